#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "cuda/device_math.h"
#include "cuda/hyper.h"
#include "cuda/hyper_math.h"
#include "cuda/indexer.h"
#include "cuda/latent.h"
#include "cuda/latent_attention.h"
#include "cuda/moe.h"
#include "cuda/router.h"
#include "quant/quant.h"

namespace ds4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWideThreads = 1024;

// ---- hyper-connections

// c[t][i] = fn_i . x_t for the first `n` blocks, the sum of squares of x_t for the last. Bytes: fn once for each row
// of the step (from the cache after the first), x once for each block, likewise. Operations: 2 (n + 1) cols T.
template <class T>
__global__ void __launch_bounds__(kWideThreads)
    coefficients_kernel(const T* fn, int64_t fn_stride, int n, const float* x, int64_t stride, int64_t cols, float* c) {
  begin_kernel();
  __shared__ float shared[32];
  const int i = blockIdx.x;
  const float* row = x + blockIdx.y * stride;
  float sum = 0.0f;
  if (i < n) {
    const T* w = fn + i * fn_stride;
#pragma unroll 8
    for (int64_t k = threadIdx.x; k < cols; k += kWideThreads) sum = fmaf(static_cast<float>(w[k]), row[k], sum);
  } else {
#pragma unroll 8
    for (int64_t k = threadIdx.x; k < cols; k += kWideThreads) sum = fmaf(row[k], row[k], sum);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) c[blockIdx.y * (n + 1) + i] = sum;
}

// y = sum of pre[j] streams[j]; the first block of a row also writes the mix. Bytes: the streams once, y once.
__global__ void __launch_bounds__(kThreads) hc_in_kernel(HyperArgs a, const float* c, const float* x, int64_t stride,
                                                         float* y, int64_t y_stride, float* mix, int64_t mix_stride) {
  begin_kernel();
  __shared__ float pre[kMostStreams];
  __shared__ alignas(16) float m[kMostStreams * kMostStreams];
  const int n = a.streams, rows = mix ? 2 * n + n * n : n;
  const int64_t t = blockIdx.y;
  c += t * (rows + 1);
  const float factor = 1.0f / sqrtf(c[rows] / static_cast<float>(n * a.width) + a.norm_eps);
  if (threadIdx.x < n) {
    const int j = threadIdx.x;
    pre[j] = sigmoid(c[j] * factor * a.scale[0] + a.base[j]) + a.eps;
    if (mix && blockIdx.x == 0)
      mix[t * mix_stride + j] = 2.0f * sigmoid(c[n + j] * factor * a.scale[1] + a.base[n + j]);
  }
  __syncthreads();
  const float* row = x + t * stride;
  for (int64_t d = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; d < a.width;
       d += static_cast<int64_t>(gridDim.x) * kThreads) {
    float sum = 0.0f;
    for (int j = 0; j < n; ++j) sum = fmaf(pre[j], row[j * a.width + d], sum);
    y[t * y_stride + d] = sum;
  }
  if (!mix || blockIdx.x != 0 || threadIdx.x >= 32) return;
  for (int i = threadIdx.x; i < n * n; i += 32) m[i] = c[2 * n + i] * factor * a.scale[2] + a.base[2 * n + i];
  __syncwarp();
  sinkhorn(m, n, a.iterations, a.eps);
  for (int i = threadIdx.x; i < n * n; i += 32) mix[t * mix_stride + n + i] = m[i];
}

// As hc_in_kernel with a norm behind it. The first block of a row computes y, the second the mix beside it.
__global__ void __launch_bounds__(kWideThreads)
    hc_in_norm_kernel(HyperArgs a, const float* c, const float* x, int64_t stride, const float* gain, float eps,
                      float* y, int64_t y_stride, float* mix, int64_t mix_stride) {
  begin_kernel();
  __shared__ float pre[kMostStreams];
  __shared__ alignas(16) float m[kMostStreams * kMostStreams];
  __shared__ float shared[32];
  const int n = a.streams, rows = 2 * n + n * n;
  const int64_t t = blockIdx.y;
  c += t * (rows + 1);
  const float factor = 1.0f / sqrtf(c[rows] / static_cast<float>(n * a.width) + a.norm_eps);
  if (blockIdx.x == 1) {
    if (threadIdx.x >= 32) return;
    mix += t * mix_stride;
    for (int j = threadIdx.x; j < n; j += 32) mix[j] = 2.0f * sigmoid(c[n + j] * factor * a.scale[1] + a.base[n + j]);
    for (int i = threadIdx.x; i < n * n; i += 32) m[i] = c[2 * n + i] * factor * a.scale[2] + a.base[2 * n + i];
    __syncwarp();
    sinkhorn(m, n, a.iterations, a.eps);
    for (int i = threadIdx.x; i < n * n; i += 32) mix[n + i] = m[i];
    return;
  }
  if (threadIdx.x < n) pre[threadIdx.x] = sigmoid(c[threadIdx.x] * factor * a.scale[0] + a.base[threadIdx.x]) + a.eps;
  __syncthreads();
  const float* row = x + t * stride;
  y += t * y_stride;
  float squares = 0.0f;
  for (int64_t d = threadIdx.x; d < a.width; d += kWideThreads) {
    float sum = 0.0f;
    for (int j = 0; j < n; ++j) sum = fmaf(pre[j], row[j * a.width + d], sum);
    y[d] = sum;
    squares = fmaf(sum, sum, squares);
  }
  const float norm = 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(a.width) + eps);
  for (int64_t d = threadIdx.x; d < a.width; d += kWideThreads) y[d] = y[d] * norm * gain[d];
}

