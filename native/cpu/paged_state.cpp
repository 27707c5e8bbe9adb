#include "cpu/paged_state.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "quant/quant.h"

namespace ds4::cpu {

namespace {

// Rows of a page: of f16 Append buffers, which the attention kernels take by pages, and of all others, where small
// pages keep short sessions small.
constexpr int kAttentionShift = std::countr_zero(static_cast<uint64_t>(kPageRows));
constexpr int kSmallShift = 3;

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

size_t element_bytes(DType type) {
  if (block_elements(type) != 1) throw Unsupported(std::string("state: element type ") + dtype_name(type));
  return block_bytes(type);
}

PagedState::PagedState(std::span<const StateSpec> specs, int64_t capacity, PagePools& pools) : capacity_(capacity) {
  if (capacity <= 0) throw Invalid("state: capacity " + std::to_string(capacity) + " tokens");
  for (const StateSpec& s : specs) {
    if (s.heads <= 0 || s.width <= 0 || s.ratio <= 0)
      throw Invalid("state buffer " + s.name + ": heads, width and ratio must be positive");
    Buffer b;
    b.spec = s;
    const size_t element = element_bytes(s.type);
    if (s.kind != StateKind::Append && s.capacity <= 0)
      throw Invalid("state buffer " + s.name + ": a fixed buffer needs a capacity");
    if (s.kind == StateKind::Append || s.kind == StateKind::Ring) {
      const bool half = s.kind == StateKind::Append && s.type == DType::F16;
      b.paged = true;
      b.keys = half && s.name.starts_with("k.");
      b.padded = b.keys || !half ? s.width : (s.width + 15) / 16 * 16;
      Group shape;
      if (s.kind == StateKind::Append)
        shape.ratio = s.ratio;
      else
        shape.capacity = s.capacity;
      shape.shift = half ? kAttentionShift : kSmallShift;
      const auto same = [&](const Group& g) {
        return g.ratio == shape.ratio && g.capacity == shape.capacity && g.shift == shape.shift;
      };
      auto group = std::find_if(groups_.begin(), groups_.end(), same);
      if (group == groups_.end()) group = groups_.insert(group, shape);
      b.group = static_cast<size_t>(group - groups_.begin());
      b.offset = group->page_bytes;
      b.head_bytes = (static_cast<size_t>(b.padded) * element) << shape.shift;
      group->page_bytes = round_up(group->page_bytes + b.head_bytes * static_cast<size_t>(s.heads), 64);
    } else {
      b.fixed.resize(static_cast<size_t>(s.capacity * s.row_elements()) * element);
    }
    buffers_.push_back(std::move(b));
  }
  for (Group& g : groups_) {
    g.pool = pools.get(g.page_bytes);
    // Room for every page now, so that growing cannot fail between two buffers.
    g.pages.reserve(g.pages_for(g.rows_for(capacity)));
  }
  for (Group& g : groups_) g.pool->expect(static_cast<int64_t>(g.pages_for(g.rows_for(capacity))));
}

PagedState::~PagedState() {
  for (Group& g : groups_) {
    resize(g, 0);
    g.pool->expect(-static_cast<int64_t>(g.pages_for(g.rows_for(capacity_))));
  }
}

void PagedState::resize(Group& g, size_t pages) {
  while (g.pages.size() > pages) {
    g.pool->release(g.pages.back());
    g.pages.pop_back();
    if (g.pages.empty()) g.pool->holds(-1);
  }
  while (g.pages.size() < pages) {
    g.pages.push_back(g.pool->take());
    if (g.pages.size() == 1) g.pool->holds(1);
    // Rows of a ring that nobody wrote are zeros.
    if (g.capacity) std::memset(g.pages.back()->data, 0, g.page_bytes);
  }
}

void PagedState::reserve(int64_t tokens) {
  if (tokens < 0 || tokens > capacity_)
    throw Invalid("state: " + std::to_string(tokens) + " tokens asked, the capacity is " + std::to_string(capacity_));
  std::vector<size_t> before;
  for (const Group& g : groups_) before.push_back(g.pages.size());
  try {
    for (Group& g : groups_) {
      const size_t pages = g.pages_for(g.rows_for(tokens));
      if (pages > g.pages.size()) resize(g, pages);
    }
  } catch (...) {
    for (size_t i = 0; i < groups_.size(); ++i) resize(groups_[i], before[i]);
    throw;
  }
}

void PagedState::truncate(int64_t tokens) {
  if (tokens < 0) throw Invalid("state: truncate to " + std::to_string(tokens) + " tokens");
  for (Group& g : groups_) {
    const size_t pages = g.pages_for(g.rows_for(tokens));
    if (pages < g.pages.size()) resize(g, pages);
  }
}

void PagedState::fork_from(const State& other, int64_t tokens) {
  const auto* from = dynamic_cast<const PagedState*>(&other);
  const auto same = [](const Buffer& a, const Buffer& b) {
    return a.spec.name == b.spec.name && a.spec.kind == b.spec.kind && a.spec.type == b.spec.type &&
           a.spec.heads == b.spec.heads && a.spec.width == b.spec.width && a.spec.ratio == b.spec.ratio &&
           a.spec.capacity == b.spec.capacity;
  };
  if (!from || !std::equal(buffers_.begin(), buffers_.end(), from->buffers_.begin(), from->buffers_.end(), same))
    throw Invalid("state: fork from a state of another kind");
  if (tokens < 0 || tokens > capacity_)
    throw Invalid("state: fork of " + std::to_string(tokens) + " tokens, the capacity is " + std::to_string(capacity_));
  if (from == this) return truncate(tokens);
  std::vector<std::vector<PagePool::Page*>> pages(groups_.size());
  std::vector<std::vector<std::byte>> fixed;
  try {
    for (size_t i = 0; i < groups_.size(); ++i) {
      const Group& g = from->groups_[i];
      const int64_t rows = g.rows_for(tokens);
      const size_t all = g.pages_for(rows);
      if (all > g.pages.size()) throw Invalid("state: fork of more tokens than the other state holds");
      pages[i].reserve(std::max(all, groups_[i].pages.capacity()));
      for (size_t p = 0; p < all; ++p) {
        // States of two backends have different pools; then every page is a copy.
        if (groups_[i].pool == g.pool) {
          g.pool->share(g.pages[p]);
          pages[i].push_back(g.pages[p]);
        } else {
          pages[i].push_back(groups_[i].pool->take());
          std::memcpy(pages[i].back()->data, g.pages[p]->data, g.page_bytes);
        }
      }
    }
    for (const Buffer& b : from->buffers_) fixed.push_back(b.fixed);
  } catch (...) {
    for (size_t i = 0; i < groups_.size(); ++i)
      for (PagePool::Page* p : pages[i]) groups_[i].pool->release(p);
    throw;
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& g = groups_[i];
    g.pages.swap(pages[i]);
    g.pool->holds(static_cast<int>(!g.pages.empty()) - static_cast<int>(!pages[i].empty()));
    for (PagePool::Page* p : pages[i]) groups_[i].pool->release(p);
  }
  for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].fixed.swap(fixed[i]);
}

const PagedState::Buffer& PagedState::buffer(size_t index) const {
  if (index >= buffers_.size())
    throw Invalid("state: buffer " + std::to_string(index) + " of " + std::to_string(buffers_.size()));
  return buffers_[index];
}

void PagedState::own(Group& g, size_t page) {
  PagePool::Page*& at = g.pages[page];
  if (!PagePool::shared(at)) return;
  PagePool::Page* copy = g.pool->take();
  std::memcpy(copy->data, at->data, g.page_bytes);
  g.pool->release(at);
  at = copy;
}

template <bool kExport, class Bytes>
void PagedState::copy_rows(const Buffer& b, int64_t first, int64_t count, Bytes* data) const {
  const size_t element = element_bytes(b.spec.type);
  const Group& g = groups_[b.group];
  const auto copy = [](std::byte* memory, Bytes* payload, size_t n) {
    if constexpr (kExport)
      std::memcpy(payload, memory, n);
    else
      std::memcpy(memory, payload, n);
  };
  for (int64_t r = first; r < first + count; ++r) {
    std::byte* page = g.pages[static_cast<size_t>(r >> g.shift)]->data + b.offset;
    const int64_t in = r & ((int64_t{1} << g.shift) - 1);
    for (int64_t h = 0; h < b.spec.heads; ++h) {
      std::byte* head = page + static_cast<size_t>(h) * b.head_bytes;
      if (b.keys) {
        std::byte* lane = head + static_cast<size_t>((in / 16 * b.spec.width * 16 + in % 16) * 2);
        for (int64_t d = 0; d < b.spec.width; ++d, data += 2) copy(lane + d * 32, data, 2);
      } else {
        const size_t n = static_cast<size_t>(b.spec.width) * element;
        copy(head + static_cast<size_t>(in * b.padded) * element, data, n);
        data += n;
      }
    }
  }
}

void PagedState::export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const {
  const Buffer& b = buffer(index);
  const size_t row = static_cast<size_t>(b.spec.row_elements()) * element_bytes(b.spec.type);
  int64_t rows = b.spec.capacity;
  if (b.paged) {
    const Group& g = groups_[b.group];
    const int64_t held = static_cast<int64_t>(g.pages.size()) << g.shift;
    rows = g.capacity ? std::min(held, g.capacity) : held;
  }
  if (first < 0 || count < 0 || first > rows - count)
    throw Invalid("state: export of rows [" + std::to_string(first) + ", +" + std::to_string(count) + ") of " +
                  b.spec.name + ", which holds " + std::to_string(rows));
  if (out.size() != static_cast<size_t>(count) * row)
    throw Invalid("state: export of " + std::to_string(count) + " rows of " + b.spec.name + " into " +
                  std::to_string(out.size()) + " bytes");
  if (b.paged)
    copy_rows<true>(b, first, count, out.data());
  else
    std::memcpy(out.data(), b.fixed.data() + static_cast<size_t>(first) * row, out.size());
}

void PagedState::import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) {
  const Buffer& b = buffer(index);
  const size_t row = static_cast<size_t>(b.spec.row_elements()) * element_bytes(b.spec.type);
  const int64_t rows = b.spec.kind == StateKind::Append ? groups_[b.group].rows_for(capacity_) : b.spec.capacity;
  if (first < 0 || count < 0 || first > rows - count)
    throw Invalid("state: import of rows [" + std::to_string(first) + ", +" + std::to_string(count) + ") into " +
                  b.spec.name + ", which has room for " + std::to_string(rows));
  if (in.size() != static_cast<size_t>(count) * row)
    throw Invalid("state: import of " + std::to_string(count) + " rows of " + b.spec.name + " from " +
                  std::to_string(in.size()) + " bytes");
  if (count == 0) return;
  if (!b.paged) {
    std::memcpy(buffers_[index].fixed.data() + static_cast<size_t>(first) * row, in.data(), in.size());
    return;
  }
  Group& g = groups_[b.group];
  if (g.pages_for(first + count) > g.pages.size()) resize(g, g.pages_for(first + count));
  for (int64_t p = first >> g.shift; p <= (first + count - 1) >> g.shift; ++p) own(g, static_cast<size_t>(p));
  copy_rows<false>(b, first, count, in.data());
}

