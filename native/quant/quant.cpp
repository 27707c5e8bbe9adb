#include "quant/quant.h"

#include <bit>
#include <cassert>
#include <cstring>
#include <string>

#include "quant/iq_tables.h"

namespace ds4 {
namespace {

struct Format {
  const char* name;
  int64_t elements;
  size_t bytes;
};

const Format* find_format(DType type) {
  static constexpr Format f32{"F32", 1, 4}, f16{"F16", 1, 2}, bf16{"BF16", 1, 2}, i32{"I32", 1, 4};
  static constexpr Format q4_0{"Q4_0", 32, 18}, q4_1{"Q4_1", 32, 20}, q5_0{"Q5_0", 32, 22}, q5_1{"Q5_1", 32, 24};
  static constexpr Format q8_0{"Q8_0", 32, 34}, iq4_nl{"IQ4_NL", 32, 18}, mxfp4{"MXFP4", 32, 17};
  static constexpr Format f8{"F8_E4M3", 1, 1}, f4{"F4", 2, 1};
  static constexpr Format q2_k{"Q2_K", 256, 84}, q3_k{"Q3_K", 256, 110}, q4_k{"Q4_K", 256, 144};
  static constexpr Format q5_k{"Q5_K", 256, 176}, q6_k{"Q6_K", 256, 210}, iq2_xxs{"IQ2_XXS", 256, 66};
  switch (type) {
    case DType::F32:
      return &f32;
    case DType::F16:
      return &f16;
    case DType::BF16:
      return &bf16;
    case DType::I32:
      return &i32;
    case DType::Q4_0:
      return &q4_0;
    case DType::Q4_1:
      return &q4_1;
    case DType::Q5_0:
      return &q5_0;
    case DType::Q5_1:
      return &q5_1;
    case DType::Q8_0:
      return &q8_0;
    case DType::IQ4_NL:
      return &iq4_nl;
    case DType::MXFP4:
      return &mxfp4;
    case DType::Q2_K:
      return &q2_k;
    case DType::Q3_K:
      return &q3_k;
    case DType::Q4_K:
      return &q4_k;
    case DType::Q5_K:
      return &q5_k;
    case DType::Q6_K:
      return &q6_k;
    case DType::IQ2_XXS:
      return &iq2_xxs;
    case DType::F8_E4M3:
      return &f8;
    case DType::F4:
      return &f4;
  }
  return nullptr;
}

const Format& format(DType type) {
  const Format* f = find_format(type);
  if (!f) throw Unsupported("element type " + std::to_string(static_cast<int32_t>(type)) + " is not known");
  return *f;
}

uint16_t load16(const uint8_t* p) {
  return static_cast<uint16_t>(p[0] | p[1] << 8);
}

uint32_t load32(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
         static_cast<uint32_t>(p[3]) << 24;
}

float load_half(const uint8_t* p) {
  return half_to_float(load16(p));
}

// One function per format, one block each. Blocks of 32 keep element i in the low nibble of byte i and element
// 16 + i in its high nibble.

void q4_0(const uint8_t* b, float* out) {
  const float d = load_half(b);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>((b[2 + i] & 15) - 8);
    out[16 + i] = d * static_cast<float>((b[2 + i] >> 4) - 8);
  }
}

void q4_1(const uint8_t* b, float* out) {
  const float d = load_half(b), m = load_half(b + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(b[4 + i] & 15) + m;
    out[16 + i] = d * static_cast<float>(b[4 + i] >> 4) + m;
  }
}

void q5_0(const uint8_t* b, float* out) {
  const float d = load_half(b);
  const uint32_t high = load32(b + 2);
  for (int i = 0; i < 16; ++i) {
    const int lo = (b[6 + i] & 15) | static_cast<int>(high >> i & 1) << 4;
    const int hi = (b[6 + i] >> 4) | static_cast<int>(high >> (16 + i) & 1) << 4;
    out[i] = d * static_cast<float>(lo - 16);
    out[16 + i] = d * static_cast<float>(hi - 16);
  }
}

void q5_1(const uint8_t* b, float* out) {
  const float d = load_half(b), m = load_half(b + 2);
  const uint32_t high = load32(b + 4);
  for (int i = 0; i < 16; ++i) {
    const int lo = (b[8 + i] & 15) | static_cast<int>(high >> i & 1) << 4;
    const int hi = (b[8 + i] >> 4) | static_cast<int>(high >> (16 + i) & 1) << 4;
    out[i] = d * static_cast<float>(lo) + m;
    out[16 + i] = d * static_cast<float>(hi) + m;
  }
}

void q8_0(const uint8_t* b, float* out) {
  const float d = load_half(b);
  for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(b[2 + i]));
}

