// Block formats in device memory. A row's blocks of 32 columns are split into planes, so that every load is aligned
// and the loads of neighbouring lanes touch:
//
//   q  quants       kQ bytes a block      s  scales of a block                kS bytes a block
//   h  high bits    kH bytes a block      d  scales of a superblock of 256    kD bytes a superblock
//
// each plane [rows][blocks of a row]. Nothing is rounded: scales keep the file's precision. A block decodes to 32
// signed bytes and   w = d0 * (q - kZero) + m0   for its first 16 columns, d1 and m1 for the others (kHalves), or one
// pair for all.
//
// Order of bits, chosen so that four neighbouring columns come out of one mask and shift:
//   nibbles    byte i: column i low, column 16 + i high; table formats: column c in nibble c
//   two bits   word k (columns 16k ..), byte i: columns i, 4 + i, 8 + i, 12 + i from the lowest bits up
//   one bit    byte i, bit j: column 4j + i
#pragma once

#include <cuda_fp16.h>
#include <vector_types.h>

#include <cstdint>
#include <type_traits>

#include "types.h"

namespace ds4::cuda {

struct Planes {
  const uint8_t* q;
  const uint8_t* h;
  const uint8_t* s;
  const uint8_t* d;
  const uint2* grid;  // code book of IQ2_XXS: eight magnitudes per index
};

template <DType type>
struct Layout {
  static constexpr bool kExists = false;
};
template <int Q, int H, int S, int D, bool Halves, bool Min, int Zero>
struct BlockLayout {
  static constexpr bool kExists = true, kHalves = Halves, kMin = Min;
  static constexpr int kQ = Q, kH = H, kS = S, kD = D, kZero = Zero;
};
//                                                      q   h  s  d   halves min zero
template <>
struct Layout<DType::Q8_0> : BlockLayout<32, 0, 2, 0, false, false, 0> {};
template <>
struct Layout<DType::Q4_0> : BlockLayout<16, 0, 2, 0, false, false, 8> {};
template <>
struct Layout<DType::Q4_1> : BlockLayout<16, 0, 4, 0, false, true, 0> {};
template <>
struct Layout<DType::Q5_0> : BlockLayout<16, 4, 2, 0, false, false, 16> {};
template <>
struct Layout<DType::Q5_1> : BlockLayout<16, 4, 4, 0, false, true, 0> {};
template <>
struct Layout<DType::IQ4_NL> : BlockLayout<16, 0, 2, 0, false, false, 0> {};
template <>
struct Layout<DType::MXFP4> : BlockLayout<16, 0, 1, 0, false, false, 0> {};
template <>
struct Layout<DType::Q2_K> : BlockLayout<8, 0, 2, 4, true, true, 0> {};
template <>
struct Layout<DType::Q3_K> : BlockLayout<8, 4, 2, 2, true, false, 4> {};
template <>
struct Layout<DType::Q4_K> : BlockLayout<16, 0, 0, 16, false, true, 0> {};
template <>
struct Layout<DType::Q5_K> : BlockLayout<16, 4, 0, 16, false, true, 0> {};
template <>
struct Layout<DType::Q6_K> : BlockLayout<16, 8, 2, 2, true, false, 32> {};
template <>
struct Layout<DType::IQ2_XXS> : BlockLayout<8, 0, 0, 2, false, false, 0> {};

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

#ifdef __CUDACC__

// What a lane loads for one block; decoding comes later, so that several blocks' loads are in flight.
template <DType type>
struct RawBlock {
  using L = Layout<type>;
  uint32_t q[L::kQ / 4];
  uint32_t h[L::kH ? L::kH / 4 : 1];
  uint32_t s;
  uint32_t d[L::kD == 16 ? 4 : 1];
};

struct Block {
  int q[8];
  float d0, d1, m0, m1;
};

template <DType type>
__device__ __forceinline__ RawBlock<type> load_block(const Planes& p, int64_t block) {
  using L = Layout<type>;
  RawBlock<type> r;
  if constexpr (L::kQ >= 16) {
#pragma unroll
    for (int i = 0; i < L::kQ / 16; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p.q + block * L::kQ) + i);
      r.q[4 * i] = v.x, r.q[4 * i + 1] = v.y, r.q[4 * i + 2] = v.z, r.q[4 * i + 3] = v.w;
    }
  } else {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p.q + block * L::kQ));
    r.q[0] = v.x, r.q[1] = v.y;
  }
  if constexpr (L::kH == 4) r.h[0] = __ldg(reinterpret_cast<const uint32_t*>(p.h) + block);
  if constexpr (L::kH == 8) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p.h) + block);
    r.h[0] = v.x, r.h[1] = v.y;
  }
  if constexpr (L::kS == 1) r.s = __ldg(p.s + block);
  if constexpr (L::kS == 2) r.s = __ldg(reinterpret_cast<const uint16_t*>(p.s) + block);
  if constexpr (L::kS == 4) r.s = __ldg(reinterpret_cast<const uint32_t*>(p.s) + block);
  if constexpr (L::kD == 2) r.d[0] = __ldg(reinterpret_cast<const uint16_t*>(p.d) + (block >> 3));
  if constexpr (L::kD == 4) r.d[0] = __ldg(reinterpret_cast<const uint32_t*>(p.d) + (block >> 3));
  if constexpr (L::kD == 16) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p.d) + (block >> 3));
    r.d[0] = v.x, r.d[1] = v.y, r.d[2] = v.z, r.d[3] = v.w;
  }
  return r;
}

