// Reductions and small functions of the kernels; orders are fixed by the block's size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/memory.h"
#include "types.h"

namespace ds4::cuda {

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
  config.numAttrs = 1;
  DS4_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

__device__ __forceinline__ void begin_kernel() {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
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

// Rounds a block of 32 values to int8, four in each of eight neighbouring lanes; `part` counts these. Writes codes,
// scale and the scaled sums of the halves at row `place` of Activations (linear.h).
__device__ __forceinline__ void store_codes(const float (&v)[4], int part, int64_t place, int8_t* q, float* d,
                                            float2* sums) {
  const unsigned group = 0xFFu << (threadIdx.x % 32 / 8 * 8);
  float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
  for (int m = 4; m > 0; m /= 2) largest = fmaxf(largest, __shfl_xor_sync(group, largest, m));
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
  int c[4], sum = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) sum += c[k] = __float2int_rn(v[k] * inverse);
  reinterpret_cast<char4*>(q + place * 32)[part] =
      make_char4(static_cast<signed char>(c[0]), static_cast<signed char>(c[1]), static_cast<signed char>(c[2]),
                 static_cast<signed char>(c[3]));
  // The first four lanes of a group hold columns 0..15, the others 16..31.
  sum += __shfl_xor_sync(group, sum, 1);
  sum += __shfl_xor_sync(group, sum, 2);
  const int other = __shfl_xor_sync(group, sum, 4);
  if (part == 0) {
    d[place] = scale;
    sums[place] = make_float2(scale * static_cast<float>(sum), scale * static_cast<float>(other));
  }
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
