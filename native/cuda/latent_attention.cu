#include <algorithm>
#include <climits>

#include "cuda/attention.h"
#include "cuda/device_math.h"
#include "cuda/latent_attention.h"

namespace ds4::cuda {
namespace {

// Rows in the list of a token row: the window's, oldest first, then compressed rows.
struct VisibleRows {
  int32_t window;
  int32_t ratio;  // 0: no compressed rows
  int32_t most;   // compressed rows at most

  __host__ __device__ int32_t in_window(int32_t position) const {
    return position + 1 < window ? position + 1 : window;
  }
  __host__ __device__ int32_t compressed(int32_t position) const {
    if (ratio == 0) return 0;
    const int32_t all = (position + 1) / ratio;
    return all < most ? all : most;
  }
  __host__ __device__ int32_t total(int32_t position) const { return in_window(position) + compressed(position); }
};

__global__ void count_rows(const DeviceRow* rows, int64_t n, VisibleRows v, int32_t* visible) {
  begin_kernel();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (t < n) visible[t] = v.total(rows[t].position);
}

constexpr int kHeads = 8;
constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // latent rows that a warp scores together

// Bytes: 32 rows of dim floats, twice (the second time from a cache), for eight heads. Operations: 8 * 4 * 32 * dim.
// Warps score four rows at a time with lanes over the columns; then threads sum columns over the rows.
__global__ void __launch_bounds__(kThreads)
    attend_latent(const float* q, int64_t q_stride, const float* kv, int64_t kv_stride, const DeviceRow* rows,
                  int32_t first_row, VisibleRows list, BufferPlace ring, BufferPlace compressed, const int32_t* ids,
                  const int32_t* counts, int64_t ids_stride, int heads, int dim, float scale, Partials p) {
  begin_kernel();
  extern __shared__ float4 shared4[];
  __shared__ const float* entry[kChunk];
  __shared__ float weight[kChunk][kHeads];
  const int t = blockIdx.z, chunk = blockIdx.x, head0 = blockIdx.y * kHeads;
  const DeviceRow row = rows[t];
  const int begin = chunk * kChunk, n = min(kChunk, list.total(row.position) - begin);
  if (n <= 0) return;
  const int n_heads = min(kHeads, heads - head0), quads = dim / 4;
  const float4* q4 = reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0) * dim);
  for (int i = threadIdx.x; i < kHeads * quads; i += kThreads)
    shared4[i] = i < n_heads * quads ? q4[i] : make_float4(0, 0, 0, 0);
  if (threadIdx.x < kChunk) {
    const int j = min(begin + static_cast<int>(threadIdx.x), begin + n - 1), in_window = list.in_window(row.position);
    const float* at;
    if (j < in_window) {
      const int position = row.position + 1 - in_window + j;
      const int first_position = row.position - (first_row + t - row.first);
      at = position < first_position ? reinterpret_cast<const float*>(ring_row(row, ring, position))
                                     : kv + static_cast<int64_t>(row.first + position - first_position) * kv_stride;
    } else {
      const int i = j - in_window;
      const int id = counts && counts[t] >= 0 ? ids[t * ids_stride + i] : i;
      at = reinterpret_cast<const float*>(append_row(row, compressed, id));
    }
    entry[threadIdx.x] = at;
  }
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int j = warp * kAtOnce; j < n; j += kThreads / 32 * kAtOnce) {
    float dot[kAtOnce][kHeads];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) dot[r][h] = 0.0f;
    for (int d = lane; d < quads; d += 32) {
      float4 x[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) x[r] = reinterpret_cast<const float4*>(entry[min(j + r, n - 1)])[d];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float4 w = shared4[h * quads + d];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
          dot[r][h] = fmaf(x[r].w, w.w, fmaf(x[r].z, w.z, fmaf(x[r].y, w.y, fmaf(x[r].x, w.x, dot[r][h]))));
      }
    }
    static_assert(kAtOnce * kHeads == 32);
    float sums[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = dot[i / kHeads][i % kHeads];
    const float s = warp_sums(sums);
    if (j + lane / kHeads < n) weight[j + lane / kHeads][lane % kHeads] = s * scale;
  }
  __syncthreads();
  {
    // Warp h turns head h's scores into exponentials.
    const int h = warp;
    const float a = lane < n ? weight[lane][h] : -INFINITY, largest = warp_max(a);
    const float e = lane < n ? expf(a - largest) : 0.0f;
    weight[lane][h] = e;
    const float total = warp_sum(e);
    if (lane == 0 && h < n_heads)
      p.stats[(static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk] = {largest, total};
  }
  __syncthreads();
  for (int d = threadIdx.x; d < dim / 2; d += kThreads) {
    float2 sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] = make_float2(0, 0);
    for (int j = 0; j < n; ++j) {
      const float2 x = reinterpret_cast<const float2*>(entry[j])[d];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float w = weight[j][h];
        sum[h].x = fmaf(w, x.x, sum[h].x);
        sum[h].y = fmaf(w, x.y, sum[h].y);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < n_heads)
        reinterpret_cast<float2*>(p.sums +
                                  ((static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk) * dim)[d] = sum[h];
  }
}

