/* Longhaul client library: one training run out of machines that come and go.
 *
 * C99, no other header of this project needed, no third-party dependency. A process opens a client
 * (a connection to the peerd on its host), joins groups as a member, and starts operations.
 *
 * Threads: every function may be called from any thread; two operations in flight on one
 * communicator must not share a tag. Nothing runs in the background: an operation is carried by
 * peerd and its outcome is collected by lh_op_wait() or lh_op_test().
 *
 * Errors: functions return an lh_status; lh_last_error() gives the calling thread's text for it.
 *
 * Time: a timeout is in milliseconds. 0 does not wait, LH_FOREVER waits for ever, any other
 * negative number is LH_INVALID_ARGUMENT. Functions without a timeout return at once, or after an
 * answer of peerd that needs no other peer. A peerd that is stopped or hangs is waited for 30 s at
 * most: such a call returns LH_UNAVAILABLE and has changed nothing. A peerd that reads nothing for
 * 30 s, so that a request cannot be handed over, counts as dead.
 *
 * Structs: options and infos begin with struct_size, which their _INIT macro sets. A struct of an
 * older release may be shorter: what it lacks has its default. One of a newer release may be
 * longer: what this library does not know has to be 0 in options, and is set to 0 in infos. Any
 * other size is LH_INVALID_ARGUMENT.
 *
 * Pointers: structs and results have to be aligned as C demands. Tensors outside of lh_alloc() may
 * have any alignment; those from lh_alloc() begin at a multiple of their element's size.
 */
#ifndef LONGHAUL_LONGHAUL_H_
#define LONGHAUL_LONGHAUL_H_

#include <stddef.h>
#include <stdint.h>

#if defined(LONGHAUL_BUILDING)
#define LH_API __attribute__((visibility("default")))
#else
#define LH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define LH_VERSION_MAJOR 0
#define LH_VERSION_MINOR 1
#define LH_VERSION_PATCH 0

/* UNAVAILABLE: the same call may work later. ABORTED: look at the world, then call again.
 * FAILED_PRECONDITION: the text names what to do first. */
typedef enum lh_status {
  LH_OK = 0,
  LH_INVALID_ARGUMENT = 1,
  LH_FAILED_PRECONDITION = 2,
  LH_UNAVAILABLE = 3,
  LH_ABORTED = 4,
  LH_DEADLINE_EXCEEDED = 5,
  LH_TOO_FEW_MEMBERS = 6,
  LH_EVICTED = 7,
  LH_STATE_MISMATCH = 8,
  LH_INTERNAL = 9
} lh_status;

typedef enum lh_dtype {
  LH_UINT8 = 0,
  LH_INT8 = 1,
  LH_UINT16 = 2,
  LH_INT16 = 3,
  LH_UINT32 = 4,
  LH_INT32 = 5,
  LH_UINT64 = 6,
  LH_INT64 = 7,
  LH_FLOAT16 = 8,
  LH_BFLOAT16 = 9,
  LH_FLOAT32 = 10,
  LH_FLOAT64 = 11,
  LH_BOOL = 12 /* of tensors of a state only: it cannot be reduced */
} lh_dtype;

/* AVG of integers is the sum (wrapping, as SUM) divided by the world size, rounded towards zero.
 * AVG of floats is the sum, in their own dtype, divided at the end: a sum of float16 beyond 65504
 * is infinite, and so is its average. Divide before, or use LH_BFLOAT16 or LH_FLOAT32. MIN and MAX:
 * NaN if any member has NaN there; -0 is less than +0. */
typedef enum lh_reduce_op {
  LH_SUM = 0,
  LH_AVG = 1,
  LH_PROD = 2,
  LH_MIN = 3,
  LH_MAX = 4
} lh_reduce_op;

/* What happens to an operation when a member dies, is removed, or leaves without having started the
 * operation: the others redo it, or it ends LH_ABORTED. LH_ABORTED comes at all members of the
 * operation, at those that had not started it yet as soon as they do. Start it again at all of
 * them, or at none. LH_AS_JOINED: what lh_join_options.on_fault said. Equal at all members of an
 * operation. */
