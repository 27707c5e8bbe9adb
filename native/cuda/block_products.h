// What the kernels for block formats share: the products of a tile, their order of addition, and what follows them.
//
// Order of additions, the same in every kernel and for every T, so that a row's result depends on nothing else. Of a
// tile (128 columns), with the activations' scale x of the tile:
//   formats with superblocks   acc = fma(S, D x, acc), then acc = fma(-M, m x, acc), S and M the exact integer sums of
//                              scales times block sums and of minimums times sums of codes
//   others                     f = d_0 s_0, f = fma(s_b, d_b, f) for the blocks in order (after each, where there are
//                              minimums, f = fma(sum of codes, m_b, f)), acc = fma(f, x, acc)
// Tiles are added in order within a chain of four (512 columns), and the chains' sums in order.
#pragma once

#include "cuda/device_math.h"
#include "cuda/linear.h"

namespace ds4::cuda {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kChainTiles = 4;

// c = a b + start, sums of 32 products.
__device__ __forceinline__ void multiply(int (&c)[4], const int (&a)[4], uint32_t b0, uint32_t b1,
                                         const int (&start)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), "r"(start[2]),
        "r"(start[3]));
}
// c = a b + start of digits of sums (activations.h): `a0` and `a1` multiply the four digits of block t of rows g, g
// + 8.
__device__ __forceinline__ void multiply_sums(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b,
                                              const int (&start)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(start[0]), "r"(start[1]), "r"(start[2]), "r"(start[3]));
}
// The operand with the columns of the other half of the block taken out.
__device__ __forceinline__ void half_of(const int (&a)[4], bool keep, int (&to)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = keep ? a[i] : 0;
}
__device__ __forceinline__ float from_lane(float v, int lane) {
  return __shfl_sync(0xFFFFFFFFu, v, lane);
}

// A lane's codes of a tile: the operands of its four blocks.
struct TileCodes {
  int a[kTileBlocks][4];
};
template <DType type, int kCopies>
__device__ __forceinline__ void decode_tile(const RawTile<type>& raw, uint32_t grid, int lane, TileCodes& codes) {
#pragma unroll
  for (int b = 0; b < kTileBlocks; ++b) decode_codes<type, kCopies>(raw, b, grid, lane, codes.a[b]);
}

// The scales of a tile's rows g and g + 8.
template <DType type>
struct TileScales {
  using L = Layout<type>;
  static constexpr int kEach = L::kInteger && type != DType::Q2_K ? kTileBlocks : 1, kHalves = L::kHalves ? 2 : 1;
  int s[kEach][kHalves][2];                               // kInteger
  float d[L::kInteger ? 1 : kTileBlocks][2];              // of superblocks, of blocks
  float m[L::kMin && !L::kInteger ? kTileBlocks : 1][2];  // likewise
  uint32_t minimums[2];                                   // kInteger: of block t

  __device__ __forceinline__ TileScales(const RawTile<type>& raw, int lane) {
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      if constexpr (L::kInteger) {
        d[0][hi] = super_scale<type>(raw, hi);
        if constexpr (type != DType::Q2_K)
#pragma unroll
          for (int b = 0; b < kTileBlocks * kHalves; ++b)
            s[b / kHalves][b % kHalves][hi] = integer_scale<type>(raw, hi, b / kHalves, b % kHalves);
        if constexpr (L::kMin) {
          m[0][hi] = super_minimum<type>(raw, hi);
          minimums[hi] = integer_minimums<type>(raw, hi, lane % 4);
        }
      } else {
#pragma unroll
        for (int b = 0; b < kTileBlocks; ++b) {
          d[b][hi] = float_scale<type>(raw, hi, b);
          if constexpr (L::kMin) m[b][hi] = float_minimum<type>(raw, hi, b);
        }
      }
    }
  }
};

// What a lane has of a tile of eight tokens: operands of two blocks each, and the digits of the sums of token g, block
// t (read only where a format has minimums).
struct TileTokens {
  uint4 q[kTileBlocks / 2];
  uint32_t sums;
};

// Adds a tile for rows g and g + 8 and tokens 2t and 2t + 1, whose scales are `x`: acc[2r + i] of row g + 8r. kSingle:
// there is one token only, in column 0 of lanes with t = 0.
template <DType type, bool kSingle = false>
__device__ __forceinline__ void add_tile(float (&acc)[4], const TileCodes& codes, const TileScales<type>& s,
                                         const TileTokens& tokens, float2 x, int lane) {
  using L = Layout<type>;
  constexpr int kStep = kSingle ? 2 : 1;
  constexpr int zero[4] = {0, 0, 0, 0};
  const uint32_t b0[4] = {tokens.q[0].x, tokens.q[0].z, tokens.q[1].x, tokens.q[1].z},
                 b1[4] = {tokens.q[0].y, tokens.q[0].w, tokens.q[1].y, tokens.q[1].w};
  if constexpr (L::kInteger) {
    int sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      if constexpr (type == DType::Q2_K) {
        multiply(sum, codes.a[b], b0[b], b1[b], sum);
      } else {
#pragma unroll
        for (int half = 0; half < s.kHalves; ++half) {
          int c[4];
          if constexpr (L::kHalves) {
            int part[4];
            half_of(codes.a[b], (lane & 2) == 2 * half, part);
            multiply(c, part, b0[b], b1[b], zero);
          } else {
            multiply(c, codes.a[b], b0[b], b1[b], zero);
          }
#pragma unroll
          for (int i = 0; i < 4; i += kStep) sum[i] = sum[i] + c[i] * s.s[b][half][i / 2];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i += kStep)
      acc[i] = fmaf(static_cast<float>(sum[i]), s.d[0][i / 2] * (i % 2 ? x.y : x.x), acc[i]);
    if constexpr (L::kMin) {
      int minimum[4];
      if constexpr (type == DType::Q2_K) {  // below 16
        multiply_sums(minimum, s.minimums[0] << 4 | s.minimums[0] << 16, s.minimums[1] << 4 | s.minimums[1] << 16,
                      tokens.sums, zero);
      } else {
        multiply_sums(minimum, s.minimums[0], s.minimums[1], tokens.sums, zero);
#pragma unroll
        for (int& v : minimum) v *= 16;
        multiply_sums(minimum, s.minimums[0] << 16, s.minimums[1] << 16, tokens.sums, minimum);
      }
#pragma unroll
      for (int i = 0; i < 4; i += kStep)
        acc[i] = fmaf(-static_cast<float>(minimum[i]), s.m[0][i / 2] * (i % 2 ? x.y : x.x), acc[i]);
    }
  } else {
    float f[4];
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      int c[4];
      multiply(c, codes.a[b], b0[b], b1[b], zero);
#pragma unroll
      for (int i = 0; i < 4; i += kStep)
        f[i] = b == 0 ? static_cast<float>(c[i]) * s.d[b][i / 2] : fmaf(static_cast<float>(c[i]), s.d[b][i / 2], f[i]);
      if constexpr (L::kMin) {
        const uint32_t all = lane % 4 == b ? 0x01011010u : 0u;  // the sum of the block's codes
        multiply_sums(c, all, all, tokens.sums, zero);
#pragma unroll
        for (int i = 0; i < 4; i += kStep) f[i] = fmaf(static_cast<float>(c[i]), s.m[b][i / 2], f[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i += kStep) acc[i] = fmaf(f[i], i % 2 ? x.y : x.x, acc[i]);
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
