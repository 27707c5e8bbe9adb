#include "session/sampler.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

namespace ds4 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
using drawing::kBlock;
using drawing::kMinExponent, drawing::kWeightless;
constexpr double kWeightMagic = 1.5 * 262144.0;  // 1.5 * 2^(52 - 34): adding it rounds to a multiple of 2^-34

// SplitMix64's output function (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

uint64_t key_of(uint64_t seed) {
  return mix(seed + kGamma);
}

double uniform(uint64_t key, uint64_t index) {
  return static_cast<double>(mix(key + (index + 1) * kGamma) >> 11) * 0x1.0p-53;
}

// Vectors in the extension that GCC and Clang share: the compiler maps them to what the target has.
template <int N>
struct VectorOf;
#define DS4_VECTOR_OF(N)                                          \
  template <>                                                     \
  struct VectorOf<N> {                                            \
    using F32 = float __attribute__((vector_size(4 * (N))));      \
    using I32 = int32_t __attribute__((vector_size(4 * (N))));    \
    using HalfF32 = float __attribute__((vector_size(2 * (N))));  \
    using HalfF64 = double __attribute__((vector_size(4 * (N)))); \
  };
DS4_VECTOR_OF(4)
DS4_VECTOR_OF(8)
DS4_VECTOR_OF(16)
#undef DS4_VECTOR_OF

// The passes over a row of logits with N of them at a time.
template <int N>
struct Lanes {
  using F32 = typename VectorOf<N>::F32;
  using I32 = typename VectorOf<N>::I32;
  using HalfF32 = typename VectorOf<N>::HalfF32;
  using HalfF64 = typename VectorOf<N>::HalfF64;

  // n <= N floats, filled up with -inf.
  [[gnu::always_inline]] static void load(const float* v, int64_t n, F32& x) {
    if (n >= N) {
      std::memcpy(&x, v, sizeof x);
    } else {
      float padded[N];
      for (int64_t j = 0; j < N; ++j) padded[j] = j < n ? v[j] : -kInf;
      std::memcpy(&x, padded, sizeof x);
    }
  }

  // exp((logit - best) * scale) as multiples of 2^-34, 0 for NaN and -inf. The exponential of x in [-60, 0] is 2^n
  // times the Taylor polynomial of e^r, |r| <= ln(2) / 2: right to about 2e-7 of the result.
  [[gnu::always_inline]] static void weights(const F32& logits, float best, float scale, HalfF64& low, HalfF64& high) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    F32 x = (logits - best) * scale;
    x = x > kMinExponent ? x : F32{} + kMinExponent;
    const F32 shifted = x * 1.44269504f + kRound;
    const F32 n = shifted - kRound;
    const I32 exponent = (I32)shifted - std::bit_cast<int32_t>(kRound);
    const F32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first one short
    F32 p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    p *= (F32)((exponent + 127) << 23);
    HalfF32 half[2];
    std::memcpy(half, &p, sizeof p);
    low = (__builtin_convertvector(half[0], HalfF64) + kWeightMagic) - kWeightMagic;
    high = (__builtin_convertvector(half[1], HalfF64) + kWeightMagic) - kWeightMagic;
  }

  // Maximum of each block, NaN ignored, -inf for none.
  [[gnu::always_inline]] static void block_max(const float* v, int64_t n, float* out) {
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t end = std::min(first + kBlock, n);
      F32 best = F32{} - kInf, x;
      for (int64_t i = first; i < end; i += N) {
        load(v + i, end - i, x);
        best = x > best ? x : best;
      }
      float top = best[0];
      for (int64_t j = 1; j < N; ++j) top = best[j] > top ? best[j] : top;
      *out++ = top;
    }
  }

  // Sum of the weights; blocks whose maximum weighs nothing are skipped.
  [[gnu::always_inline]] static double sum(const float* v, int64_t n, const float* block_max, float best, float scale) {
    HalfF64 low_sum = {}, high_sum = {}, low, high;
    F32 x;
    for (int64_t first = 0; first < n; first += kBlock, ++block_max) {
      if (!((*block_max - best) * scale > kWeightless)) continue;
      const int64_t end = std::min(first + kBlock, n);
      for (int64_t i = first; i < end; i += N) {
        load(v + i, end - i, x);
        weights(x, best, scale, low, high);
        low_sum += low;
        high_sum += high;
      }
    }
    low_sum += high_sum;
    double total = 0;
    for (int64_t j = 0; j < N / 2; ++j) total += low_sum[j];
    return total;
  }
};

