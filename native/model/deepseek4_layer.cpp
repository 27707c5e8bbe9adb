#include "model/deepseek4_layer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "quant/scaled.h"

namespace ds4::deepseek4 {
namespace {

// Lanes (Ops::beside) of a layer.
constexpr int kKeyLane = 0;  // what the token adds: its key row; of few rows also compressed rows
constexpr int kRowLane = 1;  // compressed rows of many, the indexer of few; the smaller of routing and shared expert

// Steps of up to so many rows read every matrix once: products follow each other, each at the memory's whole rate, and
// what is small runs beside the largest of them.
constexpr size_t kInOrder = 32;

}  // namespace

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
  s.ahead = p.has("draft.ahead") ? p.size("draft.ahead", 0, kMostAhead) : 0;
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

size_t declare(std::vector<StateSpec>& specs, const std::string& name, StateKind kind, int64_t width, int64_t ratio,
               int64_t need, int64_t slack, int64_t ahead) {
  specs.push_back({.name = name,
                   .kind = kind,
                   .type = DType::F32,
                   .width = width,
                   .ratio = ratio,
                   .capacity = kind == StateKind::Ring ? need + slack + ahead : 0,
                   .need = need,
                   .spare = ahead});
  return specs.size() - 1;
}

// ---- tensors

LayerFile Layers::read(TensorTable& tensors, const std::string& prefix, int64_t ratio, bool hashed) const {
  const Shape& s = shape_;
  const int64_t n = s.streams, coefficients = 2 * n + n * n;
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
  f.q_kv = {f.q_a, f.kv};
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
    f.compressor.push_back(matrix("indexer_compressor_kv.weight", 2 * s.index_dim, s.width));
    f.compressor.push_back(matrix("indexer_compressor_gate.weight", 2 * s.index_dim, s.width));
    f.index_bias = matrix("indexer_compressor_ape.weight", 4, 2 * s.index_dim);
    f.index_norm = vector("indexer_compressor_norm.weight", s.index_dim);
  }

