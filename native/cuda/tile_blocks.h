// Block formats and many rows of activations: the kernels that walk tiles (linear.h), and their launches.
//
// Dense matrices: a warp computes 16 rows of W for 8 NT tokens. Weights go from memory into the registers of the one
// warp that needs them, activations come by bulk copies through shared memory, two tiles a stage. A warp issues about
// one instruction in five cycles, so what counts is that a scheduler has four warps. Experts: the activations of an
// item stay in shared memory, so that warps take tile rows on their own.
#pragma once

#include <algorithm>

#include "cuda/async_copies.h"
#include "cuda/block_products.h"

namespace ds4::cuda {

constexpr int kStageTiles = 2;
constexpr int kStages = 3;

// Operands of two blocks: the matrices of eight tokens at the lanes' addresses, 16 bytes each, one after the other.
__device__ __forceinline__ uint4 load_operands(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Activations of 8 NT tokens in shared memory, as they stand in memory (activations.h).
template <DType type, int NT>
struct Stage {
  alignas(16) int8_t q[kStageTiles][NT][1024];
  alignas(16) float d[kStageTiles][NT][8];
  alignas(16) uint32_t sums[kStageTiles][Layout<type>::kMin ? NT : 1][32];
};
template <DType type, int NT, int kWarps>
struct TileMemory {
  Stage<type, NT> stages[kStages];
  float4 totals[NT][32 * kWarps];
  uint64_t arrivals[kStages];
};

template <DType type, int NT, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps) tile_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  constexpr int kCopies = type == DType::IQ2_XXS ? 8 : 0;
  extern __shared__ uint4 dynamic[];
  auto& memory = *reinterpret_cast<TileMemory<type, NT, kWarps>*>(dynamic);
  __shared__ Grid<kCopies> grid;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int slab = static_cast<int>(blockIdx.z), group0 = static_cast<int>(blockIdx.x) * NT;
  const int here = min(NT, static_cast<int>((p.T + 7) / 8) - group0);
  const int tile_row = static_cast<int>(blockIdx.y) * kWarps + warp;
  grid.fill(w);
  if (threadIdx.x == 0) {
    for (uint64_t& a : memory.arrivals) init_barrier(shared_address(&a));
    fence_barriers();
  }
  __syncthreads();

  const TileReader<type> reader(w, lane);
  const auto row = static_cast<uint32_t>(slab * p.tiles_m + min(tile_row, p.tiles_m - 1));
  const uint32_t tile0 = row * p.tiles_k, super0 = row * (p.tiles_k / 2);
  RawTile<type> raw[2];
  reader.all(raw[0], tile0, super0);
  begin_kernel();

  // The first thread asks for the tokens of a stage's tiles.
  const int stages = (p.tiles_k + kStageTiles - 1) / kStageTiles;
  const auto fetch = [&](int stage) {
    if (threadIdx.x != 0 || stage >= stages) return;
    Stage<type, NT>& to = memory.stages[stage % kStages];
    const uint32_t barrier = shared_address(&memory.arrivals[stage % kStages]);
    const int tiles = min(kStageTiles, p.tiles_k - stage * kStageTiles);
    expect_bytes(barrier, tiles * here * (L::kMin ? 1184 : 1056));
    for (int k = 0; k < tiles; ++k) {
      const int64_t at = (slab * (p.cols / kTileCols) + stage * kStageTiles + k) * x.eights + group0;
      copy_bulk(shared_address(to.q[k]), reinterpret_cast<const uint8_t*>(x.q + at * 1024), here * 1024, barrier);
      copy_bulk(shared_address(to.d[k]), reinterpret_cast<const uint8_t*>(x.d + at * 8), here * 32, barrier);
      if constexpr (L::kMin)
        copy_bulk(shared_address(to.sums[k]), reinterpret_cast<const uint8_t*>(x.sums + at * 32), here * 128, barrier);
    }
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) fetch(stage);

