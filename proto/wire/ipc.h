/* The messages of a trainer and its peerd over the Unix socket (SOCK_STREAM, same host, native byte
 * order).
 *
 * Every request is one struct lh_ipc_request, and every reply is one struct lh_ipc_reply. Their
 * sizes are fixed, so there is no length to trust. Another LH_IPC_VERSION may have other sizes. The
 * layout up to the version in HELLO, and up to the text in a reply, is the same in every version.
 *
 * The trainer chooses a number `call` for each request: not 0, and not in use. Exactly one
 * LH_IPC_DONE answers each request. LH_IPC_WORLD, LH_IPC_GONE and LH_IPC_PROGRESS come without a
 * request, and LH_IPC_OP_MEMBERS before the DONE of an op with many members.
 *
 * An arena region is a memfd that is sealed against shrinking. The trainer sends it with
 * LH_IPC_REGION as SCM_RIGHTS. From then on the trainer names memory only by (region, offset,
 * bytes), and peerd checks that each range lies inside its region. The trainer may write to a
 * region at any time. So peerd first copies a table from a region, and then checks the copy.
 *
 * Requests and replies may also take a shorter way, through two queues in shared memory: see struct
 * lh_ipc_shared.
 *
 * C99 without dependencies, because the C client includes this file. The client knows nothing else
 * of peerd.
 */
#ifndef LONGHAUL_PROTO_WIRE_IPC_H_
#define LONGHAUL_PROTO_WIRE_IPC_H_

#include <stdint.h>

#include "proto/wire/limits.h"
#include "proto/wire/types.h"

#define LH_IPC_MAGIC 0x3149484cu /* "LHI1" */
#define LH_IPC_VERSION 20

enum lh_ipc_type {
  /* requests */
  LH_IPC_HELLO = 1,    /* first on every connection; with or without a memfd (lh_ipc_shared) */
  LH_IPC_REGION = 2,   /* u.region, with the memfd attached */
  LH_IPC_UNREGION = 3, /* u.region.region; refused while an op uses the region */
  LH_IPC_JOIN = 4,     /* u.join; DONE when the member is admitted */
  LH_IPC_LEAVE = 5,    /* member, or u.leave; DONE when its ops are over and it is removed */
  LH_IPC_STEP = 6,     /* member, u.sync; DONE when every member has come to the boundary */
  LH_IPC_OP = 7,       /* member, u.op: a collective; DONE with the outcome */
  LH_IPC_MEMBERS = 8,  /* member, u.members; DONE with a page of an epoch's members */
  LH_IPC_STATE = 9,    /* u.state: registers tensors that are to be equal at all members */
  LH_IPC_UNSTATE = 10, /* u.state.state; refused while a sync uses the state */
  LH_IPC_SYNC = 11,    /* member, u.sync; DONE when the members' states are equal */
  LH_IPC_KEPT = 12,    /* member, u.state.state; DONE with u.kept */
  LH_IPC_TAKE = 13,    /* member, u.take; DONE when the agreed state has been fetched whole */
  LH_IPC_PREPARE = 14, /* u.state.state; DONE when peerd has hashed all its tensors. The next sync
                          then hashes only tensors that it marks as touched. Nobody may write to
                          the tensors before DONE */
  LH_IPC_MEMBER = 15,  /* member, u.about; DONE with u.about, or LH_INVALID_ARGUMENT */
  LH_IPC_CANCEL = 16,  /* member, u.cancel. DONE at once: the op was cancelled, will be, or is over.
                          The op itself is answered as always: LH_ABORTED, or its outcome */
  /* replies */
  LH_IPC_DONE = 64,
  LH_IPC_WORLD = 65,      /* the world of `member` has changed */
  LH_IPC_GONE = 66,       /* `member` was removed: status and text say why. With member 0 peerd ends
                             the connection */
  LH_IPC_PROGRESS = 67,   /* u.progress: how far the fetch of `member` is */
  LH_IPC_OP_MEMBERS = 68, /* u.members: further ids for the DONE of the op `call`, which follows */
  /* A request or a reply: look into the queue in shared memory. Everything else in it is 0, and
   * nothing answers it. */
  LH_IPC_LOOK = 128
};

struct lh_ipc_hello {
  uint32_t version;
  uint32_t pid;
  char name[LH_MEMBER_NAME_BYTES_MAX + 8]; /* for people, NUL-terminated */
};