  f.ffn_norm = vector("ffn_norm.weight", s.width);
  f.router = matrix("ffn_gate_inp.weight", s.experts, s.width);
  const auto bias = tensors.vector_if_present(prefix + "exp_probs_b.bias", s.experts);
  if (hashed) {
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

void Layers::check_table(const MatrixView& table, const std::string& name) const {
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

void Layers::use(Ops& ops) {
  ops_ = &ops;
  latent_ = ops.latent();
  if (!latent_) throw Unsupported("backend " + ops.name() + " has no operations for the deepseek4 family");
}

std::unique_ptr<Weight> Layers::keep(std::unique_ptr<Weight> w) {
  resident_ += w->resident_bytes();
  return w;
}

std::unique_ptr<Weight> Layers::one(const MatrixView& view, WeightUse use) {
  return view.data ? keep(ops_->load({&view, 1}, use)) : nullptr;
}

std::unique_ptr<Weight> Layers::stack(const std::vector<MatrixView>& parts, WeightUse use) {
  return parts.empty() ? nullptr : keep(ops_->load(PlainViews(parts).views(), use));
}

std::unique_ptr<Weight> Layers::scaled(const MatrixView& view, WeightUse use) {
  return view.data ? keep(ops_->load(PlainViews({&view, 1}).views(), use)) : nullptr;
}

LayerWeights Layers::load(const LayerFile& f, bool keys_alone) {
  LayerWeights w;
  w.hc_attn_fn = one(f.hc_attn_fn, WeightUse::Precise), w.hc_attn_base = one(f.hc_attn_base),
  w.hc_attn_scale = one(f.hc_attn_scale);
  w.hc_ffn_fn = one(f.hc_ffn_fn, WeightUse::Precise), w.hc_ffn_base = one(f.hc_ffn_base),
  w.hc_ffn_scale = one(f.hc_ffn_scale);
  w.attn_norm = one(f.attn_norm);
  if (keys_alone)
    w.q_a = scaled(f.q_a), w.kv = scaled(f.kv);
  else
    w.q_kv = stack(f.q_kv);
  w.q_a_norm = one(f.q_a_norm), w.q_b = scaled(f.q_b);
  w.kv_norm = one(f.kv_norm), w.sinks = one(f.sinks);
  w.output_a = keep(latent_->load_grouped(PlainViews({&f.output_a, 1}).front(), shape_.out_groups));
  w.output_b = scaled(f.output_b);
  w.compressor = stack(f.compressor);
  w.compressor_bias = one(f.compressor_bias), w.compressor_norm = one(f.compressor_norm);
  w.index_q = scaled(f.index_q), w.index_weight = one(f.index_weight, WeightUse::Precise);
  w.index_bias = one(f.index_bias), w.index_norm = one(f.index_norm);
  w.ffn_norm = one(f.ffn_norm), w.router = one(f.router, WeightUse::Precise), w.router_bias = one(f.router_bias);
  if (f.router_table.data) w.router_table = keep(latent_->load_table(f.router_table));
  w.experts_gate_up =
      keep(latent_->load_experts(PlainViews(f.experts_gate_up).views(), shape_.experts, WeightUse::SwiGLU));
  w.experts_down = keep(latent_->load_experts(PlainViews(f.experts_down).views(), shape_.experts, WeightUse::Linear));
  w.shared_gate_up = stack(f.shared_gate_up, WeightUse::SwiGLU), w.shared_down = scaled(f.shared_down);
  return w;
}

// ---- one step

int64_t Layers::floats_per_row() const {
  const Shape& s = shape_;
  const int64_t compressor = 4 * (s.head_dim + s.index_dim);
  return (2 * s.streams + 4) * s.width + 2 * s.rotated + s.mix() + s.q_rank + 2 * s.q() + s.head_dim + compressor +
         s.index_heads * (s.index_dim + 1) + s.index_top_k + s.out_groups * s.out_rank + s.experts + 2 * s.used +
         s.shared * s.ff + s.used * (s.ff + s.width);
}

Activations Layers::activations(int64_t rows, bool compressing) const {
  const Shape& s = shape_;
  const auto scratch = [&](int64_t dim) { return ops_->scratch(rows, dim); };
  Activations a;
  a.streams = scratch(s.streams * s.width);
  a.rope = scratch(s.rotated);
  a.mix = scratch(s.mix());
  a.x = scratch(s.width);
  a.out = scratch(s.width);
  a.q_kv = scratch(s.q_rank + s.head_dim);
  a.q_low = a.q_kv.columns(0, s.q_rank), a.kv = a.q_kv.columns(s.q_rank, s.head_dim);
  a.q = scratch(s.q());
  a.attended = scratch(s.q());
  a.low = scratch(s.out_groups * s.out_rank);
  if (compressing) {
    a.rope_far = scratch(s.rotated);
    a.compressor = scratch(4 * (s.head_dim + s.index_dim));
    a.index_q = scratch(s.index_heads * s.index_dim);
    a.index_weight = scratch(s.index_heads);
  }
  a.router = scratch(s.experts);
  a.hidden = scratch(s.shared * s.ff);
  return a;
}

void Layers::enter_attention(const LayerWeights& w, const Tensor& streams, Activations& a) {
  latent_->hc_in_norm(*ops_, hyper(w.hc_attn_fn, w.hc_attn_base, w.hc_attn_scale), streams, norm(w.attn_norm), a.x,
                      a.mix);
}

void Layers::low_product(const LayerWeights& w, Activations& a) {
  if (w.q_kv)
    ops_->linear(*w.q_kv, a.x, nullptr, nullptr, a.q_kv);  // [T, q rank + D]
  else
    ops_->linear(*w.q_a, a.x, nullptr, nullptr, a.q_low);  // [T, q rank]
}

void Layers::finish_low_queries(const LayerWeights& w, Activations& a) {
  ops_->rms_norm(a.q_low, norm(w.q_a_norm), a.q_low);
}

void Layers::high_queries(const LayerWeights& w, const Tensor& rope, Activations& a) {
  ops_->linear(*w.q_b, a.q_low, nullptr, nullptr, a.q);  // [T, heads D]
  latent_->head_norm_rope(a.q, shape_.heads, shape_.norm_eps, rope);
}

void Layers::keys(const LayerWeights& w, const Tensor& x, const Tensor& rope, Tensor kv) {
  ops_->linear(*w.kv, x, nullptr, nullptr, kv);  // [T, D], key and value
  finish_keys(w, rope, kv);
}

void Layers::finish_keys(const LayerWeights& w, const Tensor& rope, Tensor kv) {
  latent_->key_row(*ops_, kv, norm(w.kv_norm), rope, shape_.rounding ? RowRounding::Fp8 : RowRounding::None);
}

LatentAttention Layers::attend_args(const LayerWeights& w, const LayerState& at, int64_t ratio) const {
  return {.window_ring = at.window,
          .window = shape_.window,
          .compressed = ratio != 0,
          .rows = at.rows,
          .ratio = std::max<int64_t>(1, ratio),
          .sinks = w.sinks.get(),
          .heads = shape_.heads,
          .head_dim = shape_.head_dim,
          .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim))),
          .short_columns = shape_.rounding ? shape_.head_dim - shape_.rotated : 0};
}