  const uint32_t book = grid.address(lane);
  float acc[NT][4];
#pragma unroll
  for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = 0.0f;
  float4* const totals = &memory.totals[0][threadIdx.x];
  for (int stage = 0; stage < stages; ++stage) {
    wait_for(shared_address(&memory.arrivals[stage % kStages]), stage / kStages & 1);
    const Stage<type, NT>& from = memory.stages[stage % kStages];
#pragma unroll
    for (int k = 0; k < kStageTiles; ++k) {
      const int tile = stage * kStageTiles + k, ahead = min(tile + 1, p.tiles_k - 1);
      if (tile >= p.tiles_k) break;
      reader.all(raw[k ^ 1], tile0 + ahead, super0 + ahead / 2);
      TileCodes codes;
      decode_tile<type, kCopies>(raw[k], book, lane, codes);
      const TileScales<type> scales(raw[k], lane);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        TileTokens tokens;
        const uint32_t q = shared_address(from.q[k][n] + lane * 16);
        tokens.q[0] = load_operands(q), tokens.q[1] = load_operands(q + 512);
        if constexpr (L::kMin) tokens.sums = from.sums[k][n][t * 8 + g];
        const float2 scale = *reinterpret_cast<const float2*>(from.d[k][n] + 2 * t);
        add_tile<type>(acc[n], codes, scales, tokens, scale, lane);
      }
      if (tile % kChainTiles == kChainTiles - 1 && tile != p.tiles_k - 1) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          float (&v)[4] = acc[n];
          float4& total = totals[n * (32 * kWarps)];
          float4 sum = make_float4(v[0], v[1], v[2], v[3]);
          if (tile >= kChainTiles) {
            const float4 before = total;
            sum = make_float4(before.x + v[0], before.y + v[1], before.z + v[2], before.w + v[3]);
          }
          total = sum;
          v[0] = v[1] = v[2] = v[3] = 0.0f;
        }
      }
    }
    __syncthreads();
    fetch(stage + kStages);
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float (&v)[4] = acc[n];
    if (p.tiles_k > kChainTiles) {
      const float4 before = totals[n * (32 * kWarps)];
      v[0] = before.x + v[0], v[1] = before.y + v[1], v[2] = before.z + v[2], v[3] = before.w + v[3];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int64_t token = (group0 + n) * 8 + 2 * t + k;
      if (token < p.T && tile_row < p.tiles_m) finish_pair(p, slab, tile_row, g, token, v[k], v[2 + k]);
    }
  }
}

// ---- experts

// Bytes of a token's activations in shared memory.
template <DType type>
constexpr int kTokenTileBytes = Layout<type>::kMin ? 148 : 132;

template <DType type>
constexpr int kTileRing = type == DType::IQ2_XXS  ? 4
                          : Layout<type>::kQ == 8 ? 1
                                                  : 2;  // tiles on their way

// Asks for the first tiles of `rows` tile rows from `first` on.
template <DType type>
__device__ __forceinline__ void start_rows(TileReader<type>& reader, RawTile<type> (&raw)[kTileRing<type>], int tiles,
                                           int64_t first, int rows) {
  reader.advance(first * tiles);
#pragma unroll
  for (int i = 0; i < kTileRing<type>; ++i)
    if (i < rows * tiles) reader.all(raw[i], i, i / 2);
}