size_t PagedState::resident_bytes() const {
  size_t n = 0;
  for (const Group& g : groups_) n += g.pages.size() * g.page_bytes;
  for (const Buffer& b : buffers_) n += b.fixed.size();
  return n;
}

void PagedState::check_buffer(size_t index, bool keys, int64_t heads, int64_t width) const {
  const Buffer& b = buffer(index);
  if (b.spec.kind != StateKind::Append || b.spec.type != DType::F16 || b.spec.ratio != 1)
    throw Invalid("attention: state buffer " + b.spec.name + " is not an f16 append buffer of ratio 1");
  if (b.keys != keys)
    throw Invalid("attention: state buffer " + b.spec.name + (keys ? " holds keys" : " holds values") +
                  ", and names of keys (and of them only) begin with \"k.\"");
  if (b.spec.heads != heads || b.spec.width != width)
    throw Invalid("attention: state buffer " + b.spec.name + " has " + std::to_string(b.spec.heads) + " heads of " +
                  std::to_string(b.spec.width) + ", not " + std::to_string(heads) + " of " + std::to_string(width));
}

void PagedState::prepare_write(size_t index, int64_t row) {
  Group& g = groups_[buffers_[index].group];
  if (row < 0 || (g.capacity == 0 && row >= capacity_))
    throw Invalid("state: position " + std::to_string(row) + ", the capacity is " + std::to_string(capacity_));
  const auto page = static_cast<size_t>((g.capacity ? row % g.capacity : row) >> g.shift);
  if (page >= g.pages.size()) resize(g, page + 1);
  own(g, page);
}

