// Llama: pre-norm decoder with rotary grouped-query attention and a SwiGLU feed-forward.
//
//   x = E[token]
//   per layer:  a = rms(x);  q, k, v = Wq a, Wk a, Wv a (+ biases);  q, k rotated;  k, v appended
//               x += Wo concat_h( softmax(q_h K_g / sqrt(D), causal) V_g ),  g = h * Hkv / Hq
//               f = rms(x);  x += Wdown( silu(Wgate f) * (Wup f) )
//   logits = Wout rms(x), Wout = E when the file has no output matrix
//
// Sources: Llama (arXiv:2302.13971), Llama 3 (arXiv:2407.21783) for the scaled frequencies, GQA (arXiv:2305.13245),
// RoPE (arXiv:2104.09864); names and row orders from the GGUF specification.
//
// T: token rows of the step, E: width, Hq / Hkv: query / key-value heads, D: head width, F: feed-forward width.
#include "model/llama.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "quant/quant.h"

namespace ds4 {
namespace {

struct LlamaShape {
  int64_t layers, width, ff, heads, kv_heads, head_dim, rope_dim, vocab;
  float eps;
  double theta;
  RopeKind rope;

  int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim; }
};

LlamaShape read_shape(HyperParams& p) {
  constexpr int64_t kMax = int64_t{1} << 24;
  LlamaShape s{};
  s.layers = p.size("block_count", 1, 4096);
  s.width = p.size("embedding_length", 1, kMax);
  s.ff = p.size("feed_forward_length", 1, kMax);
  s.heads = p.size("attention.head_count", 1, 65536);
  s.kv_heads = p.has("attention.head_count_kv") ? p.size("attention.head_count_kv", 1, s.heads) : s.heads;
  if (s.heads % s.kv_heads != 0)
    throw Invalid("attention.head_count_kv is " + std::to_string(s.kv_heads) +
                  ", which does not divide attention.head_count " + std::to_string(s.heads));
  if (!p.has("attention.key_length") && s.width % s.heads != 0)
    throw Invalid("attention.head_count is " + std::to_string(s.heads) + ", which does not divide embedding_length " +
                  std::to_string(s.width));
  s.head_dim = p.has("attention.key_length") ? p.size("attention.key_length", 1, 65536) : s.width / s.heads;
  if (const int64_t v = p.integer_or("attention.value_length", s.head_dim); v != s.head_dim)
    throw Unsupported("attention.value_length " + std::to_string(v) + " beside attention.key_length " +
                      std::to_string(s.head_dim) + " is not implemented");
  s.rope_dim = p.has("rope.dimension_count") ? p.size("rope.dimension_count", 2, s.head_dim) : s.head_dim;
  if (s.rope_dim % 2 != 0) throw Invalid("rope.dimension_count is " + std::to_string(s.rope_dim) + ", which is odd");
  s.vocab = p.size("vocab_size", 1, int64_t{1} << 30);
  s.eps = static_cast<float>(p.real("attention.layer_norm_rms_epsilon"));
  if (!(s.eps >= 0) || !std::isfinite(s.eps)) throw Invalid("attention.layer_norm_rms_epsilon is not a small number");
  s.theta = p.real_or("rope.freq_base", 10000.0);
  if (!(s.theta > 0) || !std::isfinite(s.theta)) throw Invalid("rope.freq_base is not a positive number");
  const std::string kind = p.text_or("rope.kind", "interleaved");
  if (kind != "interleaved" && kind != "half_split") throw Unsupported("rope.kind '" + kind + "' is not implemented");
  s.rope = kind == "interleaved" ? RopeKind::Interleaved : RopeKind::HalfSplit;
  if (const int64_t experts = p.integer_or("expert_count", 0); experts != 0)
    throw Unsupported("expert_count " + std::to_string(experts) + " is not implemented");
  if (p.integer_or("expert_used_count", 0) != 0) throw Unsupported("expert_used_count is not implemented");
  return s;
}

// Radians per position of each rotated pair, [rope_dim / 2]: theta^(-2i/d), divided by the file's factors or scaled
// by the rule that rope.scaling.type names.
std::vector<double> rope_frequencies(const LlamaShape& s, HyperParams& p, TensorTable& tensors) {
  std::vector<double> freq(static_cast<size_t>(s.rope_dim / 2));
  for (size_t i = 0; i < freq.size(); ++i)
    freq[i] = std::pow(s.theta, -2.0 * static_cast<double>(i) / static_cast<double>(s.rope_dim));

  if (const auto factors = tensors.vector_if_present("rope_freqs.weight", s.rope_dim / 2)) {
    std::vector<float> divisor(freq.size());
    dequantize_row(factors->type, factors->data, divisor.data(), factors->cols);
    for (size_t i = 0; i < freq.size(); ++i) {
      if (!(divisor[i] > 0) || !std::isfinite(divisor[i]))
        throw Invalid("rope_freqs.weight: entry " + std::to_string(i) + " is not a positive number");
      freq[i] /= static_cast<double>(divisor[i]);
    }
  }

  const std::string scaling = p.text_or("rope.scaling.type", "none");
  if (scaling == "none") {
    p.ignore("rope.scaling.");
    return freq;
  }
  if (scaling != "linear" && scaling != "llama3")
    throw Unsupported("rope.scaling.type '" + scaling + "' is not implemented");
  const double factor = p.real("rope.scaling.factor");
  if (!(factor >= 1) || !std::isfinite(factor)) throw Invalid("rope.scaling.factor is not a number of at least 1");
  if (scaling == "linear") {
    for (double& f : freq) f /= factor;
    p.ignore("rope.scaling.original_context_length");  // the rule does not use it
    return freq;
  }
  // Llama 3: long wavelengths are stretched by `factor`, short ones stay, a linear ramp lies between.
  const double low = p.real("rope.scaling.low_freq_factor"), high = p.real("rope.scaling.high_freq_factor");
  const double original = p.real("rope.scaling.original_context_length");
  if (!(low > 0 && high > low && original > 0))
    throw Invalid("rope.scaling.low_freq_factor, high_freq_factor and original_context_length contradict each other");
  for (double& f : freq) {
    const double turns = original * f / (2 * std::numbers::pi);  // full turns within the original context
    const double ramp = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    f = (1 - ramp) * f / factor + ramp * f;
  }
  return freq;
}

class Llama final : public Model {
 public:
  Llama(HyperParams params, TensorTable tensors, DType kv_type)
      : shape_(read_shape(params)), freq_(rope_frequencies(shape_, params, tensors)) {
    const LlamaShape& s = shape_;
    embedding_ = tensors.matrix("token_embd.weight", s.vocab, s.width);
    output_norm_ = tensors.vector("output_norm.weight", s.width);
    output_ = tensors.matrix_if_present("output.weight", s.vocab, s.width);
    for (int64_t l = 0; l < s.layers; ++l) {
      const std::string prefix = "blk." + std::to_string(l) + ".";
      const int64_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
      LayerFile f;
      f.attn_norm = tensors.vector(prefix + "attn_norm.weight", s.width);
      f.qkv = {tensors.matrix(prefix + "attn_q.weight", q, s.width),
               tensors.matrix(prefix + "attn_k.weight", kv, s.width),
               tensors.matrix(prefix + "attn_v.weight", kv, s.width)};
      read_biases(tensors, prefix, q, kv, f);
      f.attn_output = tensors.matrix(prefix + "attn_output.weight", s.width, q);
      f.ffn_norm = tensors.vector(prefix + "ffn_norm.weight", s.width);
      f.gate_up = {tensors.matrix(prefix + "ffn_gate.weight", s.ff, s.width),
                   tensors.matrix(prefix + "ffn_up.weight", s.ff, s.width)};
      f.down = tensors.matrix(prefix + "ffn_down.weight", s.width, s.ff);
      files_.push_back(std::move(f));

      const std::string layer = std::to_string(l);
      specs_.push_back({.name = "k." + layer, .type = kv_type, .heads = s.kv_heads, .width = s.head_dim});
      specs_.push_back({.name = "v." + layer, .type = kv_type, .heads = s.kv_heads, .width = s.head_dim});
    }
    params.ignore("context_length");  // advice to the user, no part of the computation
    tensors.refuse_untaken();
    params.refuse_unread();
  }

