// Experts of the widths that the kernel for few rows shares columns for (native/cuda/expert_blocks.h), in each type
// that it takes: against the reference, and the same bits however many rows a step has and how many of them an expert.
#include <algorithm>
#include <array>
#include <utility>

#include "common.h"
#include "reference/reference.h"

namespace ds4::gpu {

void check_wide(Ops& ops, Results& r, uint64_t seed, bool some) {
  const auto reference = make_reference_ops();
  Random random(seed + 9);
  const int64_t T = 17, few = 2;  // the reference computes the first rows: it is slow
  // Nine of nine experts: more than a block of threads takes of a row at once.
  std::vector<std::array<int64_t, 4>> sizes = {{9, 4096, 2048, 9}, {3, 4096, 2048, 2}, {3, 2048, 4096, 2}};
  std::vector<std::pair<DType, DType>> types = {{DType::IQ2_XXS, DType::Q2_K}, {DType::Q4_K, DType::Q4_K},
                                                {DType::MXFP4, DType::MXFP4},  {DType::Q8_0, DType::Q8_0},
                                                {DType::Q2_K, DType::IQ2_XXS}, {DType::MXFP4, DType::Q4_K}};
  std::vector<int64_t> groups;
  for (int64_t n = 1; n <= 16; ++n) groups.push_back(n);
  if (some) sizes = {sizes[1]}, types.resize(4), groups = {1, 3, 7, 16};
  for (const auto& [E, H, F, k] : sizes)
    for (const auto& [gate_type, down_type] : types) {
      if (k == E && (gate_type != types.front().first || down_type != types.front().second)) continue;
      std::vector<std::vector<std::byte>> bytes;
      std::vector<MatrixView> gate_up, down;
      for (int64_t e = 0; e < E; ++e) {
        for (int i = 0; i < 2; ++i) {
          bytes.push_back(random.matrix(gate_type, F, H, 0.02f));
          gate_up.push_back({bytes.back().data(), F, H, gate_type});
        }
        bytes.push_back(random.matrix(down_type, H, F, 0.02f));
        down.push_back({bytes.back().data(), H, F, down_type});
      }
      const auto x = random.floats(T * H), start = random.floats(T * H, 0.01f);
      const auto load = [&](Ops& on) {
        return std::pair{on.latent()->load_experts(gate_up, E, WeightUse::SwiGLU),
                         on.latent()->load_experts(down, E, WeightUse::Linear)};
      };
      const auto weights = load(ops);
      // Rows spread over all experts; all on the same two; all on one and most on a second.
      for (const int kind : {0, 1, 2}) {
        if ((some && kind == 1) || (k == E && kind > 0)) continue;
        auto logits = random.floats(T * E, 4.0f);
        for (int64_t t = 0; t < T; ++t) {
          if (kind > 0) logits[static_cast<size_t>(t * E + 1)] = 20.0f;
          if (kind == 1 || (kind == 2 && t % 4 != 1)) logits[static_cast<size_t>(t * E)] = 10.0f;
        }
        const std::string what = std::string("experts ") + dtype_name(gate_type) + "/" + dtype_name(down_type) +
                                 " of " + std::to_string(H) + " columns, " + std::to_string(k) + " a row, rows " +
                                 (kind == 0   ? "spread"
                                  : kind == 1 ? "together"
                                              : "mostly together");
        const auto rows = [&](Ops& on, const auto& w, int64_t n, int64_t group) {
          on.reset_scratch();
          LatentOps& l = *on.latent();
          const Routing all = l.route(upload(on, logits, T, E), nullptr, nullptr, {}, k, 1.5f);
          const Tensor in = upload(on, x, T, H), y = upload(on, start, T, H);
          for (int64_t t = 0; t < n; t += group) {
            const int64_t step = std::min(group, n - t);
            l.moe(*w.first, *w.second, in.rows(t, step), {all.experts + t * k, all.weights + t * k, step, k}, 0.5f,
                  y.rows(t, step));
          }
          return download(on, y.rows(0, n));
        };
        const auto all = rows(ops, weights, T, T);
        // Rounding x and the hidden rows to 8 bits leaves 1 %. The minimums of Q4_K give all outputs a part in common,
        // the sum of a row times the weights' mean, whose error is large where the sum is small: with nothing but that
        // rounding, 48 random inputs gave 0.06 to 7 %.
        const double bound = gate_type == DType::Q4_K || down_type == DType::Q4_K ? 2e-1 : 2e-2;
        if (kind == 0 && !some)
          r.close({all.begin(), all.begin() + few * H}, rows(*reference, load(*reference), few, few), bound, what);
        for (const int64_t group : groups)
          r.equal(rows(ops, weights, T, group), all, what + " in groups of " + std::to_string(group));
      }
    }
}

}  // namespace ds4::gpu
