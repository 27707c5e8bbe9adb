// The kernels of linear.h for block formats, included by the files that instantiate them.
//
// Order of additions, the same in both kernels and for every T, so that a row's result depends on nothing else: the 32
// products of a block are summed exactly by the matrix units, blocks are added in order within a chain of 16 (512
// columns), and the chains' sums in order.
#pragma once

#include <algorithm>
#include <climits>

#include "cuda/device_math.h"
#include "cuda/linear.h"

namespace ds4::cuda {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kChainTiles = 4;

// c = a b as sums of 32 products; with `kMagic` added, which as bits of a float is 1.5 * 2^23 plus the sum.
constexpr int kMagic = 0x4B400000;
__device__ __forceinline__ void multiply(int (&c)[4], const int (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(kMagic));
}
__device__ __forceinline__ float sum_of(int c) {
  return __int_as_float(c) - 12582912.0f;  // exact: sums are below 2^22
}

// Adds one block: acc[2r + i] is of row g + 8r and token i of the lane's two. `dx`: the tokens' scales; `sums`: theirs
// times the sums of their first and second 16 codes.
template <DType type, bool kOne>
__device__ __forceinline__ void add_block(float (&acc)[4], const Fragment& f, int lane, uint2 b, float2 dx,
                                          float4 sums) {
  using L = Layout<type>;
  int c[4];
  const auto add = [&](const float (&d)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      acc[2 * r] = fmaf(sum_of(c[2 * r]), d[r] * dx.x, acc[2 * r]);
      if (!kOne) acc[2 * r + 1] = fmaf(sum_of(c[2 * r + 1]), d[r] * dx.y, acc[2 * r + 1]);
    }
  };
  if constexpr (L::kHalves) {
    const bool second = lane & 2;
    const int first_half[4] = {second ? 0 : f.a[0], second ? 0 : f.a[1], second ? 0 : f.a[2], second ? 0 : f.a[3]};
    const int second_half[4] = {second ? f.a[0] : 0, second ? f.a[1] : 0, second ? f.a[2] : 0, second ? f.a[3] : 0};
    multiply(c, first_half, b);
    add(f.d);
    multiply(c, second_half, b);
    add(f.e);
  } else {
    multiply(c, f.a, b);
    add(f.d);
  }
  if constexpr (L::kMin) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      acc[2 * r] = fmaf(f.m[r][1], sums.y, fmaf(f.m[r][0], sums.x, acc[2 * r]));
      if (!kOne) acc[2 * r + 1] = fmaf(f.m[r][1], sums.w, fmaf(f.m[r][0], sums.z, acc[2 * r + 1]));
    }
  }
}

// What follows the product: `v0` and `v1` are rows g and g + 8 of tile row `tile_row` of the slab.
__device__ __forceinline__ void finish_pair(const LinearArgs& p, int slab, int tile_row, int g, int64_t out_row,
                                            float v0, float v1) {
  float* y = p.y + out_row * p.y_stride;
  if (p.paired) {
    const int64_t row = tile_row * 8 + g;
    if (row < p.rows / 2) y[row] = p.epilogue == Epilogue::SwiGLU ? swiglu(v0, v1) : swiglu_clamped(v0, v1, p.limit);
    return;
  }
  const int64_t before = p.experts || p.items ? 0 : slab * p.rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = tile_row * kTileRows + g + 8 * r, at = before + row;
    if (row >= p.rows) return;
    const float v = r ? v1 : v0;
    if (p.epilogue == Epilogue::Add)
      y[at] = y[at] + v;
    else
      y[at] = p.bias ? v + p.bias[at] : v;
  }
}

// The pairs of few rows sorted by expert, up to eight of an expert together.
struct Leaders {
  int count;
  int votes[kMostPairs / 32];
  int expert[kMostPairs];
  int16_t members[kMostPairs][8];
  int16_t size[kMostPairs];

