#include <algorithm>
#include <string>

#include "cuda/async_copies.h"
#include "cuda/device_math.h"
#include "cuda/eight_weights.h"
#include "cuda/linear.h"
#include "cuda/matrix_math.h"
#include "quant/quant.h"

namespace ds4::cuda {
namespace {

constexpr int kRowsPerWarp = 4;
constexpr int kWarps = 4;

// Warps that share a group of four output rows. Few rows: more warps each, as long as every lane has a block.
inline int split_of(int64_t rows, int64_t units, bool experts) {
  const int64_t enough = experts ? 4096 : 16384;  // several experts run side by side
  int split = 1;
  while (split < kWarps && rows * split < enough && units >= 64 * split) split *= 2;
  return split;
}

// What the lanes hold after the reduction: lane r * NT + t has output row `row0 + r` of activation row t.
template <int NT>
__device__ __forceinline__ void finish(const LinearArgs& p, float v, int split, int64_t row0, int n,
                                       const int (&out_row)[NT]) {
  constexpr int R = kRowsPerWarp;
  __shared__ float part[kWarps][R * NT];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (split > 1) {
    if (lane < R * NT) part[warp][lane] = v;
    __syncthreads();
    if (warp % split != 0) return;
    if (lane < R * NT)
      for (int i = 1; i < split; ++i) v = v + part[warp + i][lane];
  }
  const int r = lane / NT, t = lane % NT;
  const int64_t row = row0 + r;
  // Row r + 1 of the same activation row; used by gates, whose r is even.
  const float next = __shfl_down_sync(0xFFFFFFFFu, v, NT);
  if (lane >= R * NT || t >= n || row >= p.rows) return;
  int target = 0;
#pragma unroll
  for (int i = 0; i < NT; ++i)
    if (i == t) target = out_row[i];
  float* y = p.y + static_cast<int64_t>(target) * p.y_stride;
  switch (p.epilogue) {
    case Epilogue::Store:
      y[row] = p.bias ? v + p.bias[row] : v;
      break;
    case Epilogue::Add:
      y[row] = y[row] + v;
      break;
    case Epilogue::SwiGLU:
      if (r % 2 == 0) y[row / 2] = swiglu(v, next);
      break;
    case Epilogue::Clamped:
      if (r % 2 == 0) y[row / 2] = swiglu_clamped(v, next, p.limit);
      break;
  }
}

// The activation rows of this block: `in` and `out` row numbers, clamped to the last one where there are fewer than NT.
template <int NT>
__device__ __forceinline__ int rows_of_block(const LinearArgs& p, int64_t& expert, int (&in)[NT], int (&out)[NT]) {
  int n;
  if (NT == 1 && p.experts) {
    expert = p.experts[blockIdx.x];
    n = 1;
    in[0] = static_cast<int>(blockIdx.x) / p.per_row;
    out[0] = static_cast<int>(blockIdx.x);
  } else if (p.items) {
    const ExpertItem item = p.items[blockIdx.x];
    expert = item.expert;
    n = item.count;
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const int pair = n > 0 ? p.order[item.first + min(i, n - 1)] : 0;
      in[i] = pair / p.per_row;
      out[i] = pair;
    }
  } else {
    expert = 0;
    const int first = static_cast<int>(blockIdx.x) * NT;
    n = min(NT, static_cast<int>(p.T) - first);
#pragma unroll
    for (int i = 0; i < NT; ++i) in[i] = out[i] = first + min(i, n - 1);
  }
  return n;
}

// ---- matrices, on the matrix units
//
// Order of additions for every T: a block of 32 columns by the units (matrix_math.h), blocks in order within a chain of
// 256 columns, chains in order. Tall matrices of F16: linear_halves.h.
constexpr int kThreads = 512;
constexpr int kFloatWarps = kThreads / 32;
constexpr int kChainBlocks = 8;

struct FloatArgs {
  int64_t rows, rank, cols, T;  // cols: a multiple of 8
  int64_t w_stride, x_stride, y_stride;
  const float* x;
  float* y;
  const float* bias;
  bool add;
  int64_t at_once = 0;  // tokens of a block of threads of stream_floats
};

__device__ __forceinline__ void store(const FloatArgs& p, int64_t row, int64_t token, float v) {
  float& y = p.y[token * p.y_stride + row];
  y = p.add ? y + v : p.bias ? v + p.bias[row] : v;
}

// Few tokens. Bytes: W once for each group of tokens (from the cache after the first), x once for each 16 rows, from
// the cache. A warp computes one chain of 16 rows, the block of threads adds the chains. Of eight tokens (NT = 1) a
// warp copies its chain's columns to shared memory at once, so that their latency is waited for once. kTail: the
// columns do not fill blocks of 32.
constexpr int kStagePitch = kChainBlocks * 32 + 4;  // floats: lanes of a quarter warp fall into different banks

template <class T, int NT, bool kTail>
__global__ void __launch_bounds__(kThreads, 1) stream_floats(const T* w, FloatArgs p) {
  constexpr int kAhead = sizeof(T) == 4 || NT == 4 ? 2 : 8;  // blocks on their way
  constexpr bool kStaged = NT == 1;
  extern __shared__ float stages[];  // [warp][token][kStagePitch]
  __shared__ float part[kFloatWarps][NT * 128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int blocks = static_cast<int>((p.cols + 31) / 32), chains = (blocks + kChainBlocks - 1) / kChainBlocks;
  const int at_once = min(chains, kFloatWarps), tile_rows = kFloatWarps / at_once;
  const int tiles = static_cast<int>((p.rank + 15) / 16), sub = warp / at_once;
  const int64_t groups = p.rows / p.rank, all = groups * tiles, token0 = static_cast<int64_t>(blockIdx.y) * p.at_once;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * tile_rows + sub;
  const bool active = sub < tile_rows && tile < all;
  const int64_t group = active ? tile / tiles : 0, first = active ? tile % tiles * 16 : 0;
  const int tokens = static_cast<int>(min(p.T - token0, p.at_once));
  float* const own = stages + warp * (tokens * kStagePitch);
  const T* row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) row[r] = w + (group * p.rank + min(first + g + 8 * r, p.rank - 1)) * p.w_stride + 8 * t;
  const auto load = [&](int block, Eight<T>(&raw)[2]) {
    if (kTail && block * 32 + 8 * t >= p.cols) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) raw[r].load(row[r] + block * 32);
  };
  float total = 0.0f;
  for (int pass = 0; pass * at_once < chains; ++pass) {
    const int chain = pass * at_once + warp % at_once, block0 = chain * kChainBlocks;
    const int n = active && chain < chains ? min(kChainBlocks, blocks - block0) : 0;
    Eight<T> raw[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (i < n) load(block0 + i, raw[i]);
    if (pass == 0) begin_kernel();
    const float* const x = p.x + token0 * p.x_stride + group * p.cols + block0 * 32;
    if constexpr (kStaged) {
      __syncwarp();
      for (int token = 0; token < tokens; ++token)
        for (int c = 4 * lane; c < n * 32; c += 128)
          if (!kTail || block0 * 32 + c < p.cols)
            copy_async(own + token * kStagePitch + c, x + token * p.x_stride + c, std::integral_constant<int, 16>{});
      wait_for_copies();
      __syncwarp();
    }
    float acc[NT][4];
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = 0.0f;
    for (int base = 0; base < n; base += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (base + i < n) {
          const int column = (base + i) * 32 + 8 * t;
          const bool inside = !kTail || block0 * 32 + column < p.cols;
          float k[2][8];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            raw[i][r].decode(k[r]);
#pragma unroll
            for (int c = 0; c < 8; ++c) k[r][c] = inside ? k[r][c] : 0.0f;
          }
          if (base + i + kAhead < n) load(block0 + base + i + kAhead, raw[i]);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            const int token = j * 8 + g;
            if (inside && token < tokens) {
              const float4* from = reinterpret_cast<const float4*>(kStaged ? own + token * kStagePitch + column
                                                                           : x + token * p.x_stride + column);
              const float4 lo = from[0], hi = from[1];
              v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w, v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
            }
            add_columns<sizeof(T) == 4>(acc[j], k, v);
          }
        }
    if (pass > 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      float2* to = reinterpret_cast<float2*>(part[warp] + j * 128) + lane;
      to[0] = make_float2(acc[j][0], acc[j][1]);
      to[32] = make_float2(acc[j][2], acc[j][3]);
    }
    __syncthreads();
    // A thread has one output; several tile rows only where there is one pass.
    const int here = min(at_once, chains - pass * at_once), o = static_cast<int>(threadIdx.x);
    const bool last = (pass + 1) * at_once >= chains;
    for (int of = 0; of < tile_rows && o < NT * 128; ++of) {
      const float* from = part[of * at_once] + o;
      float v = pass == 0 ? from[0] : total + from[0];
#pragma unroll 4
      for (int c = 1; c < here; ++c) v = v + from[c * (NT * 128)];
      total = v;
      if (!last) continue;
      const int64_t at = static_cast<int64_t>(blockIdx.x) * tile_rows + of;
      const int64_t in_group = at % tiles * 16 + o % 128 / 8;
      const int token = o / 128 * 8 + o % 8;
      if (at < all && in_group < p.rank && token < tokens) store(p, at / tiles * p.rank + in_group, token0 + token, v);
    }
  }
}

