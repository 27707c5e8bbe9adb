// Products of many rows, dense and of experts: the bits are those of few rows, which other checks hold against the
// reference.
#include <algorithm>

#include "common.h"

namespace ds4::gpu {
namespace {

// Tall matrices of F16: a step of few rows holds its part of the matrix in shared memory, of more streams it, of many
// goes through tiles; whole tiles of rows for a block of threads and parts of them, chains that are not whole.
void check_halves(Ops& ops, Results& r, Random& random) {
  const int64_t T = 77;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{2560, 4096}, {8192, 1024}, {4099, 2080}, {2048, 32}}) {
    ops.reset_scratch();
    const auto bytes = random.matrix(DType::F16, rows, cols, 0.05f);
    const auto w = ops.load(std::vector<MatrixView>{{bytes.data(), rows, cols, DType::F16}}, WeightUse::Linear);
    const auto bias = random.floats(rows), start = random.floats(T * rows);
    const auto b = ops.load(std::vector<MatrixView>{{bias.data(), 1, rows, DType::F32}}, WeightUse::Linear);
    const Tensor x = upload(ops, random.floats(T * cols), T, cols);
    for (const int kind : {0, 1, 2}) {
      const auto product = [&](int64_t group) {
        const Tensor y = kind == 1 ? upload(ops, start, T, rows) : poisoned(ops, T, rows);
        for (int64_t t = 0; t < T; t += group) {
          const int64_t n = std::min(group, T - t);
          if (kind == 1)
            ops.linear_add(*w, x.rows(t, n), y.rows(t, n));
          else
            ops.linear(*w, x.rows(t, n), nullptr, kind == 2 ? b.get() : nullptr, y.rows(t, n));
        }
        return download(ops, y);
      };
      const auto all = product(T);
      for (const int64_t group : {1, 3, 8, 9, 16, 31})
        r.equal(product(group), all,
                "F16 " + std::to_string(rows) + "x" + std::to_string(cols) +
                    (kind == 1   ? " added"
                     : kind == 2 ? " with bias"
                                 : "") +
                    " in groups of " + std::to_string(group));
    }
  }
}

// Dense products of more rows than the kernels for few take: every shape of a block of threads (wide_blocks.h), rows
// and tokens that do not fill it, chains that do not divide; other formats in the kernel without warp groups.
void check_dense(Ops& ops, Results& r, Random& random) {
  struct Case {
    DType type;
    int64_t rows, cols, T;
  };
  const Case cases[] = {
      {DType::Q8_0, 8450, 1152, 200}, {DType::Q8_0, 1030, 4096, 333}, {DType::Q8_0, 520, 2176, 75},
      {DType::Q8_0, 96, 640, 40},     {DType::Q8_0, 2064, 128, 129},  {DType::Q4_0, 200, 1152, 70},
      {DType::MXFP4, 2064, 512, 129}, {DType::Q4_1, 96, 640, 40},     {DType::Q4_K, 200, 1280, 70},
      {DType::Q6_K, 1030, 512, 300},  {DType::Q2_K, 200, 1280, 70},   {DType::IQ2_XXS, 200, 1280, 70}};
  for (const Case& c : cases) {
    ops.reset_scratch();
    const std::string what = std::string("many rows ") + dtype_name(c.type) + " " + std::to_string(c.rows) + "x" +
                             std::to_string(c.cols) + " for " + std::to_string(c.T);
    const auto bytes = random.matrix(c.type, c.rows, c.cols, 0.05f);
    const auto w = ops.load(std::vector<MatrixView>{{bytes.data(), c.rows, c.cols, c.type}}, WeightUse::Linear);
    const auto bias = random.floats(c.rows), start = random.floats(c.T * c.rows);
    const auto b = ops.load(std::vector<MatrixView>{{bias.data(), 1, c.rows, DType::F32}}, WeightUse::Linear);
    const Tensor x = upload(ops, random.floats(c.T * c.cols), c.T, c.cols);
    for (const bool add : {false, true})
      for (const bool with_bias : {false, true}) {
        if (add && with_bias) continue;
        const auto product = [&](int64_t group) {
          const Tensor y = add ? upload(ops, start, c.T, c.rows) : poisoned(ops, c.T, c.rows);
          for (int64_t t = 0; t < c.T; t += group) {
            const int64_t n = std::min(group, c.T - t);
            if (add)
              ops.linear_add(*w, x.rows(t, n), y.rows(t, n));
            else
              ops.linear(*w, x.rows(t, n), nullptr, with_bias ? b.get() : nullptr, y.rows(t, n));
          }
          return download(ops, y);
        };
        r.equal(product(c.T), product(16), what + (add ? " added" : with_bias ? " with bias" : ""));
      }
  }
  // Gates and ups, groups of rows.
  ops.reset_scratch();
  const int64_t T = 150, cols = 1024, rows = 264;
  const auto gate = random.matrix(DType::Q8_0, rows, cols, 0.05f), up = random.matrix(DType::Q8_0, rows, cols, 0.05f);
  const auto g =
      ops.load(std::vector<MatrixView>{{gate.data(), rows, cols, DType::Q8_0}, {up.data(), rows, cols, DType::Q8_0}},
               WeightUse::SwiGLU);
  const auto parts = random.matrix(DType::Q8_0, 4 * 64, cols, 0.05f);
  const auto grouped = ops.latent()->load_grouped({parts.data(), 4 * 64, cols, DType::Q8_0}, 4);
  const Tensor x = upload(ops, random.floats(T * cols), T, cols),
               wide = upload(ops, random.floats(T * 4 * cols), T, 4 * cols);
  const auto both = [&](int64_t group) {
    const Tensor y = poisoned(ops, T, rows), z = poisoned(ops, T, 4 * 64);
    for (int64_t t = 0; t < T; t += group) {
      const int64_t n = std::min(group, T - t);
      ops.latent()->linear_swiglu_clamped(*g, x.rows(t, n), 0.5f, y.rows(t, n));
      ops.latent()->grouped_linear(*grouped, wide.rows(t, n), 4, z.rows(t, n));
    }
    return std::pair{download(ops, y), download(ops, z)};
  };
  const auto all = both(T), some = both(16);
  r.equal(all.first, some.first, "many rows of gates and ups");
  r.equal(all.second, some.second, "many rows of grouped products");
}