typedef enum lh_on_fault { LH_RETRY = 0, LH_ABORT = 1, LH_AS_JOINED = 2 } lh_on_fault;

/* How the bytes of an operation travel. AUTO: chosen by its size and the links, the same at all
 * members. ONESHOT: everybody's input to everybody, at once; at most 4096 bytes. MESH: everybody
 * adds up one part of the tensor and gives it to all; twice the latency of the longest way,
 * whatever the number of hosts. In groups of at most 16 hosts that all reach each other; elsewhere
 * it is a RING: sums pass from host to host. Equal at all members of an operation. LOCAL: in
 * lh_op_info_t only, nothing crossed the network. */
typedef enum lh_algorithm {
  LH_AUTO = 0,
  LH_ONESHOT = 1,
  LH_MESH = 2,
  LH_RING = 3,
  LH_LOCAL = 4
} lh_algorithm;

typedef struct lh_client lh_client; /* a connection to peerd, with its arena */
typedef struct lh_comm lh_comm;     /* one member of one group */
typedef struct lh_op lh_op;         /* something in flight */
typedef struct lh_state lh_state;   /* tensors that are to be equal at all members */

/* Waits for ever, where a timeout in milliseconds is asked for. */
#define LH_FOREVER (-1)

/* "0.1.0". */
LH_API const char *lh_version(void);
/* "LH_ABORTED"; never NULL. */
LH_API const char *lh_strerror(lh_status status);
/* Text for the last call of this thread that did not return LH_OK; "" if there was none. Valid
 * until the thread's next call. */
LH_API const char *lh_last_error(void);
/* Bytes of one element; 0 for a number that is no lh_dtype. */
LH_API size_t lh_dtype_size(lh_dtype dtype);

/* ------------------------------------------------------------------ client and arena */

typedef struct lh_open_options {
  uint32_t struct_size;
  const char *socket_path; /* NULL: $LONGHAUL_SOCKET, else /run/longhaul/peerd.sock, else
                              $XDG_RUNTIME_DIR/longhaul/peerd.sock */
  const char *name;        /* of its members: 1 to 64 of [A-Za-z0-9._-]; NULL: the process id */
  int64_t timeout_ms;      /* waits this long for peerd to appear and to answer; one that listens
                              gets 100 ms at least */
} lh_open_options;
#define LH_OPEN_OPTIONS_INIT \
  { sizeof(lh_open_options), NULL, NULL, 10000 }

/* Connects to peerd; NULL for `options` means the defaults. LH_UNAVAILABLE: the text names the path
 * and the reason. A client belongs to the process that opened it: after fork() the child's calls
 * return LH_FAILED_PRECONDITION, and the parent goes on undisturbed. */
LH_API lh_status lh_open(const lh_open_options *options, lh_client **client_out);
/* Ends the connection; members of this client that have not left count as dead. All that came from
 * the client is freed with it: operations, buffers, communicators, states. No function may be
 * called with any of them afterwards, their own lh_..._free() included. Not while another thread
 * uses any of them. An operation that a dead member had started and others had not keeps the member
 * in the group for up to 2 * detect_ms (3 s), for which the others' next operation may wait: until
 * then they may still start it and have its tensor in the result. */
LH_API void lh_close(lh_client *client);
/* Whether the connection stands, as far as can be told without waiting. LH_UNAVAILABLE: peerd has
 * stopped or died; what belongs to this client is of no use any more but to be read: open another
 * one. */
LH_API lh_status lh_client_check(lh_client *client);

/* Memory shared with peerd, 64-byte aligned, zero-filled at first use: tensors here travel without
 * a copy. LH_UNAVAILABLE: the arena limit of peerd or the memory of the host is used up. */
LH_API lh_status lh_alloc(lh_client *client, size_t bytes, void **data_out);
/* NULL is allowed. LH_INVALID_ARGUMENT: not from lh_alloc(). LH_FAILED_PRECONDITION: an operation
 * in flight or a state uses it; an operation that has ended does not, whether or not it was waited
 * for. Memory goes back to the host when large parts of the arena are free. */
