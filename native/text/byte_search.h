// Where a byte stands among at most 256: the step of a walk down a tree.
#ifndef DS4_TEXT_BYTE_SEARCH_H
#define DS4_TEXT_BYTE_SEARCH_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Index of `byte` among the n bytes at p, or -1. Reads 16 bytes at a time: the last step may read up to 15 bytes that
// follow the n, which must be the caller's.
static inline int ds4_byte_index(const uint8_t* p, int n, uint8_t byte) {
#if defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi8((char)byte);
  for (int i = 0; i < n; i += 16) {
    unsigned hits = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i*)(p + i)), wanted));
    if (n - i < 16) hits &= (1u << (n - i)) - 1;
    if (hits) return i + __builtin_ctz(hits);
  }
  return -1;
#else
  const uint8_t* q = n ? (const uint8_t*)memchr(p, byte, (size_t)n) : 0;
  return q ? (int)(q - p) : -1;
#endif
}

#endif
