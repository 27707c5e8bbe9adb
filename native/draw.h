// The draw of a token where the logits are: what the sampler (session/sampler.h) would choose, as a function that one
// thread or a block of GPU threads evaluates with the same result, bit for bit.
//
//   row of logits ── edits: bias, forbidden ids, mask ──▶ maxima of blocks of 64 ──▶ best
//     greedy:       the lowest id that equals it
//     top-k, top-p: a border in the order (logit descending, id ascending), found by bisection of that order as a
//                   number of 52 bits: the last border behind which enough tokens, or enough weight, lie
//     draw:         the first id at which the weight up to it exceeds random number * weight of all that are left
//
// Weights are whole multiples of 2^-34, at most one: sums are integers below 2^53, the same in any order and exact as
// doubles. Ties of logits are broken by the lower id everywhere, and the order has no equal members. So neither the
// number of threads nor their timing shows. Everything else is a single IEEE operation on one element; compilers must
// not contract a * b + c.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#define DS4_EITHER __host__ __device__ inline
#else
#define DS4_EITHER inline
#endif

namespace ds4 {

// The part of a draw that is the same for every backend.
struct DrawSettings {
  bool greedy = false;
  float scale = 1.0f;                                         // 1 / temperature
  float log_min_p = -std::numeric_limits<float>::infinity();  // log of min-p; -inf: off
  int64_t top_k = 0;                                          // 0: off
  double top_p = 1.0;                                         // 1: off
  double uniform = 0.0;                                       // the random number, in [0, 1)
  int64_t vocab = 0;                                          // logits of the row that count
};

// One row's draw. What the spans show outlives the step.
struct DrawPlan {
  DrawSettings settings;
  std::span<const std::pair<int32_t, float>> bias;  // different ids
  std::span<const int32_t> forbidden;
  std::optional<std::span<const uint32_t>> mask;  // as Sampler::set_mask
};

// The best of a row of logits and its lead over the second; NaN is never the best. Id 0 and no lead where there is
// none.
struct Best {
  int32_t id = 0;
  float lead = 0;
};

namespace drawing {

constexpr int64_t kBlock = 64;
constexpr float kWeightless = -24.5f;   // exp of it is below half of the weight unit, 2^-35
constexpr float kMinExponent = -60.0f;  // exp of it is far below half of the weight unit
constexpr int kOrderBits = 52, kIdBits = 20;
constexpr double kUnit = 0x1p-34;

DS4_EITHER float minus_infinity() {
  return -std::numeric_limits<float>::infinity();
}

// exp((logit - best) * scale) in units of 2^-34, 0 for NaN and -inf: the sampler's polynomial, one element at a time.
DS4_EITHER uint64_t weight(float logit, float best, float scale) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23
  float x = (logit - best) * scale;
  x = x > kMinExponent ? x : kMinExponent;
  const float shifted = x * 1.44269504f + round;
  const float n = shifted - round;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  int32_t bits, rounding;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&rounding, &round, sizeof rounding);
  const int32_t power = (bits - rounding + 127) << 23;
  float two_to_n;
  std::memcpy(&two_to_n, &power, sizeof two_to_n);
  p *= two_to_n;
  constexpr double magic = 1.5 * 262144.0;  // adding it rounds to a multiple of 2^-34
  const double rounded = (static_cast<double>(p) + magic) - magic;
  return static_cast<uint64_t>(rounded * 0x1p34);
}

DS4_EITHER double mass_of(uint64_t units) {
  return static_cast<double>(units) * kUnit;
}

// Larger for what comes first: higher logits, among equal ones lower ids.
DS4_EITHER uint64_t order_of(float logit, int64_t id) {
  const float value = logit == 0.0f ? 0.0f : logit;  // both zeros are equal
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(key) << kIdBits | ((uint64_t{1} << kIdBits) - 1 - static_cast<uint64_t>(id));
}

// A token that may still be drawn.
struct Candidate {
  float logit;
  int32_t id;
  uint64_t weight;
};

// Threads that evaluate one row together. `sum`, `max`, `min` return the result to all of them.
struct OneThread {
  DS4_EITHER int64_t rank() const { return 0; }
  DS4_EITHER int64_t size() const { return 1; }
  DS4_EITHER void sync() const {}
  DS4_EITHER uint64_t sum(uint64_t v) const { return v; }
  DS4_EITHER float max(float v) const { return v; }
  DS4_EITHER int32_t min(int32_t v) const { return v; }
  DS4_EITHER int32_t next(int32_t* counter) const { return (*counter)++; }
  DS4_EITHER int64_t most() const { return INT64_MAX; }
  DS4_EITHER bool takes_part() const { return true; }
};

// What one row's draw reads and keeps. `maxima` and `sums` are of blocks of kBlock logits.
struct Row {
  const float* logits;
  const float* maxima;
  const uint64_t* sums;  // weights, where needs_sums
  Candidate* list;       // room for `capacity` candidates, near
  Candidate* overflow;   // room for the rest of the vocabulary, where truncates
  int32_t capacity;
  int32_t* count;