enum lh_ipc_region_flags {
  /* The region holds only inboxes of states. A page uses memory from the moment peerd writes to it
   * until the trainer frees it (MADV_REMOVE), after it has copied the chunks. So peerd never pins
   * the region. */
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
  uint32_t step_deadline_ms; /* at most LH_STEP_DEADLINE_MS_MAX; 0: none */
  uint16_t cohort_size;      /* members of the cohort; 0: no cohort */
  uint16_t members;    /* for an empty group: wait until this many such members have come; 0: do not
                          wait. At most LH_MEMBERS_MAX */
  uint32_t background; /* 1: the member joins in the background */
  char run[LH_RUN_NAME_BYTES_MAX + 8];       /* NUL-terminated */
  char cohort[LH_COHORT_NAME_BYTES_MAX + 8]; /* NUL-terminated; "": none */
  char name[LH_MEMBER_NAME_BYTES_MAX + 8];   /* NUL-terminated; "": the name in HELLO */
};

/* Used if `member` is 0: names the member by the `call` of its JOIN, whether it is admitted or not.
 * A trainer that does not know the member's handle yet withdraws its JOIN in this way. */
struct lh_ipc_leave {
  uint64_t join;
};

struct lh_ipc_range {
  uint64_t region;
  uint64_t offset;
};

enum lh_ipc_op_flags {
  LH_IPC_ROOT_IS_RANK = 1, /* `root` is a rank in the present epoch; else a member id */
  /* This member is the root, as far as the trainer knows; SEND: it is the sender. If peerd knows
   * better, because the epoch has changed, the op ends LH_ABORTED. */
  LH_IPC_IS_ROOT = 2
};

#define LH_IPC_REFUSAL_BYTES_MAX 255

/* A collective. Its tensors: `source` and `target`, or those of the pieces in the table. A tensor
 * that this member does not need (SourceOf() and TargetOf() in op_desc.h) has region 0, and so has
 * a tensor without elements.
 *
 * Two tensors do not overlap. The exception: all-reduce, reduce and broadcast may be in place: then
 * source and target are equal, in all pieces. */
struct lh_ipc_op {
  uint64_t tag;
  uint64_t count; /* elements; in parts: of one part; 0 with `unequal` or pieces */
  struct lh_ipc_range source;
  struct lh_ipc_range target;
  uint8_t dtype;        /* lh_wire_dtype */
  uint8_t reduce;       /* lh_wire_reduce */
  uint8_t on_fault;     /* lh_wire_on_fault */
  uint8_t quantization; /* lh_wire_quantization */
  uint32_t min_world;   /* 0 or 1: any number of members is enough */
  uint8_t algorithm;    /* lh_wire_algorithm */
  uint8_t kind;         /* lh_wire_kind */
  uint16_t world;       /* in parts: members that the tensors are laid out for */
  uint8_t order;        /* lh_wire_order */
  uint8_t weighted;     /* 1: `weight` counts; else `weight` is 0 */
  uint8_t unequal;      /* 1: the table has the lengths of parts */
  uint8_t flags;        /* lh_ipc_op_flags */
  uint64_t root;        /* SEND: the partner */
  double weight;
  uint64_t list; /* a digest of the dtypes and lengths of all tensors of a list; 0: one tensor */
  /* Lies in the arena; region 0: there is no table. It begins at a multiple of 8, and has, one
   * after the other: member ids (u64), lengths (u64), pieces (struct lh_ipc_piece), an outline, and
   * a text. */
  struct lh_ipc_range table;
  uint32_t
      participants; /* ids of the members that take part, rising; 0: all members; not for SEND */
  uint32_t gives;   /* lengths; OpTerms in op_desc.h says which */
  uint32_t gets;
  uint32_t pieces;  /* 0: one tensor */
  uint16_t block;   /* elements that share a scale, for LH_WIRE_QUANTIZE_INT8 and INT4; else 0 */
  uint8_t rounding; /* lh_wire_rounding */
  /* Not 0: the trainer's side has refused this call, so the op ends at all participants. Bytes of a
   * text that says why. It is the last thing in the table. Of the other fields count: kind, tag,
   * root, flags and participants. */
  uint8_t refusal;
  /* Bytes of the outline of a list (OutlineFault() in op_desc.h), at most LH_OUTLINE_BYTES_MAX. 0:
   * there is none. */
  uint16_t outline;
  uint8_t zero[2]; /* room for more fields */
  /* Float32, as many elements as `source`, if the op is quantized and reduces. It is added to the
   * source, and becomes what the source loses when it is encoded, if the op ends well. Region 0:
   * none. A list has them in its pieces: in all of them that have elements, or in none. */
  struct lh_ipc_range error;
};

