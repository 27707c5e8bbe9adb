#include "cuda/async_copies.h"
#include "cuda/hyper.h"
#include "cuda/hyper_math.h"

namespace ds4::cuda {
namespace {

constexpr int kStreams = 4, kCoefficients = 2 * kStreams + kStreams * kStreams;
constexpr int kSlices = 8;  // of the columns of a stream
constexpr int kRows = 2;    // rows of a team at once
constexpr int kTeams = 2;   // of threads, with the same columns
constexpr int kAtOnce = 8;  // coefficients at once
constexpr int kSums = 32;   // of a row and slice: of coefficients, of squares, the rest is not used
static_assert(kCoefficients % kAtOnce == 0);

__device__ __forceinline__ float from_lane(float v, int lane) {
  return __shfl_sync(0xFFFFFFFFu, v, lane);
}

// Bytes: streams in and, with kOut, out, `out` and its addends once; an eighth of fn for each block of threads, which
// stays in shared memory. Operations: 2 * 25 * 4 H T. A team of threads has an eighth of the columns, four each
// thread, and takes kRows rows at a time, the next ones on their way. Orders of addition are mix_and_norm_kernel's.
template <class T, bool kOut>
__global__ void __launch_bounds__(512, 1)
    mix_rows(const T* fn, int64_t fn_stride, int64_t width, float* streams, int64_t stride, float* out,
             int64_t out_stride, Addends more, const float* mix, int64_t mix_stride, int n, float* sums) {
  extern __shared__ uint2 weights[];  // [coefficient][stream][thread]
  __shared__ float part[kTeams][2][8][kRows][kSums];
  __shared__ uint64_t arrival;
  const int workers = static_cast<int>(blockDim.x) / kTeams, group = static_cast<int>(threadIdx.x) / workers;
  const int thread = static_cast<int>(threadIdx.x) % workers, warp = thread / 32, lane = thread % 32;
  const int warps = workers / 32, slice = static_cast<int>(blockIdx.x);
  const int64_t d = slice * (width / kSlices) + 4 * thread;
  if (threadIdx.x == 0) {
    init_barrier(shared_address(&arrival));
    fence_barriers();
    expect_bytes(shared_address(&arrival), kCoefficients * kStreams * workers * 8);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kCoefficients * kStreams; i += static_cast<int>(blockDim.x))
    copy_bulk(shared_address(weights + i * workers),
              reinterpret_cast<const uint8_t*>(fn + i / kStreams * fn_stride + i % kStreams * width +
                                               slice * (width / kSlices)),
              workers * 8, shared_address(&arrival));
  begin_kernel();

  float4 coming[kRows][kStreams], coming_out[kOut ? kRows : 1];
  const auto load = [&](int batch) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t t = min(batch * kRows + r, n - 1);
#pragma unroll
      for (int j = 0; j < kStreams; ++j)
        coming[r][j] = *reinterpret_cast<const float4*>(streams + t * stride + j * width + d);
      if constexpr (kOut) coming_out[r] = *reinterpret_cast<const float4*>(out + t * out_stride + d);
    }
  };
  const int batches = (n + kRows - 1) / kRows, step = static_cast<int>(gridDim.y) * kTeams;
  int batch = static_cast<int>(blockIdx.y) * kTeams + group, buffer = 0;
  if (batch < batches) load(batch);
  wait_for(shared_address(&arrival), 0);
  for (; batch < batches; batch += step, buffer ^= 1) {
    float x[kRows][kStreams][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t t = min(batch * kRows + r, n - 1);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float4 v = coming[r][j];
        x[r][j][0] = v.x, x[r][j][1] = v.y, x[r][j][2] = v.z, x[r][j][3] = v.w;
      }
      if constexpr (kOut) {
        float o[4] = {coming_out[r].x, coming_out[r].y, coming_out[r].z, coming_out[r].w};
#pragma unroll 2
        for (int i = 0; i < more.k; ++i) {
          const float w = more.weights[t * more.k + i];
          const float4 p = *reinterpret_cast<const float4*>(more.products + (t * more.k + i) * width + d);
          o[0] = fmaf(w, p.x, o[0]), o[1] = fmaf(w, p.y, o[1]), o[2] = fmaf(w, p.z, o[2]), o[3] = fmaf(w, p.w, o[3]);
        }
        if (more.k > 0 && batch * kRows + r < n)
          *reinterpret_cast<float4*>(out + t * out_stride + d) = make_float4(o[0], o[1], o[2], o[3]);
        const float* old = mix + t * mix_stride;
        float mixed[kStreams][4];
#pragma unroll
        for (int k = 0; k < kStreams; ++k) {
          const float post = old[k];
#pragma unroll
          for (int i = 0; i < 4; ++i) mixed[k][i] = post * o[i];
        }
#pragma unroll
        for (int j = 0; j < kStreams; ++j)
#pragma unroll
          for (int k = 0; k < kStreams; ++k) {
            const float share = old[kStreams + j * kStreams + k];
#pragma unroll
            for (int i = 0; i < 4; ++i) mixed[k][i] = fmaf(share, x[r][j][i], mixed[k][i]);
          }
#pragma unroll
        for (int k = 0; k < kStreams; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[r][k][i] = mixed[k][i];
          if (batch * kRows + r < n)
            *reinterpret_cast<float4*>(streams + t * stride + k * width + d) =
                make_float4(x[r][k][0], x[r][k][1], x[r][k][2], x[r][k][3]);
        }
      }
    }
    if (batch + step < batches) load(batch + step);
#pragma unroll 1
    for (int first = 0; first < kCoefficients; first += kAtOnce) {
      float sum[kRows][kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][c] = 0.0f;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          const float4 w = four_of(fn, weights[((first + c) * kStreams + j) * workers + thread]);
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            sum[r][c] =
                fmaf(w.w, x[r][j][3], fmaf(w.z, x[r][j][2], fmaf(w.y, x[r][j][1], fmaf(w.x, x[r][j][0], sum[r][c]))));
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float v = warp_sums(sum[r]);
        if (lane < kAtOnce) part[group][buffer][warp][r][first + lane] = v;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kStreams * 4; ++i) squares = fmaf(x[r][i / 4][i % 4], x[r][i / 4][i % 4], squares);
      squares = warp_sum(squares);
      if (lane == 0) part[group][buffer][warp][r][kCoefficients] = squares;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(workers) : "memory");
    for (int i = thread; i < kRows * kSums; i += workers) {
      const int r = i / kSums, c = i % kSums;
      if (c > kCoefficients || batch * kRows + r >= n) continue;
      float v = part[group][buffer][0][r][c];
      for (int w = 1; w < warps; ++w) v = v + part[group][buffer][w][r][c];
      sums[((static_cast<int64_t>(batch) * kRows + r) * kSlices + slice) * kSums + c] = v;
    }
  }
}

