#define _GNU_SOURCE
#include "client/src/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

const char* lhi_region_map(size_t bytes, uint8_t** base_out, int* fd_out) {
  const char* failed = NULL;
  void* base = MAP_FAILED;
  const int fd = memfd_create("longhaul-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return "memfd_create";
  if (ftruncate(fd, (off_t)bytes) != 0) {
    failed = "ftruncate";
  } else if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    /* peerd refuses memory that is not sealed: memory that shrinks could crash peerd. */
    failed = "F_ADD_SEALS";
  } else {
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) failed = "mmap";
  }
  if (failed != NULL) {
    const int error = errno;
    close(fd);
    errno = error;
    return failed;
  }
  /* Huge pages, where the host allows them, make page faults and pinning far cheaper. */
  (void)madvise(base, bytes, MADV_HUGEPAGE);
  *base_out = base;
  *fd_out = fd;
  return NULL;
}

struct lhi_region* lhi_arena_add(struct lhi_arena* arena, uint64_t id, uint8_t* base,
                                 size_t bytes) {
  struct lhi_region* region = calloc(1, sizeof *region);
  struct lhi_block* block = calloc(1, sizeof *block);
  if (region == NULL || block == NULL) {
    free(region);
    free(block);
    return NULL;
  }
  block->bytes = bytes;
  region->id = id;
  region->fd = -1;
  region->base = base;
  region->bytes = bytes;
  region->blocks = block;
  region->last = ++arena->takes;
  region->next = arena->regions;
  arena->regions = region;
  arena->bytes += bytes;
  return region;
}

void lhi_arena_remove(struct lhi_arena* arena, struct lhi_region* region) {
  struct lhi_region** link = &arena->regions;
  while (*link != region) link = &(*link)->next;
  *link = region->next;
  arena->bytes -= region->bytes;
  while (region->blocks != NULL) {
    struct lhi_block* const block = region->blocks;
    region->blocks = block->next;
    free(block);
  }
  munmap(region->base, region->bytes);
  if (region->fd >= 0) close(region->fd);
  free(region);
}

void lhi_arena_stage(struct lhi_arena* arena, size_t bytes) {
  arena->staged += bytes;
  if (arena->staged > arena->staged_most) arena->staged_most = arena->staged;
}

void lhi_arena_unstage(struct lhi_arena* arena, size_t bytes) { arena->staged -= bytes; }

void lhi_arena_look(struct lhi_arena* arena) {
  if (++arena->looks < LHI_STAGED_LOOKS) return;
  arena->looks = 0;
  arena->staged_most_before = arena->staged_most;
  arena->staged_most = arena->staged;
}

struct lhi_region* lhi_arena_surplus(struct lhi_arena* arena) {
  const size_t most = arena->staged_most > arena->staged_most_before ? arena->staged_most
                                                                     : arena->staged_most_before;
  size_t empty = 0;
  struct lhi_region* surplus = NULL;
  for (struct lhi_region* region = arena->regions; region != NULL; region = region->next) {
    if (region->used != 0) continue;
    if (region->inbox) return region;
    empty += region->bytes;
    if (surplus == NULL || region->last < surplus->last) surplus = region;
  }
  return empty > LHI_EMPTY_BYTES_MAX + (most - arena->staged) ? surplus : NULL;
}

size_t lhi_region_bytes(const struct lhi_arena* arena, size_t bytes, bool least) {
  const size_t needed = round_up(bytes, LHI_REGION_ROUND);
  size_t wanted = round_up(arena->bytes / 8, LHI_REGION_ROUND);
  if (least) return needed;
  if (wanted < LHI_REGION_BYTES_MIN) wanted = LHI_REGION_BYTES_MIN;
  return wanted > needed ? wanted : needed;
}

/* Marks [offset, offset + bytes) inside the free `block` as used. The rest of the block on
 * both sides stays free. Returns false if memory is short; nothing has changed then. */
static bool carve(struct lhi_block* block, size_t offset, size_t bytes) {
  const size_t before = offset - block->offset;
  const size_t after = block->bytes - before - bytes;
  struct lhi_block* middle = NULL;
  struct lhi_block* tail = NULL;
  if (before > 0 && (middle = calloc(1, sizeof *middle)) == NULL) return false;
  if (after > 0 && (tail = calloc(1, sizeof *tail)) == NULL) {
    free(middle);
    return false;
  }
  if (middle != NULL) {
    /* Insert the new block after `block`, because the region points to the first block. */
    middle->offset = offset;
    middle->bytes = bytes;
    middle->previous = block;
    middle->next = block->next;
    if (block->next != NULL) block->next->previous = middle;
    block->next = middle;
    block->bytes = before;
    block = middle;
  }
  block->bytes = bytes;
  block->used = true;
  if (tail != NULL) {
    tail->offset = offset + bytes;
    tail->bytes = after;
    tail->previous = block;
    tail->next = block->next;
    if (block->next != NULL) block->next->previous = tail;
    block->next = tail;
  }
  return true;
}

