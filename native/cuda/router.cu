#include "cuda/router.h"

#include <algorithm>
#include <cfloat>

#include "cuda/device_math.h"
#include "cuda/eight_weights.h"
#include "cuda/matrix_math.h"

namespace ds4::cuda {
namespace {

constexpr int kMostExperts = 1024;

struct RouteArgs {
  const float* bias;     // [experts] or null
  const int32_t* table;  // [ids][k] or null
  const int32_t* ids;
  int32_t* experts;  // [rows][k]
  float* weights;
  int n_experts, k;
  float scale;
};

// A row's scores and the keys by which experts are compared, as integers of the same order: every key is above 0, what
// is no number or no finite one counts as the lowest.
__device__ __forceinline__ float score_of(float x) {
  const float softplus = x > 20.0f ? x : x < -20.0f ? expf(x) : log1pf(expf(x));
  return sqrtf(softplus);
}
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint((v >= -FLT_MAX ? v : -FLT_MAX) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The experts of row t, by one warp: k rounds of the largest key, ties to the lower expert. A lane has the keys of
// experts lane, lane + 32, ... in registers.
template <int kEach>
__device__ __forceinline__ void choose(const float* score, const uint32_t* key, int64_t t, const RouteArgs& r) {
  const int lane = threadIdx.x % 32;
  int32_t* chosen = r.experts + t * r.k;
  uint32_t own[kEach];
  if (!r.table)
#pragma unroll
    for (int j = 0; j < kEach; ++j) own[j] = j * 32 + lane < r.n_experts ? key[j * 32 + lane] : 0u;
  const int32_t* from = r.table ? r.table + static_cast<int64_t>(r.ids[t]) * r.k : nullptr;
  // The first 32 choices stay with their lanes.
  int mine = from && lane < r.k ? from[lane] : 0;
  float sum = 0.0f;
  for (int i = 0; i < r.k; ++i) {
    unsigned best;
    if (from) {
      best = static_cast<unsigned>(i < 32 ? __shfl_sync(0xFFFFFFFFu, mine, i) : from[i]);
    } else {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) largest = max(largest, own[j]);
      largest = __reduce_max_sync(0xFFFFFFFFu, largest);
      unsigned at = kMostExperts;
#pragma unroll
      for (int j = kEach - 1; j >= 0; --j)
        if (own[j] == largest) at = static_cast<unsigned>(j * 32 + lane);
      best = __reduce_min_sync(0xFFFFFFFFu, at);
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (best == static_cast<unsigned>(j * 32 + lane)) own[j] = 0;
      if (lane == i) mine = static_cast<int>(best);
    }
    if (lane == 0) chosen[i] = static_cast<int32_t>(best);
    sum = sum + score[best];
  }
  __syncwarp();
  sum = fmaxf(sum, 6.1035e-5f);
  for (int i = lane; i < r.k; i += 32) r.weights[t * r.k + i] = score[i < 32 ? mine : chosen[i]] / sum * r.scale;
}

// Bytes: the logits and the bias once. One block of threads for each row.
template <int kEach>
__global__ void __launch_bounds__(256) route_kernel(const float* logits, int64_t stride, RouteArgs r) {
  begin_kernel();
  __shared__ float score[32 * kEach];
  __shared__ uint32_t key[32 * kEach];
  const int64_t t = blockIdx.x;
  for (int e = threadIdx.x; e < r.n_experts; e += blockDim.x) {
    score[e] = score_of(logits[t * stride + e]);
    key[e] = key_of(r.bias ? score[e] + r.bias[e] : score[e]);
  }
  __syncthreads();
  if (threadIdx.x < 32) choose<kEach>(score, key, t, r);
}

// ---- product and choice in one kernel
//
// A warp computes one chain of 256 columns of 16 experts, its weights on their way before the kernel before has ended;
// blocks of threads are small, so that they fit beside those of a large product. The first ones then take a row each:
// they wait until all chains have arrived and add them in order, as linear_floats does.
constexpr int kChainBlocks = 8;
constexpr int kThreads = 64;
constexpr int kMostFused = 4 * kThreads;  // experts: four neighbours a thread
constexpr int64_t kMostRows = 16;
constexpr int kSumsAtOnce = 16;  // chains that are on their way together

struct RouterArgs {
  const float* x;
  int64_t w_stride, x_stride;
  int rows, blocks, chains, units;  // blocks of 32 columns, chains of eight; units: chains of all tiles of 16 experts
  float* sums;                      // [row][chain][expert]
  int* arrived;                     // units that are done; blocks of threads that have seen it
};

// The kernel behind, which takes whole multiprocessors, is not let in before this one is through.
template <class T, int NT>
__global__ void __launch_bounds__(kThreads) router_kernel(const T* w, RouterArgs p, RouteArgs r) {
  __shared__ float score[kMostFused];
  __shared__ uint32_t key[kMostFused];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int unit = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int chain = unit % p.chains, first = unit / p.chains * 16, block0 = chain * kChainBlocks;
  const int n = unit < p.units ? min(kChainBlocks, p.blocks - block0) : 0;
  Eight<T> raw[kChainBlocks][2];
#pragma unroll
  for (int i = 0; i < kChainBlocks; ++i)
    if (i < n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        raw[i][h].load(w + min(first + g + 8 * h, r.n_experts - 1) * p.w_stride + (block0 + i) * 32 + 8 * t);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int row = j * 8 + g;
    float4 x[kChainBlocks][2];
#pragma unroll
    for (int i = 0; i < kChainBlocks; ++i) {
      x[i][0] = x[i][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i < n && row < p.rows) {
        const float4* from = reinterpret_cast<const float4*>(p.x + row * p.x_stride + (block0 + i) * 32 + 8 * t);
        x[i][0] = __ldg(from), x[i][1] = __ldg(from + 1);
      }
    }
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kChainBlocks; ++i)
      if (i < n) {
        float k[2][8];
        raw[i][0].decode(k[0]);
        raw[i][1].decode(k[1]);
        const float four[8] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w, x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
        add_columns<sizeof(T) == 4>(acc, k, four);
      }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int token = j * 8 + 2 * t + c % 2, expert = first + g + 8 * (c / 2);
      if (n > 0 && token < p.rows && expert < r.n_experts)
        p.sums[(token * p.chains + chain) * r.n_experts + expert] = acc[c];
    }
  }
  __syncwarp();
  if (lane == 0 && n > 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(p.arrived) : "memory");

