// The kernels, written once over sixteen lanes. A per-ISA file includes its simd_<isa>.h (which defines Vf, Vi, Vb and
// the functions on them), then this file, and publishes `kTable`. Everything is in an anonymous namespace and calls no
// library function, so that no code compiled for one instruction set can be linked into another.

namespace ds4::cpu {
namespace {

constexpr bool is_min(TileKind k) {
  return k == TileKind::U4F16Min || k == TileKind::U8F16Min || k == TileKind::U4KMin || k == TileKind::U8KMin ||
         k == TileKind::U2K16Min;
}
constexpr bool is_k(TileKind k) {
  return k == TileKind::U4KMin || k == TileKind::U8KMin || k == TileKind::U8K16Zero || k == TileKind::U3K16Zero ||
         k == TileKind::U2K16Min || k == TileKind::T3KZero;
}
constexpr bool is_table(TileKind k) {
  return k == TileKind::T4F16Zero || k == TileKind::T4F32Zero || k == TileKind::T3KZero;
}
constexpr bool is_group16(TileKind k) {
  return k == TileKind::U8K16Zero || k == TileKind::U3K16Zero || k == TileKind::U2K16Min;
}
constexpr bool is_u8(TileKind k) {
  return k == TileKind::U8F16Zero || k == TileKind::U7F16Zero || k == TileKind::U8F16Min || k == TileKind::U8KMin ||
         k == TileKind::U8K16Zero;
}
// Bits that a weight's value takes as a multiplier: 8 only where the zero point is 128.
constexpr int value_bits(TileKind k) {
  if (k == TileKind::U8F16Zero || is_table(k)) return 8;
  return is_u8(k) ? 7 : 4;
}

inline float f32_at(const uint8_t* p) {
  float v;
  __builtin_memcpy(&v, p, 4);
  return v;
}
inline int32_t i32_at(const uint8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

inline float f32_of(int32_t bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
inline int32_t i32_of(float v) {
  int32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  return bits;
}

template <int N>
__attribute__((always_inline)) inline void store_tile(const TileArgs& a, const Vf (&acc)[N]) {
  if (a.add) {
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) store(a.out + a.out_stride * t, add(load(a.out + a.out_stride * t), acc[t]));
  } else {
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) store(a.out + a.out_stride * t, acc[t]);
  }
}

// 16 output rows x N tokens over all columns, block-quantised weights.
template <TileKind K, int N>
void tile_int8(const TileArgs& a) {
  constexpr bool kMin = is_min(K);
  constexpr int kScales = kScalesPerBlock;        // of the activations, per block
  constexpr int kGroups = is_group16(K) ? 2 : 1;  // of the weights, per block
  static_assert(kScales >= kGroups);
  constexpr int kParts = kScales / kGroups;
  constexpr int kSteps = 8 / kScales;  // 4-column steps per scale
  constexpr int kBits = value_bits(K);
  constexpr bool kSigned = kBits == 8 && kSignedBytes;  // then the zero point is gone
  constexpr bool kNarrow = kBits == 4 && kNarrowSums;
  constexpr int kWave = N < kWaveTokens ? N : kWaveTokens;      // tokens whose sums run side by side
  constexpr int kWords = kScales + (kMin ? kGroups : kScales);  // of a token beside its values
  constexpr int64_t kRecord = N * (32 + 4 * kWords);
  Vf acc[N];
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) acc[t] = zero();
  const uint8_t* w = a.tile;
  const uint8_t* s = a.scales;
  const uint8_t* x = a.act;
  const uint8_t* ahead = a.ahead;
  const int64_t blocks = a.cols / 32;
  [[maybe_unused]] Vf super_d = zero(), super_m = zero();
  for (int64_t b = 0; b < blocks; ++b, x += kRecord) {
    for (int64_t i = 0; i < a.ahead_step; i += 64) prefetch(ahead + i);
    ahead += a.ahead_step;
    Vb v[8];
    if constexpr (is_u8(K)) {
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) {
        v[g] = load_bytes(w + 64 * g);
        if constexpr (kSigned) v[g] = less_128<kBits>(v[g]);
      }
      w += 512;
    } else if constexpr (K == TileKind::U2K16Min) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vb four = load_bytes(w + 64 * i);
        v[4 * i] = field<0, 3>(four), v[4 * i + 1] = field<2, 3>(four);
        v[4 * i + 2] = field<4, 3>(four), v[4 * i + 3] = field<6, 3>(four);
      }
      w += 128;
    } else if constexpr (K == TileKind::U3K16Zero || K == TileKind::T3KZero) {
      const Vb top = load_bytes(w + 128);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vb two = load_bytes(w + 64 * i);
        v[2 * i] = field<0, 7>(two), v[2 * i + 1] = field<3, 7>(two), v[6 + i] = field<6, 3>(two);
      }
      v[4] = field<0, 7>(top), v[5] = field<3, 7>(top);
      v[6] = either(v[6], field<4, 4>(top)), v[7] = either(v[7], field<5, 4>(top));
      if constexpr (is_table(K)) {
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
          v[g] = lookup(v[g], a.table);
          if constexpr (kSigned) v[g] = less_128<kBits>(v[g]);
        }
      }
      w += 192;
    } else {
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) {
        const Vb both = load_bytes(w + 64 * g);
        v[g] = low_nibbles(both);
        v[g + 4] = high_nibbles(both);
        if constexpr (is_table(K)) {
          v[g] = lookup(v[g], a.table);
          v[g + 4] = lookup(v[g + 4], a.table);
          if constexpr (kSigned) v[g] = less_128<kBits>(v[g]), v[g + 4] = less_128<kBits>(v[g + 4]);
        }
      }
      w += 256;
    }
    if constexpr (is_k(K)) {
      if (b % 8 == 0) {
        super_d = load_f16(reinterpret_cast<const uint16_t*>(s));
        if constexpr (K == TileKind::T3KZero) super_d = mul(super_d, set1(0.125f));
        if constexpr (kMin) super_m = load_f16(reinterpret_cast<const uint16_t*>(s + 32));
        s += kMin ? 64 : 32;
      }
    }
