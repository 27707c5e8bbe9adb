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
    quantize_kernel(const float* x, int64_t stride, int64_t cols, const float* gain, float eps, int64_t blocks,
                    int8_t* q, float* d, float2* sums) {
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
  const int64_t quads = blocks * 8, place = (blockIdx.x >> 3) * blocks * 8 + (blockIdx.x & 7);
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * kNormThreads + threadIdx.x; i < quads;
       i += static_cast<int64_t>(gridDim.y) * kNormThreads) {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = 4 * i < cols ? row[4 * i + k] : 0.0f;
      if (gain && 4 * i < cols) v[k] = v[k] * factor * gain[4 * i + k];
    }
    store_codes(v, threadIdx.x % 8, place + i / 8 * 8, q, d, sums);
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

// Rows at once for T rows of activations.
inline int width_of(int64_t T) {
  return T <= 1 ? 1 : T <= 2 ? 2 : T <= 4 ? 4 : 8;
}

inline dim3 grid_of(const LinearArgs& p, int split, int width) {
  const int64_t per_block = kWarps / split * kRowsPerWarp;
  const int64_t columns = p.n_items ? p.n_items : (p.T + width - 1) / width;
  return {static_cast<unsigned>(columns), static_cast<unsigned>((p.rows + per_block - 1) / per_block), 1};
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

void quantize(const Device& device, Tensor x, const float* gain, float eps, const Activations& to) {
  if (x.n == 0) return;
  const auto pieces = gain ? 1u : static_cast<unsigned>((to.blocks * 32 + 4 * kNormThreads - 1) / (4 * kNormThreads));
  launch_kernel(device.stream(), dim3(static_cast<unsigned>(x.n), pieces), kNormThreads, 0, quantize_kernel, x.data,
                x.stride, x.dim, gain, eps, to.blocks, const_cast<int8_t*>(to.q), const_cast<float*>(to.d),
                const_cast<float2*>(to.sums));
  DS4_CUDA(cudaGetLastError());
}

void rms_norm(const Device& device, Tensor x, const float* gain, float eps, Tensor y) {
  if (x.n == 0) return;
  launch_kernel(device.stream(), static_cast<unsigned>(x.n), kWideThreads, 0, rms_norm_kernel, x.data, x.stride, x.dim,
                gain, eps, y.data, y.stride);
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