LH_API lh_status lh_free(lh_client *client, void *data);

/* ------------------------------------------------------------------ membership */

/* How a newcomer gets the shared state of a group that has one. BLOCKING: all wait for it in their
 * first sync with it. BACKGROUND: nobody waits. It is admitted and takes part in all operations
 * in the background: it gets results, and its input is left out. Its calls of lh_sync_state()
 * and lh_begin_step_sync() return at once (lh_sync_info_t.background), and the state is fetched
 * while it and the others go on; see lh_state_take(). When it has caught up, it contributes from a
 * step boundary on. In a group that is empty the two are the same. */
typedef enum lh_join_mode { LH_BLOCKING = 0, LH_BACKGROUND = 1 } lh_join_mode;

typedef struct lh_join_options {
  uint32_t struct_size;
  const char *run; /* 1 to 64 of [A-Za-z0-9._-] */
  uint32_t group;
  int64_t timeout_ms; /* LH_FOREVER or how long to wait for admission */
  /* Members at one peerd that belong together, usually one in each of several groups: the shards of
   * one host. All `cohort_size` of them (at most 64) give the same name (as `run`) and size; none
   * is admitted before all have asked, and when one leaves, dies or is removed, all are. NULL or ""
   * with size 0: stands alone. */
  const char *cohort;
  uint32_t cohort_size;
  /* This member is removed if it has not come to a step boundary so long after the first member
   * did (at most a day); 0: the others wait for it for ever. A member that was stopped for a while
   * learns of it at its next call: LH_EVICTED. */
  uint32_t step_deadline_ms;
  lh_on_fault on_fault; /* of operations that say LH_AS_JOINED; LH_RETRY or LH_ABORT */
  /* For people, and for peerd --keep-state: a state that is kept is that of the next member of this
   * name in the group. 1 to 64 of [A-Za-z0-9._-]; NULL or "": that of lh_open_options. */
  const char *name;
  lh_join_mode mode;
} lh_join_options;
#define LH_JOIN_OPTIONS_INIT \
  { sizeof(lh_join_options), "default", 0, 60000, NULL, 0, 0, LH_RETRY, NULL, LH_BLOCKING }

/* Becomes a member: at once if nobody is, otherwise at the next step boundary of the others. NULL
 * for `options` means the defaults. LH_DEADLINE_EXCEEDED: not admitted in time; the wish is
 * withdrawn. */
LH_API lh_status lh_join(lh_client *client, const lh_join_options *options, lh_comm **comm_out);
/* The same without waiting: comm_out is usable once lh_op_wait(op_out) returned LH_OK; otherwise
 * lh_comm_free() it, which also withdraws a wish that is still open. timeout_ms has no meaning. */
LH_API lh_status lh_join_start(lh_client *client, const lh_join_options *options,
                               lh_comm **comm_out, lh_op **op_out);

/* Leaves when the member's operations in flight have ended; the others go on without it. Operations
 * that they started and this member did not go on as after a death (lh_on_fault). LH_OK also for a
 * member that was removed. LH_DEADLINE_EXCEEDED: it goes on; the next call waits for it.
 * LH_FAILED_PRECONDITION: it has left, or another thread waits for that already. */
LH_API lh_status lh_leave(lh_comm *comm, int64_t timeout_ms);
LH_API lh_status lh_leave_start(lh_comm *comm, lh_op **op_out);
/* Frees the communicator; a member that has not left leaves. NULL is allowed. Not with operations
 * of it in flight. */
LH_API void lh_comm_free(lh_comm *comm);

typedef struct lh_world_info {
  uint32_t struct_size;
  uint32_t rank;    /* 0 to size - 1, by order in the epoch */
  uint32_t size;    /* members */
  uint32_t pending; /* members that wait, and that the next boundary may admit */
  uint64_t epoch;
  uint64_t member_id;  /* of this member, unique in the run */
  uint32_t background; /* 1: this member's input is not in results yet (LH_BACKGROUND) */
  uint32_t zero;
} lh_world_info;
#define LH_WORLD_INFO_INIT \
  { sizeof(lh_world_info), 0, 0, 0, 0, 0, 0, 0 }

