#include "cuda/linear_halves.h"

#include <algorithm>

#include "cuda/async_copies.h"
#include "cuda/device_math.h"
#include "cuda/matrix_math.h"

namespace ds4::cuda {
namespace {

constexpr int kChainBlocks = 8;
constexpr int64_t kMostStreamed = 32;  // rows of x

struct HalfArgs {
  int64_t rows, rank, T, w_stride, y_stride;
  int blocks;  // of a row of W
  float* y;
  const float* bias;
  bool add;
  uint32_t zero;
};

__device__ __forceinline__ void store(const HalfArgs& p, int64_t row, int64_t token, float v) {
  float& y = p.y[token * p.y_stride + row];
  y = p.add ? y + v : p.bias ? v + p.bias[row] : v;
}

// ---- few tokens
//
// Bytes: W once, x once for each 16 rows, from the cache. A warp computes one chain of 16 rows for 8 NT tokens, the
// block of threads adds the chains. For what held_halves does not take.
constexpr int kStreamThreads = 512;
constexpr int kWarps = kStreamThreads / 32;

// Eight columns of a row of x in each lane: 8t .. 8t + 7 of a block of 32.
struct OwnColumns {
  float4 lo, hi;

  __device__ __forceinline__ static OwnColumns of(const float* from, bool there) {
    const float4 none = make_float4(0, 0, 0, 0);
    if (!there) return {none, none};
    const auto* at = reinterpret_cast<const float4*>(from);
    return {__ldg(at), __ldg(at + 1)};
  }
  __device__ __forceinline__ float split(uint32_t (&high)[4], uint32_t (&low)[4]) const {
    const float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
    return split_halves(v, high, low);
  }
};

// Up to kMostUnsplit tokens are split here, more of them have been.
template <int NT>
__global__ void __launch_bounds__(kStreamThreads, NT == 1 ? 2 : 1)
    stream_halves(const __half* w, const float* x, int64_t x_stride, HalfActivations parts, HalfArgs p) {
  constexpr bool kSplit = NT > kMostUnsplit / 8;
  constexpr int kAhead = NT == 1 ? 3 : NT == 2 ? 8 : 4;  // blocks on their way
  __shared__ float part[kWarps][NT * 128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int blocks = p.blocks, chains = (blocks + kChainBlocks - 1) / kChainBlocks;
  const int at_once = min(chains, kWarps), tile_rows = kWarps / at_once;
  const int rank = static_cast<int>(p.rank), tiles = (rank + 15) / 16, all = static_cast<int>(p.rows / p.rank) * tiles;
  const int tile = static_cast<int>(blockIdx.x) * tile_rows + warp / at_once;
  const bool active = warp / at_once < tile_rows && tile < all;
  const int slab = active ? tile / tiles : 0, first = active ? tile % tiles * 16 : 0;
  const __half* const row0 = w + (static_cast<int64_t>(slab) * rank + min(first + g, rank - 1)) * p.w_stride + 8 * t;
  const int to_row8 = (min(first + g + 8, rank - 1) - min(first + g, rank - 1)) * static_cast<int>(p.w_stride);
  const int groups = static_cast<int>((p.T + 7) / 8);
  const float* const x_from = x + g * x_stride + static_cast<int64_t>(slab) * blocks * 32 + 8 * t;
  float total = 0.0f;
  for (int pass = 0; pass * at_once < chains; ++pass) {
    const int chain = pass * at_once + warp % at_once, block0 = chain * kChainBlocks;
    const int n = active && chain < chains ? min(kChainBlocks, blocks - block0) : 0;
    uint4 raw[kAhead][2];
    const auto load = [&](int block, uint4(&to)[2]) {
      to[0] = __ldg(reinterpret_cast<const uint4*>(row0 + (block0 + block) * 32));
      to[1] = __ldg(reinterpret_cast<const uint4*>(row0 + to_row8 + (block0 + block) * 32));
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < n) load(i, raw[i]);
    if (pass == 0) begin_kernel();
    float acc[NT][4];
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int base = 0; base < n; base += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (base + i < n) {
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            uint32_t high[4], low[4];
            float2 scale;
            if constexpr (kSplit) {
              const int64_t at = min(j, groups - 1) * parts.blocks + slab * blocks + block0 + base + i;
              const uint4 h = __ldg(parts.parts + at * 64 + lane), l = __ldg(parts.parts + at * 64 + 32 + lane);
              high[0] = h.x, high[1] = h.y, high[2] = h.z, high[3] = h.w;
              low[0] = l.x, low[1] = l.y, low[2] = l.z, low[3] = l.w;
              scale = __ldg(reinterpret_cast<const float2*>(parts.scales + at * 8) + t);
            } else {
              const int token = 8 * j + g;
              const float own =
                  OwnColumns::of(x_from + 8 * j * x_stride + (block0 + base + i) * 32, token < p.T).split(high, low);
              scale = make_float2(__shfl_sync(0xFFFFFFFFu, own, 8 * t), __shfl_sync(0xFFFFFFFFu, own, 8 * t + 4));
            }
            float sum[4];
            multiply_block(sum, raw[i][0], raw[i][1], high, low);
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[j][c] = fmaf(sum[c], c % 2 ? scale.y : scale.x, acc[j][c]);
          }
          if (base + i + kAhead < n) load(base + i + kAhead, raw[i]);
        }
    if (pass > 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      float2* to = reinterpret_cast<float2*>(part[warp] + j * 128) + lane;
      to[0] = make_float2(acc[j][0], acc[j][1]);
      to[32] = make_float2(acc[j][2], acc[j][3]);
    }
    __syncthreads();
    // A thread has one output; several tiles only where there is one pass.
    const int here = min(at_once, chains - pass * at_once), o = static_cast<int>(threadIdx.x);
    const bool last = (pass + 1) * at_once >= chains;
    for (int of = 0; of < tile_rows && o < NT * 128; ++of) {
      const float* from = part[of * at_once] + o;
      float v = pass == 0 ? from[0] : total + from[0];
#pragma unroll 4
      for (int c = 1; c < here; ++c) v = v + from[c * (NT * 128)];
      total = v;
      if (!last) continue;
      const int at = static_cast<int>(blockIdx.x) * tile_rows + of, in_slab = at % tiles * 16 + o % 128 / 8,
                token = o / 128 * 8 + o % 8;
      if (at < all && in_slab < rank && token < p.T)
        store(p, static_cast<int64_t>(at / tiles) * rank + in_slab, token, v);
    }
  }
}

// As many rows of W as a block of threads holds in shared memory, all on their way before the kernel before has ended:
// a product behind a kernel that leaves the memory idle costs little more than reading x. A warp has a chain of two
// tiles of 16 rows at a time, whose x it splits once. Bytes: W once, x once for each block of threads, from the cache.
// One token: eight blocks of it stand in the eight columns of the units, where others have eight tokens; each block of
// W is multiplied by all of them, and its own column kept.
constexpr int kMostHeldTiles = 16;

struct HeldShape {
  int rows, tiles, pitch;  // of a block of threads at most; bytes from row to row, odd times 64: two rows' banks differ
  int64_t blocks, bytes;   // of threads; of its shared memory
};

template <int NT, bool kOne>
__global__ void __launch_bounds__(kStreamThreads, NT == 1 ? 2 : 1)
    held_halves(const __half* w, const float* x, int64_t x_stride, HalfArgs p, HeldShape shape) {
  extern __shared__ __align__(128) uint8_t held[];
  __shared__ uint64_t arrivals[kMostHeldTiles];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = static_cast<int>(p.rows * blockIdx.x / gridDim.x),
            rows = static_cast<int>(p.rows * (blockIdx.x + 1) / gridDim.x) - first;
  const int tiles = (rows + 15) / 16, row_bytes = p.blocks * 64, T = static_cast<int>(p.T);
  float* const part = reinterpret_cast<float*>(held + static_cast<int64_t>(shape.rows) * shape.pitch);
  const uint32_t arrival = shared_address(arrivals);
  if (threadIdx.x == 0) {
    for (int i = 0; i < tiles; ++i) init_barrier(arrival + 8 * i);
    fence_barriers();
    for (int i = 0; i < tiles; ++i) expect_bytes(arrival + 8 * i, min(16, rows - 16 * i) * row_bytes);
  }
  __syncthreads();
  const uint64_t policy = reading_policy(T <= kOnceRows);
  if (lane == 0)
    for (int r = warp; r < rows; r += kWarps)
      copy_bulk(shared_address(held) + r * shape.pitch,
                reinterpret_cast<const uint8_t*>(w + static_cast<int64_t>(first + r) * p.w_stride), row_bytes,
                arrival + r / 16 * 8, policy);
  begin_kernel();
  const int chains = (p.blocks + kChainBlocks - 1) / kChainBlocks, at_once = min(chains, kWarps),
            step = kWarps / at_once;
  for (int chain = warp % at_once; chain < chains && warp < step * at_once; chain += at_once) {
    const int block0 = chain * kChainBlocks, n = min(kChainBlocks, p.blocks - block0);
    for (int tile = warp / at_once; tile < tiles; tile += 2 * step) {
      const bool two = tile + step < tiles;
      const uint8_t* from[2][2];  // rows g and g + 8 of both tiles
#pragma unroll
      for (int i = 0; i < 4; ++i)
        from[i / 2][i % 2] =
            held + min((tile + i / 2 * step) * 16 + i % 2 * 8 + g, rows - 1) * shape.pitch + block0 * 64 + t * 16;
      const auto wait = [&] {
        wait_for(arrival + 8 * tile, 0);
        if (two) wait_for(arrival + 8 * (tile + step), 0);
      };
      float acc[2][NT][4];
#pragma unroll
      for (int i = 0; i < 8 * NT; ++i) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0.0f;
      const auto multiply = [&](int of, int block, float (&sum)[4], const uint32_t (&high)[4],
                                const uint32_t (&low)[4]) {
        multiply_block(sum, *reinterpret_cast<const uint4*>(from[of][0] + block * 64),
                       *reinterpret_cast<const uint4*>(from[of][1] + block * 64), high, low);
      };
      if constexpr (kOne) {
        static_assert(NT == 1 && kChainBlocks == 8);
        uint32_t high[4], low[4];
        const float own = OwnColumns::of(x + (block0 + g) * 32 + 8 * t, g < n).split(high, low);
        wait();
        float kept[2][4];  // lane t: of blocks 2t and 2t + 1, rows g, then rows g + 8
#pragma unroll
        for (int block = 0; block < kChainBlocks; ++block)
          if (block < n) {
#pragma unroll
            for (int of = 0; of < 2; ++of) {
              if (of == 1 && !two) break;
              float sum[4];
              multiply(of, block, sum, high, low);
              if (t == block / 2) kept[of][block % 2] = sum[block % 2], kept[of][block % 2 + 2] = sum[block % 2 + 2];
            }
          }
#pragma unroll
        for (int block = 0; block < kChainBlocks; ++block)
          if (block < n) {
            const float scale = __shfl_sync(0xFFFFFFFFu, own, 4 * block);
#pragma unroll
            for (int of = 0; of < 2; ++of) {
              if (of == 1 && !two) break;
#pragma unroll
              for (int r = 0; r < 2; ++r)
                acc[of][0][2 * r] = fmaf(__shfl_sync(0xFFFFFFFFu, kept[of][block % 2 + 2 * r], 4 * g + block / 2),
                                         scale, acc[of][0][2 * r]);
            }
          }
      } else {
        const float* const x_from = x + g * x_stride + block0 * 32 + 8 * t;
        const auto columns = [&](int j, int block) {
          return OwnColumns::of(x_from + 8 * j * x_stride + block * 32, block < n && 8 * j + g < T);
        };
        OwnColumns next[NT];
#pragma unroll
        for (int j = 0; j < NT; ++j) next[j] = columns(j, 0);
        wait();
#pragma unroll 2
        for (int block = 0; block < n; ++block) {
          uint32_t high[NT][4], low[NT][4];
          float2 scale[NT];
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            const float own = next[j].split(high[j], low[j]);
            next[j] = columns(j, block + 1);
            scale[j] = make_float2(__shfl_sync(0xFFFFFFFFu, own, 8 * t), __shfl_sync(0xFFFFFFFFu, own, 8 * t + 4));
          }
#pragma unroll
          for (int of = 0; of < 2; ++of) {
            if (of == 1 && !two) break;
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              float sum[4];
              multiply(of, block, sum, high[j], low[j]);
#pragma unroll
              for (int c = 0; c < 4; ++c) acc[of][j][c] = fmaf(sum[c], c % 2 ? scale[j].y : scale[j].x, acc[of][j][c]);
            }
          }
        }
      }
#pragma unroll
      for (int of = 0; of < 2; ++of) {
        if (of == 1 && !two) break;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          float2* to = reinterpret_cast<float2*>(part + (((tile + of * step) * chains + chain) * NT + j) * 128) + lane;
          to[0] = make_float2(acc[of][j][0], acc[of][j][1]);
          to[32] = make_float2(acc[of][j][2], acc[of][j][3]);
        }
      }
    }
  }
  __syncthreads();
  for (int o = static_cast<int>(threadIdx.x); o < rows * T; o += kStreamThreads) {
    const int row = o / T, token = o % T;
    const float* from = part + ((row / 16 * chains) * NT + token / 8) * 128 + row % 16 * 8 + token % 8;
    float v = from[0];
#pragma unroll 4
    for (int c = 1; c < chains; ++c) v = v + from[c * (NT * 128)];
    store(p, first + row, token, v);
  }
}

