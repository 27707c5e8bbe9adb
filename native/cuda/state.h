// A session's buffers in device memory.
//
// Append buffers of one ratio share pages: a page holds 64 rows of each of them. Pages are shared between forked
// sessions; only whole pages of rows that are never rewritten are, so that kernels write without looking.
//
//   group (ratio r):  page table -> page 0: [64 rows of buffer a][64 rows of buffer b] ...
//                                   page 1: ...
//   rings and fixed buffers: one allocation, a buffer behind the other
#pragma once

#include <memory>
#include <vector>

#include "cuda/memory.h"

namespace ds4::cuda {

constexpr int64_t kPageRows = 64;
constexpr int kGroups = 3;  // different ratios in one model

// One token row of a step as kernels see it.
struct DeviceRow {
  char* fixed;
  char* const* pages[kGroups];
  int32_t position;
  int32_t first;  // first row of this session in the step
  int32_t count;  // rows of this session in the step
  int32_t unused;
};

// Where a buffer stands.
struct BufferPlace {
  int64_t offset;  // in a page of its group, or in the fixed memory
  int64_t row_bytes;
  int64_t capacity;  // fixed buffers: rows
  int32_t group;     // < 0: fixed
  int32_t type;      // DType
};

#ifdef __CUDACC__
__device__ inline char* append_row(const DeviceRow& r, const BufferPlace& b, int64_t row) {
  return r.pages[b.group][row / kPageRows] + b.offset + row % kPageRows * b.row_bytes;
}
__device__ inline char* ring_row(const DeviceRow& r, const BufferPlace& b, int64_t position) {
  return r.fixed + b.offset + position % b.capacity * b.row_bytes;
}
#endif

class DeviceState final : public State {
 public:
  DeviceState(const Device& device, std::span<const StateSpec> specs, int64_t capacity);

  int64_t capacity() const override { return capacity_; }
  void reserve(int64_t tokens) override;
  void truncate(int64_t tokens) override;
  void fork_from(const State& other, int64_t tokens) override;
  void export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const override;
  void import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) override;
  size_t resident_bytes() const override;
  const float* readable_row(size_t index, int64_t row) const override;
  float* writable_row(size_t index, int64_t row) override;

  const BufferPlace& place(size_t index) const;
  DeviceRow row(int32_t position) const;

 private:
  struct Group {
    int64_t ratio = 1;
    size_t page_bytes = 0;
    std::vector<std::shared_ptr<DeviceBuffer>> pages;
    int64_t table = 0;  // first entry in the page table
  };
  std::shared_ptr<DeviceBuffer> new_page(const Group& g) const;
  void publish(const Group& g, size_t first);
  // Calls copy(device address, host offset, bytes) for each contiguous piece of the rows.
  template <class Copy>
  void pieces(size_t index, int64_t first, int64_t count, size_t bytes, Copy&& copy) const;

  const Device& device_;
  int64_t capacity_;
  std::vector<StateSpec> specs_;
  std::vector<BufferPlace> places_;
  std::vector<Group> groups_;
  DeviceBuffer fixed_, table_;
};

}  // namespace ds4::cuda