// Many tokens: a warp computes 16 rows for 8 NT tokens, a block of threads kRows by kColumns such tiles; x goes through
// shared memory, kStep blocks between two barriers.
template <class T, int NT, int kRows, int kColumns, bool kTail>
__global__ void __launch_bounds__(32 * kRows * kColumns, kColumns == 1 ? 4 : 2) tile_floats(const T* w, FloatArgs p) {
  constexpr int kTokens = 8 * NT * kColumns, kPitch = 36;  // floats: lanes of a quarter warp fall into different banks
  constexpr int kThreads = 32 * kRows * kColumns;
  constexpr int kAhead = sizeof(T) == 4 ? 2 : 4;  // blocks of W on their way
  constexpr int kStep = kColumns == 1 ? kAhead : 1, kStages = kColumns == 1 ? 3 : 4;
  __shared__ alignas(16) float stage[kStages][kStep][kTokens * kPitch];
  begin_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int blocks = static_cast<int>((p.cols + 31) / 32);
  const int64_t group = blockIdx.z, token0 = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int tile = static_cast<int>(blockIdx.y) * kRows + warp % kRows, column = warp / kRows * (8 * NT);
  const T* row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    row[r] = w + (group * p.rank + min(static_cast<int64_t>(tile) * 16 + g + 8 * r, p.rank - 1)) * p.w_stride + 8 * t;
  const auto load = [&](int block, Eight<T>(&raw)[2]) {
    if (kTail && block * 32 + 8 * t >= p.cols) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) raw[r].load(row[r] + block * 32);
  };
  // Each thread copies eight columns of one token, of one block of a step or of several.
  constexpr int kPieces = kTokens * 4, kBlocksAtOnce = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kStep % kBlocksAtOnce == 0);
  const int slot = static_cast<int>(threadIdx.x) / 4 % kTokens, piece = static_cast<int>(threadIdx.x) % 4 * 8;
  const int own = static_cast<int>(threadIdx.x) / kPieces;
  const float* const source = p.x + min(token0 + slot, p.T - 1) * p.x_stride + group * p.cols + own * 32 + piece;
  const uint32_t target = shared_address(stage[0][own] + slot * kPitch + piece);
  const auto fetch = [&](int step) {
#pragma unroll
    for (int of = 0; of < kStep; of += kBlocksAtOnce) {
      const int block = step * kStep + of;
      if (block + own >= blocks) continue;
      const bool inside = !kTail || (block + own) * 32 + piece < p.cols;
      const float* from = inside ? source + block * 32 : source - own * 32;
      const uint32_t to = target + static_cast<uint32_t>((step % kStages * kStep + of) * (kTokens * kPitch * 4));
#pragma unroll
      for (int k = 0; k < 2; ++k)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + 16 * k),
                     "l"(from + (inside ? 4 * k : 0)), "r"(inside ? 16 : 0));
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
  Eight<T> raw[kAhead][2];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < blocks) load(i, raw[i]);
  float acc[NT][4], total[NT][4];
