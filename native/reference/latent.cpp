#include "reference/latent.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "int_table.h"
#include "reference/dense_weight.h"

namespace ds4 {
namespace {

using reference::dense;
using reference::DenseWeight;
using reference::dot;
using reference::require;
using reference::row_of;

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

// ---- simulated FP8 and FP4 (OCP MX v1.0 element formats) ---------------------------------------------------------

// The smallest power of two that is >= f, f > 0 normal. Read off the bits, so that no logarithm can round across it.
float ceil_power_of_two(float f) {
  const auto bits = std::bit_cast<uint32_t>(f);
  return std::bit_cast<float>(bits & 0x7fffffu ? ((bits >> 23) + 1) << 23 : bits);
}

// Nearest e4m3 value, ties to even, |x| <= 448.
float to_e4m3(float x) {
  const float a = std::fabs(x);
  const int exponent = a < 0x1p-6f ? -6 : std::ilogb(a);
  const float step = std::ldexp(1.0f, exponent - 3);
  return std::copysign(std::min(std::nearbyint(a / step) * step, 448.0f), x);
}

// Nearest e2m1 value, ties to the even code, |x| <= 6.
float to_e2m1(float x) {
  const float a = std::fabs(x);
  const int exponent = a < 1.0f ? 0 : std::ilogb(a);
  const float step = std::ldexp(1.0f, exponent - 1);
  return std::copysign(std::min(std::nearbyint(a / step) * step, 6.0f), x);
}

template <class Round>
void round_group(float* x, int64_t n, float largest, float floor, Round round) {
  float amax = floor;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
  const float scale = ceil_power_of_two(amax * (1.0f / largest));
  for (int64_t i = 0; i < n; ++i) x[i] = round(std::clamp(x[i] / scale, -largest, largest)) * scale;
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
    const int64_t n = dim - rotated;
    require(n % 64 == 0, "Fp8 rows come in groups of 64");
    for (int64_t i = 0; i < n; i += 64) round_group(x + i, 64, 448.0f, 1e-4f, to_e4m3);
  } else if (rounding == RowRounding::HadamardFp4) {
    require(std::has_single_bit(static_cast<uint64_t>(dim)) && dim % 32 == 0, "Fp4 rows are a power of two long");
    hadamard(x, dim);
    for (int64_t i = 0; i < dim; i += 32) round_group(x + i, 32, 6.0f, 6.0f * 0x1p-126f, to_e2m1);
  }
}

void rotate_tail(float* head, int64_t dim, const float* cosine, const float* sine, int64_t pairs, double sign) {
  float* x = head + dim - 2 * pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const double a = x[2 * i], b = x[2 * i + 1], c = cosine[i], s = sign * sine[i];
    x[2 * i] = static_cast<float>(a * c - b * s);
    x[2 * i + 1] = static_cast<float>(a * s + b * c);
  }
}

// The angle as one f32 product, then exact functions of it.
void angles(int64_t position, std::span<const float> freq, float* cosine, float* sine) {
  for (size_t i = 0; i < freq.size(); ++i) {
    const double angle = static_cast<float>(position) * freq[i];
    cosine[i] = static_cast<float>(std::cos(angle));
    sine[i] = static_cast<float>(std::sin(angle));
  }
}

class ReferenceLatentOps final : public LatentOps {
 public:
  explicit ReferenceLatentOps(Ops& ops) : ops_(ops) {}

  void hc_in(const HyperConnection& hc, Tensor streams, Tensor y, Tensor mix) override {
    const int64_t n = hc.streams, width = y.dim;
    require(streams.dim == n * width && mix.dim == n + n * n && y.n == streams.n && mix.n == streams.n, "hc_in shapes");
    const float *base = dense(*hc.base).row(0), *scale = dense(*hc.scale).row(0);
    std::vector<double> m(static_cast<size_t>(n * n));
    for (int64_t t = 0; t < streams.n; ++t) {
      const float* x = row_of(streams, t);
      const std::vector<double> c = coefficients(hc, x, streams.dim);
      const auto at = [&](int64_t i) { return c[static_cast<size_t>(i)]; };
      std::vector<double> pre(static_cast<size_t>(n));
      for (int64_t j = 0; j < n; ++j) {
        pre[static_cast<size_t>(j)] = sigmoid(at(j) * scale[0] + base[j]) + hc.eps;
        row_of(mix, t)[j] = static_cast<float>(2.0 * sigmoid(at(n + j) * scale[1] + base[n + j]));
      }
      for (int64_t i = 0; i < n * n; ++i) m[static_cast<size_t>(i)] = at(2 * n + i) * scale[2] + base[2 * n + i];
      sinkhorn(m, n, hc.iterations, hc.eps);
      for (int64_t i = 0; i < n * n; ++i) row_of(mix, t)[n + i] = static_cast<float>(m[static_cast<size_t>(i)]);
      weighted_sum(pre, x, width, row_of(y, t));
    }
  }

