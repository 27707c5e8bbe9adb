#include <algorithm>
#include <climits>

#include "cuda/device_math.h"
#include "cuda/latent_attention.h"
#include "cuda/matrix_math.h"

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

// A row's list is cut into chunks of 64. A chunk gives a maximum, a sum of exponentials and a weighted sum; these are
// joined in order, beginning with the sink, by the same arithmetic whether one block of threads has all chunks of a row
// or a kernel joins what several have left in memory.
constexpr int kRows = 64;
constexpr int kHeads = 16;
constexpr int kThreads = 512;
constexpr int kMostColumns = 512;  // sixteen warps of 32

struct Softmax {
  float largest, total;
};
// Joins a chunk; the weighted sums so far and the chunk's are to be multiplied by `before` and `added`.
__device__ __forceinline__ void join(Softmax& all, Softmax chunk, float& before, float& added) {
  const float largest = fmaxf(all.largest, chunk.largest);
  before = expf(all.largest - largest);
  added = expf(chunk.largest - largest);
  all = {largest, fmaf(all.total, before, chunk.total * added)};
}
__device__ __forceinline__ Softmax start_of(const float* sinks, int head) {
  return sinks ? Softmax{sinks[head], 1.0f} : Softmax{-INFINITY, 0.0f};
}

struct LatentParts {
  float* sums;     // [rows][heads][chunks][dim]
  Softmax* stats;  // [rows][heads][chunks]
  int64_t chunks;
};

// The rotation of the last columns of a head by the negative angle; `table` null: none.
struct Turn {
  const float* table;  // cos, then sin of the row's `pairs` angles
  int64_t stride;
  int pairs;

  // Four neighbouring columns from `column` on.
  __device__ __forceinline__ void back(float (&v)[4], int64_t t, int column, int dim) const {
    const int pair = (column - (dim - 2 * pairs)) / 2;
    if (!table || column < dim - 2 * pairs) return;
    const float *cosine = table + t * stride + pair, *sine = cosine + pairs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1], c = cosine[i], s = -sine[i];
      v[2 * i] = a * c - b * s;
      v[2 * i + 1] = a * s + b * c;
    }
  }
};

