#define _GNU_SOURCE
#include "client/src/collective.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/src/comm.h"
#include "client/src/connection.h"
#include "client/src/error.h"
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
    const bool restores = op->status != LH_OK && t->pieces[i].source_in_target;
    for (int which = 0; which < LHI_SIDES; ++which) {
      struct lhi_pin* const pin = &t->pieces[i].sides[which].pin;
      /* Staged memory has a region and no block: collect() needs it. It also needs a target in
       * which it puts the source back. */
      if (pin->block != NULL && !(restores && which == LHI_TARGET)) lhi_unpin(pin);
    }
  }
  lhi_give_back_locked(op->client, op->table);
  op->table = NULL;
}

static bool arrived(const lh_op* op) { return op->status == LH_OK ? op->copy_back : op->restore; }

static void collect(lh_op* op) {
  const struct lhi_tensors* const t = &op->tensors;
  for (size_t i = 0; i < t->piece_count; ++i) {
    if (op->status != LH_OK) {
      if (t->pieces[i].source_in_target) lhi_piece_unpack(t, &t->pieces[i], LHI_SOURCE);
      continue;
    }
    for (int which = LHI_TARGET; which < LHI_SIDES; ++which) {
      const struct lhi_piece* const piece = &t->pieces[i];
      if (piece->sides[which].pin.region != NULL) lhi_piece_unpack(t, piece, which);
    }
  }
}

