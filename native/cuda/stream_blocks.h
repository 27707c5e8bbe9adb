// Block formats and few rows of activations: the kernel that streams the weights (linear.h), and its launch.
#pragma once

#include <algorithm>

#include "cuda/async_copies.h"
#include "cuda/block_products.h"
#include "cuda/leaders.h"

namespace ds4::cuda {

// The planes' parts of one unit of work of a warp in shared memory: up to kRows tile rows of one chain.
template <DType type, int kRows>
struct UnitBytes {
  using L = Layout<type>;
  static constexpr int kQ = kChainTiles * 256 * L::kQ, kH = kChainTiles * 256 * L::kH, kS = kChainTiles * 16 * L::kS,
                       kD = kChainTiles / 2 * 16 * L::kD, kRow = kQ + kH + kS + kD, kAll = kRow * kRows;
};

// Bytes of shared memory that stream_blocks wants beside what it declares, and whether it copies weights there.
template <DType type>
constexpr bool kBulk = Layout<type>::kQ < 8;
template <DType type, int NT>
constexpr int kUnitRows = Layout<type>::kQ == 2 && NT == 1 ? 2 : 1;
template <DType type, int NT>
constexpr int kStreamBytes = kBulk<type> ? 2 * kBlockWarps * UnitBytes<type, kUnitRows<type, NT>>::kAll : 0;

// Few rows of activations: weights stream from memory through registers (Q8_0) or through shared memory (smaller
// blocks, whose decoding leaves no registers to wait with), and on into the matrix units. A warp computes one chain of
// one tile row (of two where blocks are small); blocks of threads stay and take the next tile rows when they are done,
// the weights on their way while others are computed. kOne: one row of activations for every slab.
template <DType type, int NT, bool kOne>
__global__ void __launch_bounds__(kBlockThreads, NT >= 4 ? 1 : 2) stream_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  constexpr int kRows = kUnitRows<type, NT>;  // tile rows of a warp
  constexpr int kRing = 2;                    // tiles of Q8_0 on their way
  constexpr int kTiles = kChainTiles * kRows;
  constexpr int kCopies = type == DType::IQ2_XXS ? (NT == 1 ? 16 : 8) : 0;
  constexpr bool kLeads = NT == 1 && !kOne;
  using Bytes = UnitBytes<type, kRows>;
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t arrivals[kBlockWarps][2];
  struct Unit {
    uint32_t tile, super;
    int chain, tiles, rows;
  };
  // An item: a slab (or a leader of pairs) and a group of tile rows.
  struct Item {
    int lead, group;
  };
  __shared__ float part[2][kBlockWarps][kRows * NT * 128];
  __shared__ Grid<kCopies> grid;
  __shared__ Leaders<8> leaders;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chains = (p.tiles_k + kChainTiles - 1) / kChainTiles, at_once = min(chains, kBlockWarps);
  const int passes = (chains + at_once - 1) / at_once, warp_rows = kBlockWarps / at_once;
  const int groups = (p.tiles_m + warp_rows * kRows - 1) / (warp_rows * kRows), sub = warp / at_once;
  const TileReader<type> reader(w, lane);
  int leads = p.slabs;
  if (p.experts) {
    begin_kernel();  // whose experts to read is the result of the kernel before
    leads = static_cast<int>(p.n_items);
    if constexpr (kLeads) {
      leaders.find(p.experts, leads, reinterpret_cast<int*>(part));
      leads = leaders.count;
    }
  }
  const auto slab_of = [&](int lead) {
    if (!p.experts) return lead;
    if constexpr (kLeads) return leaders.expert[lead];
    return p.experts[lead];
  };
  const auto advance = [&](Item& item, int by) {
    item.group += by;
    while (item.group >= groups) item.group -= groups, ++item.lead;
  };
  const auto unit_of = [&](const Item& item, int pass) {
    Unit u{};
    if (item.lead >= leads) return u;
    const int tile_row = (item.group * warp_rows + sub) * kRows;
    u.chain = pass * at_once + warp % at_once;
    if (sub >= warp_rows || tile_row >= p.tiles_m || u.chain >= chains) return u;
    const uint32_t row = static_cast<uint32_t>(slab_of(item.lead) * p.tiles_m + tile_row);
    u.tile = row * p.tiles_k + u.chain * kChainTiles;
    u.super = row * (p.tiles_k / 2) + u.chain * (kChainTiles / 2);
    u.tiles = min(kChainTiles, p.tiles_k - u.chain * kChainTiles);
    u.rows = min(kRows, p.tiles_m - tile_row);
    return u;
  };
  RawTile<type> raw[kBulk<type> ? 1 : kRing];
  // Tile `i` of a unit: column i / kRows of its tile row i % kRows.
  const auto load = [&](const Unit& u, int i) {
    const int column = i / kRows, row = i % kRows;
    if (column < u.tiles && row < u.rows)
      reader.all(raw[i % kRing], u.tile + row * p.tiles_k + column, u.super + row * (p.tiles_k / 2) + column / 2);
  };
  // The warp's two stages. Its units follow each other in them; `coming` is the next one to copy.
  uint8_t* const stages = reinterpret_cast<uint8_t*>(dynamic) + warp * (2 * Bytes::kAll);
  const auto copy = [&](const Unit& u, int stage) {
    if (lane != 0 || u.tiles == 0) return;
    const uint32_t barrier = shared_address(&arrivals[warp][stage]);
    const int pairs = (u.tiles + 1) / 2;
    const int each = u.tiles * (256 * L::kQ + 256 * L::kH + 16 * L::kS) + pairs * (16 * L::kD);
    expect_bytes(barrier, each * u.rows);
    for (int row = 0; row < u.rows; ++row) {
      const uint32_t to = shared_address(stages + stage * Bytes::kAll + row * Bytes::kRow);
      const uint64_t tile = u.tile + row * p.tiles_k, super = u.super + row * (p.tiles_k / 2);
      copy_bulk(to, w.q + tile * (256 * L::kQ), u.tiles * (256 * L::kQ), barrier);
      if (L::kH > 0) copy_bulk(to + Bytes::kQ, w.h + tile * (256 * L::kH), u.tiles * (256 * L::kH), barrier);
      copy_bulk(to + Bytes::kQ + Bytes::kH, w.s + tile * (16 * L::kS), u.tiles * (16 * L::kS), barrier);
      if (L::kD > 0)
        copy_bulk(to + Bytes::kQ + Bytes::kH + Bytes::kS, w.d + super * (16 * L::kD), pairs * (16 * L::kD), barrier);
    }
  };
  Item item{0, 0};
  advance(item, static_cast<int>(blockIdx.x));
  Unit unit = unit_of(item, 0);
  Item coming = item;
  int coming_pass = 0;
  const auto next_coming = [&] {
    if (++coming_pass < passes) return;
    coming_pass = 0;
    advance(coming, static_cast<int>(gridDim.x));
  };
  uint32_t parity = 0;  // bit s: of stage s
  if constexpr (kBulk<type>) {
    if (lane == 0) {
      for (uint64_t& a : arrivals[warp]) init_barrier(shared_address(&a));
      fence_barriers();
    }
    __syncwarp();
    for (int stage = 0; stage < 2; ++stage) {
      copy(unit_of(coming, coming_pass), stage);
      next_coming();
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRing; ++i) load(unit, i);
  }
  if constexpr (kCopies > 0) {
    grid.fill(w);
    __syncthreads();
  }
  const uint32_t book = grid.address(lane);
  if (!p.experts) begin_kernel();

