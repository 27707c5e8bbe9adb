#include "session/session.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstring>
#include <thread>

#include "quant/quant.h"

namespace ds4 {
namespace {

// Tokens whose state is given back while the backend is held.
constexpr int64_t kClearedAtOnce = 1024;

// How long rows are copied before a step may have the backend, and bytes that are copied without a look at the clock:
// more where each copy is a round trip to a device.
constexpr std::chrono::microseconds kHeld{1000};
constexpr size_t kCopiedAtOnce = size_t{256} << 10, kDeviceCopiedAtOnce = size_t{1} << 20;
// State that those may touch where it is in host memory: rows of a token lie together, and what is touched first is
// costly.
constexpr size_t kTouchedAtOnce = size_t{2} << 20;

void check_ids(std::span<const int32_t> ids, int64_t vocab) {
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= vocab)
      throw Invalid("token " + std::to_string(ids[i]) + " at index " + std::to_string(i) +
                    " is outside the vocabulary of " + std::to_string(vocab));
}

}  // namespace

void Backend::give_way() const {
  while (steps_waiting.load(std::memory_order_relaxed) > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

Session::Session(std::shared_ptr<LoadedModel> model, int64_t ctx) : model_(std::move(model)), ctx_(ctx) {
  if (ctx < 1 || ctx > INT32_MAX) throw Invalid("a context of " + std::to_string(ctx) + " tokens");
  if (!model_->loaded) throw Invalid("the model's weights are not loaded");
  const std::scoped_lock lock(model_->backend->busy);
  state_ = model_->backend->ops->new_state(model_->model->state_specs(), ctx);
}

Session::~Session() {
  const std::scoped_lock lock(model_->backend->busy);
  state_.reset();
}

std::vector<int32_t> Session::tokens() const {
  const std::scoped_lock lock(model_->backend->busy);
  return tokens_;
}

int64_t Session::longest() const {
  const std::scoped_lock lock(model_->backend->busy);
  return longest_;
}

size_t Session::resident_bytes() const {
  const std::scoped_lock lock(model_->backend->busy);
  return state_->resident_bytes() + tokens_.capacity() * sizeof(int32_t) +
         (logits_.capacity() + ahead_logits_.capacity()) * sizeof(float);
}

int64_t Session::common_prefix(std::span<const int32_t> ids, int64_t beyond) const {
  const std::scoped_lock lock(model_->backend->busy);
  const size_t n = std::min(ids.size(), tokens_.size());
  if (beyond < 0) throw Invalid("a prefix beyond " + std::to_string(beyond) + " tokens");
  if (beyond >= static_cast<int64_t>(n)) return 0;
  if (const auto at = static_cast<size_t>(beyond); tokens_[at] != ids[at]) return 0;
  // Whole blocks first: memcmp reads many tokens at once, a loop that may end at each of them does not.
  constexpr size_t block = 1024;
  size_t same = 0;
  while (n - same >= block && std::memcmp(&tokens_[same], &ids[same], block * sizeof(int32_t)) == 0) same += block;
  while (same < n && tokens_[same] == ids[same]) ++same;
  return static_cast<int64_t>(same) > beyond ? static_cast<int64_t>(same) : 0;
}

bool Session::can_rewind_locked(int64_t n) const {
  const auto have = static_cast<int64_t>(tokens_.size());
  return n == have || (n >= 0 && n < have && can_truncate(model_->model->state_specs(), longest_, n));
}

bool Session::can_rewind(int64_t n) const {
  const std::scoped_lock lock(model_->backend->busy);
  return can_rewind_locked(n);
}

void Session::forget_ahead() noexcept {
  ahead_.clear();
  ahead_at_ = 0;
}

// Zeros for what drafts are made from, where it belongs to other tokens.
void Session::clear_stale_drafts() {
  if (!stale_drafts_) return;
  const auto& specs = model_->model->state_specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].draft) continue;
    const size_t row = row_bytes(specs[i].type, specs[i].row_elements());
    const std::vector<std::byte> zeros(row * static_cast<size_t>(specs[i].capacity));
    state_->import_rows(i, 0, specs[i].capacity, zeros);
  }
  stale_drafts_ = false;
}

void Session::clear_locked() noexcept {
  state_->truncate(0);
  forget_locked();
}