/* A part of a list of tensors: a large tensor, or small tensors of one dtype that the trainer has
 * packed. */
struct lh_ipc_piece {
  uint64_t count; /* elements; in parts: of one part */
  struct lh_ipc_range source;
  struct lh_ipc_range target;
  struct lh_ipc_range error; /* see lh_ipc_op */
  uint8_t dtype;             /* lh_wire_dtype */
  uint8_t zero[7];
};

struct lh_ipc_cancel {
  uint64_t op; /* the `call` of the op's request */
};

struct lh_ipc_members {
  uint32_t first;   /* rank of the first member wanted */
  uint32_t of_step; /* 0: of the present epoch; 1: of this member's last step boundary */
};

struct lh_ipc_about {
  uint64_t member_id; /* of the same group */
};

/* A state: `count` entries of struct lh_ipc_tensor lie at `table`. Peerd reads a tensor at `data`,
 * and writes fetched chunks of the tensor to `inbox`.
 *
 * `changed` has one byte for each chunk of each tensor, in order. When a SYNC, a STEP or a TAKE
 * ends well, peerd sets the byte to 1 for each chunk that came from other members. The trainer
 * copies these chunks from the inbox to its tensor. If the call fails, or peerd dies, the trainer's
 * tensors are as they were. After UNSTATE all ranges belong to the trainer again. No two ranges
 * overlap. */
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
  uint64_t bytes;                         /* 0: no elements; data and inbox are 0 then */
  struct lh_ipc_range data;               /* any alignment */
  /* As many bytes as `data`. The range is `data` itself if `data` is a copy of the trainer's tensor
   * that the trainer makes anew before each call. */
  struct lh_ipc_range inbox;
  uint8_t dtype; /* lh_wire_dtype */
  uint8_t dims;
  uint8_t flags;
  uint8_t zero[5];
};

/* A STEP without a sync has state 0, and all other fields are 0. Nobody may write to the tensors
 * before DONE. */
struct lh_ipc_sync {
  uint64_t state;
  uint64_t revision;
  /* One byte for each tensor: not 0 if the tensor may have changed since the last sync that ended
   * well. Region 0: every tensor may have changed. */
  struct lh_ipc_range touched;
  uint32_t strategy; /* lh_wire_strategy */
  uint32_t zero;
};

/* A member in the background (LH_IPC_BACKGROUND) waits until the agreed state has been fetched, and
 * then copies its chunks. LH_DEADLINE_EXCEEDED: after `timeout_ms` the fetch is not over. The
 * member has no sync open meanwhile. */
struct lh_ipc_take {
  uint32_t timeout_ms; /* at most LH_STEP_DEADLINE_MS_MAX */
  uint32_t zero;
};