  const int takers = min(p.rows, static_cast<int>(gridDim.x));
  if (static_cast<int>(blockIdx.x) >= takers) return;
  const int e = 4 * static_cast<int>(threadIdx.x);
  float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (r.bias && e < r.n_experts) bias = __ldg(reinterpret_cast<const float4*>(r.bias + e));
  if (threadIdx.x == 0) {
    int seen;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(p.arrived) : "memory");
    } while (seen < p.units);
  }
  __syncthreads();
  if (threadIdx.x == 32 && atomicAdd(p.arrived + 1, 1) == takers - 1)
    p.arrived[0] = p.arrived[1] = 0;  // everybody has seen it
  for (int row = blockIdx.x; row < p.rows; row += takers) {
    if (e < r.n_experts) {
      const float4* from = reinterpret_cast<const float4*>(p.sums + row * p.chains * r.n_experts + e);
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int base = 0; base < p.chains; base += kSumsAtOnce) {
        float4 more[kSumsAtOnce];
#pragma unroll
        for (int c = 0; c < kSumsAtOnce; ++c) more[c] = __ldcg(from + min(base + c, p.chains - 1) * (r.n_experts / 4));
#pragma unroll
        for (int c = 0; c < kSumsAtOnce; ++c) {
          if (base + c >= p.chains) continue;
          const bool start = base + c == 0;
          v.x = start ? more[c].x : v.x + more[c].x, v.y = start ? more[c].y : v.y + more[c].y;
          v.z = start ? more[c].z : v.z + more[c].z, v.w = start ? more[c].w : v.w + more[c].w;
        }
      }
      const float x[4] = {v.x, v.y, v.z, v.w}, b[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[e + i] = score_of(x[i]);
        key[e + i] = key_of(r.bias ? score[e + i] + b[i] : score[e + i]);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) choose<kMostFused / 32>(score, key, row, r);
    if (row + takers < p.rows) __syncthreads();
  }
}

