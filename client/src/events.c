/* How a program learns that operations have ended without waiting for one of them: a descriptor for
 * event loops, a wait for several operations, and a call for a thread that copies results. */
#define _GNU_SOURCE
#include "client/src/events.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/objects.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/sleep.h"

/* ------------------------------------------------------------------ the descriptor */

static int watch(int epoll_fd, int fd, uint32_t events) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = events;
  event.data.fd = fd;
  return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/* Makes the descriptor: an epoll set with the socket, where replies arrive that nobody has read,
 * and an eventfd, which is set when a thread has read a reply that ended an operation. Of the
 * socket only arrivals count, not that something is there: another thread may be about to read it,
 * and the event loop must not turn until that thread runs. */
static lh_status make_event_fd_locked(lh_client* client) {
  const int event_fd = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC); /* something may have ended before */
  const int poll_fd = epoll_create1(EPOLL_CLOEXEC);
  if (event_fd >= 0 && poll_fd >= 0 && watch(poll_fd, event_fd, EPOLLIN) == 0 &&
      watch(poll_fd, client->fd, EPOLLIN | EPOLLET) == 0) {
    client->event_fd = event_fd;
    __atomic_store_n(&client->poll_fd, poll_fd, __ATOMIC_RELEASE);
    return LH_OK;
  }
  const int error = errno;
  if (event_fd >= 0) close(event_fd);
  if (poll_fd >= 0) close(poll_fd);
  return lhi_fail(LH_UNAVAILABLE, "lh_event_fd: the system gives no descriptor (%s)",
                  strerror(error));
}

lh_status lh_event_fd(lh_client* client, int* fd_out) {
  lh_status status;
  if (fd_out == NULL) return lhi_refuse("lh_event_fd", "fd_out is NULL");
  *fd_out = -1;
  if (client == NULL) return lhi_refuse("lh_event_fd", "client is NULL");
  status = lhi_process_check(client, "lh_event_fd");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  if (client->dead) {
    status = lhi_dead_locked(client);
  } else if (client->poll_fd < 0) {
    status = make_event_fd_locked(client);
  }
  if (status == LH_OK) *fd_out = client->poll_fd;
  pthread_mutex_unlock(&client->mutex);
  return status;
}

/* Makes the descriptor unreadable until something arrives or ends. */
static void forget_locked(const lh_client* client) {
  struct epoll_event seen[2];
  uint64_t count;
  if (client->poll_fd < 0) return;
  (void)epoll_wait(client->poll_fd, seen, 2, 0);
  (void)!read(client->event_fd, &count, sizeof count);
}

lh_status lh_event_take(lh_client* client) {
  uint64_t count;
  lh_status status;
  if (client == NULL) return lhi_refuse("lh_event_take", "client is NULL");
  status = lhi_process_check(client, "lh_event_take");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  /* Clear first: what ends from here on sets the descriptor again. */
  forget_locked(client);
  lhi_pump_locked(client);
  if (client->reading) client->forgot = true;
  /* Whoever looks after this call sees what has ended within the call. */
  if (client->event_fd >= 0) (void)!read(client->event_fd, &count, sizeof count);
  if (client->dead) status = lhi_dead_locked(client);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

/* ------------------------------------------------------------------ waiting for several */

lh_status lh_wait_any(lh_client* client, lh_op* const* ops, uint32_t count, int64_t timeout_ms,
                      uint32_t* index_out) {
  lh_status status;
  if (client == NULL) return lhi_refuse("lh_wait_any", "client is NULL");
  if (ops == NULL || count == 0) {
    return lhi_refuse("lh_wait_any", "there are no operations to wait for");
  }
  if (index_out == NULL) return lhi_refuse("lh_wait_any", "index_out is NULL");
  for (uint32_t i = 0; i < count; ++i) {
    if (ops[i] != NULL && ops[i]->client == client) continue;
    return lhi_refuse("lh_wait_any", "ops[%u] is %s", (unsigned)i,
                      ops[i] == NULL ? "NULL" : "of another client");
  }
  status = lhi_check_timeout("lh_wait_any", timeout_ms);
  if (status == LH_OK) status = lhi_process_check(client, "lh_wait_any");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client); /* several may have ended: the first of them counts */
  if (!lhi_wait_any_locked(client, ops, count, lhi_deadline_ns(timeout_ms), index_out)) {
    status =
        lhi_fail(LH_DEADLINE_EXCEEDED, "lh_wait_any: none of %u operations ended within %lld ms",
                 (unsigned)count, (long long)timeout_ms);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

/* ------------------------------------------------------------------ the helper thread */

lh_status lh_help(lh_client* client, int64_t timeout_ms) {
  int64_t deadline_ns;
  lh_status status;
  if (client == NULL) return lhi_refuse("lh_help", "client is NULL");
  status = lhi_check_timeout("lh_help", timeout_ms);
  if (status == LH_OK) status = lhi_process_check(client, "lh_help");
  if (status != LH_OK) return status;
  deadline_ns = lhi_deadline_ns(timeout_ms);
  pthread_mutex_lock(&client->mutex);
  ++client->helpers;
  while (!client->dead && (deadline_ns == LHI_NEVER || lhi_now_ns() < deadline_ns)) {
    lh_op* op = client->ops;
    while (op != NULL && op->state != LHI_ARRIVED) op = op->next;
    if (op != NULL) {
      lhi_op_collect_locked(op);
    } else if (!client->reading) {
      lhi_read_round_locked(client, deadline_ns, true);
    } else {
      lhi_sleep_locked(client, deadline_ns);
    }
  }
  status = client->dead
               ? lhi_dead_locked(client)
               : lhi_fail(LH_DEADLINE_EXCEEDED, "lh_help: %lld ms are over", (long long)timeout_ms);
  --client->helpers;
  lhi_wake_locked(client); /* lh_close() may wait, or another thread must become the reader */
  pthread_mutex_unlock(&client->mutex);
  return status;
}

void lhi_end_help(lh_client* client) {
  pthread_mutex_lock(&client->mutex);
  if (client->helpers > 0) {
    lhi_die_locked(client, LH_FAILED_PRECONDITION, "the client is being closed");
  }
  while (client->helpers > 0) lhi_sleep_locked(client, LHI_NEVER);
  pthread_mutex_unlock(&client->mutex);
}

void lhi_close_events(lh_client* client) {
  if (client->event_fd >= 0) close(client->event_fd);
  if (client->poll_fd >= 0) close(client->poll_fd);
}