void* lhi_arena_take_inbox(struct lhi_region* region) {
  region->inbox = true;
  region->blocks->used = true;
  region->used = region->bytes;
  return region->base;
}

void* lhi_arena_take(struct lhi_arena* arena, size_t bytes) {
  const size_t align = bytes >= LHI_PAGE_ALIGN_FROM ? LHI_PAGE : LHI_ALIGN;
  const size_t size = round_up(bytes, LHI_ALIGN);
  for (struct lhi_region* region = arena->regions; region != NULL; region = region->next) {
    if (region->inbox || region->bytes - region->used < size) continue;
    for (struct lhi_block* block = region->blocks; block != NULL; block = block->next) {
      const size_t offset = round_up(block->offset, align);
      const size_t gap = offset - block->offset;
      if (block->used || block->bytes < gap || block->bytes - gap < size) continue;
      if (!carve(block, offset, size)) return NULL;
      region->used += size;
      region->last = ++arena->takes;
      return region->base + offset;
    }
  }
  return NULL;
}

static void merge_with_next(struct lhi_block* block) {
  struct lhi_block* const next = block->next;
  if (next == NULL || next->used || block->used) return;
  block->bytes += next->bytes;
  block->next = next->next;
  if (next->next != NULL) next->next->previous = block;
  free(next);
}

bool lhi_arena_give(struct lhi_arena* arena, void* data) {
  struct lhi_region* const region = lhi_arena_region(arena, data);
  struct lhi_block* block;
  if (region == NULL) return false;
  block = region->blocks;
  while (block != NULL && !(block->used && region->base + block->offset == (uint8_t*)data)) {
    block = block->next;
  }
  if (block == NULL) return false;
  block->used = false;
  region->used -= block->bytes;
  merge_with_next(block);
  if (block->previous != NULL) merge_with_next(block->previous);
  return true;
}

struct lhi_region* lhi_arena_region(const struct lhi_arena* arena, const void* data) {
  const uintptr_t at = (uintptr_t)data;
  for (struct lhi_region* region = arena->regions; region != NULL; region = region->next) {
    const uintptr_t base = (uintptr_t)region->base;
    if (at >= base && at - base < region->bytes) return region;
  }
  return NULL;
}

struct lhi_block* lhi_region_block(const struct lhi_region* region, const void* data,
                                   size_t bytes) {
  const size_t at = (size_t)((const uint8_t*)data - region->base);
  for (struct lhi_block* block = region->blocks; block != NULL; block = block->next) {
    if (at < block->offset || at - block->offset >= block->bytes) continue;
    return block->used && bytes <= block->bytes - (at - block->offset) ? block : NULL;
  }
  return NULL;
}

bool lhi_arena_pin(const struct lhi_arena* arena, const void* data, size_t bytes,
                   struct lhi_pin* pin) {
  struct lhi_region* const region = lhi_arena_region(arena, data);
  struct lhi_block* block;
  pin->region = NULL;
  pin->block = NULL;
  if (region == NULL) return true;
  block = lhi_region_block(region, data, bytes);
  if (block == NULL) return false;
  ++block->pins;
  pin->region = region;
  pin->block = block;
  return true;
}

void lhi_unpin(struct lhi_pin* pin) {
  if (pin->block != NULL) --pin->block->pins;
  pin->region = NULL;
  pin->block = NULL;
}

void lhi_arena_part(struct lhi_arena* arena) {
  for (struct lhi_region* region = arena->regions; region != NULL; region = region->next) {
    if (region->fd < 0) continue;
    /* If the system refuses, the child has no memory there: it must not write to the parent's. */
    if (mmap(region->base, region->bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, region->fd, 0) == MAP_FAILED) {
      munmap(region->base, region->bytes);
    }
    close(region->fd);
    region->fd = -1;
  }
}

void lhi_region_drop(const struct lhi_region* region) {
  (void)madvise(region->base, region->bytes, MADV_REMOVE);
}

void lhi_arena_clear(struct lhi_arena* arena) {
  while (arena->regions != NULL) lhi_arena_remove(arena, arena->regions);
}