// ---- indexer

// Bytes: the index rows once, q once for each `at_once` of them, from the cache. Operations: 2 * rows * heads * dim.
// Lanes are heads; a warp scores four rows together.
constexpr int kScoreThreads = 128;

__global__ void __launch_bounds__(kScoreThreads)
    score_rows(const float* q, int64_t q_stride, const float* weight, int64_t weight_stride, const DeviceRow* rows,
               BufferPlace index, int ratio, int heads, int dim, int k, int at_once, float* score,
               int64_t score_stride) {
  begin_kernel();
  extern __shared__ float4 shared4[];
  const int t = blockIdx.y;
  const DeviceRow row = rows[t];
  const int visible = (row.position + 1) / ratio, begin = blockIdx.x * at_once;
  if (visible <= k || begin >= visible) return;
  const int quads = dim / 4, pitch = quads + 1;  // one quad more: lanes of a column fall into different banks
  const float4* q4 = reinterpret_cast<const float4*>(q + t * q_stride);
  for (int i = threadIdx.x; i < heads * quads; i += kScoreThreads) shared4[i / quads * pitch + i % quads] = q4[i];
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int j = begin + 4 * warp; j < min(begin + at_once, visible); j += kScoreThreads / 32 * 4) {
    const float4* key[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      key[r] = reinterpret_cast<const float4*>(append_row(row, index, min(j + r, visible - 1)));
    float sum[4] = {0, 0, 0, 0};
    for (int h = lane; h < heads; h += 32) {
      float dot[4] = {0, 0, 0, 0};
      for (int d = 0; d < quads; ++d) {
        const float4 w = shared4[h * pitch + d];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float4 x = __ldg(key[r] + d);
          dot[r] = fmaf(x.w, w.w, fmaf(x.z, w.z, fmaf(x.y, w.y, fmaf(x.x, w.x, dot[r]))));
        }
      }
      const float scale = weight[t * weight_stride + h];
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[r] = fmaf(scale, fmaxf(dot[r], 0.0f), sum[r]);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float total = warp_sum(sum[r]);
      if (isnan(total)) total = -INFINITY;
      if (lane == 0 && j + r < visible) score[t * score_stride + j + r] = total;
    }
  }
}

