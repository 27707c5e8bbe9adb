#include "cuda/expert_kernels.h"

#include "cuda/expert_blocks.h"
#include "cuda/expert_row.h"

namespace ds4::cuda {
namespace {

// Calls f(std::integral_constant<DType, type>) for the formats that the kernels decode.
template <class F>
bool with_expert_format(DType type, F&& f) {
  switch (type) {
    case DType::IQ2_XXS:
      f(std::integral_constant<DType, DType::IQ2_XXS>{});
      return true;
    case DType::Q2_K:
      f(std::integral_constant<DType, DType::Q2_K>{});
      return true;
    case DType::Q4_K:
      f(std::integral_constant<DType, DType::Q4_K>{});
      return true;
    case DType::MXFP4:
      f(std::integral_constant<DType, DType::MXFP4>{});
      return true;
    default:
      return false;
  }
}

template <auto kernel, int bytes>
void launch(const Device& device, const Planes& w, const ExpertInput& x, const LinearArgs& p) {
  static const bool ready = [] {
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return true;
  }();
  static_cast<void>(ready);
  launch_kernel(device.stream(), static_cast<unsigned>(device.multiprocessors()), kExpertThreads, bytes, kernel, w, x,
                p);
  DS4_CUDA(cudaGetLastError());
}

template <DType type, int kChains>
void launch_experts(const Device& device, const Planes& w, const ExpertInput& x, const LinearArgs& p) {
  // Of one row a block of threads has units of two pairs at most.
  if (p.alone && p.n_items <= device.multiprocessors())
    launch<expert_row<type, kChains>, RowShape<type, kChains>::kBytes>(device, w, x, p);
  else
    launch<expert_blocks<type, kChains>, ExpertShape<type>::bytes(kChains * kChainTiles * kTileCols)>(device, w, x, p);
}

}  // namespace

bool experts_take(const Device& device, const Segment& w, const LinearArgs& p) {
  const int64_t chains = w.tiles_k / kChainTiles;
  bool fits = false;
  const bool known = with_expert_format(w.type, [&](auto type) {
    constexpr int most = std::max(ExpertShape<type.value>::bytes(4096), RowShape<type.value, 8>::kBytes);
    fits = most + static_cast<int>(sizeof(SharedUnits)) + 4096 <= device.block_shared();
  });
  return known && fits && p.experts && (chains == 8 || chains == 4) && w.tiles_k % kChainTiles == 0 &&
         p.cols == w.tiles_k * kTileCols && w.tiles_m % (kSegments / chains) == 0;
}

void linear_experts(const Device& device, const Segment& w, const ExpertInput& x, LinearArgs p) {
  p.rows = w.slab_rows;
  p.paired = w.paired;
  p.slabs = static_cast<int32_t>(w.slabs);
  p.tiles_m = static_cast<int32_t>(w.tiles_m);
  p.tiles_k = static_cast<int32_t>(w.tiles_k);
  with_expert_format(w.type, [&](auto type) {
    if (p.tiles_k == kUnitTiles)
      launch_experts<type.value, 8>(device, w.planes, x, p);
    else
      launch_experts<type.value, 4>(device, w.planes, x, p);
  });
}

}  // namespace ds4::cuda
