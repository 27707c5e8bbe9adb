// The closed list of operations that a backend implements. Model files (native/model/) call nothing else.
//
// Shapes are written [rows, columns]. T is the number of token rows of one step: the rows of all sessions of
// the step, one after the other. All activations are f32.
//
// Exactness contract, on every backend: output row t of every operation depends on input row t (and, for
// attention, on the state of its own session) and on nothing else, bit for bit. Not on T, not on the other
// rows, not on the number of threads. So the order of every reduction is a function of the operation's own
// shape and of absolute positions only.
//
// Aliasing: an output may alias an input only where the comment says "in place".
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "draw.h"
#include "types.h"

namespace ds4 {

class LatentOps;  // ops_latent.h

// A weight matrix (or vector) in the backend's own layout. Owned by the model, used by one backend only.
class Weight {
 public:
  virtual ~Weight() = default;
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  virtual size_t resident_bytes() const = 0;  // memory that the backend holds beside the mapped file

 protected:
  Weight(int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {}
  int64_t rows_, cols_;
};

// What a matrix is for; lets a backend pick the layout.
enum class WeightUse {
  Linear,     // y = W x
  Precise,    // y = W x of x as it is, however W is stored: what decides (routers) or scales (hyper-connections)
  SwiGLU,     // parts = {gate, up}: used by linear_swiglu only
  Embedding,  // row look-up only
  TiedHead,   // row look-up and y = W x
};

// ---- session state
// -------------------------------------------------------------------------------------------

enum class StateKind {
  Append,     // one row every `ratio` tokens; any truncation is exact
  Ring,       // the last `capacity` rows
  Recurrent,  // fixed size, overwritten by every token
  Counter,    // small host-visible integers
};

// One buffer of a session, declared by the family. Save, load, fork and rewind follow from the list.
struct StateSpec {
  // "k.0", "v.0", ...: unique in the list, written into checkpoints. Buffers of attention keys, and only these, have
  // names that begin with "k.": a backend may store them transposed.
  std::string name;
  StateKind kind = StateKind::Append;
  DType type = DType::F16;  // element type of the payload; a backend may compute in another layout, not in less
  int64_t heads = 1;        // a row is heads * width elements
  int64_t width = 0;
  int64_t ratio = 1;     // Append: tokens per row
  int64_t capacity = 0;  // Ring: rows, the row of position p at p % capacity; Recurrent, Counter: rows
  int64_t need = 0;      // Ring: rows before position n that going on from n reads
  int64_t spare = 0;     // Ring: rows of the capacity for positions that a session may not keep; never in a payload
  bool draft = false;    // guesses are made from it, results never: may be missing or stale
  int64_t row_elements() const { return heads * width; }
  int64_t kept() const { return capacity - spare; }  // Ring: the last so many rows are the session's
};

// The buffers of one session in the backend's memory and layout. Grows with use: a state of capacity C that
// holds n tokens occupies memory for about n tokens.
class State {
 public:
  virtual ~State() = default;
  virtual int64_t capacity() const = 0;  // tokens
  // Makes room for `tokens` tokens (<= capacity). Called before a step; throws std::bad_alloc and changes
  // nothing.
  virtual void reserve(int64_t tokens) = 0;
  // Forgets rows beyond `tokens`. For Append buffers exact; the session decides for the other kinds.
  virtual void truncate(int64_t tokens) = 0;
  // Becomes equal to `other` cut to `tokens` tokens. Same backend, same specs. May share memory
  // copy-on-write.
  virtual void fork_from(const State& other, int64_t tokens) = 0;
  // Payload of buffer `index`: rows [first, first + count) as spec.type elements, row-major, heads
  // contiguous.
  virtual void export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const = 0;
  virtual void import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) = 0;
  virtual size_t resident_bytes() const = 0;
  // Host memory of row `row` of buffer `index`, f32, as the payload stores it; for buffers of type F32 in host memory
  // only (else Invalid). A Ring takes the position as `row`. `writable_row` makes the row this state's own first.
  virtual const float* readable_row(size_t index, int64_t row) const = 0;
  virtual float* writable_row(size_t index, int64_t row) = 0;
};

// One token row of a step: which session's state it reads and appends to, at which position.
struct RowRef {
  State* state = nullptr;
  int32_t position = 0;
};

// ---- operation parameters
// ------------------------------------------------------------------------------------

enum class RopeKind {
  Interleaved,  // pair i is columns (2i, 2i + 1): GGUF "NORM"
  HalfSplit,    // pair i is columns (i, i + d/2): HF, GGUF "NEOX"
};

struct Norm {
  const Weight* gain = nullptr;  // [1, dim], f32
  float eps = 1e-5f;
};

// Indices into the session's state list: where layer l keeps its keys and values.
struct KvSlots {
  size_t k = 0;
  size_t v = 0;
};

// What a step of one model reads beside weights and states. The spans outlive the step.
struct StepInput {
  uint64_t model = 0;               // Model::serial
  std::span<const int32_t> ids;     // [T]
  std::span<const RowRef> rows;     // [T]
  std::span<const int32_t> wanted;  // row numbers
};

// What is drawn from row `row` of a step's logits.
struct RowDraw {
  int64_t row = 0;
  DrawPlan plan;
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual std::string name() const = 0;  // "cpu (avx512-vnni, 2 threads)", "reference"

