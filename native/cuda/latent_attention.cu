#include <algorithm>
#include <climits>

#include "cuda/async_copies.h"
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

// A row's list is cut into chunks of 64. A chunk gives a maximum, a sum of exponentials and a weighted sum; these are
// joined in order, beginning with the sink, by the same arithmetic whether one block of threads has all chunks of a row
// or a kernel joins what several have left in memory.
constexpr int kRows = 64;
constexpr int kHeads = 16;  // of a tile of the matrix units
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostColumns = 512;  // sixteen warps of 32
constexpr int kParts = 4;          // of the columns, whose scores are added in order

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

  // Neighbouring columns from `column`, an even one, on.
  template <int N>
  __device__ __forceinline__ void back(float (&v)[N], int64_t t, int column, int dim) const {
    const int pair = (column - (dim - 2 * pairs)) / 2;
    if (!table || column < dim - 2 * pairs) return;
    const float *cosine = table + t * stride + pair, *sine = cosine + pairs;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1], c = cosine[i], s = -sine[i];
      v[2 * i] = a * c - b * s;
      v[2 * i + 1] = a * s + b * c;
    }
  }
};

// Rows of `pitch` halves in shared memory, a multiple of 64. The pieces of 16 bytes of a row change places so that the
// matrix units' loads of eight rows fall into different banks.
struct HalfRows {
  uint32_t address;
  int pitch;

  __device__ __forceinline__ uint32_t at(int row, int piece) const {
    return address + static_cast<uint32_t>(row * pitch * 2 + (piece ^ row % 8) * 16);
  }
};

// Four 8 x 8 matrices of halves: the addresses of eight rows each, from eight lanes.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_turned(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// f32 values as sums of two halves; each is kept in rows of its own.
struct SplitRows {
  HalfRows high, low;

  // Four values to quad `quad` of a row, or behind an address in the high parts; whether their low parts are not all
  // zero.
  __device__ __forceinline__ bool store(int row, int quad, float4 v) const {
    return store(high.at(row, quad / 2) + quad % 2 * 8, v);
  }
  __device__ __forceinline__ bool store(uint32_t at, float4 v) const {
    const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
    const float2 fa = __half22float2(a), fb = __half22float2(b);
    const __half2 c = __floats2half2_rn(v.x - fa.x, v.y - fa.y), d = __floats2half2_rn(v.z - fb.x, v.w - fb.y);
    const auto bits = [](__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); };
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(bits(a)), "r"(bits(b)) : "memory");
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at + (low.address - high.address)), "r"(bits(c)), "r"(bits(d))
                 : "memory");
    return ((bits(c) | bits(d)) & 0x7FFF7FFFu) != 0;
  }
};

__device__ __forceinline__ void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Shared memory: queries and rows as halves, then [heads][64 rows][parts] of scores, whose places a head's
// probabilities take.
template <int kTiles>
constexpr int64_t attend_bytes(int64_t padded) {
  return (kTiles * kHeads + kRows) * padded * 4 + kTiles * kHeads * kRows * kParts * 4;
}

