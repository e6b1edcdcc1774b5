/* Longhaul client library: one training run across machines that come and go.
 *
 * A process opens a client, which is a connection to the peerd on its host. Through the client the
 * process joins groups as a member, and starts operations on tensors. peerd carries the operations;
 * this library starts no thread. This header is C99 and needs nothing else of the project.
 *
 * Threads: any thread may call any function. Two operations in flight on one communicator must have
 * different tags.
 *
 * Errors: functions return an lh_status. lh_last_error() gives the text for the calling thread.
 *
 * Operations: a function whose name ends in _start begins what the function without _start does,
 * and returns at once with an operation in *op_out. lh_op_wait() waits for the outcome, and the
 * caller frees the operation with lh_op_free().
 *
 * Time: timeouts are in milliseconds. 0 means do not wait, LH_FOREVER means wait without limit, and
 * any other negative number is LH_INVALID_ARGUMENT. A function without a timeout waits at most for
 * an answer of the local peerd. If peerd is stopped or hangs, such a function returns
 * LH_UNAVAILABLE after 30 s and has changed nothing. A call that only begins something, or waits
 * for a time, takes no longer for that: its request waits in the library, and is sent within later
 * calls. If peerd reads no requests for 30 s, the library closes the connection and treats peerd as
 * dead.
 *
 * Structs: options and infos begin with struct_size. Set struct_size with the _INIT macro of the
 * struct. A struct of an older release may be shorter: the missing fields have their defaults. A
 * struct of a newer release may be longer: in options the bytes that this library does not know
 * must be 0, and in infos this library sets them to 0. Any other size is LH_INVALID_ARGUMENT.
 *
 * Pointers: structs and results must be aligned as C requires. The one tensor of an operation, if
 * it is in memory from lh_alloc(), must begin at a multiple of its element size. A tensor
 * elsewhere, of a list (lh_slice), or of a state may have any alignment.
 *
 * Words (docs/concepts.md explains all of them):
 * - A run is one training run. Members of one group of a run combine their tensors.
 * - An epoch is one numbered, agreed membership of a group.
 * - A step boundary is the point of the program where a member calls lh_begin_step().
 * - The arena is the memory that a client shares with peerd.
 * - A member in the background takes part in operations, but its input is not in the results
 *   (lh_join_mode).
 * - detect_ms is the setting of the coordinator for how long a host may be silent: 1500 ms by
 *   default.
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

/* What the caller does next:
 * LH_INVALID_ARGUMENT     correct the call; or members of the group made calls that do not match
 * LH_FAILED_PRECONDITION  do first what the text names
 * LH_UNAVAILABLE          call again later: peerd, the coordinator or memory is missing
 * LH_ABORTED              look at the world (lh_world()), then call again
 * LH_DEADLINE_EXCEEDED    what was begun goes on: call again to wait longer. lh_join() gives up
 * LH_TOO_FEW_MEMBERS      wait for more members, then call again
 * LH_EVICTED              join again: this member was removed from its group
 * LH_STATE_MISMATCH       leave, do what the text says, and join again
 * LH_INTERNAL             report the text: it is a bug of Longhaul */
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
  LH_BOOL = 12,        /* one byte: 0 is false, and anything else is true */
  LH_FLOAT8_E4M3 = 13, /* the float8 formats are moved, and cannot be reduced */
  LH_FLOAT8_E5M2 = 14
} lh_dtype;

/* How elements are combined.
 *
 * Integer sums and products wrap. LH_AVG is the sum divided by the number of members whose tensors
 * are in it (lh_op_info_t.world_size), or by the sum of their weights; integers are rounded towards
 * zero. Sums and products of LH_FLOAT16 and LH_BFLOAT16 are computed in 32 bits, and rounded once.
 * LH_MIN and LH_MAX give NaN where any member has NaN, and treat -0 as less than +0. LH_BOOL: the
 * sum and the maximum are true where any member has true, the minimum where all have it; LH_AVG and
 * LH_PROD are refused. */
typedef enum lh_reduce_op {
  LH_SUM = 0,
  LH_AVG = 1,
  LH_PROD = 2,
  LH_MIN = 3,
  LH_MAX = 4
} lh_reduce_op;

/* What happens to an operation when a member dies, is removed, or leaves without having started it,
 * or when two hosts lose their link.
 *
 * LH_RETRY: the remaining members redo the operation.
 * LH_ABORT: the operation ends LH_ABORTED at every remaining member. A member that has not started
 * it yet gets LH_ABORTED as soon as it starts it. Then start it again at all members, or at none.
 * LH_AS_JOINED: as lh_join_options.on_fault says.
 * All members must give the same value for an operation. */
typedef enum lh_on_fault { LH_RETRY = 0, LH_ABORT = 1, LH_AS_JOINED = 2 } lh_on_fault;

/* How the bytes of an operation travel.
 *
 * LH_AUTO: Longhaul chooses by tensor size and link measurements; all members choose the same.
 * LH_ONESHOT: each host sends its whole tensor to every other host. At most 4096 bytes.
 * LH_MESH: hosts send to each other directly. In an all-reduce each host adds up one part of the
 * tensor and sends that part to every other host. That takes two times the longest latency, however
 * many hosts there are. It needs a group of at most 64 hosts that all reach each other; elsewhere
 * the operation runs as LH_RING.
 * LH_RING: sums pass from host to host around a ring. Not for gather, scatter, all-to-all, send and
 * receive, whose parts go straight to their receiver.
 * LH_LOCAL: only in lh_op_info_t; nothing crossed the network.
 * All members must give the same value for an operation. */
typedef enum lh_algorithm {
  LH_AUTO = 0,
  LH_ONESHOT = 1,
  LH_MESH = 2,
  LH_RING = 3,
  LH_LOCAL = 4
} lh_algorithm;

/* How elements travel between hosts. All members give the same.
 *
 * LH_UNQUANTIZED: as they are.
 * LH_QUANTIZE_BF16: as bfloat16.
 * LH_QUANTIZE_INT8, LH_QUANTIZE_INT4: as whole numbers of 8 or 4 bits. `block` elements share a
 * scale, which is their greatest magnitude divided by 127 or 7.
 *
 * LH_QUANTIZE_AUTO: Longhaul takes LH_UNQUANTIZED or one of `codecs`, whichever is the fastest with
 * the measured links; lh_op_info_t.quantize says which. All members take the same. No errors.
 *
 * Float32, float16 and bfloat16 tensors, in all-reduce, reduce-scatter, all-gather and broadcast;
 * LH_SUM and LH_AVG. Sums are computed in float32. All members get the same bits.
 *
 * Error bounds, with s for the scale of an element's block. Each encoding errs by at most s/2 with
 * LH_NEAREST, and by less than s with LH_STOCHASTIC, whose mean error is 0. (LH_QUANTIZE_BF16: s is
 * the distance between the two bfloat16 around the element.) An all-reduce encodes the input of
 * each host once and the sum once, so a sum over N hosts errs by at most N + 1 such errors. With
 * LH_RING it encodes each partial sum: there are as many errors, but of larger scales. A
 * reduce-scatter does not encode the sum; an all-gather and a broadcast encode once. What does not
 * leave a host is not encoded, and nor is an operation of at most 4096 bytes, unless the caller
 * chooses LH_MESH or LH_RING, or gives `counts`.
 *
 * A block with a NaN or an infinity arrives as NaN at all members; with LH_QUANTIZE_BF16 only these
 * elements are affected. lh_op_info_t.blocks_not_finite counts such blocks. */
typedef enum lh_quantization {
  LH_UNQUANTIZED = 0,
  LH_QUANTIZE_BF16 = 1,
  LH_QUANTIZE_INT8 = 2,
  LH_QUANTIZE_INT4 = 3,
  LH_QUANTIZE_AUTO = 4
} lh_quantization;
/* `codecs`: a set of codecs. */
#define LH_CODEC_BIT(quantize) (1u << ((quantize)-1))