void Session::forget_locked() noexcept {
  forget_ahead();
  stale_drafts_ = false;
  tokens_.clear();
  n_tokens_ = 0;
  longest_ = 0;
  logits_.clear();
  importing_.clear();
}

void Session::clear() {
  int64_t held = 0;
  {
    const std::scoped_lock lock(model_->backend->busy);
    held = static_cast<int64_t>(std::max(tokens_.size(), importing_.size()));
    if (held <= kClearedAtOnce) return clear_locked();
    forget_locked();
  }
  // Empty already; giving memory back takes its time, and the steps of other sessions do not wait for all of it.
  while ((held -= kClearedAtOnce) > 0) {
    model_->backend->give_way();
    const std::scoped_lock lock(model_->backend->busy);
    state_->truncate(held);
  }
  const std::scoped_lock lock(model_->backend->busy);
  clear_locked();
}

void Session::rewind(int64_t n) {
  const std::scoped_lock lock(model_->backend->busy);
  rewind_locked(n);
}

void Session::rewind_locked(int64_t n) {
  const auto have = static_cast<int64_t>(tokens_.size());
  if (n < 0 || n > have)
    throw Invalid("rewind to " + std::to_string(n) + " tokens of a session of " + std::to_string(have));
  forget_ahead();
  if (n == have) return;
  if (!can_rewind_locked(n)) {
    clear_locked();
    throw SessionInvalid("the state of " + std::to_string(have) + " tokens cannot be cut to " + std::to_string(n));
  }
  if (n == 0) return clear_locked();
  state_->truncate(n);
  stale_drafts_ = true;
  tokens_.resize(static_cast<size_t>(n));
  n_tokens_ = n;
  logits_.clear();
}

void Session::fork_from(const Session& other, int64_t n) {
  const std::scoped_lock lock(model_->backend->busy);
  if (&other == this) return rewind_locked(n);
  const auto have = static_cast<int64_t>(other.tokens_.size());
  if (other.model_ != model_) throw Invalid("fork from a session of another model");
  if (n < 0 || n > have) throw Invalid("fork " + std::to_string(n) + " tokens of a session of " + std::to_string(have));
  if (n > ctx_) throw ContextLength(n, ctx_);
  // Whatever comes next, this session's old content is gone; freed first, it does not count twice while copying.
  clear_locked();
  if (!other.can_rewind_locked(n))
    throw SessionInvalid("the state of " + std::to_string(have) + " tokens cannot be cut to " + std::to_string(n));
  if (n == 0) return;
  try {
    tokens_.assign(other.tokens_.begin(), other.tokens_.begin() + static_cast<ptrdiff_t>(n));
    if (n == have) logits_ = other.logits_;
    state_->fork_from(*other.state_, n);
    stale_drafts_ = other.stale_drafts_ || n < have;
    longest_ = other.longest_;
    n_tokens_ = n;
  } catch (...) {
    clear_locked();
    throw;
  }
}

bool Session::has_logits() const {
  const std::scoped_lock lock(model_->backend->busy);
  return !logits_.empty();
}

std::vector<float> Session::logits() const {
  const std::scoped_lock lock(model_->backend->busy);
  if (logits_.empty()) throw SessionInvalid("the session has no logits for its last token");
  return logits_;
}

int64_t Session::n_ahead() const {
  const std::scoped_lock lock(model_->backend->busy);
  return static_cast<int64_t>(ahead_.size() - ahead_at_);
}

bool Session::advance(int32_t token, Sampler& sampler, int32_t& sampled, SampleLogprobs& logprobs) {
  const std::scoped_lock lock(model_->backend->busy);
  const auto vocab = static_cast<size_t>(model_->model->vocab());
  if (static_cast<size_t>(sampler.vocab()) > vocab)
    throw Invalid("a sampler for " + std::to_string(sampler.vocab()) + " tokens, the vocabulary has " +
                  std::to_string(vocab));
  if (ahead_at_ == ahead_.size() || ahead_[ahead_at_] != token) {
    forget_ahead();
    return false;
  }
  tokens_.push_back(token);
  const auto n = static_cast<int64_t>(tokens_.size());
  n_tokens_ = n;
  longest_ = std::max(longest_, n);
  logits_.clear();
  const float* row = ahead_logits_.data() + ahead_at_ * vocab;
  ++ahead_at_;
  sampled = sampler.sample({row, static_cast<size_t>(sampler.vocab())}, &logprobs);
  return true;
}

