// The kernel of linear.h for block formats, included by the files that instantiate it.
#pragma once

#include <algorithm>

#include "cuda/device_math.h"
#include "cuda/linear.h"

namespace ds4::cuda {

constexpr int kRowsPerWarp = 4;
constexpr int kWarps = 4;

// Warps that share a group of four output rows. Few rows: more warps each, as long as every lane has a block.
inline int split_of(int64_t rows, int64_t units, bool experts) {
  const int64_t enough = experts ? 4096 : 16384;  // several experts run side by side
  int split = 1;
  while (split < kWarps && rows * split < enough && units >= 64 * split) split *= 2;
  return split;
}

// What the lanes hold after the reduction: lane r * NT + t has output row `row0 + r` of activation row t.
template <int NT>
__device__ __forceinline__ void finish(const LinearArgs& p, float v, int split, int64_t row0, int n,
                                       const int (&out_row)[NT]) {
  constexpr int R = kRowsPerWarp;
  __shared__ float part[kWarps][R * NT];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (split > 1) {
    if (lane < R * NT) part[warp][lane] = v;
    __syncthreads();
    if (warp % split != 0) return;
    if (lane < R * NT)
      for (int i = 1; i < split; ++i) v = v + part[warp + i][lane];
  }
  const int r = lane / NT, t = lane % NT;
  const int64_t row = row0 + r;
  // Row r + 1 of the same activation row; used by gates, whose r is even.
  const float next = __shfl_down_sync(0xFFFFFFFFu, v, NT);
  if (lane >= R * NT || t >= n || row >= p.rows) return;
  int target = 0;
#pragma unroll
  for (int i = 0; i < NT; ++i)
    if (i == t) target = out_row[i];
  float* y = p.y + static_cast<int64_t>(target) * p.y_stride;
  switch (p.epilogue) {
    case Epilogue::Store:
      y[row] = p.bias ? v + p.bias[row] : v;
      break;
    case Epilogue::Add:
      y[row] = y[row] + v;
      break;
    case Epilogue::SwiGLU:
      if (r % 2 == 0) y[row / 2] = swiglu(v, next);
      break;
    case Epilogue::Clamped:
      if (r % 2 == 0) y[row / 2] = swiglu_clamped(v, next, p.limit);
      break;
  }
}

// The activation rows of this block: `in` and `out` row numbers, clamped to the last one where there are fewer than NT.
template <int NT>
__device__ __forceinline__ int rows_of_block(const LinearArgs& p, int64_t& expert, int (&in)[NT], int (&out)[NT]) {
  int n;
  if (NT == 1 && p.experts) {
    expert = p.experts[blockIdx.x];
    n = 1;
    in[0] = static_cast<int>(blockIdx.x) / p.per_row;
    out[0] = static_cast<int>(blockIdx.x);
  } else if (p.items) {
    const ExpertItem item = p.items[blockIdx.x];
    expert = item.expert;
    n = item.count;
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const int pair = n > 0 ? p.order[item.first + min(i, n - 1)] : 0;
      in[i] = pair / p.per_row;
      out[i] = pair;
    }
  } else {
    expert = 0;
    const int first = static_cast<int>(blockIdx.x) * NT;
    n = min(NT, static_cast<int>(p.T) - first);
#pragma unroll
    for (int i = 0; i < NT; ++i) in[i] = out[i] = first + min(i, n - 1);
  }
  return n;
}

