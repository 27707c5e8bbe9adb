#include "cuda/linear_blocks.h"

namespace ds4::cuda {

bool linear_blocks_2(cudaStream_t stream, DType type, const Planes& w, const Activations& x, const LinearArgs& args) {
  switch (type) {
    case DType::Q5_0:
      launch_blocks<DType::Q5_0>(stream, w, x, args);
      return true;
    case DType::Q5_1:
      launch_blocks<DType::Q5_1>(stream, w, x, args);
      return true;
    case DType::IQ4_NL:
      launch_blocks<DType::IQ4_NL>(stream, w, x, args);
      return true;
    case DType::MXFP4:
      launch_blocks<DType::MXFP4>(stream, w, x, args);
      return true;
    default:
      return false;
  }
}

}  // namespace ds4::cuda
