// Sixteen lanes as pairs of AVX2 registers (with FMA and F16C). Included by kernels_avx2.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ds4::cpu {
namespace {

struct Vf {
  __m256 a, b;
};
struct Vi {
  __m256i a, b;
};
struct Vb {
  __m256i a, b;
};

constexpr bool kSignedBytes = true;  // dot4<8> takes signed weights
constexpr bool kNarrowSums = true;   // dot_narrow is there, for 4-bit weights
constexpr int kMaxTokens = 4;        // sixteen registers: 4 tokens x 2 accumulators, weights, temporaries
constexpr int kWaveTokens = 4;       // of which the sums of a block run side by side
constexpr int kScoreVectors = 3;
constexpr int kScoreTiles = 2;
constexpr int kValueVectors = 3;
constexpr int kValueWidth = 2;

inline Vf zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline Vf set1(float v) {
  return {_mm256_set1_ps(v), _mm256_set1_ps(v)};
}
inline Vf load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, Vf v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline __m128i load128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline Vf load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
inline void store_f16(uint16_t* p, Vf v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
inline Vf load_i8(const uint8_t* p) {
  const __m128i v = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
inline Vf add(Vf x, Vf y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline Vf sub(Vf x, Vf y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline Vf mul(Vf x, Vf y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline Vf div(Vf x, Vf y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline Vf fma(Vf x, Vf y, Vf z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vf max(Vf x, Vf y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline Vf min(Vf x, Vf y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline Vf abs(Vf x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline Vf round(Vf x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline Vf first_lanes(Vf x, int n, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 o = _mm256_set1_ps(other);
  const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
  return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(low)), _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(high))};
}
inline Vf zero_below(Vf x, float limit, Vf v) {
  const __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_GE_OQ), v.a), _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_GE_OQ), v.b)};
}
inline float hmax(Vf x) {
  const __m256 m = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
// Sum of the lanes in one fixed order, the same for every instruction set: halves, quarters, ...
inline float hsum(Vf x) {
  const __m256 e = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

inline Vi set1_i(int32_t v) {
  return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)};
}
inline Vf as_float(Vi x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
inline Vi to_int(Vf x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
inline int32_t store_i8(int8_t* p, Vi x) {
  // packs works per 128-bit half: the order is mended at 64-bit granularity before the last step.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
inline Vf power_of_two(Vf x) {
  const __m256 exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  return {_mm256_and_ps(x.a, exponent), _mm256_and_ps(x.b, exponent)};
}
inline Vf exp2_int(Vi n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
inline Vf scale_exponent(Vf v, Vf shifted) {
  const auto half = [](__m256 x, __m256 s) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(s), 23)));
  };
  return {half(v.a, shifted.a), half(v.b, shifted.b)};
}

inline __m256i load256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline Vb load_bytes(const uint8_t* p) {
  return {load256(p), load256(p + 32)};
}
inline Vb low_nibbles(Vb x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Vb high_nibbles(Vb x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}
// Bits SHIFT.. of every byte, under MASK.
template <int SHIFT, int MASK>
inline Vb field(Vb x) {
  const __m256i mask = _mm256_set1_epi8(MASK);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, SHIFT), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, SHIFT), mask)};
}
inline Vb either(Vb x, Vb y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
// Sixteen nibbles, the low ones (SHIFT 0) or the high ones (4) of sixteen bytes.
template <int SHIFT>
inline Vf load_nibbles(const uint8_t* p) {
  const __m128i bytes = _mm_and_si128(_mm_srli_epi16(load128(p), SHIFT), _mm_set1_epi8(15));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
}
inline Vb lookup(Vb index, const uint8_t* table) {
  const __m256i t = _mm256_broadcastsi128_si256(load128(table));
  return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
template <int BITS>
inline Vb less_128(Vb v) {
  const __m256i flip = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(v.a, flip), _mm256_xor_si256(v.b, flip)};
}
inline __m256i broadcast4(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
// vpmaddubsw adds two products in 16 bits and saturates. Weights under 128 cannot get there (2 * 127 * 127 < 2^15);
// signed ones give their sign to the activation first (2 * 128 * 127 < 2^15).
template <int BITS>
inline Vi dot4(Vi acc, Vb w, const int8_t* x) {
  const __m256i v = broadcast4(x), ones = _mm256_set1_epi16(1);
  const auto half = [&](__m256i sum, __m256i bytes) {
    const __m256i pairs = BITS == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(v, bytes))
                                    : _mm256_maddubs_epi16(bytes, v);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
  };
  return {half(acc.a, w.a), half(acc.b, w.b)};
}
// STEPS <= 8 of dot4 for weights under 16: the sums of pairs stay within 16 bits (16 * 15 * 127 < 2^15) and are widened
// once.
template <int STEPS>
inline Vi dot_narrow(Vi acc, const Vb* w, const int8_t* x) {
  __m256i a = _mm256_maddubs_epi16(w[0].a, broadcast4(x)), b = _mm256_maddubs_epi16(w[0].b, broadcast4(x));
#pragma GCC unroll 8
  for (int g = 1; g < STEPS; ++g) {
    const __m256i v = broadcast4(x + 4 * g);
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w[g].a, v));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w[g].b, v));
  }
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(a, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(b, ones))};
}
inline Vf dot2_bf16(Vf acc, const uint8_t* w, const uint8_t* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  const __m256i v = _mm256_set1_epi32(two), upper = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(v, upper));
  const auto half = [&](__m256 sum, __m256i pairs) {
    sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), first, sum);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pairs, upper)), second, sum);
  };
  return {half(acc.a, load256(w)), half(acc.b, load256(w + 32))};
}
inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace ds4::cpu

#include "cpu/simd_runs.h"
