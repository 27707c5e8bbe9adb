// Dense matrices of a block format and many rows of activations, on Hopper's warp group units (wgmma, sm_90a).
//
// Four warp groups of a block of threads; a warp has 16 rows of W, its group 64, for 32 kHalves tokens. Weights and
// activations come by bulk copies, one tile of columns a stage; weights go from there into registers (the first
// operand), activations are read by the units where they lie. A block of threads stays and takes the next unit of work,
// whose first stages are on their way while the one before ends.
//
// Of 64 x 32 outputs and 32 columns a warp issues one product, 16 conversions and 16 additions, which is what counts:
// the units take 16 cycles of a multiprocessor for it, the schedulers 41.
#pragma once

#include <algorithm>

#include "cuda/async_copies.h"
#include "cuda/block_products.h"

namespace ds4::cuda {

constexpr int kWideGroups = 4;
constexpr int kWideWarps = 4 * kWideGroups;
constexpr int kWideThreads = 32 * kWideWarps + 128;  // the last group asks for what the others compute with
// Lanes of a warp that say that a stage may be written again. One is enough behind the warp's barrier, but racecheck
// takes an arrival for the arriving thread alone.
#ifdef DS4_RACECHECK
constexpr int kLeaving = 32;
#else
constexpr int kLeaving = 1;
#endif

template <DType type>
constexpr bool kWideKernel = type == DType::Q8_0;

// How a block of threads divides: groups of 64 rows, of 32 kHalves tokens, of chains.
template <int kHalves_, int kRowGroups_, int kTokenGroups_, int kSplits_>
struct WideShape {
  static_assert(kRowGroups_ * kTokenGroups_ * kSplits_ == kWideGroups);
  static constexpr int kHalves = kHalves_, kRowGroups = kRowGroups_, kTokenGroups = kTokenGroups_, kSplits = kSplits_;
  static constexpr int kTileRows = 4 * kRowGroups, kEights = 4 * kHalves * kTokenGroups;  // of a unit
};

template <DType type, class Shape>
struct WideMemory {
  using L = Layout<type>;
  struct Stage {
    alignas(128) uint8_t x[Shape::kSplits][Shape::kEights][1024];
    uint8_t q[Shape::kSplits][Shape::kTileRows][256 * L::kQ];
    uint8_t s[Shape::kSplits][Shape::kTileRows][16 * L::kS];
    float d[Shape::kSplits][Shape::kEights][8];
  };
  static constexpr int kTotals = Shape::kSplits > 1 ? 128 : 32 * kWideWarps;  // threads whose sums are apart
  static constexpr int kRoom = 225 * 1024 - static_cast<int>(sizeof(float4)) * 4 * Shape::kHalves * kTotals;
  static constexpr int kStages =
      kRoom / static_cast<int>(sizeof(Stage)) < 6 ? kRoom / static_cast<int>(sizeof(Stage)) : 6;
  static_assert(kStages >= 3 && sizeof(Stage) % 128 == 0);
  Stage stages[kStages];
  float4 totals[4 * Shape::kHalves][kTotals];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Words of shared memory; behind a wait for their arrival.
__device__ __forceinline__ void load_shared(uint32_t (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address));
}
template <class T>
__device__ __forceinline__ void load_shared(T (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address));
}
__device__ __forceinline__ void group_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `left` products are on their way.
template <int left>
__device__ __forceinline__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}
// Matrices of eight rows of 16 bytes: the second half of the columns 128 bytes behind the first, the next eight rows
// 1024 bytes.
__device__ __forceinline__ uint32_t describe_operand(uint32_t address) {
  return address >> 4 | 128u >> 4 << 16;
}
__device__ __forceinline__ uint64_t whole_operand(uint32_t low) {
  return static_cast<uint64_t>(1024u >> 4) << 32 | low;
}
// c = a b of 64 rows, 32 tokens and 32 columns: c[4n + 2r + i] of row g + 8r and token 8n + 2t + i.
__device__ __forceinline__ void group_multiply(int (&c)[16], const int (&a)[4], uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19}, %20, add;\n"
      "}\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]), "+r"(c[4]), "+r"(c[5]), "+r"(c[6]), "+r"(c[7]), "+r"(c[8]),
        "+r"(c[9]), "+r"(c[10]), "+r"(c[11]), "+r"(c[12]), "+r"(c[13]), "+r"(c[14]), "+r"(c[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The sums are in their registers from here on.
__device__ __forceinline__ void settle_sums(int (&c)[16]) {
#pragma unroll
  for (int& v : c) asm volatile("" : "+r"(v)::"memory");
}
#endif

template <DType type, class Shape>
__global__ void __launch_bounds__(kWideThreads, 1) wide_blocks(Planes w, Activations x, LinearArgs p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<type>;
  using Memory = WideMemory<type, Shape>;
  constexpr int kHalves = Shape::kHalves, kSplits = Shape::kSplits, kRows = Shape::kTileRows;
  constexpr uint32_t kStages = Memory::kStages;
  static_assert(!L::kInteger && !L::kMin && L::kH == 0 && L::kD == 0);
  extern __shared__ __align__(1024) uint8_t wide_memory[];
  auto& memory = *reinterpret_cast<Memory*>(wide_memory);
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ int turns[4];  // chains that are added up, of each warp of a group
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; ++i)
      init_barrier(shared_address(&full[i]), 4), init_barrier(shared_address(&empty[i]), kLeaving * kWideWarps);
    for (int& v : turns) v = 0;
    fence_barriers();
  }
  __syncthreads();
  begin_kernel();

  const int eights = static_cast<int>((p.T + 7) / 8), columns = (eights + Shape::kEights - 1) / Shape::kEights;
  const int bands = (p.tiles_m + kRows - 1) / kRows, units = columns * bands * p.slabs;
  const int chains = (p.tiles_k + kChainTiles - 1) / kChainTiles;
  const int steps = kSplits == 1 ? p.tiles_k : (chains + kSplits - 1) / kSplits * kChainTiles;
  // Tile of a split at a step of a unit; what comes behind the last is computed in vain.
  const auto tile_of = [&](int step, int of) {
    return kSplits == 1 ? step : (step / kChainTiles * kSplits + of) * kChainTiles + step % kChainTiles;
  };
  // The same in a warp, and known to be.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);

  if (warp >= kWideWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    // Each warp for its share: tile rows, and the tokens of a split.
    const bool asks = threadIdx.x % 32 == 0;
    const int own = warp - kWideWarps;
    uint32_t count = 0;
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
      const int column = unit % columns, band = unit / columns % bands, slab = unit / (columns * bands);
      const int first = column * Shape::kEights, here = min(Shape::kEights, eights - first);
      const int64_t row0 = static_cast<int64_t>(slab) * p.tiles_m + band * kRows;
      const int last = p.tiles_m - 1 - band * kRows;
      for (int step = 0; step < steps; ++step, ++count) {
        const uint32_t stage = count % kStages, turn = count / kStages;
        if (turn > 0) wait_for(shared_address(&empty[stage]), (turn & 1) ^ 1);
        if (!asks) continue;
        auto& to = memory.stages[stage];
        const uint32_t barrier = shared_address(&full[stage]);
        expect_bytes(barrier, kSplits * (kRows / 4) * (256 * L::kQ + 16 * L::kS) + (own < kSplits ? here * 1056 : 0));
        if (own < kSplits) {
          const int tile = min(tile_of(step, own), p.tiles_k - 1);
          const int64_t place = (slab * (p.cols / kTileCols) + tile) * x.eights + first;
          copy_bulk(shared_address(to.x[own]), reinterpret_cast<const uint8_t*>(x.q + place * 1024), here * 1024,
                    barrier);
          copy_bulk(shared_address(to.d[own]), reinterpret_cast<const uint8_t*>(x.d + place * 8), here * 32, barrier);
        }
#pragma unroll
        for (int s = 0; s < kSplits; ++s)
#pragma unroll
          for (int of = 0; of < kRows; of += 4) {
            const int64_t at = (row0 + min(of + own, last)) * p.tiles_k + min(tile_of(step, s), p.tiles_k - 1);
            copy_bulk(shared_address(to.q[s][of + own]), w.q + at * (256 * L::kQ), 256 * L::kQ, barrier);
            copy_bulk(shared_address(to.s[s][of + own]), w.s + at * (16 * L::kS), 16 * L::kS, barrier);
          }
      }
    }
    return;
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, of_group = warp % 4, wg = warp / 4;
    const int split = wg % kSplits, row_group = wg / kSplits % Shape::kRowGroups,
              token_group = wg / (kSplits * Shape::kRowGroups);
    // Places in the first stage.
    const uint32_t first_x = shared_address(memory.stages[0].x[split][token_group * (4 * kHalves)]);
    const uint32_t first_q = shared_address(memory.stages[0].q[split][row_group * 4 + of_group]) + lane * 16;
    const uint32_t first_s = shared_address(memory.stages[0].s[split][row_group * 4 + of_group]) + g * (2 * L::kS);
    const uint32_t first_d = shared_address(memory.stages[0].d[split][token_group * (4 * kHalves)]) + t * 8;
    float4* const totals = &memory.totals[0][kSplits > 1 ? threadIdx.x % 128 : threadIdx.x];
    uint32_t done = 0;
    int turn = 0;  // chains of all units so far
    int c[2][16] = {};
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
      float acc[4 * kHalves][4];
#pragma unroll
      for (int i = 0; i < 16 * kHalves; ++i) acc[i / 4][i % 4] = 0.0f;
#pragma unroll 1
      for (int step = 0; step < steps; ++step, ++done) {
        const uint32_t stage = done % kStages, at = stage * static_cast<uint32_t>(sizeof(typename Memory::Stage));
        wait_for(shared_address(&full[stage]), done / kStages & 1);
        RawTile<type> raw;
        load_shared(raw.s, first_s + at);
        const TileScales<type> scales(raw, lane);
        int codes[2][4];
        load_shared(codes[0], first_q + at);
        const uint32_t operand = describe_operand(first_x + at);
        const auto begin = [&](int k) {
          settle_sums(c[k % 2]);
          group_fence();
          // 1024 bytes of eight tokens, 256 of a block.
          group_multiply(c[k % 2], codes[k % 2], whole_operand(operand + (k / 4 * 4096 + k % 4 * 256) / 16));
          group_commit();
        };
        begin(0);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          float f[4][4];
#pragma unroll
          for (int b = 0; b < kTileBlocks; ++b) {
            const int k = half * kTileBlocks + b;
            if (k + 1 < kHalves * kTileBlocks) {
              load_shared(codes[(k + 1) % 2], first_q + at + (k + 1) % 4 * 512);
              begin(k + 1);
              group_wait<1>();
            } else {
              group_wait<0>();
            }
            settle_sums(c[k % 2]);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
              const float sum = static_cast<float>(c[k % 2][i]);
              float& to = f[i / 4][i % 4];
              to = b == 0 ? sum * scales.d[b][i % 4 / 2] : fmaf(sum, scales.d[b][i % 4 / 2], to);
            }
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            uint32_t words[2];
            load_shared(words, first_d + at + (half * 4 + n) * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              acc[half * 4 + n][i] = fmaf(f[n][i], __uint_as_float(words[i % 2]), acc[half * 4 + n][i]);
          }
        }
        __syncwarp();
        if (lane < kLeaving) arrive(shared_address(&empty[stage]));
        const int tile = tile_of(step, split);
        const bool last = tile == p.tiles_k - 1;
        if (tile >= p.tiles_k || (tile % kChainTiles != kChainTiles - 1 && !last)) continue;

        // The end of a chain.
        const int chain = tile / kChainTiles;
        if constexpr (kSplits > 1) {
          volatile int* const at = &turns[of_group];
          while (*at != turn + chain) {
          }
          __syncwarp();
          __threadfence_block();
        }
#pragma unroll
        for (int n = 0; n < 4 * kHalves; ++n) {
          float (&v)[4] = acc[n];
          float4& total = totals[n * Memory::kTotals];
          if (chain > 0) {
            const float4 before = total;
            v[0] = before.x + v[0], v[1] = before.y + v[1], v[2] = before.z + v[2], v[3] = before.w + v[3];
          }
          if (!last) {
            total = make_float4(v[0], v[1], v[2], v[3]);
            v[0] = v[1] = v[2] = v[3] = 0.0f;
          }
        }
        if constexpr (kSplits > 1) {
          __threadfence_block();
          __syncwarp();
          if (lane == 0) *const_cast<volatile int*>(&turns[of_group]) = turn + chain + 1;
        }
        if (!last) continue;

        const int column = unit % columns, band = unit / columns % bands, slab = unit / (columns * bands);
        const int tile_row = band * Shape::kTileRows + row_group * 4 + of_group;
        if (tile_row >= p.tiles_m) continue;
        const int64_t token0 =
            (static_cast<int64_t>(column) * Shape::kEights + token_group * (4 * kHalves)) * 8 + 2 * t;
        if (!p.paired && p.epilogue == Epilogue::Store && !p.bias && (tile_row + 1) * kTileRows <= p.rows) {
          float* y = p.y + token0 * p.y_stride + slab * p.rows + tile_row * kTileRows + g;
#pragma unroll
          for (int n = 0; n < 4 * kHalves; ++n, y += 8 * p.y_stride)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (token0 + n * 8 + i < p.T) y[i * p.y_stride] = acc[n][i], y[i * p.y_stride + 8] = acc[n][2 + i];
        } else {
#pragma unroll
          for (int n = 0; n < 4 * kHalves; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (token0 + n * 8 + i < p.T)
                finish_pair(p, slab, tile_row, g, token0 + n * 8 + i, acc[n][i], acc[n][2 + i]);
        }
      }
      turn += chains;
    }
  }
