// DSpark, the block drafter of later DeepSeek V4 checkpoints: some layers that guess a block of B tokens in one pass.
//
// For every position p that the model evaluates (targets: the layers that are listened to):
//   m = rms(Wmain [mean over streams of X after target 0 | target 1 | ...])
//   each stage:  window[p] = key row of m at p
// For a token at p + 1 that is not evaluated yet:
//   X_i[j] = E[token, noise, noise, ...][i] for every stream j; positions p + 1 ... p + B
//   each stage: a window-only layer, in which every row sees the window and all B rows, also the later ones
//   y_i = hc_head(X_i);  base_i = Wout rms(y_i)
//   logits_i = base_i + W2 W1[t_i];  t_0 = token, t_(i+1) = best of logits_i      (a chain of guesses)
//   sure_i = sigmoid(Wsure [y_i | W1[t_i]]): the block ends before the first guess below a threshold
//
//   draft.window.S  Ring  key rows of stage S
//
// Sources: DeepSeek's published checkpoints with a DSpark drafter, names and graph; the same drafter as GGUF.
#include <algorithm>
#include <cmath>

#include "model/deepseek4_draft.h"

namespace ds4::deepseek4 {
namespace {

class DSpark final : public DraftLayers {
 public:
  DSpark(const Shape& shape, const Frequencies& freq, Layers& layers, HyperParams& params, TensorTable& tensors,
         std::vector<StateSpec>& specs)
      : shape_(shape), freq_(freq), layers_(layers) {
    const int64_t width = shape.width;
    block_ = params.size("dspark.block_size", 1, kMostAhead);
    const int64_t rank = params.size("dspark.markov_rank", 1, int64_t{1} << 20);
    noise_ = static_cast<int32_t>(params.size("dspark.noise_token_id", 0, shape.vocab - 1));
    targets_ = params.integers("dspark.target_layer_ids");
    const int64_t stages = params.size("dspark.stage_count", 1, 64);
    if (targets_.empty() || targets_.size() > 64) throw Invalid("dspark.target_layer_ids lists no layers, or too many");
    for (const int64_t t : targets_)
      if (t < 0 || t >= shape.layers)
        throw Invalid("dspark.target_layer_ids holds " + std::to_string(t) + ", the model has " +
                      std::to_string(shape.layers) + " layers");
    sure_ = static_cast<float>(params.real_or("draft.confidence", 0.0));

    const std::string first = "mtp.0.", last = "mtp." + std::to_string(stages - 1) + ".";
    file_.main = tensors.matrix(first + "main_proj.weight", width, static_cast<int64_t>(targets_.size()) * width);
    file_.main_norm = tensors.vector(first + "main_norm.weight", width);
    file_.norm = tensors.vector(last + "norm.weight", width);
    file_.fn = tensors.matrix(last + "hc_head_fn.weight", shape.streams, shape.streams * width);
    file_.base = tensors.vector(last + "hc_head_base.weight", shape.streams);
    file_.scale = tensors.vector(last + "hc_head_scale.weight", 1);
    file_.chain_in = tensors.matrix(last + "markov_head.markov_w1.weight", shape.vocab, rank);
    file_.chain_out = tensors.matrix(last + "markov_head.markov_w2.weight", shape.vocab, rank);
    file_.sure = tensors.matrix(last + "confidence_head.proj.weight", 1, width + rank);
    for (int64_t stage = 0; stage < stages; ++stage) {
      stage_files_.push_back(layers.read(tensors, "mtp." + std::to_string(stage) + ".", 0, false));
      at_.push_back({.window = declare(specs, "draft.window." + std::to_string(stage), StateKind::Ring, shape.head_dim,
                                       1, shape.window, kRewindSlack, std::max(shape.ahead, block_))});
      specs.back().draft = true;
    }
    zeros_.resize(static_cast<size_t>(shape.streams * shape.streams * width));
  }

  std::string name() const override { return "dspark"; }