double weight_of(float logit, float best, float scale) {
  using L = Lanes<4>;
  L::HalfF64 low, high;
  L::weights(L::F32{} + logit, best, scale, low, high);
  return low[0];
}

// The passes over the whole vocabulary, compiled for wider vectors where the CPU has them. Element-wise IEEE
// operations and exact sums: every variant gives the same bits.
struct Passes {
  void (*block_max)(const float* v, int64_t n, float* out);
  double (*sum)(const float* v, int64_t n, const float* block_max, float best, float scale);
};

#define DS4_SAMPLER_PASSES(NAME, LANES, TARGET)                                                          \
  TARGET void block_max_##NAME(const float* v, int64_t n, float* out) {                                  \
    Lanes<LANES>::block_max(v, n, out);                                                                  \
  }                                                                                                      \
  TARGET double sum_##NAME(const float* v, int64_t n, const float* block_max, float best, float scale) { \
    return Lanes<LANES>::sum(v, n, block_max, best, scale);                                              \
  }

DS4_SAMPLER_PASSES(plain, 4, )
#if defined(__x86_64__)
DS4_SAMPLER_PASSES(avx2, 8, [[gnu::target("avx2")]])
DS4_SAMPLER_PASSES(avx512, 16, [[gnu::target("avx512f")]])
#endif
#undef DS4_SAMPLER_PASSES

Passes choose_passes() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {block_max_avx2, sum_avx512};
  if (__builtin_cpu_supports("avx2")) return {block_max_avx2, sum_avx2};
#endif
  return {block_max_plain, sum_plain};
}
const Passes passes = choose_passes();

void require(bool ok, const char* name, double value, const char* allowed) {
  if (!ok) throw Invalid(std::string(name) + " is " + std::to_string(value) + ", allowed: " + allowed);
}

}  // namespace

std::vector<std::pair<std::string, double>> sampler_sums(std::span<const float> logits, float temperature) {
  const int64_t n = static_cast<int64_t>(logits.size());
  std::vector<float> maxima(static_cast<size_t>((n + kBlock - 1) / kBlock));
  std::vector<std::pair<std::string, double>> sums;
  const auto add = [&](const char* name, const Passes& p) {
    p.block_max(logits.data(), n, maxima.data());
    const float best = maxima.empty() ? 0.0f : *std::max_element(maxima.begin(), maxima.end());
    sums.emplace_back(name, p.sum(logits.data(), n, maxima.data(), best, 1.0f / temperature));
  };
  add("plain", {block_max_plain, sum_plain});
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) add("avx2", {block_max_avx2, sum_avx2});
  if (__builtin_cpu_supports("avx512f")) add("avx512", {block_max_avx512, sum_avx512});
#endif
  return sums;
}

double sampler_uniform(uint64_t seed, uint64_t index) {
  return uniform(key_of(seed), index);
}