// `rows` tile rows of one warp from `row` on, one after the other in memory and begun by start_rows, for the tokens in
// shared memory: q [tiles][NT][as activations.h has many rows], an address of shared memory, d [tiles][8 NT], sums
// [tiles][NT][32]. `decode` makes operands of a tile.
template <DType type, int NT, class Decode, class Finish>
__device__ __forceinline__ void walk_rows(TileReader<type>& reader, RawTile<type> (&raw)[kTileRing<type>], int tiles,
                                          int row, int rows, uint32_t q, const float* d, const uint32_t* sums, int lane,
                                          const Decode& decode, const Finish& finish) {
  using L = Layout<type>;
  constexpr int kRing = kTileRing<type>;
  const int g = lane / 4, t = lane % 4;
  q += lane * 16, d += 2 * t, sums += t * 8 + g;
  int left = rows * tiles;  // tiles from here to the end
  for (int end = row + rows; row < end; ++row) {
    float total[NT][4];
    for (int tile0 = 0; tile0 < tiles; tile0 += kChainTiles) {
      const int here = min(kChainTiles, tiles - tile0);
      float acc[NT][4];
#pragma unroll
      for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = 0.0f;
      const uint32_t chain_q = q + tile0 * (NT * 1024);
      const float* const chain_d = d + tile0 * (NT * 8);
      const uint32_t* const chain_sums = sums + tile0 * (NT * 32);
#pragma unroll
      for (int j = 0; j < kChainTiles; ++j) {
        if (j >= here) break;
        RawTile<type>& own = raw[j % kRing];
        const TileScales<type> scales(own, lane);
        TileCodes codes;
        decode(own, codes);
        if (j + kRing < left) reader.all(own, j + kRing, (j + kRing) / 2);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          TileTokens tokens;
          const uint32_t from = chain_q + (j * NT + n) * 1024;
          tokens.q[0] = load_operands(from), tokens.q[1] = load_operands(from + 512);
          if constexpr (L::kMin) tokens.sums = chain_sums[(j * NT + n) * 32];
          add_tile<type>(acc[n], codes, scales, tokens, *reinterpret_cast<const float2*>(chain_d + (j * NT + n) * 8),
                         lane);
        }
      }
      left -= here;
      reader.advance(here);
      if (here % kRing != 0) {  // the next tiles belong to other places of the ring
#pragma unroll
        for (int i = 0; i < kRing; ++i)
          if (i < left) reader.all(raw[i], i, i / 2);
      }
#pragma unroll
      for (int i = 0; i < NT * 4; ++i) {
        float& sum = total[i / 4][i % 4];
        sum = tile0 == 0 ? acc[i / 4][i % 4] : sum + acc[i / 4][i % 4];
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) finish(row, n * 8 + 2 * t + k, total[n][k], total[n][2 + k]);
  }
}

// kFew: up to 16 tokens, two blocks of threads a multiprocessor; each kernel takes its own of the items.
constexpr int kFewTokens = 16;
template <bool kFew>
constexpr int kItemWarps = kFew ? 8 : 16;

template <DType type, bool kFew>
__global__ void __launch_bounds__(32 * kItemWarps<kFew>, kFew ? 2 : 1)
    item_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  constexpr int kCopies = type == DType::IQ2_XXS ? 16 : 0, kMost = kFew ? kFewTokens : kItemTokens;
  extern __shared__ uint4 dynamic[];
  __shared__ Grid<kCopies> grid;
  __shared__ int32_t pairs[kMost];
  begin_kernel();
  const ExpertItem item = p.items[blockIdx.y];
  const int n = item.count, warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = p.tiles_k;
  if (n == 0 || (n <= kFewTokens) != kFew) return;
  grid.fill(w);
  if (threadIdx.x < n) pairs[threadIdx.x] = p.order[item.first + threadIdx.x];
  __syncthreads();
  const int groups = (n + 7) / 8;
  auto* q = reinterpret_cast<int8_t*>(dynamic);
  auto* d = reinterpret_cast<float*>(q + groups * tiles * 1024);
  auto* sums = reinterpret_cast<uint32_t*>(d + groups * tiles * 8);
  const int threads = static_cast<int>(blockDim.x);
  for (int i = threadIdx.x; i < n * tiles * 8; i += threads) {
    const int in = i / (tiles * 8), piece = i % (tiles * 8), row = pairs[in] / p.per_row;
    copy_async(q + (piece / 8 * groups + in / 8) * 1024 + piece % 8 * 128 + in % 8 * 16,
               x.q + (piece / 8 * x.eights + (row >> 3)) * 1024 + piece % 8 * 128 + (row & 7) * 16,
               std::integral_constant<int, 16>{});
  }
  for (int i = threadIdx.x; i < n * tiles; i += threads) {
    const int in = i / tiles, tile = i % tiles, row = pairs[in] / p.per_row;
    copy_async(d + (tile * groups + in / 8) * 8 + in % 8, x.d + tile * x.eights * 8 + row,
               std::integral_constant<int, 4>{});
  }
  if constexpr (L::kMin)
    for (int i = threadIdx.x; i < n * tiles * 4; i += threads) {
      const int in = i / (tiles * 4), block = i % (tiles * 4), row = pairs[in] / p.per_row;
      copy_async(sums + ((block / 4 * groups + in / 8) * 4 + block % 4) * 8 + in % 8,
                 x.sums + ((block / 4 * x.eights + (row >> 3)) * 4 + block % 4) * 8 + (row & 7),
                 std::integral_constant<int, 4>{});
    }
  wait_for_copies();
  __syncthreads();
  // The warps of all blocks of threads share the tile rows.
  const int walkers = static_cast<int>(gridDim.x) * kItemWarps<kFew>, each = (p.tiles_m + walkers - 1) / walkers;
  const int row = (static_cast<int>(blockIdx.x) * kItemWarps<kFew> + warp) * each, rows = min(each, p.tiles_m - row);
  if (rows <= 0) return;
  const uint32_t book = grid.address(lane);
  TileReader<type> reader(w, lane);
  RawTile<type> raw[kTileRing<type>];
  start_rows<type>(reader, raw, tiles, static_cast<int64_t>(item.expert) * p.tiles_m + row, rows);
  const auto run = [&](auto nt) {
    walk_rows<type, decltype(nt)::value>(
        reader, raw, tiles, row, rows, shared_address(q), d, sums, lane,
        [&](const RawTile<type>& from, TileCodes& codes) { decode_tile<type, kCopies>(from, book, lane, codes); },
        [&](int at, int in, float v0, float v1) {
          if (in < n) finish_pair(p, item.expert, at, lane / 4, pairs[in], v0, v1);
        });
  };
  if constexpr (kFew) {
    if (groups == 1)
      run(std::integral_constant<int, 1>{});
    else
      run(std::integral_constant<int, 2>{});
  } else {
    if (groups == 3)
      run(std::integral_constant<int, 3>{});
    else
      run(std::integral_constant<int, 4>{});
  }
}