// Bytes: out and mix once, the streams in and out.
template <int kStreams>
__global__ void __launch_bounds__(kThreads)
    hc_out_kernel(const float* out, int64_t out_stride, const float* mix, int64_t mix_stride, int n, int64_t width,
                  float* streams, int64_t stride) {
  begin_kernel();
  __shared__ float shared[kMostStreams + kMostStreams * kMostStreams];
  const int64_t t = blockIdx.y, d = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int i = threadIdx.x; i < n + n * n; i += kThreads) shared[i] = mix[t * mix_stride + i];
  __syncthreads();
  if (d >= width) return;
  const float *post = shared, *m = shared + n;
  float* x = streams + t * stride + d;
  const float o = out[t * out_stride + d];
  float in[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j)
    if (j < n) in[j] = x[j * width];
#pragma unroll
  for (int k = 0; k < kStreams; ++k)
    if (k < n) {
      float sum = post[k] * o;
#pragma unroll
      for (int j = 0; j < kStreams; ++j)
        if (j < n) sum = fmaf(m[j * n + k], in[j], sum);
      x[k * width] = sum;
    }
}

// ---- heads

__global__ void __launch_bounds__(128) head_norm_kernel(float* x, int64_t stride, int64_t dim, float eps) {
  begin_kernel();
  __shared__ float shared[32];
  float* head = x + blockIdx.y * stride + blockIdx.x * dim;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < dim; i += 128) squares = fmaf(head[i], head[i], squares);
  const float factor = 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(dim) + eps);
  for (int64_t i = threadIdx.x; i < dim; i += 128) head[i] = head[i] * factor;
}

// The angle is one f32 product; its functions are exact to the last bit of f32.
__device__ __forceinline__ void angle_of(int64_t position, float freq, float& cosine, float& sine) {
  const double angle = static_cast<double>(static_cast<float>(position) * freq);
  cosine = static_cast<float>(cos(angle));
  sine = static_cast<float>(sin(angle));
}

__global__ void angles_kernel(const DeviceRow* rows, const float* freq, int64_t pairs, float* out, int64_t stride) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  float* to = out + blockIdx.y * stride;
  angle_of(rows[blockIdx.y].position, freq[i], to[i], to[pairs + i]);
}

__device__ __forceinline__ void rotate(float& a, float& b, float c, float s) {
  const float u = a, w = b;
  a = u * c - w * s;
  b = u * s + w * c;
}

__global__ void rope_tail_kernel(float* x, int64_t stride, const float* table, int64_t table_stride, int heads,
                                 int64_t dim, int pairs, float sign) {
  begin_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= heads * pairs) return;
  const int64_t t = blockIdx.y;
  const int h = i / pairs, pair = i % pairs;
  float* p = x + t * stride + h * dim + dim - 2 * pairs + 2 * pair;
  rotate(p[0], p[1], table[t * table_stride + pair], sign * table[t * table_stride + pairs + pair]);
}

// ---- simulated FP8 and FP4 (OCP MX v1.0 element formats), bit for bit as the reference does

__device__ __forceinline__ float ceil_power_of_two(float f) {
  const uint32_t bits = __float_as_uint(f);
  return __uint_as_float(bits & 0x7FFFFFu ? ((bits >> 23) + 1) << 23 : bits);
}
// Nearest value with `mantissa` bits behind the point, exponents from `lowest` up, ties to even.
__device__ __forceinline__ float to_small(float x, int lowest, int mantissa, float largest) {
  const float a = fabsf(x);
  const int exponent = max(static_cast<int>(__float_as_uint(a) >> 23) - 127, lowest);
  const float step = __uint_as_float(static_cast<uint32_t>(exponent - mantissa + 127) << 23);
  return copysignf(fminf(rintf(a / step) * step, largest), x);
}

