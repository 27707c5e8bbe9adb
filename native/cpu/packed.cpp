#include "cpu/packed.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "quant/iq_tables.h"
#include "quant/quant.h"

namespace ds4::cpu {

namespace {

// Code books as the kernels take them: 16 unsigned values around the zero point 128.
constexpr std::array<uint8_t, 16> around_128(const int8_t (&values)[16]) {
  std::array<uint8_t, 16> out{};
  for (size_t i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(values[i] + 128);
  return out;
}
constexpr int8_t kIq2Signed[16] = {kIq2Values[0],  kIq2Values[1],  kIq2Values[2], 0,
                                   -kIq2Values[0], -kIq2Values[1], -kIq2Values[2]};
constexpr auto kIq4Table = around_128(kIq4Values);
constexpr auto kE2M1Table = around_128(kE2M1Doubled);
constexpr auto kIq2Table = around_128(kIq2Signed);

constexpr int64_t kSuper = 256;

struct Halves {
  uint16_t d = 0, m = 0;
};

uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// One source block, unpacked: values in column order and scales as the kernels store them.
struct Unpacked {
  std::array<uint8_t, kSuper> value{};
  Halves half;                       // F16: this block's d, m. K: d, -dmin
  float scale = 0;                   // F32
  std::array<int8_t, 16> sub{};      // K: per group
  std::array<int8_t, 16> sub_min{};  // K: per group
};

void nibbles32(const uint8_t* qs, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = qs[i] & 15;
    out[i + 16] = qs[i] >> 4;
  }
}

void fifth_bits32(const uint8_t* qh, uint8_t* out) {
  uint32_t bits;
  std::memcpy(&bits, qh, 4);
  for (int i = 0; i < 32; ++i) out[i] |= static_cast<uint8_t>(((bits >> i) & 1) << 4);
}

// The 6-bit scales and minimums of Q4_K and Q5_K: 8 of each in 12 bytes.
void scales_k4(const uint8_t* s, Unpacked& u) {
  for (int i = 0; i < 8; ++i) {
    const int sc = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | ((s[i - 4] >> 6) << 4);
    const int mn = i < 4 ? s[i + 4] & 63 : (s[i + 4] >> 4) | ((s[i] >> 6) << 4);
    u.sub[static_cast<size_t>(i)] = static_cast<int8_t>(sc);
    u.sub_min[static_cast<size_t>(i)] = static_cast<int8_t>(mn);
  }
}

void unpack_q6k(const uint8_t* b, Unpacked& u) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* ql = b + 64 * half;
    const uint8_t* qh = b + 128 + 32 * half;
    uint8_t* y = u.value.data() + 128 * half;
    for (int i = 0; i < 32; ++i) {
      y[i] = static_cast<uint8_t>((ql[i] & 15) | ((qh[i] & 3) << 4));
      y[i + 32] = static_cast<uint8_t>((ql[i + 32] & 15) | (((qh[i] >> 2) & 3) << 4));
      y[i + 64] = static_cast<uint8_t>((ql[i] >> 4) | (((qh[i] >> 4) & 3) << 4));
      y[i + 96] = static_cast<uint8_t>((ql[i + 32] >> 4) | (((qh[i] >> 6) & 3) << 4));
    }
  }
  std::memcpy(u.sub.data(), b + 192, 16);
  u.half.d = read16(b + 208);
}

void unpack_q3k(const uint8_t* b, Unpacked& u) {
  const uint8_t *hmask = b, *qs = b + 32, *s = b + 96;
  for (int i = 0; i < 256; ++i) {
    const int chunk = i / 32, in = i % 32;
    const int low = (qs[32 * (chunk / 4) + in] >> (2 * (chunk % 4))) & 3;
    u.value[static_cast<size_t>(i)] = static_cast<uint8_t>(low | (((hmask[in] >> chunk) & 1) << 2));
  }
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    const int high = (s[8 + i % 4] >> (2 * (i / 4))) & 3;
    u.sub[static_cast<size_t>(i)] = static_cast<int8_t>((low | (high << 4)) - 32);
  }
  u.half.d = read16(b + 108);
}

