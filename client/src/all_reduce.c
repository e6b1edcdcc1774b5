/* All-reduces: checking the call, staging tensors that are not in the arena, and the outcome. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "client/src/comm.h"
#include "client/src/connection.h"
#include "client/src/copy.h"
#include "client/src/error.h"
#include "client/src/memory.h"
#include "client/src/op.h"
#include "client/src/ops.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/uses.h"

#define LHI_ALL_REDUCE_FIRST_BYTES (offsetof(lh_all_reduce_options, on_fault) + sizeof(lh_on_fault))

static const char kAllReduce[] = "lh_all_reduce_start";

/* ------------------------------------------------------------------ its end */

static void ended(lh_op *op, const struct lh_ipc_reply *reply) {
  if (op->status == LH_OK) op->reply.info = reply->u.op;
  lhi_unpin(&op->source_pin);
}

static bool arrived(const lh_op *op) { return op->status == LH_OK && op->copy_to != NULL; }

static void collect(lh_op *op) { lhi_copy(op->copy_to, op->target, op->bytes); }

static void unstage_locked(lh_op *op, void **block) {
  if (*block == NULL) return;
  lhi_arena_unstage(&op->client->arena, op->bytes);
  lhi_give_back_locked(op->client, *block);
  *block = NULL;
}

/* Gives back what place() has pinned and allocated. */
static void give_back_locked(lh_op *op) {
  lhi_unpin(&op->source_pin);
  lhi_unpin(&op->target_pin);
  unstage_locked(op, &op->staged_source);
  unstage_locked(op, &op->staged_target);
}

static void over(lh_op *op, bool good) {
  (void)good;
  give_back_locked(op);
}

static const struct lhi_op_type kType = {ended, arrived, collect, over};

/* ------------------------------------------------------------------ its start */

static lh_status check_all_reduce(const lh_all_reduce_options *o, size_t *bytes_out) {
  const size_t element = lh_dtype_size(o->dtype);
  const uintptr_t source = (uintptr_t)o->source;
  const uintptr_t target = (uintptr_t)o->target;
  const uintptr_t low = source < target ? source : target;
  const uintptr_t high = source < target ? target : source;
  if (o->source == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: source is NULL", kAllReduce);
  if (o->target == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: target is NULL", kAllReduce);
  if (element == 0 || o->dtype == LH_BOOL)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: dtype is %d; give an lh_dtype other than LH_BOOL",
                    kAllReduce, (int)o->dtype);
  if ((unsigned)o->op > LH_MAX)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: op is %d; give an lh_reduce_op", kAllReduce,
                    (int)o->op);
  if ((unsigned)o->on_fault > LH_AS_JOINED) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: on_fault is %d; give an lh_on_fault", kAllReduce,
                    (int)o->on_fault);
  }
  if (o->min_world > LH_MEMBERS_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: min_world is %u; a group has at most %d members",
                    kAllReduce, (unsigned)o->min_world, LH_MEMBERS_MAX);
  }
  if ((unsigned)o->algorithm > LH_RING) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is %d; give LH_AUTO, LH_ONESHOT, LH_MESH or LH_RING", kAllReduce,
                    (int)o->algorithm);
  }
  if (o->count == 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is 0; give at least 1 element", kAllReduce);
  }
  if (o->count > (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / element) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is %llu; one tensor has at most 2^40 bytes",
                    kAllReduce, (unsigned long long)o->count);
  }
  *bytes_out = (size_t)o->count * element;
  if (o->algorithm == LH_ONESHOT && *bytes_out > LH_ONE_SHOT_BYTES_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: a one-shot op has at most %d bytes, this one %llu; leave the algorithm to "
                    "Longhaul (LH_AUTO), or choose LH_MESH or LH_RING",
                    kAllReduce, LH_ONE_SHOT_BYTES_MAX, (unsigned long long)*bytes_out);
  }
  if (UINTPTR_MAX - high < *bytes_out) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: source or target ends beyond the address space; correct count",
                    kAllReduce);
  }
  if (low != high && high - low < *bytes_out) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: source and target overlap; they must be equal or must not overlap",
                    kAllReduce);
  }
  return LH_OK;
}