// Orders as the float does, -0 before +0.
__device__ __forceinline__ uint32_t ordered(float f) {
  const uint32_t bits = __float_as_uint(f == 0.0f ? 0.0f : f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Exclusive prefix sum of a flag over the block of 1024; `total` gets the sum.
__device__ __forceinline__ int prefix_of(bool flag, int* shared, int& total) {
  const unsigned votes = __ballot_sync(0xFFFFFFFFu, flag);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  if (lane == 0) shared[warp] = __popc(votes);
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < 32; ++w) {
    if (w < warp) before += shared[w];
    total += shared[w];
  }
  return before + __popc(votes & ((1u << lane) - 1u));
}

// The k largest scores, ties to the lower id, ids ascending: a radix search for the k-th largest key, eight bits at a
// time, then one pass that keeps what is above it and the first of those equal to it.
__global__ void __launch_bounds__(1024) top_k(const float* score, int64_t score_stride, const DeviceRow* rows,
                                              int ratio, int k, int32_t* ids, int32_t* counts) {
  begin_kernel();
  __shared__ int histogram[256];
  __shared__ int votes[32];
  __shared__ uint32_t digit;
  __shared__ int above;
  const int t = blockIdx.x, visible = (rows[t].position + 1) / ratio;
  if (visible <= k) {
    if (threadIdx.x == 0) counts[t] = -1;
    return;
  }
  const float* s = score + t * score_stride;
  uint32_t prefix = 0, mask = 0;
  int need = k;  // of the keys that share the prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < visible; i += 1024) {
      const uint32_t key = ordered(s[i]);
      if ((key & mask) == prefix) atomicAdd(&histogram[key >> shift & 255u], 1);
    }
    __syncthreads();
    // Suffix sums; the digit is the one where they reach `need`.
    for (int step = 1; step < 256; step *= 2) {
      int add = 0;
      if (threadIdx.x + step < 256) add = histogram[threadIdx.x + step];
      __syncthreads();
      if (threadIdx.x < 256) histogram[threadIdx.x] += add;
      __syncthreads();
    }
    if (threadIdx.x < 256) {
      const int here = histogram[threadIdx.x], next = threadIdx.x < 255 ? histogram[threadIdx.x + 1] : 0;
      if (here >= need && next < need) {
        digit = threadIdx.x;
        above = next;
      }
    }
    __syncthreads();
    prefix |= digit << shift;
    mask |= 255u << shift;
    need -= above;
    __syncthreads();
  }
  int taken = 0, equal = 0;
  for (int first = 0; first < visible; first += 1024) {
    const int i = first + threadIdx.x;
    const uint32_t key = i < visible ? ordered(s[i]) : 0u;
    const bool same = i < visible && key == prefix;
    int total;
    const int rank = prefix_of(same, votes, total);
    const bool take = i < visible && (key > prefix || (same && equal + rank < need));
    equal += total;
    const int at = prefix_of(take, votes, total);
    if (take) ids[static_cast<int64_t>(t) * k + taken + at] = i;
    taken += total;
  }
  if (threadIdx.x == 0) counts[t] = k;
}

}  // namespace

