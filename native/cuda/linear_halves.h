// y = W x for tall matrices of F16 whose columns fill blocks of 32, on the matrix units' halves: half of the products
// that linear_floats needs. Matrices of few rows have too few tiles for these kernels and stay there.
//
// Order of additions for any number of rows of x: a block of 32 columns by the units, low parts of x first; blocks,
// times the power of two of x's (split_halves), in order within a chain of 256 columns; chains in order.
#pragma once

#include "cuda/linear.h"

namespace ds4::cuda {

// Rows of x as sums of two halves. Eight rows stand together, as the matrix units read them: lane 4g + t of a block has
// columns 8t .. 8t + 7 of row g. Rows behind the last up to a multiple of eight are zeros.
//
//   parts   [rows / 8][blocks][high, low][32 lanes][16 bytes]
//   scales  [rows / 8][blocks][8 rows]: what the block's sums are to be multiplied by
struct HalfActivations {
  uint4* parts = nullptr;
  float* scales = nullptr;
  int64_t blocks = 0;
};

constexpr int64_t kLeastRows = 2048;  // of W
constexpr int64_t kMostUnsplit = 16;  // rows of x; more of them are to be split before

// Whether linear_halves does it; `args` as for linear_floats.
bool halves_do(const Segment& w, const LinearArgs& args);
// The sizes of HalfActivations for rows of x.
int64_t half_parts(const Tensor& x);
int64_t half_scales(const Tensor& x);
void split_rows(const Device& device, Tensor x, const HalfActivations& to);
// `split`: x where there are more than kMostUnsplit rows.
void linear_halves(const Device& device, const Segment& w, Tensor x, const HalfActivations& split,
                   const LinearArgs& args);

}  // namespace ds4::cuda