  DS4_EITHER Candidate& candidate(int64_t i) const { return i < capacity ? list[i] : overflow[i - capacity]; }
};

DS4_EITHER int64_t blocks_of(int64_t vocab) {
  return (vocab + kBlock - 1) / kBlock;
}

DS4_EITHER bool truncates_top_k(const DrawSettings& s) {
  return s.top_k > 0 && s.top_k < s.vocab;
}
// Whether fewer than all tokens may be drawn.
DS4_EITHER bool truncates(const DrawSettings& s) {
  return !s.greedy && (truncates_top_k(s) || s.top_p < 1 || s.log_min_p > minus_infinity());
}
// Whether the weight of the whole vocabulary counts.
DS4_EITHER bool needs_sums(const DrawSettings& s) {
  return !s.greedy && !truncates_top_k(s) && (s.top_p < 1 || s.log_min_p == minus_infinity());
}

template <class Group>
DS4_EITHER float best_of_maxima(const Group& g, const float* maxima, int64_t blocks) {
  float best = minus_infinity();
  for (int64_t b = g.rank(); b < blocks; b += g.size()) best = maxima[b] > best ? maxima[b] : best;
  return g.max(best);
}

// The lowest id whose logit is `best`.
template <class Group>
DS4_EITHER int32_t first_of(const Group& g, const float* logits, const float* maxima, int64_t vocab, float best) {
  constexpr int32_t none = INT32_MAX;
  int32_t block = none;
  for (int64_t b = g.rank(); b < blocks_of(vocab) && block == none; b += g.size())
    if (maxima[b] == best) block = static_cast<int32_t>(b);
  const int64_t first = g.min(block) * kBlock;
  int32_t id = none;
  for (int64_t j = g.rank(); j < kBlock && first + j < vocab && id == none; j += g.size())
    if (logits[first + j] == best) id = static_cast<int32_t>(first + j);
  return g.min(id);
}

// Lists the tokens of a row with (logit - origin) * scale >= threshold, in any order; returns how many there are.
template <class Group>
DS4_EITHER int64_t collect(const Group& g, const DrawSettings& s, const Row& row, float best, float origin, float scale,
                           float threshold) {
  g.sync();
  if (g.rank() == 0) *row.count = 0;
  g.sync();
  for (int64_t i = g.rank(); i < s.vocab; i += g.size()) {
    const float top = row.maxima[i / kBlock];
    if (top == minus_infinity() || !((top - origin) * scale >= threshold)) continue;
    const float x = row.logits[i];
    if (x > minus_infinity() && (x - origin) * scale >= threshold)
      row.candidate(g.next(row.count)) = {x, static_cast<int32_t>(i), weight(x, best, s.scale)};
  }
  g.sync();
  return *row.count;
}

// Sum of f over the listed candidates.
template <class Group, class F>
DS4_EITHER uint64_t sum_of(const Group& g, const Row& row, int64_t count, const F& f) {
  uint64_t all = 0;
  for (int64_t i = g.rank(); i < count; i += g.size()) all += f(row.candidate(i));
  return g.sum(all);
}

// The largest number of `bits` bits that is 0 or fulfils `holds`, which holds up to some number and not beyond.
template <class Holds>
DS4_EITHER uint64_t last_that(int bits, const Holds& holds) {
  uint64_t found = 0;
  for (int bit = bits - 1; bit >= 0; --bit)
    if (const uint64_t next = found | uint64_t{1} << bit; holds(next)) found = next;
  return found;
}

// The k-th largest maximum: at least k logits reach it. -inf where there are fewer.
template <class Group>
DS4_EITHER float bound_of_top(const Group& g, const float* maxima, int64_t blocks, int64_t k) {
  if (k > blocks) return minus_infinity();
  const uint64_t key = last_that(32, [&](uint64_t least) {
    uint64_t n = 0;
    for (int64_t b = g.rank(); b < blocks; b += g.size()) n += order_of(maxima[b], 0) >> kIdBits >= least;
    return g.sum(n) >= static_cast<uint64_t>(k);
  });
  const auto low = static_cast<uint32_t>(key);
  const uint32_t bits = low >> 31 ? low & 0x7FFFFFFFu : ~low;
  float bound;
  std::memcpy(&bound, &bits, sizeof bound);
  return bound;
}

// A draw from the whole vocabulary: the block first, then the token.
template <class Group>
DS4_EITHER int32_t draw_from_all(const Group& g, const DrawSettings& s, const Row& row, float best, uint64_t total) {
  const double target = s.uniform * mass_of(total);
  const int64_t blocks = blocks_of(s.vocab);
  uint64_t before = 0;
  const auto block = static_cast<int64_t>(last_that(14, [&](uint64_t end) {
    if (end > static_cast<uint64_t>(blocks)) return false;
    uint64_t n = 0;
    for (int64_t b = g.rank(); b < static_cast<int64_t>(end); b += g.size()) n += row.sums[b];
    n = g.sum(n);
    if (!(mass_of(n) <= target)) return false;
    before = n;
    return true;
  }));
  const int64_t first = block * kBlock;
  return static_cast<int32_t>(first + static_cast<int64_t>(last_that(6, [&](uint64_t end) {
                                uint64_t n = 0;
                                for (int64_t j = g.rank(); j < static_cast<int64_t>(end) && first + j < s.vocab;
                                     j += g.size())
                                  n += weight(row.logits[first + j], best, s.scale);
                                return mass_of(before + g.sum(n)) <= target;
                              })));
}

