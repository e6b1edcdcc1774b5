#include "client/src/queue.h"

#include <stdlib.h>

#include "client/src/members.h"
#include "client/src/ops.h"
#include "proto/wire/limits.h"

/* Whether the order of such a request among the member's ops matters. */
static bool ordered(uint32_t type) {
  return type == LH_IPC_OP || type == LH_IPC_STEP || type == LH_IPC_SYNC || type == LH_IPC_LEAVE;
}

/* Whether peerd may get a request of this type now. */
static bool fits(const lh_comm* comm, uint32_t type) {
  return type != LH_IPC_OP || comm->ops_sent < LH_OPS_OPEN_MAX;
}

/* The request goes to peerd now. */
static void count_locked(lh_op* op, uint32_t type) {
  if (type != LH_IPC_OP || op->comm == NULL) return;
  op->sent = true;
  ++op->comm->ops_sent;
}

bool lhi_queue_full_locked(const lh_comm* comm) {
  return comm->queue_first != NULL || !fits(comm, LH_IPC_OP);
}

bool lhi_queue_put_locked(lh_client* client, const struct lh_ipc_request* request) {
  lh_comm* const comm = ordered(request->type) && request->member != 0
                            ? lhi_member_find_locked(client, request->member)
                            : NULL;
  lh_op* const op = lhi_op_find_locked(client, request->call);
  struct lhi_queued* queued;
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

static void pop_locked(lh_comm* comm) {
  struct lhi_queued* const first = comm->queue_first;
  comm->queue_first = first->next;
  --comm->client->queued;
  free(first);
}

lh_comm* lhi_queue_next_locked(lh_client* client) {
  for (lh_comm* comm = client->comms; comm != NULL; comm = comm->next) {
    while (comm->queue_first != NULL) {
      const struct lh_ipc_request* const request = &comm->queue_first->request;
      lh_op* const op = lhi_op_find_locked(client, request->call);
      if (op == NULL) { /* it has ended without peerd */
        pop_locked(comm);
        continue;
      }
      if (!fits(comm, request->type)) break;
      count_locked(op, request->type);
      lhi_member_use_locked(comm);
      return comm;
    }
  }
  return NULL;
}

void lhi_queue_sent_locked(lh_comm* comm) {
  pop_locked(comm);
  lhi_member_unuse_locked(comm);
}

bool lhi_queue_sends_locked(const lh_op* op) {
  const struct lhi_queued* const first = op->comm->queue_first;
  return op->sent && first != NULL && first->request.call == op->call;
}
