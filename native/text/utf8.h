// Code points: UTF-8 that may be ill-formed, Python's one, two and four byte characters, surrogates. C, not C++.
//
// Ill-formed UTF-8 is replaced by U+FFFD once for each maximal subpart (Unicode 15 section 3.9, table 3-7 and "best
// practices"; the same as the WHATWG decoder): a subpart is the longest start of a well-formed sequence, or one byte.
#ifndef DS4_TEXT_UTF8_H_
#define DS4_TEXT_UTF8_H_

#include <stdint.h>
#include <string.h>

// Takes one code point or one maximal subpart (code U+FFFD) from [p, end), p < end; returns its bytes. A sequence that
// is well-formed but cut by `end` returns 0.
static inline int ds4_utf8_next(const uint8_t* p, const uint8_t* end, uint32_t* code) {
  const uint8_t c = p[0];
  if (c < 0x80) {
    *code = c;
    return 1;
  }
  *code = 0xFFFD;
  if (c < 0xC2 || c > 0xF4) return 1;
  const int length = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
  // Only the second byte has a range that depends on the first.
  uint8_t low = 0x80, high = 0xBF;
  if (c == 0xE0) low = 0xA0;
  if (c == 0xED) high = 0x9F;
  if (c == 0xF0) low = 0x90;
  if (c == 0xF4) high = 0x8F;
  uint32_t value = c & (0xFFu >> (length + 1));
  for (int i = 1; i < length; ++i) {
    if (p + i == end) return 0;
    if (p[i] < low || p[i] > high) return i;
    low = 0x80;
    high = 0xBF;
    value = value << 6 | (p[i] & 0x3F);
  }
  *code = value;
  return length;
}

// The same where nothing may follow `end` that continues a sequence: a cut one is a maximal subpart.
static inline int ds4_utf8_take(const uint8_t* p, const uint8_t* end, uint32_t* code) {
  const int n = ds4_utf8_next(p, end, code);
  return n != 0 ? n : (int)(end - p);
}

// Bytes at the end of [p, p + n) that begin a well-formed sequence which is not complete: 0 to 3.
static inline int ds4_utf8_incomplete(const uint8_t* p, int64_t n) {
  uint32_t code;
  for (int k = 1; k <= 3 && k <= n; ++k) {
    const uint8_t c = p[n - k];
    if (c >= 0x80 && c < 0xC0) continue;
    return ds4_utf8_next(p + n - k, p + n, &code) == 0 ? k : 0;
  }
  return 0;
}

static inline int ds4_is_ascii(const uint8_t* p, int64_t n) {
  uint64_t any = 0, word;
  for (; n >= 8; p += 8, n -= 8) {
    memcpy(&word, p, 8);
    any |= word;
  }
  if (n > 0) {
    word = 0;
    memcpy(&word, p, (size_t)n);
    any |= word;
  }
  return (any & UINT64_C(0x8080808080808080)) == 0;
}

// Bytes of plain ASCII at p, eight at a time (so maybe a few less than there are).
static inline int64_t ds4_ascii_run(const uint8_t* p, const uint8_t* end) {
  const uint8_t* const start = p;
  while (end - p >= 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    if ((word & UINT64_C(0x8080808080808080)) != 0) break;
    p += 8;
  }
  return p - start;
}

// Characters that [p, end) decodes to, and the highest of them.
static inline int64_t ds4_utf8_measure(const uint8_t* p, const uint8_t* end, uint32_t* highest) {
  int64_t chars = 0;
  uint32_t code, top = 0x7F;
  while (p < end) {
    const int64_t run = ds4_ascii_run(p, end);
    chars += run;
    p += run;
    for (int i = 0; i < 8 && p < end; ++i) {
      p += ds4_utf8_take(p, end, &code);
      if (code > top) top = code;
      ++chars;
    }
  }
  *highest = top;
  return chars;
}

// Decodes what was measured; `width` is the size of a character of `out`: 1, 2 or 4.
static inline void ds4_utf8_decode(const uint8_t* p, const uint8_t* end, int width, void* out) {
  int64_t at = 0;
  while (p < end) {
    const int64_t run = ds4_ascii_run(p, end);
    if (width == 1) {
      memcpy((uint8_t*)out + at, p, (size_t)run);
    } else if (width == 2) {
      for (int64_t i = 0; i < run; ++i) ((uint16_t*)out)[at + i] = p[i];
    } else {
      for (int64_t i = 0; i < run; ++i) ((uint32_t*)out)[at + i] = p[i];
    }
    at += run;
    p += run;
    for (int i = 0; i < 8 && p < end; ++i) {
      uint32_t code;
      p += ds4_utf8_take(p, end, &code);
      if (width == 1) {
        ((uint8_t*)out)[at++] = (uint8_t)code;
      } else if (width == 2) {
        ((uint16_t*)out)[at++] = (uint16_t)code;
      } else {
        ((uint32_t*)out)[at++] = code;
      }
    }
  }
}

// The character at *at of n characters of `width` bytes, which moves behind it. A surrogate pair is its character, any
// other surrogate U+FFFD.
static inline uint32_t ds4_char_next(int width, const void* data, int64_t* at, int64_t n) {
  const int64_t i = (*at)++;
  if (width == 1) return ((const uint8_t*)data)[i];
  const uint32_t c = width == 2 ? ((const uint16_t*)data)[i] : ((const uint32_t*)data)[i];
  if (c < 0xD800 || c > 0xDFFF) return c;
  if (c < 0xDC00 && i + 1 < n) {
    const uint32_t low = width == 2 ? ((const uint16_t*)data)[i + 1] : ((const uint32_t*)data)[i + 1];
    if (low >= 0xDC00 && low <= 0xDFFF) {
      ++*at;
      return 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    }
  }
  return 0xFFFD;
}

static inline int ds4_has_surrogates(int width, const void* data, int64_t n) {
  int any = 0;
  if (width == 2) {
    for (int64_t i = 0; i < n; ++i) any |= (((const uint16_t*)data)[i] & 0xF800) == 0xD800;
  } else if (width == 4) {
    for (int64_t i = 0; i < n; ++i) any |= (((const uint32_t*)data)[i] & 0xFFFFF800) == 0xD800;
  }
  return any;
}

#endif  // DS4_TEXT_UTF8_H_