// One row in shared memory, by the whole block.
__device__ void round_row(float* x, int dim, RowRounding rounding, int rotated) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (rounding == RowRounding::Fp8) {
    for (int g = warp; g < (dim - rotated) / 64; g += warps) {
      float &a = x[g * 64 + lane], &b = x[g * 64 + 32 + lane];
      const float largest = fmaxf(1e-4f, warp_max(fmaxf(fabsf(a), fabsf(b))));
      const float scale = ceil_power_of_two(largest * (1.0f / 448.0f));
      a = to_small(fminf(fmaxf(a / scale, -448.0f), 448.0f), -6, 3, 448.0f) * scale;
      b = to_small(fminf(fmaxf(b / scale, -448.0f), 448.0f), -6, 3, 448.0f) * scale;
    }
  } else if (rounding == RowRounding::HadamardFp4) {
    for (int h = 1; h < dim; h *= 2) {
      for (int p = threadIdx.x; p < dim / 2; p += blockDim.x) {
        const int i = p / h * 2 * h + p % h;
        const float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
      __syncthreads();
    }
    const float norm = static_cast<float>(1.0 / sqrt(static_cast<double>(dim)));
    for (int g = warp; g < dim / 32; g += warps) {
      const float v = x[g * 32 + lane] * norm;
      const float largest = fmaxf(6.0f * 0x1p-126f, warp_max(fabsf(v)));
      const float scale = ceil_power_of_two(largest * (1.0f / 6.0f));
      x[g * 32 + lane] = to_small(fminf(fmaxf(v / scale, -6.0f), 6.0f), 0, 1, 6.0f) * scale;
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(128)
    round_rows_kernel(float* x, int64_t stride, int dim, RowRounding rounding, int rotated) {
  begin_kernel();
  extern __shared__ float shared[];
  float* row = x + blockIdx.y * stride + static_cast<int64_t>(blockIdx.x) * dim;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) shared[i] = row[i];
  __syncthreads();
  round_row(shared, dim, rounding, rotated);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) row[i] = shared[i];
}

// The rotation of the last columns of a head of 128 and round_row's HadamardFp4, with the same arithmetic: a warp has a
// head, a lane four neighbouring columns.
constexpr int kIndexDim = 128;
__global__ void __launch_bounds__(128)
    index_query_kernel(float* x, int64_t stride, int heads, const float* table, int64_t table_stride, int pairs) {
  begin_kernel();
  const int h = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (h >= heads) return;
  float4* at = reinterpret_cast<float4*>(x + blockIdx.y * stride + static_cast<int64_t>(h) * kIndexDim) + lane;
  const float4 in = *at;
  float v[4] = {in.x, in.y, in.z, in.w};
  if (const int pair = (4 * lane - (kIndexDim - 2 * pairs)) / 2; 4 * lane >= kIndexDim - 2 * pairs) {
    const float *cosine = table + blockIdx.y * table_stride + pair, *sine = cosine + pairs;
    rotate(v[0], v[1], cosine[0], sine[0]);
    rotate(v[2], v[3], cosine[1], sine[1]);
  }
  const auto turn = [](float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  };
  turn(v[0], v[1]), turn(v[2], v[3]);
  turn(v[0], v[2]), turn(v[1], v[3]);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2)
#pragma unroll
    for (float& f : v) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, f, mask);
      f = lane & mask ? other - f : f + other;
    }
  const float norm = static_cast<float>(1.0 / sqrt(static_cast<double>(kIndexDim)));
  float largest = 0.0f;
#pragma unroll
  for (float& f : v) {
    f = f * norm;
    largest = fmaxf(largest, fabsf(f));
  }
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, mask));
  const float scale = ceil_power_of_two(fmaxf(6.0f * 0x1p-126f, largest) * (1.0f / 6.0f));
#pragma unroll
  for (float& f : v) f = to_small(fminf(fmaxf(f / scale, -6.0f), 6.0f), 0, 1, 6.0f) * scale;
  *at = make_float4(v[0], v[1], v[2], v[3]);
}

// One head of a row: norm without gain, then the rotation of its last columns. A thread has four neighbours at a time.
__global__ void __launch_bounds__(128) head_norm_rope_kernel(float* x, int64_t stride, int dim, float eps,
                                                             const float* table, int64_t table_stride, int pairs) {
  begin_kernel();
  __shared__ float shared[32];
  float4* head = reinterpret_cast<float4*>(x + blockIdx.y * stride + static_cast<int64_t>(blockIdx.x) * dim);
  const float *cosine = table + blockIdx.y * table_stride, *sine = cosine + pairs;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < dim / 4; i += 128) {
    const float4 v = head[i];
    squares = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, squares))));
  }
  const float factor = 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(dim) + eps);
  for (int i = threadIdx.x; i < dim / 4; i += 128) {
    float4 v = head[i];
    v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
    if (const int pair = (4 * i - (dim - 2 * pairs)) / 2; 4 * i >= dim - 2 * pairs) {
      rotate(v.x, v.y, cosine[pair], sine[pair]);
      rotate(v.z, v.w, cosine[pair + 1], sine[pair + 1]);
    }
    head[i] = v;
  }
}

__global__ void __launch_bounds__(128)
    key_row_kernel(float* x, int64_t stride, int dim, const float* gain, float eps, const float* table,
                   int64_t table_stride, int pairs, RowRounding rounding) {
  begin_kernel();
  extern __shared__ float shared[];  // [dim], then [32]
  float* row = x + blockIdx.x * stride;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < dim; i += 128) {
    shared[i] = row[i];
    squares = fmaf(row[i], row[i], squares);
  }
  const float factor = 1.0f / sqrtf(block_sum(squares, shared + dim) / static_cast<float>(dim) + eps);
  for (int i = threadIdx.x; i < dim; i += 128) shared[i] = shared[i] * factor * gain[i];
  __syncthreads();
  const float *cosine = table + blockIdx.x * table_stride, *sine = cosine + pairs;
  for (int i = threadIdx.x; i < pairs; i += 128) {
    float* pair = shared + dim - 2 * pairs + 2 * i;
    rotate(pair[0], pair[1], cosine[i], sine[i]);
  }
  __syncthreads();
  round_row(shared, dim, rounding, 2 * pairs);
  for (int i = threadIdx.x; i < dim; i += 128) row[i] = shared[i];
}

void check_rounding(RowRounding rounding, int64_t dim, int64_t rotated) {
  require(rounding != RowRounding::Fp8 || (dim - rotated) % 64 == 0, "Fp8 rows come in groups of 64");
  require(rounding != RowRounding::HadamardFp4 || (std::has_single_bit(static_cast<uint64_t>(dim)) && dim % 32 == 0),
          "Fp4 rows are a power of two long");
}

// ---- state

// Whether a row is among the last `capacity` of its session in this step: only those may go to a ring, each to a slot
// of its own.
__device__ __forceinline__ bool stays(const DeviceRow& row, int64_t t, int64_t capacity) {
  return t + capacity >= row.first + row.count;
}

