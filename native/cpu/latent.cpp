// Latent operations on the CPU: matrix products go through Ops, everything between them is a loop over token rows.
//
// A token row is computed by one thread from its own inputs, in an order of f32 operations that depends on its position
// only; threads share rows (and within a step of few rows the heads or columns of one).
#include "cpu/latent.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/packed.h"
#include "int_table.h"
#include "quant/quant.h"

namespace ds4::cpu {
namespace {

constexpr int64_t kMostStreams = 16;

void require(bool ok, const char* what) {
  if (!ok) throw Invalid(std::string("cpu: ") + what);
}

float* row_of(const Tensor& x, int64_t t) {
  return x.data + t * x.stride;
}

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

// Norm gains, biases, sinks.
const float* dense(const Weight& w) {
  return packed(w).dense();
}

// Several matrices of one shape, each packed by the backend.
class Matrices final : public Weight {
 public:
  Matrices(std::vector<std::unique_ptr<Weight>> parts)
      : Weight(parts.front()->rows() * static_cast<int64_t>(parts.size()), parts.front()->cols()),
        parts_(std::move(parts)) {}
  size_t resident_bytes() const override {
    size_t n = 0;
    for (const auto& p : parts_) n += p->resident_bytes();
    return n;
  }
  const Weight& part(int64_t i) const { return *parts_[static_cast<size_t>(i)]; }
  int64_t count() const { return static_cast<int64_t>(parts_.size()); }

