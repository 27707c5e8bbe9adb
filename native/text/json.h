// JSON text: scanning to a tape, decoding strings, printing from the tape, escaping. C, not C++; no Python in here.
//
// The scanner and the decoder exist once per instruction set (json_kernels.h); `ds4_json_isa` points to those in use.
// Printing works on the tape and needs no vectors: a string without escapes is one memcpy.
#ifndef DS4_TEXT_JSON_H_
#define DS4_TEXT_JSON_H_

#include <stdlib.h>
#include <string.h>

#include "json_tape.h"

#define DS4_ISA scalar
#define DS4_ISA_SCALAR
#include "block.h"
#include "json_kernels.h"
#undef DS4_ISA
#undef DS4_ISA_SCALAR

#if defined(__x86_64__)
#include <immintrin.h>

#define DS4_ISA sse2
#define DS4_ISA_SSE2
#include "block.h"
#include "json_kernels.h"
#undef DS4_ISA
#undef DS4_ISA_SSE2

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,lzcnt,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,lzcnt,popcnt")
#endif
#define DS4_ISA avx2
#define DS4_ISA_AVX2
#include "block.h"
#include "json_kernels.h"
#undef DS4_ISA
#undef DS4_ISA_AVX2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                                                        \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx2,bmi,bmi2,lzcnt,popcnt"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx2,bmi,bmi2,lzcnt,popcnt")
#endif
#define DS4_ISA avx512
#define DS4_ISA_AVX512
#include "block.h"
#include "json_kernels.h"
#undef DS4_ISA
#undef DS4_ISA_AVX512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__

typedef struct {
  const char* name;
  int (*scan)(ds4_json_tape*);
  void (*decode1)(const uint8_t*, const uint8_t*, int, uint8_t*, int64_t);
  void (*decode2)(const uint8_t*, const uint8_t*, int, uint16_t*, int64_t);
  void (*decode4)(const uint8_t*, const uint8_t*, int, uint32_t*, int64_t);
  int64_t (*extent)(const uint8_t*, const uint8_t*, unsigned*);
  int64_t (*escaped_size)(const uint8_t*, int64_t);
} ds4_json_kernels;

#define DS4_KERNELS(isa) \
  {#isa,                 \
   ds4_json_scan_##isa,  \
   ds4_decode1_##isa,    \
   ds4_decode2_##isa,    \
   ds4_decode4_##isa,    \
   ds4_extent_##isa,     \
   ds4_escaped_size_##isa}
// From the plainest to the best.
static const ds4_json_kernels ds4_json_all[] = {
    DS4_KERNELS(scalar),
#if defined(__x86_64__)
    DS4_KERNELS(sse2),
    DS4_KERNELS(avx2),
    DS4_KERNELS(avx512),
#endif
};
#undef DS4_KERNELS
enum { DS4_JSON_N_ISA = sizeof ds4_json_all / sizeof *ds4_json_all };

static inline int ds4_json_supported(int index) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (index == 2 || index == 3) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") ||
        !__builtin_cpu_supports("popcnt")) {
      return 0;
    }
  }
  if (index == 3) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
  }
#endif
  return index < DS4_JSON_N_ISA;
}

// ---- printing ---------------------------------------------------------------------------------------------------

// Names of the short escapes of control characters. `dumps` leaves out \b and \f, the canonical form has them.
static inline char ds4_short_escape(uint32_t c, int all) {
  switch (c) {
    case '"':
      return '"';
    case '\\':
      return '\\';
    case '\n':
      return 'n';
    case '\r':
      return 'r';
    case '\t':
      return 't';
    case '\b':
      return all ? 'b' : 0;
    case '\f':
      return all ? 'f' : 0;
    default:
      return 0;
  }
}

