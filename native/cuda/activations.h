// Rows of activations as int8, the second operand of the products with block formats.
#pragma once

#include <cstdint>

namespace ds4::cuda {

// x = d * code, one scale for the 128 columns of a tile. Eight rows stand together so that a lane's operands for two
// blocks of 32 columns are 16 bytes, a warp's 512 in a row; lane 4g + t has columns 8t .. 8t + 7 of row g.
//
//   q     [rows / 8][blocks / 2][8 rows][t][2 blocks][8 columns]
//   d     [rows / 8][tiles][8 rows]
//   sums  [rows / 8][blocks][8 rows]: the sum of the codes of columns 0 .. 15 of a block is 16 times byte 0 plus byte
//   2,
//         that of columns 16 .. 31 likewise bytes 1 and 3; all signed
struct Activations {
  int8_t* q;
  float* d;
  uint32_t* sums;
  int64_t blocks;  // of a row, a multiple of four: zeros behind the columns
};
constexpr int kFewRows = 32;  // more rows have kernels of their own

}  // namespace ds4::cuda