void latent_attention(Context& context, Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                      const Selection* selection, Tensor out) {
  const int64_t dim = a.head_dim;
  require(q.dim == a.heads * dim && out.dim == q.dim && kv.dim == dim && q.n == kv.n && out.n == q.n &&
              static_cast<int64_t>(rows.size()) == q.n,
          "latent_attention shapes");
  if (dim % 4 != 0 || q.stride % 4 != 0 || kv.stride % 4 != 0)
    throw Unsupported("latent attention with heads of " + std::to_string(dim) + " columns, not a multiple of 4");
  if (q.n == 0) return;
  const DeviceState& state = Context::state(rows.front());
  const DeviceRow* list = context.rows(rows);
  VisibleRows visible{static_cast<int32_t>(a.window), a.compressed ? static_cast<int32_t>(a.ratio) : 0,
                      selection ? static_cast<int32_t>(selection->capacity) : INT_MAX};
  const int64_t longest = visible.total(static_cast<int32_t>(Context::horizon(rows)));
  const int64_t chunks = (longest + kChunk - 1) / kChunk;
  const int64_t row_floats = a.heads * chunks * (dim + 2);
  const int64_t at_once = std::clamp<int64_t>((int64_t{1} << 26) / row_floats, 1, 65535);
  const float* sinks = a.sinks ? vector_of(*a.sinks, a.heads, "sinks shape") : nullptr;
  const BufferPlace ring = state.place(a.window_ring), compressed = a.compressed ? state.place(a.rows) : BufferPlace{};
  const size_t shared = static_cast<size_t>(kHeads * dim) * sizeof(float);
  if (shared > 40 * 1024)
    DS4_CUDA(
        cudaFuncSetAttribute(attend_latent, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    auto* memory = context.workspace.get<float>(Workspace::Partials, n * row_floats);
    Partials p{memory + 2 * n * a.heads * chunks, reinterpret_cast<float2*>(memory), chunks};
    auto* totals = context.workspace.get<int32_t>(Workspace::Plan, n);
    launch_kernel(context.device.stream(), static_cast<unsigned>((n + 127) / 128), 128, 0, count_rows, list + first, n,
                  visible, totals);
    const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>((a.heads + kHeads - 1) / kHeads),
                    static_cast<unsigned>(n));
    launch_kernel(context.device.stream(), grid, kThreads, shared, attend_latent, q.data + first * q.stride, q.stride,
                  kv.data, kv.stride, list + first, static_cast<int32_t>(first), visible, ring, compressed,
                  selection ? selection->ids + first * selection->capacity : nullptr,
                  selection ? selection->counts + first : nullptr, selection ? selection->capacity : 0,
                  static_cast<int>(a.heads), static_cast<int>(dim), a.scale, p);
    DS4_CUDA(cudaGetLastError());
    combine(context.device, p, totals, sinks, n, a.heads, dim, out.rows(first, n));
  }
}

Selection select_rows(Context& context, Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows,
                      int64_t ratio, int64_t heads, int64_t k) {
  require(q.n == weight.n && weight.dim == heads && q.dim % heads == 0 && static_cast<int64_t>(rows.size()) == q.n,
          "select shapes");
  const int64_t dim = q.dim / heads;
  if (dim % 4 != 0 || q.stride % 4 != 0)
    throw Unsupported("an indexer of " + std::to_string(dim) + " columns, not a multiple of 4");
  Selection out{context.integers(q.n * k), context.integers(q.n), q.n, k};
  if (q.n == 0) return out;
  const DeviceState& state = Context::state(rows.front());
  const DeviceRow* list = context.rows(rows);
  const int64_t longest = std::max<int64_t>(1, (Context::horizon(rows) + 1) / ratio);
  const int64_t at_once = std::clamp<int64_t>((int64_t{1} << 26) / longest, 1, 65535);
  const size_t shared = static_cast<size_t>(heads * (dim + 4)) * sizeof(float);
  if (shared > 48 * 1024)
    DS4_CUDA(cudaFuncSetAttribute(score_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  const int together = q.n <= 16 ? 16 : 64;  // few rows: more blocks of threads
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    auto* score = context.workspace.get<float>(Workspace::Scores, n * longest);
    launch_kernel(context.device.stream(),
                  dim3(static_cast<unsigned>((longest + together - 1) / together), static_cast<unsigned>(n)),
                  kScoreThreads, shared, score_rows, q.data + first * q.stride, q.stride,
                  weight.data + first * weight.stride, weight.stride, list + first, state.place(index_rows),
                  static_cast<int>(ratio), static_cast<int>(heads), static_cast<int>(dim), static_cast<int>(k),
                  together, score, longest);
    launch_kernel(context.device.stream(), static_cast<unsigned>(n), 1024, 0, top_k, score, longest, list + first,
                  static_cast<int>(ratio), static_cast<int>(k), out.ids + first * k, out.counts + first);
    DS4_CUDA(cudaGetLastError());
  }
  return out;
}

}  // namespace ds4::cuda
