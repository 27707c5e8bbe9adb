// The kernels in plain C++.
#include "cpu/kernels.h"
#include "cpu/latent_kernels.h"
#include "cpu/simd_scalar.h"
// After simd_scalar.h: the kernels are written on its names.
#include "cpu/kernels_impl.h"
#include "cpu/latent_impl.h"

namespace ds4::cpu {

const Kernels& kernels_scalar() {
  static constexpr Kernels table = make_table("scalar");
  return table;
}

const LatentKernels& latent_kernels_scalar() {
  static constexpr LatentKernels table = make_latent_table();
  return table;
}

}  // namespace ds4::cpu
