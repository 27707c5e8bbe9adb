// Q8_0 and up to eight rows of activations: the kernel that streams dense matrices of whole chains.
//
// A block of threads has neighbouring tile rows, in batches of 32 units; a unit is one chain (four tiles) of one tile
// row, and a warp keeps to a chain as long as it can, so that the chain's activations stay in registers. A warp copies
// its own units two ahead by bulk copies, the first before the kernel before has ended; blocks of threads meet once a
// batch, to add chains in order.
//
// Bytes: the weights once, the activations once for each block of threads. Instructions of a warp for 512 weights: 33,
// where a multiprocessor's schedulers have 130 at 4.2 TB/s: what counts is that enough copies are on their way, 68 to
// 136 KB a multiprocessor. With sixteen rows the kernel of stream_blocks.h is faster.
#pragma once

#include <algorithm>

#include "cuda/async_copies.h"
#include "cuda/block_products.h"

namespace ds4::cuda {

constexpr int kBatchUnits = 32;

template <DType type>
constexpr bool kDenseKernel = type == DType::Q8_0;

template <DType type>
struct DenseShape {
  using L = Layout<type>;
  static constexpr int kQ = kChainTiles * 256 * L::kQ, kS = kChainTiles * 16 * L::kS, kUnit = kQ + kS;
  static constexpr int kRing = 2 * kUnit;  // of a warp
  static constexpr int kPart = kBatchUnits * 128;
  static constexpr int kBytes = kBlockWarps * kRing + 2 * kPart * static_cast<int>(sizeof(float));
};

template <DType type>
__global__ void __launch_bounds__(kBlockThreads, 1) dense_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  using Shape = DenseShape<type>;
  static_assert(L::kH == 0 && L::kD == 0);
  extern __shared__ uint4 dynamic[];
  __shared__ uint64_t arrivals[kBlockWarps][2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  uint8_t* const ring = reinterpret_cast<uint8_t*>(dynamic) + warp * Shape::kRing;
  float* const parts = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(dynamic) + kBlockWarps * Shape::kRing);
  // Chains are a power of two; `rows` of a batch.
  const int chains = p.tiles_k / kChainTiles, rows = kBatchUnits / chains;
  const int chain_bits = __ffs(chains) - 1, row_bits = __ffs(rows) - 1;
  const int all = p.slabs * p.tiles_m;
  const int first = static_cast<int>(static_cast<int64_t>(all) * blockIdx.x / gridDim.x),
            last = static_cast<int>(static_cast<int64_t>(all) * (blockIdx.x + 1) / gridDim.x);
  // Unit i of the warp: of batch i / 4, its chain and tile row.
  constexpr int kEach = kBatchUnits / kBlockWarps;
  const int units = ((last - first + rows - 1) >> row_bits) * kEach;
  struct Unit {
    int chain, row;
  };
  const auto unit_of = [&](int i) {
    const int k = i % kEach, row0 = first + i / kEach * rows;
    if (chains >= kBlockWarps) return Unit{warp + kBlockWarps * (k >> row_bits), row0 + (k & (rows - 1))};
    return Unit{warp & (chains - 1), row0 + (warp >> chain_bits) + k * (kBlockWarps >> chain_bits)};
  };
  const uint64_t policy = reading_policy(p.T <= kOnceRows);
  int coming = 0, stage_coming = 0;  // the next unit to copy, and where
  const auto copy_next = [&] {
    Unit u{};
    for (; coming < units; ++coming) {
      u = unit_of(coming);
      if (u.row < last) break;
    }
    if (coming == units) return;
    ++coming;
    if (lane == 0) {
      const uint32_t barrier = shared_address(&arrivals[warp][stage_coming]);
      const uint32_t to = shared_address(ring + stage_coming * Shape::kUnit);
      const int64_t tile = static_cast<int64_t>(u.row) * p.tiles_k + u.chain * kChainTiles;
      expect_bytes(barrier, Shape::kUnit);
      copy_bulk(to, w.q + tile * (256 * L::kQ), Shape::kQ, barrier, policy);
      copy_bulk(to + Shape::kQ, w.s + tile * (16 * L::kS), Shape::kS, barrier, policy);
    }
    stage_coming ^= 1;
  };
  if (lane == 0) {
    for (uint64_t& a : arrivals[warp]) init_barrier(shared_address(&a));
    fence_barriers();
  }
  __syncwarp();
  copy_next();
  copy_next();
  begin_kernel();

