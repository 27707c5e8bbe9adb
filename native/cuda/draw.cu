#include "cuda/draw.h"

#include <algorithm>
#include <cstring>

#include "cuda/device_math.h"

namespace ds4::cuda {
namespace {

using namespace drawing;

constexpr int kThreads = 1024;
constexpr int kListed = 2048;   // candidates in shared memory
constexpr size_t kAtOnce = 16;  // rows of a launch: each has room for its vocabulary's candidates
constexpr int kWarps = 8;       // of the passes over the vocabulary, a block of logits each

// One row's draw as kernels see it. Offsets count from the start of the uploaded bytes.
struct Job {
  DrawSettings settings;
  int64_t row = 0;
  int64_t bias = 0, forbidden = 0, mask = 0;
  int32_t biases = 0, forbids = 0, mask_words = -1;  // < 0: no mask
};

__device__ float* row_of(const Job& job, float* logits, int64_t stride) {
  return logits + job.row * stride;
}

// The threads of a block, as `drawing` wants them.
struct Block {
  uint64_t* shared;  // 32

  __device__ int64_t rank() const { return threadIdx.x; }
  __device__ int64_t size() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  template <class T, class Join>
  __device__ T all(T v, T none, const Join& join) const {
#pragma unroll
    for (int m = 16; m > 0; m /= 2) v = join(v, __shfl_xor_sync(0xFFFFFFFFu, v, m));
    __syncthreads();
    auto* parts = reinterpret_cast<T*>(shared);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : none;
#pragma unroll
    for (int m = 16; m > 0; m /= 2) v = join(v, __shfl_xor_sync(0xFFFFFFFFu, v, m));
    return v;
  }
  __device__ uint64_t sum(uint64_t v) const {
    return all<unsigned long long>(v, 0, [](unsigned long long a, unsigned long long b) { return a + b; });
  }
  __device__ float max(float v) const {
    return all(v, minus_infinity(), [](float a, float b) { return a > b ? a : b; });
  }
  __device__ int32_t min(int32_t v) const {
    return all(v, INT32_MAX, [](int32_t a, int32_t b) { return a < b ? a : b; });
  }
  __device__ int32_t next(int32_t* counter) const { return atomicAdd(counter, 1); }
};

// The first warp alone: no barriers.
struct FirstWarp {
  __device__ int64_t rank() const { return threadIdx.x; }
  __device__ int64_t size() const { return 32; }
  __device__ uint64_t sum(uint64_t v) const {
    auto n = static_cast<unsigned long long>(v);
#pragma unroll
    for (int m = 16; m > 0; m /= 2) n += __shfl_xor_sync(0xFFFFFFFFu, n, m);
    return n;
  }
  __device__ int64_t most() const { return 512; }
  __device__ bool takes_part() const { return threadIdx.x < 32; }
};

// Bias, then forbidden ids, then the mask, as the sampler applies them. A block of threads a row.
__global__ void edit_kernel(float* logits, int64_t stride, const Job* jobs, const char* uploaded) {
  begin_kernel();
  const Job& job = jobs[blockIdx.x];
  float* v = row_of(job, logits, stride);
  const auto* bias = reinterpret_cast<const std::pair<int32_t, float>*>(uploaded + job.bias);
  for (int i = threadIdx.x; i < job.biases; i += blockDim.x) v[bias[i].first] += bias[i].second;
  __syncthreads();
  const auto* forbidden = reinterpret_cast<const int32_t*>(uploaded + job.forbidden);
  for (int i = threadIdx.x; i < job.forbids; i += blockDim.x) v[forbidden[i]] = minus_infinity();
  if (job.mask_words < 0) return;
  const auto* mask = reinterpret_cast<const uint32_t*>(uploaded + job.mask);
  for (int64_t i = threadIdx.x; i < job.settings.vocab; i += blockDim.x)
    if (i / 32 >= job.mask_words || !(mask[i / 32] >> (i % 32) & 1)) v[i] = minus_infinity();
}

// Bytes: the logits. A warp for each block of kBlock logits.
__global__ void maxima_kernel(float* logits, int64_t stride, const Job* jobs, float* maxima, int64_t most_blocks) {
  begin_kernel();
  const Job& job = jobs[blockIdx.y];
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= blocks_of(job.settings.vocab)) return;
  const float* v = row_of(job, logits, stride);
  float best = minus_infinity();
  for (int64_t i = block * kBlock + threadIdx.x % 32; i < min((block + 1) * kBlock, job.settings.vocab); i += 32)
    best = v[i] > best ? v[i] : best;
  best = warp_max(best);
  if (threadIdx.x % 32 == 0) maxima[blockIdx.y * most_blocks + block] = best;
}

// Bytes: the logits. The weights of each block, where the draw asks for them.
__global__ void sums_kernel(float* logits, int64_t stride, const Job* jobs, const float* maxima, int64_t most_blocks,
                            uint64_t* sums) {
  begin_kernel();
  __shared__ uint64_t shared[32];
  const Job& job = jobs[blockIdx.y];
  const DrawSettings& s = job.settings;
  if (!needs_sums(s)) return;
  const float* tops = maxima + blockIdx.y * most_blocks;
  const float best = best_of_maxima(Block{shared}, tops, blocks_of(s.vocab));
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= blocks_of(s.vocab)) return;
  unsigned long long sum = 0;
  if ((tops[block] - best) * s.scale > kWeightless) {
    const float* v = row_of(job, logits, stride);
    for (int64_t i = block * kBlock + threadIdx.x % 32; i < min((block + 1) * kBlock, s.vocab); i += 32)
      sum += weight(v[i], best, s.scale);
#pragma unroll
    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, m);
  }
  if (threadIdx.x % 32 == 0) sums[blockIdx.y * most_blocks + block] = sum;
}