  void load(const SharedWeights& shared) override {
    shared_ = shared;
    weights_.main = layers_.scaled(file_.main), weights_.main_norm = layers_.one(file_.main_norm);
    weights_.norm = layers_.one(file_.norm);
    weights_.fn = layers_.one(file_.fn, WeightUse::Precise), weights_.base = layers_.one(file_.base);
    weights_.scale = layers_.one(file_.scale);
    weights_.chain_in = layers_.one(file_.chain_in, WeightUse::Embedding);
    weights_.chain_out = layers_.one(file_.chain_out);
    weights_.sure = layers_.one(file_.sure);
    for (const LayerFile& f : stage_files_) stages_.push_back(layers_.load(f, true));
    // hc_head with zero coefficients and no epsilon: every stream with the weight sigmoid(0) = 1 / 2.
    const int64_t n = shape_.streams;
    half_fn_ = layers_.one({zeros_.data(), n, n * shape_.width, DType::F32});
    half_base_ = layers_.one({zeros_.data(), 1, n, DType::F32});
    half_scale_ = layers_.one({zeros_.data(), 1, 1, DType::F32});
  }

  int64_t absorb_floats() const override {
    return (static_cast<int64_t>(targets_.size()) + 1) * shape_.width + shape_.head_dim;
  }
  int64_t draft_floats() const override {
    const int64_t row = layers_.floats_per_row() + 2 * shape_.width + rank() + shape_.vocab;
    return block_ * row + 1;
  }

  void begin(int64_t rows) override {
    heard_ = layers_.ops().scratch(rows, static_cast<int64_t>(targets_.size()) * shape_.width);
  }

  void after_layer(int64_t layer, const Activations& a) override {
    HyperConnection half = layers_.hyper(half_fn_, half_base_, half_scale_);
    half.eps = 0;
    for (size_t i = 0; i < targets_.size(); ++i)
      if (targets_[i] == layer)
        layers_.latent().hc_head(half, a.streams, heard_.columns(static_cast<int64_t>(i) * shape_.width, shape_.width));
  }

  void absorb(std::span<const int32_t>, std::span<const RowRef> rows, Activations& a) override {
    Ops& ops = layers_.ops();
    ops.linear(*weights_.main, heard_, nullptr, nullptr, a.x);
    // What was heard is n / 2 times the mean.
    Norm norm = layers_.norm(weights_.main_norm);
    const auto scale = static_cast<float>(shape_.streams) / 2;
    norm.eps *= scale * scale;
    ops.rms_norm(a.x, norm, a.x);
    for (size_t stage = 0; stage < stages_.size(); ++stage) {
      layers_.keys(stages_[stage], a.x, a.rope, a.kv);
      layers_.latent().ring_store(a.kv, rows, at_[stage].window);
    }
  }

  void draft(std::span<DraftRow> rows) override {
    std::vector<int32_t> ids;
    std::vector<RowRef> refs;
    for (DraftRow& row : rows) {
      row.drafts.clear();
      for (int64_t i = 0; i < block_; ++i) {
        ids.push_back(i == 0 ? row.token : noise_);
        refs.push_back({row.state, row.position + static_cast<int32_t>(i)});
      }
    }
    Ops& ops = layers_.ops();
    ops.reset_scratch();
    const auto count = static_cast<int64_t>(refs.size());
    Activations a = layers_.activations(count, false);
    for (int64_t j = 0; j < shape_.streams; ++j)
      ops.embed(*shared_.embed, ids, a.streams.columns(j * shape_.width, shape_.width));
    layers_.latent().rope_table_f32(refs, freq_.window, a.rope);
    for (size_t stage = 0; stage < stages_.size(); ++stage)
      layers_.layer(stages_[stage], ids, a, [&] { attention(stages_[stage], at_[stage], refs, a); });

    const Tensor seen = ops.scratch(count, shape_.width + rank());  // [y | W1[t]]
    const Tensor y = seen.columns(0, shape_.width), from = seen.columns(shape_.width, rank());
    const Tensor logits = ops.scratch(count, shape_.vocab), sure = ops.scratch(1, 1);
    const Norm norm = layers_.norm(weights_.norm);
    layers_.latent().hc_head(layers_.hyper(weights_.fn, weights_.base, weights_.scale), a.streams, y);
    ops.linear(*shared_.head, y, &norm, nullptr, logits);
    for (size_t r = 0; r < rows.size(); ++r) chain(rows[r], static_cast<int64_t>(r) * block_, seen, from, logits, sure);
  }

