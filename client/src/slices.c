#include "client/src/slices.h"

#include <stdlib.h>

#include "client/src/copy.h"
#include "client/src/error.h"

struct slice {
  const void *source;
  void *target;
  size_t bytes;
};

/* Memory of a slice. */
struct range {
  uintptr_t begin, end;
  uint64_t slice;
  bool written;
};

struct lhi_slices {
  size_t count;
  size_t range_count;
  struct slice *slices;
  struct range *ranges; /* in order of their addresses; none overlaps another one */
};

static int compare(const void *a, const void *b) {
  const uintptr_t a_at = ((const struct range *)a)->begin;
  const uintptr_t b_at = ((const struct range *)b)->begin;
  return a_at < b_at ? -1 : a_at > b_at;
}

static void add(struct lhi_slices *s, const void *data, size_t bytes, uint64_t slice,
                bool written) {
  const struct range range = {(uintptr_t)data, (uintptr_t)data + bytes, slice, written};
  s->ranges[s->range_count++] = range;
}

/* Checks one slice and adds it. */
static lh_status take(const char *call, const lh_slice *slice, uint64_t index, size_t element,
                      struct lhi_slices *s) {
  const unsigned long long at = (unsigned long long)index;
  size_t bytes;
  if (slice->count == 0) return LH_OK;
  if (slice->source == NULL || slice->target == NULL) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: the %s of slice %llu is NULL", call,
                    slice->source == NULL ? "source" : "target", at);
  }
  if (slice->count > LH_REGION_BYTES_MAX / element) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: slice %llu has %llu elements; one tensor has at most 2^40 bytes", call, at,
                    (unsigned long long)slice->count);
  }
  bytes = (size_t)slice->count * element;
  if (UINTPTR_MAX - (uintptr_t)slice->source < bytes ||
      UINTPTR_MAX - (uintptr_t)slice->target < bytes) {
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: slice %llu ends beyond the address space; correct its count", call, at);
  }
  s->slices[s->count].source = slice->source;
  s->slices[s->count].target = slice->target;
  s->slices[s->count++].bytes = bytes;
  if (slice->source != slice->target) add(s, slice->source, bytes, index, false);
  add(s, slice->target, bytes, index, true);
  return LH_OK;
}

static lh_status check_apart(const char *call, const struct lhi_slices *s) {
  for (size_t i = 1; i < s->range_count; ++i) {
    const struct range *const a = &s->ranges[i - 1];
    const struct range *const b = &s->ranges[i];
    if (a->end <= b->begin) continue;
    return lhi_fail(LH_INVALID_ARGUMENT,
                    "%s: slices %llu and %llu share memory; source and target of a slice may be "
                    "equal, and else no two may overlap",
                    call, (unsigned long long)a->slice, (unsigned long long)b->slice);
  }
  return LH_OK;
}

lh_status lhi_slices_take(const char *call, const lh_slice *slices, uint64_t slice_count,
                          size_t element, uint64_t *count_out, struct lhi_slices **slices_out) {
  lh_status status = LH_OK;
  struct lhi_slices *s;
  *count_out = 0;
  *slices_out = NULL;
  if (slice_count == 0 || slice_count > LH_SLICES_MAX) {
    return lhi_fail(LH_INVALID_ARGUMENT, "%s: slice_count is %llu; give 1 to %d slices", call,
                    (unsigned long long)slice_count, LH_SLICES_MAX);
  }
  s = calloc(1, sizeof *s);
  if (s != NULL) s->slices = calloc((size_t)slice_count, sizeof *s->slices);
  if (s != NULL) s->ranges = calloc((size_t)slice_count * 2, sizeof *s->ranges);
  if (s == NULL || s->slices == NULL || s->ranges == NULL) {
    lhi_slices_free(s);
    return lhi_fail(LH_UNAVAILABLE, "%s: no memory for %llu slices", call,
                    (unsigned long long)slice_count);
  }
  for (uint64_t i = 0; i < slice_count && status == LH_OK; ++i) {
    status = take(call, &slices[i], i, element, s);
    /* lhi_collective_start() checks the sum. It cannot overflow: 2^20 slices of 2^40. */
    *count_out += slices[i].count;
  }
  if (status == LH_OK) {
    qsort(s->ranges, s->range_count, sizeof *s->ranges, compare);
    status = check_apart(call, s);
  }
  if (status == LH_OK) {
    *slices_out = s;
  } else {
    lhi_slices_free(s);
  }
  return status;
}

void lhi_slices_pack(const struct lhi_slices *s, uint8_t *to) {
  for (size_t i = 0; i < s->count; ++i) {
    lhi_copy(to, s->slices[i].source, s->slices[i].bytes);
    to += s->slices[i].bytes;
  }
}

void lhi_slices_unpack(const struct lhi_slices *s, const uint8_t *from) {
  for (size_t i = 0; i < s->count; ++i) {
    lhi_copy(s->slices[i].target, from, s->slices[i].bytes);
    from += s->slices[i].bytes;
  }
}

bool lhi_slices_touch(const struct lhi_slices *s, const void *data, size_t bytes, bool *written) {
  const uintptr_t begin = (uintptr_t)data;
  size_t low = 0;
  size_t high = s->range_count;
  bool touches = false;
  *written = false;
  /* The first range that ends behind `begin`. */
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (s->ranges[middle].end <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (; low < s->range_count && s->ranges[low].begin < begin + bytes; ++low) {
    touches = true;
    if (s->ranges[low].written) *written = true;
  }
  return touches;
}

void lhi_slices_free(struct lhi_slices *s) {
  if (s == NULL) return;
  free(s->slices);
  free(s->ranges);
  free(s);
}