#pragma unroll
  for (int i = 0; i < NT * 4; ++i) acc[i / 4][i % 4] = total[i / 4][i % 4] = 0.0f;
  for (int base = 0; base < blocks; base += kAhead)
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = base + i;
      if (block >= blocks) break;
      if (i % kStep == 0) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
        __syncthreads();
        fetch(block / kStep + kStages - 1);
      }
      float k[2][8];
      const bool inside = !kTail || block * 32 + 8 * t < p.cols;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        raw[i][r].decode(k[r]);
#pragma unroll
        for (int c = 0; c < 8; ++c) k[r][c] = inside ? k[r][c] : 0.0f;
      }
      if (block + kAhead < blocks) load(block + kAhead, raw[i]);
      const float* from = stage[block / kStep % kStages][i % kStep] + (column + g) * kPitch + 8 * t;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float4 lo = *reinterpret_cast<const float4*>(from + j * 8 * kPitch),
                     hi = *reinterpret_cast<const float4*>(from + j * 8 * kPitch + 4);
        const float x[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        add_columns<sizeof(T) == 4>(acc[j], k, x);
      }
      if (block % kChainBlocks == kChainBlocks - 1 || block == blocks - 1) {
        const bool start = block < kChainBlocks;
#pragma unroll
        for (int n = 0; n < NT * 4; ++n) {
          float &sum = total[n / 4][n % 4], &chain = acc[n / 4][n % 4];
          sum = start ? chain : sum + chain;
          chain = 0.0f;
        }
      }
    }
  asm volatile("cp.async.wait_group 0;");
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t in_group = static_cast<int64_t>(tile) * 16 + g + i / 2 * 8,
                    token = token0 + column + j * 8 + 2 * t + i % 2;
      if (in_group < p.rank && token < p.T) store(p, group * p.rank + in_group, token, total[j][i]);
    }
}

