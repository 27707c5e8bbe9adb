// What the kernels of hyper-connections share.
#pragma once

#include "cuda/device_math.h"

namespace ds4::cuda {

constexpr int kMostStreams = 16;

struct HyperArgs {
  const float *base, *scale;
  int streams, iterations;
  float norm_eps, eps;
  int64_t width;
};

// Four neighbouring elements of a type, as they are stored, as floats.
__device__ __forceinline__ float4 four_of(const float*, float4 v) {
  return v;
}
__device__ __forceinline__ float4 four_of(const __half*, uint2 v) {
  return {half_bits(v.x & 0xFFFFu), half_bits(v.x >> 16), half_bits(v.y & 0xFFFFu), half_bits(v.y >> 16)};
}
__device__ __forceinline__ float4 four_of(const __nv_bfloat16*, uint2 v) {
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
          __uint_as_float(v.y & 0xFFFF0000u)};
}

// Sinkhorn's algorithm on m [n][n] by one warp. It is one chain of sums and divisions, so for four streams every lane
// has the whole matrix: nothing is waited for but them.
__device__ inline void sinkhorn(float* m, int n, int iterations, float eps) {
  const int lane = threadIdx.x % 32;
  if (n == 4) {
    const float* row = m + lane % 16 / 4 * 4;
    const float power = expf(m[lane % 16] - fmaxf(fmaxf(row[0], row[1]), fmaxf(row[2], row[3])));
    __syncwarp();
    if (lane < 16) m[lane] = power;
    __syncwarp();
    float v[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(m)[i];
      v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
    }
    const auto inverse = [](float x) {
      float r;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
      return r;
    };
    const auto rows = [&](float more) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float r = inverse(((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) + more);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = v[i][j] * r;
      }
    };
    const auto columns = [&] {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float r = inverse(((v[0][j] + v[1][j]) + (v[2][j] + v[3][j])) + eps);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i][j] = v[i][j] * r;
      }
    };
    rows(0.0f);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i / 4][i % 4] = v[i / 4][i % 4] + eps;
    columns();
#pragma unroll 1
    for (int i = 1; i < iterations; ++i) {
      rows(eps);
      columns();
    }
    __syncwarp();  // every lane has read m
    if (lane == 0)
#pragma unroll
      for (int i = 0; i < 4; ++i) reinterpret_cast<float4*>(m)[i] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
    __syncwarp();
    return;
  }
  const auto scale_lines = [&](int line, int step) {
    if (lane < n) {
      float sum = eps;
      for (int b = 0; b < n; ++b) sum += m[lane * line + b * step];
      for (int b = 0; b < n; ++b) m[lane * line + b * step] /= sum;
    }
    __syncwarp();
  };
  if (lane < n) {
    float* row = m + lane * n;
    float largest = row[0], sum = 0.0f;
    for (int b = 1; b < n; ++b) largest = fmaxf(largest, row[b]);
    for (int b = 0; b < n; ++b) sum += row[b] = expf(row[b] - largest);
    for (int b = 0; b < n; ++b) row[b] = row[b] / sum + eps;
  }
  __syncwarp();
  scale_lines(1, n);
  for (int i = 1; i < iterations; ++i) {
    scale_lines(n, 1);
    scale_lines(1, n);
  }
}

}  // namespace ds4::cuda
