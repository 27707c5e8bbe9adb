// Each operation of ops.h on a backend against the reference, with random shapes and outputs full of NaN.
#include <algorithm>

#include "common.h"
#include "reference/reference.h"

namespace ds4::gpu {
namespace {

constexpr DType kMatrixTypes[] = {DType::F32,  DType::F16,    DType::BF16,  DType::Q8_0,   DType::Q4_0, DType::Q4_1,
                                  DType::Q5_0, DType::Q5_1,   DType::Q2_K,  DType::Q3_K,   DType::Q4_K, DType::Q5_K,
                                  DType::Q6_K, DType::IQ4_NL, DType::MXFP4, DType::IQ2_XXS};

bool is_float(DType t) {
  return t == DType::F32 || t == DType::F16 || t == DType::BF16;
}

struct Shape {
  int64_t rows, cols;
};

void check_linear(Ops& cuda, Ops& ref, Results& r, Random& random, const Traits& traits) {
  for (const DType type : kMatrixTypes) {
    const Shape shapes[] = {{96, 1024}, {514, 256}, {64, 4096}, {4099, 512}, {7, is_float(type) ? 52 : 256}};
    for (const Shape& s : shapes) {
      cuda.reset_scratch();
      ref.reset_scratch();
      const std::string what =
          std::string("linear ") + dtype_name(type) + " " + std::to_string(s.rows) + "x" + std::to_string(s.cols);
      const auto bytes = random.matrix(type, s.rows, s.cols, 1.0f / std::sqrt(static_cast<float>(s.cols)));
      const MatrixView view{bytes.data(), s.rows, s.cols, type};
      const auto w = cuda.load({&view, 1}, WeightUse::TiedHead), wr = ref.load({&view, 1}, WeightUse::TiedHead);
      const int64_t T = 21;
      const auto x = random.floats(T * s.cols), exact = random.exact(T * s.cols);

      std::vector<int32_t> ids;
      for (int i = 0; i < 5; ++i) ids.push_back(static_cast<int32_t>(random.below(s.rows)));
      Tensor e = poisoned(cuda, 5, s.cols), er = poisoned(ref, 5, s.cols);
      cuda.embed(*w, ids, e);
      ref.embed(*wr, ids, er);
      r.equal(download(cuda, e), download(ref, er), "embed " + what);

      Tensor y = poisoned(cuda, T, s.rows), yr = poisoned(ref, T, s.rows);
      cuda.linear(*w, upload(cuda, exact, T, s.cols), nullptr, nullptr, y);
      ref.linear(*wr, upload(ref, exact, T, s.cols), nullptr, nullptr, yr);
      r.close(download(cuda, y), download(ref, yr), 5e-6, what + " exact activations");

      // With norm and bias; every row alone and in groups has the same bits.
      const auto gain = random.floats(s.cols), bias = random.floats(s.rows);
      const MatrixView gv{gain.data(), 1, s.cols, DType::F32}, bv{bias.data(), 1, s.rows, DType::F32};
      const auto g = cuda.load({&gv, 1}, WeightUse::Linear), gr = ref.load({&gv, 1}, WeightUse::Linear);
      const auto b = cuda.load({&bv, 1}, WeightUse::Linear), br = ref.load({&bv, 1}, WeightUse::Linear);
      const Norm norm{g.get(), 1e-5f}, norm_r{gr.get(), 1e-5f};
      const Tensor in = upload(cuda, x, T, s.cols);
      y = poisoned(cuda, T, s.rows);
      cuda.linear(*w, in, &norm, b.get(), y);
      ref.linear(*wr, upload(ref, x, T, s.cols), &norm_r, br.get(), yr);
      const auto all = download(cuda, y);
      r.close(all, download(ref, yr), traits.product_error(type), what + " norm bias");
      for (const int64_t group : {1, 2, 3, 5, 8, 16}) {
        Tensor y2 = poisoned(cuda, T, s.rows);
        for (int64_t t = 0; t < T; t += group) {
          const int64_t n = std::min(group, T - t);
          cuda.linear(*w, in.rows(t, n), &norm, b.get(), y2.rows(t, n));
        }
        r.equal(download(cuda, y2), all, what + " rows in groups of " + std::to_string(group));
      }

      const auto start = random.floats(T * s.rows);
      y = upload(cuda, start, T, s.rows);
      yr = upload(ref, start, T, s.rows);
      cuda.linear_add(*w, in, y);
      ref.linear_add(*wr, upload(ref, x, T, s.cols), yr);
      r.close(download(cuda, y), download(ref, yr), traits.product_error(type), "add " + what);
    }
    // SwiGLU, and parts of different types.
    const int64_t rows = 140, cols = 512, T = 5;
    for (const DType other : {type, DType::Q8_0}) {
      cuda.reset_scratch();
      ref.reset_scratch();
      const auto a = random.matrix(type, rows, cols, 0.05f), b = random.matrix(other, rows, cols, 0.05f);
      const MatrixView parts[] = {{a.data(), rows, cols, type}, {b.data(), rows, cols, other}};
      const auto w = cuda.load(parts, WeightUse::SwiGLU), wr = ref.load(parts, WeightUse::SwiGLU);
      const auto x = random.floats(T * cols);
      Tensor y = poisoned(cuda, T, rows), yr = poisoned(ref, T, rows);
      cuda.linear_swiglu(*w, upload(cuda, x, T, cols), nullptr, y);
      ref.linear_swiglu(*wr, upload(ref, x, T, cols), nullptr, yr);
      const std::string what = std::string("swiglu ") + dtype_name(type) + "/" + dtype_name(other);
      r.close(download(cuda, y), download(ref, yr), traits.product_error(type, other, 2e-2), what);
      if (LatentOps* l = cuda.latent()) {
        l->linear_swiglu_clamped(*w, upload(cuda, x, T, cols), 0.3f, y);
        ref.latent()->linear_swiglu_clamped(*wr, upload(ref, x, T, cols), 0.3f, yr);
        r.close(download(cuda, y), download(ref, yr), traits.product_error(type, other, 2e-2), "clamped " + what);
      }
      const auto s = cuda.load(parts, WeightUse::Linear), sr = ref.load(parts, WeightUse::Linear);
      Tensor z = poisoned(cuda, T, 2 * rows), zr = poisoned(ref, T, 2 * rows);
      cuda.linear(*s, upload(cuda, x, T, cols), nullptr, nullptr, z);
      ref.linear(*sr, upload(ref, x, T, cols), nullptr, nullptr, zr);
      r.close(download(cuda, z), download(ref, zr), traits.product_error(type, other, 1e-2),
              std::string("stack ") + dtype_name(type) + "/" + dtype_name(other));
    }
  }
}

// Float matrices and more rows than a decoding step has, of values of all sizes: against the reference, and the bits of
// few rows at once.
void check_many_rows(Ops& cuda, Ops& ref, Results& r, Random& random, const Traits& traits) {
  for (const DType type : {DType::F32, DType::F16, DType::BF16})
    for (const Shape& s : {Shape{96, 1024}, {514, 256}, {33, 96}, {5000, 288}, {20, 40}}) {
      cuda.reset_scratch();
      ref.reset_scratch();
      const std::string what =
          std::string("many rows, ") + dtype_name(type) + " " + std::to_string(s.rows) + "x" + std::to_string(s.cols);
      const auto bytes = random.matrix(type, s.rows, s.cols, 1.0f / std::sqrt(static_cast<float>(s.cols)));
      const MatrixView view{bytes.data(), s.rows, s.cols, type};
      const auto w = cuda.load({&view, 1}, WeightUse::Precise), wr = ref.load({&view, 1}, WeightUse::Precise);
      const int64_t T = 77;
      auto x = random.floats(T * s.cols);
      for (int64_t t = 0; t < T; ++t)
        for (int64_t i = 0; i < s.cols; ++i)
          x[static_cast<size_t>(t * s.cols + i)] *= std::ldexp(1.0f, static_cast<int>(t % 9) * 5 - 20);
      for (int64_t i = 0; i < s.cols; ++i) x[static_cast<size_t>(i)] = 0.0f;
      const Tensor in = upload(cuda, x, T, s.cols);
      Tensor y = poisoned(cuda, T, s.rows), yr = poisoned(ref, T, s.rows);
      cuda.linear(*w, in, nullptr, nullptr, y);
      ref.linear(*wr, upload(ref, x, T, s.cols), nullptr, nullptr, yr);
      const auto all = download(cuda, y), expected = download(ref, yr);
      for (int64_t t = 0; t < T; t += 19) {
        const auto row = [&](const std::vector<float>& v) {
          return std::vector<float>(v.begin() + t * s.rows, v.begin() + (t + 1) * s.rows);
        };
        r.close(row(all), row(expected), std::min(1e-5, traits.product_error(type)),
                what + " row " + std::to_string(t));
      }
      for (const int64_t group : {1, 16, 32, 40}) {
        Tensor y2 = poisoned(cuda, T, s.rows);
        for (int64_t t = 0; t < T; t += group) {
          const int64_t n = std::min(group, T - t);
          cuda.linear(*w, in.rows(t, n), nullptr, nullptr, y2.rows(t, n));
        }
        r.equal(download(cuda, y2), all, what + " in groups of " + std::to_string(group));
      }
    }
}

void check_attention(Ops& cuda, Ops& ref, Results& r, Random& random, const Traits& traits) {
  struct Case {
    int64_t q_heads, kv_heads, dim, pairs;
    DType type;
    RopeKind kind;
  };
  const Case cases[] = {{15, 5, 64, 32, DType::F16, RopeKind::HalfSplit},
                        {4, 4, 128, 64, DType::BF16, RopeKind::Interleaved},
                        {24, 2, 48, 16, DType::F32, RopeKind::Interleaved}};
  for (const Case& of : cases) {
    Case c = of;
    if (traits.f16_attention_only) c.type = DType::F16;
    const std::vector<StateSpec> specs = {{.name = "k.0", .type = c.type, .heads = c.kv_heads, .width = c.dim},
                                          {.name = "v.0", .type = c.type, .heads = c.kv_heads, .width = c.dim}};
    const std::string what = std::string("attention ") + std::to_string(c.q_heads) + "/" + std::to_string(c.kv_heads) +
                             "x" + std::to_string(c.dim) + " " + dtype_name(c.type);
    std::vector<double> freq;
    for (int64_t i = 0; i < c.pairs; ++i) freq.push_back(std::pow(10000.0, -static_cast<double>(i) / c.pairs));
    const int64_t width = (c.q_heads + 2 * c.kv_heads) * c.dim, total = 203, sessions = 2;
    // The tokens of two sessions, in chunks; the second time cut elsewhere and side by side.
    const auto data = random.floats(sessions * total * width);
    std::vector<float> first;
    for (const int64_t chunk : {203, 50, 1}) {
      std::vector<float> out[2];
      Ops* backends[] = {&cuda, &ref};
      for (int k = 0; k < (chunk == 203 ? 2 : 1); ++k) {
        Ops& ops = *backends[k];
        const auto s0 = ops.new_state(specs, 1000), s1 = ops.new_state(specs, 1000);
        std::vector<float> results(static_cast<size_t>(sessions * total * c.q_heads * c.dim));
        for (int64_t p = 0; p < total; p += chunk) {
          ops.reset_scratch();
          const int64_t n = std::min(chunk, total - p);
          std::vector<RowRef> rows;
          std::vector<float> x;
          for (int64_t s = 0; s < sessions; ++s) {
            State* state = s == 0 ? s0.get() : s1.get();
            state->reserve(p + n);
            for (int64_t i = 0; i < n; ++i) {
              rows.push_back({state, static_cast<int32_t>(p + i)});
              const auto from = data.begin() + static_cast<ptrdiff_t>((s * total + p + i) * width);
              x.insert(x.end(), from, from + static_cast<ptrdiff_t>(width));
            }
          }
          const auto T = static_cast<int64_t>(rows.size());
          Tensor qkv = upload(ops, x, T, width), table = poisoned(ops, T, 2 * c.pairs),
                 y = poisoned(ops, T, c.q_heads * c.dim);
          ops.rope_table(rows, freq, table);
          ops.rope_store(qkv, table, c.kind, rows, {0, 1}, c.q_heads, c.kv_heads, c.dim);
          ops.attention(qkv.columns(0, c.q_heads * c.dim), rows, {0, 1}, c.q_heads, c.kv_heads, c.dim, 0.2f, y);
          const auto got = download(ops, y);
          const auto row = static_cast<size_t>(c.q_heads * c.dim);
          for (int64_t s = 0; s < sessions; ++s)
            for (int64_t i = 0; i < n; ++i)
              std::copy_n(got.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(s * n + i) * row), row,
                          results.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(s * total + p + i) * row));
        }
        out[k] = std::move(results);
        if (k == 0 && chunk == 203) {
          // Payload: what was stored comes back, and a copy of it gives the same bits.
          const auto bytes = static_cast<size_t>(total) * row_bytes(c.type, c.kv_heads * c.dim);
          std::vector<std::byte> a(bytes), b(bytes);
          s0->export_rows(0, 0, total, a);
          const auto other = ops.new_state(specs, 1000);
          other->reserve(total);
          other->import_rows(0, 0, total, a);
          other->export_rows(0, 0, total, b);
          r.expect(a == b, what + " payload");
        }
      }
      if (chunk == 203) {
        r.close(out[0], out[1], c.type == DType::F32 ? 2e-6 : 1e-3, what);
        first = out[0];
      } else {
        r.equal(out[0], first, what + " chunks of " + std::to_string(chunk));
      }
    }
  }
}