RouteArgs route_args(Context& context, int64_t rows, int64_t n_experts, const Weight* bias, const Weight* table,
                     std::span<const int32_t> ids, int64_t k, float scale, const Routing& out) {
  RouteArgs r{bias ? vector_of(*bias, n_experts, "route bias shape") : nullptr,
              nullptr,
              nullptr,
              out.experts,
              out.weights,
              static_cast<int>(n_experts),
              static_cast<int>(k),
              scale};
  if (table) {
    const CudaWeight& t = on_device(*table);
    require(t.table() && t.cols() == k && static_cast<int64_t>(ids.size()) == rows, "route table shape");
    for (const int32_t id : ids) require(id >= 0 && id < t.rows(), "token id outside the routing table");
    r.table = t.table();
    r.ids = context.inputs.upload(ids);
  }
  return r;
}

Routing routing_of(Context& context, int64_t rows, int64_t k) {
  return {context.integers(rows * k), context.scratch(rows, k).data, rows, k};
}

}  // namespace

Routing route(Context& context, Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids,
              int64_t k, float scale) {
  require(k > 0 && k <= logits.dim && logits.dim <= kMostExperts, "route shapes");
  const Routing out = routing_of(context, logits.n, k);
  if (logits.n == 0) return out;
  const RouteArgs r = route_args(context, logits.n, logits.dim, bias, table, ids, k, scale, out);
  launch_kernel(context.device.stream(), static_cast<unsigned>(logits.n), 256, 0,
                logits.dim <= 256 ? route_kernel<8> : route_kernel<kMostExperts / 32>, logits.data, logits.stride, r);
  DS4_CUDA(cudaGetLastError());
  return out;
}

bool route_rows(Context& context, const CudaWeight& w, Tensor x, const Weight* bias, const Weight* table,
                std::span<const int32_t> ids, int64_t k, float scale, Routing& out) {
  const Segment& s = w.segments.front();
  const int64_t n_experts = w.rows();
  if (w.segments.size() != 1 || (s.type != DType::F16 && s.type != DType::BF16) || s.stride == 0 || x.n == 0 ||
      x.n > kMostRows || n_experts > kMostFused || n_experts % 4 != 0 || x.dim % 32 != 0 || x.stride % 4 != 0 ||
      reinterpret_cast<uintptr_t>(x.data) % 16 != 0)
    return false;
  require(x.dim == w.cols() && k > 0 && k <= n_experts, "router shapes");
  out = routing_of(context, x.n, k);
  const RouteArgs r = route_args(context, x.n, n_experts, bias, table, ids, k, scale, out);
  if (r.bias && reinterpret_cast<uintptr_t>(r.bias) % 16 != 0) return false;
  RouterArgs p{};
  p.x = x.data;
  p.w_stride = s.stride;
  p.x_stride = x.stride;
  p.rows = static_cast<int>(x.n);
  p.blocks = static_cast<int>(x.dim / 32);
  p.chains = (p.blocks + kChainBlocks - 1) / kChainBlocks;
  p.units = static_cast<int>((n_experts + 15) / 16) * p.chains;
  p.sums = context.workspace.get<float>(Workspace::Partials, x.n * p.chains * n_experts);
  p.arrived = context.workspace.get<int>(Workspace::Arrived, 2);
  const auto grid = static_cast<unsigned>((p.units + kThreads / 32 - 1) / (kThreads / 32));
  const auto launch = [&]<class T>(const T* data) {
    launch_kernel(context.device.stream(), grid, kThreads, 0, x.n <= 8 ? router_kernel<T, 1> : router_kernel<T, 2>,
                  data, p, r);
  };
  if (s.type == DType::F16)
    launch(s.memory.as<__half>());
  else
    launch(s.memory.as<__nv_bfloat16>());
  DS4_CUDA(cudaGetLastError());
  return true;
}

}  // namespace ds4::cuda
