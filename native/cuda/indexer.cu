#include "cuda/indexer.h"

#include <algorithm>

#include "cuda/device_math.h"

namespace ds4::cuda {
namespace {

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

// Heads and rows of values with at most eight significant bits: exact as bfloat16, so that the matrix units multiply
// them. Bytes: the index rows once for `at_once` rows of the step, q once for each 128 of them, both from the cache.
// Operations: 2 * rows * heads * dim. A warp scores sixteen rows; heads come in eights, in order, a lane's two of each
// before the lanes'.
constexpr int kShortThreads = 256;
constexpr int kShortRows = kShortThreads / 2;
constexpr int kShortDim = 128;
constexpr int kMostShortHeads = 128;

__device__ __forceinline__ uint4 to_bfloats(float4 a, float4 b) {
  const __nv_bfloat162 v[4] = {__floats2bfloat162_rn(a.x, a.y), __floats2bfloat162_rn(a.z, a.w),
                               __floats2bfloat162_rn(b.x, b.y), __floats2bfloat162_rn(b.z, b.w)};
  return *reinterpret_cast<const uint4*>(v);
}
__device__ __forceinline__ void multiply_bfloats(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                 uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__global__ void __launch_bounds__(kShortThreads, 2)
    score_short_rows(const float* q, int64_t q_stride, const float* weight, int64_t weight_stride,
                     const DeviceRow* rows, BufferPlace index, int ratio, int heads, int k, int n, int at_once,
                     float* score, int64_t score_stride) {
  constexpr int kBlocks = kShortDim / 32;
  extern __shared__ uint4 query[];  // [heads / 8][blocks][32 lanes], as the units read them
  __shared__ float2 weights[kMostShortHeads / 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int begin = blockIdx.x * kShortRows, own = begin + warp * 16;
  int loaded = -1;  // the session whose rows the lanes have, by its first row of the step
  uint4 key[2][kBlocks];
  const int first = blockIdx.y * at_once, end = min(n, first + at_once);
  // The keys that row t's session has here: all, or those that this step has written.
  float4 raw[2][kBlocks][2];
  const auto load_keys = [&](int t, bool all) {
    const DeviceRow& row = rows[t];
    const int position = row.position, step_first = position - (t - row.first);
    // As many as the session's last row here sees.
    const int last = (position + min(end - 1, row.first + row.count - 1) - t + 1) / ratio - 1;
    char* const* const pages = row.pages[index.group];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto of = static_cast<uint32_t>(min(own + g + 8 * r, last));
      if (!all && static_cast<int>(of) < step_first / ratio) continue;
      const char* const at = pages[of / kPageRows] + index.offset + of % kPageRows * index.row_bytes;
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i)
        raw[r][i / 2][i % 2] = __ldcg(reinterpret_cast<const float4*>(at) + c * 2 + i / 2 * 8 + i % 2);
    }
  };
  const auto seen = [&](int t) {
    const int visible = (rows[t].position + 1) / ratio;
    return visible <= k || begin >= visible ? 0 : visible;
  };
  // What earlier steps have written comes while the kernels before run.
  if (seen(first) > 0) load_keys(first, true);
  begin_kernel();
  for (int t = first; t < end; ++t) {
    const int visible = seen(t);
    if (visible == 0) continue;
    const bool fresh = loaded != rows[t].first;
    if (fresh) {
      loaded = rows[t].first;
      load_keys(t, t != first);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads / 8 * kBlocks * 32; i += kShortThreads) {
      const int of = i % 32;
      const float4* from = reinterpret_cast<const float4*>(
          q + t * q_stride + (i / (kBlocks * 32) * 8 + of / 4) * kShortDim + i / 32 % kBlocks * 32 + of % 4 * 8);
      query[i] = to_bfloats(from[0], from[1]);
    }
    if (threadIdx.x < heads / 2)
      weights[threadIdx.x] = *reinterpret_cast<const float2*>(weight + t * weight_stride + 2 * threadIdx.x);
    if (fresh)
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) key[i % 2][i / 2] = to_bfloats(raw[i % 2][i / 2][0], raw[i % 2][i / 2][1]);
    __syncthreads();
    if (own >= visible) continue;
    float sum[2] = {0, 0};
    for (int eights = 0; eights < heads / 8; eights += 4) {
      float dot[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) dot[i / 4][i % 4] = 0.0f;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 b = query[(min(eights + i, heads / 8 - 1) * kBlocks + block) * 32 + lane];
          multiply_bfloats(dot[i], key[0][block].x, key[1][block].x, key[0][block].y, key[1][block].y, b.x, b.y);
          multiply_bfloats(dot[i], key[0][block].z, key[1][block].z, key[0][block].w, key[1][block].w, b.z, b.w);
        }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (eights + i >= heads / 8) break;
        const float2 w = weights[(eights + i) * 4 + c];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          sum[r] = fmaf(w.y, fmaxf(dot[i][2 * r + 1], 0.0f), fmaf(w.x, fmaxf(dot[i][2 * r], 0.0f), sum[r]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
      const int j = own + g + 8 * r;
      if (c == 0 && j < visible) score[t * score_stride + j] = isnan(sum[r]) ? -INFINITY : sum[r];
    }
  }
}

// Orders as the float does, -0 before +0; never 0.
__device__ __forceinline__ uint32_t ordered(float f) {
  const uint32_t bits = __float_as_uint(f == 0.0f ? 0.0f : f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kTopThreads = 512;
constexpr int kTopWarps = kTopThreads / 32;
constexpr int kHeld = 8;  // keys of a thread in registers

// The k-th largest of the keys, zeros are none: two bits at a time, the largest digit that k keys reach. Where just k
// keys reach what is found so far, what follows changes nothing: the key before it. `above`: how many are above the
// result. `counts` holds two words for each warp.
__device__ uint32_t kth_largest(const uint32_t (&key)[kHeld], int held, int k, uint32_t* counts, int& above) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Of the keys from `least` on, by three bounds `step` apart.
  const auto count = [&](uint32_t least, uint32_t step, int turn, int (&all)[3]) {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i < held)
#pragma unroll
        for (uint32_t d = 0; d < 3; ++d) own += key[i] >= least + d * step ? 1u << (10 * d) : 0u;
    own = __reduce_add_sync(0xFFFFFFFFu, own);
    if (lane == 0) counts[turn % 2 * kTopWarps + warp] = own;
    __syncthreads();
    own = lane < kTopWarps ? counts[turn % 2 * kTopWarps + lane] : 0u;
#pragma unroll
    for (int d = 0; d < 3; ++d) all[d] = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, own >> (10 * d) & 1023u));
  };
  uint32_t found = 0;
  int all[3];
  for (int shift = 30, turn = 0; shift >= 0; shift -= 2, ++turn) {
    const uint32_t step = 1u << shift;
    count(found + step, step, turn, all);
    const uint32_t digit = all[2] >= k ? 3 : all[1] >= k ? 2 : all[0] >= k ? 1 : 0;
    found += digit << shift;
    if (digit > 0 && all[digit - 1] == k) {
      above = k;
      return found - 1;
    }
  }
  count(found + 1, 0, 0, all);
  above = all[0];
  return found;
}

