// Draws on the GPU against the same plans drawn by one thread on the host, for one row and for sixteen, and what they
// cost. The host's draws are held against the sampler by tests/engine/test_draw.py.
#include <algorithm>

#include "common.h"
#include "reference/draw_row.h"

namespace ds4::gpu {
namespace {

struct Drawn {
  DrawSettings settings;
  std::vector<std::pair<int32_t, float>> bias;
  std::vector<int32_t> forbidden;
  std::vector<uint32_t> mask;
  bool masked = false;

  DrawPlan plan() const {
    DrawPlan p{settings, bias, forbidden, std::nullopt};
    if (masked) p.mask = mask;
    return p;
  }
};

template <class T, size_t N>
T one_of(Random& random, const T (&values)[N]) {
  return values[random.below(static_cast<int64_t>(N))];
}

Drawn random_draw(Random& random, int64_t vocab) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  Drawn d;
  d.settings.greedy = random.below(6) == 0;
  d.settings.scale = one_of(random, {0.2f, 0.7f, 1.0f, 1.0f, 1.5f, 5.0f, 1e30f});
  d.settings.log_min_p = one_of(random, {none, none, -3.0f, -1.2f, 0.0f, -27.0f});
  d.settings.top_k = one_of<int64_t>(random, {0, 0, 0, 1, 5, 40, 700, 5000, int64_t{1} << 40});
  d.settings.top_p = one_of(random, {1.0, 1.0, 0.0, 0.5, 0.9, 0.99, 1 - 0x1p-40});
  d.settings.uniform = static_cast<double>(random.next() >> 11) * 0x1p-53;
  d.settings.vocab = vocab;
  if (random.below(4) == 0)
    for (int32_t id = 0; id < std::min<int64_t>(vocab, 40); id += 7) d.bias.emplace_back(id, 4 * random.uniform());
  if (random.below(3) == 0)
    for (int i = 0; i < 3; ++i) d.forbidden.push_back(static_cast<int32_t>(random.below(vocab)));
  if (random.below(4) == 0) {
    d.masked = true;
    const uint64_t dense = random.next();
    for (int64_t i = 0; i < std::max<int64_t>(1, vocab / 32 - 1); ++i)
      d.mask.push_back(static_cast<uint32_t>(random.next() & (dense % 2 ? random.next() & random.next() : ~0ull)));
  }
  return d;
}

std::vector<float> random_logits(Random& random, int64_t n) {
  // Sums of uniform numbers: a middle and tails.
  const float size = one_of(random, {0.0f, 0.1f, 0.5f, 3.0f, 10.0f});
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = size * (random.uniform() + random.uniform() + random.uniform());
  if (random.below(3) == 0)
    for (float& x : v) x = std::nearbyint(x);
  const float special = one_of(random, {NAN, -INFINITY, INFINITY});
  if (random.below(3) == 0)
    for (float& x : v)
      if (random.below(special > 0 ? 97 : 4) == 0) x = special;
  return v;
}

}  // namespace