 private:
  std::vector<std::unique_ptr<Weight>> parts_;
};

const Matrices& matrices(const Weight& w) {
  const auto* m = dynamic_cast<const Matrices*>(&w);
  if (!m) throw Invalid("cpu: a weight that was not loaded as several matrices");
  return *m;
}

// ---- simulated storage precision

float ceil_power_of_two(float f) {
  const auto bits = std::bit_cast<uint32_t>(f);
  return std::bit_cast<float>(bits & 0x7fffffu ? ((bits >> 23) + 1) << 23 : bits);
}

// Nearest multiple of the step of |x|'s binade, `mantissa` bits after the point, ties to even. Adding and taking away
// 1.5 * 2^23 steps rounds to nearest even without a library call.
float round_to(float x, float smallest, int mantissa, float largest) {
  const float a = std::min(std::fabs(x), largest);
  const float binade = std::bit_cast<float>(std::bit_cast<uint32_t>(std::max(a, smallest)) & 0x7f800000u);
  const float magic = std::ldexp(binade, 23 - mantissa) * 1.5f;
  volatile float sum = a + magic;  // not to be folded away
  return std::copysign(std::min(sum - magic, largest), x);
}

void round_group(float* x, int64_t n, float largest, float floor, float smallest, int mantissa) {
  float amax = floor;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
  const float scale = ceil_power_of_two(amax * (1.0f / largest)), inverse = 1.0f / scale;
  for (int64_t i = 0; i < n; ++i) x[i] = round_to(x[i] * inverse, smallest, mantissa, largest) * scale;
}

void hadamard(float* x, int64_t n) {
  for (int64_t h = 1; h < n; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

void round_row(float* x, int64_t dim, RowRounding rounding, int64_t rotated) {
  if (rounding == RowRounding::Fp8) {
    for (int64_t i = 0; i < dim - rotated; i += 64) round_group(x + i, 64, 448.0f, 1e-4f, 0x1p-6f, 3);
  } else if (rounding == RowRounding::HadamardFp4) {
    hadamard(x, dim);
    for (int64_t i = 0; i < dim; i += 32) round_group(x + i, 32, 6.0f, 6.0f * 0x1p-126f, 1.0f, 1);
  }
}

void check_rounding(RowRounding rounding, int64_t dim, int64_t rotated) {
  require(rounding != RowRounding::Fp8 || (dim - rotated) % 64 == 0, "Fp8 rows come in groups of 64");
  require(rounding != RowRounding::HadamardFp4 || (std::has_single_bit(static_cast<uint64_t>(dim)) && dim % 32 == 0),
          "Fp4 rows are a power of two long");
}

void rotate_tail(float* head, int64_t dim, const float* cosine, const float* sine, int64_t pairs, float sign) {
  float* x = head + dim - 2 * pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1], c = cosine[i], s = sign * sine[i];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

void angles(int64_t position, std::span<const float> freq, float* cosine, float* sine) {
  for (size_t i = 0; i < freq.size(); ++i) {
    const double angle = static_cast<float>(position) * freq[i];
    cosine[i] = static_cast<float>(std::cos(angle));
    sine[i] = static_cast<float>(std::sin(angle));
  }
}

// Sinkhorn's algorithm on n x n, n <= 16.
void sinkhorn(float* m, int64_t n, int64_t iterations, float eps) {
  const auto columns = [&] {
    for (int64_t b = 0; b < n; ++b) {
      float sum = eps;
      for (int64_t a = 0; a < n; ++a) sum += m[a * n + b];
      const float inverse = 1.0f / sum;
      for (int64_t a = 0; a < n; ++a) m[a * n + b] *= inverse;
    }
  };
  for (int64_t a = 0; a < n; ++a) {
    float* row = m + a * n;
    const float largest = *std::max_element(row, row + n);
    float sum = 0;
    for (int64_t b = 0; b < n; ++b) sum += row[b] = std::exp(row[b] - largest);
    for (int64_t b = 0; b < n; ++b) row[b] = row[b] / sum + eps;
  }
  columns();
  for (int64_t i = 1; i < iterations; ++i) {
    for (int64_t a = 0; a < n; ++a) {
      float sum = eps;
      for (int64_t b = 0; b < n; ++b) sum += m[a * n + b];
      const float inverse = 1.0f / sum;
      for (int64_t b = 0; b < n; ++b) m[a * n + b] *= inverse;
    }
    columns();
  }
}

class CpuLatent final : public LatentOps {
 public:
  CpuLatent(Ops& ops, ClampedSwiglu swiglu, const LatentKernels& kernels, ThreadPool& pool)
      : ops_(ops), swiglu_(std::move(swiglu)), kernels_(kernels), pool_(pool) {}

  void hc_in(const HyperConnection& hc, Tensor streams, Tensor y, Tensor mix) override {
    const int64_t n = hc.streams;
    require(
        n <= kMostStreams && streams.dim == n * y.dim && mix.dim == n + n * n && y.n == streams.n && mix.n == streams.n,
        "hc_in shapes");
    const Tensor c = coefficients(hc, streams);
    const float *base = dense(*hc.base), *scale = dense(*hc.scale);
    each_row(streams.n, [&](int64_t t) {
      const float *x = row_of(streams, t), *v = row_of(c, t);
      const float inverse = inverse_rms(x, streams.dim, hc.norm_eps);
      float pre[kMostStreams];
      float *post = row_of(mix, t), *m = post + n;
      for (int64_t j = 0; j < n; ++j) {
        pre[j] = sigmoid(v[j] * inverse * scale[0] + base[j]) + hc.eps;
        post[j] = 2.0f * sigmoid(v[n + j] * inverse * scale[1] + base[n + j]);
      }
      for (int64_t i = 0; i < n * n; ++i) m[i] = v[2 * n + i] * inverse * scale[2] + base[2 * n + i];
      sinkhorn(m, n, hc.iterations, hc.eps);
      kernels_.combine(pre, x, n, y.dim, row_of(y, t));
    });
  }

  void hc_out(Tensor out, Tensor mix, int64_t n, Tensor streams) override {
    require(n <= kMostStreams && streams.dim == n * out.dim && mix.dim == n + n * n && out.n == streams.n,
            "hc_out shapes");
    each_row(out.n, [&](int64_t t) {
      const float* post = row_of(mix, t);
      kernels_.mix(post, post + n, row_of(out, t), n, out.dim, row_of(streams, t));
    });
  }

  void hc_head(const HyperConnection& hc, Tensor streams, Tensor y) override {
    const int64_t n = hc.streams;
    require(n <= kMostStreams && streams.dim == n * y.dim && y.n == streams.n, "hc_head shapes");
    const Tensor c = coefficients(hc, streams);
    const float *base = dense(*hc.base), *scale = dense(*hc.scale);
    each_row(streams.n, [&](int64_t t) {
      const float* x = row_of(streams, t);
      const float inverse = inverse_rms(x, streams.dim, hc.norm_eps);
      float w[kMostStreams];
      for (int64_t j = 0; j < n; ++j) w[j] = sigmoid(row_of(c, t)[j] * inverse * scale[0] + base[j]) + hc.eps;
      kernels_.combine(w, x, n, y.dim, row_of(y, t));
    });
  }

  void head_norm(Tensor x, int64_t heads, float eps) override {
    require(x.dim % heads == 0, "head_norm shapes");
    const int64_t dim = x.dim / heads;
    each_row(x.n, [&](int64_t t) {
      for (int64_t h = 0; h < heads; ++h) {
        float* head = row_of(x, t) + h * dim;
        const float inverse = inverse_rms(head, dim, eps);
        for (int64_t i = 0; i < dim; ++i) head[i] *= inverse;
      }
    });
  }

  void rope_table_f32(std::span<const RowRef> rows, std::span<const float> freq, Tensor out) override {
    const auto pairs = static_cast<int64_t>(freq.size());
    require(static_cast<int64_t>(rows.size()) == out.n && out.dim == 2 * pairs, "rope_table_f32 shapes");
    each_row(out.n, [&](int64_t t) {
      angles(rows[static_cast<size_t>(t)].position, freq, row_of(out, t), row_of(out, t) + pairs);
    });
  }

  void rope_tail(Tensor x, Tensor table, int64_t heads, bool inverse) override {
    const int64_t dim = x.dim / heads, pairs = table.dim / 2;
    require(x.dim % heads == 0 && table.n == x.n && 2 * pairs <= dim, "rope_tail shapes");
    each_row(x.n, [&](int64_t t) {
      for (int64_t h = 0; h < heads; ++h)
        rotate_tail(row_of(x, t) + h * dim, dim, row_of(table, t), row_of(table, t) + pairs, pairs,
                    inverse ? -1.0f : 1.0f);
    });
  }

  void round_rows(Tensor x, int64_t heads, RowRounding rounding, int64_t rotated) override {
    require(x.dim % heads == 0, "round_rows shapes");
    const int64_t dim = x.dim / heads;
    check_rounding(rounding, dim, rotated);
    each_row(x.n, [&](int64_t t) {
      for (int64_t h = 0; h < heads; ++h) round_row(row_of(x, t) + h * dim, dim, rounding, rotated);
    });
  }

  void ring_store(Tensor x, std::span<const RowRef> rows, size_t ring) override {
    require(static_cast<int64_t>(rows.size()) == x.n, "ring_store shapes");
    for (int64_t t = 0; t < x.n; ++t) {
      const RowRef& row = rows[static_cast<size_t>(t)];
      std::copy_n(row_of(x, t), x.dim, row.state->writable_row(ring, row.position));
    }
  }

  void compress(Tensor kg, std::span<const RowRef> rows, const Compressor& c) override {
    const int64_t lanes = c.ratio == 4 ? 2 : 1, half = lanes * c.dim;
    require(kg.dim == 2 * half && static_cast<int64_t>(rows.size()) == kg.n && c.dim % 16 == 0, "compress shapes");
    check_rounding(c.rounding, c.dim, 2 * static_cast<int64_t>(c.freq.size()));
    const float *bias = dense(*c.bias), *gain = dense(*c.gain);
    // A session's rows follow each other through its ring; sessions are independent.
    for (int64_t t = 0; t < kg.n; ++t) {
      State& state = *rows[static_cast<size_t>(t)].state;
      const int64_t p = rows[static_cast<size_t>(t)].position;
      float* stored = state.writable_row(c.ring, p);
      const float* add = bias + p % c.ratio * half;
      std::copy_n(row_of(kg, t), half, stored);
      for (int64_t i = 0; i < half; ++i) stored[half + i] = row_of(kg, t)[half + i] + add[i];
      if ((p + 1) % c.ratio == 0) emit(state, p, lanes, half, gain, c);
    }
  }

  Selection select(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows, int64_t ratio,
                   int64_t heads, int64_t k) override {
    require(q.n == weight.n && weight.dim == heads && q.dim % heads == 0, "select shapes");
    const int64_t dim = q.dim / heads, heads16 = (heads + 15) / 16 * 16;
    Selection out{integers(q.n * k), integers(q.n), q.n, k};
    pool_.run(q.n, 1, [&](int64_t first, int64_t last) {
      std::vector<float> transposed(static_cast<size_t>(dim * heads16)), w(static_cast<size_t>(heads16)), score;
      std::vector<const float*> keys;
      std::vector<int32_t> order;
      for (int64_t t = first; t < last; ++t) {
        const State& state = *rows[static_cast<size_t>(t)].state;
        const int64_t visible = (static_cast<int64_t>(rows[static_cast<size_t>(t)].position) + 1) / ratio;
        out.counts[t] = -1;
        if (visible <= k) continue;
        transpose(row_of(q, t), heads, heads16, dim, 1.0f, transposed.data());
        std::copy_n(row_of(weight, t), heads, w.data());
        keys.resize(static_cast<size_t>(visible));
        for (int64_t i = 0; i < visible; ++i) keys[static_cast<size_t>(i)] = state.readable_row(index_rows, i);
        score.resize(static_cast<size_t>(visible));
        kernels_.index_scores(transposed.data(), heads16, dim, w.data(), keys.data(), visible, score.data());
        for (float& s : score)
          if (std::isnan(s)) s = -std::numeric_limits<float>::infinity();
        order.resize(static_cast<size_t>(visible));
        for (int64_t i = 0; i < visible; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
        std::nth_element(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
          const float x = score[static_cast<size_t>(a)], y = score[static_cast<size_t>(b)];
          return x > y || (x == y && a < b);
        });
        std::sort(order.begin(), order.begin() + k);
        std::copy_n(order.begin(), k, out.ids + t * k);
        out.counts[t] = static_cast<int32_t>(k);
      }
    });
    return out;
  }

  void latent_attention(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                        const Selection* selection, Tensor out) override {
    const int64_t dim = a.head_dim;
    require(q.dim == a.heads * dim && out.dim == q.dim && kv.dim == dim && q.n == kv.n && out.n == q.n,
            "latent_attention shapes");
    const float* sinks = dense(*a.sinks);
    // Work items are (row, sixteen heads): enough of them for every thread also in a decode step.
    const int64_t slices = (a.heads + 15) / 16;
    std::vector<int64_t> starts(static_cast<size_t>(q.n));
    for (int64_t t = 1; t < q.n; ++t)
      starts[static_cast<size_t>(t)] = rows[static_cast<size_t>(t)].state == rows[static_cast<size_t>(t - 1)].state
                                           ? starts[static_cast<size_t>(t - 1)]
                                           : t;
    pool_.run(q.n * slices, 1, [&](int64_t first, int64_t last) {
      std::vector<const float*> visible;
      std::vector<float> transposed(static_cast<size_t>(dim * 16)), acc(static_cast<size_t>(dim * 16));
      float max[16], sum[16], work[kRowBlock * 16];
      int64_t gathered = -1;
      for (int64_t item = first; item < last; ++item) {
        const int64_t t = item / slices, h = item % slices * 16, heads = std::min<int64_t>(16, a.heads - h);
        if (t != gathered) gather_rows(kv, rows, t, starts[static_cast<size_t>(t)], a, selection, visible);
        gathered = t;
        transpose(row_of(q, t) + h * dim, heads, 16, dim, a.scale, transposed.data());
        for (int64_t i = 0; i < 16; ++i) {
          max[i] = i < heads ? sinks[h + i] : 0.0f;
          sum[i] = 1.0f;  // the sink itself
        }
        std::fill(acc.begin(), acc.end(), 0.0f);
        const auto count = static_cast<int64_t>(visible.size());
        for (int64_t i = 0; i < count; i += kRowBlock)
          kernels_.attend(transposed.data(), 16, dim, visible.data() + i, std::min(kRowBlock, count - i), max, sum,
                          acc.data(), work);
        for (int64_t j = 0; j < heads; ++j) {
          float* to = row_of(out, t) + (h + j) * dim;
          const float inverse = 1.0f / sum[j];
          for (int64_t d = 0; d < dim; ++d) to[d] = acc[static_cast<size_t>(d * 16 + j)] * inverse;
        }
      }
    });
  }

  std::unique_ptr<Weight> load_grouped(const MatrixView& view, int64_t groups) override {
    require(groups > 0 && view.rows % groups == 0, "groups do not divide the rows");
    const int64_t rank = view.rows / groups;
    std::vector<std::unique_ptr<Weight>> parts;
    for (int64_t g = 0; g < groups; ++g) {
      const auto* data = static_cast<const std::byte*>(view.data);
      const MatrixView part{data + static_cast<size_t>(g * rank) * row_bytes(view.type, view.cols), rank, view.cols,
                            view.type};
      parts.push_back(ops_.load({&part, 1}, WeightUse::Linear));
    }
    return std::make_unique<Matrices>(std::move(parts));
  }

  void grouped_linear(const Weight& w, Tensor x, int64_t groups, Tensor y) override {
    const Matrices& m = matrices(w);
    require(m.count() == groups && x.dim == groups * w.cols() && y.dim == w.rows() && x.n == y.n,
            "grouped_linear shapes");
    const int64_t rank = w.rows() / groups;
    for (int64_t g = 0; g < groups; ++g)
      ops_.linear(m.part(g), x.columns(g * w.cols(), w.cols()), nullptr, nullptr, y.columns(g * rank, rank));
  }

  void linear_swiglu_clamped(const Weight& w, Tensor x, float limit, Tensor y) override { swiglu_(w, x, limit, y); }

  Routing route(Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids, int64_t k,
                float scale) override {
    const int64_t experts = logits.dim;
    require(k > 0 && k <= experts, "route shapes");
    const float* add = bias ? dense(*bias) : nullptr;
    const auto* ints = dynamic_cast<const IntTable*>(table);
    require(!table || (ints && ints->cols() == k), "route table shape");
    Routing out{integers(logits.n * k), ops_.scratch(logits.n, k).data, logits.n, k};
    each_row(logits.n, [&](int64_t t) {
      thread_local std::vector<float> score, key;
      score.resize(static_cast<size_t>(experts));
      key.resize(static_cast<size_t>(experts));
      for (int64_t e = 0; e < experts; ++e) {
        const float x = row_of(logits, t)[e];
        const float softplus = x > 20 ? x : x < -20 ? std::exp(x) : std::log1p(std::exp(x));
        score[static_cast<size_t>(e)] = std::sqrt(softplus);
        const float v = score[static_cast<size_t>(e)] + (add ? add[e] : 0.0f);
        // What is no number, or not finite from below, is the lowest, and still above what was chosen.
        key[static_cast<size_t>(e)] =
            v >= std::numeric_limits<float>::lowest() ? v : std::numeric_limits<float>::lowest();
      }
      int32_t* chosen = out.experts + t * k;
      if (ints) {
        std::copy_n(ints->row(ids[static_cast<size_t>(t)]), k, chosen);
      } else {
        for (int64_t i = 0; i < k; ++i) {  // k passes: ties go to the lower expert
          const auto best = std::max_element(key.begin(), key.end());
          chosen[i] = static_cast<int32_t>(best - key.begin());
          *best = -std::numeric_limits<float>::infinity();
        }
      }
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += score[static_cast<size_t>(chosen[i])];
      sum = std::max(sum, 6.1035e-5f);
      for (int64_t i = 0; i < k; ++i) out.weights[t * k + i] = score[static_cast<size_t>(chosen[i])] / sum * scale;
    });
    return out;
  }

  std::unique_ptr<Weight> load_experts(std::span<const MatrixView> parts, int64_t experts, WeightUse use) override {
    const size_t each = use == WeightUse::SwiGLU ? 2 : 1;
    require(experts > 0 && parts.size() == static_cast<size_t>(experts) * each,
            "load_experts of another number of matrices");
    std::vector<std::unique_ptr<Weight>> loaded;
    for (size_t e = 0; e < static_cast<size_t>(experts); ++e)
      loaded.push_back(ops_.load(parts.subspan(e * each, each), use));
    return std::make_unique<Matrices>(std::move(loaded));
  }

  std::unique_ptr<Weight> load_table(const MatrixView& view) override { return std::make_unique<IntTable>(view); }

  void moe(const Weight& gate_up, const Weight& down, Tensor x, const Routing& routing, float limit,
           Tensor y) override {
    const Matrices &up = matrices(gate_up), &out = matrices(down);
    const int64_t ff = down.cols(), k = routing.k, experts = up.count();
    require(x.n == routing.n && y.n == x.n && up.cols() == x.dim && out.count() == experts &&
                out.part(0).rows() == y.dim && up.part(0).rows() == 2 * ff,
            "moe shapes");
    // Tokens by expert, so that an expert's weights are read once whatever the number of rows.
    std::vector<int64_t> start(static_cast<size_t>(experts + 1), 0), members(static_cast<size_t>(x.n * k));
    for (int64_t i = 0; i < x.n * k; ++i) {
      require(routing.experts[i] >= 0 && routing.experts[i] < experts, "an expert that does not exist");
      ++start[static_cast<size_t>(routing.experts[i] + 1)];
    }
    for (int64_t e = 0; e < experts; ++e) start[static_cast<size_t>(e + 1)] += start[static_cast<size_t>(e)];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t i = 0; i < x.n * k; ++i)
      members[static_cast<size_t>(next[static_cast<size_t>(routing.experts[i])]++)] = i;

    Tensor results = ops_.scratch(x.n * k, y.dim), inputs = ops_.scratch(x.n, x.dim), hidden = ops_.scratch(x.n, ff);
    Tensor sorted = ops_.scratch(x.n * k, y.dim);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t first = start[static_cast<size_t>(e)], n = start[static_cast<size_t>(e + 1)] - first;
      if (n == 0) continue;
      Tensor in = inputs.rows(0, n), mid = hidden.rows(0, n);
      if (x.n == 1) {
        in = x;
      } else {
        for (int64_t i = 0; i < n; ++i)
          std::copy_n(row_of(x, members[static_cast<size_t>(first + i)] / k), x.dim, row_of(in, i));
      }
      swiglu_(up.part(e), in, limit, mid);
      ops_.linear(out.part(e), mid, nullptr, nullptr, sorted.rows(first, n));
    }
    for (int64_t i = 0; i < x.n * k; ++i)
      std::copy_n(row_of(sorted, i), y.dim, row_of(results, members[static_cast<size_t>(i)]));
    each_row(x.n, [&](int64_t t) {
      float* to = row_of(y, t);
      for (int64_t i = 0; i < k; ++i) {
        const float w = routing.weights[t * k + i];
        const float* from = row_of(results, t * k + i);
        for (int64_t d = 0; d < y.dim; ++d) to[d] += w * from[d];
      }
    });
  }

 private:
  template <class Body>
  void each_row(int64_t n, Body&& body) {
    pool_.run(n, 2, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) body(t);
    });
  }

