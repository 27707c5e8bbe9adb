// Block formats in device memory, laid out for the matrix units (mma.m16n8k32 on signed bytes).
//
// A matrix is cut into tiles of 16 rows x 128 columns (four blocks of 32). Rows and columns are padded with zeros to
// whole tiles; experts and groups of rows are slabs, each padded on its own. Lane 4g + t of a warp holds, of rows g and
// g + 8, the columns 8t .. 8t + 7 of every block: a strip is what it holds of one row of a tile.
//
//   q  quants       kQ words a strip     [tile][load][lane][16 bytes]
//   h  high bits    kH words a strip     [tile][lane][2 rows]
//   s  scales       kS bytes a row       [tile][g][2 rows], one after the other for the tile's four blocks
//   d  scales of a superblock of 256 columns, kD bytes a row    [two tiles][g][2 rows]
//
// tile = (slab * tiles of rows + tile row) * tiles of columns + tile column. Where gates and ups are interleaved, rows
// 0 .. 7 of a tile are gates and rows 8 .. 15 the ups of the same numbers.
//
// Nothing is rounded: scales keep the file's precision. A block decodes to signed bytes with one scale, or one for each
// half (kHalves); kMin subtracts a minimum from each half or adds one (float formats). kInteger: scales and minimums of
// a superblock's blocks are integers, to be multiplied by its two floats.
//
// Order of bits, so that four neighbouring columns come out of one mask and shift; `half` is 0 for columns 8t .. 8t + 3
// of a block, 1 for the next four:
//   nibbles    a word a block; byte i: column i low, column 4 + i high; table formats: column c in nibble c
//   two bits   a word two blocks; byte i: columns i and 4 + i of the first, then of the second, from the low bits up
//   one bit    byte i, bit 2 * block + half
//   IQ2_XXS    word 0: an index a block; word 1: nibble c holds the signs of column c at the bits `sign_bit`
#pragma once

#include <cuda_fp16.h>
#include <vector_types.h>

#include <cstdint>
#include <type_traits>

#include "types.h"

