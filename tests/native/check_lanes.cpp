// Many sessions of one token each, which a CPU backend with several threads sends through the model apart: the same
// bits as each session alone, while pages are shared, copied, given back and taken again. Under ThreadSanitizer, what
// the threads do to each other meanwhile.
#include "check_lanes.h"

#include "random_models.h"

namespace ds4::gpu {
namespace {

constexpr int64_t kSessions = 19, kTokens = 150;

std::vector<float> together(Ops& ops, Model& model, std::span<State* const> states, std::span<const int32_t> lengths,
                            std::span<const int32_t> tokens) {
  std::vector<RowRef> rows;
  std::vector<int32_t> wanted;
  for (size_t i = 0; i < states.size(); ++i) {
    states[i]->reserve(lengths[i] + 1);
    rows.push_back({states[i], lengths[i]});
    wanted.push_back(static_cast<int32_t>(i));
  }
  return download(ops, forward_step(ops, model, {.ids = tokens, .rows = rows, .wanted = wanted, .probe = {}}));
}

}  // namespace

void check_lanes(Ops& ops, Results& r, uint64_t seed) {
  const RandomModel random_model = random_llama(seed, {DType::Q8_0, DType::Q4_K});
  const auto model = random_model.make();
  model->load(ops, {});
  const int64_t vocab = model->vocab();
  Random random(seed + 1);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kTokens; ++i) ids.push_back(static_cast<int32_t>(random.below(vocab)));
  const auto new_state = [&] { return ops.new_state(model->state_specs(), kTokens); };

  std::vector<float> alone;  // [tokens, vocab]
  {
    const auto state = new_state();
    State* const one[] = {state.get()};
    for (int32_t at = 0; at < kTokens; ++at) {
      const auto got =
          together(ops, *model, one, std::span(&at, 1), std::span(ids).subspan(static_cast<size_t>(at), 1));
      alone.insert(alone.end(), got.begin(), got.end());
    }
  }

  // Every session goes along the same tokens, each at a place of its own, so that pages are begun in different steps.
  std::vector<std::unique_ptr<State>> states(kSessions);
  std::vector<int32_t> lengths(kSessions, 0);
  for (auto& state : states) state = new_state();
  for (int step = 0; step < 400; ++step) {
    const auto chosen = static_cast<size_t>(random.below(kSessions)),
               other = static_cast<size_t>(random.below(kSessions));
    if (chosen != other && random.below(3) == 0) {
      // Begins anew, or shares another one's pages until it writes to them.
      states[chosen] = new_state();
      lengths[chosen] = 0;
      if (random.below(2) == 0) {
        lengths[chosen] = lengths[other];
        states[chosen]->fork_from(*states[other], lengths[other]);
      }
    }
    std::vector<State*> rows;
    std::vector<int32_t> at, tokens;
    for (size_t i = 0; i < states.size(); ++i) {
      // Steps of as many rows are timed apart and together, so there are several sizes of them.
      if (lengths[i] == kTokens || (step % 4 == 3 && i % 3 == 0)) continue;
      rows.push_back(states[i].get());
      at.push_back(lengths[i]);
      tokens.push_back(ids[static_cast<size_t>(lengths[i]++)]);
    }
    if (rows.empty()) break;
    const auto got = together(ops, *model, rows, at, tokens);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto mine = static_cast<ptrdiff_t>(i) * vocab, want = at[i] * vocab;
      r.equal({got.begin() + mine, got.begin() + mine + vocab}, {alone.begin() + want, alone.begin() + want + vocab},
              "lanes: token " + std::to_string(at[i]) + " in step " + std::to_string(step));
    }
  }
}

}  // namespace ds4::gpu