// Experts with up to 16 rows each, one without any, and with more.
void check_experts(Ops& ops, Results& r, Random& random) {
  const int64_t H = 4096, F = 2048, k = 6, different = 3;
  std::vector<std::vector<std::byte>> bytes;
  for (int64_t e = 0; e < different; ++e) {
    for (int i = 0; i < 2; ++i) bytes.push_back(random.matrix(DType::IQ2_XXS, F, H, 0.02f));
    bytes.push_back(random.matrix(DType::Q2_K, H, F, 0.02f));
  }
  for (const int64_t E : {8, 30}) {
    const int64_t T = E == 8 ? 70 : 77;
    ops.reset_scratch();
    std::vector<MatrixView> gate_up, down;
    for (int64_t e = 0; e < E; ++e) {
      const auto* const own = &bytes[static_cast<size_t>(e % different * 3)];
      for (int i = 0; i < 2; ++i) gate_up.push_back({own[i].data(), F, H, DType::IQ2_XXS});
      down.push_back({own[2].data(), H, F, DType::Q2_K});
    }
    LatentOps& l = *ops.latent();
    const auto g = l.load_experts(gate_up, E, WeightUse::SwiGLU), d = l.load_experts(down, E, WeightUse::Linear);
    auto logits = random.floats(T * E, 4.0f);
    for (int64_t t = 0; t < T; ++t) logits[static_cast<size_t>(t * E + E - 2)] = -30.0f;
    const Routing all = l.route(upload(ops, logits, T, E), nullptr, nullptr, {}, k, 1.5f);
    const Tensor x = upload(ops, random.floats(T * H), T, H);
    const auto start = random.floats(T * H, 0.01f);
    const auto rows = [&](int64_t group) {
      const Tensor y = upload(ops, start, T, H);
      for (int64_t t = 0; t < T; t += group) {
        const int64_t step = std::min(group, T - t);
        l.moe(*g, *d, x.rows(t, step), {all.experts + t * k, all.weights + t * k, step, k}, 0.5f, y.rows(t, step));
      }
      return download(ops, y);
    };
    const auto one = rows(1);
    for (const int64_t group : {16, 17, 33, 50, 77})
      r.equal(rows(group), one, std::to_string(E) + " experts, rows in groups of " + std::to_string(group));
  }
}

}  // namespace

void check_many(Ops& ops, Results& r, uint64_t seed) {
  Random random(seed + 10);
  check_dense(ops, r, random);
  check_halves(ops, r, random);
  check_experts(ops, r, random);
}

}  // namespace ds4::gpu