#pragma GCC unroll 2
    for (int group = 0; group < kGroups; ++group) {
      Vf d;
      [[maybe_unused]] Vf m;
      if constexpr (K == TileKind::U2K16Min) {
        d = mul(super_d, load_nibbles<0>(s));
        m = mul(super_m, load_nibbles<4>(s));
        s += 16;
      } else if constexpr (is_k(K)) {
        d = mul(super_d, load_i8(s));
        if constexpr (kMin) m = mul(super_m, load_i8(s + 16));
        s += kMin ? 32 : 16;
      } else if constexpr (K == TileKind::T4F32Zero) {
        d = load(reinterpret_cast<const float*>(s));
        s += 64;
      } else {
        d = load_f16(reinterpret_cast<const uint16_t*>(s));
        if constexpr (kMin) m = load_f16(reinterpret_cast<const uint16_t*>(s + 32));
        s += kMin ? 64 : 32;
      }
#pragma GCC unroll 8
      for (int t0 = 0; t0 < N; t0 += kWave) {
        Vf sum[kWave];
#pragma GCC unroll 2
        for (int part = group * kParts; part < (group + 1) * kParts; ++part) {
          const uint8_t* origin = x + N * 32 + 4 * (kWords * t0 + part);
          const uint8_t* start = kMin || kSigned ? origin : origin + 4 * kScales;
          Vi dot[kWave];
#pragma GCC unroll 4
          for (int t = 0; t < kWave; ++t) dot[t] = set1_i(i32_at(start + 4 * kWords * t));
          const auto* q = reinterpret_cast<const int8_t*>(x + t0 * 32 + 4 * part * kSteps);
          if constexpr (kNarrow) {
#pragma GCC unroll 4
            for (int t = 0; t < kWave; ++t) dot[t] = dot_narrow<kSteps>(dot[t], v + part * kSteps, q + 32 * t);
          } else {
#pragma GCC unroll 8
            for (int g = 0; g < kSteps; ++g)
#pragma GCC unroll 4
              for (int t = 0; t < kWave; ++t) dot[t] = dot4<kBits>(dot[t], v[part * kSteps + g], q + 32 * t + 4 * g);
          }
#pragma GCC unroll 4
          for (int t = 0; t < kWave; ++t) {
            const Vf f = sub(as_float(dot[t]), set1(f32_at(origin + 4 * kWords * t)));
            sum[t] = part == group * kParts ? f : add(sum[t], f);
          }
        }
        const uint8_t* aux = x + N * 32 + 4 * (kWords * t0 + kScales + group);
#pragma GCC unroll 4
        for (int t = 0; t < kWave; ++t) {
          acc[t0 + t] = fma(sum[t], d, acc[t0 + t]);
          if constexpr (kMin) acc[t0 + t] = fma(m, set1(f32_at(aux + 4 * kWords * t)), acc[t0 + t]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) acc[t] = mul(acc[t], set1(f32_at(x + 4 * t)));
  store_tile(a, acc);
}

// The same for float weights; F16 and F32 multiply in f32, BF16 in pairs.
template <TileKind K, int N>
void tile_float(const TileArgs& a) {
  Vf acc[N];
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) acc[t] = zero();
  const uint8_t* w = a.tile;
  const uint8_t* x = a.act;
  const uint8_t* ahead = a.ahead;
  if constexpr (K == TileKind::BF16) {
    const int64_t pairs = (a.cols + 1) / 2;
    for (int64_t c = 0; c < pairs; ++c, w += 64, x += 4 * N) {
      if (a.ahead_step) prefetch(ahead), ahead += 64;
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) acc[t] = dot2_bf16(acc[t], w, x + 4 * t);
    }
  } else {
    constexpr int kBytes = K == TileKind::F32 ? 64 : 32;
    for (int64_t c = 0; c < a.cols; ++c, w += kBytes, x += 4 * N) {
      if (a.ahead_step) prefetch(ahead), ahead += kBytes;
      const Vf v =
          K == TileKind::F32 ? load(reinterpret_cast<const float*>(w)) : load_f16(reinterpret_cast<const uint16_t*>(w));
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) acc[t] = fma(v, set1(f32_at(x + 4 * t)), acc[t]);
    }
  }
  store_tile(a, acc);
}

