#define _GNU_SOURCE
#include "client/src/collective.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "client/src/comm.h"
#include "client/src/connection.h"
#include "client/src/error.h"
#include "client/src/kinds.h"
#include "client/src/memory.h"
#include "client/src/op.h"
#include "client/src/ops.h"
#include "client/src/queue.h"
#include "client/src/replies.h"
#include "client/src/request.h"
#include "client/src/tensors.h"
#include "client/src/uses.h"

/* ------------------------------------------------------------------ end of a collective */

/* peerd does not use the op's memory any more. */
static void ended(lh_op* op, const struct lh_ipc_reply* reply) {
  struct lhi_tensors* const t = &op->tensors;
  if (op->status == LH_OK) op->reply.info = reply->u.op;
  for (size_t i = 0; i < t->piece_count; ++i) {
    lhi_unpin(&t->pieces[i].source.pin);
    if (t->pieces[i].target.pin.block != NULL) lhi_unpin(&t->pieces[i].target.pin);
    if (t->pieces[i].error.pin.block != NULL) lhi_unpin(&t->pieces[i].error.pin);
  }
  lhi_give_back_locked(op->client, op->table);
  op->table = NULL;
}

static bool arrived(const lh_op* op) { return op->status == LH_OK && op->copy_back; }

static void collect(lh_op* op) {
  const struct lhi_tensors* const t = &op->tensors;
  for (size_t i = 0; i < t->piece_count; ++i) {
    /* Staged memory has a region and no block; ended() has emptied the other pins. */
    if (t->pieces[i].target.pin.region != NULL) lhi_piece_unpack(t, &t->pieces[i]);
    if (t->pieces[i].error.pin.region != NULL) lhi_piece_unpack_error(t, &t->pieces[i]);
  }
}

static void unstage_locked(lh_op* op, struct lhi_staged* staged) {
  if (staged->data == NULL) return;
  lhi_arena_unstage(&op->client->arena, staged->bytes);
  lhi_give_back_locked(op->client, staged->data);
  staged->data = NULL;
}

static void over(lh_op* op, bool good) {
  (void)good;
  unstage_locked(op, &op->staged_source);
  unstage_locked(op, &op->staged_target);
  unstage_locked(op, &op->staged_error);
}

static const struct lhi_op_type kType = {ended, arrived, collect, over};

/* Frees an op that was never opened. */
static void discard(lh_op* op) {
  lh_client* const client = op->client;
  op->status = LH_UNAVAILABLE;
  pthread_mutex_lock(&client->mutex);
  ended(op, NULL);
  over(op, false);
  pthread_mutex_unlock(&client->mutex);
  lhi_tensors_free(&op->tensors);
  free(op);
}

/* ------------------------------------------------------------------ checks */

/* Whether elements may share scales. */
static bool has_blocks(const struct lhi_collective* o) {
  if (o->quantize == LH_QUANTIZE_AUTO)
    return (o->codecs & (LH_CODEC_BIT(LH_QUANTIZE_INT8) | LH_CODEC_BIT(LH_QUANTIZE_INT4))) != 0;
  return o->quantize == LH_QUANTIZE_INT8 || o->quantize == LH_QUANTIZE_INT4;
}

