#include "client/src/ops.h"

#include <stdlib.h>
#include <unistd.h>

#include "client/src/error.h"
#include "client/src/members.h"
#include "client/src/sleep.h"
#include "client/src/tensors.h"

const struct lhi_op_type lhi_question = {NULL, NULL, NULL, NULL};

lh_op* lhi_op_make(lh_client* client, const struct lhi_op_type* type, lh_comm* comm) {
  lh_op* const op = calloc(1, sizeof *op);
  if (op == NULL) {
    lhi_fail(LH_UNAVAILABLE, "out of memory");
    return NULL;
  }
  op->client = client;
  op->type = type;
  op->comm = comm;
  op->held = true;
  op->progress_told = true;
  return op;
}

void lhi_op_open_locked(lh_op* op) {
  lh_client* const client = op->client;
  lh_op** bucket;
  if (op->comm != NULL) lhi_member_use_locked(op->comm);
  op->call = client->next_call++;
  op->next = client->ops;
  if (client->ops != NULL) client->ops->previous = op;
  client->ops = op;
  bucket = &client->table[op->call % LHI_TABLE_SIZE];
  op->table_next = *bucket;
  *bucket = op;
  if (client->dead) {
    lhi_op_end_locked(op, client->dead_status,
                      client->dead_text != NULL ? client->dead_text : "connection to peerd lost",
                      NULL);
  }
}

lh_op* lhi_op_new_locked(lh_client* client, const struct lhi_op_type* type, lh_comm* comm) {
  lh_op* const op = lhi_op_make(client, type, comm);
  if (op != NULL) lhi_op_open_locked(op);
  return op;
}

static void op_free_locked(lh_op* op) {
  if (op->previous != NULL) {
    op->previous->next = op->next;
  } else {
    op->client->ops = op->next;
  }
  if (op->next != NULL) op->next->previous = op->previous;
  free(op->more_members);
  lhi_tensors_free(&op->tensors);
  free(op->text);
  free(op);
}

void lhi_announce_locked(const lh_client* client) {
  const uint64_t one = 1;
  if (client->event_fd >= 0) (void)!write(client->event_fd, &one, sizeof one);
}

static void over_locked(lh_op* op, bool good) {
  op->state = LHI_ENDED;
  if (op->type->over != NULL) op->type->over(op, good);
}

void lhi_op_release_locked(lh_op* op) {
  op->held = false;
  /* Without a handle no call can copy the result. */
  if (op->state == LHI_ARRIVED) over_locked(op, false);
  if (op->state == LHI_ENDED) op_free_locked(op);
}

lh_op* lhi_op_find_locked(const lh_client* client, uint64_t call) {
  lh_op* op = client->table[call % LHI_TABLE_SIZE];
  while (op != NULL && op->call != call) op = op->table_next;
  return op;
}

static void untable_locked(const lh_op* op) {
  lh_op** link = &op->client->table[op->call % LHI_TABLE_SIZE];
  while (*link != op) link = &(*link)->table_next;
  *link = op->table_next;
}

void lhi_op_end_locked(lh_op* op, lh_status status, const char* text,
                       const struct lh_ipc_reply* reply) {
  const struct lhi_op_type* const type = op->type;
  lh_comm* const comm = op->comm;
  const bool held = op->held;
  bool arrived;
  untable_locked(op);
  op->status = status;
  if (status != LH_OK) op->text = lhi_copy_text(text);
  if (type->ended != NULL) type->ended(op, reply);
  if (op->sent && comm != NULL) --comm->ops_sent;
  op->comm = NULL;
  arrived = type->arrived != NULL && type->arrived(op);
  if (held && arrived) {
    op->state = LHI_ARRIVED;
  } else {
    over_locked(op, op->status == LH_OK && !arrived);
  }
  lhi_announce_locked(op->client);
  lhi_wake_locked(op->client);
  if (!held) op_free_locked(op);
  if (comm != NULL) lhi_member_unuse_locked(comm);
}

void lhi_op_collect_locked(lh_op* op) {
  op->state = LHI_COLLECTING;
  pthread_mutex_unlock(&op->client->mutex);
  op->type->collect(op);
  pthread_mutex_lock(&op->client->mutex);
  over_locked(op, op->status == LH_OK);
  lhi_announce_locked(op->client);
  lhi_wake_locked(op->client);
}

lh_status lhi_outcome_locked(const lh_op* op) {
  if (op->status == LH_OK) return LH_OK;
  return lhi_fail(op->status, "%s", op->text != NULL ? op->text : lh_strerror(op->status));
}

lh_progress lhi_progress_locked(const lh_op* op) {
  lh_progress progress = LH_PROGRESS_INIT;
  progress.sources = op->progress.sources;
  progress.bytes_done = op->progress.bytes_done;
  progress.bytes_total = op->progress.bytes_total;
  progress.bytes_per_second = op->progress.bytes_per_second;
  return progress;
}