  // ---- memory
  // Loads `parts`, stacked along rows (q, k, v as one matrix; gate and up as one), in file type. All parts
  // have the same cols. Throws Unsupported for a type without a kernel, naming it. Matrices of more than one row and
  // column that are loaded as Linear or SwiGLU are not read again after the call; all others may be.
  virtual std::unique_ptr<Weight> load(std::span<const MatrixView> parts, WeightUse use) = 0;
  // Scratch for one step, valid until the next `reset_scratch`. Contents undefined.
  virtual Tensor scratch(int64_t n, int64_t dim) = 0;
  virtual void reset_scratch() = 0;
  virtual size_t scratch_bytes() const = 0;
  virtual std::unique_ptr<State> new_state(std::span<const StateSpec> specs, int64_t capacity) = 0;
  // Whether Tensor::data is host memory, readable without to_host.
  virtual bool host_memory() const { return true; }
  // Copies between host and backend memory; synchronous.
  virtual void to_host(const Tensor& from, float* out) = 0;  // out: from.n * from.dim, dense
  virtual void to_device(const float* from, const Tensor& to) = 0;

  // ---- steps
  // At least the largest position of the rows. Which operations a step has depends on positions through it only.
  virtual int64_t horizon(std::span<const RowRef> rows) const {
    int64_t largest = 0;
    for (const RowRef& r : rows) largest = std::max<int64_t>(largest, r.position);
    return largest;
  }
  // The result of `forward`, which runs the operations of one step on the spans of `input` themselves. A backend may
  // keep the operations and replay them for a step of the same model, sizes and horizon, without calling it.
  virtual Tensor run(const StepInput& input, const std::function<Tensor()>& forward) {
    (void)input;
    return forward();
  }

  // Where the backend has cores that do better apart, each with some rows and all operations, than together at one
  // operation after the other: calls part(ops, first row, rows) for parts that cover `rows` rows, at the same time and
  // each with operations of its own, whose scratch memory is that part's. The rows need nothing of each other. False:
  // nothing was called.
  virtual bool in_parts(int64_t rows, const std::function<void(Ops&, int64_t, int64_t)>& part) {
    (void)rows, (void)part;
    return false;
  }

  // Calls each(i) for every i < n, on the cores that the backend computes with; throws what one of them has thrown.
  virtual void share(int64_t n, const std::function<void(int64_t)>& each) {
    for (int64_t i = 0; i < n; ++i) each(i);
  }

  // The operations of `f` may run beside those called after it, until `join`. They come after everything called before,
  // and of one lane one after the other. What follows before `join` neither touches what they write nor writes what
  // they read. lane: 0 .. kLanes - 1.
  static constexpr int kLanes = 2;
  virtual void beside(int lane, const std::function<void()>& f) {
    (void)lane;
    f();
  }
  virtual void join() {}

  // ---- operations
  // out[t] = table[ids[t]]; ids are in range (checked at the edge).             out [T, E]
  virtual void embed(const Weight& table, std::span<const int32_t> ids, Tensor out) = 0;
  // y = x * rsqrt(mean(x^2) + eps) * gain, in f32. In place allowed.             x, y [T, E]
  virtual void rms_norm(Tensor x, Norm norm, Tensor y) = 0;
  // y = W norm(x), plus bias when given; `norm` null: y = W x.                   x [T, cols], y [T, rows]
  virtual void linear(const Weight& w, Tensor x, const Norm* norm, const Weight* bias, Tensor y) = 0;
  // y += W x.                                                                    x [T, cols], y [T, rows]
  virtual void linear_add(const Weight& w, Tensor x, Tensor y) = 0;
  // y = silu(G n) * (U n), n = norm(x) or x; w was loaded as SwiGLU {G, U}.      x [T, cols], y [T, rows/2]
  virtual void linear_swiglu(const Weight& w, Tensor x, const Norm* norm, Tensor y) = 0;
  // out[t] = (cos, sin) of position[t] * freq[i], computed in f64, i < pairs.    out [T, 2 * pairs]: cos then
  // sin
  virtual void rope_table(std::span<const RowRef> rows, std::span<const double> freq, Tensor out) = 0;
  // Rotates q in place and k on its way into the state: k and v of row t are stored at rows[t].position.
  // Rotated width is 2 * pairs (columns beyond stay). qkv [T, (Hq + 2 Hkv) * D]: q heads, then k heads, then
  // v heads.
  virtual void rope_store(Tensor qkv, Tensor table, RopeKind kind, std::span<const RowRef> rows, KvSlots kv,
                          int64_t q_heads, int64_t kv_heads, int64_t head_dim) = 0;
  // Causal attention of row t over positions 0..rows[t].position of its own session; head h reads KV head
  // h * kv_heads / q_heads.  q [T, Hq * D] (a column view of qkv), out [T, Hq * D]
  virtual void attention(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads,
                         int64_t head_dim, float scale, Tensor out) = 0;
  // out[i] = x[index[i]]                                                         out [n, dim]
  virtual void gather(Tensor x, std::span<const int32_t> index, Tensor out) = 0;

  // ---- draws
  // Whether `draw` is there, so that logits need not come to the host for it.
  virtual bool can_draw() const { return false; }
  // tokens[i] = the token that draws[i] takes from its row of `logits`, as the sampler would; -1: nothing may be
  // chosen. Rows are different, and used up.                                           logits [n, vocab of the model]
  virtual void draw(Tensor logits, std::span<const RowDraw> draws, std::span<int32_t> tokens);
  // The best token of each row and its lead.                                   logits [out.size(), vocab]
  virtual void best(Tensor logits, std::span<Best> out);

  // The operations of the DeepSeek V4 family; null where the backend has none.
  virtual LatentOps* latent() { return nullptr; }
};

}  // namespace ds4