  std::string family() const override { return "llama"; }
  int64_t vocab() const override { return shape_.vocab; }
  int64_t layers() const override { return shape_.layers; }
  int64_t width() const override { return shape_.width; }
  const std::vector<StateSpec>& state_specs() const override { return specs_; }

  size_t workspace_bytes(int64_t rows, int64_t wanted) const override {
    const LlamaShape& s = shape_;
    const int64_t per_row = s.width + s.rope_dim + s.qkv() + s.heads * s.head_dim + s.ff;
    return static_cast<size_t>(rows * per_row + wanted * (s.width + s.heads * s.head_dim + s.vocab)) * sizeof(float);
  }

  void load(Ops& ops, const LoadProgress& progress) override {
    ops_ = &ops;
    const auto total = static_cast<size_t>(2 + shape_.layers);
    embed_ = load_one(embedding_, output_ ? WeightUse::Embedding : WeightUse::TiedHead);
    if (output_) head_ = load_one(*output_, WeightUse::Linear);
    final_norm_ = load_one(output_norm_, WeightUse::Linear);
    if (progress) progress(2, total);
    for (size_t l = 0; l < files_.size(); ++l) {
      const LayerFile& f = files_[l];
      Layer layer;
      layer.attn_norm = load_one(f.attn_norm, WeightUse::Linear);
      layer.qkv = ops.load(f.qkv, WeightUse::Linear);
      if (!f.qkv_bias.empty())
        layer.qkv_bias = load_one({f.qkv_bias.data(), 1, shape_.qkv(), DType::F32}, WeightUse::Linear);
      layer.attn_output = load_one(f.attn_output, WeightUse::Linear);
      layer.ffn_norm = load_one(f.ffn_norm, WeightUse::Linear);
      layer.gate_up = ops.load(f.gate_up, WeightUse::SwiGLU);
      layer.down = load_one(f.down, WeightUse::Linear);
      layers_.push_back(std::move(layer));
      if (progress) progress(3 + l, total);
    }
  }

