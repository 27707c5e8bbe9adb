#include "quant/encode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "quant/iq_tables.h"
#include "quant/quant.h"

// The inner loops are worth a version for each width of vector; contraction is off and sums keep their order, so that
// all give the same blocks.
// Sanitizers are not there yet when the loader chooses.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define DS4_WIDE __attribute__((flatten, target_clones("default", "avx2", "avx512f")))
#else
#define DS4_WIDE
#endif

namespace ds4 {
namespace {

constexpr int kSuper = 256;

// Sums run in this many lanes, added up in one order: the vector width does not change them.
constexpr int kLanes = 8;
struct Lanes {
  float v[kLanes] = {};
  float sum() const { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
};

// To the nearest integer, |v| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
inline float nearest(float v) {
  constexpr float kMagic = 12582912.0f;
  return (v + kMagic) - kMagic;
}

uint16_t half_bits(float v) {
  const uint16_t bits = float_to_half(v);
  if ((bits & 0x7C00u) == 0x7C00u) throw Invalid("the scale of a block is beyond the range of F16");
  return bits;
}

void put_half(uint8_t* at, uint16_t bits) {
  std::memcpy(at, &bits, 2);
}

float over(float a, float b) {
  return b != 0 ? a / b : 0.0f;
}

// ---- groups with a scale and a minimum: x near scale * code - minimum, both not negative

struct Line {
  float scale = 0, minimum = 0;
};

struct Moments {
  float c = 0, cc = 0, xc = 0;  // sums over the group
};

template <int N>
inline Moments code_moments(const float* x, float low, float inverse, float largest) {
  Lanes c, cc, xc;
  for (int i = 0; i < N; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float code = std::min(std::max(nearest((x[i + l] - low) * inverse), 0.0f), largest);
      c.v[l] += code;
      cc.v[l] += code * code;
      xc.v[l] += code * x[i + l];
    }
  return {c.sum(), cc.sum(), xc.sum()};
}

// Squared error of a group on the grid scale * {0..largest} - minimum.
template <int N>
inline float line_error(const float* x, float scale, float minimum, float largest) {
  const float inverse = over(1.0f, scale);
  Lanes error;
  for (int i = 0; i < N; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float code = std::min(std::max(nearest((x[i + l] + minimum) * inverse), 0.0f), largest);
      const float off = scale * code - minimum - x[i + l];
      error.v[l] += off * off;
    }
  return error.sum();
}

template <int N>
Line range_line(const float* x, float largest) {
  const auto [least, most] = std::minmax_element(x, x + N);
  const float low = std::min(*least, 0.0f), high = std::max(*most, 0.0f);
  return {(high - low) / largest, -low};
}

// The best of a range of grids: its codes, then scale and minimum by least squares for them.
template <int N>
Line fit_line(const float* x, float largest) {
  Line best = range_line<N>(x, largest);
  float least = line_error<N>(x, best.scale, best.minimum, largest);
  const auto [low_at, high_at] = std::minmax_element(x, x + N);
  const float low = std::min(*low_at, 0.0f), high = *high_at;
  if (high <= low) return best;
  Lanes sx;
  for (int i = 0; i < N; i += kLanes)
    for (int l = 0; l < kLanes; ++l) sx.v[l] += x[i + l];
  const float sum = sx.sum();
  for (int step = -8; step <= 8; ++step) {
    const float inverse = (largest + static_cast<float>(step) * 0.1f) / (high - low);
    const Moments m = code_moments<N>(x, low, inverse, largest);
    const float det = N * m.cc - m.c * m.c;
    if (det <= 0) continue;
    float scale = (N * m.xc - sum * m.c) / det, offset = (sum - scale * m.c) / N;
    if (offset > 0) {
      offset = 0;
      scale = m.xc / m.cc;
    }
    if (!(scale > 0)) continue;
    const float error = line_error<N>(x, scale, -offset, largest);
    if (error < least) {
      least = error;
      best = {scale, -offset};
    }
  }
  return best;
}

struct LineBlock {
  uint16_t d = 0, dmin = 0;  // F16
  std::array<uint8_t, 16> scale{}, minimum{};
  std::array<uint8_t, kSuper> code{};
};

// One block whose groups of N elements have scales and minimums of 0..Most in units of d and dmin.
template <int N, int Largest, int Most>
class LineEncoder {
  static constexpr int kGroups = kSuper / N;
  struct Plan {
    float d = 0, dmin = 0;
    std::array<float, kGroups> scale{}, minimum{};
    float error = std::numeric_limits<float>::max();
  };