// Writes one code point (no surrogate) escaped; returns the end. At most six bytes.
static inline uint8_t* ds4_put_escaped(uint8_t* out, uint32_t c, int all) {
  if (c >= 0x80) {
    if (c < 0x800) {
      *out++ = (uint8_t)(0xC0 | c >> 6);
    } else {
      if (c < 0x10000) {
        *out++ = (uint8_t)(0xE0 | c >> 12);
      } else {
        *out++ = (uint8_t)(0xF0 | c >> 18);
        *out++ = (uint8_t)(0x80 | (c >> 12 & 0x3F));
      }
      *out++ = (uint8_t)(0x80 | (c >> 6 & 0x3F));
    }
    *out++ = (uint8_t)(0x80 | (c & 0x3F));
    return out;
  }
  if (c >= 0x20 && c != '"' && c != '\\') {
    *out++ = (uint8_t)c;
    return out;
  }
  const char brief = ds4_short_escape(c, all);
  *out++ = '\\';
  if (brief != 0) {
    *out++ = (uint8_t)brief;
    return out;
  }
  memcpy(out, "u00", 3);
  out[3] = (uint8_t)('0' + (c >> 4));
  out[4] = (uint8_t)"0123456789abcdef"[c & 15];
  return out + 5;
}

// Copies n bytes and returns the end. Most are few: those are copied as DS4_SLACK, which both sides must bear; `limit`
// says where the source ends.
enum { DS4_SLACK = 32 };
static inline uint8_t* ds4_copy(uint8_t* out, const uint8_t* p, int64_t n, const uint8_t* limit) {
  if (n <= DS4_SLACK && limit - p >= DS4_SLACK) {
    memcpy(out, p, DS4_SLACK);
  } else {
    memcpy(out, p, (size_t)n);
  }
  return out + n;
}

// A string literal in canonical spelling, never longer than its source.
static inline uint8_t* ds4_put_canonical_string(uint8_t* out, const uint8_t* p, int64_t length) {
  const uint8_t* const limit = p + length - 1;
  *out++ = *p++;
  while (p < limit) {
    const uint8_t* slash = (const uint8_t*)memchr(p, '\\', (size_t)(limit - p));
    const uint8_t* stop = slash != NULL ? slash : limit;
    out = ds4_copy(out, p, stop - p, limit);
    p = stop;
    while (p < limit && *p == '\\') {
      int taken;
      const uint32_t code = ds4_json_unescape(p, limit, &taken);
      out = ds4_put_escaped(out, code, 1);
      p += taken;
    }
  }
  *out++ = '"';
  return out;
}

// Prints the value at `at`. canonical: ", " and ": " and canonical strings; else "," and ":" and strings as they are.
// `out` must have room for the value's bytes, one for each of its words and DS4_SLACK. Iterative: the tape is the
// order.
static inline uint8_t* ds4_json_print(const ds4_json_tape* t, int64_t at, int canonical, uint8_t* out) {
  const uint8_t* const body = t->body;
  const int64_t last = ds4_tape_next(body, t->words, at);
  struct {
    int64_t end;
    int is_object;
    int at_value;
    int first;
  } open[DS4_JSON_MAX_DEPTH];
  int depth = 0;
  while (at < last || depth > 0) {
    if (depth > 0) {
      if (at == open[depth - 1].end) {
        *out++ = open[depth - 1].is_object ? '}' : ']';
        --depth;
        continue;
      }
      if (open[depth - 1].at_value) {
        *out++ = ':';
        if (canonical) *out++ = ' ';
        open[depth - 1].at_value = 0;
      } else {
        if (!open[depth - 1].first) {
          *out++ = ',';
          if (canonical) *out++ = ' ';
        }
        open[depth - 1].first = 0;
        open[depth - 1].at_value = open[depth - 1].is_object;
      }
    }
    const uint64_t* w = t->words + at;
    const uint8_t* p = body + ds4_tape_start(w);
    if (ds4_json_is_container(*p)) {
      *out++ = *p;
      open[depth].end = ds4_tape_second(w);
      open[depth].is_object = *p == '{';
      open[depth].at_value = 0;
      open[depth].first = 1;
      ++depth;
      at += 2;
      continue;
    }
    const int64_t length = ds4_tape_second(w);
    if (canonical && *p == '"' && (ds4_tape_flags(w) & DS4_ESCAPED) != 0) {
      out = ds4_put_canonical_string(out, p, length);
    } else {
      out = ds4_copy(out, p, length, body + t->size);
    }
    at += 1 + (*p == '"' && ds4_tape_flags(w) != 0);
  }
  return out;
}

#endif  // DS4_TEXT_JSON_H_
