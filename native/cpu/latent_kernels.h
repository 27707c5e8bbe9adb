// Kernels of the latent operations (ops_latent.h) that every instruction set fills in (latent_impl.h).
//
// Heads are lanes: a token's queries are stored transposed, [dim][heads16] with heads padded to a multiple of 16, so
// that a score vector is sixteen heads wide and nothing is summed across lanes.
#pragma once

#include <cstdint>

namespace ds4::cpu {

constexpr int64_t kRowBlock = 16;  // latent rows per call of `attend`

struct LatentKernels {
  // Folds rows[0..n) (n <= kRowBlock, each `dim` f32, key and value) into the running softmax of every head:
  // max, sum [heads16], acc [dim][heads16]. qt is scaled already. work: [kRowBlock][heads16].
  void (*attend)(const float* qt, int64_t heads16, int64_t dim, const float* const* rows, int64_t n, float* max,
                 float* sum, float* acc, float* work);
  // out[n] = sum_h weight[h] * max(0, q_h . rows[i]); weight is 0 beyond the heads.
  void (*index_scores)(const float* qt, int64_t heads16, int64_t dim, const float* weight, const float* const* rows,
                       int64_t n, float* out);
  // Per column a softmax of the gates over the n entries, applied to the keys.
  void (*pool)(const float* const* keys, const float* const* gates, int64_t n, int64_t dim, float* out);
  // y = sum_j w[j] * x[j * width + d], j < n.
  void (*combine)(const float* w, const float* x, int64_t n, int64_t width, float* y);
  // x[k] = post[k] out + sum_j m[j * n + k] x[j], n <= 16, in place.
  void (*mix)(const float* post, const float* m, const float* out, int64_t n, int64_t width, float* x);
  // Sum of squares, in an order that depends on n only.
  float (*squares)(const float* x, int64_t n);
};

const LatentKernels& latent_kernels_scalar();
#if defined(__x86_64__)
const LatentKernels& latent_kernels_avx2();
const LatentKernels& latent_kernels_avx512();
#elif defined(__aarch64__)
const LatentKernels& latent_kernels_neon();
#endif

}  // namespace ds4::cpu
