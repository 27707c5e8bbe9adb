#include <algorithm>
#include <climits>

#include "cuda/async_copies.h"
#include "cuda/device_math.h"
#include "cuda/latent.h"
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
constexpr int kHeads = 16;  // of a tile of the matrix units
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostColumns = 512;  // sixteen warps of 32
constexpr int kParts = 4;          // of the columns, whose scores are added two by two

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

// Where the rows of a list stand.
struct RowSource {
  VisibleRows list;
  const float* kv;  // of this step
  int64_t kv_stride;
  int32_t first_row;  // of `kv`, the launch's row 0
  BufferPlace ring, compressed;
  const int32_t *ids, *counts;  // Selection, or null
  int64_t ids_stride;

  // Entry j of the list of row t of the launch.
  __device__ __forceinline__ const float* entry(const DeviceRow& row, int t, int j) const {
    const int in_window = list.in_window(row.position);
    if (j < in_window) {
      const int position = row.position + 1 - in_window + j;
      const int first_position = row.position - (first_row + t - row.first);
      return position < first_position ? reinterpret_cast<const float*>(ring_row(row, ring, position))
                                       : kv + static_cast<int64_t>(row.first + position - first_position) * kv_stride;
    }
    const int i = j - in_window;
    const int id = counts && counts[t] >= 0 ? ids[t * ids_stride + i] : i;
    return reinterpret_cast<const float*>(append_row(row, compressed, id));
  }
};

struct LatentParts {
  float* sums;     // [rows][heads][chunks][dim]
  Softmax* stats;  // [rows][heads][chunks]
  int64_t chunks;
};

// The rotation of the last columns of a head; `table` null: none.
struct Turn {
  const float* table;  // cos, then sin of the row's `pairs` angles
  int64_t stride;
  int pairs;

  // Neighbouring columns from `column`, an even one, on, by the angle or (kBack) its negative.
  template <bool kBack, int N>
  __device__ __forceinline__ void apply(float (&v)[N], int64_t t, int column, int dim) const {
    const int pair = (column - (dim - 2 * pairs)) / 2;
    if (!table || column < dim - 2 * pairs) return;
    const float *cosine = table + t * stride + pair, *sine = cosine + pairs;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1], c = cosine[i], s = kBack ? -sine[i] : sine[i];
      v[2 * i] = a * c - b * s;
      v[2 * i + 1] = a * s + b * c;
    }
  }
};

// What queries still lack: their norm and rotation, of heads of kMostColumns columns; `turn.table` null: nothing.
struct HeadNorm {
  Turn turn;
  float eps;

  // A lane's four columns of a quarter of a head; the quarter's sum of squares.
  __device__ __forceinline__ static float squares(float4 v) {
    return warp_sum(fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, v.x * v.x))));
  }
  __device__ __forceinline__ float factor(float s0, float s1, float s2, float s3) const {
    return 1.0f / sqrtf(((s0 + s2) + (s1 + s3)) / static_cast<float>(kMostColumns) + eps);
  }
  __device__ __forceinline__ float4 finish(float4 q, float by, int64_t t, int column) const {
    float v[4] = {q.x * by, q.y * by, q.z * by, q.w * by};
    turn.apply<false>(v, t, column, kMostColumns);
    return make_float4(v[0], v[1], v[2], v[3]);
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

__device__ __forceinline__ uint32_t half_bits_of(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&h);
}
// Four values as halves; what they lack.
__device__ __forceinline__ float4 store_halves(uint32_t at, float4 v) {
  const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
  const float2 fa = __half22float2(a), fb = __half22float2(b);
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(*reinterpret_cast<const uint32_t*>(&a)),
               "r"(*reinterpret_cast<const uint32_t*>(&b))
               : "memory");
  return make_float4(v.x - fa.x, v.y - fa.y, v.z - fb.x, v.w - fb.y);
}

// f32 values as sums of two halves; each is kept in rows of its own.
struct SplitRows {
  HalfRows high, low;

  // Four values to quad `quad` of a row, or behind addresses of both parts; whether their low parts are not all zero.
  __device__ __forceinline__ bool store(int row, int quad, float4 v) const {
    return store(high.at(row, quad / 2) + quad % 2 * 8, v);
  }
  __device__ __forceinline__ bool store(uint32_t at, float4 v) const {
    return store(at, at + (low.address - high.address), v);
  }
  __device__ __forceinline__ static bool store(uint32_t at, uint32_t low_at, float4 v) {
    const float4 rest = store_halves(at, v);
    store_halves(low_at, rest);
    return ((half_bits_of(rest.x, rest.y) | half_bits_of(rest.z, rest.w)) & 0x7FFF7FFFu) != 0;
  }
};

// The probability of row j for head h, as two halves.
__device__ __forceinline__ void store_weight(const HalfRows& high_rows, const HalfRows& low_rows, int h, int j,
                                             float v) {
  const __half high = __float2half_rn(v), rest = __float2half_rn(v - __half2float(high));
  const uint32_t in = static_cast<uint32_t>(j % 8 * 2);
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(high_rows.at(h, j / 8) + in), "h"(__half_as_ushort(high)) : "memory");
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(low_rows.at(h, j / 8) + in), "h"(__half_as_ushort(rest)) : "memory");
}

