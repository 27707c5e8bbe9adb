// y = W x for few rows of x, the shape of decoding: every weight byte is read once for up to eight rows.
//
// Bytes: the weights once (more rows than eight are blocks beside each other, which find them in the cache), 1.25
// bytes per activation. Operations: 2 * rows * cols * T; block formats use 4-way int8 dot products.
//
// Block formats: activations are rounded once per row to int8 in blocks of 32 with an f32 scale. A warp computes four
// output rows; lane l takes blocks l, l + 32 * split, ... of each, the lanes' sums are added in a fixed tree, then the
// `split` warps' sums in order. `split` depends on the matrix's shape only.
#pragma once

#include "cuda/weights.h"

namespace ds4::cuda {

// A block of 32 activations: x = d * q; sums of q over each half.
struct ActScale {
  float d;
  int16_t s0, s1;
};

struct Activations {
  const int8_t* q;
  const ActScale* scale;
  int64_t blocks;  // of a row
};

enum class Epilogue : int { Store, Add, SwiGLU, Clamped };

// Rows of one expert: pairs order[first .. first + count), at most `NT` of them; count 0: nothing to do.
struct ExpertItem {
  int32_t expert, first, count;
};

struct LinearArgs {
  int64_t rows = 0;  // of W; of one expert
  int64_t cols = 0;
  int64_t rank = 0;  // rows that share a group of columns; `rows` where there is one group
  int64_t T = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;
  Epilogue epilogue = Epilogue::Store;
  float limit = 0;
  // Experts: the work items, the pairs in their order; pair p reads activation row p / per_row, writes row p of y.
  // Or `experts`: an item is pair i alone, of expert experts[i].
  const int32_t* experts = nullptr;
  const ExpertItem* items = nullptr;
  const int32_t* order = nullptr;
  int64_t n_items = 0;
  int32_t per_row = 1;
  int width = 0;  // rows of an item at most: 1, 2, 4, 8
};

// Activations of T rows as int8, normed first when `gain` is given.
void quantize(const Device& device, Tensor x, const float* gain, float eps, int8_t* q, ActScale* scale);
void rms_norm(const Device& device, Tensor x, const float* gain, float eps, Tensor y);

// One segment of a block format.
void linear_blocks(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
// One segment of a float type; x rows are 16-byte aligned and zero (or absent) behind cols up to a multiple of 8.
void linear_floats(const Device& device, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& args);

// Parts of linear_blocks, each compiled on its own; false for a type of another part.
bool linear_blocks_1(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
bool linear_blocks_2(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
bool linear_blocks_3(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args);
bool linear_blocks_4(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args);

}  // namespace ds4::cuda
