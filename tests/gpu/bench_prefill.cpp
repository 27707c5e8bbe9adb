// Timings of prefill: every operation of a layer of Flash's shape at 512 and 2,048 tokens, then a whole model.
#include <algorithm>

#include "common.h"
#include "cuda/cuda.h"
#include "random_models.h"
#include "timing.h"

namespace ds4::gpu {
namespace {

constexpr int64_t kWidth = 4096, kHeads = 64, kHeadDim = 512;
const std::byte kNowhere[64] = {};

class Layer {
 public:
  Layer(Ops& ops, std::FILE* csv) : ops_(ops), latent_(*ops.latent()), csv_(csv), random_(11) {}

  void run(int64_t T) {
    T_ = T;
    total_ = 0;
    linear("q_a", DType::Q8_0, 1024, kWidth);
    linear("kv", DType::Q8_0, 512, kWidth);
    linear("q_b", DType::Q8_0, kHeads * kHeadDim, 1024);
    grouped();
    linear("output_b", DType::Q8_0, kWidth, 8192);
    shared();
    linear("router", DType::F16, 256, kWidth);
    linear("compressor ratio 4", DType::F16, 2560, kWidth);
    linear("compressor ratio 128", DType::F16, 1024, kWidth, 0);
    hyper();
    experts();
    state();
    std::printf("%-34s T %4d  %9.1f us a layer (ratio 4)\n", "sum", static_cast<int>(T), total_);
  }