// e^x to about one ulp: x = n ln 2 + r with ln 2 split in two, and a minimax polynomial of (e^r - 1 - r) / r^2.
// 0 below the smallest normal result; the argument is held under the largest finite one.
inline Vf exp(Vf x) {
  const Vf bounded = min(max(x, set1(-87.336f)), set1(88.37f));
  const Vf n = round(mul(bounded, set1(1.44269504f)));
  Vf r = fma(n, set1(-0.693359375f), bounded);
  r = fma(n, set1(2.12194440e-4f), r);
  Vf p = set1(1.9899334e-4f);
  p = fma(p, r, set1(1.3933688e-3f));
  p = fma(p, r, set1(8.3332984e-3f));
  p = fma(p, r, set1(4.1666463e-2f));
  p = fma(p, r, set1(1.6666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(mul(r, r), p, r);
  p = add(p, set1(1.0f));
  return zero_below(x, -87.336f, mul(p, exp2_int(to_int(n))));
}

void rms_norm(const float* x, const float* gain, float eps, int64_t n, float* y) {
  Vf squares = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const Vf v = load(x + i);
    squares = fma(v, v, squares);
  }
  float sum = hsum(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
  for (i = 0; i + 16 <= n; i += 16) store(y + i, mul(mul(load(x + i), set1(factor)), load(gain + i)));
  for (; i < n; ++i) y[i] = x[i] * factor * gain[i];
}

// Factors that a row's scales may have: 2^(i/16).
constexpr float kFactors[16] = {1.0f,       1.0442737f, 1.0905077f, 1.1387886f, 1.1892071f, 1.2418578f,
                                1.2968396f, 1.3542556f, 1.4142135f, 1.4768262f, 1.5422108f, 1.6104903f,
                                1.6817929f, 1.7562522f, 1.8340081f, 1.9152066f};

// Where the least of sixteen values is; they are not kept. The one of a pair in which both are equal that comes first.
inline int least_of_16(float (&v)[16]) {
  int at[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int half = 8; half; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      const bool less = v[i + half] < v[i];
      at[i] = less ? at[i + half] : at[i];
      v[i] = less ? v[i + half] : v[i];
    }
  return at[0];
}

// Row `t` of a group: x, [n] floats, n a multiple of 32, `work` room for 4 (n / 16 + 16) floats.
//
// A run of 16 columns has the scale f 2^e: f is the row's, e the least with which no value rounds to more than 127. Of
// sixteen factors that one is taken by which the squares of the scales, that is the noise of rounding, are least. Under
// 2^-126 scales no longer shrink; a run with values over 2^110 or none makes the row's results none either.
void pack_int8(const float* x, int64_t n, ActKind kind, int64_t group, int64_t t, uint8_t* out, float* work) {
  const int64_t runs = n / kScaleColumns, room = runs + 16;
  float *most = work, *inverse = work + room, *scale = work + 2 * room;
  auto* sums = reinterpret_cast<int32_t*>(work + 3 * room);
  const int sums_per_block = kind.zero ? kScalesPerBlock : 32 / kind.group;
  const int64_t record = group * (32 + 4 * (kScalesPerBlock + sums_per_block));
  alignas(64) float last[64] = {};
  int8_t unused[32];
  const auto columns = [&](int64_t c) -> const float* {
    if (c + 64 <= n) return x + c;
    for (int i = 0; i < 32; i += 16) store(last + i, load(x + c + i));
    return last;
  };

  const Vf factors = load(kFactors), steps = div(set1(128.0f / 127.49f), factors);
  Vf noise[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  for (int64_t c = 0; c < n; c += 64) {
    float* m = most + c / kScaleColumns;
    maxima(columns(c), m);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vf power = power_of_two(mul(set1(m[i]), steps));
      noise[i] = fma(power, power, noise[i]);
    }
  }
  alignas(64) float noises[16], step[16];
  store(noises, mul(add(add(noise[0], noise[1]), add(noise[2], noise[3])), mul(factors, factors)));
  store(step, steps);
  const int best = least_of_16(noises);
  const float factor = kFactors[best];

  for (int64_t i = 0; i < runs; i += 16) {
    const Vf power = min(max(power_of_two(mul(load(most + i), set1(step[best]))), set1(0x1p-120f)), set1(0x1p111f));
    store(inverse + i, div(set1(0x1p6f * (127.49f / 128) * step[best]), power));
    store(scale + i, mul(power, set1(0x1p-6f)));
    store(most + i, mul(power, set1(0x1.8p17f)));  // the origin: 1.5 * 2^23 scales
  }
  for (int64_t c = 0; c < n; c += 64) {
    auto* q = reinterpret_cast<int8_t*>(out + c / 32 * record + 32 * t);
    quantise(columns(c), inverse + c / kScaleColumns, q, c + 64 <= n ? q + record : unused, sums + c / kScaleColumns);
  }
  uint8_t* at = out + 32 * group + t * 4 * (kScalesPerBlock + sums_per_block);
  for (int64_t i = 0; i < runs; i += kScalesPerBlock, at += record) {
    __builtin_memcpy(at, most + i, 4 * kScalesPerBlock);
    uint8_t* auxiliary = at + 4 * kScalesPerBlock;
    if (kind.zero) {
      int32_t starts[kScalesPerBlock];
      for (int k = 0; k < kScalesPerBlock; ++k) starts[k] = i32_of(most[i + k]) - kind.zero * sums[i + k];
      __builtin_memcpy(auxiliary, starts, sizeof starts);
    } else {
      float values[kScalesPerBlock];
      for (int k = 0; k < kScalesPerBlock; ++k) values[k] = scale[i + k] * static_cast<float>(sums[i + k]);
      if (sums_per_block == 1) {
        values[0] += values[1];
        __builtin_memcpy(auxiliary, values, sizeof values[0]);
      } else {
        __builtin_memcpy(auxiliary, values, sizeof values);
      }
    }
  }
  __builtin_memcpy(out + n / 32 * record + 4 * t, &factor, 4);
}

inline uint16_t round_bf16(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void pack_act(ActKind kind, const float* x, int64_t n, int64_t group, int64_t t, uint8_t* out, float* work) {
  if (kind.type == ActKind::Int8) {
    pack_int8(x, (n + 31) / 32 * 32, kind, group, t, out, work);
  } else if (kind.type == ActKind::BFloat16) {
    for (int64_t c = 0; c < n; c += 2) {
      const uint16_t two[2] = {round_bf16(x[c]), c + 1 < n ? round_bf16(x[c + 1]) : uint16_t{0}};
      __builtin_memcpy(out + (c / 2 * group + t) * 4, two, 4);
    }
  } else {
    for (int64_t c = 0; c < n; ++c) __builtin_memcpy(out + (c * group + t) * 4, x + c, 4);
  }
}

void swiglu(const float* g, const float* u, int64_t n, float limit, float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const Vf v = min(load(g + i), set1(limit));
    const Vf w = max(min(load(u + i), set1(limit)), set1(-limit));
    store(y + i, mul(div(v, add(set1(1.0f), exp(sub(zero(), v)))), w));
  }
}

void rope(float* __restrict x, int64_t heads, int64_t dim, const float* __restrict cs, int64_t pairs,
          bool interleaved) {
  for (int64_t h = 0; h < heads; ++h, x += dim) {
    const float *cosine = cs, *sine = cs + pairs;
    if (interleaved) {
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = a * sine[i] + b * cosine[i];
      }
    } else {
      float* high = x + pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[i], b = high[i];
        x[i] = a * cosine[i] - b * sine[i];
        high[i] = a * sine[i] + b * cosine[i];
      }
    }
  }
}