  static float group_error(const float* x, const Plan& p, int g, float scale, float minimum) {
    return line_error<N>(x + g * N, p.d * scale, p.dmin * minimum, Largest);
  }

  static void set_units(Plan& p, float d, float dmin) {
    p.d = half_to_float(half_bits(d));
    p.dmin = half_to_float(half_bits(dmin));
  }

  // The integers nearest to the lines, and with `search` their neighbours too.
  static void choose(const float* x, Plan& p, const std::array<Line, kGroups>& lines, bool search) {
    p.error = 0;
    for (int g = 0; g < kGroups; ++g) {
      const auto at = static_cast<size_t>(g);
      float scale = std::min(nearest(over(lines[at].scale, p.d)), static_cast<float>(Most));
      float minimum = std::min(nearest(over(lines[at].minimum, p.dmin)), static_cast<float>(Most));
      float error = group_error(x, p, g, scale, minimum);
      const auto attempt = [&](float s, float m) {
        if (s < 0 || s > Most || m < 0 || m > Most) return;
        const float e = group_error(x, p, g, s, m);
        if (e < error) error = e, scale = s, minimum = m;
      };
      if (search) {
        const float s = scale, m = minimum;
        for (const float step : {-1.0f, 1.0f}) attempt(s + step, m);
        const float better = scale;
        for (const float step : {-1.0f, 1.0f}) attempt(better, m + step);
        attempt(s - 1, m - 1);
        attempt(s + 1, m + 1);
      }
      p.scale[at] = scale, p.minimum[at] = minimum;
      p.error += error;
    }
  }

  // d and dmin by least squares for the codes that the plan gives; false where that is no plan.
  static bool refit(const float* x, Plan& p) {
    double a = 0, b = 0, c = 0, u = 0, v = 0;
    for (int g = 0; g < kGroups; ++g) {
      const auto at = static_cast<size_t>(g);
      const float s = p.scale[at], m = p.minimum[at], inverse = over(1.0f, p.d * s), low = p.dmin * m;
      float codes = 0, squares = 0, products = 0, sum = 0;
      for (int i = g * N; i < (g + 1) * N; ++i) {
        const float code = std::min(std::max(nearest((x[i] + low) * inverse), 0.0f), static_cast<float>(Largest));
        codes += code, squares += code * code, products += code * x[i], sum += x[i];
      }
      a += static_cast<double>(s) * s * squares;
      b += static_cast<double>(s) * m * codes;
      c += static_cast<double>(m) * m * N;
      u += static_cast<double>(s) * products;
      v += static_cast<double>(m) * sum;
    }
    const double det = a * c - b * b;
    const double d = det > 0 ? (u * c - v * b) / det : a > 0 ? u / a : 0, dmin = det > 0 ? (b * d - v) / c : 0;
    if (!(d > 0 && dmin >= 0)) return false;
    set_units(p, static_cast<float>(d), static_cast<float>(dmin));
    return true;
  }

  static Plan plan_of(const float* x, const std::array<Line, kGroups>& lines, bool search) {
    float top = 0, bottom = 0;
    for (const Line& l : lines) top = std::max(top, l.scale), bottom = std::max(bottom, l.minimum);
    Plan p;
    set_units(p, top / Most, bottom / Most);
    choose(x, p, lines, search);
    return p;
  }

