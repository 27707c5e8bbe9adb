// A model family: its hyper-parameters, the state a session of it owns, and its forward pass.
//
// A family is written on the operations of ops.h alone; sessions, persistence, batching and sampling know nothing of
// it beyond this interface.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/source.h"
#include "ops.h"

namespace ds4 {

// The rows of one step: every token of every session of the step; a session's tokens stand together, in order.
struct Batch {
  std::span<const int32_t> ids;     // [T]
  std::span<const RowRef> rows;     // [T]
  std::span<const int32_t> wanted;  // row numbers whose logits are asked for; only these go through the head
  // Called with (l, [T, E]) before layer l, and with (layers, ...) after the final norm. For tests and tools.
  std::function<void(int64_t, const Tensor&)> probe;
};

// Called with (done, total) parts of the weights while loading.
using LoadProgress = std::function<void(size_t, size_t)>;

class Model {
 public:
  virtual ~Model() = default;

  // Different for every model of this process, for whatever a backend remembers of one.
  uint64_t serial() const { return serial_; }
  virtual std::string family() const = 0;
  virtual int64_t vocab() const = 0;
  virtual int64_t layers() const = 0;
  virtual int64_t width() const = 0;

  // Order and names are part of the checkpoint format.
  virtual const std::vector<StateSpec>& state_specs() const = 0;
  // Bytes of activations of a step of `rows` token rows, `wanted` of them with logits.
  virtual size_t workspace_bytes(int64_t rows, int64_t wanted) const = 0;

  // Hands the weights to the backend; called once, before `forward`. `ops` outlives the model.
  virtual void load(Ops& ops, const LoadProgress& progress) = 0;
  // Bytes that the backend holds for weights beside the mapped file.
  virtual size_t resident_bytes() const = 0;

  // Logits [wanted, vocab] in the backend's scratch memory: valid until the next forward. Each row's K and V (and
  // whatever else the family keeps) is in its session's state afterwards. The states have room for the rows.
  virtual Tensor forward(const Batch& batch) = 0;

 private:
  inline static std::atomic<uint64_t> created_ = 0;
  const uint64_t serial_ = ++created_;
};

// model.forward(batch) by way of Ops::run; `batch` has no probe.
inline Tensor forward_step(Ops& ops, Model& model, const Batch& batch) {
  return ops.run({model.serial(), batch.ids, batch.rows, batch.wanted}, [&] { return model.forward(batch); });
}

// Whether buffers that have held up to `longest` tokens still hold all that a session cut to `to` tokens goes on from.
// Append buffers always do, rings as far as they reach back, recurrent buffers never (but for nothing at all).
bool can_truncate(std::span<const StateSpec> specs, int64_t longest, int64_t to);
// Rows of a buffer that carry information when the session holds `tokens` tokens. A ring is counted in slots.
int64_t payload_rows(const StateSpec& spec, int64_t tokens);
// Bytes of all buffers of a session of `tokens` tokens, as the payload stores them.
size_t payload_bytes(std::span<const StateSpec> specs, int64_t tokens);

// Reads and checks everything but the weights' values. `kv_type` is the element type of K and V (F16, BF16 or F32).
// Throws Unsupported (family, key or tensor that is not implemented) and Invalid (missing or contradictory), naming
// the key or tensor first. The tensors' memory must outlive the model.
std::unique_ptr<Model> make_model(const std::string& family, HyperParams params, TensorTable tensors, DType kv_type);

}  // namespace ds4