// Bytes: 64 rows of dim floats for 16 kTiles heads, from the cache; operations 4 * 64 * dim a head. f32 values are sums
// of two halves, exact to 22 bits; products of two low parts are left out, and those with low parts of rows where these
// are zeros: most columns of key rows were rounded to FP8. Scores: a warp has a quarter of the columns, 16 of each 64,
// for 16 heads and 16 kTiles rows. Weighted sums: a warp has 32 columns of all heads. kWhole: all chunks of the row,
// into `out`; otherwise chunk blockIdx.x into `p`.
template <int kTiles, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    attend_latent(const float* q, int64_t q_stride, const float* kv, int64_t kv_stride, const DeviceRow* rows,
                  int32_t first_row, VisibleRows list, BufferPlace ring, BufferPlace compressed, const int32_t* ids,
                  const int32_t* counts, int64_t ids_stride, const float* sinks, int heads, int dim, float scale,
                  LatentParts p, Turn turn, float* out, int64_t out_stride, Activations codes) {
  begin_kernel();
  extern __shared__ __align__(128) uint8_t attend_memory[];
  constexpr int kAll = kTiles * kHeads;
  __shared__ const float* entry[kRows];
  __shared__ Softmax running[kAll];
  __shared__ float factor[2][kAll];
  __shared__ unsigned low_columns;  // bit c: low parts of rows in columns 32 c .. 32 c + 31
  const int t = blockIdx.z, head0 = blockIdx.y * kAll, n_heads = min(kAll, heads - head0);
  const DeviceRow row = rows[t];
  const int total = list.total(row.position), quads = dim / 4, padded = (dim + 63) / 64 * 64;
  if (!kWhole && static_cast<int>(blockIdx.x) * kRows >= total) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t base = shared_address(attend_memory);
  const auto after = [&](int count) { return static_cast<uint32_t>(count * padded * 2); };
  const SplitRows query{{base, padded}, {base + after(kAll), padded}},
      latent{{base + after(2 * kAll), padded}, {base + after(2 * kAll + kRows), padded}};
  float* const score = reinterpret_cast<float*>(attend_memory + after(2 * kAll + 2 * kRows));
  // Part `part` of head h's scores; a row's place among them, likewise so that eight heads fall into different banks.
  const auto scores = [&](int h, int part) { return score + (h * kParts + part) * kRows; };
  const HalfRows weight_high{shared_address(score), kRows * kParts * 2},
      weight_low{shared_address(score) + 2 * kRows, kRows * kParts * 2};
  for (int h = warp; h < kAll; h += kWarps)
    for (int i = lane; i < padded / 4; i += 32) {
      float4 v = make_float4(0, 0, 0, 0);
      if (h < n_heads && i < quads)
        v = reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0 + h) * dim)[i];
      query.store(h, i, v);
    }
  if (kWhole && threadIdx.x < kAll)
    running[threadIdx.x] = start_of(sinks, head0 + min(static_cast<int>(threadIdx.x), n_heads - 1));
  float all[kTiles][4][4];