template <class T, bool kTail>
void launch_matrix(const Device& device, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& a) {
  FloatArgs p{a.rows, a.rank, (a.cols + 7) / 8 * 8,       a.T, w.stride, x_stride, a.y_stride, x,
              a.y,    a.bias, a.epilogue == Epilogue::Add};
  const T* data = w.memory.as<T>();
  const int64_t tiles = (p.rank + 15) / 16, groups = p.rows / p.rank;
  if (p.T > 32) {
    const auto run = [&](auto kernel, int64_t tokens, int64_t rows, unsigned threads) {
      launch_kernel(device.stream(),
                    dim3(static_cast<unsigned>((p.T + tokens - 1) / tokens),
                         static_cast<unsigned>((tiles + rows - 1) / rows), static_cast<unsigned>(groups)),
                    threads, 0, kernel, data, p);
    };
    // Enough warps for the device, weights read as seldom as that allows.
    if ((p.T + 31) / 32 * tiles * groups >= 8 * device.multiprocessors())
      run(tile_floats<T, 4, 4, 2, kTail>, 64, 4, 256);
    else
      run(tile_floats<T, 2, 4, 1, kTail>, 16, 4, 128);
    return;
  }
  const int64_t chains = ((p.cols + 31) / 32 + kChainBlocks - 1) / kChainBlocks;
  const int64_t tile_rows = kFloatWarps / std::min<int64_t>(chains, kFloatWarps);
  const auto grid = static_cast<unsigned>((groups * tiles + tile_rows - 1) / tile_rows);
  constexpr int token_bytes = kFloatWarps * kStagePitch * static_cast<int>(sizeof(float));
  const int64_t fit = (device.block_shared() - 9 * 1024) / token_bytes;
  if (p.T > 16 || fit < 4) {
    p.at_once = 32;
    launch_kernel(device.stream(), grid, kThreads, 0, stream_floats<T, 4, kTail>, data, p);
    return;
  }
  p.at_once = fit < 8 ? 4 : 8;
  constexpr auto kernel = stream_floats<T, 1, kTail>;
  static const bool ready = [&] {
    DS4_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(p.at_once * token_bytes)));
    return true;
  }();
  static_cast<void>(ready);
  launch_kernel(device.stream(), dim3(grid, static_cast<unsigned>((p.T + p.at_once - 1) / p.at_once)), kThreads,
                static_cast<size_t>(std::min(p.T, p.at_once) * token_bytes), kernel, data, p);
}

