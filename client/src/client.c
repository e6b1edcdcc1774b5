/* The connection to peerd: requests out, replies in, and who reads them. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "client/src/copy.h"
#include "client/src/internal.h"

#define LHI_DEFAULT_SOCKET "/run/longhaul/peerd.sock"
#define LHI_GREET_NS ((int64_t)2 * 1000 * 1000 * 1000)
#define LHI_SPIN_NS ((int64_t)300 * 1000)
#define LHI_CONNECT_RETRY_NS ((int64_t)20 * 1000 * 1000)
#define LHI_PATH_BYTES_MAX (sizeof(((struct sockaddr_un *)0)->sun_path) - 1)

typedef char lhi_request_is_256_bytes[sizeof(struct lh_ipc_request) == 256 ? 1 : -1];
typedef char lhi_tensor_is_360_bytes[sizeof(struct lh_ipc_tensor) == 360 ? 1 : -1];
typedef char lhi_reply_is_528_bytes[sizeof(struct lh_ipc_reply) == 528 ? 1 : -1];

/* ------------------------------------------------------------------ clients and fork() */

/* A child of fork() must not keep the connection open: peerd would take the trainer for alive as
 * long as a data loader it forked lives. */
static pthread_mutex_t clients_mutex = PTHREAD_MUTEX_INITIALIZER;
static lh_client *clients;
static bool fork_handled;

static void before_fork(void) { pthread_mutex_lock(&clients_mutex); }
static void in_parent(void) { pthread_mutex_unlock(&clients_mutex); }
static void in_child(void) {
  for (lh_client *client = clients; client != NULL; client = client->next_client) {
    if (client->fd >= 0) close(client->fd);
    client->fd = -1;
  }
  clients = NULL;
  pthread_mutex_unlock(&clients_mutex);
}

static void enlist(lh_client *client) {
  pthread_mutex_lock(&clients_mutex);
  if (!fork_handled) fork_handled = pthread_atfork(before_fork, in_parent, in_child) == 0;
  client->next_client = clients;
  clients = client;
  pthread_mutex_unlock(&clients_mutex);
}

static void delist(const lh_client *client) {
  lh_client **link = &clients;
  pthread_mutex_lock(&clients_mutex);
  while (*link != NULL && *link != client) link = &(*link)->next_client;
  if (*link != NULL) *link = client->next_client;
  pthread_mutex_unlock(&clients_mutex);
}

lh_status lhi_process_check(const lh_client *client, const char *call) {
  if (client->pid == getpid()) return LH_OK;
  return lhi_fail(LH_FAILED_PRECONDITION,
                  "%s: the client belongs to process %ld, which forked this one; open a client of "
                  "this process with lh_open()",
                  call, (long)client->pid);
}

lh_status lhi_dead_locked(const lh_client *client) {
  return lhi_fail(client->dead_status, "%s",
                  client->dead_text != NULL ? client->dead_text : "connection to peerd lost");
}

