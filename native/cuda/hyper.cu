#include <cooperative_groups.h>

#include <utility>

#include "cuda/hyper.h"
#include "cuda/hyper_math.h"
#include "cuda/moe.h"

namespace ds4::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kStreams = 4;
constexpr int kSlices = 8;  // blocks of threads of a cluster
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define DS4_CLUSTER __cluster_dims__(kSlices, 1, 1)
#else
#define DS4_CLUSTER  // the kernel is empty there, and not launched
#endif
constexpr int kCoefficients = 2 * kStreams + kStreams * kStreams;
constexpr int kMostWidth = 7168, kReadyWidth = 4096;
constexpr int threads_of(int64_t width, int parts) {
  return static_cast<int>(parts * width / (4 * kSlices) + (parts == 1 ? 32 : 0));
}

// Four neighbouring elements as they are stored, and as floats.
__device__ __forceinline__ float4 raw_four(const float* p) {
  return __ldg(reinterpret_cast<const float4*>(p));
}
template <class T>
__device__ __forceinline__ uint2 raw_four(const T* p) {
  return __ldg(reinterpret_cast<const uint2*>(p));
}
__device__ __forceinline__ float4 four_of(const float*, float4 v) {
  return v;
}
__device__ __forceinline__ float4 four_of(const __half*, uint2 v) {
  return {half_bits(v.x & 0xFFFFu), half_bits(v.x >> 16), half_bits(v.y & 0xFFFFu), half_bits(v.y >> 16)};
}
__device__ __forceinline__ float4 four_of(const __nv_bfloat16*, uint2 v) {
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
          __uint_as_float(v.y & 0xFFFF0000u)};
}
template <class T>
__device__ __forceinline__ float4 load_four(const T* p) {
  return four_of(p, raw_four(p));
}

// Bytes: fn once for each kRows rows (from the cache after the first), streams in and, with kOut, out, `out` once, its
// addends once for each kParts.
// Operations: 2 * 25 * 4 H T. A cluster of eight blocks of threads has kRows rows; each has an eighth of the columns of
// every stream. kParts groups of its threads have these columns, four each thread, and a share of fn's rows; a
// warp behind the first group does Sinkhorn's algorithm beside it. Sums do not depend on kRows and kParts.
// kReady: fn waits in registers.
template <class T, int kRows, int kParts, bool kOut, bool kReady>
__global__ void DS4_CLUSTER __launch_bounds__(threads_of(kReady ? kReadyWidth : kMostWidth, kParts))
    mix_and_norm_kernel(const T* fn, int64_t fn_stride, HyperArgs a, const float* gain, float eps, float* streams,
                        int64_t stride, float* out, int64_t out_stride, Addends more, float* mix, int64_t mix_stride,
                        float* y, int64_t y_stride, int64_t n, Activations codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kEach = kCoefficients / kParts, kSums = kParts == 1 ? 32 : 8;
  __shared__ float part[32][kRows][kSums];
  __shared__ float slice_sum[kRows][32], slice_squares[kRows];
  __shared__ float coefficient[kRows][32], old_mix[kRows][kStreams + kStreams * kStreams];
  __shared__ alignas(16) float m[kRows][kStreams * kStreams];
  __shared__ float squares_part[32][kRows];
  const auto cluster = cg::this_cluster();
  const int slice = static_cast<int>(cluster.block_rank()), workers = static_cast<int>(a.width) / (4 * kSlices);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int group = thread / workers, of_group = workers / 32;
  const bool counts = group < kParts, works = group == 0;
  const int64_t t0 = static_cast<int64_t>(blockIdx.y) * kRows;
  const int64_t d = slice * (a.width / kSlices) + 4 * (thread % workers);
  // What this block will read of fn, on its way while the kernel before ends: to the registers where they hold it.
  using Raw = decltype(raw_four(fn));
  Raw ready[kReady ? kEach : 1][kStreams];
  if (counts) {
    if constexpr (kReady) {
#pragma unroll
      for (int c = 0; c < kEach; ++c)
#pragma unroll
        for (int j = 0; j < kStreams; ++j)
          ready[c][j] = raw_four(fn + (group * kEach + c) * fn_stride + j * a.width + d);
    } else {
      constexpr int per_line = 128 / static_cast<int>(sizeof(T));
      const int lines = 4 * workers / per_line;
      for (int i = thread; i < kCoefficients * kStreams * lines; i += kParts * workers) {
        const int row = i / (kStreams * lines), j = i / lines % kStreams;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(fn + row * fn_stride + j * a.width + slice * (a.width / kSlices) +
                                                      i % lines * per_line));
      }
    }
  }
  begin_kernel();

  float x[kRows][kStreams][4];
  float o[kRows][4];
  if (kOut) {
    for (int i = thread; i < kRows * (kStreams + kStreams * kStreams); i += static_cast<int>(blockDim.x)) {
      const int64_t t = min(t0 + i / (kStreams + kStreams * kStreams), n - 1);
      old_mix[i / (kStreams + kStreams * kStreams)][i % (kStreams + kStreams * kStreams)] =
          mix[t * mix_stride + i % (kStreams + kStreams * kStreams)];
    }
    __syncthreads();
  }
  if (counts) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t t = min(t0 + r, n - 1);
      const float* row = streams + t * stride + d;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float4 v = *reinterpret_cast<const float4*>(row + j * a.width);
        x[r][j][0] = v.x, x[r][j][1] = v.y, x[r][j][2] = v.z, x[r][j][3] = v.w;
      }
      if (kOut) {
        const float4 v = *reinterpret_cast<const float4*>(out + t * out_stride + d);
        o[r][0] = v.x, o[r][1] = v.y, o[r][2] = v.z, o[r][3] = v.w;
        constexpr int kAtOnce = kRows == 1 ? 6 : 2;  // on their way together
        for (int i = 0; i < more.k; i += kAtOnce) {
          float w[kAtOnce];
          float4 p[kAtOnce];
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            const int64_t at = t * more.k + min(i + n, more.k - 1);
            w[n] = more.weights[at];
            p[n] = *reinterpret_cast<const float4*>(more.products + at * a.width + d);
          }
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            if (i + n >= more.k) continue;
            o[r][0] = fmaf(w[n], p[n].x, o[r][0]), o[r][1] = fmaf(w[n], p[n].y, o[r][1]);
            o[r][2] = fmaf(w[n], p[n].z, o[r][2]), o[r][3] = fmaf(w[n], p[n].w, o[r][3]);
          }
        }
        float mixed[kStreams][4];
