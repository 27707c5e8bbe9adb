#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_1(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q8_0:
      launch_blocks<DType::Q8_0>(stream, w, x, args);
      return true;
    case DType::Q4_0:
      launch_blocks<DType::Q4_0>(stream, w, x, args);
      return true;
    case DType::Q4_1:
      launch_blocks<DType::Q4_1>(stream, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