void iq4_nl(const uint8_t* b, float* out) {
  const float d = load_half(b);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(kIq4Values[b[2 + i] & 15]);
    out[16 + i] = d * static_cast<float>(kIq4Values[b[2 + i] >> 4]);
  }
}

// The scale byte e means 2^(e - 127); the code table holds twice the E2M1 values, so half of it is used.
void mxfp4(const uint8_t* b, float* out) {
  const uint32_t e = b[0];
  const float d = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * static_cast<float>(kE2M1Doubled[b[1 + i] & 15]);
    out[16 + i] = d * static_cast<float>(kE2M1Doubled[b[1 + i] >> 4]);
  }
}

// Bytes: 16 scales (low nibble scale, high nibble min), 64 of 2-bit codes, d, dmin.
void q2_k(const uint8_t* b, float* out) {
  const uint8_t *scales = b, *codes = b + 16;
  const float d = load_half(b + 80), dmin = load_half(b + 82);
  for (int i = 0; i < 256; ++i) {
    const int group = i / 16, half = i / 128, shift = i % 128 / 32 * 2;
    const float scale = d * static_cast<float>(scales[group] & 15), min = dmin * static_cast<float>(scales[group] >> 4);
    const int code = codes[half * 32 + i % 32] >> shift & 3;
    out[i] = scale * static_cast<float>(code) - min;
  }
}

// Bytes: 32 of high bits, 64 of 2-bit codes, 12 of 6-bit scales (16 of them), d.
void q3_k(const uint8_t* b, float* out) {
  const uint8_t *high = b, *codes = b + 32, *scales = b + 96;
  const float d = load_half(b + 108);
  for (int i = 0; i < 256; ++i) {
    const int group = i / 16, half = i / 128, shift = i % 128 / 32 * 2;
    const int low4 = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
    const int high2 = scales[8 + group % 4] >> (group / 4 * 2) & 3;
    const float scale = d * static_cast<float>((low4 | high2 << 4) - 32);
    const int code = codes[half * 32 + i % 32] >> shift & 3;
    const int offset = high[i % 32] >> (i / 32) & 1 ? 0 : 4;
    out[i] = scale * static_cast<float>(code - offset);
  }
}

// The eight 6-bit scales and mins of Q4_K and Q5_K in 12 bytes: groups 0..3 in the low six bits of bytes 0..3 and
// 4..7; groups 4..7 have their low nibbles in bytes 8..11 and their upper two bits on top of bytes 0..7.
void scale_min(const uint8_t* s, int group, int& scale, int& min) {
  if (group < 4) {
    scale = s[group] & 63;
    min = s[group + 4] & 63;
  } else {
    scale = (s[group + 4] & 15) | s[group - 4] >> 6 << 4;
    min = s[group + 4] >> 4 | s[group] >> 6 << 4;
  }
}

// Bytes: d, dmin, 12 of scales and mins, 128 of 4-bit codes.
void q4_k(const uint8_t* b, float* out) {
  const float d = load_half(b), dmin = load_half(b + 2);
  for (int group = 0; group < 8; ++group) {
    int sc, mn;
    scale_min(b + 4, group, sc, mn);
    const float scale = d * static_cast<float>(sc), min = dmin * static_cast<float>(mn);
    for (int i = 0; i < 32; ++i) {
      const int code = b[16 + group / 2 * 32 + i] >> (group % 2 * 4) & 15;
      out[group * 32 + i] = scale * static_cast<float>(code) - min;
    }
  }
}

// Bytes: d, dmin, 12 of scales and mins, 32 of fifth bits, 128 of 4-bit codes.
void q5_k(const uint8_t* b, float* out) {
  const float d = load_half(b), dmin = load_half(b + 2);
  for (int group = 0; group < 8; ++group) {
    int sc, mn;
    scale_min(b + 4, group, sc, mn);
    const float scale = d * static_cast<float>(sc), min = dmin * static_cast<float>(mn);
    for (int i = 0; i < 32; ++i) {
      const int low = b[48 + group / 2 * 32 + i] >> (group % 2 * 4) & 15, high = b[16 + i] >> group & 1;
      out[group * 32 + i] = scale * static_cast<float>(low | high << 4) - min;
    }
  }
}

