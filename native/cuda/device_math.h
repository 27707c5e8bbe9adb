// Reductions and small functions of the kernels; orders are fixed by the block's size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/activations.h"
#include "cuda/memory.h"
#include "types.h"

namespace ds4::cuda {

// Whether the kernels that run here were compiled for Hopper or later, which have clusters and overlapping launches.
bool hopper_kernels();

// Launches overlap: a kernel's blocks may start as soon as all of the one before have, and wait at their beginning.
// Every kernel launched so calls `begin_kernel` before it reads or writes anything but weights, on every path.
template <class... P, class... A>
void launch_kernel(cudaStream_t stream, dim3 grid, dim3 block, size_t shared, void (*kernel)(P...), A&&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = hopper_kernels() ? 1 : 0;
  DS4_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

__device__ __forceinline__ void begin_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, m);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, m));
  return v;
}

// Each lane gives half of its values to the lane across and adds what it gets to the other half.
template <int Half, int Mask, int N>
__device__ __forceinline__ void fold(float (&v)[N], int lane) {
  if constexpr (Half > 0) {
    const bool upper = lane & Mask;
#pragma unroll
    for (int i = 0; i < Half; ++i) {
      const float give = upper ? v[i] : v[i + Half], keep = upper ? v[i + Half] : v[i];
      v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, Mask);
    }
    fold<Half / 2, Mask / 2>(v, lane);
  }
}

// Lane i < N gets the warp's sum of v[i], added in the order of warp_sum. N: a power of two up to 32.
template <int N>
__device__ __forceinline__ float warp_sums(float (&v)[N]) {
  const int lane = threadIdx.x % 32;
  fold<N / 2, 16>(v, lane);
  float sum = v[0];
#pragma unroll
  for (int rest = 16 / N; rest > 0; rest /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, rest);
  return N == 32 ? sum : __shfl_sync(0xFFFFFFFFu, sum, lane * (32 / N) % 32);
}

// Sum over a block of whole warps, at most 32; every thread gets it. `shared` holds 32 floats.
__device__ __forceinline__ float block_sum(float v, float* shared) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0.0f;
  return warp_sum(v);
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ float swiglu(float g, float u) {
  return g * sigmoid(g) * u;
}
__device__ __forceinline__ float swiglu_clamped(float g, float u, float limit) {
  return swiglu(fminf(g, limit), fminf(fmaxf(u, -limit), limit));
}

// Rounds 128 values of row `row` to int8, tile `tile` of it (Activations, linear.h): four in each lane of a whole warp.
__device__ __forceinline__ void store_codes(const float (&v)[4], int64_t row, int64_t tile, const Activations& to) {
  const int lane = threadIdx.x % 32, block = lane / 8;
  const float largest = warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  int c[4], sum = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) sum += c[k] = __float2int_rn(v[k] * inverse);
  const int64_t in = row & 7, place = to.eights ? tile * to.eights + (row >> 3) : (row >> 3) * (to.blocks / 4) + tile;
  const int64_t at = to.eights ? block * 256 + lane % 2 * 128 + in * 16 + lane % 8 / 2 * 4
                               : block / 2 * 512 + in * 64 + lane % 8 / 2 * 16 + block % 2 * 8 + lane % 2 * 4;
  *reinterpret_cast<char4*>(to.q + place * 1024 + at) =
      make_char4(static_cast<signed char>(c[0]), static_cast<signed char>(c[1]), static_cast<signed char>(c[2]),
                 static_cast<signed char>(c[3]));
  // Four lanes hold a half of 16 columns.
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  const int high = (sum + 8) >> 4, low = sum - 16 * high;
  const uint32_t digits = (high & 255) | (low & 255) << 16, other = __shfl_xor_sync(0xFFFFFFFFu, digits, 4);
  if (lane % 8 == 0) to.sums[(place * 4 + block) * 8 + in] = digits | other << 8;
  if (lane == 0) to.d[place * 8 + in] = largest / 127.0f;
}

// Element i of an array of F32, F16 or BF16.
__device__ __forceinline__ float load_element(const void* p, int64_t i, int32_t type) {
  if (type == static_cast<int32_t>(DType::F32)) return static_cast<const float*>(p)[i];
  if (type == static_cast<int32_t>(DType::F16)) return __half2float(static_cast<const __half*>(p)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}
__device__ __forceinline__ void store_element(void* p, int64_t i, int32_t type, float v) {
  if (type == static_cast<int32_t>(DType::F32))
    static_cast<float*>(p)[i] = v;
  else if (type == static_cast<int32_t>(DType::F16))
    static_cast<__half*>(p)[i] = __float2half_rn(v);
  else
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
}

}  // namespace ds4::cuda
