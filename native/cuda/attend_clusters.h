// Latent attention of heads of 512 columns by clusters of blocks of threads, each of which has some of the columns:
// attend_half for many rows, attend_part for few.
#pragma once

#include "cuda/attention_rows.h"

namespace ds4::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define DS4_PARTS __cluster_dims__(kParts, 1, 1)
#define DS4_HALVES __cluster_dims__(2, 1, 1)
#else
#define DS4_PARTS  // the kernels are empty there, and not launched
#define DS4_HALVES
#endif

// Rows whose low parts are zeros but in the last kLowColumns of 512 columns: a cluster of two blocks of threads has all
// chunks of a row (kWhole) or one of them for 32 heads, each half of the columns, and so little shared memory that two
// blocks fit a multiprocessor: one computes while the other waits for rows. Bytes: 64 rows of 256 floats a chunk, from
// the cache; operations 4 * 64 * 256 a head. Order of all sums as in attend_latent.
constexpr int kHalfHeads = 2 * kHeads;
constexpr int kHalfColumns = kMostColumns / 2;
constexpr int kLowColumns = 64;

// Threads of a block: chunks side by side have twice the warps, each half of the way through a chunk.
template <bool kWhole>
constexpr int kHalfThreads = kWhole ? 256 : 512;

struct HalfMemory {
  uint8_t query[2][kHalfHeads * kHalfColumns * 2];  // high parts, low parts
  union {
    struct {
      uint8_t rows[kRows * kHalfColumns * 2];
      uint8_t low_rows[kRows * kLowColumns * 2];  // of the second half's last columns
    };
    float result[kHalfHeads][kHalfColumns + 8];  // eight heads fall into different banks
  };
  float score[kHalfHeads][kRows];  // of one part, then of both
  union {
    float second[kHalfHeads][kRows];  // of the other part
    uint8_t weight[2][kHalfHeads * kRows * 2];
  };
  float other[2][kHalfHeads][kRows];  // of the other half; chunks take turns
};