Sampler::Sampler(SamplerParams params, int64_t vocab) : params_(std::move(params)), vocab_(vocab) {
  const SamplerParams& p = params_;
  require(vocab >= 1 && vocab <= kMaxVocab, "vocabulary size", static_cast<double>(vocab), "1 to 524288");
  require(std::isfinite(p.temperature), "temperature", p.temperature, "finite");
  require(p.top_k >= 0, "top_k", static_cast<double>(p.top_k), ">= 0");
  require(p.top_p >= 0 && p.top_p <= 1, "top_p", p.top_p, "0 to 1");
  require(p.min_p >= 0 && p.min_p <= 1, "min_p", p.min_p, "0 to 1");
  require(std::isfinite(p.presence_penalty), "presence_penalty", p.presence_penalty, "finite");
  require(std::isfinite(p.frequency_penalty), "frequency_penalty", p.frequency_penalty, "finite");
  require(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0, "repetition_penalty", p.repetition_penalty,
          "finite and > 0");
  require(p.logprobs.value_or(0) >= 0, "logprobs", static_cast<double>(p.logprobs.value_or(0)), ">= 0");
  for (const auto& [id, bias] : p.logit_bias) {
    check_ids({&id, 1}, "logit_bias");
    require(!std::isnan(bias), "logit_bias", bias, "a number");
  }
  std::vector<int32_t> biased;
  for (const auto& [id, bias] : p.logit_bias) biased.push_back(id);
  std::sort(biased.begin(), biased.end());
  biased_twice_ = std::adjacent_find(biased.begin(), biased.end()) != biased.end();
  // A temperature so small that 1 / T overflows would turn 0 / T into NaN; 1e30 separates any two distinct logits.
  if (p.temperature > 0) inverse_temperature_ = static_cast<float>(std::min(1.0 / p.temperature, 1e30));
  log_min_p_ = p.min_p > 0 ? static_cast<float>(std::log(p.min_p)) : -kInf;
  key_ = key_of(p.seed);
}

void Sampler::check_ids(std::span<const int32_t> ids, const char* what) const {
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab_)
      throw Invalid(std::string(what) + ": token id " + std::to_string(id) + " is not below the vocabulary size " +
                    std::to_string(vocab_));
}

void Sampler::forbid(std::span<const int32_t> ids) {
  check_ids(ids, "forbidden ids");
  forbidden_.assign(ids.begin(), ids.end());
}

void Sampler::set_mask(std::optional<std::span<const uint32_t>> words) {
  masked_ = words.has_value();
  if (masked_) mask_.assign(words->begin(), words->end());
}

void Sampler::observe(std::span<const int32_t> ids, bool prompt) {
  check_ids(ids, "observed ids");
  if (!tracks_tokens() || (prompt && params_.repetition_penalty == 1)) return;
  for (const int32_t id : ids) count(id, !prompt);
}

void Sampler::count(int32_t id, bool output) {
  if (seen_index_.empty()) seen_index_.assign(static_cast<size_t>(vocab_), -1);
  int32_t& slot = seen_index_[static_cast<size_t>(id)];
  if (slot < 0) {
    slot = static_cast<int32_t>(seen_.size());
    seen_.push_back({id, 0});
  }
  if (output) ++seen_[static_cast<size_t>(slot)].output_count;
}

const float* Sampler::adjusted(const float* logits) {
  if (params_.logit_bias.empty() && seen_.empty() && forbidden_.empty() && !masked_) return logits;
  scratch_.assign(logits, logits + vocab_);
  float* v = scratch_.data();
  for (const auto& [id, bias] : params_.logit_bias) v[id] += bias;
  const float repetition = static_cast<float>(params_.repetition_penalty);
  for (const Seen& s : seen_) {
    float x = v[s.id];
    x = x > 0 ? x / repetition : x * repetition;
    if (s.output_count > 0)
      x -= static_cast<float>(params_.frequency_penalty * s.output_count + params_.presence_penalty);
    v[s.id] = x;
  }
  for (const int32_t id : forbidden_) v[id] = -kInf;
  if (masked_) {
    const int64_t words = static_cast<int64_t>(mask_.size());
    for (int64_t w = 0; w * 32 < vocab_; ++w) {
      const uint32_t bits = w < words ? mask_[static_cast<size_t>(w)] : 0;
      if (bits == ~uint32_t{0}) continue;
      const int64_t end = std::min<int64_t>(vocab_ - w * 32, 32);
      for (int64_t j = 0; j < end; ++j)
        if (!(bits >> j & 1)) v[w * 32 + j] = -kInf;
    }
  }
  return v;
}