__global__ void ring_store_kernel(const float* x, int64_t stride, int64_t dim, const DeviceRow* rows,
                                  BufferPlace ring) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, t = blockIdx.y;
  const DeviceRow row = rows[t];
  if (i < dim && stays(row, t, ring.capacity))
    reinterpret_cast<float*>(ring_row(row, ring, row.position))[i] = x[t * stride + i];
}

// Bytes: a row in and out for each row of the step.
__global__ void previous_rows_kernel(const float* x, int64_t stride, int64_t dim, const DeviceRow* rows,
                                     BufferPlace ring, float* y, int64_t y_stride) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, t = blockIdx.y;
  if (i >= dim) return;
  const DeviceRow row = rows[t];
  float value = 0.0f;
  if (row.position > 0)
    value = t > row.first ? x[(t - 1) * stride + i]
                          : reinterpret_cast<const float*>(ring_row(row, ring, row.position - 1))[i];
  y[t * y_stride + i] = value;
}

struct CompressArgs {
  BufferPlace ring, rows;
  const float *bias, *gain, *freq;
  int ratio, dim, lanes, pairs;
  float eps;
  RowRounding rounding;
};

// Column i of the window that closes at row t of the step, pooled. Tokens of this step are read from `kg`, older ones
// from the ring, which is written afterwards; its gates have their position bias. kAtOnce tokens are read together, or
// the gates alone of kGates.
template <int kAtOnce, int kGates>
__device__ __forceinline__ float pool_column(const float* kg, int64_t stride, const DeviceRow& row, int64_t t,
                                             const CompressArgs& a, int i) {
  const int p = row.position, half = a.lanes * a.dim, first = p + 1 - a.ratio;
  const int start = a.lanes == 2 && first > 0 ? first - a.ratio : first;
  const int step_first = p - static_cast<int>(t - row.first);
  // kFresh: all tokens are of this step.
  const auto pool = [&](auto all_fresh) {
    constexpr bool kFresh = decltype(all_fresh)::value;
    const float* const first_token = kg + static_cast<int64_t>(row.first + start - step_first) * stride;
    const char* const ring = row.fixed + a.ring.offset;
    const auto slots = static_cast<int>(a.ring.capacity);  // at least kGates
    // Gates of the tokens from `from` on, and their keys where somebody wants them.
    const auto read = [&](int from, auto& gates, float* keys) {
      constexpr int n = sizeof(gates) / sizeof(float);
      const int slot = kFresh ? 0 : from % slots;
      float bias[n];
#pragma unroll
      for (int k = 0; k < n; ++k) {
        const int at = min(from + k, p), column = (a.lanes == 2 && at >= first ? a.dim : 0) + i;
        const bool old = !kFresh && at < step_first;
        int place = slot + at - from;
        if (place >= slots) place -= slots;
        const float* token = old ? reinterpret_cast<const float*>(ring + place * a.ring.row_bytes)
                                 : first_token + static_cast<int64_t>(at - start) * stride;
        gates[k] = token[half + column];
        if (keys) keys[k] = token[column];
        bias[k] = 0.0f;
        if (!old) bias[k] = a.bias[(at >= first ? at - first : at - start) * half + column];
      }
#pragma unroll
      for (int k = 0; k < n; ++k)
        if (kFresh || min(from + k, p) >= step_first) gates[k] = gates[k] + bias[k];
    };
    float largest = -INFINITY;
    for (int from = start; from <= p; from += kGates) {
      float gates[kGates];
      read(from, gates, nullptr);
#pragma unroll
      for (int k = 0; k < kGates; ++k) largest = fmaxf(largest, gates[k]);  // the last one again does no harm
    }
    float total = 0.0f, sum = 0.0f;
    for (int from = start; from <= p; from += kAtOnce) {
      float gates[kAtOnce], keys[kAtOnce];
      read(from, gates, keys);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (from + k <= p) {
          const float e = expf(gates[k] - largest);
          total = total + e;
          sum = fmaf(e, keys[k], sum);
        }
    }
    return sum / total;
  };
  return start >= step_first ? pool(std::true_type{}) : pool(std::false_type{});
}

constexpr int kLongWindow = 32;  // tokens, and more: what is under way at once decides how long it takes to pool

// Long windows of many rows: a block of threads pools some columns of a row's window, where one closes.
constexpr int kPoolThreads = 64;
__global__ void __launch_bounds__(kPoolThreads)
    pool_kernel(const float* kg, int64_t stride, const DeviceRow* rows, CompressArgs a, float* pooled) {
  begin_kernel();
  const int64_t t = blockIdx.x;
  const int i = static_cast<int>(blockIdx.y) * kPoolThreads + static_cast<int>(threadIdx.x);
  const DeviceRow row = rows[t];
  if ((row.position + 1) % a.ratio == 0 && i < a.dim)
    pooled[t * a.dim + i] = pool_column<32, 32>(kg, stride, row, t, a, i);
}