void unpack_q2k(const uint8_t* b, Unpacked& u) {
  for (int i = 0; i < 256; ++i) {
    const int chunk = i / 32, in = i % 32;
    u.value[static_cast<size_t>(i)] = static_cast<uint8_t>((b[16 + 32 * (chunk / 4) + in] >> (2 * (chunk % 4))) & 3);
  }
  for (size_t i = 0; i < 16; ++i) {
    u.sub[i] = static_cast<int8_t>(b[i] & 15);
    u.sub_min[i] = static_cast<int8_t>(b[i] >> 4);
  }
  u.half = {read16(b + 80), static_cast<uint16_t>(read16(b + 82) ^ 0x8000)};
}

// The bits of eight pairs or single bits, one in each byte of a word, the lowest in the first byte.
uint64_t spread(uint32_t bits, int each) {
  uint64_t out = 0;
  for (int i = 0; i < 8; ++i) out |= static_cast<uint64_t>(bits >> (each * i) & ((1u << each) - 1)) << (8 * i);
  return out;
}

struct Iq2Bytes {
  std::array<uint64_t, 256> code;   // of a grid index
  std::array<uint64_t, 128> signs;  // of seven sign bits: 4 where the weight is negative
};

const Iq2Bytes& iq2_bytes() {
  static const Iq2Bytes bytes = [] {
    Iq2Bytes b{};
    for (size_t k = 0; k < 256; ++k) b.code[k] = spread(kIq2Grid[k], 2);
    for (uint32_t k = 0; k < 128; ++k)
      b.signs[k] = spread(k | (static_cast<uint32_t>(std::popcount(k)) & 1u) << 7, 1) << 2;
    return b;
  }();
  return bytes;
}

// Eight weights per 8-bit grid index, seven sign bits per eight weights (the eighth makes their number even), a 4-bit
// scale s per 32: d (0.5 + s) / 4. Stored as indices into {+8, +25, +43, -, -8, -25, -43} and 2s + 1 eighths of d.
void unpack_iq2xxs(const uint8_t* b, Unpacked& u) {
  const Iq2Bytes& bytes = iq2_bytes();
  u.half.d = read16(b);
  for (size_t g = 0; g < 8; ++g) {
    const uint8_t* indices = b + 2 + 8 * g;
    uint32_t word;
    std::memcpy(&word, indices + 4, 4);
    u.sub[g] = static_cast<int8_t>(2 * (word >> 28) + 1);
    for (size_t part = 0; part < 4; ++part) {
      const uint64_t eight = bytes.code[indices[part]] | bytes.signs[word >> (7 * part) & 127];
      std::memcpy(u.value.data() + 32 * g + 8 * part, &eight, 8);
    }
  }
}

void unpack(DType type, const uint8_t* b, Unpacked& u) {
  uint8_t* v = u.value.data();
  switch (type) {
    case DType::Q4_0:
    case DType::IQ4_NL:
      u.half.d = read16(b);
      nibbles32(b + 2, v);
      break;
    case DType::Q4_1:
      u.half = {read16(b), read16(b + 2)};
      nibbles32(b + 4, v);
      break;
    case DType::Q5_0:
      u.half.d = read16(b);
      nibbles32(b + 6, v);
      fifth_bits32(b + 2, v);
      break;
    case DType::Q5_1:
      u.half = {read16(b), read16(b + 2)};
      nibbles32(b + 8, v);
      fifth_bits32(b + 4, v);
      break;
    case DType::Q8_0:
      u.half.d = read16(b);
      for (int i = 0; i < 32; ++i) v[i] = static_cast<uint8_t>(b[2 + i] ^ 0x80);
      break;
    case DType::Q4_K:
    case DType::Q5_K: {
      u.half = {read16(b), static_cast<uint16_t>(read16(b + 2) ^ 0x8000)};
      scales_k4(b + 4, u);
      const bool five = type == DType::Q5_K;
      const uint8_t* qs = b + (five ? 48 : 16);
      for (int i = 0; i < 256; ++i) {
        const int chunk = i / 32, in = i % 32;
        const uint8_t byte = qs[32 * (chunk / 2) + in];
        v[i] = chunk % 2 ? byte >> 4 : byte & 15;
        if (five) v[i] |= static_cast<uint8_t>(((b[16 + in] >> chunk) & 1) << 4);
      }
      break;
    }
    case DType::Q6_K:
      unpack_q6k(b, u);
      break;
    case DType::Q3_K:
      unpack_q3k(b, u);
      break;
    case DType::Q2_K:
      unpack_q2k(b, u);
      break;
    case DType::IQ2_XXS:
      unpack_iq2xxs(b, u);
      break;
    case DType::MXFP4: {
      // Scale 2^(e - 127), halved because the table holds doubled values; built as bits so that e = 0, 1 stay exact.
      const uint32_t bits = b[0] < 2 ? 0x00200000u << b[0] : static_cast<uint32_t>(b[0] - 1) << 23;
      std::memcpy(&u.scale, &bits, 4);
      nibbles32(b + 1, v);
      break;
    }
    default:
      throw Unsupported("no packed layout for this type");
  }
}