static lh_status check_options(const struct lhi_collective* o) {
  if ((unsigned)o->on_fault > LH_AS_JOINED) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: on_fault is %d; give an lh_on_fault", o->call,
                    (int)o->on_fault);
  }
  if ((unsigned)o->algorithm > LH_RING) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is %d; give LH_AUTO, LH_ONESHOT, LH_MESH or LH_RING", o->call,
                    (int)o->algorithm);
  }
  if (o->algorithm == LH_RING && lhi_direct(o->kind)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is LH_RING, and the parts of this operation go straight to "
                    "their receiver; give LH_AUTO, LH_ONESHOT or LH_MESH",
                    o->call);
  }
  if ((unsigned)o->op > LH_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: op is %d; give an lh_reduce_op", o->call, (int)o->op);
  }
  if ((unsigned)o->order > LH_RANK_ORDER) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: order is %d; give an lh_order", o->call,
                    (int)o->order);
  }
  if (o->order == LH_RANK_ORDER && o->algorithm == LH_RING) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is LH_RING with LH_RANK_ORDER, but in a ring the order of the "
                    "sums follows the ring; give LH_AUTO, LH_ONESHOT or LH_MESH",
                    o->call);
  }
  if (o->weight != NULL && (!(*o->weight >= 0) || *o->weight > DBL_MAX)) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: weight is %g; give a finite number, 0 or more",
                    o->call, *o->weight);
  }
  if (o->weight != NULL && o->op != LH_SUM && o->op != LH_AVG) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: op is %d; with a weight give LH_SUM or LH_AVG",
                    o->call, (int)o->op);
  }
  if ((unsigned)o->quantize > LH_QUANTIZE_AUTO) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: quantize is %d; give an lh_quantization", o->call,
                    (int)o->quantize);
  }
  if ((unsigned)o->rounding > LH_STOCHASTIC) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: rounding is %d; give an lh_rounding", o->call,
                    (int)o->rounding);
  }
  if (o->quantize == LH_UNQUANTIZED && (o->rounding != LH_NEAREST || o->error || o->errors)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: %s is given without quantize; an operation that is not quantized is exact",
                    o->call, o->rounding != LH_NEAREST ? "rounding" : "error");
  }
  if (o->quantize == LH_QUANTIZE_AUTO ? o->codecs == 0 || o->codecs > 7 : o->codecs != 0) {
    return lhi_fail(
        LH_INVALID_ARGUMENT,
        "%s: codecs is %u; give LH_CODEC_BIT() of LH_QUANTIZE_BF16, LH_QUANTIZE_INT8 or "
        "LH_QUANTIZE_INT4 with LH_QUANTIZE_AUTO, and 0 otherwise",
        o->call, (unsigned)o->codecs);
  }
  if (o->quantize == LH_QUANTIZE_AUTO && (o->error != NULL || o->errors != NULL)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: error is given with LH_QUANTIZE_AUTO; name the codec to keep its errors",
                    o->call);
  }
  if (o->block != 0 && !has_blocks(o)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: block is %u; only LH_QUANTIZE_INT8 and LH_QUANTIZE_INT4 have blocks",
                    o->call, (unsigned)o->block);
  }
  if (o->block != 0 && ((o->block & (o->block - 1)) != 0 || o->block < LH_QUANTIZE_BLOCK_MIN ||
                        o->block > LH_QUANTIZE_BLOCK_MAX)) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: block is %u; give a power of two from %d to %d",
                    o->call, (unsigned)o->block, LH_QUANTIZE_BLOCK_MIN, LH_QUANTIZE_BLOCK_MAX);
  }
  if (o->quantize != LH_UNQUANTIZED && lhi_reduces(o->kind) && o->op != LH_SUM && o->op != LH_AVG) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: op is %d; with quantize give LH_SUM or LH_AVG",
                    o->call, (int)o->op);
  }
  if (o->error != NULL && o->slices != NULL) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: error is given with slices; give errors", o->call);
  }
  if (o->errors != NULL && o->slices == NULL) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: errors is given without slices; give error", o->call);
  }
  if (o->min_world > LH_MEMBERS_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: min_world is %u; a group has at most %d members",
                    o->call, (unsigned)o->min_world, LH_MEMBERS_MAX);
  }
  return LH_OK;
}

/* Checks the dtype of a tensor that is reduced or quantized. */
static lh_status check_dtype(const struct lhi_collective* o, lh_dtype dtype) {
  if (o->quantize != LH_UNQUANTIZED && dtype != LH_FLOAT32 && dtype != LH_FLOAT16 &&
      dtype != LH_BFLOAT16) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: dtype is %d; with quantize give LH_FLOAT32, LH_FLOAT16 or LH_BFLOAT16",
                    o->call, (int)dtype);
  }
  if (!lhi_reduces(o->kind)) return LH_OK;
  if (dtype == LH_FLOAT8_E4M3 || dtype == LH_FLOAT8_E5M2) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: dtype is %d, a float8, which can only be moved; convert the tensor to a "
                    "dtype that can be reduced",
                    o->call, (int)dtype);
  }
  if (dtype == LH_BOOL && (o->op == LH_AVG || o->op == LH_PROD)) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: op is %s for LH_BOOL; give LH_SUM, LH_MIN or LH_MAX",
                    o->call, o->op == LH_AVG ? "LH_AVG" : "LH_PROD");
  }
  if (o->weight != NULL && dtype != LH_FLOAT16 && dtype != LH_BFLOAT16 && dtype != LH_FLOAT32 &&
      dtype != LH_FLOAT64) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: dtype is %d; with a weight give a float of 16 bits "
                    "or more",
                    o->call, (int)dtype);
  }
  return LH_OK;
}

/* Checks the root or partner, and finds out whether this member is the root. */
static lh_status check_root(struct lhi_collective* o, const struct lh_ipc_world* world) {
  bool self;
  if (o->root_name == NULL) return LH_OK;
  self = o->root_member != 0 ? o->root_member == world->member_id : o->root == world->rank;
  if (o->root_member == 0 && o->root >= world->size) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: %s is rank %u, and the group has %u members", o->call,
                    o->root_name, (unsigned)o->root, (unsigned)world->size);
  }
  if (o->kind != LH_WIRE_SEND_RECV) {
    o->is_root = self;
  } else if (self) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: %s names this member itself; name another one",
                    o->call, o->root_name);
  }
  return LH_OK;
}