namespace ds4::cuda {

constexpr int kTileRows = 16;
constexpr int kTileBlocks = 4;
constexpr int kTileCols = 32 * kTileBlocks;

struct Planes {
  const uint8_t* q;
  const uint8_t* h;
  const uint8_t* s;
  const uint8_t* d;
  const uint32_t* grid;  // code book of IQ2_XXS: eight codes of magnitudes per index, a nibble each
};

template <DType type>
struct Layout {
  static constexpr bool kExists = false;
};
template <int Q, int H, int S, int D, bool Halves, bool Min, int Zero>
struct TileLayout {
  static constexpr bool kExists = true, kHalves = Halves, kMin = Min, kInteger = D > 0;
  static constexpr int kQ = Q, kH = H, kS = S, kD = D, kZero = Zero;
};
//                                                      q  h  s  d  halves min zero
template <>
struct Layout<DType::Q8_0> : TileLayout<8, 0, 8, 0, false, false, 0> {};
template <>
struct Layout<DType::Q4_0> : TileLayout<4, 0, 8, 0, false, false, 8> {};
template <>
struct Layout<DType::Q4_1> : TileLayout<4, 0, 16, 0, false, true, 0> {};
template <>
struct Layout<DType::Q5_0> : TileLayout<4, 1, 8, 0, false, false, 16> {};
template <>
struct Layout<DType::Q5_1> : TileLayout<4, 1, 16, 0, false, true, 0> {};
template <>
struct Layout<DType::IQ4_NL> : TileLayout<4, 0, 8, 0, false, false, 0> {};
template <>
struct Layout<DType::MXFP4> : TileLayout<4, 0, 4, 0, false, false, 0> {};
// The four-bit scales of Q2_K are multiplied into the bytes.
template <>
struct Layout<DType::Q2_K> : TileLayout<2, 0, 8, 4, false, true, 0> {};
template <>
struct Layout<DType::Q3_K> : TileLayout<2, 1, 8, 2, true, false, 4> {};
template <>
struct Layout<DType::Q4_K> : TileLayout<4, 0, 8, 4, false, true, 0> {};
template <>
struct Layout<DType::Q5_K> : TileLayout<4, 1, 8, 4, false, true, 0> {};
template <>
struct Layout<DType::Q6_K> : TileLayout<4, 2, 8, 2, true, false, 32> {};
template <>
struct Layout<DType::IQ2_XXS> : TileLayout<2, 0, 2, 2, false, false, 0> {};

// Calls f(std::integral_constant<DType, type>) for a block format, returns false for any other type.
template <class F>
bool with_block_format(DType type, F&& f) {
  switch (type) {
#define DS4_FORMAT(name)                             \
  case DType::name:                                  \
    f(std::integral_constant<DType, DType::name>{}); \
    return true;
    DS4_FORMAT(Q8_0)
    DS4_FORMAT(Q4_0)
    DS4_FORMAT(Q4_1)
    DS4_FORMAT(Q5_0)
    DS4_FORMAT(Q5_1)
    DS4_FORMAT(IQ4_NL)
    DS4_FORMAT(MXFP4)
    DS4_FORMAT(Q2_K)
    DS4_FORMAT(Q3_K)
    DS4_FORMAT(Q4_K)
    DS4_FORMAT(Q5_K)
    DS4_FORMAT(Q6_K)
    DS4_FORMAT(IQ2_XXS)
#undef DS4_FORMAT
    default:
      return false;
  }
}

// Word of strip (slot, t) that holds block `block`; `part` counts the words of one block (Q8_0) or of one strip.
template <int kQ>
constexpr int64_t quant_word(int64_t tile, int slot, int t, int block, int part) {
  const int lane = slot % 8 * 4 + t, hi = slot / 8;
  if (kQ == 8) return tile * 512 + (block * 32 + lane) * 4 + part * 2 + hi;
  if (kQ == 4) return tile * 256 + (hi * 32 + lane) * 4 + block;
  return tile * 128 + lane * 4 + hi * 2 + part;
}

// Bit of a nibble of IQ2_XXS' sign word that holds the sign for each block of the tile.
constexpr int sign_bit(int block) {
  return block == 0 ? 2 : block == 1 ? 3 : block == 2 ? 1 : 0;
}

#ifdef __CUDACC__

// What a lane loads for one tile; decoding comes later, so that several tiles' loads are in flight.
template <DType type>
struct RawTile {
  using L = Layout<type>;
  uint32_t q[2 * L::kQ];
  uint32_t h[L::kH ? 2 * L::kH : 1];
  uint32_t s[L::kS / 2];
  uint32_t d[L::kD ? L::kD / 2 : 1];
};

// Weights are read once: they do not push activations out of the cache.
__device__ __forceinline__ uint4 stream_load(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

template <bool kShared, int N>
__device__ __forceinline__ void load_words(uint32_t (&to)[N], const uint8_t* from) {
  if constexpr (N >= 4) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const uint4* at = reinterpret_cast<const uint4*>(from) + i;
      const uint4 v = kShared ? *at : __ldg(at);
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  } else if constexpr (N == 2) {
    const uint2* at = reinterpret_cast<const uint2*>(from);
    const uint2 v = kShared ? *at : __ldg(at);
    to[0] = v.x, to[1] = v.y;
  } else {
    const uint32_t* at = reinterpret_cast<const uint32_t*>(from);
    to[0] = kShared ? *at : __ldg(at);
  }
}

// Lane's addresses in the planes, or in a copy of some tiles in shared memory. `super`: number of the tile pair that
// holds the tile, for formats with superblocks.
template <DType type, bool kShared = false>
struct TileReader {
  using L = Layout<type>;
  const uint8_t *q, *h, *s, *d;
  __device__ __forceinline__ TileReader(const Planes& p, int lane)
      : q(p.q + lane * 16),
        h(p.h + lane * (8 * L::kH)),
        s(p.s + lane / 4 * (2 * L::kS)),
        d(p.d + lane / 4 * (2 * L::kD)) {}
  // Counts tiles from the `by`th on; an even number where superblocks are two tiles.
  __device__ __forceinline__ void advance(int64_t by) {
    q += by * (256 * L::kQ), h += by * (256 * L::kH), s += by * (16 * L::kS), d += by / 2 * (16 * L::kD);
  }
  __device__ __forceinline__ void quants(RawTile<type>& r, uint32_t tile, int load) const {
    const uint4* from = reinterpret_cast<const uint4*>(q + static_cast<uint64_t>(tile) * (256 * L::kQ)) + 32 * load;
    const uint4 v = kShared ? *from : stream_load(from);
    r.q[4 * load] = v.x, r.q[4 * load + 1] = v.y, r.q[4 * load + 2] = v.z, r.q[4 * load + 3] = v.w;
  }
  __device__ __forceinline__ void scales(RawTile<type>& r, uint32_t tile, uint32_t super) const {
    load_words<kShared>(r.s, s + static_cast<uint64_t>(tile) * (16 * L::kS));
    if constexpr (L::kD > 0) load_words<kShared>(r.d, d + static_cast<uint64_t>(super) * (16 * L::kD));
  }
  __device__ __forceinline__ void all(RawTile<type>& r, uint32_t tile, uint32_t super) const {
#pragma unroll
    for (int i = 0; i < L::kQ / 2; ++i) quants(r, tile, i);
    if constexpr (L::kH > 0) load_words<kShared>(r.h, h + static_cast<uint64_t>(tile) * (256 * L::kH));
    scales(r, tile, super);
  }
};

__device__ __forceinline__ float half_bits(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(select));
  return v;
}