bool has_min(TileKind k) {
  return k == TileKind::U4F16Min || k == TileKind::U8F16Min || k == TileKind::U4KMin || k == TileKind::U8KMin ||
         k == TileKind::U2K16Min;
}

bool k_scales(TileKind k) {
  return k == TileKind::U4KMin || k == TileKind::U8KMin || k == TileKind::U8K16Zero || k == TileKind::U3K16Zero ||
         k == TileKind::U2K16Min || k == TileKind::T3KZero;
}

void put16(uint8_t* p, int64_t lane, uint16_t v) {
  std::memcpy(p + 2 * lane, &v, 2);
}

void store_scales(const Format& f, const Unpacked& u, int64_t block, int64_t lane, uint8_t* scales) {
  const bool min = has_min(f.kind);
  if (k_scales(f.kind)) {
    uint8_t* at = scales + block / 8 * f.scale_bytes;  // a source block is 256 columns: block is a multiple of 8
    put16(at, lane, u.half.d);
    if (min) put16(at + 32, lane, u.half.m);
    at += min ? 64 : 32;
    const bool nibbles = f.kind == TileKind::U2K16Min;
    const int64_t step = min && !nibbles ? 32 : 16;
    for (int64_t g = 0; g < kSuper / f.act.group; ++g) {
      const auto scale = static_cast<uint8_t>(u.sub[static_cast<size_t>(g)]);
      const auto minimum = static_cast<uint8_t>(u.sub_min[static_cast<size_t>(g)]);
      at[g * step + lane] = nibbles ? static_cast<uint8_t>(scale | minimum << 4) : scale;
      if (min && !nibbles) at[g * step + 16 + lane] = minimum;
    }
  } else if (f.kind == TileKind::T4F32Zero) {
    std::memcpy(scales + block * 64 + 4 * lane, &u.scale, 4);
  } else {
    uint8_t* at = scales + block * (min ? 64 : 32);
    put16(at, lane, u.half.d);
    if (min) put16(at + 32, lane, u.half.m);
  }
}

void store_values(const Format& f, const uint8_t* v, int64_t block, int64_t lane, uint8_t* quants) {
  // A word is the four columns of a group; no value has bits to carry into its neighbour.
  std::array<uint32_t, 8> word;
  std::memcpy(word.data(), v, sizeof word);
  uint8_t* at = quants + block * 64 * f.bits + 4 * lane;
  const auto put = [&](size_t vector, uint32_t bytes) { std::memcpy(at + 64 * vector, &bytes, 4); };
  switch (f.bits) {
    case 2:
      for (size_t i = 0; i < 2; ++i)
        put(i, word[4 * i] | word[4 * i + 1] << 2 | word[4 * i + 2] << 4 | word[4 * i + 3] << 6);
      break;
    case 3: {
      constexpr uint32_t kLow = 0x03030303u, kHigh = 0x04040404u;
      for (size_t i = 0; i < 2; ++i) put(i, word[2 * i] | word[2 * i + 1] << 3 | (word[6 + i] & kLow) << 6);
      put(2, word[4] | word[5] << 3 | (word[6] & kHigh) << 4 | (word[7] & kHigh) << 5);
      break;
    }
    case 4:
      for (size_t i = 0; i < 4; ++i) put(i, word[i] | word[i + 4] << 4);
      break;
    default:
      for (size_t i = 0; i < 8; ++i) put(i, word[i]);
  }
}