void to_f16(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_f16(out + i, load(x + i));
  if (i < n) {
    float in[16] = {};
    uint16_t half[16];
    for (int64_t j = 0; j < n - i; ++j) in[j] = x[i + j];
    store_f16(half, load(in));
    for (int64_t j = 0; j < n - i; ++j) out[i + j] = half[j];
  }
}

void scale(const float* x, float factor, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, mul(load(x + i), set1(factor)));
  for (; i < n; ++i) y[i] = x[i] * factor;
}

// 2^x for x <= 0 to about one ulp, 1 exactly at 0; what lies under -125, and minus infinity, counts as 2^-125. Adding
// 1.5 * 2^23 rounds x to an integer; the rest goes through a minimax polynomial of (2^r - 1) / r.
inline Vf exp2_below_1(Vf x) {
  const Vf bounded = max(x, set1(-125.0f)), magic = set1(12582912.0f);
  const Vf shifted = add(bounded, magic);
  const Vf r = sub(bounded, sub(shifted, magic));
  Vf p = set1(1.32647087e-3f);
  p = fma(p, r, set1(9.67151113e-3f));
  p = fma(p, r, set1(5.55073395e-2f));
  p = fma(p, r, set1(2.40222424e-1f));
  p = fma(p, r, set1(6.93147004e-1f));
  return scale_exponent(fma(p, r, set1(1.0f)), shifted);
}

