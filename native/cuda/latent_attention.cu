#include <algorithm>
#include <climits>

#include "cuda/attend_clusters.h"
#include "cuda/attention_rows.h"
#include "cuda/device_math.h"
#include "cuda/latent.h"
#include "cuda/latent_attention.h"
#include "cuda/matrix_math.h"

namespace ds4::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

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
  const RowSource::Place row = source.place(rows[t]);
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
      float score_of[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = lane + 32 * k ^ h % 8 * 8;
        score_of[k] = (scores(h, 0)[at] + scores(h, 1)[at]) + (scores(h, 2)[at] + scores(h, 3)[at]);
      }
      __syncwarp();
      const Softmax found = weigh_head(weight_high, weight_low, h, n, score_of, scale);
      if (lane == 0) {
        if constexpr (kWhole)
          join(running[h], found, factor[0][h], factor[1][h]);
        else if (h < n_heads)
          p.stats[(static_cast<int64_t>(t) * heads + head0 + h) * p.chunks + chunk] = found;
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
          add_weighted(sum[tile], up, down, high, rest, both);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        if constexpr (kWhole)
          join_tile(all[tile], sum[tile], factor[0] + tile * kHeads, factor[1] + tile * kHeads);
        else
          store_tile(
              sum[tile],
              p.sums + ((static_cast<int64_t>(t) * heads + head0 + tile * kHeads) * p.chunks + chunk) * dim + column0,
              p.chunks * dim, n_heads - tile * kHeads, dim - column0);
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
          const float2 both = finish_two(all[tile][i][2 * r], all[tile][i][2 * r + 1], inverse, turn, t, column, dim);
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
__global__ void __launch_bounds__(kMostColumns / 4, 8)
    join_chunks(LatentParts p, const DeviceRow* rows, VisibleRows list, const float* sinks, int64_t heads, int dim,
                Turn turn, float* out, int64_t stride, Activations codes) {
  const int64_t t = blockIdx.y, h = blockIdx.x, of = (t * heads + h) * p.chunks;
  const int chunks = (list.total(rows[t].position) + kRows - 1) / kRows, d = 4 * static_cast<int>(threadIdx.x);
  Softmax all = start_of(sinks, static_cast<int>(h));
  begin_kernel();
  if (d >= dim) return;
  float sum[4] = {0, 0, 0, 0};
  join_chunks_of(
      all, sum, chunks, [&](int c) { return p.stats + of + c; }, [&](int c) { return p.sums + (of + c) * dim + d; });
  finish_head(all, sum, t, h, d, dim, turn, out, stride, codes);
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
                     q.n * tiles * p.chunks * kParts <= 2 * context.device.multiprocessors();
  const bool halves = a.short_columns >= kMostColumns - kLowColumns && dim == kMostColumns && hopper_kernels();
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
    const auto launch_half = [&](auto kernel, int threads) {
      DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(HalfMemory))));
      const int64_t groups = (a.heads + kHalfHeads - 1) / kHalfHeads;
      launch_kernel(
          context.device.stream(),
          dim3(2, static_cast<unsigned>(whole ? groups : groups * n), static_cast<unsigned>(whole ? n : p.chunks)),
          threads, sizeof(HalfMemory), kernel, q.data + first * q.stride, q.stride, norm, list + first, source, sinks,
          static_cast<int>(a.heads), a.scale, p, turn, out.data + first * out.stride, out.stride,
          whole ? codes : Activations{});
    };
    if (whole) {
      halves ? launch_half(attend_half<true>, kHalfThreads<true>)
             : launch(attend_latent<2, true>, 2, attend_bytes<2>(padded));
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
      launch_kernel(
          context.device.stream(),
          dim3(static_cast<unsigned>(kParts * tiles), static_cast<unsigned>(p.chunks), static_cast<unsigned>(n)),
          kPartThreads, sizeof(PartMemory), attend_part, q.data + first * q.stride, q.stride, norm, list + first,
          source, sinks, static_cast<int>(a.heads), a.scale, p, arrived, turn, out.data + first * out.stride,
          out.stride, codes);
    } else {
      halves ? launch_half(attend_half<false>, kHalfThreads<false>)
             : launch(attend_latent<1, false>, 1, attend_bytes<1>(padded));
      launch_kernel(context.device.stream(), dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(n)),
                    static_cast<unsigned>((dim / 4 + 31) / 32 * 32), 0, join_chunks, p, list + first, visible, sinks,
                    a.heads, static_cast<int>(dim), turn, out.data + first * out.stride, out.stride, codes);
    }
    DS4_CUDA(cudaGetLastError());
  }
}

}  // namespace ds4::cuda