// Packs one row of the source into lane `lane` of a zeroed tile.
void pack_row(const Format& f, DType type, const uint8_t* row, int64_t cols, int64_t lane, uint8_t* tile) {
  if (f.bits == 0) {
    const int64_t size = f.kind == TileKind::F32 ? 4 : 2;
    for (int64_t c = 0; c < cols; ++c) {
      // bf16 pairs of columns stay together (vdpbf16ps takes two); the others are column by column.
      const int64_t at = f.kind == TileKind::BF16 ? (c / 2) * 64 + lane * 4 + (c % 2) * 2 : (c * 16 + lane) * size;
      std::memcpy(tile + at, row + c * size, static_cast<size_t>(size));
    }
    return;
  }
  const int64_t elements = block_elements(type);
  const auto bytes = static_cast<int64_t>(block_bytes(type));
  uint8_t* scales = tile + scale_offset(f, cols);
  Unpacked u;
  for (int64_t c = 0; c < cols; c += elements) {
    unpack(type, row + c / elements * bytes, u);
    store_scales(f, u, c / kBlock, lane, scales);
    for (int64_t i = 0; i < elements; i += kBlock) store_values(f, u.value.data() + i, (c + i) / kBlock, lane, tile);
  }
}

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// Whether `restore_row` knows the type.
bool restorable(DType type) {
  return type == DType::F32 || type == DType::F16 || type == DType::BF16 || type == DType::Q8_0 ||
         type == DType::Q4_0 || type == DType::Q4_1;
}

// The stored row that `pack_row` has written into lane `lane` of a tile.
void restore_row(const Format& f, DType type, const uint8_t* tile, int64_t cols, int64_t lane, uint8_t* row) {
  if (f.bits == 0) {
    const int64_t size = f.kind == TileKind::F32 ? 4 : 2;
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t at = f.kind == TileKind::BF16 ? (c / 2) * 64 + lane * 4 + (c % 2) * 2 : (c * 16 + lane) * size;
      std::memcpy(row + c * size, tile + at, static_cast<size_t>(size));
    }
    return;
  }
  const uint8_t* scales = tile + scale_offset(f, cols);
  const int halves = has_min(f.kind) ? 2 : 1;
  for (int64_t b = 0; b < cols / kBlock; ++b, row += block_bytes(type)) {
    for (int h = 0; h < halves; ++h) std::memcpy(row + 2 * h, scales + (b * halves + h) * 32 + 2 * lane, 2);
    uint8_t* values = row + 2 * halves;
    // Four-bit values lie in the file as in the tile: column c beside column c + 16.
    for (int64_t i = 0; i < f.bits; ++i) std::memcpy(values + 4 * i, tile + (b * f.bits + i) * 64 + 4 * lane, 4);
    if (f.bits == 8)
      for (int64_t i = 0; i < kBlock; ++i) values[i] ^= 0x80;
  }
}

}  // namespace

Format format_of(DType type) {
  using enum TileKind;
  const auto int8 = [](int group, int zero) {
    return ActKind{ActKind::Int8, static_cast<uint8_t>(group), static_cast<uint8_t>(zero)};
  };
  switch (type) {
    case DType::Q4_0:
      return {U4F16Zero, int8(32, 8), 4, 8 * 32};
    case DType::Q4_1:
      return {U4F16Min, int8(32, 0), 4, 8 * 64};
    case DType::IQ4_NL:
      return {T4F16Zero, int8(32, 128), 4, 8 * 32, kIq4Table.data()};
    case DType::MXFP4:
      return {T4F32Zero, int8(32, 128), 4, 8 * 64, kE2M1Table.data()};
    case DType::IQ2_XXS:
      return {T3KZero, int8(32, 128), 3, 32 + 8 * 16, kIq2Table.data()};
    case DType::Q8_0:
      return {U8F16Zero, int8(32, 128), 8, 8 * 32};
    case DType::Q5_0:
      return {U7F16Zero, int8(32, 16), 8, 8 * 32};
    case DType::Q5_1:
      return {U8F16Min, int8(32, 0), 8, 8 * 64};
    case DType::Q4_K:
      return {U4KMin, int8(32, 0), 4, 64 + 8 * 32};
    case DType::Q5_K:
      return {U8KMin, int8(32, 0), 8, 64 + 8 * 32};
    case DType::Q6_K:
      return {U8K16Zero, int8(16, 32), 8, 32 + 16 * 16};
    case DType::Q3_K:
      return {U3K16Zero, int8(16, 4), 3, 32 + 16 * 16};
    case DType::Q2_K:
      return {U2K16Min, int8(16, 0), 2, 64 + 16 * 16};
    case DType::BF16:
      return {BF16, {ActKind::BFloat16, 0, 0}, 0, 0};
    case DType::F16:
      return {F16, {ActKind::Float32, 0, 0}, 0, 0};
    case DType::F32:
      return {F32, {ActKind::Float32, 0, 0}, 0, 0};
    default:
      throw Unsupported(std::string("cpu: no kernel for weights of type ") + dtype_name(type));
  }
}

