// The kernels for Armv8.2 with dot product and half-precision instructions (Apple M1, Graviton 2 and later).
#include "cpu/kernels.h"
#include "cpu/latent_kernels.h"
#include "cpu/simd_neon.h"
// After simd_neon.h: the kernels are written on its names.
#include "cpu/kernels_impl.h"
#include "cpu/latent_impl.h"

namespace ds4::cpu {

const Kernels& kernels_neon() {
  static constexpr Kernels table = make_table("neon-dotprod");
  return table;
}

const LatentKernels& latent_kernels_neon() {
  static constexpr LatentKernels table = make_latent_table();
  return table;
}

}  // namespace ds4::cpu