// Joins a chunk's sums of four columns, `v`, to `sum`.
__device__ __forceinline__ void join_sums(Softmax& all, Softmax chunk, float4 v, float (&sum)[4]) {
  float before, added;
  join(all, chunk, before, added);
  sum[0] = fmaf(sum[0], before, v.x * added);
  sum[1] = fmaf(sum[1], before, v.y * added);
  sum[2] = fmaf(sum[2], before, v.z * added);
  sum[3] = fmaf(sum[3], before, v.w * added);
}

// Four columns of a head from `column` on, all chunks joined; a whole warp has 128 where `codes` has room.
__device__ __forceinline__ void finish_head(const Softmax& all, float (&sum)[4], int64_t t, int64_t h, int column,
                                            int dim, const Turn& turn, float* out, int64_t stride,
                                            const Activations& codes) {
  const float inverse = 1.0f / all.total;
#pragma unroll
  for (float& v : sum) v = v * inverse;
  turn.apply<true>(sum, t, column, dim);
  *reinterpret_cast<float4*>(out + t * stride + h * dim + column) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  if (codes.q) store_codes(sum, t, (h * dim + column) / kTileCols, codes);
}

// Shared memory: queries and rows as halves, then [heads][64 rows][parts] of scores, whose places a head's
// probabilities take.
template <int kTiles>
constexpr int64_t attend_bytes(int64_t padded) {
  return (kTiles * kHeads + kRows) * padded * 4 + kTiles * kHeads * kRows * kParts * 4;
}

