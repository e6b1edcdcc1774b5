/* The objects of the client library, which its modules share. Nothing here is exported.
 *
 * One mutex per client guards the client, its communicators, operations, states and arena. It is
 * never held over a system call that may block, nor over a copy of a tensor. Functions that end in
 * _locked are called with it.
 *
 * A module uses those above it in this list, and no others:
 *   error, arena, copy, objects
 *   sleep         threads that wait for a change of a client
 *   connection    the socket to peerd
 *   members       the members that this client has
 *   ops           operations: what peerd is asked, from the question to the outcome
 *   replies       what peerd says: who reads it, and who is told
 *   request       asking peerd
 *   uses          whether an operation and a state use the same memory of the caller
 *   memory        the arena, with peerd
 *   op, comm
 *   all_reduce, state
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

/* What is particular to an operation. All functions but `collect` are called with the mutex held;
 * each may be NULL. */
struct lhi_op_type {
  /* It has an outcome, in op->status, which this may change. `reply` is what peerd answered; NULL:
   * peerd did not answer. op->comm is still set. */
  void (*ended)(lh_op *op, const struct lh_ipc_reply *reply);
  /* Whether something has to be copied out of the arena now. */
  bool (*arrived)(const lh_op *op);
  /* Copies it, without the mutex. */
  void (*collect)(lh_op *op);
  /* The op does not use the caller's memory and the arena any more. `good`: it ended well, and the
   * caller has all of the result. */
  void (*over)(lh_op *op, bool good);
};

enum lhi_op_state {
  LHI_OPEN,       /* no answer yet */
  LHI_ARRIVED,    /* answered; the staged result waits to be copied to the target */
  LHI_COLLECTING, /* a thread copies */
  LHI_ENDED
};

struct lh_op {
  lh_client *client;
  lh_comm *comm; /* counted in comm->users while the op is open; else NULL */
  const struct lhi_op_type *type;
  enum lhi_op_state state;
  bool held; /* somebody has the handle: it is freed by lh_op_free(), else with its end */
  uint64_t call;
  struct lh_op *table_next;      /* in client->table while open */
  struct lh_op *previous, *next; /* in client->ops until freed */

  lh_status status; /* once ended */
  char *text;       /* NULL: none */
  union lhi_answer {
    struct lh_ipc_op_info info;
    struct lh_ipc_members_page members;
    struct lh_ipc_sync_info sync;
    struct lh_ipc_kept kept;
  } reply;
  uint32_t reply_flags;

  /* all-reduce */
  bool reduces;
  uint64_t tag;
  const void *from; /* the caller's memory, wherever it is */
  void *to;
  struct lhi_pin source_pin, target_pin; /* while they are used */
  uint8_t *source, *target;              /* in the arena */
  size_t bytes;
  bool staged;
  void *staged_source, *staged_target; /* blocks of ours, NULL if the caller's memory is used */
  void *copy_to;                       /* where the staged result goes */

  /* sync, and step with one */
  lh_state *synced;  /* NULL once nothing of it is used any more */
  uint64_t of_state; /* number of the state that it is or was a sync of; 0: none */
  bool passed;       /* the boundary is behind the member, whatever becomes of the sync */
  void (*on_progress)(const lh_progress *progress, void *context);
  void *progress_context;
  struct lh_ipc_progress progress;
  bool progress_told; /* to the caller */
};

/* One tensor of a state. */
struct lhi_tensor {
  uint8_t *data;  /* in the arena: what peerd reads */
  uint8_t *inbox; /* where peerd puts what it fetches: `data` where that is a copy */
  uint8_t *own;   /* where the caller has it: other than `data` if that is our copy */
  bool staged;    /* `data` is the caller's copy: made anew, and looked at, by the caller */
  size_t bytes;
  struct lhi_pin pin; /* of `data`, if that is no copy of ours */
  size_t first_chunk; /* in lh_state.changed */
};

struct lh_state {
  lh_client *client;
  lh_state *previous, *next; /* in client->states */
  uint64_t id;               /* at peerd */
  lh_op *op;                 /* the sync that uses it, or NULL */
  bool starting;             /* a call copies tensors for a sync */
  lh_comm *holder;           /* in the background: peerd fetches into it for this member, or NULL */
  uint32_t count;
  struct lhi_tensor *tensors;
  size_t chunks;
  /* Blocks of the arena, pinned. */
  uint8_t *table; /* of struct lh_ipc_tensor; behind it, in one block: */
  uint8_t *touched;
  uint8_t *changed;
  uint8_t *copies; /* NULL: none */
  uint8_t *inbox;  /* of tensors that are no copies; NULL: none */
  size_t inbox_bytes;
  bool fetched; /* chunks may have come since the inbox was given back */
  struct lhi_pin table_pin;
  struct lhi_pin copies_pin;
  struct lhi_pin inbox_pin;
};

struct lh_comm {
  lh_client *client;
  lh_comm *previous, *next;
  bool held;      /* the caller has the handle */
  uint32_t users; /* ops that refer to it */
  uint64_t join_call;
  uint64_t handle;      /* at peerd; 0 before admission */
  lh_on_fault on_fault; /* of ops that do not say */
  bool admitted;
  bool leaving; /* a LEAVE was sent */
  bool left;
  bool stepping;  /* a STEP is open */
  bool at_join;   /* stands at the boundary that admitted it, and has done nothing since */
  lh_status gone; /* not LH_OK: removed, or never admitted */
  char *gone_text;
  struct lh_ipc_world world;
  /* Begun by a call whose time ran out: the next such call goes on waiting for it. */
  lh_op *parked_step;
  lh_op *parked_leave;
  lh_op *parked_sync;
  lh_op *parked_take;
  lh_op *sync; /* open: a sync, or a step with one */
  /* Called before its memory goes, if a state was fetched into for it. */
  void (*on_free)(lh_comm *comm);
};

struct lh_client {
  pid_t pid;
  int fd;
  int64_t answer_ns; /* peerd answers in this time what needs no other peer; beyond it, it hangs */
  lh_client *next_client; /* of the process, for fork() */
  pthread_mutex_t send_mutex;

  pthread_mutex_t mutex; /* guards what follows */
  uint32_t wakes;        /* futex: rises when sleepers have to look again */
  uint32_t sleepers;
  bool reading;
  bool dead;
  lh_status dead_status;
  char *dead_text;
  uint64_t next_call;
  uint64_t next_region;
  lh_op *table[LHI_TABLE_SIZE];
  lh_op *ops;
  lh_comm *comms;
  lh_state *states;
  uint64_t next_state;
  struct lhi_arena arena;
  size_t inbox_bytes;                          /* the reader's */
  struct lh_ipc_reply inbox[LHI_INBOX_FRAMES]; /* the reader's */
};

#endif /* LONGHAUL_CLIENT_OBJECTS_H_ */