const float* PagedState::readable_row(size_t index, int64_t row) const {
  const Buffer& b = buffer(index);
  if (b.spec.type != DType::F32 || row < 0) throw Invalid("state buffer " + b.spec.name + " does not hold f32 rows");
  if (!b.paged) return reinterpret_cast<const float*>(b.fixed.data()) + row % b.spec.capacity * b.spec.row_elements();
  const Group& g = groups_[b.group];
  const int64_t at = g.capacity ? row % g.capacity : row;
  const auto page = static_cast<size_t>(at >> g.shift);
  if (b.spec.heads != 1 || page >= g.pages.size())
    throw Invalid("state: row " + std::to_string(row) + " of " + b.spec.name + " is not there");
  const int64_t in = at & ((int64_t{1} << g.shift) - 1);
  return reinterpret_cast<const float*>(g.pages[page]->data + b.offset) + in * b.padded;
}

float* PagedState::writable_row(size_t index, int64_t row) {
  if (buffer(index).paged) prepare_write(index, row);
  return const_cast<float*>(readable_row(index, row));
}

uint16_t* PagedState::head_page(size_t index, int64_t page, int64_t head) const {
  const Buffer& b = buffers_[index];
  const Group& g = groups_[b.group];
  if (static_cast<size_t>(page) >= g.pages.size()) return nullptr;
  return reinterpret_cast<uint16_t*>(g.pages[static_cast<size_t>(page)]->data + b.offset +
                                     static_cast<size_t>(head) * b.head_bytes);
}

}  // namespace ds4::cpu