int64_t scale_offset(const Format& f, int64_t cols) {
  return round_up(cols, kBlock) / kBlock * 64 * f.bits;
}

int64_t tile_bytes(const Format& f, int64_t cols) {
  if (f.bits == 0) return round_up(round_up(cols, 2) * kTileRows * (f.kind == TileKind::F32 ? 4 : 2), 64);
  const int64_t blocks = round_up(cols, kBlock) / kBlock;
  // K scales come per 256 columns, and their source types have whole super-blocks only.
  return round_up(scale_offset(f, cols) + (blocks * f.scale_bytes + 7) / 8, 64);
}

// What the kernels read: F32 where activations must not be rounded and the kernels for the stored type do.
DType PackedWeight::packed_type(const MatrixView& part) const {
  return use_ == WeightUse::Precise && part.type != DType::F16 ? DType::F32 : part.type;
}

PackedWeight::PackedWeight(std::span<const MatrixView> parts, WeightUse use, ThreadPool& pool, SlabArena& arena)
    : Weight(0, parts.empty() ? 0 : parts[0].cols), parts_(parts.begin(), parts.end()), use_(use) {
  if (parts.empty()) throw Invalid("load: no matrix given");
  for (const MatrixView& p : parts) {
    if (!p.data || p.rows <= 0 || p.cols <= 0) throw Invalid("load: empty matrix");
    if (p.cols != cols_)
      throw Invalid("load: stacked matrices of " + std::to_string(cols_) + " and " + std::to_string(p.cols) +
                    " columns");
    if (use != WeightUse::Embedding) format_of(p.type);  // throws Unsupported
    if (p.cols % block_elements(p.type) != 0)
      throw Invalid("load: " + std::to_string(p.cols) + " columns are no multiple of the block of " +
                    std::to_string(block_elements(p.type)) + " of " + dtype_name(p.type));
    rows_ += p.rows;
  }
  if (use == WeightUse::SwiGLU && (parts.size() != 2 || parts[0].rows != parts[1].rows))
    throw Invalid("load: SwiGLU takes a gate and an up matrix of equal shape");
  if ((rows_ == 1 || cols_ == 1) && use != WeightUse::SwiGLU) {
    vector_.resize(static_cast<size_t>(rows_ * cols_));
    for (int64_t r = 0; r < rows_; ++r) read_file(r, vector_.data() + r * cols_);
  } else if (use != WeightUse::Embedding) {
    std::call_once(packed_, [&] { pack(&pool, &arena); });
  }
}

const std::vector<Segment>& PackedWeight::segments() const {
  std::call_once(packed_, [&] { pack(nullptr, nullptr); });
  return segments_;
}

