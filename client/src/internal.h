/* What the units of the client library share. Nothing here is exported.
 *
 * One mutex per client guards the client, its communicators, operations and arena; it is never held
 * over a system call that may block, nor over a copy of a tensor. Requests are written under a
 * second one, so that frames do not mix.
 *
 * Replies are read by whoever waits: the first waiting thread becomes the reader (`reading`), takes
 * frames off the socket without the mutex, and hands every operation its outcome; the others sleep
 * until something ended or the reader left.
 */
#ifndef LONGHAUL_CLIENT_INTERNAL_H_
#define LONGHAUL_CLIENT_INTERNAL_H_

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
/* peerd answers what needs no other peer at once; beyond this it hangs. */
#define LHI_ANSWER_NS ((int64_t)30 * 1000 * 1000 * 1000)
#define LHI_NEVER INT64_MAX

enum lhi_op_kind {
  LHI_HELLO,
  LHI_REGION,
  LHI_UNREGION,
  LHI_MEMBERS,
  LHI_JOIN,
  LHI_LEAVE,
  LHI_STEP,
  LHI_ALL_REDUCE,
  LHI_STATE,
  LHI_UNSTATE,
  LHI_SYNC,
  LHI_KEPT,
  LHI_TAKE,
  LHI_PREPARE
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
  enum lhi_op_kind kind;
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
  uint64_t reply_revision;

  /* all-reduce */
  struct lhi_region *source_region, *target_region; /* pinned while open */
  uint8_t *source, *target;                         /* in the arena */
  size_t bytes;
  bool staged;
  void *staged_source, *staged_target; /* blocks of ours, NULL if the caller's memory is used */
  void *copy_to;                       /* where the staged result goes */

  /* sync, and step with one */
  lh_state *synced;  /* NULL once nothing of it is used any more */
  uint64_t of_state; /* number of the state that it is or was a sync of; 0: none */
  bool in_place;     /* as in lh_state */
  bool passed;       /* the boundary is behind the member, whatever becomes of the sync */
  bool torn;         /* once ended: that of its state */
  void (*on_progress)(const lh_progress *progress, void *context);
  void *progress_context;
  struct lh_ipc_progress progress;
  bool progress_told; /* to the caller */
};

/* One tensor of a state. */
struct lhi_tensor {
  uint8_t *data; /* in the arena */
  size_t bytes;
  bool staged;               /* the caller says that it is a copy */
  uint8_t *copy_of;          /* the caller's memory, if `data` is a copy of it; else NULL */
  struct lhi_region *region; /* pinned, of a tensor in place; else NULL */
  size_t first_chunk;        /* in lh_state.changed */
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
  uint32_t copied; /* tensors that are copies of ours */
  bool in_place;   /* some are no copies, of ours or of the caller */
  /* Its tensors hold a mixture, as far as is known here; meanwhile peerd knows of a state that is
   * held. */
  bool torn;
  size_t chunks;
  /* Blocks of the arena, each in a region that is pinned. */
  uint8_t *table; /* of struct lh_ipc_tensor; behind it, in one block: */
  uint8_t *touched;
  uint8_t *changed;
  uint8_t *copies; /* NULL: none */
  struct lhi_region *table_region;
  struct lhi_region *copies_region;
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
};

struct lh_client {
  pid_t pid;
  int fd;
  lh_client *next_client; /* of the process, for fork() */
  pthread_mutex_t send_mutex;

