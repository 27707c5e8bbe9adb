// Sixteen lanes as the compiler's generic vectors, which it lowers to whatever the baseline has: runs on every machine.
#pragma once

#include <cstdint>

#include "quant/quant.h"

namespace ds4::cpu {
namespace {

using Vf = float __attribute__((vector_size(64)));
using Vi = int32_t __attribute__((vector_size(64)));
using Vb = uint32_t __attribute__((vector_size(64)));  // lane r: the four bytes of row r, first in the low bits

constexpr bool kSignedBytes = false;
constexpr bool kNarrowSums = false;
constexpr int kMaxTokens = 2;
constexpr int kWaveTokens = 2;  // of which the sums of a block run side by side
constexpr int kScoreVectors = 1;
constexpr int kScoreTiles = 1;
constexpr int kValueVectors = 1;
constexpr int kValueWidth = 1;

inline Vf zero() {
  return Vf{};
}
inline Vf set1(float x) {
  return Vf{} + x;
}
inline Vf load(const float* p) {
  Vf r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
inline void store(float* p, Vf v) {
  __builtin_memcpy(p, &v, sizeof v);
}
inline Vf load_f16(const uint16_t* p) {
  Vf r;
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) r[i] = half_to_float(p[i]);
  return r;
}
inline void store_f16(uint16_t* p, Vf v) {
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(v[i]);
}
inline Vf load_i8(const uint8_t* p) {
  Vf r;
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) r[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return r;
}
inline Vf add(Vf a, Vf b) {
  return a + b;
}
inline Vf sub(Vf a, Vf b) {
  return a - b;
}
inline Vf mul(Vf a, Vf b) {
  return a * b;
}
inline Vf div(Vf a, Vf b) {
  return a / b;
}
// Rounds twice: machines that need this set have no fused form, and a library call per lane would be far slower.
inline Vf fma(Vf a, Vf b, Vf c) {
  return a * b + c;
}
inline Vf max(Vf a, Vf b) {
  return a > b ? a : b;
}
inline Vf min(Vf a, Vf b) {
  return a < b ? a : b;
}
inline Vf abs(Vf a) {
  return a < 0.0f ? -a : a;
}
// To nearest even by adding and taking away 1.5 * 2^23: exact for |a| < 2^22, which is all that the kernels round.
inline Vf round(Vf a) {
  return (a + 12582912.0f) - 12582912.0f;
}
inline Vf first_lanes(Vf a, int n, float other) {
  constexpr Vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < n ? a : set1(other);
}
inline Vf zero_below(Vf x, float limit, Vf v) {
  return x >= limit ? v : zero();
}
inline float hmax(Vf a) {
  float m = a[0];
#pragma GCC unroll 1
  for (int i = 1; i < 16; ++i) m = a[i] > m ? a[i] : m;
  return m;
}

// Sum of the lanes in one fixed order, the same for every instruction set: halves, quarters, ...
inline float hsum(Vf a) {
#pragma GCC unroll 1
  for (int half = 8; half; half /= 2)
#pragma GCC unroll 1
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}

inline Vi set1_i(int32_t x) {
  return Vi{} + x;
}
inline Vf as_float(Vi a) {
  return reinterpret_cast<Vf>(a);
}
// Values outside the range of the conversion (NaN, infinities from bad weights) become 0 rather than undefined.
inline Vi to_int(Vf a) {
  const Vf r = round(a);
  return __builtin_convertvector((r > -4e6f) & (r < 4e6f) ? r : zero(), Vi);
}
inline int32_t store_i8(int8_t* p, Vi a) {
  int32_t sum = 0;
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a[i]), sum += p[i];
  return sum;
}
inline Vf power_of_two(Vf a) {
  return reinterpret_cast<Vf>(reinterpret_cast<Vb>(a) & 0x7f800000u);
}
inline Vf exp2_int(Vi n) {
  return reinterpret_cast<Vf>((n + 127) << 23);
}
inline Vf scale_exponent(Vf v, Vf shifted) {
  return reinterpret_cast<Vf>(reinterpret_cast<Vb>(v) + (reinterpret_cast<Vb>(shifted) << 23));
}

inline Vb load_bytes(const uint8_t* p) {
  Vb r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
inline Vb low_nibbles(Vb a) {
  return a & 0x0f0f0f0fu;
}
inline Vb high_nibbles(Vb a) {
  return (a >> 4) & 0x0f0f0f0fu;
}
// Bits SHIFT.. of every byte, under MASK.
template <int SHIFT, int MASK>
inline Vb field(Vb a) {
  return (a >> SHIFT) & (uint32_t{MASK} * 0x01010101u);
}
inline Vb either(Vb a, Vb b) {
  return a | b;
}
// Sixteen nibbles, the low ones (SHIFT 0) or the high ones (4) of sixteen bytes.
template <int SHIFT>
inline Vf load_nibbles(const uint8_t* p) {
  Vf r;
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) r[i] = static_cast<float>(p[i] >> SHIFT & 15);
  return r;
}
inline Vb lookup(Vb index, const uint8_t* table) {
  uint8_t bytes[64];
  __builtin_memcpy(bytes, &index, sizeof bytes);
#pragma GCC unroll 1
  for (uint8_t& b : bytes) b = table[b & 15];
  return load_bytes(bytes);
}
template <int BITS>
inline Vi dot4(Vi acc, Vb w, const int8_t* x) {
  return acc + reinterpret_cast<Vi>(w & 255u) * int32_t{x[0]} + reinterpret_cast<Vi>((w >> 8) & 255u) * int32_t{x[1]} +
         reinterpret_cast<Vi>((w >> 16) & 255u) * int32_t{x[2]} + reinterpret_cast<Vi>(w >> 24) * int32_t{x[3]};
}
inline Vf dot2_bf16(Vf acc, const uint8_t* w, const uint8_t* x) {
  const Vb pairs = load_bytes(w);
  uint32_t two;
  __builtin_memcpy(&two, x, sizeof two);
  const uint32_t bits[2] = {two << 16, two & 0xffff0000u};
  float v[2];
  __builtin_memcpy(v, bits, sizeof v);
  return acc + reinterpret_cast<Vf>(pairs << 16) * v[0] + reinterpret_cast<Vf>(pairs & 0xffff0000u) * v[1];
}
inline void prefetch(const void*) {}

}  // namespace
}  // namespace ds4::cpu

#include "cpu/simd_runs.h"
