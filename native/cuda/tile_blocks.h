// Block formats and many rows of activations: the kernel that walks tiles (linear.h), and its launches.
#pragma once

#include "cuda/block_products.h"

namespace ds4::cuda {

__device__ __forceinline__ void copy_async(void* to, const void* from, std::integral_constant<int, 16>) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from));
}
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, std::integral_constant<int, kBytes>) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "n"(kBytes));
}

// Many rows of activations: a block of threads computes 128 rows of W for up to 64 tokens. Weights go from memory into
// the registers of the one warp that needs them, activations through shared memory, three tiles deep.
template <DType type>
struct Stage {
  int8_t q[kTileTokens * kTileCols];   // [8 tokens][block][token][32]
  float d[kTileTokens * kTileBlocks];  // [8 tokens][block][token]
  float2 sums[Layout<type>::kMin ? kTileTokens * kTileBlocks : 2];
};
constexpr int kStages = 3;
constexpr int kFewTokens = 16;

// The products of a block of threads with NT times eight tokens. `fetch(i)` starts the copy of the activations of tile
// i.
template <DType type, int NT, int kCopies, class Fetch, class Finish>
__device__ __forceinline__ void run_tiles(const TileReader<type>& reader, uint32_t tile0, uint32_t super0, int tiles,
                                          const Stage<type>* stages, uint32_t book, int lane, const Fetch& fetch,
                                          const Finish& finish) {
  using L = Layout<type>;
  const int t = lane % 4;
  const Bias bias;
  RawTile<type> raw;
  reader.all(raw, tile0, super0);
  float acc[NT][4], total[NT][4];
#pragma unroll
  for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = total[i / 4][i % 4] = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    fetch(tile + 2);
    const Stage<type>& stage = stages[tile % kStages];
    const int ahead = min(tile + 1, tiles - 1);
    const OwnScales<type> own(raw, lane);
    RawTile<type> next;
    if constexpr (L::kQ == 8)
      reader.scales(raw, tile0 + ahead, super0 + ahead / 2);
    else
      reader.all(next, tile0 + ahead, super0 + ahead / 2);
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      int a[4];
      decode_codes<type, kCopies>(raw, b, book, lane, a);
      if constexpr (L::kQ == 8) reader.quants(raw, tile0 + ahead, b);
      Scales s[2];
      const int from = (lane & 28) + b;
#pragma unroll
      for (int hi = 0; hi < 2; ++hi) {
        s[hi].d = from_lane(own.row[hi].d, from);
        if (L::kHalves) s[hi].e = from_lane(own.row[hi].e, from);
        if (L::kMin) s[hi].m0 = from_lane(own.row[hi].m0, from), s[hi].m1 = from_lane(own.row[hi].m1, from);
      }
#pragma unroll
      for (int i = 0; i < NT; ++i) {
        const int at = i * kTileBlocks + b;
        const uint2 code = reinterpret_cast<const uint2*>(stage.q)[at * 32 + lane];
        const float2 dx = reinterpret_cast<const float2*>(stage.d)[at * 4 + t];
        float4 sums = make_float4(0, 0, 0, 0);
        if constexpr (L::kMin) sums = reinterpret_cast<const float4*>(stage.sums)[at * 4 + t];
        add_block<type>(acc[i], a, s[0], s[1], lane, code, dx, sums, bias);
      }
    }
    if constexpr (L::kQ != 8) raw = next;
    if (tile % kChainTiles == kChainTiles - 1 || tile == tiles - 1) {
      const bool start = tile < kChainTiles;
#pragma unroll
      for (int i = 0; i < NT * 4; ++i) {
        float &sum = total[i / 4][i % 4], &chain = acc[i / 4][i % 4];
        sum = start ? chain : sum + chain;
        chain = 0.0f;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < NT; ++i)
#pragma unroll
    for (int k = 0; k < 2; ++k) finish(i * 8 + 2 * t + k, total[i][k], total[i][2 + k]);
}