  size_t resident_bytes() const override {
    size_t n = embed_->resident_bytes() + final_norm_->resident_bytes() + (head_ ? head_->resident_bytes() : 0);
    for (const Layer& l : layers_)
      n += l.attn_norm->resident_bytes() + l.qkv->resident_bytes() + l.attn_output->resident_bytes() +
           l.ffn_norm->resident_bytes() + l.gate_up->resident_bytes() + l.down->resident_bytes() +
           (l.qkv_bias ? l.qkv_bias->resident_bytes() : 0);
    return n;
  }

  Tensor forward(const Batch& batch) override {
    ops_->reset_scratch();
    if (apart(batch)) {
      const auto rows = static_cast<int64_t>(batch.ids.size());
      const Tensor logits = ops_->scratch(rows, shape_.vocab);
      const auto part = [&](Ops& ops, int64_t first, int64_t count) {
        const auto of = [&](auto all) { return all.subspan(static_cast<size_t>(first), static_cast<size_t>(count)); };
        // Places count from the part's first row.
        std::vector<int32_t> wanted(static_cast<size_t>(count));
        std::iota(wanted.begin(), wanted.end(), 0);
        pass(ops, {.ids = of(batch.ids), .rows = of(batch.rows), .wanted = wanted, .probe = {}},
             logits.rows(first, count));
      };
      if (ops_->in_parts(rows, part)) return logits;
    }
    return pass(*ops_, batch, {});
  }

