// Weights in the layout that the CPU kernels read: tiles of 16 output rows, so that a vector lane is an output row.
//
//   one k-block (32 columns) of a tile, 8-bit:  8 vectors of 64 bytes, vector g holds columns 4g..4g+3 of 16 rows
//
//       byte   0 1 2 3   4 5 6 7   ...   60 61 62 63
//       row    0 0 0 0   1 1 1 1   ...   15 15 15 15
//       column 4g .. 4g+3  for every row
//
//   4-bit: 4 vectors; vector v holds group v in the low nibbles and group v + 4 in the high ones.
//   3-bit: 3 vectors; bits 0..2 and 3..5 of vector v hold groups 2v and 2v + 1.
//          The two bits above them: in vectors 0 and 1 the low bits of groups 6 and 7,
//          in vector 2 the high bits of both.
//   2-bit: 2 vectors; bits 2k of vector v hold group 4v + k.
//   tile = [quants of all k-blocks][scales of all k-blocks], both 64-byte aligned.
//
// Values are unsigned. What makes them signed is either a per-group minimum (w = d * u + m) or a zero point shared by
// the whole format (w = d * (u - zero)), which the kernels subtract as an integer: zero * (sum of the activations), or
// from the weights themselves where the instructions take signed ones.
// Nothing is rounded: scales keep the file's precision.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cpu/memory.h"
#include "cpu/pool.h"
#include "ops.h"

namespace ds4::cpu {

constexpr int64_t kTileRows = 16;
constexpr int64_t kBlock = 32;

// Kernel variants: bits of a value (T: indices into a table of 16), how scales are stored, group size, minimum or zero
// point. F16 scales: f16 d [16] (and f16 m [16]) per block. K scales: f16 d [16] (and f16 -dmin [16]) per 256 columns,
// then i8 scale [16] (and i8 minimum [16]; U2K16Min: both in the nibbles of one byte) per group; T3KZero counts them in
// eighths of d. F32: f32 d [16] per block.
enum class TileKind : uint8_t {
  U4F16Zero,
  U4F16Min,
  T4F16Zero,
  T4F32Zero,
  U8F16Zero,
  U7F16Zero,  // bytes under 128
  U8F16Min,
  U4KMin,
  U8KMin,
  U8K16Zero,
  U3K16Zero,
  U2K16Min,
  T3KZero,
  BF16,
  F16,
  F32,
  Count,
};

// How a kernel wants its activations (see kernels.h for the layout).
struct ActKind {
  enum Type : uint8_t { Int8, BFloat16, Float32 } type = Int8;
  uint8_t group = 32;  // Int8: columns per sum for a minimum
  uint8_t zero = 0;    // Int8: zero point; 0: weights have minimums
  bool operator==(const ActKind&) const = default;
};

struct Format {
  TileKind kind;
  ActKind act;
  int bits;                        // of a stored value, 2, 3, 4 or 8; 0 for float kinds
  int scale_bytes;                 // per 256 columns (8 blocks) of a tile
  const uint8_t* table = nullptr;  // 16 unsigned values
};

// Throws Unsupported for a type without a kernel.
Format format_of(DType type);

int64_t tile_bytes(const Format& f, int64_t cols);    // multiple of 64
int64_t scale_offset(const Format& f, int64_t cols);  // of the scales inside a tile; 0 for float kinds

// Consecutive output rows in one format.
struct Segment {
  Format format{};
  DType type{};          // stored
  size_t act_index = 0;  // into PackedWeight::acts
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t tiles = 0;
  int64_t tile_stride = 0;  // bytes
  int64_t scales_at = 0;
  const uint8_t* data = nullptr;
};

class PackedWeight final : public Weight {
 public:
  PackedWeight(std::span<const MatrixView> parts, WeightUse use, ThreadPool& pool, SlabArena& arena);
  size_t resident_bytes() const override;

  WeightUse use() const { return use_; }
  // Packed rows; for a vector (one row or one column) packed at the first use as a matrix.
  const std::vector<Segment>& segments() const;
  const std::vector<ActKind>& acts() const { return acts_; }
  // A matrix of one row or one column as dense floats (norm gains, biases); null for others.
  const float* vector() const { return vector_.empty() ? nullptr : vector_.data(); }
  // Row `row` as floats: of a head from what is packed, where the format allows, so that its table in the model file is
  // not read, and not in memory, a second time; of all others from the file.
  void dequantize(int64_t row, float* out) const;
  // All rows as floats, kept from the first call on: for small matrices that are read by element.
  const float* dense() const;

 private:
  DType packed_type(const MatrixView& part) const;
  void read_file(int64_t row, float* out) const;
  void pack(ThreadPool* pool, SlabArena* arena) const;
  std::vector<MatrixView> parts_;
  WeightUse use_;
  std::vector<float> vector_;
  mutable std::once_flag packed_, widened_;
  mutable std::vector<float> dense_;
  mutable std::shared_ptr<std::byte> memory_;
  mutable size_t bytes_ = 0;  // of memory_
  mutable std::vector<Segment> segments_;
  mutable std::vector<ActKind> acts_;
};

// Throws Invalid for a weight of another backend.
const PackedWeight& packed(const Weight& w);

}  // namespace ds4::cpu