// Eight entries of a table of 16 bytes, selected by eight nibbles: four in each word.
__device__ __forceinline__ void table16(uint32_t nibbles, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3,
                                        uint32_t (&to)[2]) {
  const uint32_t in = nibbles & 0x77777777u, which = (nibbles >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t at = in >> (16 * half);
    to[half] = permute(permute(t0, t1, at), permute(t2, t3, at), which >> (16 * half));
  }
}

// The code book in shared memory, kCopies times: copy c of an entry stands at word kCopies * index + c, so that lanes
// fall into different banks.
template <int kCopies>
struct Grid {
  uint32_t word[256 * kCopies];
  __device__ __forceinline__ void fill(const Planes& p) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
      const uint32_t v = __ldg(p.grid + i);
#pragma unroll
      for (int c = 0; c < kCopies; ++c) word[i * kCopies + c] = v;
    }
  }
  // The address of the lane's copy in shared memory.
  __device__ __forceinline__ uint32_t address(int lane) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(word)) + lane % kCopies * 4;
  }
};
template <>
struct Grid<0> {
  uint32_t word[1];
  __device__ __forceinline__ void fill(const Planes&) {}
  __device__ __forceinline__ uint32_t address(int) const { return 0; }
};

// A block's share of a lane as the A operand of mma.m16n8k32: a[0], a[2] of row g, a[1], a[3] of row g + 8. The byte
// that the instruction calls k = 4t + i is column 8t + i, and k = 16 + 4t + i is column 8t + 4 + i. `grid`: what
// Grid<kCopies>::address gave.
template <DType type, int kCopies>
__device__ __forceinline__ void decode_codes(const RawTile<type>& r, int block, uint32_t grid, int lane, int (&a)[4]) {
  using L = Layout<type>;
  constexpr bool table = type == DType::MXFP4 || type == DType::IQ4_NL;
#pragma unroll
  for (int hi = 0; hi < 2; ++hi) {
    uint32_t w[2];
    if constexpr (L::kQ == 8) {
      w[0] = r.q[4 * block + hi], w[1] = r.q[4 * block + 2 + hi];
    } else if constexpr (table) {
      // Twice the E2M1 values; the code book of IQ4_NL.
      if constexpr (type == DType::MXFP4)
        table16(r.q[4 * hi + block], 0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu, w);
      else
        table16(r.q[4 * hi + block], 0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u, w);
    } else if constexpr (L::kQ == 4) {
      const uint32_t v = r.q[4 * hi + block];
      w[0] = v & 0x0F0F0F0Fu, w[1] = v >> 4 & 0x0F0F0F0Fu;
    } else if constexpr (type == DType::IQ2_XXS) {
      const uint32_t index = permute(r.q[2 * hi], 0, 0x4440u + static_cast<uint32_t>(block)), sign = r.q[2 * hi + 1];
      uint32_t entry;
      asm("ld.shared.u32 %0, [%1];" : "=r"(entry) : "r"(index * (4 * kCopies) + grid));
      const uint32_t s = (block == 0   ? sign
                          : block == 1 ? sign >> 1
                          : block == 2 ? sign << 1
                                       : sign << 2) &
                         0x44444444u;
      const uint32_t select = entry ^ s;
      // Bytes 0 .. 2: the magnitudes, 4 .. 6: their negatives.
      w[0] = permute(0x002B1908u, 0x00D5E7F8u, select);
      w[1] = permute(0x002B1908u, 0x00D5E7F8u, select >> 16);
    } else {
      const uint32_t v = r.q[2 * hi + block / 2];
      w[0] = v >> (4 * (block % 2)) & 0x03030303u, w[1] = v >> (4 * (block % 2) + 2) & 0x03030303u;
    }
    if constexpr (L::kH == 1) {
      constexpr int shift = L::kQ == 2 ? 2 : 4;
      w[0] |= (r.h[hi] >> (2 * block) & 0x01010101u) << shift;
      w[1] |= (r.h[hi] >> (2 * block + 1) & 0x01010101u) << shift;
    }
    if constexpr (L::kH == 2) {
      const uint32_t v = r.h[2 * hi + block / 2];
      w[0] |= (v >> (4 * (block % 2)) & 0x03030303u) << 4;
      w[1] |= (v >> (4 * (block % 2) + 2) & 0x03030303u) << 4;
    }
    if constexpr (L::kZero > 0) {
      constexpr uint32_t zero = L::kZero * 0x01010101u;
      w[0] = ((w[0] | 0x80808080u) - zero) ^ 0x80808080u;
      w[1] = ((w[1] | 0x80808080u) - zero) ^ 0x80808080u;
    }
    if constexpr (type == DType::Q2_K) {
      const uint32_t s = r.s[2 * hi + block / 2] >> (lane & 2 ? 16 * (block % 2) + 8 : 16 * (block % 2)) & 15u;
      w[0] *= s, w[1] *= s;
    }
    a[hi] = static_cast<int>(w[0]);
    a[2 + hi] = static_cast<int>(w[1]);
  }
}

