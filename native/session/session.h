// Sessions and the step: who remembers. A session is one timeline: its tokens, the state that the model family keeps
// for them, and the logits after the last one. A step advances several sessions in one forward pass.
//
//   tokens  t0 t1 ... t(n-1)          always exactly what the state was computed from
//   state   one buffer per StateSpec  rows for n tokens
//   logits  [vocab] after t(n-1)      or none (nobody asked, or the session was rewound)
//   ahead   d1 d2 ... dk              evaluated in the last step behind the tokens, and logits after each of them: they
//                                     are taken in one by one when they turn out to be what is drawn, or forgotten
//
// What was evaluated ahead leaves no trace: rings have spare rows for it, so that no row of the session's own is lost,
// and rows of append buffers beyond the tokens count for nothing.
//
// Every public operation leaves the session in that form, also when it throws. Operations of one backend exclude each
// other with a lock; a session is otherwise used by one thread at a time.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "model/model.h"
#include "ops.h"
#include "session/sampler.h"

namespace ds4 {

// A step or prompt needs more positions than the session has.
struct ContextLength : Invalid {
  ContextLength(int64_t tokens, int64_t ctx)
      : Invalid(std::to_string(tokens) + " tokens in a context of " + std::to_string(ctx)),
        n_tokens(tokens),
        n_ctx(ctx) {}
  int64_t n_tokens, n_ctx;
};
// A session cannot do what was asked: it has no logits, or its state cannot be cut there.
struct SessionInvalid : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The forward pass or an allocation failed; the sessions of the step were cleared.
struct StepFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The operations of one device and the lock that keeps its users apart.
struct Backend {
  explicit Backend(std::unique_ptr<Ops> o) : ops(std::move(o)) {}
  std::unique_ptr<Ops> ops;
  std::mutex busy;
  std::atomic<int> steps_waiting{0};

  // Before each of many short uses in a row: a mutex is not fair, and a step that waits must not wait for all of them.
  void give_way() const;
};

// A model whose weights the backend holds. `keep_alive` owns the mapped file.
struct LoadedModel {
  std::shared_ptr<Backend> backend;
  std::unique_ptr<Model> model;
  std::shared_ptr<void> keep_alive;
  bool loaded = false;
};

class Session {
 public:
  // Throws Invalid for a capacity below one token; the state grows with use.
  Session(std::shared_ptr<LoadedModel> model, int64_t ctx);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int64_t ctx() const { return ctx_; }
  int64_t n_tokens() const { return n_tokens_.load(std::memory_order_relaxed); }
  std::vector<int32_t> tokens() const;
  // The most tokens that the state has held since it was cleared: rings have lost what lies further back.
  int64_t longest() const;
  size_t resident_bytes() const;

  // Length of the equal prefix; 0 when it is not more than `beyond`, which one comparison mostly shows.
  int64_t common_prefix(std::span<const int32_t> ids, int64_t beyond = 0) const;
  bool can_rewind(int64_t n) const;
  // Cuts to the first n tokens, 0 <= n <= n_tokens (else Invalid). Throws SessionInvalid, and clears, where the family
  // cannot. Logits survive only when nothing is cut.
  void rewind(int64_t n);
  void clear();
  // Becomes a copy of `other` cut to n tokens; both of the same model. Throws Invalid, ContextLength, SessionInvalid;
  // on SessionInvalid and bad_alloc this session is left cleared, `other` never changes.
  void fork_from(const Session& other, int64_t n);

  bool has_logits() const;
  // Throws SessionInvalid when there are none.
  std::vector<float> logits() const;

  // Tokens evaluated ahead that may still be taken in.
  int64_t n_ahead() const;
  // `token` was drawn after the session's last one. When it is the next of those evaluated ahead, it becomes part of
  // the session, `sampler` draws the token after it, exactly as `step` with that token would have, and the result is
  // true. Else nothing is drawn, what was evaluated ahead is forgotten, and the result is false.
  bool advance(int32_t token, Sampler& sampler, int32_t& sampled, SampleLogprobs& logprobs);