// Where a window closes: pools it, or takes it from `ready`, norms, rotates and rounds. Bytes: the window's keys once
// and gates twice. One block for each row of the step. `store`: the rows are so few that none of them takes the place
// of one that is read; they are stored at once.
template <int kGates>
__global__ void __launch_bounds__(512) compress_kernel(const float* kg, int64_t stride, const DeviceRow* rows,
                                                       CompressArgs a, bool store, const float* ready) {
  begin_kernel();
  extern __shared__ float pooled[];  // [dim], then [32]
  const int64_t t = blockIdx.x;
  const DeviceRow row = rows[t];
  const int p = row.position;
  if (store) {
    const int columns = a.lanes * a.dim;
    float* to = reinterpret_cast<float*>(ring_row(row, a.ring, p));
    for (int i = threadIdx.x; i < 2 * columns; i += static_cast<int>(blockDim.x)) {
      const float v = kg[t * stride + i];
      to[i] = i < columns ? v : v + a.bias[p % a.ratio * columns + i - columns];
    }
  }
  if ((p + 1) % a.ratio != 0) return;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < a.dim; i += static_cast<int>(blockDim.x)) {
    const float v = ready ? ready[t * a.dim + i] : pool_column<8, kGates>(kg, stride, row, t, a, i);
    pooled[i] = v;
    squares = fmaf(v, v, squares);
  }
  const float factor = 1.0f / sqrtf(block_sum(squares, pooled + a.dim) / static_cast<float>(a.dim) + a.eps);
  for (int i = threadIdx.x; i < a.dim; i += static_cast<int>(blockDim.x)) pooled[i] = pooled[i] * factor * a.gain[i];
  __syncthreads();
  for (int i = threadIdx.x; i < a.pairs; i += static_cast<int>(blockDim.x)) {
    float c, s;
    angle_of(p + 1 - a.ratio, a.freq[i], c, s);
    float* pair = pooled + a.dim - 2 * a.pairs + 2 * i;
    rotate(pair[0], pair[1], c, s);
  }
  __syncthreads();
  round_row(pooled, a.dim, a.rounding, 2 * a.pairs);
  float* to = reinterpret_cast<float*>(append_row(row, a.rows, p / a.ratio));
  for (int i = threadIdx.x; i < a.dim; i += static_cast<int>(blockDim.x)) to[i] = pooled[i];
}

__global__ void store_open_kernel(const float* kg, int64_t stride, const DeviceRow* rows, BufferPlace ring,
                                  const float* bias, int ratio, int half) {
  begin_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t t = blockIdx.y;
  const DeviceRow row = rows[t];
  if (i >= 2 * half || !stays(row, t, ring.capacity)) return;
  const float v = kg[t * stride + i];
  reinterpret_cast<float*>(ring_row(row, ring, row.position))[i] =
      i < half ? v : v + bias[row.position % ratio * half + i - half];
}

unsigned pieces(int64_t n, int threads) {
  return static_cast<unsigned>((n + threads - 1) / threads);
}

class CudaLatentOps final : public LatentOps {
 public:
  explicit CudaLatentOps(Context& context) : context_(context) {}

  void hc_in(const HyperConnection& hc, Tensor streams, Tensor y, Tensor mix) override {
    const int64_t n = hc.streams;
    require(streams.dim == n * y.dim && mix.dim == n + n * n && y.n == streams.n && mix.n == streams.n, "hc_in shapes");
    hyper(hc, 2 * n + n * n, 3, streams, y, &mix);
  }

  void hc_in_norm(Ops&, const HyperConnection& hc, Tensor streams, Norm norm, Tensor y, Tensor mix) override {
    const int64_t n = hc.streams;
    require(streams.dim == n * y.dim && mix.dim == n + n * n && y.n == streams.n && mix.n == streams.n && norm.gain,
            "hc_in_norm shapes");
    enter();
    if (mix_and_norm(context_, hc, nullptr, streams, vector_of(*norm.gain, y.dim, "norm shape"), norm.eps, y, mix))
      return;
    hyper(hc, 2 * n + n * n, 3, streams, y, &mix, &norm);
  }

  void hc_out_in_norm(Ops& ops, Tensor out, const HyperConnection& hc, Tensor streams, Norm norm, Tensor y,
                      Tensor mix) override {
    const int64_t n = hc.streams;
    require(streams.dim == n * y.dim && out.dim == y.dim && mix.dim == n + n * n && y.n == streams.n &&
                out.n == streams.n && mix.n == streams.n && norm.gain,
            "hc_out_in_norm shapes");
    context_.device.enter();  // what the context owes may be added on the way
    if (mix_and_norm(context_, hc, &out, streams, vector_of(*norm.gain, y.dim, "norm shape"), norm.eps, y, mix)) return;
    LatentOps::hc_out_in_norm(ops, out, hc, streams, norm, y, mix);
  }

  void hc_head(const HyperConnection& hc, Tensor streams, Tensor y) override {
    require(streams.dim == hc.streams * y.dim && y.n == streams.n, "hc_head shapes");
    hyper(hc, hc.streams, 1, streams, y, nullptr);
  }

  void hc_out(Tensor out, Tensor mix, int64_t n, Tensor streams) override {
    enter();
    context_.written(streams);
    require(streams.dim == n * out.dim && mix.dim == n + n * n && out.n == streams.n && n <= kMostStreams,
            "hc_out shapes");
    if (out.n == 0) return;
    const dim3 grid(pieces(out.dim, kThreads), static_cast<unsigned>(out.n));
    const auto launch = [&](auto kernel) {
      launch_kernel(stream(), grid, kThreads, 0, kernel, out.data, out.stride, mix.data, mix.stride,
                    static_cast<int>(n), out.dim, streams.data, streams.stride);
    };
    if (n == 4)
      launch(hc_out_kernel<4>);
    else
      launch(hc_out_kernel<kMostStreams>);
    DS4_CUDA(cudaGetLastError());
  }