// ---- many tokens

constexpr int kSplitThreads = 256;

// Bytes: x once, as many out. Operations: 40 a value. A warp has a block of eight rows.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(const float* x, int64_t stride, int64_t rows, HalfActivations to) {
  begin_kernel();
  const int lane = threadIdx.x % 32;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kSplitThreads / 32) + threadIdx.x / 32, group = blockIdx.y;
  if (block >= to.blocks) return;
  const int64_t t = group * 8 + lane / 4;
  float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (t < rows) {
    const float4* from = reinterpret_cast<const float4*>(x + t * stride + block * 32) + lane % 4 * 2;
    const float4 a = from[0], b = from[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
  uint32_t high[4], low[4];
  const float scale = split_halves(v, high, low);
  const int64_t at = group * to.blocks + block;
  to.parts[at * 64 + lane] = make_uint4(high[0], high[1], high[2], high[3]);
  to.parts[at * 64 + 32 + lane] = make_uint4(low[0], low[1], low[2], low[3]);
  if (lane % 4 == 0) to.scales[at * 8 + lane / 4] = scale;
}

// Bytes: W once for each 16 NT rows of x, x's parts once for each 32 MT rows of W, both from the cache after the first.
// Operations: 4 rows cols T on halves. Four warps have 16 MT rows and 8 NT tokens each, two by two; W and x go through
// shared memory, two blocks of 32 columns a stage.
constexpr int kTileThreads = 128;
constexpr int kStages = 3;

template <int MT, int NT>
constexpr int stage_bytes() {
  return 2 * (MT * 32 * 64 + NT * 2 * 1024 + NT * 2 * 32);
}

template <int MT, int NT>
__global__ void __launch_bounds__(kTileThreads, 3) tile_halves(const __half* w, HalfActivations x, HalfArgs p) {
  begin_kernel();
  extern __shared__ __align__(128) uint8_t stages[];
  constexpr int kRows = 32 * MT, kGroups = 2 * NT;  // of W; of eight tokens
  constexpr int kPartBytes = kRows * 64 * 2, kScaleBytes = kPartBytes + kGroups * 2048;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 % 2 * (16 * MT),
            warp_group = static_cast<int>(threadIdx.x) / 64 * NT;
  const int slab = blockIdx.z, row0 = static_cast<int>(blockIdx.y) * kRows, rank = static_cast<int>(p.rank);
  const int group0 = static_cast<int>(blockIdx.x) * kGroups;
  const int blocks = p.blocks, steps = (blocks + 1) / 2, i = static_cast<int>(threadIdx.x);
  // A thread copies 16 bytes of every 16th row of W and of each group of tokens.
  const __half* const w_from = w + static_cast<int64_t>(slab) * rank * p.w_stride + i % 8 * 8;
  int w_off[kRows / 16];
#pragma unroll
  for (int piece = 0; piece < kRows / 16; ++piece)
    w_off[piece] = min(row0 + i / 8 + piece * 16, rank - 1) * static_cast<int>(p.w_stride);
  const int x_group = static_cast<int>(x.blocks) * 64;
  const uint4* const x_from = x.parts + static_cast<int64_t>(group0) * x_group + slab * blocks * 64 + i;
  const float* const scale_from = x.scales + ((group0 + i / 4) * x.blocks + slab * blocks) * 8 + i % 4 * 4;
  const uint32_t base = shared_address(stages);
  const uint32_t w_to = base + static_cast<uint32_t>(i % 8 / 4 * (kRows * 64) + i / 8 * 64 + i % 4 * 16);
  const auto fetch = [&](int step) {
    const uint32_t on = static_cast<uint32_t>(step % kStages * stage_bytes<MT, NT>());
    if (step < steps) {
      const int block0 = 2 * step;
      if (block0 + i % 8 / 4 < blocks)
#pragma unroll
        for (int piece = 0; piece < kRows / 16; ++piece)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(w_to + on + piece * 1024),
                       "l"(w_from + w_off[piece] + block0 * 32));
      if (block0 + i / 64 < blocks)
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          asm volatile(
              "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + on + kPartBytes + group * 2048 + i * 16),
              "l"(x_from + (group * x_group + block0 * 64)));
      if (i < kGroups * 4 && block0 + i % 4 / 2 < blocks)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + on + kScaleBytes + i * 16),
                     "l"(scale_from + block0 * 8));
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
  float chain[MT][NT][4], total[MT][NT][4];
#pragma unroll
  for (int i = 0; i < MT * NT * 4; ++i)
    chain[i / 4 / NT][i / 4 % NT][i % 4] = total[i / 4 / NT][i / 4 % NT][i % 4] = 0.0f;
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();
    fetch(step + kStages - 1);
    const uint8_t* const stage = stages + step % kStages * stage_bytes<MT, NT>();
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const int block = 2 * step + of;
      if (block >= blocks) break;
      // The units' operands stand in registers of their own, built once: what ptxas cannot see through keeps it from
      // moving them together anew for every product.
      uint32_t a[MT][2][4];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint4 v = *reinterpret_cast<const uint4*>(stage + of * (kRows * 64) +
                                                          (warp_row + m * 16 + r * 8 + g) * 64 + t * 16);
          a[m][0][r] = v.x ^ p.zero, a[m][0][r + 2] = v.y ^ p.zero;
          a[m][1][r] = v.z ^ p.zero, a[m][1][r + 2] = v.w ^ p.zero;
        }
