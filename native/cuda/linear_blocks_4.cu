#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_4(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q4_K:
      launch_blocks<DType::Q4_K>(stream, w, x, args);
      return true;
    case DType::Q5_K:
      launch_blocks<DType::Q5_K>(stream, w, x, args);
      return true;
    case DType::Q6_K:
      launch_blocks<DType::Q6_K>(stream, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
