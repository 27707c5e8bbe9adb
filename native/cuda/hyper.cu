#include <type_traits>
#include <utility>

#include "cuda/async_copies.h"
#include "cuda/hyper.h"
#include "cuda/hyper_math.h"
#include "cuda/moe.h"

namespace ds4::cuda {
namespace {

constexpr int kStreams = 4, kCoefficients = 2 * kStreams + kStreams * kStreams;
constexpr int kTeams = 4;        // of warps, with the same columns and a share of the coefficients each
constexpr int kSlices = 8;       // of the columns of a stream, whose sums are added one after the other
constexpr int kMostBlocks = 16;  // of a cluster
constexpr int kMostWidth = 7168, kOftenWidth = kMostBlocks * 2 * kTileCols;
constexpr int kQuads = 8;    // a tile's sums: three coefficients each; the first one's last is the sum of squares
constexpr int kToAll = 2;    // of them have what every block needs: the shares of the streams and the squares
constexpr int kSquares = 3;  // its place in them

// Four neighbouring elements as they are stored, and as floats.
__device__ __forceinline__ float4 raw_four(const float* p) {
  return __ldg(reinterpret_cast<const float4*>(p));
}
template <class T>
__device__ __forceinline__ uint2 raw_four(const T* p) {
  return __ldg(reinterpret_cast<const uint2*>(p));
}

// Sum of a float of each tile, kStep floats apart: the tiles of a slice in order, then the slices.
template <int kStep>
__device__ __forceinline__ float sum_of_tiles(const float* tile, int of_slice) {
  float v[kSlices];
#pragma unroll
  for (int s = 0; s < kSlices; ++s) v[s] = tile[s * of_slice * kStep];
#pragma unroll 4
  for (int w = 1; w < of_slice; ++w)
#pragma unroll
    for (int s = 0; s < kSlices; ++s) v[s] = v[s] + tile[(s * of_slice + w) * kStep];
#pragma unroll
  for (int s = 1; s < kSlices; ++s) v[0] = v[0] + v[s];
  return v[0];
}

// Bytes: fn once for each kRows rows (from the cache after the first), streams in and, with `out`, out, `out` once and
// its addends. Operations: 2 * 25 * 4 H T. A cluster has kRows rows, a block of it kTiles tiles of 128 columns of every
// stream. First a thread has a column and leaves what the streams are now in shared memory; then groups of warps have
// all these columns, four each thread, and some of fn's rows, which wait in registers; a warp's sums go to all blocks,
// or to the one that has the row's mix. Then a warp has a tile of a row, and one a row's mix. Sums do not depend on
// kTiles, kRows and the number of blocks.
template <class T, int kTiles, int kRows>
__global__ void __launch_bounds__(32 * kTeams * kTiles, kTiles == 2 && kRows == 1 ? 2 : 1)
    mix_and_norm_kernel(const T* fn, int64_t fn_stride, HyperArgs a, const float* gain, float eps, float* streams,
                        int64_t stride, float* out, int64_t out_stride, Addends more, float* mix, int64_t mix_stride,
                        float* y, int64_t y_stride, int64_t n, Activations codes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kWarps = kTeams * kTiles, kColumns = 32 * kWarps, kEach = kCoefficients / kTeams;
  constexpr int kOfGroup = kQuads / kTeams, kSums = 4 * kOfGroup, kOld = kStreams + kStreams * kStreams;
  static_assert(2 * kMostBlocks == 32 && kOfGroup == 2);
  static_assert(kColumns == kTiles * kTileCols && kRows < kTeams);
  __shared__ alignas(16) float x[kRows][kStreams][kColumns];
  __shared__ float4 sums[kRows][kMostBlocks * kTiles][kQuads];
  __shared__ float squares[kRows][kMostBlocks * kTiles];
  __shared__ alignas(16) float old[kRows][kOld], m[kStreams * kStreams];
  __shared__ alignas(16) float gains[kColumns];
  __shared__ float bases[kCoefficients], scales[3];
  __shared__ uint64_t arrivals[3];  // of the sums for all, of those for this block, of squares
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int rank = static_cast<int>(blockIdx.x), blocks = kTiles == 2 ? kMostBlocks : static_cast<int>(gridDim.x);
  const int64_t width = kTiles == 2 ? kOftenWidth : a.width;
  const int group = warp / kTiles, tile = warp % kTiles, own_tile = rank * kTiles + tile;
  const int64_t t0 = static_cast<int64_t>(blockIdx.y) * kRows;
  const uint32_t arrival = shared_address(arrivals);
  // On their way while the kernel before ends.
  using Raw = decltype(raw_four(fn));
  Raw ready[kEach][kStreams];
#pragma unroll
  for (int c = 0; c < kEach; ++c)
#pragma unroll
    for (int j = 0; j < kStreams; ++j)
      ready[c][j] = raw_four(fn + (group * kEach + c) * fn_stride + j * width + own_tile * kTileCols + 4 * lane);
  // Behind the wait even what the second cache has comes late: other kernels' weights are on their way then.
  constexpr std::integral_constant<int, 4> kFloat;
  copy_async(&gains[thread], gain + rank * kColumns + thread, kFloat);
  if (thread < kCoefficients) copy_async(&bases[thread], a.base + thread, kFloat);
  if (thread < 3) copy_async(&scales[thread], a.scale + thread, kFloat);
  if (thread == 0) {
    for (int i = 0; i < 3; ++i) init_barrier(arrival + 8 * i);
    fence_barriers();
    const int tiles = blocks * kTiles;
    expect_bytes(arrival, kRows * tiles * kToAll * 16);
    expect_bytes(arrival + 8, tiles * (kQuads - kToAll) * 16);
    expect_bytes(arrival + 16, kRows * tiles * 4);
  }
  __syncthreads();
  cluster_started();
  begin_kernel();

  const int64_t d = rank * kColumns + thread;
  constexpr int kTogether = 6;  // addends on their way
  float before[kRows][kStreams], o[kRows], portion[kRows][kTogether], product[kRows][kTogether], own_old = 0.0f;
  const auto load_addends = [&](int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = min(t0 + r, n - 1) * more.k + first;
      const float *weights = more.weights + at, *products = more.products + at * width + d;
#pragma unroll
      for (int e = 0; e < kTogether; ++e)
        if (first + e < more.k) portion[r][e] = weights[e], product[r][e] = products[e * width];
    }
  };
  const bool has_old = out && thread < kRows * kOld;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t t = min(t0 + r, n - 1);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) before[r][j] = streams[t * stride + j * width + d];
    if (out) o[r] = out[t * out_stride + d];
  }
  if (has_old) own_old = mix[min(t0 + thread / kOld, n - 1) * mix_stride + thread % kOld];
  load_addends(0);
  // Rows of fn become floats while all that comes, as many as registers allow.
  constexpr int kFloats = kTiles == 2 && kRows == 1 && sizeof(T) == 2 ? 3 : 0;
  float weights[kFloats ? kFloats : 1][kStreams][4];
