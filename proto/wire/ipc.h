/* What a trainer and its peerd say over the Unix socket (SOCK_STREAM, same host, native byte
 * order).
 *
 * Every request is one struct lh_ipc_request, every reply one struct lh_ipc_reply: fixed sizes, no
 * lengths to trust. A request carries a `call` that the trainer chose (not 0, not in use); exactly
 * one LH_IPC_DONE answers it. LH_IPC_WORLD and LH_IPC_GONE come unasked.
 *
 * An arena region is a memfd sealed against shrinking, sent with LH_IPC_REGION as SCM_RIGHTS. The
 * trainer names memory by (region, offset, bytes) only; peerd checks each against the region.
 * C99 without dependencies: it is all that the client sees of peerd.
 */
#ifndef LONGHAUL_PROTO_WIRE_IPC_H_
#define LONGHAUL_PROTO_WIRE_IPC_H_

#include <stdint.h>

#include "proto/wire/limits.h"
#include "proto/wire/types.h"

#define LH_IPC_MAGIC 0x3149484cu /* "LHI1" */
#define LH_IPC_VERSION 2

enum lh_ipc_type {
  /* requests */
  LH_IPC_HELLO = 1,      /* first on every connection */
  LH_IPC_REGION = 2,     /* u.region, with the memfd attached */
  LH_IPC_UNREGION = 3,   /* u.region.region; refused while an op uses it */
  LH_IPC_JOIN = 4,       /* u.join; DONE when the member is admitted */
  LH_IPC_LEAVE = 5,      /* member, or u.leave; DONE when it is out, after its ops in flight */
  LH_IPC_STEP = 6,       /* member; DONE when every member stands at its step boundary */
  LH_IPC_ALL_REDUCE = 7, /* member, u.op; DONE with the outcome */
  LH_IPC_MEMBERS = 8,    /* member, u.members; DONE with a page of the epoch's members */
  /* replies */
  LH_IPC_DONE = 64,
  LH_IPC_WORLD = 65, /* the world of `member` changed */
  LH_IPC_GONE =
      66 /* `member` was removed: status and text say why. Member 0: the connection ends */
};

struct lh_ipc_hello {
  uint32_t version;
  uint32_t pid;
  char name[LH_MEMBER_NAME_BYTES_MAX + 8]; /* for people, NUL-terminated */
};

struct lh_ipc_region {
  uint64_t region; /* chosen by the trainer, not 0 */
  uint64_t bytes;
};

struct lh_ipc_join {
  uint32_t group;
  uint32_t step_deadline_ms; /* at most LH_STEP_DEADLINE_MS_MAX; 0: none */
  uint32_t cohort_size;      /* members of the cohort; 0 without one */
  uint32_t zero;
  char run[LH_RUN_NAME_BYTES_MAX + 8];       /* NUL-terminated */
  char cohort[LH_COHORT_NAME_BYTES_MAX + 8]; /* NUL-terminated; "": none */
};

/* With `member` 0: the member that the JOIN with call `join` asked for, admitted or not. A trainer
 * that does not know the member's handle yet withdraws its wish by this. */
struct lh_ipc_leave {
  uint64_t join;
};

struct lh_ipc_range {
  uint64_t region;
  uint64_t offset;
};

struct lh_ipc_op {
  uint64_t tag;
  uint64_t count;             /* elements */
  struct lh_ipc_range source; /* equal to target: in place; otherwise they must not overlap */
  struct lh_ipc_range target;
  uint8_t dtype;    /* lh_wire_dtype */
  uint8_t reduce;   /* lh_wire_reduce */
  uint8_t on_fault; /* lh_wire_on_fault */
  uint8_t quantization;
  uint32_t min_world; /* 0 or 1: any number of members will do */
};

struct lh_ipc_members {
  uint32_t first; /* rank of the first wanted */
  uint32_t zero;
};

struct lh_ipc_request {
  uint32_t magic;
  uint32_t type;
  uint64_t call;
  uint64_t member; /* handle from the DONE of JOIN; 0 where no member is meant */
  union {
    struct lh_ipc_hello hello;
    struct lh_ipc_region region;
    struct lh_ipc_join join;
    struct lh_ipc_leave leave;
    struct lh_ipc_op op;
    struct lh_ipc_members members;
    uint8_t bytes[168];
  } u;
};

struct lh_ipc_world {
  uint64_t epoch;
  uint64_t member_id; /* the coordinator's id of this member */
  uint32_t rank;
  uint32_t size;
  uint32_t pending; /* members waiting for admission */
  uint32_t zero;
};

struct lh_ipc_op_info {
  uint64_t epoch; /* the epoch of the attempt that counted */
  uint64_t bytes_sent;
  uint64_t bytes_received;
  uint64_t seconds_total_ns;
  uint64_t seconds_wait_ns; /* until every member had posted */
  uint32_t size;            /* members whose tensors are in the result */
  uint32_t retries;         /* attempts beyond the first */
};

#define LH_IPC_MEMBERS_PAGE 28
struct lh_ipc_members_page {
  uint64_t epoch;
  uint32_t first;
  uint32_t count;
  uint64_t member_ids[LH_IPC_MEMBERS_PAGE];
};

struct lh_ipc_reply {
  uint32_t magic;
  uint32_t type;
  uint64_t call;   /* 0 unless DONE */
  uint64_t member; /* DONE of JOIN: the handle of the new member */
  int32_t status;  /* lh_status */
  uint32_t zero;
  struct lh_ipc_world world; /* WORLD, and DONE of JOIN and STEP */
  union {
    struct lh_ipc_op_info op; /* DONE of an op */
    struct lh_ipc_members_page members;
    char text[LH_ERROR_TEXT_BYTES_MAX + 8]; /* status not OK: NUL-terminated */
  } u;
};

#if defined(__cplusplus)
static_assert(sizeof(struct lh_ipc_request) == 192, "wire size");
static_assert(sizeof(struct lh_ipc_reply) == 520, "wire size");
#endif

#endif /* LONGHAUL_PROTO_WIRE_IPC_H_ */
