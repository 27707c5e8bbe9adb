#include <algorithm>

#include "cuda/attention.h"
#include "cuda/device_math.h"

namespace ds4::cuda {
namespace {

// Bytes: the partial sums once. One block for a head of a row.
__global__ void combine_kernel(Partials p, const int32_t* visible, const float* sinks, int64_t heads, int64_t dim,
                               float* out, int64_t stride) {
  begin_kernel();
  const int64_t t = blockIdx.y, h = blockIdx.x, list = t * heads + h;
  const int chunks = (visible[t] + kChunk - 1) / kChunk;
  const float2* stats = p.stats + list * p.chunks;
  float largest = sinks ? sinks[h] : -INFINITY;
#pragma unroll 8
  for (int c = 0; c < chunks; ++c) largest = fmaxf(largest, stats[c].x);
  float total = sinks ? expf(sinks[h] - largest) : 0.0f;
#pragma unroll 8
  for (int c = 0; c < chunks; ++c) total = fmaf(stats[c].y, expf(stats[c].x - largest), total);
  const float inverse = 1.0f / total;
  for (int64_t d = threadIdx.x; d < dim; d += blockDim.x) {
    float sum = 0.0f;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c)
      sum = fmaf(p.sums[(list * p.chunks + c) * dim + d], expf(stats[c].x - largest), sum);
    out[t * stride + h * dim + d] = sum * inverse;
  }
}

__global__ void count_positions(const DeviceRow* rows, int64_t n, int32_t* visible) {
  begin_kernel();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t < n) visible[t] = rows[t].position + 1;
}

// Bytes: 32 keys and values of a KV head, for up to eight query heads. Operations: 4 * 32 * dim for each head.
// A warp scores a position at a time, lanes over the columns; then threads sum columns over the positions.
constexpr int kHeads = 8;
constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    attend(const float* q, int64_t q_stride, const DeviceRow* rows, BufferPlace k, BufferPlace v, int q_heads,
           int kv_heads, int dim, float scale, Partials p) {
  begin_kernel();
  extern __shared__ float shared[];
  const int t = blockIdx.z, chunk = blockIdx.x;
  const DeviceRow row = rows[t];
  const int begin = chunk * kChunk, n = min(kChunk, row.position + 1 - begin);
  if (n <= 0) return;
  const int per_kv = q_heads / kv_heads, sets = (per_kv + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / sets, first = kv_head * per_kv + blockIdx.y % sets * kHeads;
  const int heads = min(kHeads, kv_head * per_kv + per_kv - first);
  float* query = shared;                  // [heads][dim]
  float* weight = shared + kHeads * dim;  // [heads][kChunk]
  for (int i = threadIdx.x; i < heads * dim; i += kThreads) query[i] = q[t * q_stride + first * dim + i];
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t column = static_cast<int64_t>(kv_head) * dim;
  for (int j = warp; j < n; j += kThreads / 32) {
    const char* key = append_row(row, k, begin + j);
    float dot[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) dot[h] = 0.0f;
    for (int d = lane; d < dim; d += 32) {
      const float x = load_element(key, column + d, k.type);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
        if (h < heads) dot[h] = fmaf(x, query[h * dim + d], dot[h]);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < heads) {
        const float s = warp_sum(dot[h]) * scale;
        if (lane == 0) weight[h * kChunk + j] = s;
      }
  }
  __syncthreads();
  for (int h = warp; h < heads; h += kThreads / 32) {
    const float a = lane < n ? weight[h * kChunk + lane] : -INFINITY;
    const float largest = warp_max(a);
    const float e = lane < n ? expf(a - largest) : 0.0f;
    weight[h * kChunk + lane] = e;
    const float total = warp_sum(e);
    if (lane == 0) p.stats[(static_cast<int64_t>(t) * q_heads + first + h) * p.chunks + chunk] = {largest, total};
  }
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += kThreads) {
    float sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] = 0.0f;
    for (int j = 0; j < n; ++j) {
      const float x = load_element(append_row(row, v, begin + j), column + d, v.type);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
        if (h < heads) sum[h] = fmaf(weight[h * kChunk + j], x, sum[h]);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < heads) p.sums[((static_cast<int64_t>(t) * q_heads + first + h) * p.chunks + chunk) * dim + d] = sum[h];
  }
}

}  // namespace

void combine(const Device& device, const Partials& p, const int32_t* visible, const float* sinks, int64_t T,
             int64_t heads, int64_t dim, Tensor out) {
  launch_kernel(device.stream(), dim3(static_cast<unsigned>(heads), static_cast<unsigned>(T)),
                static_cast<unsigned>(std::min<int64_t>((dim + 31) / 32 * 32, 512)), 0, combine_kernel, p, visible,
                sinks, heads, dim, out.data, out.stride);
  DS4_CUDA(cudaGetLastError());
}

void paged_attention(const Device& device, Tensor q, const DeviceRow* rows, int64_t longest, const BufferPlace& k,
                     const BufferPlace& v, int64_t q_heads, int64_t kv_heads, int64_t head_dim, float scale,
                     Workspace& workspace, Tensor out) {
  const int64_t chunks = (longest + kChunk - 1) / kChunk, per_kv = q_heads / kv_heads;
  const int64_t sets = (per_kv + kHeads - 1) / kHeads;
  // As many rows at once as a quarter of a gigabyte of partial sums holds.
  const int64_t row_floats = q_heads * chunks * (head_dim + 2);
  const int64_t at_once = std::clamp<int64_t>((int64_t{1} << 26) / row_floats, 1, 65535);
  const size_t shared = static_cast<size_t>(kHeads * (head_dim + kChunk)) * sizeof(float);
  if (shared > 48 * 1024)
    DS4_CUDA(cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    Partials p;
    p.chunks = chunks;
    auto* memory = workspace.get<float>(Workspace::Partials, n * row_floats);
    p.stats = reinterpret_cast<float2*>(memory);
    p.sums = memory + 2 * n * q_heads * chunks;
    auto* visible = workspace.get<int32_t>(Workspace::Plan, n);
    launch_kernel(device.stream(), static_cast<unsigned>((n + 127) / 128), 128, 0, count_positions, rows + first, n,
                  visible);
    launch_kernel(device.stream(),
                  dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(kv_heads * sets), static_cast<unsigned>(n)),
                  kThreads, shared, attend, q.data + first * q.stride, q.stride, rows + first, k, v,
                  static_cast<int>(q_heads), static_cast<int>(kv_heads), static_cast<int>(head_dim), scale, p);
    DS4_CUDA(cudaGetLastError());
    combine(device, p, visible, nullptr, n, q_heads, head_dim, out.rows(first, n));
  }
}

}  // namespace ds4::cuda