 private:
  Tensor random(int64_t rows, int64_t cols, float scale = 1.0f) {
    return upload(ops_, random_.floats(rows * cols, scale), rows, cols);
  }
  std::unique_ptr<Weight> weight(DType type, int64_t rows, int64_t cols) {
    const MatrixView view{kNowhere, rows, cols, type};
    return ops_.load({&view, 1}, WeightUse::Linear);
  }
  std::unique_ptr<Weight> vector(int64_t n) {
    values_.push_back(random_.floats(n));
    const MatrixView view{values_.back().data(), 1, n, DType::F32};
    return ops_.load({&view, 1}, WeightUse::Linear);
  }
  // `share`: how often a layer does it.
  void line(const std::string& name, double us, double operations, double share = 1) {
    std::printf("%-34s T %4d  %9.1f us  %7.1f TOP/s\n", name.c_str(), static_cast<int>(T_), us, operations / us / 1e6);
    std::fprintf(csv_, "prefill %s,%d,%.2f,0\n", name.c_str(), static_cast<int>(T_), us);
    std::fflush(csv_);
    total_ += share * us;
  }
  void linear(const std::string& name, DType type, int64_t rows, int64_t cols, double share = 1) {
    ops_.reset_scratch();
    const auto w = weight(type, rows, cols);
    const Tensor x = random(T_, cols), y = ops_.scratch(T_, rows);
    const auto operations = 2.0 * static_cast<double>(T_ * rows * cols);
    line(name + " " + dtype_name(type), time_op(ops_, 4, [&](int) { ops_.linear(*w, x, nullptr, nullptr, y); }),
         operations, share);
  }
  void grouped() {
    ops_.reset_scratch();
    const auto w = latent_.load_grouped({kNowhere, 8192, kWidth, DType::Q8_0}, 8);
    const Tensor x = random(T_, kHeads * kHeadDim), y = ops_.scratch(T_, 8192);
    line("output_a", time_op(ops_, 4, [&](int) { latent_.grouped_linear(*w, x, 8, y); }),
         2.0 * static_cast<double>(T_ * 8192 * kWidth));
  }
  void shared() {
    ops_.reset_scratch();
    const MatrixView parts[] = {{kNowhere, 2048, kWidth, DType::Q8_0}, {kNowhere, 2048, kWidth, DType::Q8_0}};
    const auto w = ops_.load(parts, WeightUse::SwiGLU);
    const Tensor x = random(T_, kWidth), y = ops_.scratch(T_, 2048);
    line("shared gate and up", time_op(ops_, 4, [&](int) { latent_.linear_swiglu_clamped(*w, x, 10.0f, y); }),
         2.0 * static_cast<double>(T_ * 4096 * kWidth));
    linear("shared down", DType::Q8_0, kWidth, 2048);
  }
  void hyper() {
    ops_.reset_scratch();
    const auto fn = weight(DType::F16, 24, 4 * kWidth), base = vector(24), scale = vector(3), gain = vector(kWidth);
    const Tensor x = random(T_, 4 * kWidth), y = ops_.scratch(T_, kWidth), mix = random(T_, 20);
    const Tensor q = random(T_, kHeads * kHeadDim), table = random(T_, 64), low = random(T_, 1024);
    const HyperConnection hc{fn.get(), base.get(), scale.get()};
    const auto narrow = vector(1024);
    line("hc_out_in_norm (twice)",
         time_op(ops_, 8, [&](int) { latent_.hc_out_in_norm(ops_, y, hc, x, {gain.get(), 1e-6f}, y, mix); }), 0, 2);
    line("head norm, rope", time_op(ops_, 4, [&](int) { latent_.head_norm_rope(q, kHeads, 1e-6f, table); }), 0);
    line("norm of q_a", time_op(ops_, 4, [&](int) { ops_.rms_norm(low, {narrow.get(), 1e-6f}, low); }), 0);
  }
  void experts() {
    ops_.reset_scratch();
    const int64_t count = 256, ff = 2048;
    std::vector<MatrixView> gate_up(static_cast<size_t>(2 * count), MatrixView{kNowhere, ff, kWidth, DType::IQ2_XXS}),
        down(static_cast<size_t>(count), MatrixView{kNowhere, kWidth, ff, DType::Q2_K});
    const auto g = latent_.load_experts(gate_up, count, WeightUse::SwiGLU),
               d = latent_.load_experts(down, count, WeightUse::Linear);
    const Tensor x = random(T_, kWidth), y = ops_.scratch(T_, kWidth), logits = random(T_, count, 4.0f);
    Routing routing = latent_.route(logits, nullptr, nullptr, {}, 6, 1.5f);
    line("route", time_op(ops_, 4, [&](int) { routing = latent_.route(logits, nullptr, nullptr, {}, 6, 1.5f); }), 0);
    line("experts IQ2_XXS, Q2_K", time_op(ops_, 4, [&](int) { latent_.moe(*g, *d, x, routing, 10.0f, y); }),
         2.0 * static_cast<double>(T_ * 6 * 3 * ff * kWidth));
  }
  void state() {
    std::vector<StateSpec> specs = {
        {.name = "window",
         .kind = StateKind::Ring,
         .type = DType::F32,
         .width = kHeadDim,
         .capacity = 384,
         .need = 128},
        {.name = "rows", .type = DType::F32, .width = kHeadDim, .ratio = 4},
        {.name = "far", .type = DType::F32, .width = kHeadDim, .ratio = 128},
        {.name = "open", .kind = StateKind::Ring, .type = DType::F32, .width = 2048, .capacity = 264, .need = 8},
        {.name = "open128", .kind = StateKind::Ring, .type = DType::F32, .width = 1024, .capacity = 384, .need = 128}};
    const auto sinks = vector(kHeads), gain = vector(kHeadDim);
    const auto bias4 = weight(DType::F16, 4, 1024), bias128 = weight(DType::F16, 128, 512);
    const std::vector<float> freq(32, 0.01f);
    for (const int64_t depth : {int64_t{0}, int64_t{3584}}) {
      ops_.reset_scratch();
      const auto session = ops_.new_state(specs, depth + T_);
      session->reserve(depth + T_);
      std::vector<RowRef> rows;
      for (int64_t i = 0; i < T_; ++i) rows.push_back({session.get(), static_cast<int32_t>(depth + i)});
      const Tensor kg = random(T_, 2048), narrow = random(T_, 1024), q = random(T_, kHeads * kHeadDim),
                   kv = random(T_, kHeadDim), out = ops_.scratch(T_, kHeads * kHeadDim), table = random(T_, 64);
      const std::string at = " at " + std::to_string(depth);
      const double share = depth == 0 ? 1 : 0;
      Compressor c{.ring = 3,
                   .rows = 1,
                   .bias = bias4.get(),
                   .gain = gain.get(),
                   .freq = freq,
                   .ratio = 4,
                   .dim = kHeadDim,
                   .eps = 1e-6f,
                   .rounding = RowRounding::Fp8};
      line("compress 4" + at, time_op(ops_, 4, [&](int) { latent_.compress(kg, rows, c); }), 0, share);
      c.ring = 4, c.rows = 2, c.bias = bias128.get(), c.ratio = 128;
      line("compress 128" + at, time_op(ops_, 4, [&](int) { latent_.compress(narrow, rows, c); }), 0, 0);
      line("ring_store" + at, time_op(ops_, 4, [&](int) { latent_.ring_store(kv, rows, 0); }), 0, share);
      for (const int64_t ratio : {4, 128})
        for (const int64_t short_columns : {kHeadDim - 64, int64_t{0}}) {
          const LatentAttention a{.window_ring = 0,
                                  .window = 128,
                                  .compressed = true,
                                  .rows = static_cast<size_t>(ratio == 4 ? 1 : 2),
                                  .ratio = ratio,
                                  .sinks = sinks.get(),
                                  .heads = kHeads,
                                  .head_dim = kHeadDim,
                                  .scale = 0.05f,
                                  .short_columns = short_columns};
          line("attention " + std::to_string(ratio) + (short_columns ? "" : " unrounded") + at,
               time_op(ops_, 4, [&](int) { latent_.latent_attention_rope(q, kv, rows, a, nullptr, table, out); }), 0,
               ratio == 4 && short_columns ? share : 0);
        }
      if (depth == 0) continue;
      const Tensor iq = random(T_, kHeads * 128), iw = random(T_, kHeads);
      std::vector<StateSpec> index = {{.name = "index", .type = DType::F32, .width = 128, .ratio = 4}};
      const auto other = ops_.new_state(index, depth + T_);
      other->reserve(depth + T_);
      for (RowRef& r : rows) r.state = other.get();
      line("select" + at, time_op(ops_, 4, [&](int) { latent_.select_short(iq, iw, rows, 0, 4, kHeads, 512); }), 0, 0);
    }
  }