#pragma unroll
      for (int n0 = 0; n0 < NT; n0 += 2) {
        uint4 x_part[2][2];
        float2 scale[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint8_t* const from = stage + kPartBytes + (warp_group + n0 + n) * 2048 + of * 1024 + lane * 16;
          x_part[n][0] = *reinterpret_cast<const uint4*>(from + 512);
          x_part[n][1] = *reinterpret_cast<const uint4*>(from);
          scale[n] =
              *reinterpret_cast<const float2*>(stage + kScaleBytes + (warp_group + n0 + n) * 64 + of * 32 + t * 8);
        }
        float sum[MT][2][4];
#pragma unroll
        for (int i = 0; i < MT * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const uint4& v = x_part[n][step / 2];
              multiply_halves(sum[m][n], a[m][step % 2], step % 2 ? v.z : v.x, step % 2 ? v.w : v.y);
            }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
              chain[m][n0 + n][c] = fmaf(sum[m][n][c], c % 2 ? scale[n].y : scale[n].x, chain[m][n0 + n][c]);
      }
      if (block % kChainBlocks == kChainBlocks - 1 || block == blocks - 1) {
        const bool start = block < kChainBlocks;
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) {
          float &all = total[i / 4 / NT][i / 4 % NT][i % 4], &part = chain[i / 4 / NT][i / 4 % NT][i % 4];
          all = start ? part : all + part;
          part = 0.0f;
        }
      }
    }
  }
  asm volatile("cp.async.wait_group 0;");
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int in_slab = row0 + warp_row + m * 16 + g + c / 2 * 8;
        const int64_t row = static_cast<int64_t>(slab) * rank + in_slab,
                      token = (group0 + warp_group + n) * 8 + 2 * t + c % 2;
        if (in_slab >= rank || token >= p.T) continue;
        store(p, row, token, total[m][n][c]);
      }
}