// Bytes: 64 rows of dim floats for 16 heads, through shared memory. Operations: 16 * 4 * 64 * dim,
// three times over on the matrix units. Scores: a warp has eight of the rows and half of the columns. Weighted sums: a
// warp has 32 columns. kWhole: all chunks of the row, into `out`; otherwise chunk blockIdx.x into `p`.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    attend_latent(const float* q, int64_t q_stride, const float* kv, int64_t kv_stride, const DeviceRow* rows,
                  int32_t first_row, VisibleRows list, BufferPlace ring, BufferPlace compressed, const int32_t* ids,
                  const int32_t* counts, int64_t ids_stride, const float* sinks, int heads, int dim, float scale,
                  LatentParts p, Turn turn, float* out, int64_t out_stride) {
  begin_kernel();
  extern __shared__ float4 shared4[];
  constexpr int kScorePitch = kRows + 4;
  __shared__ const float* entry[kRows];
  __shared__ float score[2][kHeads * kScorePitch];
  __shared__ Softmax running[kHeads];
  __shared__ float factor[2][kHeads];
  const int t = blockIdx.z, head0 = blockIdx.y * kHeads, n_heads = min(kHeads, heads - head0);
  const DeviceRow row = rows[t];
  const int total = list.total(row.position), quads = dim / 4;
  if (!kWhole && static_cast<int>(blockIdx.x) * kRows >= total) return;
  // [16][pitch] and [64][pitch]: lanes of a quarter warp fall into different banks.
  float* query = reinterpret_cast<float*>(shared4);
  const int pitch = (dim + 31) / 32 * 32 + 4;
  float* latent = query + kHeads * pitch;
  for (int i = threadIdx.x; i < kHeads * (pitch / 4); i += kThreads) {
    const int h = i / (pitch / 4), at = i % (pitch / 4);
    float4 v = make_float4(0, 0, 0, 0);
    if (h < n_heads && at < quads)
      v = reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0 + h) * dim)[at];
    shared4[i] = v;
  }
  if (kWhole && threadIdx.x < kHeads)
    running[threadIdx.x] = start_of(sinks, head0 + min(static_cast<int>(threadIdx.x), n_heads - 1));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int column0 = warp * 32, group = warp % 8, half = warp / 8, blocks = (dim + 31) / 32;
  const int from = half ? blocks / 2 * 32 : 0, until = half ? blocks * 32 : blocks / 2 * 32;
  float all[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) all[i / 4][i % 4] = 0.0f;
  const int end = kWhole ? (total + kRows - 1) / kRows : static_cast<int>(blockIdx.x) + 1;
  for (int chunk = kWhole ? 0 : static_cast<int>(blockIdx.x); chunk < end; ++chunk) {
    const int begin = chunk * kRows, n = min(kRows, total - begin);
    if (threadIdx.x < kRows) {
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
    // Every warp copies what it scores itself; rows and columns behind the last are zeros.
    for (int j = group * 8; j < min((n + 7) / 8 * 8, group * 8 + 8); ++j)
      for (int i = from / 4 + lane; i < until / 4; i += 32)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         static_cast<uint32_t>(__cvta_generic_to_shared(latent + j * pitch + 4 * i))),
                     "l"(entry[j] + (i < quads ? 4 * i : 0)), "r"(i < quads ? 16 : 0));
    asm volatile("cp.async.wait_all;");
    __syncwarp();
    if (group * 8 < n) {
      const float4* key = reinterpret_cast<const float4*>(latent + (group * 8 + g) * pitch + 8 * c);
      const float *q0 = query + g * pitch + 8 * c, *q1 = q0 + 8 * pitch;
      float acc[4] = {0, 0, 0, 0};
#pragma unroll 4
      for (int d = from; d < until; d += 32) {
        const float4 k0 = key[d / 4], k1 = key[d / 4 + 1];
        const float x[8] = {k0.x, k0.y, k0.z, k0.w, k1.x, k1.y, k1.z, k1.w};
        float w[2][8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float4* from = reinterpret_cast<const float4*>((r ? q1 : q0) + d);
          const float4 a = from[0], b = from[1];
          w[r][0] = a.x, w[r][1] = a.y, w[r][2] = a.z, w[r][3] = a.w;
          w[r][4] = b.x, w[r][5] = b.y, w[r][6] = b.z, w[r][7] = b.w;
        }
        add_columns<true>(acc, w, x);
      }
      float2* to = reinterpret_cast<float2*>(score[half] + g * kScorePitch + group * 8 + 2 * c);
      to[0] = make_float2(acc[0], acc[1]);
      to[8 * kScorePitch / 2] = make_float2(acc[2], acc[3]);
    }
    __syncthreads();
    // A warp turns the scores of a head into exponentials.
    {
      static_assert(kHeads == kThreads / 32);
      const int h = warp;
      float *s = score[0] + h * kScorePitch, *s1 = score[1] + h * kScorePitch;
      const float a = lane < n ? (s[lane] + s1[lane]) * scale : -INFINITY,
                  b = lane + 32 < n ? (s[lane + 32] + s1[lane + 32]) * scale : -INFINITY;
      const float largest = warp_max(fmaxf(a, b));
      const float ea = lane < n ? expf(a - largest) : 0.0f, eb = lane + 32 < n ? expf(b - largest) : 0.0f;
      s[lane] = ea, s[lane + 32] = eb;
      const float sum = warp_sum(ea + eb);
      if (lane == 0) {
        if constexpr (kWhole)
          join(running[h], {largest, sum}, factor[0][h], factor[1][h]);
        else if (h < n_heads)
          p.stats[(static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk] = {largest, sum};
      }
    }
    __syncthreads();
    if (column0 < dim) {
      // Column 4j + i of the warp's 32 is column j of the units' product i.
      float sum[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] = 0.0f;
#pragma unroll 2
      for (int first = 0; first < n; first += 8) {
        const float* s = score[0] + g * kScorePitch + first + c;
        const float a[4] = {s[0], s[8 * kScorePitch], s[4], s[8 * kScorePitch + 4]};
        float x[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float4 v = *reinterpret_cast<const float4*>(latent + (first + c + 4 * r) * pitch + column0 + 4 * g);
          x[r][0] = v.x, x[r][1] = v.y, x[r][2] = v.z, x[r][3] = v.w;
        }
        float up[4], down[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) up[i] = high_part(a[i]), down[i] = a[i] - up[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float h0 = high_part(x[0][i]), h1 = high_part(x[1][i]);
          multiply(sum[i], down, h0, h1);
          multiply(sum[i], up, x[0][i] - h0, x[1][i] - h1);
          multiply(sum[i], up, h0, h1);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int h = g + 8 * r;
        if constexpr (kWhole) {
          const float before = factor[0][h], added = factor[1][h];
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int k = 2 * r; k < 2 * r + 2; ++k) all[i][k] = fmaf(all[i][k], before, sum[i][k] * added);
        } else if (h < n_heads) {
          float* to = p.sums + ((static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk) * dim + column0;
#pragma unroll
          for (int k = 0; k < 2; ++k)
            if (column0 + 8 * c + 4 * k < dim)
              *reinterpret_cast<float4*>(to + 8 * c + 4 * k) =
                  make_float4(sum[0][2 * r + k], sum[1][2 * r + k], sum[2][2 * r + k], sum[3][2 * r + k]);
        }
      }
    }
    if (kWhole) __syncthreads();
  }
  if constexpr (kWhole) {
    if (column0 >= dim) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int h = g + 8 * r;
      if (h >= n_heads) continue;
      const float inverse = 1.0f / running[h].total;
      float* to = out + t * out_stride + static_cast<int64_t>(head0 + h) * dim + column0;
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (column0 + 8 * c + 4 * k < dim) {
          float v[4] = {all[0][2 * r + k] * inverse, all[1][2 * r + k] * inverse, all[2][2 * r + k] * inverse,
                        all[3][2 * r + k] * inverse};
          turn.back(v, t, column0 + 8 * c + 4 * k, dim);
          *reinterpret_cast<float4*>(to + 8 * c + 4 * k) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
  }
}

// Bytes: the chunks' sums once. One block of threads for a head of a row, four columns each thread; the result also
// rounded where `codes` has room.
__global__ void join_chunks(LatentParts p, const DeviceRow* rows, VisibleRows list, const float* sinks, int64_t heads,
                            int dim, Turn turn, float* out, int64_t stride, Activations codes) {
  begin_kernel();
  const int64_t t = blockIdx.y, h = blockIdx.x, of = (t * heads + h) * p.chunks;
  const int chunks = (list.total(rows[t].position) + kRows - 1) / kRows, d = 4 * static_cast<int>(threadIdx.x);
  if (d >= dim) return;
  Softmax all = start_of(sinks, static_cast<int>(h));
  float sum[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int c = 0; c < chunks; ++c) {
    float before, added;
    join(all, p.stats[of + c], before, added);
    const float4 v = *reinterpret_cast<const float4*>(p.sums + (of + c) * dim + d);
    sum[0] = fmaf(sum[0], before, v.x * added);
    sum[1] = fmaf(sum[1], before, v.y * added);
    sum[2] = fmaf(sum[2], before, v.z * added);
    sum[3] = fmaf(sum[3], before, v.w * added);
  }
  const float inverse = 1.0f / all.total;
#pragma unroll
  for (float& v : sum) v = v * inverse;
  turn.back(sum, t, d, dim);
  *reinterpret_cast<float4*>(out + t * stride + h * dim + d) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  if (codes.q) store_codes(sum, t, (h * dim + d) / kTileCols, codes);
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
                      const Selection* selection, const Tensor* table, Tensor out) {
  const int64_t dim = a.head_dim;
  require(q.dim == a.heads * dim && out.dim == q.dim && kv.dim == dim && q.n == kv.n && out.n == q.n &&
              static_cast<int64_t>(rows.size()) == q.n,
          "latent_attention shapes");
  if (dim % 8 != 0 || dim > kMostColumns || q.stride % 4 != 0 || kv.stride % 4 != 0 || out.stride % 4 != 0)
    throw Unsupported("latent attention with heads of " + std::to_string(dim) + " columns: a multiple of 8 up to " +
                      std::to_string(kMostColumns) + " is implemented");
  if (q.n == 0) return;
  const DeviceState& state = Context::state(rows.front());
  const DeviceRow* list = context.rows(rows);
  VisibleRows visible{static_cast<int32_t>(a.window), a.compressed ? static_cast<int32_t>(a.ratio) : 0,
                      selection ? static_cast<int32_t>(selection->capacity) : INT_MAX};
  const int64_t longest = visible.total(static_cast<int32_t>(Context::horizon(rows)));
  const int64_t groups = (a.heads + kHeads - 1) / kHeads;
  const float* sinks = a.sinks ? vector_of(*a.sinks, a.heads, "sinks shape") : nullptr;
  const BufferPlace ring = state.place(a.window_ring), compressed = a.compressed ? state.place(a.rows) : BufferPlace{};
  const size_t shared = static_cast<size_t>((kHeads + kRows) * ((dim + 31) / 32 * 32 + 4)) * sizeof(float);
  // Few rows: their chunks side by side.
  const bool whole = q.n * groups >= 3 * context.device.multiprocessors();
  LatentParts p{nullptr, nullptr, (longest + kRows - 1) / kRows};
  const int64_t row_floats = a.heads * p.chunks * (dim + 2);
  const int64_t at_once = whole ? 65535 : std::clamp<int64_t>((int64_t{1} << 27) / row_floats, 1, 65535);
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    const Turn turn{table ? table->data + first * table->stride : nullptr, table ? table->stride : 0,
                    table ? static_cast<int>(table->dim / 2) : 0};
    const auto launch = [&](auto kernel) {
      if (shared > 40 * 1024)
        DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
      const dim3 grid(whole ? 1u : static_cast<unsigned>(p.chunks), static_cast<unsigned>(groups),
                      static_cast<unsigned>(n));
      launch_kernel(context.device.stream(), grid, kThreads, shared, kernel, q.data + first * q.stride, q.stride,
                    kv.data, kv.stride, list + first, static_cast<int32_t>(first), visible, ring, compressed,
                    selection ? selection->ids + first * selection->capacity : nullptr,
                    selection ? selection->counts + first : nullptr, selection ? selection->capacity : 0, sinks,
                    static_cast<int>(a.heads), static_cast<int>(dim), a.scale, p, turn, out.data + first * out.stride,
                    out.stride);
    };
    if (whole) {
      launch(attend_latent<true>);
    } else {
      auto* memory = context.workspace.get<float>(Workspace::Partials, n * row_floats + 4);
      p.stats = reinterpret_cast<Softmax*>(memory);
      p.sums = memory + (2 * n * a.heads * p.chunks + 3) / 4 * 4;
      launch(attend_latent<false>);
      // Codes for what follows, when all rows are of this one launch.
      const bool rounded = table && n == q.n && dim % kTileCols == 0 && out.stride == out.dim;
      launch_kernel(context.device.stream(), dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(n)),
                    static_cast<unsigned>((dim / 4 + 31) / 32 * 32), 0, join_chunks, p, list + first, visible, sinks,
                    a.heads, static_cast<int>(dim), turn, out.data + first * out.stride, out.stride,
                    rounded ? context.keep_rounded(Context::OfHeads, out) : Activations{});
    }
    DS4_CUDA(cudaGetLastError());
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
