/* Clients: lh_open(), lh_close(), and what happens to a client in a child of fork(). */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/events.h"
#include "client/src/members.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/shared.h"
#include "client/src/state.h"
#include "client/src/tensors.h"

#define LHI_DEFAULT_SOCKET "/run/longhaul/peerd.sock"
/* A peerd that listens gets at least this long to answer HELLO, also if the timeout is shorter. */
#define LHI_GREET_NS ((int64_t)100 * 1000 * 1000)
/* peerd answers a request at once if it needs no other peer. After this time peerd counts as
 * hanging. */
#define LHI_ANSWER_NS ((int64_t)30 * 1000 * 1000 * 1000)
#define LHI_CONNECT_RETRY_NS ((int64_t)20 * 1000 * 1000)
#define LHI_PATH_BYTES_MAX (sizeof(((struct sockaddr_un*)0)->sun_path) - 1)

/* ------------------------------------------------------------------ clients and fork() */

/* A child of fork() must not keep the connection open. Otherwise peerd would take the trainer for
 * alive as long as one of its child processes lives, such as a data loader. */
static pthread_mutex_t clients_mutex = PTHREAD_MUTEX_INITIALIZER;
static lh_client* clients;
static bool fork_handled;

static void before_fork(void) {
  pthread_mutex_lock(&clients_mutex);
  /* The child reads the list of regions, so no thread may be changing it. */
  for (lh_client* client = clients; client != NULL; client = client->next_client) {
    pthread_mutex_lock(&client->mutex);
  }
}
static void in_parent(void) {
  for (lh_client* client = clients; client != NULL; client = client->next_client) {
    client->forked = true;
    pthread_mutex_unlock(&client->mutex);
  }
  pthread_mutex_unlock(&clients_mutex);
}
/* The memory of lh_alloc() is shared with peerd. Without this, a child would write into the
 * parent's tensors, and into those of operations in flight. */
static void in_child(void) {
  for (lh_client* client = clients; client != NULL; client = client->next_client) {
    if (client->fd >= 0) close(client->fd);
    client->fd = -1;
    lhi_arena_part(&client->arena);
    pthread_mutex_unlock(&client->mutex);
  }
  clients = NULL;
  pthread_mutex_unlock(&clients_mutex);
}

static void enlist(lh_client* client) {
  pthread_mutex_lock(&clients_mutex);
  if (!fork_handled) fork_handled = pthread_atfork(before_fork, in_parent, in_child) == 0;
  client->next_client = clients;
  clients = client;
  pthread_mutex_unlock(&clients_mutex);
}

static void delist(const lh_client* client) {
  lh_client** link = &clients;
  pthread_mutex_lock(&clients_mutex);
  while (*link != NULL && *link != client) link = &(*link)->next_client;
  if (*link != NULL) *link = client->next_client;
  pthread_mutex_unlock(&clients_mutex);
}

/* ------------------------------------------------------------------ open and close */

/* Gives the memory back to the host that no operation and no state uses, because children of fork()
 * keep it. */
static void drop_memory(const lh_client* client) {
  if (!client->forked || client->states != NULL) return;
  for (const lh_op* op = client->ops; op != NULL; op = op->next) {
    if (op->state == LHI_OPEN) return;
  }
  for (const struct lhi_region* region = client->arena.regions; region != NULL;
       region = region->next) {
    lhi_region_drop(region);
  }
}

static void client_free(lh_client* client) {
  drop_memory(client);
  while (client->ops != NULL) {
    lh_op* const op = client->ops;
    client->ops = op->next;
    free(op->more_members);
    lhi_tensors_free(&op->tensors);
    free(op->text);
    free(op);
  }
  while (client->comms != NULL) {
    lh_comm* const comm = client->comms;
    client->comms = comm->next;
    lhi_member_free_memory(comm);
  }
  while (client->states != NULL) {
    lh_state* const state = client->states;
    client->states = state->next;
    lhi_state_free_memory(state);
  }
  lhi_forget_kept(client);
  lhi_arena_clear(&client->arena);
  lhi_shared_close(client);
  lhi_close_events(client);
  if (client->fd >= 0) close(client->fd);
  pthread_mutex_destroy(&client->mutex);
  pthread_mutex_destroy(&client->send_mutex);
  free(client->dead_text);
  free(client);
}

static void hello_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  op->reply_flags = reply != NULL ? reply->flags : 0;
}
static const struct lhi_op_type hello = {hello_ended, NULL, NULL, NULL};

/* Sends HELLO on a new connection and waits for the answer. LH_UNAVAILABLE: peerd has gone, or does
 * not answer in time. */