int32_t Sampler::sample(std::span<const float> logits, SampleLogprobs* logprobs) {
  if (static_cast<int64_t>(logits.size()) != vocab_)
    throw Invalid("sampler got " + std::to_string(logits.size()) + " logits, its vocabulary has " +
                  std::to_string(vocab_));
  const float* v = adjusted(logits.data());
  block_max_.resize(static_cast<size_t>((vocab_ + kBlock - 1) / kBlock));
  passes.block_max(v, vocab_, block_max_.data());
  const float best = *std::max_element(block_max_.begin(), block_max_.end());
  if (best == -kInf) return -1;
  const bool greedy = force_greedy_ || params_.temperature <= 0 || best == kInf;
  const int32_t id = greedy ? argmax(v, best) : draw(v, best);
  assert(id >= 0 && id < vocab_);
  if (logprobs && params_.logprobs) fill_logprobs(v, best, id, *logprobs);
  ++index_;
  if (tracks_tokens()) count(id, true);
  return id;
}

std::optional<DrawPlan> Sampler::plan() const {
  if (tracks_tokens() || wants_logprobs() || biased_twice_) return std::nullopt;
  DrawPlan p;
  p.settings = {.greedy = force_greedy_ || params_.temperature <= 0,
                .scale = inverse_temperature_,
                .log_min_p = log_min_p_,
                .top_k = params_.top_k,
                .top_p = params_.top_p,
                .uniform = uniform(key_, index_),
                .vocab = vocab_};
  p.bias = params_.logit_bias;
  p.forbidden = forbidden_;
  if (masked_) p.mask = mask_;
  return p;
}

void Sampler::drawn(int32_t id) {
  if (id < 0) return;
  assert(id < vocab_ && !tracks_tokens());
  ++index_;
}

int32_t Sampler::argmax(const float* logits, float best) const {
  const auto block = std::find(block_max_.begin(), block_max_.end(), best) - block_max_.begin();
  const float* first = logits + block * kBlock;
  return static_cast<int32_t>(std::find(first, logits + vocab_, best) - logits);
}

double Sampler::sum_all(const float* logits, float best, float scale) const {
  return passes.sum(logits, vocab_, block_max_.data(), best, scale);
}

void Sampler::collect(const float* logits, float best, float scale, float threshold) {
  candidates_.clear();
  for (int64_t b = 0; b < static_cast<int64_t>(block_max_.size()); ++b) {
    const float top = block_max_[static_cast<size_t>(b)];
    if (top == -kInf || !((top - best) * scale >= threshold)) continue;
    const int64_t end = std::min((b + 1) * kBlock, vocab_);
    for (int64_t i = b * kBlock; i < end; ++i)
      if (logits[i] > -kInf && (logits[i] - best) * scale >= threshold)
        candidates_.push_back({logits[i], static_cast<int32_t>(i), 0.0});
  }
}

namespace {
const auto before = [](const auto& a, const auto& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; };
}  // namespace

void Sampler::keep_up_to(const Candidate& last) {
  const Candidate border = last;
  std::erase_if(candidates_, [&](const Candidate& c) { return before(border, c); });
}

// The k-th largest block maximum has at least k logits at or above it, so it bounds the k-th largest logit.
void Sampler::collect_top(const float* logits, int64_t k) {
  float bound = -kInf;
  if (k <= static_cast<int64_t>(block_max_.size())) {
    selection_ = block_max_;
    std::nth_element(selection_.begin(), selection_.begin() + (k - 1), selection_.end(), std::greater<float>());
    bound = selection_[static_cast<size_t>(k - 1)];
  }
  collect(logits, 0.0f, 1.0f, bound);
  if (static_cast<int64_t>(candidates_.size()) <= k) return;
  order_ = candidates_;
  std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), before);
  keep_up_to(order_[static_cast<size_t>(k - 1)]);
}

double Sampler::weigh(float best, float scale) {
  double sum = 0;
  for (Candidate& c : candidates_) sum += c.weight = weight_of(c.logit, best, scale);
  return sum;
}