#endif
}

// Whether wide_blocks is in this build (for sm_90a) and takes the product: enough tokens, columns that fill tiles.
template <DType type>
bool wide_kernel_takes(const Device& device, const LinearArgs& p) {
  if constexpr (!kWideKernel<type>) {
    return false;
  } else {
    static const bool built = [] {  // the kernel is empty elsewhere, and has no barriers
      cudaFuncAttributes attributes{};
      DS4_CUDA(cudaFuncGetAttributes(&attributes, wide_blocks<type, WideShape<2, 2, 2, 1>>));
      return attributes.sharedSizeBytes > 0;
    }();
    return built && !p.items && !p.experts && p.T > kFewRows && p.cols % kTileCols == 0 &&
           device.block_shared() >= 227 * 1024;
  }
}

template <DType type>
void launch_wide(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  if constexpr (kWideKernel<type>) {
    const auto units = [&](auto shape) {
      using Shape = decltype(shape);
      const int64_t eights = (p.T + 7) / 8;
      return (eights + Shape::kEights - 1) / Shape::kEights * ((p.tiles_m + Shape::kTileRows - 1) / Shape::kTileRows) *
             p.slabs;
    };
    const auto run = [&](auto shape) {
      using Shape = decltype(shape);
      constexpr auto kernel = wide_blocks<type, Shape>;
      constexpr int bytes = static_cast<int>(sizeof(WideMemory<type, Shape>));
      static const bool ready = [] {
        DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        return true;
      }();
      static_cast<void>(ready);
      const int64_t blocks = std::min<int64_t>(units(shape), device.multiprocessors());
      launch_kernel(device.stream(), static_cast<unsigned>(blocks), kWideThreads, bytes, kernel, w, x, p);
    };
    // A multiprocessor's time goes with the outputs of its units; small units share less of what they read.
    const auto cost = [&](auto shape, int percent) {
      using Shape = decltype(shape);
      const int64_t each = (units(shape) + device.multiprocessors() - 1) / device.multiprocessors();
      return each * Shape::kTileRows * Shape::kEights * percent;
    };
    constexpr WideShape<2, 2, 2, 1> large{};
    constexpr WideShape<2, 1, 1, 4> split{};
    constexpr WideShape<1, 1, 1, 4> small{};
    const int64_t costs[3] = {cost(large, 100), cost(split, 125), cost(small, 150)};
    if (costs[0] <= costs[1] && costs[0] <= costs[2])
      run(large);
    else if (costs[1] <= costs[2])
      run(split);
    else
      run(small);
  }
}

}  // namespace ds4::cuda
