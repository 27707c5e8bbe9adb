#include "cpu/attention.h"

#include <algorithm>
#include <numbers>

namespace ds4::cpu {

namespace {

// Query vectors that share the keys and values of a page while it is in the first-level cache. More take more memory
// for their scores (1 KiB each) than they save in conversions.
constexpr int64_t kVectors = 48;

// Memory kept from call to call; aligned, since vector loads that straddle cache lines take twice as long.
class FloatBuffer {
 public:
  float* at_least(int64_t n) {
    if (static_cast<int64_t>(memory_.size()) < n + 16) memory_.resize(static_cast<size_t>(n + 16));
    const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(float) % 16);
    return memory_.data() + (16 - past) % 16;
  }

 private:
  std::vector<float> memory_;
};

}  // namespace

const PagedState& paged(const State* state) {
  const auto* p = dynamic_cast<const PagedState*>(state);
  if (!p) throw Invalid("cpu: a state of another backend");
  return *p;
}

void Attention::cut(std::span<const RowRef> rows, const Shape& s) {
  blocks_.clear();
  const int64_t most = std::max<int64_t>(1, kVectors / s.group);
  const auto n = static_cast<int64_t>(rows.size());
  const State* checked = nullptr;
  for (int64_t t = 0; t < n;) {
    const RowRef& first = rows[static_cast<size_t>(t)];
    if (first.state != checked) {
      const PagedState& state = paged(first.state);
      state.check_buffer(s.kv.k, true, s.kv_heads, s.dim);
      state.check_buffer(s.kv.v, false, s.kv_heads, s.dim);
      checked = first.state;
    }
    if (first.position < 0) throw Invalid("attention: position " + std::to_string(first.position));
    Block b;
    b.state = static_cast<const PagedState*>(first.state);
    b.row = t;
    b.position = first.position;
    while (t < n && b.rows < most && rows[static_cast<size_t>(t)].state == first.state &&
           rows[static_cast<size_t>(t)].position == first.position + b.rows)
      ++t, ++b.rows;
    const int64_t last = b.position + b.rows - 1;
    if (!b.state->head_page(s.kv.k, last / kPageRows, 0))
      throw Invalid("attention: position " + std::to_string(last) + " is not in the state");
    b.segments = last / kSegment + 1;
    b.first_part = blocks_.empty() ? 0 : blocks_.back().first_part + blocks_.back().segments * s.kv_heads;
    blocks_.push_back(b);
  }
}

// Queries of a block and head times the scale and log2 e, [rows * group][dim], in this thread's memory.
const float* Attention::queries(const Shape& s, const Block& b, int64_t head) const {
  thread_local FloatBuffer memory;
  const int64_t row_floats = s.group * s.dim;
  float* q = memory.at_least(b.rows * row_floats);
  for (int64_t r = 0; r < b.rows; ++r)
    kernels_.scale(s.q.data + (b.row + r) * s.q.stride + head * row_floats, s.scale * std::numbers::log2e_v<float>,
                   row_floats, q + r * row_floats);
  return q;
}

void Attention::segment(const Shape& s, const Block& b, int64_t head, int64_t index, const float* q, Partial to,
                        const Block* next, int64_t next_head) const {
  thread_local FloatBuffer memory;
  const int64_t vectors = b.rows * s.group;
  float* page = memory.at_least(kPageRows * s.padded + vectors * (kSegment + 1));
  float* work = page + kPageRows * s.padded;
  auto* limit = reinterpret_cast<int32_t*>(work + vectors * kSegment);
  const int64_t base = index * kSegment;
  // Rows before the segment see none of it; they come first.
  const int64_t skip = std::clamp<int64_t>(base - b.position, 0, b.rows);
  const int64_t n = (b.rows - skip) * s.group;
  for (int64_t r = skip; r < b.rows; ++r) {
    const auto visible = static_cast<int32_t>(std::min(b.position + r + 1 - base, kSegment));
    std::fill_n(limit + (r - skip) * s.group, s.group, visible);
  }
  // While a page's values are read the keys come that are needed as many pages later as a segment has, or the whole
  // row.
  constexpr int64_t kPages = kSegment / kPageRows;
  const uint16_t *keys[kPages] = {}, *values[kPages] = {}, *next_keys[kPages] = {};
  const int64_t first_page = base / kPageRows, last_page = (b.position + b.rows - 1) / kPageRows;
  for (int64_t p = 0; p < kPages; ++p) {
    const int64_t at = first_page + p, later = at + std::min(kPages, last_page + 1);
    if (at <= last_page) {
      keys[p] = b.state->head_page(s.kv.k, at, head);
      values[p] = b.state->head_page(s.kv.v, at, head);
    }
    if (later <= last_page)
      next_keys[p] = b.state->head_page(s.kv.k, later, head);
    else if (next)
      next_keys[p] = next->state->head_page(s.kv.k, later - last_page - 1, next_head);
  }
  AttentionArgs a;
  a.q = q + skip * s.group * s.dim;
  a.n = n;
  a.limit = limit;
  a.keys = keys;
  a.values = values;
  a.next_keys = next_keys;
  a.dim = s.dim;
  a.padded = s.padded;
  const int64_t at = skip * s.group;
  a.max = to.max + at;
  a.sum = to.sum + at * 16;
  a.acc = to.acc + at * s.padded;
  a.work = work;
  a.page = page;
  kernels_.attend(a);
}

