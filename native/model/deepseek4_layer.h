// What all layers of DeepSeek V4 have in common, those of the model and those that only draft: sizes, tensors, state
// buffers and sub-layers. See deepseek4.cpp for the whole.
//
// T: token rows of the step, H: width, n: streams, D: head width (key and value in one), R: rotated columns at its
// end, r: tokens per compressed row of a layer (0: window only, 4: two lanes and an indexer, 128: one lane).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"
#include "ops_latent.h"

namespace ds4::deepseek4 {

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
  int64_t ahead;  // tokens that a step may evaluate beyond those that a session keeps

  int64_t q() const { return heads * head_dim; }
  int64_t mix() const { return streams + streams * streams; }
  int64_t lanes(int64_t ratio) const { return ratio == 4 ? 2 : 1; }
};

// Throws Invalid and Unsupported, naming the key.
Shape read_shape(HyperParams& p);

// Radians per position of the R/2 rotated pairs: of window-only layers, and of compressing layers, whose base differs
// and whose long wavelengths YaRN stretches (without its magnitude factor).
struct Frequencies {
  std::vector<float> window, compressed;
};

Frequencies read_frequencies(const Shape& s, HyperParams& p);

// Tensors of one layer, as the file holds them (views) or as the backend does (weights).
template <class M, class Stack>
struct LayerTensors {
  M hc_attn_fn, hc_attn_base, hc_attn_scale, hc_ffn_fn, hc_ffn_base, hc_ffn_scale;
  M attn_norm, q_a, q_a_norm, q_b, kv, kv_norm, sinks, output_a, output_b;
  Stack q_kv;        // q_a and kv, which read the same x; loaded instead of them, or they instead of it
  Stack compressor;  // keys, gates, then the indexer's
  M compressor_bias, compressor_norm;
  M index_q, index_weight;
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

// What a step of T rows computes in, [T, ...]; `compressor` and the indexer's only where layers compress.
struct Activations {
  Tensor streams;         // [T, n H] X
  Tensor rope, rope_far;  // [T, cos | sin] of window-only layers, of compressing layers
  Tensor mix;             // [T, post | M]
  Tensor x, out;          // [T, H] into a sub-layer, out of it
  Tensor q_kv;            // [T, q rank + D]: q_low, kv
  Tensor q_low, q;        // [T, q rank], [T, heads D]
  Tensor kv, attended;    // [T, D], [T, heads D]
  Tensor low;             // [T, groups * rank]
  Tensor compressor, index_q, index_weight;
  Tensor router, hidden;
};

// A state buffer of f32 rows; returns its index in `specs`. `slack` and `ahead`: of a Ring, rows beyond the needed
// ones.
size_t declare(std::vector<StateSpec>& specs, const std::string& name, StateKind kind, int64_t width, int64_t ratio = 1,
               int64_t need = 0, int64_t slack = 0, int64_t ahead = 0);

// Reads, loads and computes layers. Lives as long as the model.
class Layers {
 public:
  Layers(const Shape& shape, const Frequencies& freq) : shape_(shape), freq_(freq) {}

  // The tensors of a layer under `prefix`. Throws Invalid and Unsupported, naming the tensor.
  LayerFile read(TensorTable& tensors, const std::string& prefix, int64_t ratio, bool hashed) const;

  // The backend to load into and to compute with. Throws Unsupported when it lacks the family's operations.
  void use(Ops& ops);
  Ops& ops() const { return *ops_; }
  LatentOps& latent() const { return *latent_; }
  // `keys_alone`: for `keys`, which makes key rows without queries; for `attention` otherwise.
  LayerWeights load(const LayerFile& f, bool keys_alone = false);
  // null for a view of nothing
  std::unique_ptr<Weight> one(const MatrixView& view, WeightUse use = WeightUse::Linear);
  // A matrix that the file may hold with scales beside it.
  std::unique_ptr<Weight> scaled(const MatrixView& view, WeightUse use = WeightUse::Linear);
  size_t resident_bytes() const { return resident_; }