/* The world as last heard from peerd. LH_EVICTED: this member was removed; the text says why. */
LH_API lh_status lh_world(lh_comm *comm, lh_world_info *info);
/* Members waiting for admission, as last heard. Those that a step boundary admitted are not among
 * them when lh_begin_step() has returned. */
LH_API lh_status lh_pending(lh_comm *comm, uint32_t *count_out);
/* Ids of the members in rank order. Writes at most `capacity` of them, and their number to
 * *count_out. */
LH_API lh_status lh_members(lh_comm *comm, uint64_t *ids, uint32_t capacity, uint32_t *count_out);

/* Step boundary: waits until every member has called it, admits those that wait, and returns in the
 * epoch that all now share. Every member must call it at the same point of its program. A new
 * member has come in at such a point of the others: unless it has started an operation since its
 * join, its first call is the boundary that admitted it and returns at once. So the same loop, with
 * the boundary at its top or at its end, fits all of them.
 * LH_DEADLINE_EXCEEDED: the others have not all come; the next call waits at the same boundary.
 * LH_FAILED_PRECONDITION: lh_begin_step_sync() began the wait at this boundary, call that again. */
LH_API lh_status lh_begin_step(lh_comm *comm, int64_t timeout_ms);
LH_API lh_status lh_begin_step_start(lh_comm *comm, lh_op **op_out);
/* The admission alone; today the same as lh_begin_step(). */
LH_API lh_status lh_admit(lh_comm *comm, int64_t timeout_ms);

/* ------------------------------------------------------------------ operations */

typedef struct lh_all_reduce_options {
  uint32_t struct_size;
  const void *source; /* count elements; may be equal to target, must not overlap it otherwise */
  void *target;
  uint64_t count; /* elements, at least 1, equal at all members */
  lh_dtype dtype;
  lh_reduce_op op;
  /* Names the operation among those in flight on this communicator. A second one of the same tag
   * ends with LH_INVALID_ARGUMENT; the first goes on. */
  uint64_t tag;
  lh_on_fault on_fault;
  /* With fewer members than this (deaths shrink the world) there is no result: LH_TOO_FEW_MEMBERS.
   * 0 or 1: the last member completes alone. At most 1024; equal at all members. */
  uint32_t min_world;
  lh_algorithm algorithm;
  uint32_t zero;
} lh_all_reduce_options;
#define LH_ALL_REDUCE_OPTIONS_INIT                                                                 \
  {                                                                                                \
    sizeof(lh_all_reduce_options), NULL, NULL, 0, LH_FLOAT32, LH_SUM, 0, LH_AS_JOINED, 0, LH_AUTO, \
        0                                                                                          \
  }

/* Starts an all-reduce and returns at once; lh_op_wait() gives the outcome. A member has at most
 * 1024 operations in flight: one more ends with LH_UNAVAILABLE.
 * Buffers: they belong to the operation until lh_op_wait() returns its outcome; from lh_alloc()
 * they travel without a copy, others are staged through the arena. LH_FAILED_PRECONDITION: one has
 * memory of a tensor of a state that is in a sync, or is the target and has memory of one that is
 * fetched into in the background (lh_state_take()). Outcome: LH_OK - every member of
 * the epoch that stays one ends with the same bytes in target. LH_ABORTED - source is unchanged.
 * LH_TOO_FEW_MEMBERS - fewer than min_world, at all of them, and source is unchanged.
 * LH_INVALID_ARGUMENT - the members' count, dtype, op, on_fault, min_world or algorithm differ, at
 * all of them, and source is unchanged. LH_EVICTED - this member was removed, and source is
 * unchanged. Unless the outcome is LH_OK, a target apart from source may hold anything: parts of
 * the result come there before all members' offers have been compared. LH_UNAVAILABLE - peerd
 * stopped or died: the others may have the result all the same. Source is unchanged where it
 * is apart from target or not from lh_alloc(); in place in memory from lh_alloc() it may be
 * overwritten in part, since the original lay in the memory of peerd. Take what it was computed
 * from out of the shared state (of the others, or a checkpoint) and compute it again; who needs it
 * to outlive peerd gives a target of its own. Returns: LH_OK and a new op in *op_out, or an error
 * and *op_out is NULL. */