// Keys and values as the state stores them, or widened before by `widen`: the same numbers.
inline Vf load_kv(const uint16_t* p) {
  return load_f16(p);
}
inline Vf load_kv(const float* p) {
  return load(p);
}
void widen(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 16) store(to + i, load_f16(from + i));
}

// Pages lie apart and are read in four streams at once, which hardware prefetchers follow badly: while a page's keys
// are read its values are fetched, and while its values are read the keys of a page that comes later.
inline void prefetch_row(const uint16_t* p, int64_t elements) {
  for (int64_t i = 0; i < elements; i += 32) prefetch(p + i);
}

// scores[v][16 T ..] of N query vectors against T key tiles; `ahead`, if any, is a page to fetch meanwhile.
template <int N, int T, class E>
void scores(const float* q, int64_t dim, const E* keys, const uint16_t* ahead, float* out) {
  Vf acc[N][T];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[v][t] = zero();
  for (int64_t d = 0; d < dim; ++d) {
    if (ahead) prefetch_row(ahead + d * 16 * T, 16 * T);
    Vf k[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) k[t] = load_kv(keys + (t * dim + d) * 16);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const Vf x = set1(q[v * dim + d]);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[v][t] = fma(k[t], x, acc[v][t]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) store(out + v * kSegment + 16 * t, acc[v][t]);
}

// acc[v][16 W ..] += sum over keys [first, last) of p[v][key] * value[key].
template <int N, int W, class E>
void weigh(const float* p, int64_t first, int64_t last, const E* values, int64_t padded, const uint16_t* ahead,
           float* acc) {
  Vf a[N][W];
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v)
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) a[v][i] = load(acc + v * padded + 16 * i);
  for (int64_t key = first; key < last; ++key) {
    if (ahead) prefetch_row(ahead + key * padded, 16 * W);
    Vf x[W];
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) x[i] = load_kv(values + key * padded + 16 * i);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const Vf weight = set1(p[v * kSegment + key]);
#pragma GCC unroll 4
      for (int i = 0; i < W; ++i) a[v][i] = fma(x[i], weight, a[v][i]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < N; ++v)
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) store(acc + v * padded + 16 * i, a[v][i]);
}

