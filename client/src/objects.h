/* The structs of the client library, which its modules share. Nothing here is exported.
 *
 * Each client has one mutex. It guards the client and its communicators, operations, states and
 * arena. It is never held during a system call that may block, nor during the copy of a tensor.
 * The caller of a function whose name ends in _locked holds the mutex.
 *
 * A module may use the modules above it in this list, and no others:
 *   error, arena, copy, objects
 *   tensors       what a collective works on
 *   sleep         waiting for a change of a client
 *   shared        queues in memory that is shared with peerd
 *   connection    the way to peerd: these queues, and the socket
 *   members       the members of a client
 *   ops           requests to peerd, from the request to the outcome
 *   replies       reading replies of peerd, and giving them to the operations
 *   queue         requests that wait until peerd may get them
 *   request       sending requests to peerd
 *   uses          whether an operation and a state use the same memory of the caller
 *   memory        allocating memory shared with peerd
 *   op, comm, events
 *   collective    staging and outcome of every kind of collective
 *   calls, state  the calls of all collectives; shared states
 *   client        lh_open() and lh_close()
 */
#ifndef LONGHAUL_CLIENT_OBJECTS_H_
#define LONGHAUL_CLIENT_OBJECTS_H_

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/include/longhaul/longhaul.h"
#include "client/src/arena.h"
#include "proto/wire/ipc.h"

#define LHI_TABLE_SIZE 256
#define LHI_INBOX_FRAMES 32

/* The functions by which the kinds of operations differ. The mutex is held during all of them but
 * `collect`. Each function may be NULL. */
struct lhi_op_type {
  /* Called when the op has an outcome, in op->status. The function may change the status. `reply`
   * is the answer of peerd, or NULL if peerd did not answer. op->comm is still set. */
  void (*ended)(lh_op* op, const struct lh_ipc_reply* reply);
  /* Returns whether a result in the arena must be copied to the caller's memory. */
  bool (*arrived)(const lh_op* op);
  /* Copies that result. The mutex is not held. */
  void (*collect)(lh_op* op);
  /* Called when the op no longer uses the caller's memory or the arena. `good`: the outcome is
   * LH_OK, and the caller has the whole result. */
  void (*over)(lh_op* op, bool good);
};

enum lhi_op_state {
  LHI_OPEN,       /* no answer yet */
  LHI_ARRIVED,    /* answered; the result is in the arena and must be copied to the caller */
  LHI_COLLECTING, /* a thread copies the result */
  LHI_ENDED
};

/* The tensors of a collective (tensors.h). */

enum lhi_which { LHI_SOURCE, LHI_TARGET, LHI_ERROR, LHI_SIDES };

/* A tensor of the caller: not empty, except where there is no list. */
struct lhi_pair {
  uint8_t* at[LHI_SIDES]; /* NULL: none. The source is only read */
  size_t bytes;           /* of one part; only in a list */
};

/* The source, the target or the error of a piece. */
struct lhi_side {
  size_t bytes; /* 0: this member has no such tensor */
  /* What peerd uses, in the arena. If the pin has a block, it is the caller's memory, else staged
   * memory. */
  uint8_t* data;
  struct lhi_pin pin;
};

/* What peerd sees as one tensor: one of the caller, or several of one dtype that are packed. */
struct lhi_piece {
  uint64_t count;        /* elements; in parts: of one part */
  size_t first, tensors; /* in lhi_tensors.pairs */
  struct lhi_side sides[LHI_SIDES];
  uint8_t dtype;
  bool source_in_target; /* peerd has a copy of the source, and may overwrite the caller's */
};

/* A range of the caller's memory. */
struct lhi_use {
  uintptr_t begin, end;
  uint64_t slice;
  bool written; /* the result is written there */
};

struct lhi_tensors {
  uint64_t digest;  /* of the dtypes and counts of a list; 0: one tensor */
  uint8_t* outline; /* of a list (OutlineFault() in proto/wire/op_desc.h); malloc() */
  uint16_t outline_bytes;
  bool in_parts;
  size_t source_parts, target_parts; /* 0: this member has no such tensor */
  size_t pair_count, piece_count, use_count;
  struct lhi_pair* pairs;
  struct lhi_piece* pieces;
  struct lhi_use* uses; /* in order of their addresses; none overlaps another one */
  bool owned;           /* the three arrays have memory of their own */
  struct lhi_pair one_pair;
  struct lhi_piece one_piece;
  struct lhi_use one_uses[3];
};

