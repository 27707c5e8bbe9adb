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
constexpr int kWaveTokens = 2;    // of which the sums of a block run side by side
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
// Sum of the lanes in one fixed order, the same for every instruction set: halves, quarters, ...
inline float hsum(Vf a) {
  const __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

inline Vi set1_i(int32_t v) {
  return _mm512_set1_epi32(v);
}
inline Vf as_float(Vi v) {
  return _mm512_castsi512_ps(v);
}
inline Vi to_int(Vf v) {
  return _mm512_cvtps_epi32(v);
}  // to nearest even
// most[i] = the largest magnitude of x[16 i ..], i < 4.
inline void maxima(const float* x, float* most) {
  const Vf a = abs(load(x)), b = abs(load(x + 16)), c = abs(load(x + 32)), d = abs(load(x + 48));
  const Vf ab = max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vf cd = max(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  // Every quarter of `all` has one value of each run.
  const Vf all = max(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(most, _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
// x[16 i ..] times inverse[i], i < 4, as bytes to q0 [32] and q1 [32]; sums[i]: of the bytes. |x inverse| < 127.5.
inline void quantise(const float* x, const float* inverse, int8_t* q0, int8_t* q1, int32_t* sums) {
  const Vi a = to_int(mul(load(x), set1(inverse[0]))), b = to_int(mul(load(x + 16), set1(inverse[1])));
  const Vi c = to_int(mul(load(x + 32), set1(inverse[2]))), d = to_int(mul(load(x + 48), set1(inverse[3])));
  // Packing works per quarter: each has four bytes of every run.
  const __m512i quarters = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, quarters);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q0), _mm512_castsi512_si256(bytes));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q1), _mm512_extracti64x4_epi64(bytes, 1));
  const __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), quarters);
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums),
                   _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}
// The largest power of two that is at most v, for normal v > 0.
inline Vf power_of_two(Vf v) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7f800000)));
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
  // Spelled out: GCC 12 makes two instructions of it, a broadcast to a register and the product.
  struct Four {
    int8_t x[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const Four*>(x)));
  return acc;
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
