// The latent kernels, written once over sixteen lanes; included after kernels_impl.h, on the same names.

namespace ds4::cpu {
namespace {

// Scores of N rows against one vector of heads, `stride` apart in `out`.
template <int N>
inline void latent_scores(const float* qt, int64_t heads16, int64_t dim, const float* const* rows, float* out,
                          int64_t stride) {
  Vf acc[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) acc[i] = zero();
  for (int64_t d = 0; d < dim; ++d) {
    const Vf q = load(qt + d * heads16);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) acc[i] = fma(q, set1(rows[i][d]), acc[i]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) store(out + i * stride, acc[i]);
}

constexpr int kLatentRows = kMaxTokens < 8 ? kMaxTokens : 8;

void latent_attend(const float* qt, int64_t heads16, int64_t dim, const float* const* rows, int64_t n, float* max_,
                   float* sum, float* acc, float* work) {
  for (int64_t h = 0; h < heads16; h += 16) {
    int64_t i = 0;
    for (; i + kLatentRows <= n; i += kLatentRows)
      latent_scores<kLatentRows>(qt + h, heads16, dim, rows + i, work + i * heads16 + h, heads16);
    for (; i < n; ++i) latent_scores<1>(qt + h, heads16, dim, rows + i, work + i * heads16 + h, heads16);
    const Vf before = load(max_ + h);
    Vf now = before;
    for (i = 0; i < n; ++i) now = max(now, load(work + i * heads16 + h));
    const Vf shrink = exp(sub(before, now));
    store(max_ + h, now);
    Vf total = mul(load(sum + h), shrink);
    for (i = 0; i < n; ++i) {
      const Vf p = exp(sub(load(work + i * heads16 + h), now));
      store(work + i * heads16 + h, p);
      total = add(total, p);
    }
    store(sum + h, total);
    for (int64_t d = 0; d < dim; ++d) {
      Vf a = mul(load(acc + d * heads16 + h), shrink);
      for (i = 0; i < n; ++i) a = fma(load(work + i * heads16 + h), set1(rows[i][d]), a);
      store(acc + d * heads16 + h, a);
    }
  }
}

void latent_index_scores(const float* qt, int64_t heads16, int64_t dim, const float* weight, const float* const* rows,
                         int64_t n, float* out) {
  float scores[16 * kLatentRows] = {};
  for (int64_t i = 0; i < n;) {
    const bool many = i + kLatentRows <= n;
    const int count = many ? kLatentRows : 1;
    Vf sums[kLatentRows];
    for (int r = 0; r < count; ++r) sums[r] = zero();
    for (int64_t h = 0; h < heads16; h += 16) {
      if (many)
        latent_scores<kLatentRows>(qt + h, heads16, dim, rows + i, scores, 16);
      else
        latent_scores<1>(qt + h, heads16, dim, rows + i, scores, 16);
      for (int r = 0; r < count; ++r) sums[r] = fma(load(weight + h), max(load(scores + 16 * r), zero()), sums[r]);
    }
    for (int r = 0; r < count; ++r) out[i + r] = hsum(sums[r]);
    i += count;
  }
}

void latent_pool(const float* const* keys, const float* const* gates, int64_t n, int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; d += 16) {
    Vf top = load(gates[0] + d);
    for (int64_t i = 1; i < n; ++i) top = max(top, load(gates[i] + d));
    Vf total = zero(), sum = zero();
    for (int64_t i = 0; i < n; ++i) {
      const Vf e = exp(sub(load(gates[i] + d), top));
      total = add(total, e);
      sum = fma(e, load(keys[i] + d), sum);
    }
    store(out + d, div(sum, total));
  }
}

void latent_combine(const float* w, const float* x, int64_t n, int64_t width, float* y) {
  int64_t d = 0;
  for (; d + 16 <= width; d += 16) {
    Vf sum = mul(load(x + d), set1(w[0]));
    for (int64_t j = 1; j < n; ++j) sum = fma(load(x + j * width + d), set1(w[j]), sum);
    store(y + d, sum);
  }
  for (; d < width; ++d) {
    float sum = x[d] * w[0];
    for (int64_t j = 1; j < n; ++j) sum = __builtin_fmaf(x[j * width + d], w[j], sum);
    y[d] = sum;
  }
}

void latent_mix(const float* post, const float* m, const float* out, int64_t n, int64_t width, float* x) {
  for (int64_t d = 0; d < width; d += 16) {
    float tail[17 * 16];
    const bool whole = d + 16 <= width;
    float* at = x + d;
    const float* from = out + d;
    int64_t stride = width;
    if (!whole) {  // the last columns go through a padded copy
      for (int64_t i = 0; i < width - d; ++i) {
        for (int64_t j = 0; j < n; ++j) tail[j * 16 + i] = x[j * width + d + i];
        tail[n * 16 + i] = out[d + i];
      }
      at = tail;
      from = tail + n * 16;
      stride = 16;
    }
    Vf old[16];
    for (int64_t j = 0; j < n; ++j) old[j] = load(at + j * stride);
    const Vf o = load(from);
    for (int64_t k = 0; k < n; ++k) {
      Vf sum = mul(o, set1(post[k]));
      for (int64_t j = 0; j < n; ++j) sum = fma(old[j], set1(m[j * n + k]), sum);
      store(at + k * stride, sum);
    }
    if (!whole)
      for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < width - d; ++i) x[j * width + d + i] = tail[j * 16 + i];
  }
}

float latent_squares(const float* x, int64_t n) {
  Vf sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) {
      const Vf v = load(x + i + 16 * j);
      sum[j] = fma(v, v, sum[j]);
    }
  float total = hsum(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  for (; i < n; ++i) total += x[i] * x[i];
  return total;
}

constexpr LatentKernels make_latent_table() {
  LatentKernels k{};
  k.attend = latent_attend;
  k.index_scores = latent_index_scores;
  k.pool = latent_pool;
  k.combine = latent_combine;
  k.mix = latent_mix;
  k.squares = latent_squares;
  return k;
}

}  // namespace
}  // namespace ds4::cpu