template <DType type, int NT>
__global__ void __launch_bounds__(32 * kWarps) linear_blocks_kernel(Planes w, Activations x, LinearArgs p, int split) {
  using L = Layout<type>;
  constexpr int R = kRowsPerWarp;
  __shared__ uint2 grid[type == DType::IQ2_XXS ? 256 : 1];
  int64_t expert;
  int in[NT], out[NT];
  if (p.n_items) begin_kernel();  // whose experts to read is the result of the kernel before
  const int n = rows_of_block<NT>(p, expert, in, out);
  if (n == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row0 = (static_cast<int64_t>(blockIdx.y) * (kWarps / split) + warp / split) * R;
  const int64_t blocks = p.cols / 32;
  int64_t base[R];
#pragma unroll
  for (int r = 0; r < R; ++r) base[r] = (expert * p.rows + min(row0 + r, p.rows - 1)) * blocks;
  const int64_t column = min(row0, p.rows - 1) / p.rank * blocks;

  float sum[R][NT];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int t = 0; t < NT; ++t) sum[r][t] = 0.0f;

  // With few activation rows there are registers to load the next blocks while these are computed.
  constexpr bool kAhead = NT <= 2;
  const int64_t step = 32 * split;
  int64_t b = (warp % split) * 32 + lane;
  RawBlock<type> raw[R];
  if (kAhead && b < blocks)
#pragma unroll
    for (int r = 0; r < R; ++r) raw[r] = load_block<type>(w, base[r] + b);
  if constexpr (type == DType::IQ2_XXS) {
    for (int i = threadIdx.x; i < 256; i += 32 * kWarps) grid[i] = __ldg(w.grid + i);
    __syncthreads();
  }
  if (!p.n_items) begin_kernel();
  for (; b < blocks; b += step) {
    Block block[R];
    if constexpr (kAhead) {
      RawBlock<type> next[R];
      const int64_t ahead = b + step < blocks ? b + step : b;
#pragma unroll
      for (int r = 0; r < R; ++r) next[r] = load_block<type>(w, base[r] + ahead);
#pragma unroll
      for (int r = 0; r < R; ++r) block[r] = decode_block<type>(raw[r], b, grid);
#pragma unroll
      for (int r = 0; r < R; ++r) raw[r] = next[r];
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) raw[r] = load_block<type>(w, base[r] + b);
#pragma unroll
      for (int r = 0; r < R; ++r) block[r] = decode_block<type>(raw[r], b, grid);
    }
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const int64_t at = in[t] * x.blocks + column + b;
      const int4 a0 = __ldg(reinterpret_cast<const int4*>(x.q) + 2 * at),
                 a1 = __ldg(reinterpret_cast<const int4*>(x.q) + 2 * at + 1);
      const uint2 packed = __ldg(reinterpret_cast<const uint2*>(x.scale) + at);
      const float d = __uint_as_float(packed.x);
      const int s0 = static_cast<int16_t>(packed.y & 0xFFFFu), s1 = static_cast<int16_t>(packed.y >> 16);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const Block& k = block[r];
        const int i0 = __dp4a(k.q[3], a0.w, __dp4a(k.q[2], a0.z, __dp4a(k.q[1], a0.y, __dp4a(k.q[0], a0.x, 0))));
        const int i1 = __dp4a(k.q[7], a1.w, __dp4a(k.q[6], a1.z, __dp4a(k.q[5], a1.y, __dp4a(k.q[4], a1.x, 0))));
        float v;
        if constexpr (L::kHalves) {
          v = fmaf(k.d1, static_cast<float>(i1 - L::kZero * s1), k.d0 * static_cast<float>(i0 - L::kZero * s0));
          if constexpr (L::kMin) v = fmaf(k.m1, static_cast<float>(s1), fmaf(k.m0, static_cast<float>(s0), v));
        } else {
          v = k.d0 * static_cast<float>(i0 + i1 - L::kZero * (s0 + s1));
          if constexpr (L::kMin) v = fmaf(k.m0, static_cast<float>(s0 + s1), v);
        }
        sum[r][t] = fmaf(d, v, sum[r][t]);
      }
    }
  }

  float sums[R * NT];
#pragma unroll
  for (int i = 0; i < R * NT; ++i) sums[i] = sum[i / NT][i % NT];
  finish<NT>(p, warp_sums(sums), split, row0, n, out);
}

// Rows at once for T rows of activations.
inline int width_of(int64_t T) {
  return T <= 1 ? 1 : T <= 2 ? 2 : T <= 4 ? 4 : 8;
}

inline dim3 grid_of(const LinearArgs& p, int split, int width) {
  const int64_t per_block = kWarps / split * kRowsPerWarp;
  const int64_t columns = p.n_items ? p.n_items : (p.T + width - 1) / width;
  return {static_cast<unsigned>(columns), static_cast<unsigned>((p.rows + per_block - 1) / per_block), 1};
}

template <DType type>
void launch_blocks(cudaStream_t stream, const Planes& w, const Activations& x, const LinearArgs& p) {
  const int split = split_of(p.rows, p.cols / 32, p.n_items > 0), width = p.n_items ? p.width : width_of(p.T);
  const dim3 grid = grid_of(p, split, width);
  switch (width) {
    case 1:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_blocks_kernel<type, 1>, w, x, p, split);
      break;
    case 2:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_blocks_kernel<type, 2>, w, x, p, split);
      break;
    case 4:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_blocks_kernel<type, 4>, w, x, p, split);
      break;
    default:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_blocks_kernel<type, 8>, w, x, p, split);
  }
}

}  // namespace ds4::cuda