 private:
  template <class M>
  struct Tensors {
    M main, main_norm, norm, fn, base, scale, chain_in, chain_out, sure;
  };

  int64_t rank() const { return file_.chain_in.cols; }

  // Every row of a block attends to the window before the block and to the whole block: as the block's last row does.
  void attention(const LayerWeights& w, const LayerState& at, std::span<const RowRef> rows, Activations& a) {
    layers_.queries(w, a.rope, a);
    layers_.keys(w, a.x, a.rope, a.kv);
    layers_.latent().ring_store(a.kv, rows, at.window);
    LatentAttention attend = layers_.attend_args(w, at, 0);
    attend.window += block_;
    for (size_t t = 0; t < rows.size(); ++t) {
      const size_t end =
          t / static_cast<size_t>(block_) * static_cast<size_t>(block_) + static_cast<size_t>(block_) - 1;
      const auto row = static_cast<int64_t>(t);
      layers_.latent().latent_attention(a.q.rows(row, 1), a.kv.rows(static_cast<int64_t>(end), 1), rows.subspan(end, 1),
                                        attend, nullptr, a.attended.rows(row, 1));
    }
    layers_.latent().rope_tail(a.attended, a.rope, shape_.heads, true);
    layers_.attention_out(w, a);
  }

  void chain(DraftRow& row, int64_t first, const Tensor& seen, const Tensor& from, const Tensor& logits,
             const Tensor& sure) {
    Ops& ops = layers_.ops();
    const int64_t most = std::min(row.most, block_);
    for (int64_t i = 0; i < most; ++i) {
      const int32_t before = row.drafts.empty() ? row.token : row.drafts.back();
      const Tensor w1 = from.rows(first + i, 1), out = logits.rows(first + i, 1);
      ops.embed(*weights_.chain_in, {&before, 1}, w1);
      if (sure_ > 0) {
        float value = 0;
        ops.linear(*weights_.sure, seen.rows(first + i, 1), nullptr, nullptr, sure);
        ops.to_host(sure, &value);
        if (!(1.0f / (1.0f + std::exp(-value)) >= sure_)) return;
      }
      ops.linear_add(*weights_.chain_out, w1, out);
      Best best;
      ops.best(out, {&best, 1});
      row.drafts.push_back(best.id);
      if (row.logits) append_logits(ops, out, *row.logits);
    }
  }

  const Shape& shape_;
  const Frequencies& freq_;
  Layers& layers_;
  int64_t block_ = 0;
  int32_t noise_ = 0;
  float sure_ = 0;
  std::vector<int64_t> targets_;
  Tensors<MatrixView> file_;
  Tensors<std::unique_ptr<Weight>> weights_;
  std::vector<LayerFile> stage_files_;
  std::vector<LayerWeights> stages_;
  std::vector<LayerState> at_;
  std::vector<float> zeros_;
  std::unique_ptr<Weight> half_fn_, half_base_, half_scale_;
  SharedWeights shared_;
  Tensor heard_;  // of the running step: [T, targets * H]
};

}  // namespace

std::unique_ptr<DraftLayers> make_dspark(const Shape& shape, const Frequencies& freq, Layers& layers,
                                         HyperParams& params, TensorTable& tensors, std::vector<StateSpec>& specs) {
  return std::make_unique<DSpark>(shape, freq, layers, params, tensors, specs);
}

}  // namespace ds4::deepseek4