  pthread_mutex_t mutex; /* guards what follows */
  uint32_t wakes;        /* futex: rises when sleepers have to look again */
  uint32_t sleepers;
  bool reading;
  bool dead;
  lh_status dead_status;
  char *dead_text;
  bool hung_up; /* peerd ended the connection: it does nothing any more for this client */
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

/* ---- error.c */

/* Sets the thread's text and returns `status`. */
lh_status lhi_fail(lh_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Copies options or info structs across versions: `from` begins with its own size, at least
 * `first_bytes`; what this library does not know has to be zero. */
lh_status lhi_take(const char *call, const char *init, const void *from, size_t first_bytes,
                   void *to, size_t to_bytes);
/* The reverse: writes as much of `from` as the caller's struct holds, and leaves its struct_size.
 */
lh_status lhi_give(const char *call, const char *init, const void *from, size_t from_bytes,
                   size_t first_bytes, void *to);
lh_status lhi_check_timeout(const char *call, int64_t timeout_ms);
/* Of a run, a member, a cohort: `what` says which. */
lh_status lhi_check_name(const char *call, const char *what, const char *name);
int64_t lhi_now_ns(void);
/* LHI_NEVER for LH_FOREVER. */
int64_t lhi_deadline_ns(int64_t timeout_ms);
char *lhi_copy_text(const char *text); /* NULL when memory is short; cut to one reply's length */

/* ---- client.c. _locked: the client's mutex is held. */

/* LH_OK: this process may use the client, and its connection stands. */
lh_status lhi_client_check(lh_client *client, const char *call);
/* The same without asking for the connection. */
lh_status lhi_process_check(const lh_client *client, const char *call);
lh_status lhi_dead_locked(const lh_client *client);

/* An op that nobody else sees yet, held; NULL: out of memory (the text says so). */
lh_op *lhi_op_make(lh_client *client, enum lhi_op_kind kind, lh_comm *comm);
/* Gives it a call of its own and makes it known; it ends at once if the connection is dead. */
void lhi_op_open_locked(lh_op *op);
/* Both. */
lh_op *lhi_op_new_locked(lh_client *client, enum lhi_op_kind kind, lh_comm *comm);
/* Gives the handle up: frees the op now or at its end. */
void lhi_op_release_locked(lh_op *op);
/* Ends an op that is open, without an answer. */
void lhi_op_end_locked(lh_op *op, lh_status status, const char *text);
/* Releases what the op pinned or staged. */
void lhi_op_unpin_locked(lh_op *op);

struct lh_ipc_request lhi_request(uint32_t type, const lh_op *op);
/* Sends; `fd` goes along unless -1. On failure the connection is dead, and with it the op ended. */
void lhi_send(lh_client *client, const struct lh_ipc_request *request, int fd);

/* Waits until the op has ended (true) or the deadline passed; copies a staged result. */
bool lhi_wait_locked(lh_op *op, int64_t deadline_ns);
/* Takes what has arrived, without blocking. */
void lhi_pump_locked(lh_client *client);
/* Waits for an op that peerd answers at once, releases it, returns its status with text. */
lh_status lhi_call(lh_op *op, const char *call);

/* Sleeps until lhi_wake_locked() or the deadline; spurious returns. */
void lhi_sleep_locked(lh_client *client, int64_t deadline_ns);
void lhi_wake_locked(lh_client *client);

/* A block from the arena; adds a region when none has room. */
lh_status lhi_alloc(lh_client *client, const char *call, size_t bytes, void **data_out);
void lhi_give_back_locked(lh_client *client, void *data);
/* Removes empty regions beyond those kept. Not locked. */
void lhi_trim(lh_client *client);

/* ---- op.c */
/* The op's outcome as return value and text. Mutex held; the op has ended. */
lh_status lhi_outcome_locked(const lh_op *op);

/* ---- state.c */
/* Whether the block is used by a state. */
bool lhi_state_uses_locked(const lh_client *client, const uint8_t *data, size_t bytes);
/* Copies what came from others to where the caller has it. Without the mutex. */
void lhi_state_copy_back(const lh_state *state);
/* The sync has an answer of peerd, or will not get one: what is known of its tensors by that. */
void lhi_sync_ended_locked(lh_op *op, bool answered);
/* The sync does not use its state any more. `good`: the caller's tensors are what all hold. */
void lhi_sync_over_locked(lh_op *op, bool good);
/* Peerd fetches into the state. */
bool lhi_state_held_locked(const lh_state *state);
/* The communicator is gone. */
void lhi_state_forget_locked(lh_client *client, const lh_comm *comm);
/* What is known of a sync that has ended; keeps info->struct_size. */
void lhi_sync_info_locked(const lh_op *op, lh_sync_info_t *info);
void lhi_state_free_memory(lh_state *state);
/* What was heard last of a sync that fetches. */
lh_progress lhi_progress_locked(const lh_op *op);

/* ---- comm.c */
/* NULL and fork() checks of calls that take a communicator. */
lh_status lhi_check_comm(const lh_comm *comm, const char *call);
/* Asks peerd what it knows at once: `request` with its type and what is asked; the rest is put in.
 */
lh_status lhi_ask(const char *call, lh_comm *comm, enum lhi_op_kind kind,
                  const struct lh_ipc_request *request, union lhi_answer *answer);
/* Waits for a call of a member that goes on by itself; one that does not end in time is kept in
 * *parked. `info` is filled at the end if it is not NULL. */
lh_status lhi_finish(const char *call, lh_op *op, lh_op **parked, int64_t timeout_ms,
                     lh_sync_info_t *info);
/* LH_OK: an admitted member that can be used. */
lh_status lhi_member_check_locked(const lh_comm *comm, const char *call);
/* LH_OK: it is neither at a step boundary nor in a sync, and takes no state. */
lh_status lhi_free_check_locked(const lh_comm *comm, const char *call);
/* Forgets a take that was answered late, by "not yet": that is what its caller was told. */
void lhi_drop_take_locked(lh_comm *comm);
void lhi_comm_unuse_locked(lh_comm *comm);
void lhi_comm_free_memory(lh_comm *comm);

#endif /* LONGHAUL_CLIENT_INTERNAL_H_ */