  void head_norm(Tensor x, int64_t heads, float eps) override {
    enter();
    context_.written(x);
    require(x.dim % heads == 0, "head_norm shapes");
    if (x.n == 0) return;
    launch_kernel(stream(), dim3(static_cast<unsigned>(heads), static_cast<unsigned>(x.n)), 128, 0, head_norm_kernel,
                  x.data, x.stride, x.dim / heads, eps);
    DS4_CUDA(cudaGetLastError());
  }

  void rope_table_f32(std::span<const RowRef> rows, std::span<const float> freq, Tensor out) override {
    enter();
    context_.written(out);
    const auto pairs = static_cast<int64_t>(freq.size());
    require(static_cast<int64_t>(rows.size()) == out.n && out.dim == 2 * pairs, "rope_table_f32 shapes");
    if (out.n == 0) return;
    launch_kernel(stream(), dim3(pieces(pairs, 64), static_cast<unsigned>(out.n)), 64, 0, angles_kernel,
                  context_.rows(rows), context_.inputs.constant(freq), pairs, out.data, out.stride);
    DS4_CUDA(cudaGetLastError());
  }

  void rope_tail(Tensor x, Tensor table, int64_t heads, bool inverse) override {
    enter();
    context_.written(x);
    const int64_t dim = x.dim / heads, pairs = table.dim / 2;
    require(x.dim % heads == 0 && table.n == x.n && 2 * pairs <= dim, "rope_tail shapes");
    if (x.n == 0) return;
    launch_kernel(stream(), dim3(pieces(heads * pairs, 128), static_cast<unsigned>(x.n)), 128, 0, rope_tail_kernel,
                  x.data, x.stride, table.data, table.stride, static_cast<int>(heads), dim, static_cast<int>(pairs),
                  inverse ? -1.0f : 1.0f);
    DS4_CUDA(cudaGetLastError());
  }

  void round_rows(Tensor x, int64_t heads, RowRounding rounding, int64_t rotated) override {
    enter();
    context_.written(x);
    require(x.dim % heads == 0, "round_rows shapes");
    const int64_t dim = x.dim / heads;
    check_rounding(rounding, dim, rotated);
    if (x.n == 0 || rounding == RowRounding::None) return;
    launch_kernel(stream(), dim3(static_cast<unsigned>(heads), static_cast<unsigned>(x.n)), 128,
                  static_cast<size_t>(dim) * sizeof(float), round_rows_kernel, x.data, x.stride, static_cast<int>(dim),
                  rounding, static_cast<int>(rotated));
    DS4_CUDA(cudaGetLastError());
  }

  void ring_store(Tensor x, std::span<const RowRef> rows, size_t ring) override {
    enter();
    require(static_cast<int64_t>(rows.size()) == x.n, "ring_store shapes");
    if (x.n == 0) return;
    const BufferPlace place = float_buffer(rows, ring, x.dim);
    launch_kernel(stream(), dim3(pieces(x.dim, 128), static_cast<unsigned>(x.n)), 128, 0, ring_store_kernel, x.data,
                  x.stride, x.dim, context_.rows(rows), place);
    DS4_CUDA(cudaGetLastError());
  }

  void previous_rows(Tensor x, std::span<const RowRef> rows, size_t ring, Tensor y) override {
    enter();
    context_.written(y);
    require(static_cast<int64_t>(rows.size()) == y.n && x.dim == y.dim && x.n == y.n, "previous_rows shapes");
    if (y.n == 0) return;
    const BufferPlace place = float_buffer(rows, ring, y.dim);
    launch_kernel(stream(), dim3(pieces(y.dim, 128), static_cast<unsigned>(y.n)), 128, 0, previous_rows_kernel, x.data,
                  x.stride, y.dim, context_.rows(rows), place, y.data, y.stride);
    DS4_CUDA(cudaGetLastError());
  }

  void compress(Tensor kg, std::span<const RowRef> rows, const Compressor& c) override {
    enter();
    const int64_t lanes = c.ratio == 4 ? 2 : 1, half = lanes * c.dim;
    require(kg.dim == 2 * half && static_cast<int64_t>(rows.size()) == kg.n, "compress shapes");
    const CudaWeight& bias = on_device(*c.bias);
    require(bias.rows() == c.ratio && bias.cols() == half, "compress bias shape");
    const auto pairs = static_cast<int64_t>(c.freq.size());
    check_rounding(c.rounding, c.dim, 2 * pairs);
    if (kg.n == 0) return;
    CompressArgs a{float_buffer(rows, c.ring, 2 * half),
                   float_buffer(rows, c.rows, c.dim),
                   bias.dense(context_.device),
                   vector_of(*c.gain, c.dim, "compress gain shape"),
                   context_.inputs.constant(c.freq),
                   static_cast<int>(c.ratio),
                   static_cast<int>(c.dim),
                   static_cast<int>(lanes),
                   static_cast<int>(pairs),
                   c.eps,
                   c.rounding};
    const DeviceRow* list = context_.rows(rows);
    // A closing window reads no further back than its own tokens and, of two lanes, those of the window before.
    const bool store = kg.n + lanes * c.ratio <= a.ring.capacity;
    const auto threads = static_cast<unsigned>(std::clamp<int64_t>((c.dim + 31) / 32 * 32, 32, 512));
    const bool is_long = c.ratio > kLongWindow;
    require(a.ring.capacity >= (is_long ? 32 : 8), "compress: a ring of fewer rows than are read at once");
    float* ready = nullptr;
    if (is_long && kg.n > 32) {
      ready = context_.workspace.get<float>(Workspace::Pooled, kg.n * c.dim);
      launch_kernel(stream(), dim3(static_cast<unsigned>(kg.n), pieces(c.dim, kPoolThreads)), kPoolThreads, 0,
                    pool_kernel, kg.data, kg.stride, list, a, ready);
    }
    launch_kernel(stream(), static_cast<unsigned>(kg.n), threads, static_cast<size_t>(c.dim + 32) * sizeof(float),
                  is_long ? compress_kernel<16> : compress_kernel<8>, kg.data, kg.stride, list, a, store, ready);
    if (!store)
      launch_kernel(stream(), dim3(pieces(2 * half, kThreads), static_cast<unsigned>(kg.n)), kThreads, 0,
                    store_open_kernel, kg.data, kg.stride, list, a.ring, a.bias, a.ratio, static_cast<int>(half));
    DS4_CUDA(cudaGetLastError());
  }