// How held_halves would have a product, `blocks` 0: not at all. Whole tiles where that leaves most multiprocessors
// their part; else a few are left to the kernel before, which may hold eight by itself.
constexpr int kHeldStatic = 1024;
HeldShape held_shape(const Device& device, const HalfArgs& p) {
  if (!hopper_kernels() || p.rank != p.rows || p.T > kMostUnsplit) return {};
  const int64_t many = device.multiprocessors(), each = (p.rows + many - 1) / many, whole = (each + 15) / 16 * 16;
  HeldShape s{};
  s.blocks = whole * 8 <= each * 9 ? (p.rows + whole - 1) / whole : std::max<int64_t>(1, many - 8);
  s.rows = static_cast<int>((p.rows + s.blocks - 1) / s.blocks);
  s.tiles = (s.rows + 15) / 16;
  s.pitch = p.blocks * 64 + (p.blocks % 2 == 0 ? 64 : 0);
  const int64_t chains = (p.blocks + kChainBlocks - 1) / kChainBlocks;
  s.bytes = static_cast<int64_t>(s.rows) * s.pitch + s.tiles * chains * (p.T <= 8 ? 512 : 1024);
  return s.tiles <= kMostHeldTiles && s.bytes + kHeldStatic <= device.block_shared() ? s : HeldShape{};
}

}  // namespace

