#include <algorithm>
#include <string>

#include "cuda/device_math.h"
#include "cuda/linear.h"
#include "quant/quant.h"

namespace ds4::cuda {
namespace {

constexpr int kNormThreads = 256;
constexpr int kWideThreads = 1024;

// Bytes: x once (twice from the cache with a norm), 1.4 per element out. One block of threads for each row with a
// norm, else for each 1024 columns.
__global__ void __launch_bounds__(kNormThreads)
    quantize_kernel(const float* x, int64_t stride, int64_t cols, const float* gain, float eps, Activations to) {
  begin_kernel();
  __shared__ float shared[32];
  const float* row = x + blockIdx.x * stride;
  float factor = 1.0f;
  if (gain) {
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < cols; i += kNormThreads) squares = fmaf(row[i], row[i], squares);
    factor = 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(cols) + eps);
  }
  const int64_t quads = to.blocks * 8;  // whole warps
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * kNormThreads + threadIdx.x; i < quads;
       i += static_cast<int64_t>(gridDim.y) * kNormThreads) {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = 4 * i < cols ? row[4 * i + k] : 0.0f;
      if (gain && 4 * i < cols) v[k] = v[k] * factor * gain[4 * i + k];
    }
    store_codes(v, blockIdx.x, i / 32, to);
  }
}

__global__ void __launch_bounds__(kWideThreads)
    rms_norm_kernel(const float* x, int64_t stride, int64_t cols, const float* gain, float eps, float* y,
                    int64_t y_stride) {
  begin_kernel();
  __shared__ float shared[32];
  const float* row = x + blockIdx.x * stride;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < cols; i += kWideThreads) squares = fmaf(row[i], row[i], squares);
  const float factor = 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(cols) + eps);
  for (int64_t i = threadIdx.x; i < cols; i += kWideThreads) y[blockIdx.x * y_stride + i] = row[i] * factor * gain[i];
}

// Rows of up to 4 * kWideThreads columns have one load, then one barrier between it and what is stored.
__global__ void __launch_bounds__(kWideThreads)
    norm_codes_kernel(const float* x, int64_t stride, int64_t cols, const float* gain, float eps, float* y,
                      int64_t y_stride, Activations codes) {
  __shared__ float shared[32];
  const int64_t first = threadIdx.x, quads = cols / 4;
  float4 g = first < quads ? __ldg(reinterpret_cast<const float4*>(gain) + first) : make_float4(0, 0, 0, 0);
  begin_kernel();
  const float4* row = reinterpret_cast<const float4*>(x + blockIdx.x * stride);
  float4 v = first < quads ? row[first] : make_float4(0, 0, 0, 0);
  const float4 own = v;
  float squares = 0.0f;
  for (int64_t i = first; i < quads; i += blockDim.x) {
    if (i != first) v = row[i];
    squares = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, squares))));
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0.0f);
  const float factor = 1.0f / sqrtf(squares / static_cast<float>(cols) + eps);
  v = own;
  for (int64_t i = first; i < quads; i += blockDim.x) {
    if (i != first) v = row[i], g = reinterpret_cast<const float4*>(gain)[i];
    const float four[4] = {v.x * factor * g.x, v.y * factor * g.y, v.z * factor * g.z, v.w * factor * g.w};
    reinterpret_cast<float4*>(y + blockIdx.x * y_stride)[i] = make_float4(four[0], four[1], four[2], four[3]);
    store_codes(four, blockIdx.x, i / 32, codes);
  }
}

}  // namespace

void quantize(const Device& device, Tensor x, const float* gain, float eps, const Activations& to) {
  if (x.n == 0) return;
  const auto pieces = gain ? 1u : static_cast<unsigned>((to.blocks * 32 + 4 * kNormThreads - 1) / (4 * kNormThreads));
  launch_kernel(device.stream(), dim3(static_cast<unsigned>(x.n), pieces), kNormThreads, 0, quantize_kernel, x.data,
                x.stride, x.dim, gain, eps, to);
  DS4_CUDA(cudaGetLastError());
}

void rms_norm(const Device& device, Tensor x, const float* gain, float eps, Tensor y, const Activations* codes) {
  if (x.n == 0) return;
  if (codes) {
    const auto threads = static_cast<unsigned>(std::min<int64_t>(kWideThreads, x.dim / 4));
    launch_kernel(device.stream(), static_cast<unsigned>(x.n), threads, 0, norm_codes_kernel, x.data, x.stride, x.dim,
                  gain, eps, y.data, y.stride, *codes);
  } else {
    launch_kernel(device.stream(), static_cast<unsigned>(x.n), kWideThreads, 0, rms_norm_kernel, x.data, x.stride,
                  x.dim, gain, eps, y.data, y.stride);
  }
  DS4_CUDA(cudaGetLastError());
}

void linear_blocks(const Device& device, const Segment& w, const Activations& x, LinearArgs args) {
  if (args.T == 0) return;
  args.rows = w.slab_rows;
  args.paired = w.paired;
  args.slabs = static_cast<int32_t>(w.slabs);
  args.tiles_m = static_cast<int32_t>(w.tiles_m);
  args.tiles_k = static_cast<int32_t>(w.tiles_k);
  if (!linear_blocks_1(device, w.type, w.planes, x, args) && !linear_blocks_2(device, w.type, w.planes, x, args) &&
      !linear_blocks_3(device, w.type, w.planes, x, args) && !linear_blocks_4(device, w.type, w.planes, x, args))
    throw Unsupported(std::string("no matrix kernel for type ") + dtype_name(w.type));
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
