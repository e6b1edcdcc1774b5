/* The arena: memory that a client shares with peerd. It consists of regions, each of which is one
 * memfd, and of blocks inside the regions.
 *
 * The arena knows neither the socket nor a lock. memory.c registers regions with peerd. The caller
 * holds the mutex of the client, unless a comment says otherwise.
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
/* Blocks of at least this size begin at a page, because peerd pins whole pages to send from. */
#define LHI_PAGE_ALIGN_FROM ((size_t)1 << 20)
#define LHI_PAGE ((size_t)4096)
/* Up to this many bytes of empty regions are kept for later tensors. On top of that, as many bytes
 * are kept as operations have recently had in staged blocks at one time. New memory must be faulted
 * in page by page, which takes several times as long as the operation. */
#define LHI_EMPTY_BYTES_MAX ((size_t)256 << 20)
/* "Recently" means: during the present and the previous period of this many lhi_arena_look(). */
#define LHI_STAGED_LOOKS 64

/* A part of a region. The list of blocks is in address order and covers the whole region. Two free
 * blocks are never neighbours. */
struct lhi_block {
  size_t offset;
  size_t bytes;
  bool used;
  uint32_t pins; /* uses that must end before the block may be freed */
  struct lhi_block* previous;
  struct lhi_block* next;
};

struct lhi_region {
  uint64_t id; /* the name of the region in requests to peerd */
  int fd;      /* of the memfd, for children of fork(); -1: a child has no such region */
  uint8_t* base;
  size_t bytes;
  size_t used;   /* bytes in used blocks */
  uint64_t last; /* lhi_arena.takes when the last block was taken here, or the region added */
  bool inbox; /* the inbox of one state: one block covers the region, and no other is taken here */
  struct lhi_block* blocks;
  struct lhi_region* next;
};

/* A use of a block. A pinned block may not be freed. All zeros: no block is pinned. */
struct lhi_pin {
  struct lhi_region* region;
  struct lhi_block* block;
};

struct lhi_arena {
  struct lhi_region* regions;
  size_t bytes;   /* of all regions */
  uint64_t takes; /* counts blocks taken and regions added */
  /* Bytes in staged blocks, which hold copies of operations' tensors. */
  size_t staged;
  size_t staged_most;        /* the most in the present period of LHI_STAGED_LOOKS looks */
  size_t staged_most_before; /* the most in the previous period */
  uint32_t looks;            /* in the present period */
};

/* Makes a memfd of `bytes`, seals it against shrinking and growing, and maps it. Returns NULL if
 * all went well, else the name of the call that failed; errno says why. Needs no mutex. */
const char* lhi_region_map(size_t bytes, uint8_t** base_out, int* fd_out);

/* Adds a region, which takes over the mapping. Returns NULL if memory is short; then the mapping
 * still belongs to the caller. */
struct lhi_region* lhi_arena_add(struct lhi_arena* arena, uint64_t id, uint8_t* base, size_t bytes);
/* Unmaps the region, and frees it with its blocks. */
void lhi_arena_remove(struct lhi_arena* arena, struct lhi_region* region);
/* Count a block that was taken for a staged tensor, and a block that was given back. */
void lhi_arena_stage(struct lhi_arena* arena, size_t bytes);
void lhi_arena_unstage(struct lhi_arena* arena, size_t bytes);
/* Counts one look. Called when an operation is over, before lhi_arena_surplus(). */
void lhi_arena_look(struct lhi_arena* arena);
/* Returns an empty region that need not be kept, or NULL. Empty inboxes come first, because they
 * are never kept; then the region in which no block was taken for the longest time. */
struct lhi_region* lhi_arena_surplus(struct lhi_arena* arena);

/* Returns the size of the region to add for a block of `bytes` (at most 2^40). The larger the
 * arena, the larger the region, because a client has at most LH_REGIONS_MAX regions. With `least`,
 * returns the size of the smallest region that holds the block. */
size_t lhi_region_bytes(const struct lhi_arena* arena, size_t bytes, bool least);

/* Makes a region that was just added the inbox of a state, and returns its one block. */
void* lhi_arena_take_inbox(struct lhi_region* region);
/* Takes a block of `bytes` (not 0) from the first region with room. NULL: no region has room, or
 * memory for the bookkeeping is short. */
void* lhi_arena_take(struct lhi_arena* arena, size_t bytes);
/* Frees the block that begins at `data`. False: no used block begins there. */
bool lhi_arena_give(struct lhi_arena* arena, void* data);

/* Returns the region that contains the address, or NULL. */
struct lhi_region* lhi_arena_region(const struct lhi_arena* arena, const void* data);
/* Returns the used block of the region that contains the whole range, or NULL. */
struct lhi_block* lhi_region_block(const struct lhi_region* region, const void* data, size_t bytes);

/* Pins the used block that contains the whole range. If the range begins outside the arena, there
 * is nothing to pin: returns true with pin->region NULL. False: the range begins in the arena, but
 * no used block contains all of it. */
bool lhi_arena_pin(const struct lhi_arena* arena, const void* data, size_t bytes,
                   struct lhi_pin* pin);
/* Ends the use. Does nothing if the pin is empty. */
void lhi_unpin(struct lhi_pin* pin);

/* In a child of fork(): what the child writes from here on stays in the child. It may happen that
 * the child sees what the parent writes later. */
void lhi_arena_part(struct lhi_arena* arena);
/* Gives the memory of a region back to the host, though children of fork() may have the region. Its
 * content is lost. */
void lhi_region_drop(const struct lhi_region* region);

/* Removes all regions. */
void lhi_arena_clear(struct lhi_arena* arena);

#ifdef __cplusplus
}
#endif

#endif /* LONGHAUL_CLIENT_ARENA_H_ */
