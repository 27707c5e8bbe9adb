// DeepSeek V4: hyper-connected residual streams, latent attention over a window and compressed rows, hash- and
// score-routed experts.
//
//   X[j] = E[token] for every stream j
//   per layer:  a, mix = hc_in(X);      X = hc_out(attention(rms(a)), mix, X)
//               f, mix = hc_in(X);      X = hc_out(experts(rms(f), token), mix, X)
//   logits = Wout rms(hc_head(X))
//
// Sources: DeepSeek V4's published inference code for what is computed and rounded, mHC (arXiv:2512.24880) for the
// hyper-connections, YaRN (arXiv:2309.00071) for the scaled frequencies; names and orders as in the GGUF files.
//
// T: token rows of the step, H: width, n: streams, D: head width (key and value in one), R: rotated columns at its
// end, r: tokens per compressed row of a layer (0: window only, 4: two lanes and an indexer, 128: one lane).
#include "model/deepseek4.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops_latent.h"
#include "quant/scaled.h"

namespace ds4 {
namespace {

// Positions beyond the needed ones that rings keep, so that a session can be cut by that much and go on exactly.
constexpr int64_t kRewindSlack = 128;

struct Shape {
  int64_t layers, width, vocab, heads, head_dim, rotated, q_rank, out_groups, out_rank, window;
  int64_t index_heads, index_dim, index_top_k;
  int64_t streams, sinkhorn;
  int64_t experts, used, shared, ff, hash_layers;
  float norm_eps, hc_eps, route_scale, limit;
  std::vector<int64_t> ratios;
  bool rounding;  // simulate the storage precision of trained key rows