// The draw from `count` listed candidates, which top-k and then `mass` (< 0: none) and min-p still cut.
template <class Group>
DS4_EITHER int32_t draw_from_list(const Group& g, const DrawSettings& s, const Row& row, float best, int64_t count,
                                  double mass) {
  const auto weigh = [&](uint64_t border) {
    return sum_of(g, row, count, [&](const Candidate& c) { return order_of(c.logit, c.id) >= border ? c.weight : 0; });
  };
  uint64_t border = 0;
  if (truncates_top_k(s)) {
    if (count > s.top_k)
      border = last_that(kOrderBits, [&](uint64_t at) {
        const uint64_t n =
            sum_of(g, row, count, [&](const Candidate& c) { return uint64_t{order_of(c.logit, c.id) >= at}; });
        return n >= static_cast<uint64_t>(s.top_k);
      });
    if (s.top_p < 1) mass = s.top_p * mass_of(weigh(border));
  }
  if (mass >= 0) {
    // The shortest prefix of the order that weighs at least `mass`.
    const uint64_t cut = last_that(kOrderBits, [&](uint64_t at) {
      const uint64_t n = weigh(at > border ? at : border);
      return n > 0 && mass_of(n) >= mass;
    });
    border = cut > border ? cut : border;
  }
  const auto weigh_below = [&](uint64_t id) {
    return sum_of(g, row, count, [&](const Candidate& c) {
      const bool left = static_cast<uint64_t>(c.id) < id && order_of(c.logit, c.id) >= border &&
                        (c.logit - best) * s.scale >= s.log_min_p;
      return left ? c.weight : 0;
    });
  };
  const double target = s.uniform * mass_of(weigh_below(uint64_t{1} << kIdBits));
  return static_cast<int32_t>(last_that(kIdBits, [&](uint64_t id) { return mass_of(weigh_below(id)) <= target; }));
}

// The token of one row, -1 when nothing may be chosen. All threads of `g` take part; `few` are some of them, the first
// among them, that go on alone with up to `few.most()` candidates. Threads that do not go on get -1.
template <class Group, class Few>
DS4_EITHER int32_t draw(const Group& g, const Few& few, const DrawSettings& s, const Row& row) {
  const int64_t blocks = blocks_of(s.vocab);
  const float best = best_of_maxima(g, row.maxima, blocks);
  if (best == minus_infinity()) return -1;
  if (s.greedy || best == -minus_infinity()) return first_of(g, row.logits, row.maxima, s.vocab, best);

  uint64_t total = 0;
  if (needs_sums(s)) {
    for (int64_t b = g.rank(); b < blocks; b += g.size()) total += row.sums[b];
    total = g.sum(total);
    if (s.top_p >= 1) return draw_from_all(g, s, row, best, total);
  }

  int64_t count = 0;
  double mass = -1;
  const auto listed = [&] { return mass_of(sum_of(g, row, count, [](const Candidate& c) { return c.weight; })); };
  if (truncates_top_k(s)) {
    count = collect(g, s, row, best, 0.0f, 1.0f, bound_of_top(g, row.maxima, blocks, s.top_k));
  } else if (s.top_p < 1) {
    mass = s.top_p * mass_of(total);
    if (s.log_min_p > minus_infinity()) {
      count = collect(g, s, row, best, best, s.scale, s.log_min_p);
      if (!(listed() >= mass)) mass = -1;  // min-p leaves less
    } else {
      // Mostly few tokens hold nearly all of the mass.
      for (const float threshold : {-4.0f, -8.0f, minus_infinity()}) {
        count = collect(g, s, row, best, best, s.scale, threshold);
        if (listed() >= mass) break;
      }
    }
  } else {
    count = collect(g, s, row, best, best, s.scale, s.log_min_p);
  }
  if (count > few.most()) return draw_from_list(g, s, row, best, count, mass);
  return few.takes_part() ? draw_from_list(few, s, row, best, count, mass) : -1;
}

}  // namespace drawing

inline Best best_of(std::span<const float> logits) {
  Best best;
  float first = drawing::minus_infinity(), second = first;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float x = logits[i];
    if (x > first) {
      second = first;
      first = x;
      best.id = static_cast<int32_t>(i);
    } else if (x > second) {
      second = x;
    }
  }
  best.lead = second > drawing::minus_infinity() ? first - second : 0;
  return best;
}

}  // namespace ds4
