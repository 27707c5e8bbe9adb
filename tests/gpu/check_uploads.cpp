// Weights on their way to the device: matrices of several pieces arrive as they are in the file, and what each part of
// the way takes by itself, on tensors of a layer of Flash's shape.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "common.h"
#include "reference/reference.h"
#include "timing.h"

namespace ds4::gpu {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Pages of a file in memory, mapped as a model's file is.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    const int file = memfd_create("weights", MFD_CLOEXEC);
    if (file < 0) throw std::runtime_error("no memory file");
    Random random(3);
    const auto some = random.matrix(DType::Q8_0, 1024, 4096, 0.1f);
    {
      std::vector<std::jthread> writers;
      for (size_t t = 0; t < 8; ++t)
        writers.emplace_back([&, t] {
          for (size_t at = t * some.size(); at < bytes; at += 8 * some.size())
            written_ += pwrite(file, some.data(), std::min(some.size(), bytes - at), static_cast<off_t>(at));
        });
    }
    void* p = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (p == MAP_FAILED || static_cast<size_t>(written_) != bytes) throw std::runtime_error("memory file too short");
    data_ = static_cast<const std::byte*>(p);
  }
  ~Memory() { munmap(const_cast<std::byte*>(data_), bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  const std::byte* data() const { return data_; }

 private:
  const std::byte* data_ = nullptr;
  size_t bytes_;
  std::atomic<int64_t> written_ = 0;
};

// Some rows of the first, the last, and pieces between, against the reference.
void compare_rows(Ops& cuda, const Weight& w, Ops& reference, const Weight& wanted, Random& random, Results& r,
                  const std::string& what) {
  std::vector<int32_t> ids = {0, static_cast<int32_t>(w.rows() - 1)};
  for (int i = 0; i < 254; ++i) ids.push_back(static_cast<int32_t>(random.below(w.rows())));
  const auto rows = [&](Ops& ops, const Weight& of) {
    ops.reset_scratch();
    const Tensor e = poisoned(ops, static_cast<int64_t>(ids.size()), of.cols());
    ops.embed(of, ids, e);
    return download(ops, e);
  };
  r.equal(rows(cuda, w), rows(reference, wanted), what);
}

}  // namespace

void check_uploads(Ops& ops, Results& r, uint64_t seed) {
  const auto reference = make_reference_ops();
  Random random(seed + 12);
  for (const DType type : {DType::Q8_0, DType::IQ2_XXS, DType::Q4_K, DType::F16}) {
    // Rows that pieces do not divide, then many small parts of one matrix.
    const int64_t rows = 40013, cols = 512;
    const auto bytes = random.matrix(type, rows, cols, 0.1f);
    const MatrixView view{bytes.data(), rows, cols, type};
    compare_rows(ops, *ops.load({&view, 1}, WeightUse::Embedding), *reference,
                 *reference->load({&view, 1}, WeightUse::Embedding), random, r,
                 std::string("a matrix of several pieces, ") + dtype_name(type));
    const int64_t slabs = 61, each = 640;
    std::vector<MatrixView> parts;
    for (int64_t s = 0; s < slabs; ++s)
      parts.push_back(
          {bytes.data() + static_cast<size_t>((s * 37 % slabs) * each) * row_bytes(type, cols), each, cols, type});
    compare_rows(ops, *ops.latent()->load_experts(parts, slabs, WeightUse::Linear), *reference,
                 *reference->load(parts, WeightUse::Embedding), random, r,
                 std::string("a matrix of many parts, ") + dtype_name(type));
  }
}