  int64_t q() const { return heads * head_dim; }
  int64_t mix() const { return streams + streams * streams; }
  int64_t lanes(int64_t ratio) const { return ratio == 4 ? 2 : 1; }
};

Shape read_shape(HyperParams& p) {
  constexpr int64_t kMax = int64_t{1} << 24;
  Shape s{};
  s.layers = p.size("block_count", 1, 4096);
  s.width = p.size("embedding_length", 1, kMax);
  s.vocab = p.size("vocab_size", 1, int64_t{1} << 30);
  s.heads = p.size("attention.head_count", 1, 65536);
  if (const int64_t kv = p.integer_or("attention.head_count_kv", 1); kv != 1)
    throw Unsupported("attention.head_count_kv is " + std::to_string(kv) + ", one shared head is implemented");
  s.head_dim = p.size("attention.key_length", 2, 65536);
  if (const int64_t v = p.integer_or("attention.value_length", s.head_dim); v != s.head_dim)
    throw Invalid("attention.value_length is " + std::to_string(v) + ", attention.key_length " +
                  std::to_string(s.head_dim) + ": keys and values are one row");
  s.rotated = p.size("rope.dimension_count", 2, s.head_dim);
  s.q_rank = p.size("attention.q_lora_rank", 1, kMax);
  s.out_groups = p.size("attention.output_group_count", 1, s.heads);
  s.out_rank = p.size("attention.output_lora_rank", 1, kMax);
  s.window = p.size("attention.sliding_window", 1, 65536);
  s.index_heads = p.size("attention.indexer.head_count", 1, 65536);
  s.index_dim = p.size("attention.indexer.key_length", 2, 65536);
  s.index_top_k = p.size("attention.indexer.top_k", 1, kMax);
  s.streams = p.size("hyper_connection.count", 1, 16);
  s.sinkhorn = p.size("hyper_connection.sinkhorn_iterations", 1, 1000);
  s.experts = p.size("expert_count", 1, 65536);
  s.used = p.size("expert_used_count", 1, s.experts);
  s.shared = p.size("expert_shared_count", 1, 64);
  s.ff = static_cast<int64_t>(p.uniform_or("expert_feed_forward_length", 0));
  s.hash_layers = p.size("hash_layer_count", 0, s.layers);
  s.norm_eps = static_cast<float>(p.real_or("attention.layer_norm_rms_epsilon", 1e-6));
  s.hc_eps = static_cast<float>(p.real_or("hyper_connection.epsilon", 1e-6));
  s.route_scale = static_cast<float>(p.real("expert_weights_scale"));
  s.limit = static_cast<float>(p.uniform_or("swiglu_clamp_exp", 10.0));
  if (const auto shared = static_cast<float>(p.uniform_or("swiglu_clamp_shexp", s.limit)); shared != s.limit)
    throw Unsupported("swiglu_clamp_shexp differs from swiglu_clamp_exp");
  s.rounding = p.flag_or("kv_qat", true);
  s.ratios = p.integers("attention.compress_ratios");

  if (s.ff < 1 || s.ff > kMax) throw Invalid("expert_feed_forward_length is " + std::to_string(s.ff));
  if (s.rotated % 2 != 0) throw Invalid("rope.dimension_count is " + std::to_string(s.rotated) + ", which is odd");
  if (s.rotated > s.index_dim)
    throw Invalid("attention.indexer.key_length is " + std::to_string(s.index_dim) + ", below rope.dimension_count " +
                  std::to_string(s.rotated));
  if (s.heads % s.out_groups != 0)
    throw Invalid("attention.output_group_count is " + std::to_string(s.out_groups) +
                  ", which does not divide attention.head_count " + std::to_string(s.heads));
  if (static_cast<int64_t>(s.ratios.size()) < s.layers)
    throw Invalid("attention.compress_ratios has " + std::to_string(s.ratios.size()) + " entries for " +
                  std::to_string(s.layers) + " layers");
  s.ratios.resize(static_cast<size_t>(s.layers));  // more entries belong to draft layers
  for (const int64_t r : s.ratios)
    if (r != 0 && r != 4 && r != 128)
      throw Invalid("attention.compress_ratios holds " + std::to_string(r) + ", allowed are 0, 4, 128");
  for (const float v : {s.norm_eps, s.hc_eps, s.route_scale, s.limit})
    if (!(v >= 0) || !std::isfinite(v)) throw Invalid("an epsilon, scale or limit is not a positive number");
  if (!p.flag_or("expert_weights_norm", true)) throw Unsupported("expert_weights_norm false is not implemented");
  if (const int64_t f = p.integer_or("expert_gating_func", 4); f != 4)
    throw Unsupported("expert_gating_func " + std::to_string(f) + ", sqrt-softplus (4) is implemented");
  for (const char* key : {"expert_group_count", "expert_group_used_count"})
    if (p.integer_or(key, 0) > 1) throw Unsupported(std::string(key) + " above 1 is not implemented");
  return s;
}

// Radians per position of the R/2 rotated pairs: of window-only layers, and of compressing layers, whose base differs
// and whose long wavelengths YaRN stretches (without its magnitude factor).
struct Frequencies {
  std::vector<float> window, compressed;
};

Frequencies read_frequencies(const Shape& s, HyperParams& p) {
  const double base = p.real_or("rope.freq_base", 10000.0),
               far = p.real_or("attention.compress_rope_freq_base", 160000.0);
  const std::string kind = p.text_or("rope.scaling.type", "yarn");
  if (kind != "yarn") throw Unsupported("rope.scaling.type '" + kind + "' is not implemented");
  const double factor = p.real_or("rope.scaling.factor", 16),
               original = p.real_or("rope.scaling.original_context_length", 65536);
  const double fast = p.real_or("rope.scaling.yarn_beta_fast", 32), slow = p.real_or("rope.scaling.yarn_beta_slow", 1);
  if (!(base > 1 && far > 1 && factor >= 1 && original > 1 && fast > slow && slow > 0))
    throw Invalid("rope.freq_base, attention.compress_rope_freq_base and rope.scaling.* contradict each other");
  const auto dim = static_cast<double>(s.rotated);
  const auto turning = [&](double turns) {
    return dim * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(far));
  };
  const double low = std::max(std::floor(turning(fast)), 0.0), high = std::min(std::ceil(turning(slow)), dim - 1);
  Frequencies f;
  for (int64_t i = 0; i < s.rotated / 2; ++i) {
    const double share = 2.0 * static_cast<double>(i) / dim, plain = std::pow(far, -share);
    const double keep = 1 - std::clamp((static_cast<double>(i) - low) / std::max(high - low, 0.001), 0.0, 1.0);
    f.window.push_back(static_cast<float>(std::pow(base, -share)));
    f.compressed.push_back(static_cast<float>(keep * plain + (1 - keep) * plain / factor));
  }
  return f;
}

// Tensors of one layer, as the file holds them (views) or as the backend does (weights).
template <class M, class Stack>
struct LayerTensors {
  M hc_attn_fn, hc_attn_base, hc_attn_scale, hc_ffn_fn, hc_ffn_base, hc_ffn_scale;
  M attn_norm, q_a, q_a_norm, q_b, kv, kv_norm, sinks, output_a, output_b;
  Stack compressor;  // keys, gates
  M compressor_bias, compressor_norm;
  M index_q, index_weight;
  Stack index_compressor;
  M index_bias, index_norm;
  M ffn_norm, router, router_bias, router_table;
  Stack experts_gate_up, shared_gate_up;
  Stack experts_down;
  M shared_down;
};
using LayerFile = LayerTensors<MatrixView, std::vector<MatrixView>>;
using LayerWeights = LayerTensors<std::unique_ptr<Weight>, std::unique_ptr<Weight>>;

// Where a layer keeps its state, as indices into the list of buffers.
struct LayerState {
  size_t window = 0, ring = 0, rows = 0, index_ring = 0, index_rows = 0;
};

class DeepSeek4 final : public Model {
 public:
  DeepSeek4(HyperParams params, TensorTable tensors)
      : shape_(read_shape(params)), freq_(read_frequencies(shape_, params)) {
    const Shape& s = shape_;
    embedding_ = tensors.matrix("token_embd.weight", s.vocab, s.width);
    output_ = tensors.matrix("output.weight", s.vocab, s.width);
    output_norm_ = tensors.vector("output_norm.weight", s.width);
    head_fn_ = tensors.matrix("output_hc_fn.weight", s.streams, s.streams * s.width);
    head_base_ = tensors.vector("output_hc_base.weight", s.streams);
    head_scale_ = tensors.vector("output_hc_scale.weight", 1);
    for (int64_t l = 0; l < s.layers; ++l) {
      files_.push_back(read_layer(tensors, l));
      declare_state(l);
    }
    for (const char* key : {"context_length", "feed_forward_length", "embedding_length_out", "nextn_predict_layers"})
      params.ignore(key);  // advice, sizes of other families, and layers that only draft
    tensors.refuse_untaken();
    params.refuse_unread();
  }