template <int N, class E>
void weigh_row(const float* p, int64_t first, int64_t last, const E* values, int64_t padded, const uint16_t* ahead,
               float* acc) {
  int64_t i = 0;
  for (; i + 16 * kValueWidth <= padded; i += 16 * kValueWidth)
    weigh<N, kValueWidth>(p, first, last, values + i, padded, ahead ? ahead + i : nullptr, acc + i);
  for (; i < padded; i += 16) weigh<N, 1>(p, first, last, values + i, padded, nullptr, acc + i);
}

// `scores` of the first `tiles` tiles of a page, T at a time and what is left in halves of that.
template <int N, int T, class E>
void scores_of(const float* q, int64_t dim, const E* keys, const uint16_t* ahead, int tiles, float* out) {
  int t = 0;
  for (; t + T <= tiles; t += T)
    scores<N, T>(q, dim, keys + t * dim * 16, ahead ? ahead + t * dim * 16 : nullptr, out + t * 16);
  if constexpr (T > 1) {
    if (t < tiles)
      scores_of<N, T / 2>(q, dim, keys + t * dim * 16, ahead ? ahead + t * dim * 16 : nullptr, tiles - t, out + t * 16);
  }
}

// Scores of query vectors [from, a.n) against the page of keys at `base`, in runs of at most N.
template <int N, class E>
void scores_all(const AttentionArgs& a, const E* keys, const uint16_t* ahead, int tiles, int64_t base, int64_t from) {
  int64_t v = from;
  for (; v + N <= a.n; v += N, ahead = nullptr)
    scores_of<N, kScoreTiles>(a.q + v * a.dim, a.dim, keys, ahead, tiles, a.work + v * kSegment + base);
  if constexpr (N > 1) {
    if (v < a.n) scores_all<(N > 3 ? 3 : N - 1)>(a, keys, ahead, tiles, base, v);
  }
}

// Adds the page of values at `base` to query vectors [from, a.n), in runs of at most N.
template <int N, class E>
void weigh_all(const AttentionArgs& a, const E* values, const uint16_t* ahead, int64_t base, int64_t from) {
  int64_t v = from;
  for (; v + N <= a.n; v += N, ahead = nullptr) {
    int64_t visible[N];
    for (int i = 0; i < N; ++i) {
      const int64_t n = a.limit[v + i] - base;
      visible[i] = n < kPageRows ? n : kPageRows;
    }
    // Vectors ascend in what they see: the first one's keys together, the rest one vector at a time.
    float* acc = a.acc + v * a.padded;
    const float* p = a.work + v * kSegment + base;
    weigh_row<N>(p, 0, visible[0], values, a.padded, ahead, acc);
    if (ahead)
      for (int64_t key = visible[0]; key < kPageRows; ++key) prefetch_row(ahead + key * a.padded, a.padded);
    for (int i = 1; i < N; ++i)
      if (visible[i] > visible[0])
        weigh_row<1>(p + i * kSegment, visible[0], visible[i], values, a.padded, nullptr, acc + i * a.padded);
  }
  if constexpr (N > 1) {
    if (v < a.n) weigh_all<(N > 3 ? 3 : N - 1)>(a, values, ahead, base, v);
  }
}

// The largest of `visible` scores; those of the last sixteen that are not visible become minus infinity.
inline float mask_and_max(float* s, int64_t visible) {
  constexpr float kMinusInfinity = -__builtin_inff();
  Vf top = set1(kMinusInfinity), second = top;
  int64_t i = 0;
  for (; i + 32 <= visible; i += 32) top = max(top, load(s + i)), second = max(second, load(s + i + 16));
  for (; i < visible; i += 16) {
    const Vf masked = first_lanes(load(s + i), visible - i < 16 ? static_cast<int>(visible - i) : 16, kMinusInfinity);
    store(s + i, masked);
    top = max(top, masked);
  }
  return hmax(max(top, second));
}