  float inverse_rms(const float* x, int64_t n, float eps) const {
    return 1.0f / std::sqrt(kernels_.squares(x, n) / static_cast<float>(n) + eps);
  }

  // fn x; the caller multiplies by 1 / rms(x).
  Tensor coefficients(const HyperConnection& hc, Tensor streams) {
    Tensor c = ops_.scratch(streams.n, hc.fn->rows());
    ops_.linear(*hc.fn, streams, nullptr, nullptr, c);
    return c;
  }

  static void transpose(const float* q, int64_t heads, int64_t heads16, int64_t dim, float scale, float* out) {
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t h = 0; h < heads16; ++h) out[d * heads16 + h] = h < heads ? q[h * dim + d] * scale : 0.0f;
  }

  static void gather_rows(Tensor kv, std::span<const RowRef> rows, int64_t t, int64_t start, const LatentAttention& a,
                          const Selection* selection, std::vector<const float*>& visible) {
    const RowRef& row = rows[static_cast<size_t>(t)];
    const State& state = *row.state;
    const int64_t p = row.position, step_first = rows[static_cast<size_t>(start)].position;
    visible.clear();
    for (int64_t j = std::max<int64_t>(0, p + 1 - a.window); j <= p; ++j)
      visible.push_back(j < step_first ? state.readable_row(a.window_ring, j) : row_of(kv, start + (j - step_first)));
    if (!a.compressed) return;
    const int64_t count = selection ? selection->counts[t] : -1;
    if (count < 0) {
      const int64_t emitted = (p + 1) / a.ratio;
      for (int64_t i = 0; i < emitted; ++i) visible.push_back(state.readable_row(a.rows, i));
    } else {
      const int32_t* ids = selection->ids + t * selection->capacity;
      for (int64_t i = 0; i < count; ++i) visible.push_back(state.readable_row(a.rows, ids[i]));
    }
  }

  void emit(State& state, int64_t p, int64_t lanes, int64_t half, const float* gain, const Compressor& c) const {
    const int64_t first = p + 1 - c.ratio, start = lanes == 2 && first > 0 ? first - c.ratio : first;
    std::vector<const float*> keys, gates;
    for (int64_t j = start; j <= p; ++j) {
      const float* entry = state.readable_row(c.ring, j) + (lanes == 2 && j >= first ? c.dim : 0);
      keys.push_back(entry);
      gates.push_back(entry + half);
    }
    float* row = state.writable_row(c.rows, p / c.ratio);
    kernels_.pool(keys.data(), gates.data(), static_cast<int64_t>(keys.size()), c.dim, row);
    const float inverse = inverse_rms(row, c.dim, c.eps);
    for (int64_t i = 0; i < c.dim; ++i) row[i] = row[i] * inverse * gain[i];
    std::vector<float> cosine(c.freq.size()), sine(c.freq.size());
    angles(first, c.freq, cosine.data(), sine.data());
    const auto pairs = static_cast<int64_t>(c.freq.size());
    rotate_tail(row, c.dim, cosine.data(), sine.data(), pairs, 1.0f);
    round_row(row, c.dim, c.rounding, 2 * pairs);
  }

  // Integers live in the backend's scratch, which hands out f32 of the same size.
  int32_t* integers(int64_t n) { return reinterpret_cast<int32_t*>(ops_.scratch(1, std::max<int64_t>(1, n)).data); }

  Ops& ops_;
  ClampedSwiglu swiglu_;
  const LatentKernels& kernels_;
  ThreadPool& pool_;
};

}  // namespace

std::unique_ptr<LatentOps> make_latent_ops(Ops& ops, ClampedSwiglu swiglu, const LatentKernels& kernels,
                                           ThreadPool& pool) {
  return std::make_unique<CpuLatent>(ops, std::move(swiglu), kernels, pool);
}

}  // namespace ds4::cpu
