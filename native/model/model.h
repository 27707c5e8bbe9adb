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
  // Called with (l, [T, E]) before layer l, and with (layers, ...) after the final norm; true: it has written other
  // rows there, which the layer is to start from. For tests and tools.
  std::function<bool(int64_t, const Tensor&)> probe;
};

// Tokens that one step may evaluate beyond those that a session keeps.
constexpr int64_t kMostAhead = 16;

// What one session asks of a drafter: at most `most` tokens after `token`, which is to stand at `position`.
struct DraftRow {
  State* state = nullptr;
  int32_t position = 0;
  int32_t token = 0;
  int64_t most = 0;
  std::vector<int32_t> drafts;           // result
  std::vector<float>* logits = nullptr;  // gets what each draft was chosen by, [drafts, vocab]
};

// Guesses how a session goes on, from `draft` buffers that the model keeps up to date in its forward pass. What it
// writes into the states lies at positions from `position` on, which the model's next pass writes again.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual std::string name() const = 0;
  virtual void draft(std::span<DraftRow> rows) = 0;  // different sessions, 1 <= most <= the model's most_ahead
};

// Called with (done, total) parts of the weights while loading.
using LoadProgress = std::function<void(size_t, size_t)>;

// A number that nothing else in this process has, for whatever a backend remembers of a graph of operations.
inline uint64_t next_serial() {
  static std::atomic<uint64_t> given = 0;
  return ++given;
}

class Model {
 public:
  virtual ~Model() = default;

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

  // Null: the model has no layers that draft.
  virtual Drafter* drafter() { return nullptr; }

 private:
  const uint64_t serial_ = next_serial();
};

// model.forward(batch) by way of Ops::run; `batch` has no probe.
inline Tensor forward_step(Ops& ops, Model& model, const Batch& batch) {
  return ops.run({model.serial(), batch.ids, batch.rows, batch.wanted}, [&] { return model.forward(batch); });
}

// Whether buffers that have held up to `longest` tokens still hold all that a session cut to `to` tokens goes on from.
// Append buffers always do, rings as far as they reach back, recurrent buffers never (but for nothing at all). Draft
// buffers are not asked.
bool can_truncate(std::span<const StateSpec> specs, int64_t longest, int64_t to);
// Tokens that a step may evaluate beyond those that the session keeps: as many as the rings have room for.
int64_t most_ahead(std::span<const StateSpec> specs);
// Rows of a buffer that carry information when the session holds `tokens` tokens.
int64_t payload_rows(const StateSpec& spec, int64_t tokens);
// Bytes of all buffers of a session of `tokens` tokens, as the payload stores them.
size_t payload_bytes(std::span<const StateSpec> specs, int64_t tokens);

// Reads and checks everything but the weights' values. `kv_type` is the element type of K and V (F16, BF16 or F32).
// Throws Unsupported (family, key or tensor that is not implemented) and Invalid (missing or contradictory), naming
// the key or tensor first. The tensors' memory must outlive the model.
std::unique_ptr<Model> make_model(const std::string& family, HyperParams params, TensorTable tensors, DType kv_type);

}  // namespace ds4