__global__ void draw_kernel(float* logits, int64_t stride, const Job* jobs, const float* maxima, const uint64_t* sums,
                            int64_t most_blocks, Candidate* overflow, int32_t* tokens) {
  begin_kernel();
  __shared__ uint64_t shared[32];
  __shared__ Candidate list[kListed];
  __shared__ int32_t count;
  const Job& job = jobs[blockIdx.x];
  const Row row{row_of(job, logits, stride),
                maxima + blockIdx.x * most_blocks,
                sums + blockIdx.x * most_blocks,
                list,
                overflow + blockIdx.x * most_blocks * kBlock,
                kListed,
                &count};
  const int32_t token = drawing::draw(Block{shared}, FirstWarp{}, job.settings, row);
  if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}

__global__ void best_kernel(float* logits, int64_t stride, const Job* jobs, const float* maxima, int64_t most_blocks,
                            Best* out) {
  begin_kernel();
  __shared__ uint64_t shared[32];
  const Block g{shared};
  const Job& job = jobs[blockIdx.x];
  const int64_t vocab = job.settings.vocab, blocks = blocks_of(vocab);
  const float* v = row_of(job, logits, stride);
  const float* tops = maxima + blockIdx.x * most_blocks;
  const float best = best_of_maxima(g, tops, blocks);
  Best found;
  if (best > minus_infinity()) {
    found.id = first_of(g, v, tops, vocab, best);
    const int64_t own = found.id / kBlock;
    float second = minus_infinity();
    for (int64_t b = threadIdx.x; b < blocks; b += blockDim.x)
      if (b != own && tops[b] > second) second = tops[b];
    for (int64_t i = own * kBlock + threadIdx.x; i < min((own + 1) * kBlock, vocab); i += blockDim.x)
      if (i != found.id && v[i] > second) second = v[i];
    second = g.max(second);
    found.lead = second > minus_infinity() ? best - second : 0.0f;
  }
  if (threadIdx.x == 0) out[blockIdx.x] = found;
}

size_t aligned(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

dim3 passes(int64_t blocks, size_t rows) {
  return dim3(static_cast<unsigned>((blocks + kWarps - 1) / kWarps), static_cast<unsigned>(rows));
}

}  // namespace

void Drawer::room(size_t bytes, size_t rows, int64_t blocks, bool listed) {
  const auto grow = [&](DeviceBuffer& b, size_t n) {
    if (b.bytes() < n) b = DeviceBuffer(device_, n + n / 4, DeviceBuffer::Pooled);
  };
  const auto grow_host = [](PinnedBuffer& b, size_t n) {
    if (b.bytes() < n) b = PinnedBuffer(n + n / 4);
  };
  const size_t tops = rows * static_cast<size_t>(blocks);
  if (listed) grow(overflow_, tops * kBlock * sizeof(Candidate));
  grow(inputs_, bytes);
  grow(maxima_, tops * sizeof(float));
  grow(sums_, tops * sizeof(uint64_t));
  grow(found_, rows * sizeof(Best));
  grow_host(host_, bytes);
  grow_host(found_host_, rows * sizeof(Best));
}

void Drawer::draw(const Tensor& logits, std::span<const RowDraw> draws, std::span<int32_t> tokens) {
  require(draws.size() == tokens.size(), "draw shapes");
  device_.enter();
  for (size_t first = 0; first < draws.size(); first += kAtOnce) {
    const size_t n = std::min(kAtOnce, draws.size() - first);
    draw_some(logits, draws.subspan(first, n), tokens.subspan(first, n));
  }
}

