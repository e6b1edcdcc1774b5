/* What a trainer and its peerd say over the Unix socket (SOCK_STREAM, same host, native byte
 * order).
 *
 * Every request is one struct lh_ipc_request, every reply one struct lh_ipc_reply: fixed sizes, no
 * lengths to trust. Their sizes may differ in another LH_IPC_VERSION; up to the version in HELLO,
 * and up to the text in a reply, they do not. A request carries a `call` that the trainer chose
 * (not 0, not in use); exactly one LH_IPC_DONE answers it. LH_IPC_WORLD, LH_IPC_GONE and
 * LH_IPC_PROGRESS come unasked.
 *
 * An arena region is a memfd sealed against shrinking, sent with LH_IPC_REGION as SCM_RIGHTS. The
 * trainer names memory by (region, offset, bytes) only; peerd checks each against the region. What
 * peerd reads from a region it copies before it checks it: the trainer may write at any time.
 * C99 without dependencies: it is all that the client sees of peerd.
 */
#ifndef LONGHAUL_PROTO_WIRE_IPC_H_
#define LONGHAUL_PROTO_WIRE_IPC_H_

#include <stdint.h>

#include "proto/wire/limits.h"
#include "proto/wire/types.h"

#define LH_IPC_MAGIC 0x3149484cu /* "LHI1" */
#define LH_IPC_VERSION 10

enum lh_ipc_type {
  /* requests */
  LH_IPC_HELLO = 1,    /* first on every connection */
  LH_IPC_REGION = 2,   /* u.region, with the memfd attached */
  LH_IPC_UNREGION = 3, /* u.region.region; refused while an op uses it */
  LH_IPC_JOIN = 4,     /* u.join; DONE when the member is admitted */
  LH_IPC_LEAVE = 5,    /* member, or u.leave; DONE when it is out, after its ops in flight */
  LH_IPC_STEP = 6,     /* member, u.sync; DONE when every member stands at its step boundary */
  LH_IPC_OP = 7,       /* member, u.op: a collective; DONE with the outcome */
  LH_IPC_MEMBERS = 8,  /* member, u.members; DONE with a page of the epoch's members */
  LH_IPC_STATE = 9,    /* u.state: the tensors that are to be equal at all members */
  LH_IPC_UNSTATE = 10, /* u.state.state; refused while a sync uses it */
  LH_IPC_SYNC = 11,    /* member, u.sync; DONE when the members' states are equal */
  LH_IPC_KEPT = 12,    /* member, u.state.state; DONE with u.kept: what peerd keeps for it */
  LH_IPC_TAKE = 13,    /* member, u.take; DONE when what was agreed on last is all here */
  LH_IPC_PREPARE = 14, /* u.state.state; DONE when all its tensors are hashed: to the next sync
                          they are as after one that ended well. Nobody writes until then */
  /* replies */
  LH_IPC_DONE = 64,
  LH_IPC_WORLD = 65,   /* the world of `member` changed */
  LH_IPC_GONE = 66,    /* `member` was removed: status and text say why. Member 0: the connection
                          ends */
  LH_IPC_PROGRESS = 67 /* u.progress of the sync of `member` */
};

struct lh_ipc_hello {
  uint32_t version;
  uint32_t pid;
  char name[LH_MEMBER_NAME_BYTES_MAX + 8]; /* for people, NUL-terminated */
};

enum lh_ipc_region_flags {
  /* Only inboxes of states lie in it. Its pages come as peerd writes to them, and the trainer gives
   * them back (MADV_REMOVE) when it has copied what came: peerd never pins them. */
  LH_IPC_REGION_INBOX = 1
};

struct lh_ipc_region {
  uint64_t region; /* chosen by the trainer, not 0 */
  uint64_t bytes;
  uint32_t flags;
  uint32_t zero;
};

struct lh_ipc_join {
  uint32_t group;
  uint32_t step_deadline_ms;           /* at most LH_STEP_DEADLINE_MS_MAX; 0: none */
  uint32_t cohort_size;                /* members of the cohort; 0 without one */
  uint32_t background;                 /* 1: nobody is to wait until it has the group's state */
  char run[LH_RUN_NAME_BYTES_MAX + 8]; /* NUL-terminated */
  char cohort[LH_COHORT_NAME_BYTES_MAX + 8]; /* NUL-terminated; "": none */
  char name[LH_MEMBER_NAME_BYTES_MAX + 8];   /* NUL-terminated; "": that of HELLO */
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
  uint8_t algorithm;  /* lh_wire_algorithm */
  uint8_t kind;       /* lh_wire_kind */
  uint8_t zero[22];   /* room for more fields */
};

struct lh_ipc_members {
  uint32_t first; /* rank of the first wanted */
  uint32_t zero;
};

/* A state: `count` entries of struct lh_ipc_tensor at `table`. Peerd reads a tensor at `data`, and
 * writes what it fetches of it to `inbox`. `changed` has one byte for each chunk of each tensor, in
 * order: when a SYNC, a STEP or a TAKE ends well, it is 1 where the chunk came from others, and the
 * trainer copies it from the inbox to where it has the tensor. A call that fails, and a peerd that
 * dies, leave the trainer's tensors as they were. All of it is the trainer's again after UNSTATE;
 * no two ranges overlap. */
struct lh_ipc_state {
  uint64_t state; /* chosen by the trainer, not 0 */
  struct lh_ipc_range table;
  struct lh_ipc_range changed;
  uint32_t count;
  uint32_t zero;
};