void check_draws(Ops& cuda, Results& r, uint64_t seed) {
  Random random(seed + 77);
  for (int round = 0; round < 60; ++round) {
    const int64_t vocab = one_of<int64_t>(random, {1, 63, 65, 1000, 32003, 129280, 129280, int64_t{1} << 19});
    const int64_t wide = vocab + random.below(3), rows = vocab > 200000 ? 3 : 16;
    cuda.reset_scratch();
    std::vector<float> logits;
    std::vector<Drawn> drawn;
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = random_logits(random, wide);
      logits.insert(logits.end(), row.begin(), row.end());
      drawn.push_back(random_draw(random, vocab));
    }
    std::vector<int32_t> want, batched(static_cast<size_t>(rows)), alone(1);
    std::vector<Best> want_best, best(static_cast<size_t>(rows));
    std::vector<RowDraw> draws;
    for (int64_t i = 0; i < rows; ++i) {
      const auto first = logits.begin() + static_cast<ptrdiff_t>(i * wide);
      std::vector<float> row(first, first + static_cast<ptrdiff_t>(wide));
      want_best.push_back(best_of(row));
      want.push_back(draw_row(drawn[static_cast<size_t>(i)].plan(), row));
      draws.push_back({i, drawn[static_cast<size_t>(i)].plan()});
    }
    const std::string what = "vocabulary " + std::to_string(vocab) + " round " + std::to_string(round) + " row ";
    const Tensor again = upload(cuda, logits, rows, wide);
    cuda.best(again, best);
    std::reverse(draws.begin(), draws.end());
    cuda.draw(again, draws, batched);
    for (int64_t i = 0; i < rows; ++i) {
      const auto at = static_cast<size_t>(i);
      const int32_t got = batched[static_cast<size_t>(rows - 1 - i)];
      r.expect(got == want[at],
               "draw " + what + std::to_string(i) + ": " + std::to_string(got) + ", not " + std::to_string(want[at]));
      const float lead = best[at].lead, want_lead = want_best[at].lead;
      const bool same = lead == want_lead || (lead != lead && want_lead != want_lead);
      r.expect(same && best[at].id == want_best[at].id,
               "best " + what + std::to_string(i) + ": " + std::to_string(best[at].id) + " by " +
                   std::to_string(best[at].lead) + ", not " + std::to_string(want_best[at].id) + " by " +
                   std::to_string(want_best[at].lead));
    }
    const Tensor one = upload(cuda, logits, rows, wide);
    cuda.draw(one, {&draws.back(), 1}, alone);
    r.expect(alone[0] == want[0], "draw alone " + what + "0");
  }

  // Cost: a row of a trained model is mostly flat far below its best token.
  const int64_t vocab = 129280;
  for (const int64_t rows : {1, 16}) {
    std::vector<float> logits;
    for (int64_t i = 0; i < rows * vocab; ++i)
      logits.push_back(4 * (random.uniform() + random.uniform() + random.uniform()));
    struct Kind {
      const char* name;
      DrawSettings settings;
    };
    const float none = -std::numeric_limits<float>::infinity();
    const Kind kinds[] = {{"greedy", {true, 1, none, 0, 1, 0.4, vocab}},
                          {"min-p 0.05", {false, 1, -3.0f, 0, 1, 0.4, vocab}},
                          {"all", {false, 1, none, 0, 1, 0.4, vocab}},
                          {"top-p 0.95", {false, 1, none, 0, 0.95, 0.4, vocab}},
                          {"top-k 40", {false, 1, none, 40, 1, 0.4, vocab}},
                          {"top-k 40, top-p 0.95", {false, 1, none, 40, 0.95, 0.4, vocab}}};
    for (const Kind& kind : kinds) {
      cuda.reset_scratch();
      const Tensor t = upload(cuda, logits, rows, vocab);
      std::vector<RowDraw> draws;
      for (int64_t i = 0; i < rows; ++i) draws.push_back({i, {kind.settings, {}, {}, std::nullopt}});
      std::vector<int32_t> tokens(static_cast<size_t>(rows));
      std::vector<double> times;
      for (int i = 0; i < 21; ++i) {
        const auto start = std::chrono::steady_clock::now();
        cuda.draw(t, draws, tokens);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
      }
      std::nth_element(times.begin(), times.begin() + 10, times.end());
      std::printf("draw of %2d rows, %-22s %7.1f us\n", static_cast<int>(rows), kind.name, times[10]);
    }
    cuda.reset_scratch();
    const Tensor t = upload(cuda, logits, rows, vocab);
    std::vector<double> times;
    for (int i = 0; i < 21; ++i) {
      const auto start = std::chrono::steady_clock::now();
      cuda.to_host(t, logits.data());
      times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    }
    std::nth_element(times.begin(), times.begin() + 10, times.end());
    std::printf("logits of %2d rows to the host           %7.1f us\n", static_cast<int>(rows), times[10]);
  }
}

}  // namespace ds4::gpu