/* What a member says in its table. The arrays are not copied, except the ids. */
struct terms {
  uint64_t* ids; /* rising; malloc() */
  const uint64_t *gives, *gets;
  uint64_t own; /* `count` of a part of its own */
  uint32_t id_count, gives_count, gets_count;
};

static int compare_ids(const void* a, const void* b) {
  const uint64_t left = *(const uint64_t*)a;
  const uint64_t right = *(const uint64_t*)b;
  return left < right ? -1 : left > right;
}

/* Checks and sorts the participants. */
static lh_status take_participants(const struct lhi_collective* o, const struct lh_ipc_world* world,
                                   struct terms* terms) {
  bool self = false;
  bool root = o->root_name == NULL || o->root_member == 0;
  if (o->participants == NULL && o->participant_count == 0) return LH_OK;
  if (o->participants == NULL || o->participant_count == 0 ||
      o->participant_count > LH_MEMBERS_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: participants is %s, and participant_count is %u; give 1 to %d member ids, "
                    "or NULL and 0 for all members",
                    o->call, o->participants == NULL ? "NULL" : "an array",
                    (unsigned)o->participant_count, LH_MEMBERS_MAX);
  }
  terms->ids = malloc(o->participant_count * sizeof *terms->ids);
  if (terms->ids == NULL) return lhi_fail(LH_UNAVAILABLE, "%s: out of memory", o->call);
  terms->id_count = o->participant_count;
  memcpy(terms->ids, o->participants, o->participant_count * sizeof *terms->ids);
  qsort(terms->ids, terms->id_count, sizeof *terms->ids, compare_ids);
  for (uint32_t i = 0; i < terms->id_count; ++i) {
    if (terms->ids[i] == 0 || (i > 0 && terms->ids[i] == terms->ids[i - 1])) {
      return lhi_fail(LH_INVALID_ARGUMENT,
                      "%s: participants has the member id %llu %s; give each id of a member once",
                      o->call, (unsigned long long)terms->ids[i],
                      terms->ids[i] == 0 ? "which nobody has" : "twice");
    }
    if (terms->ids[i] == world->member_id) self = true;
    if (terms->ids[i] == o->root_member) root = true;
  }
  if (!self) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: participants does not have this member, %llu; only participants start "
                    "the operation",
                    o->call, (unsigned long long)world->member_id);
  }
  if (!root) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: the root, member %llu, is not one of participants",
                    o->call, (unsigned long long)o->root_member);
  }
  return LH_OK;
}

/* Names the set of participants: members match ops by tag and set. */
static uint64_t set_of(const struct lhi_collective* o, const struct terms* terms) {
  uint64_t set = LHI_DIGEST;
  if (o->kind == LH_WIRE_SEND_RECV) { /* both directions may be in flight */
    set = lhi_digest(set, o->is_root);
    return lhi_digest(set, o->root_member != 0 ? o->root_member : ~(uint64_t)o->root);
  }
  if (terms->id_count == 0) return 0;
  for (uint32_t i = 0; i < terms->id_count; ++i) set = lhi_digest(set, terms->ids[i]);
  return set;
}

/* ------------------------------------------------------------------ tensors */

static lh_status too_large(const struct lhi_collective* o, uint64_t count) {
  return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is %llu; one tensor has at most 2^40 bytes",
                  o->call, (unsigned long long)count);
}

/* Sums up lengths. */
static lh_status sum_of(const struct lhi_collective* o, const char* name, const uint64_t* counts,
                        uint64_t* sum_out) {
  *sum_out = 0;
  for (uint32_t i = 0; i < o->world; ++i) {
    if (counts[i] > LH_REGION_BYTES_MAX) {
      return lhi_fail(LH_INVALID_ARGUMENT, "%s: %s[%u] is %llu; one tensor has at most 2^40 bytes",
                      o->call, name, (unsigned)i, (unsigned long long)counts[i]);
    }
    *sum_out += counts[i]; /* cannot overflow: 2^10 lengths of 2^40 */
  }
  return LH_OK;
}

/* Finds the elements of one side of a tensor, and what the table says of it. */
static lh_status measure(const struct lhi_collective* o, const char* name, const uint64_t* counts,
                         enum lhi_extent extent, struct terms* terms, const uint64_t** lengths,
                         uint32_t* length_count, uint64_t* elements_out) {
  *elements_out = extent == LHI_NONE ? 0 : o->count;
  if (!lhi_in_parts(o->kind) || extent == LHI_NONE) return LH_OK;
  if (o->counts == NULL) {
    if (extent == LHI_WHOLE) *elements_out *= o->world; /* take_one() has checked it */
    return LH_OK;
  }
  if (extent == LHI_WHOLE) {
    *lengths = counts;
    *length_count = o->world;
    return sum_of(o, name, counts, elements_out);
  }
  terms->own = o->count;
  *lengths = &terms->own;
  *length_count = 1;
  return LH_OK;
}