// Scores become weights 2^(score - largest), in place. A few vectors per pass: the way from scores to their maximum is
// long, and the next vector's hides it.
void softmax(const AttentionArgs& a) {
  constexpr int64_t kPass = 8;
  for (int64_t first = 0; first < a.n; first += kPass) {
    const int64_t end = first + kPass < a.n ? first + kPass : a.n;
    for (int64_t v = first; v < end; ++v) a.max[v] = mask_and_max(a.work + v * kSegment, a.limit[v]);
    for (int64_t v = first; v < end; ++v) {
      float* s = a.work + v * kSegment;
      const Vf largest = set1(a.max[v]);
      Vf sum = zero();
      for (int64_t i = 0; i < a.limit[v]; i += 16) {
        const Vf p = exp2_below_1(sub(load(s + i), largest));
        store(s + i, p);
        sum = add(sum, p);
      }
      store(a.sum + 16 * v, sum);
      for (int64_t i = 0; i < a.padded; i += 16) store(a.acc + v * a.padded + i, zero());
    }
  }
}

void attend(const AttentionArgs& a) {
  // Widening a page once pays when several runs of vectors read it.
  const bool wide = a.n > 2 * kScoreVectors;
  const int64_t most = a.limit[a.n - 1];
  int64_t from = 0;
  for (int64_t base = 0; base < most; base += kPageRows) {
    while (a.limit[from] <= base) ++from;
    const int64_t page = base / kPageRows, left = most - base;
    const int tiles = left >= kPageRows ? 4 : static_cast<int>((left + 15) / 16);
    if (wide) {
      widen(a.keys[page], tiles * 16 * a.dim, a.page);
      scores_all<kScoreVectors>(a, a.page, a.values[page], tiles, base, from);
    } else {
      scores_all<kScoreVectors>(a, a.keys[page], a.values[page], tiles, base, from);
    }
  }
  softmax(a);
  from = 0;
  for (int64_t base = 0; base < most; base += kPageRows) {
    while (a.limit[from] <= base) ++from;
    const int64_t page = base / kPageRows, left = most - base;
    const uint16_t* ahead = a.next_keys[page];
    if (wide) {
      widen(a.values[page], (left < kPageRows ? left : kPageRows) * a.padded, a.page);
      weigh_all<kValueVectors>(a, a.page, ahead, base, from);
    } else {
      weigh_all<kValueVectors>(a, a.values[page], ahead, base, from);
    }
  }
}

void merge(float* M, float* S, float* A, float m, const float* s, const float* a, int64_t padded) {
  const float now = m > *M ? m : *M;
  const Vf old_factor = exp2_below_1(set1(*M - now)), new_factor = exp2_below_1(set1(m - now));
  *M = now;
  store(S, fma(load(s), new_factor, mul(load(S), old_factor)));
  for (int64_t i = 0; i < padded; i += 16) store(A + i, fma(load(a + i), new_factor, mul(load(A + i), old_factor)));
}

void finish(const float* S, const float* A, int64_t dim, float* out) {
  const float inverse = 1.0f / hsum(load(S));
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) store(out + i, mul(load(A + i), set1(inverse)));
  for (; i < dim; ++i) out[i] = A[i] * inverse;
}

template <TileKind K, int N>
constexpr TileFn tile_fn() {
  if constexpr (N > kMaxTokens)
    return nullptr;
  else if constexpr (K == TileKind::BF16 || K == TileKind::F16 || K == TileKind::F32)
    return tile_float<K, N>;
  else
    return tile_int8<K, N>;
}

template <int K = 0>
constexpr void fill_tiles(Kernels& k) {
  if constexpr (K < static_cast<int>(TileKind::Count)) {
    constexpr auto kind = static_cast<TileKind>(K);
    k.tile[K][0] = tile_fn<kind, 1>();
    k.tile[K][1] = tile_fn<kind, 2>();
    k.tile[K][2] = tile_fn<kind, 4>();
    k.tile[K][3] = tile_fn<kind, 8>();
    k.tile[K][4] = tile_fn<kind, 16>();
    fill_tiles<K + 1>(k);
  }
}

constexpr Kernels make_table(const char* name) {
  Kernels k{};
  k.name = name;
  k.max_group = kMaxTokens;
  fill_tiles(k);
  k.rms_norm = rms_norm;
  k.pack_act = pack_act;
  k.swiglu = swiglu;
  k.rope = rope;
  k.to_f16 = to_f16;
  k.scale = scale;
  k.attend = attend;
  k.merge = merge;
  k.finish = finish;
  return k;
}

}  // namespace
}  // namespace ds4::cpu