LH_API lh_status lh_all_reduce_start(lh_comm *comm, const lh_all_reduce_options *options,
                                     lh_op **op_out);

/* ------------------------------------------------------------------ shared state */

/* lh_tensor.flags */
enum {
  LH_ALLOW_UNEQUAL = 1, /* not compared; a newcomer that fetches gets it once, with the rest. One
                           that has all that is compared keeps its own */
  LH_STAGED = 2         /* a copy that the caller makes anew before each sync */
};

typedef struct lh_tensor {
  uint32_t struct_size; /* the same in all of an array */
  lh_dtype dtype;
  const char *name; /* 1 to 256 bytes of UTF-8 without control characters, unique in the state */
  /* As many elements as the shape has, without gaps, of any alignment. From lh_alloc(): used in
   * place. Elsewhere, or sharing bytes with another tensor: copied into the arena before it is
   * hashed, and what came from others is copied back. */
  void *data;
  const uint64_t *shape; /* of `dims` sizes; NULL for a scalar */
  uint32_t dims;         /* at most 8; 0: a scalar */
  uint32_t flags;        /* LH_ALLOW_UNEQUAL | LH_STAGED */
} lh_tensor;
#define LH_TENSOR_INIT \
  { sizeof(lh_tensor), LH_FLOAT32, NULL, NULL, NULL, 0, 0 }

/* Declares a state: 1 to 65536 tensors, at all members the same ones in the same order. Nothing is
 * read yet; the memory of the tensors stays the caller's, and has to stay there until
 * lh_state_free() or lh_close(). LH_UNAVAILABLE: no room in the arena for the copies. */
LH_API lh_status lh_state_new(lh_client *client, const lh_tensor *tensors, uint32_t count,
                              lh_state **state_out);
/* NULL is allowed. LH_FAILED_PRECONDITION: a sync uses it, also one that has ended and whose call
 * is to be made again for the outcome; or it is fetched into in the background. */
LH_API lh_status lh_state_free(lh_state *state);

/* Reads all tensors ahead of a sync: what has to be copied is, and peerd hashes them. For a
 * newcomer before it joins, since the others wait for it from its admission on. To the next sync
 * with LH_HASH_ON_CHANGE the tensors are untouched then; until that is over they are not written to
 * without lh_state_touch(). LH_FAILED_PRECONDITION: a sync uses the state, an operation in flight
 * uses a tensor of it, or it is fetched into in the background. LH_DEADLINE_EXCEEDED: it goes on,
 * and the state is in use until its end. */
LH_API lh_status lh_state_prepare(lh_state *state, int64_t timeout_ms);
LH_API lh_status lh_state_prepare_start(lh_state *state, lh_op **op_out);

#define LH_ALL_TENSORS UINT32_MAX
/* With LH_HASH_ON_CHANGE: the tensor of that number may have changed. */
LH_API lh_status lh_state_touch(lh_state *state, uint32_t tensor);
/* After a sync: the first range of the tensor from *offset on that came from others, in bytes.
 * *bytes is 0 if there is none. */
LH_API lh_status lh_state_next_change(lh_state *state, uint32_t tensor, uint64_t *offset,
                                      uint64_t *bytes);

#define LH_NO_REVISION UINT64_MAX
/* The revision of what peerd has kept (--keep-state) of a member of this name, of the same tensors;
 * LH_NO_REVISION: nothing. The first sync fills the tensors from it if it offers a lower revision
 * and does not only send: who knows that need not load a checkpoint first. */
LH_API lh_status lh_kept_revision(lh_comm *comm, lh_state *state, uint64_t *revision_out);

/* POPULAR: the state that most of those with the highest revision have wins; must be used by all or
 * by none. RECEIVE: takes what others have, and is never chosen. SEND: never receives. */