// Bytes: 64 rows of dim floats for 16 kTiles heads, from the cache; operations 4 * 64 * dim a head. f32 values are sums
// of two halves, exact to 22 bits; products of two low parts are left out, and those with low parts of rows where these
// are zeros: most columns of key rows were rounded to FP8. Scores: a warp has a quarter of the columns for 16 heads
// and 16 kTiles rows. Weighted sums: a warp has 32 columns of all heads. kWhole: all chunks of the row,
// into `out`; otherwise chunk blockIdx.x into `p`.
template <int kTiles, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    attend_latent(const float* q, int64_t q_stride, HeadNorm norm, const DeviceRow* rows, RowSource source,
                  const float* sinks, int heads, int dim, float scale, LatentParts p, Turn turn, float* out,
                  int64_t out_stride, Activations codes) {
  begin_kernel();
  extern __shared__ __align__(128) uint8_t attend_memory[];
  constexpr int kAll = kTiles * kHeads;
  __shared__ const float* entry[kRows];
  __shared__ Softmax running[kAll];
  __shared__ float factor[2][kAll];
  __shared__ unsigned low_columns;  // bit c: low parts of rows in columns 32 c .. 32 c + 31
  const int t = blockIdx.z, head0 = blockIdx.y * kAll, n_heads = min(kAll, heads - head0);
  const DeviceRow row = rows[t];
  const int total = source.list.total(row.position), quads = dim / 4, padded = (dim + 63) / 64 * 64;
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
  for (int h = warp; h < kAll; h += kWarps) {
    float4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = make_float4(0, 0, 0, 0);
      if (h < n_heads && i * 32 + lane < quads)
        v[i] = reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0 + h) * dim)[i * 32 + lane];
    }
    if (norm.turn.table) {
      const float by = norm.factor(norm.squares(v[0]), norm.squares(v[1]), norm.squares(v[2]), norm.squares(v[3]));
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = norm.finish(v[i], by, t, (i * 32 + lane) * 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i * 32 + lane < padded / 4) query.store(h, i * 32 + lane, v[i]);
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
      const int j = min(begin + static_cast<int>(threadIdx.x), begin + n - 1);
      entry[threadIdx.x] = source.entry(row, t, j);
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
        const int piece0 = part * (padded / 32);
        const uint32_t a_high = query.high.at(tile * kHeads + lane % 16, lane % 8),
                       to_a_low = query.low.address - query.high.address,
                       b_high = latent.high.at(first + lane % 8 + lane / 16 * 8, lane % 8),
                       to_b_low = latent.low.address - latent.high.address;  // both rows' first pieces
        const uint32_t rows16 = static_cast<uint32_t>(32 * padded);
#pragma unroll 2
        for (int step = 0; step < steps; ++step) {
          const int piece = piece0 + 2 * step;
          const uint32_t a_at = a_high + static_cast<uint32_t>((piece + lane / 16 ^ lane % 8) * 16),
                         b_at = b_high + static_cast<uint32_t>((piece + lane / 8 % 2 ^ lane % 8) * 16);
          uint32_t up[4], down[4], high[kGroup / 16][4];
          load_matrices(down, a_at + to_a_low);
          load_matrices(up, a_at);
#pragma unroll
          for (int i = 0; i < kGroup / 16; ++i) load_matrices(high[i], b_at + i * rows16);
#pragma unroll
          for (int i = 0; i < kGroup / 8; ++i)
            multiply_halves(sum[i], down, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
          if (low >> (piece / 4) & 1u) {
#pragma unroll
            for (int i = 0; i < kGroup / 16; ++i) {
              load_matrices(down, b_at + to_b_low + i * rows16);
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
        const float sum = (scores(h, 0)[at] + scores(h, 1)[at]) + (scores(h, 2)[at] + scores(h, 3)[at]);
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
        store_weight(weight_high, weight_low, h, j, v[k]);
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
          turn.apply<true>(v, t, column, dim);
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

// Few rows of heads of 512 columns: a cluster of four blocks of threads has a chunk for sixteen heads, each a quarter
// of the columns; scores are exchanged, each block has all of them and computes the probabilities for itself. The last
// of a row's chunks to end joins them. Bytes: 64 rows of 128 floats and sixteen heads' likewise, from the cache;
// operations 4 * 64 * 128 a head. Order of all sums as in attend_latent.
constexpr int kPartThreads = 256;
constexpr int kPartWarps = kPartThreads / 32;
constexpr int kPartColumns = kMostColumns / kParts;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define DS4_PARTS __cluster_dims__(kParts, 1, 1)
#define DS4_HALVES __cluster_dims__(2, 1, 1)
#else
#define DS4_PARTS  // the kernels are empty there, and not launched
#define DS4_HALVES
#endif

// Many rows whose low parts are zeros but in the last kLowColumns of 512 columns: a cluster of two blocks of threads
// has all chunks of a row for 32 heads, each half of the columns, and so little shared memory that two blocks fit a
// multiprocessor: one computes while the other waits for rows. Bytes: 64 rows of 256 floats a chunk, from the cache;
// operations 4 * 64 * 256 a head. Order of all sums as in attend_latent.
constexpr int kHalfThreads = 256;
constexpr int kHalfWarps = kHalfThreads / 32;
constexpr int kHalfHeads = 2 * kHeads;
constexpr int kHalfColumns = kMostColumns / 2;
constexpr int kLowColumns = 64;

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

__global__ void DS4_HALVES __launch_bounds__(kHalfThreads, 2)
    attend_half(const float* q, int64_t q_stride, HeadNorm norm, const DeviceRow* rows, RowSource source,
                const float* sinks, int heads, float scale, Turn turn, float* out, int64_t out_stride,
                Activations codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  begin_kernel();
  extern __shared__ __align__(128) uint8_t half_memory[];
  HalfMemory& m = *reinterpret_cast<HalfMemory*>(half_memory);
  __shared__ Softmax running[kHalfHeads];
  __shared__ float factor[2][kHalfHeads];
  __shared__ float squares[kParts][kHalfHeads];
  __shared__ uint64_t arrivals[3];  // of chunks' scores, which take turns; of squares
  const uint32_t arrival = shared_address(arrivals);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) init_barrier(arrival + 8 * i);
    fence_barriers();
  }
  __syncthreads();
  cluster_started();
  // Rows with the longest lists first.
  const int half = static_cast<int>(blockIdx.x), t = static_cast<int>(gridDim.z - 1 - blockIdx.z),
            head0 = static_cast<int>(blockIdx.y) * kHalfHeads, n_heads = min(kHalfHeads, heads - head0);
  const DeviceRow row = rows[t];
  const int total = source.list.total(row.position);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const SplitRows query{{shared_address(m.query[0]), kHalfColumns}, {shared_address(m.query[1]), kHalfColumns}};
  const HalfRows latent{shared_address(m.rows), kHalfColumns}, latent_low{shared_address(m.low_rows), kLowColumns},
      weight_high{shared_address(m.weight[0]), kRows}, weight_low{shared_address(m.weight[1]), kRows};
  const uint32_t peer_other = address_in(shared_address(m.other), half ^ 1),
                 peer_arrival = address_in(arrival, half ^ 1);
  {
    constexpr int kEach = kHalfHeads / kHalfWarps;
    float4 v[kEach][2];
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = warp + r * kHalfWarps;
        v[r][i] = make_float4(0, 0, 0, 0);
        if (h < n_heads)
          v[r][i] =
              __ldcg(reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0 + h) * kMostColumns +
                                                     half * kHalfColumns) +
                     i * 32 + lane);
      }
    wait_cluster();
    if (norm.turn.table) {
      if (threadIdx.x == 0) expect_bytes(arrival + 16, static_cast<int>(sizeof(squares)));
#pragma unroll
      for (int r = 0; r < kEach; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = norm.squares(v[r][i]);
          if (lane < 2)
            store_in(address_in(shared_address(&squares[2 * half + i][warp + r * kHalfWarps]), lane), sum,
                     address_in(arrival + 16, lane));
        }
      wait_for(arrival + 16, 0);
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const int h = warp + r * kHalfWarps;
        const float by = norm.factor(squares[0][h], squares[1][h], squares[2][h], squares[3][h]);
#pragma unroll
        for (int i = 0; i < 2; ++i) v[r][i] = norm.finish(v[r][i], by, t, half * kHalfColumns + (i * 32 + lane) * 4);
      }
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) query.store(warp + r * kHalfWarps, i * 32 + lane, v[r][i]);
  }
  if (threadIdx.x < kHalfHeads)
    running[threadIdx.x] = start_of(sinks, head0 + min(static_cast<int>(threadIdx.x), n_heads - 1));
  float all[2][4][4];
