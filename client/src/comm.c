#define _GNU_SOURCE
#include "client/src/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/members.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/request.h"

#define LHI_JOIN_FIRST_BYTES (offsetof(lh_join_options, timeout_ms) + sizeof(int64_t))
#define LHI_WORLD_FIRST_BYTES (offsetof(lh_world_info, member_id) + sizeof(uint64_t))
/* How long lh_join() waits for the reason why it was not admitted, after its timeout. A peerd that
 * is well takes less. */
#define LHI_WITHDRAW_MS 1000
/* The epoch may change between two pages of members. After this many changes lh_members() gives up.
 */
#define LHI_MEMBERS_TRIES 16

/* LH_OK: the member has not left and was not removed, and peerd is alive. The member need not be
 * admitted. */
static lh_status standing_locked(const lh_comm* comm, const char* call) {
  if (comm->gone != LH_OK) {
    return lhi_fail(comm->gone, "%s: %s", call,
                    comm->gone_text != NULL && comm->gone_text[0] != '\0'
                        ? comm->gone_text
                        : "this member was removed; join again");
  }
  if (comm->client->dead) return lhi_dead_locked(comm->client);
  if (comm->left) {
    return lhi_fail(LH_FAILED_PRECONDITION, "%s: this member has left; call lh_join() to come back",
                    call);
  }
  return LH_OK;
}

lh_status lhi_free_check_locked(const lh_comm* comm, const char* call) {
  if (comm->stepping) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: this member waits at a step boundary already; wait for that first", call);
  }
  if (comm->sync != NULL && comm->sync != comm->parked_take) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: this member is in a sync already; wait for that first", call);
  }
  /* Until lh_state_take() has an outcome, the caller does not know whether the tensors are its
   * own. */
  if (comm->parked_take != NULL) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: lh_state_take() of this member has no outcome yet; call it again first",
                    call);
  }
  return LH_OK;
}

void lhi_drop_take_locked(lh_comm* comm) {
  lh_op* const take = comm->parked_take;
  if (take == NULL || take->state != LHI_ENDED) return;
  if (take->status != LH_DEADLINE_EXCEEDED && take->status != LH_ABORTED) return;
  comm->parked_take = NULL;
  lhi_op_release_locked(take);
}

lh_status lhi_member_check_locked(const lh_comm* comm, const char* call) {
  const lh_status status = standing_locked(comm, call);
  if (status != LH_OK) return status;
  if (!comm->admitted) {
    return lhi_fail(LH_FAILED_PRECONDITION,
                    "%s: this member is not admitted yet; wait for its join first", call);
  }
  if (comm->leaving) return lhi_fail(LH_FAILED_PRECONDITION, "%s: this member is leaving", call);
  return LH_OK;
}

lh_status lhi_boundary_check_locked(const lh_comm* comm, const char* call) {
  if (!comm->newcomer || !comm->at_join) return LH_OK;
  return lhi_fail(LH_FAILED_PRECONDITION,
                  "%s: this member came to a run that was going, and has passed no step boundary "
                  "yet: call lh_begin_step() first; only members that begin a run together may "
                  "start with something else",
                  call);
}

lh_status lhi_check_comm(const lh_comm* comm, const char* call) {
  if (comm == NULL) return lhi_refuse(call, "comm is NULL");
  return lhi_process_check(comm->client, call);
}

/* ------------------------------------------------------------------ join */

/* Checks a name, if it is not NULL or "", and copies it. The array is longer than every name. */
static lh_status put_name(const char* call, const char* what, const char* name, char* to) {
  lh_status status = LH_OK;
  if (name == NULL || name[0] == '\0') return LH_OK;
  status = lhi_check_name(call, what, name);
  if (status == LH_OK) memcpy(to, name, strlen(name));
  return status;
}

