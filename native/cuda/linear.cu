#include <string>

#include "cuda/linear_blocks.h"
#include "quant/quant.h"

namespace ds4::cuda {
namespace {

constexpr int kNormThreads = 256;
constexpr int kWideThreads = 1024;

// Bytes: x once (twice from the cache with a norm), 1.25 per element out. One block of threads for each row with a
// norm, else for each 1024 columns.
__global__ void __launch_bounds__(kNormThreads)
    quantize_kernel(const float* x, int64_t stride, int64_t cols, const float* gain, float eps, int8_t* q,
                    ActScale* scale) {
  begin_kernel();
  __shared__ float shared[32];
  const float* row = x + blockIdx.x * stride;
  float factor = 1.0f;
  if (gain) {
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < cols; i += kNormThreads) squares = fmaf(row[i], row[i], squares);
    factor = 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(cols) + eps);
  }
  // Eight lanes share a block of 32. Whole groups of eight leave the loop together.
  const int64_t quads = cols / 4;
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * kNormThreads + threadIdx.x; i < quads;
       i += static_cast<int64_t>(gridDim.y) * kNormThreads) {
    const unsigned group = 0xFFu << (threadIdx.x % 32 / 8 * 8);
    float v[4];
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = row[4 * i + k];
      if (gain) v[k] = v[k] * factor * gain[4 * i + k];
      largest = fmaxf(largest, fabsf(v[k]));
    }
#pragma unroll
    for (int m = 4; m > 0; m /= 2) largest = fmaxf(largest, __shfl_xor_sync(group, largest, m));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int sum = 0;
    char4 code;
    const int c0 = __float2int_rn(v[0] * inverse), c1 = __float2int_rn(v[1] * inverse),
              c2 = __float2int_rn(v[2] * inverse), c3 = __float2int_rn(v[3] * inverse);
    code.x = static_cast<signed char>(c0), code.y = static_cast<signed char>(c1);
    code.z = static_cast<signed char>(c2), code.w = static_cast<signed char>(c3);
    sum = c0 + c1 + c2 + c3;
    reinterpret_cast<char4*>(q + blockIdx.x * cols)[i] = code;
    // The first four lanes of a group hold columns 0..15, the others 16..31.
    sum += __shfl_xor_sync(group, sum, 1);
    sum += __shfl_xor_sync(group, sum, 2);
    const int other = __shfl_xor_sync(group, sum, 4);
    if (threadIdx.x % 8 == 0)
      scale[blockIdx.x * (cols / 32) + i / 8] = {largest / 127.0f, static_cast<int16_t>(sum),
                                                 static_cast<int16_t>(other)};
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

// Eight weights as floats.
template <class T>
struct Eight;
template <>
struct Eight<float> {
  float4 a, b;
  __device__ __forceinline__ void load(const float* p) {
    a = __ldg(reinterpret_cast<const float4*>(p));
    b = __ldg(reinterpret_cast<const float4*>(p) + 1);
  }
  __device__ __forceinline__ void decode(float (&v)[8]) const {
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
};
template <>
struct Eight<__half> {
  uint4 a;
  __device__ __forceinline__ void load(const __half* p) { a = __ldg(reinterpret_cast<const uint4*>(p)); }
  __device__ __forceinline__ void decode(float (&v)[8]) const {
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = half_bits(w[i] & 0xFFFFu), v[2 * i + 1] = half_bits(w[i] >> 16);
  }
};
template <>
struct Eight<__nv_bfloat16> {
  uint4 a;
  __device__ __forceinline__ void load(const __nv_bfloat16* p) { a = __ldg(reinterpret_cast<const uint4*>(p)); }
  __device__ __forceinline__ void decode(float (&v)[8]) const {
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[2 * i] = __uint_as_float(w[i] << 16), v[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
  }
};

template <class T, int NT>
__global__ void __launch_bounds__(32 * kWarps)
    linear_floats_kernel(const T* w, int64_t w_stride, const float* x, int64_t x_stride, LinearArgs p, int split) {
  constexpr int R = kRowsPerWarp;
  int64_t expert;
  int in[NT], out[NT];
  begin_kernel();
  const int n = rows_of_block<NT>(p, expert, in, out);
  if (n == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row0 = (static_cast<int64_t>(blockIdx.y) * (kWarps / split) + warp / split) * R;
  const T* base[R];
#pragma unroll
  for (int r = 0; r < R; ++r) base[r] = w + (expert * p.rows + min(row0 + r, p.rows - 1)) * w_stride;
  const int64_t column = min(row0, p.rows - 1) / p.rank * p.cols;
  float sum[R][NT];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int t = 0; t < NT; ++t) sum[r][t] = 0.0f;
  const int64_t units = (p.cols + 7) / 8;
  for (int64_t u = (warp % split) * 32 + lane; u < units; u += 32 * split) {
    Eight<T> raw[R];
#pragma unroll
    for (int r = 0; r < R; ++r) raw[r].load(base[r] + 8 * u);
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const float4* a = reinterpret_cast<const float4*>(x + in[t] * x_stride + column + 8 * u);
      const float4 lo = __ldg(a), hi = __ldg(a + 1);
      const float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float k[8];
        raw[r].decode(k);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[r][t] = fmaf(k[i], v[i], sum[r][t]);
      }
    }
  }
  float sums[R * NT];
#pragma unroll
  for (int i = 0; i < R * NT; ++i) sums[i] = sum[i / NT][i % NT];
  finish<NT>(p, warp_sums(sums), split, row0, n, out);
}

