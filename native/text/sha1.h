// SHA-1 (FIPS 180-4), portable and with the SHA instructions of x86, chosen at run time. C, not C++.
//
// It names things (cache keys and files), it secures nothing.
#ifndef DS4_TEXT_SHA1_H_
#define DS4_TEXT_SHA1_H_

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

typedef struct {
  uint32_t state[5];
  uint64_t size;  // bytes so far
  uint8_t block[64];
} ds4_sha1;

static inline uint32_t ds4_rotl(uint32_t x, int n) {
  return x << n | x >> (32 - n);
}

static void ds4_sha1_blocks_portable(uint32_t* state, const uint8_t* p, int64_t blocks) {
  for (; blocks > 0; --blocks, p += 64) {
    uint32_t w[16], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    for (int t = 0; t < 80; ++t) {
      uint32_t x;
      if (t < 16) {
        const uint8_t* q = p + 4 * t;
        x = (uint32_t)q[0] << 24 | (uint32_t)q[1] << 16 | (uint32_t)q[2] << 8 | q[3];
      } else {
        x = ds4_rotl(w[(t + 13) & 15] ^ w[(t + 8) & 15] ^ w[(t + 2) & 15] ^ w[t & 15], 1);
      }
      w[t & 15] = x;
      uint32_t f, k;
      if (t < 20) {
        f = (b & c) | (~b & d);
        k = 0x5A827999;
      } else if (t < 40) {
        f = b ^ c ^ d;
        k = 0x6ED9EBA1;
      } else if (t < 60) {
        f = (b & c) | (b & d) | (c & d);
        k = 0x8F1BBCDC;
      } else {
        f = b ^ c ^ d;
        k = 0xCA62C1D6;
      }
      const uint32_t next = ds4_rotl(a, 5) + f + e + k + x;
      e = d;
      d = c;
      c = ds4_rotl(b, 30);
      b = a;
      a = next;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
  }
}

#if defined(__x86_64__)

// A register of its own for the copy: the chain of `abcd` stays in one, without moves.
#define DS4_SHA1_COPY(x) __asm__("" : "+x"(x))
// Four rounds: `g` counts them from 0 to 19, `f` = g / 5 picks function and constant. The first four message vectors
// come from the block, the others from the four before them.
#define DS4_SHA1_ROUNDS(g, f)                                                                            \
  do {                                                                                                   \
    if (g >= 4) {                                                                                        \
      const __m128i mixed = _mm_xor_si128(_mm_sha1msg1_epu32(w[g & 3], w[(g + 1) & 3]), w[(g + 2) & 3]); \
      w[g & 3] = _mm_sha1msg2_epu32(mixed, w[(g + 3) & 3]);                                              \
    }                                                                                                    \
    const __m128i in = g == 0 ? _mm_add_epi32(before, w[0]) : _mm_sha1nexte_epu32(before, w[g & 3]);     \
    before = abcd;                                                                                       \
    DS4_SHA1_COPY(before);                                                                               \
    abcd = _mm_sha1rnds4_epu32(abcd, in, f);                                                             \
  } while (0)

#define DS4_SHA1_NI __attribute__((target("sha,ssse3,sse4.1")))

// Gives the bytes of a block, NULL if there are none.
typedef const uint8_t* (*ds4_sha1_source)(void* from, int64_t block);

// Hashes the blocks that `source` gives, up to its first NULL; returns how many. The next block is asked for before the
// rounds of this one: a block is one chain of dependent instructions, beside which the source's work costs little.
DS4_SHA1_NI static inline __attribute__((always_inline)) int64_t ds4_sha1_from_ni(uint32_t* state,
                                                                                  ds4_sha1_source source, void* from,
                                                                                  int64_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0001020304050607, 0x08090A0B0C0D0E0F);
  __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i*)state), 0x1B);
  __m128i e = _mm_set_epi32((int)state[4], 0, 0, 0);
  int64_t done = 0;
  const uint8_t* p = blocks > 0 ? source(from, 0) : NULL;
  while (p) {
    const __m128i abcd_in = abcd, e_in = e;
    __m128i before = e, w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(p + 16 * i)), swap);
    ++done;
    p = done < blocks ? source(from, done) : NULL;
    DS4_SHA1_ROUNDS(0, 0);
    DS4_SHA1_ROUNDS(1, 0);
    DS4_SHA1_ROUNDS(2, 0);
    DS4_SHA1_ROUNDS(3, 0);
    DS4_SHA1_ROUNDS(4, 0);
    DS4_SHA1_ROUNDS(5, 1);
    DS4_SHA1_ROUNDS(6, 1);
    DS4_SHA1_ROUNDS(7, 1);
    DS4_SHA1_ROUNDS(8, 1);
    DS4_SHA1_ROUNDS(9, 1);
    DS4_SHA1_ROUNDS(10, 2);
    DS4_SHA1_ROUNDS(11, 2);
    DS4_SHA1_ROUNDS(12, 2);
    DS4_SHA1_ROUNDS(13, 2);
    DS4_SHA1_ROUNDS(14, 2);
    DS4_SHA1_ROUNDS(15, 3);
    DS4_SHA1_ROUNDS(16, 3);
    DS4_SHA1_ROUNDS(17, 3);
    DS4_SHA1_ROUNDS(18, 3);
    DS4_SHA1_ROUNDS(19, 3);
    e = _mm_sha1nexte_epu32(before, e_in);
    abcd = _mm_add_epi32(abcd, abcd_in);
  }
  _mm_storeu_si128((__m128i*)state, _mm_shuffle_epi32(abcd, 0x1B));
  state[4] = (uint32_t)_mm_extract_epi32(e, 3);
  return done;
}
#undef DS4_SHA1_ROUNDS
#undef DS4_SHA1_COPY

