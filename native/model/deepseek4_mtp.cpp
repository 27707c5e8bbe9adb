// The multi-token prediction head of DeepSeek V4: from the streams X of position p and the token at p + 1 it guesses
// the token at p + 2.
//
//   Z[j] = We rms(E[token at p + 1]) + Wh rms(X_p[j])        for every stream j
//   Z    = one window-only layer of the model's kind on Z, at position p + 1
//   logits = Wout rms(hc_head(Z));   Z and the guess go on to p + 3 the same way
//
// What the layer needs of earlier tokens is its window of key rows, made of the pairs (X_p, token at p + 1). The
// model's forward pass adds them: only the way up to the key row is computed, not the rest of the layer.
//
//   draft.window  Ring  key rows, that of the pair (X_p, token at p + 1) at p + 1
//   draft.hidden  Ring  streams: of the model at a position that is evaluated, of the head at one that is drafted
#include <algorithm>
#include <limits>

#include "model/deepseek4_draft.h"

namespace ds4::deepseek4 {
namespace {

class Mtp final : public DraftLayers {
 public:
  Mtp(const Shape& shape, const Frequencies& freq, Layers& layers, HyperParams& params, TensorTable& tensors,
      std::vector<StateSpec>& specs)
      : shape_(shape), freq_(freq), layers_(layers) {
    const std::string prefix = "mtp.0.";
    const int64_t width = shape.width;
    margin_ = static_cast<float>(params.real_or("draft.margin", 0.0));
    file_.enorm = tensors.vector(prefix + "enorm.weight", width);
    file_.hnorm = tensors.vector(prefix + "hnorm.weight", width);
    if (tensors.has(prefix + "eh_proj.weight")) {
      file_.both = tensors.matrix(prefix + "eh_proj.weight", width, 2 * width);
    } else {
      file_.e_proj = tensors.matrix(prefix + "e_proj.weight", width, width);
      file_.h_proj = tensors.matrix(prefix + "h_proj.weight", width, width);
    }
    file_.norm = tensors.vector(prefix + "norm.weight", width);
    file_.fn = tensors.matrix(prefix + "hc_head_fn.weight", shape.streams, shape.streams * width);
    file_.base = tensors.vector(prefix + "hc_head_base.weight", shape.streams);
    file_.scale = tensors.vector(prefix + "hc_head_scale.weight", 1);
    // Optional ones instead of the model's.
    if (auto own = tensors.matrix_if_present(prefix + "embed_tokens.weight", shape.vocab, width)) file_.embed = *own;
    if (auto own = tensors.matrix_if_present(prefix + "shared_head_head.weight", shape.vocab, width)) file_.head = *own;
    layer_file_ = layers.read(tensors, prefix, 0, false);

    at_.window =
        declare(specs, "draft.window", StateKind::Ring, shape.head_dim, 1, shape.window, kRewindSlack, shape.ahead);
    hidden_ = declare(specs, "draft.hidden", StateKind::Ring, shape.streams * width, 1, 1, 0, shape.ahead);
    specs[at_.window].draft = specs[hidden_].draft = true;
  }

  std::string name() const override { return "mtp"; }

  void load(const SharedWeights& shared) override {
    weights_.enorm = layers_.one(file_.enorm), weights_.hnorm = layers_.one(file_.hnorm);
    weights_.e_proj = layers_.scaled(file_.e_proj), weights_.h_proj = layers_.scaled(file_.h_proj);
    weights_.both = layers_.scaled(file_.both);
    weights_.norm = layers_.one(file_.norm);
    weights_.fn = layers_.one(file_.fn, WeightUse::Precise), weights_.base = layers_.one(file_.base);
    weights_.scale = layers_.one(file_.scale);
    weights_.embed = layers_.one(file_.embed, WeightUse::Embedding);
    weights_.head = layers_.one(file_.head);
    embed_ = weights_.embed ? weights_.embed.get() : shared.embed;
    head_ = weights_.head ? weights_.head.get() : shared.head;
    layer_ = layers_.load(layer_file_, true);
  }