template <class T>
void launch_floats(cudaStream_t stream, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& p) {
  const int split = split_of(p.rows, (p.cols + 7) / 8, p.n_items > 0), width = p.n_items ? p.width : width_of(p.T);
  const dim3 grid = grid_of(p, split, width);
  const T* data = w.memory.as<T>();
  switch (width) {
    case 1:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 1>, data, w.stride, x, x_stride, p, split);
      break;
    case 2:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 2>, data, w.stride, x, x_stride, p, split);
      break;
    case 4:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 4>, data, w.stride, x, x_stride, p, split);
      break;
    default:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 8>, data, w.stride, x, x_stride, p, split);
  }
}

}  // namespace

void quantize(const Device& device, Tensor x, const float* gain, float eps, int8_t* q, ActScale* scale) {
  if (x.n == 0) return;
  const auto pieces = gain ? 1u : static_cast<unsigned>((x.dim + 4 * kNormThreads - 1) / (4 * kNormThreads));
  launch_kernel(device.stream(), dim3(static_cast<unsigned>(x.n), pieces), kNormThreads, 0, quantize_kernel, x.data,
                x.stride, x.dim, gain, eps, q, scale);
  DS4_CUDA(cudaGetLastError());
}

void rms_norm(const Device& device, Tensor x, const float* gain, float eps, Tensor y) {
  if (x.n == 0) return;
  launch_kernel(device.stream(), static_cast<unsigned>(x.n), kWideThreads, 0, rms_norm_kernel, x.data, x.stride, x.dim,
                gain, eps, y.data, y.stride);
  DS4_CUDA(cudaGetLastError());
}

void linear_blocks(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  if (args.T == 0) return;
  const cudaStream_t stream = device.stream();
  if (!linear_blocks_1(stream, type, w, x, args) && !linear_blocks_2(stream, type, w, x, args) &&
      !linear_blocks_3(stream, type, w, x, args) && !linear_blocks_4(stream, type, w, x, args))
    throw Unsupported(std::string("no matrix kernel for type ") + dtype_name(type));
  DS4_CUDA(cudaGetLastError());
}

void linear_floats(const Device& device, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& args) {
  if (args.T == 0) return;
  if (w.type == DType::F32)
    launch_floats<float>(device.stream(), w, x, x_stride, args);
  else if (w.type == DType::F16)
    launch_floats<__half>(device.stream(), w, x, x_stride, args);
  else if (w.type == DType::BF16)
    launch_floats<__nv_bfloat16>(device.stream(), w, x, x_stride, args);
  else
    throw Unsupported(std::string("no matrix kernel for type ") + dtype_name(w.type));
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
