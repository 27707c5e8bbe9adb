#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "cuda/attention.h"
#include "cuda/context.h"
#include "cuda/cuda.h"
#include "cuda/device_math.h"
#include "cuda/draw.h"
#include "cuda/latent.h"
#include "quant/quant.h"

namespace ds4 {
namespace cuda {
namespace {

// Bytes: x in and out. out[i] = x[index[i]].
__global__ void gather_kernel(const float* x, int64_t stride, const int32_t* index, int64_t dim, float* out,
                              int64_t out_stride) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < dim) out[blockIdx.y * out_stride + i] = x[index[blockIdx.y] * stride + i];
}

__global__ void rope_table_kernel(const DeviceRow* rows, const double* freq, int64_t pairs, float* out,
                                  int64_t stride) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  const double angle = static_cast<double>(rows[blockIdx.y].position) * freq[i];
  out[blockIdx.y * stride + i] = static_cast<float>(cos(angle));
  out[blockIdx.y * stride + pairs + i] = static_cast<float>(sin(angle));
}

// Bytes: q in and out, k and v in, their rows out. A block of threads for each head of each row.
__global__ void rope_store_kernel(float* qkv, int64_t stride, const float* table, int64_t table_stride, int64_t pairs,
                                  bool interleaved, const DeviceRow* rows, BufferPlace k, BufferPlace v, int q_heads,
                                  int kv_heads, int dim) {
  begin_kernel();
  const int head = blockIdx.x;
  const int64_t t = blockIdx.y;
  float* x = qkv + t * stride + static_cast<int64_t>(head) * dim;
  const float *cosine = table + t * table_stride, *sine = cosine + pairs;
  if (head < q_heads + kv_heads) {
    for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
      float& a = x[interleaved ? 2 * i : i];
      float& b = x[interleaved ? 2 * i + 1 : i + pairs];
      const float u = a, w = b, c = cosine[i], s = sine[i];
      a = u * c - w * s;
      b = u * s + w * c;
    }
    __syncthreads();
  }
  if (head < q_heads) return;
  const bool key = head < q_heads + kv_heads;
  const BufferPlace& to = key ? k : v;
  const int kv_head = head - q_heads - (key ? 0 : kv_heads);
  char* row = append_row(rows[t], to, rows[t].position);
  for (int i = threadIdx.x; i < dim; i += blockDim.x)
    store_element(row, static_cast<int64_t>(kv_head) * dim + i, to.type, x[i]);
}

// The operations of a step, instantiated; empty for a shape that was seen once.
struct StepGraph {
  StepGraph() = default;
  StepGraph(StepGraph&&) = delete;
  ~StepGraph() {
    if (exec) cudaGraphExecDestroy(exec);
  }
  cudaGraphExec_t exec = nullptr;
  bool unfit = false;
  Tensor result;
};

// Steps of more rows gain nothing from a graph.
constexpr size_t kGraphRows = 32;
// Of more rows, blocks of a lane's first kernel take room that the next product's need to load behind
// hyper-connections.
constexpr size_t kEarlyRows = 1;
constexpr size_t kMostGraphs = 64;

// At the end of an operation: its output is no longer what was kept of it.
struct Written {
  Context& context;
  const Tensor& tensor;
  ~Written() { context.written(tensor); }
};

class CudaOps final : public Ops {
 public:
  explicit CudaOps(const CudaOptions& options)
      : context_(options.device, options.synthetic_weights),
        latent_(make_latent_ops(context_)),
        drawer_(context_.device) {}

  ~CudaOps() override {
    context_.device.enter();
    forget_graphs();
  }

  std::string name() const override { return "cuda (" + context_.device.name() + ")"; }

  std::unique_ptr<Weight> load(std::span<const MatrixView> parts, WeightUse use) override {
    context_.enter();
    require(!parts.empty(), "load of no parts");
    const bool swiglu = use == WeightUse::SwiGLU;
    require(!swiglu || (parts.size() == 2 && parts[0].rows == parts[1].rows && parts[0].cols == parts[1].cols),
            "SwiGLU takes a gate and an up matrix of one shape");
    return context_.uploader.load(parts, swiglu && parts[0].type == parts[1].type);
  }

