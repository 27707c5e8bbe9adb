// Sixteen lanes as four NEON registers (Armv8.2 with dot product and half precision). Included by kernels_neon.cpp
// only.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace ds4::cpu {
namespace {

struct Vf {
  float32x4_t v[4];
};
struct Vi {
  int32x4_t v[4];
};
struct Vb {
  uint8x16_t v[4];
};

constexpr bool kSignedBytes = true;  // dot4<8> takes signed weights
constexpr bool kNarrowSums = false;
constexpr int kMaxTokens = 4;
constexpr int kWaveTokens = 4;  // of which the sums of a block run side by side
constexpr int kScoreVectors = 3;
constexpr int kScoreTiles = 1;
constexpr int kValueVectors = 3;
constexpr int kValueWidth = 1;

template <class F>
inline Vf each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class F>
inline Vi each_i(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
template <class F>
inline Vb each_b(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

inline Vf set1(float x) {
  return each([=](int) { return vdupq_n_f32(x); });
}
inline Vf zero() {
  return set1(0.0f);
}
inline Vf load(const float* p) {
  return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, Vf a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline Vf load_f16(const uint16_t* p) {
  return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store_f16(uint16_t* p, Vf a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline Vf load_i8(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline Vf add(Vf a, Vf b) {
  return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Vf sub(Vf a, Vf b) {
  return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline Vf mul(Vf a, Vf b) {
  return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Vf div(Vf a, Vf b) {
  return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline Vf fma(Vf a, Vf b, Vf c) {
  return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline Vf max(Vf a, Vf b) {
  return each([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); });
}
inline Vf min(Vf a, Vf b) {
  return each([&](int i) { return vminq_f32(a.v[i], b.v[i]); });
}
inline Vf abs(Vf a) {
  return each([&](int i) { return vabsq_f32(a.v[i]); });
}
inline Vf round(Vf a) {
  return each([&](int i) { return vrndnq_f32(a.v[i]); });
}
inline Vf first_lanes(Vf a, int n, float other) {
  static const int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return each([&](int i) {
    return vbslq_f32(vcltq_s32(vld1q_s32(kLanes + 4 * i), vdupq_n_s32(n)), a.v[i], vdupq_n_f32(other));
  });
}
inline Vf zero_below(Vf x, float limit, Vf v) {
  return each([&](int i) { return vbslq_f32(vcgeq_f32(x.v[i], vdupq_n_f32(limit)), v.v[i], vdupq_n_f32(0)); });
}
inline float hmax(Vf a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}

// Sum of the lanes in one fixed order, the same for every instruction set: halves, quarters, ...
inline float hsum(Vf a) {
  const float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}

inline Vi set1_i(int32_t x) {
  return each_i([=](int) { return vdupq_n_s32(x); });
}
inline Vf as_float(Vi a) {
  return each([&](int i) { return vreinterpretq_f32_s32(a.v[i]); });
}
inline Vi to_int(Vf a) {
  return each_i([&](int i) { return vcvtnq_s32_f32(a.v[i]); });
}
inline int32_t store_i8(int8_t* p, Vi a) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
  const int8x16_t bytes = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
  vst1q_s8(p, bytes);
  return vaddlvq_s8(bytes);
}
inline Vf power_of_two(Vf a) {
  return each(
      [&](int i) { return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), vdupq_n_u32(0x7f800000))); });
}
inline Vf exp2_int(Vi n) {
  return each([&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23)); });
}
inline Vf scale_exponent(Vf v, Vf shifted) {
  return each([&](int i) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(shifted.v[i]), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v.v[i]), n));
  });
}

inline Vb load_bytes(const uint8_t* p) {
  return each_b([=](int i) { return vld1q_u8(p + 16 * i); });
}
inline Vb low_nibbles(Vb a) {
  return each_b([&](int i) { return vandq_u8(a.v[i], vdupq_n_u8(15)); });
}
inline Vb high_nibbles(Vb a) {
  return each_b([&](int i) { return vshrq_n_u8(a.v[i], 4); });
}
// Bits SHIFT.. of every byte, under MASK.
template <int SHIFT, int MASK>
inline Vb field(Vb a) {
  return each_b([&](int i) {
    if constexpr (SHIFT == 0)
      return vandq_u8(a.v[i], vdupq_n_u8(MASK));
    else
      return vandq_u8(vshrq_n_u8(a.v[i], SHIFT), vdupq_n_u8(MASK));
  });
}
inline Vb either(Vb a, Vb b) {
  return each_b([&](int i) { return vorrq_u8(a.v[i], b.v[i]); });
}
// Sixteen nibbles, the low ones (SHIFT 0) or the high ones (4) of sixteen bytes.
template <int SHIFT>
inline Vf load_nibbles(const uint8_t* p) {
  const uint8x16_t bytes = vandq_u8(vshlq_u8(vld1q_u8(p), vdupq_n_s8(-SHIFT)), vdupq_n_u8(15));
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline Vb lookup(Vb index, const uint8_t* table) {
  const uint8x16_t t = vld1q_u8(table);
  return each_b([&](int i) { return vqtbl1q_u8(t, index.v[i]); });
}
template <int BITS>
inline Vb less_128(Vb a) {
  return each_b([&](int i) { return veorq_u8(a.v[i], vdupq_n_u8(128)); });
}
// The dot product is of signed bytes, which weights under 128 are too.
template <int BITS>
inline Vi dot4(Vi acc, Vb w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(four));
  return each_i([&](int i) { return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), v); });
}
inline Vf dot2_bf16(Vf acc, const uint8_t* w, const uint8_t* x) {
  uint32_t two;
  __builtin_memcpy(&two, x, 4);
  const float32x4_t first = vreinterpretq_f32_u32(vdupq_n_u32(two << 16));
  const float32x4_t second = vreinterpretq_f32_u32(vdupq_n_u32(two & 0xffff0000u));
  return each([&](int i) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(w + 16 * i));
    const float32x4_t sum = vfmaq_f32(acc.v[i], vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)), first);
    return vfmaq_f32(sum, vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u))), second);
  });
}
inline void prefetch(const void* p) {
  __builtin_prefetch(p);
}

}  // namespace
}  // namespace ds4::cpu

#include "cpu/simd_runs.h"