 public:
  static LineBlock encode(const float* x) {
    std::array<Line, kGroups> plain, fitted;
    for (int g = 0; g < kGroups; ++g) {
      plain[static_cast<size_t>(g)] = range_line<N>(x + g * N, Largest);
      fitted[static_cast<size_t>(g)] = fit_line<N>(x + g * N, Largest);
    }
    Plan best = plan_of(x, fitted, true);
    for (int round = 0; round < 2; ++round) {
      Plan next = best;
      if (!refit(x, next)) break;
      std::array<Line, kGroups> lines;
      for (size_t g = 0; g < kGroups; ++g) lines[g] = {best.scale[g] * best.d, best.minimum[g] * best.dmin};
      choose(x, next, lines, true);
      if (next.error >= best.error) break;
      best = next;
    }
    if (const Plan range = plan_of(x, plain, false); range.error < best.error) best = range;
    LineBlock out;
    out.d = half_bits(best.d), out.dmin = half_bits(best.dmin);
    for (int g = 0; g < kGroups; ++g) {
      const auto at = static_cast<size_t>(g);
      out.scale[at] = static_cast<uint8_t>(best.scale[at]);
      out.minimum[at] = static_cast<uint8_t>(best.minimum[at]);
      const float inverse = over(1.0f, best.d * best.scale[at]), low = best.dmin * best.minimum[at];
      for (int i = g * N; i < (g + 1) * N; ++i)
        out.code[static_cast<size_t>(i)] = static_cast<uint8_t>(
            std::min(std::max(nearest((x[i] + low) * inverse), 0.0f), static_cast<float>(Largest)));
    }
    return out;
  }
};

DS4_WIDE void encode_q2_k(const float* x, uint8_t* out) {
  const LineBlock b = LineEncoder<16, 3, 15>::encode(x);
  for (size_t g = 0; g < 16; ++g) out[g] = static_cast<uint8_t>(b.scale[g] | b.minimum[g] << 4);
  for (size_t i = 0; i < 64; ++i) {  // bits 2s of byte 32 h + i: element 128 h + 32 s + i
    const size_t from = i / 32 * 128 + i % 32;
    out[16 + i] =
        static_cast<uint8_t>(b.code[from] | b.code[from + 32] << 2 | b.code[from + 64] << 4 | b.code[from + 96] << 6);
  }
  put_half(out + 80, b.d);
  put_half(out + 82, b.dmin);
}

// Scales and minimums of groups 0..3 in the low six bits of bytes 0..3 and 4..7; those of groups 4..7 have their low
// nibbles in bytes 8..11 and their upper bits on top of bytes 0..7.
void put_scales(const LineBlock& b, uint8_t* out) {
  for (size_t g = 0; g < 4; ++g) {
    out[g] = static_cast<uint8_t>(b.scale[g] | b.scale[g + 4] >> 4 << 6);
    out[g + 4] = static_cast<uint8_t>(b.minimum[g] | b.minimum[g + 4] >> 4 << 6);
    out[g + 8] = static_cast<uint8_t>((b.scale[g + 4] & 15) | (b.minimum[g + 4] & 15) << 4);
  }
}

// Nibbles of 64 neighbours in 32 bytes, the first half low.
void put_nibbles(const LineBlock& b, uint8_t* out) {
  for (size_t i = 0; i < 128; ++i) {
    const size_t from = i / 32 * 64 + i % 32;
    out[i] = static_cast<uint8_t>((b.code[from] & 15) | (b.code[from + 32] & 15) << 4);
  }
}

DS4_WIDE void encode_q4_k(const float* x, uint8_t* out) {
  const LineBlock b = LineEncoder<32, 15, 63>::encode(x);
  put_half(out, b.d);
  put_half(out + 2, b.dmin);
  put_scales(b, out + 4);
  put_nibbles(b, out + 16);
}

DS4_WIDE void encode_q5_k(const float* x, uint8_t* out) {
  const LineBlock b = LineEncoder<32, 31, 63>::encode(x);
  put_half(out, b.d);
  put_half(out + 2, b.dmin);
  put_scales(b, out + 4);
  std::memset(out + 16, 0, 32);
  for (size_t i = 0; i < kSuper; ++i)  // fifth bits of group g in bit g
    out[16 + i % 32] = static_cast<uint8_t>(out[16 + i % 32] | b.code[i] >> 4 << i / 32);
  put_nibbles(b, out + 48);
}

// ---- groups of 16 with a signed scale: x near scale * code, codes -Down..Down - 1

struct SignedBlock {
  uint16_t d = 0;                  // F16
  std::array<int8_t, 16> scale{};  // -Most..Most - 1
  std::array<int8_t, kSuper> code{};
};

template <int Down, int Most>
class SignedEncoder {
  static constexpr int N = 16, kGroups = kSuper / N;
  struct Plan {
    float d = 0;
    std::array<float, kGroups> scale{};
    float error = std::numeric_limits<float>::max();
  };

  static float code_of(float x, float inverse) {
    return std::min(std::max(nearest(x * inverse), static_cast<float>(-Down)), static_cast<float>(Down - 1));
  }

  static float error_of(const float* x, float scale) {
    const float inverse = over(1.0f, scale);
    Lanes error;
    for (int i = 0; i < N; i += kLanes)
      for (int l = 0; l < kLanes; ++l) {
        const float off = scale * code_of(x[i + l], inverse) - x[i + l];
        error.v[l] += off * off;
      }
    return error.sum();
  }

