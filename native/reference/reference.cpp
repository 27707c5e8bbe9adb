#include "reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/dense_state.h"
#include "reference/dense_weight.h"
#include "reference/draw_row.h"
#include "reference/latent.h"

namespace ds4 {
namespace {

using reference::dense;
using reference::DenseWeight;
using reference::dot;
using reference::require;
using reference::row_of;

DenseState& dense(const RowRef& row) {
  auto* d = dynamic_cast<DenseState*>(row.state);
  if (!d) throw Invalid("a state of another backend");
  return *d;
}

void normalize(const float* x, int64_t n, const Norm& norm, float* y) {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + static_cast<double>(norm.eps));
  const float* gain = dense(*norm.gain).row(0);
  for (int64_t i = 0; i < n; ++i)
    y[i] = static_cast<float>(static_cast<double>(x[i]) * scale * static_cast<double>(gain[i]));
}

class ReferenceOps final : public Ops {
 public:
  std::string name() const override { return "reference"; }

  std::unique_ptr<Weight> load(std::span<const MatrixView> parts, WeightUse use) override {
    require(!parts.empty(), "load of no parts");
    for (const MatrixView& part : parts)
      require(part.data && part.rows > 0 && part.cols == parts.front().cols && part.cols > 0, "parts do not stack");
    require(use != WeightUse::SwiGLU || (parts.size() == 2 && parts[0].rows == parts[1].rows),
            "SwiGLU takes a gate and an up matrix of one shape");
    return std::make_unique<DenseWeight>(parts);
  }

  Tensor scratch(int64_t n, int64_t dim) override {
    require(n >= 0 && dim > 0, "scratch of an impossible shape");
    scratch_.emplace_back(static_cast<size_t>(n * dim), std::numeric_limits<float>::quiet_NaN());
    return {scratch_.back().data(), n, dim};
  }
  void reset_scratch() override { scratch_.clear(); }
  size_t scratch_bytes() const override {
    size_t n = 0;
    for (const auto& s : scratch_) n += s.size() * sizeof(float);
    return n;
  }

  std::unique_ptr<State> new_state(std::span<const StateSpec> specs, int64_t capacity) override {
    return std::make_unique<DenseState>(specs, capacity);
  }

  void to_host(const Tensor& from, float* out) override {
    for (int64_t t = 0; t < from.n; ++t) std::copy_n(row_of(from, t), from.dim, out + t * from.dim);
  }
  void to_device(const float* from, const Tensor& to) override {
    for (int64_t t = 0; t < to.n; ++t) std::copy_n(from + t * to.dim, to.dim, row_of(to, t));
  }

  void embed(const Weight& table, std::span<const int32_t> ids, Tensor out) override {
    require(static_cast<int64_t>(ids.size()) == out.n && table.cols() == out.dim, "embed shapes");
    for (int64_t t = 0; t < out.n; ++t) {
      const int32_t id = ids[static_cast<size_t>(t)];
      require(id >= 0 && id < table.rows(), "token id outside the embedding table");
      std::copy_n(dense(table).row(id), out.dim, row_of(out, t));
    }
  }

  void rms_norm(Tensor x, Norm norm, Tensor y) override {
    require(x.n == y.n && x.dim == y.dim && norm.gain && norm.gain->cols() == x.dim, "rms_norm shapes");
    for (int64_t t = 0; t < x.n; ++t) normalize(row_of(x, t), x.dim, norm, row_of(y, t));
  }

  void linear(const Weight& w, Tensor x, const Norm* norm, const Weight* bias, Tensor y) override {
    require(x.n == y.n && x.dim == w.cols() && y.dim == w.rows(), "linear shapes");
    require(!bias || bias->cols() == w.rows(), "linear bias shape");
    for (int64_t t = 0; t < x.n; ++t) {
      const float* in = input(x, t, norm);
      for (int64_t r = 0; r < w.rows(); ++r) {
        double sum = dot(dense(w).row(r), in, x.dim);
        if (bias) sum += static_cast<double>(dense(*bias).row(0)[r]);
        row_of(y, t)[r] = static_cast<float>(sum);
      }
    }
  }

  void linear_add(const Weight& w, Tensor x, Tensor y) override {
    require(x.n == y.n && x.dim == w.cols() && y.dim == w.rows(), "linear_add shapes");
    for (int64_t t = 0; t < x.n; ++t)
      for (int64_t r = 0; r < w.rows(); ++r) {
        float& out = row_of(y, t)[r];
        out = static_cast<float>(static_cast<double>(out) + dot(dense(w).row(r), row_of(x, t), x.dim));
      }
  }

  void linear_swiglu(const Weight& w, Tensor x, const Norm* norm, Tensor y) override {
    require(x.n == y.n && x.dim == w.cols() && 2 * y.dim == w.rows(), "linear_swiglu shapes");
    for (int64_t t = 0; t < x.n; ++t) {
      const float* in = input(x, t, norm);
      for (int64_t r = 0; r < y.dim; ++r) {
        const double g = dot(dense(w).row(r), in, x.dim), u = dot(dense(w).row(y.dim + r), in, x.dim);
        row_of(y, t)[r] = static_cast<float>(g / (1.0 + std::exp(-g)) * u);
      }
    }
  }

  void rope_table(std::span<const RowRef> rows, std::span<const double> freq, Tensor out) override {
    const auto pairs = static_cast<int64_t>(freq.size());
    require(static_cast<int64_t>(rows.size()) == out.n && out.dim == 2 * pairs, "rope_table shapes");
    for (int64_t t = 0; t < out.n; ++t)
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(rows[static_cast<size_t>(t)].position) * freq[static_cast<size_t>(i)];
        row_of(out, t)[i] = static_cast<float>(std::cos(angle));
        row_of(out, t)[pairs + i] = static_cast<float>(std::sin(angle));
      }
  }

