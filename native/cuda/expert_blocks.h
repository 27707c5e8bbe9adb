// Experts of block formats for steps of few rows: most experts have one row or two, so that a product is bound by
// reading its weights, and decoding them has to keep up.
//
// A warp owns a unit: 32 tiles, which are one tile row of 4096 columns or several of fewer; a unit's eight chains of
// four tiles are its segments. The matrix units give eight columns of sums and one row of activations fills one of
// them, so the columns are the segments: a product of segment n has activations in column n alone, and after the eight
// segments' products one accumulator holds eight blocks' sums, of each lane its own. Scales are applied there, for an
// eighth of the work. Two tokens share the columns of four segments, four tokens those of two; formats with a scale for
// each 16 columns have a column for each half of a block.
//
// Bytes: each weight once for up to four rows. Instructions of a warp for 512 weights: 20 (IQ2_XXS), 14 (Q2_K, Q4_K),
// 33 (MXFP4), and at 4.2 TB/s a multiprocessor's schedulers have 33, 40 and 64 (four bits) each. A lane loads the words
// that it decodes 4 KB of weights ahead of its warp, so that no warp waits for another; activations stand in shared
// memory for the two experts that a block of threads meets. Experts of several rows take longer: blocks of threads
// share the units by their cost. A block's warps have as many units each; up to fifteen that are left over are shared
// by four warps each, two chains a warp, whose sums meet in shared memory. Sums and chains are those of
// block_products.h: the bits are the other kernels'.
//
// The down matrices' kernel knows its experts before it waits for the hidden rows (expert_kernels.h): its first weights
// are on their way while the gates' and ups' kernel ends, and it rounds the rows itself.
#pragma once

#include <algorithm>

#include "cuda/block_products.h"
#include "cuda/expert_kernels.h"
#include "cuda/leaders.h"

namespace ds4::cuda {

constexpr int kExpertWarps = 16;
constexpr int kExpertThreads = kExpertWarps * 32;
constexpr int kExpertTokens = 4;  // rows of an expert that are computed together
constexpr int kSegments = 8;
constexpr int kUnitTiles = kSegments * kChainTiles;
constexpr int kSlots = 2;        // experts whose activations are at hand
constexpr int kZeroBytes = 512;  // what lanes of other columns read: four tiles' strides and the last one's words

template <DType type>
struct ExpertShape {
  using L = Layout<type>;
  static constexpr int kParts = type == DType::Q2_K ? 2 : 1;  // columns of sums for a block
  static constexpr int kOwn = 2 / kParts;                     // segments of which a lane has sums
  static constexpr int kTile = 256 * L::kQ;
  static constexpr int kAhead = 16 / L::kQ;  // tiles on their way: 128 bytes of a lane
  static constexpr int kBook = type == DType::IQ2_XXS ? 256 * 256 : 0;
  static constexpr int kFixed = kBook + kZeroBytes;
  // One token's codes [tile][t][block][8], scales [tile] and, of formats with minimums, sums of halves or of blocks;
  // the last 16 bytes are there for the banks.
  static constexpr int record(int cols) { return cols + cols / 32 + (L::kMin ? cols / 8 : 0) + 16; }
  static constexpr int bytes(int cols) { return kFixed + kSlots * kExpertTokens * record(cols); }
  // What a unit of an expert with so many rows costs, by its instructions.
  static __device__ __forceinline__ int cost(int rows) {
    if (type == DType::IQ2_XXS) return rows == 1 ? 20 : rows == 2 ? 22 : 28;
    if (type == DType::Q2_K) return rows == 1 ? 10 : rows == 2 ? 13 : 19;
    return rows <= 2 ? 20 : 24;
  }
};

// Which columns of the matrix units a lane has: of B column g, of the sums columns 2t and 2t + 1. `kTokens` share them.
template <DType type, int kTokens>
struct Columns {
  static constexpr int kParts = ExpertShape<type>::kParts;
  static constexpr int kAtOnce = kSegments / (kTokens * kParts);  // segments in one accumulator
  static constexpr int kGroups = kSegments / kAtOnce;
};

// A lane's words of a tile, asked for here and now: the compiler would put it off.
template <int kQ>
__device__ __forceinline__ void load_strip(uint32_t (&q)[2 * kQ], const uint8_t* from) {
#pragma unroll
  for (int i = 0; i < kQ / 2; ++i)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q[4 * i]), "=r"(q[4 * i + 1]), "=r"(q[4 * i + 2]), "=r"(q[4 * i + 3])
                 : "l"(from + 512 * i));
}
__device__ __forceinline__ void prefetch(const uint8_t* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// A unit's scales come to the second cache while the unit before is computed.
template <DType type>
__device__ __forceinline__ void prefetch_scales(const Planes& w, uint32_t tile, int lane) {
  using L = Layout<type>;
  constexpr int kS = kUnitTiles * 16 * L::kS / 128, kD = kUnitTiles / 2 * 16 * L::kD / 128;  // lines
  static_assert(kS <= 32 && kD <= 32);
  if (lane < kS) prefetch(w.s + static_cast<uint64_t>(tile) * (16 * L::kS) + lane * 128);
  if (lane < kD) prefetch(w.d + static_cast<uint64_t>(tile / 2) * (16 * L::kD) + lane * 128);
}

// The code book of IQ2_XXS with one word a lane: entry e of lane l stands at byte 256 e + 4 l, once with the magnitudes
// in the low two bits of each nibble and the sign's place above them, once (128 bytes on) with the sign's place below.
struct BookWords {
  static constexpr int kEach = 256 * 16 / kExpertThreads;  // of a thread
  uint32_t v[kEach];
  __device__ __forceinline__ void load(const Planes& w) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = __ldg(w.grid + (threadIdx.x + k * kExpertThreads) / 16);
  }
  __device__ __forceinline__ void store(uint8_t* book) const {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32_t word = threadIdx.x & 8 ? v[k] << 1 : v[k];
      reinterpret_cast<uint4*>(book)[threadIdx.x + k * kExpertThreads] = make_uint4(word, word, word, word);
    }
  }
};