  // The value of largest magnitude gets the code that reaches further.
  static float range_scale(const float* x) {
    const float* top = std::max_element(x, x + N, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
    return *top / static_cast<float>(-Down);
  }

  static float fit(const float* x) {
    float best = range_scale(x), least = error_of(x, best);
    if (best == 0) return best;
    const float top = best * static_cast<float>(-Down);
    for (int step = -9; step <= 9; ++step)
      for (const float end : {static_cast<float>(-Down), static_cast<float>(Down - 1)}) {
        const float inverse = (end + std::copysign(0.1f, end) * static_cast<float>(step)) / top;
        float cc = 0, xc = 0;
        for (int i = 0; i < N; ++i) {
          const float code = code_of(x[i], inverse);
          cc += code * code, xc += code * x[i];
        }
        const float scale = over(xc, cc);
        if (scale == 0) continue;
        if (const float error = error_of(x, scale); error < least) least = error, best = scale;
      }
    return best;
  }

  static void choose(const float* x, Plan& p, const std::array<float, kGroups>& scales, bool search) {
    p.error = 0;
    for (int g = 0; g < kGroups; ++g) {
      const auto at = static_cast<size_t>(g);
      const auto bounded = [](float s) {
        return std::min(std::max(s, static_cast<float>(-Most)), static_cast<float>(Most - 1));
      };
      const float middle = bounded(nearest(over(scales[at], p.d)));
      float best = middle, error = error_of(x + g * N, p.d * middle);
      if (search)
        for (const float step : {-1.0f, 1.0f})
          if (const float e = error_of(x + g * N, p.d * bounded(middle + step)); e < error)
            error = e, best = bounded(middle + step);
      p.scale[at] = best;
      p.error += error;
    }
  }

  static Plan plan_of(const float* x, const std::array<float, kGroups>& scales, bool search) {
    const float top =
        *std::max_element(scales.begin(), scales.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); });
    Plan p;
    p.d = half_to_float(half_bits(top / static_cast<float>(-Most)));
    choose(x, p, scales, search);
    return p;
  }

  static bool refit(const float* x, Plan& p) {
    double a = 0, u = 0;
    for (int i = 0; i < kSuper; ++i) {
      const float s = p.scale[static_cast<size_t>(i / N)], code = code_of(x[i], over(1.0f, p.d * s));
      a += static_cast<double>(s) * s * code * code;
      u += static_cast<double>(s) * code * x[i];
    }
    if (a == 0) return false;
    p.d = half_to_float(half_bits(static_cast<float>(u / a)));
    return p.d != 0;
  }