static lh_status greet(lh_client* client, const char* path, const char* name, int64_t deadline_ns) {
  struct lh_ipc_request request;
  lh_status status;
  lh_op* op;
  int shared_fd = -1;
  pthread_mutex_lock(&client->mutex);
  op = lhi_op_new_locked(client, &hello, NULL);
  pthread_mutex_unlock(&client->mutex);
  if (op == NULL) return LH_UNAVAILABLE;
  request = lhi_request(LH_IPC_HELLO, op);
  request.u.hello.version = LH_IPC_VERSION;
  request.u.hello.pid = (uint32_t)client->pid;
  memcpy(request.u.hello.name, name, strlen(name));
  /* Without the queues all goes over the socket. */
  (void)lhi_shared_open(client, &shared_fd);
  lhi_send(client, &request, shared_fd);
  if (shared_fd >= 0) close(shared_fd);
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, deadline_ns)) {
    status = lhi_outcome_locked(op);
    if ((op->reply_flags & LH_IPC_SHARED) == 0) lhi_shared_close(client);
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

static lh_client* client_new(int fd) {
  lh_client* const client = calloc(1, sizeof *client);
  if (client == NULL) return NULL;
  client->pid = getpid();
  client->fd = fd;
  client->answer_ns = LHI_ANSWER_NS;
  client->spin_ns = lhi_spin_ns();
  client->next_call = 1;
  client->next_region = 1;
  client->next_state = 1;
  client->flush = lhi_flush_locked;
  client->event_fd = -1;
  client->poll_fd = -1;
  pthread_mutex_init(&client->mutex, NULL);
  pthread_mutex_init(&client->send_mutex, NULL);
  return client;
}

/* The socket paths to try, in this order. */
struct paths {
  const char* path[2];
  size_t count;
  char user_path[256];
};

static lh_status choose_paths(const lh_open_options* options, struct paths* paths) {
  const char* const chosen =
      options->socket_path != NULL ? options->socket_path : getenv("LONGHAUL_SOCKET");
  const char* const user_directory = getenv("XDG_RUNTIME_DIR");
  const bool named = chosen != NULL && chosen[0] != '\0';
  paths->count = 1;
  paths->path[0] = named ? chosen : LHI_DEFAULT_SOCKET;
  if (named) {
    if (strlen(chosen) > LHI_PATH_BYTES_MAX) {
      return lhi_refuse("lh_open", "the socket path has %zu bytes; at most %zu are possible",
                        strlen(chosen), (size_t)LHI_PATH_BYTES_MAX);
    }
    return LH_OK;
  }
  if (options->socket_path != NULL) {
    return lhi_refuse("lh_open", "socket_path is empty; NULL means the default");
  }
  if (user_directory != NULL && user_directory[0] != '\0') {
    const int length = snprintf(paths->user_path, sizeof paths->user_path, "%s/longhaul/peerd.sock",
                                user_directory);
    if (length > 0 && (size_t)length <= LHI_PATH_BYTES_MAX)
      paths->path[paths->count++] = paths->user_path;
  }
  return LH_OK;
}

/* Returns whether a peerd may still start to listen at the path. */
static bool may_appear(int error) {
  return error == ENOENT || error == ECONNREFUSED || error == EAGAIN || error == ENOTDIR;
}

/* Tries each path once. LH_OK: *client_out is connected, and peerd has answered. Otherwise *again
 * says whether another try may succeed. */
static lh_status open_once(const struct paths* paths, const char* name, int64_t deadline_ns,
                           lh_client** client_out, bool* again) {
  lh_status status = LH_UNAVAILABLE;
  lh_client* client;
  int fd = -1;
  int error = 0;
  size_t i;
  *again = true;
  for (i = 0; i < paths->count; ++i) {
    error = lhi_connect(paths->path[i], &fd);
    if (error == 0 || !may_appear(error)) break;
  }
  if (error != 0) {
    const char* const path = paths->path[i < paths->count ? i : 0];
    *again = may_appear(error);
    return lhi_fail(
        LH_UNAVAILABLE, "lh_open: no peerd answers on %s (%s); %s", path, strerror(error),
        error == EACCES || error == EPERM
            ? "peerd does not let this user connect: see --socket-mode, --socket-group and "
              "--allow-users of peerd"
            : "start longhaul-peerd, or set socket_path or LONGHAUL_SOCKET");
  }
  client = client_new(fd);
  if (client == NULL) {
    close(fd);
    return lhi_fail(LH_UNAVAILABLE, "lh_open: out of memory");
  }
  enlist(client);
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

lh_status lh_open(const lh_open_options* options, lh_client** client_out) {
  lh_open_options given = LH_OPEN_OPTIONS_INIT;
  struct paths paths;
  struct lhi_text before;
  char default_name[32];
  const char* name;
  int64_t deadline_ns;
  lh_status status;
  bool again = true;
  if (client_out == NULL) return lhi_refuse("lh_open", "client_out is NULL");
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
  lhi_note_text(&before);
  deadline_ns = lhi_deadline_ns(given.timeout_ms);
  while ((status = open_once(&paths, name, deadline_ns, client_out, &again)) != LH_OK && again &&
         lhi_now_ns() < deadline_ns) {
    const struct timespec pause = {0, (long)LHI_CONNECT_RETRY_NS};
    (void)nanosleep(&pause, NULL);
  }
  if (status == LH_OK) lhi_forget_failure(&before);
  return status;
}

lh_status lh_client_check(lh_client* client) {
  static const char kCall[] = "lh_client_check";
  lh_status status;
  if (client == NULL) return lhi_refuse(kCall, "client is NULL");
  status = lhi_process_check(client, kCall);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client); /* read the end of the connection, if it has come */
  pthread_mutex_unlock(&client->mutex);
  return lhi_client_check(client, kCall);
}

void lh_close(lh_client* client) {
  if (client == NULL) return;
  /* In a child of fork() the lock may be held for ever and the lists may be half changed. So the
   * child leaves the client alone. */
  if (client->pid != getpid()) return;
  lhi_end_help(client);
  delist(client);
  client_free(client);
}