#pragma unroll
  for (int i = 0; i < 32; ++i) all[i / 16][i / 4 % 4][i % 4] = 0.0f;
  const int chunks = (total + kRows - 1) / kRows;
  // A warp has eight rows of a chunk, a lane finds one of them, while the chunk before is multiplied.
  constexpr int kEach = kRows / kHalfWarps, kAhead = 4;  // on their way at a time
  const int own_row = warp + lane % kEach * kHalfWarps;
  const float* own = source.entry(row, t, min(own_row, total - 1)) + half * kHalfColumns;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int begin = chunk * kRows, n = min(kRows, total - begin), filled = (n + 15) / 16 * 16;
    {
#pragma unroll
      for (int first = 0; first < kEach; first += kAhead) {
        float4 v[kAhead][2];
#pragma unroll
        for (int r = 0; r < kAhead; ++r) {
          const auto at =
              reinterpret_cast<const float4*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<uint64_t>(own), first + r));
#pragma unroll
          for (int i = 0; i < 2; ++i)
            v[r][i] = warp + (first + r) * kHalfWarps < n ? __ldcg(at + i * 32 + lane) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int r = 0; r < kAhead; ++r) {
          const int of = warp + (first + r) * kHalfWarps;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t to = latent.at(of, (i * 32 + lane) / 2) + lane % 2 * 8;
            if (i == 1 && lane >= 16 && half == 1)
              SplitRows{latent, latent_low}.store(to, latent_low.at(of, (lane - 16) / 2) + lane % 2 * 8, v[r][i]);
            else
              store_halves(to, v[r][i]);
          }
        }
      }
    }
    if (chunk + 1 < chunks) own = source.entry(row, t, min(begin + kRows + own_row, total - 1)) + half * kHalfColumns;
    __syncthreads();
    {
      // Scores: a warp has a quarter of the columns for 16 heads and 32 rows.
      const int part = warp / 4, tile = warp / 2 % 2, first = warp % 2 * 32;
      float sum[4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] = 0.0f;
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
          uint32_t up[4], down[4], high[2][4];
          load_matrices(down, a_at + to_a_low);
          load_matrices(up, a_at);
#pragma unroll
          for (int i = 0; i < 2; ++i) load_matrices(high[i], b_at + i * kRows16);
#pragma unroll
          for (int i = 0; i < 4; ++i) multiply_halves(sum[i], down, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
          if (step >= 4 && half == 1 && part == 1)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              load_matrices(down,
                            latent_low.at(first + 16 * i + lane % 8 + lane / 16 * 8, 2 * (step - 4) + lane / 8 % 2));
              multiply_halves(sum[2 * i], up, down[0], down[1]);
              multiply_halves(sum[2 * i + 1], up, down[2], down[3]);
            }
#pragma unroll
          for (int i = 0; i < 4; ++i) multiply_halves(sum[i], up, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
        }
      }
      auto& to = part ? m.second : m.score;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (first + 8 * i ^ 8 * g) + 2 * c;
        *reinterpret_cast<float2*>(&to[tile * kHeads + g][at]) = make_float2(sum[i][0], sum[i][1]);
        *reinterpret_cast<float2*>(&to[tile * kHeads + g + 8][at]) = make_float2(sum[i][2], sum[i][3]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHalfHeads * kRows / 4 / kHalfThreads; ++i) {
      const int at = i * kHalfThreads + static_cast<int>(threadIdx.x);
      float4& mine = reinterpret_cast<float4*>(&m.score[0][0])[at];
      const float4 a = mine, b = reinterpret_cast<const float4*>(&m.second[0][0])[at];
      mine = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      store_in(peer_other + static_cast<uint32_t>(chunk % 2 * static_cast<int>(sizeof(m.other[0])) + at * 16), mine,
               peer_arrival + chunk % 2 * 8);
    }
    if (threadIdx.x == 0) expect_bytes(arrival + chunk % 2 * 8, static_cast<int>(sizeof(m.other[0])));
    __syncthreads();
    wait_for(arrival + chunk % 2 * 8, static_cast<uint32_t>(chunk / 2 % 2));
