#define _GNU_SOURCE
#include "client/src/connection.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/src/error.h"
#include "client/src/shared.h"

/* A peerd that reads nothing for this long counts as dead. */
#define LHI_WRITE_NS ((int64_t)30 * 1000 * 1000 * 1000)
/* How long a call waits for room in the socket, if it need not wait for the answer of peerd. A
 * peerd that is well takes less. Afterwards the request waits in the library. */
#define LHI_ROOM_NS ((int64_t)50 * 1000 * 1000)
/* The most that the reader sleeps at once. Other threads may have requests that wait for room, and
 * cannot wake the reader. */
#define LHI_READ_MS_MAX 1000
/* How long a thread polls for an answer, and on how many processors it does. On fewer, it would
 * take the processor from the peerd that it waits for. */
#define LHI_SPIN_NS ((int64_t)300 * 1000)
#define LHI_SPIN_PROCESSORS_MIN 4
/* A processor that another thread keeps for so long is busy. */
#define LHI_YIELDED_NS ((int64_t)20 * 1000)
/* The most waits that do not poll after one in which the processor was busy. Each such wait in a
 * row doubles their number. */
#define LHI_SPIN_SKIPS_MAX 64

typedef char lhi_request_is_256_bytes[sizeof(struct lh_ipc_request) == 256 ? 1 : -1];
typedef char lhi_tensor_is_376_bytes[sizeof(struct lh_ipc_tensor) == 376 ? 1 : -1];
typedef char lhi_reply_is_544_bytes[sizeof(struct lh_ipc_reply) == 544 ? 1 : -1];

lh_status lhi_process_check(const lh_client* client, const char* call) {
  if (client->pid == getpid()) return LH_OK;
  return lhi_fail(
      LH_FAILED_PRECONDITION,
      "%s: the client belongs to process %ld, which forked this one; open another client "
      "here with lh_open()",
      call, (long)client->pid);
}

lh_status lhi_dead_locked(const lh_client* client) {
  return lhi_fail(client->dead_status, "%s",
                  client->dead_text != NULL ? client->dead_text : "connection to peerd lost");
}

lh_status lhi_client_check(lh_client* client, const char* call) {
  lh_status status = lhi_process_check(client, call);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  if (client->dead) status = lhi_dead_locked(client);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

int lhi_connect(const char* path, int* fd_out) {
  struct sockaddr_un address;
  int error = 0;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path, strlen(path));
  if (connect(fd, (const struct sockaddr*)&address, sizeof address) != 0) {
    error = errno;
    close(fd);
  } else {
    *fd_out = fd;
  }
  return error;
}

/* Returns 0 or an errno. EAGAIN: the socket has had no room for `wait_ns`. The caller holds the
 * send mutex. */
