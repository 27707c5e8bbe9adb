// Draws tokens from rows of logits in device memory (draw.h): a block of threads a row, the passes over the vocabulary
// by many. Only the tokens come to the host.
#pragma once

#include "cuda/memory.h"

namespace ds4::cuda {

class Drawer {
 public:
  explicit Drawer(const Device& device) : device_(device) {}
  // As Ops::draw and Ops::best; both wait for the results.
  void draw(const Tensor& logits, std::span<const RowDraw> draws, std::span<int32_t> tokens);
  void best(const Tensor& logits, std::span<Best> out);

 private:
  void draw_some(const Tensor& logits, std::span<const RowDraw> draws, std::span<int32_t> tokens);
  // Makes room for `bytes` of inputs, what `rows` rows of so many blocks keep, and lists of candidates where asked for.
  void room(size_t bytes, size_t rows, int64_t blocks, bool listed);

  const Device& device_;
  PinnedBuffer host_;
  DeviceBuffer inputs_, maxima_, sums_, overflow_;
  PinnedBuffer found_host_;
  DeviceBuffer found_;
};

}  // namespace ds4::cuda