// Bytes: the streams once more (from the second cache, as far as they fit), y and its codes out. One block of threads
// for each row: kQuads times four columns a thread; the last warp does Sinkhorn's algorithm beside the others.
constexpr int kQuads = 2;
__global__ void __launch_bounds__(7168 / (4 * kQuads) + 32)
    norm_rows(const float* sums, HyperArgs a, const float* gain, float eps, const float* streams, int64_t stride,
              float* mix, int64_t mix_stride, float* y, int64_t y_stride, Activations codes) {
  __shared__ float coefficient[32], pre[kStreams], squares_part[7168 / 128];
  __shared__ alignas(16) float m[kStreams * kStreams];
  begin_kernel();
  const int workers = static_cast<int>(blockDim.x) - 32, thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t t = blockIdx.x;
  const bool works = thread < workers;
  float4 x[kQuads][kStreams];
  if (works)
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
#pragma unroll
      for (int j = 0; j < kStreams; ++j)
        x[q][j] = *reinterpret_cast<const float4*>(streams + t * stride + j * a.width + 4 * (q * workers + thread));
  if (!works) {
    const float* from = sums + t * (kSlices * kSums) + lane;
    float v[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) v[s] = lane <= kCoefficients ? from[s * kSums] : 0.0f;
#pragma unroll
    for (int s = 1; s < kSlices; ++s) v[0] = v[0] + v[s];
    const float factor =
        1.0f / sqrtf(from_lane(v[0], kCoefficients) / static_cast<float>(kStreams * a.width) + a.norm_eps);
    if (lane < kStreams) pre[lane] = sigmoid(v[0] * factor * a.scale[0] + a.base[lane]) + a.eps;
    coefficient[lane] = v[0] * factor;
  }
  __syncthreads();
  if (!works) {
    float* to = mix + t * mix_stride;
    if (lane < kStreams) to[lane] = 2.0f * sigmoid(coefficient[kStreams + lane] * a.scale[1] + a.base[kStreams + lane]);
    if (lane < kStreams * kStreams)
      m[lane] = coefficient[2 * kStreams + lane] * a.scale[2] + a.base[2 * kStreams + lane];
    __syncwarp();
    sinkhorn(m, kStreams, a.iterations, a.eps);
    if (lane < kStreams * kStreams) to[kStreams + lane] = m[lane];
    return;
  }
  float value[kQuads][4];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[q][i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float share = pre[j], four[4] = {x[q][j].x, x[q][j].y, x[q][j].z, x[q][j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) value[q][i] = fmaf(share, four[i], value[q][i]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares = fmaf(value[q][i], value[q][i], squares);
    squares = warp_sum(squares);
    if (lane == 0) squares_part[(q * workers + thread) / 32] = squares;
  }
  asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
  const int of_slice = static_cast<int>(a.width) / (128 * kSlices);
  float v = 0.0f;
  if (lane < kSlices) {
    v = squares_part[lane * of_slice];
    for (int w = 1; w < of_slice; ++w) v = v + squares_part[lane * of_slice + w];
  }
  float all = from_lane(v, 0);
#pragma unroll
  for (int s = 1; s < kSlices; ++s) all = all + from_lane(v, s);
  const float norm = 1.0f / sqrtf(all / static_cast<float>(a.width) + eps);
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int64_t d = 4 * (q * workers + thread);
    const float4 g = __ldg(reinterpret_cast<const float4*>(gain + d));
    const float four[4] = {value[q][0] * norm * g.x, value[q][1] * norm * g.y, value[q][2] * norm * g.z,
                           value[q][3] * norm * g.w};
    *reinterpret_cast<float4*>(y + t * y_stride + d) = make_float4(four[0], four[1], four[2], four[3]);
    store_codes(four, t, d / kTileCols, codes);
  }
}

}  // namespace