/* Checks the world and the lengths of a kind in parts. */
static lh_status check_parts(const struct lhi_collective* o) {
  const bool unequal = o->counts != NULL;
  if (!lhi_in_parts(o->kind)) return LH_OK;
  if (o->world == 0 || o->world > LH_MEMBERS_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: world is %u; give the number of members that the tensors are laid out "
                    "for, 1 to %d",
                    o->call, (unsigned)o->world, LH_MEMBERS_MAX);
  }
  if (o->kind == LH_WIRE_ALL_TO_ALL && o->world > LH_ALL_TO_ALL_MEMBERS_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: world is %u; an all-to-all has at most %d members",
                    o->call, (unsigned)o->world, LH_ALL_TO_ALL_MEMBERS_MAX);
  }
  if (o->kind == LH_WIRE_ALL_TO_ALL && unequal != (o->target_counts != NULL)) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: give counts and target_counts, or neither", o->call);
  }
  if (o->kind == LH_WIRE_ALL_TO_ALL && unequal && o->count != 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is %llu; leave it 0 with counts", o->call,
                    (unsigned long long)o->count);
  }
  if (unequal && o->slices != NULL) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: counts and slices are given; the parts of a list are equal, so give one "
                    "tensor, or no counts",
                    o->call);
  }
  if (unequal && o->algorithm == LH_ONESHOT) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: algorithm is LH_ONESHOT, and parts of unequal lengths cannot travel so; "
                    "give LH_AUTO, LH_MESH or LH_RING",
                    o->call);
  }
  return LH_OK;
}

static lh_status check_oneshot(const struct lhi_collective* o, uint64_t bytes) {
  if (o->algorithm != LH_ONESHOT || bytes <= LH_ONE_SHOT_BYTES_MAX) return LH_OK;
  return lhi_fail(LH_INVALID_ARGUMENT,
                  "%s: a one-shot op has at most %d bytes, this one %llu; leave the algorithm to "
                  "Longhaul (LH_AUTO), or choose LH_MESH or LH_RING",
                  o->call, LH_ONE_SHOT_BYTES_MAX, (unsigned long long)bytes);
}

static lh_status take_one(lh_op* op, const struct lhi_collective* o,
                          const struct lhi_layout* layout, struct terms* terms) {
  const size_t element = lh_dtype_size(o->dtype);
  /* An all-to-all has a part for each pair of members. */
  const uint64_t parts =
      (uint64_t)layout->world * (o->kind == LH_WIRE_ALL_TO_ALL ? layout->world : 1);
  struct lhi_pair pair;
  uint64_t source;
  uint64_t target;
  lh_status status;
  if (element == 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: dtype is %d; give an lh_dtype", o->call,
                    (int)o->dtype);
  }
  status = check_dtype(o, o->dtype);
  if (status != LH_OK) return status;
  if (o->count >
      (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / element / (o->counts == NULL ? layout->world : 1))
    return too_large(o, o->count);
  if (o->counts == NULL) status = check_oneshot(o, o->count * element * parts);
  if (status == LH_OK) {
    status = measure(o, "counts", o->counts, layout->source, terms, &terms->gives,
                     &terms->gives_count, &source);
  }
  if (status == LH_OK) {
    const bool both = o->kind == LH_WIRE_ALL_TO_ALL;
    status = measure(o, both ? "target_counts" : "counts", both ? o->target_counts : o->counts,
                     layout->target, terms, &terms->gets, &terms->gets_count, &target);
  }
  if (status != LH_OK) return status;
  if (source > (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / element) return too_large(o, source);
  if (target > (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / element) return too_large(o, target);
  if (source > 0 && o->source == NULL)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: source is NULL", o->call);
  if (target > 0 && o->target == NULL)
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: target is NULL", o->call);
  source *= element;
  target *= element;
  if (UINTPTR_MAX - (uintptr_t)o->source < source || UINTPTR_MAX - (uintptr_t)o->target < target) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: source or target ends beyond the address space; correct count", o->call);
  }
  if (!layout->in_parts && o->source != o->target && source > 0 && target > 0 &&
      lhi_overlap(o->source, (size_t)source, o->target, (size_t)target)) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: source and target overlap; they must be equal or must not overlap",
                    o->call);
  }
  if (o->error != NULL && source > 0) {
    const size_t error = (size_t)source / element * sizeof(float);
    if (UINTPTR_MAX - (uintptr_t)o->error < error ||
        lhi_overlap(o->error, error, o->source, (size_t)source) ||
        (target > 0 && lhi_overlap(o->error, error, o->target, (size_t)target))) {
      return lhi_fail(LH_INVALID_ARGUMENT,
                      "%s: error overlaps source or target, or ends beyond the address space; give "
                      "it memory of its own, with a float for each element of source",
                      o->call);
    }
  }
  pair.source = o->source;
  pair.target = o->target;
  pair.error = source > 0 ? o->error : NULL;
  pair.bytes = 0;
  lhi_tensors_one(&op->tensors, layout, &pair, o->dtype, o->counts == NULL ? o->count : 0,
                  (size_t)source, (size_t)target);
  return LH_OK;
}