/* LH_NEAREST: to the nearest value. LH_STOCHASTIC: up or down by chance, so that the mean error is
 * 0. The random numbers depend on the run, the group, the operation and the member; an operation
 * that is redone sends the same bytes. */
typedef enum lh_rounding { LH_NEAREST = 0, LH_STOCHASTIC = 1 } lh_rounding;

/* The `block` of LH_QUANTIZE_INT8 and LH_QUANTIZE_INT4 if it is 0. */
#define LH_BLOCK_DEFAULT 128

typedef struct lh_client lh_client; /* a connection to peerd, and the memory shared with peerd */
typedef struct lh_comm lh_comm;     /* a communicator: one member of one group */
typedef struct lh_op lh_op;         /* an operation: something that peerd does for the caller */
typedef struct lh_state lh_state;   /* named tensors that all members keep equal */

/* As a timeout: wait without limit. */
#define LH_FOREVER (-1)

/* The version of this library, such as "0.1.0". */
LH_API const char* lh_version(void);
/* The name of the status, such as "LH_ABORTED". Never NULL. */
LH_API const char* lh_strerror(lh_status status);
/* The text of the last call of this thread that did not return LH_OK; "" if there was none. The
 * pointer is valid until the thread calls the library again. */
LH_API const char* lh_last_error(void);
/* Bytes of one element. 0 if `dtype` is not an lh_dtype. */
LH_API size_t lh_dtype_size(lh_dtype dtype);

/* ------------------------------------------------------------------ client and arena */

typedef struct lh_open_options {
  uint32_t struct_size;
  const char* socket_path; /* NULL: $LONGHAUL_SOCKET, else /run/longhaul/peerd.sock, else
                              $XDG_RUNTIME_DIR/longhaul/peerd.sock */
  const char* name;        /* name of the members of this client, in logs and lhctl: 1 to 64 of
                              [A-Za-z0-9._-]; NULL: the process id */
  int64_t timeout_ms;      /* how long to wait until peerd listens and answers. A peerd that
                              listens has at least 100 ms to answer. */
} lh_open_options;
#define LH_OPEN_OPTIONS_INIT \
  { sizeof(lh_open_options), NULL, NULL, 10000 }

/* Connects to the peerd on this host. NULL for `options` means the defaults.
 * Returns: LH_OK and a client in *client_out. LH_UNAVAILABLE: no peerd answered in time, or this
 * process may not connect to it; the text names the socket path and the reason.
 * After fork() the client still belongs to the parent, and is not disturbed. The child's calls with
 * it return LH_FAILED_PRECONDITION. What the child writes to memory from lh_alloc() stays in the
 * child. What it reads there is what the parent had written until fork(), or later. */
LH_API lh_status lh_open(const lh_open_options* options, lh_client** client_out);
/* Closes the connection and frees everything that came from the client: operations, buffers,
 * communicators and states. Afterwards no function may be called with any of them, not even their
 * own lh_..._free(). No other thread may use any of them during the call. NULL is allowed.
 *
 * A member that has not left counts as dead. If one of its operations has not ended, the member
 * stays in the group for up to 2 * detect_ms. If the operation ends in that time, the result counts
 * the dead member's tensor. Otherwise the member is removed then, and lh_on_fault decides about the
 * operation. Steps and other operations of the remaining members may wait for that long. */
LH_API void lh_close(lh_client* client);
/* LH_OK if the connection to peerd is open, as far as the library can tell without waiting.
 * LH_UNAVAILABLE: peerd has stopped or died. Memory of this client can still be read. All other
 * uses of the client fail: open another client. */
LH_API lh_status lh_client_check(lh_client* client);

/* Asks peerd why members of a group wait, and writes a sentence for people to text_out, cut to
 * `bytes` with its NUL: why and since when there is no coordinator, else what the coordinator says,
 * such as which members have not come to the step boundary. Also for a member that is not admitted
 * yet, or was removed without knowing it. "" if nobody knows. Returns LH_OK,
 * LH_DEADLINE_EXCEEDED (peerd is stopped or hangs; `timeout_ms` should be 3000 or more, as the
 * coordinator has a second to answer), LH_UNAVAILABLE (peerd has gone) or LH_INVALID_ARGUMENT. Any
 * thread. */
LH_API lh_status lh_why(lh_client* client, const char* run, uint32_t group, int64_t timeout_ms,
                        char* text_out, size_t bytes);

/* Allocates `bytes` (1 or more) in the arena, aligned to 64 bytes. peerd sends and
 * receives tensors in this memory without a copy. The content is undefined.
 * LH_UNAVAILABLE: the arena limit of peerd (--arena-limit) or the memory of the host is used up. */
LH_API lh_status lh_alloc(lh_client* client, size_t bytes, void** data_out);
/* Frees memory from lh_alloc(). NULL is allowed.
 * LH_INVALID_ARGUMENT: `data` is not from lh_alloc(), or is free already. LH_FAILED_PRECONDITION:
 * an operation in flight or a state uses the memory. An operation that has ended does not use it,
 * even if nobody has waited for it.
 * The library keeps freed memory for later calls, and gives large empty parts back to the host. */
LH_API lh_status lh_free(lh_client* client, void* data);

/* ------------------------------------------------------------------ membership */

/* How a new member gets the shared state of a group that already trains.
 *
 * LH_BLOCKING: all members wait in the newcomer's first sync until it has the state.
 * LH_BACKGROUND: nobody waits. The newcomer takes part in all operations in the background: it gets
 * the results, and its input is left out. Its lh_sync_state() and lh_begin_step_sync() return at
 * once with lh_sync_info_t.background set, and peerd fetches the state meanwhile (lh_state_take()).
 * When it has caught up, its input is in the results from a step boundary on.
 * For the first member of a group both modes are the same. */
typedef enum lh_join_mode { LH_BLOCKING = 0, LH_BACKGROUND = 1 } lh_join_mode;

typedef struct lh_join_options {
  uint32_t struct_size;
  const char* run; /* 1 to 64 of [A-Za-z0-9._-] */
  uint32_t group;
  int64_t timeout_ms; /* how long to wait for admission, or LH_FOREVER */
  /* Name of a cohort: members at one peerd that belong together, usually one in each of several
   * groups, such as the shards of one host. All members of the cohort give the same name (1 to 64
   * of [A-Za-z0-9._-]) and the same `cohort_size` (at most 64). None is admitted before all have
   * asked to join. When one leaves, dies or is removed, all are removed. NULL or "" with size 0: no
   * cohort. */
  const char* cohort;
  uint32_t cohort_size;
  /* This member is removed if it comes to a step boundary or a sync more than this many
   * milliseconds (at most a day) after the first member. Its next call returns LH_EVICTED. 0: the
   * other members wait for it without limit. */
  uint32_t step_deadline_ms;
  lh_on_fault on_fault; /* LH_RETRY or LH_ABORT: for operations that say LH_AS_JOINED */
  /* Name of the member, in logs and lhctl: 1 to 64 of [A-Za-z0-9._-]. NULL or "": the name in
   * lh_open_options. With peerd --keep-state, a state that peerd kept goes to the next member of
   * the same name in the group (lh_kept_revision()). */
  const char* name;
  lh_join_mode mode;
  /* For programs that start together: if the group has no members, wait until this many members
   * have joined with this number (at most 1024). All are admitted at once, so lh_world() then shows
   * `members` as the size to all of them. Ranks follow the names; members without a name stand
   * behind the others, in the order of their peerds. All joins give the same number. If the group
   * has members, and always with 0, the join does not wait for others. */
  uint32_t members;
} lh_join_options;
#define LH_JOIN_OPTIONS_INIT \
  { sizeof(lh_join_options), "default", 0, 60000, NULL, 0, 0, LH_RETRY, NULL, LH_BLOCKING, 0 }