#pragma unroll
    for (int i = 0; i < kHalfHeads / kHalfWarps; ++i) {
      const int h = i * kHalfWarps + warp;
      float v[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int j = lane + 32 * k, at = j ^ h % 8 * 8;
        const float sum = m.score[h][at] + m.other[chunk % 2][h][at];
        v[k] = j < n ? sum * scale : -INFINITY;
      }
      const float largest = warp_max(fmaxf(v[0], v[1]));
#pragma unroll
      for (int k = 0; k < 2; ++k) v[k] = lane + 32 * k < n ? expf(v[k] - largest) : 0.0f;
      const float sum = warp_sum(v[0] + v[1]);
#pragma unroll
      for (int k = 0; k < 2; ++k) store_weight(weight_high, weight_low, h, lane + 32 * k, v[k]);
      if (lane == 0) join(running[h], {largest, sum}, factor[0][h], factor[1][h]);
    }
    __syncthreads();
    {
      // Weighted sums: a warp has 32 columns of all heads.
      const bool both = half == 1 && warp >= kHalfWarps - 2;
      float sum[2][4][4];
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step) {
        if (step * 16 >= filled) break;
        uint32_t high[2][4], rest[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_turned(high[i], latent.at(step * 16 + lane % 16, warp * 4 + 2 * i + lane / 16));
          if (both)
            load_turned(rest[i],
                        latent_low.at(step * 16 + lane % 16, (warp - (kHalfWarps - 2)) * 4 + 2 * i + lane / 16));
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          uint32_t up[4], down[4];
          load_matrices(down, weight_low.at(tile * kHeads + lane % 16, 2 * step + lane / 16));
          load_matrices(up, weight_high.at(tile * kHeads + lane % 16, 2 * step + lane / 16));
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
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int h = tile * kHeads + g + 8 * r;
          const float before = factor[0][h], added = factor[1][h];
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int k = 2 * r; k < 2 * r + 2; ++k)
              all[tile][i][k] = fmaf(all[tile][i][k], before, sum[tile][i][k] * added);
        }
    }
    __syncthreads();
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int h = tile * kHeads + g + 8 * r;
      if (h >= n_heads) continue;
      const float inverse = 1.0f / running[h].total;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = warp * 32 + 8 * i + 2 * c;
        float v[2] = {all[tile][i][2 * r] * inverse, all[tile][i][2 * r + 1] * inverse};
        turn.apply<true>(v, t, half * kHalfColumns + column, kMostColumns);
        *reinterpret_cast<float2*>(&m.result[h][column]) = make_float2(v[0], v[1]);
      }
    }
  __syncthreads();
  for (int i = warp; i < n_heads * 2; i += kHalfWarps) {
    const float4 v = *reinterpret_cast<const float4*>(&m.result[i / 2][i % 2 * kTileCols + 4 * lane]);
    const int64_t column = static_cast<int64_t>(head0 + i / 2) * kMostColumns + half * kHalfColumns + i % 2 * kTileCols;
    *reinterpret_cast<float4*>(out + t * out_stride + column + 4 * lane) = v;
    if (codes.q) store_codes({v.x, v.y, v.z, v.w}, t, column / kTileCols, codes);
  }
#endif
}

struct PartMemory {
  uint8_t query[2][kHeads * kPartColumns * 2];  // high parts, low parts
  uint8_t rows[2][kRows * kPartColumns * 2];
  float score[kParts][kHeads][kRows];
  uint8_t weight[2][kHeads * kRows * 2];
};

__global__ void DS4_PARTS __launch_bounds__(kPartThreads, 3)
    attend_part(const float* q, int64_t q_stride, HeadNorm norm, const DeviceRow* rows, RowSource source,
                const float* sinks, int heads, float scale, LatentParts p, int* arrived, Turn turn, float* out,
                int64_t out_stride, Activations codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  begin_kernel();
  extern __shared__ __align__(128) uint8_t part_memory[];
  PartMemory& m = *reinterpret_cast<PartMemory*>(part_memory);
  __shared__ unsigned low_columns;  // bit c: low parts of rows in columns 32 c .. 32 c + 31 of the part
  __shared__ Softmax stats[kHeads];
  __shared__ float squares[kParts][kHeads];
  __shared__ int turn_of;
  __shared__ uint64_t arrivals[2];  // of scores, of squares
  const uint32_t arrival = shared_address(arrivals);
  const int part = static_cast<int>(blockIdx.x), chunk = blockIdx.y;
  const int tiles = (heads + kHeads - 1) / kHeads, t = static_cast<int>(blockIdx.z) / tiles,
            head0 = static_cast<int>(blockIdx.z) % tiles * kHeads, n_heads = min(kHeads, heads - head0);
  const DeviceRow row = rows[t];
  const int total = source.list.total(row.position), begin = chunk * kRows;
  if (begin >= total) return;
  if (threadIdx.x == 0) {
    low_columns = 0;
    for (int i = 0; i < 2; ++i) init_barrier(arrival + 8 * i);
    fence_barriers();
    expect_bytes(arrival, static_cast<int>(sizeof(m.score)));
    expect_bytes(arrival + 8, static_cast<int>(sizeof(squares)));
  }
  __syncthreads();
  cluster_started();
  const int n = min(kRows, total - begin), filled = (n + 15) / 16 * 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const SplitRows query{{shared_address(m.query[0]), kPartColumns}, {shared_address(m.query[1]), kPartColumns}},
      latent{{shared_address(m.rows[0]), kPartColumns}, {shared_address(m.rows[1]), kPartColumns}};
  const HalfRows weight_high{shared_address(m.weight[0]), kRows}, weight_low{shared_address(m.weight[1]), kRows};
  constexpr int kEach = kRows / kPartWarps;
  // A lane finds one of its warp's rows.
  const float* own = source.entry(row, t, begin + min(warp + lane % kEach * kPartWarps, n - 1)) + part * kPartColumns;
  float4 v[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const auto at = reinterpret_cast<const float4*>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<uint64_t>(own), r));
    v[r] = warp + r * kPartWarps < n ? __ldcg(at + lane) : make_float4(0, 0, 0, 0);
  }
  constexpr int kOwnHeads = kHeads / kPartWarps;
  float4 w[kOwnHeads];