// ---- scales of row g (hi = 0) or g + 8 of a lane

// Formats with float scales: that of one block, and its minimum.
template <DType type>
__device__ __forceinline__ float float_scale(const RawTile<type>& r, int hi, int block) {
  using L = Layout<type>;
  static_assert(!L::kInteger);
  if constexpr (type == DType::MXFP4) {
    const uint32_t e = r.s[hi] >> (8 * block) & 255u;
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  } else if constexpr (L::kMin) {
    return half_bits(r.s[4 * hi + block] & 0xFFFFu);
  } else {
    return half_bits(r.s[2 * hi + block / 2] >> (16 * (block % 2)) & 0xFFFFu);
  }
}
template <DType type>
__device__ __forceinline__ float float_minimum(const RawTile<type>& r, int hi, int block) {
  static_assert(Layout<type>::kMin && !Layout<type>::kInteger);
  return half_bits(r.s[4 * hi + block] >> 16);
}

// Formats with superblocks: the integer scale of a block (`half`: of its columns 16 .. 31, where there are two), and
// what it is to be multiplied by. The scales of Q2_K are in the codes.
template <DType type>
__device__ __forceinline__ int integer_scale(const RawTile<type>& r, int hi, int block, int half) {
  static_assert(Layout<type>::kInteger && type != DType::Q2_K);
  if constexpr (type == DType::IQ2_XXS) {
    // Of blocks 0 and 2, or 1 and 3, of both rows: 2 n + 1.
    const uint32_t odd = (block % 2 ? r.s[0] >> 3 : r.s[0] << 1) & 0x1E1E1E1Eu | 0x01010101u;
    return static_cast<int>(permute(odd, 0, 0x4440u + static_cast<uint32_t>(2 * hi + block / 2)));
  } else {
    const uint32_t s = r.s[2 * hi + block / 2] >> (16 * (block % 2) + 8 * half) & 255u;
    return Layout<type>::kHalves ? static_cast<int8_t>(s) : static_cast<int>(s);
  }
}
template <DType type>
__device__ __forceinline__ float super_scale(const RawTile<type>& r, int hi) {
  using L = Layout<type>;
  if constexpr (L::kD == 4) return half_bits(r.d[hi] & 0xFFFFu);
  const float d = half_bits(r.d[0] >> (16 * hi) & 0xFFFFu);
  return type == DType::IQ2_XXS ? 0.125f * d : d;
}
template <DType type>
__device__ __forceinline__ float super_minimum(const RawTile<type>& r, int hi) {
  static_assert(Layout<type>::kD == 4);
  return half_bits(r.d[hi] >> 16);
}
// The minimums of block `block`, which may be the lane's own number: of its first 16 columns in byte 0, of the others
// in byte 1.
template <DType type>
__device__ __forceinline__ uint32_t integer_minimums(const RawTile<type>& r, int hi, int block) {
  const uint32_t s = (block & 2 ? r.s[2 * hi + 1] : r.s[2 * hi]) >> (16 * (block & 1)) & 0xFFFFu;
  return type == DType::Q2_K ? s >> 4 & 0x0F0Fu : (s >> 8) * 0x0101u;
}

#endif

}  // namespace ds4::cuda
