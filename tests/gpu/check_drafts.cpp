// Layers that draft on the GPU: guesses against the reference, the same when operations are replayed, and no trace of
// what was evaluated in vain.
#include <algorithm>

#include "common.h"
#include "random_models.h"
#include "reference/reference.h"

namespace ds4::gpu {
namespace {

// Logits [tokens, vocab] of tokens at `first`.
std::vector<float> advance(Ops& ops, Model& model, State& state, int64_t first, const std::vector<int32_t>& ids) {
  state.reserve(first + static_cast<int64_t>(ids.size()));
  std::vector<RowRef> rows;
  std::vector<int32_t> wanted;
  for (size_t i = 0; i < ids.size(); ++i) {
    rows.push_back({&state, static_cast<int32_t>(first + static_cast<int64_t>(i))});
    wanted.push_back(static_cast<int32_t>(i));
  }
  return download(ops, forward_step(ops, model, {.ids = ids, .rows = rows, .wanted = wanted, .probe = {}}));
}

std::vector<int32_t> slice(const std::vector<int32_t>& ids, int64_t first, int64_t end) {
  return {ids.begin() + first, ids.begin() + end};
}

struct Guess {
  std::vector<int32_t> drafts;
  std::vector<float> logits;
};

Guess guess(Model& model, State& state, int64_t position, int32_t token) {
  Guess g;
  DraftRow row{&state, static_cast<int32_t>(position), token, 5, {}, &g.logits};
  model.drafter()->draft({&row, 1});
  g.drafts = row.drafts;
  return g;
}

// The rows that a payload of `tokens` tokens takes, of all buffers.
std::vector<std::byte> kept(const Model& model, const State& state, int64_t tokens) {
  std::vector<std::byte> all;
  const auto& specs = model.state_specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    const size_t row = row_bytes(specs[i].type, specs[i].row_elements());
    const int64_t rows = payload_rows(specs[i], tokens);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = specs[i].kind == StateKind::Ring ? (tokens - rows + r) % specs[i].capacity : r;
      std::vector<std::byte> one(row);
      state.export_rows(i, at, 1, one);
      all.insert(all.end(), one.begin(), one.end());
    }
  }
  return all;
}

void check(Ops& cuda, Results& r, const RandomModel& random, const std::string& what) {
  const auto ref = make_reference_ops();
  const auto model = random.make(), model_r = random.make();
  model->load(cuda, {});
  model_r->load(*ref, {});
  Random ids_of(random.seed + 5);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < 160; ++i) ids.push_back(static_cast<int32_t>(ids_of.below(model->vocab())));
  const auto a = cuda.new_state(model->state_specs(), 256), b = cuda.new_state(model->state_specs(), 256);
  const auto ar = ref->new_state(model_r->state_specs(), 256);
  int64_t at = 0;
  size_t guessed = 0;
  for (const int64_t n : {3, 8, 40, 41, 42, 43, 130}) {
    if (at < n) {
      advance(cuda, *model, *a, at, slice(ids, at, n));
      advance(*ref, *model_r, *ar, at, slice(ids, at, n));
    }
    for (; at < n; ++at) advance(cuda, *model, *b, at, {ids[static_cast<size_t>(at)]});
    const int32_t token = ids[static_cast<size_t>(n)];
    const std::string here = what + " at " + std::to_string(n);
    const Guess mine = guess(*model, *a, n, token), want = guess(*model_r, *ar, n, token);
    // The first may be less sure than asked for.
    r.expect(mine.drafts.size() == want.drafts.size(), here + ": number of guesses");
    guessed += mine.drafts.size();
    size_t same = 0;
    while (same < std::min(mine.drafts.size(), want.drafts.size()) && mine.drafts[same] == want.drafts[same]) ++same;
    r.expect(same == want.drafts.size(), here + ": only the first " + std::to_string(same) + " guesses are equal");
    if (mine.logits.size() == want.logits.size()) r.close(mine.logits, want.logits, 1e-3, here + " logits");
    r.equal(mine.logits, guess(*model, *b, n, token).logits, here + ", token by token");
    r.equal(mine.logits, guess(*model, *a, n, token).logits, here + ", again");
    // Guesses evaluated in vain: what is kept is that of a session that never guessed.
    std::vector<int32_t> vain = {token};
    for (const int32_t d : mine.drafts) vain.push_back((d + 1) % static_cast<int32_t>(model->vocab()));
    const auto ahead = advance(cuda, *model, *a, n, vain), plain = advance(cuda, *model, *b, n, {token});
    r.equal({ahead.begin(), ahead.begin() + model->vocab()}, plain, here + ", verified");
    r.expect(kept(*model, *a, n + 1) == kept(*model, *b, n + 1), here + ": rejected guesses left a trace");
    advance(*ref, *model_r, *ar, n, {token});
    at = n + 1;
    a->truncate(at);
    b->truncate(at);
  }
  r.expect(guessed > 7, what + ": " + std::to_string(guessed) + " guesses in all");
}

}  // namespace

void check_drafts(Ops& cuda, Results& r, uint64_t seed) {
  const DeepSeekTypes plain = {DType::F32, DType::F32, DType::F32, DType::F32};
  check(cuda, r, random_deepseek(tiny_deepseek(), seed, plain, false, false, Drafts::Mtp), "mtp");
  check(cuda, r, random_deepseek(tiny_deepseek(), seed + 1, plain, false, false, Drafts::DSpark), "dspark");
}

}  // namespace ds4::gpu
