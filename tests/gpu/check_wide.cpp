// Experts of the widths that the kernel for few rows takes (native/cuda/expert_blocks.h): against the reference, and
// the same bits however many rows a step has.
#include <algorithm>

#include "common.h"
#include "reference/reference.h"

namespace ds4::gpu {

void check_wide(Ops& ops, Results& r, uint64_t seed) {
  const auto reference = make_reference_ops();
  Random random(seed + 9);
  const int64_t k = 2, T = 17, few = 2;  // the reference computes the first rows: it is slow
  const int64_t sizes[][3] = {{4, 4096, 2048}, {3, 2048, 4096}};
  for (const auto& [E, H, F] : sizes) {
    ops.reset_scratch();
    reference->reset_scratch();
    std::vector<std::vector<std::byte>> bytes;
    std::vector<MatrixView> gate_up, down;
    for (int64_t e = 0; e < E; ++e) {
      for (int i = 0; i < 2; ++i) {
        bytes.push_back(random.matrix(DType::IQ2_XXS, F, H, 0.02f));
        gate_up.push_back({bytes.back().data(), F, H, DType::IQ2_XXS});
      }
      bytes.push_back(random.matrix(DType::Q2_K, H, F, 0.02f));
      down.push_back({bytes.back().data(), H, F, DType::Q2_K});
    }
    const auto x = random.floats(T * H), logits = random.floats(T * E, 4.0f), start = random.floats(T * H, 0.01f);
    const std::string what = "experts of " + std::to_string(H) + " columns";
    const auto rows = [&](Ops& on, int64_t n, int64_t group) {
      LatentOps& l = *on.latent();
      const auto g = l.load_experts(gate_up, E, WeightUse::SwiGLU), d = l.load_experts(down, E, WeightUse::Linear);
      const Routing all = l.route(upload(on, logits, T, E), nullptr, nullptr, {}, k, 1.5f);
      const Tensor in = upload(on, x, T, H), y = upload(on, start, T, H);
      for (int64_t t = 0; t < n; t += group) {
        const int64_t step = std::min(group, n - t);
        l.moe(*g, *d, in.rows(t, step), {all.experts + t * k, all.weights + t * k, step, k}, 0.5f, y.rows(t, step));
      }
      return download(on, y.rows(0, n));
    };
    const auto all = rows(ops, T, T);
    r.close({all.begin(), all.begin() + few * H}, rows(*reference, few, few), 2e-2, what);
    for (const int64_t group : {1, 3, 5, 16})
      r.equal(rows(ops, T, group), all, what + " in groups of " + std::to_string(group));
  }
}

}  // namespace ds4::gpu
