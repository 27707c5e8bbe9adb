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

// Sinkhorn's algorithm on m [n][n] by one warp. For four streams a lane is an entry and sums are shuffles.
__device__ inline void sinkhorn(float* m, int n, int iterations, float eps) {
  const int lane = threadIdx.x % 32;
  if (n == 4) {
    float v = lane < 16 ? m[lane] : 0.0f;
    const auto over = [](float x, int a, int b) {
      x = x + __shfl_xor_sync(0xFFFFFFFFu, x, a);
      return x + __shfl_xor_sync(0xFFFFFFFFu, x, b);
    };
    float largest = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    v = expf(v - largest);
    v = __fdividef(v, over(v, 1, 2)) + eps;
    v = __fdividef(v, over(v, 4, 8) + eps);
    for (int i = 1; i < iterations; ++i) {
      v = __fdividef(v, over(v, 1, 2) + eps);
      v = __fdividef(v, over(v, 4, 8) + eps);
    }
    if (lane < 16) m[lane] = v;
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
