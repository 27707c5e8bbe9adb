// Value types shared by every native room: element types of model files, views of host matrices, tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace ds4 {

// Element types as model files store them. The numbers are GGUF's type ids, so that a GGUF tensor header can
// be passed through unchanged; types that GGUF does not know start at 1000.
enum class DType : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ4_NL = 20,
  I32 = 26,
  BF16 = 30,
  MXFP4 = 39,
  F8_E4M3 = 1005,  // with scales beside it, see MatrixView
  F4 = 1008,       // E2M1, two columns per byte, the first in the low nibble; with scales beside it
};

// One row-major matrix in a mapped model file: `rows` rows of `cols` elements, rows contiguous and
// block-aligned. A vector is a matrix of one row. The view does not own the bytes; the mapping must outlive
// its use.
struct MatrixView {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType type = DType::F32;
  // F8_E4M3: one E8M0 byte per tile of 128 x 128 elements, tiles row-major. F4: one per 32 columns of a row. Null for
  // all other types. Backends know no such matrices: a family converts them (quant/scaled.h) before it loads them.
  const uint8_t* scales = nullptr;
};

// A row-major f32 matrix in the backend's memory: n rows, dim columns, `stride` elements from row to row.
struct Tensor {
  float* data = nullptr;
  int64_t n = 0;
  int64_t dim = 0;
  int64_t stride = 0;

  Tensor() = default;
  Tensor(float* d, int64_t rows, int64_t cols, int64_t row_stride = 0)
      : data(d), n(rows), dim(cols), stride(row_stride ? row_stride : cols) {}
  // Columns [first, first + count) of every row.
  Tensor columns(int64_t first, int64_t count) const { return {data + first, n, count, stride}; }
  // Rows [first, first + count).
  Tensor rows(int64_t first, int64_t count) const { return {data + first * stride, count, dim, stride}; }
};

// Errors of the native layer. Bindings turn them into ds4.errors: Invalid -> ValueError, Unsupported ->
// UnsupportedModelError, everything else std::exception -> EngineError.
struct Invalid : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace ds4