// A tile's words of a lane -> the A operands of its four blocks, as decode_codes has them but for Q2_K's scales.
template <DType type>
__device__ __forceinline__ void decode_strip(const uint32_t (&q)[2 * Layout<type>::kQ], const uint8_t* book,
                                             uint32_t lane_byte, int (&a)[kTileBlocks][4]) {
  if constexpr (type != DType::IQ2_XXS && type != DType::Q2_K) {
    RawTile<type> raw;
#pragma unroll
    for (int i = 0; i < 2 * Layout<type>::kQ; ++i) raw.q[i] = q[i];
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) decode_codes<type, 0>(raw, b, 0, 0, a[b]);
  } else {
#pragma unroll
    for (int hi = 0; hi < 2; ++hi) {
      if constexpr (type == DType::IQ2_XXS) {
        const uint32_t signs = q[2 * hi + 1], moved = signs >> 1;
#pragma unroll
        for (int b = 0; b < kTileBlocks; ++b) {
          // sign_bit: blocks 0 and 3 have theirs above and below the magnitude, 1 and 2 one bit further up.
          constexpr uint32_t above = 0x44444444u, below = 0x11111111u;
          const bool low = b >= 2;
          const uint32_t at = permute(q[2 * hi], lane_byte, 0x6504u | static_cast<uint32_t>(b) << 4);
          const uint32_t entry = *reinterpret_cast<const uint32_t*>(book + at + (low ? 128 : 0));
          const uint32_t select = entry ^ ((b == 0 || b == 3 ? signs : moved) & (low ? below : above));
          const uint32_t t0 = low ? 0xE719F808u : 0x002B1908u, t1 = low ? 0x0000D52Bu : 0x00D5E7F8u;
          a[b][hi] = static_cast<int>(permute(t0, t1, select));
          a[b][2 + hi] = static_cast<int>(permute(t0, t1, select >> 16));
        }
      } else {
#pragma unroll
        for (int b = 0; b < kTileBlocks; ++b) {
          const uint32_t v = q[2 * hi + b / 2] >> (4 * (b % 2));
          a[b][hi] = static_cast<int>(v & 0x03030303u);
          a[b][2 + hi] = static_cast<int>(v >> 2 & 0x03030303u);
        }
      }
    }
  }
}