namespace {

// Positions whose rows a ring may have taken the place of others for. A cut empties draft buffers, so that they hold
// nothing of what lay behind it.
int64_t seen(const StateSpec& spec, int64_t tokens, int64_t longest) {
  return spec.draft ? tokens : longest;
}

// Calls piece(slot or -1 where the ring has lost them, first row, count) for runs of rows [first, first + count) of a
// ring that keeps `rows` rows before position `end` and has seen `longest` positions.
template <class Piece>
void ring_pieces(const StateSpec& spec, int64_t rows, int64_t end, int64_t longest, int64_t first, int64_t count,
                 Piece&& piece) {
  const int64_t oldest = end - rows;
  if (const int64_t lost = std::min(count, longest - spec.kept() - oldest - first); lost > 0) {
    piece(int64_t{-1}, first, lost);
    first += lost;
    count -= lost;
  }
  while (count > 0) {
    const int64_t slot = (oldest + first) % spec.capacity, n = std::min(count, spec.capacity - slot);
    piece(slot, first, n);
    first += n;
    count -= n;
  }
}

const StateSpec& checked_rows(const Model& model, const Session::Rows& rows, int64_t tokens) {
  const StateSpec& spec = model.state_specs()[rows.index];
  const int64_t have = payload_rows(spec, tokens);
  if (rows.first < 0 || rows.first > have || rows.count > have - rows.first)
    throw Invalid("rows " + std::to_string(rows.first) + "+" + std::to_string(rows.count) + " of " +
                  std::to_string(have) + " of " + spec.name);
  return spec;
}

// Throws Invalid where the rows do not have `bytes` bytes.
void check_sizes(std::span<const StateSpec> specs, std::span<const Session::Rows> which, size_t bytes) {
  size_t sum = 0;
  for (const Session::Rows& rows : which) {
    if (rows.index >= specs.size()) throw Invalid("state buffer " + std::to_string(rows.index) + " does not exist");
    const StateSpec& spec = specs[rows.index];
    const size_t row = row_bytes(spec.type, spec.row_elements());
    if (rows.count < 0 || static_cast<size_t>(rows.count) > (bytes - sum) / row)
      throw Invalid(std::to_string(bytes) + " bytes for " + std::to_string(rows.count) + " rows of " + spec.name +
                    " and what stands before them");
    sum += static_cast<size_t>(rows.count) * row;
  }
  if (sum != bytes) throw Invalid(std::to_string(bytes) + " bytes for rows of " + std::to_string(sum));
}

}  // namespace

template <class Copy>
void Session::in_turns(std::span<const Rows> which, size_t bytes, bool importing, Copy&& copy) const {
  const std::span<const StateSpec> specs = model_->model->state_specs();
  check_sizes(specs, which, bytes);
  const bool host = model_->backend->ops->host_memory();
  const size_t at_once = host ? kCopiedAtOnce : kDeviceCopiedAtOnce;
  size_t at = 0;
  int64_t done = 0;  // of the first of those that are left
  while (!which.empty()) {
    model_->backend->give_way();
    const std::scoped_lock lock(model_->backend->busy);
    const auto until = std::chrono::steady_clock::now() + kHeld;
    const auto tokens = static_cast<int64_t>((importing ? importing_ : tokens_).size());
    const size_t all = importing && host ? payload_bytes(specs, tokens) : 0;
    do {
      const auto& [index, first, count] = which.front();
      const size_t row = row_bytes(specs[index].type, specs[index].row_elements());
      const size_t touched = all / static_cast<size_t>(std::max<int64_t>(1, payload_rows(specs[index], tokens)));
      const size_t most = std::max<size_t>(1, std::min(at_once / row, kTouchedAtOnce / std::max<size_t>(1, touched)));
      const int64_t n = std::min(count - done, static_cast<int64_t>(most));
      copy(Rows{index, first + done, n}, at);
      at += static_cast<size_t>(n) * row;
      done += n;
      if (done == count) which = which.subspan(1), done = 0;
    } while (!which.empty() && std::chrono::steady_clock::now() < until);
  }
}