  Tensor scratch(int64_t n, int64_t dim) override { return context_.scratch(n, dim); }
  void reset_scratch() override {
    context_.enter();
    join();
    context_.reset_step();
  }
  size_t scratch_bytes() const override { return context_.arena.bytes() + context_.workspace.total(); }

  std::unique_ptr<State> new_state(std::span<const StateSpec> specs, int64_t capacity) override {
    return std::make_unique<DeviceState>(context_.device, specs, capacity);
  }

  bool host_memory() const override { return false; }

  void to_host(const Tensor& from, float* out) override {
    context_.enter();
    join();
    if (from.n == 0) return;
    const size_t row = static_cast<size_t>(from.dim) * sizeof(float), all = row * static_cast<size_t>(from.n);
    if (staging_.bytes() < all) staging_ = PinnedBuffer(all);
    DS4_CUDA(cudaMemcpy2DAsync(staging_.data(), row, from.data, static_cast<size_t>(from.stride) * sizeof(float), row,
                               static_cast<size_t>(from.n), cudaMemcpyDeviceToHost, context_.device.stream()));
    context_.device.synchronize();
    std::memcpy(out, staging_.data(), all);
  }

  void to_device(const float* from, const Tensor& to) override {
    context_.enter();
    const Written note{context_, to};
    if (to.n == 0) return;
    const size_t row = static_cast<size_t>(to.dim) * sizeof(float);
    DS4_CUDA(cudaMemcpy2DAsync(to.data, static_cast<size_t>(to.stride) * sizeof(float), from, row, row,
                               static_cast<size_t>(to.n), cudaMemcpyHostToDevice, context_.device.stream()));
    context_.device.synchronize();
  }

  int64_t horizon(std::span<const RowRef> rows) const override { return Context::horizon(rows); }

  // The first step of a shape runs as it is, which makes all memory it needs; the second is recorded, later ones are
  // replayed on the inputs that begin_step puts in their places.
  Tensor run(const StepInput& step, const std::function<Tensor()>& forward) override {
    context_.enter();
    const auto joined = [&] {
      const Tensor out = forward();
      context_.enter();
      join();
      return out;
    };
    if (step.rows.empty() || step.rows.size() > kGraphRows) return joined();
    context_.begin_step(step);
    struct End {
      Context& context;
      ~End() { context.end_step(); }
    } const end{context_};
    if (graphs_generation_ != context_.generation() || graphs_.size() > kMostGraphs) forget_graphs();
    const auto [at, fresh] =
        graphs_.try_emplace({step.model, step.rows.size(), step.wanted.size(), horizon(step.rows)});
    if (fresh) {
      const Tensor out = joined();
      if (graphs_generation_ != context_.generation()) forget_graphs();
      graphs_.try_emplace({step.model, step.rows.size(), step.wanted.size(), horizon(step.rows)});
      return out;
    }
    StepGraph& graph = at->second;
    if (!graph.exec && !graph.unfit) record(graph, joined, step.rows.size() <= kEarlyRows);
    if (graph.unfit) return joined();
    DS4_CUDA(cudaGraphLaunch(graph.exec, stream()));
    return graph.result;
  }

  void beside(int lane, const std::function<void()>& f) override {
    context_.enter();
    context_.device.enter_lane(lane);
    struct Leave {
      Device& device;
      ~Leave() { device.leave_lane(); }
    } const leave{context_.device};
    f();
  }
  void join() override { context_.device.join_lanes(); }

  void embed(const Weight& table, std::span<const int32_t> ids, Tensor out) override {
    context_.enter();
    const Written note{context_, out};
    require(static_cast<int64_t>(ids.size()) == out.n && table.cols() == out.dim, "embed shapes");
    for (const int32_t id : ids) require(id >= 0 && id < table.rows(), "token id outside the embedding table");
    if (out.n == 0) return;
    launch_rows(context_.device, on_device(table), context_.inputs.upload(ids), out.n, out.data, out.stride);
  }

