#define _GNU_SOURCE
#include "client/src/request.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/ops.h"
#include "client/src/queue.h"
#include "client/src/replies.h"
#include "client/src/sleep.h"

/* The interval at which lhi_send() looks whether the reader has read why peerd closed the
 * connection. */
#define LHI_LOOK_NS ((int64_t)20 * 1000 * 1000)

struct lh_ipc_request lhi_request(uint32_t type, const lh_op* op) {
  struct lh_ipc_request request;
  memset(&request, 0, sizeof request);
  request.magic = LH_IPC_MAGIC;
  request.type = type;
  request.call = op->call;
  return request;
}

struct lh_ipc_range lhi_range(const struct lhi_pin* pin, const uint8_t* data) {
  struct lh_ipc_range range;
  range.region = pin->region->id;
  range.offset = (uint64_t)(data - pin->region->base);
  return range;
}

static void send_now(lh_client* client, const struct lh_ipc_request* request, int fd) {
  const int error = lhi_write_request(client, request, fd);
  if (error == 0) return;
  pthread_mutex_lock(&client->mutex);
  /* peerd may have sent the reason before it closed the connection. Read that first. */
  if (error != ETIMEDOUT) {
    while (client->reading && !client->dead) lhi_sleep_locked(client, lhi_now_ns() + LHI_LOOK_NS);
    lhi_pump_locked(client);
  }
  if (!client->dead) {
    char text[128];
    snprintf(text, sizeof text,
             "peerd reads no requests (%s); look at the log of peerd, then call lh_open() again",
             strerror(error));
    lhi_die_locked(client, LH_UNAVAILABLE, text);
  }
  pthread_mutex_unlock(&client->mutex);
}

void lhi_send(lh_client* client, const struct lh_ipc_request* request, int fd) {
  bool waits;
  pthread_mutex_lock(&client->mutex);
  waits = lhi_queue_put_locked(client, request);
  pthread_mutex_unlock(&client->mutex);
  if (!waits) send_now(client, request, fd);
}

void lhi_flush_locked(lh_client* client) {
  lh_comm* comm;
  if (client->queued == 0 || client->flushing) return;
  client->flushing = true;
  while (!client->dead && (comm = lhi_queue_next_locked(client)) != NULL) {
    const struct lh_ipc_request request = comm->queue_first->request;
    const lh_op* op;
    pthread_mutex_unlock(&client->mutex);
    send_now(client, &request, -1);
    pthread_mutex_lock(&client->mutex);
    lhi_queue_sent_locked(comm);
    op = lhi_op_find_locked(client, request.call);
    if (op != NULL && op->cancel) {
      struct lh_ipc_request cancel;
      memset(&cancel, 0, sizeof cancel);
      cancel.type = LH_IPC_CANCEL;
      cancel.member = request.member;
      cancel.u.cancel.op = request.call;
      pthread_mutex_unlock(&client->mutex);
      (void)lhi_tell(client, &cancel); /* out of memory: the op goes on */
      pthread_mutex_lock(&client->mutex);
    }
  }
  client->flushing = false;
}

bool lhi_tell(lh_client* client, const struct lh_ipc_request* request) {
  struct lh_ipc_request asked;
  bool send = false;
  bool made;
  lh_op* op;
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, &lhi_question, NULL);
  made = op != NULL;
  if (made) {
    asked = lhi_request(request->type, op);
    asked.member = request->member;
    asked.u = request->u;
    send = op->state == LHI_OPEN;
    lhi_op_release_locked(op);
  }
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &asked, -1);
  return made;
}

int64_t lhi_answer_deadline_ns(const lh_client* client) { return lhi_now_ns() + client->answer_ns; }

lh_status lhi_call(lh_op* op, const char* call, int64_t deadline_ns, union lhi_answer* answer) {
  lh_client* const client = op->client;
  lh_status status;
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, deadline_ns)) {
    status = lhi_outcome_locked(op);
    if (status == LH_OK && answer != NULL) *answer = op->reply;
  } else {
    status = lhi_fail(LH_UNAVAILABLE,
                      "%s: peerd has not answered for %lld s: it is stopped or hangs; look at the "
                      "log of peerd, then call again",
                      call, (long long)(client->answer_ns / 1000000000));
  }
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  return status;
}