/* peerd checks the rest of the wish. */
static lh_status take_join_options(const char* call, const lh_join_options* options,
                                   lh_join_options* given, struct lh_ipc_join* wish) {
  lh_status status = LH_OK;
  memset(wish, 0, sizeof *wish);
  if (options != NULL) {
    status =
        lhi_take(call, "LH_JOIN_OPTIONS_INIT", options, LHI_JOIN_FIRST_BYTES, given, sizeof *given);
  }
  if (status == LH_OK) status = lhi_check_timeout(call, given->timeout_ms);
  if (status == LH_OK) status = lhi_check_name(call, "run", given->run);
  if (status == LH_OK) status = put_name(call, "run", given->run, wish->run);
  if (status == LH_OK) status = put_name(call, "cohort", given->cohort, wish->cohort);
  if (status == LH_OK) status = put_name(call, "name", given->name, wish->name);
  if (status != LH_OK) return status;
  if ((unsigned)given->on_fault > LH_ABORT) {
    return lhi_refuse(call, "on_fault is %d; give LH_RETRY or LH_ABORT", (int)given->on_fault);
  }
  wish->group = given->group;
  wish->step_deadline_ms = given->step_deadline_ms;
  wish->background = (uint32_t)given->mode; /* LH_BACKGROUND is 1 */
  LHI_PUT(call, wish->cohort_size, "cohort_size", given->cohort_size);
  LHI_PUT(call, wish->members, "members", given->members);
  return LH_OK;
}

static void join_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  lh_comm* const comm = op->comm;
  if (op->status != LH_OK) {
    lhi_member_gone_locked(comm, op->status, op->text);
    return;
  }
  comm->handle = reply->member;
  comm->admitted = true;
  comm->at_join = true;
  comm->newcomer = (reply->flags & LH_IPC_NEWCOMER) != 0;
  comm->world = reply->world;
}

static const struct lhi_op_type kJoin = {join_ended, NULL, NULL, NULL};

static lh_status join_start(const char* call, lh_client* client, lh_on_fault on_fault,
                            const struct lh_ipc_join* wish, lh_comm** comm_out, lh_op** op_out) {
  struct lh_ipc_request request;
  lh_comm* comm;
  lh_op* op;
  lh_status status = lhi_client_check(client, call);
  if (status != LH_OK) return status;
  comm = calloc(1, sizeof *comm);
  if (comm == NULL) return lhi_fail(LH_UNAVAILABLE, "%s: out of memory", call);
  op = lhi_op_make(client, &kJoin, comm);
  if (op == NULL) {
    free(comm);
    return LH_UNAVAILABLE;
  }
  comm->client = client;
  comm->held = true;
  comm->on_fault = on_fault;
  pthread_mutex_lock(&client->mutex);
  lhi_member_add_locked(comm);
  lhi_op_open_locked(op);
  comm->join_call = op->call;
  request = lhi_request(LH_IPC_JOIN, op);
  pthread_mutex_unlock(&client->mutex);
  request.u.join = *wish;
  lhi_send(client, &request, -1);
  *comm_out = comm;
  *op_out = op;
  return LH_OK;
}

lh_status lh_join_start(lh_client* client, const lh_join_options* options, lh_comm** comm_out,
                        lh_op** op_out) {
  lh_join_options given = LH_JOIN_OPTIONS_INIT;
  struct lh_ipc_join wish;
  lh_status status;
  if (comm_out != NULL) *comm_out = NULL;
  if (op_out != NULL) *op_out = NULL;
  if (client == NULL || comm_out == NULL || op_out == NULL) {
    return lhi_refuse("lh_join_start", "%s is NULL",
                      client == NULL     ? "client"
                      : comm_out == NULL ? "comm_out"
                                         : "op_out");
  }
  status = take_join_options("lh_join_start", options, &given, &wish);
  if (status != LH_OK) return status;
  return join_start("lh_join_start", client, given.on_fault, &wish, comm_out, op_out);
}

