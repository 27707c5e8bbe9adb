// Products of f32 on the matrix units. On TF32 (mma.m16n8k8), which has ten mantissa bits, a value is the sum of two
// such parts, exact to 22 bits; products of two low parts are left out. On halves (mma.m16n8k16) likewise.
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

}  // namespace ds4::cuda