/* A block of the arena for copies of tensors. */
struct lhi_staged {
  void* data; /* NULL: none */
  size_t bytes;
};

struct lh_op {
  lh_client* client;
  lh_comm* comm; /* counted in comm->users while the op is open; else NULL */
  const struct lhi_op_type* type;
  enum lhi_op_state state;
  bool held;                     /* there is a handle. If not, the op is freed when it ends */
  uint64_t call;                 /* its number in requests and replies */
  struct lh_op* table_next;      /* in client->table while open */
  struct lh_op *previous, *next; /* in client->ops until freed */

  lh_status status; /* valid once there is an outcome */
  char* text;       /* the text for an error; NULL: none */
  union lhi_answer {
    struct lh_ipc_op_info info;
    struct lh_ipc_members_page members;
    struct lh_ipc_member_info about;
    struct lh_ipc_sync_info sync;
    struct lh_ipc_kept kept;
  } reply;
  uint32_t reply_flags;

  /* used only by collectives */
  bool collective;
  bool sent;              /* counted in comm->ops_sent */
  uint64_t* more_members; /* ids of members for which the reply has no room */
  uint32_t more_members_count;
  uint64_t tag;
  uint64_t set; /* a digest of the participants; of a send: of the partner. 0: all members */
  struct lhi_tensors tensors;
  bool staged;
  bool reads, writes; /* peerd uses memory of the caller as a source, as a target */
  bool copy_back;     /* collect() copies staged targets and errors to the caller */
  bool restore;       /* without a result, collect() puts sources back that lie in targets */
  bool cancel;        /* lh_op_cancel() came before the request was sent */
  /* Blocks of the arena, for lhi_which. An op in place has one for both source and target. */
  struct lhi_staged staged_sides[LHI_SIDES];
  void* table; /* lh_ipc_op.table */

  /* used only by a sync, and by a step with a sync */
  lh_state* synced;  /* the state; NULL once the op does not use it any more */
  uint64_t of_state; /* id of that state, kept to the end; 0: the op is not a sync */
  bool passed;       /* the member has passed the boundary, even if the sync fails */
  void (*on_progress)(const lh_progress* progress, void* context);
  void* progress_context;
  struct lh_ipc_progress progress;
  bool progress_told; /* the caller's function was called with `progress` */
};

/* One tensor of a state. */
struct lhi_tensor {
  uint8_t* data;  /* in the arena: what peerd reads. `own`, or the library's copy of it */
  uint8_t* inbox; /* in the arena: where peerd puts what it fetches. Equal to `data` if that is a
                     copy, made by the library or by the caller (LH_STAGED) */
  uint8_t* own;   /* the caller's memory (lh_tensor.data) */
  bool staged;    /* LH_STAGED: the caller copies to and from `data` itself */
  size_t bytes;
  struct lhi_pin pin; /* of `data`; empty if `data` is the library's copy */
  size_t first_chunk; /* in lh_state.changed */
};

struct lh_state {
  lh_client* client;
  lh_state *previous, *next; /* in client->states */
  uint64_t id;               /* the name of the state in requests to peerd */
  lh_op* op;                 /* the sync that uses the state, or NULL */
  bool starting;             /* a call is copying tensors to begin a sync */
  lh_comm* holder;           /* the background member for which peerd fills the state, or NULL */
  uint32_t count;
  struct lhi_tensor* tensors;
  size_t chunks;
  /* Blocks of the arena, pinned. */
  uint8_t* table;   /* one struct lh_ipc_tensor for each tensor; `touched` and `changed` follow */
  uint8_t* touched; /* one byte for each tensor: not 0 if it may have changed */
  uint8_t* changed; /* one byte for each chunk: not 0 if it came from other members */
  uint8_t* copies;  /* copies of tensors that are not in the arena; NULL: none */
  uint8_t* inbox;   /* for tensors that peerd reads in place; NULL: none */
  size_t inbox_bytes;
  bool fetched; /* peerd may have put chunks into the inbox since its pages were given back */
  struct lhi_pin table_pin;
  struct lhi_pin copies_pin;
  struct lhi_pin inbox_pin;
};

/* A request that waits (queue.h, connection.h). */
struct lhi_queued {
  struct lhi_queued* next;
  struct lh_ipc_request request;
};