/* Pins a buffer of the caller if it is in the arena; otherwise *pin stays empty. */
static lh_status pin_locked(lh_client *client, const char *what, const void *data, size_t bytes,
                            size_t element, struct lhi_pin *pin) {
  if (!lhi_arena_pin(&client->arena, data, bytes, pin)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "lh_all_reduce_start: %s is not within one buffer from lh_alloc()", what);
  }
  /* Memory outside the arena is copied to an aligned block, so its alignment does not matter. */
  if (pin->region != NULL && (uintptr_t)data % element != 0) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "lh_all_reduce_start: %s is not aligned to its elements, as tensors in memory "
                    "from lh_alloc() must be; pass a copy of it",
                    what);
  }
  return LH_OK;
}

/* Frees an op that was never opened. */
static void discard(lh_op *op) {
  lh_client *const client = op->client;
  pthread_mutex_lock(&client->mutex);
  give_back_locked(op);
  pthread_mutex_unlock(&client->mutex);
  free(op);
}

/* Allocates and pins a block of the arena for a copy of one of the op's tensors. */
static lh_status stage(lh_op *op, int64_t deadline_ns, void **block, struct lhi_pin *pin) {
  lh_client *const client = op->client;
  const lh_status status = lhi_alloc(client, kAllReduce, op->bytes, deadline_ns, block);
  op->staged = true;
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_arena_stage(&client->arena, op->bytes);
  (void)lhi_arena_pin(&client->arena, *block, op->bytes, pin);
  pthread_mutex_unlock(&client->mutex);
  return LH_OK;
}

/* Sets op->source and op->target to memory in the arena. Buffers outside the arena get a staged
 * block. The caller's buffers are pinned first, so that no other thread frees one of them while
 * blocks are allocated. The op is not open yet. If this fails, the caller calls discard(). */
static lh_status place(lh_op *op, const lh_all_reduce_options *o) {
  lh_client *const client = op->client;
  const size_t element = lh_dtype_size(o->dtype);
  const int64_t deadline_ns = lhi_answer_deadline_ns(client);
  lh_status status;
  op->source = (uint8_t *)(uintptr_t)o->source;
  op->target = o->target;
  pthread_mutex_lock(&client->mutex);
  status = lhi_check_states_locked(kAllReduce, op);
  if (status == LH_OK) {
    status = pin_locked(client, "source", o->source, op->bytes, element, &op->source_pin);
  }
  if (status == LH_OK) {
    status = pin_locked(client, "target", o->target, op->bytes, element, &op->target_pin);
  }
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK && op->source_pin.region == NULL) {
    status = stage(op, deadline_ns, &op->staged_source, &op->source_pin);
    if (status == LH_OK) lhi_copy(op->staged_source, o->source, op->bytes);
    op->source = op->staged_source;
  }
  if (status == LH_OK && op->target_pin.region == NULL) {
    /* A block of its own also for an op in place. With source and target apart, peerd need not keep
     * the original, which would cost as much memory and one more copy. */
    status = stage(op, deadline_ns, &op->staged_target, &op->target_pin);
    op->target = op->staged_target;
    op->copy_to = o->target;
  }
  return status;
}

static struct lh_ipc_request all_reduce_request(const lh_op *op, const lh_all_reduce_options *o) {
  struct lh_ipc_request request = lhi_request(LH_IPC_OP, op);
  request.member = op->comm->handle;
  request.u.op.tag = o->tag;
  request.u.op.count = o->count;
  request.u.op.source = lhi_range(&op->source_pin, op->source);
  request.u.op.target = lhi_range(&op->target_pin, op->target);
  request.u.op.kind = LH_WIRE_ALL_REDUCE;
  request.u.op.dtype = (uint8_t)o->dtype;
  request.u.op.reduce = (uint8_t)o->op;
  request.u.op.on_fault = (uint8_t)(o->on_fault == LH_AS_JOINED ? op->comm->on_fault : o->on_fault);
  request.u.op.min_world = o->min_world;
  request.u.op.algorithm = (uint8_t)o->algorithm;
  return request;
}