lh_status lh_join(lh_client* client, const lh_join_options* options, lh_comm** comm_out) {
  lh_join_options given = LH_JOIN_OPTIONS_INIT;
  struct lh_ipc_join wish;
  lh_comm* comm = NULL;
  lh_op* op = NULL;
  lh_status status;
  if (comm_out != NULL) *comm_out = NULL;
  if (client == NULL || comm_out == NULL) {
    return lhi_refuse("lh_join", "%s is NULL", client == NULL ? "client" : "comm_out");
  }
  status = take_join_options("lh_join", options, &given, &wish);
  if (status == LH_OK) status = join_start("lh_join", client, given.on_fault, &wish, &comm, &op);
  /* With LH_OK there are always both. clang's analyser cannot see that. */
  if (status != LH_OK || comm == NULL || op == NULL) return status;
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, lhi_deadline_ns(given.timeout_ms))) {
    status = lhi_outcome_locked(op);
  } else {
    /* Peerd's answer to the withdrawn request says what the member waited for. */
    pthread_mutex_unlock(&client->mutex);
    (void)lh_leave(comm, LHI_WITHDRAW_MS);
    pthread_mutex_lock(&client->mutex);
    status =
        lhi_fail(LH_DEADLINE_EXCEEDED, "lh_join: not admitted to %s/%u within %lld ms; %s",
                 given.run, (unsigned)given.group, (long long)given.timeout_ms,
                 op->state == LHI_ENDED && op->text != NULL
                     ? op->text
                     : "the request is withdrawn; peerd does not answer: it is stopped or hangs");
  }
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK) {
    *comm_out = comm;
  } else {
    char text[LH_ERROR_TEXT_BYTES_MAX + 192];
    snprintf(text, sizeof text, "%s", lh_last_error());
    lh_comm_free(comm);
    lhi_fail(status, "%s", text);
  }
  return status;
}

/* ------------------------------------------------------------------ leave */

static void leave_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  lh_comm* const comm = op->comm;
  (void)reply;
  /* A member that was removed meanwhile is out of the group, too. So this is no error. */
  if (comm->gone != LH_OK) op->status = LH_OK;
  comm->leaving = false;
  comm->left = op->status == LH_OK;
}

static const struct lhi_op_type kLeave = {leave_ended, NULL, NULL, NULL};

/* Begins to leave, or returns the op of an earlier call that timed out. If *send is set, the caller
 * must send *request. NULL: out of memory. */
static lh_op* leave_locked(lh_comm* comm, struct lh_ipc_request* request, bool* send) {
  lh_op* op = comm->parked_leave;
  *send = false;
  comm->parked_leave = NULL;
  if (op != NULL) return op;
  op = lhi_op_new_locked(comm->client, &kLeave, comm);
  if (op == NULL || op->state != LHI_OPEN) return op;
  if (comm->gone != LH_OK) {
    lhi_op_end_locked(op, LH_OK, NULL, NULL); /* the member was removed: peerd need not be asked */
    return op;
  }
  *request = lhi_request(LH_IPC_LEAVE, op);
  if (comm->admitted) {
    request->member = comm->handle;
  } else {
    request->u.leave.join = comm->join_call;
  }
  comm->leaving = true;
  *send = true;
  return op;
}

static lh_status leave_start(const char* call, lh_comm* comm, lh_op** op_out) {
  struct lh_ipc_request request;
  lh_client* const client = comm->client;
  bool send = false;
  lh_op* op = NULL;
  lh_status status = LH_OK;
  pthread_mutex_lock(&client->mutex);
  /* An earlier call has begun to leave: this one gives its outcome, also if another call has read
   * it meanwhile. A member that was removed need not leave. That is no error of the program. */
  if (comm->parked_leave == NULL && comm->gone == LH_OK) status = standing_locked(comm, call);
  if (status == LH_OK && comm->leaving && comm->parked_leave == NULL) {
    status = lhi_fail(LH_FAILED_PRECONDITION, "%s: this member is leaving already", call);
  }
  if (status == LH_OK) {
    op = leave_locked(comm, &request, &send);
    if (op == NULL) status = LH_UNAVAILABLE;
  }
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &request, -1);
  *op_out = op;
  return status;
}

