// Sixteen lanes on AVX-512 (F, BW, DQ, VL, VNNI, VBMI, BF16). Included by kernels_avx512.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ds4::cpu {
namespace {

using Vf = __m512;   // 16 x f32
using Vi = __m512i;  // 16 x i32
using Vb = __m512i;  // 16 rows x 4 bytes

constexpr bool kSignedBytes = false;
constexpr bool kNarrowSums = false;
constexpr int kMaxTokens = 16;    // accumulators of one tile
constexpr int kScoreVectors = 6;  // query vectors x kScoreTiles accumulators
constexpr int kScoreTiles = 4;    // key tiles per pass: a whole page
constexpr int kValueVectors = 6;  // query vectors x kValueWidth accumulators
constexpr int kValueWidth = 4;    // vectors of a value row per pass

inline Vf zero() {
  return _mm512_setzero_ps();
}
inline Vf set1(float v) {
  return _mm512_set1_ps(v);
}
inline Vf load(const float* p) {
  return _mm512_loadu_ps(p);
}
inline void store(float* p, Vf v) {
  _mm512_storeu_ps(p, v);
}
inline Vf load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_f16(uint16_t* p, Vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vf load_i8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vf add(Vf a, Vf b) {
  return _mm512_add_ps(a, b);
}
inline Vf sub(Vf a, Vf b) {
  return _mm512_sub_ps(a, b);
}
inline Vf mul(Vf a, Vf b) {
  return _mm512_mul_ps(a, b);
}
inline Vf div(Vf a, Vf b) {
  return _mm512_div_ps(a, b);
}
inline Vf fma(Vf a, Vf b, Vf c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Vf max(Vf a, Vf b) {
  return _mm512_max_ps(a, b);
}
inline Vf min(Vf a, Vf b) {
  return _mm512_min_ps(a, b);
}
inline Vf abs(Vf a) {
  return _mm512_abs_ps(a);
}
inline Vf round(Vf a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Lanes < n of a, the others `other`.
inline Vf first_lanes(Vf a, int n, float other) {
  const __mmask16 keep = n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
  return _mm512_mask_blend_ps(keep, _mm512_set1_ps(other), a);
}
// 0 where x < limit, else v.
inline Vf zero_below(Vf x, float limit, Vf v) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), v);
}
inline float hmax(Vf a) {
  return _mm512_reduce_max_ps(a);
}

inline Vi zero_i() {
  return _mm512_setzero_si512();
}
inline Vi set1_i(int32_t v) {
  return _mm512_set1_epi32(v);
}
inline Vf to_float(Vi v) {
  return _mm512_cvtepi32_ps(v);
}
inline Vi to_int(Vf v) {
  return _mm512_cvtps_epi32(v);
}  // to nearest even
// Sum of sixteen signed bytes: the sum of absolute differences adds eight unsigned ones at a time.
inline int32_t sum_bytes(__m128i v) {
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(v, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}
// Stores the lanes as bytes and returns their sum; |v| <= 127.
inline int32_t store_i8(int8_t* p, Vi v) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  return sum_bytes(bytes);
}
// 2^n, n in [-126, 127].
inline Vf exp2_int(Vi n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// v * 2^n by adding n to the exponents of v; `shifted` is n + 1.5 * 2^23, whose low bits are n.
inline Vf scale_exponent(Vf v, Vf shifted) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

inline Vb load_bytes(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}
inline Vb low_nibbles(Vb v) {
  return _mm512_and_si512(v, _mm512_set1_epi8(15));
}
inline Vb high_nibbles(Vb v) {
  return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}
// Bits SHIFT.. of every byte, under MASK.
template <int SHIFT, int MASK>
inline Vb field(Vb v) {
  return _mm512_and_si512(SHIFT ? _mm512_srli_epi16(v, SHIFT) : v, _mm512_set1_epi8(MASK));
}
inline Vb either(Vb a, Vb b) {
  return _mm512_or_si512(a, b);
}
// Sixteen nibbles, the low ones (SHIFT 0) or the high ones (4) of sixteen bytes.
template <int SHIFT>
inline Vf load_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(SHIFT ? _mm512_srli_epi32(bytes, 4) : _mm512_and_si512(bytes, _mm512_set1_epi32(15)));
}
inline Vb lookup(Vb index, const uint8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}
// acc[row] += sum of 4 products, u8 weights by i8 activations; exact. BITS: of the weights.
template <int BITS>
inline Vi dot4(Vi acc, Vb w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
// acc[row] += w[2k] x[2k] + w[2k + 1] x[2k + 1], bf16 operands, two columns per call.
inline Vf dot2_bf16(Vf acc, const uint8_t* w, const uint8_t* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w)),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)));
}
inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace
}  // namespace ds4::cpu