lh_status lhi_client_check(lh_client *client, const char *call) {
  lh_status status = lhi_process_check(client, call);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  if (client->dead) status = lhi_dead_locked(client);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

/* ------------------------------------------------------------------ sleeping */

void lhi_sleep_locked(lh_client *client, int64_t deadline_ns) {
  const uint32_t seen = client->wakes;
  struct timespec left;
  struct timespec *timeout = NULL;
  if (deadline_ns != LHI_NEVER) {
    int64_t ns = deadline_ns - lhi_now_ns();
    if (ns < 0) ns = 0;
    left.tv_sec = (time_t)(ns / 1000000000);
    left.tv_nsec = (long)(ns % 1000000000);
    timeout = &left;
  }
  ++client->sleepers;
  pthread_mutex_unlock(&client->mutex);
  /* Not a condition variable: with the monotonic clock it would need a newer C library. */
  syscall(SYS_futex, &client->wakes, FUTEX_WAIT_PRIVATE, seen, timeout, NULL, 0);
  pthread_mutex_lock(&client->mutex);
  --client->sleepers;
}

void lhi_wake_locked(lh_client *client) {
  __atomic_add_fetch(&client->wakes, 1, __ATOMIC_SEQ_CST);
  if (client->sleepers > 0) {
    syscall(SYS_futex, &client->wakes, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
  }
}

/* ------------------------------------------------------------------ ops */

lh_op *lhi_op_make(lh_client *client, enum lhi_op_kind kind, lh_comm *comm) {
  lh_op *const op = calloc(1, sizeof *op);
  if (op == NULL) {
    lhi_fail(LH_UNAVAILABLE, "out of memory");
    return NULL;
  }
  op->client = client;
  op->kind = kind;
  op->comm = comm;
  op->held = true;
  op->progress_told = true;
  return op;
}

void lhi_op_open_locked(lh_op *op) {
  lh_client *const client = op->client;
  lh_op **bucket;
  if (op->comm != NULL) ++op->comm->users;
  op->call = client->next_call++;
  op->next = client->ops;
  if (client->ops != NULL) client->ops->previous = op;
  client->ops = op;
  bucket = &client->table[op->call % LHI_TABLE_SIZE];
  op->table_next = *bucket;
  *bucket = op;
  if (client->dead) {
    lhi_op_end_locked(op, client->dead_status,
                      client->dead_text != NULL ? client->dead_text : "connection to peerd lost");
  }
}

lh_op *lhi_op_new_locked(lh_client *client, enum lhi_op_kind kind, lh_comm *comm) {
  lh_op *const op = lhi_op_make(client, kind, comm);
  if (op != NULL) lhi_op_open_locked(op);
  return op;
}

static void op_free_locked(lh_op *op) {
  if (op->previous != NULL) {
    op->previous->next = op->next;
  } else {
    op->client->ops = op->next;
  }
  if (op->next != NULL) op->next->previous = op->previous;
  free(op->text);
  free(op);
}

void lhi_op_release_locked(lh_op *op) {
  op->held = false;
  if (op->state == LHI_ARRIVED) {
    /* Nobody collects it any more. */
    op->state = LHI_ENDED;
    lhi_op_unpin_locked(op);
    lhi_sync_over_locked(op, false);
  }
  if (op->state == LHI_ENDED) op_free_locked(op);
}

static void unstage_locked(lh_op *op, void **block) {
  if (*block == NULL) return;
  lhi_arena_unstage(&op->client->arena, op->bytes);
  lhi_give_back_locked(op->client, *block);
  *block = NULL;
}

void lhi_op_unpin_locked(lh_op *op) {
  if (op->source_region != NULL) --op->source_region->pins;
  if (op->target_region != NULL) --op->target_region->pins;
  op->source_region = NULL;
  op->target_region = NULL;
  unstage_locked(op, &op->staged_source);
  unstage_locked(op, &op->staged_target);
}

static void untable_locked(const lh_op *op) {
  lh_op **link = &op->client->table[op->call % LHI_TABLE_SIZE];
  while (*link != op) link = &(*link)->table_next;
  *link = op->table_next;
}

/* What an outcome means for the communicator. */
static void tell_comm_locked(lh_op *op, const struct lh_ipc_reply *reply) {
  lh_comm *const comm = op->comm;
  const bool ok = op->status == LH_OK;
  if (comm->sync == op) comm->sync = NULL;
  switch (op->kind) {
    case LHI_JOIN:
      if (ok) {
        comm->handle = reply->member;
        comm->admitted = true;
        comm->at_join = true;
        comm->world = reply->world;
      } else if (comm->gone == LH_OK) {
        comm->gone = op->status;
        comm->gone_text = op->text != NULL ? lhi_copy_text(op->text) : NULL;
      }
      break;
    case LHI_STEP:
      comm->stepping = false;
      if (reply != NULL && (reply->flags & LH_IPC_PASSED) != 0) comm->world = reply->world;
      break;
    case LHI_LEAVE:
      /* A member that was removed meanwhile is out all the same. */
      if (comm->gone != LH_OK) op->status = LH_OK;
      comm->leaving = false;
      comm->left = op->status == LH_OK;
      break;
    default:
      break;
  }
}

/* Whether something has to be copied out of the arena. After a sync that failed: what fits to
 * tensors in place that have changed. */
static bool to_be_collected(const lh_op *op) {
  if (op->synced != NULL && op->synced->copied > 0) {
    if (op->status != LH_OK) return op->in_place && (op->reply_flags & LH_IPC_REPLACED) != 0;
    return op->reply.sync.bytes > 0 || (op->reply_flags & LH_IPC_RESUMED) != 0;
  }
  return op->status == LH_OK && op->copy_to != NULL;
}

/* `reply` is NULL when peerd did not answer. */
static void op_end_locked(lh_op *op, lh_status status, const char *text,
                          const struct lh_ipc_reply *reply) {
  lh_comm *const comm = op->comm;
  untable_locked(op);
  op->status = status;
  if (status != LH_OK) op->text = lhi_copy_text(text);
  if (op->of_state != 0) lhi_sync_ended_locked(op, reply != NULL);
  if (comm != NULL) {
    tell_comm_locked(op, reply);
    op->comm = NULL;
  }
  if (op->held && to_be_collected(op)) {
    op->state = LHI_ARRIVED;
    if (op->source_region != NULL) --op->source_region->pins;
    op->source_region = NULL;
  } else {
    op->state = LHI_ENDED;
    lhi_op_unpin_locked(op);
    lhi_sync_over_locked(op, op->status == LH_OK && !to_be_collected(op));
  }
  lhi_wake_locked(op->client);
  if (!op->held) op_free_locked(op);
  if (comm != NULL) lhi_comm_unuse_locked(comm);
}

void lhi_op_end_locked(lh_op *op, lh_status status, const char *text) {
  op_end_locked(op, status, text, NULL);
}

static void die_locked(lh_client *client, lh_status status, const char *text) {
  if (client->dead) return;
  client->dead = true;
  client->dead_status = status;
  client->dead_text = lhi_copy_text(text);
  /* Ends the wait of a reader; the descriptor itself stays until lh_close(). */
  shutdown(client->fd, SHUT_RDWR);
  for (size_t i = 0; i < LHI_TABLE_SIZE; ++i) {
    while (client->table[i] != NULL) lhi_op_end_locked(client->table[i], status, text);
  }
  lhi_wake_locked(client);
}

/* ------------------------------------------------------------------ replies */

static lh_comm *find_comm_locked(lh_client *client, uint64_t handle) {
  lh_comm *comm = client->comms;
  while (comm != NULL && (!comm->admitted || comm->handle != handle)) comm = comm->next;
  return comm;
}

static void on_done_locked(lh_client *client, struct lh_ipc_reply *reply) {
  lh_op *op = client->table[reply->call % LHI_TABLE_SIZE];
  if (reply->status < LH_OK || reply->status > LH_INTERNAL) reply->status = LH_INTERNAL;
  while (op != NULL && op->call != reply->call) op = op->table_next;
  if (op == NULL) {
    die_locked(client, LH_INTERNAL, "peerd answered a call that was not asked; connection closed");
    return;
  }
  op->reply_flags = reply->flags;
  op->reply_revision = reply->revision;
  if (reply->status != LH_OK) {
    op_end_locked(op, (lh_status)reply->status, reply->u.text, reply);
    return;
  }
  if (op->kind == LHI_ALL_REDUCE) op->reply.info = reply->u.op;
  if (op->kind == LHI_MEMBERS) op->reply.members = reply->u.members;
  if (op->kind == LHI_KEPT) op->reply.kept = reply->u.kept;
  if (op->synced != NULL) op->reply.sync = reply->u.sync;
  op_end_locked(op, LH_OK, NULL, reply);
}

static void on_gone_locked(lh_client *client, struct lh_ipc_reply *reply) {
  const lh_status status = reply->status != LH_OK ? (lh_status)reply->status : LH_UNAVAILABLE;
  lh_comm *comm;
  if (reply->member == 0) {
    client->hung_up = true;
    die_locked(client, status, reply->u.text);
    return;
  }
  comm = find_comm_locked(client, reply->member);
  if (comm == NULL || comm->gone != LH_OK) return;
  comm->gone = status;
  comm->gone_text = lhi_copy_text(reply->u.text);
}

static void on_reply_locked(lh_client *client, struct lh_ipc_reply *reply) {
  lh_comm *comm;
  if (client->dead) return;
  if (reply->magic != LH_IPC_MAGIC) {
    die_locked(client, LH_INTERNAL, "what answers on the socket is no peerd; check the path");
    return;
  }
  reply->u.text[LH_ERROR_TEXT_BYTES_MAX] = '\0';
  switch (reply->type) {
    case LH_IPC_DONE:
      on_done_locked(client, reply);
      break;
    case LH_IPC_WORLD:
      comm = find_comm_locked(client, reply->member);
      if (comm != NULL) comm->world = reply->world;
      break;
    case LH_IPC_GONE:
      on_gone_locked(client, reply);
      break;
    case LH_IPC_PROGRESS:
      comm = find_comm_locked(client, reply->member);
      if (comm == NULL || comm->sync == NULL) break;
      comm->sync->progress = reply->u.progress;
      comm->sync->progress_told = false;
      lhi_wake_locked(client);
      break;
    default:
      die_locked(client, LH_INTERNAL,
                 "peerd sent a reply of unknown type; install matching releases");
      break;
  }
}

/* Reads once, without blocking. The reader's, without the mutex. Bytes, 0 at the end, or -errno. */
static ssize_t read_inbox(lh_client *client) {
  ssize_t got;
  do {
    got = recv(client->fd, (char *)client->inbox + client->inbox_bytes,
               sizeof client->inbox - client->inbox_bytes, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return -errno;
  client->inbox_bytes += (size_t)got;
  return got;
}

/* Hands out what was read. `got` is what read_inbox() returned. */
static void dispatch_locked(lh_client *client, ssize_t got) {
  const size_t frames = client->inbox_bytes / sizeof(struct lh_ipc_reply);
  const size_t rest = client->inbox_bytes % sizeof(struct lh_ipc_reply);
  for (size_t i = 0; i < frames; ++i) on_reply_locked(client, &client->inbox[i]);
  if (frames > 0) memmove(client->inbox, &client->inbox[frames], rest);
  client->inbox_bytes = rest;
  if (got == 0) {
    client->hung_up = true;
    die_locked(
        client, LH_UNAVAILABLE,
        "peerd closed the connection: it stopped or died; look at its log, then lh_open() again");
  } else if (got < 0 && got != -EAGAIN) {
    char text[128];
    client->hung_up = got == -ECONNRESET;
    snprintf(text, sizeof text, "connection to peerd failed (%s); lh_open() again",
             strerror((int)-got));
    die_locked(client, LH_UNAVAILABLE, text);
  }
}

void lhi_pump_locked(lh_client *client) {
  ssize_t got = 1;
  while (got > 0 && !client->reading && !client->dead) {
    got = read_inbox(client);
    dispatch_locked(client, got);
  }
}

/* Looks again and again for a moment: an answer that is nearly there costs no sleep, which takes
 * longer than a small operation does. Others that want the processor get it in between. */
static ssize_t read_briefly(lh_client *client) {
  const int64_t until = lhi_now_ns() + LHI_SPIN_NS;
  ssize_t got;
  while ((got = read_inbox(client)) == -EAGAIN && lhi_now_ns() < until) sched_yield();
  return got;
}

/* One round of reading as the reader. */
static void read_round_locked(lh_client *client, int64_t deadline_ns) {
  struct pollfd poll_fd = {client->fd, POLLIN, 0};
  int timeout = -1;
  ssize_t got = -EAGAIN;
  if (deadline_ns != LHI_NEVER) {
    const int64_t left = deadline_ns - lhi_now_ns();
    /* Rounded up: otherwise the last fraction of a millisecond is spent spinning. */
    timeout = left <= 0                                  ? 0
              : left / 1000000 >= (int64_t)INT32_MAX - 1 ? INT32_MAX
                                                         : (int)((left + 999999) / 1000000);
  }
  client->reading = true;
  pthread_mutex_unlock(&client->mutex);
  if (timeout != 0) got = read_briefly(client);
  if (got == -EAGAIN && poll(&poll_fd, 1, timeout) > 0) got = read_inbox(client);
  pthread_mutex_lock(&client->mutex);
  client->reading = false;
  dispatch_locked(client, got);
}

/* Copies the staged result out, without the mutex. */
static void collect_locked(lh_op *op) {
  op->state = LHI_COLLECTING;
  pthread_mutex_unlock(&op->client->mutex);
  if (op->synced != NULL) {
    lhi_state_copy_back(op->synced);
  } else {
    lhi_copy(op->copy_to, op->target, op->bytes);
  }
  pthread_mutex_lock(&op->client->mutex);
  op->state = LHI_ENDED;
  lhi_op_unpin_locked(op);
  lhi_sync_over_locked(op, op->status == LH_OK);
  lhi_wake_locked(op->client);
}

/* Calls the caller's function, without the mutex. */
static void tell_progress_locked(lh_op *op) {
  const lh_progress progress = lhi_progress_locked(op);
  op->progress_told = true;
  if (op->on_progress == NULL) return;
  pthread_mutex_unlock(&op->client->mutex);
  op->on_progress(&progress, op->progress_context);
  pthread_mutex_lock(&op->client->mutex);
}

bool lhi_wait_locked(lh_op *op, int64_t deadline_ns) {
  lh_client *const client = op->client;
  bool read = false;
  bool last = false;
  while (op->state != LHI_ENDED) {
    if (!op->progress_told) tell_progress_locked(op);
    if (op->state == LHI_ARRIVED) {
      collect_locked(op);
      continue;
    }
    if (last) break;
    /* One look more after the deadline: what has arrived in time counts. */
    last = deadline_ns != LHI_NEVER && lhi_now_ns() >= deadline_ns;
    if (op->state == LHI_OPEN && !client->reading) {
      read = true;
      read_round_locked(client, deadline_ns);
    } else if (!last) {
      lhi_sleep_locked(client, deadline_ns);
    }
  }
  /* Another one has to read now. */
  if (read && client->sleepers > 0) lhi_wake_locked(client);
  return op->state == LHI_ENDED;
}

/* ------------------------------------------------------------------ requests */

struct lh_ipc_request lhi_request(uint32_t type, const lh_op *op) {
  struct lh_ipc_request request;
  memset(&request, 0, sizeof request);
  request.magic = LH_IPC_MAGIC;
  request.type = type;
  request.call = op->call;
  return request;
}

/* 0 or an errno. The send mutex is held. */
static int write_request(int socket_fd, const struct lh_ipc_request *request, int fd) {
  const int64_t deadline = lhi_now_ns() + LHI_ANSWER_NS;
  union {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control;
  size_t sent = 0;
  while (sent < sizeof *request) {
    struct iovec iov = {(char *)(uintptr_t)request + sent, sizeof *request - sent};
    struct msghdr message;
    ssize_t wrote;
    memset(&message, 0, sizeof message);
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    if (fd >= 0 && sent == 0) {
      struct cmsghdr *header;
      memset(&control, 0, sizeof control);
      message.msg_control = control.bytes;
      message.msg_controllen = sizeof control.bytes;
      header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof fd);
      memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    wrote = sendmsg(socket_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (wrote >= 0) {
      sent += (size_t)wrote;
    } else if (errno == EAGAIN) {
      struct pollfd poll_fd = {socket_fd, POLLOUT, 0};
      const int64_t left = deadline - lhi_now_ns();
      if (left <= 0) return ETIMEDOUT;
      (void)poll(&poll_fd, 1, (int)(left / 1000000) + 1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

void lhi_send(lh_client *client, const struct lh_ipc_request *request, int fd) {
  int error;
  pthread_mutex_lock(&client->send_mutex);
  error = write_request(client->fd, request, fd);
  pthread_mutex_unlock(&client->send_mutex);
  if (error == 0) return;
  pthread_mutex_lock(&client->mutex);
  /* peerd may have said why, before it closed. */
  if (error != ETIMEDOUT) {
    while (client->reading && !client->dead)
      lhi_sleep_locked(client, lhi_now_ns() + LHI_CONNECT_RETRY_NS);
    lhi_pump_locked(client);
  }
  if (!client->dead) {
    char text[128];
    snprintf(text, sizeof text,
             "peerd takes no requests (%s); look at its log, then lh_open() again",
             strerror(error));
    die_locked(client, LH_UNAVAILABLE, text);
  }
  pthread_mutex_unlock(&client->mutex);
}

lh_status lhi_call(lh_op *op, const char *call) {
  lh_client *const client = op->client;
  lh_status status;
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, lhi_now_ns() + LHI_ANSWER_NS)) {
    status = lhi_outcome_locked(op);
  } else {
    status = lhi_fail(LH_UNAVAILABLE, "%s: peerd does not answer; look at its log", call);
  }
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

/* ------------------------------------------------------------------ arena */

void lhi_give_back_locked(lh_client *client, void *data) {
  if (data != NULL) (void)lhi_arena_give(&client->arena, data);
}

void lhi_trim(lh_client *client) {
  struct lhi_region *region;
  pthread_mutex_lock(&client->mutex);
  lhi_arena_look(&client->arena);
  while ((region = lhi_arena_surplus(&client->arena)) != NULL) {
    struct lh_ipc_request request;
    lh_op *const op = lhi_op_new_locked(client, LHI_UNREGION, NULL);
    /* Without memory for the request the region is kept. */
    if (op == NULL) break;
    request = lhi_request(LH_IPC_UNREGION, op);
    request.u.region.region = region->id;
    lhi_arena_remove(&client->arena, region);
    const bool ask = op->state == LHI_OPEN;
    lhi_op_release_locked(op);
    pthread_mutex_unlock(&client->mutex);
    if (ask) lhi_send(client, &request, -1);
    pthread_mutex_lock(&client->mutex);
  }
  pthread_mutex_unlock(&client->mutex);
}

/* Makes a region of `region_bytes`, tells peerd, and takes a block of `bytes` from it. */
static lh_status add_region(lh_client *client, const char *call, size_t region_bytes, size_t bytes,
                            void **data_out) {
  struct lh_ipc_request request;
  uint8_t *base = NULL;
  int fd = -1;
  uint64_t id = 0;
  lh_op *op;
  lh_status status;
  const char *const failed = lhi_region_map(region_bytes, &base, &fd);
  if (failed != NULL) {
    return lhi_fail(LH_UNAVAILABLE, "%s: no shared memory of %zu bytes, %s failed (%s)", call,
                    region_bytes, failed, strerror(errno));
  }
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, LHI_REGION, NULL);
  if (op != NULL) {
    id = client->next_region++;
    request = lhi_request(LH_IPC_REGION, op);
    request.u.region.region = id;
    request.u.region.bytes = region_bytes;
  }
  pthread_mutex_unlock(&client->mutex);
  if (op == NULL) {
    status = LH_UNAVAILABLE;
  } else {
    lhi_send(client, &request, fd);
    status = lhi_call(op, call);
  }
  close(fd);
  if (status != LH_OK) {
    munmap(base, region_bytes);
    return status;
  }
  pthread_mutex_lock(&client->mutex);
  if (lhi_arena_add(&client->arena, id, base, region_bytes) == NULL) {
    munmap(base, region_bytes);
    status = lhi_fail(LH_UNAVAILABLE, "%s: out of memory", call);
  } else if ((*data_out = lhi_arena_take(&client->arena, bytes)) == NULL) {
    status = lhi_fail(LH_UNAVAILABLE, "%s: out of memory", call);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

lh_status lhi_alloc(lh_client *client, const char *call, size_t bytes, void **data_out) {
  size_t region_bytes;
  size_t least_bytes;
  lh_status status;
  if (bytes > LH_REGION_BYTES_MAX - LHI_REGION_ROUND) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: %zu bytes; one buffer has at most 2^40", call, bytes);
  }
  pthread_mutex_lock(&client->mutex);
  if (client->dead) {
    status = lhi_dead_locked(client);
    pthread_mutex_unlock(&client->mutex);
    return status;
  }
  *data_out = lhi_arena_take(&client->arena, bytes);
  region_bytes = lhi_region_bytes(&client->arena, bytes, false);
  least_bytes = lhi_region_bytes(&client->arena, bytes, true);
  pthread_mutex_unlock(&client->mutex);
  if (*data_out != NULL) return LH_OK;
  status = add_region(client, call, region_bytes, bytes, data_out);
  /* The limit of peerd may leave room for this block, if not for the others to come. */
  if (status == LH_UNAVAILABLE && least_bytes < region_bytes) {
    status = add_region(client, call, least_bytes, bytes, data_out);
  }
  return status;
}

lh_status lh_alloc(lh_client *client, size_t bytes, void **data_out) {
  lh_status status;
  if (data_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "lh_alloc: data_out is NULL");
  *data_out = NULL;
  if (client == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "lh_alloc: client is NULL");
  if (bytes == 0) return lhi_fail(LH_INVALID_ARGUMENT, "lh_alloc: bytes is 0");
  status = lhi_process_check(client, "lh_alloc");
  if (status != LH_OK) return status;
  return lhi_alloc(client, "lh_alloc", bytes, data_out);
}

/* Whether an operation that has not ended uses bytes of the block. */
static bool in_use_locked(const lh_client *client, const uint8_t *data, size_t bytes) {
  for (const lh_op *op = client->ops; op != NULL; op = op->next) {
    if (op->kind != LHI_ALL_REDUCE || op->state == LHI_ENDED) continue;
    if (op->source_region != NULL && op->source < data + bytes && data < op->source + op->bytes) {
      return true;
    }
    if (op->target_region != NULL && op->target < data + bytes && data < op->target + op->bytes) {
      return true;
    }
  }
  return lhi_state_uses_locked(client, data, bytes);
}

lh_status lh_free(lh_client *client, void *data) {
  lh_status status;
  const struct lhi_region *region;
  const struct lhi_block *block = NULL;
  if (data == NULL) return LH_OK;
  if (client == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "lh_free: client is NULL");
  status = lhi_process_check(client, "lh_free");
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  region = lhi_arena_region(&client->arena, data);
  if (region != NULL) block = lhi_region_block(region, data, 1);
  if (block == NULL || region->base + block->offset != (uint8_t *)data) {
    status = lhi_fail(LH_INVALID_ARGUMENT, "lh_free: %p was not returned by lh_alloc(), or is free",
                      data);
  } else if (region->pins > 0 && in_use_locked(client, data, block->bytes)) {
    status = lhi_fail(LH_FAILED_PRECONDITION,
                      "lh_free: an operation in flight or a state uses the buffer; lh_op_wait() "
                      "for it, or lh_state_free() it first");
  } else {
    (void)lhi_arena_give(&client->arena, data);
  }
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK) lhi_trim(client);
  return status;
}

/* ------------------------------------------------------------------ open and close */

static void client_free(lh_client *client) {
  while (client->ops != NULL) {
    lh_op *const op = client->ops;
    client->ops = op->next;
    free(op->text);
    free(op);
  }
  while (client->comms != NULL) {
    lh_comm *const comm = client->comms;
    client->comms = comm->next;
    lhi_comm_free_memory(comm);
  }
  while (client->states != NULL) {
    lh_state *const state = client->states;
    client->states = state->next;
    lhi_state_free_memory(state);
  }
  lhi_arena_clear(&client->arena);
  if (client->fd >= 0) close(client->fd);
  pthread_mutex_destroy(&client->mutex);
  pthread_mutex_destroy(&client->send_mutex);
  free(client->dead_text);
  free(client);
}

/* 0 and a connected socket, or an errno. */
static int connect_to(const char *path, int *fd_out) {
  struct sockaddr_un address;
  int error = 0;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path, strlen(path));
  if (connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
    error = errno;
    close(fd);
  } else {
    *fd_out = fd;
  }
  return error;
}

/* Says HELLO on a fresh connection. LH_UNAVAILABLE: peerd went away meanwhile. */
static lh_status greet(lh_client *client, const char *path, const char *name, int64_t deadline_ns) {
  struct lh_ipc_request request;
  lh_status status;
  lh_op *op;
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, LHI_HELLO, NULL);
  pthread_mutex_unlock(&client->mutex);
  if (op == NULL) return LH_UNAVAILABLE;
  request = lhi_request(LH_IPC_HELLO, op);
  request.u.hello.version = LH_IPC_VERSION;
  request.u.hello.pid = (uint32_t)client->pid;
  memcpy(request.u.hello.name, name, strlen(name));
  lhi_send(client, &request, -1);
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, deadline_ns)) {
    status = lhi_outcome_locked(op);
    if (status != LH_OK) {
      status = lhi_fail(status, "lh_open %s: %s", path, lh_last_error());
    }
  } else {
    status = lhi_fail(LH_UNAVAILABLE,
                      "lh_open %s: peerd accepts but does not answer; look at its log", path);
  }
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

static lh_client *client_new(int fd) {
  lh_client *const client = calloc(1, sizeof *client);
  if (client == NULL) return NULL;
  client->pid = getpid();
  client->fd = fd;
  client->next_call = 1;
  client->next_region = 1;
  client->next_state = 1;
  pthread_mutex_init(&client->mutex, NULL);
  pthread_mutex_init(&client->send_mutex, NULL);
  return client;
}

/* The paths to try, in turn. */
struct paths {
  const char *path[2];
  size_t count;
  char user_path[256];
};

static lh_status choose_paths(const lh_open_options *options, struct paths *paths) {
  const char *const chosen =
      options->socket_path != NULL ? options->socket_path : getenv("LONGHAUL_SOCKET");
  const char *const user_directory = getenv("XDG_RUNTIME_DIR");
  const bool named = chosen != NULL && chosen[0] != '\0';
  paths->count = 1;
  paths->path[0] = named ? chosen : LHI_DEFAULT_SOCKET;
  if (named) {
    if (strlen(chosen) > LHI_PATH_BYTES_MAX) {
      return lhi_fail(LH_INVALID_ARGUMENT,
                      "lh_open: socket path of %zu bytes, at most %zu are possible", strlen(chosen),
                      (size_t)LHI_PATH_BYTES_MAX);
    }
    return LH_OK;
  }
  if (options->socket_path != NULL) {
    return lhi_fail(LH_INVALID_ARGUMENT, "lh_open: socket_path is empty; NULL means the default");
  }
  if (user_directory != NULL && user_directory[0] != '\0') {
    const int length = snprintf(paths->user_path, sizeof paths->user_path, "%s/longhaul/peerd.sock",
                                user_directory);
    if (length > 0 && (size_t)length <= LHI_PATH_BYTES_MAX)
      paths->path[paths->count++] = paths->user_path;
  }
  return LH_OK;
}

static bool may_appear(int error) {
  return error == ENOENT || error == ECONNREFUSED || error == EAGAIN || error == ENOTDIR;
}

/* Tries each path once. LH_OK and a client that peerd knows, or why not; *again: it is worth
 * waiting. */
static lh_status open_once(const struct paths *paths, const char *name, int64_t deadline_ns,
                           lh_client **client_out, bool *again) {
  lh_status status = LH_UNAVAILABLE;
  lh_client *client;
  int fd = -1;
  int error = 0;
  size_t i;
  *again = true;
  for (i = 0; i < paths->count; ++i) {
    error = connect_to(paths->path[i], &fd);
    if (error == 0 || !may_appear(error)) break;
  }
  if (error != 0) {
    const char *const path = paths->path[i < paths->count ? i : 0];
    *again = may_appear(error);
    return lhi_fail(LH_UNAVAILABLE, "lh_open: no peerd answers on %s (%s); %s", path,
                    strerror(error),
                    error == EACCES || error == EPERM
                        ? "peerd runs as another user: give it --socket_group"
                        : "start longhaul-peerd, or set socket_path or LONGHAUL_SOCKET");
  }
  client = client_new(fd);
  if (client == NULL) {
    close(fd);
    return lhi_fail(LH_UNAVAILABLE, "lh_open: out of memory");
  }
  enlist(client);
  /* One that is there may take a moment to answer, however short the wait for it to appear. */
  if (deadline_ns < lhi_now_ns() + LHI_GREET_NS) deadline_ns = lhi_now_ns() + LHI_GREET_NS;
  status = greet(client, paths->path[i], name, deadline_ns);
  if (status == LH_OK) {
    *client_out = client;
    return LH_OK;
  }
  *again = status == LH_UNAVAILABLE;
  delist(client);
  client_free(client);
  return status;
}

lh_status lh_open(const lh_open_options *options, lh_client **client_out) {
  lh_open_options given = LH_OPEN_OPTIONS_INIT;
  struct paths paths;
  char default_name[32];
  const char *name;
  int64_t deadline_ns;
  lh_status status;
  bool again = true;
  if (client_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "lh_open: client_out is NULL");
  *client_out = NULL;
  if (options != NULL) {
    status = lhi_take("lh_open", "LH_OPEN_OPTIONS_INIT", options,
                      offsetof(lh_open_options, timeout_ms) + sizeof options->timeout_ms, &given,
                      sizeof given);
    if (status != LH_OK) return status;
  }
  status = lhi_check_timeout("lh_open", given.timeout_ms);
  if (status == LH_OK) status = choose_paths(&given, &paths);
  snprintf(default_name, sizeof default_name, "%ld", (long)getpid());
  name = given.name != NULL ? given.name : default_name;
  if (status == LH_OK) status = lhi_check_name("lh_open", "name", name);
  if (status != LH_OK) return status;
  deadline_ns = lhi_deadline_ns(given.timeout_ms);
  while ((status = open_once(&paths, name, deadline_ns, client_out, &again)) != LH_OK && again &&
         lhi_now_ns() < deadline_ns) {
    const struct timespec pause = {0, (long)LHI_CONNECT_RETRY_NS};
    (void)nanosleep(&pause, NULL);
  }
  return status;
}

lh_status lh_client_check(lh_client *client) {
  static const char kCall[] = "lh_client_check";
  lh_status status;
  if (client == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: client is NULL", kCall);
  status = lhi_process_check(client, kCall);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client); /* the end of the connection may lie there unread */
  pthread_mutex_unlock(&client->mutex);
  return lhi_client_check(client, kCall);
}

void lh_close(lh_client *client) {
  if (client == NULL) return;
  /* In a child of fork() a lock may be held for ever, and the lists be half changed: leave them. */
  if (client->pid != getpid()) return;
  delist(client);
  client_free(client);
}
