#include "client/src/queue.h"

#include <stdlib.h>

#include "client/src/members.h"
#include "client/src/ops.h"
#include "client/src/request.h"
#include "proto/wire/limits.h"

struct lhi_queued {
  struct lhi_queued *next;
  struct lh_ipc_request request;
};

/* Whether the order of such a request among the member's ops matters. */
static bool ordered(uint32_t type) {
  return type == LH_IPC_OP || type == LH_IPC_STEP || type == LH_IPC_SYNC || type == LH_IPC_LEAVE;
}

/* Whether peerd may get a request of this type now. */
static bool fits(const lh_comm *comm, uint32_t type) {
  return type != LH_IPC_OP || comm->ops_sent < LH_OPS_OPEN_MAX;
}

/* The request goes to peerd now. */
static void count_locked(lh_op *op, uint32_t type) {
  if (type != LH_IPC_OP || op->comm == NULL) return;
  op->sent = true;
  ++op->comm->ops_sent;
}

bool lhi_queue_full_locked(const lh_comm *comm) {
  return comm->queue_first != NULL || !fits(comm, LH_IPC_OP);
}

bool lhi_queue_put_locked(lh_client *client, const struct lh_ipc_request *request) {
  lh_comm *const comm = ordered(request->type) && request->member != 0
                            ? lhi_member_find_locked(client, request->member)
                            : NULL;
  lh_op *const op = lhi_op_find_locked(client, request->call);
  struct lhi_queued *queued;
  if (comm == NULL || op == NULL) return false;
  if (comm->queue_first == NULL && fits(comm, request->type)) {
    count_locked(op, request->type);
    return false;
  }
  queued = malloc(sizeof *queued);
  if (queued == NULL) {
    lhi_op_end_locked(op, LH_UNAVAILABLE, "out of memory", NULL);
    return true;
  }
  queued->next = NULL;
  queued->request = *request;
  if (comm->queue_first == NULL) {
    comm->queue_first = queued;
  } else {
    comm->queue_last->next = queued;
  }
  comm->queue_last = queued;
  ++client->queued;
  return true;
}

static void pop_locked(lh_comm *comm) {
  struct lhi_queued *const first = comm->queue_first;
  comm->queue_first = first->next;
  --comm->client->queued;
  free(first);
}

/* Sends what may be sent for one member. An entry stays in the queue until it is sent, so that no
 * later request overtakes it. Returns whether it has sent something. */
static bool flush_member_locked(lh_comm *comm) {
  lh_client *const client = comm->client;
  bool sent = false;
  while (!client->dead && comm->queue_first != NULL &&
         fits(comm, comm->queue_first->request.type)) {
    const struct lh_ipc_request request = comm->queue_first->request;
    lh_op *const op = lhi_op_find_locked(client, request.call);
    if (op != NULL) {
      count_locked(op, request.type);
      pthread_mutex_unlock(&client->mutex);
      lhi_send_now(client, &request, -1);
      pthread_mutex_lock(&client->mutex);
      sent = true;
    }
    pop_locked(comm);
  }
  return sent;
}

void lhi_queue_flush_locked(lh_client *client) {
  bool sent = true;
  if (client->queued == 0 || client->flushing) return;
  client->flushing = true;
  while (sent && !client->dead) {
    sent = false;
    for (lh_comm *comm = client->comms, *next; comm != NULL && !sent; comm = next) {
      next = comm->next;
      if (comm->queue_first == NULL) continue;
      /* If something is sent, the mutex is released meanwhile, and the list may change. Then begin
       * anew. */
      lhi_member_use_locked(comm);
      sent = flush_member_locked(comm);
      lhi_member_unuse_locked(comm);
    }
  }
  client->flushing = false;
}

void lhi_queue_clear(lh_comm *comm) {
  while (comm->queue_first != NULL) {
    struct lhi_queued *const first = comm->queue_first;
    comm->queue_first = first->next;
    free(first);
  }
}
