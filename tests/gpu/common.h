// What the checks of a backend share: random data, random blocks of every file format, comparison, a result list.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ops.h"
#include "ops_latent.h"
#include "quant/quant.h"

namespace ds4::gpu {

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545F4914F6CDD1Dull;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() >> 33) % n; }
  float uniform() { return static_cast<float>(static_cast<double>(next() >> 40) * 0x1p-23 - 1.0); }  // [-1, 1)
  std::vector<float> floats(int64_t n, float scale = 1.0f) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = uniform() * scale;
    return v;
  }
  // Whole numbers whose int8 rounding in blocks of 32 is exact.
  std::vector<float> exact(int64_t n) {
    std::vector<float> v(static_cast<size_t>(n));
    for (size_t i = 0; i < v.size(); ++i) v[i] = i % 32 == 0 ? 127.0f : static_cast<float>(below(255) - 127);
    return v;
  }
  // Bytes of a matrix whose values are about `size`.
  std::vector<std::byte> matrix(DType type, int64_t rows, int64_t cols, float size);
};

// Checks done and failed; each failure is printed with its numbers.
struct Results {
  int checks = 0, failed = 0;
  void expect(bool ok, const std::string& what) {
    ++checks;
    if (ok) return;
    ++failed;
    std::printf("FAILED %s\n", what.c_str());
  }
  // |a - b| / |b| within `most`; NaN anywhere fails.
  void close(const std::vector<float>& got, const std::vector<float>& want, double most, const std::string& what);
  void equal(const std::vector<float>& got, const std::vector<float>& want, const std::string& what);
};

double relative_error(const std::vector<float>& got, const std::vector<float>& want);

// A dense matrix on a backend, and back.
Tensor upload(Ops& ops, const std::vector<float>& values, int64_t rows, int64_t cols);
std::vector<float> download(Ops& ops, const Tensor& t);
// Scratch full of NaN.
Tensor poisoned(Ops& ops, int64_t rows, int64_t cols);

// What a backend does in another way than the reference, which a check has to know. Those of the GPU's are the
// defaults.
struct Traits {
  bool rounds_to_bf16 = false;      // activations in front of BF16 weights
  bool f16_attention_only = false;  // keys and values of other types are refused

  // The largest relative error of a product with weights of this type: sums in another order, or rounded activations.
  double product_error(DType type, double blocks = 1e-2) const {
    if (type == DType::BF16 && rounds_to_bf16) return 5e-3;
    return type == DType::F32 || type == DType::F16 || type == DType::BF16 ? 3e-6 : blocks;
  }
  double product_error(DType a, DType b, double blocks) const {
    return std::max(product_error(a, blocks), product_error(b, blocks));
  }
};

void check_ops(Ops& ops, Results& results, uint64_t seed, const Traits& traits = {});
void check_latent(Ops& ops, Results& results, uint64_t seed, const Traits& traits = {});
void check_models(Ops& ops, Results& results, uint64_t seed);
void check_drafts(Ops& ops, Results& results, uint64_t seed);
void check_few(Ops& ops, Results& results, uint64_t seed);
// `some`: few launches, nothing of the reference.
void check_wide(Ops& ops, Results& results, uint64_t seed, bool some = false);
void check_many(Ops& ops, Results& results, uint64_t seed);
void check_uploads(Ops& ops, Results& results, uint64_t seed);
// Prints what draws cost as well.
void check_draws(Ops& ops, Results& results, uint64_t seed);
// Timings of the way of weights to the device and each part of it, of single operations, of experts of each type, of a
// layer's products at the widths of decoding, then of a whole model of 43 layers with random weights; rows go to `csv`.
void bench_uploads(Ops& cuda, std::FILE* csv);
void bench_ops(Ops& cuda, std::FILE* csv);
void bench_experts(Ops& cuda, std::FILE* csv);
void bench_decode(Ops& cuda, std::FILE* csv);
void bench_model(std::FILE* csv, int64_t layers, DType gate_up, DType down);
void bench_prefill(std::FILE* csv, int64_t layers);

}  // namespace ds4::gpu