  int64_t absorb_floats() const override { return (file_.both.data ? 3 : 2) * shape_.streams * shape_.width; }
  int64_t draft_floats() const override {
    return layers_.floats_per_row() + absorb_floats() + shape_.width + shape_.vocab;
  }

  void absorb(std::span<const int32_t> ids, std::span<const RowRef> rows, Activations& a) override {
    const Tensor z = pairs(ids, rows, a.streams, a.x);
    layers_.enter_attention(layer_, z, a);
    layers_.keys(layer_, a.x, a.rope, a.kv);
    layers_.latent().ring_store(a.kv, rows, at_.window);
    layers_.latent().ring_store(a.streams, rows, hidden_);
  }

  void draft(std::span<DraftRow> rows) override {
    Ops& ops = layers_.ops();
    std::vector<size_t> active;
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].drafts.clear();
      active.push_back(i);
    }
    std::vector<Best> best;
    for (int64_t depth = 0; !active.empty(); ++depth) {
      std::vector<int32_t> ids, all;
      std::vector<RowRef> refs;
      for (const size_t i : active) {
        const DraftRow& row = rows[i];
        all.push_back(static_cast<int32_t>(all.size()));
        ids.push_back(row.drafts.empty() ? row.token : row.drafts.back());
        refs.push_back({row.state, row.position + static_cast<int32_t>(depth)});
      }
      // Few steps are early; their attention is not that of others of their shape.
      const bool early = std::any_of(refs.begin(), refs.end(), [&](const RowRef& r) { return is_early(r); });
      const Tensor out = early ? forward(ids, refs, true)
                               : ops.run({serial_, ids, refs, all}, [&] { return forward(ids, refs, false); });
      best.resize(active.size());
      ops.best(out, best);
      std::vector<size_t> next;
      for (size_t j = 0; j < active.size(); ++j) {
        DraftRow& row = rows[active[j]];
        row.drafts.push_back(best[j].id);
        if (row.logits) append_logits(ops, out.rows(static_cast<int64_t>(j), 1), *row.logits);
        if (depth + 1 < row.most && best[j].lead >= margin_) next.push_back(active[j]);
      }
      active = std::move(next);
    }
  }

 private:
  template <class M>
  struct Tensors {
    M enorm, hnorm, e_proj, h_proj, both, norm, fn, base, scale, embed, head;
  };

  // Z [T, n H] of the tokens and the streams one position before; `scratch` [T, H].
  Tensor pairs(std::span<const int32_t> ids, std::span<const RowRef> rows, const Tensor& streams, Tensor scratch) {
    Ops& ops = layers_.ops();
    const int64_t n = shape_.streams, width = shape_.width, count = streams.n;
    const Norm enorm = layers_.norm(weights_.enorm), hnorm = layers_.norm(weights_.hnorm);
    const Tensor z = ops.scratch(count, n * width);
    const auto each = [&](const Tensor& x) { return Tensor(x.data, count * n, x.dim / n); };  // a row per stream
    if (weights_.both) {
      const Tensor both = ops.scratch(count, n * 2 * width), row = each(both);
      for (int64_t j = 0; j < n; ++j) {
        const Tensor e = both.columns(j * 2 * width, width);
        ops.embed(*embed_, ids, e);
        ops.rms_norm(e, enorm, e);
      }
      layers_.latent().previous_rows(streams, rows, hidden_, z);
      ops.rms_norm(each(z), hnorm, row.columns(width, width));
      ops.linear(*weights_.both, row, nullptr, nullptr, each(z));
      return z;
    }
    const Tensor before = ops.scratch(count, n * width);
    layers_.latent().previous_rows(streams, rows, hidden_, before);
    ops.rms_norm(each(before), hnorm, each(before));
    ops.linear(*weights_.h_proj, each(before), nullptr, nullptr, each(z));
    ops.embed(*embed_, ids, scratch);
    ops.rms_norm(scratch, enorm, scratch);
    for (int64_t j = 0; j < n; ++j) ops.linear_add(*weights_.e_proj, scratch, z.columns(j * width, width));
    return z;
  }

