/* lh_why(): why members of a group wait, as peerd and the coordinator see it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/sleep.h"
#include "proto/wire/ipc_why.h"

static void why_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  char text[LH_ERROR_TEXT_BYTES_MAX + 1];
  if (op->status != LH_OK || reply == NULL) return;
  snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, reply->u.text);
  op->text = lhi_copy_text(text);
}

static const struct lhi_op_type kWhy = {why_ended, NULL, NULL, NULL};

lh_status lh_why(lh_client* client, const char* run, uint32_t group, int64_t timeout_ms,
                 char* text_out, size_t bytes) {
  static const char kCall[] = "lh_why";
  struct lh_ipc_request request;
  struct lh_ipc_why why;
  lh_status status;
  lh_op* op;
  if (client == NULL) return lhi_refuse(kCall, "client is NULL");
  if (text_out == NULL || bytes == 0) return lhi_refuse(kCall, "there is no room for the text");
  text_out[0] = '\0';
  status = lhi_check_timeout(kCall, timeout_ms);
  if (status == LH_OK) status = lhi_check_name(kCall, "run", run);
  if (status == LH_OK) status = lhi_client_check(client, kCall);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, &kWhy, NULL);
  pthread_mutex_unlock(&client->mutex);
  if (op == NULL) return LH_UNAVAILABLE;
  request = lhi_request(LH_IPC_WHY, op);
  memset(&why, 0, sizeof why);
  why.group = group;
  memcpy(why.run, run, strlen(run));
  lh_ipc_put_why(&why, &request);
  lhi_send(client, &request, -1);
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, lhi_deadline_ns(timeout_ms))) {
    status = lhi_outcome_locked(op);
    if (status == LH_OK) snprintf(text_out, bytes, "%s", op->text != NULL ? op->text : "");
  } else {
    status =
        lhi_fail(LH_DEADLINE_EXCEEDED, "%s: peerd does not answer: it is stopped, or hangs", kCall);
  }
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  return status;
}
