/* The client's memory that peerd sees too: regions (one memfd each), and blocks inside them.
 *
 * Knows neither socket nor lock: memory.c registers regions with peerd, and the client's mutex
 * guards all of this.
 */
#ifndef LONGHAUL_CLIENT_ARENA_H_
#define LONGHAUL_CLIENT_ARENA_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LHI_REGION_BYTES_MIN ((size_t)64 << 20)
#define LHI_REGION_ROUND ((size_t)2 << 20)
#define LHI_ALIGN ((size_t)64)
/* Blocks from this size on begin at a page: the kernel moves whole pages. */
#define LHI_PAGE_ALIGN_FROM ((size_t)1 << 20)
#define LHI_PAGE ((size_t)4096)
/* Empty regions are kept for the next tensor up to this many bytes, beside what operations staged
 * at one time of late: to fault that in anew costs several times the operation. */
#define LHI_EMPTY_BYTES_MAX ((size_t)256 << 20)
/* Of late: in so many looks at what is empty, one after each operation, and those before. */
#define LHI_STAGED_LOOKS 64

/* Blocks of a region lie in the order of their addresses and cover it; no two free ones touch. */
struct lhi_block {
  size_t offset;
  size_t bytes;
  bool used;
  uint32_t pins; /* uses of it that have to end before it is given back */
  struct lhi_block *previous;
  struct lhi_block *next;
};

struct lhi_region {
  uint64_t id; /* as peerd knows it */
  uint8_t *base;
  size_t bytes;
  size_t used;   /* bytes in used blocks */
  uint64_t last; /* value of the arena's `takes` when a block was taken here, or it was added */
  bool inbox;    /* of one state: all of it is one block, and no other one is taken here */
  struct lhi_block *blocks;
  struct lhi_region *next;
};

/* A use of a place in the arena; zeros: none. */
struct lhi_pin {
  struct lhi_region *region;
  struct lhi_block *block;
};

struct lhi_arena {
  struct lhi_region *regions;
  size_t bytes; /* of all regions */
  uint64_t takes;
  /* In blocks that hold copies of operations' tensors. */
  size_t staged;
  size_t staged_most; /* since the looks were counted from 0 */
  size_t staged_most_before;
  uint32_t looks;
};

/* A memfd of `bytes`, sealed in its size, and its mapping. Returns NULL or what failed, for errno.
 */
const char *lhi_region_map(size_t bytes, uint8_t **base_out, int *fd_out);

/* Takes over the mapping; NULL: out of memory, and the mapping is still the caller's. */
struct lhi_region *lhi_arena_add(struct lhi_arena *arena, uint64_t id, uint8_t *base, size_t bytes);
/* Unmaps the region and forgets it, blocks and all. */
void lhi_arena_remove(struct lhi_arena *arena, struct lhi_region *region);
/* A block was taken to stage a tensor in, and is given back. */
void lhi_arena_stage(struct lhi_arena *arena, size_t bytes);
void lhi_arena_unstage(struct lhi_arena *arena, size_t bytes);
/* An operation is over: time to look for what is surplus. */
void lhi_arena_look(struct lhi_arena *arena);
/* A region of the list that is empty and beyond what is kept, that for which there has been no use
 * for longest; an empty inbox is never kept. NULL: none. */
struct lhi_region *lhi_arena_surplus(struct lhi_arena *arena);

/* The size of region to add for a block of `bytes`: large regions in large arenas, since their
 * number is limited; `least`: the smallest that holds the block. `bytes` is at most 2^40. */
size_t lhi_region_bytes(const struct lhi_arena *arena, size_t bytes, bool least);

/* The region, which was just added, is an inbox: its one block. */
void *lhi_arena_take_inbox(struct lhi_region *region);
/* First fit; NULL: no region has room. `bytes` is not 0. */
void *lhi_arena_take(struct lhi_arena *arena, size_t bytes);
/* False: `data` does not begin a used block. */
bool lhi_arena_give(struct lhi_arena *arena, void *data);

/* The region that contains the address, or NULL. */
struct lhi_region *lhi_arena_region(const struct lhi_arena *arena, const void *data);
/* The used block of the region that contains the range wholly, or NULL. */
struct lhi_block *lhi_region_block(const struct lhi_region *region, const void *data, size_t bytes);

/* Pins the block that contains the range wholly; outside of the arena there is nothing to pin, and
 * pin->region is NULL. False: part of the range lies elsewhere, or in a block that is free. */
bool lhi_arena_pin(const struct lhi_arena *arena, const void *data, size_t bytes,
                   struct lhi_pin *pin);
/* Twice is once, and of none is nothing. */
void lhi_unpin(struct lhi_pin *pin);

/* Unmaps everything. */
void lhi_arena_clear(struct lhi_arena *arena);

#ifdef __cplusplus
}
#endif

#endif /* LONGHAUL_CLIENT_ARENA_H_ */