#pragma unroll
  for (int i = 0; i < kTiles * 16; ++i) all[i / 16][i / 4 % 4][i % 4] = 0.0f;
  const int end = kWhole ? (total + kRows - 1) / kRows : static_cast<int>(blockIdx.x) + 1;
  for (int chunk = kWhole ? 0 : static_cast<int>(blockIdx.x); chunk < end; ++chunk) {
    const int begin = chunk * kRows, n = min(kRows, total - begin), filled = (n + 15) / 16 * 16;
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
    if (threadIdx.x == 0) low_columns = 0;
    __syncthreads();
    // Rows up to the next multiple of 16 and columns behind the last are zeros. A warp has four rows.
    unsigned low = 0;
    {
      constexpr int kEach = kRows / kWarps;
      float4 v[kEach][4];
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const int of = warp + r * kWarps;
        const float4* from = reinterpret_cast<const float4*>(entry[of]) + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[r][i] = make_float4(0, 0, 0, 0);
          if (of < n && i * 32 + lane < quads) v[r][i] = __ldcg(from + i * 32);
        }
      }
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const int of = warp + r * kWarps;
        if (of >= filled) break;
        const uint32_t to = latent.high.at(of, lane / 2) + lane % 2 * 8;  // the next piece of 32 quads: 256 bytes on
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (i * 32 + lane < padded / 4) low |= latent.store(to + i * 256, v[r][i]) ? 1u << (i * 4 + lane / 8) : 0u;
      }
    }
    low = __reduce_or_sync(0xFFFFFFFFu, low);
    if (lane == 0 && low) atomicOr(&low_columns, low);
    __syncthreads();
    low = low_columns;
    {
      const int part = warp / 4, steps = padded / 64, tile = kTiles == 1 ? 0 : warp % 4 / 2;
      constexpr int kGroup = kTiles == 1 ? 16 : 32;  // rows of a warp
      static_assert(kTiles <= 2);
      const int first = (kTiles == 1 ? warp % 4 : warp % 2) * kGroup;
      float sum[kGroup / 8][4];
#pragma unroll
      for (int i = 0; i < kGroup / 2; ++i) sum[i / 4][i % 4] = 0.0f;
      if (first < n) {
        const uint32_t a_high = query.high.at(tile * kHeads + lane % 16, 2 * part + lane / 16),
                       a_low = a_high + (query.low.address - query.high.address),
                       b_high = latent.high.at(first + lane % 8 + lane / 16 * 8, 2 * part + lane / 8 % 2),
                       b_low = b_high + (latent.low.address - latent.high.address);
        const uint32_t rows16 = static_cast<uint32_t>(32 * padded);
        const unsigned lows = low >> (part / 2);
#pragma unroll 2
        for (int step = 0; step < steps; ++step) {
          const uint32_t on = static_cast<uint32_t>(step * 128);
          uint32_t up[4], down[4], high[kGroup / 16][4];
          load_matrices(down, a_low + on);
          load_matrices(up, a_high + on);
#pragma unroll
          for (int i = 0; i < kGroup / 16; ++i) load_matrices(high[i], b_high + on + i * rows16);
#pragma unroll
          for (int i = 0; i < kGroup / 8; ++i)
            multiply_halves(sum[i], down, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
          if (lows >> (2 * step) & 1u) {
#pragma unroll
            for (int i = 0; i < kGroup / 16; ++i) {
              load_matrices(down, b_low + on + i * rows16);
              multiply_halves(sum[2 * i], up, down[0], down[1]);
              multiply_halves(sum[2 * i + 1], up, down[2], down[3]);
            }
          }
#pragma unroll
          for (int i = 0; i < kGroup / 8; ++i)
            multiply_halves(sum[i], up, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < kGroup / 8; ++i) {
        const int at = (first + 8 * i ^ 8 * g) + 2 * c;
        *reinterpret_cast<float2*>(scores(tile * kHeads + g, part) + at) = make_float2(sum[i][0], sum[i][1]);
        *reinterpret_cast<float2*>(scores(tile * kHeads + g + 8, part) + at) = make_float2(sum[i][2], sum[i][3]);
      }
    }
    __syncthreads();
    // A warp turns the scores of a head into exponentials.
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int h = i * kWarps + warp;
      float v[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int j = lane + 32 * k, at = j ^ h % 8 * 8;
        float sum = scores(h, 0)[at];
#pragma unroll
        for (int part = 1; part < kParts; ++part) sum = sum + scores(h, part)[at];
        v[k] = j < n ? sum * scale : -INFINITY;
      }
      const float largest = warp_max(fmaxf(v[0], v[1]));
#pragma unroll
      for (int k = 0; k < 2; ++k) v[k] = lane + 32 * k < n ? expf(v[k] - largest) : 0.0f;
      const float sum = warp_sum(v[0] + v[1]);
      __syncwarp();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int j = lane + 32 * k;
        const __half high = __float2half_rn(v[k]), rest = __float2half_rn(v[k] - __half2float(high));
        const uint32_t in = static_cast<uint32_t>(j % 8 * 2);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(weight_high.at(h, j / 8) + in), "h"(__half_as_ushort(high))
                     : "memory");
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(weight_low.at(h, j / 8) + in), "h"(__half_as_ushort(rest))
                     : "memory");
      }
      if (lane == 0) {
        if constexpr (kWhole)
          join(running[h], {largest, sum}, factor[0][h], factor[1][h]);
        else if (h < n_heads)
          p.stats[(static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk] = {largest, sum};
      }
    }
    __syncthreads();
    const int column0 = warp * 32;
    if (column0 < padded) {
      const bool both = low >> warp & 1u;
      float sum[kTiles][4][4];
#pragma unroll
      for (int i = 0; i < kTiles * 16; ++i) sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
      const uint32_t v_high = latent.high.at(lane % 16, column0 / 8 + lane / 16),
                     v_low = v_high + (latent.low.address - latent.high.address);
      const uint32_t a_high = weight_high.at(lane % 16, lane / 16);  // rows are whole 128 bytes: pieces change by bits
      constexpr uint32_t kToLow = 2 * kRows, kTileBytes = kHeads * kRows * kParts * 4;
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step) {
        if (step * 16 >= filled) break;
        const uint32_t on = static_cast<uint32_t>(step * 32 * padded);
        uint32_t high[2][4], rest[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_turned(high[i], (v_high ^ 32 * i) + on);
          if (both) load_turned(rest[i], (v_low ^ 32 * i) + on);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t up[4], down[4];
          load_matrices(down, (a_high ^ 32 * step) + tile * kTileBytes + kToLow);
          load_matrices(up, (a_high ^ 32 * step) + tile * kTileBytes);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            multiply_halves(sum[tile][i], down, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
          if (both)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              multiply_halves(sum[tile][i], up, rest[i / 2][i % 2 * 2], rest[i / 2][i % 2 * 2 + 1]);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            multiply_halves(sum[tile][i], up, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int h = tile * kHeads + g + 8 * r;
          if constexpr (kWhole) {
            const float before = factor[0][h], added = factor[1][h];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int k = 2 * r; k < 2 * r + 2; ++k)
                all[tile][i][k] = fmaf(all[tile][i][k], before, sum[tile][i][k] * added);
          } else if (h < n_heads) {
            float* to = p.sums + ((static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk) * dim + column0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              if (column0 + 8 * i < dim)
                *reinterpret_cast<float2*>(to + 8 * i + 2 * c) =
                    make_float2(sum[tile][i][2 * r], sum[tile][i][2 * r + 1]);
          }
        }
    }
    if (kWhole) __syncthreads();
  }
  if constexpr (kWhole) {
    // The rows' place takes what is to be rounded.
    float* const result = reinterpret_cast<float*>(attend_memory + after(2 * kAll));
    const int pitch = dim + 8;  // eight heads fall into different banks
    static_assert(kAll * (kMostColumns + 8) <= kRows * kMostColumns);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int h = tile * kHeads + g + 8 * r;
        if (h >= n_heads) continue;
        const float inverse = 1.0f / running[h].total;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = warp * 32 + 8 * i + 2 * c;
          if (column >= dim) continue;
          float v[2] = {all[tile][i][2 * r] * inverse, all[tile][i][2 * r + 1] * inverse};
          turn.back(v, t, column, dim);
          const float2 both = make_float2(v[0], v[1]);
          *reinterpret_cast<float2*>(out + t * out_stride + static_cast<int64_t>(head0 + h) * dim + column) = both;
          if (codes.q) *reinterpret_cast<float2*>(result + h * pitch + column) = both;
        }
      }
    if (!codes.q) return;
    __syncthreads();
    const int each = dim / kTileCols;
    for (int i = warp; i < n_heads * each; i += kWarps) {
      const float4 v = *reinterpret_cast<const float4*>(result + i / each * pitch + i % each * kTileCols + 4 * lane);
      store_codes({v.x, v.y, v.z, v.w}, t, static_cast<int64_t>(head0) * each + i, codes);
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
  const float* sinks = a.sinks ? vector_of(*a.sinks, a.heads, "sinks shape") : nullptr;
  const BufferPlace ring = state.place(a.window_ring), compressed = a.compressed ? state.place(a.rows) : BufferPlace{};
  // Few rows: their chunks side by side.
  const int64_t tiles = (a.heads + kHeads - 1) / kHeads;
  const bool whole = q.n * tiles >= 3 * context.device.multiprocessors();
  const int64_t padded = (dim + 63) / 64 * 64;
  LatentParts p{nullptr, nullptr, (longest + kRows - 1) / kRows};
  const int64_t row_floats = a.heads * p.chunks * (dim + 2);
  const int64_t at_once = whole ? 65535 : std::clamp<int64_t>((int64_t{1} << 27) / row_floats, 1, 65535);
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    const Turn turn{table ? table->data + first * table->stride : nullptr, table ? table->stride : 0,
                    table ? static_cast<int>(table->dim / 2) : 0};
    // Codes for what follows, when all rows are of this one launch.
    const bool rounded = table && n == q.n && dim % kTileCols == 0 && out.stride == out.dim;
    const Activations codes = rounded ? context.keep_rounded(Context::OfHeads, out) : Activations{};
    const auto launch = [&](auto kernel, int at_once, int64_t shared) {
      if (shared > 40 * 1024)
        DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
      const dim3 grid(whole ? 1u : static_cast<unsigned>(p.chunks),
                      static_cast<unsigned>((tiles + at_once - 1) / at_once), static_cast<unsigned>(n));
      launch_kernel(context.device.stream(), grid, kThreads, shared, kernel, q.data + first * q.stride, q.stride,
                    kv.data, kv.stride, list + first, static_cast<int32_t>(first), visible, ring, compressed,
                    selection ? selection->ids + first * selection->capacity : nullptr,
                    selection ? selection->counts + first : nullptr, selection ? selection->capacity : 0, sinks,
                    static_cast<int>(a.heads), static_cast<int>(dim), a.scale, p, turn, out.data + first * out.stride,
                    out.stride, whole ? codes : Activations{});
    };
    if (whole) {
      launch(attend_latent<2, true>, 2, attend_bytes<2>(padded));
    } else {
      auto* memory = context.workspace.get<float>(Workspace::Partials, n * row_floats + 4);
      p.stats = reinterpret_cast<Softmax*>(memory);
      p.sums = memory + (2 * n * a.heads * p.chunks + 3) / 4 * 4;
      launch(attend_latent<1, false>, 1, attend_bytes<1>(padded));
      launch_kernel(context.device.stream(), dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(n)),
                    static_cast<unsigned>((dim / 4 + 31) / 32 * 32), 0, join_chunks, p, list + first, visible, sinks,
                    a.heads, static_cast<int>(dim), turn, out.data + first * out.stride, out.stride, codes);
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