  void rms_norm(Tensor x, Norm norm, Tensor y) override {
    context_.enter();
    require(x.n == y.n && x.dim == y.dim, "rms_norm shapes");
    context_.written(y);
    context_.normed(x, gain(&norm, x.dim), norm.eps, y);
  }

  void linear(const Weight& w, Tensor x, const Norm* norm, const Weight* bias, Tensor y) override {
    context_.enter();
    const Written note{context_, y};
    require(x.n == y.n && x.dim == w.cols() && y.dim == w.rows(), "linear shapes");
    LinearArgs args;
    if (bias) args.bias = vector_of(*bias, w.rows(), "linear bias shape");
    context_.linear(on_device(w), x, gain(norm, x.dim), norm ? norm->eps : 0, y, args);
  }

  void linear_add(const Weight& w, Tensor x, Tensor y) override {
    context_.enter();
    const Written note{context_, y};
    require(x.n == y.n && x.dim == w.cols() && y.dim == w.rows(), "linear_add shapes");
    LinearArgs args;
    args.epilogue = Epilogue::Add;
    context_.linear(on_device(w), x, nullptr, 0, y, args);
  }

  void linear_swiglu(const Weight& w, Tensor x, const Norm* norm, Tensor y) override {
    context_.enter();
    const Written note{context_, y};
    require(x.n == y.n && x.dim == w.cols() && 2 * y.dim == w.rows(), "linear_swiglu shapes");
    context_.swiglu(on_device(w), x, gain(norm, x.dim), norm ? norm->eps : 0, Epilogue::SwiGLU, 0, y);
  }

  void rope_table(std::span<const RowRef> rows, std::span<const double> freq, Tensor out) override {
    context_.enter();
    const Written note{context_, out};
    const auto pairs = static_cast<int64_t>(freq.size());
    require(static_cast<int64_t>(rows.size()) == out.n && out.dim == 2 * pairs, "rope_table shapes");
    if (out.n == 0) return;
    launch_kernel(context_.device.stream(),
                  dim3(static_cast<unsigned>((pairs + 63) / 64), static_cast<unsigned>(out.n)), 64, 0,
                  rope_table_kernel, context_.rows(rows), context_.inputs.constant(freq), pairs, out.data, out.stride);
    DS4_CUDA(cudaGetLastError());
  }

  void rope_store(Tensor qkv, Tensor table, RopeKind kind, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads,
                  int64_t kv_heads, int64_t head_dim) override {
    context_.enter();
    const Written note{context_, qkv};
    const int64_t pairs = table.dim / 2;
    require(static_cast<int64_t>(rows.size()) == qkv.n && table.n == qkv.n && 2 * pairs <= head_dim &&
                qkv.dim == (q_heads + 2 * kv_heads) * head_dim,
            "rope_store shapes");
    if (qkv.n == 0) return;
    const DeviceState& state = Context::state(rows.front());
    launch_kernel(context_.device.stream(),
                  dim3(static_cast<unsigned>(q_heads + 2 * kv_heads), static_cast<unsigned>(qkv.n)), 64, 0,
                  rope_store_kernel, qkv.data, qkv.stride, table.data, table.stride, pairs,
                  kind == RopeKind::Interleaved, context_.rows(rows), state.place(kv.k), state.place(kv.v),
                  static_cast<int>(q_heads), static_cast<int>(kv_heads), static_cast<int>(head_dim));
    DS4_CUDA(cudaGetLastError());
  }