template <bool kWhole>
__global__ void DS4_HALVES __launch_bounds__(kHalfThreads<kWhole>, 2)
    attend_half(const float* q, int64_t q_stride, HeadNorm norm, const DeviceRow* rows, RowSource source,
                const float* sinks, int heads, float scale, LatentParts p, Turn turn, float* out, int64_t out_stride,
                Activations codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kWarps = kHalfThreads<kWhole> / 32, kSpan = kHalfColumns / kWarps;
  extern __shared__ __align__(128) uint8_t half_memory[];
  HalfMemory& m = *reinterpret_cast<HalfMemory*>(half_memory);
  __shared__ Softmax running[kHalfHeads];
  __shared__ float factor[2][kHalfHeads];
  __shared__ float squares[kParts][kHalfHeads];
  __shared__ uint64_t arrivals[3];  // of chunks' scores, which take turns; of squares
  const uint32_t arrival = shared_address(arrivals);
  // Rows with the longest lists first; of chunks the last, which are not whole, behind the others.
  const int groups = (heads + kHalfHeads - 1) / kHalfHeads, half = static_cast<int>(blockIdx.x),
            head0 = static_cast<int>(blockIdx.y) % groups * kHalfHeads, n_heads = min(kHalfHeads, heads - head0),
            t = static_cast<int>(kWhole ? gridDim.z - 1 - blockIdx.z : blockIdx.y / groups),
            first_chunk = kWhole ? 0 : static_cast<int>(blockIdx.z);
  const RowSource::Place row = source.place(rows[t]);
  const int total = source.list.total(row.position);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) init_barrier(arrival + 8 * i);
    fence_barriers();
  }
  begin_kernel();
  if (!kWhole && first_chunk * kRows >= total) return;
  __syncthreads();
  cluster_started();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const SplitRows query{{shared_address(m.query[0]), kHalfColumns}, {shared_address(m.query[1]), kHalfColumns}};
  const HalfRows latent{shared_address(m.rows), kHalfColumns}, latent_low{shared_address(m.low_rows), kLowColumns},
      weight_high{shared_address(m.weight[0]), kRows}, weight_low{shared_address(m.weight[1]), kRows};
  const uint32_t peer_other = address_in(shared_address(m.other), half ^ 1),
                 peer_arrival = address_in(arrival, half ^ 1);
  // A lane finds one of its warp's rows of a chunk, while the chunk before is multiplied.
  constexpr int kEach = kRows / kWarps, kAhead = 4;  // on their way at a time
  static_assert(kWhole || kEach == kAhead);
  const int own_row = warp + lane % kEach * kWarps;
  const float* own = source.entry(row, t, min(first_chunk * kRows + own_row, total - 1)) + half * kHalfColumns;
  float4 ahead[kAhead][2];
  const auto load_rows = [&](int first, int n) {
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      const auto at =
          reinterpret_cast<const float4*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<uint64_t>(own), first + r));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ahead[r][i] = warp + (first + r) * kWarps < n ? __ldcg(at + i * 32 + lane) : make_float4(0, 0, 0, 0);
    }
  };
  const auto store_rows = [&](int first) {
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      const int of = warp + (first + r) * kWarps;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t to = latent.at(of, (i * 32 + lane) / 2) + lane % 2 * 8;
        if (i == 1 && lane >= 16 && half == 1)
          SplitRows{latent, latent_low}.store(to, latent_low.at(of, (lane - 16) / 2) + lane % 2 * 8, ahead[r][i]);
        else
          store_halves(to, ahead[r][i]);
      }
    }
  };
  {
    constexpr int kEach = kHalfHeads / kWarps;  // heads of a warp
    float4 v[kEach][2];
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = warp + r * kWarps;
        v[r][i] = make_float4(0, 0, 0, 0);
        if (h < n_heads)
          v[r][i] =
              __ldcg(reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0 + h) * kMostColumns +
                                                     half * kHalfColumns) +
                     i * 32 + lane);
      }
    // Rows come while the heads' norms do, where they are few.
    if constexpr (!kWhole) load_rows(0, total - first_chunk * kRows);
    wait_cluster();
    if (norm.turn.table) {
      if (threadIdx.x == 0) expect_bytes(arrival + 16, static_cast<int>(sizeof(squares)));
#pragma unroll
      for (int r = 0; r < kEach; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = norm.squares(v[r][i]);
          if (lane < 2)
            store_in(address_in(shared_address(&squares[2 * half + i][warp + r * kWarps]), lane), sum,
                     address_in(arrival + 16, lane));
        }
    }
    if constexpr (!kWhole) store_rows(0);
    if (norm.turn.table) {
      wait_for(arrival + 16, 0);
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const int h = warp + r * kWarps;
        const float by = norm.factor(squares[0][h], squares[1][h], squares[2][h], squares[3][h]);
#pragma unroll
        for (int i = 0; i < 2; ++i) v[r][i] = norm.finish(v[r][i], by, t, half * kHalfColumns + (i * 32 + lane) * 4);
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) query.store(warp + r * kWarps, i * 32 + lane, v[r][i]);
  }
  if (kWhole && threadIdx.x < kHalfHeads)
    running[threadIdx.x] = start_of(sinks, head0 + min(static_cast<int>(threadIdx.x), n_heads - 1));
  float all[2][kSpan / 8][4];