  std::string family() const override { return "deepseek4"; }
  int64_t vocab() const override { return shape_.vocab; }
  int64_t layers() const override { return shape_.layers; }
  int64_t width() const override { return shape_.streams * shape_.width; }
  const std::vector<StateSpec>& state_specs() const override { return specs_; }

  size_t workspace_bytes(int64_t rows, int64_t wanted) const override {
    const Shape& s = shape_;
    const int64_t compressor = 4 * (s.head_dim + s.index_dim);
    const int64_t per_row = (2 * s.streams + 4) * s.width + 2 * s.rotated + s.mix() + s.q_rank + 2 * s.q() +
                            s.head_dim + compressor + s.index_heads * (s.index_dim + 1) + s.index_top_k +
                            s.out_groups * s.out_rank + s.experts + 2 * s.used + s.shared * s.ff +
                            s.used * (s.ff + s.width);
    return static_cast<size_t>(rows * per_row + wanted * ((s.streams + 2) * s.width + s.vocab)) * sizeof(float);
  }

  void load(Ops& ops, const LoadProgress& progress) override {
    ops_ = &ops;
    latent_ = ops.latent();
    if (!latent_) throw Unsupported("backend " + ops.name() + " has no operations for the deepseek4 family");
    const auto total = static_cast<size_t>(2 + shape_.layers);
    embed_ = one(embedding_, WeightUse::Embedding);
    head_ = one(output_);
    final_norm_ = one(output_norm_);
    hc_fn_ = one(head_fn_), hc_base_ = one(head_base_), hc_scale_ = one(head_scale_);
    if (progress) progress(2, total);
    for (size_t l = 0; l < files_.size(); ++l) {
      try {
        load_layer(files_[l]);
      } catch (const Invalid& e) {
        throw Invalid("blk." + std::to_string(l) + ": " + e.what());
      }
      if (progress) progress(3 + l, total);
    }
  }