  void hc_out(Tensor out, Tensor mix, int64_t n, Tensor streams) override {
    require(streams.dim == n * out.dim && mix.dim == n + n * n && out.n == streams.n, "hc_out shapes");
    std::vector<double> next(static_cast<size_t>(n));
    for (int64_t t = 0; t < out.n; ++t) {
      const float *post = row_of(mix, t), *m = post + n;
      for (int64_t d = 0; d < out.dim; ++d) {
        for (int64_t k = 0; k < n; ++k) {
          double sum = static_cast<double>(post[k]) * row_of(out, t)[d];
          for (int64_t j = 0; j < n; ++j)
            sum += static_cast<double>(m[j * n + k]) * row_of(streams, t)[j * out.dim + d];
          next[static_cast<size_t>(k)] = sum;
        }
        for (int64_t k = 0; k < n; ++k)
          row_of(streams, t)[k * out.dim + d] = static_cast<float>(next[static_cast<size_t>(k)]);
      }
    }
  }

  void hc_head(const HyperConnection& hc, Tensor streams, Tensor y) override {
    require(streams.dim == hc.streams * y.dim && y.n == streams.n, "hc_head shapes");
    const float *base = dense(*hc.base).row(0), *scale = dense(*hc.scale).row(0);
    for (int64_t t = 0; t < streams.n; ++t) {
      std::vector<double> w = coefficients(hc, row_of(streams, t), streams.dim);
      for (int64_t j = 0; j < hc.streams; ++j) {
        double& v = w[static_cast<size_t>(j)];
        v = sigmoid(v * scale[0] + base[j]) + hc.eps;
      }
      weighted_sum(w, row_of(streams, t), y.dim, row_of(y, t));
    }
  }

  void head_norm(Tensor x, int64_t heads, float eps) override {
    require(x.dim % heads == 0, "head_norm shapes");
    const int64_t dim = x.dim / heads;
    for (int64_t t = 0; t < x.n; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        float* head = row_of(x, t) + h * dim;
        const double scale = 1.0 / std::sqrt(dot(head, head, dim) / static_cast<double>(dim) + eps);
        for (int64_t i = 0; i < dim; ++i) head[i] = static_cast<float>(head[i] * scale);
      }
  }

  void rope_table_f32(std::span<const RowRef> rows, std::span<const float> freq, Tensor out) override {
    const auto pairs = static_cast<int64_t>(freq.size());
    require(static_cast<int64_t>(rows.size()) == out.n && out.dim == 2 * pairs, "rope_table_f32 shapes");
    for (int64_t t = 0; t < out.n; ++t)
      angles(rows[static_cast<size_t>(t)].position, freq, row_of(out, t), row_of(out, t) + pairs);
  }

  void rope_tail(Tensor x, Tensor table, int64_t heads, bool inverse) override {
    const int64_t dim = x.dim / heads, pairs = table.dim / 2;
    require(x.dim % heads == 0 && table.n == x.n && 2 * pairs <= dim, "rope_tail shapes");
    for (int64_t t = 0; t < x.n; ++t)
      for (int64_t h = 0; h < heads; ++h)
        rotate_tail(row_of(x, t) + h * dim, dim, row_of(table, t), row_of(table, t) + pairs, pairs, inverse ? -1 : 1);
  }