#pragma unroll
  for (int r = 0; r < kOwnHeads; ++r) {
    const int h = warp + r * kPartWarps;
    w[r] = make_float4(0, 0, 0, 0);
    if (h < n_heads)
      w[r] = __ldcg(reinterpret_cast<const float4*>(q + t * q_stride + static_cast<int64_t>(head0 + h) * kMostColumns +
                                                    part * kPartColumns) +
                    lane);
  }
  wait_cluster();
  if (norm.turn.table) {
#pragma unroll
    for (int r = 0; r < kOwnHeads; ++r) {
      const float sum = norm.squares(w[r]);
      if (lane < kParts)
        store_in(address_in(shared_address(&squares[part][warp + r * kPartWarps]), lane), sum,
                 address_in(arrival + 8, lane));
    }
    wait_for(arrival + 8, 0);
#pragma unroll
    for (int r = 0; r < kOwnHeads; ++r) {
      const int h = warp + r * kPartWarps;
      w[r] = norm.finish(w[r], norm.factor(squares[0][h], squares[1][h], squares[2][h], squares[3][h]), t,
                         part * kPartColumns + 4 * lane);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwnHeads; ++r) query.store(warp + r * kPartWarps, lane, w[r]);
  unsigned low = 0;
#pragma unroll
  for (int r = 0; r < kEach; ++r) low |= latent.store(warp + r * kPartWarps, lane, v[r]) ? 1u << (lane / 8) : 0u;
  low = __reduce_or_sync(0xFFFFFFFFu, low);
  __syncthreads();
  if (lane == 0 && low) atomicOr(&low_columns, low);
  __syncthreads();
  low = low_columns;
  {
    // Scores of the part: a warp has eight rows.
    float sum[4] = {0, 0, 0, 0};
    const int first = warp * 8;
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
#pragma unroll
  for (int i = 0; i < kHeads / kPartWarps; ++i) {
    const int h = i * kPartWarps + warp;
    float e[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int j = lane + 32 * k, at = j ^ h % 8 * 8;
      const float sum = (m.score[0][h][at] + m.score[1][h][at]) + (m.score[2][h][at] + m.score[3][h][at]);
      e[k] = j < n ? sum * scale : -INFINITY;
    }
    const float largest = warp_max(fmaxf(e[0], e[1]));
#pragma unroll
    for (int k = 0; k < 2; ++k) e[k] = lane + 32 * k < n ? expf(e[k] - largest) : 0.0f;
    const float sum = warp_sum(e[0] + e[1]);
#pragma unroll
    for (int k = 0; k < 2; ++k) store_weight(weight_high, weight_low, h, lane + 32 * k, e[k]);
    if (lane == 0) stats[h] = {largest, sum};
  }
  __syncthreads();
  float sum[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = 0.0f;
  {
    // Weighted sums: a warp has sixteen columns.
    const int column0 = warp * 16;
    const bool both = low >> (warp / 2) & 1u;
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      if (step * 16 >= filled) break;
      uint32_t high[4], rest[4], up[4], down[4];
      load_turned(high, latent.high.at(step * 16 + lane % 16, column0 / 8 + lane / 16));
      if (both) load_turned(rest, latent.low.at(step * 16 + lane % 16, column0 / 8 + lane / 16));
      load_matrices(down, weight_low.at(lane % 16, 2 * step + lane / 16));
      load_matrices(up, weight_high.at(lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_halves(sum[i], down, high[2 * i], high[2 * i + 1]);
      if (both)
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_halves(sum[i], up, rest[2 * i], rest[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_halves(sum[i], up, high[2 * i], high[2 * i + 1]);
    }
  }
  const int chunks = (total + kRows - 1) / kRows;
  const int64_t of_heads = static_cast<int64_t>(t) * heads + head0;
  // A chunk's sums and statistics; each part has its own of these.
  const auto sums_of = [&](int h, int of) {
    return p.sums + ((of_heads + h) * p.chunks + of) * kMostColumns + part * kPartColumns;
  };
  const auto stats_of = [&](int h, int of) { return p.stats + ((of_heads + h) * p.chunks + of) * kParts + part; };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int h = g + 8 * r;
    if (h >= n_heads) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      __stcg(reinterpret_cast<float2*>(sums_of(h, chunk) + warp * 16 + 8 * i + 2 * c),
             make_float2(sum[i][2 * r], sum[i][2 * r + 1]));
  }
  if (static_cast<int>(threadIdx.x) < n_heads) *stats_of(threadIdx.x, chunk) = stats[threadIdx.x];
  int* const counter = arrived + static_cast<int64_t>(blockIdx.z) * kParts + part;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    turn_of = atomicAdd(counter, 1);
    if (turn_of == chunks - 1) *counter = 0;  // for the next launch
    __threadfence();
  }
  __syncthreads();
  if (turn_of != chunks - 1) return;
#pragma unroll
  for (int r = 0; r < kHeads / kPartWarps; ++r) {
    const int h = warp + r * kPartWarps;
    if (h >= n_heads) continue;
    Softmax all = start_of(sinks, head0 + h);
    float v[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int of = 0; of < chunks; ++of) {
      const float2 s = __ldcg(reinterpret_cast<const float2*>(stats_of(h, of)));
      const float4 w = __ldcg(reinterpret_cast<const float4*>(sums_of(h, of)) + lane);
      join_sums(all, {s.x, s.y}, w, v);
    }
    finish_head(all, v, t, head0 + h, part * kPartColumns + 4 * lane, kMostColumns, turn, out, out_stride, codes);
  }
#endif
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
  for (int c = 0; c < chunks; ++c)
    join_sums(all, p.stats[of + c], *reinterpret_cast<const float4*>(p.sums + (of + c) * dim + d), sum);
  finish_head(all, sum, t, h, d, dim, turn, out, stride, codes);
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
  begin_kernel();
  constexpr int kBlocks = kShortDim / 32;
  extern __shared__ uint4 query[];  // [heads / 8][blocks][32 lanes], as the units read them
  __shared__ float2 weights[kMostShortHeads / 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int begin = blockIdx.x * kShortRows, own = begin + warp * 16;
  int loaded = -1;  // the session whose rows the lanes have, by its first row of the step
  uint4 key[2][kBlocks];
  const int first = blockIdx.y * at_once, end = min(n, first + at_once);
  for (int t = first; t < end; ++t) {
    const DeviceRow row = rows[t];
    const int visible = (row.position + 1) / ratio;
    if (visible <= k || begin >= visible) continue;
    __syncthreads();
    for (int i = threadIdx.x; i < heads / 8 * kBlocks * 32; i += kShortThreads) {
      const int of = i % 32;
      const float4* from = reinterpret_cast<const float4*>(
          q + t * q_stride + (i / (kBlocks * 32) * 8 + of / 4) * kShortDim + i / 32 % kBlocks * 32 + of % 4 * 8);
      query[i] = to_bfloats(from[0], from[1]);
    }
    if (threadIdx.x < heads / 2)
      weights[threadIdx.x] = *reinterpret_cast<const float2*>(weight + t * weight_stride + 2 * threadIdx.x);
    if (loaded != row.first) {
      loaded = row.first;
      // As many as the session's last row here sees.
      const int last = (row.position + min(end - 1, row.first + row.count - 1) - t + 1) / ratio - 1;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4* from =
            reinterpret_cast<const float4*>(append_row(row, index, min(own + g + 8 * r, last))) + c * 2;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          key[r][block] = to_bfloats(__ldg(from + block * 8), __ldg(from + block * 8 + 1));
      }
    }
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

constexpr int kTopThreads = 1024;
constexpr int kHeld = 4;  // keys of a thread in registers

// The k-th largest of the keys, zeros are none: two bits at a time, the largest digit that k keys reach. `counts` holds
// two words for each warp.
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
    if (lane == 0) counts[turn % 2 * 32 + warp] = own;
    __syncthreads();
    own = counts[turn % 2 * 32 + lane];
#pragma unroll
    for (int d = 0; d < 3; ++d) all[d] = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, own >> (10 * d) & 1023u));
  };
  uint32_t found = 0;
  int all[3];
  for (int shift = 30, turn = 0; shift >= 0; shift -= 2, ++turn) {
    const uint32_t step = 1u << shift;
    count(found + step, step, turn, all);
    found += (all[2] >= k ? 3u : all[1] >= k ? 2u : all[0] >= k ? 1u : 0u) << shift;
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
  begin_kernel();
  __shared__ int histogram[256];
  __shared__ uint32_t votes[2][32];
  __shared__ uint32_t digit;
  __shared__ int beyond;
  const int t = blockIdx.x, visible = (rows[t].position + 1) / ratio;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  __syncthreads();
  for (int turn = 0; turn < held; ++turn) {
    const int i = turn * kTopThreads + static_cast<int>(threadIdx.x);
    const uint32_t of = i < visible ? ordered(s[i]) : 0u;
    const unsigned more = __ballot_sync(0xFFFFFFFFu, of > kth), same = __ballot_sync(0xFFFFFFFFu, of == kth);
    if (lane == 0) votes[turn % 2][warp] = static_cast<uint32_t>(__popc(more) | __popc(same) << 16);
    __syncthreads();
    const uint32_t vote = votes[turn % 2][lane];
    const uint32_t before = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? vote : 0u);
    const unsigned lower = (1u << lane) - 1u;
    const int above = static_cast<int>((before + passed) & 0xFFFFu) + __popc(more & lower);
    const int equal = static_cast<int>((before + passed) >> 16) + __popc(same & lower);
    if (of > kth || (of == kth && equal < need)) ids[static_cast<int64_t>(t) * k + above + min(equal, need)] = i;
    passed += __reduce_add_sync(0xFFFFFFFFu, vote);
  }
  if (threadIdx.x == 0) counts[t] = k;
}

}  // namespace