typedef enum lh_strategy { LH_POPULAR = 1, LH_RECEIVE = 2, LH_SEND = 3 } lh_strategy;
/* Which tensors are hashed: all; or those that were touched since the last sync that ended well. */
typedef enum lh_hash { LH_HASH_ALWAYS = 0, LH_HASH_ON_CHANGE = 1 } lh_hash;

typedef struct lh_progress {
  uint32_t struct_size;
  uint32_t sources; /* that chunks are asked of */
  uint64_t bytes_done;
  uint64_t bytes_total;
  uint64_t bytes_per_second;
} lh_progress;
#define LH_PROGRESS_INIT \
  { sizeof(lh_progress), 0, 0, 0, 0 }

typedef struct lh_sync_options {
  uint32_t struct_size;
  lh_strategy strategy;
  lh_state *state;
  uint64_t revision; /* of the state: one more than at the last sync; any at the group's first */
  lh_hash hash;
  uint32_t zero;
  /* Called while this member fetches, at most ten times a second, by the thread that waits; NULL:
   * nobody is told. It may call the library, but not free what the sync uses. */
  void (*progress)(const lh_progress *progress, void *context);
  void *progress_context;
} lh_sync_options;
#define LH_SYNC_OPTIONS_INIT \
  { sizeof(lh_sync_options), LH_POPULAR, NULL, 0, LH_HASH_ALWAYS, 0, NULL, NULL }

typedef struct lh_sync_info_t {
  uint32_t struct_size;
  uint32_t sources;  /* members that sent some of `bytes` */
  uint64_t revision; /* that all hold now */
  uint64_t hash_high;
  uint64_t hash_low;
  uint64_t bytes; /* received; 0: this member had the state */
  double seconds; /* from the call to its end, at peerd */
  /* Also if the sync failed, or could not begin: */
  uint32_t passed;     /* of a step boundary: 1: it is behind this member */
  uint32_t resumed;    /* 1: the tensors were filled from what peerd had kept; that counts as having
                          come from others, too */
  uint32_t background; /* 1: this member is in the background: nobody writes to the tensors until
                          lh_state_take() has ended well, or a later sync returns without this. The
                          other fields say nothing */
  uint32_t zero;
} lh_sync_info_t;
#define LH_SYNC_INFO_INIT \
  { sizeof(lh_sync_info_t), 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0 }

/* Brings the tensors of all members of the group to the same bits: the members vote by digest, and
 * those that differ fetch what differs from those that do not. Ends when all members have called
 * it and hold the same. `info` may be NULL; it is filled whenever there is an outcome.
 * Tensors: nobody writes to them until it has ended. LH_OK: they hold what all hold; otherwise they
 * are as they were. What came is written to them by the call that waits for the end. LH_ABORTED:
 * the transfer failed for all, call again. LH_FAILED_PRECONDITION: an operation in flight uses
 * memory of a tensor; or as the text says. LH_STATE_MISMATCH: this member's state cannot be brought
 * together with the others'; the text says why. LH_DEADLINE_EXCEEDED: it goes on; the next call
 * waits for it. */
LH_API lh_status lh_sync_state(lh_comm *comm, const lh_sync_options *options, int64_t timeout_ms,
                               lh_sync_info_t *info);
LH_API lh_status lh_sync_state_start(lh_comm *comm, const lh_sync_options *options, lh_op **op_out);
/* How far the sync of this member that goes on is with fetching, as last heard; all 0: nothing is
 * fetched. For callers that do not want to be called (lh_sync_options.progress). */
LH_API lh_status lh_sync_progress(lh_comm *comm, lh_progress *progress);
/* lh_begin_step() and lh_sync_state() in one, at the price of one. The boundary may be passed and
 * the sync have failed: info->passed tells; after LH_ABORTED go on with lh_sync_state() then.
 * LH_FAILED_PRECONDITION: lh_begin_step() began the wait at this boundary, call that again. */
LH_API lh_status lh_begin_step_sync(lh_comm *comm, const lh_sync_options *options,
                                    int64_t timeout_ms, lh_sync_info_t *info);