  size_t resident_bytes() const override { return resident_; }

  Tensor forward(const Batch& batch) override {
    const Shape& s = shape_;
    const auto rows = static_cast<int64_t>(batch.ids.size());
    ops_->reset_scratch();
    Activations a;
    a.streams = ops_->scratch(rows, s.streams * s.width);  // X [T, n H]
    a.rope = ops_->scratch(rows, s.rotated);               // [T, cos | sin] of window-only layers
    a.rope_far = ops_->scratch(rows, s.rotated);           // of compressing layers
    a.mix = ops_->scratch(rows, s.mix());                  // [T, post | M]
    a.x = ops_->scratch(rows, s.width);                    // [T, H] into a sub-layer
    a.out = ops_->scratch(rows, s.width);                  // [T, H] out of it
    a.q_low = ops_->scratch(rows, s.q_rank);
    a.q = ops_->scratch(rows, s.q());        // [T, heads D]
    a.kv = ops_->scratch(rows, s.head_dim);  // [T, D]
    a.attended = ops_->scratch(rows, s.q());
    a.low = ops_->scratch(rows, s.out_groups * s.out_rank);
    a.compressor = ops_->scratch(rows, 4 * s.head_dim);
    a.index_compressor = ops_->scratch(rows, 4 * s.index_dim);
    a.index_q = ops_->scratch(rows, s.index_heads * s.index_dim);
    a.index_weight = ops_->scratch(rows, s.index_heads);
    a.router = ops_->scratch(rows, s.experts);
    a.hidden = ops_->scratch(rows, s.shared * s.ff);

    for (int64_t j = 0; j < s.streams; ++j) ops_->embed(*embed_, batch.ids, a.streams.columns(j * s.width, s.width));
    latent_->rope_table_f32(batch.rows, freq_.window, a.rope);
    latent_->rope_table_f32(batch.rows, freq_.compressed, a.rope_far);
    for (size_t l = 0; l < layers_.size(); ++l) {
      if (batch.probe) batch.probe(static_cast<int64_t>(l), a.streams);
      const LayerWeights& w = layers_[l];
      latent_->hc_in_norm(*ops_, hyper(w.hc_attn_fn, w.hc_attn_base, w.hc_attn_scale), a.streams, norm(w.attn_norm),
                          a.x, a.mix);
      attention(w, states_[l], s.ratios[l], batch.rows, a);
      latent_->hc_out(a.out, a.mix, s.streams, a.streams);

      latent_->hc_in_norm(*ops_, hyper(w.hc_ffn_fn, w.hc_ffn_base, w.hc_ffn_scale), a.streams, norm(w.ffn_norm), a.x,
                          a.mix);
      experts(w, batch.ids, a);
      latent_->hc_out(a.out, a.mix, s.streams, a.streams);
    }
    if (batch.probe) batch.probe(s.layers, a.streams);
    return head(a.streams, batch.wanted);
  }

 private:
  struct Activations {
    Tensor streams, rope, rope_far, mix, x, out, q_low, q, kv, attended, low, compressor, index_compressor, index_q,
        index_weight, router, hidden;
  };