// Bytes: 128 of low nibbles, 64 of upper 2-bit parts, 16 signed scales, d.
void q6_k(const uint8_t* b, float* out) {
  const float d = load_half(b + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, in_half = i % 128;
    const int low = b[half * 64 + in_half % 64] >> (in_half / 64 * 4) & 15;
    const int high = b[128 + half * 32 + in_half % 32] >> (in_half / 32 * 2) & 3;
    const float scale = d * static_cast<float>(static_cast<int8_t>(b[192 + i / 16]));
    out[i] = scale * static_cast<float>((low | high << 4) - 32);
  }
}

// Bytes: d, then 8 groups of 32: four grid indices, and a word of four 7-bit sign indices and a 4-bit scale. The
// eighth sign makes the number of minus signs even.
void iq2_xxs(const uint8_t* b, float* out) {
  const float d = load_half(b);
  for (int group = 0; group < 8; ++group) {
    const uint8_t* g = b + 2 + group * 8;
    const uint32_t word = load32(g + 4);
    const float scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
    for (int part = 0; part < 4; ++part) {
      const uint32_t seven = word >> (7 * part) & 127;
      const uint32_t signs = seven | (std::popcount(seven) & 1u) << 7;
      const uint16_t grid = kIq2Grid[g[part]];
      for (int i = 0; i < 8; ++i) {
        const float magnitude = static_cast<float>(kIq2Values[grid >> (2 * i) & 3]);
        out[group * 32 + part * 8 + i] = scale * magnitude * (signs >> i & 1 ? -1.0f : 1.0f);
      }
    }
  }
}

void for_blocks(void (*one)(const uint8_t*, float*), const Format& f, const void* row, float* out, int64_t n) {
  const auto* p = static_cast<const uint8_t*>(row);
  for (int64_t i = 0; i < n; i += f.elements, p += f.bytes) one(p, out + i);
}

}  // namespace

int64_t block_elements(DType type) {
  return format(type).elements;
}

size_t block_bytes(DType type) {
  return format(type).bytes;
}

size_t row_bytes(DType type, int64_t cols) {
  const Format& f = format(type);
  if (cols < 0 || cols % f.elements != 0)
    throw Invalid(std::string("a row of ") + std::to_string(cols) + " elements is not a whole number of " + f.name +
                  " blocks of " + std::to_string(f.elements));
  return static_cast<size_t>(cols / f.elements) * f.bytes;
}

const char* dtype_name(DType type) {
  const Format* f = find_format(type);
  return f ? f->name : "unknown";
}

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  // 2^-24 steps; the product is exact.
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

uint16_t float_to_half(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f), magnitude = bits & 0x7FFFFFFFu;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (magnitude >> 13 & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to 2^16 or more
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the subnormal, rounded to nearest even, in the sum's last bits.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float bf16_to_float(uint16_t b) {
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

uint16_t float_to_bf16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

void dequantize_row(DType type, const void* row, float* out, int64_t n) {
  const Format& f = format(type);
  row_bytes(type, n);
  const auto* p = static_cast<const uint8_t*>(row);
  switch (type) {
    case DType::F32:
      if (n > 0) std::memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::F16:
      for (int64_t i = 0; i < n; ++i) out[i] = load_half(p + 2 * i);
      return;
    case DType::BF16:
      for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(load16(p + 2 * i));
      return;
    case DType::Q4_0:
      return for_blocks(q4_0, f, row, out, n);
    case DType::Q4_1:
      return for_blocks(q4_1, f, row, out, n);
    case DType::Q5_0:
      return for_blocks(q5_0, f, row, out, n);
    case DType::Q5_1:
      return for_blocks(q5_1, f, row, out, n);
    case DType::Q8_0:
      return for_blocks(q8_0, f, row, out, n);
    case DType::IQ4_NL:
      return for_blocks(iq4_nl, f, row, out, n);
    case DType::MXFP4:
      return for_blocks(mxfp4, f, row, out, n);
    case DType::Q2_K:
      return for_blocks(q2_k, f, row, out, n);
    case DType::Q3_K:
      return for_blocks(q3_k, f, row, out, n);
    case DType::Q4_K:
      return for_blocks(q4_k, f, row, out, n);
    case DType::Q5_K:
      return for_blocks(q5_k, f, row, out, n);
    case DType::Q6_K:
      return for_blocks(q6_k, f, row, out, n);
    case DType::IQ2_XXS:
      return for_blocks(iq2_xxs, f, row, out, n);
    case DType::I32:
    case DType::F8_E4M3:
    case DType::F4:
      break;
  }
  throw Unsupported(std::string("element type ") + f.name + " has no conversion to f32");
}

}  // namespace ds4