bool halves_do(const Segment& w, const LinearArgs& args) {
  return w.type == DType::F16 && args.rows >= kLeastRows && args.cols % 32 == 0 && args.n_items == 0 &&
         (args.epilogue == Epilogue::Store || args.epilogue == Epilogue::Add);
}

// Whole tiles of 64 rows: what stands behind the last group is read, and its products are left.
int64_t half_parts(const Tensor& x) {
  return (x.n + 63) / 64 * 8 * (x.dim / 32) * 64;
}
int64_t half_scales(const Tensor& x) {
  return (x.n + 63) / 64 * 8 * (x.dim / 32) * 8;
}

void split_rows(const Device& device, Tensor x, const HalfActivations& to) {
  constexpr int kBlocks = kSplitThreads / 32;
  launch_kernel(device.stream(),
                dim3(static_cast<unsigned>((to.blocks + kBlocks - 1) / kBlocks), static_cast<unsigned>((x.n + 7) / 8)),
                kSplitThreads, 0, split_kernel, x.data, x.stride, x.n, to);
  DS4_CUDA(cudaGetLastError());
}

void linear_halves(const Device& device, const Segment& w, Tensor x, const HalfActivations& split,
                   const LinearArgs& a) {
  const HalfArgs p{a.rows,   a.rank,     a.T,
                   w.stride, a.y_stride, static_cast<int>(a.cols / 32),
                   a.y,      a.bias,     a.epilogue == Epilogue::Add};
  const int64_t slabs = a.rows / a.rank;
  const auto* data = w.memory.as<const __half>();
  if (a.T <= kMostStreamed) {
    const int64_t chains = (p.blocks + kChainBlocks - 1) / kChainBlocks;
    const int64_t at_once = kWarps / std::min<int64_t>(chains, kWarps), tiles = slabs * ((a.rank + 15) / 16);
    const auto run = [&](auto kernel) {
      launch_kernel(device.stream(), static_cast<unsigned>((tiles + at_once - 1) / at_once), kStreamThreads, 0, kernel,
                    data, x.data, x.stride, split, p);
    };
    if (const HeldShape shape = held_shape(device, p); shape.blocks > 0) {
      const auto run_held = [&](auto kernel) {
        DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(device.block_shared() - kHeldStatic)));
        launch_kernel(device.stream(), static_cast<unsigned>(shape.blocks), kStreamThreads,
                      static_cast<size_t>(shape.bytes), kernel, data, x.data, x.stride, p, shape);
      };
      a.T == 1   ? run_held(held_halves<1, true>)
      : a.T <= 8 ? run_held(held_halves<1, false>)
                 : run_held(held_halves<2, false>);
      DS4_CUDA(cudaGetLastError());
      return;
    }
    a.T <= 8 ? run(stream_halves<1>) : a.T <= 16 ? run(stream_halves<2>) : run(stream_halves<4>);
    DS4_CUDA(cudaGetLastError());
    return;
  }
  const auto blocks_of = [&](int64_t rows, int64_t tokens) {
    return dim3(static_cast<unsigned>((p.T + tokens - 1) / tokens), static_cast<unsigned>((p.rank + rows - 1) / rows),
                static_cast<unsigned>(slabs));
  };
  const auto run = [&](auto kernel, dim3 grid, int shared) {
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * shared));
    launch_kernel(device.stream(), grid, kTileThreads, static_cast<size_t>(kStages * shared), kernel, data, split, p);
  };
  const dim3 large = blocks_of(64, 64);
  if (static_cast<int64_t>(large.x) * large.y * large.z * 10 >= 9 * device.multiprocessors())
    run(tile_halves<2, 4>, large, stage_bytes<2, 4>());
  else
    run(tile_halves<1, 2>, blocks_of(32, 32), stage_bytes<1, 2>());
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
