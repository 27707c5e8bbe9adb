// Packing of activations, 64 columns at a time, for instruction sets with too few registers to do it side by side.
// Included by their simd_<isa>.h only, behind its other functions.

namespace ds4::cpu {
namespace {

// most[i] = the largest magnitude of x[16 i ..], i < 4.
inline void maxima(const float* x, float* most) {
  for (int i = 0; i < 4; ++i) most[i] = hmax(abs(load(x + 16 * i)));
}
// x[16 i ..] times inverse[i], i < 4, as bytes to q0 [32] and q1 [32]; sums[i]: of the bytes. |x inverse| < 127.5.
inline void quantise(const float* x, const float* inverse, int8_t* q0, int8_t* q1, int32_t* sums) {
  for (int i = 0; i < 4; ++i)
    sums[i] = store_i8((i < 2 ? q0 : q1) + i % 2 * 16, to_int(mul(load(x + 16 * i), set1(inverse[i]))));
}

}  // namespace
}  // namespace ds4::cpu
