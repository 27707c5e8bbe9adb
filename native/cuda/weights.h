// Weights in device memory: block formats in tiles (formats.h), float types as rows.
#pragma once

#include <memory>
#include <vector>

#include "cuda/formats.h"
#include "cuda/memory.h"
#include "cuda/staging.h"

namespace ds4::cuda {

// Consecutive rows of one type.
struct Segment {
  DType type = DType::F32;
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t stride = 0;  // float types: elements from row to row, a multiple of 8, zero behind the columns
  DeviceBuffer memory;
  // Block formats: slabs of slab_rows rows, each in tiles_m x tiles_k tiles; `paired`: gates and ups share tiles.
  Planes planes{};
  bool paired = false;
  int64_t slabs = 1, slab_rows = 0, tiles_m = 0, tiles_k = 0;
};

class Uploader;

class CudaWeight final : public Weight {
 public:
  CudaWeight(int64_t rows, int64_t cols) : Weight(rows, cols) {}
  size_t resident_bytes() const override;

  // A row or column as f32; null for matrices.
  const float* vector() const { return vector_.as<float>(); }
  // The whole matrix as f32 [rows][cols], made at the first use: for small matrices only.
  const float* dense(const Device& device) const;
  const int32_t* table() const { return table_.as<int32_t>(); }

  std::vector<Segment> segments;
  // SwiGLU: gates and ups stand side by side. Otherwise gates stand before ups.
  bool interleaved = false;

 private:
  friend class Uploader;
  DeviceBuffer vector_, table_;
  mutable DeviceBuffer dense_;
};

const CudaWeight& on_device(const Weight& w);
const float* vector_of(const Weight& w, int64_t n, const char* what);

// Brings matrices from the mapped file into their layout on the device, a piece after the other.
class Uploader {
 public:
  Uploader(const Device& device, bool synthetic);
  // Parts stacked along rows. `interleave`: parts come in pairs of one shape and type, row r of a pair's first part
  // becomes row 2r of the pair, row r of the second 2r + 1 (block formats: both share a tile). `slabs`: experts, or
  // groups of rows that read different columns.
  std::unique_ptr<CudaWeight> load(std::span<const MatrixView> parts, bool interleave, int64_t slabs = 1);
  std::unique_ptr<CudaWeight> load_table(const MatrixView& view);

 private:
  // Where a matrix' rows go: from row `first` of the segment on, or to every `step`th. `half` >= 0: to the gates (0) or
  // the ups (1) of slab `first`.
  struct Destination {
    const Segment* segment;
    int64_t first, step;
    int half;
  };
  void read(std::span<const MatrixView> parts, std::span<const Destination> to);
  void draw(const MatrixView& part, const Destination& to);
  // Rows [r, r + n) of the part, which stand at `rows` on the device, into the layout.
  void arrange(const MatrixView& part, const Destination& to, const uint8_t* rows, int64_t r, int64_t n,
               cudaStream_t stream);
  const Device& device_;
  bool synthetic_;
  DeviceBuffer grid_;
  uint64_t seed_ = 1;
  Staging staging_;
};

// out[i] = row ids[i] of w as f32, columns [0, cols).
void launch_rows(const Device& device, const CudaWeight& w, const int32_t* ids, int64_t n, float* out,
                 int64_t out_stride);

}  // namespace ds4::cuda
