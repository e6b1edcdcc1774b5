/* The tensors of a collective: one tensor, or a list (lh_slice). peerd sees pieces.
 *
 * How a list is cut into pieces follows from its dtypes and counts alone, so all members cut alike:
 * - A tensor whose part has LHI_PIECE_BYTES_MIN or more is a piece. From LHI_LARGE_PIECES_MAX such
 *   pieces on, a large tensor counts as a small one.
 * - The small tensors of one dtype are one piece, in their order and without gaps. On a side that
 *   holds a part for each member, the parts of the piece lie one after the other: the first parts
 *   of all its tensors, then the second parts, and so on.
 * - Pieces come in the order of their first tensors. A tensor without elements is a small one. */
#ifndef LONGHAUL_CLIENT_TENSORS_H_
#define LONGHAUL_CLIENT_TENSORS_H_

#include "client/src/objects.h"
#include "proto/wire/kinds.h"

#define LHI_PIECE_BYTES_MIN ((uint64_t)256 << 10)
/* LH_PIECES_MAX leaves room for one piece of small tensors for each dtype. */
#define LHI_LARGE_PIECES_MAX (LH_PIECES_MAX - 16)
/* Staged pieces begin at multiples of this. */
#define LHI_PIECE_ALIGN ((size_t)64)

struct lhi_layout {
  int source, target; /* lh_wire_extent */
  uint32_t world;     /* parts of a whole; 1 if the kind is not in parts */
  bool in_parts;
};

/* Sets up one tensor. The caller has checked that source and target lie in the address space. */
void lhi_tensors_one(struct lhi_tensors* tensors, const struct lhi_layout* layout,
                     const struct lhi_pair* pair, lh_dtype dtype, uint64_t count,
                     size_t source_bytes, size_t target_bytes);
/* `errors`: NULL, or one for each slice.
 * Sets up a list, and checks it: memory of a slice may overlap no other slice. Its source and
 * target may be equal, or overlap in kinds in parts. If this fails, the caller calls
 * lhi_tensors_free(). */
lh_status lhi_tensors_list(struct lhi_tensors* tensors, const char* call,
                           const struct lhi_layout* layout, const lh_slice* slices,
                           uint64_t slice_count, float* const* errors);
/* Returns whether source and target of a piece of one tensor share memory. */
bool lhi_piece_overlaps(const struct lhi_tensors* tensors, const struct lhi_piece* piece);
/* Copies one side of a piece (lhi_which) to its staged memory, and from there. */
void lhi_piece_pack(const struct lhi_tensors* tensors, const struct lhi_piece* piece, int which);
void lhi_piece_unpack(const struct lhi_tensors* tensors, const struct lhi_piece* piece, int which);
/* Returns whether the caller's tensors share memory with the range; `written`: those in which the
 * result is written. */
bool lhi_tensors_touch(const struct lhi_tensors* tensors, const void* data, size_t bytes,
                       bool written);
/* Whether two ranges share bytes. */
bool lhi_overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes);
void lhi_tensors_free(struct lhi_tensors* tensors);

/* Adds a number to a digest that tells lists, or sets, apart. Begin with LHI_DIGEST. */
#define LHI_DIGEST ((uint64_t)0xcbf29ce484222325u)
static inline uint64_t lhi_digest(uint64_t digest, uint64_t number) {
  digest = (digest ^ number) * (uint64_t)0x9e3779b97f4a7c15u;
  return digest ^ digest >> 29;
}

#endif /* LONGHAUL_CLIENT_TENSORS_H_ */