#pragma unroll
  for (int c = 0; c < kFloats; ++c)
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float4 w = four_of(fn, ready[c][j]);
      weights[c][j][0] = w.x, weights[c][j][1] = w.y, weights[c][j][2] = w.z, weights[c][j][3] = w.w;
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(weights[c][j][i]));
    }
  const auto weight = [&](int c, int j) {
    return c < kFloats ? make_float4(weights[c][j][0], weights[c][j][1], weights[c][j][2], weights[c][j][3])
                       : four_of(fn, ready[c][j]);
  };
  if (out) {
    for (int first = 0; first < more.k; first += kTogether) {
      if (first > 0) load_addends(first);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int e = 0; e < kTogether; ++e)
          if (first + e < more.k) o[r] = fmaf(portion[r][e], product[r][e], o[r]);
    }
    if (has_old) old[thread / kOld][thread % kOld] = own_old;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float now[kStreams];
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        now[k] = old[r][k] * o[r];
#pragma unroll
        for (int j = 0; j < kStreams; ++j) now[k] = fmaf(old[r][kStreams + j * kStreams + k], before[r][j], now[k]);
      }
#pragma unroll
      for (int k = 0; k < kStreams; ++k) before[r][k] = now[k];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < kStreams; ++k) x[r][k][thread] = before[r][k];
  wait_for_copies();
  wait_cluster();
  __syncthreads();

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float four[kStreams][4], v[kSums];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const float4 at = *reinterpret_cast<const float4*>(&x[r][j][tile * kTileCols + 4 * lane]);
      four[j][0] = at.x, four[j][1] = at.y, four[j][2] = at.z, four[j][3] = at.w;
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      v[i] = 0.0f;
      if (i % 4 == kSquares) {
        if (i == kSquares && group == 0)
#pragma unroll
          for (int k = 0; k < kStreams * 4; ++k) v[i] = fmaf(four[k / 4][k % 4], four[k / 4][k % 4], v[i]);
      } else {
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          const float4 w = weight(i - i / 4, j);
          v[i] = fmaf(w.w, four[j][3], fmaf(w.z, four[j][2], fmaf(w.y, four[j][1], fmaf(w.x, four[j][0], v[i]))));
        }
      }
    }
    const float sum = warp_sums(v);
    const int block = lane % kMostBlocks, half = lane / kMostBlocks, quad = group * kOfGroup + half;
    float all[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) all[i] = __shfl_sync(0xFFFFFFFFu, sum, half * 4 + i);
    if (block < blocks && (quad < kToAll || block == r))
      store_in(address_in(shared_address(&sums[r][own_tile][quad]), block), make_float4(all[0], all[1], all[2], all[3]),
               address_in(arrival + (quad < kToAll ? 0 : 8), block));
  }
  if (out)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t t = t0 + r;
      if (t >= n) continue;
      if (more.k > 0) out[t * out_stride + d] = o[r];
