// Layers behind those of a DeepSeek V4 model that only draft: the multi-token prediction head of the V3 report
// (arXiv:2412.19437, section 2.2) with V4's block, and DSpark's block drafter.
#pragma once

#include <memory>

#include "model/deepseek4_layer.h"

namespace ds4::deepseek4 {

// Of the main model.
struct SharedWeights {
  const Weight* embed = nullptr;
  const Weight* head = nullptr;
};

class DraftLayers : public Drafter {
 public:
  // After the model's own weights.
  virtual void load(const SharedWeights& shared) = 0;
  // Floats per token row that `forward` of the model needs for it, and those of a draft of one session.
  virtual int64_t absorb_floats() const = 0;
  virtual int64_t draft_floats() const = 0;
  // Within a step of the model, which has the streams in a.streams: before its first layer, after each, after the last.
  virtual void begin(int64_t rows) { (void)rows; }
  virtual void after_layer(int64_t layer, const Activations& a) { (void)layer, (void)a; }
  virtual void absorb(std::span<const int32_t> ids, std::span<const RowRef> rows, Activations& a) = 0;
};

// The drafter whose tensors the table has, null for none; its buffers go to `specs`. All references outlive it. Throws
// Invalid and Unsupported, naming key or tensor.
std::unique_ptr<DraftLayers> make_draft_layers(const Shape& shape, const Frequencies& freq, Layers& layers,
                                               HyperParams& params, TensorTable& tensors,
                                               std::vector<StateSpec>& specs);

// Copies rows of logits behind those in `to`.
void append_logits(Ops& ops, const Tensor& logits, std::vector<float>& to);

std::unique_ptr<DraftLayers> make_mtp(const Shape& shape, const Frequencies& freq, Layers& layers, HyperParams& params,
                                      TensorTable& tensors, std::vector<StateSpec>& specs);
std::unique_ptr<DraftLayers> make_dspark(const Shape& shape, const Frequencies& freq, Layers& layers,
                                         HyperParams& params, TensorTable& tensors, std::vector<StateSpec>& specs);

}  // namespace ds4::deepseek4
