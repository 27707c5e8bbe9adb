// What the kernels for block formats share: the products of a block, their order of addition, and what follows them.
//
// Order of additions, the same in every kernel and for every T, so that a row's result depends on nothing else: the 32
// products of a block are summed exactly by the matrix units, blocks are added in order within a chain of 16 (512
// columns), and the chains' sums in order.
#pragma once

#include "cuda/device_math.h"
#include "cuda/linear.h"

namespace ds4::cuda {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kChainTiles = 4;

// c = a b as sums of 32 products, on top of a bias that makes them the bits of a float: 1.5 * 2^23 plus the sum. The
// four registers of the bias are opaque to the compiler, which would else write them anew for every product.
struct Bias {
  int v[4];
  __device__ __forceinline__ Bias() {
#pragma unroll
    for (int& x : v) asm volatile("mov.b32 %0, 0x4B400000;" : "=r"(x));
  }
};
__device__ __forceinline__ void multiply(int (&c)[4], const int (&a)[4], uint2 b, const Bias& bias) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(bias.v[0]), "r"(bias.v[1]), "r"(bias.v[2]),
        "r"(bias.v[3]));
}
__device__ __forceinline__ float sum_of(int c) {
  return __int_as_float(c) - 12582912.0f;  // exact: sums are below 2^22
}
// The operand with the columns of the other half of the block taken out.
__device__ __forceinline__ void half_of(const int (&a)[4], bool keep, int (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = keep ? a[i] : 0;
}
__device__ __forceinline__ float from_lane(float v, int lane) {
  return __shfl_sync(0xFFFFFFFFu, v, lane);
}

// The scales of a tile, lane 4g + t holding those of block t of rows g and g + 8.
template <DType type>
struct OwnScales {
  Scales row[2];
  __device__ __forceinline__ OwnScales(const RawTile<type>& raw, int lane) {
    row[0] = decode_scales<type>(raw, 0, lane % 4);
    row[1] = decode_scales<type>(raw, 1, lane % 4);
  }
};

// Adds one block for rows g and g + 8 and two tokens: acc[2r + i] += d_r x_i sum (and the second half's likewise), then
// the minimums' share. The order of these is part of a result's bits; `add_single` follows it.
template <DType type>
__device__ __forceinline__ void add_block(float (&acc)[4], const int (&a)[4], const Scales& s0, const Scales& s1,
                                          int lane, uint2 b, float2 dx, float4 sums, const Bias& bias) {
  using L = Layout<type>;
  int c[4] = {};
  const auto add = [&](float d0, float d1) {
    acc[0] = fmaf(sum_of(c[0]), d0 * dx.x, acc[0]);
    acc[1] = fmaf(sum_of(c[1]), d0 * dx.y, acc[1]);
    acc[2] = fmaf(sum_of(c[2]), d1 * dx.x, acc[2]);
    acc[3] = fmaf(sum_of(c[3]), d1 * dx.y, acc[3]);
  };
  if constexpr (L::kHalves) {
    int half[4];
    half_of(a, !(lane & 2), half);
    multiply(c, half, b, bias);
    add(s0.d, s1.d);
    half_of(a, lane & 2, half);
    multiply(c, half, b, bias);
    add(s0.e, s1.e);
  } else {
    multiply(c, a, b, bias);
    add(s0.d, s1.d);
  }
  if constexpr (L::kMin) {
    acc[0] = acc[0] + fmaf(s0.m1, sums.y, s0.m0 * sums.x);
    acc[1] = acc[1] + fmaf(s0.m1, sums.w, s0.m0 * sums.z);
    acc[2] = acc[2] + fmaf(s1.m1, sums.y, s1.m0 * sums.x);
    acc[3] = acc[3] + fmaf(s1.m1, sums.w, s1.m0 * sums.z);
  }
}

// One token: what add_block multiplies for a block is multiplied by the lane that owns it.
struct Products {
  float d, e, m;
};
template <DType type>
__device__ __forceinline__ Products products_of(const Scales& s, float dx, float2 sums) {
  using L = Layout<type>;
  Products p{s.d * dx, 0.0f, 0.0f};
  if (L::kHalves) p.e = s.e * dx;
  if (L::kMin) p.m = fmaf(s.m1, sums.y, s.m0 * sums.x);
  return p;
}
template <DType type>
__device__ __forceinline__ void add_single(float (&acc)[4], const int (&a)[4], const Products& p0, const Products& p1,
                                           int lane, int from, uint2 b, const Bias& bias) {
  using L = Layout<type>;
  int c[4] = {};
  const auto add = [&](float d0, float d1) {
    acc[0] = fmaf(sum_of(c[0]), from_lane(d0, from), acc[0]);
    acc[2] = fmaf(sum_of(c[2]), from_lane(d1, from), acc[2]);
  };
  if constexpr (L::kHalves) {
    int half[4];
    half_of(a, !(lane & 2), half);
    multiply(c, half, b, bias);
    add(p0.d, p1.d);
    half_of(a, lane & 2, half);
    multiply(c, half, b, bias);
    add(p0.e, p1.e);
  } else {
    multiply(c, a, b, bias);
    add(p0.d, p1.d);
  }
  if constexpr (L::kMin) {
    acc[0] = acc[0] + from_lane(p0.m, from);
    acc[2] = acc[2] + from_lane(p1.m, from);
  }
}

// What follows the product: `v0` and `v1` are rows g and g + 8 of tile row `tile_row` of the slab.
__device__ __forceinline__ void finish_pair(const LinearArgs& p, int slab, int tile_row, int g, int64_t out_row,
                                            float v0, float v1) {
  float* y = p.y + out_row * p.y_stride;
  if (p.paired) {
    const int64_t row = tile_row * 8 + g;
    if (row < p.rows / 2) y[row] = p.epilogue == Epilogue::SwiGLU ? swiglu(v0, v1) : swiglu_clamped(v0, v1, p.limit);
    return;
  }
  const int64_t before = p.experts || p.items ? 0 : slab * p.rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = tile_row * kTileRows + g + 8 * r, at = before + row;
    if (row >= p.rows) return;
    const float v = r ? v1 : v0;
    if (p.epilogue == Epilogue::Add)
      y[at] = y[at] + v;
    else
      y[at] = p.bias ? v + p.bias[at] : v;
  }
}

}  // namespace ds4::cuda