  void rope_store(Tensor qkv, Tensor table, RopeKind kind, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads,
                  int64_t kv_heads, int64_t head_dim) override {
    const int64_t pairs = table.dim / 2;
    require(static_cast<int64_t>(rows.size()) == qkv.n && table.n == qkv.n && 2 * pairs <= head_dim &&
                qkv.dim == (q_heads + 2 * kv_heads) * head_dim,
            "rope_store shapes");
    for (int64_t t = 0; t < qkv.n; ++t) {
      float* q = row_of(qkv, t);
      const float *cosine = row_of(table, t), *sine = cosine + pairs;
      for (int64_t h = 0; h < q_heads + kv_heads; ++h)
        for (int64_t i = 0; i < pairs; ++i) {
          float* head = q + h * head_dim;
          float& a = head[kind == RopeKind::Interleaved ? 2 * i : i];
          float& b = head[kind == RopeKind::Interleaved ? 2 * i + 1 : i + pairs];
          const double x = a, y = b, c = cosine[i], s = sine[i];
          a = static_cast<float>(x * c - y * s);
          b = static_cast<float>(x * s + y * c);
        }
      const auto width = static_cast<size_t>(kv_heads * head_dim);
      const float *k = q + q_heads * head_dim, *v = k + width;
      const RowRef& row = rows[static_cast<size_t>(t)];
      dense(row).write_row(kv.k, row.position, {k, width});
      dense(row).write_row(kv.v, row.position, {v, width});
    }
  }

  void attention(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads,
                 int64_t head_dim, float scale, Tensor out) override {
    require(static_cast<int64_t>(rows.size()) == q.n && out.n == q.n && q.dim == q_heads * head_dim &&
                out.dim == q.dim && q_heads % kv_heads == 0,
            "attention shapes");
    const auto width = static_cast<size_t>(kv_heads * head_dim);
    std::vector<float> keys, values;
    std::vector<double> weight, sum(static_cast<size_t>(head_dim));
    for (int64_t t = 0; t < q.n; ++t) {
      const RowRef& row = rows[static_cast<size_t>(t)];
      const int64_t visible = static_cast<int64_t>(row.position) + 1;
      keys.resize(static_cast<size_t>(visible) * width);
      values.resize(keys.size());
      weight.resize(static_cast<size_t>(visible));
      for (int64_t p = 0; p < visible; ++p) {
        dense(row).read_row(kv.k, p, std::span(keys).subspan(static_cast<size_t>(p) * width, width));
        dense(row).read_row(kv.v, p, std::span(values).subspan(static_cast<size_t>(p) * width, width));
      }
      for (int64_t h = 0; h < q_heads; ++h) {
        const int64_t column = h * kv_heads / q_heads * head_dim;
        double largest = -std::numeric_limits<double>::infinity(), total = 0;
        for (int64_t p = 0; p < visible; ++p) {
          const float* key = keys.data() + static_cast<size_t>(p) * width + column;
          weight[static_cast<size_t>(p)] = dot(row_of(q, t) + h * head_dim, key, head_dim) * static_cast<double>(scale);
          largest = std::max(largest, weight[static_cast<size_t>(p)]);
        }
        std::fill(sum.begin(), sum.end(), 0.0);
        for (int64_t p = 0; p < visible; ++p) {
          const double e = std::exp(weight[static_cast<size_t>(p)] - largest);
          const float* value = values.data() + static_cast<size_t>(p) * width + column;
          total += e;
          for (int64_t i = 0; i < head_dim; ++i) sum[static_cast<size_t>(i)] += e * static_cast<double>(value[i]);
        }
        for (int64_t i = 0; i < head_dim; ++i)
          row_of(out, t)[h * head_dim + i] = static_cast<float>(sum[static_cast<size_t>(i)] / total);
      }
    }
  }

  void gather(Tensor x, std::span<const int32_t> index, Tensor out) override {
    require(static_cast<int64_t>(index.size()) == out.n && x.dim == out.dim, "gather shapes");
    for (int64_t i = 0; i < out.n; ++i) {
      const int32_t t = index[static_cast<size_t>(i)];
      require(t >= 0 && t < x.n, "gather index outside the rows");
      std::copy_n(row_of(x, t), x.dim, row_of(out, i));
    }
  }

  bool can_draw() const override { return true; }
  void draw(Tensor logits, std::span<const RowDraw> draws, std::span<int32_t> tokens) override {
    require(draws.size() == tokens.size(), "draw shapes");
    for (size_t i = 0; i < draws.size(); ++i) {
      const auto& [row, plan] = draws[i];
      require(row >= 0 && row < logits.n && plan.settings.vocab <= logits.dim, "draw of a row that is not there");
      tokens[i] = draw_row(plan, {row_of(logits, row), static_cast<size_t>(logits.dim)});
    }
  }

  LatentOps* latent() override { return latent_.get(); }

 private:
  // Row t of x, normalised when asked; valid until the next call.
  const float* input(const Tensor& x, int64_t t, const Norm* norm) {
    if (!norm) return row_of(x, t);
    require(norm->gain && norm->gain->cols() == x.dim, "norm shape");
    normalized_.resize(static_cast<size_t>(x.dim));
    normalize(row_of(x, t), x.dim, *norm, normalized_.data());
    return normalized_.data();
  }

  std::unique_ptr<LatentOps> latent_ = make_reference_latent_ops(*this);
  std::vector<std::vector<float>> scratch_;
  std::vector<float> normalized_;
};

}  // namespace

std::unique_ptr<Ops> make_reference_ops() {
  return std::make_unique<ReferenceOps>();
}

}  // namespace ds4