// ---- launches

inline void allow_shared(const void* kernel, int64_t bytes) {
  if (bytes > 40 * 1024)
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Experts' items, planned by plan_experts (moe.cu).
template <DType type>
void launch_item_tiles(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  const auto run = [&](auto kernel, int warps, int tokens) {
    const int64_t bytes = static_cast<int64_t>(tokens) * p.tiles_k * kTokenTileBytes<type>;
    allow_shared(reinterpret_cast<const void*>(kernel), bytes);
    // About four tile rows a warp: the activations are copied seldom, and the last blocks of threads end together.
    const int slices = std::max(1, p.tiles_m / (4 * warps));
    launch_kernel(device.stream(), dim3(static_cast<unsigned>(slices), static_cast<unsigned>(p.n_items)),
                  static_cast<unsigned>(32 * warps), static_cast<size_t>(bytes), kernel, w, x, p);
  };
  run(item_blocks<type, true>, kItemWarps<true>, std::min(p.width, kFewTokens));
  if (p.width > kFewTokens) run(item_blocks<type, false>, kItemWarps<false>, p.width);
}

template <DType type>
void launch_tiles(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  const auto run = [&](auto groups, auto of) {
    constexpr int NT = decltype(groups)::value, kWarps = decltype(of)::value;
    constexpr auto kernel = tile_blocks<type, NT, kWarps>;
    constexpr int bytes = sizeof(TileMemory<type, NT, kWarps>);
    allow_shared(reinterpret_cast<const void*>(kernel), bytes);
    const dim3 grid(static_cast<unsigned>((p.T + 8 * NT - 1) / (8 * NT)),
                    static_cast<unsigned>((p.tiles_m + kWarps - 1) / kWarps), static_cast<unsigned>(p.slabs));
    launch_kernel(device.stream(), grid, 32 * kWarps, bytes, kernel, w, x, p);
  };
  // Enough blocks of threads for the device, weights read as seldom as that allows.
  if ((p.T + 63) / 64 * ((p.tiles_m + 7) / 8) * p.slabs >= device.multiprocessors())
    run(std::integral_constant<int, 8>{}, std::integral_constant<int, 8>{});
  else
    run(std::integral_constant<int, 2>{}, std::integral_constant<int, 4>{});
}

}  // namespace ds4::cuda
