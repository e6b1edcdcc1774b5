#define _GNU_SOURCE
#include "client/src/collective.h"

#include <stdlib.h>

#include "client/src/comm.h"
#include "client/src/connection.h"
#include "client/src/copy.h"
#include "client/src/error.h"
#include "client/src/memory.h"
#include "client/src/op.h"
#include "client/src/ops.h"
#include "client/src/queue.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/slices.h"
#include "client/src/uses.h"

/* ------------------------------------------------------------------ end of a collective */

static void ended(lh_op *op, const struct lh_ipc_reply *reply) {
  if (op->status == LH_OK) op->reply.info = reply->u.op;
  lhi_unpin(&op->source_pin);
}

static bool arrived(const lh_op *op) { return op->status == LH_OK && op->copy_back; }

static void collect(lh_op *op) {
  if (op->slices != NULL) {
    lhi_slices_unpack(op->slices, op->target);
  } else {
    lhi_copy(op->to, op->target, op->target_bytes);
  }
}

static void unstage_locked(lh_op *op, void **block, size_t bytes) {
  if (*block == NULL) return;
  lhi_arena_unstage(&op->client->arena, bytes);
  lhi_give_back_locked(op->client, *block);
  *block = NULL;
}

/* Gives back what place() has pinned and allocated. */
static void give_back_locked(lh_op *op) {
  lhi_unpin(&op->source_pin);
  lhi_unpin(&op->target_pin);
  unstage_locked(op, &op->staged_source, op->source_bytes);
  unstage_locked(op, &op->staged_target, op->target_bytes);
}

static void over(lh_op *op, bool good) {
  (void)good;
  give_back_locked(op);
}

static const struct lhi_op_type kType = {ended, arrived, collect, over};

/* ------------------------------------------------------------------ start of a collective */

/* Checks what all kinds have, and sets the sizes of the op's source and target. */
static lh_status check(const struct lhi_collective *o, size_t *source_bytes, size_t *target_bytes) {
  const size_t element = lh_dtype_size(o->dtype);
  const uintptr_t source = (uintptr_t)o->source;
  const uintptr_t target = (uintptr_t)o->target;
  const size_t world = o->in_parts ? o->asked.world : 1;
  size_t whole;
  if (o->slices != NULL && (o->source != NULL || o->target != NULL)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: slices and source or target are given; give only one of the two", o->call);
  }
  if (o->source == NULL && o->slices == NULL)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: source is NULL", o->call);
  if (o->target == NULL && o->slices == NULL)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: target is NULL", o->call);
  if (element == 0 || o->dtype == LH_BOOL)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: dtype is %d; give an lh_dtype other than LH_BOOL",
                    o->call, (int)o->dtype);
  if ((unsigned)o->on_fault > LH_AS_JOINED) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: on_fault is %d; give an lh_on_fault", o->call,
                    (int)o->on_fault);
  }
  if ((unsigned)o->algorithm > LH_RING) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is %d; give LH_AUTO, LH_ONESHOT, LH_MESH or LH_RING", o->call,
                    (int)o->algorithm);
  }
  if (o->count == 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is 0; give at least 1 element", o->call);
  }
  if (o->count > (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / element / world) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is %llu; one tensor has at most 2^40 bytes",
                    o->call, (unsigned long long)o->count);
  }
  whole = (size_t)o->count * element * world;
  *source_bytes = o->asked.kind == LH_WIRE_ALL_GATHER ? whole / world : whole;
  *target_bytes = o->asked.kind == LH_WIRE_REDUCE_SCATTER ? whole / world : whole;
  if (o->algorithm == LH_ONESHOT && whole > LH_ONE_SHOT_BYTES_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: a one-shot op has at most %d bytes, this one %llu; leave the algorithm to "
                    "Longhaul (LH_AUTO), or choose LH_MESH or LH_RING",
                    o->call, LH_ONE_SHOT_BYTES_MAX, (unsigned long long)whole);
  }
  if (o->algorithm == LH_MESH && o->asked.kind != LH_WIRE_ALL_REDUCE) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is LH_MESH, which only all-reduces have; give LH_AUTO, "
                    "LH_ONESHOT or LH_RING",
                    o->call);
  }
  if (UINTPTR_MAX - source < *source_bytes || UINTPTR_MAX - target < *target_bytes) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: source or target ends beyond the address space; correct count", o->call);
  }
  if (!o->in_parts && source != target && lhi_overlap(o->source, whole, o->target, whole)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: source and target overlap; they must be equal or must not overlap",
                    o->call);
  }
  return LH_OK;
}

/* Pins a buffer of the caller if it is in the arena; otherwise *pin stays empty. */
static lh_status pin_locked(const char *call, lh_client *client, const char *what, const void *data,
                            size_t bytes, size_t element, struct lhi_pin *pin) {
  if (!lhi_arena_pin(&client->arena, data, bytes, pin)) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: %s is not within one buffer from lh_alloc()", call,
                    what);
  }
  /* Memory outside the arena is copied to an aligned block, so its alignment does not matter. */
  if (pin->region != NULL && (uintptr_t)data % element != 0) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: %s is not aligned to its elements, as tensors in memory from lh_alloc() "
                    "must be; pass a copy of it",
                    call, what);
  }
  return LH_OK;
}

