#define _GNU_SOURCE
#include "client/src/replies.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/members.h"
#include "client/src/ops.h"
#include "client/src/shared.h"
#include "client/src/sleep.h"

void lhi_die_locked(lh_client* client, lh_status status, const char* text) {
  if (client->dead) return;
  client->dead = true;
  client->dead_status = status;
  client->dead_text = lhi_copy_text(text);
  /* Wakes up a reader that waits. The descriptor stays open until lh_close(). */
  shutdown(client->fd, SHUT_RDWR);
  for (size_t i = 0; i < LHI_TABLE_SIZE; ++i) {
    while (client->table[i] != NULL) lhi_op_end_locked(client->table[i], status, text, NULL);
  }
  lhi_announce_locked(client);
  lhi_wake_locked(client);
}

static const char kMalformed[] =
    "peerd sent a malformed list of members; install the same release of peerd and library";

static void on_done_locked(lh_client* client, struct lh_ipc_reply* reply) {
  lh_op* const op = lhi_op_find_locked(client, reply->call);
  if (op != NULL && op->collective && reply->status == LH_OK &&
      reply->u.op.size > LH_IPC_OP_MEMBERS_MAX + op->more_members_count) {
    lhi_die_locked(client, LH_INTERNAL, kMalformed);
    return;
  }
  if (op == NULL) {
    lhi_die_locked(
        client, LH_INTERNAL,
        "peerd answered a request that was not made; connection closed; report this bug");
    return;
  }
  lhi_op_end_locked(op, (lh_status)reply->status, reply->u.text, reply);
}

static void on_op_members_locked(lh_client* client, const struct lh_ipc_reply* reply) {
  lh_op* const op = lhi_op_find_locked(client, reply->call);
  const struct lh_ipc_members_page* const page = &reply->u.members;
  uint32_t known;
  uint64_t* ids;
  if (op == NULL || !op->collective || page->count > LH_IPC_MEMBERS_PAGE ||
      page->first != LH_IPC_OP_MEMBERS_MAX + op->more_members_count ||
      page->first + page->count > LH_MEMBERS_MAX) {
    lhi_die_locked(client, LH_INTERNAL, kMalformed);
    return;
  }
  known = op->more_members_count;
  ids = realloc(op->more_members, (known + page->count) * sizeof *ids);
  if (ids == NULL) {
    lhi_die_locked(client, LH_UNAVAILABLE, "out of memory");
    return;
  }
  memcpy(ids + known, page->member_ids, page->count * sizeof *ids);
  op->more_members = ids;
  op->more_members_count = known + page->count;
}

static void on_gone_locked(lh_client* client, struct lh_ipc_reply* reply) {
  const lh_status status = reply->status != LH_OK ? (lh_status)reply->status : LH_UNAVAILABLE;
  lh_comm* comm;
  if (reply->member == 0) {
    lhi_die_locked(client, status, reply->u.text);
    return;
  }
  comm = lhi_member_find_locked(client, reply->member);
  if (comm != NULL) lhi_member_gone_locked(comm, status, reply->u.text);
}

static void on_reply_locked(lh_client* client, struct lh_ipc_reply* reply) {
  lh_comm* comm;
  if (client->dead) return;
  if (reply->magic != LH_IPC_MAGIC) {
    lhi_die_locked(client, LH_INTERNAL,
                   "the program that answers on the socket is not a peerd; check the path");
    return;
  }
  if (reply->status < LH_OK || reply->status > LH_INTERNAL) {
    snprintf(reply->u.text, sizeof reply->u.text,
             "peerd sent the unknown status %d; install the same release of peerd and library",
             (int)reply->status);
    reply->status = LH_INTERNAL;
  }
  if (reply->status != LH_OK) reply->u.text[LH_ERROR_TEXT_BYTES_MAX] = '\0';
  switch (reply->type) {
    case LH_IPC_DONE:
      on_done_locked(client, reply);
      break;
    case LH_IPC_OP_MEMBERS:
      on_op_members_locked(client, reply);
      break;
    case LH_IPC_WORLD:
      comm = lhi_member_find_locked(client, reply->member);
      if (comm != NULL) comm->world = reply->world;
      break;
    case LH_IPC_GONE:
      on_gone_locked(client, reply);
      break;
    case LH_IPC_PROGRESS:
      comm = lhi_member_find_locked(client, reply->member);
      if (comm == NULL || comm->sync == NULL) break;
      comm->sync->progress = reply->u.progress;
      comm->sync->progress_told = false;
      lhi_wake_locked(client);
      break;
    case LH_IPC_LOOK: /* the queue is looked into with every reply */
      break;
    default:
      lhi_die_locked(
          client, LH_INTERNAL,
          "peerd sent a reply of unknown type; install the same release of peerd and library");
      break;
  }
}

/* Handles the replies of the queue that come before all further ones of the socket. */
static void dispatch_shared_locked(lh_client* client) {
  struct lh_ipc_reply* reply;
  while (!client->dead && (reply = lhi_shared_next(client)) != NULL) {
    on_reply_locked(client, reply);
    lhi_shared_pop(client);
  }
  if (lhi_shared_broken(client)) {
    lhi_die_locked(client, LH_INTERNAL,
                   "peerd says that it has put in more replies than there is room for; connection "
                   "closed; report this bug");
  }
}