struct lh_ipc_request {
  uint32_t magic;
  uint32_t type;
  uint64_t call;
  uint64_t member; /* the handle in the DONE of JOIN; 0 in a request that concerns no member */
  union {
    struct lh_ipc_hello hello;
    struct lh_ipc_region region;
    struct lh_ipc_join join;
    struct lh_ipc_leave leave;
    struct lh_ipc_op op;
    struct lh_ipc_cancel cancel;
    struct lh_ipc_members members;
    struct lh_ipc_about about;
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
  uint32_t background; /* 1: this member is in the background, so its input is not in results */
  uint64_t boundary;   /* the newest epoch made at a step boundary, as of this member's last one */
  /* The group at this member's last step boundary: the same epoch and size at all members that
   * passed it. */
  uint64_t step_epoch;
  uint32_t step_rank;
  uint32_t step_size;
};

#define LH_IPC_OP_MEMBERS_MAX 48
struct lh_ipc_op_info {
  uint64_t epoch; /* the epoch of the attempt that gave the result */
  uint64_t bytes_sent;
  uint64_t bytes_received;
  uint64_t seconds_total_ns;
  uint64_t seconds_wait_ns;   /* until every participant had started the op */
  uint32_t size;              /* members whose tensors are in the result */
  uint32_t retries;           /* attempts after the first */
  uint32_t algorithm;         /* lh_wire_algorithm of that attempt, never AUTO */
  uint32_t quantization;      /* lh_wire_quantization of that attempt, never AUTO */
  uint64_t hosts;             /* a digest of the set of hosts of these `size` members; never 0 */
  uint64_t blocks_not_finite; /* of the result, if the op was quantized */
  /* The first of these members, in rank order. The ids from rank LH_IPC_OP_MEMBERS_MAX on
   * come before in LH_IPC_OP_MEMBERS frames, in order. */
  uint64_t member_ids[LH_IPC_OP_MEMBERS_MAX];
};

#define LH_IPC_MEMBERS_PAGE 54
struct lh_ipc_members_page {
  uint64_t epoch;
  uint32_t first;
  uint32_t count;
  uint64_t member_ids[LH_IPC_MEMBERS_PAGE];
};

#define LH_IPC_HOST_BYTES_MAX 128
/* What peerd knows of a member. The texts are NUL-terminated. */
struct lh_ipc_member_info {
  uint64_t member_id;
  uint64_t peer_id;
  uint32_t current; /* 1: the member is in the present epoch, and has this rank; 0: a former one */
  uint32_t rank;
  char name[LH_MEMBER_NAME_BYTES_MAX + 8];
  char cohort[LH_COHORT_NAME_BYTES_MAX + 8]; /* "": none */
  char host[LH_IPC_HOST_BYTES_MAX + 8];
};

struct lh_ipc_sync_info {
  uint64_t revision;
  uint64_t hash_high; /* the digest of the agreed state */
  uint64_t hash_low;
  uint64_t bytes; /* received for this member */
  uint64_t seconds_ns;
  uint32_t sources; /* members that sent some of these bytes */
  uint32_t zero;
};

/* Whether peerd keeps a state for the name of this member, with the same manifest. */
struct lh_ipc_kept {
  uint64_t revision;
  uint32_t kept; /* 0: peerd keeps none */
  uint32_t zero;
};

struct lh_ipc_progress {
  uint64_t bytes_done;
  uint64_t bytes_total;
  uint64_t bytes_per_second; /* lately */
  uint32_t sources;
  uint32_t zero;
};

/* A STEP with a sync has two outcomes: that of the boundary and that of the sync. If the boundary
 * failed, `status` is its outcome. Otherwise `status` is the outcome of the sync. */
enum lh_ipc_reply_flags {
  LH_IPC_PASSED = 1, /* DONE of STEP: the member has passed the boundary, whatever the status is */
  /* The trainer brought a lower revision than the state that peerd keeps for the member's name. The
   * kept state replaces the trainer's tensors: its chunks are marked as changed, too. */
  LH_IPC_RESUMED = 2,
  /* DONE of SYNC, STEP and TAKE: the member is in the background. Peerd fetches the agreed state
   * into the inbox of the member's state. Nobody may write to the tensors until TAKE ends well, or
   * a later sync ends without this flag. */
  LH_IPC_BACKGROUND = 4,
  LH_IPC_CHANGED = 8,  /* chunks are marked as changed */
  LH_IPC_SHARED = 16,  /* DONE of HELLO: peerd uses the trainer's lh_ipc_shared */
  LH_IPC_NEWCOMER = 32 /* DONE of JOIN: other members were in the group before */
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
    struct lh_ipc_member_info about;        /* DONE of MEMBER */
    char text[LH_ERROR_TEXT_BYTES_MAX + 8]; /* status not OK: NUL-terminated */
  } u;
};

/* A queue in shared memory, for one direction. The entries follow elsewhere; entry i is at the
 * index i % LH_IPC_QUEUE_ENTRIES. `put` and `taken` may wrap. The writer changes `put`, the reader
 * the other fields. */
#define LH_IPC_QUEUE_ENTRIES 64u
struct lh_ipc_queue {
  uint32_t put; /* entries that the writer has put in so far */
  uint8_t zero[60];
  uint64_t frames; /* frames that the reader had read from the socket when it last looked here */
  uint32_t taken;  /* entries that the reader has taken out so far */
  uint32_t awake;  /* 1: the reader looks into the queue again and again, without being told */
  uint8_t more_zero[48];
};

