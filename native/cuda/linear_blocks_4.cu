#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_4(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q3_K:
      launch_blocks<DType::Q3_K>(device, w, x, args);
      return true;
    case DType::Q4_K:
      launch_blocks<DType::Q4_K>(device, w, x, args);
      return true;
    case DType::Q5_K:
      launch_blocks<DType::Q5_K>(device, w, x, args);
      return true;
    case DType::Q6_K:
      launch_blocks<DType::Q6_K>(device, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