  Ops& ops_;
  LatentOps& latent_;
  std::FILE* csv_;
  Random random_;
  int64_t T_ = 0;
  double total_ = 0;
  std::vector<std::vector<float>> values_;
};

}  // namespace

void bench_prefill(std::FILE* csv, int64_t layers) {
  {
    const auto ops = make_cuda_ops({.device = 0, .synthetic_weights = true});
    Layer layer(*ops, csv);
    for (const int64_t T : {512, 2048}) layer.run(T);
  }
  const auto ops = make_cuda_ops({.device = 0, .synthetic_weights = true});
  const DeepSeekTypes types{DType::F16, DType::Q8_0, DType::IQ2_XXS, DType::Q2_K};
  const RandomModel random = random_deepseek(flash_deepseek(layers), 77, types, true, true);
  const auto model = random.make();
  model->load(*ops, {});
  Random ids_of(3);
  std::vector<float> logits(static_cast<size_t>(model->vocab()));
  for (const int64_t T : {512, 2048}) {
    double best = 1e9;
    for (int turn = 0; turn < 5; ++turn) {
      const auto session = ops->new_state(model->state_specs(), 8192);
      session->reserve(T);
      std::vector<RowRef> rows;
      std::vector<int32_t> ids, wanted = {static_cast<int32_t>(T - 1)};
      for (int64_t i = 0; i < T; ++i) {
        rows.push_back({session.get(), static_cast<int32_t>(i)});
        ids.push_back(static_cast<int32_t>(ids_of.below(model->vocab())));
      }
      const auto start = std::chrono::steady_clock::now();
      ops->to_host(model->forward({.ids = ids, .rows = rows, .wanted = wanted, .probe = {}}), logits.data());
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::printf("prefill of %d, %d layers: %.2f ms, %.1f us a layer, %.0f tokens/s\n", static_cast<int>(T),
                static_cast<int>(layers), 1e3 * best, 1e6 * best / static_cast<double>(layers),
                static_cast<double>(T) / best);
    std::fprintf(csv, "prefill %d of %d layers,%d,%.1f,0\n", static_cast<int>(T), static_cast<int>(layers),
                 static_cast<int>(T), 1e6 * best);
  }
}

}  // namespace ds4::gpu