static lh_status take_list(lh_op* op, const struct lhi_collective* o,
                           const struct lhi_layout* layout) {
  struct lhi_tensors* const t = &op->tensors;
  const uint64_t parts =
      (uint64_t)layout->world * (o->kind == LH_WIRE_ALL_TO_ALL ? layout->world : 1);
  uint64_t bytes = 0;
  lh_status status;
  if (o->source != NULL || o->target != NULL) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: slices and source or target are given; give only one of the two", o->call);
  }
  if (o->count != 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: count is %llu; leave it 0 with slices", o->call,
                    (unsigned long long)o->count);
  }
  status = lhi_tensors_list(t, o->call, layout, o->slices, o->slice_count, o->errors);
  for (size_t i = 0; status == LH_OK && i < t->piece_count; ++i) {
    const lh_dtype dtype = (lh_dtype)t->pieces[i].dtype;
    status = check_dtype(o, dtype);
    bytes += t->pieces[i].count * lh_dtype_size(dtype);
  }
  if (status == LH_OK && bytes > LH_COUNT_MAX / parts) {
    status = lhi_fail(LH_INVALID_ARGUMENT,
                      "%s: the slices of all members have more than 2^48 bytes", o->call);
  }
  /* peerd counts the gaps between pieces, too, and says so if there are too many. */
  return status == LH_OK ? check_oneshot(o, bytes * parts) : status;
}

/* Sets up op->tensors, with the lengths of parts in *terms. */
static lh_status take_tensors(lh_op* op, const struct lhi_collective* o, struct terms* terms) {
  struct lhi_layout layout;
  lh_status status = check_parts(o);
  if (status != LH_OK) return status;
  layout.source = lhi_source_of(o->kind, o->is_root);
  layout.target = lhi_target_of(o->kind, o->is_root);
  layout.in_parts = lhi_in_parts(o->kind);
  layout.world = layout.in_parts ? o->world : 1;
  if (o->slices == NULL && o->slice_count > 0) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: slice_count is %llu, and slices is NULL", o->call,
                    (unsigned long long)o->slice_count);
  }
  if (o->slices != NULL) return take_list(op, o, &layout);
  status = take_one(op, o, &layout, terms);
  /* READY frames have room for so many. */
  if (status == LH_OK &&
      (o->weight != NULL ? 8u : 0u) + 4u + 8u * (terms->gives_count + terms->gets_count) >
          LH_OP_TERMS_BYTES_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: world is %u; parts of unequal lengths are possible for at most %d members",
                    o->call, (unsigned)o->world, LH_OP_TERMS_BYTES_MAX / 8 - 3);
  }
  return status;
}

/* ------------------------------------------------------------------ placing tensors in the arena
 */

/* Pins one side of a piece of one tensor if it is in the arena; otherwise the pin stays empty. */
static lh_status pin_locked(const lh_op* op, const char* call, const char* what, const void* data,
                            size_t element, struct lhi_side* side) {
  if (side->bytes == 0) return LH_OK;
  if (!lhi_arena_pin(&op->client->arena, data, side->bytes, &side->pin)) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: %s is not within one buffer from lh_alloc()", call,
                    what);
  }
  if (side->pin.region == NULL || (uintptr_t)data % element == 0) return LH_OK;
  /* Memory outside the arena is copied to an aligned block, so its alignment does not matter. The
   * same holds for the tensors of a list. */
  lhi_unpin(&side->pin);
  if (op->tensors.digest != 0) return LH_OK;
  return lhi_fail(LH_INVALID_ARGUMENT,
                  "%s: %s is not aligned to its elements, as tensors in memory from lh_alloc() "
                  "must be; pass a copy of it",
                  call, what);
}

/* Pins the caller's tensors that peerd uses where they are. Sets *in_place if the op is in place
 * for peerd: then it has to be so in all pieces. */
