// What the two halves of the backend (ops.cu, latent.cu) share: the device, the memory of a step and the steps' rows.
#pragma once

#include <algorithm>

#include "cuda/linear.h"
#include "cuda/state.h"
#include "cuda/weights.h"

namespace ds4::cuda {

// What is to be added to row t of a tensor: sum over i, in order, of weights[t * k + i] * products[t * k + i].
struct Addends {
  const float* products = nullptr;  // [rows * k][dim]
  const float* weights = nullptr;   // [rows * k]
  int32_t k = 0;
};

class Context {
 public:
  Context(int device, bool synthetic)
      : device(device),
        arena(this->device),
        workspace(this->device),
        inputs(this->device),
        uploader(this->device, synthetic) {}

  Tensor scratch(int64_t n, int64_t dim) {
    require(n >= 0 && dim > 0, "scratch of an impossible shape");
    return {static_cast<float*>(arena.take(static_cast<size_t>(n * dim) * sizeof(float))), n, dim};
  }
  int32_t* integers(int64_t n) {
    return static_cast<int32_t*>(arena.take(static_cast<size_t>(std::max<int64_t>(1, n)) * sizeof(int32_t)));
  }
  void reset_step() {
    arena.reset();
    for (Rounded& r : kept_) r = {};
    raw_heads = {};
    if (staged_) return;  // the inputs of this very step
    inputs.reset();
    refs_.clear();
  }
  // Uploads everything a step needs, where every step of its sizes has it; `end_step` after its operations.
  void begin_step(const StepInput& step);
  void end_step() {
    staged_ = false;
    inputs.end_staging();
  }
  // Changes whenever memory that operations use has moved.
  uint64_t generation() const { return arena.generation() + workspace.generation() + inputs.generation(); }

  // Positions are rounded up for everything that decides about launches, so that few different ones exist.
  static int64_t horizon(std::span<const RowRef> rows);

  // The rows on the device; the rows of one session stand together.
  const DeviceRow* rows(std::span<const RowRef> rows);
  static const DeviceState& state(const RowRef& row);

  // y = W x with or without norm, in the segments' types. `args` carries what follows the product; rows, cols, T and
  // the row offset of each segment are set here.
  void linear(const CudaWeight& w, Tensor x, const float* gain, float eps, Tensor y, LinearArgs args);
  // y = silu(G x) * (U x) with the epilogue SwiGLU or Clamped, for a weight loaded as SwiGLU.
  void swiglu(const CudaWeight& w, Tensor x, const float* gain, float eps, Epilogue epilogue, float limit, Tensor y);
  // Activations for block formats; valid until the next call, or until x is written where they were kept.
  Activations quantized(Tensor x, const float* gain, float eps, bool many);
  // Room for x rounded, which the caller's kernel fills beside x; `quantized` finds it until `written`.
  enum Kept { OfLayer, OfNorm, OfHeads, kKept };
  Activations keep_rounded(Kept place, const Tensor& x);
  // y = rms_norm(x), kept rounded too where rows fill tiles.
  void normed(Tensor x, const float* gain, float eps, Tensor y);
  // Every operation says which of its tensors it has written.
  void written(const Tensor& x);

  // The experts' sum that a tensor still lacks. The kernel that reads the tensor next may add it on its way; every
  // other operation begins with `settle` (moe.h), through `enter`.
  struct Owed {
    Tensor y;
    Addends addends;
  };
  Owed owed;
  // Heads that still lack their norm and rotation (LatentOps::head_norm_rope). Attention does both while it reads them;
  // every other operation has them done first, through `enter`; `enter_beside` is for those that do not touch heads.
  struct RawHeads {
    Tensor x;
    int64_t heads = 0;
    float eps = 0;
    Tensor table;
  };
  RawHeads raw_heads;
  void enter();
  void enter_beside();

  Device device;
  Arena arena;
  Workspace workspace;
  StepInputs inputs;
  Uploader uploader;

 private:
  // Rows of x, normed if asked, aligned for linear_floats and zero behind `dim` up to a multiple of 8.
  Tensor floats(Tensor x, const float* gain, float eps);
  std::vector<DeviceRow> device_list(std::span<const RowRef> rows) const;
  Activations rounded(Workspace::Slot codes, Workspace::Slot scales, Workspace::Slot sums, const Tensor& x, bool many);
  struct Rounded {
    Tensor of;
    Activations activations;
  };
  Rounded kept_[kKept];
  bool staged_ = false;
  std::vector<RowRef> refs_;
  const DeviceRow* device_rows_ = nullptr;
};

}  // namespace ds4::cuda