  __device__ __forceinline__ void find(const int32_t* experts, int pairs, int* scratch) {
    const int p = threadIdx.x;
    if (p < pairs) scratch[p] = experts[p];
    __syncthreads();
    bool leads = false;
    if (p < kMostPairs) {
      if (p < pairs) {
        int before = 0;
        for (int i = 0; i < p; ++i) before += scratch[i] == scratch[p];
        leads = before % 8 == 0;
      }
      const unsigned vote = __ballot_sync(0xFFFFFFFFu, leads);
      if (p % 32 == 0) votes[p / 32] = __popc(vote);
      __syncwarp();
      if (leads) {
        int n = 0;
        int16_t own[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = static_cast<int16_t>(p);
        for (int i = p; i < pairs && n < 8; ++i)
          if (scratch[i] == scratch[p]) {
#pragma unroll
            for (int k = 0; k < 8; ++k)
              if (k == n) own[k] = static_cast<int16_t>(i);
            ++n;
          }
        scratch[kMostPairs + p] = n;
#pragma unroll
        for (int k = 0; k < 8; ++k) members[p][k] = own[k];
      }
    }
    __syncthreads();
    // Into places without gaps; what is read here is in registers before anything is written.
    int at = 0;
    int16_t own[8], n = 0;
    if (p < kMostPairs) {
      for (int i = 0; i < p / 32; ++i) at += votes[i];
      at += __popc(__ballot_sync(0xFFFFFFFFu, leads) & ((1u << (p % 32)) - 1u));
      if (leads) {
        n = static_cast<int16_t>(scratch[kMostPairs + p]);
#pragma unroll
        for (int k = 0; k < 8; ++k) own[k] = members[p][k];
      }
    }
    __syncthreads();
    if (leads) {
      expert[at] = scratch[p];
      size[at] = n;
#pragma unroll
      for (int k = 0; k < 8; ++k) members[at][k] = own[k];
    }
    if (p == 0) {
      int all = 0;
      for (const int v : votes) all += v;
      count = all;
    }
    __syncthreads();
  }
};

// Few rows of activations: weights stream from memory into registers and on into the matrix units. A warp computes one
// chain of a tile row; blocks of threads stay and take one tile row (or as many as their warps have chains for) after
// the other, the next weights on their way while these are computed. kOne: one row of activations for every slab.
template <DType type, int NT, bool kOne>
__global__ void __launch_bounds__(kBlockThreads, NT >= 4                            ? 1
                                                 : Layout<type>::kQ == 8 || NT == 2 ? 2
                                                                                    : 3)
    stream_blocks(Planes w, Activations x, LinearArgs p) {
  constexpr int kRing = Layout<type>::kQ == 8 ? 2 : 4;
  constexpr int kCopies = type == DType::IQ2_XXS ? (NT == 1 ? 16 : 8) : 0;
  constexpr bool kLeads = NT == 1 && !kOne;
  struct Unit {
    int64_t tile, super;
    int chain, tiles, tile_row;
  };
  __shared__ float part[2][kBlockWarps][NT * 128];
  __shared__ Grid<kCopies> grid;
  __shared__ Leaders leaders;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chains = (p.tiles_k + kChainTiles - 1) / kChainTiles, at_once = min(chains, kBlockWarps);
  const int passes = (chains + at_once - 1) / at_once, tile_rows = kBlockWarps / at_once;
  const int groups = (p.tiles_m + tile_rows - 1) / tile_rows, sub = warp / at_once;
  int items = p.slabs * groups;
  if (p.experts) {
    begin_kernel();  // whose experts to read is the result of the kernel before
    items = p.n_items * groups;
    if constexpr (kLeads) {
      leaders.find(p.experts, static_cast<int>(p.n_items), reinterpret_cast<int*>(part));
      items = leaders.count * groups;
    }
  }
  const auto slab_of = [&](int item) {
    const int i = item / groups;
    if (!p.experts) return i;
    return kLeads ? leaders.expert[i] : p.experts[i];
  };
  const auto unit_of = [&](int item, int pass) {
    Unit u{};
    if (item >= items) return u;
    u.tile_row = item % groups * tile_rows + sub;
    u.chain = pass * at_once + warp % at_once;
    if (sub >= tile_rows || u.tile_row >= p.tiles_m || u.chain >= chains) return u;
    const int64_t row = static_cast<int64_t>(slab_of(item)) * p.tiles_m + u.tile_row;
    u.tile = row * p.tiles_k + u.chain * kChainTiles;
    u.super = row * (p.tiles_k / 2) + u.chain * (kChainTiles / 2);
    u.tiles = min(kChainTiles, p.tiles_k - u.chain * kChainTiles);
    return u;
  };
  RawTile<type> raw[kRing];
  Unit unit = unit_of(static_cast<int>(blockIdx.x), 0);
#pragma unroll
  for (int j = 0; j < kRing; ++j)
    if (j < unit.tiles) raw[j] = load_tile<type>(w, unit.tile + j, unit.super + j / 2, lane);
  if constexpr (kCopies > 0) {
    grid.fill(w);
    __syncthreads();
  }
  if (!p.experts) begin_kernel();

  int buffer = 0;
  float total0 = 0.0f, total1 = 0.0f;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    // The lane's token as a column of B, and its two tokens as columns of the sums.
    int64_t own = g, first = 2 * t, second = 2 * t + 1;
    const int slab = slab_of(item), lead = item / groups;
    int64_t column = 0;
    if (p.experts) {
      const auto row_of = [&](int token) { return (token >> 3) * x.blocks * 8 + (token & 7); };
      if constexpr (kLeads) {
        own = row_of(leaders.members[lead][g] / p.per_row);
        first = row_of(leaders.members[lead][2 * t] / p.per_row);
        second = row_of(leaders.members[lead][2 * t + 1] / p.per_row);
      } else {
        own = first = second = row_of(lead / p.per_row);
      }
    } else {
      column = slab * (p.cols / 32);
      if (kOne) own = first = second = 0;
    }
    for (int pass = 0; pass < passes; ++pass) {
      const Unit next = pass + 1 < passes ? unit_of(item, pass + 1) : unit_of(item + static_cast<int>(gridDim.x), 0);
      float acc[NT][4];
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
      const int64_t block0 = column + unit.chain * (kChainTiles * kTileBlocks);
      const int8_t* xq = x.q + (own + block0 * 8) * 32 + 8 * t;
      const float *xd0 = x.d + first + block0 * 8, *xd1 = x.d + second + block0 * 8;
      const float2 *xs0 = x.sums + first + block0 * 8, *xs1 = x.sums + second + block0 * 8;
#pragma unroll
      for (int j = 0; j < kChainTiles; ++j) {
        RawTile<type>& tile = raw[j % kRing];
        if (j < unit.tiles) {
#pragma unroll
          for (int b = 0; b < kTileBlocks; ++b) {
            Fragment f;
            decode_block<type>(tile, b, grid, lane, f);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const int64_t at = (n * x.blocks + j * kTileBlocks + b) * 8;
              uint2 code = make_uint2(0, 0);
              if (!kOne || g == 0) code = __ldg(reinterpret_cast<const uint2*>(xq + at * 32));
              float2 dx = make_float2(__ldg(xd0 + at), 0);
              if (!kOne) dx.y = __ldg(xd1 + at);
              float4 sums = make_float4(0, 0, 0, 0);
              if constexpr (Layout<type>::kMin) {
                const float2 s0 = __ldg(xs0 + at);
                sums.x = s0.x, sums.y = s0.y;
                if (!kOne) {
                  const float2 s1 = __ldg(xs1 + at);
                  sums.z = s1.x, sums.w = s1.y;
                }
              }
              add_block<type, kOne>(acc[n], f, lane, code, dx, sums);
            }
          }
        }
        constexpr int kAhead = kRing;
        if (j + kAhead < kChainTiles) {
          if (j + kAhead < unit.tiles)
            tile = load_tile<type>(w, unit.tile + j + kAhead, unit.super + (j + kAhead) / 2, lane);
        } else {
          const int i = j + kAhead - kChainTiles;
          if (i < next.tiles) tile = load_tile<type>(w, next.tile + i, next.super + i / 2, lane);
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float2* to = reinterpret_cast<float2*>(part[buffer][warp] + n * 128) + lane;
        to[0] = make_float2(acc[n][0], acc[n][1]);
        to[32] = make_float2(acc[n][2], acc[n][3]);
      }
      __syncthreads();
      // A thread adds the chains of rows g and g + 8 for one token. With several passes there is one for each thread.
      constexpr int kEach = kOne ? 8 : 64 * NT;
      const int here = min(at_once, chains - pass * at_once);
      for (int o = threadIdx.x; o < tile_rows * kEach; o += kBlockThreads) {
        const int of = o / kEach, in = o % kEach;
        const int n = kOne ? 0 : in / 64, at = kOne ? in * 8 : in % 64;
        float v0 = total0, v1 = total1;
        for (int c = 0; c < here; ++c) {
          const float* from = part[buffer][of * at_once + c] + n * 128 + at;
          if (pass == 0 && c == 0)
            v0 = from[0], v1 = from[64];
          else
            v0 = v0 + from[0], v1 = v1 + from[64];
        }
        if (pass + 1 < passes) {
          total0 = v0, total1 = v1;
          continue;
        }
        const int tile_row = item % groups * tile_rows + of, token = n * 8 + at % 8;
        if (tile_row >= p.tiles_m) continue;
        int64_t out_row = token;
        if (kOne) {
          out_row = p.experts ? lead : 0;
        } else if (p.experts) {
          if (token >= leaders.size[lead]) continue;
          out_row = leaders.members[lead][token % 8];
        } else if (token >= p.T) {
          continue;
        }
        finish_pair(p, slab, tile_row, at / 8, out_row, v0, v1);
      }
      buffer ^= 1;
      unit = next;
    }
  }
}

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
__global__ void __launch_bounds__(kBlockThreads, 2) tile_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  constexpr int NT = kTileTokens / 8, kStages = 3;
  constexpr int kCopies = type == DType::IQ2_XXS ? 8 : 0;
  struct Stage {
    int8_t q[kTileTokens * kTileCols];   // [8 tokens][block][token][32]
    float d[kTileTokens * kTileBlocks];  // [8 tokens][block][token]
    float2 sums[L::kMin ? kTileTokens * kTileBlocks : 2];
  };
  __shared__ alignas(16) Stage stages[kStages];
  __shared__ Grid<kCopies> grid;
  begin_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int slab, n, tile_row, first = 0;
  if (p.items) {
    const ExpertItem item = p.items[blockIdx.y];
    slab = item.expert, n = item.count, first = item.first;
    tile_row = static_cast<int>(blockIdx.x) * kBlockWarps + warp;
    if (n == 0) return;
  } else {
    slab = static_cast<int>(blockIdx.z);
    first = static_cast<int>(blockIdx.x) * kTileTokens;
    n = min(kTileTokens, static_cast<int>(p.T) - first);
    tile_row = static_cast<int>(blockIdx.y) * kBlockWarps + warp;
  }
  const int n_tiles = (n + 7) / 8;
  const auto pair_of = [&](int i) { return p.items ? p.order[first + min(i, n - 1)] : first + min(i, n - 1); };
  const int64_t column = p.items ? 0 : slab * (p.cols / 32);
  if constexpr (kCopies > 0) grid.fill(w);

  // Each thread copies one block of one token of every tile.
  const int slot = threadIdx.x / kTileBlocks, own_block = threadIdx.x % kTileBlocks;
  const int place = (slot / 8 * kTileBlocks + own_block) * 8 + slot % 8;
  const int token = pair_of(slot) / (p.items ? p.per_row : 1);
  const int64_t source = (token >> 3) * x.blocks * 8 + (token & 7) + (column + own_block) * 8;
  const auto fetch = [&](int tile) {
    if (tile < p.tiles_k && slot < n_tiles * 8) {
      Stage& to = stages[tile % kStages];
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

  const int64_t row = static_cast<int64_t>(slab) * p.tiles_m + min(tile_row, p.tiles_m - 1);
  const int64_t tile0 = row * p.tiles_k, super0 = row * (p.tiles_k / 2);
  RawTile<type> raw = load_tile<type>(w, tile0, super0, lane);
  float acc[NT][4], total[NT][4];
#pragma unroll
  for (int i = 0; i < NT; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) acc[i][k] = total[i][k] = 0.0f;
  for (int tile = 0; tile < p.tiles_k; ++tile) {
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    fetch(tile + 2);
    const Stage& stage = stages[tile % kStages];
    const int ahead = min(tile + 1, p.tiles_k - 1);
    RawTile<type> next = load_tile<type>(w, tile0 + ahead, super0 + ahead / 2, lane);
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      Fragment f;
      decode_block<type>(raw, b, grid, lane, f);
#pragma unroll
      for (int i = 0; i < NT; ++i)
        if (i < n_tiles) {
          const int at = i * kTileBlocks + b;
          const uint2 code = reinterpret_cast<const uint2*>(stage.q)[at * 32 + lane];
          const float2 dx = reinterpret_cast<const float2*>(stage.d)[at * 4 + t];
          float4 sums = make_float4(0, 0, 0, 0);
          if constexpr (L::kMin) sums = reinterpret_cast<const float4*>(stage.sums)[at * 4 + t];
          add_block<type, false>(acc[i], f, lane, code, dx, sums);
        }
    }
    raw = next;
    if (tile % kChainTiles == kChainTiles - 1 || tile == p.tiles_k - 1) {
      const bool start = tile < kChainTiles;
#pragma unroll
      for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          total[i][k] = start ? acc[i][k] : total[i][k] + acc[i][k];
          acc[i][k] = 0.0f;
        }
    }
  }
  asm volatile("cp.async.wait_group 0;");
  if (tile_row >= p.tiles_m) return;
