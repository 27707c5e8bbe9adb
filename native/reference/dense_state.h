// A session's state as one contiguous host buffer per spec, rows in the payload's own element type and order.
#pragma once

#include <vector>

#include "ops.h"

namespace ds4 {

class DenseState final : public State {
 public:
  // Throws Unsupported for an element type that holds no plain numbers, Invalid for impossible sizes.
  DenseState(std::span<const StateSpec> specs, int64_t capacity);

  int64_t capacity() const override { return capacity_; }
  void reserve(int64_t tokens) override;
  void truncate(int64_t tokens) override;
  void fork_from(const State& other, int64_t tokens) override;
  void export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const override;
  void import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) override;
  size_t resident_bytes() const override;

  const float* readable_row(size_t index, int64_t row) const override;
  float* writable_row(size_t index, int64_t row) override;

  // Row `row` of buffer `index` as f32; width is the spec's row_elements().
  void read_row(size_t index, int64_t row, std::span<float> out) const;
  // Rounds to the spec's type.
  void write_row(size_t index, int64_t row, std::span<const float> in);

 private:
  struct Buffer {
    StateSpec spec;
    size_t row_bytes = 0;
    std::vector<std::byte> bytes;
  };

  // Append and Ring: as long as what is in them.
  static bool grows(const StateSpec& spec);
  void grow(size_t index, int64_t rows);
  // Rows that a buffer has at least when `tokens` tokens are reserved.
  static int64_t rows_for(const StateSpec& spec, int64_t tokens);
  const Buffer& at(size_t index, int64_t first, int64_t count) const;

  int64_t capacity_;
  int64_t reserved_ = 0;
  std::vector<Buffer> buffers_;
};

}  // namespace ds4
