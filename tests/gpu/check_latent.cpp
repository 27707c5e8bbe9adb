// Each operation of ops_latent.h on a backend against the reference.
#include <algorithm>

#include "common.h"
#include "reference/reference.h"

namespace ds4::gpu {
namespace {

struct Pair {
  Ops& cuda;
  Ops& ref;
  Traits traits;
  void reset() const {
    cuda.reset_scratch();
    ref.reset_scratch();
  }
};

struct Loaded {
  std::vector<std::byte> bytes;
  std::unique_ptr<Weight> cuda, ref;
};

Loaded load(const Pair& p, std::vector<std::byte> bytes, int64_t rows, int64_t cols, DType type,
            WeightUse use = WeightUse::Linear) {
  Loaded l{std::move(bytes), nullptr, nullptr};
  const MatrixView view{l.bytes.data(), rows, cols, type};
  l.cuda = p.cuda.load({&view, 1}, use);
  l.ref = p.ref.load({&view, 1}, use);
  return l;
}

std::vector<int32_t> integers(Ops& ops, const int32_t* data, int64_t n) {
  std::vector<float> bits(static_cast<size_t>(n));
  // Scratch holds 32-bit words; copied without being looked at.
  ops.to_host(Tensor(reinterpret_cast<float*>(const_cast<int32_t*>(data)), 1, n), bits.data());
  std::vector<int32_t> out(static_cast<size_t>(n));
  std::memcpy(out.data(), bits.data(), out.size() * 4);
  return out;
}

void check_hyper(const Pair& p, Results& r, Random& random) {
  for (const int64_t n : {4, 2}) {
    for (const DType type : {DType::F16, DType::F32, DType::BF16, DType::Q8_0}) {
      p.reset();
      const int64_t width = 384, T = 7, rows = 2 * n + n * n;
      const std::string what = "hc of " + std::to_string(n) + " streams, " + dtype_name(type);
      const Loaded fn = load(p, random.matrix(type, rows, n * width, 0.05f), rows, n * width, type, WeightUse::Precise);
      const Loaded base = load(p, random.matrix(DType::F32, 1, rows, 1.0f), 1, rows, DType::F32);
      const Loaded scale = load(p, random.matrix(DType::F32, 1, 3, 1.0f), 1, 3, DType::F32);
      const auto x = random.floats(T * n * width, 2.0f), out = random.floats(T * width);
      Tensor y = poisoned(p.cuda, T, width), mix = poisoned(p.cuda, T, n + n * n), s = upload(p.cuda, x, T, n * width);
      Tensor yr = poisoned(p.ref, T, width), mr = poisoned(p.ref, T, n + n * n), sr = upload(p.ref, x, T, n * width);
      p.cuda.latent()->hc_in({fn.cuda.get(), base.cuda.get(), scale.cuda.get(), n}, s, y, mix);
      p.ref.latent()->hc_in({fn.ref.get(), base.ref.get(), scale.ref.get(), n}, sr, yr, mr);
      const auto all = download(p.cuda, y);
      r.close(all, download(p.ref, yr), 3e-6, what + " in");
      r.close(download(p.cuda, mix), download(p.ref, mr), 5e-6, what + " mix");
      p.cuda.to_device(download(p.ref, mr).data(), mix);
      p.cuda.latent()->hc_out(upload(p.cuda, out, T, width), mix, n, s);
      p.ref.latent()->hc_out(upload(p.ref, out, T, width), mr, n, sr);
      r.close(download(p.cuda, s), download(p.ref, sr), 1e-6, what + " out");
      Tensor one = poisoned(p.cuda, T, width), one_mix = poisoned(p.cuda, T, n + n * n);
      s = upload(p.cuda, x, T, n * width);
      for (int64_t t = 0; t < T; ++t)
        p.cuda.latent()->hc_in({fn.cuda.get(), base.cuda.get(), scale.cuda.get(), n}, s.rows(t, 1), one.rows(t, 1),
                               one_mix.rows(t, 1));
      r.equal(download(p.cuda, one), all, what + " row by row");

      const Loaded hf = load(p, random.matrix(type, n, n * width, 0.05f), n, n * width, type, WeightUse::Precise);
      const Loaded hb = load(p, random.matrix(DType::F32, 1, n, 1.0f), 1, n, DType::F32);
      const Loaded hs = load(p, random.matrix(DType::F32, 1, 1, 1.0f), 1, 1, DType::F32);
      y = poisoned(p.cuda, T, width);
      p.cuda.latent()->hc_head({hf.cuda.get(), hb.cuda.get(), hs.cuda.get(), n}, s, y);
      p.ref.latent()->hc_head({hf.ref.get(), hb.ref.get(), hs.ref.get(), n}, upload(p.ref, x, T, n * width), yr);
      r.close(download(p.cuda, y), download(p.ref, yr), 3e-6, what + " head");
    }
  }
}

// Wide streams: what stands between two sub-layers, in one kernel. Rows alone and together have the same bits.
void check_between(const Pair& p, Results& r, Random& random) {
  for (const DType type : {DType::F16, DType::F32, DType::BF16})
    for (const int64_t width : {1024, 4096, 7168}) {
      p.reset();
      const int64_t n = 4, T = width == 4096 ? 150 : 37, rows = 2 * n + n * n;
      const std::string what = "between sub-layers, " + std::string(dtype_name(type)) + " " + std::to_string(width);
      const Loaded fn = load(p, random.matrix(type, rows, n * width, 0.02f), rows, n * width, type, WeightUse::Precise);
      const Loaded base = load(p, random.matrix(DType::F32, 1, rows, 1.0f), 1, rows, DType::F32);
      const Loaded scale = load(p, random.matrix(DType::F32, 1, 3, 1.0f), 1, 3, DType::F32);
      const Loaded gain = load(p, random.matrix(DType::F32, 1, width, 1.0f), 1, width, DType::F32);
      const Loaded w = load(p, random.matrix(DType::Q8_0, 96, width, 0.02f), 96, width, DType::Q8_0);
      const HyperConnection hc{fn.cuda.get(), base.cuda.get(), scale.cuda.get(), n},
          hr{fn.ref.get(), base.ref.get(), scale.ref.get(), n};
      const auto x = random.floats(T * n * width, 2.0f), out = random.floats(T * width);
      struct Run {
        std::vector<float> streams, y, mix, product;
      };
      const auto run = [&](Ops& ops, const HyperConnection& h, const Weight& g, const Weight& m, int64_t group) {
        Tensor s = upload(ops, x, T, n * width), y = poisoned(ops, T, width), mix = poisoned(ops, T, n + n * n),
               z = poisoned(ops, T, 96);
        const Tensor o = upload(ops, out, T, width);
        for (int64_t t = 0; t < T; t += group) {
          const int64_t k = std::min(group, T - t);
          ops.latent()->hc_in_norm(ops, h, s.rows(t, k), {&g, 1e-6f}, y.rows(t, k), mix.rows(t, k));
          ops.latent()->hc_out_in_norm(ops, o.rows(t, k), h, s.rows(t, k), {&g, 1e-6f}, y.rows(t, k), mix.rows(t, k));
          ops.linear(m, y.rows(t, k), nullptr, nullptr, z.rows(t, k));
        }
        return Run{download(ops, s), download(ops, y), download(ops, mix), download(ops, z)};
      };
      const Run all = run(p.cuda, hc, *gain.cuda, *w.cuda, T), one = run(p.cuda, hc, *gain.cuda, *w.cuda, 1),
                some = run(p.cuda, hc, *gain.cuda, *w.cuda, 7), more = run(p.cuda, hc, *gain.cuda, *w.cuda, 15),
                ref = run(p.ref, hr, *gain.ref, *w.ref, T);
      r.close(all.streams, ref.streams, 5e-6, what + " streams");
      r.close(all.y, ref.y, 1e-5, what + " y");
      r.close(all.mix, ref.mix, 1e-5, what + " mix");
      r.close(all.product, ref.product, 1e-2, what + " product of y");
      for (const Run* cut : {&one, &some, &more}) {
        r.equal(cut->streams, all.streams, what + " streams in groups");
        r.equal(cut->y, all.y, what + " y in groups");
        r.equal(cut->mix, all.mix, what + " mix in groups");
        r.equal(cut->product, all.product, what + " product in groups");
      }
    }
}

void check_heads(const Pair& p, Results& r, Random& random) {
  p.reset();
  const int64_t T = 6, heads = 5, dim = 192, rotated = 64;
  const auto x = random.floats(T * heads * dim, 3.0f);
  Tensor a = upload(p.cuda, x, T, heads * dim), b = upload(p.ref, x, T, heads * dim);
  p.cuda.latent()->head_norm(a, heads, 1e-6f);
  p.ref.latent()->head_norm(b, heads, 1e-6f);
  r.close(download(p.cuda, a), download(p.ref, b), 1e-6, "head_norm");

  const std::vector<StateSpec> specs = {
      {.name = "r", .kind = StateKind::Ring, .type = DType::F32, .width = 4, .capacity = 4}};
  const auto s = p.cuda.new_state(specs, 2000000), sr = p.ref.new_state(specs, 2000000);
  std::vector<RowRef> rows, rows_r;
  for (const int32_t at : {0, 1, 127, 5000, 262143, 1048575}) {
    rows.push_back({s.get(), at});
    rows_r.push_back({sr.get(), at});
  }
  std::vector<float> freq;
  for (int i = 0; i < 32; ++i) freq.push_back(std::pow(160000.0f, -static_cast<float>(i) / 32.0f));
  Tensor table = poisoned(p.cuda, T, rotated), tr = poisoned(p.ref, T, rotated);
  p.cuda.latent()->rope_table_f32(rows, freq, table);
  p.ref.latent()->rope_table_f32(rows_r, freq, tr);
  r.close(download(p.cuda, table), download(p.ref, tr), 1e-7, "rope_table_f32 up to a million tokens");
  for (const bool inverse : {false, true}) {
    p.cuda.latent()->rope_tail(a, table, heads, inverse);
    p.ref.latent()->rope_tail(b, tr, heads, inverse);
    r.close(download(p.cuda, a), download(p.ref, b), 1e-6, inverse ? "rope_tail back" : "rope_tail");
  }
  for (const auto& [rounding, columns] : {std::pair{RowRounding::Fp8, int64_t{192}}, {RowRounding::HadamardFp4, 128}}) {
    std::vector<float> v = random.floats(T * heads * columns, 5.0f);
    for (size_t i = 0; i < v.size(); ++i) v[i] *= std::ldexp(1.0f, static_cast<int>(random.below(24)) - 16);
    v[0] = 0.0f, v[1] = -0.0f;
    Tensor u = upload(p.cuda, v, T, heads * columns), ur = upload(p.ref, v, T, heads * columns);
    p.cuda.latent()->round_rows(u, heads, rounding, 64);
    p.ref.latent()->round_rows(ur, heads, rounding, 64);
    r.equal(download(p.cuda, u), download(p.ref, ur), rounding == RowRounding::Fp8 ? "round fp8" : "round fp4");
  }
}

// The indexer's queries and choice in their own kernels against the operations they stand for, on the same backend.
void check_indexer(const Pair& p, Results& r, Random& random) {
  p.reset();
  const int64_t T = 40, heads = 64, dim = 128, k = 64, n_rows = 700, ratio = 4;
  const auto x = random.floats(T * heads * dim, 3.0f), table = random.floats(T * 64), w = random.floats(T * heads);
  const Tensor t = upload(p.cuda, table, T, 64), weight = upload(p.cuda, w, T, heads);
  LatentOps& l = *p.cuda.latent();
  Tensor q = upload(p.cuda, x, T, heads * dim), parts = upload(p.cuda, x, T, heads * dim);
  l.index_query(q, t, heads, RowRounding::HadamardFp4);
  l.rope_tail(parts, t, heads, false);
  l.round_rows(parts, heads, RowRounding::HadamardFp4, 64);
  r.equal(download(p.cuda, q), download(p.cuda, parts), "index_query");

  // Two sessions; every row alone, and all of them, by the units; their choice differs from f32's at most in the order
  // of additions.
  const std::vector<StateSpec> specs = {{.name = "index", .type = DType::F32, .width = dim, .ratio = ratio}};
  std::vector<std::unique_ptr<State>> states;
  std::vector<RowRef> rows;
  for (int s = 0; s < 2; ++s) {
    Tensor keys = upload(p.cuda, random.floats(n_rows * dim), n_rows, dim);
    l.round_rows(keys, 1, RowRounding::HadamardFp4, 0);
    const auto values = download(p.cuda, keys);
    states.push_back(p.cuda.new_state(specs, n_rows * ratio + 64));
    states.back()->reserve(n_rows * ratio);
    states.back()->import_rows(0, 0, n_rows, std::as_bytes(std::span(values)));
    for (int64_t i = 0; i < T / 2; ++i)
      rows.push_back({states.back().get(), static_cast<int32_t>((s == 0 ? 245 : n_rows * ratio - T / 2) + i)});
  }
  const Selection all = l.select_short(q, weight, rows, 0, ratio, heads, k),
                  plain = l.select(q, weight, rows, 0, ratio, heads, k);
  const auto ids = integers(p.cuda, all.ids, T * k), counts = integers(p.cuda, all.counts, T),
             plain_ids = integers(p.cuda, plain.ids, T * k);
  int64_t chosen = 0, apart = 0;
  bool same = true;
  for (int64_t i = 0; i < T; ++i) {
    const Selection one = l.select_short(q.rows(i, 1), weight.rows(i, 1),
                                         std::span(rows).subspan(static_cast<size_t>(i), 1), 0, ratio, heads, k);
    const auto alone = integers(p.cuda, one.ids, k);
    if (integers(p.cuda, one.counts, 1)[0] != counts[static_cast<size_t>(i)]) same = false;
    if (counts[static_cast<size_t>(i)] < 0) continue;
    chosen += k;
    for (int64_t j = 0; j < k; ++j) {
      const auto at = static_cast<size_t>(i * k + j);
      if (alone[static_cast<size_t>(j)] != ids[at]) same = false;
      if (!std::binary_search(plain_ids.begin() + i * k, plain_ids.begin() + (i + 1) * k, ids[at])) ++apart;
    }
  }
  r.expect(same, "select_short of rows alone");
  r.expect(chosen > 0 && apart <= 2,
           "select_short against select: " + std::to_string(apart) + " of " + std::to_string(chosen) + " apart");
}

// Operations in one kernel against their parts on the reference.
void check_joined(const Pair& p, Results& r, Random& random) {
  p.reset();
  const int64_t T = 9, heads = 5, dim = 192, rotated = 64, row = 512;
  const auto x = random.floats(T * heads * dim, 3.0f), table = random.floats(T * rotated), k = random.floats(T * row);
  const Loaded gain = load(p, random.matrix(DType::F32, 1, row, 1.0f), 1, row, DType::F32);
  std::vector<std::vector<float>> q, plain, rounded;
  for (Ops* ops : {&p.cuda, &p.ref}) {
    const Tensor a = upload(*ops, x, T, heads * dim), t = upload(*ops, table, T, rotated);
    ops->latent()->head_norm_rope(a, heads, 1e-6f, t);
    q.push_back(download(*ops, a));
    const Norm norm{ops == &p.cuda ? gain.cuda.get() : gain.ref.get(), 1e-6f};
    for (const RowRounding rounding : {RowRounding::None, RowRounding::Fp8}) {
      const Tensor b = upload(*ops, k, T, row);
      ops->latent()->key_row(*ops, b, norm, t, rounding);
      (rounding == RowRounding::None ? plain : rounded).push_back(download(*ops, b));
    }
  }
  r.close(q[0], q[1], 1e-6, "head_norm_rope");
  r.close(plain[0], plain[1], 1e-6, "key_row");
  r.close(rounded[0], rounded[1], 1e-2, "key_row rounded");
}

// Two sessions whose rows are of this step or of the ring, and one at its first position.
void check_previous(const Pair& p, Results& r, Random& random) {
  p.reset();
  const int64_t dim = 200;
  const std::vector<StateSpec> specs = {
      {.name = "r", .kind = StateKind::Ring, .type = DType::F32, .width = dim, .capacity = 3}};
  std::vector<std::vector<float>> found;
  const auto before = random.floats(4 * dim), x = random.floats(6 * dim);
  for (Ops* ops : {&p.cuda, &p.ref}) {
    std::vector<std::unique_ptr<State>> states;
    for (int i = 0; i < 3; ++i) states.push_back(ops->new_state(specs, 100));
    const auto at = [&](int s, int32_t position) { return RowRef{states[static_cast<size_t>(s)].get(), position}; };
    const std::vector<RowRef> old = {at(0, 5), at(0, 6), at(1, 0), at(1, 1)};
    const std::vector<RowRef> rows = {at(0, 7), at(0, 8), at(0, 9), at(1, 2), at(2, 0), at(2, 1)};
    ops->latent()->ring_store(upload(*ops, before, 4, dim), old, 0);
    const Tensor y = poisoned(*ops, 6, dim);
    ops->latent()->previous_rows(upload(*ops, x, 6, dim), rows, 0, y);
    found.push_back(download(*ops, y));
  }
  r.equal(found[0], found[1], "previous_rows");
}

// Two sessions through compress, ring_store, select and latent_attention, in steps of `chunk` tokens.
struct LatentRun {
  std::vector<float> attended, rows, index;
  std::vector<int32_t> counts;
};

// `wide`: heads of 512 columns, which come raw and go rotated.
LatentRun run_latent(Ops& ops, int64_t ratio, int64_t chunk, int64_t total, RowRounding rounding, uint64_t seed,
                     bool wide = false) {
  Random random(seed);
  const int64_t dim = wide ? 512 : 128,
                heads = !wide        ? 6
                        : ratio == 4 ? 36
                                     : 20,
                window = wide ? 128 : 16, index_heads = 32, index_dim = 128, k = 8, sessions = 2;
  const int64_t lanes = ratio == 4 ? 2 : 1, half = lanes * dim;
  const std::vector<StateSpec> specs = {{.name = "window",
                                         .kind = StateKind::Ring,
                                         .type = DType::F32,
                                         .width = dim,
                                         .capacity = window + 24,
                                         .need = window},
                                        {.name = "open",
                                         .kind = StateKind::Ring,
                                         .type = DType::F32,
                                         .width = 2 * half,
                                         .capacity = (ratio == 4 ? 8 : ratio) + 24},
                                        {.name = "rows", .type = DType::F32, .width = dim, .ratio = ratio},
                                        {.name = "index_open",
                                         .kind = StateKind::Ring,
                                         .type = DType::F32,
                                         .width = 2 * lanes * index_dim,
                                         .capacity = (ratio == 4 ? 8 : ratio) + 24},
                                        {.name = "index_rows", .type = DType::F32, .width = index_dim, .ratio = ratio}};
  const auto bias = random.floats(ratio * half), gain = random.floats(dim), sinks = random.floats(heads);
  const auto index_bias = random.floats(ratio * lanes * index_dim), index_gain = random.floats(index_dim);
  const auto vector = [&](const std::vector<float>& v, int64_t rows) {
    const MatrixView view{v.data(), rows, static_cast<int64_t>(v.size()) / rows, DType::F32};
    return ops.load({&view, 1}, WeightUse::Linear);
  };
  const auto wb = vector(bias, ratio), wg = vector(gain, 1), ws = vector(sinks, 1), ib = vector(index_bias, ratio),
             ig = vector(index_gain, 1);
  std::vector<float> freq;
  for (int i = 0; i < 32; ++i) freq.push_back(std::pow(10000.0f, -static_cast<float>(i) / 32.0f));
  const auto kv = random.floats(sessions * total * dim), kg = random.floats(sessions * total * 2 * half),
             q = random.floats(sessions * total * heads * dim),
             ikg = random.floats(sessions * total * 2 * lanes * index_dim),
             iq = random.floats(sessions * total * index_heads * index_dim),
             iw = random.floats(sessions * total * index_heads);
  std::vector<std::unique_ptr<State>> states;
  for (int s = 0; s < sessions; ++s) states.push_back(ops.new_state(specs, 1000));
  LatentRun out;
  out.attended.resize(q.size());
  out.counts.resize(static_cast<size_t>(sessions * total));
  LatentOps& l = *ops.latent();
  for (int64_t at = 0; at < total; at += chunk) {
    ops.reset_scratch();
    const int64_t n = std::min(chunk, total - at);
    std::vector<RowRef> rows;
    std::vector<size_t> source;
    for (int64_t s = 0; s < sessions; ++s) {
      states[static_cast<size_t>(s)]->reserve(at + n);
      for (int64_t i = 0; i < n; ++i) {
        rows.push_back({states[static_cast<size_t>(s)].get(), static_cast<int32_t>(at + i)});
        source.push_back(static_cast<size_t>(s * total + at + i));
      }
    }
    const auto T = static_cast<int64_t>(rows.size());
    const auto take = [&](const std::vector<float>& from, int64_t width) {
      std::vector<float> v;
      for (const size_t i : source)
        v.insert(v.end(), from.begin() + static_cast<ptrdiff_t>(i * static_cast<size_t>(width)),
                 from.begin() + static_cast<ptrdiff_t>((i + 1) * static_cast<size_t>(width)));
      return upload(ops, v, T, width);
    };
    const Tensor tkv = take(kv, dim), y = poisoned(ops, T, heads * dim);
    l.compress(take(kg, 2 * half), rows,
               {.ring = 1,
                .rows = 2,
                .bias = wb.get(),
                .gain = wg.get(),
                .freq = freq,
                .ratio = ratio,
                .dim = dim,
                .rounding = rounding});
    l.compress(take(ikg, 2 * lanes * index_dim), rows,
               {.ring = 3,
                .rows = 4,
                .bias = ib.get(),
                .gain = ig.get(),
                .freq = freq,
                .ratio = ratio,
                .dim = index_dim,
                .rounding = rounding == RowRounding::None ? RowRounding::None : RowRounding::HadamardFp4});
    Selection selection;
    if (ratio == 4) {
      const Tensor tiq = take(iq, index_heads * index_dim), tiw = take(iw, index_heads);
      if (rounding == RowRounding::None) {
        selection = l.select(tiq, tiw, rows, 4, ratio, index_heads, k);
      } else {
        l.round_rows(tiq, index_heads, RowRounding::HadamardFp4, 0);
        selection = l.select_short(tiq, tiw, rows, 4, ratio, index_heads, k);
      }
    }
    const LatentAttention attention{.window_ring = 0,
                                    .window = window,
                                    .compressed = true,
                                    .rows = 2,
                                    .ratio = ratio,
                                    .sinks = ws.get(),
                                    .heads = heads,
                                    .head_dim = dim,
                                    .scale = 0.1f,
                                    .short_columns = wide && rounding == RowRounding::Fp8 ? dim - 64 : 0};
    if (wide) l.round_rows(tkv, 1, rounding, 64);
    const Selection* const chosen = ratio == 4 ? &selection : nullptr;
    const Tensor tq = take(q, heads * dim);
    if (wide) {
      const Tensor table = poisoned(ops, T, 64);
      l.rope_table_f32(rows, freq, table);
      l.head_norm_rope(tq, heads, 1e-6f, table);
      l.latent_attention_rope(tq, tkv, rows, attention, chosen, table, y);
    } else {
      l.latent_attention(tq, tkv, rows, attention, chosen, y);
    }
    l.ring_store(tkv, rows, 0);
    const auto got = download(ops, y);
    std::vector<int32_t> counts(static_cast<size_t>(T), -1);
    if (ratio == 4) counts = integers(ops, selection.counts, T);
    for (size_t i = 0; i < source.size(); ++i) {
      std::copy_n(got.begin() + static_cast<ptrdiff_t>(i) * heads * dim, heads * dim,
                  out.attended.begin() + static_cast<ptrdiff_t>(source[i]) * heads * dim);
      out.counts[source[i]] = counts[i];
    }
  }
  const auto rows_of = [&](size_t index, int64_t width) {
    std::vector<float> v(static_cast<size_t>(total / ratio * width));
    states[1]->export_rows(index, 0, total / ratio, std::as_writable_bytes(std::span(v)));
    return v;
  };
  out.rows = rows_of(2, dim);
  out.index = rows_of(4, index_dim);
  return out;
}

void check_attention(const Pair& p, Results& r, uint64_t seed) {
  for (const int64_t ratio : {4, 128})
    for (const RowRounding rounding : {RowRounding::None, RowRounding::Fp8}) {
      const int64_t total = 300;
      const std::string what =
          "latent, ratio " + std::to_string(ratio) + (rounding == RowRounding::None ? "" : ", rounded");
      const LatentRun ref = run_latent(p.ref, ratio, 300, total, rounding, seed);
      const LatentRun all = run_latent(p.cuda, ratio, 300, total, rounding, seed);
      // A rounding step apart is a changed code here and there.
      const double most = rounding == RowRounding::None ? 2e-6 : 1e-2;
      r.close(all.rows, ref.rows, most, what + " rows");
      r.close(all.index, ref.index, most, what + " index rows");
      r.expect(all.counts == ref.counts, what + " counts");
      r.close(all.attended, ref.attended, rounding == RowRounding::None ? 1e-5 : 5e-2, what + " attention");
      for (const int64_t chunk : {1, 7, 64, 131}) {
        const LatentRun cut = run_latent(p.cuda, ratio, chunk, total, rounding, seed);
        const std::string chunks = " in chunks of " + std::to_string(chunk);
        r.equal(cut.rows, all.rows, what + " rows" + chunks);
        r.equal(cut.attended, all.attended, what + " attention" + chunks);
      }
    }
}

void check_wide_heads(const Pair& p, Results& r, uint64_t seed) {
  for (const int64_t ratio : {4, 128})
    for (const RowRounding rounding : {RowRounding::None, RowRounding::Fp8}) {
      const int64_t total = 210;
      const std::string what =
          "latent of 512 columns, ratio " + std::to_string(ratio) + (rounding == RowRounding::None ? "" : ", rounded");
      const LatentRun ref = run_latent(p.ref, ratio, total, total, rounding, seed, true);
      const LatentRun all = run_latent(p.cuda, ratio, total, total, rounding, seed, true);
      r.close(all.attended, ref.attended, rounding == RowRounding::None ? 1e-5 : 5e-2, what);
      for (const int64_t chunk : {1, 3, 50, 97}) {
        const LatentRun cut = run_latent(p.cuda, ratio, chunk, total, rounding, seed, true);
        r.equal(cut.attended, all.attended, what + " in chunks of " + std::to_string(chunk));
      }
    }
  // Raw heads that something else reads first.
  p.reset();
  Random random(seed);
  const int64_t T = 3, heads = 2, dim = 512;
  const auto x = random.floats(T * heads * dim), angles = random.floats(T * 64);
  std::vector<std::vector<float>> found;
  for (Ops* ops : {&p.cuda, &p.ref}) {
    const Tensor q = upload(*ops, x, T, heads * dim), table = upload(*ops, angles, T, 64);
    ops->latent()->head_norm_rope(q, heads, 1e-6f, table);
    found.push_back(download(*ops, q));
  }
  r.close(found[0], found[1], 1e-6, "head_norm_rope of 512 columns");
}

void check_select(const Pair& p, Results& r, Random& random) {
  // Many rows, with ties: the same set as a stable sort of the reference's scores.
  p.reset();
  const int64_t ratio = 4, heads = 64, dim = 128, n_rows = 5000, k = 512;
  const std::vector<StateSpec> specs = {{.name = "index", .type = DType::F32, .width = dim, .ratio = ratio}};
  const auto s = p.cuda.new_state(specs, n_rows * ratio + 64), sr = p.ref.new_state(specs, n_rows * ratio + 64);
  // Small whole numbers: scores are exact in f32 and often equal.
  std::vector<float> keys(static_cast<size_t>(n_rows * dim));
  for (float& v : keys) v = static_cast<float>(random.below(3) - 1);
  s->reserve(n_rows * ratio);
  sr->reserve(n_rows * ratio);
  s->import_rows(0, 0, n_rows, std::as_bytes(std::span(keys)));
  sr->import_rows(0, 0, n_rows, std::as_bytes(std::span(keys)));
  std::vector<RowRef> rows, rows_r;
  for (const int32_t at : {100, 2047, 2051, 2055, 8000, 11999, 16383, 16387, 19999}) {
    rows.push_back({s.get(), at});
    rows_r.push_back({sr.get(), at});
  }
  const auto T = static_cast<int64_t>(rows.size());
  std::vector<float> q(static_cast<size_t>(T * heads * dim)), w(static_cast<size_t>(T * heads));
  for (float& v : q) v = static_cast<float>(random.below(3) - 1);
  for (float& v : w) v = static_cast<float>(random.below(5) - 2);
  const Tensor in = upload(p.cuda, q, T, heads * dim), weights = upload(p.cuda, w, T, heads);
  const Selection b =
      p.ref.latent()->select(upload(p.ref, q, T, heads * dim), upload(p.ref, w, T, heads), rows_r, 0, ratio, heads, k);
  for (const bool short_values : {false, true}) {
    const Selection a = short_values ? p.cuda.latent()->select_short(in, weights, rows, 0, ratio, heads, k)
                                     : p.cuda.latent()->select(in, weights, rows, 0, ratio, heads, k);
    const auto ca = integers(p.cuda, a.counts, T), ia = integers(p.cuda, a.ids, T * k);
    for (int64_t t = 0; t < T; ++t) {
      const std::string what = (short_values ? " of short row " : " of row ") + std::to_string(t);
      r.expect(ca[static_cast<size_t>(t)] == b.counts[t], "select count" + what);
      if (b.counts[t] < 0) continue;
      r.expect(std::equal(b.ids + t * k, b.ids + (t + 1) * k, ia.begin() + t * k), "select ids" + what);
    }
  }
}

void check_experts(const Pair& p, Results& r, Random& random) {
  const int64_t E = 24, k = 3, H = 512, F = 256, vocab = 50;
  const DType types[][2] = {{DType::F32, DType::F32},   {DType::F16, DType::BF16},    {DType::IQ2_XXS, DType::Q2_K},
                            {DType::Q4_K, DType::Q4_K}, {DType::MXFP4, DType::MXFP4}, {DType::Q8_0, DType::Q6_K},
                            {DType::Q5_K, DType::Q3_K}, {DType::Q4_0, DType::Q4_1}};
  std::vector<int32_t> table(static_cast<size_t>(vocab * k));
  for (int64_t i = 0; i < vocab; ++i)
    for (int64_t j = 0; j < k; ++j) table[static_cast<size_t>(i * k + j)] = static_cast<int32_t>((i * 7 + j * 5) % E);
  const MatrixView tv{table.data(), vocab, k, DType::I32};
  const auto tc = p.cuda.latent()->load_table(tv), tr = p.ref.latent()->load_table(tv);
  const Loaded bias = load(p, random.matrix(DType::F32, 1, E, 0.3f), 1, E, DType::F32);
  for (const auto& [gate_type, down_type] : types) {
    p.reset();
    std::vector<std::vector<std::byte>> bytes;
    std::vector<MatrixView> gate_up, down;
    for (int64_t e = 0; e < E; ++e) {
      for (int i = 0; i < 2; ++i) {
        bytes.push_back(random.matrix(gate_type, F, H, 0.05f));
        gate_up.push_back({bytes.back().data(), F, H, gate_type});
      }
      bytes.push_back(random.matrix(down_type, H, F, 0.05f));
      down.push_back({bytes.back().data(), H, F, down_type});
    }
    const auto gc = p.cuda.latent()->load_experts(gate_up, E, WeightUse::SwiGLU),
               gr = p.ref.latent()->load_experts(gate_up, E, WeightUse::SwiGLU),
               dc = p.cuda.latent()->load_experts(down, E, WeightUse::Linear),
               dr = p.ref.latent()->load_experts(down, E, WeightUse::Linear);
    const std::string what = std::string("moe ") + dtype_name(gate_type) + "/" + dtype_name(down_type);
    const int64_t T = 150;
    const auto x = random.floats(T * H), logits = random.floats(T * E, 4.0f), start = random.floats(T * H, 0.01f);
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < T; ++t) ids.push_back(static_cast<int32_t>(random.below(vocab)));
    for (const bool hashed : {false, true}) {
      const Routing a = p.cuda.latent()->route(upload(p.cuda, logits, T, E), bias.cuda.get(),
                                               hashed ? tc.get() : nullptr, ids, k, 1.5f);
      const Routing b =
          p.ref.latent()->route(upload(p.ref, logits, T, E), bias.ref.get(), hashed ? tr.get() : nullptr, ids, k, 1.5f);
      r.expect(integers(p.cuda, a.experts, T * k) == std::vector<int32_t>(b.experts, b.experts + T * k),
               what + " route experts");
      r.close(download(p.cuda, Tensor(a.weights, T, k)), std::vector<float>(b.weights, b.weights + T * k), 1e-6,
              what + " route weights");
      const Tensor in = upload(p.cuda, x, T, H);
      Tensor y = upload(p.cuda, start, T, H), yr = upload(p.ref, start, T, H);
      p.cuda.latent()->moe(*gc, *dc, in, a, 0.5f, y);
      p.ref.latent()->moe(*gr, *dr, upload(p.ref, x, T, H), b, 0.5f, yr);
      const auto all = download(p.cuda, y);
      r.close(all, download(p.ref, yr), p.traits.product_error(gate_type, down_type, 2e-2), what);
      for (const int64_t group : {1, 4, 16, 60}) {
        Tensor z = upload(p.cuda, start, T, H);
        for (int64_t t = 0; t < T; t += group) {
          const int64_t n = std::min(group, T - t);
          const Routing part{a.experts + t * k, a.weights + t * k, n, k};
          p.cuda.latent()->moe(*gc, *dc, in.rows(t, n), part, 0.5f, z.rows(t, n));
        }
        r.equal(download(p.cuda, z), all, what + " in groups of " + std::to_string(group));
      }
    }
  }
  for (const DType type : {DType::Q8_0, DType::F16}) {
    p.reset();
    const int64_t groups = 4, rank = 36, in = 256, T = 11;
    const auto bytes = random.matrix(type, groups * rank, in, 0.05f);
    const MatrixView view{bytes.data(), groups * rank, in, type};
    const auto w = p.cuda.latent()->load_grouped(view, groups), wr = p.ref.latent()->load_grouped(view, groups);
    const auto x = random.floats(T * groups * in);
    Tensor y = poisoned(p.cuda, T, groups * rank), yr = poisoned(p.ref, T, groups * rank);
    p.cuda.latent()->grouped_linear(*w, upload(p.cuda, x, T, groups * in), groups, y);
    p.ref.latent()->grouped_linear(*wr, upload(p.ref, x, T, groups * in), groups, yr);
    r.close(download(p.cuda, y), download(p.ref, yr), type == DType::F16 ? 3e-6 : 1e-2,
            std::string("grouped linear ") + dtype_name(type));
  }
}

// The router's product and its choice as one operation: the bits of both, in any number of rows, again and again.
void check_router(const Pair& p, Results& r, Random& random) {
  struct Case {
    int64_t experts, width, used;
    DType type;
  };
  for (const Case& c : {Case{256, 4096, 6, DType::F16},
                        {256, 4096, 6, DType::BF16},
                        {20, 288, 3, DType::F16},
                        {8, 256, 8, DType::BF16},
                        {40, 2336, 4, DType::F32},
                        {272, 512, 6, DType::F16}}) {
    p.reset();
    const int64_t T = 20, vocab = 40;
    const Loaded w = load(p, random.matrix(c.type, c.experts, c.width, 0.05f), c.experts, c.width, c.type);
    const Loaded bias = load(p, random.matrix(DType::F32, 1, c.experts, 0.3f), 1, c.experts, DType::F32);
    std::vector<int32_t> table(static_cast<size_t>(vocab * c.used)), ids;
    for (int64_t i = 0; i < vocab; ++i)
      for (int64_t j = 0; j < c.used; ++j)
        table[static_cast<size_t>(i * c.used + j)] = static_cast<int32_t>((i + j) % c.experts);
    for (int64_t t = 0; t < T; ++t) ids.push_back(static_cast<int32_t>(random.below(vocab)));
    const auto listed = p.cuda.latent()->load_table({table.data(), vocab, c.used, DType::I32});
    const auto x = random.floats(T * c.width);
    const Tensor in = upload(p.cuda, x, T, c.width);
    const std::string shape =
        "router " + std::to_string(c.experts) + "x" + std::to_string(c.width) + " " + dtype_name(c.type);
    for (const Weight* const from : {static_cast<const Weight*>(nullptr), static_cast<const Weight*>(listed.get())})
      for (const Weight* const add :
           {static_cast<const Weight*>(nullptr), static_cast<const Weight*>(bias.cuda.get())}) {
        const std::string what = shape + (from ? " by table" : "") + (add ? " with bias" : "");
        const Tensor logits = poisoned(p.cuda, T, c.experts);
        p.cuda.linear(*w.cuda, in, nullptr, nullptr, logits);
        const Routing all = p.cuda.latent()->route(logits, add, from, ids, c.used, 1.5f);
        const auto experts = integers(p.cuda, all.experts, T * c.used);
        const auto weights = download(p.cuda, Tensor(all.weights, T, c.used));
        for (const int64_t group : {1, 2, 3, 8, 9, 16, 17}) {
          std::vector<int32_t> got;
          std::vector<float> got_weights;
          for (int64_t t = 0; t < T; t += group) {
            const int64_t n = std::min(group, T - t);
            const Routing part = p.cuda.latent()->router(
                p.cuda, *w.cuda, in.rows(t, n), poisoned(p.cuda, n, c.experts), add, from,
                std::span(ids).subspan(static_cast<size_t>(t)).first(static_cast<size_t>(n)), c.used, 1.5f);
            const auto e = integers(p.cuda, part.experts, n * c.used);
            const auto v = download(p.cuda, Tensor(part.weights, n, c.used));
            got.insert(got.end(), e.begin(), e.end());
            got_weights.insert(got_weights.end(), v.begin(), v.end());
          }
          r.expect(got == experts, what + " in groups of " + std::to_string(group));
          r.equal(got_weights, weights, what + " weights in groups of " + std::to_string(group));
        }
        if (from || !add) continue;
        const Routing want =
            p.ref.latent()->router(p.ref, *w.ref, upload(p.ref, x, T, c.width), poisoned(p.ref, T, c.experts),
                                   bias.ref.get(), nullptr, ids, c.used, 1.5f);
        if (c.type == DType::BF16 && p.traits.rounds_to_bf16) continue;
        r.expect(experts == std::vector<int32_t>(want.experts, want.experts + T * c.used), what + " experts");
        r.close(weights, std::vector<float>(want.weights, want.weights + T * c.used), 1e-5, what + " weights");
      }
  }
  // Biases that are no numbers or not finite: experts are chosen all the same, each once.
  p.reset();
  const int64_t E = 64, H = 256, k = 6;
  std::vector<float> odd(static_cast<size_t>(E), -std::numeric_limits<float>::infinity());
  odd[9] = odd[40] = std::numeric_limits<float>::quiet_NaN();
  odd[33] = 1.0f, odd[2] = std::numeric_limits<float>::infinity();
  std::vector<std::byte> bytes(odd.size() * sizeof(float));
  std::memcpy(bytes.data(), odd.data(), bytes.size());
  const Loaded bias = load(p, bytes, 1, E, DType::F32),
               w = load(p, random.matrix(DType::F16, E, H, 0.05f), E, H, DType::F16);
  const Routing got = p.cuda.latent()->router(p.cuda, *w.cuda, upload(p.cuda, random.floats(H), 1, H),
                                              poisoned(p.cuda, 1, E), bias.cuda.get(), nullptr, {}, k, 1.5f);
  r.expect(integers(p.cuda, got.experts, k) == std::vector<int32_t>{2, 33, 0, 1, 3, 4}, "router with odd biases");
}

}  // namespace

void check_latent(Ops& cuda, Results& results, uint64_t seed, const Traits& traits) {
  const auto ref = make_reference_ops();
  const Pair p{cuda, *ref, traits};
  Random random(seed + 1);
  check_hyper(p, results, random);
  check_between(p, results, random);
  check_joined(p, results, random);
  check_heads(p, results, random);
  check_previous(p, results, random);
  check_wide_heads(p, results, seed);
  check_select(p, results, random);
  check_indexer(p, results, random);
  check_attention(p, results, seed + 2);
  check_experts(p, results, random);
  check_router(p, results, random);
}

}  // namespace ds4::gpu
