// The kernels for AVX-512 with VNNI, VBMI and BF16 (Zen 4 and later, Sapphire Rapids and later).
#include "cpu/kernels.h"
#include "cpu/latent_kernels.h"
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header starts many intrinsics from a deliberately undefined register, and then warns of it (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "cpu/simd_avx512.h"
// After simd_avx512.h: the kernels are written on its names.
#include "cpu/kernels_impl.h"
#include "cpu/latent_impl.h"

namespace ds4::cpu {

const Kernels& kernels_avx512() {
  static constexpr Kernels table = make_table("avx512-vnni");
  return table;
}

const LatentKernels& latent_kernels_avx512() {
  static constexpr LatentKernels table = make_latent_table();
  return table;
}

}  // namespace ds4::cpu
