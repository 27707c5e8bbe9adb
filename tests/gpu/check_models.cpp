// Small random models on the GPU: logits against the reference, and the same bits however the tokens are cut, batched,
// forked, rewound or saved.
#include <algorithm>
#include <map>

#include "common.h"
#include "random_models.h"
#include "reference/reference.h"

namespace ds4::gpu {
namespace {

std::vector<float> run(Ops& ops, Model& model, State& state, const std::vector<int32_t>& ids, int64_t first,
                       int64_t end, int64_t chunk) {
  std::vector<float> out;
  for (int64_t at = first; at < end; at += chunk) {
    const int64_t n = std::min(chunk, end - at);
    state.reserve(at + n);
    std::vector<RowRef> rows;
    std::vector<int32_t> wanted;
    for (int64_t i = 0; i < n; ++i) {
      rows.push_back({&state, static_cast<int32_t>(at + i)});
      wanted.push_back(static_cast<int32_t>(i));
    }
    const Tensor logits = forward_step(ops, model,
                                       {.ids = std::span(ids).subspan(static_cast<size_t>(at), static_cast<size_t>(n)),
                                        .rows = rows,
                                        .wanted = wanted,
                                        .probe = {}});
    const auto got = download(ops, logits);
    out.insert(out.end(), got.begin(), got.end());
  }
  return out;
}

std::vector<float> tail(const std::vector<float>& v, int64_t first_row, int64_t vocab) {
  return {v.begin() + static_cast<ptrdiff_t>(first_row * vocab), v.end()};
}

double same_argmax(const std::vector<float>& a, const std::vector<float>& b, int64_t vocab) {
  int same = 0, rows = 0;
  for (size_t i = 0; i < a.size(); i += static_cast<size_t>(vocab), ++rows) {
    const auto best = [&](const std::vector<float>& v) {
      return std::max_element(v.begin() + static_cast<ptrdiff_t>(i), v.begin() + static_cast<ptrdiff_t>(i) + vocab) -
             v.begin();
    };
    same += best(a) == best(b);
  }
  return static_cast<double>(same) / std::max(rows, 1);
}

void check(Ops& cuda, Results& r, const RandomModel& random, const std::string& what, double most, double agree) {
  const auto ref = make_reference_ops();
  const auto model = random.make(), model_r = random.make();
  model->load(cuda, {});
  model_r->load(*ref, {});
  const int64_t total = 300, vocab = model->vocab();
  Random ids_of(random.seed + 9);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < total; ++i) ids.push_back(static_cast<int32_t>(ids_of.below(vocab)));
  const auto new_state = [&] { return cuda.new_state(model->state_specs(), 512); };

  const auto state = new_state();
  const auto all = run(cuda, *model, *state, ids, 0, total, total);
  {
    const auto state_r = ref->new_state(model->state_specs(), 512);
    const auto want = run(*ref, *model_r, *state_r, ids, 0, total, total);
    const double error = relative_error(all, want), same = same_argmax(all, want, vocab);
    std::printf("model %-28s error %.3g, same argmax %.1f %%\n", what.c_str(), error, 100 * same);
    r.expect(error <= most, what + " logits: error " + std::to_string(error));
    r.expect(same >= agree, what + " argmax: " + std::to_string(same));
  }
  for (const int64_t chunk : {1, 7, 130}) {
    const auto s = new_state();
    r.equal(run(cuda, *model, *s, ids, 0, total, chunk), all, what + " chunks of " + std::to_string(chunk));
  }

  // Three sessions of different lengths side by side, one token each.
  {
    std::vector<std::unique_ptr<State>> states;
    const int64_t lengths[] = {3, 130, 255};
    for (const int64_t n : lengths) {
      states.push_back(new_state());
      run(cuda, *model, *states.back(), ids, 0, n, 64);
    }
    for (int64_t step = 0; step < 20; ++step) {
      std::vector<RowRef> rows;
      std::vector<int32_t> tokens, wanted;
      for (size_t i = 0; i < states.size(); ++i) {
        const int64_t p = lengths[i] + step;
        states[i]->reserve(p + 1);
        rows.push_back({states[i].get(), static_cast<int32_t>(p)});
        tokens.push_back(ids[static_cast<size_t>(p)]);
        wanted.push_back(static_cast<int32_t>(i));
      }
      const auto got =
          download(cuda, forward_step(cuda, *model, {.ids = tokens, .rows = rows, .wanted = wanted, .probe = {}}));
      for (size_t i = 0; i < states.size(); ++i) {
        const auto from = static_cast<ptrdiff_t>((lengths[i] + step) * vocab);
        r.equal({got.begin() + static_cast<ptrdiff_t>(i) * vocab, got.begin() + static_cast<ptrdiff_t>(i + 1) * vocab},
                {all.begin() + from, all.begin() + from + vocab},
                what + " batched, session " + std::to_string(i) + " step " + std::to_string(step));
      }
    }
  }

  // Fork, then both go on; the older one is cut back and goes on once more.
  {
    const auto a = new_state(), b = new_state();
    run(cuda, *model, *a, ids, 0, 270, 90);
    b->fork_from(*a, 270);
    auto other = ids;
    for (size_t i = 270; i < other.size(); ++i) other[i] = (other[i] + 1) % static_cast<int32_t>(vocab);
    run(cuda, *model, *a, other, 270, total, 5);
    r.equal(run(cuda, *model, *b, ids, 270, total, 3), tail(all, 270, vocab), what + " after a fork");
    a->truncate(265);
    r.equal(run(cuda, *model, *a, ids, 265, total, 4), tail(all, 265, vocab), what + " after a cut");
  }
  // Save and load.
  {
    const auto& specs = model->state_specs();
    const auto a = new_state(), b = new_state();
    run(cuda, *model, *a, ids, 0, 200, 200);
    b->reserve(200);
    for (size_t i = 0; i < specs.size(); ++i) {
      const int64_t rows = payload_rows(specs[i], 200);
      std::vector<std::byte> bytes(static_cast<size_t>(rows) * row_bytes(specs[i].type, specs[i].row_elements()));
      a->export_rows(i, 0, rows, bytes);
      b->import_rows(i, 0, rows, bytes);
    }
    r.equal(run(cuda, *model, *b, ids, 200, total, 50), tail(all, 200, vocab), what + " after loading");
  }
}

}  // namespace

void check_models(Ops& cuda, Results& r, uint64_t seed) {
  check(cuda, r, random_llama(seed, {DType::F32, DType::F32}), "llama F32", 1e-3, 0.98);
  // The error is the rounding of activations to int8, which the reference does not do: 0.016 to 0.062 over ten seeds.
  check(cuda, r, random_llama(seed + 1, {DType::Q8_0, DType::Q4_K}), "llama Q8_0/Q4_K", 0.1, 0.8);
  check(cuda, r, random_deepseek(tiny_deepseek(), seed + 2, {DType::F32, DType::F32, DType::F32, DType::F32}, false),
        "deepseek4 F32, no rounding", 1e-3, 0.98);
  check(cuda, r,
        random_deepseek(tiny_deepseek(), seed + 3, {DType::F16, DType::Q8_0, DType::IQ2_XXS, DType::Q2_K}, true),
        "deepseek4 Q8_0/IQ2_XXS/Q2_K", 0.5, 0.5);
}

}  // namespace ds4::gpu