// What a tile adds to a chain: acc = fma(v[0], v[1], acc), then, where there are minimums, fma(v[2], v[3], acc).
template <DType type>
struct TileTerms {
  static constexpr int kCount = Layout<type>::kMin ? 4 : 2;
  float v[kCount];
  __device__ __forceinline__ void add_to(float& acc) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) acc = fmaf(v[i], v[i + 1], acc);
  }
};

// A tile's terms for the lane's segment `i` in rows g and g + 8: `c` are the sums of its blocks, columns 2t and 2t + 1
// of them the lane's segments or, of a format with halves, its segment's halves. `dx`, `sums`: of the activations.
template <DType type>
__device__ __forceinline__ void segment_terms(TileTerms<type> (&to)[2], const int (&c)[kTileBlocks][4],
                                              const RawTile<type>& own, int i, float dx,
                                              const int (&sums)[kTileBlocks]) {
  using L = Layout<type>;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int sum = 0;
    to[r].v[1] = dx;
    if constexpr (!L::kInteger) {
      float f = static_cast<float>(c[0][2 * r + i]) * float_scale<type>(own, r, 0);
#pragma unroll
      for (int b = 1; b < kTileBlocks; ++b)
        f = fmaf(static_cast<float>(c[b][2 * r + i]), float_scale<type>(own, r, b), f);
      to[r].v[0] = f;
    } else if constexpr (type != DType::Q2_K) {
#pragma unroll
      for (int b = 0; b < kTileBlocks; ++b) sum += c[b][2 * r + i] * integer_scale<type>(own, r, b, 0);
      to[r].v[0] = static_cast<float>(sum), to[r].v[1] = super_scale<type>(own, r) * dx;
      if constexpr (L::kMin) {
        int least = 0;
#pragma unroll
        for (int b = 0; b < kTileBlocks; ++b)
          least += sums[b] * static_cast<int>(integer_minimums<type>(own, r, b) & 255u);
        to[r].v[2] = -static_cast<float>(least), to[r].v[3] = super_minimum<type>(own, r) * dx;
      }
    } else {
      int least = 0;
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        const uint32_t word = own.s[2 * r + two];
        const int scales = static_cast<int>(word & 0x0F0F0F0Fu), mins = static_cast<int>(word >> 4 & 0x0F0F0F0Fu);
        const auto halves = [&](int b) {
          return static_cast<int>(
              permute(static_cast<uint32_t>(c[b][2 * r]), static_cast<uint32_t>(c[b][2 * r + 1]), 0x5410u));
        };
        sum = __dp2a_hi(halves(2 * two + 1), scales, __dp2a_lo(halves(2 * two), scales, sum));
        least = __dp2a_hi(sums[2 * two + 1], mins, __dp2a_lo(sums[2 * two], mins, least));
      }
      to[r].v[0] = static_cast<float>(sum), to[r].v[1] = super_scale<type>(own, r) * dx;
      to[r].v[2] = -static_cast<float>(least), to[r].v[3] = super_minimum<type>(own, r) * dx;
    }
  }
}

// Adds a tile to the lane's chain `i` of rows g and g + 8.
template <DType type>
__device__ __forceinline__ void add_segment(float (&acc)[2][ExpertShape<type>::kOwn], const int (&c)[kTileBlocks][4],
                                            const RawTile<type>& own, int i, float dx, const int (&sums)[kTileBlocks]) {
  TileTerms<type> terms[2];
  segment_terms<type>(terms, c, own, i, dx, sums);
#pragma unroll
  for (int r = 0; r < 2; ++r) terms[r].add_to(acc[r][i]);
}

// What a warp needs of the block of threads for its units.
struct ExpertView {
  const uint8_t* book;
  const uint8_t* zeros;
  int lane;
};