lh_status lhi_finish(const char* call, lh_op* op, lh_op** parked, int64_t timeout_ms,
                     lhi_sync_info_of* info_of, lh_sync_info_t* info) {
  lh_client* const client = op->client;
  lh_status status;
  pthread_mutex_lock(&client->mutex);
  if (lhi_wait_locked(op, lhi_deadline_ns(timeout_ms))) {
    if (info_of != NULL) info_of(op, info);
    status = lhi_outcome_locked(op);
    lhi_op_release_locked(op);
  } else {
    /* The next call gives its own progress function. */
    op->on_progress = NULL;
    *parked = op;
    status = lhi_fail(LH_DEADLINE_EXCEEDED,
                      "%s: not finished within %lld ms; it goes on; call again to wait for it",
                      call, (long long)timeout_ms);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

lh_status lh_leave(lh_comm* comm, int64_t timeout_ms) {
  lh_op* op;
  lh_status status = lhi_check_comm(comm, "lh_leave");
  if (status == LH_OK) status = lhi_check_timeout("lh_leave", timeout_ms);
  if (status == LH_OK) status = leave_start("lh_leave", comm, &op);
  if (status != LH_OK) return status;
  return lhi_finish("lh_leave", op, &comm->parked_leave, timeout_ms, NULL, NULL);
}

lh_status lh_leave_start(lh_comm* comm, lh_op** op_out) {
  lh_status status;
  if (op_out == NULL) return lhi_refuse("lh_leave_start", "op_out is NULL");
  *op_out = NULL;
  status = lhi_check_comm(comm, "lh_leave_start");
  if (status != LH_OK) return status;
  return leave_start("lh_leave_start", comm, op_out);
}

void lh_comm_free(lh_comm* comm) {
  struct lh_ipc_request request;
  lh_client* client;
  bool send = false;
  if (comm == NULL || comm->client->pid != getpid()) return;
  client = comm->client;
  pthread_mutex_lock(&client->mutex);
  if (comm->parked_step != NULL) lhi_op_release_locked(comm->parked_step);
  comm->parked_step = NULL;
  if (comm->parked_sync != NULL) lhi_op_release_locked(comm->parked_sync);
  comm->parked_sync = NULL;
  if (comm->parked_take != NULL) lhi_op_release_locked(comm->parked_take);
  comm->parked_take = NULL;
  if (!client->dead && comm->gone == LH_OK && !comm->left &&
      (!comm->leaving || comm->parked_leave != NULL)) {
    lh_op* const op = leave_locked(comm, &request, &send);
    if (op != NULL) lhi_op_release_locked(op);
  } else if (comm->parked_leave != NULL) {
    lhi_op_release_locked(comm->parked_leave);
  }
  comm->parked_leave = NULL;
  /* The request holds copies, so the communicator may be freed before the request is sent. */
  comm->held = false;
  lhi_member_use_locked(comm);
  lhi_member_unuse_locked(comm);
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &request, -1);
}

/* ------------------------------------------------------------------ world */

lh_status lh_world(lh_comm* comm, lh_world_info* info) {
  lh_world_info own = LH_WORLD_INFO_INIT;
  lh_status status = lhi_check_comm(comm, "lh_world");
  if (status != LH_OK) return status;
  if (info == NULL) return lhi_refuse("lh_world", "info is NULL");
  pthread_mutex_lock(&comm->client->mutex);
  lhi_pump_locked(comm->client);
  status = standing_locked(comm, "lh_world");
  if (status == LH_OK && !comm->admitted) {
    status = lhi_fail(LH_FAILED_PRECONDITION,
                      "lh_world: this member is not admitted yet; wait for its join first");
  }
  own.rank = comm->world.rank;
  own.size = comm->world.size;
  own.pending = comm->world.pending;
  own.epoch = comm->world.epoch;
  own.member_id = comm->world.member_id;
  own.background = comm->world.background != 0;
  own.boundary = comm->world.boundary;
  own.step_epoch = comm->world.step_epoch;
  own.step_rank = comm->world.step_rank;
  own.step_size = comm->world.step_size;
  pthread_mutex_unlock(&comm->client->mutex);
  if (status != LH_OK) return status;
  return lhi_give("lh_world", "LH_WORLD_INFO_INIT", &own, sizeof own, LHI_WORLD_FIRST_BYTES, info);
}

lh_status lhi_ask(const char* call, lh_comm* comm, const struct lhi_op_type* type,
                  const struct lh_ipc_request* request, int64_t deadline_ns,
                  union lhi_answer* answer) {
  lh_client* const client = comm->client;
  struct lh_ipc_request asked;
  lh_op* op = NULL;
  lh_status status;
  pthread_mutex_lock(&client->mutex);
  status = lhi_member_check_locked(comm, call);
  if (status == LH_OK) {
    op = lhi_op_new_locked(client, type, comm);
    if (op == NULL) status = LH_UNAVAILABLE;
  }
  if (op != NULL) {
    asked = lhi_request(request->type, op);
    asked.member = comm->handle;
    asked.u = request->u;
  }
  pthread_mutex_unlock(&client->mutex);
  if (status != LH_OK) return status;
  lhi_send(client, &asked, -1);
  return lhi_call(op, call, deadline_ns, answer);
}

static void members_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  if (op->status == LH_OK) op->reply.members = reply->u.members;
}