bool mix_many_rows(Context& context, const Segment& fn, const HyperArgs& a, const float* gain, float eps,
                   const Tensor* out, const Addends& more, Tensor streams, Tensor y, Tensor mix,
                   const Activations& codes) {
  const int64_t bytes = kCoefficients * kStreams * a.width / kSlices * 2;
  if (fn.type == DType::F32 || bytes + 10 * 1024 > context.device.block_shared()) return false;
  auto* sums = context.workspace.get<float>(Workspace::RowSums, streams.n * kSlices * kSums);
  const auto launch = [&](auto kernel, const auto* data) {
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    const int64_t resident = std::max<int64_t>(1, (context.device.block_shared() + 1024) / (bytes + 10 * 1024));
    const int64_t batches = (streams.n + kRows - 1) / kRows;
    const int64_t groups = std::min((batches + kTeams - 1) / kTeams,
                                    std::max<int64_t>(1, resident * context.device.multiprocessors() / kSlices));
    launch_kernel(context.device.stream(), dim3(kSlices, static_cast<unsigned>(groups)),
                  static_cast<unsigned>(kTeams * a.width / (4 * kSlices)), static_cast<size_t>(bytes), kernel, data,
                  fn.stride, a.width, streams.data, streams.stride, out ? out->data : nullptr, out ? out->stride : 0,
                  more, mix.data, mix.stride, static_cast<int>(streams.n), sums);
  };
  const auto of_type = [&]<class T>(const T* data) {
    out ? launch(mix_rows<T, true>, data) : launch(mix_rows<T, false>, data);
  };
  if (fn.type == DType::F16)
    of_type(fn.memory.as<__half>());
  else
    of_type(fn.memory.as<__nv_bfloat16>());
  launch_kernel(context.device.stream(), static_cast<unsigned>(streams.n),
                static_cast<unsigned>(a.width / (4 * kQuads) + 32), 0, norm_rows, sums, a, gain, eps, streams.data,
                streams.stride, mix.data, mix.stride, y.data, y.stride, codes);
  DS4_CUDA(cudaGetLastError());
  return true;
}

}  // namespace ds4::cuda