  Selection select(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows, int64_t ratio,
                   int64_t heads, int64_t k) override {
    context_.enter_beside();
    return select_rows(context_, q, weight, rows, index_rows, ratio, heads, k, false);
  }

  Selection select_short(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows, int64_t ratio,
                         int64_t heads, int64_t k) override {
    context_.enter_beside();
    return select_rows(context_, q, weight, rows, index_rows, ratio, heads, k, true);
  }

  void index_query(Tensor x, Tensor table, int64_t heads, RowRounding rounding) override {
    const int64_t pairs = table.dim / 2;
    if (rounding != RowRounding::HadamardFp4 || x.dim != heads * kIndexDim || pairs % 2 != 0 || 2 * pairs > kIndexDim ||
        x.stride % 4 != 0)
      return LatentOps::index_query(x, table, heads, rounding);
    enter();
    require(table.n == x.n, "index_query shapes");
    context_.written(x);
    if (x.n == 0) return;
    launch_kernel(stream(), dim3(pieces(heads, 4), static_cast<unsigned>(x.n)), 128, 0, index_query_kernel, x.data,
                  x.stride, static_cast<int>(heads), table.data, table.stride, static_cast<int>(pairs));
    DS4_CUDA(cudaGetLastError());
  }

  void latent_attention(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                        const Selection* selection, Tensor out) override {
    context_.enter_beside();
    context_.written(out);
    cuda::latent_attention(context_, q, kv, rows, a, selection, nullptr, out);
  }

  void latent_attention_rope(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                             const Selection* selection, Tensor table, Tensor out) override {
    context_.enter_beside();
    require(table.n == out.n && table.dim <= a.head_dim && table.dim % 8 == 0, "latent_attention_rope shapes");
    context_.written(out);
    cuda::latent_attention(context_, q, kv, rows, a, selection, &table, out);
  }

  void head_norm_rope(Tensor x, int64_t heads, float eps, Tensor table) override {
    enter();
    const int64_t dim = x.dim / heads;
    require(x.dim % heads == 0 && table.n == x.n && table.dim <= dim, "head_norm_rope shapes");
    if (dim % 4 != 0 || table.dim % 4 != 0 || x.stride % 4 != 0) return LatentOps::head_norm_rope(x, heads, eps, table);
    context_.written(x);
    if (x.n == 0) return;
    context_.raw_heads = {x, heads, eps, table};
    if (!attention_norms(dim)) settle_heads(context_);
  }

  void key_row(Ops&, Tensor x, Norm norm, Tensor table, RowRounding rounding) override {
    enter();
    require(table.n == x.n && table.dim <= x.dim && norm.gain, "key_row shapes");
    check_rounding(rounding, x.dim, table.dim);
    context_.written(x);
    if (x.n == 0) return;
    launch_kernel(stream(), static_cast<unsigned>(x.n), 128, static_cast<size_t>(x.dim + 32) * sizeof(float),
                  key_row_kernel, x.data, x.stride, static_cast<int>(x.dim), vector_of(*norm.gain, x.dim, "norm shape"),
                  norm.eps, table.data, table.stride, static_cast<int>(table.dim / 2), rounding);
    DS4_CUDA(cudaGetLastError());
  }

  std::unique_ptr<Weight> load_grouped(const MatrixView& view, int64_t groups) override {
    require(groups > 0 && view.rows % groups == 0 && view.rows / groups % 4 == 0,
            "groups do not divide the rows into fours");
    require(block_elements(view.type) == 1 || view.cols % kTileCols == 0, "groups of columns that do not fill tiles");
    return context_.uploader.load({&view, 1}, false, groups);
  }

  void grouped_linear(const Weight& w, Tensor x, int64_t groups, Tensor y) override {
    enter();
    context_.written(y);
    require(x.dim == groups * w.cols() && y.dim == w.rows() && w.rows() % groups == 0 && x.n == y.n &&
                w.rows() / groups % 4 == 0 && w.cols() % 8 == 0,
            "grouped_linear shapes");
    LinearArgs args;
    args.rank = w.rows() / groups;
    context_.linear(on_device(w), x, nullptr, 0, y, args);
  }

