#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_1(const Device& device, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q8_0:
      launch_blocks<DType::Q8_0>(device, w, x, args);
      return true;
    case DType::MXFP4:
      launch_blocks<DType::MXFP4>(device, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