#pragma unroll
      for (int k = 0; k < kStreams; ++k) streams[t * stride + k * width + d] = x[r][k][thread];
    }

  const bool mixes = warp == kWarps - 1 && rank < kRows;
  if (warp >= kRows * kTiles && !mixes) return;
  const int r = mixes ? rank : warp / kTiles, of_slice = static_cast<int>(width) / (kSlices * kTileCols);
  const int64_t t = t0 + r;
  const float4 g = *reinterpret_cast<const float4*>(&gains[tile * kTileCols + 4 * lane]);
  const float base = bases[min(lane, kCoefficients - 1)], scale = scales[lane < kStreams       ? 0
                                                                         : lane < 2 * kStreams ? 1
                                                                                               : 2];
  const bool posts = rank == r && warp == r * kTiles;  // has the mix's first part, too
  wait_for(arrival, 0);
  if (mixes || posts) wait_for(arrival + 8, 0);
  const int c = lane < (mixes ? kCoefficients : posts ? 2 * kStreams : kStreams) ? lane : kCoefficients;
  const float sum = sum_of_tiles<4 * kQuads>(
      reinterpret_cast<const float*>(sums[r]) + (c < kCoefficients ? c / 3 * 4 + c % 3 : kSquares), of_slice);
  const float factor =
      1.0f / sqrtf(__shfl_sync(0xFFFFFFFFu, sum, kCoefficients) / static_cast<float>(kStreams * width) + a.norm_eps);
  const float coefficient = sum * factor * scale + base;
  if (mixes) {
    if (lane >= 2 * kStreams && lane < kCoefficients) m[lane - 2 * kStreams] = coefficient;
    __syncwarp();
    sinkhorn(m, kStreams, a.iterations, a.eps);
    if (t < n && lane < kStreams * kStreams) mix[t * mix_stride + kStreams + lane] = m[lane];
    return;
  }
  const float share = sigmoid(coefficient);
  if (posts && t < n && lane >= kStreams && lane < 2 * kStreams) mix[t * mix_stride + lane - kStreams] = 2.0f * share;
  float value[4] = {0, 0, 0, 0}, square = 0.0f;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const float pre = __shfl_sync(0xFFFFFFFFu, share + a.eps, j);
    const float4 v = *reinterpret_cast<const float4*>(&x[r][j][tile * kTileCols + 4 * lane]);
    value[0] = fmaf(pre, v.x, value[0]), value[1] = fmaf(pre, v.y, value[1]);
    value[2] = fmaf(pre, v.z, value[2]), value[3] = fmaf(pre, v.w, value[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) square = fmaf(value[i], value[i], square);
  square = warp_sum(square);
  if (lane < blocks)
    store_in(address_in(shared_address(&squares[r][own_tile]), lane), square, address_in(arrival + 16, lane));
  wait_for(arrival + 16, 0);
  const float norm = 1.0f / sqrtf(sum_of_tiles<1>(squares[r], of_slice) / static_cast<float>(width) + eps);
  if (t >= n) return;
  const float four[4] = {value[0] * norm * g.x, value[1] * norm * g.y, value[2] * norm * g.z, value[3] * norm * g.w};
  *reinterpret_cast<float4*>(y + t * y_stride + own_tile * kTileCols + 4 * lane) =
      make_float4(four[0], four[1], four[2], four[3]);
  store_codes(four, t, own_tile, codes);
#endif
}

