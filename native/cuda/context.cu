#include <algorithm>
#include <bit>
#include <climits>

#include "cuda/context.h"
#include "cuda/device_math.h"
#include "cuda/latent.h"
#include "cuda/linear_halves.h"
#include "cuda/moe.h"

namespace ds4::cuda {
namespace {

// For gates and ups of different types, which cannot be interleaved: both products stand side by side.
__global__ void swiglu_kernel(const float* both, int64_t ff, bool clamped, float limit, float* y, int64_t stride) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= ff) return;
  const float g = both[blockIdx.y * 2 * ff + i], u = both[blockIdx.y * 2 * ff + ff + i];
  y[blockIdx.y * stride + i] = clamped ? swiglu_clamped(g, u, limit) : swiglu(g, u);
}

}  // namespace

void Context::enter() {
  enter_beside();
  settle_heads(*this);
}

void Context::enter_beside() {
  device.enter();
  settle(*this);
}

const DeviceState& Context::state(const RowRef& row) {
  const auto* s = dynamic_cast<const DeviceState*>(row.state);
  if (!s) throw Invalid("a state of another backend");
  return *s;
}

const DeviceRow* Context::rows(std::span<const RowRef> rows) {
  const bool same = refs_.size() == rows.size() && !refs_.empty() &&
                    std::equal(rows.begin(), rows.end(), refs_.begin(), [](const RowRef& a, const RowRef& b) {
                      return a.state == b.state && a.position == b.position;
                    });
  if (same) return device_rows_;
  device_rows_ = inputs.upload(std::span<const DeviceRow>(device_list(rows)));
  refs_.assign(rows.begin(), rows.end());
  return device_rows_;
}

void Context::begin_step(const StepInput& step) {
  require(step.ids.size() == step.rows.size(), "step shapes");
  staged_ = false;
  reset_step();
  const auto list = device_list(step.rows);
  device_rows_ = inputs.stage(step.rows.data(), std::span<const DeviceRow>(list));
  refs_.assign(step.rows.begin(), step.rows.end());
  inputs.stage(step.ids.data(), step.ids);
  inputs.stage(step.wanted.data(), step.wanted);
  inputs.send_staged();
  staged_ = true;
}

int64_t Context::horizon(std::span<const RowRef> rows) {
  uint64_t n = 1;
  for (const RowRef& r : rows) n = std::max(n, static_cast<uint64_t>(r.position) + 1);
  const uint64_t step = std::max<uint64_t>(256, std::bit_floor(n) / 8);
  return std::min<int64_t>(static_cast<int64_t>((n + step - 1) / step * step) - 1, INT_MAX - 1);
}

std::vector<DeviceRow> Context::device_list(std::span<const RowRef> rows) const {
  std::vector<DeviceRow> list;
  list.reserve(rows.size());
  for (size_t first = 0; first < rows.size();) {
    size_t end = first;
    while (end < rows.size() && rows[end].state == rows[first].state) ++end;
    const DeviceState& s = state(rows[first]);
    for (size_t t = first; t < end; ++t) {
      DeviceRow r = s.row(rows[t].position);
      r.first = static_cast<int32_t>(first);
      r.count = static_cast<int32_t>(end - first);
      list.push_back(r);
    }
    first = end;
  }
  return list;
}

Activations Context::rounded(Workspace::Slot codes, Workspace::Slot scales, Workspace::Slot sums, const Tensor& x,
                             bool many) {
  const int64_t blocks = (x.dim / 32 + kTileBlocks - 1) / kTileBlocks * kTileBlocks, n = (x.n + 7) / 8 * 8 * blocks;
  return {workspace.get<int8_t>(codes, std::max<int64_t>(1, n * 32)),
          workspace.get<float>(scales, std::max<int64_t>(1, n / kTileBlocks)),
          workspace.get<uint32_t>(sums, std::max<int64_t>(1, n)), blocks, many ? (x.n + 7) / 8 : 0};
}

Activations Context::quantized(Tensor x, const float* gain, float eps, bool many) {
  if (!gain)
    for (const Rounded& r : kept_)
      if (r.of.data && r.of.data == x.data && r.of.n == x.n && r.of.dim == x.dim && r.of.stride == x.stride &&
          (r.activations.eights != 0) == many)
        return r.activations;
  const Activations a = rounded(Workspace::Quants, Workspace::Scales, Workspace::Sums, x, many);
  quantize(device, x, gain, eps, a);
  return a;
}

Activations Context::keep_rounded(Kept place, const Tensor& x) {
  require(x.dim % kTileCols == 0, "rows that do not fill tiles");
  const auto slot = [&](Workspace::Slot first) {
    return static_cast<Workspace::Slot>(static_cast<int>(first) + static_cast<int>(place));
  };
  kept_[place] = {x, rounded(slot(Workspace::KeptQuants), slot(Workspace::KeptScales), slot(Workspace::KeptSums), x,
                             x.n > kFewRows)};
  return kept_[place].activations;
}