#pragma unroll
  for (int i = 0; i < NT; ++i)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int in = i * 8 + 2 * t + k;
      if (in < n) finish_pair(p, slab, tile_row, g, pair_of(in), total[i][k], total[i][2 + k]);
    }
}

template <auto kernel>
void launch_stream(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  static int resident = 0;  // blocks of threads that a multiprocessor holds
  if (resident == 0) {
    DS4_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kBlockThreads, 0));
    resident = std::max(1, resident);
  }
  const int chains = (p.tiles_k + kChainTiles - 1) / kChainTiles,
            tile_rows = kBlockWarps / std::min(chains, kBlockWarps);
  const int64_t items = (p.experts ? p.n_items : p.slabs) * ((p.tiles_m + tile_rows - 1) / tile_rows);
  launch_kernel(device.stream(), static_cast<unsigned>(std::min<int64_t>(items, resident * device.multiprocessors())),
                kBlockThreads, 0, kernel, w, x, p);
}

template <DType type>
void launch_blocks(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  const auto tile_rows = static_cast<unsigned>((p.tiles_m + kBlockWarps - 1) / kBlockWarps);
  if (p.items) {
    launch_kernel(device.stream(), dim3(tile_rows, static_cast<unsigned>(p.n_items)), kBlockThreads, 0,
                  tile_blocks<type>, w, x, p);
  } else if (p.experts ? p.alone : p.T == 1) {
    launch_stream<stream_blocks<type, 1, true>>(device, w, x, p);
  } else if (p.experts || p.T <= 8) {
    launch_stream<stream_blocks<type, 1, false>>(device, w, x, p);
  } else if (p.T <= 16) {
    launch_stream<stream_blocks<type, 2, false>>(device, w, x, p);
  } else if (p.T <= 32) {
    launch_stream<stream_blocks<type, 4, false>>(device, w, x, p);
  } else {
    launch_kernel(
        device.stream(),
        dim3(static_cast<unsigned>((p.T + kTileTokens - 1) / kTileTokens), tile_rows, static_cast<unsigned>(p.slabs)),
        kBlockThreads, 0, tile_blocks<type>, w, x, p);
  }
}

}  // namespace ds4::cuda