// One unit: tiles `tile` to `tile` + 31 for `kTokens` records from `x` on. `words` holds what the lane decodes of the
// first tiles and is left with those of the unit at `next`; `more` says whether there is one.
template <DType type, int kChains, int kTokens, class Finish>
__device__ __forceinline__ void run_unit(const Planes& w, const ExpertView& v, uint32_t tile, uint32_t next, bool more,
                                         const uint8_t* x,
                                         uint32_t (&words)[ExpertShape<type>::kAhead][2 * Layout<type>::kQ],
                                         const Finish& finish) {
  using L = Layout<type>;
  using Shape = ExpertShape<type>;
  using C = Columns<type, kTokens>;
  constexpr int kParts = Shape::kParts, kOwn = Shape::kOwn, kAtOnce = C::kAtOnce, kGroups = C::kGroups;
  constexpr int kAhead = Shape::kAhead;
  constexpr int kCols = kChains * kChainTiles * kTileCols, kRecord = Shape::record(kCols);
  const int g = v.lane / 4, t = v.lane % 4;
  // Where the lane reads column g's activations: of the segments that are not its own, zeros.
  const int column = g / kParts, token = column / kAtOnce, place = column % kAtOnce;
  const bool half = kParts == 1 || t / 2 == g % 2;
  const uint8_t* from[kSegments];
#pragma unroll
  for (int n = 0; n < kSegments; ++n)
    from[n] = half && place == n % kAtOnce ? x + token * kRecord + n % kChains * (4 * kTileCols) + t * 32 : v.zeros;
  const uint8_t* refill = w.q + static_cast<uint64_t>(tile) * Shape::kTile + v.lane * 16;
  const uint8_t* refill_next = w.q + static_cast<uint64_t>(next) * Shape::kTile + v.lane * 16;
  const TileReader<type> reader(w, v.lane);
  if (more) prefetch_scales<type>(w, next, v.lane);
  float acc[kGroups][2][kOwn] = {};
  int steps = kChainTiles;
  asm volatile("" : "+r"(steps));  // not unrolled: the loop's code is 10 KB
  for (int j = 0; j < steps; ++j) {
    const uint8_t* const current = refill;
    refill = j + 1 < steps ? refill + Shape::kTile : refill_next;
    const bool ahead = j + 1 < steps || more;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      // Scales of the lane's sums, asked for before the tiles are decoded.
      RawTile<type> own[kOwn];
      float dx[kOwn];
      int sums[kOwn][kTileBlocks] = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int own_column = kParts == 2 ? t : 2 * t + i;
        const int n = group * kAtOnce + own_column % kAtOnce;
        const uint32_t at = tile + n * kChainTiles + j;
        reader.scales(own[i], at, at / 2);
        const int column_tile = n % kChains * kChainTiles + j;
        const uint8_t* record = x + own_column / kAtOnce * kRecord + kCols;
        dx[i] = reinterpret_cast<const float*>(record)[column_tile];
        if constexpr (L::kMin) {
          const int4 four = reinterpret_cast<const int4*>(record + kCols / 32)[column_tile];
          sums[i][0] = four.x, sums[i][1] = four.y, sums[i][2] = four.z, sums[i][3] = four.w;
        }
      }
      int c[kTileBlocks][4] = {};
#pragma unroll
      for (int in = 0; in < kAtOnce; ++in) {
        const int n = group * kAtOnce + in;
        const uint4* codes = reinterpret_cast<const uint4*>(from[n] + j * kTileCols);
        const uint4 x0 = codes[0], x1 = codes[1];
        int a[kTileBlocks][4];
        decode_strip<type>(words[n % kAhead], v.book, v.lane * 4, a);
        if (n + kAhead < kSegments)
          load_strip<L::kQ>(words[n % kAhead], current + (n + kAhead) * (kChainTiles * Shape::kTile));
        else if (ahead)
          load_strip<L::kQ>(words[n % kAhead], refill + (n + kAhead - kSegments) * (kChainTiles * Shape::kTile));
        multiply(c[0], a[0], x0.x, x0.y, c[0]);
        multiply(c[1], a[1], x0.z, x0.w, c[1]);
        multiply(c[2], a[2], x1.x, x1.y, c[2]);
        multiply(c[3], a[3], x1.z, x1.w, c[3]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) add_segment<type>(acc[group], c, own[i], i, dx[i], sums[i]);
    }
  }
  // Chains in order; a lane has the token t / (4 / kTokens), the first of those lanes writes.
  const int mine = t / (4 / kTokens);
  float total[2] = {};
#pragma unroll
  for (int n = 0; n < kSegments; ++n) {
    const int in = n % kAtOnce, at = mine * kAtOnce + in;
    const int lane = (v.lane & 28) + (kParts == 2 ? at : at / 2);
    const bool start = n % kChains == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float chain = from_lane(acc[n / kAtOnce][r][in % kOwn], lane);
      total[r] = start ? chain : total[r] + chain;
    }
    if (n % kChains == kChains - 1 && t % (4 / kTokens) == 0) finish(n, mine, total[0], total[1]);
  }
}