/* Joins a group and waits for admission. The first member of a group is admitted at once. A later
 * one is admitted when all members stand at a step boundary. So a thread that joins one group twice
 * waits in vain: the first member cannot reach a boundary while its thread waits here.
 * NULL for `options` means the defaults.
 * LH_DEADLINE_EXCEEDED: not admitted in time; the request to join is withdrawn. The text says what
 * it waited for; with `members`, who has come and who has left again. If peerd does not answer,
 * that takes a second longer. LH_UNAVAILABLE: peerd cannot reach the coordinator, the other members
 * cannot reach this host, peerd drains, or peerd has 64 members already. LH_EVICTED: removed before
 * admission; the text says why. LH_INVALID_ARGUMENT: the text names the option. */
LH_API lh_status lh_join(lh_client* client, const lh_join_options* options, lh_comm** comm_out);
/* lh_join() without waiting. *comm_out can be used once lh_op_wait(*op_out) has returned LH_OK. In
 * every other case free it with lh_comm_free(), which also withdraws a request to join that is
 * still open. options->timeout_ms has no effect, but has to be a timeout. peerd checks most
 * options, so a wrong one may be the outcome of *op_out. */
LH_API lh_status lh_join_start(lh_client* client, const lh_join_options* options,
                               lh_comm** comm_out, lh_op** op_out);

/* Leaves the group when this member's operations in flight have ended. The other members go on. If
 * they have started an operation that this member has not started, lh_on_fault decides, as after a
 * death. LH_OK is also returned for a member that was removed meanwhile.
 * LH_DEADLINE_EXCEEDED: the member is still leaving; the next call goes on waiting.
 * LH_FAILED_PRECONDITION: it has left already, or another call is waiting for it to leave. */
LH_API lh_status lh_leave(lh_comm* comm, int64_t timeout_ms);
LH_API lh_status lh_leave_start(lh_comm* comm, lh_op** op_out);
/* Frees the communicator. A member that has not left leaves, and this call does not wait for that.
 * NULL is allowed. No operation of the communicator may be in flight. */
LH_API void lh_comm_free(lh_comm* comm);