void Context::normed(Tensor x, const float* gain, float eps, Tensor y) {
  const auto aligned = [](const Tensor& t) {
    return t.stride % 4 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  };
  if (x.dim % kTileCols == 0 && aligned(x) && aligned(y)) {
    const Activations codes = keep_rounded(OfNorm, y);
    rms_norm(device, x, gain, eps, y, &codes);
  } else {
    rms_norm(device, x, gain, eps, y);
  }
}

void Context::written(const Tensor& x) {
  const auto overlap = [](const Tensor& a, const Tensor& b) {
    const float *a_end = a.data + (a.n - 1) * a.stride + a.dim, *b_end = b.data + (b.n - 1) * b.stride + b.dim;
    if (b.data >= a_end || a.data >= b_end) return false;
    if (a.stride != b.stride) return true;
    // Columns of one array.
    const int64_t column = ((b.data - a.data) % a.stride + a.stride) % a.stride;
    return column < a.dim || column + b.dim > a.stride;
  };
  for (Rounded& r : kept_)
    if (r.of.data && r.of.n > 0 && x.n > 0 && overlap(r.of, x)) r = {};
}

Tensor Context::floats(Tensor x, const float* gain, float eps) {
  const bool ready = x.dim % 8 == 0 && x.stride % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  if (ready && !gain) return x;
  const int64_t padded = (x.dim + 7) / 8 * 8;
  Tensor to(workspace.get<float>(Workspace::Floats, std::max<int64_t>(1, x.n * padded)), x.n, x.dim, padded);
  if (padded != x.dim)
    DS4_CUDA(cudaMemsetAsync(to.data, 0, static_cast<size_t>(x.n * padded) * sizeof(float), device.stream()));
  if (gain)
    rms_norm(device, x, gain, eps, to);
  else if (x.n > 0)
    DS4_CUDA(cudaMemcpy2DAsync(to.data, static_cast<size_t>(padded) * sizeof(float), x.data,
                               static_cast<size_t>(x.stride) * sizeof(float),
                               static_cast<size_t>(x.dim) * sizeof(float), static_cast<size_t>(x.n),
                               cudaMemcpyDeviceToDevice, device.stream()));
  return to;
}

void Context::linear(const CudaWeight& w, Tensor x, const float* gain, float eps, Tensor y, LinearArgs args) {
  if (x.n == 0) return;
  const bool any_blocks = std::any_of(w.segments.begin(), w.segments.end(), [](const Segment& s) { return !s.stride; });
  const bool any_floats = std::any_of(w.segments.begin(), w.segments.end(), [](const Segment& s) { return s.stride; });
  Activations q{};
  Tensor f;
  HalfActivations halves;
  if (any_blocks) q = quantized(x, gain, eps, x.n > kFewRows);
  if (any_floats) f = floats(x, gain, eps);
  const float* bias = args.bias;
  const int64_t rank = args.rank;
  const bool halved = args.epilogue == Epilogue::SwiGLU || args.epilogue == Epilogue::Clamped;
  for (const Segment& s : w.segments) {
    args.rows = s.rows;
    args.cols = w.cols();
    args.rank = rank ? rank : s.rows;
    args.T = x.n;
    args.y = y.data + (halved ? s.first_row / 2 : s.first_row);
    args.y_stride = y.stride;
    args.bias = bias ? bias + s.first_row : nullptr;
    if (s.stride && halves_do(s, args)) {
      if (x.n > kMostUnsplit && !halves.parts) {
        halves = {workspace.get<uint4>(Workspace::HalfParts, half_parts(f)),
                  workspace.get<float>(Workspace::HalfScales, half_scales(f)), f.dim / 32};
        split_rows(device, f, halves);
      }
      linear_halves(device, s, f, halves, args);
    } else if (s.stride) {
      linear_floats(device, s, f.data, f.stride, args);
    } else {
      linear_blocks(device, s, q, args);
    }
  }
}

void Context::swiglu(const CudaWeight& w, Tensor x, const float* gain, float eps, Epilogue epilogue, float limit,
                     Tensor y) {
  if (x.n == 0) return;
  LinearArgs args;
  args.limit = limit;
  if (w.interleaved) {
    args.epilogue = epilogue;
    return linear(w, x, gain, eps, y, args);
  }
  const Tensor both(workspace.get<float>(Workspace::Hidden, x.n * w.rows()), x.n, w.rows());
  linear(w, x, gain, eps, both, args);
  launch_kernel(device.stream(), dim3(static_cast<unsigned>((y.dim + 127) / 128), static_cast<unsigned>(x.n)), 128, 0,
                swiglu_kernel, both.data, y.dim, epilogue == Epilogue::Clamped, limit, y.data, y.stride);
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
