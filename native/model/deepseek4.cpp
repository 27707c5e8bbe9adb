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
// Sub-layers are in deepseek4_layer.cpp, layers that only draft in deepseek4_mtp.cpp and deepseek4_dspark.cpp.
#include "model/deepseek4.h"

#include <algorithm>

#include "model/deepseek4_draft.h"

namespace ds4 {
namespace {

using namespace deepseek4;

class DeepSeek4 final : public Model {
 public:
  DeepSeek4(HyperParams params, TensorTable tensors)
      : shape_(read_shape(params)), freq_(read_frequencies(shape_, params)), math_(shape_, freq_) {
    const Shape& s = shape_;
    embedding_ = tensors.matrix("token_embd.weight", s.vocab, s.width);
    output_ = tensors.matrix("output.weight", s.vocab, s.width);
    output_norm_ = tensors.vector("output_norm.weight", s.width);
    head_fn_ = tensors.matrix("output_hc_fn.weight", s.streams, s.streams * s.width);
    head_base_ = tensors.vector("output_hc_base.weight", s.streams);
    head_scale_ = tensors.vector("output_hc_scale.weight", 1);
    for (int64_t l = 0; l < s.layers; ++l) {
      files_.push_back(
          math_.read(tensors, "blk." + std::to_string(l) + ".", s.ratios[static_cast<size_t>(l)], l < s.hash_layers));
      declare_state(l);
    }
    draft_ = make_draft_layers(shape_, freq_, math_, params, tensors, specs_);
    for (const char* key :
         {"context_length", "feed_forward_length", "embedding_length_out", "nextn_predict_layers", "dspark.", "draft."})
      params.ignore(key);  // advice, sizes of other families, and settings of a drafter that is not there
    tensors.refuse_untaken();
    params.refuse_unread();
  }

  std::string family() const override { return "deepseek4"; }
  int64_t vocab() const override { return shape_.vocab; }
  int64_t layers() const override { return shape_.layers; }
  int64_t width() const override { return shape_.streams * shape_.width; }
  const std::vector<StateSpec>& state_specs() const override { return specs_; }
  Drafter* drafter() override { return draft_.get(); }

  size_t workspace_bytes(int64_t rows, int64_t wanted) const override {
    const Shape& s = shape_;
    const int64_t step = rows * (math_.floats_per_row() + (draft_ ? draft_->absorb_floats() : 0)) +
                         wanted * ((s.streams + 2) * s.width + s.vocab);
    return static_cast<size_t>(std::max(step, draft_ ? draft_->draft_floats() : 0)) * sizeof(float);
  }

  void load(Ops& ops, const LoadProgress& progress) override {
    math_.use(ops);
    const auto total = static_cast<size_t>(2 + shape_.layers + (draft_ ? 1 : 0));
    embed_ = math_.one(embedding_, WeightUse::Embedding);
    head_ = math_.one(output_);
    final_norm_ = math_.one(output_norm_);
    hc_fn_ = math_.one(head_fn_, WeightUse::Precise), hc_base_ = math_.one(head_base_),
    hc_scale_ = math_.one(head_scale_);
    if (progress) progress(2, total);
    for (size_t l = 0; l < files_.size(); ++l) {
      try {
        layers_.push_back(math_.load(files_[l]));
      } catch (const Invalid& e) {
        throw Invalid("blk." + std::to_string(l) + ": " + e.what());
      }
      if (progress) progress(3 + l, total);
    }
    if (!draft_) return;
    try {
      draft_->load({embed_.get(), head_.get()});
    } catch (const Invalid& e) {
      throw Invalid(std::string("mtp: ") + e.what());
    }
    if (progress) progress(total, total);
  }

  size_t resident_bytes() const override { return math_.resident_bytes(); }

  Tensor forward(const Batch& batch) override {
    const Shape& s = shape_;
    Ops& ops = math_.ops();
    LatentOps& latent = math_.latent();
    const auto rows = static_cast<int64_t>(batch.ids.size());
    ops.reset_scratch();
    Activations a = math_.activations(rows, true);
    if (draft_) draft_->begin(rows);

    for (int64_t j = 0; j < s.streams; ++j) ops.embed(*embed_, batch.ids, a.streams.columns(j * s.width, s.width));
    latent.rope_table_f32(batch.rows, freq_.window, a.rope);
    latent.rope_table_f32(batch.rows, freq_.compressed, a.rope_far);
    for (size_t l = 0; l < layers_.size(); ++l) {
      const bool replaced = batch.probe && batch.probe(static_cast<int64_t>(l), a.streams);
      math_.layer(
          layers_[l], batch.ids, a, [&] { math_.attention(layers_[l], states_[l], s.ratios[l], batch.rows, a); },
          l > 0 && !replaced, l + 1 < layers_.size() ? &layers_[l + 1] : nullptr);
      if (draft_) draft_->after_layer(static_cast<int64_t>(l), a);
    }
    if (batch.probe) batch.probe(s.layers, a.streams);
    if (draft_) draft_->absorb(batch.ids, batch.rows, a);
    return head(a.streams, batch.wanted);
  }

 private:
  void declare_state(int64_t l) {
    const Shape& s = shape_;
    const int64_t ratio = s.ratios[static_cast<size_t>(l)];
    const std::string layer = "." + std::to_string(l);
    const auto ring = [&](const char* name, int64_t width, int64_t need) {
      return declare(specs_, name + layer, StateKind::Ring, width, 1, need, kRewindSlack, s.ahead);
    };
    LayerState at;
    at.window = ring("window", s.head_dim, s.window);
    if (ratio != 0) {
      // A ratio-4 window also pools the window before it.
      const int64_t need = ratio == 4 ? 8 : ratio;
      at.ring = ring("open", 2 * s.lanes(ratio) * s.head_dim, need);
      at.rows = declare(specs_, "rows" + layer, StateKind::Append, s.head_dim, ratio);
      if (ratio == 4) {
        at.index_ring = ring("index_open", 4 * s.index_dim, need);
        at.index_rows = declare(specs_, "index_rows" + layer, StateKind::Append, s.index_dim, ratio);
      }
    }
    states_.push_back(at);
  }

  // Wout rms(hc_head(X)) of the wanted rows, [wanted, vocab]
  Tensor head(const Tensor& streams, std::span<const int32_t> wanted) {
    const Shape& s = shape_;
    Ops& ops = math_.ops();
    const auto n = static_cast<int64_t>(wanted.size());
    if (n == 0) return {};
    Tensor last = ops.scratch(n, s.streams * s.width), y = ops.scratch(n, s.width), logits = ops.scratch(n, s.vocab);
    ops.gather(streams, wanted, last);
    math_.latent().hc_head(math_.hyper(hc_fn_, hc_base_, hc_scale_), last, y);
    const Norm pre = math_.norm(final_norm_);
    ops.linear(*head_, y, &pre, nullptr, logits);
    return logits;
  }

  Shape shape_;
  Frequencies freq_;
  Layers math_;
  std::vector<StateSpec> specs_;
  std::vector<LayerState> states_;
  MatrixView embedding_, output_, output_norm_, head_fn_, head_base_, head_scale_;
  std::vector<LayerFile> files_;
  std::unique_ptr<Weight> embed_, head_, final_norm_, hc_fn_, hc_base_, hc_scale_;
  std::vector<LayerWeights> layers_;
  std::unique_ptr<DraftLayers> draft_;
};

}  // namespace

std::unique_ptr<Model> make_deepseek4(HyperParams params, TensorTable tensors) {
  return std::make_unique<DeepSeek4>(std::move(params), std::move(tensors));
}

}  // namespace ds4