  void round_rows(Tensor x, int64_t heads, RowRounding rounding, int64_t rotated) override {
    require(x.dim % heads == 0, "round_rows shapes");
    for (int64_t t = 0; t < x.n; ++t)
      for (int64_t h = 0; h < heads; ++h)
        round_row(row_of(x, t) + h * (x.dim / heads), x.dim / heads, rounding, rotated);
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
    require(kg.dim == 2 * half && static_cast<int64_t>(rows.size()) == kg.n, "compress shapes");
    const auto pairs = static_cast<int64_t>(c.freq.size());
    std::vector<float> cosine(c.freq.size()), sine(c.freq.size());
    for (int64_t t = 0; t < kg.n; ++t) {
      State& state = *rows[static_cast<size_t>(t)].state;
      const int64_t p = rows[static_cast<size_t>(t)].position;
      float* stored = state.writable_row(c.ring, p);
      const float* bias = dense(*c.bias).row(p % c.ratio);
      std::copy_n(row_of(kg, t), half, stored);
      for (int64_t i = 0; i < half; ++i) stored[half + i] = row_of(kg, t)[half + i] + bias[i];
      if ((p + 1) % c.ratio != 0) continue;

      const int64_t first = p + 1 - c.ratio;
      std::vector<float> pooled(static_cast<size_t>(c.dim));
      for (int64_t i = 0; i < c.dim; ++i) pooled[static_cast<size_t>(i)] = pool(state, c, lanes, half, first, i);
      const double scale =
          1.0 / std::sqrt(dot(pooled.data(), pooled.data(), c.dim) / static_cast<double>(c.dim) + c.eps);
      float* row = state.writable_row(c.rows, p / c.ratio);
      for (int64_t i = 0; i < c.dim; ++i)
        row[i] = static_cast<float>(pooled[static_cast<size_t>(i)] * scale * dense(*c.gain).row(0)[i]);
      angles(first, c.freq, cosine.data(), sine.data());
      rotate_tail(row, c.dim, cosine.data(), sine.data(), pairs, 1);
      round_row(row, c.dim, c.rounding, 2 * pairs);
    }
  }