// The k largest scores, ties to the lower id, ids ascending. The k-th largest key by kth_largest where a thread's keys
// fit its registers, else by a radix search, eight bits at a time; then one pass that keeps what is above it and the
// first of those equal to it.
__global__ void __launch_bounds__(kTopThreads) top_k(const float* score, int64_t score_stride, const DeviceRow* rows,
                                                     int ratio, int k, int32_t* ids, int32_t* counts) {
  __shared__ int histogram[256];
  __shared__ uint32_t votes[2][kTopWarps];
  __shared__ uint32_t digit;
  __shared__ int beyond;
  const int t = blockIdx.x, visible = (rows[t].position + 1) / ratio;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  begin_kernel();
  if (visible <= k) {
    if (threadIdx.x == 0) counts[t] = -1;
    return;
  }
  const float* s = score + t * score_stride;
  const int held = (visible + kTopThreads - 1) / kTopThreads;
  uint32_t kth = 0, key[kHeld];
  int need = k;  // of the keys that are equal to the k-th
  if (held <= kHeld) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = i * kTopThreads + static_cast<int>(threadIdx.x);
      key[i] = i < held && at < visible ? ordered(s[at]) : 0u;
    }
    int above;
    kth = kth_largest(key, held, k, votes[0], above);
    need -= above;
  } else {
    uint32_t mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < visible; i += kTopThreads) {
        const uint32_t of = ordered(s[i]);
        if ((of & mask) == kth) atomicAdd(&histogram[of >> shift & 255u], 1);
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
          beyond = next;
        }
      }
      __syncthreads();
      kth |= digit << shift;
      mask |= 255u << shift;
      need -= beyond;
      __syncthreads();
    }
  }
  // Keys above the k-th and keys equal to it, before this one: two counts in a word.
  uint32_t passed = 0;
  const auto keep = [&](int turn, uint32_t of) {
    const unsigned more = __ballot_sync(0xFFFFFFFFu, of > kth), same = __ballot_sync(0xFFFFFFFFu, of == kth);
    if (lane == 0) votes[turn % 2][warp] = static_cast<uint32_t>(__popc(more) | __popc(same) << 16);
    __syncthreads();
    const uint32_t vote = lane < kTopWarps ? votes[turn % 2][lane] : 0u;
    const uint32_t before = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? vote : 0u);
    const unsigned lower = (1u << lane) - 1u;
    const int above = static_cast<int>((before + passed) & 0xFFFFu) + __popc(more & lower);
    const int equal = static_cast<int>((before + passed) >> 16) + __popc(same & lower);
    if (of > kth || (of == kth && equal < need))
      ids[static_cast<int64_t>(t) * k + above + min(equal, need)] = turn * kTopThreads + static_cast<int>(threadIdx.x);
    passed += __reduce_add_sync(0xFFFFFFFFu, vote);
  };
  __syncthreads();
  if (held <= kHeld) {
#pragma unroll
    for (int turn = 0; turn < kHeld; ++turn)
      if (turn < held) keep(turn, key[turn]);
  } else {
    for (int turn = 0; turn < held; ++turn) {
      const int i = turn * kTopThreads + static_cast<int>(threadIdx.x);
      keep(turn, i < visible ? ordered(s[i]) : 0u);
    }
  }
  if (threadIdx.x == 0) counts[t] = k;
}

}  // namespace