void Layers::attention_out(const LayerWeights& w, Activations& a) {
  latent_->grouped_linear(*w.output_a, a.attended, shape_.out_groups, a.low);  // [T, groups * rank]
  ops_->linear(*w.output_b, a.low, nullptr, nullptr, a.out);                   // [T, H]
}

void Layers::attention(const LayerWeights& w, const LayerState& at, int64_t ratio, std::span<const RowRef> rows,
                       Activations& a) {
  const Tensor rope = ratio == 0 ? a.rope : a.rope_far;
  const bool selected = ratio == 4 && chooses(rows);
  Selection selection;
  // Where a ring has room for the step's rows beside all that their windows see, they are stored at once.
  const bool stored = rows.size() <= static_cast<size_t>(kRewindSlack);
  const auto keys_of_step = [&] {
    finish_keys(w, rope, a.kv);
    if (stored) latent_->ring_store(a.kv, rows, at.window);
  };
  // A token sees the row that it closes, so rows are compressed first.
  if (rows.size() <= kInOrder) {
    // Products one after the other, what needs little of the device beside them.
    if (ratio != 0) {
      compressor(w, ratio, a);
      ops_->beside(kKeyLane, [&] { compress_rows(w, at, ratio, rows, a); });
    }
    if (ratio == 4)
      ops_->beside(kRowLane, [&] {
        if (selected) index_weights(w, a);
        compress_index(w, at, rows, a);
      });
    low_product(w, a);
    ops_->beside(kKeyLane, keys_of_step);
    finish_low_queries(w, a);
    if (selected) {
      ops_->linear(*w.index_q, a.q_low, nullptr, nullptr, a.index_q);
      ops_->beside(kRowLane, [&] {
        finish_index_queries(rope, a);
        selection = select(at, rows, a);
      });
    }
    high_queries(w, rope, a);
    ops_->join();
  } else {
    if (ratio != 0)
      ops_->beside(kRowLane, [&] {
        compressor(w, ratio, a);
        compress_rows(w, at, ratio, rows, a);
        if (ratio == 4) compress_index(w, at, rows, a);
      });
    low_product(w, a);
    ops_->beside(kKeyLane, keys_of_step);
    finish_low_queries(w, a);
    if (selected)
      ops_->beside(kKeyLane, [&] {
        ops_->linear(*w.index_q, a.q_low, nullptr, nullptr, a.index_q);
        finish_index_queries(rope, a);
        index_weights(w, a);
      });
    high_queries(w, rope, a);
    ops_->join();
    if (selected) selection = select(at, rows, a);
  }

  latent_->latent_attention_rope(a.q, a.kv, rows, attend_args(w, at, ratio), selected ? &selection : nullptr, rope,
                                 a.attended);
  if (!stored) ops_->beside(kKeyLane, [&] { latent_->ring_store(a.kv, rows, at.window); });
  attention_out(w, a);
}