 private:
  // What the file holds for one layer, and what the backend made of it.
  struct LayerFile {
    MatrixView attn_norm, attn_output, ffn_norm, down;
    std::vector<MatrixView> qkv, gate_up;
    std::vector<float> qkv_bias;
  };
  struct Layer {
    std::unique_ptr<Weight> attn_norm, qkv, qkv_bias, attn_output, ffn_norm, gate_up, down;
  };
  struct Activations {
    Tensor x, rope, qkv, attended, hidden;
    Tensor q(const LlamaShape& s) const { return qkv.columns(0, s.heads * s.head_dim); }
  };

  static void read_biases(TensorTable& tensors, const std::string& prefix, int64_t q, int64_t kv, LayerFile& f) {
    const std::pair<const char*, int64_t> parts[] = {{"attn_q.bias", q}, {"attn_k.bias", kv}, {"attn_v.bias", kv}};
    std::vector<float> all;
    bool any = false;
    for (const auto& [name, dim] : parts) {
      const size_t start = all.size();
      all.resize(start + static_cast<size_t>(dim));  // an absent bias is zero
      if (const auto view = tensors.vector_if_present(prefix + name, dim)) {
        dequantize_row(view->type, view->data, all.data() + start, dim);
        any = true;
      }
    }
    if (any) f.qkv_bias = std::move(all);
  }

  std::unique_ptr<Weight> load_one(const MatrixView& view, WeightUse use) { return ops_->load({&view, 1}, use); }

  Norm norm(const Weight& gain) const { return {&gain, shape_.eps}; }

  // Every row is a session of its own and has logits: what one row computes no other row reads.
  static bool apart(const Batch& batch) {
    const auto same = [](const RowRef& a, const RowRef& b) { return a.state == b.state; };
    return !batch.probe && batch.wanted.size() == batch.ids.size() &&
           std::adjacent_find(batch.rows.begin(), batch.rows.end(), same) == batch.rows.end();
  }

  // The rows' way through the model. Logits [wanted, vocab] into `logits`, or into scratch memory where it is empty.
  Tensor pass(Ops& ops, const Batch& batch, Tensor logits) const {
    const LlamaShape& s = shape_;
    const auto rows = static_cast<int64_t>(batch.ids.size());
    Activations a{
        .x = ops.scratch(rows, s.width),                      // [T, E]
        .rope = ops.scratch(rows, s.rope_dim),                // [T, cos | sin]
        .qkv = ops.scratch(rows, s.qkv()),                    // [T, (Hq + 2 Hkv) D]
        .attended = ops.scratch(rows, s.heads * s.head_dim),  // [T, Hq D]
        .hidden = ops.scratch(rows, s.ff),                    // [T, F]
    };
    ops.embed(*embed_, batch.ids, a.x);
    ops.rope_table(batch.rows, freq_, a.rope);
    for (size_t l = 0; l < layers_.size(); ++l) {
      if (batch.probe) batch.probe(static_cast<int64_t>(l), a.x);
      project(ops, layers_[l], l, batch.rows, a);
      if (l + 1 == layers_.size() && narrows(ops, batch)) {
        if (batch.wanted.empty()) return {};
        std::vector<RowRef> wanted;
        a = of_wanted(ops, batch, a, wanted);
        attention(ops, layers_[l], l, wanted, a);
        feed_forward(ops, layers_[l], a);
        return head(ops, a.x, logits);
      }
      attention(ops, layers_[l], l, batch.rows, a);
      feed_forward(ops, layers_[l], a);
    }
    if (batch.probe) {
      Tensor normed = ops.scratch(rows, s.width);
      ops.rms_norm(a.x, norm(*final_norm_), normed);
      batch.probe(s.layers, normed);
    }
    if (batch.wanted.empty()) return {};
    Tensor last = ops.scratch(static_cast<int64_t>(batch.wanted.size()), s.width);
    ops.gather(a.x, batch.wanted, last);
    return head(ops, last, logits);
  }