void check_small(Ops& cuda, Ops& ref, Results& r, Random& random) {
  cuda.reset_scratch();
  ref.reset_scratch();
  const int64_t T = 9, dim = 333;
  const auto x = random.floats(T * dim), gain = random.floats(dim);
  const MatrixView gv{gain.data(), 1, dim, DType::F32};
  const auto g = cuda.load({&gv, 1}, WeightUse::Linear), gr = ref.load({&gv, 1}, WeightUse::Linear);
  Tensor y = poisoned(cuda, T, dim), yr = poisoned(ref, T, dim);
  cuda.rms_norm(upload(cuda, x, T, dim), {g.get(), 1e-6f}, y);
  ref.rms_norm(upload(ref, x, T, dim), {gr.get(), 1e-6f}, yr);
  r.close(download(cuda, y), download(ref, yr), 1e-6, "rms_norm");
  const std::vector<int32_t> index = {8, 0, 3, 3};
  y = poisoned(cuda, 4, dim), yr = poisoned(ref, 4, dim);
  cuda.gather(upload(cuda, x, T, dim), index, y);
  ref.gather(upload(ref, x, T, dim), index, yr);
  r.equal(download(cuda, y), download(ref, yr), "gather");
}

}  // namespace

void check_ops(Ops& cuda, Results& results, uint64_t seed, const Traits& traits) {
  const auto ref = make_reference_ops();
  Random random(seed);
  check_small(cuda, *ref, results, random);
  check_linear(cuda, *ref, results, random, traits);
  check_many_rows(cuda, *ref, results, random, traits);
  check_attention(cuda, *ref, results, random, traits);
}

}  // namespace ds4::gpu