void Drawer::draw_some(const Tensor& logits, std::span<const RowDraw> draws, std::span<int32_t> tokens) {
  std::vector<Job> jobs;
  size_t bytes = aligned(draws.size() * sizeof(Job));
  int64_t blocks = 0;
  bool edits = false, sums = false, listed = false;
  const auto place = [&](size_t n) { return static_cast<int64_t>(std::exchange(bytes, bytes + aligned(n))); };
  for (const auto& [row, plan] : draws) {
    const DrawSettings& s = plan.settings;
    require(row >= 0 && row < logits.n && s.vocab > 0 && s.vocab <= logits.dim, "draw of a row that is not there");
    Job job;
    job.settings = s;
    job.row = row;
    job.biases = static_cast<int32_t>(plan.bias.size());
    job.forbids = static_cast<int32_t>(plan.forbidden.size());
    job.bias = place(plan.bias.size_bytes());
    job.forbidden = place(plan.forbidden.size_bytes());
    if (plan.mask) {
      job.mask_words = static_cast<int32_t>(plan.mask->size());
      job.mask = place(plan.mask->size_bytes());
    }
    edits = edits || job.biases > 0 || job.forbids > 0 || plan.mask;
    sums = sums || needs_sums(s);
    listed = listed || truncates(s);
    blocks = std::max(blocks, blocks_of(s.vocab));
    jobs.push_back(job);
  }
  room(bytes, draws.size(), blocks, listed);
  const auto put = [&](int64_t at, const auto& values) {
    if (!values.empty()) std::memcpy(host_.data() + at, values.data(), values.size_bytes());
  };
  put(0, std::span(jobs));
  for (size_t i = 0; i < jobs.size(); ++i) {
    const DrawPlan& plan = draws[i].plan;
    put(jobs[i].bias, plan.bias);
    put(jobs[i].forbidden, plan.forbidden);
    if (plan.mask) put(jobs[i].mask, *plan.mask);
  }
  const cudaStream_t stream = device_.stream();
  DS4_CUDA(cudaMemcpyAsync(inputs_.as(), host_.data(), bytes, cudaMemcpyHostToDevice, stream));
  const auto* todo = inputs_.as<const Job>();
  const auto rows = static_cast<unsigned>(jobs.size());
  if (edits)
    launch_kernel(stream, rows, 1024, 0, edit_kernel, logits.data, logits.stride, todo, inputs_.as<const char>());
  launch_kernel(stream, passes(blocks, rows), kWarps * 32, 0, maxima_kernel, logits.data, logits.stride, todo,
                maxima_.as<float>(), blocks);
  if (sums)
    launch_kernel(stream, passes(blocks, rows), kWarps * 32, 0, sums_kernel, logits.data, logits.stride, todo,
                  maxima_.as<const float>(), blocks, sums_.as<uint64_t>());
  launch_kernel(stream, rows, kThreads, 0, draw_kernel, logits.data, logits.stride, todo, maxima_.as<const float>(),
                sums_.as<const uint64_t>(), blocks, overflow_.as<Candidate>(), found_.as<int32_t>());
  DS4_CUDA(cudaMemcpyAsync(found_host_.data(), found_.as(), tokens.size_bytes(), cudaMemcpyDeviceToHost, stream));
  device_.synchronize();
  std::memcpy(tokens.data(), found_host_.data(), tokens.size_bytes());
}

void Drawer::best(const Tensor& logits, std::span<Best> out) {
  require(static_cast<int64_t>(out.size()) <= logits.n, "best of rows that are not there");
  if (out.empty()) return;
  device_.enter();
  std::vector<Job> jobs(out.size());
  for (size_t i = 0; i < out.size(); ++i) {
    jobs[i].settings.vocab = logits.dim;
    jobs[i].row = static_cast<int64_t>(i);
  }
  const size_t bytes = jobs.size() * sizeof(Job);
  const int64_t blocks = blocks_of(logits.dim);
  room(bytes, out.size(), blocks, false);
  std::memcpy(host_.data(), jobs.data(), bytes);
  const cudaStream_t stream = device_.stream();
  DS4_CUDA(cudaMemcpyAsync(inputs_.as(), host_.data(), bytes, cudaMemcpyHostToDevice, stream));
  const auto* todo = inputs_.as<const Job>();
  launch_kernel(stream, passes(blocks, out.size()), kWarps * 32, 0, maxima_kernel, logits.data, logits.stride, todo,
                maxima_.as<float>(), blocks);
  launch_kernel(stream, static_cast<unsigned>(out.size()), kThreads, 0, best_kernel, logits.data, logits.stride, todo,
                maxima_.as<const float>(), blocks, found_.as<Best>());
  DS4_CUDA(cudaMemcpyAsync(found_host_.data(), found_.as(), out.size_bytes(), cudaMemcpyDeviceToHost, stream));
  device_.synchronize();
  std::memcpy(out.data(), found_host_.data(), out.size_bytes());
}

}  // namespace ds4::cuda