  int64_t floats_per_row() const;  // of Activations
  Activations activations(int64_t rows, bool compressing) const;
  Norm norm(const std::unique_ptr<Weight>& gain) const { return {gain.get(), shape_.norm_eps}; }
  HyperConnection hyper(const std::unique_ptr<Weight>& fn, const std::unique_ptr<Weight>& base,
                        const std::unique_ptr<Weight>& scale) const {
    return {fn.get(), base.get(), scale.get(), shape_.streams, shape_.sinkhorn, shape_.norm_eps, shape_.hc_eps};
  }

  // One layer on a.streams; `attend` makes a.out of a.x. `entered`: enter_attention was done by the layer before, whose
  // `next` this one was.
  template <class Attend>
  void layer(const LayerWeights& w, std::span<const int32_t> ids, Activations& a, Attend&& attend, bool entered = false,
             const LayerWeights* next = nullptr) {
    if (!entered) enter_attention(w, a.streams, a);
    attend();
    latent_->hc_out_in_norm(*ops_, a.out, hyper(w.hc_ffn_fn, w.hc_ffn_base, w.hc_ffn_scale), a.streams,
                            norm(w.ffn_norm), a.x, a.mix);
    experts(w, ids, a);
    if (next)
      latent_->hc_out_in_norm(*ops_, a.out, hyper(next->hc_attn_fn, next->hc_attn_base, next->hc_attn_scale), a.streams,
                              norm(next->attn_norm), a.x, a.mix);
    else
      latent_->hc_out(a.out, a.mix, shape_.streams, a.streams);
  }

  // a.x, a.mix = hc_in(streams), normed
  void enter_attention(const LayerWeights& w, const Tensor& streams, Activations& a);
  // a.out = Wb Wa_grouped rope^-1( attend( rope(rms(Wqb rms(Wqa x))), window rows, compressed rows ) )
  void attention(const LayerWeights& w, const LayerState& at, int64_t ratio, std::span<const RowRef> rows,
                 Activations& a);

  // The parts of `attention`.
  void queries(const LayerWeights& w, const Tensor& rope, Activations& a) {  // a.q of a.x
    low_product(w, a);
    finish_low_queries(w, a);
    high_queries(w, rope, a);
  }
  void keys(const LayerWeights& w, const Tensor& x, const Tensor& rope, Tensor kv);
  LatentAttention attend_args(const LayerWeights& w, const LayerState& at, int64_t ratio) const;
  void attention_out(const LayerWeights& w, Activations& a);  // a.out of a.attended, rotated back

 private:
  void check_table(const MatrixView& table, const std::string& name) const;
  std::unique_ptr<Weight> keep(std::unique_ptr<Weight> w);
  std::unique_ptr<Weight> stack(const std::vector<MatrixView>& parts, WeightUse use = WeightUse::Linear);
  void finish_keys(const LayerWeights& w, const Tensor& rope, Tensor kv);
  // Columns of a.compressor: keys and gates of compressed rows, and of the indexer's.
  int64_t own_columns(int64_t ratio) const { return 2 * shape_.lanes(ratio) * shape_.head_dim; }
  int64_t index_columns(int64_t ratio) const { return ratio == 4 ? 4 * shape_.index_dim : 0; }
  void compressor(const LayerWeights& w, int64_t ratio, Activations& a);  // a.compressor of a.x
  void compress_rows(const LayerWeights& w, const LayerState& at, int64_t ratio, std::span<const RowRef> rows,
                     Activations& a);
  void compress_index(const LayerWeights& w, const LayerState& at, std::span<const RowRef> rows,
                      Activations& a);                      // of layers of ratio 4
  void low_product(const LayerWeights& w, Activations& a);  // of a.x: a.q_low before its norm, and a.kv if `w` has both
  void finish_low_queries(const LayerWeights& w, Activations& a);
  void high_queries(const LayerWeights& w, const Tensor& rope, Activations& a);  // a.q of a.q_low
  bool chooses(std::span<const RowRef> rows) const;
  void finish_index_queries(const Tensor& rope, Activations& a);
  void index_weights(const LayerWeights& w, Activations& a);
  Selection select(const LayerState& at, std::span<const RowRef> rows, const Activations& a);
  void experts(const LayerWeights& w, std::span<const int32_t> ids, Activations& a);

  const Shape& shape_;
  const Frequencies& freq_;
  Ops* ops_ = nullptr;
  LatentOps* latent_ = nullptr;
  size_t resident_ = 0;
};

}  // namespace ds4::deepseek4