// kFew: up to 16 tokens, with registers for more blocks of threads; of the experts' items each kernel takes its own.
template <DType type, bool kFew>
__global__ void __launch_bounds__(kBlockThreads, kFew ? 3 : 2) tile_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  constexpr int kCopies = type == DType::IQ2_XXS ? 8 : 0;
  __shared__ alignas(16) Stage<type> stages[kStages];
  __shared__ Grid<kCopies> grid;
  begin_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int slab, n, tile_row, first = 0;
  if (p.items) {
    const ExpertItem item = p.items[blockIdx.y];
    slab = item.expert, n = item.count, first = item.first;
    tile_row = static_cast<int>(blockIdx.x) * kBlockWarps + warp;
    if (n == 0 || (n <= kFewTokens) != kFew) return;
  } else {
    constexpr int tokens = kFew ? kFewTokens : kTileTokens;
    slab = static_cast<int>(blockIdx.z);
    first = static_cast<int>(blockIdx.x) * tokens;
    n = min(tokens, static_cast<int>(p.T) - first);
    tile_row = static_cast<int>(blockIdx.y) * kBlockWarps + warp;
  }
  const auto pair_of = [&](int i) { return p.items ? p.order[first + min(i, n - 1)] : first + min(i, n - 1); };
  const int64_t column = p.items ? 0 : slab * (p.cols / 32);
  grid.fill(w);

  // Each thread copies one block of one token of every tile.
  const int slot = threadIdx.x / kTileBlocks, own_block = threadIdx.x % kTileBlocks;
  const int place = (slot / 8 * kTileBlocks + own_block) * 8 + slot % 8;
  const int token = pair_of(slot) / (p.items ? p.per_row : 1);
  const int64_t source = (token >> 3) * x.blocks * 8 + (token & 7) + (column + own_block) * 8;
  const int slots = kFew ? (n <= 8 ? 8 : 16) : (n <= 32 ? 32 : 64);
  const auto fetch = [&](int tile) {
    if (tile < p.tiles_k && slot < slots) {
      Stage<type>& to = stages[tile % kStages];
      const int64_t from = source + static_cast<int64_t>(tile) * kTileBlocks * 8;
      copy_async(to.q + place * 32, x.q + from * 32, std::integral_constant<int, 16>{});
      copy_async(to.q + place * 32 + 16, x.q + from * 32 + 16, std::integral_constant<int, 16>{});
      copy_async(to.d + place, x.d + from, std::integral_constant<int, 4>{});
      if constexpr (L::kMin) copy_async(to.sums + place, x.sums + from, std::integral_constant<int, 8>{});
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(0);
  fetch(1);
  const auto row = static_cast<uint32_t>(slab * p.tiles_m + min(tile_row, p.tiles_m - 1));
  const auto run = [&](auto nt) {
    run_tiles<type, decltype(nt)::value, kCopies>(TileReader<type>(w, lane), row * p.tiles_k, row * (p.tiles_k / 2),
                                                  p.tiles_k, stages, grid.address(lane), lane, fetch,
                                                  [&](int in, float v0, float v1) {
                                                    if (in < n && tile_row < p.tiles_m)
                                                      finish_pair(p, slab, tile_row, lane / 4, pair_of(in), v0, v1);
                                                  });
  };
  if constexpr (kFew) {
    if (slots == 8)
      run(std::integral_constant<int, 1>{});
    else
      run(std::integral_constant<int, 2>{});
  } else {
    if (slots <= 32)
      run(std::integral_constant<int, 4>{});
    else
      run(std::integral_constant<int, 8>{});
  }
  asm volatile("cp.async.wait_group 0;");
}

// The experts' work items, sorted by plan_experts.
template <DType type>
void launch_item_tiles(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  const dim3 grid(static_cast<unsigned>((p.tiles_m + kBlockWarps - 1) / kBlockWarps), static_cast<unsigned>(p.n_items));
  launch_kernel(device.stream(), grid, kBlockThreads, 0, tile_blocks<type, true>, w, x, p);
  if (p.width > kFewTokens) launch_kernel(device.stream(), grid, kBlockThreads, 0, tile_blocks<type, false>, w, x, p);
}

template <DType type>
void launch_tiles(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  const auto tile_rows = static_cast<unsigned>((p.tiles_m + kBlockWarps - 1) / kBlockWarps);
  const auto run = [&](auto kernel, int64_t tokens) {
    const dim3 grid(static_cast<unsigned>((p.T + tokens - 1) / tokens), tile_rows, static_cast<unsigned>(p.slabs));
    launch_kernel(device.stream(), grid, kBlockThreads, 0, kernel, w, x, p);
  };
  // Enough blocks of threads for the device, weights read as seldom as that allows.
  if ((p.T + kTileTokens - 1) / kTileTokens * tile_rows * p.slabs >= device.multiprocessors())
    run(tile_blocks<type, false>, kTileTokens);
  else
    run(tile_blocks<type, true>, kFewTokens);
}

}  // namespace ds4::cuda
