// Timings on the GPU; weights are random blocks made on the device, enough copies of each that no cache holds them.
#include <algorithm>

#include "common.h"
#include "cuda/cuda.h"
#include "random_models.h"
#include "timing.h"

namespace ds4::gpu {
namespace {

void line(std::FILE* csv, const std::string& name, int64_t T, double us, double bytes) {
  std::printf("%-34s T %3d  %9.1f us  %7.0f GB/s\n", name.c_str(), static_cast<int>(T), us, bytes / us / 1e3);
  std::fprintf(csv, "%s,%d,%.2f,%.0f\n", name.c_str(), static_cast<int>(T), us, bytes);
  std::fflush(csv);
}

}  // namespace

void bench_ops(Ops& ops, std::FILE* csv) {
  Random random(5);
  static const std::byte nowhere[64] = {};
  const auto weights = [&](DType type, int64_t rows, int64_t cols, WeightUse use = WeightUse::Linear) {
    const double size = static_cast<double>(rows) * static_cast<double>(row_bytes(type, cols));
    const int copies = std::clamp(static_cast<int>(2e8 / size), 1, 48);
    std::vector<std::unique_ptr<Weight>> all;
    for (int i = 0; i < copies; ++i) {
      if (use == WeightUse::SwiGLU) {
        const MatrixView parts[] = {{nowhere, rows / 2, cols, type}, {nowhere, rows / 2, cols, type}};
        all.push_back(ops.load(parts, use));
      } else {
        const MatrixView view{nowhere, rows, cols, type};
        all.push_back(ops.load({&view, 1}, use));
      }
    }
    return all;
  };
  const auto linear = [&](const std::string& name, DType type, int64_t rows, int64_t cols, bool all_T) {
    const auto w = weights(type, rows, cols);
    const double bytes = static_cast<double>(rows) * static_cast<double>(row_bytes(type, cols));
    for (const int64_t T : all_T ? std::vector<int64_t>{1, 4, 8, 16, 512} : std::vector<int64_t>{1, 16}) {
      ops.reset_scratch();
      const Tensor x = upload(ops, random.floats(T * cols), T, cols), y = ops.scratch(T, rows);
      const double us = time_op(ops, static_cast<int>(std::max<size_t>(w.size(), 4)), [&](int i) {
        ops.linear(*w[static_cast<size_t>(i) % w.size()], x, nullptr, nullptr, y);
      });
      line(csv, name + " " + dtype_name(type), T, us, bytes);
    }
  };
  for (const DType type :
       {DType::Q8_0, DType::Q4_K, DType::Q2_K, DType::IQ2_XXS, DType::MXFP4, DType::Q4_0, DType::F16})
    linear("linear 32768x4096", type, 32768, 4096, true);
  for (const DType type : {DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q3_K, DType::Q5_K, DType::Q6_K, DType::IQ4_NL,
                           DType::BF16, DType::F32})
    linear("linear 32768x4096", type, 32768, 4096, false);
  linear("q_a 1024x4096", DType::Q8_0, 1024, 4096, false);
  linear("kv 512x4096", DType::Q8_0, 512, 4096, false);
  linear("q_b 32768x1024", DType::Q8_0, 32768, 1024, false);
  linear("output_b 4096x8192", DType::Q8_0, 4096, 8192, false);
  linear("compressor 2048x4096", DType::F16, 2048, 4096, false);
  linear("router 256x4096", DType::F16, 256, 4096, false);
  linear("index_q 8192x1024", DType::F16, 8192, 1024, false);
  linear("shared_down 4096x2048", DType::Q8_0, 4096, 2048, false);
  linear("head 129280x4096", DType::Q8_0, 129280, 4096, false);

  LatentOps& l = *ops.latent();
  const int64_t H = 4096, heads = 64, D = 512;
  {
    const auto w = weights(DType::Q8_0, 4096, 4096, WeightUse::SwiGLU);
    const auto g = weights(DType::Q8_0, 8192, 4096);
    for (const int64_t T : {1, 16}) {
      ops.reset_scratch();
      const Tensor x = upload(ops, random.floats(T * H), T, H), y = ops.scratch(T, 2048);
      line(
          csv, "shared_gate_up Q8_0", T,
          time_op(ops, 16, [&](int i) { l.linear_swiglu_clamped(*w[static_cast<size_t>(i) % w.size()], x, 10.0f, y); }),
          4096.0 * 4096 * 34 / 32);
      const Tensor xg = upload(ops, random.floats(T * heads * D), T, heads * D), yg = ops.scratch(T, 8192);
      line(csv, "output_a grouped Q8_0", T,
           time_op(ops, 16, [&](int i) { l.grouped_linear(*g[static_cast<size_t>(i) % g.size()], xg, 8, yg); }),
           8192.0 * 4096 * 34 / 32);
    }
  }
  {
    const MatrixView fv{nowhere, 24, 4 * H, DType::F16};
    const auto base_v = random.floats(24), scale_v = random.floats(3);
    const MatrixView bv{base_v.data(), 1, 24, DType::F32}, sv{scale_v.data(), 1, 3, DType::F32};
    const auto fn = ops.load({&fv, 1}, WeightUse::Linear), base = ops.load({&bv, 1}, WeightUse::Linear),
               scale = ops.load({&sv, 1}, WeightUse::Linear);
    const auto gain_v = random.floats(H);
    const MatrixView gv{gain_v.data(), 1, H, DType::F32};
    const auto gain = ops.load({&gv, 1}, WeightUse::Linear);
    for (const int64_t T : {1, 16, 512}) {
      ops.reset_scratch();
      const Tensor x = upload(ops, random.floats(T * 4 * H), T, 4 * H), y = ops.scratch(T, H), mix = ops.scratch(T, 20);
      const Tensor q = upload(ops, random.floats(T * heads * D), T, heads * D);
      const Tensor table = upload(ops, random.floats(T * 64), T, 64);
      line(csv, "hc_in", T, time_op(ops, 20, [&](int) { l.hc_in({fn.get(), base.get(), scale.get()}, x, y, mix); }),
           24.0 * 4 * H * 2);
      const Norm norm{gain.get(), 1e-6f};
      const HyperConnection hc{fn.get(), base.get(), scale.get()};
      line(csv, "hc_out_in_norm", T, time_op(ops, 20, [&](int) { l.hc_out_in_norm(ops, y, hc, x, norm, y, mix); }),
           24.0 * 4 * H * 2);
      line(csv, "hc_out", T, time_op(ops, 20, [&](int) { l.hc_out(y, mix, 4, x); }), 9.0 * H * 4 * T);
      line(csv, "rms_norm", T, time_op(ops, 20, [&](int) { ops.rms_norm(y, {gain.get(), 1e-6f}, y); }),
           2.0 * H * 4 * T);
      line(csv, "head_norm", T, time_op(ops, 20, [&](int) { l.head_norm(q, heads, 1e-6f); }), 2.0 * heads * D * 4 * T);
      line(csv, "rope_tail", T, time_op(ops, 20, [&](int) { l.rope_tail(q, table, heads, false); }),
           2.0 * heads * 64 * 4 * T);
    }
  }
  {
    std::vector<StateSpec> specs = {
        {.name = "window", .kind = StateKind::Ring, .type = DType::F32, .width = D, .capacity = 256, .need = 128},
        {.name = "rows", .type = DType::F32, .width = D, .ratio = 4},
        {.name = "index", .type = DType::F32, .width = 128, .ratio = 4}};
    const auto sink_v = random.floats(heads);
    const MatrixView sv{sink_v.data(), 1, heads, DType::F32};
    const auto sinks = ops.load({&sv, 1}, WeightUse::Linear);
    for (const int64_t depth : {500, 2000, 4096, 65536})
      for (const int64_t T : {1, 16}) {
        ops.reset_scratch();
        std::vector<std::unique_ptr<State>> states;
        std::vector<RowRef> rows;
        const auto values = random.floats(depth / 4 * D), ring = random.floats(256 * D);
        for (int64_t t = 0; t < T; ++t) {
          states.push_back(ops.new_state(specs, depth + 64));
          states.back()->reserve(depth + 1);
          const auto as_bytes = std::as_bytes(std::span(values));
          states.back()->import_rows(0, 0, 256, std::as_bytes(std::span(ring)));
          states.back()->import_rows(1, 0, depth / 4, as_bytes);
          states.back()->import_rows(2, 0, depth / 4, as_bytes.first(static_cast<size_t>(depth / 4 * 128 * 4)));
          rows.push_back({states.back().get(), static_cast<int32_t>(depth - 1)});
        }
        const Tensor q = upload(ops, random.floats(T * heads * D), T, heads * D),
                     kv = upload(ops, random.floats(T * D), T, D), out = ops.scratch(T, heads * D);
        const Tensor iq = upload(ops, random.floats(T * heads * 128), T, heads * 128),
                     iw = upload(ops, random.floats(T * heads), T, heads);
        Selection s = l.select_short(iq, iw, rows, 2, 4, heads, 512);
        const std::string at = " at " + std::to_string(depth);
        line(csv, "select" + at, T, time_op(ops, 8, [&](int) { s = l.select_short(iq, iw, rows, 2, 4, heads, 512); }),
             static_cast<double>(T * depth / 4 * 128 * 4));
        const LatentAttention a{.window_ring = 0,
                                .window = 128,
                                .compressed = true,
                                .rows = 1,
                                .ratio = 4,
                                .sinks = sinks.get(),
                                .heads = heads,
                                .head_dim = D,
                                .scale = 0.05f};
        line(csv, "latent_attention" + at, T,
             time_op(ops, 8, [&](int) { l.latent_attention(q, kv, rows, a, &s, out); }),
             static_cast<double>(T * (128 + std::min<int64_t>(512, depth / 4)) * D * 4));
      }
  }
}

// The experts of a layer of Flash's shape, of each type that files have them in. `together`: all rows on six experts.
void bench_experts(Ops& ops, std::FILE* csv) {
  Random random(7);
  LatentOps& l = *ops.latent();
  static const std::byte nowhere[64] = {};
  const int64_t H = 4096, E = 256, F = 2048, k = 6;
  const DType types[][2] = {{DType::IQ2_XXS, DType::Q2_K},
                            {DType::Q4_K, DType::Q4_K},
                            {DType::MXFP4, DType::MXFP4},
                            {DType::Q8_0, DType::Q8_0}};
  for (const auto& [gate_type, down_type] : types) {
    std::vector<MatrixView> gate_up(static_cast<size_t>(2 * E), MatrixView{nowhere, F, H, gate_type}),
        down(static_cast<size_t>(E), MatrixView{nowhere, H, F, down_type});
    const auto g = l.load_experts(gate_up, E, WeightUse::SwiGLU), d = l.load_experts(down, E, WeightUse::Linear);
    const double each = 2.0 * F * static_cast<double>(row_bytes(gate_type, H)) +
                        static_cast<double>(H) * static_cast<double>(row_bytes(down_type, F));
    for (const bool together : {false, true})
      for (const int64_t T : together ? std::vector<int64_t>{4, 8, 16} : std::vector<int64_t>{1, 4, 8, 16, 512}) {
        ops.reset_scratch();
        const Tensor x = upload(ops, random.floats(T * H), T, H), y = ops.scratch(T, H);
        std::vector<Routing> routings;
        for (int i = 0; i < 8; ++i) {
          auto logits = random.floats((together ? 1 : T) * E, 4.0f);
          for (int64_t t = 1; together && t < T; ++t) logits.insert(logits.end(), logits.begin(), logits.begin() + E);
          routings.push_back(l.route(upload(ops, logits, T, E), nullptr, nullptr, {}, k, 1.5f));
        }
        const double distinct =
            together ? k
                     : static_cast<double>(E) * (1 - std::pow(1 - static_cast<double>(k) / E, static_cast<double>(T)));
        line(csv,
             std::string("moe ") + dtype_name(gate_type) + "/" + dtype_name(down_type) +
                 (together ? ", six experts" : ""),
             T, time_op(ops, 8, [&](int i) { l.moe(*g, *d, x, routings[static_cast<size_t>(i)], 10.0f, y); }),
             distinct * each);
      }
  }
}

// The products of a layer of DeepSeek V4 Flash at the widths of decoding, and their sum.
void bench_decode(Ops& ops, std::FILE* csv) {
  Random random(6);
  LatentOps& l = *ops.latent();
  static const std::byte nowhere[64] = {};
  const int64_t H = 4096, E = 256, F = 2048, widths[] = {1, 2, 4, 8, 16};
  double total[std::size(widths)] = {};
  const auto each = [&](const std::string& name, int calls, const std::function<double(int64_t)>& bytes,
                        const std::function<std::function<void(int)>(int64_t)>& make) {
    for (size_t i = 0; i < std::size(widths); ++i) {
      ops.reset_scratch();
      const double us = time_op(ops, calls, make(widths[i]));
      line(csv, name, widths[i], us, bytes(widths[i]));
      total[i] += us;
    }
  };
  {
    std::vector<MatrixView> gate_up(static_cast<size_t>(2 * E), MatrixView{nowhere, F, H, DType::IQ2_XXS}),
        down(static_cast<size_t>(E), MatrixView{nowhere, H, F, DType::Q2_K});
    const auto g = l.load_experts(gate_up, E, WeightUse::SwiGLU), d = l.load_experts(down, E, WeightUse::Linear);
    const double expert = 2.0 * F * static_cast<double>(row_bytes(DType::IQ2_XXS, H)) +
                          static_cast<double>(H) * static_cast<double>(row_bytes(DType::Q2_K, F));
    each(
        "experts", 8,
        [&](int64_t T) {
          return expert * static_cast<double>(E) * (1 - std::pow(1 - 6.0 / E, static_cast<double>(T)));
        },
        [&](int64_t T) -> std::function<void(int)> {
          const Tensor x = upload(ops, random.floats(T * H), T, H), y = ops.scratch(T, H);
          std::vector<Routing> routings;
          for (int i = 0; i < 8; ++i)
            routings.push_back(l.route(upload(ops, random.floats(T * E, 4.0f), T, E), nullptr, nullptr, {}, 6, 1.5f));
          return [&l, &g, &d, x, y, routings](int i) { l.moe(*g, *d, x, routings[static_cast<size_t>(i)], 10.0f, y); };
        });
  }
  const auto dense = [&](const std::string& name, int64_t rows, int64_t cols, int64_t groups, bool gated) {
    const double size = static_cast<double>(rows) * static_cast<double>(row_bytes(DType::Q8_0, cols));
    const int copies = std::clamp(static_cast<int>(2e8 / size), 4, 48);
    std::vector<std::unique_ptr<Weight>> w;
    const MatrixView all{nowhere, rows, cols, DType::Q8_0}, half{nowhere, rows / 2, cols, DType::Q8_0};
    const MatrixView halves[] = {half, half};
    for (int i = 0; i < copies; ++i)
      w.push_back(gated        ? ops.load(halves, WeightUse::SwiGLU)
                  : groups > 1 ? l.load_grouped(all, groups)
                               : ops.load({&all, 1}, WeightUse::Linear));
    each(
        name, copies, [&](int64_t) { return size; },
        [&](int64_t T) -> std::function<void(int)> {
          const Tensor x = upload(ops, random.floats(T * cols * groups), T, cols * groups);
          const Tensor y = ops.scratch(T, gated ? rows / 2 : rows);
          return [&ops, &l, &w, x, y, groups, gated](int i) {
            const Weight& of = *w[static_cast<size_t>(i)];
            if (gated)
              l.linear_swiglu_clamped(of, x, 10.0f, y);
            else if (groups > 1)
              l.grouped_linear(of, x, groups, y);
            else
              ops.linear(of, x, nullptr, nullptr, y);
          };
        });
  };
  dense("q_a", 1024, H, 1, false);
  dense("kv", 512, H, 1, false);
  dense("q_b", 32768, 1024, 1, false);
  dense("output_a", 8192, H, 8, false);
  dense("output_b", H, 8192, 1, false);
  dense("shared gate and up", 2 * F, H, 1, true);
  dense("shared down", H, F, 1, false);
  for (size_t i = 0; i < std::size(widths); ++i) line(csv, "products of a layer", widths[i], total[i], 0);
  {
    const auto vector = [&](int64_t n) {
      const auto values = random.floats(n);
      const MatrixView v{values.data(), 1, n, DType::F32};
      return ops.load({&v, 1}, WeightUse::Linear);
    };
    const auto base = vector(24), scale = vector(3), gain = vector(H);
    const MatrixView view{nowhere, 24, 4 * H, DType::F16};
    std::vector<std::unique_ptr<Weight>> fn;
    for (int i = 0; i < 100; ++i) fn.push_back(ops.load({&view, 1}, WeightUse::Precise));
    each(
        "hyper-connection", 100, [&](int64_t T) { return 24.0 * 4 * H * 2 + static_cast<double>(T * H) * 4 * 10; },
        [&](int64_t T) -> std::function<void(int)> {
          const Tensor x = upload(ops, random.floats(T * 4 * H), T, 4 * H), y = ops.scratch(T, H),
                       out = upload(ops, random.floats(T * H), T, H), mix = upload(ops, random.floats(T * 20), T, 20);
          return [&, x, y, out, mix](int i) {
            l.hc_out_in_norm(ops, out, {fn[static_cast<size_t>(i)].get(), base.get(), scale.get()}, x,
                             {gain.get(), 1e-6f}, y, mix);
          };
        });
  }
}

void bench_model(std::FILE* csv, int64_t layers, DType gate_up, DType down) {
  const auto ops = make_cuda_ops({.device = 0, .synthetic_weights = true});
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const DeepSeekTypes types{DType::F16, DType::Q8_0, gate_up, down};
  const RandomModel random = random_deepseek(flash_deepseek(layers), 77, types, true, true);
  const auto model = random.make();
  double start = seconds();
  model->load(*ops, {});
  ops->to_host(ops->scratch(1, 1), std::vector<float>(1).data());
  std::printf("model of %d layers: %.2f GB of weights in %.1f s\n", static_cast<int>(layers),
              static_cast<double>(model->resident_bytes()) / 1e9, seconds() - start);
  const int64_t vocab = model->vocab(), ctx = 8192;
  Random ids_of(3);
  std::vector<float> logits(static_cast<size_t>(16 * vocab));
  const auto prefill = [&](State& state, int64_t first, int64_t n) {
    std::vector<RowRef> rows;
    std::vector<int32_t> ids, wanted = {static_cast<int32_t>(n - 1)};
    state.reserve(first + n);
    for (int64_t i = 0; i < n; ++i) {
      rows.push_back({&state, static_cast<int32_t>(first + i)});
      ids.push_back(static_cast<int32_t>(ids_of.below(vocab)));
    }
    const Tensor out = model->forward({.ids = ids, .rows = rows, .wanted = wanted, .probe = {}});
    ops->to_host(out, logits.data());
    for (int64_t i = 0; i < vocab; ++i)
      if (!std::isfinite(logits[static_cast<size_t>(i)])) throw std::runtime_error("a logit is not finite");
  };
  const auto decode = [&](const State& from, int64_t depth, int64_t B) {
    std::vector<std::unique_ptr<State>> states;
    for (int64_t b = 0; b < B; ++b) {
      states.push_back(ops->new_state(model->state_specs(), ctx));
      states.back()->fork_from(from, depth);
    }
    std::vector<double> times;
    for (int64_t step = 0; step < 24; ++step) {
      const double t0 = seconds();
      std::vector<RowRef> rows;
      std::vector<int32_t> ids, wanted;
      for (int64_t b = 0; b < B; ++b) {
        states[static_cast<size_t>(b)]->reserve(depth + step + 1);
        rows.push_back({states[static_cast<size_t>(b)].get(), static_cast<int32_t>(depth + step)});
        ids.push_back(static_cast<int32_t>(ids_of.below(vocab)));
        wanted.push_back(static_cast<int32_t>(b));
      }
      ops->to_host(forward_step(*ops, *model, {.ids = ids, .rows = rows, .wanted = wanted, .probe = {}}),
                   logits.data());
      if (step >= 4) times.push_back(seconds() - t0);
    }
    std::nth_element(times.begin(), times.begin() + 10, times.end());
    const double t = times[10];
    std::printf("decode at %5d  batch %2d  %8.2f ms a step  %8.1f tokens/s\n", static_cast<int>(depth),
                static_cast<int>(B), 1e3 * t, static_cast<double>(B) / t);
    std::fprintf(csv, "decode %d of %d layers,%d,%.1f,0\n", static_cast<int>(depth), static_cast<int>(layers),
                 static_cast<int>(B), 1e6 * t);
  };
  const auto base = ops->new_state(model->state_specs(), ctx);
  int64_t depth = 0;
  for (const int64_t until : {512, 4096}) {
    double best = 1e9;
    while (depth < until) {
      start = seconds();
      prefill(*base, depth, 512);
      best = std::min(best, seconds() - start);
      depth += 512;
    }
    std::printf("prefill of 512 before %5d   %8.2f ms           %8.1f tokens/s\n", static_cast<int>(depth), 1e3 * best,
                512 / best);
    std::fprintf(csv, "prefill 512 before %d of %d layers,512,%.1f,0\n", static_cast<int>(depth),
                 static_cast<int>(layers), 1e6 * best);
    for (const int64_t B : {1, 4, 8, 16}) decode(*base, depth, B);
  }
}

}  // namespace ds4::gpu
