// What the kernels of latent attention share: a row's list, the joining of its chunks, and values as sums of two
// halves.
#pragma once

#include "cuda/async_copies.h"
#include "cuda/context.h"
#include "cuda/device_math.h"
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
constexpr int kHeads = 16;         // of a tile of the matrix units
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

  // What the entries of a row's list need of the row; read side by side, and from the step's inputs alone.
  struct Place {
    const char* fixed;
    char* const* pages;
    int32_t position, first;
  };
  __device__ __forceinline__ Place place(const DeviceRow& row) const {
    return {row.fixed, list.ratio ? row.pages[compressed.group] : nullptr, row.position, row.first};
  }

  // Entry j of the list of row t of the launch.
  __device__ __forceinline__ const float* entry(const Place& row, int t, int j) const {
    const int in_window = list.in_window(row.position);
    if (j < in_window) {
      const int position = row.position + 1 - in_window + j;
      const int first_position = row.position - (first_row + t - row.first);
      if (position >= first_position)
        return kv + static_cast<int64_t>(row.first + position - first_position) * kv_stride;
      const uint32_t slot = static_cast<uint32_t>(position) % static_cast<uint32_t>(ring.capacity);
      return reinterpret_cast<const float*>(row.fixed + ring.offset + slot * ring.row_bytes);
    }
    const int i = j - in_window;
    const auto id = static_cast<uint32_t>(counts && counts[t] >= 0 ? ids[t * ids_stride + i] : i);
    return reinterpret_cast<const float*>(row.pages[id / kPageRows] + compressed.offset +
                                          id % kPageRows * compressed.row_bytes);
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

// A warp has the scores of a head in a chunk of n rows, each lane those of rows `lane` and `lane` + 32, and leaves
// their exponentials as probabilities.
__device__ __forceinline__ Softmax weigh_head(const HalfRows& high_rows, const HalfRows& low_rows, int h, int n,
                                              const float (&score)[2], float scale) {
  const int lane = threadIdx.x % 32;
  float v[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) v[k] = lane + 32 * k < n ? score[k] * scale : -INFINITY;
  const float largest = warp_max(fmaxf(v[0], v[1]));
#pragma unroll
  for (int k = 0; k < 2; ++k) v[k] = lane + 32 * k < n ? expf(v[k] - largest) : 0.0f;
  const float sum = warp_sum(v[0] + v[1]);
#pragma unroll
  for (int k = 0; k < 2; ++k) store_weight(high_rows, low_rows, h, lane + 32 * k, v[k]);
  return {largest, sum};
}

// Sixteen rows' probabilities for sixteen heads, `up` and their low parts `down`, times the rows: `high` and, with
// `both`, their low parts `rest`; 8 N columns.
template <int N>
__device__ __forceinline__ void add_weighted(float (&sum)[N][4], const uint32_t (&up)[4], const uint32_t (&down)[4],
                                             const uint32_t (&high)[N / 2][4], const uint32_t (&rest)[N / 2][4],
                                             bool both) {
#pragma unroll
  for (int i = 0; i < N; ++i) multiply_halves(sum[i], down, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
  if (both)
#pragma unroll
    for (int i = 0; i < N; ++i) multiply_halves(sum[i], up, rest[i / 2][i % 2 * 2], rest[i / 2][i % 2 * 2 + 1]);
#pragma unroll
  for (int i = 0; i < N; ++i) multiply_halves(sum[i], up, high[i / 2][i % 2 * 2], high[i / 2][i % 2 * 2 + 1]);
}

// A tile of sixteen heads as the units have it: a lane has heads g and g + 8 and two columns of every eight.
//
// Joins a chunk's sums to those before, by factors of the tile's heads.
template <int N>
__device__ __forceinline__ void join_tile(float (&all)[N][4], const float (&sum)[N][4], const float* before,
                                          const float* added) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float by = before[g + 8 * r], with = added[g + 8 * r];
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int k = 2 * r; k < 2 * r + 2; ++k) all[i][k] = fmaf(all[i][k], by, sum[i][k] * with);
  }
}
// A chunk's sums to those of `heads` heads from `to` on, `stride` floats from one to the next, `columns` at most.
template <int N>
__device__ __forceinline__ void store_tile(const float (&sum)[N][4], float* to, int64_t stride, int heads,
                                           int columns) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (g + 8 * r < heads)
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (8 * i < columns)
          __stcg(reinterpret_cast<float2*>(to + (g + 8 * r) * stride + 8 * i + 2 * c),
                 make_float2(sum[i][2 * r], sum[i][2 * r + 1]));
}
// Two columns of a head from `column` on, all chunks joined.
__device__ __forceinline__ float2 finish_two(float a, float b, float inverse, const Turn& turn, int64_t t, int column,
                                             int dim) {
  float v[2] = {a * inverse, b * inverse};
  turn.apply<true>(v, t, column, dim);
  return make_float2(v[0], v[1]);
}

// Whether this block of threads is the last of `all` that count at `counter`, which is zero again then; it sees what
// they have written before. `turn`: shared.
__device__ __forceinline__ bool last_of(int* counter, int all, int& turn) {
  __syncthreads();
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before == all - 1) *counter = 0;  // for the next launch
    turn = before;
  }
  __syncthreads();
  return turn == all - 1;
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

// Joins all chunks in order; six are asked for together. `stat`, `part`: a chunk's, by its number.
template <class Stat, class Part>
__device__ __forceinline__ void join_chunks_of(Softmax& all, float (&sum)[4], int chunks, const Stat& stat,
                                               const Part& part) {
  constexpr int kTogether = 6;
#pragma unroll 1
  for (int from = 0; from < chunks; from += kTogether) {
    float2 s[kTogether];
    float4 v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (from + i < chunks) {
        s[i] = __ldcg(reinterpret_cast<const float2*>(stat(from + i)));
        v[i] = __ldcg(reinterpret_cast<const float4*>(part(from + i)));
      }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (from + i < chunks) join_sums(all, {s[i].x, s[i].y}, v[i], sum);
  }
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

}  // namespace
}  // namespace ds4::cuda