  static KvSlots kv_of(size_t layer) { return {2 * layer, 2 * layer + 1}; }

  // q, k, v = rope(Wqkv rms(x)); k and v go to the state
  void project(Ops& ops, const Layer& w, size_t layer, std::span<const RowRef> rows, Activations& a) const {
    const LlamaShape& s = shape_;
    const Norm pre = norm(*w.attn_norm);
    ops.linear(*w.qkv, a.x, &pre, w.qkv_bias.get(), a.qkv);  // [T, E] -> [T, (Hq + 2 Hkv) D]
    ops.rope_store(a.qkv, a.rope, s.rope, rows, kv_of(layer), s.heads, s.kv_heads, s.head_dim);
  }

  // x += Wo attention(q)
  void attention(Ops& ops, const Layer& w, size_t layer, std::span<const RowRef> rows, Activations& a) const {
    const LlamaShape& s = shape_;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.head_dim)));
    ops.attention(a.q(s), rows, kv_of(layer), s.heads, s.kv_heads, s.head_dim, scale, a.attended);  // [T, Hq D]
    ops.linear_add(*w.attn_output, a.attended, a.x);                                                // [T, E]
  }

  // After the last layer's keys and values are stored only the wanted rows go on. Not where a backend may replay the
  // step, which then reads no other rows than the step's own, and not where every row's result is looked at.
  static bool narrows(const Ops& ops, const Batch& batch) {
    return !batch.probe && ops.host_memory() && batch.wanted.size() < batch.ids.size();
  }

  // The activations of the wanted rows alone; `wanted` becomes their places.
  Activations of_wanted(Ops& ops, const Batch& batch, const Activations& all, std::vector<RowRef>& wanted) const {
    const LlamaShape& s = shape_;
    const auto n = static_cast<int64_t>(batch.wanted.size());
    for (const int32_t t : batch.wanted) wanted.push_back(batch.rows[static_cast<size_t>(t)]);
    Activations a{.x = ops.scratch(n, s.width),
                  .rope = {},
                  .qkv = ops.scratch(n, s.heads * s.head_dim),
                  .attended = all.attended.rows(0, n),
                  .hidden = all.hidden.rows(0, n)};
    ops.gather(all.x, batch.wanted, a.x);
    ops.gather(all.q(s), batch.wanted, a.qkv);
    return a;
  }

  // x += Wdown(silu(Wgate rms(x)) * Wup rms(x))
  void feed_forward(Ops& ops, const Layer& w, Activations& a) const {
    const Norm pre = norm(*w.ffn_norm);
    ops.linear_swiglu(*w.gate_up, a.x, &pre, a.hidden);  // [T, F]
    ops.linear_add(*w.down, a.hidden, a.x);              // [T, E]
  }

  // Wout rms(x) of the wanted rows x, [wanted, vocab]
  Tensor head(Ops& ops, const Tensor& x, Tensor logits) const {
    if (!logits.data) logits = ops.scratch(x.n, shape_.vocab);
    const Norm pre = norm(*final_norm_);
    ops.linear(head_ ? *head_ : *embed_, x, &pre, nullptr, logits);
    return logits;
  }

  LlamaShape shape_;
  std::vector<double> freq_;
  std::vector<StateSpec> specs_;
  MatrixView embedding_, output_norm_;
  std::optional<MatrixView> output_;
  std::vector<LayerFile> files_;

  Ops* ops_ = nullptr;
  std::unique_ptr<Weight> embed_, head_, final_norm_;
  std::vector<Layer> layers_;
};

}  // namespace

std::unique_ptr<Model> make_llama(HyperParams params, TensorTable tensors, DType kv_type) {
  return std::make_unique<Llama>(std::move(params), std::move(tensors), kv_type);
}

}  // namespace ds4