  LayerFile read_layer(TensorTable& tensors, int64_t l) const {
    const Shape& s = shape_;
    const int64_t ratio = s.ratios[static_cast<size_t>(l)], n = s.streams, coefficients = 2 * n + n * n;
    const std::string prefix = "blk." + std::to_string(l) + ".";
    const auto matrix = [&](const char* name, int64_t rows, int64_t cols) {
      return tensors.matrix(prefix + name, rows, cols);
    };
    const auto vector = [&](const char* name, int64_t dim) { return tensors.vector(prefix + name, dim); };
    LayerFile f;
    f.hc_attn_fn = matrix("hc_attn_fn.weight", coefficients, n * s.width);
    f.hc_attn_base = vector("hc_attn_base.weight", coefficients);
    f.hc_attn_scale = vector("hc_attn_scale.weight", 3);
    f.hc_ffn_fn = matrix("hc_ffn_fn.weight", coefficients, n * s.width);
    f.hc_ffn_base = vector("hc_ffn_base.weight", coefficients);
    f.hc_ffn_scale = vector("hc_ffn_scale.weight", 3);

    f.attn_norm = vector("attn_norm.weight", s.width);
    f.q_a = matrix("attn_q_a.weight", s.q_rank, s.width);
    f.q_a_norm = vector("attn_q_a_norm.weight", s.q_rank);
    f.q_b = matrix("attn_q_b.weight", s.q(), s.q_rank);
    f.kv = matrix("attn_kv.weight", s.head_dim, s.width);
    f.kv_norm = vector("attn_kv_a_norm.weight", s.head_dim);
    f.sinks = vector("attn_sinks.weight", s.heads);
    f.output_a = matrix("attn_output_a.weight", s.out_groups * s.out_rank, s.q() / s.out_groups);
    if (f.output_a.scales && s.out_rank < 2)
      throw Unsupported(prefix + "attn_output_a.weight: scales beside groups of one row");
    f.output_b = matrix("attn_output_b.weight", s.width, s.out_groups * s.out_rank);
    if (ratio != 0) {
      const int64_t dim = s.lanes(ratio) * s.head_dim;
      f.compressor = {matrix("attn_compressor_kv.weight", dim, s.width),
                      matrix("attn_compressor_gate.weight", dim, s.width)};
      f.compressor_bias = matrix("attn_compressor_ape.weight", ratio, dim);
      f.compressor_norm = vector("attn_compressor_norm.weight", s.head_dim);
    }
    if (ratio == 4) {
      f.index_q = matrix("indexer.attn_q_b.weight", s.index_heads * s.index_dim, s.q_rank);
      f.index_weight = matrix("indexer.proj.weight", s.index_heads, s.width);
      f.index_compressor = {matrix("indexer_compressor_kv.weight", 2 * s.index_dim, s.width),
                            matrix("indexer_compressor_gate.weight", 2 * s.index_dim, s.width)};
      f.index_bias = matrix("indexer_compressor_ape.weight", 4, 2 * s.index_dim);
      f.index_norm = vector("indexer_compressor_norm.weight", s.index_dim);
    }

    f.ffn_norm = vector("ffn_norm.weight", s.width);
    f.router = matrix("ffn_gate_inp.weight", s.experts, s.width);
    const auto bias = tensors.vector_if_present(prefix + "exp_probs_b.bias", s.experts);
    if (l < s.hash_layers) {
      f.router_table = matrix("ffn_gate_tid2eid.weight", s.vocab, s.used);  // a bias beside it has no effect
      check_table(f.router_table, prefix + "ffn_gate_tid2eid.weight");
    } else if (bias) {
      f.router_bias = *bias;
    } else {
      throw Invalid(prefix + "exp_probs_b.bias: tensor is missing");
    }
    const auto gate = tensors.slabs(prefix + "ffn_gate_exps.weight", s.experts, s.ff, s.width);
    const auto up = tensors.slabs(prefix + "ffn_up_exps.weight", s.experts, s.ff, s.width);
    for (size_t e = 0; e < gate.size(); ++e) f.experts_gate_up.insert(f.experts_gate_up.end(), {gate[e], up[e]});
    f.experts_down = tensors.slabs(prefix + "ffn_down_exps.weight", s.experts, s.width, s.ff);
    f.shared_gate_up = {matrix("ffn_gate_shexp.weight", s.shared * s.ff, s.width),
                        matrix("ffn_up_shexp.weight", s.shared * s.ff, s.width)};
    f.shared_down = matrix("ffn_down_shexp.weight", s.width, s.shared * s.ff);
    return f;
  }