static const struct lhi_op_type kMembers = {members_ended, NULL, NULL, NULL};

/* Asks peerd for one page of members, from rank `first` on. */
static lh_status members_page(const char* call, lh_comm* comm, uint32_t of_step, uint32_t first,
                              int64_t deadline_ns, struct lh_ipc_members_page* page) {
  struct lh_ipc_request request;
  union lhi_answer answer;
  lh_status status;
  memset(&request, 0, sizeof request);
  request.type = LH_IPC_MEMBERS;
  request.u.members.first = first;
  request.u.members.of_step = of_step;
  status = lhi_ask(call, comm, &kMembers, &request, deadline_ns, &answer);
  if (status == LH_OK) *page = answer.members;
  if (status == LH_OK && (page->first != first || page->count > LH_IPC_MEMBERS_PAGE)) {
    status =
        lhi_fail(LH_INTERNAL, "%s: peerd sent a malformed page; install matching releases", call);
  }
  return status;
}

static void about_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  if (op->status == LH_OK) op->reply.about = reply->u.about;
}

static const struct lhi_op_type kAbout = {about_ended, NULL, NULL, NULL};

lh_status lh_member(lh_comm* comm, uint64_t member_id, lh_member_info* info) {
  lh_member_info own = LH_MEMBER_INFO_INIT;
  struct lh_ipc_request request;
  union lhi_answer answer;
  lh_status status = lhi_check_comm(comm, "lh_member");
  if (status != LH_OK) return status;
  if (info == NULL) return lhi_refuse("lh_member", "info is NULL");
  if (member_id == 0) return lhi_refuse("lh_member", "member_id is 0, not an id");
  memset(&request, 0, sizeof request);
  request.type = LH_IPC_MEMBER;
  request.u.about.member_id = member_id;
  status =
      lhi_ask("lh_member", comm, &kAbout, &request, lhi_answer_deadline_ns(comm->client), &answer);
  if (status != LH_OK) return status;
  own.current = answer.about.current;
  own.member_id = answer.about.member_id;
  own.peer_id = answer.about.peer_id;
  own.rank = answer.about.rank;
  snprintf(own.name, sizeof own.name, "%.71s", answer.about.name);
  snprintf(own.cohort, sizeof own.cohort, "%.71s", answer.about.cohort);
  snprintf(own.host, sizeof own.host, "%.135s", answer.about.host);
  return lhi_give("lh_member", "LH_MEMBER_INFO_INIT", &own, sizeof own, sizeof own, info);
}

static lh_status members_of(const char* call, lh_comm* comm, uint32_t of_step, uint64_t* ids,
                            uint32_t capacity, uint32_t* count_out) {
  struct lh_ipc_members_page page = {0, 0, 0, {0}};
  uint64_t epoch = 0;
  struct lhi_text before;
  uint32_t count = 0;
  int64_t deadline_ns;
  int tries = 0;
  lh_status status = lhi_check_comm(comm, call);
  if (status != LH_OK) return status;
  if (count_out == NULL) return lhi_refuse(call, "count_out is NULL");
  if (ids == NULL && capacity > 0) return lhi_refuse(call, "ids is NULL");
  deadline_ns = lhi_answer_deadline_ns(comm->client);
  lhi_note_text(&before);
  while (true) {
    status = members_page(call, comm, of_step, count, deadline_ns, &page);
    if (status == LH_INTERNAL && count > 0 && ++tries < LHI_MEMBERS_TRIES) {
      count = 0; /* the epoch has changed, and has fewer members now: begin again */
      continue;
    }
    if (status != LH_OK) return status;
    if (count > 0 && page.epoch != epoch) {
      if (++tries >= LHI_MEMBERS_TRIES) {
        return lhi_fail(LH_UNAVAILABLE, "%s: the epoch keeps changing; call again", call);
      }
      count = 0;
      continue;
    }
    epoch = page.epoch;
    for (uint32_t i = 0; i < page.count; ++i, ++count) {
      if (count < capacity) ids[count] = page.member_ids[i];
    }
    if (page.count < LH_IPC_MEMBERS_PAGE || count >= LH_MEMBERS_MAX) break;
  }
  if (tries > 0) lhi_forget_failure(&before);
  *count_out = count;
  return LH_OK;
}