#pragma unroll
        for (int k = 0; k < kStreams; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float sum = old_mix[r][k] * o[r][i];
#pragma unroll
            for (int j = 0; j < kStreams; ++j) sum = fmaf(old_mix[r][kStreams + j * kStreams + k], x[r][j][i], sum);
            mixed[k][i] = sum;
          }
#pragma unroll
        for (int k = 0; k < kStreams * 4; ++k) x[r][k / 4][k % 4] = mixed[k / 4][k % 4];
      }
    }
    float sum[kRows][kSums];
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r][c] = 0.0f;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float4 w = kReady ? four_of(fn, ready[kReady ? c : 0][j])
                                : load_four(fn + (group * kEach + c) * fn_stride + j * a.width + d);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          sum[r][c] =
              fmaf(w.w, x[r][j][3], fmaf(w.z, x[r][j][2], fmaf(w.y, x[r][j][1], fmaf(w.x, x[r][j][0], sum[r][c]))));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kStreams * 4; ++i) squares = fmaf(x[r][i / 4][i % 4], x[r][i / 4][i % 4], squares);
      sum[r][kEach] = squares;
#pragma unroll
      for (int c = kEach + 1; c < kSums; ++c) sum[r][c] = 0.0f;
      const float v = warp_sums(sum[r]);
      if (lane < kSums) part[warp][r][lane] = v;
    }
  }
  __syncthreads();  // all groups have read the streams
  if (kOut && works)
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (t0 + r < n) {
        if (more.k > 0)
          *reinterpret_cast<float4*>(out + (t0 + r) * out_stride + d) = make_float4(o[r][0], o[r][1], o[r][2], o[r][3]);
#pragma unroll
        for (int j = 0; j < kStreams; ++j)
          *reinterpret_cast<float4*>(streams + (t0 + r) * stride + d + j * a.width) =
              make_float4(x[r][j][0], x[r][j][1], x[r][j][2], x[r][j][3]);
      }
  if (thread < 32) {
    const int first = lane < kCoefficients ? lane / kEach * of_group : 0;
    const int column = lane < kCoefficients ? lane % kEach : kEach;  // the squares, for all lanes behind
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float v = part[first][r][column];
      for (int w = 1; w < of_group; ++w) v = v + part[first + w][r][column];
      slice_sum[r][lane] = v;
    }
  }
  cluster.sync();
  if (thread < 32) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float v[kSlices];
#pragma unroll
      for (int s = 0; s < kSlices; ++s) v[s] = *cluster.map_shared_rank(&slice_sum[r][lane], s);