  TileTokens tokens[kChainTiles];
  float2 dx[kChainTiles];
  int have = -1;  // whose activations these are
  int stage = 0, buffer = 0;
  uint32_t parity = 0;  // bit s: of stage s
  for (int i = 0; i < units;) {
    float* const part = parts + buffer * Shape::kPart;
    const int row0 = first + i / kEach * rows;
    for (int k = 0; k < kEach; ++k, ++i) {
      const Unit u = unit_of(i);
      if (u.row >= last) continue;
      const int slab = p.slabs > 1 ? u.row / p.tiles_m : 0;
      if (const int want = slab * chains + u.chain; want != have) {
        have = want;
        const int64_t block = slab * (p.cols / 32) + u.chain * (kChainTiles * kTileBlocks);
#pragma unroll
        for (int j = 0; j < kChainTiles; ++j) {
#pragma unroll
          for (int h = 0; h < kTileBlocks / 2; ++h)
            tokens[j].q[h] =
                __ldg(reinterpret_cast<const uint4*>(x.q + (block + j * kTileBlocks + 2 * h) * 256) + lane);
          tokens[j].sums = 0;
          dx[j] = __ldg(reinterpret_cast<const float2*>(x.d + (block / kTileBlocks + j) * 8) + t);
        }
      }
      wait_for(shared_address(&arrivals[warp][stage]), parity >> stage & 1u);
      parity ^= 1u << stage;
      const uint8_t* at = ring + stage * Shape::kUnit;
      const TileReader<type, true> reader(Planes{at, nullptr, at + Shape::kQ, nullptr, nullptr}, lane);
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kChainTiles; ++j) {
        RawTile<type> raw;
        reader.all(raw, j, 0);
        const TileScales<type> scales(raw, lane);
        TileCodes codes;
        decode_tile<type, 0>(raw, 0, lane, codes);
        add_tile<type>(acc, codes, scales, tokens[j], dx[j], lane);
      }
      __syncwarp();
      copy_next();
      stage ^= 1;
      float2* to = reinterpret_cast<float2*>(part + ((u.row - row0) * chains + u.chain) * 128) + lane;
      to[0] = make_float2(acc[0], acc[1]);
      to[32] = make_float2(acc[2], acc[3]);
    }
    __syncthreads();
    // Chains in order; a thread has rows g and g + 8 of a tile row for one token.
    const int here = min(rows, last - row0);
    for (int o = threadIdx.x; o < here * 64; o += kBlockThreads) {
      const int row = o / 64, in = o % 64, token = in % 8;
      if (token >= p.T) continue;
      const float* from = part + row * chains * 128 + in;
      float v0 = from[0], v1 = from[64];
      for (int c = 1; c < chains; ++c) v0 = v0 + from[c * 128], v1 = v1 + from[c * 128 + 64];
      const int slab = p.slabs > 1 ? (row0 + row) / p.tiles_m : 0;
      finish_pair(p, slab, row0 + row - slab * p.tiles_m, in / 8, token, v0, v1);
    }
    buffer ^= 1;
  }
}

// Whether dense_blocks takes this product: no experts, up to eight rows, whole chains that divide a batch.
template <DType type>
bool dense_kernel_takes(const Device& device, const LinearArgs& p) {
  if constexpr (!kDenseKernel<type>) {
    return false;
  } else {
    const int chains = p.tiles_k / kChainTiles;
    return !p.experts && !p.items && p.T <= 8 && chains > 0 && kBatchUnits % chains == 0 &&
           p.cols == chains * kChainTiles * kTileCols && DenseShape<type>::kBytes + 1024 <= device.block_shared();
  }
}

template <DType type>
void launch_dense(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  if constexpr (kDenseKernel<type>) {
    constexpr auto kernel = dense_blocks<type>;
    constexpr int bytes = DenseShape<type>::kBytes;
    static const bool ready = [] {
      DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      return true;
    }();
    static_cast<void>(ready);
    const auto blocks = std::min<int64_t>(device.multiprocessors(), static_cast<int64_t>(p.slabs) * p.tiles_m);
    launch_kernel(device.stream(), static_cast<unsigned>(blocks), kBlockThreads, bytes, kernel, w, x, p);
  }
}

}  // namespace ds4::cuda