  // Position 0 has no pair, and its key row is not to be seen.
  bool is_early(const RowRef& row) const { return row.position < shape_.window; }

  void attention(std::span<const RowRef> rows, bool early, Activations& a) {
    layers_.queries(layer_, a.rope, a);
    layers_.keys(layer_, a.x, a.rope, a.kv);
    LatentAttention attend = layers_.attend_args(layer_, at_, 0);
    if (early) {
      for (size_t t = 0; t < rows.size(); ++t) {
        const auto row = static_cast<int64_t>(t);
        attend.window = std::clamp<int64_t>(rows[t].position, 1, shape_.window);
        layers_.latent().latent_attention(a.q.rows(row, 1), a.kv.rows(row, 1), rows.subspan(t, 1), attend, nullptr,
                                          a.attended.rows(row, 1));
      }
    } else {
      layers_.latent().latent_attention(a.q, a.kv, rows, attend, nullptr, a.attended);
    }
    layers_.latent().ring_store(a.kv, rows, at_.window);
    layers_.latent().rope_tail(a.attended, a.rope, shape_.heads, true);
    layers_.attention_out(layer_, a);
  }

  // Logits [T, vocab]; the streams behind the layer are kept for the next position.
  Tensor forward(std::span<const int32_t> ids, std::span<const RowRef> rows, bool early) {
    Ops& ops = layers_.ops();
    ops.reset_scratch();
    const auto count = static_cast<int64_t>(rows.size());
    Activations a = layers_.activations(count, false);
    a.streams = pairs(ids, rows, a.streams, a.x);
    layers_.latent().rope_table_f32(rows, freq_.window, a.rope);
    layers_.layer(layer_, ids, a, [&] { attention(rows, early, a); });
    layers_.latent().ring_store(a.streams, rows, hidden_);
    layers_.latent().hc_head(layers_.hyper(weights_.fn, weights_.base, weights_.scale), a.streams, a.x);
    const Tensor logits = ops.scratch(count, shape_.vocab);
    const Norm norm = layers_.norm(weights_.norm);
    ops.linear(*head_, a.x, &norm, nullptr, logits);
    return logits;
  }

  const Shape& shape_;
  const Frequencies& freq_;
  Layers& layers_;
  const uint64_t serial_ = next_serial();
  float margin_ = 0;
  Tensors<MatrixView> file_;
  Tensors<std::unique_ptr<Weight>> weights_;
  LayerFile layer_file_;
  LayerWeights layer_;
  LayerState at_;
  size_t hidden_ = 0;
  const Weight *embed_ = nullptr, *head_ = nullptr;
};

}  // namespace

std::unique_ptr<DraftLayers> make_mtp(const Shape& shape, const Frequencies& freq, Layers& layers, HyperParams& params,
                                      TensorTable& tensors, std::vector<StateSpec>& specs) {
  return std::make_unique<Mtp>(shape, freq, layers, params, tensors, specs);
}

void append_logits(Ops& ops, const Tensor& logits, std::vector<float>& to) {
  const size_t have = to.size();
  to.resize(have + static_cast<size_t>(logits.n * logits.dim));
  ops.to_host(logits, to.data() + have);
}

std::unique_ptr<DraftLayers> make_draft_layers(const Shape& shape, const Frequencies& freq, Layers& layers,
                                               HyperParams& params, TensorTable& tensors,
                                               std::vector<StateSpec>& specs) {
  if (tensors.has("mtp.0.main_proj.weight")) return make_dspark(shape, freq, layers, params, tensors, specs);
  if (tensors.has("mtp.0.enorm.weight")) return make_mtp(shape, freq, layers, params, tensors, specs);
  return nullptr;
}

}  // namespace ds4::deepseek4
