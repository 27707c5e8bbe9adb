// What the reference operations share: weights as exact f32 copies, and sums in f64.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "ops.h"
#include "quant/quant.h"

namespace ds4::reference {

// An f32 copy of the stacked parts; for SwiGLU the gate rows stand before the up rows.
class DenseWeight final : public Weight {
 public:
  explicit DenseWeight(std::span<const MatrixView> parts) : Weight(0, parts.front().cols) {
    for (const MatrixView& part : parts) rows_ += part.rows;
    values_.resize(static_cast<size_t>(rows_ * cols_));
    float* out = values_.data();
    for (const MatrixView& part : parts) {
      const auto* row = static_cast<const std::byte*>(part.data);
      const size_t bytes = row_bytes(part.type, part.cols);
      for (int64_t r = 0; r < part.rows; ++r, row += bytes, out += cols_) dequantize_row(part.type, row, out, cols_);
    }
  }
  size_t resident_bytes() const override { return values_.size() * sizeof(float); }
  const float* row(int64_t r) const { return values_.data() + r * cols_; }

 private:
  std::vector<float> values_;
};

inline const DenseWeight& dense(const Weight& w) {
  const auto* d = dynamic_cast<const DenseWeight*>(&w);
  if (!d) throw Invalid("a weight of another backend");
  return *d;
}

inline void require(bool ok, const char* what) {
  if (!ok) throw Invalid(std::string("reference backend: ") + what);
}

inline float* row_of(const Tensor& x, int64_t t) {
  return x.data + t * x.stride;
}

// Eight partial sums, so that the compiler can keep them in vectors; the order depends on n only.
inline double dot(const float* a, const float* b, int64_t n) {
  double part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) part[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  double rest = 0;
  for (; i < n; ++i) rest += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7])) + rest;
}

}  // namespace ds4::reference
