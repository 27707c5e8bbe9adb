// Block formats of model files: sizes, and the exact scalar conversion to f32 that every kernel is judged by.
//
// A row is a whole number of blocks. All multi-byte fields are little endian, scales are IEEE half precision.
// Formats: the GGUF specification and its quantisation types; MXFP4: OCP Microscaling Formats (MX) v1.0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "types.h"

namespace ds4 {

// Elements and bytes of one block. Throw Unsupported for an id that is no DType.
int64_t block_elements(DType type);
size_t block_bytes(DType type);
// Bytes of `cols` elements; throws Invalid when cols is negative or not a whole number of blocks.
size_t row_bytes(DType type, int64_t cols);
// "Q4_K", ...; "unknown" for an id that is no DType.
const char* dtype_name(DType type);

// out[i] = element i of the row, i < n (a whole number of blocks), rounded once per operation as the format's
// reference does: f32 products of the scales, no fused multiply-add. Throws Unsupported for I32 and for
// types with scales beside them.
void dequantize_row(DType type, const void* row, float* out, int64_t n);

// IEEE 754 binary16: exact widening (subnormals, infinities, NaN), and rounding to nearest even.
float half_to_float(uint16_t h);
uint16_t float_to_half(float f);
// bfloat16: the upper half of a binary32; rounding to nearest even.
float bf16_to_float(uint16_t b);
uint16_t float_to_bf16(float f);

}  // namespace ds4
