#include "client/src/tensors.h"

#include <stdlib.h>
#include <string.h>

#include "client/src/copy.h"
#include "client/src/error.h"

#define NO_PIECE UINT32_MAX

bool lhi_overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const uintptr_t a_at = (uintptr_t)a;
  const uintptr_t b_at = (uintptr_t)b;
  return a_at < b_at + b_bytes && b_at < a_at + a_bytes;
}

/* ------------------------------------------------------------------ memory in use */

static int compare(const void* a, const void* b) {
  const uintptr_t a_at = ((const struct lhi_use*)a)->begin;
  const uintptr_t b_at = ((const struct lhi_use*)b)->begin;
  return a_at < b_at ? -1 : a_at > b_at;
}

/* Most programs allocate their tensors in the order in which they pass them. */
static void sort(struct lhi_use* uses, size_t count) {
  size_t i = 1;
  while (i < count && uses[i - 1].begin <= uses[i].begin) ++i;
  if (i < count) qsort(uses, count, sizeof *uses, compare);
}

static void add(struct lhi_tensors* t, const void* data, size_t bytes, uint64_t slice,
                bool written) {
  const struct lhi_use use = {(uintptr_t)data, (uintptr_t)data + bytes, slice, written};
  if (bytes > 0) t->uses[t->use_count++] = use;
}

/* The bytes of the error of a source. */
static size_t error_bytes(size_t source_bytes, lh_dtype dtype) {
  return source_bytes / lh_dtype_size(dtype) * sizeof(float);
}

/* Adds the memory of one tensor of the caller. Source and target that share memory are one range.
 */
static void add_pair(struct lhi_tensors* t, const struct lhi_pair* pair, lh_dtype dtype,
                     size_t source_bytes, size_t target_bytes, uint64_t slice, bool may_overlap) {
  const uint8_t* const source = pair->at[LHI_SOURCE];
  const uint8_t* const target = pair->at[LHI_TARGET];
  if (pair->at[LHI_ERROR] != NULL)
    add(t, pair->at[LHI_ERROR], error_bytes(source_bytes, dtype), slice, true);
  if (source_bytes > 0 && target_bytes > 0 &&
      (source == target ||
       (may_overlap && lhi_overlap(source, source_bytes, target, target_bytes)))) {
    const uint8_t* const begin = source < target ? source : target;
    const size_t source_end = (size_t)(source - begin) + source_bytes;
    const size_t target_end = (size_t)(target - begin) + target_bytes;
    add(t, begin, source_end > target_end ? source_end : target_end, slice, true);
  } else {
    add(t, source, source_bytes, slice, false);
    add(t, target, target_bytes, slice, true);
  }
}