  void check_table(const MatrixView& table, const std::string& name) const {
    if (table.type != DType::I32) throw Unsupported(name + ": expected type I32");
    const auto* ids = static_cast<const int32_t*>(table.data);
    for (int64_t i = 0; i < table.rows * table.cols; ++i) {
      if (ids[i] < 0 || ids[i] >= shape_.experts)
        throw Invalid(name + ": entry " + std::to_string(i) + " is " + std::to_string(ids[i]) + ", there are " +
                      std::to_string(shape_.experts) + " experts");
      for (int64_t j = i - i % table.cols; j < i; ++j)
        if (ids[j] == ids[i])
          throw Invalid(name + ": row " + std::to_string(i / table.cols) + " holds expert " + std::to_string(ids[i]) +
                        " twice");
    }
  }

  size_t declare(const std::string& name, StateKind kind, int64_t width, int64_t ratio, int64_t need) {
    specs_.push_back({.name = name,
                      .kind = kind,
                      .type = DType::F32,
                      .width = width,
                      .ratio = ratio,
                      .capacity = kind == StateKind::Ring ? need + kRewindSlack : 0,
                      .need = need});
    return specs_.size() - 1;
  }

  void declare_state(int64_t l) {
    const Shape& s = shape_;
    const int64_t ratio = s.ratios[static_cast<size_t>(l)];
    const std::string layer = "." + std::to_string(l);
    LayerState at;
    at.window = declare("window" + layer, StateKind::Ring, s.head_dim, 1, s.window);
    if (ratio != 0) {
      // A ratio-4 window also pools the window before it.
      const int64_t need = ratio == 4 ? 8 : ratio;
      at.ring = declare("open" + layer, StateKind::Ring, 2 * s.lanes(ratio) * s.head_dim, 1, need);
      at.rows = declare("rows" + layer, StateKind::Append, s.head_dim, ratio, 0);
      if (ratio == 4) {
        at.index_ring = declare("index_open" + layer, StateKind::Ring, 4 * s.index_dim, 1, need);
        at.index_rows = declare("index_rows" + layer, StateKind::Append, s.index_dim, ratio, 0);
      }
    }
    states_.push_back(at);
  }

  std::unique_ptr<Weight> keep(std::unique_ptr<Weight> w) {
    resident_ += w->resident_bytes();
    return w;
  }
  std::unique_ptr<Weight> one(const MatrixView& view, WeightUse use = WeightUse::Linear) {
    return view.data ? keep(ops_->load({&view, 1}, use)) : nullptr;
  }
  std::unique_ptr<Weight> stack(const std::vector<MatrixView>& parts, WeightUse use = WeightUse::Linear) {
    return parts.empty() ? nullptr : keep(ops_->load(PlainViews(parts).views(), use));
  }
  // A matrix that the file may hold with scales beside it.
  std::unique_ptr<Weight> scaled(const MatrixView& view) {
    return view.data ? keep(ops_->load(PlainViews({&view, 1}).views(), WeightUse::Linear)) : nullptr;
  }

  void load_layer(const LayerFile& f) {
    LayerWeights w;
    w.hc_attn_fn = one(f.hc_attn_fn), w.hc_attn_base = one(f.hc_attn_base), w.hc_attn_scale = one(f.hc_attn_scale);
    w.hc_ffn_fn = one(f.hc_ffn_fn), w.hc_ffn_base = one(f.hc_ffn_base), w.hc_ffn_scale = one(f.hc_ffn_scale);
    w.attn_norm = one(f.attn_norm);
    w.q_a = scaled(f.q_a), w.q_a_norm = one(f.q_a_norm), w.q_b = scaled(f.q_b);
    w.kv = scaled(f.kv), w.kv_norm = one(f.kv_norm), w.sinks = one(f.sinks);
    w.output_a = keep(latent_->load_grouped(PlainViews({&f.output_a, 1}).front(), shape_.out_groups));
    w.output_b = scaled(f.output_b);
    w.compressor = stack(f.compressor);
    w.compressor_bias = one(f.compressor_bias), w.compressor_norm = one(f.compressor_norm);
    w.index_q = scaled(f.index_q), w.index_weight = one(f.index_weight);
    w.index_compressor = stack(f.index_compressor);
    w.index_bias = one(f.index_bias), w.index_norm = one(f.index_norm);
    w.ffn_norm = one(f.ffn_norm), w.router = one(f.router), w.router_bias = one(f.router_bias);
    if (f.router_table.data) w.router_table = keep(latent_->load_table(f.router_table));
    w.experts_gate_up =
        keep(latent_->load_experts(PlainViews(f.experts_gate_up).views(), shape_.experts, WeightUse::SwiGLU));
    w.experts_down = keep(latent_->load_experts(PlainViews(f.experts_down).views(), shape_.experts, WeightUse::Linear));
    w.shared_gate_up = stack(f.shared_gate_up, WeightUse::SwiGLU), w.shared_down = scaled(f.shared_down);
    layers_.push_back(std::move(w));
  }