struct lh_comm {
  lh_client* client;
  lh_comm *previous, *next;
  bool held;            /* the caller has the handle */
  uint32_t users;       /* open ops that refer to this member */
  uint64_t join_call;   /* lh_op.call of the join */
  uint64_t handle;      /* the name of the member in requests to peerd; 0 before admission */
  lh_on_fault on_fault; /* for ops with LH_AS_JOINED */
  bool admitted;
  bool leaving; /* LEAVE was sent and is not answered yet */
  bool left;
  bool stepping; /* STEP was sent and is not answered yet */
  bool newcomer; /* other members were in the group before */
  /* Admitted, and no step since then, nor a sync or an op of all members: the next step returns at
   * once. It stands for the boundary that admitted this member. */
  bool at_join;
  lh_status gone; /* not LH_OK: removed, or never admitted */
  char* gone_text;
  struct lh_ipc_world world;
  /* Ops of calls that timed out. The next call of the same kind goes on waiting for the op. */
  lh_op* parked_step;
  lh_op* parked_leave;
  lh_op* parked_sync;
  lh_op* parked_take;
  /* Requests that wait (queue.h). */
  struct lhi_queued *queue_first, *queue_last;
  uint32_t ops_sent; /* open ops that peerd has */
  lh_op* sync; /* the open op that uses a state: a sync, a step with one, or a take. Or NULL */
  /* Called before the record is freed. Set if peerd has fetched a state for this member. */
  void (*on_free)(lh_comm* comm);
};

struct lh_client {
  pid_t pid;
  int fd;
  int64_t spin_ns; /* how long a thread polls for an answer before it sleeps */
  /* Only the reader uses these two: how many of the next waits do not poll, and how many did not
   * after the last time that the processor was busy. */
  uint32_t spin_skips, spin_skips_next;
  /* The memory with the queues; NULL: there are none. `put` and `sent` are guarded by the send
   * mutex. Only the reader uses `taken` and `read`. */
  struct lh_ipc_shared* shared;
  uint32_t put;  /* requests that were put into the queue so far */
  uint64_t sent; /* requests that were sent over the socket so far */
  /* Requests for which the socket has no room (connection.h), and since when it has taken none.
   * Guarded by the send mutex, but `unsent` is also read without it. */
  struct lhi_queued *unsent, *unsent_last;
  int64_t unsent_since_ns;
  uint32_t
      patient; /* atomic: threads that send a descriptor, and wait for room with the send mutex */
  uint32_t taken;         /* replies that were taken from the queue so far */
  uint64_t read;          /* replies that were read from the socket and handled so far */
  int64_t answer_ns;      /* how long to wait for an answer that needs no other peer */
  lh_client* next_client; /* the list of all clients of the process, for fork() */
  pthread_mutex_t send_mutex;

  pthread_mutex_t mutex; /* guards everything that follows */
  uint32_t wakes;        /* futex: rises when sleeping threads must look again */
  uint32_t sleepers;     /* threads that sleep on `wakes` */
  bool reading;          /* a thread is the reader (replies.h) */
  int event_fd;          /* set when an op has ended; -1 before lh_event_fd() */
  int poll_fd;           /* what lh_event_fd() gives */
  /* lh_event_take() has forgotten what arrived at the socket, because a thread was the reader: that
   * thread must look once more before it stops. */
  bool forgot;
  uint32_t queued;                  /* requests in the queues of all members */
  void (*flush)(lh_client* client); /* lhi_flush_locked() */
  bool flushing;                    /* a thread sends such requests */
  uint32_t helpers;                 /* threads in lh_help() */
  bool dead;                        /* the connection has ended, with dead_status and dead_text */
  lh_status dead_status;
  char* dead_text;
  uint64_t next_call;
  uint64_t next_region;
  lh_op* table[LHI_TABLE_SIZE]; /* open ops, hashed by their call */
  lh_op* ops;
  lh_comm* comms;
  lh_state* states;
  uint64_t next_state;
  struct lhi_arena arena;
  bool forked; /* children of fork() may have the regions of the arena */
  /* Replies that were read and not handled yet (not an inbox of a state). Only the reader uses
   * these two fields. */
  size_t inbox_bytes;
  struct lh_ipc_reply inbox[LHI_INBOX_FRAMES];
};

#endif /* LONGHAUL_CLIENT_OBJECTS_H_ */