__device__ __forceinline__ float half_bits(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Four entries of a table of 16 bytes, selected by four nibbles.
__device__ __forceinline__ int table16(uint32_t nibbles, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3) {
  const uint32_t low = __byte_perm(t0, t1, nibbles & 0x7777u), high = __byte_perm(t2, t3, nibbles & 0x7777u);
  return static_cast<int>(__byte_perm(low, high, 0x3210u | (nibbles & 0x8888u) >> 1));
}

// `grid`: Planes::grid, copied to shared memory; unused by other formats.
template <DType type>
__device__ __forceinline__ Block decode_block(const RawBlock<type>& r, int64_t block, const uint2* grid) {
  using L = Layout<type>;
  Block b;
  b.d1 = b.m0 = b.m1 = 0.0f;
  constexpr bool table = type == DType::MXFP4 || type == DType::IQ4_NL;
  if constexpr (L::kQ == 32) {
#pragma unroll
    for (int j = 0; j < 8; ++j) b.q[j] = static_cast<int>(r.q[j]);
  } else if constexpr (table) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t nibbles = j % 2 ? r.q[j / 2] >> 16 : r.q[j / 2] & 0xFFFFu;
      // Twice the E2M1 values; the code book of IQ4_NL.
      b.q[j] = type == DType::MXFP4 ? table16(nibbles, 0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu)
                                    : table16(nibbles, 0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u);
    }
  } else if constexpr (L::kQ == 16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b.q[j] = static_cast<int>(r.q[j] & 0x0F0F0F0Fu);
      b.q[4 + j] = static_cast<int>(r.q[j] >> 4 & 0x0F0F0F0Fu);
    }
  } else if constexpr (type != DType::IQ2_XXS) {
#pragma unroll
    for (int j = 0; j < 8; ++j) b.q[j] = static_cast<int>(r.q[j / 4] >> (2 * (j % 4)) & 0x03030303u);
  }
  if constexpr (L::kH == 4) {
    constexpr int shift = L::kQ == 8 ? 2 : 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) b.q[j] |= static_cast<int>((r.h[0] >> j & 0x01010101u) << shift);
  }
  if constexpr (L::kH == 8) {
#pragma unroll
    for (int j = 0; j < 8; ++j) b.q[j] |= static_cast<int>((r.h[j / 4] >> (2 * (j % 4)) & 0x03030303u) << 4);
  }

  const int in_super = static_cast<int>(block & 7);
  if constexpr (type == DType::MXFP4) {
    b.d0 = __uint_as_float(r.s < 2 ? 0x00200000u << r.s : (r.s - 1) << 23);
  } else if constexpr (type == DType::Q4_1 || type == DType::Q5_1) {
    b.d0 = half_bits(r.s & 0xFFFFu);
    b.m0 = half_bits(r.s >> 16);
  } else if constexpr (L::kS == 2 && L::kD == 0) {
    b.d0 = half_bits(r.s);
  } else if constexpr (type == DType::Q2_K) {
    const float d = half_bits(r.d[0] & 0xFFFFu), dmin = half_bits(r.d[0] >> 16);
    b.d0 = d * static_cast<float>(r.s & 15u);
    b.m0 = -(dmin * static_cast<float>(r.s >> 4 & 15u));
    b.d1 = d * static_cast<float>(r.s >> 8 & 15u);
    b.m1 = -(dmin * static_cast<float>(r.s >> 12 & 15u));
  } else if constexpr (type == DType::Q3_K || type == DType::Q6_K) {
    const float d = half_bits(r.d[0]);
    b.d0 = d * static_cast<float>(static_cast<int8_t>(r.s & 0xFFu));
    b.d1 = d * static_cast<float>(static_cast<int8_t>(r.s >> 8));
  } else if constexpr (L::kD == 16) {
    const float d = half_bits(r.d[0] & 0xFFFFu), dmin = half_bits(r.d[0] >> 16);
    // Bytes 0..11 of the words 1..3: six-bit scales and minimums, see Q4_K in the GGUF formats.
    const int shift = 8 * (in_super & 3);
    const uint32_t a = r.d[1] >> shift, m = r.d[2] >> shift, c = r.d[3] >> shift;
    const uint32_t scale = in_super < 4 ? a & 63u : (c & 15u) | (a >> 6 & 3u) << 4;
    const uint32_t min = in_super < 4 ? m & 63u : (c >> 4 & 15u) | (m >> 6 & 3u) << 4;
    b.d0 = d * static_cast<float>(scale);
    b.m0 = -(dmin * static_cast<float>(min));
  } else if constexpr (type == DType::IQ2_XXS) {
    const uint32_t word = r.q[1];
    b.d0 = half_bits(r.d[0]) * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint2 g = grid[r.q[0] >> (8 * part) & 255u];
      const uint32_t seven = word >> (7 * part) & 127u;
      const uint32_t signs = seven | (static_cast<uint32_t>(__popc(seven)) & 1u) << 7;
      // One bit to each byte; 0xFF where the sign is minus. x ^ 0xFF + 1 is -x, and no magnitude is zero.
      const uint32_t low = (signs & 15u) * 0x00204081u & 0x01010101u, high = (signs >> 4) * 0x00204081u & 0x01010101u;
      b.q[2 * part] = static_cast<int>((g.x ^ low * 255u) + low);
      b.q[2 * part + 1] = static_cast<int>((g.y ^ high * 255u) + high);
    }
  }
  return b;
}

#endif

}  // namespace ds4::cuda