void Layers::compressor(const LayerWeights& w, int64_t ratio, Activations& a) {
  ops_->linear(*w.compressor, a.x, nullptr, nullptr,
               a.compressor.columns(0, own_columns(ratio) + index_columns(ratio)));
}

void Layers::compress_rows(const LayerWeights& w, const LayerState& at, int64_t ratio, std::span<const RowRef> rows,
                           Activations& a) {
  const Shape& s = shape_;
  latent_->compress(a.compressor.columns(0, own_columns(ratio)), rows,
                    {.ring = at.ring,
                     .rows = at.rows,
                     .bias = w.compressor_bias.get(),
                     .gain = w.compressor_norm.get(),
                     .freq = freq_.compressed,
                     .ratio = ratio,
                     .dim = s.head_dim,
                     .eps = s.norm_eps,
                     .rounding = s.rounding ? RowRounding::Fp8 : RowRounding::None});
}

void Layers::compress_index(const LayerWeights& w, const LayerState& at, std::span<const RowRef> rows, Activations& a) {
  const Shape& s = shape_;
  const int64_t ratio = 4;
  latent_->compress(a.compressor.columns(own_columns(ratio), index_columns(ratio)), rows,
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

// Whether the indexer chooses: only where more rows exist than it may. Otherwise every row sees all.
bool Layers::chooses(std::span<const RowRef> rows) const {
  return (ops_->horizon(rows) + 1) / 4 > shape_.index_top_k;
}

// index_q: [T, index heads * index dim].
void Layers::finish_index_queries(const Tensor& rope, Activations& a) {
  latent_->index_query(a.index_q, rope, shape_.index_heads,
                       shape_.rounding ? RowRounding::HadamardFp4 : RowRounding::None);
}

// The trained weights carry 1 / sqrt(index heads * index dim), which changes no order.
void Layers::index_weights(const LayerWeights& w, Activations& a) {
  ops_->linear(*w.index_weight, a.x, nullptr, nullptr, a.index_weight);
}

Selection Layers::select(const LayerState& at, std::span<const RowRef> rows, const Activations& a) {
  const Shape& s = shape_;
  return s.rounding
             ? latent_->select_short(a.index_q, a.index_weight, rows, at.index_rows, 4, s.index_heads, s.index_top_k)
             : latent_->select(a.index_q, a.index_weight, rows, at.index_rows, 4, s.index_heads, s.index_top_k);
}

// out = shared(x) + sum_k weight_k expert_k(x)
void Layers::experts(const LayerWeights& w, std::span<const int32_t> ids, Activations& a) {
  const Shape& s = shape_;
  const auto shared = [&] {
    latent_->linear_swiglu_clamped(*w.shared_gate_up, a.x, s.limit, a.hidden);
    ops_->linear(*w.shared_down, a.hidden, nullptr, nullptr, a.out);
  };
  Routing routing;
  const auto route = [&] {
    routing = latent_->router(*ops_, *w.router, a.x, a.router, w.router_bias.get(), w.router_table.get(), ids, s.used,
                              s.route_scale);
  };
  // What is larger follows the kernel before at once.
  if (a.x.n <= static_cast<int64_t>(kInOrder)) {
    ops_->beside(kRowLane, route);
    shared();
  } else {
    ops_->beside(kRowLane, shared);
    route();
  }
  ops_->join();
  latent_->moe(*w.experts_gate_up, *w.experts_down, a.x, routing, s.limit, a.out);
}

}  // namespace ds4::deepseek4