#pragma unroll
      for (int s = 1; s < kSlices; ++s) v[0] = v[0] + v[s];
      coefficient[r][lane] = v[0];
    }
  }
  __syncthreads();

  const auto factor_of = [&](int r) {
    return 1.0f / sqrtf(coefficient[r][kCoefficients] / static_cast<float>(kStreams * a.width) + a.norm_eps);
  };
  float value[kRows][4];
  if (works) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float factor = factor_of(r);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[r][i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) {
        const float pre = sigmoid(coefficient[r][j] * factor * a.scale[0] + a.base[j]) + a.eps;
#pragma unroll
        for (int i = 0; i < 4; ++i) value[r][i] = fmaf(pre, x[r][j][i], value[r][i]);
      }
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) squares = fmaf(value[r][i], value[r][i], squares);
      squares = warp_sum(squares);
      if (lane == 0) squares_part[warp][r] = squares;
    }
    // The workers alone: the warp behind them is at Sinkhorn's algorithm.
    asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
    if (thread < kRows) {
      float v = squares_part[0][thread];
      for (int w = 1; w < of_group; ++w) v = v + squares_part[w][thread];
      slice_squares[thread] = v;
    }
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (warp == of_group && slice < kRows && t0 + slice < n) {
    const int r = slice;
    float* to = mix + (t0 + r) * mix_stride;
    const float factor = factor_of(r);
    if (lane < kStreams)
      to[lane] = 2.0f * sigmoid(coefficient[r][kStreams + lane] * factor * a.scale[1] + a.base[kStreams + lane]);
    if (lane < kStreams * kStreams)
      m[r][lane] = coefficient[r][2 * kStreams + lane] * factor * a.scale[2] + a.base[2 * kStreams + lane];
    __syncwarp();
    sinkhorn(m[r], kStreams, a.iterations, a.eps);
    if (lane < kStreams * kStreams) to[kStreams + lane] = m[r][lane];
    __syncwarp();
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  float all_squares[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float v[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) v[s] = *cluster.map_shared_rank(&slice_squares[r], s);
#pragma unroll
    for (int s = 1; s < kSlices; ++s) v[0] = v[0] + v[s];
    all_squares[r] = v[0];
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (works) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float norm = 1.0f / sqrtf(all_squares[r] / static_cast<float>(a.width) + eps);
      const float4 g = load_four(gain + d);
      const float four[4] = {value[r][0] * norm * g.x, value[r][1] * norm * g.y, value[r][2] * norm * g.z,
                             value[r][3] * norm * g.w};
      const int64_t t = t0 + r;
      if (t >= n) continue;
      *reinterpret_cast<float4*>(y + t * y_stride + d) = make_float4(four[0], four[1], four[2], four[3]);
      store_codes(four, t, d / kTileCols, codes);
    }
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // nobody leaves while its sums are read
#endif
}

}  // namespace

bool mix_and_norm(Context& context, const HyperConnection& hc, const Tensor* out, Tensor streams, const float* gain,
                  float eps, Tensor y, Tensor mix) {
  const CudaWeight& fn = on_device(*hc.fn);
  require(fn.cols() == streams.dim && fn.rows() == 2 * hc.streams + hc.streams * hc.streams, "hyper-connection shape");
  const auto aligned = [](const Tensor& t) {
    return t.stride % 4 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  };
  const Segment& s = fn.segments.front();
  if (!hopper_kernels() || hc.streams != kStreams || y.dim % 1024 != 0 || y.dim > kMostWidth || s.stride == 0 ||
      fn.segments.size() != 1 || !aligned(streams) || !aligned(y) || (out && !aligned(*out)))
    return false;
  if (streams.n == 0) return true;
  Addends more;
  if (out && context.owed.y.data == out->data && context.owed.y.stride == out->stride)
    more = std::exchange(context.owed, {}).addends;
  else
    settle(context);
  const HyperArgs a{vector_of(*hc.base, kCoefficients, "hyper-connection base shape"),
                    vector_of(*hc.scale, 3, "hyper-connection scale shape"),
                    kStreams,
                    static_cast<int>(hc.iterations),
                    hc.norm_eps,
                    hc.eps,
                    y.dim};
  context.written(streams);
  context.written(mix);
  context.written(y);
  const Activations codes = context.keep_rounded(Context::OfLayer, y);
  if (streams.n > kFewRows && mix_many_rows(context, s, a, gain, eps, out, more, streams, y, mix, codes)) return true;
  const bool two = streams.n > kFewRows;  // fn is read half as often
  const dim3 grid(kSlices, static_cast<unsigned>(two ? (streams.n + 1) / 2 : streams.n));
  const auto threads = static_cast<unsigned>(threads_of(y.dim, two ? 1 : 4));
  const auto launch = [&](auto kernel, const auto* data) {
    launch_kernel(context.device.stream(), grid, threads, 0, kernel, data, s.stride, a, gain, eps, streams.data,
                  streams.stride, out ? out->data : nullptr, out ? out->stride : 0, more, mix.data, mix.stride, y.data,
                  y.stride, streams.n, codes);
  };
  const auto of_type = [&]<class T>(const T* data) {
    if (two)
      out ? launch(mix_and_norm_kernel<T, 2, 1, true, false>, data)
          : launch(mix_and_norm_kernel<T, 2, 1, false, false>, data);
    else if (sizeof(T) == 2 && y.dim <= kReadyWidth)
      out ? launch(mix_and_norm_kernel<T, 1, 4, true, sizeof(T) == 2>, data)
          : launch(mix_and_norm_kernel<T, 1, 4, false, sizeof(T) == 2>, data);
    else
      out ? launch(mix_and_norm_kernel<T, 1, 4, true, false>, data)
          : launch(mix_and_norm_kernel<T, 1, 4, false, false>, data);
  };
  if (s.type == DType::F16)
    of_type(s.memory.as<__half>());
  else if (s.type == DType::BF16)
    of_type(s.memory.as<__nv_bfloat16>());
  else
    of_type(s.memory.as<float>());
  DS4_CUDA(cudaGetLastError());
  return true;
}

}  // namespace ds4::cuda
