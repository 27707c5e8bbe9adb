#include "quant/scaled.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "quant/quant.h"

namespace ds4 {
namespace {

constexpr uint8_t kNotANumber = 255;  // E8M0

// 2^(scale - 127)
float power(uint8_t scale) {
  if (scale == kNotANumber) throw Invalid("a scale is not a number");
  return std::bit_cast<float>(scale == 0 ? 0x00400000u : static_cast<uint32_t>(scale) << 23);
}

// E4M3 has no infinities; magnitude 127 is NaN.
std::array<float, 256> e4m3_values() {
  std::array<float, 256> out{};
  for (uint32_t code = 0; code < 256; ++code) {
    const int exponent = static_cast<int>(code >> 3 & 15), fraction = static_cast<int>(code & 7);
    float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    if ((code & 127) == 127) value = std::numeric_limits<float>::quiet_NaN();
    out[code] = code & 128 ? -value : value;
  }
  return out;
}

std::vector<std::byte> f4_to_mxfp4(const MatrixView& m) {
  std::vector<std::byte> out(static_cast<size_t>(m.rows) * row_bytes(DType::MXFP4, m.cols));
  const auto* codes = static_cast<const uint8_t*>(m.data);
  auto* block = reinterpret_cast<uint8_t*>(out.data());
  const int64_t blocks = m.rows * (m.cols / kScaleColumns);
  for (int64_t b = 0; b < blocks; ++b, codes += 16, block += 17) {
    if (m.scales[b] == kNotANumber) throw Invalid("a scale is not a number");
    block[0] = m.scales[b];
    // Pairs of neighbours become pairs sixteen apart.
    for (int i = 0; i < 16; ++i) {
      const uint8_t low = codes[i / 2] >> (i % 2 * 4) & 15, high = codes[8 + i / 2] >> (i % 2 * 4) & 15;
      block[1 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
  return out;
}

// Row `r` as floats; the products are exact unless they leave the range of F32.
void e4m3_row(const MatrixView& m, int64_t r, float* out) {
  static const std::array<float, 256> values = e4m3_values();
  const int64_t tiles = (m.cols + kScaleTile - 1) / kScaleTile;
  const auto* codes = static_cast<const uint8_t*>(m.data) + r * m.cols;
  const uint8_t* scales = m.scales + r / kScaleTile * tiles;
  for (int64_t t = 0; t < tiles; ++t) {
    const float scale = power(scales[t]);
    for (int64_t c = t * kScaleTile; c < std::min(m.cols, (t + 1) * kScaleTile); ++c) {
      const float value = values[codes[c]];
      out[c] = value * scale;
      if (std::isinf(out[c])) throw Invalid("a scaled value is beyond the range of F32");
    }
  }
}

std::vector<std::byte> e4m3_to_f32(const MatrixView& m) {
  std::vector<std::byte> out(static_cast<size_t>(m.rows * m.cols) * sizeof(float));
  auto* values = reinterpret_cast<float*>(out.data());
  for (int64_t r = 0; r < m.rows; ++r) e4m3_row(m, r, values + r * m.cols);
  return out;
}

// Empty when a value does not fit.
std::vector<std::byte> e4m3_to_bf16(const MatrixView& m) {
  std::vector<std::byte> out(static_cast<size_t>(m.rows * m.cols) * sizeof(uint16_t));
  auto* halves = reinterpret_cast<uint16_t*>(out.data());
  std::vector<float> row(static_cast<size_t>(m.cols));
  for (int64_t r = 0; r < m.rows; ++r) {
    e4m3_row(m, r, row.data());
    for (const float value : row) {
      const auto bits = std::bit_cast<uint32_t>(value);
      if (bits & 0xFFFFu) return {};
      *halves++ = static_cast<uint16_t>(bits >> 16);
    }
  }
  return out;
}

}  // namespace

bool has_scales(DType type) {
  return type == DType::F8_E4M3 || type == DType::F4;
}

int64_t scale_count(DType type, int64_t rows, int64_t cols) {
  if (type == DType::F8_E4M3) return (rows + kScaleTile - 1) / kScaleTile * ((cols + kScaleTile - 1) / kScaleTile);
  if (type != DType::F4) throw Invalid(std::string("type ") + dtype_name(type) + " has no scales beside it");
  if (cols % kScaleColumns != 0)
    throw Invalid("a row of " + std::to_string(cols) + " elements is not a whole number of groups of " +
                  std::to_string(kScaleColumns));
  return rows * (cols / kScaleColumns);
}

PlainViews::PlainViews(std::span<const MatrixView> views) : views_(views.begin(), views.end()) {
  for (MatrixView& v : views_) {
    if (!has_scales(v.type)) continue;
    // Vectors and one-row matrices may be read again later.
    if (v.rows < 2 || v.cols < 2) throw Unsupported("scales beside a matrix of one row or one column");
    if (!v.scales) throw Invalid(std::string("a matrix of type ") + dtype_name(v.type) + " without scales");
    DType plain = DType::MXFP4;
    if (v.type == DType::F4) {
      converted_.push_back(f4_to_mxfp4(v));
    } else {
      plain = DType::BF16;
      converted_.push_back(e4m3_to_bf16(v));
      if (converted_.back().empty()) {
        plain = DType::F32;
        converted_.back() = e4m3_to_f32(v);
      }
    }
    v = {converted_.back().data(), v.rows, v.cols, plain};
  }
}

}  // namespace ds4