void bench_uploads(Ops& ops, std::FILE* csv) {
  const auto must = [](cudaError_t e) {
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
  };
  const auto line = [&](const std::string& name, double bytes, double seconds) {
    std::printf("%-44s %8.2f ms %8.1f GB/s\n", name.c_str(), 1e3 * seconds, bytes / seconds / 1e9);
    std::fprintf(csv, "%s,1,%.1f,%.0f\n", name.c_str(), 1e6 * seconds, bytes);
  };
  // The file: a layer's experts, gates and ups of 2 bits, downs of 2.6.
  const int64_t E = 256, H = 4096, F = 2048;
  const size_t gate = static_cast<size_t>(F) * row_bytes(DType::IQ2_XXS, H);
  const size_t down = static_cast<size_t>(H) * row_bytes(DType::Q2_K, F);
  const size_t all = static_cast<size_t>(E) * (2 * gate + down);
  const Memory memory(all);
  const std::byte* file = memory.data();

  const size_t lane = size_t{4} << 20;
  const size_t most = 16;
  std::byte* pinned = nullptr;
  double start = now();
  must(cudaMallocHost(reinterpret_cast<void**>(&pinned), most * lane));
  line("page-locked memory, made", static_cast<double>(most * lane), now() - start);
  for (const size_t threads : {1, 4, 8, 12, 16}) {
    double best = 1e9;
    for (int round = 0; round < 3; ++round) {
      start = now();
      {
        std::vector<std::jthread> pool;
        for (size_t t = 0; t < threads; ++t)
          pool.emplace_back([&, t] {
            for (size_t at = t * lane; at + lane <= all; at += threads * lane)
              std::memcpy(pinned + t * lane, file + at, lane);
          });
      }
      best = std::min(best, now() - start);
    }
    line("copies to page-locked memory, " + std::to_string(threads) + " threads", static_cast<double>(all), best);
  }
  void* device = nullptr;
  for (const size_t bytes : {size_t{32} << 20, all}) {
    start = now();
    must(cudaMalloc(&device, bytes));
    line("device memory, made", static_cast<double>(bytes), now() - start);
    if (bytes != all) must(cudaFree(device));
  }
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const size_t piece : {size_t{1} << 20, size_t{2} << 20, size_t{4} << 20, size_t{8} << 20}) {
    start = now();
    const size_t n = (size_t{1} << 30) / piece;
    for (size_t i = 0; i < n; ++i)
      must(cudaMemcpyAsync(static_cast<std::byte*>(device) + i * piece, pinned + i % (most * lane / piece) * piece,
                           piece, cudaMemcpyHostToDevice, stream));
    must(cudaStreamSynchronize(stream));
    line("page-locked memory to the device, " + std::to_string(piece >> 20) + " MB", static_cast<double>(n * piece),
         now() - start);
  }
  must(cudaStreamDestroy(stream));
  must(cudaFreeHost(pinned));
  must(cudaFree(device));

  const auto loaded = [&](const std::string& name, double bytes, const auto& load) {
    double best = 1e9;
    for (int round = 0; round < 3; ++round) {
      start = now();
      const auto weight = load();
      ops.reset_scratch();
      must(cudaDeviceSynchronize());
      best = std::min(best, now() - start);
    }
    line(name, bytes, best);
  };
  const auto matrix = [&](DType type, int64_t rows, int64_t cols) {
    const MatrixView view{file, rows, cols, type};
    loaded(std::string("a matrix of ") + dtype_name(type),
           static_cast<double>(rows) * static_cast<double>(row_bytes(type, cols)),
           [&] { return ops.load({&view, 1}, WeightUse::Linear); });
  };
  matrix(DType::Q8_0, 32768, 1024);
  for (const DType type : {DType::Q8_0, DType::F16, DType::MXFP4, DType::Q4_K, DType::IQ2_XXS, DType::Q2_K})
    matrix(type, static_cast<int64_t>(all / row_bytes(type, H) / 16 * 16), H);
  std::vector<MatrixView> gates_and_ups, downs;
  for (int64_t e = 0; e < E; ++e) {
    const auto i = static_cast<size_t>(e);
    gates_and_ups.push_back({file + i * gate, F, H, DType::IQ2_XXS});
    gates_and_ups.push_back({file + (static_cast<size_t>(E) + i) * gate, F, H, DType::IQ2_XXS});
    downs.push_back({file + 2 * static_cast<size_t>(E) * gate + i * down, H, F, DType::Q2_K});
  }
  loaded("a layer's gates and ups", static_cast<double>(2 * static_cast<size_t>(E) * gate),
         [&] { return ops.latent()->load_experts(gates_and_ups, E, WeightUse::SwiGLU); });
  loaded("a layer's downs", static_cast<double>(static_cast<size_t>(E) * down),
         [&] { return ops.latent()->load_experts(downs, E, WeightUse::Linear); });
}

}  // namespace ds4::gpu