typedef struct lh_world_info {
  uint32_t struct_size;
  uint32_t rank; /* of this member: 0 to size - 1; may change with the epoch */
  uint32_t size; /* all members, those in the background included */
  /* Newcomers that the next step boundary may admit, as peerd last reported them. A newcomer that
   * the members' hosts cannot reach does not count. When lh_begin_step() returns, the newcomers
   * that it admitted are no longer counted. */
  uint32_t pending;
  uint64_t epoch;      /* number of the agreed membership; rises with every change */
  uint64_t member_id;  /* of this member; unique in the run, never changes */
  uint32_t background; /* 1: this member's input is not in the results yet (LH_BACKGROUND) */
  uint32_t zero;
  /* The newest epoch that was made at a step boundary, as of this member's last boundary. It rises
   * when that boundary admitted newcomers, or let members in the background take part, and at no
   * other time. All members that passed the boundary see the same number until their next one. */
  uint64_t boundary;
  /* The group at this member's last step boundary: epoch and size are the same at all members that
   * passed the boundary, and rank is this member's place among them. They change at the next
   * boundary only, whereas the fields above follow each fault at once. A newcomer's first boundary
   * is the one that admitted it. To divide the work of a step, use these. */
  uint64_t step_epoch;
  uint32_t step_rank;
  uint32_t step_size;
} lh_world_info;
#define LH_WORLD_INFO_INIT \
  { sizeof(lh_world_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* Gives the group as peerd last reported it. Does not wait. LH_EVICTED: this member was removed;
 * the text says why. LH_FAILED_PRECONDITION: it is not admitted yet, or has left. LH_UNAVAILABLE:
 * peerd died. */
LH_API lh_status lh_world(lh_comm* comm, lh_world_info* info);
/* Gives the ids of all members of the current epoch, in rank order. Writes at most `capacity` ids
 * to `ids`, and the number of all members to *count_out. LH_UNAVAILABLE: the epoch kept changing
 * while the ids were read, or peerd does not answer. */
LH_API lh_status lh_members(lh_comm* comm, uint64_t* ids, uint32_t capacity, uint32_t* count_out);
/* As lh_members(), for the members at this member's last step boundary (lh_world_info.step_epoch):
 * the same ids at all members that passed it, those that have gone since included. */
LH_API lh_status lh_step_members(lh_comm* comm, uint64_t* ids, uint32_t capacity,
                                 uint32_t* count_out);

typedef struct lh_member_info {
  uint32_t struct_size;
  uint32_t current; /* 1: a member of the present epoch; 0: a former member */
  uint64_t member_id;
  uint64_t peer_id; /* of its peerd: equal for the members at one peerd */
  uint32_t rank;    /* if `current` is 1 */
  uint32_t zero;
  char name[72];   /* lh_join_options.name, or the name of its client */
  char cohort[72]; /* lh_join_options.cohort; "": none */
  char host[136];  /* name of its host */
} lh_member_info;
#define LH_MEMBER_INFO_INIT \
  { sizeof(lh_member_info), 0, 0, 0, 0, 0, "", "", "" }

/* Tells what is known of a member of the group. Former members are known for a long time: at least
 * the last 4096 members of the group since this member was admitted. LH_INVALID_ARGUMENT: no such
 * member is known. LH_UNAVAILABLE: peerd does not answer. */
LH_API lh_status lh_member(lh_comm* comm, uint64_t member_id, lh_member_info* info);

/* Step boundary: waits until every member has called it, admits the newcomers that wait, and
 * returns in the epoch that all members now share (lh_world_info.step_epoch). Every member must
 * call it at the same point of its program. A member may be removed at any moment, also before this
 * call returns: lh_world() shows that in `size` and `rank`, but not in `step_size` and `step_rank`.
 *
 * A newcomer was admitted at such a boundary. Therefore its first call returns at once and stands
 * for the boundary that admitted it. So all members run the same loop, with the boundary at its
 * top. An operation or a sync that a newcomer starts before gets LH_FAILED_PRECONDITION, and the
 * other members hear nothing of it. Members that begin together, as the first of the group, may
 * start with operations and syncs; after one of all members, their first call waits for all.
 *
 * To wait for n members, test the world after each boundary: call lh_begin_step(), then lh_world(),
 * until size >= n. Do not test before the first boundary: a newcomer that finds n members there
 * would not call lh_begin_step() at all.
 *
 * LH_DEADLINE_EXCEEDED: not all members have come. This member still counts as standing at the
 * boundary, and the next call waits at the same one. LH_FAILED_PRECONDITION: lh_begin_step_sync()
 * began the wait at this boundary; call that again. LH_EVICTED: this member was removed, or its
 * peerd drains. */
LH_API lh_status lh_begin_step(lh_comm* comm, int64_t timeout_ms);
LH_API lh_status lh_begin_step_start(lh_comm* comm, lh_op** op_out);

/* ------------------------------------------------------------------ operations */

/* A tensor of a list. All collectives but the barrier take a list in place of one tensor: `slices`
 * and `slice_count` instead of source, target, count and dtype. A list is one operation, with one
 * tag and one outcome. All members give the same dtypes and counts in the same order, and a list
 * where the others give a list. Dtypes may differ within a list.
 *
 * A tensor of at least 256 KiB (in parts: 256 KiB for each part) in memory from lh_alloc() travels
 * from where it is. The library packs all other tensors into memory shared with peerd, and unpacks
 * the result. */
typedef struct lh_slice {
  const void* source; /* as `source` of the operation; NULL if this member gives nothing */
  /* As `target` of the operation. Two slices do not overlap, and a target overlaps at most its own
   * source, as far as the operation allows that. NULL if this member gets nothing */
  void* target;
  uint64_t count; /* as `count` of the operation; may be 0 */
  lh_dtype dtype;
  uint32_t zero;
} lh_slice;
#define LH_SLICES_MAX 1048576

/* The order in which inputs are added. LH_ANY_ORDER: the fastest; all members get the same bits.
 * LH_RANK_ORDER: the result depends only on the inputs, the ranks of the members, and which ranks
 * share a host; not on the algorithm, the links or the time. Members that share a host are added up
 * first, at the place of the first of them. It needs LH_AUTO, LH_ONESHOT or LH_MESH, and a group
 * for which there is a mesh. */
typedef enum lh_order { LH_ANY_ORDER = 0, LH_RANK_ORDER = 1 } lh_order;

typedef struct lh_all_reduce_options {
  uint32_t struct_size;
  lh_dtype dtype; /* the same at all members. Not a float8; LH_BOOL: not LH_AVG or LH_PROD */
  /* This member's input: `count` elements. Either the same address as `target` (in place), or
   * memory that does not overlap `target`. */
  const void* source;
  void* target;   /* where the result goes: `count` elements */
  uint64_t count; /* elements; the same at all members. With 0, source and target may be NULL */
  /* Several tensors: an array of 1 to LH_SLICES_MAX. Then source, target, count and dtype are not
   * used: source and target are NULL, and count is 0. The array is not used any more when the call
   * returns. NULL and 0: one tensor. */
  const lh_slice* slices;
  uint64_t slice_count;
  /* Names the operation among those in flight on this communicator. Members match their calls by
   * tag, so they may start operations in any order. If an operation with this tag and the same
   * participants is in flight already, the new one ends with LH_INVALID_ARGUMENT, and the old one
   * goes on. */
  uint64_t tag;
  /* The ids of the members that take part, in any order, each once. This member is one of them, and
   * all of them give the same set. The set keeps its name: ids of members that have died or left
   * may stay in it. Operations of different sets never meet, whatever their tags. The array is not
   * used any more when the call returns. NULL and 0: all members. */
  const uint64_t* participants;
  uint32_t participant_count;
  /* The operation ends LH_TOO_FEW_MEMBERS if fewer members than this contribute (deaths shrink the
   * group). 0 or 1: a single member gets its own input back as the result. At most 1024; the same
   * at all members. */
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  lh_reduce_op op;
  lh_order order; /* the same at all members */
  /* Each input is multiplied by the weight of its member, for instance its number of tokens. LH_SUM
   * gives the sum of the products. LH_AVG divides the sum of the products by the sum of the
   * weights. A weight is 0 or more and finite; if their sum is 0, the operation ends
   * LH_TOO_FEW_MEMBERS. For floats only. NULL: no weights; either all members give a weight or
   * none. Read within the call. */
  const double* weight;
  lh_quantization quantize; /* the same at all members, like the next two */
  lh_rounding rounding;
  uint32_t block;  /* a power of two from 32 to 4096; 0: LH_BLOCK_DEFAULT, or none if not needed */
  uint32_t codecs; /* with LH_QUANTIZE_AUTO: LH_CODEC_BIT() of those that it may take; else 0 */
  /* Error feedback, for a quantized operation: as many float32 as `source` has elements. They are
   * added to the source, also if this member has a weight. When the outcome is LH_OK, they are what
   * the input and, at the host that adds them up, the sum have lost by encoding, in units of this
   * member's input; an error that is not finite becomes 0. With any other outcome they are
   * unchanged. The memory belongs to the operation until it ends, and overlaps neither source nor
   * target. The inputs of members on one host are encoded together: the first of them that has an
   * error gets it, and those of the others become 0. If no member on a host gives an input, the
   * loss of the sums that the host encodes is added to the first error there. Each member decides
   * whether it keeps errors. NULL: it keeps none. */
  float* error;
  /* The same for slices: an array with an error for each, or NULL. Errors of slices without
   * elements may be NULL. The array is not used any more when the call returns. */
  float* const* errors;
} lh_all_reduce_options;
#define LH_ALL_REDUCE_OPTIONS_INIT                                                                 \
  {                                                                                                \
    sizeof(lh_all_reduce_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0,              \
        LH_AS_JOINED, LH_AUTO, LH_SUM, LH_ANY_ORDER, NULL, LH_UNQUANTIZED, LH_NEAREST, 0, 0, NULL, \
        NULL                                                                                       \
  }

/* Starts an all-reduce and returns at once. lh_op_wait() gives the outcome.
 *
 * A member has at most 1024 operations at peerd. Further ones wait in the library, and so do the
 * member's steps, syncs and its leave behind them. They go to peerd when earlier operations have
 * ended and a call of the library reads that: a wait, lh_op_test(), lh_event_take() or lh_help().
 * So with more than 1024 in flight, all members have to start them in about the same order. If the
 * first 1024 of two members had no operation in common, both would wait for ever.
 *
 * Buffers: source and target belong to the operation until lh_op_wait() returns the outcome.
 * Memory from lh_alloc() travels without a copy. The library copies other memory into memory shared
 * with peerd and back.
 *
 * Returns: LH_OK and a new operation in *op_out, or an error and NULL in *op_out.
 * LH_FAILED_PRECONDITION: source or target shares memory with a tensor of a state that is in a
 * sync; or target shares memory with a state that peerd fetches in the background
 * (lh_state_take()). LH_INVALID_ARGUMENT: the call's structs or memory cannot be used. (Other wrong
 * options are found by peerd, and are an outcome.) LH_UNAVAILABLE, LH_EVICTED: the text says why.
 *
 * Outcomes, and what the buffers hold then:
 * LH_OK                every member that stays in the group has the same bytes in its target
 * LH_ABORTED           lh_on_fault is LH_ABORT, and one of its faults happened; or the operation
 *                      was cancelled (lh_op_cancel()); source is unchanged
 * LH_TOO_FEW_MEMBERS   too few members contribute, or their weights sum to 0, at all members;
 *                      source is unchanged
 * LH_INVALID_ARGUMENT  an option is wrong here or at another member: the text names it, and that
 *                      member; or the members' calls differ in an option that has to be the same:
 *                      the operation ends so at all members. If the tag is in use, only this call
 *                      ends. source is unchanged
 * LH_EVICTED           this member was removed; source is unchanged
 * LH_UNAVAILABLE       peerd refused the operation for lack of memory or room, and source is
 *                      unchanged; or peerd stopped or died (lh_client_check()), and the other
 *                      members may have the result
 *
 * Unless the outcome is LH_OK, a target from lh_alloc() that is apart from source may hold
 * anything, because parts of the result arrive there while the operation runs. A target that is not
 * from lh_alloc() is unchanged. docs/concepts.md, "What tensors hold if an op does not end well",
 * has a table of what holds for each kind; the comments below say what differs from an all-reduce.
 *
 * When peerd dies, source is unchanged in two cases: target is apart from source, or source is not
 * from lh_alloc(). An operation in place on memory from lh_alloc() may leave that memory partly
 * overwritten, because peerd had the original. Then get the shared state from the other members or
 * from a checkpoint, and compute the tensor again. To avoid this, give a target apart from source.
 */
LH_API lh_status lh_all_reduce_start(lh_comm* comm, const lh_all_reduce_options* options,
                                     lh_op** op_out);

/* The other collectives. They follow lh_all_reduce_start() in options of the same name, tags,
 * buffers, errors and outcomes, except where their comments differ. All dtypes travel; float8 is
 * refused only where tensors are reduced.
 *
 * Roots and partners: by rank in the present epoch, or by member id, which never changes. The
 * member id counts if it is not 0. Who is the root counts when the call is made.
 *
 * Parts: a tensor that holds a part for each member has `world` parts in rank order. `world` is the
 * number of members that take part, the same at all of them. Usually all parts have `count`
 * elements. `counts` gives parts lengths of their own: `world` lengths in rank order; `count` is
 * then the length of this member's own part. Lengths may be 0. If one member gives `counts`, all
 * give it; a member whose tensors have no part for each member gives any pointer that is not NULL,
 * and nothing is read there. Not with a list, and not as LH_ONESHOT. The lengths of two members
 * that contradict each other end the operation LH_INVALID_ARGUMENT.
 *
 * Deaths: an operation that is interrupted is redone by the members that are left, or ends
 * LH_ABORTED, as lh_on_fault says. In these cases it ends LH_ABORTED in any case, at all members,
 * and the sources are unchanged:
 * - reduce-scatter, all-to-all, scatter: a member that it is laid out for is gone
 * - broadcast, reduce, gather, scatter: the root is gone; the text names it
 * - send and receive: the partner is gone; the text names it
 * - two members posted it for different worlds or roots, as may happen when one of them has not
 *   heard of a death yet */

typedef struct lh_reduce_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source;
  void* target; /* used at the root only; equal to source, or without overlap */
  uint64_t count;
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  lh_reduce_op op;
  lh_order order;
  const double* weight;
  uint64_t root_member; /* member id of the root; 0: `root` names it */
  uint32_t root;        /* rank of the root */
  uint32_t zero;
} lh_reduce_options;
#define LH_REDUCE_OPTIONS_INIT                                                                  \
  {                                                                                             \
    sizeof(lh_reduce_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, LH_AS_JOINED, \
        LH_AUTO, LH_SUM, LH_ANY_ORDER, NULL, 0, 0, 0                                            \
  }
/* Combines the sources of all members element by element, and gives the root the result. */
LH_API lh_status lh_reduce_start(lh_comm* comm, const lh_reduce_options* options, lh_op** op_out);

typedef struct lh_reduce_scatter_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source; /* `world` parts: part i is for the member of rank i */
  void* target;       /* this member's part. May be anywhere in `source` */
  uint64_t count;     /* elements of one part */
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  lh_reduce_op op;
  lh_order order;
  const double* weight;
  uint32_t world; /* 1 to 1024 */
  uint32_t zero;
  const uint64_t* counts;   /* lengths of the parts of `source`; NULL: all are equal */
  lh_quantization quantize; /* the same at all members, like the next two */
  lh_rounding rounding;
  uint32_t block;  /* a power of two from 32 to 4096; 0: LH_BLOCK_DEFAULT, or none if not needed */
  uint32_t codecs; /* with LH_QUANTIZE_AUTO: LH_CODEC_BIT() of those that it may take; else 0 */
  float* error;    /* as in an all-reduce */
  float* const* errors;
} lh_reduce_scatter_options;
#define LH_REDUCE_SCATTER_OPTIONS_INIT                                                             \
  {                                                                                                \
    sizeof(lh_reduce_scatter_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0,          \
        LH_AS_JOINED, LH_AUTO, LH_SUM, LH_ANY_ORDER, NULL, 0, 0, NULL, LH_UNQUANTIZED, LH_NEAREST, \
        0, 0, NULL, NULL                                                                           \
  }
/* Combines the sources of all members element by element, and gives each member its part of the
 * result. Unless the outcome is LH_OK, target is unchanged. (When peerd dies, a target from
 * lh_alloc() that is apart from source may be partly overwritten.) */
LH_API lh_status lh_reduce_scatter_start(lh_comm* comm, const lh_reduce_scatter_options* options,
                                         lh_op** op_out);

typedef struct lh_all_gather_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source; /* this member's part. May be anywhere in `target` */
  void* target;       /* room for `world` parts */
  uint64_t count;     /* elements of one part */
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  uint32_t world; /* 1 to 1024 */
  uint32_t zero;
  const uint64_t* counts;   /* lengths of the parts in `target`; NULL: all are equal */
  lh_quantization quantize; /* the same at all members, like the next two */
  lh_rounding rounding;
  uint32_t block;  /* a power of two from 32 to 4096; 0: LH_BLOCK_DEFAULT, or none if not needed */
  uint32_t codecs; /* with LH_QUANTIZE_AUTO: LH_CODEC_BIT() of those that it may take; else 0 */
} lh_all_gather_options;
#define LH_ALL_GATHER_OPTIONS_INIT                                                    \
  {                                                                                   \
    sizeof(lh_all_gather_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, \
        LH_AS_JOINED, LH_AUTO, 0, 0, NULL, LH_UNQUANTIZED, LH_NEAREST, 0, 0           \
  }
/* Puts the sources of all members side by side. The parts come in the order of
 * lh_op_info_t.members, without gaps: the part of a member that has died or is in the background is
 * not there, and the last parts of `target` are unchanged or hold anything. Unless the outcome is
 * LH_OK, target may hold anything, and source is unchanged, also within target. */
LH_API lh_status lh_all_gather_start(lh_comm* comm, const lh_all_gather_options* options,
                                     lh_op** op_out);

typedef struct lh_broadcast_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source; /* `count` elements. Only that of the root is sent */
  void* target;       /* `count` elements. Equal to source, or without overlap */
  uint64_t count;
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm;
  uint64_t root_member; /* member id of the root; 0: `root` names it */
  uint32_t root;        /* rank of the root */
  uint32_t zero;
  lh_quantization quantize; /* the same at all members, like the next two */
  lh_rounding rounding;
  uint32_t block;  /* a power of two from 32 to 4096; 0: LH_BLOCK_DEFAULT, or none if not needed */
  uint32_t codecs; /* with LH_QUANTIZE_AUTO: LH_CODEC_BIT() of those that it may take; else 0 */
} lh_broadcast_options;
#define LH_BROADCAST_OPTIONS_INIT                                                                  \
  {                                                                                                \
    sizeof(lh_broadcast_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, LH_AS_JOINED, \
        LH_AUTO, 0, 0, 0, LH_UNQUANTIZED, LH_NEAREST, 0, 0                                         \
  }
/* Copies the root's source to the targets of all members. Unless the outcome is LH_OK, a target
 * may hold anything, except that of the root if it is equal to source. So at other members, source
 * is unchanged only if it is apart from target. */
LH_API lh_status lh_broadcast_start(lh_comm* comm, const lh_broadcast_options* options,
                                    lh_op** op_out);

typedef struct lh_gather_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source; /* this member's part. At the root it may be anywhere in `target` */
  void* target;       /* at the root: room for `world` parts. Not used elsewhere */
  uint64_t count;     /* elements of one part */
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm; /* not LH_RING */
  uint64_t root_member;   /* member id of the root; 0: `root` names it */
  uint32_t root;          /* rank of the root */
  uint32_t world;         /* 1 to 1024 */
  const uint64_t* counts; /* at the root: lengths of the parts in `target`; NULL: all are equal */
} lh_gather_options;
#define LH_GATHER_OPTIONS_INIT                                                                  \
  {                                                                                             \
    sizeof(lh_gather_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, LH_AS_JOINED, \
        LH_AUTO, 0, 0, 0, NULL                                                                  \
  }
/* Puts the sources of all members side by side in the target of the root, in the order and with the
 * exceptions of an all-gather. */
LH_API lh_status lh_gather_start(lh_comm* comm, const lh_gather_options* options, lh_op** op_out);

typedef struct lh_scatter_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source; /* at the root: `world` parts. Not used elsewhere */
  void* target;       /* this member's part. At the root it may be anywhere in `source` */
  uint64_t count;     /* elements of one part */
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm; /* not LH_RING */
  uint64_t root_member;   /* member id of the root; 0: `root` names it */
  uint32_t root;          /* rank of the root */
  uint32_t world;         /* 1 to 1024 */
  const uint64_t* counts; /* at the root: lengths of the parts of `source`; NULL: all are equal */
} lh_scatter_options;
#define LH_SCATTER_OPTIONS_INIT                                                                  \
  {                                                                                              \
    sizeof(lh_scatter_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, LH_AS_JOINED, \
        LH_AUTO, 0, 0, 0, NULL                                                                   \
  }
/* Gives each member its part of the root's source: part i to the member of rank i. */
LH_API lh_status lh_scatter_start(lh_comm* comm, const lh_scatter_options* options, lh_op** op_out);

typedef struct lh_all_to_all_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source; /* `world` parts: part i is for the member of rank i */
  void* target;       /* `world` parts: part i is from the member of rank i. May overlap source */
  uint64_t count;     /* elements of one part; 0 with `counts` */
  const lh_slice* slices;
  uint64_t slice_count;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
  lh_on_fault on_fault;
  lh_algorithm algorithm; /* not LH_RING */
  uint32_t world;         /* 1 to 256 */
  uint32_t zero;
  const uint64_t* counts;        /* lengths of the parts of `source`; NULL: all are equal */
  const uint64_t* target_counts; /* lengths of the parts of `target`; NULL without `counts` */
} lh_all_to_all_options;
#define LH_ALL_TO_ALL_OPTIONS_INIT                                                    \
  {                                                                                   \
    sizeof(lh_all_to_all_options), LH_FLOAT32, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, \
        LH_AS_JOINED, LH_AUTO, 0, 0, NULL, NULL                                       \
  }
/* Each member gives each member a part. The parts from members in the background are unchanged or
 * hold anything. */
LH_API lh_status lh_all_to_all_start(lh_comm* comm, const lh_all_to_all_options* options,
                                     lh_op** op_out);

typedef struct lh_send_options {
  uint32_t struct_size;
  lh_dtype dtype;
  const void* source;
  uint64_t count;
  const lh_slice* slices; /* their targets are not used */
  uint64_t slice_count;
  uint64_t tag;
  lh_on_fault on_fault;
  lh_algorithm algorithm; /* not LH_RING */
  uint64_t to_member;     /* member id of the receiver; 0: `to` names it */
  uint32_t to;            /* rank of the receiver */
  uint32_t zero;
} lh_send_options;
#define LH_SEND_OPTIONS_INIT \
  { sizeof(lh_send_options), LH_FLOAT32, NULL, 0, NULL, 0, 0, LH_AS_JOINED, LH_AUTO, 0, 0, 0 }
/* Sends a tensor to one other member, which calls lh_recv() with the same tag, count and dtype. It
 * ends when the receiver has the tensor. The two may exchange tensors in both directions at a time,
 * also with one tag. */
LH_API lh_status lh_send_start(lh_comm* comm, const lh_send_options* options, lh_op** op_out);

typedef struct lh_recv_options {
  uint32_t struct_size;
  lh_dtype dtype;
  void* target;
  uint64_t count;
  const lh_slice* slices; /* their sources are not used */
  uint64_t slice_count;
  uint64_t tag;
  lh_on_fault on_fault;
  lh_algorithm algorithm; /* not LH_RING */
  uint64_t from_member;   /* member id of the sender; 0: `from` names it */
  uint32_t from;          /* rank of the sender */
  uint32_t zero;
} lh_recv_options;
#define LH_RECV_OPTIONS_INIT \
  { sizeof(lh_recv_options), LH_FLOAT32, NULL, 0, NULL, 0, 0, LH_AS_JOINED, LH_AUTO, 0, 0, 0 }
/* Receives a tensor that another member sends to this one with lh_send(). */
LH_API lh_status lh_recv_start(lh_comm* comm, const lh_recv_options* options, lh_op** op_out);

typedef struct lh_barrier_options {
  uint32_t struct_size;
  lh_on_fault on_fault;
  uint64_t tag;
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t min_world;
} lh_barrier_options;
#define LH_BARRIER_OPTIONS_INIT \
  { sizeof(lh_barrier_options), LH_AS_JOINED, 0, NULL, 0, 0 }
/* Ends when every member has started it. It admits nobody: that is lh_begin_step(). */
LH_API lh_status lh_barrier_start(lh_comm* comm, const lh_barrier_options* options, lh_op** op_out);

/* ------------------------------------------------------------------ shared state */

/* lh_tensor.flags */
enum {
  /* Members may hold different contents, such as the state of a random generator. A newcomer that
   * fetches the state gets this tensor once, with the other tensors. If its compared tensors are
   * equal already, it keeps its own contents. */
  LH_ALLOW_UNEQUAL = 1,
  /* `data` is a copy in memory from lh_alloc(). Before each sync the caller copies the tensor to
   * `data`. After it the caller copies what changed back (lh_state_next_change()). */
  LH_STAGED = 2
};

typedef struct lh_tensor {
  uint32_t struct_size; /* the same in all elements of an array */
  lh_dtype dtype;
  const char* name; /* 1 to 256 bytes of UTF-8 without control characters, unique in the state */
  /* The elements, contiguous, of any alignment. NULL if the tensor has no elements. Memory from
   * lh_alloc() is used in place. Memory elsewhere, and memory that two tensors share, is copied
   * into memory shared with peerd before each sync; changes are copied back after it. */
  void* data;
  const uint64_t* shape; /* `dims` sizes; NULL for a scalar */
  uint32_t dims;         /* at most 8; 0: a scalar */
  uint32_t flags;        /* LH_ALLOW_UNEQUAL | LH_STAGED */
} lh_tensor;
#define LH_TENSOR_INIT \
  { sizeof(lh_tensor), LH_FLOAT32, NULL, NULL, NULL, 0, 0 }

/* Declares a state: 1 to 65536 tensors, the same names, dtypes and shapes in the same order at all
 * members. Reads no tensor yet. The array, the names and the shapes are copied. The memory of the
 * tensors stays the caller's, and must stay valid until lh_state_free() or lh_close().
 * LH_UNAVAILABLE: no memory for the copies, or the client has 16 states already. */
LH_API lh_status lh_state_new(lh_client* client, const lh_tensor* tensors, uint32_t count,
                              lh_state** state_out);
/* Frees the state. NULL is allowed. LH_FAILED_PRECONDITION: a sync uses the state; or a sync or
 * lh_state_take() ended with LH_DEADLINE_EXCEEDED and was not called again for its outcome; or
 * peerd fetches the state in the background. */
LH_API lh_status lh_state_free(lh_state* state);

/* Copies and hashes all tensors ahead of a sync, and waits until peerd has done so. A newcomer
 * calls it before it joins, because from its admission on the others wait for its first sync. In
 * the next sync use LH_HASH_ON_CHANGE: it does not read the tensors again. From this call to the
 * end of that sync, name every tensor that you write to with lh_state_touch().
 * LH_FAILED_PRECONDITION: a sync uses the state, an operation in flight uses one of its tensors, or
 * peerd fetches the state in the background. LH_DEADLINE_EXCEEDED: peerd is still hashing, and the
 * state is in use until it is done. */
LH_API lh_status lh_state_prepare(lh_state* state, int64_t timeout_ms);
LH_API lh_status lh_state_prepare_start(lh_state* state, lh_op** op_out);

#define LH_ALL_TENSORS UINT32_MAX
/* Says that the tensor at this index, or every tensor (LH_ALL_TENSORS), may have changed since the
 * last sync. Needed with LH_HASH_ON_CHANGE only. */
LH_API lh_status lh_state_touch(lh_state* state, uint32_t tensor);
/* After a sync: finds the next range of a tensor that came from other members. In: *offset is where
 * to start, in bytes. Out: the range begins at *offset and has *bytes bytes; *bytes is 0 if there
 * is no further range. */
LH_API lh_status lh_state_next_change(lh_state* state, uint32_t tensor, uint64_t* offset,
                                      uint64_t* bytes);

#define LH_NO_REVISION UINT64_MAX
/* peerd --keep-state keeps a copy of a state after its trainer has died. Gives the revision of the
 * copy that peerd has for the name of this member, of the same tensors; LH_NO_REVISION: no copy.
 * Before the first sync of this member, a former member of the same name has left it. Afterwards it
 * is this member's own, of its last sync.
 * The first sync fills the tensors from this copy if the caller offers a lower revision and the
 * strategy is not LH_SEND. Then the caller need not load a checkpoint before. */
LH_API lh_status lh_kept_revision(lh_comm* comm, lh_state* state, uint64_t* revision_out);

/* Whose state a sync chooses.
 * LH_POPULAR: among the members with the highest revision, the state that most of them have. Either
 * all members of a group use LH_POPULAR, or none.
 * LH_RECEIVE: this member takes the state of others. Its own state is never chosen.
 * LH_SEND: the tensors of this member never change. If another state is chosen, this member gets
 * LH_STATE_MISMATCH. */
typedef enum lh_strategy { LH_POPULAR = 1, LH_RECEIVE = 2, LH_SEND = 3 } lh_strategy;
/* Which tensors a sync reads and hashes. LH_HASH_ALWAYS: all. LH_HASH_ON_CHANGE: the tensors named
 * by lh_state_touch() since the last sync or lh_state_prepare() that returned LH_OK. */
typedef enum lh_hash { LH_HASH_ALWAYS = 0, LH_HASH_ON_CHANGE = 1 } lh_hash;

typedef struct lh_progress {
  uint32_t struct_size;
  uint32_t sources; /* members that peerd asks for parts of the state */
  uint64_t bytes_done;
  uint64_t bytes_total;
  uint64_t bytes_per_second;
} lh_progress;
#define LH_PROGRESS_INIT \
  { sizeof(lh_progress), 0, 0, 0, 0 }

typedef struct lh_sync_options {
  uint32_t struct_size;
  lh_strategy strategy;
  lh_state* state;
  /* The revision of what the tensors hold now, at most 2^63. The first sync of a group accepts any
   * revision. In each later sync the revision is one more than in the sync before. A member with a
   * lower revision is outdated, and fetches. A higher revision is refused. */
  uint64_t revision;
  lh_hash hash;
  uint32_t zero;
  /* Called while this member fetches, at most ten times a second, on the thread that waits for the
   * sync. NULL: not called. It may call the library, but must not free what the sync uses. */
  void (*progress)(const lh_progress* progress, void* context);
  void* progress_context;
} lh_sync_options;
#define LH_SYNC_OPTIONS_INIT \
  { sizeof(lh_sync_options), LH_POPULAR, NULL, 0, LH_HASH_ALWAYS, 0, NULL, NULL }

typedef struct lh_sync_info_t {
  uint32_t struct_size;
  uint32_t sources;   /* members that sent some of `bytes` */
  uint64_t revision;  /* of the state that all members hold now */
  uint64_t hash_high; /* hash of that state, 128 bits */
  uint64_t hash_low;
  uint64_t bytes; /* received from other members; 0: this member had the state */
  double seconds; /* from the call to its end, measured by peerd */
  /* 1: lh_begin_step_sync() has passed the step boundary. Valid whenever there is an outcome, also
   * if the sync failed. */
  uint32_t passed;
  /* 1: the tensors were filled from what peerd had kept (lh_kept_revision()).
   * lh_state_next_change() reports these ranges, too. */
  uint32_t resumed;
  /* 1: this member is in the background, and peerd fetches the state. Do not write to the tensors
   * until lh_state_take() returns LH_OK, or a later sync returns with 0 here. Valid also if the
   * call failed or could not begin. If 1, the fields above mean nothing, except `passed`. */
  uint32_t background;
  uint32_t zero;
} lh_sync_info_t;
#define LH_SYNC_INFO_INIT \
  { sizeof(lh_sync_info_t), 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0 }

/* Makes the tensors of all members of the group equal, bit by bit. Every member must call it. One
 * member's state is chosen by revision and hash. Members whose tensors differ from it fetch what
 * differs. The call ends when all members have called it and hold the same bits. `info` may be
 * NULL; it is filled whenever there is an outcome.
 *
 * Tensors: nobody may write to them until the sync has ended. The call that gets the outcome writes
 * to them what came from other members.
 *
 * Outcomes:
 * LH_OK                   the tensors hold the chosen state
 * LH_ABORTED              the transfer failed for all members; call again
 * LH_FAILED_PRECONDITION  an operation in flight uses memory of a tensor, or as the text says
 * LH_INVALID_ARGUMENT     some members use LH_POPULAR and others do not: this member is of the
 * smaller side (of two equal ones, it does not use LH_POPULAR); the other side goes on
 * LH_STATE_MISMATCH       this member's state does not fit the others' states; the text says why
 * LH_DEADLINE_EXCEEDED    no outcome yet; the sync goes on, and the next call waits for it
 * Unless the outcome is LH_OK, the tensors are as they were. */
LH_API lh_status lh_sync_state(lh_comm* comm, const lh_sync_options* options, int64_t timeout_ms,
                               lh_sync_info_t* info);
LH_API lh_status lh_sync_state_start(lh_comm* comm, const lh_sync_options* options, lh_op** op_out);
/* How much of the state this member has fetched in the sync that is in flight, as peerd last
 * reported it. All fields are 0 if nothing is fetched. Callers that poll use this function; others
 * use lh_sync_options.progress. */
LH_API lh_status lh_sync_progress(lh_comm* comm, lh_progress* progress);
/* lh_begin_step() and lh_sync_state() in one call, with one round trip to the coordinator. The
 * boundary can be passed although the sync fails: then info->passed is 1. After LH_ABORTED with
 * passed 1 call lh_sync_state(), not this function.
 * LH_FAILED_PRECONDITION: lh_begin_step() began the wait at this boundary; call that again. */
LH_API lh_status lh_begin_step_sync(lh_comm* comm, const lh_sync_options* options,
                                    int64_t timeout_ms, lh_sync_info_t* info);
LH_API lh_status lh_begin_step_sync_start(lh_comm* comm, const lh_sync_options* options,
                                          lh_op** op_out);
/* For a member in the background, after a sync that returned with info->background 1: waits until
 * peerd has fetched the state that the group agreed on last, and writes it to the tensors. It waits
 * at most timeout_ms, and never longer than a day. `info` may be NULL; info->revision says what the
 * tensors hold.
 *
 * After LH_OK the tensors belong to the caller until its next sync. If the caller then changes them
 * as the other members do in this step, and offers revision + 1 in its next lh_begin_step_sync(),
 * its input is in the results from that boundary on. A caller that does not do so contributes
 * later, when little of its state is left to fetch.
 *
 * LH_DEADLINE_EXCEEDED: the state is not complete yet, and peerd goes on fetching.
 * LH_ABORTED: the state cannot become complete in this step, because its sources have changed it
 * meanwhile. peerd goes on with the next step. A source whose peerd has --keep-state does not have
 * this problem.
 * LH_FAILED_PRECONDITION: nothing is fetched for this member, or an operation in flight uses memory
 * of a tensor.
 *
 * If peerd itself does not answer, the call returns LH_DEADLINE_EXCEEDED with all of *info 0, one
 * second after timeout_ms. Then it is not known whether the tensors belong to the caller. Call
 * lh_state_take() again: it waits for the same answer. Until that call has given an outcome, this
 * member can begin neither a step nor a sync (LH_FAILED_PRECONDITION). If the late answer is
 * LH_DEADLINE_EXCEEDED or LH_ABORTED, it can begin them without that call. */
LH_API lh_status lh_state_take(lh_comm* comm, lh_state* state, int64_t timeout_ms,
                               lh_sync_info_t* info);
/* What a sync did; `op` is from lh_sync_state_start() or lh_begin_step_sync_start().
 * LH_FAILED_PRECONDITION: there is no outcome yet. LH_INVALID_ARGUMENT: `op` is not a sync. */
LH_API lh_status lh_sync_info(lh_op* op, lh_sync_info_t* info);

/* ------------------------------------------------------------------ waiting */

/* Waits for the outcome of an operation and returns it. Every further call returns it again.
 * LH_DEADLINE_EXCEEDED: there is no outcome yet; the operation goes on, and the caller may wait
 * again. */
LH_API lh_status lh_op_wait(lh_op* op, int64_t timeout_ms);
/* Sets *finished_out to 1 if there is an outcome, else to 0. Does not wait for other members. It
 * may copy a result to the caller's memory first. */
LH_API lh_status lh_op_test(lh_op* op, int* finished_out);

typedef struct lh_op_info_t {
  uint32_t struct_size;
  uint32_t world_size; /* members whose tensors are in the result; none is in the background */
  uint32_t retries;    /* how often a fault interrupted it after all members had started it */
  uint32_t staged;     /* 1: a buffer was not from lh_alloc(), and was copied */
  uint64_t epoch;      /* in which the result was made */
  /* Tensor bytes that peerd sent and received for this operation, for all its members on this host
   * together. */
  uint64_t bytes_sent;
  uint64_t bytes_received;
  double seconds;           /* from start to outcome, measured by peerd */
  double seconds_wait;      /* the part of `seconds` until every member had started it */
  lh_algorithm algorithm;   /* that made the result; never LH_AUTO */
  lh_quantization quantize; /* how elements travelled; never LH_QUANTIZE_AUTO */
  /* Set by the caller: an array for the ids of the `world_size` members, and its length. The ids
   * come in rank order, and are the same at all members. NULL and 0: the ids are not wanted. Ids
   * beyond the array's length are left out. A group has at most 1024 members. */
  uint64_t* members;
  uint32_t members_capacity;
  uint32_t zero2;
  /* A digest of the set of these members' hosts: equal for operations with the same hosts, in any
   * group of the run. With it the shards of a host learn whether the operations of their groups had
   * the same hosts: LH_MIN and LH_MAX of it over the shards are equal then. */
  uint64_t hosts;
  /* Of a quantized operation: blocks of this member's result with an element that is not finite. */
  uint64_t blocks_not_finite;
} lh_op_info_t;
#define LH_OP_INFO_INIT \
  { sizeof(lh_op_info_t), 0, 0, 0, 0, 0, 0, 0.0, 0.0, LH_AUTO, LH_UNQUANTIZED, NULL, 0, 0, 0, 0 }

/* What a collective did. If its outcome is not LH_OK, all fields but `staged` are 0.
 * LH_FAILED_PRECONDITION: there is no outcome yet. LH_INVALID_ARGUMENT: `op` is not a
 * collective. */
LH_API lh_status lh_op_info(lh_op* op, lh_op_info_t* info);
/* lh_all_reduce_start(), lh_op_wait(), lh_op_info() and lh_op_free() in one call. Returns the
 * outcome; `info` may be NULL. *op_out is NULL, except if the operation has no outcome within
 * timeout_ms: then the call returns LH_DEADLINE_EXCEEDED, and *op_out is the operation, which goes
 * on. The caller waits for it with lh_op_wait() and frees it. */
LH_API lh_status lh_all_reduce(lh_comm* comm, const lh_all_reduce_options* options,
                               int64_t timeout_ms, lh_op_info_t* info, lh_op** op_out);
/* The same for the other collectives. */
LH_API lh_status lh_reduce(lh_comm* comm, const lh_reduce_options* options, int64_t timeout_ms,
                           lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_reduce_scatter(lh_comm* comm, const lh_reduce_scatter_options* options,
                                   int64_t timeout_ms, lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_all_gather(lh_comm* comm, const lh_all_gather_options* options,
                               int64_t timeout_ms, lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_broadcast(lh_comm* comm, const lh_broadcast_options* options,
                              int64_t timeout_ms, lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_gather(lh_comm* comm, const lh_gather_options* options, int64_t timeout_ms,
                           lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_scatter(lh_comm* comm, const lh_scatter_options* options, int64_t timeout_ms,
                            lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_all_to_all(lh_comm* comm, const lh_all_to_all_options* options,
                               int64_t timeout_ms, lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_send(lh_comm* comm, const lh_send_options* options, int64_t timeout_ms,
                         lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_recv(lh_comm* comm, const lh_recv_options* options, int64_t timeout_ms,
                         lh_op_info_t* info, lh_op** op_out);
LH_API lh_status lh_barrier(lh_comm* comm, const lh_barrier_options* options, int64_t timeout_ms,
                            lh_op_info_t* info, lh_op** op_out);
/* Asks for the end of a collective that is in flight. Does not wait: after LH_OK, lh_op_wait()
 * tells the outcome. Usually that is LH_ABORTED, at all members, with the sources unchanged;
 * members that start the operation later get LH_ABORTED, too, until their next step boundary. If
 * the operation was almost done, it may still end with its result, at all members. Members may
 * cancel it at the same time: that is one end. So a member that gets LH_ABORTED and starts the
 * operation again meets the others that do so. If the operation has an outcome already, nothing
 * happens. If it waits in this library (lh_all_reduce_start()), it goes to peerd first.
 *
 * A cancelled operation delays all operations of the group that are in flight, by a few round trips
 * to the coordinator. LH_INVALID_ARGUMENT: `op` is not a collective. LH_UNAVAILABLE: out of memory.
 */
LH_API lh_status lh_op_cancel(lh_op* op);
/* Frees the handle. NULL is allowed. An operation in flight goes on, and its buffers still belong
 * to it. So wait for the outcome first, unless the process ends. A target that is not from
 * lh_alloc() gets the result only within lh_op_wait() or lh_op_test(). */
LH_API void lh_op_free(lh_op* op);

/* A call that this library refuses with LH_INVALID_ARGUMENT ends the operation at the other members
 * as well, also if they start it later: with LH_INVALID_ARGUMENT, and a text that names this member
 * and says why. (Unless the call names no operation, because its options are NULL, its participants
 * are no members, or its tag is in flight.) So start it again at all members, or at none: this
 * member's next call of that tag and those participants is the next operation. The others hear of
 * the refusal in the same step only.
 *
 * lh_refuse() does the same for a call that a library on top of this one refuses. It does not wait
 * for the others. Of the refused call its name counts: tag, participants, and the partner of a send
 * or receive. */
typedef struct lh_refuse_options {
  uint32_t struct_size; /* sizeof(lh_refuse_options) */
  uint32_t zero;
  const char* call; /* such as "lh_all_gather" */
  const char* why;  /* the first 255 bytes are passed on, without control characters */
  const uint64_t* participants;
  uint32_t participant_count;
  uint32_t partner;        /* of a send or receive: its rank */
  uint64_t partner_member; /* its id; 0: `partner` names it */
  uint64_t tag;
} lh_refuse_options;
#define LH_REFUSE_OPTIONS_INIT \
  { sizeof(lh_refuse_options), 0, NULL, NULL, NULL, 0, 0, 0, 0 }
LH_API lh_status lh_refuse(lh_comm* comm, const lh_refuse_options* options);

/* Completion of several operations. All operations belong to the same client. */

/* Waits until at least one of `count` operations has an outcome, and sets *index_out to the first
 * of these in the array. Get its outcome with lh_op_wait(), which then does not wait.
 * LH_DEADLINE_EXCEEDED: none has an outcome; all go on. LH_INVALID_ARGUMENT: there are no
 * operations, or one belongs to another client. */
LH_API lh_status lh_wait_any(lh_client* client, lh_op* const* ops, uint32_t count,
                             int64_t timeout_ms, uint32_t* index_out);

/* Gives a descriptor for poll(), epoll or an event loop. It is readable when an operation of the
 * client may have ended. Then call lh_event_take(), and after that lh_op_test() for each operation
 * of interest. The client owns the descriptor: only wait for it, and do not read, write or close
 * it. It is the same in each call, and ends with lh_close(). LH_UNAVAILABLE: the system gives no
 * descriptor, or peerd has gone. */
LH_API lh_status lh_event_fd(lh_client* client, int* fd_out);
/* Makes the descriptor unreadable until something ends after this call. Does not wait. If peerd has
 * gone, all operations have ended, the descriptor may stay readable, and the call returns the error
 * of the connection. */
LH_API lh_status lh_event_take(lh_client* client);

/* For a thread of the caller: copies results to tensors that are not from lh_alloc(), as soon as
 * they come, until timeout_ms is over or lh_close() is called. Without it, such a copy happens when
 * the program calls lh_op_wait() or lh_op_test(). While a thread is in this call, each wait of the
 * other threads takes some 10 us longer, because that thread reads the replies of peerd.
 * LH_DEADLINE_EXCEEDED: timeout_ms is over. LH_UNAVAILABLE: peerd has gone.
 * LH_FAILED_PRECONDITION: lh_close() was called. lh_close() waits for the end of this call. */
LH_API lh_status lh_help(lh_client* client, int64_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif /* LONGHAUL_LONGHAUL_H_ */