static lh_status pin_all_locked(lh_op* op, const struct lhi_collective* o, bool* in_place) {
  struct lhi_tensors* const t = &op->tensors;
  const char* const call = o->call;
  *in_place = false;
  for (size_t i = 0; i < t->piece_count; ++i) {
    struct lhi_piece* const piece = &t->pieces[i];
    const struct lhi_pair* const pair = &t->pairs[piece->first];
    const size_t element = lh_dtype_size((lh_dtype)piece->dtype);
    lh_status status;
    if (piece->tensors != 1) continue;
    status = pin_locked(op, call, "source", pair->source, element, &piece->source);
    if (status == LH_OK)
      status = pin_locked(op, call, "target", pair->target, element, &piece->target);
    if (status == LH_OK)
      status = pin_locked(op, call, "error", pair->error, sizeof(float), &piece->error);
    if (status != LH_OK) return status;
    piece->error.data = (uint8_t*)pair->error;
    piece->source.data = (uint8_t*)(uintptr_t)pair->source;
    piece->target.data = pair->target;
    if (t->in_parts) {
      /* peerd wants source and target apart: a part that lies in the whole gets staged memory. If
       * it is quantized, it is not what it was in the result, and the source has to stay what it is
       * until the outcome is known. Then the result gets staged memory. */
      const bool part =
          t->source_parts == 1 && t->target_parts > 1 && o->quantize == LH_UNQUANTIZED;
      if (lhi_piece_overlaps(t, piece)) lhi_unpin(part ? &piece->source.pin : &piece->target.pin);
    } else if (pair->source == pair->target && piece->source.pin.region != NULL &&
               piece->target.pin.region != NULL) {
      *in_place = true;
    }
  }
  for (size_t i = 0; *in_place && i < t->piece_count; ++i) {
    struct lhi_piece* const piece = &t->pieces[i];
    if (piece->source.data == piece->target.data) continue;
    lhi_unpin(&piece->source.pin);
    lhi_unpin(&piece->target.pin);
  }
  return LH_OK;
}

/* Allocates a block of the arena. *region: where it is. */
static lh_status take_block(lh_op* op, const char* call, size_t bytes, int64_t deadline_ns,
                            void** block, struct lhi_region** region) {
  lh_client* const client = op->client;
  const lh_status status = lhi_alloc(client, call, bytes, deadline_ns, block);
  if (status != LH_OK) return status;
  pthread_mutex_lock(&client->mutex);
  *region = lhi_arena_region(&client->arena, *block);
  pthread_mutex_unlock(&client->mutex);
  return LH_OK;
}

static size_t aligned(size_t bytes) {
  return (bytes + LHI_PIECE_ALIGN - 1) / LHI_PIECE_ALIGN * LHI_PIECE_ALIGN;
}

static bool needs_stage(const struct lhi_side* side) {
  return side->bytes > 0 && side->pin.region == NULL;
}

enum side { SOURCE, TARGET, ERROR };

static struct lhi_side* side_of(struct lhi_piece* piece, enum side which) {
  return which == SOURCE ? &piece->source : which == TARGET ? &piece->target : &piece->error;
}

/* Gives all sources, all targets or all errors that are not in the arena a place in one block. */
static lh_status stage(lh_op* op, const char* call, enum side which, int64_t deadline_ns) {
  struct lhi_tensors* const t = &op->tensors;
  struct lhi_staged* const staged = which == SOURCE   ? &op->staged_source
                                    : which == TARGET ? &op->staged_target
                                                      : &op->staged_error;
  struct lhi_region* region = NULL;
  size_t bytes = 0;
  lh_status status;
  for (size_t i = 0; i < t->piece_count; ++i) {
    const struct lhi_side* const side = side_of(&t->pieces[i], which);
    if (needs_stage(side)) bytes += aligned(side->bytes);
  }
  if (bytes == 0) return LH_OK;
  op->staged = true;
  status = take_block(op, call, bytes, deadline_ns, &staged->data, &region);
  if (status != LH_OK) return status;
  staged->bytes = bytes;
  pthread_mutex_lock(&op->client->mutex);
  lhi_arena_stage(&op->client->arena, bytes);
  pthread_mutex_unlock(&op->client->mutex);
  bytes = 0;
  for (size_t i = 0; i < t->piece_count; ++i) {
    struct lhi_side* const side = side_of(&t->pieces[i], which);
    if (!needs_stage(side)) continue;
    side->data = (uint8_t*)staged->data + bytes;
    side->pin.region = region;
    bytes += aligned(side->bytes);
  }
  return LH_OK;
}

/* Sets where peerd finds the tensors: in the arena. The caller's buffers there are pinned first, so
 * that no other thread frees one of them while blocks are allocated. The op is not open yet. If
 * this fails, the caller calls discard(). */