  Selection select(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows, int64_t ratio,
                   int64_t heads, int64_t k) override {
    require(q.n == weight.n && weight.dim == heads && q.dim % heads == 0, "select shapes");
    const int64_t dim = q.dim / heads;
    Selection out = new_selection(q.n, k);
    std::vector<double> score;
    std::vector<int32_t> order;
    for (int64_t t = 0; t < q.n; ++t) {
      const State& state = *rows[static_cast<size_t>(t)].state;
      const int64_t visible = (static_cast<int64_t>(rows[static_cast<size_t>(t)].position) + 1) / ratio;
      out.counts[t] = -1;
      if (visible <= k) continue;
      score.assign(static_cast<size_t>(visible), 0.0);
      order.resize(static_cast<size_t>(visible));
      std::iota(order.begin(), order.end(), 0);
      for (int64_t w = 0; w < visible; ++w) {
        const float* key = state.readable_row(index_rows, w);
        for (int64_t h = 0; h < heads; ++h)
          score[static_cast<size_t>(w)] +=
              static_cast<double>(row_of(weight, t)[h]) * std::max(0.0, dot(row_of(q, t) + h * dim, key, dim));
      }
      for (double& s : score)
        if (std::isnan(s)) s = -std::numeric_limits<double>::infinity();
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)];
      });
      std::sort(order.begin(), order.begin() + k);
      std::copy_n(order.begin(), k, out.ids + t * k);
      out.counts[t] = static_cast<int32_t>(k);
    }
    return out;
  }

  void latent_attention(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                        const Selection* selection, Tensor out) override {
    const int64_t dim = a.head_dim;
    require(q.dim == a.heads * dim && out.dim == q.dim && kv.dim == dim && q.n == kv.n && out.n == q.n,
            "latent_attention shapes");
    std::vector<const float*> visible;
    std::vector<double> weight, sum(static_cast<size_t>(dim));
    for (int64_t t = 0; t < q.n; ++t) {
      const RowRef& row = rows[static_cast<size_t>(t)];
      int64_t start = t;  // first row of this session in the step
      while (start > 0 && rows[static_cast<size_t>(start - 1)].state == row.state) --start;
      const int64_t p = row.position, step_first = rows[static_cast<size_t>(start)].position;
      visible.clear();
      for (int64_t j = std::max<int64_t>(0, p + 1 - a.window); j <= p; ++j)
        visible.push_back(j < step_first ? row.state->readable_row(a.window_ring, j)
                                         : row_of(kv, start + (j - step_first)));
      if (a.compressed) {
        const int64_t emitted = (p + 1) / a.ratio;
        const int64_t count = selection && selection->counts[t] >= 0 ? selection->counts[t] : -1;
        for (int64_t i = 0; i < (count < 0 ? emitted : count); ++i)
          visible.push_back(
              row.state->readable_row(a.rows, count < 0 ? i : selection->ids[t * selection->capacity + i]));
      }
      weight.resize(visible.size());
      for (int64_t h = 0; h < a.heads; ++h) {
        const double sink = dense(*a.sinks).row(0)[h];
        double largest = sink;
        for (size_t i = 0; i < visible.size(); ++i) {
          weight[i] = dot(row_of(q, t) + h * dim, visible[i], dim) * static_cast<double>(a.scale);
          largest = std::max(largest, weight[i]);
        }
        double total = std::exp(sink - largest);
        std::fill(sum.begin(), sum.end(), 0.0);
        for (size_t i = 0; i < visible.size(); ++i) {
          const double e = std::exp(weight[i] - largest);
          total += e;
          for (int64_t d = 0; d < dim; ++d) sum[static_cast<size_t>(d)] += e * visible[i][d];
        }
        for (int64_t d = 0; d < dim; ++d)
          row_of(out, t)[h * dim + d] = static_cast<float>(sum[static_cast<size_t>(d)] / total);
      }
    }
  }

  std::unique_ptr<Weight> load_grouped(const MatrixView& view, int64_t groups) override {
    require(groups > 0 && view.rows % groups == 0, "groups do not divide the rows");
    return std::make_unique<DenseWeight>(std::span(&view, 1));
  }

  void grouped_linear(const Weight& w, Tensor x, int64_t groups, Tensor y) override {
    require(x.dim == groups * w.cols() && y.dim == w.rows() && w.rows() % groups == 0 && x.n == y.n,
            "grouped_linear shapes");
    const int64_t rank = w.rows() / groups;
    for (int64_t t = 0; t < x.n; ++t)
      for (int64_t r = 0; r < w.rows(); ++r)
        row_of(y, t)[r] = static_cast<float>(dot(dense(w).row(r), row_of(x, t) + r / rank * w.cols(), w.cols()));
  }

  void linear_swiglu_clamped(const Weight& w, Tensor x, float limit, Tensor y) override {
    require(x.n == y.n && x.dim == w.cols() && 2 * y.dim == w.rows(), "linear_swiglu_clamped shapes");
    for (int64_t t = 0; t < x.n; ++t) swiglu(dense(w), 0, y.dim, row_of(x, t), limit, row_of(y, t));
  }

  Routing route(Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids, int64_t k,
                float scale) override {
    require(k > 0 && k <= logits.dim, "route shapes");
    Routing out = new_routing(logits.n, k);
    std::vector<double> score(static_cast<size_t>(logits.dim));
    std::vector<int32_t> order(score.size());
    for (int64_t t = 0; t < logits.n; ++t) {
      for (int64_t e = 0; e < logits.dim; ++e) {
        const double x = row_of(logits, t)[e];
        const double softplus = x > 20 ? x : x < -20 ? std::exp(x) : std::log1p(std::exp(x));
        score[static_cast<size_t>(e)] = std::sqrt(softplus);
      }
      int32_t* chosen = out.experts + t * k;
      if (table) {
        const auto* ints = dynamic_cast<const IntTable*>(table);
        require(ints && ints->cols() == k, "route table shape");
        std::copy_n(ints->row(ids[static_cast<size_t>(t)]), k, chosen);
      } else {
        std::iota(order.begin(), order.end(), 0);
        const auto key = [&](int32_t e) {
          const double v = score[static_cast<size_t>(e)] + (bias ? static_cast<double>(dense(*bias).row(0)[e]) : 0.0);
          return v >= -std::numeric_limits<float>::max() ? v : -static_cast<double>(std::numeric_limits<float>::max());
        };
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key(a) > key(b); });
        std::copy_n(order.begin(), k, chosen);
      }
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += score[static_cast<size_t>(chosen[i])];
      sum = std::max(sum, 6.1035e-5);
      for (int64_t i = 0; i < k; ++i)
        out.weights[t * k + i] = static_cast<float>(score[static_cast<size_t>(chosen[i])] / sum * scale);
    }
    return out;
  }

  std::unique_ptr<Weight> load_experts(std::span<const MatrixView> parts, int64_t experts, WeightUse use) override {
    require(experts > 0 && static_cast<int64_t>(parts.size()) == experts * (use == WeightUse::SwiGLU ? 2 : 1),
            "load_experts of another number of matrices");
    return std::make_unique<DenseWeight>(parts);
  }

  std::unique_ptr<Weight> load_table(const MatrixView& view) override { return std::make_unique<IntTable>(view); }

  void moe(const Weight& gate_up, const Weight& down, Tensor x, const Routing& routing, float limit,
           Tensor y) override {
    require(x.n == routing.n && y.n == x.n && gate_up.cols() == x.dim && gate_up.rows() % (2 * down.cols()) == 0,
            "moe shapes");
    const int64_t ff = down.cols(), width = y.dim;
    std::vector<float> hidden(static_cast<size_t>(ff));
    for (int64_t t = 0; t < x.n; ++t)
      for (int64_t i = 0; i < routing.k; ++i) {
        const int64_t e = routing.experts[t * routing.k + i];
        require(e >= 0 && (e + 1) * width <= down.rows(), "an expert that does not exist");
        const float weight = routing.weights[t * routing.k + i];
        swiglu(dense(gate_up), e * 2 * ff, ff, row_of(x, t), limit, hidden.data());
        for (int64_t r = 0; r < width; ++r) {
          float& sum = row_of(y, t)[r];
          sum = static_cast<float>(sum + weight * dot(dense(down).row(e * width + r), hidden.data(), ff));
        }
      }
  }

 private:
  static std::vector<double> coefficients(const HyperConnection& hc, const float* x, int64_t n) {
    const DenseWeight& fn = dense(*hc.fn);
    require(fn.cols() == n, "hyper-connection shape");
    const double scale = 1.0 / std::sqrt(dot(x, x, n) / static_cast<double>(n) + hc.norm_eps);
    std::vector<double> c(static_cast<size_t>(fn.rows()));
    for (int64_t i = 0; i < fn.rows(); ++i) c[static_cast<size_t>(i)] = dot(fn.row(i), x, n) * scale;
    return c;
  }

  static void sinkhorn(std::vector<double>& m, int64_t n, int64_t iterations, double eps) {
    const auto at = [&](int64_t a, int64_t b) -> double& { return m[static_cast<size_t>(a * n + b)]; };
    const auto columns = [&] {
      for (int64_t b = 0; b < n; ++b) {
        double sum = eps;
        for (int64_t a = 0; a < n; ++a) sum += at(a, b);
        for (int64_t a = 0; a < n; ++a) at(a, b) /= sum;
      }
    };
    for (int64_t a = 0; a < n; ++a) {
      double largest = at(a, 0), sum = 0;
      for (int64_t b = 1; b < n; ++b) largest = std::max(largest, at(a, b));
      for (int64_t b = 0; b < n; ++b) sum += at(a, b) = std::exp(at(a, b) - largest);
      for (int64_t b = 0; b < n; ++b) at(a, b) = at(a, b) / sum + eps;
    }
    columns();
    for (int64_t i = 1; i < iterations; ++i) {
      for (int64_t a = 0; a < n; ++a) {
        double sum = eps;
        for (int64_t b = 0; b < n; ++b) sum += at(a, b);
        for (int64_t b = 0; b < n; ++b) at(a, b) /= sum;
      }
      columns();
    }
  }

  static void weighted_sum(const std::vector<double>& w, const float* streams, int64_t width, float* y) {
    for (int64_t d = 0; d < width; ++d) {
      double sum = 0;
      for (size_t j = 0; j < w.size(); ++j) sum += w[j] * streams[static_cast<int64_t>(j) * width + d];
      y[d] = static_cast<float>(sum);
    }
  }

  // Column i of the row that pools the window starting at `first`.
  static float pool(const State& state, const Compressor& c, int64_t lanes, int64_t half, int64_t first, int64_t i) {
    const int64_t start = lanes == 2 && first > 0 ? first - c.ratio : first;
    const auto entry = [&](int64_t p, bool gate) {
      const int64_t lane = lanes == 2 && p >= first ? c.dim : 0;
      return static_cast<double>(state.readable_row(c.ring, p)[(gate ? half : 0) + lane + i]);
    };
    double largest = -std::numeric_limits<double>::infinity(), sum = 0, total = 0;
    for (int64_t p = start; p < first + c.ratio; ++p) largest = std::max(largest, entry(p, true));
    for (int64_t p = start; p < first + c.ratio; ++p) {
      const double e = std::exp(entry(p, true) - largest);
      total += e;
      sum += e * entry(p, false);
    }
    return static_cast<float>(sum / total);
  }

  static void swiglu(const DenseWeight& w, int64_t first, int64_t ff, const float* x, float limit, float* y) {
    for (int64_t r = 0; r < ff; ++r) {
      const double g = std::min(dot(w.row(first + r), x, w.cols()), static_cast<double>(limit));
      const double u =
          std::clamp(dot(w.row(first + ff + r), x, w.cols()), -static_cast<double>(limit), static_cast<double>(limit));
      y[r] = static_cast<float>(g * sigmoid(g) * u);
    }
  }

  // Integers live in the backend's scratch, which hands out f32 of the same size.
  int32_t* integers(int64_t n) { return reinterpret_cast<int32_t*>(ops_.scratch(1, std::max<int64_t>(1, n)).data); }
  Selection new_selection(int64_t n, int64_t k) { return {integers(n * k), integers(n), n, k}; }
  Routing new_routing(int64_t n, int64_t k) { return {integers(n * k), ops_.scratch(n, k).data, n, k}; }

  Ops& ops_;
};

}  // namespace

std::unique_ptr<LatentOps> make_reference_latent_ops(Ops& ops) {
  return std::make_unique<ReferenceLatentOps>(ops);
}

}  // namespace ds4