/* Handles the replies that were read. `got` is what lhi_read_replies() returned. */
static void dispatch_locked(lh_client* client, ssize_t got) {
  const size_t frames = client->inbox_bytes / sizeof(struct lh_ipc_reply);
  const size_t rest = client->inbox_bytes % sizeof(struct lh_ipc_reply);
  if (frames > 0) lhi_shared_look(client, client->read + frames);
  dispatch_shared_locked(client);
  for (size_t i = 0; i < frames; ++i) {
    on_reply_locked(client, &client->inbox[i]);
    ++client->read;
    dispatch_shared_locked(client);
  }
  if (frames > 0) memmove(client->inbox, &client->inbox[frames], rest);
  client->inbox_bytes = rest;
  client->flush(client);
  if (got == 0) {
    lhi_die_locked(
        client, LH_UNAVAILABLE,
        "peerd closed the connection: it stopped or died; look at its log, then lh_open() again");
  } else if (got < 0 && got != -EAGAIN) {
    char text[128];
    snprintf(text, sizeof text,
             got == -ETIMEDOUT
                 ? "peerd reads no requests (%s); look at the log of peerd, then call "
                   "lh_open() again"
                 : "connection to peerd failed (%s); lh_open() again",
             strerror((int)-got));
    lhi_die_locked(client, LH_UNAVAILABLE, text);
  }
}

void lhi_pump_locked(lh_client* client) {
  ssize_t got = -lhi_write_kept(client);
  if (got < 0) dispatch_locked(client, got);
  for (got = 1; got > 0 && !client->reading && !client->dead;) {
    got = lhi_read_replies(client);
    dispatch_locked(client, got);
  }
}

void lhi_read_round_locked(lh_client* client, int64_t deadline_ns, bool poll_first) {
  ssize_t got;
  client->reading = true;
  pthread_mutex_unlock(&client->mutex);
  got = -lhi_write_kept(client);
  if (got == 0) got = lhi_await_replies(client, deadline_ns, poll_first);
  pthread_mutex_lock(&client->mutex);
  client->reading = false;
  dispatch_locked(client, got);
  if (!client->forgot) return;
  client->forgot = false;
  lhi_pump_locked(client);
}

/* Calls the caller's progress function. The mutex is released meanwhile. */
static void tell_progress_locked(lh_op* op) {
  const lh_progress progress = lhi_progress_locked(op);
  op->progress_told = true;
  if (op->on_progress == NULL) return;
  pthread_mutex_unlock(&op->client->mutex);
  op->on_progress(&progress, op->progress_context);
  pthread_mutex_lock(&op->client->mutex);
}

/* Returns whether the answer may come so soon that the thread should stay awake for it. A step and
 * a sync wait for the trainers of all members and for the coordinator. A thread that polls
 * meanwhile takes the processor from those that it waits for. */
static bool comes_soon(const lh_op* op) { return op->collective || op->comm == NULL; }

bool lhi_wait_any_locked(lh_client* client, lh_op* const* ops, uint32_t count, int64_t deadline_ns,
                         uint32_t* index_out) {
  bool ended = false;
  bool read = false;
  bool last = false;
  while (true) {
    lh_op* untold = NULL;
    lh_op* first = NULL; /* the first that is answered; its result may still have to be copied */
    bool open = false;
    bool soon = false;
    for (uint32_t i = 0; i < count && first == NULL; ++i) {
      if (ops[i]->state != LHI_OPEN) first = ops[i];
      if (first != NULL) *index_out = i;
      if (!ops[i]->progress_told) untold = ops[i];
      open = open || ops[i]->state == LHI_OPEN;
      soon = soon || comes_soon(ops[i]);
    }
    ended = first != NULL && first->state == LHI_ENDED;
    if (ended) break;
    if (untold != NULL) {
      tell_progress_locked(untold);
      continue;
    }
    if (first != NULL && first->state == LHI_ARRIVED) {
      lhi_op_collect_locked(first);
      continue;
    }
    if (first != NULL) { /* another thread copies its result */
      lhi_sleep_locked(client, LHI_NEVER);
      continue;
    }
    if (last) break;
    /* Read once more after the deadline, because a reply may have come in time. */
    last = deadline_ns != LHI_NEVER && lhi_now_ns() >= deadline_ns;
    if (open && !client->reading) {
      read = true;
      lhi_read_round_locked(client, deadline_ns, soon);
    } else if (!last) {
      lhi_sleep_locked(client, deadline_ns);
    }
  }
  /* Another waiting thread must become the reader. */
  if (read && client->sleepers > 0) lhi_wake_locked(client);
  return ended;
}

bool lhi_wait_locked(lh_op* op, int64_t deadline_ns) {
  uint32_t index;
  return lhi_wait_any_locked(op->client, &op, 1, deadline_ns, &index);
}