lh_status lh_all_reduce_start(lh_comm *comm, const lh_all_reduce_options *options, lh_op **op_out) {
  lh_all_reduce_options o = LH_ALL_REDUCE_OPTIONS_INIT;
  struct lh_ipc_request request;
  lh_client *client;
  lh_status status;
  size_t bytes = 0;
  lh_op *op;
  if (op_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: op_out is NULL", kAllReduce);
  *op_out = NULL;
  if (comm == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: comm is NULL", kAllReduce);
  if (options == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: options is NULL", kAllReduce);
  client = comm->client;
  status = lhi_process_check(client, kAllReduce);
  if (status == LH_OK) {
    status = lhi_take(kAllReduce, "LH_ALL_REDUCE_OPTIONS_INIT", options, LHI_ALL_REDUCE_FIRST_BYTES,
                      &o, sizeof o);
  }
  if (status == LH_OK) status = check_all_reduce(&o, &bytes);
  if (status != LH_OK) return status;

  pthread_mutex_lock(&client->mutex);
  /* A program may start many ops before it waits for one: read the replies that have come. */
  lhi_pump_locked(client);
  status = lhi_member_check_locked(comm, kAllReduce);
  pthread_mutex_unlock(&client->mutex);
  if (status != LH_OK) return status;

  op = lhi_op_make(client, &kType, comm);
  if (op == NULL) return LH_UNAVAILABLE;
  op->reduces = true;
  op->tag = o.tag;
  op->bytes = bytes;
  op->from = o.source;
  op->to = o.target;
  status = place(op, &o);
  if (status != LH_OK) {
    discard(op);
    return status;
  }
  pthread_mutex_lock(&client->mutex);
  status = lhi_member_check_locked(comm, kAllReduce);
  if (status == LH_OK) status = lhi_check_states_locked(kAllReduce, op);
  if (status == LH_OK) {
    comm->at_join = false;
    lhi_op_open_locked(op);
    request = all_reduce_request(op, &o);
  }
  pthread_mutex_unlock(&client->mutex);
  if (status != LH_OK) {
    discard(op);
    return status;
  }
  lhi_send(client, &request, -1);
  *op_out = op;
  return LH_OK;
}

lh_status lh_all_reduce(lh_comm *comm, const lh_all_reduce_options *options, int64_t timeout_ms,
                        lh_op_info_t *info, lh_op **op_out) {
  static const char kCall[] = "lh_all_reduce";
  lh_op_info_t own = LH_OP_INFO_INIT;
  lh_client *client;
  lh_status status;
  lh_op *op = NULL;
  bool ended;
  if (op_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: op_out is NULL", kCall);
  *op_out = NULL;
  status = lhi_check_timeout(kCall, timeout_ms);
  /* Check the caller's struct before anything is started. */
  if (status == LH_OK && info != NULL) {
    status = lhi_give(kCall, "LH_OP_INFO_INIT", &own, sizeof own, LHI_OP_INFO_FIRST_BYTES, info);
  }
  if (status == LH_OK) status = lh_all_reduce_start(comm, options, &op);
  /* With LH_OK there is always an op. clang's analyser cannot see that. */
  if (status != LH_OK || op == NULL) return status;
  client = op->client;
  pthread_mutex_lock(&client->mutex);
  ended = lhi_wait_locked(op, lhi_deadline_ns(timeout_ms));
  if (ended) {
    own = lhi_op_info_locked(op);
    status = lhi_outcome_locked(op);
    lhi_op_release_locked(op);
  }
  pthread_mutex_unlock(&client->mutex);
  if (!ended) {
    *op_out = op;
    return lhi_fail(
        LH_DEADLINE_EXCEEDED,
        "%s: no outcome within %lld ms; the operation goes on; call lh_op_wait() for it", kCall,
        (long long)timeout_ms);
  }
  if (info != NULL) {
    (void)lhi_give(kCall, "LH_OP_INFO_INIT", &own, sizeof own, LHI_OP_INFO_FIRST_BYTES, info);
  }
  lhi_trim(client);
  return status;
}