static void over(lh_op* op, bool good) {
  (void)good;
  for (size_t i = 0; op->restore && i < op->tensors.piece_count; ++i) {
    struct lhi_pin* const pin = &op->tensors.pieces[i].sides[LHI_TARGET].pin;
    if (pin->block != NULL) lhi_unpin(pin);
  }
  for (int which = 0; which < LHI_SIDES; ++which) {
    struct lhi_staged* const staged = &op->staged_sides[which];
    if (staged->data == NULL) continue;
    lhi_arena_unstage(&op->client->arena, staged->bytes);
    lhi_give_back_locked(op->client, staged->data);
    staged->data = NULL;
  }
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

/* peerd checks whether an op is legal (proto/wire/op_desc.h, ipc_op.h), and its refusal is the
 * outcome of the op. Only what peerd cannot see is checked here: options that stand for one number
 * of the request, or that exclude each other, and the caller's memory. */

static lh_status check_options(const struct lhi_collective* o) {
  if ((unsigned)o->quantize > LH_QUANTIZE_AUTO) {
    return lhi_refuse(o->call, "quantize is %d; give an lh_quantization", (int)o->quantize);
  }
  if (o->quantize == LH_QUANTIZE_AUTO ? o->codecs == 0 || o->codecs > 7 : o->codecs != 0) {
    return lhi_refuse(o->call,
                      "codecs is %u; give LH_CODEC_BIT() of LH_QUANTIZE_BF16, LH_QUANTIZE_INT8 or "
                      "LH_QUANTIZE_INT4 with LH_QUANTIZE_AUTO, and 0 otherwise",
                      (unsigned)o->codecs);
  }
  if (o->slices == NULL && o->slice_count > 0) {
    return lhi_refuse(o->call, "slice_count is %llu, and slices is NULL",
                      (unsigned long long)o->slice_count);
  }
  if (o->slices != NULL && (o->source != NULL || o->target != NULL)) {
    return lhi_refuse(o->call, "slices and source or target are given; give only one of the two");
  }
  if (o->slices == NULL ? o->errors != NULL : o->error != NULL) {
    return lhi_refuse(o->call, o->slices == NULL ? "errors is given without slices; give error"
                                                 : "error is given with slices; give errors");
  }
  if (o->kind == LH_WIRE_ALL_TO_ALL && (o->counts != NULL) != (o->target_counts != NULL)) {
    return lhi_refuse(o->call, "give counts and target_counts, or neither");
  }
  if ((o->participants == NULL) != (o->participant_count == 0) ||
      o->participant_count > LH_MEMBERS_MAX) {
    return lhi_refuse(o->call,
                      "participants is %s, and participant_count is %u; give 1 to %d member ids, "
                      "or NULL and 0 for all members",
                      o->participants == NULL ? "NULL" : "an array", (unsigned)o->participant_count,
                      LH_MEMBERS_MAX);
  }
  return LH_OK;
}

/* Checks the rank of the root or partner, and finds out whether this member is the root. */
static lh_status check_root(struct lhi_collective* o, const struct lh_ipc_world* world) {
  if (o->root_name == NULL) return LH_OK;
  if (o->root_member == 0 && o->root >= world->size) {
    return lhi_refuse(o->call, "%s is rank %u, and the group has %u members", o->root_name,
                      (unsigned)o->root, (unsigned)world->size);
  }
  if (o->kind != LH_WIRE_SEND_RECV) {
    o->is_root = o->root_member != 0 ? o->root_member == world->member_id : o->root == world->rank;
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

static lh_status sort_participants(const struct lhi_collective* o, struct terms* terms) {
  const size_t bytes = o->participant_count * sizeof *terms->ids;
  if (bytes == 0) return LH_OK;
  terms->ids = malloc(bytes);
  if (terms->ids == NULL) return lhi_fail(LH_UNAVAILABLE, "%s: out of memory", o->call);
  terms->id_count = o->participant_count;
  memcpy(terms->ids, o->participants, bytes);
  qsort(terms->ids, terms->id_count, sizeof *terms->ids, compare_ids);
  return LH_OK;
}

/* Names the set of participants: members match ops by tag and set. */
static uint64_t set_of(const struct lhi_collective* o, const struct terms* terms) {
  /* The ids of a set must not look like a direction and a partner. */
  uint64_t set = lhi_digest(LHI_DIGEST, o->kind == LH_WIRE_SEND_RECV);
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
  return lhi_refuse(o->call, "count is %llu; one tensor has at most 2^40 bytes",
                    (unsigned long long)count);
}

/* Finds the elements of one side of a tensor, and what the table says of it. */
static lh_status measure(const struct lhi_collective* o, const struct lhi_layout* layout, int which,
                         struct terms* terms, uint64_t* elements) {
  const bool gets = which == LHI_TARGET;
  const bool other = gets && o->target_counts != NULL;
  const uint64_t* const counts = other ? o->target_counts : o->counts;
  const int extent = gets ? layout->target : layout->source;
  const uint64_t** const lengths = gets ? &terms->gets : &terms->gives;
  uint32_t* const length_count = gets ? &terms->gets_count : &terms->gives_count;
  *elements = extent == LH_WIRE_NOTHING ? 0 : o->count;
  if (extent == LH_WIRE_NOTHING || !layout->in_parts) return LH_OK;
  if (o->counts == NULL) {
    if (extent == LH_WIRE_WHOLE) *elements *= layout->world; /* take_one() has checked it */
    return LH_OK;
  }
  if (extent == LH_WIRE_PART) {
    terms->own = o->count;
    *lengths = &terms->own;
    *length_count = 1;
    return LH_OK;
  }
  *lengths = counts;
  *length_count = o->world;
  *elements = 0;
  for (uint32_t i = 0; i < o->world; ++i) {
    *elements += counts[i];
    if (counts[i] > LH_REGION_BYTES_MAX || *elements > LH_REGION_BYTES_MAX) {
      return lhi_refuse(o->call, "%s[%u] is %llu; one tensor has at most 2^40 bytes",
                        other ? "target_counts" : "counts", (unsigned)i,
                        (unsigned long long)counts[i]);
    }
  }
  return LH_OK;
}

static lh_status take_one(lh_op* op, const struct lhi_collective* o,
                          const struct lhi_layout* layout, struct terms* terms) {
  const size_t element = lh_dtype_size(o->dtype);
  const uint64_t elements_max =
      element == 0 ? 0 : (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / element;
  struct lhi_pair pair;
  uint64_t source;
  uint64_t target;
  lh_status status;
  if (element == 0) return lhi_refuse(o->call, "dtype is %d; give an lh_dtype", (int)o->dtype);
  if (o->count > elements_max / (o->counts == NULL ? layout->world : 1))
    return too_large(o, o->count);
  status = measure(o, layout, LHI_SOURCE, terms, &source);
  if (status == LH_OK) status = measure(o, layout, LHI_TARGET, terms, &target);
  if (status != LH_OK) return status;
  if (source > elements_max || target > elements_max)
    return too_large(o, source > target ? source : target);
  if (source > 0 && o->source == NULL) return lhi_refuse(o->call, "source is NULL");
  if (target > 0 && o->target == NULL) return lhi_refuse(o->call, "target is NULL");
  source *= element;
  target *= element;
  if (UINTPTR_MAX - (uintptr_t)o->source < source || UINTPTR_MAX - (uintptr_t)o->target < target) {
    return lhi_refuse(o->call, "source or target ends beyond the address space; correct count");
  }
  if (!layout->in_parts && o->source != o->target && source > 0 && target > 0 &&
      lhi_overlap(o->source, (size_t)source, o->target, (size_t)target)) {
    return lhi_refuse(o->call, "source and target overlap; they must be equal or must not overlap");
  }
  if (o->error != NULL && source > 0) {
    const size_t error = (size_t)source / element * sizeof(float);
    if (UINTPTR_MAX - (uintptr_t)o->error < error ||
        lhi_overlap(o->error, error, o->source, (size_t)source) ||
        (target > 0 && lhi_overlap(o->error, error, o->target, (size_t)target))) {
      return lhi_refuse(o->call,
                        "error overlaps source or target, or ends beyond the address space; give "
                        "it memory of its own, with a float for each element of source");
    }
  }
  /* The source is only read. */
  pair.at[LHI_SOURCE] = (uint8_t*)(uintptr_t)o->source;
  pair.at[LHI_TARGET] = o->target;
  pair.at[LHI_ERROR] = source > 0 ? (uint8_t*)o->error : NULL;
  pair.bytes = 0;
  lhi_tensors_one(&op->tensors, layout, &pair, o->dtype, o->counts == NULL ? o->count : 0,
                  (size_t)source, (size_t)target);
  return LH_OK;
}

/* Sets up op->tensors, with the lengths of parts in *terms. */
static lh_status take_tensors(lh_op* op, const struct lhi_collective* o, struct terms* terms) {
  const struct lh_kind* const kind = lh_kind_of(o->kind);
  struct lhi_layout layout;
  if (kind->in_parts && (o->world == 0 || o->world > LH_MEMBERS_MAX)) {
    return lhi_refuse(o->call,
                      "world is %u; give the number of members that the tensors are laid out for, "
                      "1 to %d",
                      (unsigned)o->world, LH_MEMBERS_MAX);
  }
  layout.source = kind->source[o->is_root];
  layout.target = kind->target[o->is_root];
  layout.in_parts = kind->in_parts;
  layout.world = kind->in_parts ? o->world : 1;
  if (o->slices == NULL) return take_one(op, o, &layout, terms);
  return lhi_tensors_list(&op->tensors, o->call, &layout, o->slices, o->slice_count, o->errors);
}

/* Checks the lengths that this member gives for the part between itself and itself. They can be
 * told from one another only while the parts are those of the last boundary: there it knows its
 * rank. */
static lh_status check_own_part(const struct lhi_collective* o, const struct lh_ipc_world* world) {
  const uint32_t rank = world->step_rank;
  const struct lh_kind* const kind = lh_kind_of(o->kind);
  const bool to_all = o->kind == LH_WIRE_ALL_TO_ALL;
  const bool whole =
      kind->source[o->is_root] == LH_WIRE_WHOLE || kind->target[o->is_root] == LH_WIRE_WHOLE;
  uint64_t own;
  if (o->counts == NULL || !whole || o->participant_count > 0 || o->world != world->step_size ||
      rank >= o->world) {
    return LH_OK;
  }
  own = to_all ? o->target_counts[rank] : o->count;
  if (own == o->counts[rank]) return LH_OK;
  return lhi_refuse(o->call,
                    to_all ? "this member expects %llu elements of itself, and counts[%u], for the "
                             "member of its rank, is %llu"
                           : "this member's part has %llu elements, and counts[%u], for the member "
                             "of its rank, is %llu",
                    (unsigned long long)own, (unsigned)rank, (unsigned long long)o->counts[rank]);
}

/* ------------------------------------------------------------------ placing tensors in the arena
 */

/* Pins one side of a piece of one tensor if it is in the arena; otherwise the pin stays empty. */
static lh_status pin_locked(const lh_op* op, const char* call, struct lhi_piece* piece, int which) {
  static const char* const kNames[] = {"source", "target", "error"};
  struct lhi_side* const side = &piece->sides[which];
  const size_t element = which == LHI_ERROR ? sizeof(float) : lh_dtype_size((lh_dtype)piece->dtype);
  side->data = op->tensors.pairs[piece->first].at[which];
  if (side->bytes == 0) return LH_OK;
  if (!lhi_arena_pin(&op->client->arena, side->data, side->bytes, &side->pin)) {
    return lhi_refuse(call, "%s is not within one buffer from lh_alloc()", kNames[which]);
  }
  if (side->pin.region == NULL || (uintptr_t)side->data % element == 0) return LH_OK;
  /* Memory outside the arena is copied to an aligned block, so its alignment does not matter. The
   * same holds for the tensors of a list. */
  lhi_unpin(&side->pin);
  if (op->tensors.digest != 0) return LH_OK;
  return lhi_refuse(call,
                    "%s is not aligned to its elements, as tensors in memory from lh_alloc() "
                    "must be; pass a copy of it",
                    kNames[which]);
}

/* Pins the caller's tensors that peerd uses where they are. Sets *in_place if the op is in place
 * for peerd: then it has to be so in all pieces. */
static lh_status pin_all_locked(lh_op* op, const struct lhi_collective* o, bool* in_place) {
  struct lhi_tensors* const t = &op->tensors;
  *in_place = false;
  for (size_t i = 0; i < t->piece_count; ++i) {
    struct lhi_piece* const piece = &t->pieces[i];
    struct lhi_side* const source = &piece->sides[LHI_SOURCE];
    struct lhi_side* const target = &piece->sides[LHI_TARGET];
    if (piece->tensors != 1) continue;
    for (int which = 0; which < LHI_SIDES; ++which) {
      const lh_status status = pin_locked(op, o->call, piece, which);
      if (status != LH_OK) return status;
    }
    if (t->in_parts) {
      /* peerd wants source and target apart: a part that lies in the whole gets staged memory. If
       * it is quantized, it is not what it was in the result, and the source has to stay what it is
       * until the outcome is known. Then the result gets staged memory. */
      const bool part =
          t->source_parts == 1 && t->target_parts > 1 && o->quantize == LH_UNQUANTIZED;
      if (lhi_piece_overlaps(t, piece)) {
        piece->source_in_target = part && target->pin.region != NULL;
        op->restore = op->restore || piece->source_in_target;
        lhi_unpin(part ? &source->pin : &target->pin);
      }
    } else if (source->data == target->data && source->pin.region != NULL &&
               target->pin.region != NULL) {
      *in_place = true;
    }
  }
  for (size_t i = 0; *in_place && i < t->piece_count; ++i) {
    struct lhi_side* const sides = t->pieces[i].sides;
    if (sides[LHI_SOURCE].data == sides[LHI_TARGET].data) continue;
    lhi_unpin(&sides[LHI_SOURCE].pin);
    lhi_unpin(&sides[LHI_TARGET].pin);
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

/* Gives all sources, all targets or all errors that are not in the arena a place in one block. */
static lh_status stage(lh_op* op, const char* call, int which, int64_t deadline_ns) {
  struct lhi_tensors* const t = &op->tensors;
  struct lhi_staged* const staged = &op->staged_sides[which];
  struct lhi_region* region = NULL;
  size_t bytes = 0;
  lh_status status;
  for (size_t i = 0; i < t->piece_count; ++i) {
    const struct lhi_side* const side = &t->pieces[i].sides[which];
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
    struct lhi_side* const side = &t->pieces[i].sides[which];
    if (!needs_stage(side)) continue;
    side->data = (uint8_t*)staged->data + bytes;
    side->pin.region = region;
    bytes += aligned(side->bytes);
  }
  return LH_OK;
}

/* Copies the caller's tensors of one side to their staged memory. */
static void pack(const struct lhi_tensors* t, int which) {
  for (size_t i = 0; i < t->piece_count; ++i) {
    const struct lhi_pin* const pin = &t->pieces[i].sides[which].pin;
    if (pin->region != NULL && pin->block == NULL) lhi_piece_pack(t, &t->pieces[i], which);
  }
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
    const struct lhi_side* const sides = t->pieces[i].sides;
    const bool error = sides[LHI_ERROR].pin.region != NULL;
    if (error || sides[LHI_SOURCE].pin.region != NULL) op->reads = true;
    if (error || sides[LHI_TARGET].pin.region != NULL) op->writes = true;
  }
  /* An op in place whose tensors are all outside the arena gets a target block of its own, too.
   * With source and target apart, peerd need not keep the original. Keeping it would cost as much
   * memory, and one more copy. */
  if (status == LH_OK) status = stage(op, o->call, LHI_TARGET, deadline_ns);
  if (status == LH_OK) status = stage(op, o->call, LHI_ERROR, deadline_ns);
  if (status != LH_OK) return status;
  pack(t, LHI_ERROR);
  op->copy_back = op->staged && !o->no_result;
  if (!in_place) {
    status = stage(op, o->call, LHI_SOURCE, deadline_ns);
    if (status == LH_OK) pack(t, LHI_SOURCE);
    return status;
  }
  for (size_t i = 0; i < t->piece_count; ++i) {
    struct lhi_side* const sides = t->pieces[i].sides;
    if (!needs_stage(&sides[LHI_SOURCE])) continue;
    sides[LHI_SOURCE].data = sides[LHI_TARGET].data;
    sides[LHI_SOURCE].pin.region = sides[LHI_TARGET].pin.region;
    lhi_piece_pack(t, &t->pieces[i], LHI_SOURCE);
  }
  return LH_OK;
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

/* Writes the table of the op, if the op needs one. `refusal`: the text of a refused op, or "". */
static lh_status write_table(lh_op* op, const char* call, const struct terms* terms,
                             const char* refusal, int64_t deadline_ns, struct lh_ipc_op* request) {
  const struct lhi_tensors* const t = &op->tensors;
  const size_t pieces = t->digest != 0 ? t->piece_count : 0;
  const size_t bytes =
      sizeof(uint64_t) * ((size_t)terms->id_count + terms->gives_count + terms->gets_count) +
      sizeof(struct lh_ipc_piece) * pieces + t->outline_bytes + strlen(refusal);
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
    piece.source = range_of(&t->pieces[i].sides[LHI_SOURCE]);
    piece.target = range_of(&t->pieces[i].sides[LHI_TARGET]);
    piece.error = range_of(&t->pieces[i].sides[LHI_ERROR]);
    piece.dtype = t->pieces[i].dtype;
    memcpy(at, &piece, sizeof piece);
    at += sizeof piece;
  }
  if (t->outline_bytes > 0) memcpy(at, t->outline, t->outline_bytes);
  at += t->outline_bytes;
  memcpy(at, refusal, strlen(refusal));
  request->outline = t->outline_bytes;
  request->refusal = (uint8_t)strlen(refusal);
  request->table = lhi_range(&pin, op->table);
  request->participants = terms->id_count;
  request->gives = terms->gives_count;
  request->gets = terms->gets_count;
  request->pieces = (uint32_t)pieces;
  return LH_OK;
}

/* Whether elements may share scales. */
static bool has_blocks(const struct lhi_collective* o) {
  if (o->quantize == LH_QUANTIZE_AUTO)
    return (o->codecs & (LH_CODEC_BIT(LH_QUANTIZE_INT8) | LH_CODEC_BIT(LH_QUANTIZE_INT4))) != 0;
  return o->quantize == LH_QUANTIZE_INT8 || o->quantize == LH_QUANTIZE_INT4;
}

/* Fills in the root or partner of a request. */
static void put_root(const struct lhi_collective* o, struct lh_ipc_op* request) {
  if (o->root_name == NULL) return;
  request->root = o->root_member != 0 ? o->root_member : o->root;
  request->flags = (uint8_t)((o->root_member == 0 ? LH_IPC_ROOT_IS_RANK : 0) |
                             (o->is_root ? LH_IPC_IS_ROOT : 0));
}

static lh_status fill_request(const lh_op* op, const struct lhi_collective* o,
                              struct lh_ipc_op* request) {
  const struct lhi_tensors* const t = &op->tensors;
  const lh_on_fault on_fault = o->on_fault == LH_AS_JOINED ? op->comm->on_fault : o->on_fault;
  request->kind = o->kind;
  request->tag = o->tag;
  request->dtype = t->pieces[0].dtype;
  LHI_PUT(o->call, request->reduce, "op", o->op);
  LHI_PUT(o->call, request->on_fault, "on_fault", on_fault);
  LHI_PUT(o->call, request->algorithm, "algorithm", o->algorithm);
  LHI_PUT(o->call, request->world, "world", o->world);
  LHI_PUT(o->call, request->order, "order", o->order);
  LHI_PUT(o->call, request->rounding, "rounding", o->rounding);
  LHI_PUT(o->call, request->block, "block",
          o->block == 0 && has_blocks(o) ? LH_BLOCK_DEFAULT : o->block);
  request->min_world = o->min_world;
  request->unequal = o->counts != NULL;
  request->list = t->digest;
  request->quantization =
      (uint8_t)(o->quantize == LH_QUANTIZE_AUTO ? LH_WIRE_QUANTIZE_AUTO + o->codecs - 1
                                                : (uint32_t)o->quantize);
  if (o->weight != NULL) {
    request->weighted = 1;
    request->weight = *o->weight;
  }
  put_root(o, request);
  /* With unequal parts, `count` of the other kinds is a length in the table. */
  if (o->counts == NULL || o->kind == LH_WIRE_ALL_TO_ALL) request->count = o->count;
  if (t->digest != 0) return LH_OK;
  request->source = range_of(&t->pieces[0].sides[LHI_SOURCE]);
  request->target = range_of(&t->pieces[0].sides[LHI_TARGET]);
  request->error = range_of(&t->pieces[0].sides[LHI_ERROR]);
  return LH_OK;
}

/* ------------------------------------------------------------------ start of a collective */

lh_status lhi_collective_take(const char* call, const char* init, const lh_comm* comm,
                              const void* options, void* taken, size_t size, lh_op** op_out) {
  lh_status status;
  if (op_out == NULL) return lhi_refuse(call, "op_out is NULL");
  *op_out = NULL;
  if (comm == NULL) return lhi_refuse(call, "comm is NULL");
  if (options == NULL) return lhi_refuse(call, "options is NULL");
  status = lhi_process_check(comm->client, call);
  return status == LH_OK ? lhi_take(call, init, options, size, taken, size) : status;
}

/* peerd refuses a tag that is in flight. For an op that waits in the client, the answer must not
 * depend on when it is sent, so the client looks itself. */
static lh_status check_tag_locked(const char* call, const lh_comm* comm, const lh_op* mine) {
  for (const lh_op* op = comm->client->ops; op != NULL; op = op->next) {
    if (op->collective && op->state == LHI_OPEN && op->comm == comm && op->tag == mine->tag &&
        op->set == mine->set) {
      return lhi_refuse(call,
                        "this member has an op with tag %llu in flight; wait for it, or use "
                        "another tag",
                        (unsigned long long)mine->tag);
    }
  }
  return LH_OK;
}

/* The members that begin together may start ops before their first step boundary. That is then a
 * boundary of all of them, or of none, so what only some of them start does not count. */
static void began_locked(lh_comm* comm, uint64_t set) {
  if (set == 0) comm->at_join = false;
}

/* Tells peerd that this call was refused, and why, so that no other participant waits for it. No
 * memory of the call is used but its name. Nobody waits for the answer. */
static void tell_refusal(lh_comm* comm, const struct lhi_collective* o, const char* why) {
  lh_client* const client = comm->client;
  struct lh_ipc_request request;
  struct lh_ipc_op body;
  struct terms terms;
  char text[LH_IPC_REFUSAL_BYTES_MAX + 1];
  uint64_t set;
  lh_op* op;
  bool sends;
  if ((o->participants == NULL) != (o->participant_count == 0) ||
      o->participant_count > LH_MEMBERS_MAX) {
    return;
  }
  snprintf(text, sizeof text, "%s", *why == '\0' ? "no reason was given" : why);
  memset(&terms, 0, sizeof terms);
  memset(&body, 0, sizeof body);
  op = lhi_op_make(client, &kType, comm);
  if (op == NULL) return;
  if (sort_participants(o, &terms) != LH_OK ||
      write_table(op, o->call, &terms, text, lhi_answer_deadline_ns(client), &body) != LH_OK) {
    free(terms.ids);
    discard(op);
    return;
  }
  set = set_of(o, &terms);
  free(terms.ids);
  body.kind = o->kind;
  body.tag = o->tag;
  put_root(o, &body);
  pthread_mutex_lock(&client->mutex);
  began_locked(comm, set);
  lhi_op_open_locked(op);
  request = lhi_request(LH_IPC_OP, op);
  request.member = comm->handle;
  request.u.op = body;
  sends = op->state == LHI_OPEN;
  lhi_op_release_locked(op);
  pthread_mutex_unlock(&client->mutex);
  if (sends) lhi_send(client, &request, -1);
}

/* tell_refusal() for a call that ends with `status`, and the text of lh_last_error(). */
static lh_status refused(lh_comm* comm, const struct lhi_collective* o, lh_status status) {
  char text[LH_IPC_REFUSAL_BYTES_MAX + 1];
  char* whole;
  if (status != LH_INVALID_ARGUMENT) return status;
  whole = lhi_copy_text(lh_last_error());
  snprintf(text, sizeof text, "%s", lh_last_error());
  tell_refusal(comm, o, text);
  if (whole != NULL) lhi_fail(status, "%s", whole);
  free(whole);
  return status;
}

lh_status lh_refuse(lh_comm* comm, const lh_refuse_options* options) {
  static const char* const kCalls[] = {
      "",           "lh_all_reduce", "lh_reduce_scatter", "lh_all_gather", "lh_broadcast",
      "lh_barrier", "lh_reduce",     "lh_gather",         "lh_scatter",    "lh_all_to_all",
      "lh_send",
  };
  lh_refuse_options o = LH_REFUSE_OPTIONS_INIT;
  struct lhi_collective asked;
  lh_status status = lhi_check_comm(comm, "lh_refuse");
  if (status != LH_OK) return status;
  if (options == NULL) return lhi_refuse("lh_refuse", "options is NULL");
  status = lhi_take("lh_refuse", "LH_REFUSE_OPTIONS_INIT", options, sizeof o, &o, sizeof o);
  if (status != LH_OK) return status;
  if (o.call == NULL || o.why == NULL) return lhi_refuse("lh_refuse", "call or why is NULL");
  memset(&asked, 0, sizeof asked);
  asked.call = "lh_refuse";
  for (uint8_t kind = 1; kind < LH_WIRE_KIND_END; ++kind) {
    if (strcmp(o.call, kCalls[kind]) == 0) asked.kind = kind;
  }
  asked.is_root = asked.kind == LH_WIRE_SEND_RECV;
  if (strcmp(o.call, "lh_recv") == 0) asked.kind = LH_WIRE_SEND_RECV;
  if (asked.kind == 0) {
    return lhi_refuse("lh_refuse", "call is \"%s\"; give one such as \"lh_all_gather\"", o.call);
  }
  pthread_mutex_lock(&comm->client->mutex);
  status = lhi_boundary_check_locked(comm, "lh_refuse");
  pthread_mutex_unlock(&comm->client->mutex);
  if (status != LH_OK) return status;
  asked.tag = o.tag;
  asked.participants = o.participants;
  asked.participant_count = o.participant_count;
  if (asked.kind == LH_WIRE_SEND_RECV) {
    asked.root_name = "partner";
    asked.root = o.partner;
    asked.root_member = o.partner_member;
  }
  tell_refusal(comm, &asked, o.why);
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
    began_locked(comm, op->set);
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
  if (status == LH_OK) status = lhi_boundary_check_locked(comm, asked->call);
  world = comm->world;
  pthread_mutex_unlock(&client->mutex);
  if (status == LH_OK) status = check_options(asked);
  if (status == LH_OK) status = check_root(asked, &world);
  if (status != LH_OK) return refused(comm, asked, status);
  op = lhi_op_make(client, &kType, comm);
  if (op == NULL) return LH_UNAVAILABLE;
  op->collective = true;
  op->tag = asked->tag;
  status = sort_participants(asked, &terms);
  if (status == LH_OK) status = take_tensors(op, asked, &terms);
  if (status == LH_OK) status = check_own_part(asked, &world);
  if (status == LH_OK) {
    op->set = set_of(asked, &terms);
    status = place(op, asked, deadline_ns);
  }
  if (status == LH_OK) status = write_table(op, asked->call, &terms, "", deadline_ns, &body);
  free(terms.ids);
  if (status == LH_OK) status = fill_request(op, asked, &body);
  if (status != LH_OK) {
    discard(op);
    return refused(comm, asked, status);
  }
  status = open_op(op, asked->call);
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
  if (op_out == NULL) return lhi_refuse(call, "op_out is NULL");
  *op_out = NULL;
  status = lhi_check_timeout(call, timeout_ms);
  /* Check the caller's struct before anything is started, and before anything else of it is read.
   */
  if (status == LH_OK && info != NULL) {
    status = lhi_check_struct(call, "LH_OP_INFO_INIT", info, LHI_OP_INFO_FIRST_BYTES);
  }
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
