// A table of whole numbers in host memory: the experts of each token id of a hash-routed layer.
#pragma once

#include <vector>

#include "ops.h"

namespace ds4 {

class IntTable final : public Weight {
 public:
  // Throws Invalid for another type than I32.
  explicit IntTable(const MatrixView& view) : Weight(view.rows, view.cols) {
    if (view.type != DType::I32) throw Invalid("a table of whole numbers has type I32");
    const auto* data = static_cast<const int32_t*>(view.data);
    values_.assign(data, data + view.rows * view.cols);
  }
  size_t resident_bytes() const override { return values_.size() * sizeof(int32_t); }
  const int32_t* row(int64_t r) const { return values_.data() + r * cols_; }

 private:
  std::vector<int32_t> values_;
};

}  // namespace ds4