Selection select_rows(Context& context, Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows,
                      int64_t ratio, int64_t heads, int64_t k, bool short_values) {
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
  const bool on_units =
      short_values && dim == kShortDim && heads % 8 == 0 && heads <= kMostShortHeads && weight.stride % 2 == 0;
  const int64_t units_rows = q.n <= 16 ? 1 : 8;
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    auto* score = context.workspace.get<float>(Workspace::Scores, n * longest);
    if (on_units)
      launch_kernel(context.device.stream(),
                    dim3(static_cast<unsigned>((longest + kShortRows - 1) / kShortRows),
                         static_cast<unsigned>((n + units_rows - 1) / units_rows)),
                    kShortThreads, static_cast<size_t>(heads * kShortDim * 2), score_short_rows,
                    q.data + first * q.stride, q.stride, weight.data + first * weight.stride, weight.stride,
                    list + first, state.place(index_rows), static_cast<int>(ratio), static_cast<int>(heads),
                    static_cast<int>(k), static_cast<int>(n), static_cast<int>(units_rows), score, longest);
    else
      launch_kernel(context.device.stream(),
                    dim3(static_cast<unsigned>((longest + together - 1) / together), static_cast<unsigned>(n)),
                    kScoreThreads, shared, score_rows, q.data + first * q.stride, q.stride,
                    weight.data + first * weight.stride, weight.stride, list + first, state.place(index_rows),
                    static_cast<int>(ratio), static_cast<int>(heads), static_cast<int>(dim), static_cast<int>(k),
                    together, score, longest);
    launch_kernel(context.device.stream(), static_cast<unsigned>(n), kTopThreads, 0, top_k, score, longest,
                  list + first, static_cast<int>(ratio), static_cast<int>(k), out.ids + first * k, out.counts + first);
    DS4_CUDA(cudaGetLastError());
  }
  return out;
}

}  // namespace ds4::cuda
