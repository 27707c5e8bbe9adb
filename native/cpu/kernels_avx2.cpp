// The kernels for AVX2 with FMA and F16C.
#include "cpu/kernels.h"
#include "cpu/latent_kernels.h"
#include "cpu/simd_avx2.h"
// After simd_avx2.h: the kernels are written on its names.
#include "cpu/kernels_impl.h"
#include "cpu/latent_impl.h"

namespace ds4::cpu {

const Kernels& kernels_avx2() {
  static constexpr Kernels table = make_table("avx2");
  return table;
}

const LatentKernels& latent_kernels_avx2() {
  static constexpr LatentKernels table = make_latent_table();
  return table;
}

}  // namespace ds4::cpu