void Attention::fold(const Shape& s, const Block& b, int64_t index, Partial into, Partial from) const {
  const int64_t skip = std::clamp<int64_t>(index * kSegment - b.position, 0, b.rows);
  for (int64_t v = skip * s.group; v < b.rows * s.group; ++v)
    kernels_.merge(into.max + v, into.sum + 16 * v, into.acc + v * s.padded, from.max[v], from.sum + 16 * v,
                   from.acc + v * s.padded, s.padded);
}

void Attention::write(const Shape& s, const Block& b, int64_t head, Partial from) const {
  for (int64_t r = 0; r < b.rows; ++r)
    for (int64_t g = 0; g < s.group; ++g) {
      const int64_t v = r * s.group + g;
      kernels_.finish(from.sum + 16 * v, from.acc + v * s.padded, s.dim,
                      s.out.data + (b.row + r) * s.out.stride + (head * s.group + g) * s.dim);
    }
}

void Attention::run(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads,
                    int64_t head_dim, float scale, Tensor out) {
  const Shape s{q, out, kv, kv_heads, q_heads / kv_heads, head_dim, (head_dim + 15) / 16 * 16, scale};
  cut(rows, s);
  if (blocks_.empty()) return;
  const auto blocks = static_cast<int64_t>(blocks_.size());
  if (blocks * kv_heads >= 4 * pool_.threads()) {
    // Enough to share by row block and head: a thread walks the segments of its block.
    pool_.run(blocks * kv_heads, 1, [&](int64_t first, int64_t last) {
      thread_local FloatBuffer memory;
      for (int64_t i = first; i < last; ++i) {
        const Block& b = blocks_[static_cast<size_t>(i / kv_heads)];
        const int64_t vectors = b.rows * s.group, floats = partial_floats(s, vectors);
        float* at = memory.at_least(2 * floats);
        const Partial all = partial(s, at, vectors), part = partial(s, at + floats, vectors);
        const float* scaled = queries(s, b, i % kv_heads);
        // Shares are short, and what follows one is mostly the same thread's next one.
        const Block* next = i + 1 < blocks * kv_heads ? &blocks_[static_cast<size_t>((i + 1) / kv_heads)] : nullptr;
        segment(s, b, i % kv_heads, 0, scaled, all, next, (i + 1) % kv_heads);
        for (int64_t index = 1; index < b.segments; ++index) {
          segment(s, b, i % kv_heads, index, scaled, part, next, (i + 1) % kv_heads);
          fold(s, b, index, all, part);
        }
        write(s, b, i % kv_heads, all);
      }
    });
    return;
  }
  // Few rows over many keys: threads share the segments too, then the caller merges them.
  int64_t widest = 0;
  for (const Block& b : blocks_) widest = std::max(widest, b.rows * s.group);
  const int64_t floats = partial_floats(s, widest);
  const int64_t parts = blocks_.back().first_part + blocks_.back().segments * kv_heads;
  if (static_cast<int64_t>(parts_.size()) < parts * floats) parts_.resize(static_cast<size_t>(parts * floats));
  const auto part_of = [&](const Block& b, int64_t head, int64_t index) {
    return partial(s, parts_.data() + (b.first_part + head * b.segments + index) * floats, b.rows * s.group);
  };
  pool_.run(parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto after = std::upper_bound(blocks_.begin(), blocks_.end(), i,
                                          [](int64_t at, const Block& b) { return at < b.first_part; });
      const Block& b = *(after - 1);
      const int64_t head = (i - b.first_part) / b.segments, index = (i - b.first_part) % b.segments;
      segment(s, b, head, index, queries(s, b, head), part_of(b, head, index));
    }
  });
  for (const Block& b : blocks_)
    for (int64_t head = 0; head < kv_heads; ++head) {
      const Partial all = part_of(b, head, 0);
      for (int64_t index = 1; index < b.segments; ++index) fold(s, b, index, all, part_of(b, head, index));
      write(s, b, head, all);
    }
}

}  // namespace ds4::cpu