// As launch_kernel, by clusters.
template <class... P>
cudaLaunchConfig_t clusters_config(void (*kernel)(P...), unsigned threads, unsigned blocks, unsigned clusters,
                                   cudaLaunchAttribute (&attributes)[2]) {
  DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks, clusters);
  config.blockDim = threads;
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}
template <class... P, class... A>
void launch_clusters(cudaStream_t stream, unsigned threads, size_t shared, unsigned blocks, unsigned clusters,
                     void (*kernel)(P...), A&&... args) {
  cudaLaunchAttribute attributes[2]{};
  auto config = clusters_config(kernel, threads, blocks, clusters, attributes);
  config.stream = stream;
  config.dynamicSmemBytes = shared;
  if (shared > 0)
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  DS4_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

// Blocks that a cluster may have here: every device allows eight, some sixteen.
int most_blocks() {
  static const int most = [] {
    int n = 0;
    if (!hopper_kernels()) return n;
    cudaLaunchAttribute attributes[2]{};
    const auto kernel = mix_and_norm_kernel<__half, 4, 1>;
    const auto config = clusters_config(kernel, 32 * kTeams * 4, 1, 1, attributes);
    DS4_CUDA(cudaOccupancyMaxPotentialClusterSize(&n, kernel, &config));
    return n;
  }();
  return most;
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
  const bool often = y.dim == kOftenWidth && s.type != DType::F32 && most_blocks() >= kMostBlocks;
  const int64_t tiles = often ? 2 : 4, blocks = y.dim / (tiles * kTileCols);
  if (hc.streams != kStreams || y.dim % 1024 != 0 || y.dim > kMostWidth || s.stride == 0 || fn.segments.size() != 1 ||
      blocks > most_blocks() || !aligned(streams) || !aligned(y) || !aligned(mix) || (out && !aligned(*out)))
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
  const auto launch = [&](auto kernel, const auto* data, int64_t rows, size_t shared = 0) {
    launch_clusters(context.device.stream(), static_cast<unsigned>(32 * kTeams * tiles), shared,
                    static_cast<unsigned>(blocks), static_cast<unsigned>((streams.n + rows - 1) / rows), kernel, data,
                    s.stride, a, gain, eps, streams.data, streams.stride, out ? out->data : nullptr,
                    out ? out->stride : 0, more, mix.data, mix.stride, y.data, y.stride, streams.n, codes);
  };
  // Seven clusters of sixteen blocks run at once; one that waits for another takes twice as long. Few rows start beside
  // the kernel before them. Blocks of two rows would fit there, too, but then the kernels behind start early as well,
  // and their weights are on their way when the streams are asked for: a step of 8 rows takes 3 % longer.
  constexpr size_t kAlone = 100 * 1024;
  const auto of_type = [&]<class T>(const T* data) {
    if constexpr (sizeof(T) == 4)
      launch(mix_and_norm_kernel<T, 4, 1>, data, 1);
    else if (!often)
      streams.n <= 8 ? launch(mix_and_norm_kernel<T, 4, 1>, data, 1) : launch(mix_and_norm_kernel<T, 4, 2>, data, 2);
    else if (streams.n <= 4)
      launch(mix_and_norm_kernel<T, 2, 1>, data, 1);
    else if (streams.n <= 14)
      launch(mix_and_norm_kernel<T, 2, 2>, data, 2, kAlone);
    else
      launch(mix_and_norm_kernel<T, 2, 3>, data, 3);
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