void PackedWeight::pack(ThreadPool* pool, SlabArena* arena) const {
  // Neighbours of one type become one segment; gate and up stay apart, their tiles interleaved when they can be.
  struct Source {
    DType type;
    int64_t rows;
  };
  std::vector<Source> sources;
  const bool swiglu = use_ == WeightUse::SwiGLU;
  for (const MatrixView& p : parts_) {
    if (!swiglu && !sources.empty() && sources.back().type == packed_type(p))
      sources.back().rows += p.rows;
    else
      sources.push_back({packed_type(p), p.rows});
  }
  const bool interleave = swiglu && parts_[0].type == parts_[1].type;
  int64_t total = 0, row = 0;
  std::vector<int64_t> offsets;
  for (const Source& s : sources) {
    Segment g;
    g.format = format_of(s.type);
    g.type = s.type;
    g.first_row = row;
    g.rows = s.rows;
    g.tiles = (s.rows + kTileRows - 1) / kTileRows;
    const int64_t bytes = tile_bytes(g.format, cols_);
    g.tile_stride = interleave ? 2 * bytes : bytes;
    g.scales_at = scale_offset(g.format, cols_);
    offsets.push_back(interleave ? (row ? bytes : 0) : total);
    total += g.tiles * bytes;
    row += s.rows;
    const auto act = std::find(acts_.begin(), acts_.end(), g.format.act);
    g.act_index = static_cast<size_t>(act - acts_.begin());
    if (act == acts_.end()) acts_.push_back(g.format.act);
    segments_.push_back(g);
  }
  bytes_ = static_cast<size_t>(total);
  if (arena) {
    memory_ = arena->take(bytes_);
  } else {
    const auto own = std::make_shared<HugeBuffer>(bytes_);
    memory_ = {own, own->data()};
  }
  auto* base = reinterpret_cast<uint8_t*>(memory_.get());
  for (size_t i = 0; i < segments_.size(); ++i) {
    Segment& g = segments_[i];
    uint8_t* data = base + offsets[i];
    g.data = data;
    const DType type = sources[i].type;
    // The stored row, or `widened` with its values.
    const auto source_row = [&](int64_t row, std::vector<float>& widened) {
      int64_t r = row;
      for (const MatrixView& p : parts_) {
        if (r < p.rows && p.type == type)
          return static_cast<const uint8_t*>(p.data) + r * static_cast<int64_t>(row_bytes(type, cols_));
        if (r < p.rows) {
          widened.resize(static_cast<size_t>(cols_));
          read_file(row, widened.data());
          return reinterpret_cast<const uint8_t*>(widened.data());
        }
        r -= p.rows;
      }
      throw Invalid("load: row out of range");
    };
    const auto pack_tiles = [&](int64_t first, int64_t last) {
      std::vector<float> widened;
      for (int64_t t = first; t < last; ++t)
        for (int64_t lane = 0; lane < kTileRows && t * kTileRows + lane < g.rows; ++lane)
          pack_row(g.format, type, source_row(g.first_row + t * kTileRows + lane, widened), cols_, lane,
                   data + t * g.tile_stride);
    };
    if (pool)
      pool->run(g.tiles, 1, pack_tiles);
    else
      pack_tiles(0, g.tiles);
  }
}

void PackedWeight::dequantize(int64_t row, float* out) const {
  if (use_ == WeightUse::TiedHead && vector_.empty())
    for (const Segment& s : segments_) {
      const int64_t at = row - s.first_row;
      if (at < 0 || at >= s.rows || !restorable(s.type)) continue;
      thread_local std::vector<uint8_t> stored;
      stored.resize(row_bytes(s.type, cols_));
      restore_row(s.format, s.type, s.data + at / kTileRows * s.tile_stride, cols_, at % kTileRows, stored.data());
      dequantize_row(s.type, stored.data(), out, cols_);
      return;
    }
  read_file(row, out);
}

void PackedWeight::read_file(int64_t row, float* out) const {
  for (const MatrixView& p : parts_) {
    if (row < p.rows) {
      dequantize_row(p.type,
                     static_cast<const std::byte*>(p.data) + row * static_cast<int64_t>(row_bytes(p.type, cols_)), out,
                     cols_);
      return;
    }
    row -= p.rows;
  }
  throw Invalid("row out of range");
}

const float* PackedWeight::dense() const {
  if (const float* v = vector()) return v;
  std::call_once(widened_, [&] {
    dense_.resize(static_cast<size_t>(rows_ * cols_));
    for (int64_t r = 0; r < rows_; ++r) read_file(r, dense_.data() + r * cols_);
  });
  return dense_.data();
}

const PackedWeight& packed(const Weight& w) {
  const auto* p = dynamic_cast<const PackedWeight*>(&w);
  if (!p) throw Invalid("cpu: a weight of another backend");
  return *p;
}

size_t PackedWeight::resident_bytes() const {
  return bytes_ + vector_.size() * sizeof(float);
}

}  // namespace ds4::cpu
