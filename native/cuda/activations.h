// Rows of activations as int8, the second operand of the products with block formats.
#pragma once

#include <cstdint>

namespace ds4::cuda {

// x = d * code, one scale for the 128 columns of a tile. Eight rows stand together; lane 4g + t has columns 8t .. 8t +
// 7 of row g. Few rows: a lane's operands for two blocks of 32 columns are 16 bytes, a warp's 512 in a row. Many
// (`eights` is not 0): 128 bytes are a matrix of eight rows of 16 bytes, as ldmatrix and the units of warp groups read
// it from shared memory, and the rows of a tile follow each other.
//
//   few   q     [rows / 8][blocks / 2][8 rows][t][2 blocks][8 columns]
//         d     [rows / 8][tiles][8 rows]
//         sums  [rows / 8][blocks][8 rows]
//   many  q     [tiles][rows / 8][4 blocks][2 halves][8 rows][t][4 columns]: half h has columns 8t + 4h .. 8t + 4h + 3
//         d     [tiles][rows / 8][8 rows]
//         sums  [tiles][rows / 8][4 blocks][8 rows]
//
// sums: the sum of the codes of columns 0 .. 15 of a block is 16 times byte 0 plus byte 2, that of columns 16 .. 31
// likewise bytes 1 and 3; all signed.
struct Activations {
  int8_t* q;
  float* d;
  uint32_t* sums;
  int64_t blocks;  // of a row, a multiple of four: zeros behind the columns
  int64_t eights;  // rows / 8, rounded up, where there are many
};
constexpr int kFewRows = 32;  // dense products of more rows read the layout of many

}  // namespace ds4::cuda
