#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_2(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q4_0:
      launch_blocks<DType::Q4_0>(device, w, x, args);
      return true;
    case DType::Q4_1:
      launch_blocks<DType::Q4_1>(device, w, x, args);
      return true;
    case DType::Q5_0:
      launch_blocks<DType::Q5_0>(device, w, x, args);
      return true;
    case DType::Q5_1:
      launch_blocks<DType::Q5_1>(device, w, x, args);
      return true;
    case DType::IQ4_NL:
      launch_blocks<DType::IQ4_NL>(device, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