  void attention(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads,
                 int64_t head_dim, float scale, Tensor out) override {
    context_.enter();
    const Written note{context_, out};
    require(static_cast<int64_t>(rows.size()) == q.n && out.n == q.n && q.dim == q_heads * head_dim &&
                out.dim == q.dim && q_heads % kv_heads == 0,
            "attention shapes");
    if (q.n == 0) return;
    const int64_t longest = horizon(rows) + 1;
    const DeviceState& state = Context::state(rows.front());
    paged_attention(context_.device, q, context_.rows(rows), longest, state.place(kv.k), state.place(kv.v), q_heads,
                    kv_heads, head_dim, scale, context_.workspace, out);
  }

  void gather(Tensor x, std::span<const int32_t> index, Tensor out) override {
    context_.enter();
    const Written note{context_, out};
    require(static_cast<int64_t>(index.size()) == out.n && x.dim == out.dim, "gather shapes");
    for (const int32_t i : index) require(i >= 0 && i < x.n, "gather index outside the rows");
    if (out.n == 0) return;
    launch_kernel(context_.device.stream(),
                  dim3(static_cast<unsigned>((x.dim + 255) / 256), static_cast<unsigned>(out.n)), 256, 0, gather_kernel,
                  x.data, x.stride, context_.inputs.upload(index), x.dim, out.data, out.stride);
    DS4_CUDA(cudaGetLastError());
  }

  bool can_draw() const override { return true; }
  void draw(Tensor logits, std::span<const RowDraw> draws, std::span<int32_t> tokens) override {
    const Written note{context_, logits};
    drawer_.draw(logits, draws, tokens);
  }
  void best(Tensor logits, std::span<Best> out) override { drawer_.best(logits, out); }

  LatentOps* latent() override { return latent_.get(); }

  cudaStream_t stream() const { return context_.device.stream(); }

 private:
  static const float* gain(const Norm* norm, int64_t dim) {
    if (!norm) return nullptr;
    require(norm->gain, "a norm without gain");
    return vector_of(*norm->gain, dim, "norm shape");
  }

  void record(StepGraph& graph, const std::function<Tensor()>& forward, bool early_lanes) {
    cudaGraph_t recorded = nullptr;
    DS4_CUDA(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
    context_.device.set_recording(true, early_lanes);
    try {
      graph.result = forward();
    } catch (const std::runtime_error&) {
      graph.unfit = true;  // it runs operation by operation, where an error of its own shows
    } catch (...) {
      context_.device.set_recording(false);
      cudaStreamEndCapture(stream(), &recorded);
      if (recorded) cudaGraphDestroy(recorded);
      throw;
    }
    context_.device.set_recording(false);
    const cudaError_t ended = cudaStreamEndCapture(stream(), &recorded);
    if (ended == cudaSuccess && !graph.unfit && cudaGraphInstantiate(&graph.exec, recorded, 0) != cudaSuccess)
      graph.exec = nullptr;
    if (!graph.exec) graph.unfit = true;
    if (recorded) cudaGraphDestroy(recorded);
    cudaGetLastError();
  }

  void forget_graphs() {
    context_.device.synchronize();
    graphs_.clear();
    graphs_generation_ = context_.generation();
  }

  Context context_;
  std::unique_ptr<LatentOps> latent_;
  Drawer drawer_;
  // By model, rows, wanted rows and horizon.
  std::map<std::tuple<uint64_t, size_t, size_t, int64_t>, StepGraph> graphs_;
  uint64_t graphs_generation_ = 0;
  PinnedBuffer staging_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options) {
  return std::make_unique<cuda::CudaOps>(options);
}

void* cuda_stream(Ops& ops) {
  const auto* c = dynamic_cast<cuda::CudaOps*>(&ops);
  return c ? c->stream() : nullptr;
}

std::vector<CudaDevice> cuda_devices(std::string& why) {
  std::vector<CudaDevice> found;
  int count = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess) {
    cudaGetLastError();
    why = cudaGetErrorString(e);
    return found;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (cudaGetDeviceProperties(&p, i) == cudaSuccess) found.push_back({p.name, p.totalGlobalMem});
  }
  if (found.empty()) why = "the driver lists no device";
  return found;
}

}  // namespace ds4