static inline const uint8_t* ds4_sha1_memory(void* from, int64_t block) {
  return (const uint8_t*)from + 64 * block;
}

DS4_SHA1_NI static void ds4_sha1_blocks_ni(uint32_t* state, const uint8_t* p, int64_t blocks) {
  ds4_sha1_from_ni(state, ds4_sha1_memory, (void*)p, blocks);
}

#endif  // __x86_64__

static inline int ds4_sha1_has_ni(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 9) || !(c & 1u << 19)) return 0;  // SSSE3, SSE4.1
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
#else
  return 0;
#endif
}

// Set once when the module is loaded.
static void (*ds4_sha1_blocks)(uint32_t*, const uint8_t*, int64_t) = ds4_sha1_blocks_portable;

static inline int ds4_sha1_use(int ni) {
#if defined(__x86_64__)
  if (ni) {
    if (!ds4_sha1_has_ni()) return 0;
    ds4_sha1_blocks = ds4_sha1_blocks_ni;
    return 1;
  }
#endif
  if (ni) return 0;
  ds4_sha1_blocks = ds4_sha1_blocks_portable;
  return 1;
}

static inline void ds4_sha1_init(ds4_sha1* h) {
  static const uint32_t start[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
  memcpy(h->state, start, sizeof start);
  h->size = 0;
}

static inline void ds4_sha1_update(ds4_sha1* h, const uint8_t* p, int64_t n) {
  const int64_t used = (int64_t)(h->size & 63);
  h->size += (uint64_t)n;
  if (used > 0) {
    const int64_t take = n < 64 - used ? n : 64 - used;
    memcpy(h->block + used, p, (size_t)take);
    if (used + take < 64) return;
    ds4_sha1_blocks(h->state, h->block, 1);
    p += take;
    n -= take;
  }
  if (n >= 64) {
    ds4_sha1_blocks(h->state, p, n / 64);
    p += n & ~(int64_t)63;
    n &= 63;
  }
  if (n > 0) memcpy(h->block, p, (size_t)n);
}

// The digest of a copy: `h` may go on.
static inline void ds4_sha1_digest(const ds4_sha1* h, uint8_t* digest) {
  uint32_t state[5];
  uint8_t tail[128] = {0};
  const int64_t used = (int64_t)(h->size & 63);
  const int64_t length = used < 56 ? 64 : 128;
  memcpy(state, h->state, sizeof state);
  memcpy(tail, h->block, (size_t)used);
  tail[used] = 0x80;
  for (int i = 0; i < 8; ++i) tail[length - 1 - i] = (uint8_t)((h->size << 3) >> (8 * i));
  ds4_sha1_blocks(state, tail, length / 64);
  for (int i = 0; i < 20; ++i) digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

#endif  // DS4_TEXT_SHA1_H_