lh_status lh_members(lh_comm* comm, uint64_t* ids, uint32_t capacity, uint32_t* count_out) {
  return members_of("lh_members", comm, 0, ids, capacity, count_out);
}

lh_status lh_step_members(lh_comm* comm, uint64_t* ids, uint32_t capacity, uint32_t* count_out) {
  return members_of("lh_step_members", comm, 1, ids, capacity, count_out);
}

/* ------------------------------------------------------------------ step boundary */

void lhi_step_ended(lh_op* op, const struct lh_ipc_reply* reply) {
  op->comm->stepping = false;
  if (reply != NULL && (reply->flags & LH_IPC_PASSED) != 0) op->comm->world = reply->world;
}

static const struct lhi_op_type kStep = {lhi_step_ended, NULL, NULL, NULL};

static lh_status step_start(const char* call, lh_comm* comm, lh_op** op_out) {
  lh_client* const client = comm->client;
  struct lh_ipc_request request;
  bool send = false;
  lh_op* op = NULL;
  lh_status status = LH_OK;
  pthread_mutex_lock(&client->mutex);
  lhi_pump_locked(client);
  lhi_drop_take_locked(comm);
  if (comm->parked_step != NULL && comm->parked_step->of_state != 0) {
    status = lhi_fail(LH_FAILED_PRECONDITION,
                      "%s: a step with a state waits at this boundary already; call "
                      "lh_begin_step_sync() again",
                      call);
  } else if (comm->parked_step != NULL) {
    op = comm->parked_step;
    comm->parked_step = NULL;
  } else {
    status = lhi_member_check_locked(comm, call);
    if (status == LH_OK) status = lhi_free_check_locked(comm, call);
    if (status == LH_OK) {
      op = lhi_op_new_locked(client, &kStep, comm);
      if (op == NULL) status = LH_UNAVAILABLE;
    }
    if (op != NULL && op->state == LHI_OPEN && comm->at_join) {
      /* This call is for the boundary that admitted this member. The other members have passed that
       * boundary already. */
      lhi_op_end_locked(op, LH_OK, NULL, NULL);
    } else if (op != NULL && op->state == LHI_OPEN) {
      comm->stepping = true;
      send = true;
      request = lhi_request(LH_IPC_STEP, op);
      request.member = comm->handle;
    }
  }
  if (op != NULL) comm->at_join = false;
  pthread_mutex_unlock(&client->mutex);
  if (send) lhi_send(client, &request, -1);
  *op_out = op;
  return status;
}

lh_status lh_begin_step(lh_comm* comm, int64_t timeout_ms) {
  static const char kCall[] = "lh_begin_step";
  lh_op* op = NULL;
  lh_status status = lhi_check_comm(comm, kCall);
  if (status == LH_OK) status = lhi_check_timeout(kCall, timeout_ms);
  if (status == LH_OK) status = step_start(kCall, comm, &op);
  /* With LH_OK there is always an op. clang's analyser cannot see that. */
  if (status != LH_OK || op == NULL) return status;
  return lhi_finish(kCall, op, &comm->parked_step, timeout_ms, NULL, NULL);
}

lh_status lh_begin_step_start(lh_comm* comm, lh_op** op_out) {
  lh_status status;
  if (op_out == NULL) return lhi_refuse("lh_begin_step_start", "op_out is NULL");
  *op_out = NULL;
  status = lhi_check_comm(comm, "lh_begin_step_start");
  if (status != LH_OK) return status;
  return step_start("lh_begin_step_start", comm, op_out);
}
