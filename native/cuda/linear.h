// y = W x. Every weight byte is read once for up to 32 rows of x, once for 64 or 128 rows beyond that.
//
// Bytes: the weights once, 1.4 bytes per activation. Operations: 2 * rows * cols * T; block formats use the matrix
// units on int8 (block_products.h), which are far from their limit, so what counts is the decoding: 10 to 40
// instructions of a warp for 512 weights, and 12 to add their products to eight rows.
//
// Activations for block formats are rounded once per row to int8, 128 columns with one f32 scale (activations.h). For
// float types a warp computes four output rows; lane l takes units l, l + 32 * split, ... of each, the lanes' sums are
// added in a fixed tree, then the `split` warps' sums in order. `split` depends on the matrix's shape only.
#pragma once

#include "cuda/activations.h"
#include "cuda/weights.h"

namespace ds4::cuda {

constexpr int kMostPairs = 128;  // pairs that `LinearArgs::experts` may list
constexpr int kItemTokens = 32;  // rows of an item of block formats at most
// Rows of an item, so that their activations of `cols` columns stand in shared memory: at most kItemTokens, 0: none do.
constexpr int item_tokens(int64_t cols) {
  const int64_t fit = 200 * 1024 / ((cols + 127) / 128 * 148) / 8 * 8;
  return static_cast<int>(fit < kItemTokens ? fit : kItemTokens);
}

enum class Epilogue : int { Store, Add, SwiGLU, Clamped };

// Rows of one expert: pairs order[first .. first + count), at most `NT` of them; count 0: nothing to do.
struct ExpertItem {
  int32_t expert, first, count;
};

struct LinearArgs {
  int64_t rows = 0;  // of W; of one expert; block formats: of one slab
  int64_t cols = 0;
  int64_t rank = 0;  // float types: rows that share a group of columns; `rows` where there is one group
  int64_t T = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;
  Epilogue epilogue = Epilogue::Store;
  float limit = 0;
  // Experts: the work items, the pairs in their order; pair p reads activation row p / per_row, writes row p of y.
  // Or `experts`: n_items pairs, pair i of expert experts[i]; `alone`: no two of the same.
  const int32_t* experts = nullptr;
  const ExpertItem* items = nullptr;
  const int32_t* order = nullptr;
  int64_t n_items = 0;
  int32_t per_row = 1;
  int width = 0;  // rows of an item at most; float types: 1, 2, 4, 8
  bool alone = false;
  // Block formats: see Segment.
  bool paired = false;
  int32_t slabs = 1, tiles_m = 0, tiles_k = 0;
};

// Activations of T rows as int8, normed first when `gain` is given.
void quantize(const Device& device, Tensor x, const float* gain, float eps, const Activations& to);
// `codes`: y rounded, too; columns in fours, rows aligned to them.
void rms_norm(const Device& device, Tensor x, const float* gain, float eps, Tensor y,
              const Activations* codes = nullptr);

// One segment of a block format.
void linear_blocks(const Device& device, const Segment& w, const Activations& x, LinearArgs args);
// One segment of a float type; x rows are 16-byte aligned and zero (or absent) behind cols up to a multiple of 8.
void linear_floats(const Device& device, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& args);

// Parts of linear_blocks, each compiled on its own; false for a type of another part.
bool linear_blocks_1(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
bool linear_blocks_2(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
bool linear_blocks_3(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
bool linear_blocks_4(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args);

}  // namespace ds4::cuda