 public:
  static SignedBlock encode(const float* x) {
    std::array<float, kGroups> plain, fitted;
    for (int g = 0; g < kGroups; ++g) {
      plain[static_cast<size_t>(g)] = range_scale(x + g * N);
      fitted[static_cast<size_t>(g)] = fit(x + g * N);
    }
    Plan best = plan_of(x, fitted, true);
    for (int round = 0; round < 2; ++round) {
      Plan next = best;
      if (!refit(x, next)) break;
      std::array<float, kGroups> scales;
      for (size_t g = 0; g < kGroups; ++g) scales[g] = best.scale[g] * best.d;
      choose(x, next, scales, true);
      if (next.error >= best.error) break;
      best = next;
    }
    if (const Plan range = plan_of(x, plain, false); range.error < best.error) best = range;
    SignedBlock out;
    out.d = half_bits(best.d);
    for (int i = 0; i < kSuper; ++i) {
      const auto g = static_cast<size_t>(i / N);
      out.scale[g] = static_cast<int8_t>(best.scale[g]);
      out.code[static_cast<size_t>(i)] = static_cast<int8_t>(code_of(x[i], over(1.0f, best.d * best.scale[g])));
    }
    return out;
  }
};

DS4_WIDE void encode_q3_k(const float* x, uint8_t* out) {
  const SignedBlock b = SignedEncoder<4, 32>::encode(x);
  std::memset(out, 0, 110);
  for (size_t i = 0; i < kSuper; ++i) {
    const int code = b.code[i] + 4;
    out[i % 32] = static_cast<uint8_t>(out[i % 32] | code >> 2 << i / 32);
    uint8_t& low = out[32 + i / 128 * 32 + i % 32];
    low = static_cast<uint8_t>(low | (code & 3) << i % 128 / 32 * 2);
  }
  uint8_t* scales = out + 96;
  for (size_t g = 0; g < 16; ++g) {
    const int s = b.scale[g] + 32;
    scales[g % 8] = static_cast<uint8_t>(scales[g % 8] | (s & 15) << g / 8 * 4);
    scales[8 + g % 4] = static_cast<uint8_t>(scales[8 + g % 4] | s >> 4 << g / 4 * 2);
  }
  put_half(out + 108, b.d);
}

DS4_WIDE void encode_q6_k(const float* x, uint8_t* out) {
  const SignedBlock b = SignedEncoder<32, 128>::encode(x);
  const auto code = [&](size_t i) { return b.code[i] + 32; };
  for (size_t half = 0; half < 2; ++half) {
    for (size_t i = 0; i < 64; ++i)
      out[64 * half + i] = static_cast<uint8_t>((code(128 * half + i) & 15) | (code(128 * half + 64 + i) & 15) << 4);
    for (size_t i = 0; i < 32; ++i) {
      const size_t at = 128 * half + i;
      out[128 + 32 * half + i] = static_cast<uint8_t>(code(at) >> 4 | code(at + 32) >> 4 << 2 |
                                                      code(at + 64) >> 4 << 4 | code(at + 96) >> 4 << 6);
    }
  }
  std::memcpy(out + 192, b.scale.data(), 16);
  put_half(out + 208, b.d);
}

// ---- IQ4_NL: a block of 32, one scale, sixteen values of a table

// The table's value nearest to each of 32, the lower one at a tie: the least value, and a step for each middle passed.
inline void nearest_iq4(const float* x, float inverse, float* value) {
  for (int i = 0; i < 32; ++i) value[i] = kIq4Values[0];
  for (int k = 1; k < 16; ++k) {
    const float low = kIq4Values[k - 1], high = kIq4Values[k], middle = (low + high) / 2, step = high - low;
    for (int i = 0; i < 32; ++i) value[i] += x[i] * inverse > middle ? step : 0.0f;
  }
}

DS4_WIDE void encode_iq4_nl(const float* x, uint8_t* out) {
  constexpr int N = 32;
  const float top = *std::max_element(x, x + N, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
  float best = 0, least = std::numeric_limits<float>::max();
  float value[N];
  const auto attempt = [&](float wanted) {
    const float scale = half_to_float(half_bits(wanted));
    nearest_iq4(x, over(1.0f, scale), value);
    Lanes error, qq, xq;
    for (int i = 0; i < N; i += kLanes)
      for (int l = 0; l < kLanes; ++l) {
        const float v = value[i + l], off = scale * v - x[i + l];
        error.v[l] += off * off, qq.v[l] += v * v, xq.v[l] += v * x[i + l];
      }
    if (error.sum() < least) least = error.sum(), best = scale;
    return over(xq.sum(), qq.sum());
  };
  for (int step = -8; step <= 8; ++step)
    for (const float end : {-127.0f, 113.0f}) attempt(attempt(top / (end * (1.0f + 0.02f * static_cast<float>(step)))));
  put_half(out, half_bits(best));
  nearest_iq4(x, over(1.0f, best), value);
  const auto code = [&](int i) {
    return std::lower_bound(std::begin(kIq4Values), std::end(kIq4Values), static_cast<int8_t>(value[i])) -
           std::begin(kIq4Values);
  };
  for (int i = 0; i < 16; ++i) out[2 + i] = static_cast<uint8_t>(code(i) | code(i + 16) << 4);
}

// ---- IQ2_XXS: eight magnitudes by a code book of 256, seven signs (the eighth makes their number even), a scale of
// d (0.5 + 0..15) / 4 for 32

constexpr int kGrid = 256;

struct GridColumns {
  alignas(64) float value[8][kGrid];  // magnitude of element j in every word
  alignas(64) float norm[kGrid];      // squares of a word, summed
};

const GridColumns& grid() {
  static const GridColumns columns = [] {
    GridColumns g{};
    for (size_t k = 0; k < kGrid; ++k)
      for (size_t j = 0; j < 8; ++j) {
        const float v = kIq2Values[kIq2Grid[k] >> (2 * j) & 3];
        g.value[j][k] = v;
        g.norm[k] += v * v;
      }
    return g;
  }();
  return columns;
}

// Eight values against every word: |x| . word, less what the one wrong sign costs where the number of minus signs is
// odd. The squared error of a word at scale s is |x|^2 - 2 s match + s^2 norm.
struct Eight {
  alignas(64) float match[kGrid];
  uint8_t signs = 0;
  bool odd = false;
};

DS4_WIDE void match_words(const float* x, const GridColumns& g, Eight& e) {
  e.signs = 0;
  for (int j = 0; j < 8; ++j) e.signs = static_cast<uint8_t>(e.signs | (x[j] < 0 ? 1 << j : 0));
  e.odd = std::popcount(e.signs) % 2 != 0;
  for (float& m : e.match) m = 0;
  for (int j = 0; j < 8; ++j) {
    const float a = std::fabs(x[j]);
    for (int k = 0; k < kGrid; ++k) e.match[k] += a * g.value[j][k];
  }
  if (!e.odd) return;
  alignas(64) float cheapest[kGrid];
  for (float& c : cheapest) c = std::numeric_limits<float>::max();
  for (int j = 0; j < 8; ++j) {
    const float a = std::fabs(x[j]);
    for (int k = 0; k < kGrid; ++k) cheapest[k] = std::min(cheapest[k], a * g.value[j][k]);
  }
  for (int k = 0; k < kGrid; ++k) e.match[k] -= 2 * cheapest[k];
}

// The best word at a scale, and its error less |x|^2.
DS4_WIDE int best_word(const Eight& e, const GridColumns& g, float scale, float& error) {
  constexpr int kWide = 16;
  float least[kWide];
  int32_t at[kWide];
  const float twice = 2 * scale, square = scale * scale;
  for (int l = 0; l < kWide; ++l) least[l] = std::numeric_limits<float>::max(), at[l] = 0;
  for (int k = 0; k < kGrid; k += kWide)
    for (int l = 0; l < kWide; ++l) {
      const float cost = square * g.norm[k + l] - twice * e.match[k + l];
      at[l] = cost < least[l] ? k + l : at[l];
      least[l] = std::min(cost, least[l]);
    }
  int best = 0;
  for (int l = 1; l < kWide; ++l)
    if (least[l] < least[best] || (least[l] == least[best] && at[l] < at[best])) best = l;
  error = least[best];
  return at[best];
}

class GridEncoder {
 public:
  explicit GridEncoder(const float* x) : x_(x), grid_(grid()) {
    for (int i = 0; i < 32; ++i) match_words(x + 8 * i, grid_, eights_[static_cast<size_t>(i)]);
  }

  void encode(uint8_t* out) {
    // Each group's own best scale: a range of scales, each followed by a least-squares step on the words it chose.
    std::array<float, 8> ideal{};
    for (int g = 0; g < 8; ++g) {
      float top = 0;
      for (int i = 0; i < 32; ++i) top = std::max(top, std::fabs(x_[32 * g + i]));
      float least = 0;
      // From the largest value a little beyond the largest magnitude, to it (and so all) at the smallest.
      float scale = 0.55f * top / 43.0f;
      for (int step = 0; step < 16 && top > 0; ++step, scale *= 1.17f) {
        const float fitted = refit(g, scale);
        if (const float error = group_error(g, fitted); error < least)
          least = error, ideal[static_cast<size_t>(g)] = fitted;
      }
    }
    const float most = *std::max_element(ideal.begin(), ideal.end());
    std::array<int, 8> codes{}, best_codes{};
    uint16_t best_d = 0;
    float least = std::numeric_limits<float>::max();
    for (int step = -4; step <= 4; ++step) {
      const uint16_t bits = half_bits(most * 4 / 15.5f * (1.0f + 0.03f * static_cast<float>(step)));
      const float d = half_to_float(bits);
      float error = 0;
      for (int g = 0; g < 8; ++g)
        error += choose_scale(g, d, ideal[static_cast<size_t>(g)], codes[static_cast<size_t>(g)]);
      if (error < least) least = error, best_d = bits, best_codes = codes;
    }
    write(half_to_float(best_d), best_codes, out + 2);
    put_half(out, best_d);
  }

 private:
  static float scale_of(float d, int code) { return d * (0.5f + static_cast<float>(code)) * 0.25f; }

  float group_error(int g, float scale) const {
    float sum = 0;
    for (int i = 4 * g; i < 4 * g + 4; ++i) {
      float error;
      best_word(eights_[static_cast<size_t>(i)], grid_, scale, error);
      sum += error;
    }
    return sum;
  }

  float refit(int g, float scale) const {
    float match = 0, norm = 0;
    for (int i = 4 * g; i < 4 * g + 4; ++i) {
      float error;
      const int k = best_word(eights_[static_cast<size_t>(i)], grid_, scale, error);
      match += eights_[static_cast<size_t>(i)].match[k];
      norm += grid_.norm[k];
    }
    return std::max(0.0f, match / norm);
  }

  float choose_scale(int g, float d, float ideal, int& code) const {
    const int middle = static_cast<int>(nearest(std::min(over(4 * ideal, d), 64.0f) - 0.5f));
    float least = std::numeric_limits<float>::max();
    for (int s = std::clamp(middle - 1, 0, 15); s <= std::clamp(middle + 1, 0, 15); ++s)
      if (const float error = group_error(g, scale_of(d, s)); error < least) least = error, code = s;
    return least;
  }

  void write(float d, const std::array<int, 8>& codes, uint8_t* out) const {
    for (int g = 0; g < 8; ++g, out += 8) {
      uint32_t word = static_cast<uint32_t>(codes[static_cast<size_t>(g)]) << 28;
      for (int part = 0; part < 4; ++part) {
        const Eight& e = eights_[static_cast<size_t>(4 * g + part)];
        const float* x = x_ + 32 * g + 8 * part;
        float error;
        const int k = best_word(e, grid_, scale_of(d, codes[static_cast<size_t>(g)]), error);
        uint32_t signs = e.signs;
        if (e.odd) {  // the cheapest sign is the wrong one
          int at = 0;
          for (int j = 1; j < 8; ++j)
            if (std::fabs(x[j]) * grid_.value[j][k] < std::fabs(x[at]) * grid_.value[at][k]) at = j;
          signs ^= 1u << at;
        }
        out[part] = static_cast<uint8_t>(k);
        word |= (signs & 127) << (7 * part);
      }
      std::memcpy(out + 4, &word, 4);
    }
  }

  const float* x_;
  const GridColumns& grid_;
  std::array<Eight, 32> eights_;
};

void encode_iq2_xxs(const float* x, uint8_t* out) {
  GridEncoder(x).encode(out);
}

using BlockEncoder = void (*)(const float*, uint8_t*);

BlockEncoder encoder_of(DType type) {
  switch (type) {
    case DType::Q2_K:
      return encode_q2_k;
    case DType::Q3_K:
      return encode_q3_k;
    case DType::Q4_K:
      return encode_q4_k;
    case DType::Q5_K:
      return encode_q5_k;
    case DType::Q6_K:
      return encode_q6_k;
    case DType::IQ4_NL:
      return encode_iq4_nl;
    case DType::IQ2_XXS:
      return encode_iq2_xxs;
    default:
      return nullptr;
  }
}

}  // namespace

bool can_encode(DType type) {
  return encoder_of(type) != nullptr;
}

void encode_rows(DType type, std::span<const float> values, int threads, std::span<std::byte> out) {
  const BlockEncoder encode = encoder_of(type);
  if (!encode) throw Unsupported(std::string("no encoder for type ") + dtype_name(type));
  const auto n = static_cast<int64_t>(values.size());
  if (out.size() != row_bytes(type, n))
    throw Invalid(std::to_string(out.size()) + " bytes for " + std::to_string(n) + " values of type " +
                  dtype_name(type));
  const int64_t elements = block_elements(type), blocks = n / elements;
  const auto bytes = static_cast<int64_t>(block_bytes(type));
  const auto range = [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b)
      encode(values.data() + b * elements, reinterpret_cast<uint8_t*>(out.data()) + b * bytes);
  };
  // A thread costs as much as some blocks.
  constexpr int64_t kLeast = 64;
  int64_t most = threads > 0 ? threads : static_cast<int64_t>(std::thread::hardware_concurrency());
  most = std::clamp<int64_t>(most, 1, std::max<int64_t>(1, blocks / kLeast));
  std::vector<std::exception_ptr> failures(static_cast<size_t>(most));
  {
    std::vector<std::jthread> workers;
    for (int64_t w = 0; w < most; ++w) {
      const auto work = [&, w] {
        try {
          range(blocks * w / most, blocks * (w + 1) / most);
        } catch (...) {
          failures[static_cast<size_t>(w)] = std::current_exception();
        }
      };
      if (w + 1 == most)
        work();
      else
        workers.emplace_back(work);
    }
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace ds4