struct lh_ipc_queued_request {
  uint64_t frames; /* requests that were sent over the socket before this one */
  struct lh_ipc_request request;
};
struct lh_ipc_queued_reply {
  uint64_t frames; /* replies that were sent over the socket before this one */
  struct lh_ipc_reply reply;
};

/* The memory of the memfd that comes with HELLO, which begins as zeros. The memfd has just this
 * size, and is sealed against shrinking and growing. If peerd can use it, the DONE of HELLO has
 * LH_IPC_SHARED. From then on a request without descriptor, and a reply, may take the way through a
 * queue; so may this DONE:
 * - The writer uses a queue only if it has room, and if its reader will look into it: the reader is
 *   awake, or it has not yet read all that the writer has sent over the socket. Otherwise the
 *   writer uses the socket. So a reader that sleeps need not know of the queue.
 * - After the writer has raised `put`, it looks at `awake` and `frames` again. If the reader is
 *   no longer about to look, the writer sends LOOK over the socket. A reader changes `awake` or
 *   `frames`, and then looks at `put` before it sleeps. All these accesses are sequentially
 *   consistent, so one of the two always sees the other.
 * - The order of all requests (and of all replies) is kept: an entry counts the frames that went
 *   over the socket before it. The reader takes the entry behind just these frames.
 * Peerd copies an entry before it checks it, since the trainer may write there at any time. */
struct lh_ipc_shared {
  struct lh_ipc_queue requests;
  struct lh_ipc_queue replies;
  struct lh_ipc_queued_request request[LH_IPC_QUEUE_ENTRIES];
  struct lh_ipc_queued_reply reply[LH_IPC_QUEUE_ENTRIES];
};

/* The accesses of both sides to a queue. */

/* For the writer, who has put in `put` entries, and has sent `sent` frames over the socket: whether
 * the reader will look into the queue. */
static inline int lh_ipc_queue_watched(const struct lh_ipc_queue* queue, uint64_t sent) {
  return __atomic_load_n(&queue->awake, __ATOMIC_SEQ_CST) != 0 ||
         __atomic_load_n(&queue->frames, __ATOMIC_SEQ_CST) != sent;
}
/* Whether the writer may put in another entry. */
static inline int lh_ipc_queue_open(const struct lh_ipc_queue* queue, uint32_t put, uint64_t sent) {
  return put - __atomic_load_n(&queue->taken, __ATOMIC_ACQUIRE) < LH_IPC_QUEUE_ENTRIES &&
         lh_ipc_queue_watched(queue, sent);
}
/* Shows the reader the entries up to `put`. Returns 0 if the reader must be told of them. */
static inline int lh_ipc_queue_show(struct lh_ipc_queue* queue, uint32_t put, uint64_t sent) {
  __atomic_store_n(&queue->put, put, __ATOMIC_SEQ_CST);
  return lh_ipc_queue_watched(queue, sent);
}
/* For the reader, who has read `frames` frames from the socket: looks how many entries the writer
 * has put in. */
static inline uint32_t lh_ipc_queue_look(struct lh_ipc_queue* queue, uint64_t frames) {
  __atomic_store_n(&queue->frames, frames, __ATOMIC_SEQ_CST);
  return __atomic_load_n(&queue->put, __ATOMIC_SEQ_CST);
}
/* Gives the writer the room of all entries before `taken`. */
static inline void lh_ipc_queue_take(struct lh_ipc_queue* queue, uint32_t taken) {
  __atomic_store_n(&queue->taken, taken, __ATOMIC_RELEASE);
}
static inline void lh_ipc_queue_wake(struct lh_ipc_queue* queue, int awake) {
  __atomic_store_n(&queue->awake, awake != 0 ? 1u : 0u, __ATOMIC_SEQ_CST);
}

#if defined(__cplusplus)
static_assert(sizeof(struct lh_ipc_queue) == 128, "wire size");
static_assert(sizeof(struct lh_ipc_request) == 256, "wire size");
static_assert(sizeof(struct lh_ipc_reply) == 544, "wire size");
static_assert(sizeof(struct lh_ipc_tensor) == 376, "wire size");
static_assert(sizeof(struct lh_ipc_piece) == 64, "wire size");
#endif

#endif /* LONGHAUL_PROTO_WIRE_IPC_H_ */
