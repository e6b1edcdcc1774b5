#include "client/src/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)

#include <emmintrin.h>

#define LINE ((size_t)64)
#define PAGE ((size_t)4096)
#define PAGES ((size_t)4)
#define BLOCK (PAGES * PAGE)

/* Copies one cache line; `to` is aligned to a line. These stores do not read the old line first. */
static void stream_line(uint8_t *to, const uint8_t *from) {
  const __m128i *const in = (const __m128i *)(const void *)from;
  __m128i *const out = (__m128i *)(void *)to;
  const __m128i a = _mm_loadu_si128(in);
  const __m128i b = _mm_loadu_si128(in + 1);
  const __m128i c = _mm_loadu_si128(in + 2);
  const __m128i d = _mm_loadu_si128(in + 3);
  _mm_stream_si128(out, a);
  _mm_stream_si128(out + 1, b);
  _mm_stream_si128(out + 2, c);
  _mm_stream_si128(out + 3, d);
}

/* Copies several pages, one line of each in turn. The reason: a processor prefetches only up to the
 * end of a page. `next` is the source of the block that is copied after this one. */
static void stream_block(uint8_t *to, const uint8_t *from, const uint8_t *next) {
  for (size_t line = 0; line < PAGE; line += LINE) {
    for (size_t at = line; at < BLOCK; at += PAGE) {
      _mm_prefetch((const char *)(next + at), _MM_HINT_T0);
      stream_line(to + at, from + at);
    }
  }
}

void lhi_copy(void *to, const void *from, size_t bytes) {
  uint8_t *out = to;
  const uint8_t *in = from;
  if (bytes >= LHI_STREAM_BYTES_MIN) {
    const size_t head = (LINE - (uintptr_t)out % LINE) % LINE;
    memcpy(out, in, head);
    out += head;
    in += head;
    bytes -= head;
    for (; bytes >= BLOCK; out += BLOCK, in += BLOCK, bytes -= BLOCK) {
      stream_block(out, in, bytes >= 2 * BLOCK ? in + BLOCK : in);
    }
    /* Streaming stores are not ordered like plain stores. The fence completes them before the
     * caller tells another thread or process that the copy is done. */
    _mm_sfence();
  }
  memcpy(out, in, bytes);
}

#else

void lhi_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

#endif
