#include <algorithm>
#include <string>

#include "cuda/state.h"
#include "quant/quant.h"

namespace ds4::cuda {
namespace {

size_t pages_for(int64_t ratio, int64_t tokens) {
  return static_cast<size_t>((tokens / ratio + kPageRows - 1) / kPageRows);
}

}  // namespace

DeviceState::DeviceState(const Device& device, std::span<const StateSpec> specs, int64_t capacity)
    : device_(device), capacity_(capacity), specs_(specs.begin(), specs.end()) {
  if (capacity < 1) throw Invalid("state of " + std::to_string(capacity) + " tokens");
  device.enter();
  size_t fixed = 0;
  for (const StateSpec& s : specs_) {
    if (s.heads < 1 || s.width < 1 || s.ratio < 1 || (s.kind != StateKind::Append && s.capacity < 1))
      throw Invalid("state buffer " + s.name + " has an impossible shape");
    if (block_elements(s.type) != 1) throw Unsupported("state buffer " + s.name + " of type " + dtype_name(s.type));
    const size_t bytes = row_bytes(s.type, s.row_elements());
    BufferPlace p{0, static_cast<int64_t>(bytes), s.capacity, -1, static_cast<int32_t>(s.type)};
    if (s.kind == StateKind::Append) {
      auto g = std::find_if(groups_.begin(), groups_.end(), [&](const Group& x) { return x.ratio == s.ratio; });
      if (g == groups_.end()) {
        if (groups_.size() == kGroups) throw Unsupported("state buffer " + s.name + ": a fourth ratio");
        groups_.push_back({.ratio = s.ratio});
        g = groups_.end() - 1;
      }
      p.group = static_cast<int32_t>(g - groups_.begin());
      p.offset = static_cast<int64_t>(g->page_bytes);
      g->page_bytes += (bytes * kPageRows + 255) / 256 * 256;
    } else {
      p.offset = static_cast<int64_t>(fixed);
      fixed += (bytes * static_cast<size_t>(s.capacity) + 255) / 256 * 256;
    }
    places_.push_back(p);
  }
  int64_t entries = 0;
  for (Group& g : groups_) {
    g.table = entries;
    entries += static_cast<int64_t>(pages_for(g.ratio, capacity));
    g.pages.reserve(pages_for(g.ratio, capacity));
  }
  fixed_ = DeviceBuffer(device, fixed, DeviceBuffer::Pooled);
  table_ =
      DeviceBuffer(device, static_cast<size_t>(std::max<int64_t>(1, entries)) * sizeof(char*), DeviceBuffer::Pooled);
  if (fixed > 0) DS4_CUDA(cudaMemsetAsync(fixed_.as(), 0, fixed, device.stream()));
}

std::shared_ptr<DeviceBuffer> DeviceState::new_page(const Group& g) const {
  return std::make_shared<DeviceBuffer>(device_, g.page_bytes, DeviceBuffer::Pooled);
}

void DeviceState::publish(const Group& g, size_t first) {
  if (first >= g.pages.size()) return;
  std::vector<char*> addresses;
  for (size_t i = first; i < g.pages.size(); ++i) addresses.push_back(g.pages[i]->as<char>());
  // Pageable memory: the copy has read it when the call returns.
  DS4_CUDA(cudaMemcpyAsync(table_.as<char*>() + g.table + static_cast<int64_t>(first), addresses.data(),
                           addresses.size() * sizeof(char*), cudaMemcpyHostToDevice, device_.stream()));
}

void DeviceState::reserve(int64_t tokens) {
  if (tokens > capacity_)
    throw Invalid("reserve " + std::to_string(tokens) + " tokens in a state of " + std::to_string(capacity_));
  device_.enter();
  std::vector<std::vector<std::shared_ptr<DeviceBuffer>>> fresh;
  for (const Group& g : groups_) {
    fresh.emplace_back();
    for (size_t n = g.pages.size(); n < pages_for(g.ratio, tokens); ++n) fresh.back().push_back(new_page(g));
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& g = groups_[i];
    const size_t before = g.pages.size();
    g.pages.insert(g.pages.end(), fresh[i].begin(), fresh[i].end());
    publish(g, before);
  }
}

void DeviceState::truncate(int64_t tokens) {
  if (tokens < 0) throw Invalid("truncate a state to " + std::to_string(tokens) + " tokens");
  device_.enter();
  for (Group& g : groups_) {
    const size_t keep = pages_for(g.ratio, tokens);
    if (keep < g.pages.size()) g.pages.resize(keep);
    // The last page will be written to behind the cut: no longer together with others.
    const bool open = tokens / g.ratio % kPageRows != 0;
    if (!open || g.pages.size() != keep || g.pages.back().use_count() == 1) continue;
    auto own = new_page(g);
    DS4_CUDA(
        cudaMemcpyAsync(own->as(), g.pages.back()->as(), g.page_bytes, cudaMemcpyDeviceToDevice, device_.stream()));
    g.pages.back() = std::move(own);
    publish(g, keep - 1);
  }
  if (tokens == 0 && fixed_.bytes() > 0) DS4_CUDA(cudaMemsetAsync(fixed_.as(), 0, fixed_.bytes(), device_.stream()));
}

void DeviceState::fork_from(const State& other, int64_t tokens) {
  const auto* from = dynamic_cast<const DeviceState*>(&other);
  if (!from || from->groups_.size() != groups_.size() || from->fixed_.bytes() != fixed_.bytes())
    throw Invalid("fork from a state of another kind");
  if (tokens < 0 || tokens > from->capacity_ || tokens > capacity_)
    throw Invalid("fork " + std::to_string(tokens) + " tokens of a state of capacity " +
                  std::to_string(from->capacity_) + " into one of capacity " + std::to_string(capacity_));
  if (from == this) return truncate(tokens);
  device_.enter();
  std::vector<std::vector<std::shared_ptr<DeviceBuffer>>> pages;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const Group& g = from->groups_[i];
    const size_t need = pages_for(g.ratio, tokens);
    if (g.page_bytes != groups_[i].page_bytes || g.pages.size() < need)
      throw Invalid("fork of more tokens than the state holds");
    pages.emplace_back(g.pages.begin(), g.pages.begin() + static_cast<ptrdiff_t>(need));
    if (need > 0 && tokens / g.ratio % kPageRows != 0) {
      auto own = new_page(g);
      DS4_CUDA(cudaMemcpyAsync(own->as(), pages.back().back()->as(), g.page_bytes, cudaMemcpyDeviceToDevice,
                               device_.stream()));
      pages.back().back() = std::move(own);
    }
  }
  if (fixed_.bytes() > 0)
    DS4_CUDA(
        cudaMemcpyAsync(fixed_.as(), from->fixed_.as(), fixed_.bytes(), cudaMemcpyDeviceToDevice, device_.stream()));
  for (size_t i = 0; i < groups_.size(); ++i) {
    groups_[i].pages = std::move(pages[i]);
    publish(groups_[i], 0);
  }
}