#pragma unroll
  for (int i = 0; i < kSpan; ++i) all[i / (kSpan / 2)][i / 4 % (kSpan / 8)][i % 4] = 0.0f;
  const int end = kWhole ? (total + kRows - 1) / kRows : first_chunk + 1;
  for (int chunk = first_chunk; chunk < end; ++chunk) {
    const int begin = chunk * kRows, n = min(kRows, total - begin), filled = (n + 15) / 16 * 16;
    const int turns = chunk - first_chunk;
    if constexpr (kWhole)
#pragma unroll
      for (int first = 0; first < kEach; first += kAhead) {
        load_rows(first, n);
        store_rows(first);
      }
    if (chunk + 1 < end) own = source.entry(row, t, min(begin + kRows + own_row, total - 1)) + half * kHalfColumns;
    __syncthreads();
    {
      // Scores: a warp has a quarter of the columns for 16 heads and kSpan rows.
      const int part = warp / (kWarps / 2), tile = warp / (kWarps / 4) % 2, first = warp % (kWarps / 4) * kSpan;
      float sum[kSpan / 8][4];
#pragma unroll
      for (int i = 0; i < kSpan / 2; ++i) sum[i / 4][i % 4] = 0.0f;
      if (first < n) {
        const uint32_t a_high = query.high.at(tile * kHeads + lane % 16, lane % 8),
                       b_high = latent.at(first + lane % 8 + lane / 16 * 8, lane % 8),
                       to_a_low = query.low.address - query.high.address;
        constexpr uint32_t kRows16 = 16 * kHalfColumns * 2;
#pragma unroll
        for (int step = 0; step < kHalfColumns / 32; ++step) {
          const int piece = part * (kHalfColumns / 16) + 2 * step;
          const uint32_t a_at = a_high + static_cast<uint32_t>((piece + lane / 16 ^ lane % 8) * 16),
                         b_at = b_high + static_cast<uint32_t>((piece + lane / 8 % 2 ^ lane % 8) * 16);
          uint32_t up[4], down[4], high[kSpan / 16][4];
          load_matrices(down, a_at + to_a_low);
          load_matrices(up, a_at);
#pragma unroll
          for (int i = 0; i < kSpan / 16; ++i) load_matrices(high[i], b_at + i * kRows16);
#pragma unroll
          for (int i = 0; i < kSpan / 8; ++i)
            multiply_halves(sum[i], down, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
          if (step >= 4 && half == 1 && part == 1)
#pragma unroll
            for (int i = 0; i < kSpan / 16; ++i) {
              load_matrices(down,
                            latent_low.at(first + 16 * i + lane % 8 + lane / 16 * 8, 2 * (step - 4) + lane / 8 % 2));
              multiply_halves(sum[2 * i], up, down[0], down[1]);
              multiply_halves(sum[2 * i + 1], up, down[2], down[3]);
            }
#pragma unroll
          for (int i = 0; i < kSpan / 8; ++i)
            multiply_halves(sum[i], up, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
        }
      }
      auto& to = part ? m.second : m.score;
#pragma unroll
      for (int i = 0; i < kSpan / 8; ++i) {
        const int at = (first + 8 * i ^ 8 * g) + 2 * c;
        *reinterpret_cast<float2*>(&to[tile * kHeads + g][at]) = make_float2(sum[i][0], sum[i][1]);
        *reinterpret_cast<float2*>(&to[tile * kHeads + g + 8][at]) = make_float2(sum[i][2], sum[i][3]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHalfHeads * kRows / 4 / kHalfThreads<kWhole>; ++i) {
      const int at = i * kHalfThreads<kWhole> + static_cast<int>(threadIdx.x);
      float4& mine = reinterpret_cast<float4*>(&m.score[0][0])[at];
      const float4 a = mine, b = reinterpret_cast<const float4*>(&m.second[0][0])[at];
      mine = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      store_in(peer_other + static_cast<uint32_t>(turns % 2 * static_cast<int>(sizeof(m.other[0])) + at * 16), mine,
               peer_arrival + turns % 2 * 8);
    }
    if (threadIdx.x == 0) expect_bytes(arrival + turns % 2 * 8, static_cast<int>(sizeof(m.other[0])));
    __syncthreads();
    wait_for(arrival + turns % 2 * 8, static_cast<uint32_t>(turns / 2 % 2));
#pragma unroll
    for (int i = 0; i < kHalfHeads / kWarps; ++i) {
      const int h = i * kWarps + warp;
      float score[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = lane + 32 * k ^ h % 8 * 8;
        score[k] = m.score[h][at] + m.other[turns % 2][h][at];
      }
      const Softmax found = weigh_head(weight_high, weight_low, h, n, score, scale);
      if (lane == 0) {
        if constexpr (kWhole)
          join(running[h], found, factor[0][h], factor[1][h]);
        else if (half == 0 && h < n_heads)
          p.stats[(static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk] = found;
      }
    }
    __syncthreads();
    {
      // Weighted sums: a warp has kSpan columns of all heads.
      constexpr int kLowWarps = kLowColumns / kSpan;
      const bool both = half == 1 && warp >= kWarps - kLowWarps;
      float sum[2][kSpan / 8][4];
#pragma unroll
      for (int i = 0; i < kSpan; ++i) sum[i / (kSpan / 2)][i / 4 % (kSpan / 8)][i % 4] = 0.0f;
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step) {
        if (step * 16 >= filled) break;
        uint32_t high[kSpan / 16][4], rest[kSpan / 16][4];
#pragma unroll
        for (int i = 0; i < kSpan / 16; ++i) {
          load_turned(high[i], latent.at(step * 16 + lane % 16, warp * (kSpan / 8) + 2 * i + lane / 16));
          if (both)
            load_turned(rest[i], latent_low.at(step * 16 + lane % 16,
                                               (warp - (kWarps - kLowWarps)) * (kSpan / 8) + 2 * i + lane / 16));
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          uint32_t up[4], down[4];
          load_matrices(down, weight_low.at(tile * kHeads + lane % 16, 2 * step + lane / 16));
          load_matrices(up, weight_high.at(tile * kHeads + lane % 16, 2 * step + lane / 16));
          add_weighted(sum[tile], up, down, high, rest, both);
        }
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
        if constexpr (kWhole)
          join_tile(all[tile], sum[tile], factor[0] + tile * kHeads, factor[1] + tile * kHeads);
        else
          store_tile(sum[tile],
                     p.sums +
                         ((static_cast<int64_t>(t) * heads + head0 + tile * kHeads) * p.chunks + chunk) * kMostColumns +
                         half * kHalfColumns + warp * kSpan,
                     p.chunks * kMostColumns, n_heads - tile * kHeads, kSpan);
    }
    if constexpr (kWhole) __syncthreads();
  }
  if constexpr (kWhole) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int h = tile * kHeads + g + 8 * r;
        if (h >= n_heads) continue;
        const float inverse = 1.0f / running[h].total;
#pragma unroll
        for (int i = 0; i < kSpan / 8; ++i) {
          const int column = warp * kSpan + 8 * i + 2 * c;
          *reinterpret_cast<float2*>(&m.result[h][column]) =
              finish_two(all[tile][i][2 * r], all[tile][i][2 * r + 1], inverse, turn, t, half * kHalfColumns + column,
                         kMostColumns);
        }
      }
    __syncthreads();
    for (int i = warp; i < n_heads * 2; i += kWarps) {
      const float4 v = *reinterpret_cast<const float4*>(&m.result[i / 2][i % 2 * kTileCols + 4 * lane]);
      const int64_t column =
          static_cast<int64_t>(head0 + i / 2) * kMostColumns + half * kHalfColumns + i % 2 * kTileCols;
      *reinterpret_cast<float4*>(out + t * out_stride + column + 4 * lane) = v;
      if (codes.q) store_codes({v.x, v.y, v.z, v.w}, t, column / kTileCols, codes);
    }
  }
#endif
}

// Few rows of heads of 512 columns: a cluster of four blocks of threads has a chunk for sixteen heads, each a quarter
// of the columns; scores are exchanged, each block has all of them and computes the probabilities for itself. The last
// of a row's chunks to end joins them. Bytes: 64 rows of 128 floats and sixteen heads' likewise, from the cache;
// operations 4 * 64 * 128 a head. What counts is the longest way through it: a warp has one head, four rows, eight
// columns, and little code. Order of all sums as in attend_latent.
constexpr int kPartThreads = 512;
constexpr int kPartWarps = kPartThreads / 32;
constexpr int kPartColumns = kMostColumns / kParts;
static_assert(kPartWarps == kHeads && kPartWarps * 8 == kPartColumns);

struct PartMemory {
  uint8_t query[2][kHeads * kPartColumns * 2];  // high parts, low parts
  uint8_t rows[2][kRows * kPartColumns * 2];
  float score[kParts][kHeads][kRows];
  uint8_t weight[2][kHeads * kRows * 2];
};

__global__ void DS4_PARTS __launch_bounds__(kPartThreads, 2)
    attend_part(const float* q, int64_t q_stride, HeadNorm norm, const DeviceRow* rows, RowSource source,
                const float* sinks, int heads, float scale, LatentParts p, int* arrived, Turn turn, float* out,
                int64_t out_stride, Activations codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t part_memory[];
  PartMemory& m = *reinterpret_cast<PartMemory*>(part_memory);
  __shared__ unsigned low_columns[kPartWarps];  // bit c: low parts of rows in columns 32 c .. 32 c + 31 of the part
  __shared__ float squares[kParts][kHeads];
  __shared__ int turn_of;
  __shared__ uint64_t arrivals[2];  // of scores, of squares
  const uint32_t arrival = shared_address(arrivals);
  const int part = static_cast<int>(blockIdx.x % kParts), head0 = static_cast<int>(blockIdx.x / kParts) * kHeads,
            chunk = static_cast<int>(blockIdx.y), t = static_cast<int>(blockIdx.z),
            n_heads = min(kHeads, heads - head0);
  const RowSource::Place row = source.place(rows[t]);
  const int total = source.list.total(row.position), begin = chunk * kRows;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) init_barrier(arrival + 8 * i);
    fence_barriers();
    expect_bytes(arrival, static_cast<int>(sizeof(m.score)));
    expect_bytes(arrival + 8, static_cast<int>(sizeof(squares)));
  }
  begin_kernel();
  if (begin >= total) return;
  __syncthreads();
  cluster_started();
  const int n = min(kRows, total - begin), filled = (n + 15) / 16 * 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, h = head0 + warp;
  const bool has_head = warp < n_heads;
  const SplitRows query{{shared_address(m.query[0]), kPartColumns}, {shared_address(m.query[1]), kPartColumns}},
      latent{{shared_address(m.rows[0]), kPartColumns}, {shared_address(m.rows[1]), kPartColumns}};
  const HalfRows weight_high{shared_address(m.weight[0]), kRows}, weight_low{shared_address(m.weight[1]), kRows};
  float4 w = make_float4(0, 0, 0, 0);
  if (has_head)
    w = __ldcg(reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(h) * kMostColumns +
                                               part * kPartColumns) +
               lane);
  constexpr int kEach = kRows / kPartWarps;
  // A lane finds one of its warp's rows.
  const float* own = source.entry(row, t, begin + min(warp + lane % kEach * kPartWarps, n - 1)) + part * kPartColumns;
  float4 v[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const auto at = reinterpret_cast<const float4*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<uint64_t>(own), r));
    v[r] = warp + r * kPartWarps < n ? __ldcg(at + lane) : make_float4(0, 0, 0, 0);
  }
  wait_cluster();
  if (norm.turn.table) {
    const float sum = norm.squares(w);
    if (lane < kParts)
      store_in(address_in(shared_address(&squares[part][warp]), lane), sum, address_in(arrival + 8, lane));
    wait_for(arrival + 8, 0);
    w = norm.finish(w, norm.factor(squares[0][warp], squares[1][warp], squares[2][warp], squares[3][warp]), t,
                    part * kPartColumns + 4 * lane);
  }
  query.store(warp, lane, w);
  unsigned low = 0;
