// Experts of one row: all six are read at once, in the time of a few accesses to memory.
//
// A block of threads has whole units (expert_blocks.h), eleven or twelve of them at Flash's widths. Its warps take
// pieces: the tiles of one accumulator that stand at the same place of their chains, eight (four where blocks have two
// columns of sums). A piece's chains go on in other warps, so what its tiles add is left in shared memory as the terms
// of the additions, and when all pieces are done a thread makes those of one chain in the order of block_products.h:
// the bits are the other kernels'.
//
// Bytes: each weight once. A warp asks for its first piece as soon as it knows the experts, and for the others to come
// to the second cache; the code book is filled, from words asked for before, and the row rounded while they are on
// their way.
#pragma once

#include "cuda/expert_blocks.h"

namespace ds4::cuda {

template <DType type, int kChains>
struct RowShape {
  using E = ExpertShape<type>;
  static constexpr int kCols = kChains * kChainTiles * kTileCols, kRecord = E::record(kCols);
  static constexpr int kTiles = kSegments / E::kParts;                    // of a piece
  static constexpr int kPieces = kChainTiles * (kSegments / kTiles);      // of a unit
  static constexpr int kAhead = E::kAhead < kTiles ? E::kAhead : kTiles;  // tiles on their way
  static constexpr int kRounds = 3;                                       // pieces of a warp between two barriers
  static constexpr int kAtOnce = kRounds * kExpertWarps;                  // pieces
  static constexpr int kPiece = kTiles * kTileRows * static_cast<int>(sizeof(TileTerms<type>));  // bytes of its terms
  static constexpr int kTermsAt = E::kFixed + kSlots * kRecord;
  static constexpr int kBytes = kTermsAt + kAtOnce * kPiece;
  static_assert(kAtOnce % kPieces == 0 && kTermsAt % 16 == 0);
};

template <int N>
__device__ __forceinline__ void load_pinned(uint32_t (&to)[N], const uint8_t* from) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 1)
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
  else if constexpr (N == 2)
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
}

// The pairs' experts of a block's units, at most two, and where their tiles stand.
struct RowUnits {
  int first, each, second;  // of the second pair, the first unit
  int experts[2];
  __device__ __forceinline__ int pair(int unit) const { return unit < second ? 0 : 1; }
  __device__ __forceinline__ int expert(int unit) const { return unit < second ? experts[0] : experts[1]; }
  // The unit's first tile.
  __device__ __forceinline__ uint32_t tile(int unit) const {
    const int in = unit < second ? unit - (second - each) : unit - second;
    return static_cast<uint32_t>(expert(unit) * each + in) * kUnitTiles;
  }
};