  void linear_swiglu_clamped(const Weight& w, Tensor x, float limit, Tensor y) override {
    enter();
    context_.written(y);
    require(x.n == y.n && x.dim == w.cols() && 2 * y.dim == w.rows(), "linear_swiglu_clamped shapes");
    context_.swiglu(on_device(w), x, nullptr, 0, Epilogue::Clamped, limit, y);
  }

  Routing route(Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids, int64_t k,
                float scale) override {
    enter();
    return cuda::route(context_, logits, bias, table, ids, k, scale);
  }

  Routing router(Ops& ops, const Weight& w, Tensor x, Tensor logits, const Weight* bias, const Weight* table,
                 std::span<const int32_t> ids, int64_t k, float scale) override {
    enter();
    require(x.n == logits.n && w.rows() == logits.dim, "router shapes");
    Routing out;
    if (route_rows(context_, on_device(w), x, bias, table, ids, k, scale, out)) return out;
    return LatentOps::router(ops, w, x, logits, bias, table, ids, k, scale);
  }

  std::unique_ptr<Weight> load_experts(std::span<const MatrixView> parts, int64_t experts, WeightUse use) override {
    const bool swiglu = use == WeightUse::SwiGLU;
    require(experts > 0 && static_cast<int64_t>(parts.size()) == experts * (swiglu ? 2 : 1),
            "load_experts of another number of matrices");
    for (const MatrixView& p : parts)
      require(p.rows == parts.front().rows && p.type == parts.front().type, "experts of different shapes or types");
    return context_.uploader.load(parts, swiglu, experts);
  }

  std::unique_ptr<Weight> load_table(const MatrixView& view) override { return context_.uploader.load_table(view); }

  void moe(const Weight& gate_up, const Weight& down, Tensor x, const Routing& routing, float limit,
           Tensor y) override {
    enter();
    context_.written(y);
    experts(context_, on_device(gate_up), on_device(down), x, routing, limit, y);
  }

 private:
  void enter() const { context_.enter(); }
  cudaStream_t stream() const { return context_.device.stream(); }

  static BufferPlace float_buffer(std::span<const RowRef> rows, size_t index, int64_t width) {
    const BufferPlace& p = Context::state(rows.front()).place(index);
    require(p.type == static_cast<int32_t>(DType::F32) && p.row_bytes == width * 4, "a state buffer of another shape");
    return p;
  }

  void hyper(const HyperConnection& hc, int64_t rows, int64_t scales, Tensor streams, Tensor y, const Tensor* mix,
             const Norm* norm = nullptr) {
    enter();
    context_.written(y);
    if (mix) context_.written(*mix);
    const CudaWeight& fn = on_device(*hc.fn);
    require(fn.cols() == streams.dim && fn.rows() == rows && hc.streams <= kMostStreams, "hyper-connection shape");
    if (streams.n == 0) return;
    const HyperArgs a{vector_of(*hc.base, rows, "hyper-connection base shape"),
                      vector_of(*hc.scale, scales, "hyper-connection scale shape"),
                      static_cast<int>(hc.streams),
                      static_cast<int>(hc.iterations),
                      hc.norm_eps,
                      hc.eps,
                      y.dim};
    auto* c = context_.workspace.get<float>(Workspace::Coefficients, streams.n * (rows + 1));
    const dim3 grid(static_cast<unsigned>(rows + 1), static_cast<unsigned>(streams.n));
    const auto launch = [&](const auto* data, int64_t stride) {
      launch_kernel(stream(), grid, kWideThreads, 0, coefficients_kernel<std::remove_cvref_t<decltype(*data)>>, data,
                    stride, static_cast<int>(rows), streams.data, streams.stride, streams.dim, c);
    };
    const Segment& s = fn.segments.front();
    if (s.type == DType::F16)
      launch(s.memory.as<const __half>(), s.stride);
    else if (s.type == DType::BF16)
      launch(s.memory.as<const __nv_bfloat16>(), s.stride);
    else
      launch(fn.dense(context_.device), fn.cols());
    if (norm) {
      launch_kernel(stream(), dim3(2, static_cast<unsigned>(streams.n)), kWideThreads, 0, hc_in_norm_kernel, a, c,
                    streams.data, streams.stride, vector_of(*norm->gain, y.dim, "norm shape"), norm->eps, y.data,
                    y.stride, mix->data, mix->stride);
      DS4_CUDA(cudaGetLastError());
      return;
    }
    launch_kernel(stream(), dim3(std::min(pieces(y.dim, kThreads), 16u), static_cast<unsigned>(streams.n)), kThreads, 0,
                  hc_in_kernel, a, c, streams.data, streams.stride, y.data, y.stride, mix ? mix->data : nullptr,
                  mix ? mix->stride : 0);
    DS4_CUDA(cudaGetLastError());
  }

  Context& context_;
};

}  // namespace

void settle_heads(Context& context) {
  const auto [x, heads, eps, table] = std::exchange(context.raw_heads, {});
  if (x.n == 0) return;
  context.device.on_stream([&] {
    launch_kernel(context.device.stream(), dim3(static_cast<unsigned>(heads), static_cast<unsigned>(x.n)), 128, 0,
                  head_norm_rope_kernel, x.data, x.stride, static_cast<int>(x.dim / heads), eps, table.data,
                  table.stride, static_cast<int>(table.dim / 2));
    DS4_CUDA(cudaGetLastError());
  });
}

std::unique_ptr<LatentOps> make_latent_ops(Context& context) {
  return std::make_unique<CudaLatentOps>(context);
}

}  // namespace ds4::cuda
