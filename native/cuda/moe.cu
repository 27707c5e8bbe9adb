#include <algorithm>
#include <string>
#include <utility>

#include "cuda/device_math.h"
#include "cuda/expert_kernels.h"
#include "cuda/moe.h"

namespace ds4::cuda {
namespace {

constexpr int kMostExperts = 1024;
constexpr int64_t kRowsApart = 16;
constexpr int kShortItems =
    16;  // rows of an item where experts have no more on average: more blocks of threads at once

// Sorts the pairs (row, i) by expert and cuts each expert's pairs into items of at most `width`. One block of threads;
// items beyond the last get no rows.
__global__ void __launch_bounds__(kMostExperts)
    plan_experts(const int32_t* experts, int pairs, int n_experts, int width, ExpertItem* items, int n_items,
                 int32_t* order) {
  begin_kernel();
  __shared__ int count[kMostExperts], start[kMostExperts], item[kMostExperts];
  const int e = threadIdx.x;
  count[e] = 0;
  __syncthreads();
  for (int p = e; p < pairs; p += kMostExperts) atomicAdd(&count[experts[p]], 1);
  __syncthreads();
  start[e] = count[e];
  item[e] = (count[e] + width - 1) / width;
  __syncthreads();
  for (int step = 1; step < kMostExperts; step *= 2) {
    const int a = e >= step ? start[e - step] : 0, b = e >= step ? item[e - step] : 0;
    __syncthreads();
    start[e] += a;
    item[e] += b;
    __syncthreads();
  }
  const int all = item[kMostExperts - 1];
  const int n = count[e], first = start[e] - n, at = item[e] - (n + width - 1) / width;
  for (int i = 0; i * width < n; ++i) items[at + i] = {e, first + i * width, min(width, n - i * width)};
  for (int i = all + e; i < n_items; i += kMostExperts) items[i] = {0, 0, 0};
  __syncthreads();
  start[e] = first;
  __syncthreads();
  for (int p = e; p < pairs; p += kMostExperts) order[atomicAdd(&start[experts[p]], 1)] = p;
}

__global__ void add_experts(Addends a, int64_t dim, float* y, int64_t stride) {
  begin_kernel();
  const int64_t d = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, t = blockIdx.y;
  if (d >= dim) return;
  float sum = y[t * stride + d];
  for (int i = 0; i < a.k; ++i) sum = fmaf(a.weights[t * a.k + i], a.products[(t * a.k + i) * dim + d], sum);
  y[t * stride + d] = sum;
}

// The product of one expert matrix per pair. `hidden`: x is what the gates and ups of the same pairs gave, `early`:
// through linear_experts. Returns whether this product went through it, too.
bool expert_linear(Context& context, const CudaWeight& w, int64_t rows, Tensor x, LinearArgs args, bool hidden,
                   bool early) {
  const Segment& s = w.segments.front();
  args.rows = args.rank = rows;
  args.cols = w.cols();
  args.T = x.n;
  if (!s.stride && experts_take(context.device, s, args)) {
    if (hidden)
      linear_experts(context.device, s, {.rounded = {}, .rows = x.data, .early = early}, args);
    else
      linear_experts(context.device, s, {.rounded = context.quantized(x, nullptr, 0, false)}, args);
    return true;
  }
  if (s.stride) {
    require(x.dim % 8 == 0 && x.stride % 4 == 0, "experts of float types have a multiple of 8 columns");
    linear_floats(context.device, s, x.data, x.stride, args);
  } else {
    linear_blocks(context.device, s, context.quantized(x, nullptr, 0, args.items != nullptr), args);
  }
  return false;
}

}  // namespace

void experts(Context& context, const CudaWeight& gate_up, const CudaWeight& down, Tensor x, const Routing& routing,
             float limit, Tensor y) {
  const int64_t ff = down.cols(), width = y.dim, n_experts = down.rows() / width, pairs = x.n * routing.k;
  require(x.n == routing.n && y.n == x.n && gate_up.cols() == x.dim && gate_up.rows() == n_experts * 2 * ff &&
              gate_up.interleaved && n_experts <= kMostExperts && down.segments.size() == 1,
          "moe shapes");
  if (pairs == 0) return;
  // Results do not depend on how pairs are put together.
  LinearArgs args;
  const bool floats = gate_up.segments.front().stride || down.segments.front().stride;
  const bool apart = x.n <= kRowsApart && pairs <= kMostPairs;  // few pairs share an expert
  const int most = floats ? 8 : item_tokens(std::max(x.dim, ff));
  const int at_once = apart ? 1 : pairs <= kShortItems * n_experts ? std::min(most, kShortItems) : most;
  if (at_once == 0)
    throw Unsupported("experts of " + std::to_string(std::max(x.dim, ff)) + " columns: too many for shared memory");
  args.alone = x.n == 1;
  const int64_t n_items = apart ? pairs : std::min(pairs, pairs / at_once + n_experts);
  if (apart) {
    args.experts = routing.experts;
  } else {
    auto* items = context.workspace.get<ExpertItem>(Workspace::Plan, n_items + (pairs + 2) / 3);
    auto* order = reinterpret_cast<int32_t*>(items + n_items);
    launch_kernel(context.device.stream(), 1, kMostExperts, 0, plan_experts, routing.experts, static_cast<int>(pairs),
                  static_cast<int>(n_experts), at_once, items, static_cast<int>(n_items), order);
    DS4_CUDA(cudaGetLastError());
    args.items = items;
    args.order = order;
  }
  args.n_items = n_items;
  args.width = at_once;
  args.per_row = static_cast<int32_t>(routing.k);
  args.epilogue = Epilogue::Clamped;
  args.limit = limit;
  const Tensor hidden(context.workspace.get<float>(Workspace::Hidden, pairs * ff), pairs, ff);
  args.y = hidden.data;
  args.y_stride = ff;
  const bool taken = expert_linear(context, gate_up, 2 * ff, x, args, false, false);

  const Tensor products(context.workspace.get<float>(Workspace::Products, pairs * width), pairs, width);
  args.per_row = 1;
  args.epilogue = Epilogue::Store;
  args.y = products.data;
  args.y_stride = width;
  expert_linear(context, down, width, hidden, args, true, taken);
  context.owed = {y, {products.data, routing.weights, static_cast<int32_t>(routing.k)}};
  if (!apart && x.n <= kFewRows) settle(context);  // read once
}

void settle(Context& context) {
  const Context::Owed owed = std::exchange(context.owed, {});
  const Tensor& y = owed.y;
  if (owed.addends.k == 0) return;
  launch_kernel(context.device.stream(), dim3(static_cast<unsigned>((y.dim + 127) / 128), static_cast<unsigned>(y.n)),
                128, 0, add_experts, owed.addends, y.dim, y.data, y.stride);
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