template <DType type, int kChains>
__global__ void __launch_bounds__(kExpertThreads, 1) expert_row(Planes w, ExpertInput x, LinearArgs p) {
  using L = Layout<type>;
  using Shape = ExpertShape<type>;
  using R = RowShape<type, kChains>;
  constexpr int kParts = Shape::kParts, kOwn = Shape::kOwn, kTiles = R::kTiles, kPieces = R::kPieces,
                kAhead = R::kAhead;
  constexpr int kStride = kChainTiles * Shape::kTile;  // bytes from chain to chain
  extern __shared__ uint4 dynamic[];
  uint8_t* const book = reinterpret_cast<uint8_t*>(dynamic);
  uint8_t* const zeros = book + Shape::kBook;
  uint8_t* const slots = zeros + kZeroBytes;
  uint8_t* const terms = reinterpret_cast<uint8_t*>(dynamic) + R::kTermsAt;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  constexpr int rows = kSegments / kChains;  // tile rows of a unit
  const int pairs = static_cast<int>(p.n_items);
  RowUnits units;
  units.each = p.tiles_m / rows;
  const auto all = static_cast<unsigned>(pairs * units.each);
  units.first = static_cast<int>(all * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x);
  const int lead = units.first / units.each, pieces = (last - units.first) * kPieces;
  units.second = (lead + 1) * units.each;
  BookWords entries;  // behind the weights they would come as late
  if constexpr (Shape::kBook > 0) entries.load(w);
  if (!x.early) begin_before_next();
  units.experts[0] = __ldcg(p.experts + lead);
  units.experts[1] = __ldcg(p.experts + min(lead + 1, pairs - 1));

  if (!x.rows) stage_row<type>(slots, 0, x.rounded, R::kCols);

  // Piece q: unit q / kPieces, of it the group of chains and the place in them.
  const auto tile_of = [&](int q) {
    const int in = q % kPieces;
    return units.tile(units.first + q / kPieces) + in / kChainTiles * (kTiles * kChainTiles) + in % kChainTiles;
  };
  const TileReader<type> reader(w, lane);
  const auto load_scales = [&](RawTile<type>(&to)[kOwn], uint32_t tile) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = tile + (kParts == 2 ? t : 2 * t + i) * kChainTiles;
      load_pinned(to[i].s, reader.s + static_cast<uint64_t>(at) * (16 * L::kS));
      if constexpr (L::kD > 0) load_pinned(to[i].d, reader.d + static_cast<uint64_t>(at / 2) * (16 * L::kD));
    }
  };
  uint32_t words[kAhead][2 * L::kQ] = {};
  RawTile<type> own[kOwn] = {};
  const uint8_t* refill = nullptr;
  int q = warp;
  if (q < pieces) {
    const uint32_t tile = tile_of(q);
    refill = w.q + static_cast<uint64_t>(tile) * Shape::kTile + lane * 16;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_strip<L::kQ>(words[n], refill + n * kStride);
    load_scales(own, tile);
    // The warp's other pieces come to the second cache meanwhile.
    constexpr int kLines = Shape::kTile / 128, kOthers = R::kRounds - 1;
#pragma unroll
    for (int i = 0; i < kOthers * kTiles * kLines / 32; ++i) {
      const int line = i * 32 + lane, of = q + (1 + line / (kTiles * kLines)) * kExpertWarps;
      if (of < pieces)
        prefetch(w.q + static_cast<uint64_t>(tile_of(of)) * Shape::kTile + line / kLines % kTiles * kStride +
                 line % kLines * 128);
    }
    static_assert(kOthers == 2 && kTiles <= 8);
    const int of = q + (1 + lane / 16) * kExpertWarps;
    if (of < pieces && lane % 8 < kTiles) {
      const uint64_t at = tile_of(of) + lane % 8 * kChainTiles;
      if (lane % 16 < 8)
        prefetch(w.s + at * (16 * L::kS));
      else if constexpr (L::kD > 0)
        prefetch(w.d + at / 2 * (16 * L::kD));
    }
  }
  if constexpr (Shape::kBook > 0) entries.store(book);
  if (threadIdx.x < kZeroBytes / 16) reinterpret_cast<uint4*>(zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (x.early) begin_before_next();
  constexpr int kTileColumns = R::kCols / kTileCols;
  if (x.rows) {
    constexpr int kEach = kSlots * kTileColumns / kExpertWarps;
    float4 four[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int of = min(lead + (warp + i * kExpertWarps) / kTileColumns, pairs - 1);
      four[i] = load_four(x.rows + static_cast<int64_t>(of) * R::kCols, (warp + i * kExpertWarps) % kTileColumns);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = warp + i * kExpertWarps;
      round_tile<type>(slots + at / kTileColumns * R::kRecord, R::kCols, at % kTileColumns, four[i]);
    }
  }
  __syncthreads();

  // Column g of the matrix units belongs to segment g / kParts of a piece.
  const int place = g / kParts;
  const bool half = kParts == 1 || t / 2 == g % 2;
  const uint8_t* const nothing = zeros + 16;  // in banks that a column's own lanes leave
  for (int begun = 0; begun < pieces; begun += R::kAtOnce) {
    int rounds = R::kRounds;
    asm volatile("" : "+r"(rounds));  // not unrolled: a cold kernel pays for its instructions
    for (int round = 0; round < rounds && q < pieces; ++round, q += kExpertWarps) {
      const int in_unit = q % kPieces, chain0 = in_unit / kChainTiles * kTiles, j = in_unit % kChainTiles;
      const uint8_t* const record = slots + (x.rows ? units.pair(units.first + q / kPieces) * R::kRecord : 0);
      const uint8_t* const from = record + ((chain0 + place) % kChains * kChainTiles + j) * kTileCols + t * 32;
      const bool more = q + kExpertWarps < pieces;
      const uint32_t next = more ? tile_of(q + kExpertWarps) : 0;
      const uint8_t* const current = refill;
      refill = w.q + static_cast<uint64_t>(next) * Shape::kTile + lane * 16;
      RawTile<type> now[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) now[i] = own[i];
      if (more) load_scales(own, next);
      int c[kTileBlocks][4] = {};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4* codes = reinterpret_cast<const uint4*>(half && place == n ? from : nothing);
        const uint4 x0 = codes[0], x1 = codes[1];
        int a[kTileBlocks][4];
        decode_strip<type>(words[n % kAhead], book, lane * 4, a);
        if (n + kAhead < kTiles)
          load_strip<L::kQ>(words[n % kAhead], current + (n + kAhead) * kStride);
        else if (more)
          load_strip<L::kQ>(words[n % kAhead], refill + (n + kAhead - kTiles) * kStride);
        multiply(c[0], a[0], x0.x, x0.y, c[0]);
        multiply(c[1], a[1], x0.z, x0.w, c[1]);
        multiply(c[2], a[2], x1.x, x1.y, c[2]);
        multiply(c[3], a[3], x1.z, x1.w, c[3]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int segment = kParts == 2 ? t : 2 * t + i, tile = (chain0 + segment) % kChains * kChainTiles + j;
        const float dx = reinterpret_cast<const float*>(record + R::kCols)[tile];
        int sums[kTileBlocks] = {};
        if constexpr (L::kMin) {
          const int4 four = reinterpret_cast<const int4*>(record + R::kCols + R::kCols / 32)[tile];
          sums[0] = four.x, sums[1] = four.y, sums[2] = four.z, sums[3] = four.w;
        }
        TileTerms<type> add[2];
        segment_terms<type>(add, c, now[i], i, dx, sums);
        auto* to = reinterpret_cast<TileTerms<type>*>(terms + (round * kExpertWarps + warp) * R::kPiece);
#pragma unroll
        for (int r = 0; r < 2; ++r) to[(g + 8 * r) * kTiles + segment] = add[r];
      }
    }
    __syncthreads();
    // A thread has a chain of rows g and g + 8; the first of a tile row's threads writes.
    const int here = min(R::kAtOnce, pieces - begun) / kPieces * (kSegments * 8);
    for (int i = threadIdx.x; i < here; i += kExpertThreads) {
      const int unit = i / (kSegments * 8), row = i / kSegments % 8, n = i % kSegments;
      const int piece = unit * kPieces + n / kTiles * kChainTiles;
      float chain[2] = {}, total[2] = {};
#pragma unroll
      for (int j = 0; j < kChainTiles; ++j) {
        const auto* of = reinterpret_cast<const TileTerms<type>*>(terms + (piece + j) * R::kPiece);
#pragma unroll
        for (int r = 0; r < 2; ++r) of[(row + 8 * r) * kTiles + n % kTiles].add_to(chain[r]);
      }
#pragma unroll
      for (int k = 0; k < kChains; ++k)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float v = from_lane(chain[r], lane / kChains * kChains + k);
          total[r] = k == 0 ? v : total[r] + v;
        }
      const int at = units.first + begun / kPieces + unit, pair = units.pair(at);
      if (n % kChains == 0)
        finish_pair(p, units.expert(at), (at - (lead + pair) * units.each) * rows + n / kChains, row, lead + pair,
                    total[0], total[1]);
    }
    if (begun + R::kAtOnce < pieces) __syncthreads();
  }
}

}  // namespace ds4::cuda