enum lh_ipc_tensor_flags { LH_IPC_ALLOW_UNEQUAL = 1 };

struct lh_ipc_tensor {
  char name[LH_STATE_NAME_BYTES_MAX + 8]; /* UTF-8 without control characters, NUL-terminated */
  uint64_t shape[LH_STATE_DIMS_MAX];      /* 0 beyond `dims` */
  uint64_t bytes;                         /* 0: without elements; data is 0, too */
  struct lh_ipc_range data;               /* of any alignment */
  /* `data` itself where that is a copy of the trainer's tensor, made anew before each call; else as
   * many bytes elsewhere. */
  struct lh_ipc_range inbox;
  uint8_t dtype; /* lh_wire_dtype or LH_WIRE_BOOL */
  uint8_t dims;
  uint8_t flags;
  uint8_t zero[5];
};

/* In a STEP the state may be 0: none, and so is the rest then. Nobody writes to the tensors until
 * DONE. */
struct lh_ipc_sync {
  uint64_t state;
  uint64_t revision;
  /* One byte for each tensor: not 0 if it may have changed since the last sync that ended well.
   * Region 0: all of them may have. */
  struct lh_ipc_range touched;
  uint32_t strategy; /* lh_wire_strategy */
  uint32_t zero;
};

/* All that was agreed on last is here (LH_IPC_BACKGROUND), to be copied; or, after this time,
 * LH_DEADLINE_EXCEEDED: not yet. No sync of the member is open meanwhile. */
struct lh_ipc_take {
  uint32_t timeout_ms; /* at most LH_STEP_DEADLINE_MS_MAX */
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
    struct lh_ipc_state state;
    struct lh_ipc_sync sync;
    struct lh_ipc_take take;
    uint8_t bytes[232];
  } u;
};

struct lh_ipc_world {
  uint64_t epoch;
  uint64_t member_id; /* the coordinator's id of this member */
  uint32_t rank;
  uint32_t size;
  uint32_t pending;    /* members waiting for admission */
  uint32_t background; /* 1: this member's input is not in results yet */
};

struct lh_ipc_op_info {
  uint64_t epoch; /* the epoch of the attempt that counted */
  uint64_t bytes_sent;
  uint64_t bytes_received;
  uint64_t seconds_total_ns;
  uint64_t seconds_wait_ns; /* until every member had posted */
  uint32_t size;            /* members whose tensors are in the result */
  uint32_t retries;         /* attempts beyond the first */
  uint32_t algorithm;       /* lh_wire_algorithm of the attempt that counted, never AUTO */
  uint32_t zero;
};

#define LH_IPC_MEMBERS_PAGE 28
struct lh_ipc_members_page {
  uint64_t epoch;
  uint32_t first;
  uint32_t count;
  uint64_t member_ids[LH_IPC_MEMBERS_PAGE];
};

struct lh_ipc_sync_info {
  uint64_t revision;
  uint64_t hash_high; /* of the state that all agreed on */
  uint64_t hash_low;
  uint64_t bytes; /* received */
  uint64_t seconds_ns;
  uint32_t sources; /* that sent some of them */
  uint32_t zero;
};

/* What peerd kept of a member of this name, of the same tensors. */
struct lh_ipc_kept {
  uint64_t revision;
  uint32_t kept; /* 0: nothing */
  uint32_t zero;
};

struct lh_ipc_progress {
  uint64_t bytes_done;
  uint64_t bytes_total;
  uint64_t bytes_per_second; /* of late */
  uint32_t sources;
  uint32_t zero;
};

/* A STEP may be refused, its sync may, or both: `status` is the first of these that is not OK. */
enum lh_ipc_reply_flags {
  LH_IPC_PASSED = 1, /* DONE of STEP: the boundary is behind the member, whatever the status */
  /* What peerd had kept of a member of this name took the place of the trainer's tensors, since the
   * trainer brought a lower revision. Those chunks count as changed, too. */
  LH_IPC_RESUMED = 2,
  /* DONE of SYNC, STEP and TAKE: the member is in the background. What others agree on is fetched
   * into the inbox of its state, whose tensors nobody writes to until TAKE ends well or a later
   * sync says no more of this. */
  LH_IPC_BACKGROUND = 4,
  LH_IPC_CHANGED = 8 /* chunks are marked as changed */
};

struct lh_ipc_reply {
  uint32_t magic;
  uint32_t type;
  uint64_t call;             /* 0 unless DONE */
  uint64_t member;           /* DONE of JOIN: the handle of the new member */
  int32_t status;            /* lh_status */
  uint32_t flags;            /* lh_ipc_reply_flags */
  struct lh_ipc_world world; /* WORLD, and DONE of JOIN and of a STEP that passed */
  union {
    struct lh_ipc_op_info op;     /* DONE of an op */
    struct lh_ipc_sync_info sync; /* DONE of SYNC and TAKE, and of STEP with one */
    struct lh_ipc_kept kept;      /* DONE of KEPT */
    struct lh_ipc_progress progress;
    struct lh_ipc_members_page members;
    char text[LH_ERROR_TEXT_BYTES_MAX + 8]; /* status not OK: NUL-terminated */
  } u;
};

#if defined(__cplusplus)
static_assert(sizeof(struct lh_ipc_request) == 256, "wire size");
static_assert(sizeof(struct lh_ipc_reply) == 520, "wire size");
static_assert(sizeof(struct lh_ipc_tensor) == 376, "wire size");
#endif

#endif /* LONGHAUL_PROTO_WIRE_IPC_H_ */