/* Frees an op that was never opened. */
static void discard(lh_op *op) {
  lh_client *const client = op->client;
  pthread_mutex_lock(&client->mutex);
  give_back_locked(op);
  pthread_mutex_unlock(&client->mutex);
  lhi_slices_free(op->slices);
  free(op);
}

/* Allocates and pins a block of the arena for a copy of one of the op's tensors. */
static lh_status stage(const char *call, lh_op *op, int64_t deadline_ns, size_t bytes, void **block,
                       struct lhi_pin *pin) {
  lh_client *const client = op->client;
  const lh_status status = lhi_alloc(client, call, bytes, deadline_ns, block);
  op->staged = true;
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  lhi_arena_stage(&client->arena, bytes);
  (void)lhi_arena_pin(&client->arena, *block, bytes, pin);
  pthread_mutex_unlock(&client->mutex);
  return LH_OK;
}

/* Sets op->source and op->target to memory in the arena. Buffers outside the arena get a staged
 * block. The caller's buffers are pinned first, so that no other thread frees one of them while
 * blocks are allocated. The op is not open yet. If this fails, the caller calls discard(). */
static lh_status place(lh_op *op, const struct lhi_collective *o) {
  lh_client *const client = op->client;
  const size_t element = lh_dtype_size(o->dtype);
  const int64_t deadline_ns = lhi_answer_deadline_ns(client);
  lh_status status;
  op->source = (uint8_t *)(uintptr_t)o->source;
  op->target = o->target;
  pthread_mutex_lock(&client->mutex);
  status = lhi_check_states_locked(o->call, op);
  if (status == LH_OK && op->slices == NULL) {
    status = pin_locked(o->call, client, "source", o->source, op->source_bytes, element,
                        &op->source_pin);
  }
  if (status == LH_OK && op->slices == NULL) {
    status = pin_locked(o->call, client, "target", o->target, op->target_bytes, element,
                        &op->target_pin);
  }
  /* peerd wants a part apart from the whole that it belongs to: the part gets a staged block. */
  if (status == LH_OK && o->in_parts &&
      lhi_overlap(o->source, op->source_bytes, o->target, op->target_bytes)) {
    lhi_unpin(o->asked.kind == LH_WIRE_ALL_GATHER ? &op->source_pin : &op->target_pin);
  }
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK && op->source_pin.region == NULL) {
    status = stage(o->call, op, deadline_ns, op->source_bytes, &op->staged_source, &op->source_pin);
    if (status == LH_OK && op->slices != NULL) lhi_slices_pack(op->slices, op->staged_source);
    if (status == LH_OK && op->slices == NULL)
      lhi_copy(op->staged_source, o->source, op->source_bytes);
    op->source = op->staged_source;
  }
  if (status == LH_OK && op->target_pin.region == NULL) {
    /* An op in place gets a target block of its own, too. With source and target apart, peerd need
     * not keep the original. Keeping it would cost as much memory, and one more copy. */
    status = stage(o->call, op, deadline_ns, op->target_bytes, &op->staged_target, &op->target_pin);
    op->target = op->staged_target;
    op->copy_back = !o->no_result;
  }
  return status;
}

static struct lh_ipc_request request_of(const lh_op *op, const struct lhi_collective *o) {
  struct lh_ipc_request request = lhi_request(LH_IPC_OP, op);
  request.member = op->comm->handle;
  request.u.op = o->asked;
  request.u.op.count = o->count;
  request.u.op.source = lhi_range(&op->source_pin, op->source);
  request.u.op.target = lhi_range(&op->target_pin, op->target);
  request.u.op.dtype = (uint8_t)o->dtype;
  request.u.op.on_fault = (uint8_t)(o->on_fault == LH_AS_JOINED ? op->comm->on_fault : o->on_fault);
  request.u.op.algorithm = (uint8_t)o->algorithm;
  return request;
}

lh_status lhi_collective_check(const char *call, lh_reduce_op op, uint32_t min_world) {
  if ((unsigned)op > LH_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: op is %d; give an lh_reduce_op", call, (int)op);
  }
  if (min_world > LH_MEMBERS_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: min_world is %u; a group has at most %d members",
                    call, (unsigned)min_world, LH_MEMBERS_MAX);
  }
  return LH_OK;
}

