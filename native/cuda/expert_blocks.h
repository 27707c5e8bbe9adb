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
// share the units by their cost. Sums and chains are those of block_products.h: the bits are the other kernels'.
#pragma once

#include <algorithm>

#include "cuda/block_products.h"
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
constexpr bool kExpertKernel =
    type == DType::IQ2_XXS || type == DType::Q2_K || type == DType::Q4_K || type == DType::MXFP4;

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
__device__ __forceinline__ void fill_book(uint8_t* book, const Planes& w) {
  for (int i = threadIdx.x; i < 256 * 16; i += kExpertThreads) {
    uint32_t v = __ldg(w.grid + i / 16);
    if (i & 8) v <<= 1;
    reinterpret_cast<uint4*>(book)[i] = make_uint4(v, v, v, v);
  }
}

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

// Adds a tile to the lane's chain `i` of rows g and g + 8: `c` are the sums of its blocks, columns 2t and 2t + 1 of
// them the lane's segments or, of a format with halves, its segment's halves. `dx`, `sums`: of the activations.
template <DType type>
__device__ __forceinline__ void add_segment(float (&acc)[2][ExpertShape<type>::kOwn], const int (&c)[kTileBlocks][4],
                                            const RawTile<type>& own, int i, float dx, const int (&sums)[kTileBlocks]) {
  using L = Layout<type>;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int sum = 0;
    if constexpr (!L::kInteger) {
      float f = static_cast<float>(c[0][2 * r + i]) * float_scale<type>(own, r, 0);
#pragma unroll
      for (int b = 1; b < kTileBlocks; ++b)
        f = fmaf(static_cast<float>(c[b][2 * r + i]), float_scale<type>(own, r, b), f);
      acc[r][i] = fmaf(f, dx, acc[r][i]);
    } else if constexpr (type != DType::Q2_K) {
#pragma unroll
      for (int b = 0; b < kTileBlocks; ++b) sum += c[b][2 * r + i] * integer_scale<type>(own, r, b, 0);
      acc[r][i] = fmaf(static_cast<float>(sum), super_scale<type>(own, r) * dx, acc[r][i]);
      if constexpr (L::kMin) {
        int least = 0;
#pragma unroll
        for (int b = 0; b < kTileBlocks; ++b)
          least += sums[b] * static_cast<int>(integer_minimums<type>(own, r, b) & 255u);
        acc[r][i] = fmaf(-static_cast<float>(least), super_minimum<type>(own, r) * dx, acc[r][i]);
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
      acc[r][i] = fmaf(static_cast<float>(sum), super_scale<type>(own, r) * dx, acc[r][i]);
      acc[r][i] = fmaf(-static_cast<float>(least), super_minimum<type>(own, r) * dx, acc[r][i]);
    }
  }
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

// Copies the activations of lead `lead` to a slot.
template <DType type>
__device__ __forceinline__ void stage_tokens(uint8_t* slot, const Leaders<kExpertTokens>& leaders, int lead,
                                             const Activations& x, const LinearArgs& p, int cols, int record) {
  using L = Layout<type>;
  const int size = leaders.size[lead] == 3 ? 4 : leaders.size[lead], pieces = cols / 16, tiles = cols / kTileCols;
  for (int token = 0; token < size; ++token) {
    const int64_t row = leaders.members[lead][token] / p.per_row, group = row >> 3, in = row & 7;
    uint8_t* to = slot + token * record;
    for (int i = threadIdx.x; i < pieces; i += kExpertThreads) {
      const int pair = i / 4, t = i % 4;
      reinterpret_cast<uint4*>(to)[pair / 2 * 8 + t * 2 + pair % 2] =
          reinterpret_cast<const uint4*>(x.q)[((group * (x.blocks / 2) + pair) * 8 + in) * 4 + t];
    }
    for (int i = threadIdx.x; i < tiles; i += kExpertThreads)
      reinterpret_cast<float*>(to + cols)[i] = x.d[(group * (x.blocks / 4) + i) * 8 + in];
    if constexpr (L::kMin) {
      for (int i = threadIdx.x; i < tiles * kTileBlocks; i += kExpertThreads) {
        const char4 s = reinterpret_cast<const char4*>(x.sums)[(group * x.blocks + i) * 8 + in];
        const int first = 16 * s.x + s.z, second = 16 * s.y + s.w;
        if constexpr (type == DType::Q2_K)
          reinterpret_cast<short2*>(to + cols + cols / 32)[i] =
              make_short2(static_cast<short>(first), static_cast<short>(second));
        else
          reinterpret_cast<int*>(to + cols + cols / 32)[i] = first + second;
      }
    }
  }
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
__global__ void __launch_bounds__(kExpertThreads, 1) expert_blocks(Planes w, Activations x, LinearArgs p) {
  using L = Layout<type>;
  using Shape = ExpertShape<type>;
  extern __shared__ uint4 dynamic[];
  __shared__ Leaders<kExpertTokens> leaders;
  uint8_t* const book = reinterpret_cast<uint8_t*>(dynamic);
  uint8_t* const zeros = book + Shape::kBook;
  uint8_t* const slots = zeros + kZeroBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int cols = kChains * kChainTiles * kTileCols, record = Shape::record(cols);
  if constexpr (Shape::kBook > 0) fill_book(book, w);
  if (threadIdx.x < kZeroBytes / 16) reinterpret_cast<uint4*>(zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  begin_kernel();
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
    int unit = max(first, lead * each) + warp;
    uint32_t words[Shape::kAhead][2 * L::kQ] = {}, tile = 0;
    if (unit < end) {
      tile = tile_of(unit);
      prefetch_scales<type>(w, tile, lane);
      const uint8_t* from = w.q + static_cast<uint64_t>(tile) * Shape::kTile + lane * 16;
#pragma unroll
      for (int n = 0; n < Shape::kAhead; ++n) load_strip<L::kQ>(words[n], from + n * (kChainTiles * Shape::kTile));
    }
    __syncthreads();  // slots are free
    for (int s = 0; s < kSlots; ++s)
      if (lead + s < leaders.count && (lead + s) * each < last)
        stage_tokens<type>(slots + s * (kExpertTokens * record), leaders, lead + s, x, p, cols, record);
    __syncthreads();
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
}

// Whether expert_blocks takes these experts: rows of 4096 or 2048 columns, units of whole tile rows.
template <DType type>
bool expert_kernel_takes(const Device& device, const LinearArgs& p) {
  if constexpr (!kExpertKernel<type>) {
    return false;
  } else {
    const int chains = p.tiles_k / kChainTiles;
    return p.experts && (chains == 8 || chains == 4) && p.cols == chains * kChainTiles * kTileCols &&
           p.tiles_m % (kSegments / chains) == 0 &&
           ExpertShape<type>::bytes(static_cast<int>(p.cols)) + 4096 <= device.block_shared();
  }
}

template <DType type, int kChains>
void launch_experts_of(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  constexpr auto kernel = expert_blocks<type, kChains>;
  constexpr int bytes = ExpertShape<type>::bytes(kChains * kChainTiles * kTileCols);
  static const bool ready = [] {
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return true;
  }();
  static_cast<void>(ready);
  launch_kernel(device.stream(), static_cast<unsigned>(device.multiprocessors()), kExpertThreads, bytes, kernel, w, x,
                p);
}

template <DType type>
void launch_experts(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  if constexpr (kExpertKernel<type>) {
    if (p.tiles_k == kUnitTiles)
      launch_experts_of<type, 8>(device, w, x, p);
    else
      launch_experts_of<type, 4>(device, w, x, p);
  }
}

}  // namespace ds4::cuda