template <class Copy>
void DeviceState::pieces(size_t index, int64_t first, int64_t count, size_t bytes, Copy&& copy) const {
  const BufferPlace& p = place(index);
  const StateSpec& s = specs_[index];
  const int64_t rows =
      p.group < 0 ? s.capacity : static_cast<int64_t>(groups_[static_cast<size_t>(p.group)].pages.size()) * kPageRows;
  if (first < 0 || count < 0 || first > rows || count > rows - first)
    throw Invalid("rows " + std::to_string(first) + "+" + std::to_string(count) + " of state buffer " + s.name +
                  ", which holds " + std::to_string(rows));
  if (bytes != static_cast<size_t>(count * p.row_bytes)) throw Invalid("state rows in a buffer of another size");
  device_.enter();
  int64_t done = 0;
  while (done < count) {
    const int64_t row = first + done;
    const int64_t n = p.group < 0 ? count - done : std::min(count - done, kPageRows - row % kPageRows);
    char* at = p.group < 0
                   ? fixed_.as<char>() + p.offset + row * p.row_bytes
                   : groups_[static_cast<size_t>(p.group)].pages[static_cast<size_t>(row / kPageRows)]->as<char>() +
                         p.offset + row % kPageRows * p.row_bytes;
    copy(at, static_cast<size_t>(done * p.row_bytes), static_cast<size_t>(n * p.row_bytes));
    done += n;
  }
  device_.synchronize();
}

void DeviceState::export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const {
  pieces(index, first, count, out.size(), [&](char* at, size_t offset, size_t n) {
    DS4_CUDA(cudaMemcpyAsync(out.data() + offset, at, n, cudaMemcpyDeviceToHost, device_.stream()));
  });
}

void DeviceState::import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) {
  pieces(index, first, count, in.size(), [&](char* at, size_t offset, size_t n) {
    DS4_CUDA(cudaMemcpyAsync(at, in.data() + offset, n, cudaMemcpyHostToDevice, device_.stream()));
  });
}

size_t DeviceState::resident_bytes() const {
  size_t n = fixed_.bytes() + table_.bytes();
  for (const Group& g : groups_) n += g.pages.size() * g.page_bytes;
  return n;
}

const float* DeviceState::readable_row(size_t, int64_t) const {
  throw Invalid("the rows of this state are in device memory");
}
float* DeviceState::writable_row(size_t, int64_t) {
  throw Invalid("the rows of this state are in device memory");
}

const BufferPlace& DeviceState::place(size_t index) const {
  if (index >= places_.size()) throw Invalid("state buffer " + std::to_string(index) + " does not exist");
  return places_[index];
}

DeviceRow DeviceState::row(int32_t position) const {
  DeviceRow r{};
  r.fixed = fixed_.as<char>();
  for (size_t i = 0; i < groups_.size(); ++i) r.pages[i] = table_.as<char*>() + groups_[i].table;
  r.position = position;
  return r;
}

}  // namespace ds4::cuda