// ---- gates and ups, experts: plain f32 arithmetic

template <class T, int NT>
__global__ void __launch_bounds__(32 * kWarps)
    linear_floats_kernel(const T* w, int64_t w_stride, const float* x, int64_t x_stride, LinearArgs p, int split) {
  constexpr int R = kRowsPerWarp;
  int64_t expert;
  int in[NT], out[NT];
  begin_kernel();
  const int n = rows_of_block<NT>(p, expert, in, out);
  if (n == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row0 = (static_cast<int64_t>(blockIdx.y) * (kWarps / split) + warp / split) * R;
  const T* base[R];
#pragma unroll
  for (int r = 0; r < R; ++r) base[r] = w + (expert * p.rows + min(row0 + r, p.rows - 1)) * w_stride;
  const int64_t column = min(row0, p.rows - 1) / p.rank * p.cols;
  float sum[R][NT];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int t = 0; t < NT; ++t) sum[r][t] = 0.0f;
  const int64_t units = (p.cols + 7) / 8;
  for (int64_t u = (warp % split) * 32 + lane; u < units; u += 32 * split) {
    Eight<T> raw[R];
#pragma unroll
    for (int r = 0; r < R; ++r) raw[r].load(base[r] + 8 * u);
#pragma unroll
    for (int t = 0; t < NT; ++t) {
      const float4* a = reinterpret_cast<const float4*>(x + in[t] * x_stride + column + 8 * u);
      const float4 lo = __ldg(a), hi = __ldg(a + 1);
      const float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float k[8];
        raw[r].decode(k);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[r][t] = fmaf(k[i], v[i], sum[r][t]);
      }
    }
  }
  float sums[R * NT];
#pragma unroll
  for (int i = 0; i < R * NT; ++i) sums[i] = sum[i / NT][i % NT];
  finish<NT>(p, warp_sums(sums), split, row0, n, out);
}

// Rows at once for T rows of activations.
inline int width_of(int64_t T) {
  return T <= 1 ? 1 : T <= 2 ? 2 : T <= 4 ? 4 : 8;
}

inline dim3 grid_of(const LinearArgs& p, int split, int width) {
  const int64_t per_block = kWarps / split * kRowsPerWarp;
  const int64_t columns = p.n_items ? p.n_items : (p.T + width - 1) / width;
  return {static_cast<unsigned>(columns), static_cast<unsigned>((p.rows + per_block - 1) / per_block), 1};
}

template <class T>
void launch_floats(cudaStream_t stream, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& p) {
  const int split = split_of(p.rows, (p.cols + 7) / 8, p.n_items > 0), width = p.n_items ? p.width : width_of(p.T);
  const dim3 grid = grid_of(p, split, width);
  const T* data = w.memory.as<T>();
  switch (width) {
    case 1:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 1>, data, w.stride, x, x_stride, p, split);
      break;
    case 2:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 2>, data, w.stride, x, x_stride, p, split);
      break;
    case 4:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 4>, data, w.stride, x, x_stride, p, split);
      break;
    default:
      launch_kernel(stream, grid, 32 * kWarps, 0, linear_floats_kernel<T, 8>, data, w.stride, x, x_stride, p, split);
  }
}

template <class T>
void launch(const Device& device, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& args) {
  if (args.n_items || args.epilogue == Epilogue::SwiGLU || args.epilogue == Epilogue::Clamped)
    launch_floats<T>(device.stream(), w, x, x_stride, args);
  else
    args.cols % 32 ? launch_matrix<T, true>(device, w, x, x_stride, args)
                   : launch_matrix<T, false>(device, w, x, x_stride, args);
}

}  // namespace

void linear_floats(const Device& device, const Segment& w, const float* x, int64_t x_stride, const LinearArgs& args) {
  if (args.T == 0) return;
  if (w.type == DType::F32)
    launch<float>(device, w, x, x_stride, args);
  else if (w.type == DType::F16)
    launch<__half>(device, w, x, x_stride, args);
  else if (w.type == DType::BF16)
    launch<__nv_bfloat16>(device, w, x, x_stride, args);
  else
    throw Unsupported(std::string("no matrix kernel for type ") + dtype_name(w.type));
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
