// Each kernel a handful of times on the smallest models, for tools under which a launch takes long
// (compute-sanitizer --tool racecheck gpu_check few): steps of every width that has kernels of its own must leave the
// bits of one prefill.
#include <algorithm>
#include <numeric>

#include "common.h"
#include "random_models.h"
#include "reference/draw_row.h"

namespace ds4::gpu {
namespace {

void check(Ops& cuda, Results& r, const RandomModel& random, const std::string& what,
           const std::vector<int64_t>& widths) {
  const auto start = std::chrono::steady_clock::now();
  const auto model = random.make();
  model->load(cuda, {});
  const int64_t total = std::accumulate(widths.begin(), widths.end(), int64_t{0}), vocab = model->vocab();
  Random ids_of(random.seed + 3);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < total; ++i) ids.push_back(static_cast<int32_t>(ids_of.below(vocab)));
  // Logits of the last token alone: the head costs as much as a layer here.
  const auto advance = [&](std::span<State* const> states, int64_t first, int64_t n) {
    std::vector<RowRef> rows;
    std::vector<int32_t> step, wanted;
    for (State* const s : states) {
      s->reserve(first + n);
      for (int64_t i = first; i < first + n; ++i) {
        rows.push_back({s, static_cast<int32_t>(i)});
        step.push_back(ids[static_cast<size_t>(i)]);
      }
      wanted.push_back(static_cast<int32_t>(step.size()) - 1);
    }
    return download(cuda, forward_step(cuda, *model, {.ids = step, .rows = rows, .wanted = wanted, .probe = {}}));
  };
  const auto a = cuda.new_state(model->state_specs(), total + 8), b = cuda.new_state(model->state_specs(), total + 8);
  State* const one[] = {a.get()};
  State* const both[] = {a.get(), b.get()};
  int64_t at = 0;
  std::vector<float> pieces;
  for (const int64_t n : widths) {
    pieces = advance(one, at, n);
    at += n;
  }
  State* const whole[] = {b.get()};
  r.equal(advance(whole, 0, total), pieces, what + " in pieces");
  a->truncate(total - 1);
  b->fork_from(*a, total - 1);
  const auto side = advance(both, total - 1, 1);
  r.equal({side.begin(), side.begin() + vocab}, pieces, what + " beside a fork");
  r.equal({side.begin() + vocab, side.end()}, pieces, what + " of a fork");
  if (Drafter* drafter = model->drafter()) {
    DraftRow row{a.get(), static_cast<int32_t>(total), ids.front(), 2, {}, nullptr};
    a->reserve(total + 3);
    drafter->draft({&row, 1});
    r.expect(!row.drafts.empty(), what + ": no guesses");
  }
  std::printf("few: %-28s %.1f s\n", what.c_str(),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  std::fflush(stdout);
}

}  // namespace

void check_few(Ops& cuda, Results& r, uint64_t seed) {
  DeepSeekShape small = tiny_deepseek();
  small.layers = 3;
  small.hash_layers = 1;
  small.ratios = {0, 4, 128};
  small.vocab = 160;
  // The second and third step of one width are recorded and replayed.
  const std::vector<int64_t> widths = {70, 1, 1, 1, 3, 9, 17, 34};
  check(cuda, r, random_llama(seed, {DType::Q8_0, DType::Q4_K}), "llama Q8_0/Q4_K", {40, 1, 1, 1, 3, 9, 17});
  check(cuda, r,
        random_deepseek(small, seed + 1, {DType::F16, DType::Q8_0, DType::IQ2_XXS, DType::Q2_K}, true, false,
                        Drafts::Mtp),
        "deepseek4 Q8_0/IQ2_XXS/Q2_K", widths);
  check(cuda, r, random_deepseek(small, seed + 2, {DType::BF16, DType::Q4_0, DType::MXFP4, DType::Q4_K}, false),
        "deepseek4 Q4_0/MXFP4/Q4_K", widths);
  // Heads of 512 columns, matrices that held_halves and dense_blocks take; windows close in steps of one row.
  DeepSeekShape wide = small;
  wide.width = wide.q_rank = 512;
  wide.head_dim = 512;
  wide.heads = 20;
  wide.window = 128;
  wide.index_heads = 64;
  check(cuda, r, random_deepseek(wide, seed + 4, {DType::F16, DType::Q8_0, DType::IQ2_XXS, DType::Q2_K}, true),
        "deepseek4, heads of 512", {124, 1, 1, 1, 1, 1, 1, 3, 9, 17, 34});
  check_wide(cuda, r, seed, true);

  Random random(seed + 3);
  const int64_t vocab = 1000;
  const float none = -std::numeric_limits<float>::infinity();
  const std::vector<int32_t> forbidden = {3, 5};
  const std::vector<uint32_t> mask(vocab / 32, 0xFFFF0FFFu);
  for (const DrawSettings& s : {DrawSettings{true, 1, none, 0, 1, 0.4, vocab},
                                {false, 1, none, 0, 1, 0.4, vocab},
                                {false, 1, none, 20, 0.9, 0.4, vocab},
                                {false, 1, -3.0f, 0, 0.9, 0.4, vocab}}) {
    cuda.reset_scratch();
    auto logits = random.floats(vocab, 5.0f);
    const Tensor t = upload(cuda, logits, 1, vocab);
    const RowDraw draw{0, {s, {}, forbidden, mask}};
    int32_t token = -2;
    Best best;
    cuda.best(t, {&best, 1});
    r.expect(best.id == best_of(logits).id, "few: best");
    cuda.draw(t, {&draw, 1}, {&token, 1});
    r.expect(token == draw_row(draw.plan, logits), "few: draw");
  }
}

}  // namespace ds4::gpu