void Session::export_rows(std::span<const Rows> which, std::span<std::byte> out) const {
  in_turns(which, out.size(), false, [&](const Rows& rows, size_t at) { export_locked(rows, out.subspan(at)); });
}

void Session::export_locked(const Rows& rows, std::span<std::byte> out) const {
  const auto n = static_cast<int64_t>(tokens_.size());
  const StateSpec& spec = checked_rows(*model_->model, rows, n);
  const size_t row = row_bytes(spec.type, spec.row_elements());
  out = out.first(static_cast<size_t>(rows.count) * row);
  if (spec.draft && stale_drafts_) {
    std::fill(out.begin(), out.end(), std::byte{});
    return;
  }
  if (spec.kind != StateKind::Ring) return state_->export_rows(rows.index, rows.first, rows.count, out);
  ring_pieces(spec, payload_rows(spec, n), n, seen(spec, n, longest_), rows.first, rows.count,
              [&](int64_t slot, int64_t at, int64_t some) {
                const auto part =
                    out.subspan(static_cast<size_t>(at - rows.first) * row, static_cast<size_t>(some) * row);
                if (slot < 0)
                  std::fill(part.begin(), part.end(), std::byte{});
                else
                  state_->export_rows(rows.index, slot, some, part);
              });
}

void Session::begin_import(std::span<const int32_t> ids, int64_t longest) {
  const std::scoped_lock lock(model_->backend->busy);
  check_ids(ids, model_->model->vocab());
  if (static_cast<int64_t>(ids.size()) > ctx_) throw ContextLength(static_cast<int64_t>(ids.size()), ctx_);
  if (longest < static_cast<int64_t>(ids.size()))
    throw Invalid("a session of " + std::to_string(ids.size()) + " tokens that never held more than " +
                  std::to_string(longest));
  clear_locked();
  longest_ = longest;
  importing_.assign(ids.begin(), ids.end());
  stale_drafts_ = true;
  state_->reserve(static_cast<int64_t>(ids.size()));
}

void Session::import_rows(std::span<const Rows> which, std::span<const std::byte> in) {
  in_turns(which, in.size(), true, [&](const Rows& rows, size_t at) { import_locked(rows, in.subspan(at)); });
}

void Session::import_locked(const Rows& rows, std::span<const std::byte> in) {
  const auto n = static_cast<int64_t>(importing_.size());
  const StateSpec& spec = checked_rows(*model_->model, rows, n);
  if (!tokens_.empty()) throw Invalid("import into a session that is in use");
  if (spec.draft) clear_stale_drafts();
  const size_t row = row_bytes(spec.type, spec.row_elements());
  in = in.first(static_cast<size_t>(rows.count) * row);
  if (spec.kind != StateKind::Ring) return state_->import_rows(rows.index, rows.first, rows.count, in);
  ring_pieces(spec, payload_rows(spec, n), n, seen(spec, n, longest_), rows.first, rows.count,
              [&](int64_t slot, int64_t at, int64_t some) {
                if (slot >= 0)
                  state_->import_rows(
                      rows.index, slot, some,
                      in.subspan(static_cast<size_t>(at - rows.first) * row, static_cast<size_t>(some) * row));
              });
}

void Session::finish_import(std::span<const float> logits) {
  const std::scoped_lock lock(model_->backend->busy);
  if (!logits.empty() && static_cast<int64_t>(logits.size()) != model_->model->vocab())
    throw Invalid(std::to_string(logits.size()) + " logits for a vocabulary of " +
                  std::to_string(model_->model->vocab()));
  logits_.assign(logits.begin(), logits.end());
  tokens_ = std::move(importing_);
  importing_.clear();
  n_tokens_ = static_cast<int64_t>(tokens_.size());
}