// Chain sums of units that several warps share: [unit][token][segment][row].
constexpr int kShared = kExpertWarps - 1;  // units at most
struct SharedUnits {
  float sums[kShared][kExpertTokens][kSegments][kTileRows];
  int done[kShared];
};

// A quarter of a unit: segments n0 and n0 + 1, whose eight tiles stand from `tile` on, for the four records from `x`
// on, of which those behind an expert's rows hold anything. `words`: its tiles in the order in which they are computed,
// left with those of the quarter, or of the unit, at `next`.
template <DType type, int kChains>
__device__ __forceinline__ void run_quarter(const Planes& w, const ExpertView& v, uint32_t tile, int n0, uint32_t next,
                                            bool more, bool quarter, const uint8_t* x,
                                            uint32_t (&words)[ExpertShape<type>::kAhead][2 * Layout<type>::kQ],
                                            float (&to)[kExpertTokens][kSegments][kTileRows]) {
  using L = Layout<type>;
  using Shape = ExpertShape<type>;
  constexpr int kParts = Shape::kParts, kOwn = Shape::kOwn, kAtOnce = 2 / kParts, kGroups = 2 / kAtOnce;
  constexpr int kAhead = Shape::kAhead, kTiles = 2 * kChainTiles;
  constexpr int kCols = kChains * kChainTiles * kTileCols, kRecord = Shape::record(kCols);
  const int g = v.lane / 4, t = v.lane % 4;
  const int column = g / kParts, place = column % kAtOnce;
  const bool half = kParts == 1 || t / 2 == g % 2;
  const uint8_t* const codes_at = x + column / kAtOnce * kRecord + t * 32;
  const uint8_t* const here = w.q + static_cast<uint64_t>(tile) * Shape::kTile + v.lane * 16;
  const uint8_t* const refill = w.q + static_cast<uint64_t>(next) * Shape::kTile + v.lane * 16;
  const TileReader<type> reader(w, v.lane);
  if (more) prefetch_scales<type>(w, next / kUnitTiles * kUnitTiles, v.lane);
  float acc[kGroups][2][kOwn] = {};
#pragma unroll
  for (int j = 0; j < kChainTiles; ++j)
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      RawTile<type> own[kOwn];
      float dx[kOwn];
      int sums[kOwn][kTileBlocks] = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int of = kParts == 2 ? group : i;  // the segment; the lane's token is t
        const uint32_t at = tile + of * kChainTiles + j;
        reader.scales(own[i], at, at / 2);
        const int column_tile = (n0 + of) % kChains * kChainTiles + j;
        const uint8_t* record = x + t * kRecord + kCols;
        dx[i] = reinterpret_cast<const float*>(record)[column_tile];
        if constexpr (L::kMin) {
          const int4 four = reinterpret_cast<const int4*>(record + kCols / 32)[column_tile];
          sums[i][0] = four.x, sums[i][1] = four.y, sums[i][2] = four.z, sums[i][3] = four.w;
        }
      }
      int c[kTileBlocks][4] = {};
#pragma unroll
      for (int in = 0; in < kAtOnce; ++in) {
        const int of = group * kAtOnce + in, s = 2 * j + of;
        const uint8_t* const from = codes_at + ((n0 + of) % kChains * kChainTiles + j) * kTileCols;
        const uint4* codes = reinterpret_cast<const uint4*>(half && place == in ? from : v.zeros);
        const uint4 x0 = codes[0], x1 = codes[1];
        int a[kTileBlocks][4];
        decode_strip<type>(words[s % kAhead], v.book, v.lane * 4, a);
        const int ahead = s + kAhead, of_next = ahead % kTiles;
        const int in_quarter = (of_next % 2 * kChainTiles + of_next / 2) * Shape::kTile;
        if (ahead < kTiles)
          load_strip<L::kQ>(words[s % kAhead], here + in_quarter);
        else if (more)
          load_strip<L::kQ>(words[s % kAhead], refill + (quarter ? in_quarter : of_next * kChainTiles * Shape::kTile));
        multiply(c[0], a[0], x0.x, x0.y, c[0]);
        multiply(c[1], a[1], x0.z, x0.w, c[1]);
        multiply(c[2], a[2], x1.x, x1.y, c[2]);
        multiply(c[3], a[3], x1.z, x1.w, c[3]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) add_segment<type>(acc[group], c, own[i], i, dx[i], sums[i]);
    }
