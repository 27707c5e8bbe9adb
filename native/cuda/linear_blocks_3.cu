#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_3(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q2_K:
      launch_blocks<DType::Q2_K>(device, w, x, args);
      return true;
    case DType::IQ2_XXS:
      launch_blocks<DType::IQ2_XXS>(device, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
