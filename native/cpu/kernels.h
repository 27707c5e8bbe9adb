// The table of kernels that every instruction set fills in (kernels_impl.h), and the data they share.
//
// Activations of int8 kernels: the token rows of a step are cut into groups of 16, 8, 4, 2 and 1 tokens. A group of N
// tokens is a sequence of records, one per block of 32 columns, so that a kernel walks one pointer, and a factor f of
// each token behind the last one:
//
//   i8 q [N][32] | 4-byte words [N][origin 0, origin 1, auxiliary ...]
//
// x = f 2^e q, with e for every 16 columns. Scales that are powers of two cost no multiplication, and the dot products
// no conversion: an integer added to the bits of the float 1.5 * 2^(23 + e), the origin, gives the float that lies that
// many times 2^e above it, as long as its magnitude is under 2^22. So the kernel starts its sum of 16 columns at the
// origin and takes the origin away as a float. With a zero point it starts at the origin - zero * sum(q), which is the
// auxiliary (i32, per 16 columns); for weights with a minimum that is 2^e sum(q) (f32, per `group` columns).
//
// Float kernels: one value (f32) or one pair (bf16) per column (pair) and token: [cols][N].
//
// Exactness: per output element every kernel runs the same sequence of f32 operations, ascending over the columns,
// whatever N is; lanes are output rows, so nothing is ever summed across lanes.
#pragma once

#include <cstdint>

#include "cpu/packed.h"

namespace ds4::cpu {

constexpr int kScaleColumns = 16;  // of activations, per scale
constexpr int kScalesPerBlock = 32 / kScaleColumns;
constexpr int kGroupSizes[] = {1, 2, 4, 8, 16};
constexpr int kGroupCount = 5;
constexpr int64_t kPageRows = 64;  // rows of a KV page
constexpr int64_t kSegment = 256;  // keys whose attention is computed as a unit

struct TileArgs {
  const uint8_t* tile = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* table = nullptr;
  const uint8_t* act = nullptr;
  const uint8_t* ahead = nullptr;  // where the next tile's bytes start
  int64_t ahead_step = 0;          // bytes to prefetch per k-block, 0: none
  int64_t cols = 0;
  float* out = nullptr;     // [N][16], rows `out_stride` apart
  int64_t out_stride = 16;  // elements
  bool add = false;         // to what is there
};
using TileFn = void (*)(const TileArgs&);

// One segment of attention for query vectors that share a KV head. Vectors are in ascending order of `limit`. Scores
// are logarithms to base 2: softmax is 2^(s - max) / sum.
struct AttentionArgs {
  const float* q = nullptr;        // [n][dim], already multiplied by the score scale and by log2 e
  int64_t n = 0;                   // query vectors
  const int32_t* limit = nullptr;  // [n] visible keys of this segment, 1 .. kSegment
  // Pages of the segment, keys [4 tiles][dim][16 keys] f16 and values [64 keys][padded] f16; and for each page the keys
  // that are read some pages later, to be fetched ahead, null where there are none.
  const uint16_t* const* keys = nullptr;
  const uint16_t* const* values = nullptr;
  const uint16_t* const* next_keys = nullptr;
  int64_t dim = 0;
  int64_t padded = 0;     // dim rounded up to 16
  float* max = nullptr;   // [n]
  float* sum = nullptr;   // [n][16]
  float* acc = nullptr;   // [n][padded]
  float* work = nullptr;  // [n][kSegment]
  float* page = nullptr;  // [kPageRows][padded], a page in f32
};

struct Kernels {
  const char* name;
  int max_group;  // tokens of the largest group that this set takes
  TileFn tile[static_cast<int>(TileKind::Count)][kGroupCount];

  // y = x * rsqrt(mean(x^2) + eps) * gain.
  void (*rms_norm)(const float* x, const float* gain, float eps, int64_t n, float* y);
  // Writes token `t` of a group of `group` tokens; `x` is readable up to the next multiple of 32, zeros beyond n;
  // `work` is room for pack_floats(n).
  void (*pack_act)(ActKind kind, const float* x, int64_t n, int64_t group, int64_t t, uint8_t* out, float* work);
  // y = silu(min(g, limit)) * clamp(u, +-limit).
  void (*swiglu)(const float* g, const float* u, int64_t n, float limit, float* y);
  // Rotates `heads` heads of width `dim` in place; cs: cos [pairs], sin [pairs].
  void (*rope)(float* x, int64_t heads, int64_t dim, const float* cs, int64_t pairs, bool interleaved);
  void (*to_f16)(const float* x, int64_t n, uint16_t* out);
  void (*scale)(const float* x, float factor, int64_t n, float* y);
  void (*attend)(const AttentionArgs&);
  // Folds a later segment (m, s, a) of one query vector into (M, S, A); the maxima are logarithms to base 2.
  void (*merge)(float* M, float* S, float* A, float m, const float* s, const float* a, int64_t padded);
  // out = A / sum of S.
  void (*finish)(const float* S, const float* A, int64_t dim, float* out);
};

const Kernels& kernels_scalar();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#elif defined(__aarch64__)
const Kernels& kernels_neon();
#endif

int64_t act_bytes(ActKind kind, int64_t cols);  // per token
constexpr int64_t pack_floats(int64_t cols) {
  return 4 * ((cols + kScaleColumns - 1) / kScaleColumns + 16);
}

}  // namespace ds4::cpu
