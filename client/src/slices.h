/* The tensors of an operation on several tensors (lh_slice). They are packed into one staged block,
 * in their order and without gaps, and unpacked from one. */
#ifndef LONGHAUL_CLIENT_SLICES_H_
#define LONGHAUL_CLIENT_SLICES_H_

#include "client/src/objects.h"

struct lhi_slices;

/* Copies the caller's array, and checks it: no slice but an empty one may share memory with another
 * slice, or its source with its target, unless these are equal. Sets *count_out to the elements of
 * all slices together. `element` is the size of one. */
lh_status lhi_slices_take(const char *call, const lh_slice *slices, uint64_t slice_count,
                          size_t element, uint64_t *count_out, struct lhi_slices **slices_out);
void lhi_slices_pack(const struct lhi_slices *slices, uint8_t *to);
void lhi_slices_unpack(const struct lhi_slices *slices, const uint8_t *from);
/* Returns whether a slice shares memory with the range. *written: the result is written there. */
bool lhi_slices_touch(const struct lhi_slices *slices, const void *data, size_t bytes,
                      bool *written);
/* NULL is allowed. */
void lhi_slices_free(struct lhi_slices *slices);

#endif /* LONGHAUL_CLIENT_SLICES_H_ */