  Norm norm(const std::unique_ptr<Weight>& gain) const { return {gain.get(), shape_.norm_eps}; }

  HyperConnection hyper(const std::unique_ptr<Weight>& fn, const std::unique_ptr<Weight>& base,
                        const std::unique_ptr<Weight>& scale) const {
    return {fn.get(), base.get(), scale.get(), shape_.streams, shape_.sinkhorn, shape_.norm_eps, shape_.hc_eps};
  }

  // out = Wb Wa_grouped rope^-1( attend( rope(rms(Wqb rms(Wqa x))), window rows, compressed rows ) )
  void attention(const LayerWeights& w, const LayerState& at, int64_t ratio, std::span<const RowRef> rows,
                 Activations& a) {
    const Shape& s = shape_;
    const Tensor rope = ratio == 0 ? a.rope : a.rope_far;
    ops_->linear(*w.q_a, a.x, nullptr, nullptr, a.q_low);  // [T, q rank]
    ops_->rms_norm(a.q_low, norm(w.q_a_norm), a.q_low);
    ops_->linear(*w.q_b, a.q_low, nullptr, nullptr, a.q);  // [T, heads D]
    latent_->head_norm(a.q, s.heads, s.norm_eps);
    latent_->rope_tail(a.q, rope, s.heads, false);

    ops_->linear(*w.kv, a.x, nullptr, nullptr, a.kv);  // [T, D], key and value
    ops_->rms_norm(a.kv, norm(w.kv_norm), a.kv);
    latent_->rope_tail(a.kv, rope, 1, false);
    if (s.rounding) latent_->round_rows(a.kv, 1, RowRounding::Fp8, s.rotated);

    // A token sees the row that it closes, so rows are compressed first.
    Selection selection;
    bool selected = false;
    if (ratio != 0) compress(w, at, ratio, rows, a);
    if (ratio == 4) selected = select(w, at, rows, rope, a, selection);

    LatentAttention attend{.window_ring = at.window,
                           .window = s.window,
                           .compressed = ratio != 0,
                           .rows = at.rows,
                           .ratio = std::max<int64_t>(1, ratio),
                           .sinks = w.sinks.get(),
                           .heads = s.heads,
                           .head_dim = s.head_dim,
                           .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.head_dim)))};
    latent_->latent_attention(a.q, a.kv, rows, attend, selected ? &selection : nullptr, a.attended);
    latent_->ring_store(a.kv, rows, at.window);
    latent_->rope_tail(a.attended, rope, s.heads, true);
    latent_->grouped_linear(*w.output_a, a.attended, s.out_groups, a.low);  // [T, groups * rank]
    ops_->linear(*w.output_b, a.low, nullptr, nullptr, a.out);              // [T, H]
  }

  void compress(const LayerWeights& w, const LayerState& at, int64_t ratio, std::span<const RowRef> rows,
                Activations& a) {
    const Shape& s = shape_;
    Tensor kg = a.compressor.columns(0, 2 * s.lanes(ratio) * s.head_dim);
    ops_->linear(*w.compressor, a.x, nullptr, nullptr, kg);
    latent_->compress(kg, rows,
                      {.ring = at.ring,
                       .rows = at.rows,
                       .bias = w.compressor_bias.get(),
                       .gain = w.compressor_norm.get(),
                       .freq = freq_.compressed,
                       .ratio = ratio,
                       .dim = s.head_dim,
                       .eps = s.norm_eps,
                       .rounding = s.rounding ? RowRounding::Fp8 : RowRounding::None});
    if (ratio != 4) return;
    ops_->linear(*w.index_compressor, a.x, nullptr, nullptr, a.index_compressor);
    latent_->compress(a.index_compressor, rows,
                      {.ring = at.index_ring,
                       .rows = at.index_rows,
                       .bias = w.index_bias.get(),
                       .gain = w.index_norm.get(),
                       .freq = freq_.compressed,
                       .ratio = ratio,
                       .dim = s.index_dim,
                       .eps = s.norm_eps,
                       .rounding = s.rounding ? RowRounding::HadamardFp4 : RowRounding::None});
  }

  // The indexer's choice, needed only where more rows exist than it may choose. False: every row sees all.
  bool select(const LayerWeights& w, const LayerState& at, std::span<const RowRef> rows, const Tensor& rope,
              Activations& a, Selection& selection) {
    const Shape& s = shape_;
    if ((ops_->horizon(rows) + 1) / 4 <= s.index_top_k) return false;
    ops_->linear(*w.index_q, a.q_low, nullptr, nullptr, a.index_q);  // [T, index heads * index dim]
    latent_->rope_tail(a.index_q, rope, s.index_heads, false);
    if (s.rounding) latent_->round_rows(a.index_q, s.index_heads, RowRounding::HadamardFp4, s.rotated);
    // The trained weights carry 1 / sqrt(index heads * index dim), which changes no order.
    ops_->linear(*w.index_weight, a.x, nullptr, nullptr, a.index_weight);
    selection = latent_->select(a.index_q, a.index_weight, rows, at.index_rows, 4, s.index_heads, s.index_top_k);
    return true;
  }

  // out = shared(x) + sum_k weight_k expert_k(x)
  void experts(const LayerWeights& w, std::span<const int32_t> ids, Activations& a) {
    const Shape& s = shape_;
    ops_->linear(*w.router, a.x, nullptr, nullptr, a.router);  // [T, E]
    const Routing routing =
        latent_->route(a.router, w.router_bias.get(), w.router_table.get(), ids, s.used, s.route_scale);
    latent_->linear_swiglu_clamped(*w.shared_gate_up, a.x, s.limit, a.hidden);
    ops_->linear(*w.shared_down, a.hidden, nullptr, nullptr, a.out);
    latent_->moe(*w.experts_gate_up, *w.experts_down, a.x, routing, s.limit, a.out);
  }

  // Wout rms(hc_head(X)) of the wanted rows, [wanted, vocab]
  Tensor head(const Tensor& streams, std::span<const int32_t> wanted) {
    const Shape& s = shape_;
    const auto n = static_cast<int64_t>(wanted.size());
    if (n == 0) return {};
    Tensor last = ops_->scratch(n, s.streams * s.width), y = ops_->scratch(n, s.width),
           logits = ops_->scratch(n, s.vocab);
    ops_->gather(streams, wanted, last);
    latent_->hc_head(hyper(hc_fn_, hc_base_, hc_scale_), last, y);
    const Norm pre = norm(final_norm_);
    ops_->linear(*head_, y, &pre, nullptr, logits);
    return logits;
  }

  Shape shape_;
  Frequencies freq_;
  std::vector<StateSpec> specs_;
  std::vector<LayerState> states_;
  MatrixView embedding_, output_, output_norm_, head_fn_, head_base_, head_scale_;
  std::vector<LayerFile> files_;

  Ops* ops_ = nullptr;
  LatentOps* latent_ = nullptr;
  size_t resident_ = 0;
  std::unique_ptr<Weight> embed_, head_, final_norm_, hc_fn_, hc_base_, hc_scale_;
  std::vector<LayerWeights> layers_;
};

}  // namespace

std::unique_ptr<Model> make_deepseek4(HyperParams params, TensorTable tensors) {
  return std::make_unique<DeepSeek4>(std::move(params), std::move(tensors));
}

}  // namespace ds4