bool lhi_tensors_touch(const struct lhi_tensors* t, const void* data, size_t bytes, bool written) {
  const uintptr_t begin = (uintptr_t)data;
  size_t low = 0;
  size_t high = t->use_count;
  /* The first range that ends behind `begin`. */
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (t->uses[middle].end <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (; low < t->use_count && t->uses[low].begin < begin + bytes; ++low) {
    if (!written || t->uses[low].written) return true;
  }
  return false;
}

/* The most bytes of one number of an outline: 48 bits of a count, and 4 of a dtype. */
#define LHI_OUTLINE_NUMBER_BYTES 8

/* ------------------------------------------------------------------ one tensor */

static size_t parts_of(int extent, const struct lhi_layout* layout) {
  if (extent == LH_WIRE_NOTHING) return 0;
  return extent == LH_WIRE_WHOLE ? layout->world : 1;
}

static void begin(struct lhi_tensors* t, const struct lhi_layout* layout) {
  memset(t, 0, sizeof *t);
  t->in_parts = layout->in_parts;
  t->source_parts = parts_of(layout->source, layout);
  t->target_parts = parts_of(layout->target, layout);
}

void lhi_tensors_one(struct lhi_tensors* t, const struct lhi_layout* layout,
                     const struct lhi_pair* pair, lh_dtype dtype, uint64_t count,
                     size_t source_bytes, size_t target_bytes) {
  begin(t, layout);
  t->pairs = &t->one_pair;
  t->pieces = &t->one_piece;
  t->uses = t->one_uses;
  t->one_pair = *pair;
  t->pair_count = 1;
  t->one_piece.count = count;
  t->one_piece.dtype = (uint8_t)dtype;
  t->one_piece.tensors = 1;
  t->one_piece.sides[LHI_SOURCE].bytes = source_bytes;
  t->one_piece.sides[LHI_TARGET].bytes = target_bytes;
  if (pair->at[LHI_ERROR] != NULL)
    t->one_piece.sides[LHI_ERROR].bytes = error_bytes(source_bytes, dtype);
  t->piece_count = 1;
  add_pair(t, pair, dtype, source_bytes, target_bytes, 0, layout->in_parts);
  sort(t->uses, t->use_count);
}

/* ------------------------------------------------------------------ a list */

/* Checks the numbers of all slices, and counts the pieces that they need at most. */
static lh_status check_slices(const char* call, const lh_slice* slices, uint64_t slice_count,
                              size_t* pieces_out) {
  size_t large = 0;
  for (uint64_t i = 0; i < slice_count; ++i) {
    const size_t element = lh_dtype_size(slices[i].dtype);
    if (element == 0) {
      return lhi_refuse(call, "the dtype of slice %llu is %d; give an lh_dtype",
                        (unsigned long long)i, (int)slices[i].dtype);
    }
    if (slices[i].count > LH_REGION_BYTES_MAX / element) {
      return lhi_refuse(call, "slice %llu has %llu elements; one tensor has at most 2^40 bytes",
                        (unsigned long long)i, (unsigned long long)slices[i].count);
    }
    if (slices[i].count * element >= LHI_PIECE_BYTES_MIN) ++large;
  }
  *pieces_out = (large < LHI_LARGE_PIECES_MAX ? large : LHI_LARGE_PIECES_MAX) + 16;
  return LH_OK;
}

/* Checks the pointers of one slice. */
static lh_status check_slice(const char* call, const struct lhi_tensors* t, const lh_slice* slice,
                             uint64_t index, size_t bytes) {
  const unsigned long long at = (unsigned long long)index;
  const bool source = t->source_parts > 0;
  const bool target = t->target_parts > 0;
  if ((source && slice->source == NULL) || (target && slice->target == NULL)) {
    return lhi_refuse(call, "the %s of slice %llu is NULL",
                      source && slice->source == NULL ? "source" : "target", at);
  }
  if ((source && UINTPTR_MAX - (uintptr_t)slice->source < bytes * t->source_parts) ||
      (target && UINTPTR_MAX - (uintptr_t)slice->target < bytes * t->target_parts)) {
    return lhi_refuse(call, "slice %llu ends beyond the address space; correct its count", at);
  }
  return LH_OK;
}

/* Adds a number to the outline. Returns whether it had room. */
static bool outline(struct lhi_tensors* t, uint64_t number) {
  if (t->outline_bytes + LHI_OUTLINE_NUMBER_BYTES > LH_OUTLINE_BYTES_MAX) return false;
  for (; number > 0x7f; number >>= 7) {
    t->outline[t->outline_bytes++] = (uint8_t)(number | 0x80);
  }
  t->outline[t->outline_bytes++] = (uint8_t)number;
  return true;
}

/* Finds the piece of each slice, sums up the pieces, and digests the list. */
static lh_status cut(const char* call, struct lhi_tensors* t, const lh_slice* slices,
                     uint64_t slice_count, uint32_t world, uint32_t* piece_of) {
  uint32_t packed[LH_WIRE_DTYPE_COUNT];
  size_t large = 0;
  uint64_t digest = LHI_DIGEST;
  bool outlined = outline(t, slice_count);
  for (size_t i = 0; i < LH_WIRE_DTYPE_COUNT; ++i) packed[i] = NO_PIECE;
  for (uint64_t i = 0; i < slice_count; ++i) {
    const lh_slice* const slice = &slices[i];
    const size_t bytes = (size_t)slice->count * lh_dtype_size(slice->dtype);
    const bool alone = bytes >= LHI_PIECE_BYTES_MIN && large < LHI_LARGE_PIECES_MAX;
    uint32_t at = packed[slice->dtype];
    struct lhi_piece* piece;
    digest = lhi_digest(lhi_digest(digest, (uint64_t)slice->dtype), slice->count);
    outlined = outlined && outline(t, slice->count << 4 | (uint64_t)slice->dtype);
    if (alone) ++large;
    if (alone || at == NO_PIECE) {
      at = (uint32_t)t->piece_count++;
      if (!alone) packed[slice->dtype] = at;
    }
    piece = &t->pieces[at];
    piece->dtype = (uint8_t)slice->dtype;
    piece->count += slice->count;
    piece_of[i] = at;
    if (slice->count == 0) continue;
    ++piece->tensors;
    /* Cannot overflow: 2^20 slices of 2^40 bytes. */
    piece->sides[LHI_SOURCE].bytes += bytes;
    if (piece->sides[LHI_SOURCE].bytes > (LH_REGION_BYTES_MAX - LHI_REGION_ROUND) / world) {
      return lhi_refuse(call, "slices of one dtype have more than 2^40 bytes together");
    }
  }
  t->digest = digest == 0 ? 1 : digest;
  return LH_OK;
}

/* Puts the slices with elements in the order of their pieces. */
static lh_status take(const char* call, struct lhi_tensors* t, const lh_slice* slices,
                      uint64_t slice_count, float* const* errors, uint32_t* piece_of) {
  for (size_t p = 0; p < t->piece_count; ++p) {
    struct lhi_piece* const piece = &t->pieces[p];
    const size_t bytes = piece->sides[LHI_SOURCE].bytes;
    piece->first = t->pair_count;
    t->pair_count += piece->tensors;
    piece->tensors = 0;
    piece->sides[LHI_SOURCE].bytes = bytes * t->source_parts;
    piece->sides[LHI_TARGET].bytes = bytes * t->target_parts;
    if (errors != NULL) {
      piece->sides[LHI_ERROR].bytes = error_bytes(bytes * t->source_parts, (lh_dtype)piece->dtype);
    }
  }
  for (uint64_t i = 0; i < slice_count; ++i) {
    const lh_slice* const slice = &slices[i];
    const size_t bytes = (size_t)slice->count * lh_dtype_size(slice->dtype);
    struct lhi_piece* const piece = &t->pieces[piece_of[i]];
    struct lhi_pair* pair;
    lh_status status;
    if (bytes == 0) continue;
    status = check_slice(call, t, slice, i, bytes);
    if (status != LH_OK) return status;
    if (errors != NULL && errors[i] == NULL) {
      return lhi_refuse(call,
                        "errors[%llu] is NULL; give an error for each slice with elements, or no "
                        "errors",
                        (unsigned long long)i);
    }
    pair = &t->pairs[piece->first + piece->tensors++];
    pair->at[LHI_SOURCE] = (uint8_t*)(uintptr_t)slice->source;
    pair->at[LHI_TARGET] = slice->target;
    pair->at[LHI_ERROR] = errors == NULL ? NULL : (uint8_t*)errors[i];
    pair->bytes = bytes;
    add_pair(t, pair, slice->dtype, bytes * t->source_parts, bytes * t->target_parts, i,
             t->in_parts);
  }
  return LH_OK;
}

static lh_status check_apart(const char* call, const struct lhi_tensors* t) {
  for (size_t i = 1; i < t->use_count; ++i) {
    const struct lhi_use* const a = &t->uses[i - 1];
    const struct lhi_use* const b = &t->uses[i];
    if (a->end <= b->begin) continue;
    return lhi_refuse(call,
                      "slices %llu and %llu share memory; source and target of a slice may be "
                      "equal, and else no two tensors may overlap, errors included",
                      (unsigned long long)a->slice, (unsigned long long)b->slice);
  }
  return LH_OK;
}

lh_status lhi_tensors_list(struct lhi_tensors* t, const char* call, const struct lhi_layout* layout,
                           const lh_slice* slices, uint64_t slice_count, float* const* errors) {
  lh_status status;
  size_t pieces = 0;
  uint32_t* piece_of;
  begin(t, layout);
  if (slice_count == 0 || slice_count > LH_SLICES_MAX) {
    return lhi_refuse(call, "slice_count is %llu; give 1 to %d slices",
                      (unsigned long long)slice_count, LH_SLICES_MAX);
  }
  status = check_slices(call, slices, slice_count, &pieces);
  if (status != LH_OK) return status;
  t->pairs = malloc((size_t)slice_count * sizeof *t->pairs);
  t->pieces = calloc(pieces, sizeof *t->pieces);
  t->uses = malloc((size_t)slice_count * 3 * sizeof *t->uses);
  t->outline = malloc(LH_OUTLINE_BYTES_MAX);
  t->owned = true;
  piece_of = malloc((size_t)slice_count * sizeof *piece_of);
  if (t->pairs == NULL || t->pieces == NULL || t->uses == NULL || t->outline == NULL ||
      piece_of == NULL) {
    status = lhi_fail(LH_UNAVAILABLE, "%s: no memory for %llu slices", call,
                      (unsigned long long)slice_count);
  }
  if (status == LH_OK) status = cut(call, t, slices, slice_count, layout->world, piece_of);
  if (status == LH_OK) status = take(call, t, slices, slice_count, errors, piece_of);
  free(piece_of);
  if (status != LH_OK) return status;
  sort(t->uses, t->use_count);
  return check_apart(call, t);
}

void lhi_tensors_free(struct lhi_tensors* t) {
  if (!t->owned) return;
  free(t->pairs);
  free(t->pieces);
  free(t->uses);
  free(t->outline);
}

/* ------------------------------------------------------------------ pieces */

bool lhi_piece_overlaps(const struct lhi_tensors* t, const struct lhi_piece* piece) {
  const struct lhi_pair* const pair = &t->pairs[piece->first];
  return piece->tensors == 1 && lhi_overlap(pair->at[LHI_SOURCE], piece->sides[LHI_SOURCE].bytes,
                                            pair->at[LHI_TARGET], piece->sides[LHI_TARGET].bytes);
}

/* Copies one side of a piece to its staged memory, or from there. */
static void move(const struct lhi_tensors* t, const struct lhi_piece* piece, int which,
                 bool to_staged) {
  const struct lhi_pair* const pairs = &t->pairs[piece->first];
  const struct lhi_side* const side = &piece->sides[which];
  const size_t parts = which == LHI_TARGET ? t->target_parts : t->source_parts;
  uint8_t* staged = side->data;
  if (piece->tensors == 1) {
    lhi_copy(to_staged ? staged : pairs->at[which], to_staged ? pairs->at[which] : staged,
             side->bytes);
    return;
  }
  for (size_t part = 0; part < parts; ++part) {
    for (size_t i = 0; i < piece->tensors; ++i) {
      const size_t bytes =
          which == LHI_ERROR ? error_bytes(pairs[i].bytes, (lh_dtype)piece->dtype) : pairs[i].bytes;
      uint8_t* const own = pairs[i].at[which] + part * bytes;
      lhi_copy(to_staged ? staged : own, to_staged ? own : staged, bytes);
      staged += bytes;
    }
  }
}

void lhi_piece_pack(const struct lhi_tensors* t, const struct lhi_piece* piece, int which) {
  move(t, piece, which, true);
}

void lhi_piece_unpack(const struct lhi_tensors* t, const struct lhi_piece* piece, int which) {
  move(t, piece, which, false);
}
