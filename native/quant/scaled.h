// Matrices stored as 8- and 4-bit codes with power-of-two scales beside them, as DeepSeek publishes its weights, and
// their exact conversion to types that hold code and scale in one.
//
//   F4 with a scale per 32 columns       -> MXFP4: the same codes and scales, put in order
//   F8_E4M3 with a scale per 128 x 128   -> BF16, or F32 where a value has no place in BF16
//
// Formats: OCP 8-bit Floating Point (OFP8) v1.0 for E4M3, OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "types.h"

namespace ds4 {

constexpr int64_t kScaleTile = 128;    // F8_E4M3: rows and columns that share a scale
constexpr int64_t kScaleColumns = 32;  // F4: columns that share a scale

// Whether a type's values need scales beside the codes.
bool has_scales(DType type);
// Bytes of scales of a matrix. Throws Invalid for a type without, or where the columns are not whole groups.
int64_t scale_count(DType type, int64_t rows, int64_t cols);

// Views of plain types with the values of `views`: those with scales are converted into memory of this object, all
// others are passed on. Throws Invalid for a scale that is not a number, and for a value beyond the range of F32.
class PlainViews {
 public:
  explicit PlainViews(std::span<const MatrixView> views);
  std::span<const MatrixView> views() const { return views_; }
  const MatrixView& front() const { return views_.front(); }

 private:
  std::vector<MatrixView> views_;
  std::vector<std::vector<std::byte>> converted_;
};

}  // namespace ds4