static lh_status place(lh_op* op, const struct lhi_collective* o, int64_t deadline_ns) {
  lh_client* const client = op->client;
  struct lhi_tensors* const t = &op->tensors;
  bool in_place = false;
  lh_status status;
  pthread_mutex_lock(&client->mutex);
  status = lhi_check_states_locked(o->call, op);
  if (status == LH_OK) status = pin_all_locked(op, o, &in_place);
  pthread_mutex_unlock(&client->mutex);
  for (size_t i = 0; status == LH_OK && i < t->piece_count; ++i) {
    if (t->pieces[i].source.pin.region != NULL) op->reads = true;
    if (t->pieces[i].target.pin.region != NULL) op->writes = true;
    if (t->pieces[i].error.pin.region != NULL) op->reads = op->writes = true;
  }
  /* An op in place whose tensors are all outside the arena gets a target block of its own, too.
   * With source and target apart, peerd need not keep the original. Keeping it would cost as much
   * memory, and one more copy. */
  if (status == LH_OK) status = stage(op, o->call, TARGET, deadline_ns);
  if (status == LH_OK) status = stage(op, o->call, ERROR, deadline_ns);
  if (status != LH_OK) return status;
  for (size_t i = 0; i < t->piece_count; ++i) {
    const struct lhi_pin* const pin = &t->pieces[i].error.pin;
    if (pin->region != NULL && pin->block == NULL) lhi_piece_pack_error(t, &t->pieces[i]);
  }
  op->copy_back = op->staged && !o->no_result;
  if (in_place) {
    for (size_t i = 0; i < t->piece_count; ++i) {
      struct lhi_piece* const piece = &t->pieces[i];
      if (!needs_stage(&piece->source)) continue;
      piece->source.data = piece->target.data;
      piece->source.pin.region = piece->target.pin.region;
      lhi_piece_pack(t, piece);
    }
    return LH_OK;
  }
  status = stage(op, o->call, SOURCE, deadline_ns);
  for (size_t i = 0; status == LH_OK && i < t->piece_count; ++i) {
    struct lhi_piece* const piece = &t->pieces[i];
    if (piece->source.pin.region != NULL && piece->source.pin.block == NULL)
      lhi_piece_pack(t, piece);
  }
  return status;
}

/* ------------------------------------------------------------------ the request */

/* Returns the place of one side of a piece. A tensor without elements has none. */
static struct lh_ipc_range range_of(const struct lhi_side* side) {
  const struct lh_ipc_range none = {0, 0};
  return side->bytes == 0 ? none : lhi_range(&side->pin, side->data);
}

static uint8_t* put_numbers(uint8_t* at, const uint64_t* numbers, uint32_t count) {
  if (count > 0) memcpy(at, numbers, count * sizeof *numbers);
  return at + count * sizeof *numbers;
}

/* Writes the table of the op, if the op needs one. */
static lh_status write_table(lh_op* op, const char* call, const struct terms* terms,
                             int64_t deadline_ns, struct lh_ipc_op* request) {
  const struct lhi_tensors* const t = &op->tensors;
  const size_t pieces = t->digest != 0 ? t->piece_count : 0;
  const size_t bytes =
      sizeof(uint64_t) * ((size_t)terms->id_count + terms->gives_count + terms->gets_count) +
      sizeof(struct lh_ipc_piece) * pieces;
  struct lhi_pin pin = {NULL, NULL};
  uint8_t* at;
  lh_status status;
  if (bytes == 0) return LH_OK;
  status = take_block(op, call, bytes, deadline_ns, &op->table, &pin.region);
  if (status != LH_OK) return status;
  at = put_numbers(op->table, terms->ids, terms->id_count);
  at = put_numbers(at, terms->gives, terms->gives_count);
  at = put_numbers(at, terms->gets, terms->gets_count);
  for (size_t i = 0; i < pieces; ++i) {
    struct lh_ipc_piece piece;
    memset(&piece, 0, sizeof piece);
    piece.count = t->pieces[i].count;
    piece.source = range_of(&t->pieces[i].source);
    piece.target = range_of(&t->pieces[i].target);
    piece.error = range_of(&t->pieces[i].error);
    piece.dtype = t->pieces[i].dtype;
    memcpy(at, &piece, sizeof piece);
    at += sizeof piece;
  }
  request->table = lhi_range(&pin, op->table);
  request->participants = terms->id_count;
  request->gives = terms->gives_count;
  request->gets = terms->gets_count;
  request->pieces = (uint32_t)pieces;
  return LH_OK;
}

static void fill_request(const lh_op* op, const struct lhi_collective* o,
                         struct lh_ipc_op* request) {
  const struct lhi_tensors* const t = &op->tensors;
  request->kind = o->kind;
  request->tag = o->tag;
  request->dtype = t->pieces[0].dtype;
  request->reduce = (uint8_t)o->op;
  request->on_fault = (uint8_t)(o->on_fault == LH_AS_JOINED ? op->comm->on_fault : o->on_fault);
  request->min_world = o->min_world;
  request->algorithm = (uint8_t)o->algorithm;
  request->world = (uint16_t)o->world;
  request->order = (uint8_t)o->order;
  request->unequal = o->counts != NULL;
  request->list = t->digest;
  request->quantization =
      (uint8_t)(o->quantize == LH_QUANTIZE_AUTO ? LH_WIRE_QUANTIZE_AUTO + o->codecs - 1
                                                : (uint32_t)o->quantize);
  request->rounding = (uint8_t)o->rounding;
  request->block = (uint16_t)o->block;
  if (o->block == 0 && has_blocks(o)) request->block = LH_BLOCK_DEFAULT;
  if (o->weight != NULL) {
    request->weighted = 1;
    request->weight = *o->weight;
  }
  if (o->root_name != NULL) {
    request->root = o->root_member != 0 ? o->root_member : o->root;
    request->flags = (uint8_t)((o->root_member == 0 ? LH_IPC_ROOT_IS_RANK : 0) |
                               (o->is_root ? LH_IPC_IS_ROOT : 0));
  }
  if (t->digest != 0) return;
  request->count = t->pieces[0].count;
  request->source = range_of(&t->pieces[0].source);
  request->target = range_of(&t->pieces[0].target);
  request->error = range_of(&t->pieces[0].error);
}

