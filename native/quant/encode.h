// Encoders of the block formats that need a search: values to blocks, the inverse of dequantize_row.
//
// Every block is fitted by itself, without weights on its elements: group scales by trying a range of grids with a
// least-squares step each, then the block's own scale and the groups' small integers around it. The result is never
// worse, in squared error, than the grid that spans each group's range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "types.h"

namespace ds4 {

// Types that `encode_rows` writes: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ2_XXS.
bool can_encode(DType type);

// Finite values, row-major, whole blocks, to out.size() == row_bytes(type, values.size()) bytes. The bytes do not
// depend on `threads` (0: one per usable core). Throws Invalid for a scale beyond the range of F16 and for sizes that
// do not fit, Unsupported for other types.
void encode_rows(DType type, std::span<const float> values, int threads, std::span<std::byte> out);

}  // namespace ds4