#pragma unroll
  for (int r = 0; r < kEach; ++r) low |= latent.store(warp + r * kPartWarps, lane, v[r]) ? 1u << (lane / 8) : 0u;
  low = __reduce_or_sync(0xFFFFFFFFu, low);
  if (lane == 0) low_columns[warp] = low;
  __syncthreads();
  low = __reduce_or_sync(0xFFFFFFFFu, low_columns[lane % kPartWarps]);
  if (const int first = warp * 8; first < kRows) {
    // Scores of the part: a warp has eight rows.
    float sum[4] = {0, 0, 0, 0};
    if (first < n) {
      const uint32_t a_high = query.high.at(lane % 16, lane % 8), b_high = latent.high.at(first + lane % 8, lane % 8),
                     to_a_low = query.low.address - query.high.address,
                     to_b_low = latent.low.address - latent.high.address;
#pragma unroll
      for (int pair = 0; pair < kPartColumns / 32; ++pair) {
        const uint32_t b_at = b_high + static_cast<uint32_t>((4 * pair + lane / 8 ^ lane % 8) * 16);
        uint32_t high[4], rest[4];
        load_matrices(high, b_at);
        const bool both = low >> pair & 1u;
        if (both) load_matrices(rest, b_at + to_b_low);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t a_at = a_high + static_cast<uint32_t>((4 * pair + 2 * step + lane / 16 ^ lane % 8) * 16);
          uint32_t up[4], down[4];
          load_matrices(down, a_at + to_a_low);
          load_matrices(up, a_at);
          multiply_halves(sum, down, high[2 * step], high[2 * step + 1]);
          if (both) multiply_halves(sum, up, rest[2 * step], rest[2 * step + 1]);
          multiply_halves(sum, up, high[2 * step], high[2 * step + 1]);
        }
      }
    }
    const int at = (first ^ 8 * g) + 2 * c;