bool attention_norms(int64_t dim) {
  return dim == kMostColumns && hopper_kernels();
}

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
  const int64_t row_floats = a.heads * p.chunks * (dim + 2 * kParts);
  const int64_t at_once = whole ? 65535 : std::clamp<int64_t>((int64_t{1} << 27) / row_floats, 1, 65535);
  // Clusters where all their blocks of threads are on the device at once.
  const bool parts = !whole && dim == kMostColumns && hopper_kernels() &&
                     q.n * tiles * p.chunks * kParts <= 3 * context.device.multiprocessors();
  // Queries as they came, which these kernels norm and rotate; else all that is still to be done is.
  const Context::RawHeads raw = context.raw_heads;
  const bool norms = raw.x.n == q.n && raw.x.data == q.data && raw.x.dim == q.dim && raw.x.stride == q.stride &&
                     raw.heads == a.heads && dim == kMostColumns;
  if (norms)
    context.raw_heads = {};
  else
    settle_heads(context);
  for (int64_t first = 0; first < q.n; first += at_once) {
    const int64_t n = std::min(at_once, q.n - first);
    const HeadNorm norm{{norms ? raw.table.data + first * raw.table.stride : nullptr, norms ? raw.table.stride : 0,
                         norms ? static_cast<int>(raw.table.dim / 2) : 0},
                        norms ? raw.eps : 0.0f};
    const RowSource source{visible,
                           kv.data,
                           kv.stride,
                           static_cast<int32_t>(first),
                           ring,
                           compressed,
                           selection ? selection->ids + first * selection->capacity : nullptr,
                           selection ? selection->counts + first : nullptr,
                           selection ? selection->capacity : 0};
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
      launch_kernel(context.device.stream(), grid, kThreads, shared, kernel, q.data + first * q.stride, q.stride, norm,
                    list + first, source, sinks, static_cast<int>(a.heads), static_cast<int>(dim), a.scale, p, turn,
                    out.data + first * out.stride, out.stride, whole ? codes : Activations{});
    };
    if (whole && a.short_columns >= kMostColumns - kLowColumns && dim == kMostColumns && hopper_kernels()) {
      DS4_CUDA(cudaFuncSetAttribute(attend_half, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(HalfMemory))));
      launch_kernel(context.device.stream(),
                    dim3(2, static_cast<unsigned>((a.heads + kHalfHeads - 1) / kHalfHeads), static_cast<unsigned>(n)),
                    kHalfThreads, sizeof(HalfMemory), attend_half, q.data + first * q.stride, q.stride, norm,
                    list + first, source, sinks, static_cast<int>(a.heads), a.scale, turn,
                    out.data + first * out.stride, out.stride, codes);
      DS4_CUDA(cudaGetLastError());
      continue;
    }
    if (whole) {
      launch(attend_latent<2, true>, 2, attend_bytes<2>(padded));
      DS4_CUDA(cudaGetLastError());
      continue;
    }
    auto* memory = context.workspace.get<float>(Workspace::Partials, n * row_floats + 4);
    p.stats = reinterpret_cast<Softmax*>(memory);
    p.sums = memory + (2 * n * a.heads * p.chunks * kParts + 3) / 4 * 4;
    if (parts) {
      int* arrived = context.workspace.get<int>(Workspace::Arrived, n * tiles * kParts);
      DS4_CUDA(cudaFuncSetAttribute(attend_part, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(PartMemory))));
      launch_kernel(context.device.stream(),
                    dim3(kParts, static_cast<unsigned>(p.chunks), static_cast<unsigned>(n * tiles)), kPartThreads,
                    sizeof(PartMemory), attend_part, q.data + first * q.stride, q.stride, norm, list + first, source,
                    sinks, static_cast<int>(a.heads), a.scale, p, arrived, turn, out.data + first * out.stride,
                    out.stride, codes);
    } else {
      launch(attend_latent<1, false>, 1, attend_bytes<1>(padded));
      launch_kernel(context.device.stream(), dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(n)),
                    static_cast<unsigned>((dim / 4 + 31) / 32 * 32), 0, join_chunks, p, list + first, visible, sinks,
                    a.heads, static_cast<int>(dim), turn, out.data + first * out.stride, out.stride, codes);
    }
    DS4_CUDA(cudaGetLastError());
  }
}

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
