// Products of f32 on the matrix units. On TF32 (mma.m16n8k8), which has ten mantissa bits, a value is the sum of two
// such parts, exact to 22 bits; products of two low parts are left out. On halves (mma.m16n8k16) likewise, where the
// other operand is a half itself.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace ds4::cuda {

__device__ __forceinline__ void multiply(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ float high_part(float v) {
  return __uint_as_float(__float_as_uint(v) & 0xFFFFE000u);
}

// Adds a block of 32 columns, sums with low parts apart: lane 4g + t has columns 8t .. 8t + 7 of rows g and g + 8 of W
// and of token g of x. Step s of the units' k = t is column 8t + 2s, their k = t + 4 the one behind it. kSplit: values
// of w may have more than ten mantissa bits.
template <bool kSplit>
__device__ __forceinline__ void add_columns(float (&acc)[4], const float (&w)[2][8], const float (&x)[8]) {
  float up_up[4] = {0, 0, 0, 0}, up_down[4] = {0, 0, 0, 0}, down_up[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const float a[4] = {w[0][2 * s], w[1][2 * s], w[0][2 * s + 1], w[1][2 * s + 1]};
    const float h0 = high_part(x[2 * s]), h1 = high_part(x[2 * s + 1]);
    float up[4], down[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) up[i] = kSplit ? high_part(a[i]) : a[i], down[i] = a[i] - up[i];
    multiply(up_down, up, x[2 * s] - h0, x[2 * s + 1] - h1);
    if constexpr (kSplit) multiply(down_up, down, h0, h1);
    multiply(up_up, up, h0, h1);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] = acc[i] + ((kSplit ? up_down[i] + down_up[i] : up_down[i]) + up_up[i]);
}

__device__ __forceinline__ void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight neighbouring columns of a row in each of four neighbouring lanes: 32 columns as sums of two halves, times a
// power of two that brings the largest of the 32 to 2^14 .. 2^15. Returns its inverse.
__device__ __forceinline__ float split_halves(const float (&x)[8], uint32_t (&high)[4], uint32_t (&low)[4]) {
  float largest = 0.0f;
#pragma unroll
  for (const float v : x) largest = fmaxf(largest, fabsf(v));
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
  const uint32_t exponent = max(__float_as_uint(largest) >> 23, 20u);
  const float up = __uint_as_float((268u - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = x[2 * i] * up, b = x[2 * i + 1] * up;
    const __half2 h = __floats2half2_rn(a, b);
    const float2 f = __half22float2(h);
    const __half2 l = __floats2half2_rn(a - f.x, b - f.y);
    high[i] = *reinterpret_cast<const uint32_t*>(&h);
    low[i] = *reinterpret_cast<const uint32_t*>(&l);
  }
  return __uint_as_float((exponent - 14u) << 23);
}

// A block of 32 columns, apart from everything before: lane 4g + t has columns 8t .. 8t + 7 of rows g and g + 8 of W
// and of token g of x. The units' k = 2t, 2t + 1, 2t + 8, 2t + 9 are columns 8t .. 8t + 3, then 8t + 4 .. 8t + 7.
__device__ __forceinline__ void multiply_block(float (&c)[4], const uint4& w0, const uint4& w8,
                                               const uint32_t (&high)[4], const uint32_t (&low)[4]) {
  const uint32_t first[4] = {w0.x, w8.x, w0.y, w8.y}, second[4] = {w0.z, w8.z, w0.w, w8.w};
#pragma unroll
  for (float& v : c) v = 0.0f;
  multiply_halves(c, first, low[0], low[1]);
  multiply_halves(c, second, low[2], low[3]);
  multiply_halves(c, first, high[0], high[1]);
  multiply_halves(c, second, high[2], high[3]);
}

}  // namespace ds4::cuda