#pragma unroll
    for (int to = 0; to < kParts; ++to) {
      const uint32_t barrier = address_in(arrival, to);
      store_in(address_in(shared_address(&m.score[part][g][at]), to), make_float2(sum[0], sum[1]), barrier);
      store_in(address_in(shared_address(&m.score[part][g + 8][at]), to), make_float2(sum[2], sum[3]), barrier);
    }
  }
  wait_for(arrival, 0);
  // A chunk's sums and statistics; each part has its own of these.
  const int64_t of_heads = (static_cast<int64_t>(t) * heads + head0) * p.chunks;
  float* const sums = p.sums + of_heads * kMostColumns + part * kPartColumns;
  Softmax* const stats = p.stats + of_heads * kParts + part;
  {
    float score[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int at = lane + 32 * k ^ warp % 8 * 8;
      score[k] = (m.score[0][warp][at] + m.score[1][warp][at]) + (m.score[2][warp][at] + m.score[3][warp][at]);
    }
    const Softmax found = weigh_head(weight_high, weight_low, warp, n, score, scale);
    if (lane == 0 && has_head) stats[(warp * p.chunks + chunk) * kParts] = found;
  }
  __syncthreads();
  {
    // Weighted sums: a warp has eight columns, 32 rows at a time.
    const bool both = low >> (warp / 4) & 1u;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int pair = 0; pair < kRows / 32; ++pair) {
      if (pair * 32 >= filled) break;
      uint32_t high[4], rest[4];
      load_turned(high, latent.high.at(pair * 32 + lane, warp));
      if (both) load_turned(rest, latent.low.at(pair * 32 + lane, warp));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        if (pair * 32 + step * 16 >= filled) break;
        uint32_t up[4], down[4];
        load_matrices(down, weight_low.at(lane % 16, 4 * pair + 2 * step + lane / 16));
        load_matrices(up, weight_high.at(lane % 16, 4 * pair + 2 * step + lane / 16));
        multiply_halves(sum, down, high[2 * step], high[2 * step + 1]);
        if (both) multiply_halves(sum, up, rest[2 * step], rest[2 * step + 1]);
        multiply_halves(sum, up, high[2 * step], high[2 * step + 1]);
      }
    }
    store_tile<1>({{sum[0], sum[1], sum[2], sum[3]}}, sums + chunk * kMostColumns + warp * 8, p.chunks * kMostColumns,
                  n_heads, 8);
  }
  const int chunks = (total + kRows - 1) / kRows;
  const unsigned of_part = (blockIdx.z * (gridDim.x / kParts) + blockIdx.x / kParts) * kParts + part;
  if (!last_of(arrived + of_part, chunks, turn_of) || !has_head) return;
  Softmax all = start_of(sinks, h);
  float sum[4] = {0, 0, 0, 0};
  const float* from = sums + warp * p.chunks * kMostColumns + 4 * lane;
  const Softmax* stat = stats + warp * p.chunks * kParts;
#pragma unroll 4
  for (int of = 0; of < chunks; ++of) {
    const float2 s = __ldcg(reinterpret_cast<const float2*>(stat + of * kParts));
    const float4 chunk_sum = __ldcg(reinterpret_cast<const float4*>(from + of * kMostColumns));
    join_sums(all, {s.x, s.y}, chunk_sum, sum);
  }
  finish_head(all, sum, t, h, part * kPartColumns + 4 * lane, kMostColumns, turn, out, out_stride, codes);
#endif
}

}  // namespace
}  // namespace ds4::cuda
