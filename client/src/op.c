#define _GNU_SOURCE
#include "client/src/op.h"

#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/memory.h"
#include "client/src/ops.h"
#include "client/src/queue.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/sleep.h"

lh_status lh_op_wait(lh_op* op, int64_t timeout_ms) {
  lh_client* client;
  lh_status status;
  if (op == NULL) return lhi_refuse("lh_op_wait", "op is NULL");
  client = op->client;
  status = lhi_check_timeout("lh_op_wait", timeout_ms);
  if (status == LH_OK) status = lhi_process_check(client, "lh_op_wait");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, lhi_deadline_ns(timeout_ms))) {
    status = lhi_outcome_locked(op);
  } else {
    status = lhi_fail(
        LH_DEADLINE_EXCEEDED,
        "lh_op_wait: no outcome within %lld ms; the operation goes on; call again to wait for it",
        (long long)timeout_ms);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

lh_status lh_op_test(lh_op* op, int* finished_out) {
  lh_client* client;
  lh_status status;
  if (op == NULL) return lhi_refuse("lh_op_test", "op is NULL");
  if (finished_out == NULL) return lhi_refuse("lh_op_test", "finished_out is NULL");
  client = op->client;
  status = lhi_process_check(client, "lh_op_test");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  if (op->state == LHI_OPEN) lhi_pump_locked(client);
  if (op->state == LHI_ARRIVED) (void)lhi_wait_locked(op, LHI_NEVER);
  *finished_out = op->state == LHI_ENDED;
  pthread_mutex_unlock(&client->mutex);
  return LH_OK;
}

lh_op_info_t lhi_op_info_locked(const lh_op* op) {
  lh_op_info_t info = LH_OP_INFO_INIT;
  if (op->state != LHI_ENDED) return info;
  info.staged = op->staged;
  if (op->status == LH_OK && op->collective) {
    info.world_size = op->reply.info.size;
    info.retries = op->reply.info.retries;
    info.epoch = op->reply.info.epoch;
    info.hosts = op->reply.info.hosts;
    info.blocks_not_finite = op->reply.info.blocks_not_finite;
    info.bytes_sent = op->reply.info.bytes_sent;
    info.bytes_received = op->reply.info.bytes_received;
    info.seconds = (double)op->reply.info.seconds_total_ns * 1e-9;
    info.seconds_wait = (double)op->reply.info.seconds_wait_ns * 1e-9;
    info.algorithm = (lh_algorithm)op->reply.info.algorithm;
    info.quantize = (lh_quantization)op->reply.info.quantization;
  }
  return info;
}

void lhi_op_members_locked(const lh_op* op, const lh_op_info_t* to, lh_op_info_t* info) {
  if (to->struct_size < offsetof(lh_op_info_t, zero2)) return;
  info->members = to->members;
  info->members_capacity = to->members_capacity;
  if (to->members == NULL) return;
  for (uint32_t i = 0; i < info->world_size && i < to->members_capacity; ++i) {
    to->members[i] = i < LH_IPC_OP_MEMBERS_MAX ? op->reply.info.member_ids[i]
                                               : op->more_members[i - LH_IPC_OP_MEMBERS_MAX];
  }
}

lh_status lh_op_info(lh_op* op, lh_op_info_t* info) {
  lh_op_info_t own;
  lh_status status;
  bool ended;
  if (op == NULL) return lhi_refuse("lh_op_info", "op is NULL");
  if (info == NULL) return lhi_refuse("lh_op_info", "info is NULL");
  status = lhi_check_struct("lh_op_info", "LH_OP_INFO_INIT", info, LHI_OP_INFO_FIRST_BYTES);
  if (status == LH_OK) status = lhi_process_check(op->client, "lh_op_info");
  if (status != LH_OK) return status;
  if (!op->collective) {
    return lhi_refuse("lh_op_info", "op is not a collective; use lh_sync_info() for a sync");
  }
  pthread_mutex_lock(&op->client->mutex);
  ended = op->state == LHI_ENDED;
  own = lhi_op_info_locked(op);
  lhi_op_members_locked(op, info, &own);
  pthread_mutex_unlock(&op->client->mutex);
  if (!ended) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "lh_op_info: there is no outcome yet; call lh_op_wait() first");
  }
  return lhi_give("lh_op_info", "LH_OP_INFO_INIT", &own, sizeof own, LHI_OP_INFO_FIRST_BYTES, info);
}

lh_status lh_op_cancel(lh_op* op) {
  struct lh_ipc_request request;
  lh_client* client;
  lh_status status;
  bool ask = false;
  if (op == NULL) return lhi_refuse("lh_op_cancel", "op is NULL");
  client = op->client;
  status = lhi_process_check(client, "lh_op_cancel");
  if (status != LH_OK) return status;
  if (!op->collective) {
    return lhi_refuse("lh_op_cancel", "op is not a collective");
  }
  memset(&request, 0, sizeof request);
  request.type = LH_IPC_CANCEL;
  pthread_mutex_lock(&client->mutex);
  if (op->state == LHI_OPEN) lhi_pump_locked(client);
  if (op->state == LHI_OPEN) {
    request.member = op->comm->handle;
    request.u.cancel.op = op->call;
    /* While the op waits for its turn, or a thread sends it, this request waits behind the op. */
    op->cancel = !op->sent || lhi_queue_sends_locked(op);
    ask = !op->cancel;
  }
  pthread_mutex_unlock(&client->mutex);
  if (ask && !lhi_tell(client, &request))
    return lhi_fail(LH_UNAVAILABLE, "lh_op_cancel: out of memory");
  return LH_OK;
}

void lh_op_free(lh_op* op) {
  lh_client* client;
  if (op == NULL || op->client->pid != getpid()) return;
  client = op->client;
  pthread_mutex_lock(&client->mutex);
  /* Another thread copies the result: the caller may free its memory only afterwards. */
  while (op->state == LHI_COLLECTING) lhi_sleep_locked(client, LHI_NEVER);
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  lhi_trim(client);
}