namespace {

void check_step(const LoadedModel& model, std::span<const StepRow> rows, auto&& tokens_of, auto&& model_of) {
  if (!model.loaded) throw Invalid("the model's weights are not loaded");
  if (rows.empty()) throw Invalid("a step without rows");
  const int64_t vocab = model.model->vocab();
  std::vector<const void*> seen;
  for (const StepRow& row : rows) {
    if (model_of(row) != &model) throw Invalid("a session of another model");
    if (row.tokens.empty()) throw Invalid("a row without tokens");
    check_ids(row.tokens, vocab);
    check_ids(row.drafts, vocab);
    const int64_t most = most_ahead(model.model->state_specs());
    if (static_cast<int64_t>(row.drafts.size()) > most)
      throw Invalid(std::to_string(row.drafts.size()) + " drafts, a session of this model has room for " +
                    std::to_string(most));
    if (!row.drafts.empty() && (!row.sampler || row.every)) throw Invalid("drafts of a row without a sampler");
    const auto need = tokens_of(row) + static_cast<int64_t>(row.tokens.size() + row.drafts.size());
    if (need > row.session->ctx()) throw ContextLength(need, row.session->ctx());
    // A sampler may know fewer tokens: models pad their vocabulary with rows that no text spells.
    if (row.sampler && row.sampler->vocab() > vocab)
      throw Invalid("a sampler for " + std::to_string(row.sampler->vocab()) + " tokens, the vocabulary has " +
                    std::to_string(vocab));
    seen.push_back(row.session);
    if (row.sampler) seen.push_back(row.sampler);
  }
  std::sort(seen.begin(), seen.end());
  if (std::adjacent_find(seen.begin(), seen.end()) != seen.end())
    throw Invalid("a session or sampler stands in two rows of one step");
}

}  // namespace

void step(LoadedModel& loaded, std::span<StepRow> rows, const std::function<void()>& under_way) {
  Backend& backend = *loaded.backend;
  backend.steps_waiting.fetch_add(1, std::memory_order_relaxed);
  const std::scoped_lock lock(backend.busy);
  backend.steps_waiting.fetch_sub(1, std::memory_order_relaxed);
  check_step(
      loaded, rows, [](const StepRow& r) { return static_cast<int64_t>(r.session->tokens_.size()); },
      [](const StepRow& r) { return r.session->model_.get(); });

  Ops& ops = *loaded.backend->ops;
  const int64_t vocab = loaded.model->vocab();
  try {
    std::vector<int32_t> ids, wanted;
    std::vector<RowRef> refs;
    for (const StepRow& row : rows) {
      Session& s = *row.session;
      auto position = static_cast<int32_t>(s.tokens_.size());
      s.forget_ahead();
      s.clear_stale_drafts();
      s.state_->reserve(position + static_cast<int64_t>(row.tokens.size() + row.drafts.size()));
      s.tokens_.reserve(s.tokens_.size() + row.tokens.size() + row.drafts.size());
      for (const int32_t id : row.tokens) {
        ids.push_back(id);
        refs.push_back({s.state_.get(), position++});
      }
      const auto end = static_cast<int32_t>(ids.size());
      for (const int32_t id : row.drafts) {
        ids.push_back(id);
        refs.push_back({s.state_.get(), position++});
      }
      const auto first = row.every ? end - static_cast<int32_t>(row.tokens.size()) : end - 1;
      if (row.sampler || row.want_logits || row.every)
        for (int32_t i = first; i < static_cast<int32_t>(ids.size()); ++i) wanted.push_back(i);
    }

    if (under_way && ops.host_memory()) under_way();
    const Tensor logits = forward_step(ops, *loaded.model, {.ids = ids, .rows = refs, .wanted = wanted, .probe = {}});
    if (under_way && !ops.host_memory()) under_way();

    int64_t at = 0;
    std::vector<float> copy;
    std::vector<RowDraw> draws;  // by the backend, all at once at the end
    std::vector<StepRow*> drawn;
    struct Sampled {
      StepRow* row;
      const float* logits;
    };
    const auto sample = [](const Sampled& s) {
      Sampler& sampler = *s.row->sampler;
      s.row->sampled = sampler.sample({s.logits, static_cast<size_t>(sampler.vocab())}, &s.row->logprobs);
    };
    std::vector<Sampled> sampled;  // here, all at once at the end: they are a fiftieth of a step of many sessions
    for (StepRow& row : rows) {
      Session& s = *row.session;
      s.logits_.clear();
      s.tokens_.insert(s.tokens_.end(), row.tokens.begin(), row.tokens.end());
      if (row.every) {
        const auto n = static_cast<int64_t>(row.tokens.size());
        ops.to_host(logits.rows(at, n), row.every);
        at += n - 1;  // the last one is the row's own
      }
      if (!row.sampler && !row.want_logits) {
        at += row.every ? 1 : 0;
        continue;
      }
      const int64_t at_of_row = at++;
      const Tensor one = logits.rows(at_of_row, 1);
      if (const auto n = static_cast<int64_t>(row.drafts.size()); n > 0) {
        s.ahead_logits_.resize(static_cast<size_t>(n * vocab));
        ops.to_host(logits.rows(at, n), s.ahead_logits_.data());
        s.ahead_.assign(row.drafts.begin(), row.drafts.end());
        at += n;
      }
      if (ops.can_draw() && row.sampler && !row.want_logits) {
        if (const auto plan = row.sampler->plan()) {
          draws.push_back({at_of_row, *plan});
          drawn.push_back(&row);
          continue;
        }
      }
      const float* values = one.data;
      if (row.want_logits || !ops.host_memory()) {
        std::vector<float>& to = row.want_logits ? s.logits_ : copy;
        to.resize(static_cast<size_t>(vocab));
        ops.to_host(one, to.data());
        values = to.data();
      }
      if (!row.sampler) continue;
      sampled.push_back({&row, values});
      if (values == copy.data()) sample(sampled.back()), sampled.pop_back();  // the next row's take its place
    }
    ops.share(static_cast<int64_t>(sampled.size()), [&](int64_t i) { sample(sampled[static_cast<size_t>(i)]); });
    if (!draws.empty()) {
      std::vector<int32_t> tokens(draws.size());
      ops.draw(logits, draws, tokens);
      for (size_t i = 0; i < tokens.size(); ++i) {
        drawn[i]->sampled = tokens[i];
        drawn[i]->sampler->drawn(tokens[i]);
      }
    }
    for (const StepRow& row : rows) {
      const auto n = static_cast<int64_t>(row.session->tokens_.size());
      row.session->n_tokens_ = n;
      row.session->longest_ = std::max(row.session->longest_, n);
    }
  } catch (const std::exception& e) {
    for (const StepRow& row : rows) row.session->clear_locked();
    throw StepFailed(e.what());
  }
}