#pragma unroll
  for (int of = 0; of < 2; ++of)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      to[t][n0 + of][g + 8 * r] = kParts == 2 ? acc[of % kGroups][r][0] : acc[0][r][of % kOwn];
}

// Waits for the kernels before, then lets the next one start, which may so read what those before this one have made.
__device__ __forceinline__ void begin_before_next() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// A lane's four values of a tile of a row, made by the kernel before.
__device__ __forceinline__ float4 load_four(const float* row, int tile) {
  return __ldcg(reinterpret_cast<const float4*>(row + tile * kTileCols) + threadIdx.x % 32);
}
// Rounds a tile of a row to the codes, scale and sums of a record, as store_codes does for rows in memory. By a warp.
template <DType type>
__device__ __forceinline__ void round_tile(uint8_t* record, int cols, int tile, const float4& v) {
  using L = Layout<type>;
  const int lane = threadIdx.x % 32, block = lane / 8;
  const float largest = warp_max(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  const int c0 = __float2int_rn(v.x * inverse), c1 = __float2int_rn(v.y * inverse), c2 = __float2int_rn(v.z * inverse),
            c3 = __float2int_rn(v.w * inverse);
  *reinterpret_cast<char4*>(record + tile * kTileCols + lane % 8 / 2 * 32 + block * 8 + lane % 2 * 4) =
      make_char4(static_cast<signed char>(c0), static_cast<signed char>(c1), static_cast<signed char>(c2),
                 static_cast<signed char>(c3));
  if (lane == 0) reinterpret_cast<float*>(record + cols)[tile] = largest / 127.0f;
  if constexpr (L::kMin) {
    int sum = c0 + c1 + c2 + c3;
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    const int other = __shfl_xor_sync(0xFFFFFFFFu, sum, 4), at = tile * kTileBlocks + block;
    if (lane % 8 == 0) {
      if constexpr (type == DType::Q2_K)
        reinterpret_cast<short2*>(record + cols + cols / 32)[at] =
            make_short2(static_cast<short>(sum), static_cast<short>(other));
      else
        reinterpret_cast<int*>(record + cols + cols / 32)[at] = sum + other;
    }
  }
}
// Rounds the rows of lead `lead` into a slot.
template <DType type>
__device__ __forceinline__ void round_tokens(uint8_t* slot, const Leaders<kExpertTokens>& leaders, int lead,
                                             const float* rows, int cols, int record) {
  const int size = leaders.size[lead] == 3 ? 4 : leaders.size[lead], tiles = cols / kTileCols;
  for (int i = threadIdx.x / 32; i < size * tiles; i += kExpertWarps)
    round_tile<type>(slot + i / tiles * record, cols, i % tiles,
                     load_four(rows + static_cast<int64_t>(leaders.members[lead][i / tiles]) * cols, i % tiles));
}

// Copies a row of activations to a record.
template <DType type>
__device__ __forceinline__ void stage_row(uint8_t* to, int64_t row, const Activations& x, int cols) {
  using L = Layout<type>;
  const int64_t group = row >> 3, in = row & 7;
  // The kernels' columns are constants: no loop is left.
  const auto over = [](int n, auto&& each) {
#pragma unroll
    for (int k = 0; k < (n + kExpertThreads - 1) / kExpertThreads; ++k)
      if (const int i = k * kExpertThreads + static_cast<int>(threadIdx.x); i < n) each(i);
  };
  over(cols / 16, [&](int i) {
    const int pair = i / 4, t = i % 4;
    reinterpret_cast<uint4*>(to)[pair / 2 * 8 + t * 2 + pair % 2] =
        reinterpret_cast<const uint4*>(x.q)[((group * (x.blocks / 2) + pair) * 8 + in) * 4 + t];
  });
  over(cols / kTileCols,
       [&](int i) { reinterpret_cast<float*>(to + cols)[i] = x.d[(group * (x.blocks / 4) + i) * 8 + in]; });
  if constexpr (L::kMin)
    over(cols / 32, [&](int i) {
      const char4 s = reinterpret_cast<const char4*>(x.sums)[(group * x.blocks + i) * 8 + in];
      const int first = 16 * s.x + s.z, second = 16 * s.y + s.w;
      if constexpr (type == DType::Q2_K)
        reinterpret_cast<short2*>(to + cols + cols / 32)[i] =
            make_short2(static_cast<short>(first), static_cast<short>(second));
      else
        reinterpret_cast<int*>(to + cols + cols / 32)[i] = first + second;
    });
}
// Copies the activations of lead `lead` to a slot.
template <DType type>
__device__ __forceinline__ void stage_tokens(uint8_t* slot, const Leaders<kExpertTokens>& leaders, int lead,
                                             const Activations& x, const LinearArgs& p, int cols, int record) {
  const int size = leaders.size[lead] == 3 ? 4 : leaders.size[lead];
  for (int token = 0; token < size; ++token)
    stage_row<type>(slot + token * record, leaders.members[lead][token] / p.per_row, x, cols);
}

// The units of a block of threads, [first, last) of all leads' units, `each` a lead: as many as cost the same.
struct Share {
  int first, last;
};
template <DType type>
__device__ __forceinline__ Share share_of(const Leaders<kExpertTokens>& leaders, int each) {
  __shared__ int totals[kMostPairs / 32], bounds[2];
  const int l = threadIdx.x, lane = l % 32;
  int cost = 0, sum = 0;
  if (l < kMostPairs) {
    cost = l < leaders.count ? ExpertShape<type>::cost(leaders.size[l]) : 0;
    sum = cost;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(0xFFFFFFFFu, sum, d);
      if (lane >= d) sum += v;
    }
    if (lane == 31) totals[l / 32] = sum;
  }
  __syncthreads();
  int all = 0;
  for (int i = 0; i < kMostPairs / 32; ++i) {
    if (i < l / 32) sum += totals[i];
    all += totals[i];
  }
  const int64_t start = static_cast<int64_t>(sum - cost) * each, end = static_cast<int64_t>(sum) * each;
  for (unsigned i = 0; i < 2; ++i) {
    const int64_t at = static_cast<int64_t>(all) * each * (blockIdx.x + i) / gridDim.x;
    if (cost > 0 && at >= start && at < end) bounds[i] = l * each + static_cast<int>((at - start) / cost);
  }
  if (l == 0 && blockIdx.x + 1 == gridDim.x) bounds[1] = leaders.count * each;
  __syncthreads();
  return {bounds[0], bounds[1]};
}