lh_status lhi_collective_take(const char *call, const char *init, const lh_comm *comm,
                              const void *options, size_t first_bytes, void *taken, size_t size,
                              lh_op **op_out) {
  lh_status status;
  if (op_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: op_out is NULL", call);
  *op_out = NULL;
  if (comm == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: comm is NULL", call);
  if (options == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: options is NULL", call);
  status = lhi_process_check(comm->client, call);
  return status == LH_OK ? lhi_take(call, init, options, first_bytes, taken, size) : status;
}

/* peerd refuses a tag that is in flight. For an op that waits in the client, the answer must not
 * depend on when it is sent, so the client looks itself. */
static lh_status check_tag_locked(const char *call, const lh_comm *comm, uint64_t tag) {
  for (const lh_op *op = comm->client->ops; op != NULL; op = op->next) {
    if (op->collective && op->state == LHI_OPEN && op->comm == comm && op->tag == tag) {
      return lhi_fail(LH_INVALID_ARGUMENT,
                      "%s: this member has an op with tag %llu in flight; wait for it, or use "
                      "another tag",
                      call, (unsigned long long)tag);
    }
  }
  return LH_OK;
}

static lh_status start(lh_comm *comm, const struct lhi_collective *asked, struct lhi_slices *slices,
                       lh_op **op_out) {
  lh_client *const client = comm->client;
  struct lh_ipc_request request;
  size_t source_bytes = 0;
  size_t target_bytes = 0;
  lh_status status = check(asked, &source_bytes, &target_bytes);
  lh_op *op = NULL;

  if (status == LH_OK) {
    pthread_mutex_lock(&client->mutex);
    /* A program may start many ops before it waits for one: read the replies that have come. */
    lhi_pump_locked(client);
    status = lhi_member_check_locked(comm, asked->call);
    pthread_mutex_unlock(&client->mutex);
  }
  if (status == LH_OK) {
    op = lhi_op_make(client, &kType, comm);
    if (op == NULL) status = LH_UNAVAILABLE;
  }
  if (op == NULL) {
    lhi_slices_free(slices);
    return status;
  }
  op->slices = slices;
  op->collective = true;
  op->tag = asked->asked.tag;
  op->source_bytes = source_bytes;
  op->target_bytes = target_bytes;
  op->from = asked->source;
  op->to = asked->target;
  status = place(op, asked);
  if (status != LH_OK) {
    discard(op);
    return status;
  }
  pthread_mutex_lock(&client->mutex);
  status = lhi_member_check_locked(comm, asked->call);
  if (status == LH_OK) status = lhi_check_states_locked(asked->call, op);
  if (status == LH_OK && lhi_queue_full_locked(comm))
    status = check_tag_locked(asked->call, comm, op->tag);
  if (status == LH_OK) {
    comm->at_join = false;
    lhi_op_open_locked(op);
    request = request_of(op, asked);
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

lh_status lhi_collective_start(lh_comm *comm, const struct lhi_collective *asked, lh_op **op_out) {
  struct lhi_collective whole = *asked;
  struct lhi_slices *slices = NULL;
  const size_t element = lh_dtype_size(asked->dtype);
  if (asked->slices == NULL && asked->slice_count > 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: slice_count is %llu, and slices is NULL", asked->call,
                    (unsigned long long)asked->slice_count);
  }
  if (asked->slices != NULL && element > 0) {
    lh_status status;
    if (asked->count != 0) {
      return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is %llu; leave it 0 with slices", asked->call,
                      (unsigned long long)asked->count);
    }
    status = lhi_slices_take(asked->call, asked->slices, asked->slice_count, element, &whole.count,
                             &slices);
    if (status != LH_OK) return status;
  }
  return start(comm, &whole, slices, op_out);
}

lh_status lhi_collective_may_wait(const char *call, int64_t timeout_ms, lh_op_info_t *info,
                                  lh_op **op_out) {
  lh_op_info_t none = LH_OP_INFO_INIT;
  lh_status status;
  if (op_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: op_out is NULL", call);
  *op_out = NULL;
  status = lhi_check_timeout(call, timeout_ms);
  /* Check the caller's struct before anything is started. */
  if (status == LH_OK && info != NULL) {
    if (info->struct_size >= offsetof(lh_op_info_t, zero2)) {
      none.members = info->members;
      none.members_capacity = info->members_capacity;
    }
    status = lhi_give(call, "LH_OP_INFO_INIT", &none, sizeof none, LHI_OP_INFO_FIRST_BYTES, info);
  }
  return status;
}

lh_status lhi_collective_wait(const char *call, lh_op *op, int64_t timeout_ms, lh_op_info_t *info,
                              lh_op **op_out) {
  lh_client *const client = op->client;
  lh_op_info_t own = LH_OP_INFO_INIT;
  lh_status status = LH_OK;
  bool ended;
  pthread_mutex_lock(&client->mutex);
  ended = lhi_wait_locked(op, lhi_deadline_ns(timeout_ms));
  if (ended) {
    own = lhi_op_info_locked(op);
    if (info != NULL) lhi_op_members_locked(op, info, &own);
    status = lhi_outcome_locked(op);
    lhi_op_release_locked(op);
  }
  pthread_mutex_unlock(&client->mutex);
  if (!ended) {
    *op_out = op;
    return lhi_fail(
        LH_DEADLINE_EXCEEDED,
        "%s: no outcome within %lld ms; the operation goes on; call lh_op_wait() for it", call,
        (long long)timeout_ms);
  }
  if (info != NULL) {
    (void)lhi_give(call, "LH_OP_INFO_INIT", &own, sizeof own, LHI_OP_INFO_FIRST_BYTES, info);
  }
  lhi_trim(client);
  return status;
}