std::vector<std::vector<int32_t>> draft(LoadedModel& loaded, std::span<const DraftRequest> rows) {
  Backend& backend = *loaded.backend;
  backend.steps_waiting.fetch_add(1, std::memory_order_relaxed);
  const std::scoped_lock lock(backend.busy);
  backend.steps_waiting.fetch_sub(1, std::memory_order_relaxed);
  if (!loaded.loaded) throw Invalid("the model's weights are not loaded");
  Drafter* drafter = loaded.model->drafter();
  if (!drafter) throw Invalid("the model has no layers that draft");
  const int64_t most = most_ahead(loaded.model->state_specs());
  std::vector<std::vector<int32_t>> out(rows.size());
  std::vector<DraftRow> asked;
  std::vector<size_t> whose;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Session& s = *rows[i].session;
    if (s.model_.get() != &loaded) throw Invalid("a session of another model");
    check_ids({&rows[i].token, 1}, loaded.model->vocab());
    const auto have = static_cast<int64_t>(s.tokens_.size());
    for (size_t j = 0; j < i; ++j)
      if (rows[j].session == rows[i].session) throw Invalid("a session stands in two rows of one draft");
    // Behind the token, which takes a place of its own.
    const int64_t room = std::min({rows[i].most, most, s.ctx() - have - 1});
    if (room < 1) continue;
    asked.push_back({s.state_.get(), static_cast<int32_t>(have), rows[i].token, room, {}, rows[i].logits});
    whose.push_back(i);
  }
  if (asked.empty()) return out;
  try {
    for (const size_t i : whose) {
      rows[i].session->forget_ahead();
      rows[i].session->clear_stale_drafts();
    }
    drafter->draft(asked);
  } catch (const std::exception& e) {
    for (const DraftRequest& row : rows) row.session->clear_locked();
    throw StepFailed(e.what());
  }
  for (size_t j = 0; j < asked.size(); ++j) out[whose[j]] = std::move(asked[j].drafts);
  return out;
}

}  // namespace ds4