  int buffer = 0;  // also the stage of the unit
  float total0 = 0.0f, total1 = 0.0f;
  while (item.lead < leads) {
    Item following = item;
    advance(following, static_cast<int>(gridDim.x));
    const int slab = slab_of(item.lead);
    // The token whose operands the lane holds: row `in` of a group of eight.
    int64_t group = 0, in = kOne ? 0 : g, column = 0;
    bool single = kOne;
    if (p.experts) {
      int token = item.lead;
      if constexpr (kLeads) {
        token = leaders.members[item.lead][g];
        single = leaders.size[item.lead] == 1;
      }
      token /= p.per_row;
      group = token >> 3, in = token & 7;
    } else {
      column = slab * (p.cols / 32);
    }
    for (int pass = 0; pass < passes; ++pass) {
      const Unit next = pass + 1 < passes ? unit_of(item, pass + 1) : unit_of(following, 0);
      float acc[kRows][NT][4];
#pragma unroll
      for (int i = 0; i < kRows * NT * 4; ++i) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
      const int64_t block0 = group * x.blocks + column + unit.chain * (kChainTiles * kTileBlocks);
      const int8_t* xq = x.q + block0 * 256 + in * 64 + 16 * t;
      const uint32_t* xs = x.sums + (block0 + t) * 8 + in;
      asm volatile("" : "+l"(xq), "+l"(xs));  // addresses stay in registers
      // Lane 4g + t has the scale of token g for tile t of the chain.
      float own[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n)
        own[n] = __ldg(x.d + (block0 / kTileBlocks + min(t, max(unit.tiles, 1) - 1)) * 8 + in + n * x.blocks * 2);
      const auto compute = [&](auto one) {
        constexpr bool kSingle = decltype(one)::value;
        TileTokens tokens[NT];
#pragma unroll
        for (int j = 0; j < kChainTiles; ++j) {
          if (j < unit.tiles) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const int64_t at = n * x.blocks + j * kTileBlocks;
              if constexpr (L::kMin) tokens[n].sums = __ldg(xs + at * 8);
#pragma unroll
              for (int i = 0; i < kTileBlocks / 2; ++i) {
                tokens[n].q[i] = make_uint4(0, 0, 0, 0);
                if (!kSingle || g == 0) tokens[n].q[i] = __ldg(reinterpret_cast<const uint4*>(xq + (at + 2 * i) * 256));
              }
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if (kRows > 1 && r >= unit.rows) continue;
              if constexpr (kBulk<type>) {
                const uint8_t* at = stages + buffer * Bytes::kAll + r * Bytes::kRow;
                const Planes copied{at, at + Bytes::kQ, at + Bytes::kQ + Bytes::kH,
                                    at + Bytes::kQ + Bytes::kH + Bytes::kS, nullptr};
                TileReader<type, true>(copied, lane).all(raw[0], j, j / 2);
              }
              const RawTile<type>& tile = raw[kBulk<type> ? 0 : (j * kRows + r) % kRing];
              const TileScales<type> scales(tile, lane);
              TileCodes codes;
              decode_tile<type, kCopies>(tile, book, lane, codes);
#pragma unroll
              for (int n = 0; n < NT; ++n) {
                const float first = from_lane(own[n], kSingle ? j : 8 * t + j);
                const float2 scale = make_float2(first, kSingle ? 0.0f : from_lane(own[n], 8 * t + 4 + j));
                add_tile<type, kSingle>(acc[r][n], codes, scales, tokens[n], scale, lane);
              }
            }
          }
          if constexpr (!kBulk<type>) {
            const int i = j + kRing;
            if (i < kTiles)
              load(unit, i);
            else
              load(next, i - kTiles);
          }
        }
      };
      if (kBulk<type> && unit.tiles > 0) {
        wait_for(shared_address(&arrivals[warp][buffer]), parity >> buffer & 1u);
        parity ^= 1u << buffer;
      }
      if (single)
        compute(std::true_type{});
      else if constexpr (!kOne)
        compute(std::false_type{});
      if constexpr (kBulk<type>) {
        __syncwarp();
        copy(unit_of(coming, coming_pass), buffer);
        next_coming();
      }
#pragma unroll
      for (int i = 0; i < kRows * NT; ++i) {
        float2* to = reinterpret_cast<float2*>(part[buffer][warp] + i * 128) + lane;
        to[0] = make_float2(acc[i / NT][i % NT][0], acc[i / NT][i % NT][1]);
        to[32] = make_float2(acc[i / NT][i % NT][2], acc[i / NT][i % NT][3]);
      }
      __syncthreads();
      // A thread adds the chains of rows g and g + 8 for one token. With several passes there is one for each thread.
      constexpr int kEach = kOne ? 8 : 64;
      const int here = min(at_once, chains - pass * at_once);
      for (int o = threadIdx.x; o < warp_rows * kRows * NT * kEach; o += kBlockThreads) {
        const int of = o / (kRows * NT * kEach), in = o / kEach % (kRows * NT), n = in % NT;
        const int at = kOne ? o % kEach * 8 : o % kEach;
        const float* from = part[buffer][of * at_once] + in * 128 + at;
        float v0[kBlockWarps], v1[kBlockWarps];
#pragma unroll
        for (int c = 0; c < kBlockWarps; ++c)
          if (c < here) v0[c] = from[c * (kRows * NT * 128)], v1[c] = from[c * (kRows * NT * 128) + 64];
        total0 = pass == 0 ? v0[0] : total0 + v0[0];
        total1 = pass == 0 ? v1[0] : total1 + v1[0];
#pragma unroll
        for (int c = 1; c < kBlockWarps; ++c)
          if (c < here) total0 = total0 + v0[c], total1 = total1 + v1[c];
        if (pass + 1 < passes) continue;
        const int tile_row = (item.group * warp_rows + of) * kRows + in / NT, token = n * 8 + at % 8;
        if (tile_row >= p.tiles_m) continue;
        int64_t out_row = token;
        if (kOne) {
          out_row = p.experts ? item.lead : 0;
        } else if (p.experts) {
          if (token >= leaders.size[item.lead]) continue;
          out_row = leaders.members[item.lead][token % 8];
        } else if (token >= p.T) {
          continue;
        }
        finish_pair(p, slab, tile_row, at / 8, out_row, total0, total1);
      }
      buffer ^= 1;
      unit = next;
    }
    item = following;
  }
}

template <DType type, int NT, bool kOne>
void launch_stream(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  constexpr auto kernel = stream_blocks<type, NT, kOne>;
  constexpr int bytes = kStreamBytes<type, NT>;
  static int resident = 0;  // blocks of threads that a multiprocessor holds
  if (resident == 0) {
    if (bytes > 0) DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    DS4_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kBlockThreads, bytes));
    resident = std::max(1, resident);
  }
  const int chains = (p.tiles_k + kChainTiles - 1) / kChainTiles;
  const int tile_rows = kBlockWarps / std::min(chains, kBlockWarps) * kUnitRows<type, NT>;
  const int64_t items = (p.experts ? p.n_items : p.slabs) * ((p.tiles_m + tile_rows - 1) / tile_rows);
  launch_kernel(device.stream(), static_cast<unsigned>(std::min<int64_t>(items, resident * device.multiprocessors())),
                kBlockThreads, bytes, kernel, w, x, p);
}

}  // namespace ds4::cuda