  // Persistence, generic over the specs: rows [first, first + count) of buffer `index` as the payload stores them. Rows
  // of a ring are counted from the oldest kept one on, in the order of positions; rows that the ring has lost since are
  // zeros.
  struct Rows {
    size_t index;
    int64_t first, count;
  };
  // All of them, one behind the other. The backend is held for about a millisecond at a time, so that steps of
  // other sessions come between; nobody else may use this one meanwhile.
  void export_rows(std::span<const Rows> which, std::span<std::byte> out) const;
  // Replaces the session: `begin_import` clears it and makes room for the tokens; rows follow; `finish_import` makes it
  // valid. Between the two the session counts as empty. Token ids are checked (Invalid), room too (ContextLength).
  // `longest` is the saved session's, at least the number of tokens (else Invalid).
  void begin_import(std::span<const int32_t> ids, int64_t longest);
  void import_rows(std::span<const Rows> which, std::span<const std::byte> in);
  // `logits` is [vocab] or empty.
  void finish_import(std::span<const float> logits);

 private:
  friend void step(LoadedModel& model, std::span<struct StepRow> rows, const std::function<void()>& under_way);
  friend std::vector<std::vector<int32_t>> draft(LoadedModel& model, std::span<const struct DraftRequest> rows);

  void forget_ahead() noexcept;
  void clear_stale_drafts();
  void clear_locked() noexcept;
  void forget_locked() noexcept;  // all but the state
  bool can_rewind_locked(int64_t n) const;
  void rewind_locked(int64_t n);
  // Calls copy(rows, their offset among `bytes` bytes) for parts of `which`, in order and with the backend held.
  template <class Copy>
  void in_turns(std::span<const Rows> which, size_t bytes, bool importing, Copy&& copy) const;
  void export_locked(const Rows& rows, std::span<std::byte> out) const;
  void import_locked(const Rows& rows, std::span<const std::byte> in);

  std::shared_ptr<LoadedModel> model_;
  int64_t ctx_;
  std::unique_ptr<State> state_;
  std::vector<int32_t> tokens_;
  std::atomic<int64_t> n_tokens_{0};  // tokens_.size(), readable beside a running step
  int64_t longest_ = 0;
  std::vector<float> logits_;  // empty: none
  std::vector<int32_t> ahead_;
  std::vector<float> ahead_logits_;  // [ahead, vocab]
  size_t ahead_at_ = 0;              // the next one to take in
  bool stale_drafts_ = false;        // the draft buffers are of other tokens
  std::vector<int32_t> importing_;
};

// One session's share of a step, and its result.
struct StepRow {
  Session* session = nullptr;
  std::span<const int32_t> tokens;  // one: decode; many: a prefill chunk
  Sampler* sampler = nullptr;       // draws the token after the last one
  bool want_logits = false;         // keeps the logits of the last position in the session
  float* every = nullptr;           // not null: gets the logits of all positions, [tokens, vocab]
  // Tokens that may follow, evaluated in the same pass for Session::advance. Needs a sampler; at most most_ahead.
  std::span<const int32_t> drafts = {};

  int32_t sampled = -1;  // result of the sampler
  SampleLogprobs logprobs;
};

// One forward pass over all rows. Checks everything first: on Invalid and ContextLength nothing has changed. On any
// later failure all sessions of the step are cleared and StepFailed is thrown.
//
// `under_way` is called once, when the device computes and this thread has nothing to do but wait, or before the pass
// where both are the processor; never when the step fails before. It must not touch sessions, and not wait.
void step(LoadedModel& model, std::span<StepRow> rows, const std::function<void()>& under_way = {});

// At most `most` tokens that may follow `token`, which was drawn after the session's last one.
struct DraftRequest {
  Session* session = nullptr;
  int32_t token = 0;
  int64_t most = 0;
  std::vector<float>* logits = nullptr;  // gets what each draft was chosen by, [drafts, vocab]
};

// The guesses of the model's drafter, in one pass over all sessions. Nothing where none is asked or the context has no
// room. Throws Invalid, and StepFailed as `step` does.
std::vector<std::vector<int32_t>> draft(LoadedModel& model, std::span<const DraftRequest> rows);

}  // namespace ds4