/* ------------------------------------------------------------------ start of a collective */

lh_status lhi_collective_take(const char* call, const char* init, const lh_comm* comm,
                              const void* options, void* taken, size_t size, lh_op** op_out) {
  lh_status status;
  if (op_out == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: op_out is NULL", call);
  *op_out = NULL;
  if (comm == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: comm is NULL", call);
  if (options == NULL) return lhi_fail(LH_INVALID_ARGUMENT, "%s: options is NULL", call);
  status = lhi_process_check(comm->client, call);
  return status == LH_OK ? lhi_take(call, init, options, size, taken, size) : status;
}

/* peerd refuses a tag that is in flight. For an op that waits in the client, the answer must not
 * depend on when it is sent, so the client looks itself. */
static lh_status check_tag_locked(const char* call, const lh_comm* comm, const lh_op* mine) {
  for (const lh_op* op = comm->client->ops; op != NULL; op = op->next) {
    if (op->collective && op->state == LHI_OPEN && op->comm == comm && op->tag == mine->tag &&
        op->set == mine->set) {
      return lhi_fail(LH_INVALID_ARGUMENT,
                      "%s: this member has an op with tag %llu in flight; wait for it, or use "
                      "another tag",
                      call, (unsigned long long)mine->tag);
    }
  }
  return LH_OK;
}

static lh_status open_op(lh_op* op, const char* call) {
  lh_comm* const comm = op->comm;
  lh_status status;
  pthread_mutex_lock(&op->client->mutex);
  status = lhi_member_check_locked(comm, call);
  if (status == LH_OK) status = lhi_check_states_locked(call, op);
  if (status == LH_OK && lhi_queue_full_locked(comm)) status = check_tag_locked(call, comm, op);
  if (status == LH_OK) {
    comm->at_join = false;
    lhi_op_open_locked(op);
  }
  pthread_mutex_unlock(&op->client->mutex);
  return status;
}

lh_status lhi_collective_start(lh_comm* comm, struct lhi_collective* asked, lh_op** op_out) {
  lh_client* const client = comm->client;
  const int64_t deadline_ns = lhi_answer_deadline_ns(client);
  struct lh_ipc_request request;
  struct lh_ipc_world world;
  struct lh_ipc_op body;
  struct terms terms;
  lh_status status;
  lh_op* op;
  memset(&terms, 0, sizeof terms);
  memset(&body, 0, sizeof body);
  pthread_mutex_lock(&client->mutex);
  /* A program may start many ops before it waits for one: read the replies that have come. */
  lhi_pump_locked(client);
  status = lhi_member_check_locked(comm, asked->call);
  world = comm->world;
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK) status = check_options(asked);
  if (status == LH_OK) status = check_root(asked, &world);
  if (status != LH_OK) return status;
  op = lhi_op_make(client, &kType, comm);
  if (op == NULL) return LH_UNAVAILABLE;
  op->collective = true;
  op->tag = asked->tag;
  status = take_participants(asked, &world, &terms);
  if (status == LH_OK) status = take_tensors(op, asked, &terms);
  if (status == LH_OK) {
    op->set = set_of(asked, &terms);
    status = place(op, asked, deadline_ns);
  }
  if (status == LH_OK) status = write_table(op, asked->call, &terms, deadline_ns, &body);
  free(terms.ids);
  if (status == LH_OK) {
    fill_request(op, asked, &body);
    status = open_op(op, asked->call);
  }
  if (status != LH_OK) {
    discard(op);
    return status;
  }
  /* If the connection is dead, the op has ended already, and nobody reads what is sent. */
  request = lhi_request(LH_IPC_OP, op);
  request.member = comm->handle;
  request.u.op = body;
  lhi_send(client, &request, -1);
  *op_out = op;
  return LH_OK;
}

lh_status lhi_collective_may_wait(const char* call, int64_t timeout_ms, lh_op_info_t* info,
                                  lh_op** op_out) {
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

lh_status lhi_collective_wait(const char* call, lh_op* op, int64_t timeout_ms, lh_op_info_t* info,
                              lh_op** op_out) {
  lh_client* const client = op->client;
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
