#include "cuda/devices.h"

#include "cuda/device_math.h"

namespace ds4 {
namespace {

__global__ void probe() {}

std::string version_text(int version) {
  return version > 0 ? std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) : std::string();
}

}  // namespace

size_t cuda_free_memory(int device) {
  DS4_CUDA(cudaSetDevice(device));
  size_t free = 0, total = 0;
  DS4_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

std::string cuda_device_problem(int device) {
  cudaFuncAttributes attributes{};
  cudaError_t e = cudaSetDevice(device);
  if (e == cudaSuccess) e = cudaFuncGetAttributes(&attributes, probe);  // fails without code for this architecture
  if (e == cudaSuccess) return {};
  cudaGetLastError();
  return cudaGetErrorString(e);
}

bool cuda::hopper_kernels() {
  static const bool answer = [] {
    cudaFuncAttributes attributes{};
    DS4_CUDA(cudaFuncGetAttributes(&attributes, probe));
    return attributes.ptxVersion >= 90;
  }();
  return answer;
}

std::pair<std::string, std::string> cuda_runtime_versions() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
  return {version_text(driver), version_text(CUDART_VERSION)};
}

}  // namespace ds4
