#include "client/src/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)

#include <emmintrin.h>

#define LINE ((size_t)64)
/* So far ahead of a copy its source is prefetched, past most caches, since nothing reads it soon. A
 * processor prefetches by itself, but only up to the end of a page. */
#define AHEAD ((size_t)2048)

/* Copies one cache line; `to` is aligned to a line. These stores do not read the old line first. */
static void stream_line(uint8_t* to, const uint8_t* from) {
  const __m128i* const in = (const __m128i*)(const void*)from;
  __m128i* const out = (__m128i*)(void*)to;
  const __m128i a = _mm_loadu_si128(in);
  const __m128i b = _mm_loadu_si128(in + 1);
  const __m128i c = _mm_loadu_si128(in + 2);
  const __m128i d = _mm_loadu_si128(in + 3);
  _mm_stream_si128(out, a);
  _mm_stream_si128(out + 1, b);
  _mm_stream_si128(out + 2, c);
  _mm_stream_si128(out + 3, d);
}

void lhi_copy(void* to, const void* from, size_t bytes) {
  uint8_t* out = to;
  const uint8_t* in = from;
  if (bytes >= LHI_STREAM_BYTES_MIN) {
    const size_t head = (LINE - (uintptr_t)out % LINE) % LINE;
    memcpy(out, in, head);
    out += head;
    in += head;
    bytes -= head;
    for (; bytes >= AHEAD + LINE; out += LINE, in += LINE, bytes -= LINE) {
      _mm_prefetch((const char*)(in + AHEAD), _MM_HINT_NTA);
      stream_line(out, in);
    }
    /* Streaming stores are not ordered like plain stores. The fence completes them before the
     * caller tells another thread or process that the copy is done. */
    _mm_sfence();
  }
  memcpy(out, in, bytes);
}

#else

void lhi_copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

#endif