static int write_request(int socket_fd, const struct lh_ipc_request* request, int fd,
                         int64_t wait_ns) {
  const int64_t begun = lhi_now_ns();
  union {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control;
  size_t sent = 0;
  while (sent < sizeof *request) {
    struct iovec iov = {(char*)(uintptr_t)request + sent, sizeof *request - sent};
    struct msghdr message;
    ssize_t wrote;
    memset(&message, 0, sizeof message);
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    if (fd >= 0 && sent == 0) {
      struct cmsghdr* header;
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
      /* A request that has begun must not stay a part. */
      const int64_t left = begun + (sent == 0 ? wait_ns : LHI_WRITE_NS) - lhi_now_ns();
      if (left <= 0) return sent == 0 ? EAGAIN : ETIMEDOUT;
      (void)poll(&poll_fd, 1, (int)(left / 1000000) + 1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

/* Lets the descriptor of lh_event_fd() tell of room in the socket, too, or no more. */
static void watch_room(const lh_client* client, bool wanted) {
  const int poll_fd = __atomic_load_n(&client->poll_fd, __ATOMIC_ACQUIRE);
  struct epoll_event event;
  if (poll_fd < 0) return;
  memset(&event, 0, sizeof event);
  event.events = EPOLLIN | EPOLLET | (wanted ? EPOLLOUT : 0u);
  event.data.fd = client->fd;
  (void)epoll_ctl(poll_fd, EPOLL_CTL_MOD, client->fd, &event);
}

/* Keeps a request for which the socket has no room. */
static int keep(lh_client* client, const struct lh_ipc_request* request) {
  struct lhi_queued* const kept = malloc(sizeof *kept);
  if (kept == NULL) return ENOMEM;
  kept->next = NULL;
  kept->request = *request;
  if (client->unsent != NULL) {
    client->unsent_last->next = kept;
  } else {
    client->unsent_since_ns = lhi_now_ns();
    __atomic_store_n(&client->unsent, kept, __ATOMIC_RELEASE);
    watch_room(client, true);
  }
  client->unsent_last = kept;
  return 0;
}

/* Sends the requests that wait for room, in order. Returns 0 if none is left. EAGAIN: there has
 * been no room for `wait_ns`. */
static int send_kept(lh_client* client, int64_t wait_ns) {
  while (client->unsent != NULL) {
    struct lhi_queued* const first = client->unsent;
    const int error = write_request(client->fd, &first->request, -1, wait_ns);
    if (error == EAGAIN && lhi_now_ns() - client->unsent_since_ns >= LHI_WRITE_NS) return ETIMEDOUT;
    if (error != 0) return error;
    ++client->sent;
    client->unsent_since_ns = lhi_now_ns();
    __atomic_store_n(&client->unsent, first->next, __ATOMIC_RELEASE);
    free(first);
    if (client->unsent == NULL) watch_room(client, false);
  }
  return 0;
}

int lhi_write_request(lh_client* client, const struct lh_ipc_request* request, int fd) {
  static const struct lh_ipc_request kLook = {.magic = LH_IPC_MAGIC, .type = LH_IPC_LOOK};
  /* The caller of a request with a descriptor waits for the answer in any case. */
  const int64_t wait_ns = fd >= 0 ? LHI_WRITE_NS : LHI_ROOM_NS;
  bool look = true;
  int error = 0;
  if (fd >= 0) __atomic_add_fetch(&client->patient, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_lock(&client->send_mutex);
  if (client->unsent != NULL) error = send_kept(client, fd >= 0 ? LHI_WRITE_NS : 0);
  if (error == 0 && fd < 0 && lhi_shared_put(client, request, &look)) request = &kLook;
  if (error == 0 && look) {
    error = write_request(client->fd, request, fd, wait_ns);
    if (error == 0) ++client->sent;
  }
  if (error == EAGAIN) error = fd < 0 ? keep(client, request) : ETIMEDOUT;
  pthread_mutex_unlock(&client->send_mutex);
  if (fd >= 0) __atomic_sub_fetch(&client->patient, 1, __ATOMIC_SEQ_CST);
  return error;
}

int lhi_write_kept(lh_client* client) {
  int error = 0;
  if (__atomic_load_n(&client->unsent, __ATOMIC_ACQUIRE) == NULL) return 0;
  /* A thread that sends a descriptor sends what was kept before. Other threads wait only while
   * nothing is kept. (pthread_mutex_trylock() would need a newer C library.) */
  if (__atomic_load_n(&client->patient, __ATOMIC_SEQ_CST) != 0) return 0;
  pthread_mutex_lock(&client->send_mutex);
  error = send_kept(client, 0);
  if (error == EAGAIN) watch_room(client, true); /* the descriptor may be new */
  pthread_mutex_unlock(&client->send_mutex);
  /* Whoever reads replies finds out why peerd has closed the connection. */
  return error == ETIMEDOUT ? error : 0;
}

void lhi_forget_kept(lh_client* client) {
  while (client->unsent != NULL) {
    struct lhi_queued* const first = client->unsent;
    client->unsent = first->next;
    free(first);
  }
}

ssize_t lhi_read_replies(lh_client* client) {
  ssize_t got;
  do {
    got = recv(client->fd, (char*)client->inbox + client->inbox_bytes,
               sizeof client->inbox - client->inbox_bytes, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return -errno;
  client->inbox_bytes += (size_t)got;
  return got;
}

int64_t lhi_spin_ns(void) {
  cpu_set_t processors;
  /* The call fails where a machine has more processors than the set can hold. */
  const bool many = sched_getaffinity(0, sizeof processors, &processors) != 0 ||
                    CPU_COUNT(&processors) >= LHI_SPIN_PROCESSORS_MIN;
  return many ? LHI_SPIN_NS : 0;
}

/* Polls for client->spin_ns. To sleep and wake up takes longer than a small operation, so an answer
 * that comes soon should find the thread awake. sched_yield() gives the processor to other threads.
 * If one of them keeps it, the processors are busy, and the thread that polls may hold up the peerd
 * that it waits for. Then this wait and the next ones sleep at once. */
static ssize_t read_briefly(lh_client* client) {
  int64_t now = lhi_now_ns();
  const int64_t until = now + client->spin_ns;
  ssize_t got = -EAGAIN;
  if (client->spin_ns == 0) return lhi_read_replies(client);
  if (client->spin_skips > 0) {
    --client->spin_skips;
    return lhi_read_replies(client);
  }
  lhi_shared_wake(client, true);
  while (lhi_shared_next(client) == NULL && (got = lhi_read_replies(client)) == -EAGAIN &&
         now < until) {
    const int64_t before = now;
    sched_yield();
    now = lhi_now_ns();
    if (now - before < LHI_YIELDED_NS) continue;
    client->spin_skips_next = client->spin_skips_next < LHI_SPIN_SKIPS_MAX / 2
                                  ? 2 * client->spin_skips_next + 1
                                  : LHI_SPIN_SKIPS_MAX;
    client->spin_skips = client->spin_skips_next;
    break;
  }
  lhi_shared_wake(client, false);
  if (client->spin_skips == 0) client->spin_skips_next = 0;
  return got;
}

ssize_t lhi_await_replies(lh_client* client, int64_t deadline_ns, bool poll_first) {
  struct pollfd poll_fd = {client->fd, POLLIN, 0};
  int timeout = LHI_READ_MS_MAX;
  ssize_t got = -EAGAIN;
  if (deadline_ns != LHI_NEVER) {
    const int64_t left = deadline_ns - lhi_now_ns();
    /* Rounded up. Otherwise the last fraction of a millisecond would be a busy loop. */
    timeout = left <= 0                           ? 0
              : left / 1000000 >= LHI_READ_MS_MAX ? LHI_READ_MS_MAX
                                                  : (int)((left + 999999) / 1000000);
  }
  if (timeout != 0) got = poll_first ? read_briefly(client) : lhi_read_replies(client);
  if (__atomic_load_n(&client->unsent, __ATOMIC_ACQUIRE) != NULL) poll_fd.events |= POLLOUT;
  if (got == -EAGAIN && lhi_shared_next(client) == NULL && poll(&poll_fd, 1, timeout) > 0 &&
      (poll_fd.revents & ~POLLOUT) != 0) {
    got = lhi_read_replies(client);
  }
  return got;
}