LH_API lh_status lh_begin_step_sync_start(lh_comm *comm, const lh_sync_options *options,
                                          lh_op **op_out);
/* After a sync that returned with info->background: waits until the tensors hold what the group has
 * agreed on last, at most a day, and gives them back: from then on they are the caller's, up to its
 * next sync. Who then does with them what the others do at this step, and offers revision + 1 with
 * its next lh_begin_step_sync(), contributes from that boundary on; others do so when little is
 * left to fetch. `info` may be NULL; `revision` says what they hold. LH_DEADLINE_EXCEEDED: not all
 * is here yet; they are fetched into. LH_ABORTED: so they are, but with the next step only: those
 * who had it have changed it meanwhile, which nobody does whose peerd has --keep-state.
 * LH_FAILED_PRECONDITION: nothing is fetched for this member, or an operation in flight uses memory
 * of a tensor. A peerd that does not answer is waited for a second longer than timeout_ms:
 * LH_DEADLINE_EXCEEDED with *info all 0, and the next call waits for the same answer. Until it is
 * here nobody knows whose the tensors are, and the member can begin neither a step nor a sync
 * (LH_FAILED_PRECONDITION); once it is, neither before this was called again, unless the answer is
 * one of those two. */
LH_API lh_status lh_state_take(lh_comm *comm, lh_state *state, int64_t timeout_ms,
                               lh_sync_info_t *info);
/* Of a sync, by itself or at a boundary. LH_FAILED_PRECONDITION before there is an outcome.
 * LH_INVALID_ARGUMENT: the operation is no sync. */
LH_API lh_status lh_sync_info(lh_op *op, lh_sync_info_t *info);

/* ------------------------------------------------------------------ waiting */

/* Waits for the outcome. LH_DEADLINE_EXCEEDED: none yet, the operation goes on and may be waited
 * for again. Once there is an outcome every further call returns it. */
LH_API lh_status lh_op_wait(lh_op *op, int64_t timeout_ms);
/* Whether there is an outcome; never blocks. */
LH_API lh_status lh_op_test(lh_op *op, int *finished_out);

typedef struct lh_op_info_t {
  uint32_t struct_size;
  uint32_t world_size; /* members whose tensors are in the result: those not in the background */
  uint32_t retries;    /* attempts beyond the first */
  uint32_t staged;     /* 1: a buffer was not from lh_alloc() */
  uint64_t epoch;
  uint64_t bytes_sent; /* payload over the network */
  uint64_t bytes_received;
  double seconds;         /* from start to outcome, at peerd */
  double seconds_wait;    /* of these, until every member had started the operation */
  lh_algorithm algorithm; /* of the attempt that counted */
  uint32_t zero;
} lh_op_info_t;
#define LH_OP_INFO_INIT \
  { sizeof(lh_op_info_t), 0, 0, 0, 0, 0, 0, 0.0, 0.0, LH_AUTO, 0 }

/* Of an all-reduce. LH_FAILED_PRECONDITION before there is an outcome. LH_INVALID_ARGUMENT: the
 * operation is no all-reduce. */
LH_API lh_status lh_op_info(lh_op *op, lh_op_info_t *info);
/* lh_all_reduce_start(), lh_op_wait(), lh_op_info() and lh_op_free() in one: returns the outcome.
 * `info` may be NULL; without an outcome of LH_OK all of it but `staged` is 0. *op_out is NULL,
 * unless there is no outcome within timeout_ms (LH_DEADLINE_EXCEEDED, and an operation was
 * started): then it names the operation, which goes on. */
LH_API lh_status lh_all_reduce(lh_comm *comm, const lh_all_reduce_options *options,
                               int64_t timeout_ms, lh_op_info_t *info, lh_op **op_out);
/* Frees the handle. An operation still in flight goes on, and its buffers still belong to it: wait
 * first unless the process ends. A staged target is filled by the wait only. NULL is allowed. */
LH_API void lh_op_free(lh_op *op);

#ifdef __cplusplus
}
#endif

#endif /* LONGHAUL_LONGHAUL_H_ */