void Sampler::cut_to_mass(double mass) {
  order_ = candidates_;
  auto lo = order_.begin(), hi = order_.end();
  double before_lo = 0;
  while (hi - lo > 64) {
    const auto mid = lo + (hi - lo) / 2;
    std::nth_element(lo, mid, hi, before);
    double half = 0;
    for (auto it = lo; it != mid; ++it) half += it->weight;
    if (before_lo + half >= mass) {
      hi = mid;
    } else {
      before_lo += half;
      lo = mid;
    }
  }
  std::sort(lo, hi, before);
  while (lo + 1 < hi && (before_lo += lo->weight) < mass) ++lo;
  if (lo != order_.end()) keep_up_to(*lo);
}

int32_t Sampler::draw(const float* logits, float best) {
  const float scale = inverse_temperature_;
  const bool top_k = params_.top_k > 0 && params_.top_k < vocab_;
  const bool top_p = params_.top_p < 1;
  if (top_k) {
    collect_top(logits, params_.top_k);
    const double total = weigh(best, scale);
    if (top_p) cut_to_mass(params_.top_p * total);
  } else if (top_p) {
    const double mass = params_.top_p * sum_all(logits, best, scale);
    if (params_.min_p > 0) {
      collect(logits, best, scale, log_min_p_);
      if (weigh(best, scale) >= mass) cut_to_mass(mass);
    } else {
      for (const float threshold : {-8.0f, -16.0f, -kInf}) {
        collect(logits, best, scale, threshold);
        if (weigh(best, scale) >= mass || threshold == -kInf) break;
      }
      cut_to_mass(mass);
    }
  } else if (params_.min_p > 0) {
    collect(logits, best, scale, log_min_p_);
    weigh(best, scale);
  } else {
    return draw_from_all(logits, best, scale, sum_all(logits, best, scale));
  }
  double total = 0;
  if (params_.min_p > 0)
    std::erase_if(candidates_, [&](const Candidate& c) { return !((c.logit - best) * scale >= log_min_p_); });
  for (const Candidate& c : candidates_) total += c.weight;
  const double target = uniform(key_, index_) * total;
  double cumulative = 0;
  int32_t chosen = -1;
  for (const Candidate& c : candidates_) {
    if (c.weight <= 0) continue;
    chosen = c.id;
    if ((cumulative += c.weight) > target) break;
  }
  return chosen;
}

int32_t Sampler::draw_from_all(const float* logits, float best, float scale, double total) const {
  const double target = uniform(key_, index_) * total;
  double cumulative = 0;
  int32_t chosen = -1;
  for (int64_t i = 0; i < vocab_; i += kBlock) {
    const int64_t n = std::min(kBlock, vocab_ - i);
    const double block = passes.sum(logits + i, n, &block_max_[static_cast<size_t>(i / kBlock)], best, scale);
    if (cumulative + block <= target) {
      cumulative += block;
      continue;
    }
    for (int64_t j = i; j < i + n; ++j) {
      const double weight = weight_of(logits[j], best, scale);
      if (weight <= 0) continue;
      chosen = static_cast<int32_t>(j);
      if ((cumulative += weight) > target) return chosen;
    }
  }
  return chosen;
}

void Sampler::fill_logprobs(const float* logits, float best, int32_t chosen, SampleLogprobs& out) {
  out.top.clear();
  const int64_t n = std::min(*params_.logprobs, vocab_);
  if (n > 0) {
    collect_top(logits, n);
    std::sort(candidates_.begin(), candidates_.end(), before);
  } else {
    candidates_.clear();
  }
  const bool infinite = best == kInf;
  const double log_total = infinite ? 0.0 : std::log(sum_all(logits, best, 1.0f));
  const auto logprob = [&](float logit) {
    if (infinite) return logit == kInf ? 0.0 : -std::numeric_limits<double>::infinity();
    return static_cast<double>(logit) - static_cast<double>(best) - log_total;
  };
  out.chosen = logprob(logits[chosen]);
  for (const Candidate& c : candidates_)
    if (!infinite || c.logit == kInf) out.top.emplace_back(c.id, logprob(c.logit));
}

}  // namespace ds4