template <DType type, int kChains>
__global__ void __launch_bounds__(kExpertThreads, 1) expert_blocks(Planes w, ExpertInput x, LinearArgs p) {
  using L = Layout<type>;
  using Shape = ExpertShape<type>;
  extern __shared__ uint4 dynamic[];
  __shared__ Leaders<kExpertTokens> leaders;
  __shared__ SharedUnits shared;
  uint8_t* const book = reinterpret_cast<uint8_t*>(dynamic);
  uint8_t* const zeros = book + Shape::kBook;
  uint8_t* const slots = zeros + kZeroBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int cols = kChains * kChainTiles * kTileCols, record = Shape::record(cols);
  if constexpr (Shape::kBook > 0) {
    BookWords words;
    words.load(w);
    words.store(book);
  }
  if (threadIdx.x < kZeroBytes / 16) reinterpret_cast<uint4*>(zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  bool waits = x.early;
  if (!waits) begin_before_next();
  leaders.find(p.experts, static_cast<int>(p.n_items), reinterpret_cast<int*>(slots));
  const ExpertView view{book, zeros + 16, lane};  // zeros in banks that a column's own lanes leave
  constexpr int rows = kSegments / kChains;       // tile rows of a unit
  const int each = p.tiles_m / rows;
  const auto [first, last] = share_of<type>(leaders, each);
  for (int lead = first / each; lead * each < last; lead += kSlots) {
    const int second = (lead + 1) * each, end = min(last, (lead + kSlots) * each);
    const auto tile_of = [&](int unit) {
      const int of = unit < second ? lead : lead + 1;
      return static_cast<uint32_t>(leaders.expert[of] * each + unit - of * each) * kUnitTiles;
    };
    // Warps have as many units each; those that are left are shared, a quarter each, before them. Quarters
    // take longer by the work, so without whole units only as many as are done at once.
    const int begin = max(first, lead * each), over = (end - begin) % kExpertWarps,
              left = end - begin > kExpertWarps || over <= 4 ? over : 0, quarters = 4 * left;
    const auto quarter_of = [&](int q) { return tile_of(begin + q / 4) + q % 4 * (2 * kChainTiles); };
    int unit = begin + left + warp, quarter = warp;
    uint32_t words[Shape::kAhead][2 * L::kQ] = {}, tile = 0;
    if (quarter < quarters || unit < end) {
      const bool part = quarter < quarters;
      tile = part ? quarter_of(quarter) : tile_of(unit);
      prefetch_scales<type>(w, tile / kUnitTiles * kUnitTiles, lane);
      const uint8_t* from = w.q + static_cast<uint64_t>(tile) * Shape::kTile + lane * 16;
#pragma unroll
      for (int n = 0; n < Shape::kAhead; ++n)
        load_strip<L::kQ>(words[n], from + (part ? n % 2 * kChainTiles + n / 2 : n * kChainTiles) * Shape::kTile);
    }
    if (waits) begin_before_next();
    waits = false;
    __syncthreads();  // slots are free
    if (threadIdx.x < kShared) shared.done[threadIdx.x] = 0;
    for (int s = 0; s < kSlots; ++s) {
      if (lead + s >= leaders.count || (lead + s) * each >= last) continue;
      uint8_t* slot = slots + s * (kExpertTokens * record);
      if (x.rows)
        round_tokens<type>(slot, leaders, lead + s, x.rows, cols, record);
      else
        stage_tokens<type>(slot, leaders, lead + s, x.rounded, p, cols, record);
    }
    __syncthreads();
    for (; quarter < quarters; quarter += kExpertWarps) {
      const int at = begin + quarter / 4, of = at < second ? lead : lead + 1;
      const bool again = quarter + kExpertWarps < quarters, more = again || unit < end;
      const uint32_t next = again ? quarter_of(quarter + kExpertWarps) : more ? tile_of(unit) : tile;
      auto& to = shared.sums[quarter / 4];
      run_quarter<type, kChains>(w, view, tile, quarter % 4 * 2, next, more, again,
                                 slots + (of - lead) * (kExpertTokens * record), words, to);
      tile = next;
      // The last of four adds the chains.
      __threadfence_block();
      __syncwarp();
      int before = 0;
      if (lane == 0) before = atomicAdd(&shared.done[quarter / 4], 1);
      if (__shfl_sync(0xFFFFFFFFu, before, 0) != 3) continue;
      __threadfence_block();
      for (int i = lane; i < leaders.size[of] * rows * 8; i += 32) {
        const int token = i / (rows * 8), row = i / 8 % rows, g = i % 8;
        float total[2];
#pragma unroll
        for (int k = 0; k < kChains; ++k)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float chain = to[token][row * kChains + k][g + 8 * r];
            total[r] = k == 0 ? chain : total[r] + chain;
          }
        finish_pair(p, leaders.expert[of], (at - of * each) * rows + row, g, leaders.members[of][token], total[0],
                    total[1]);
      }
    }
    for (; unit < end; unit += kExpertWarps) {
      const int of = unit < second ? lead : lead + 1, size = leaders.size[of];
      const bool more = unit + kExpertWarps < end;
      const uint32_t next = more ? tile_of(unit + kExpertWarps) : tile;
      const uint8_t* slot = slots + (of - lead) * (kExpertTokens * record);
      const int row0 = (unit - of * each) * rows;
      const auto finish = [&](int n, int token, float v0, float v1) {
        if (token < size)
          finish_pair(p, leaders.expert[of], row0 + n / kChains, lane / 4, leaders.members[of][token], v0, v1);
      };
      if (size == 1)
        run_unit<type, kChains, 1>(w, view, tile, next, more, slot, words, finish);
      else if (size == 2)
        run_unit<type, kChains, 2>(w, view, tile, next, more, slot, words, finish);
      else
        run_unit<type, kChains, 4>(w, view, tile, next, more, slot, words, finish);
      tile = next;
    }
  }
  if (waits) begin_before_next();  // on every path
}

}  // namespace ds4::cuda
