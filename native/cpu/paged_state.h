// Session state in pages: grows with use, forks share full pages.
//
// Append buffers with the same `ratio` form a group, and so do Ring buffers with the same capacity. A page of the group
// holds some rows of each of its buffers, 64 where the attention kernels read it (f16 Append), else 8:
//
//   page:  | buffer 0: head 0, head 1, ... | buffer 1: ... | ...
//
//   keys (f16 buffers named "k.*"), per head:  [4 tiles][width][16 rows] f16, so that 16 scores are one vector
//   other f16 Append buffers, per head:        [64 rows][width rounded up to 16] f16
//   all others:                                [rows][heads][width]
//
// A state of n tokens has pages for n tokens, and for no more than the capacity of a ring. Pages are counted: fork_from
// shares them all, and a shared page is copied before it is written, so that a fork that is only saved copies nothing.
// Recurrent and Counter buffers are plain arrays.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/page_pool.h"
#include "ops.h"

namespace ds4::cpu {

class PagedState final : public State {
 public:
  PagedState(std::span<const StateSpec> specs, int64_t capacity, PagePools& pools);
  ~PagedState() override;
  PagedState(const PagedState&) = delete;
  PagedState& operator=(const PagedState&) = delete;

  int64_t capacity() const override { return capacity_; }
  void reserve(int64_t tokens) override;
  void truncate(int64_t tokens) override;
  void fork_from(const State& other, int64_t tokens) override;
  void export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const override;
  void import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) override;
  size_t resident_bytes() const override;

  const float* readable_row(size_t index, int64_t row) const override;
  float* writable_row(size_t index, int64_t row) override;

  // For the kernels: an f16 Append buffer of ratio 1 with this shape, laid out as keys or not. Throws Invalid.
  void check_buffer(size_t index, bool keys, int64_t heads, int64_t width) const;
  // Row `row` of buffer `index` is about to be written: its page exists and belongs to this state alone.
  // Throws Invalid beyond the capacity, std::bad_alloc.
  void prepare_write(size_t index, int64_t row);
  // Start of one head's rows in page `page`; null when the page does not exist.
  uint16_t* head_page(size_t index, int64_t page, int64_t head) const;

 private:
  struct Buffer {
    StateSpec spec;
    bool paged = false;     // Append, Ring
    size_t group = 0;       // paged
    size_t offset = 0;      // paged: in the page
    size_t head_bytes = 0;  // paged: of one head in the page
    int64_t padded = 0;     // paged: width in memory
    bool keys = false;
    std::vector<std::byte> fixed;  // other kinds
  };
  struct Group {
    int64_t ratio = 1;     // Append: tokens per row
    int64_t capacity = 0;  // Ring: rows; 0: Append
    int shift = 0;         // a page has 1 << shift rows
    size_t page_bytes = 0;
    int64_t rows_for(int64_t tokens) const {
      return capacity ? std::min(tokens, capacity) : (tokens + ratio - 1) / ratio;
    }
    size_t pages_for(int64_t rows) const { return static_cast<size_t>((rows + (int64_t{1} << shift) - 1) >> shift); }
    std::shared_ptr<PagePool> pool;
    std::vector<PagePool::Page*> pages;
  };
  const Buffer& buffer(size_t index) const;
  void own(Group& group, size_t page);
  void resize(Group& group, size_t pages);
  // Copies rows between the page layout and the canonical one.
  template <bool kExport, class Bytes>
  void copy_rows(const Buffer& b, int64_t first, int64_t count, Bytes* data) const;

  int64_t capacity_;
  std::vector<Buffer> buffers_;
  std::vector<Group> groups_;
};

size_t element_bytes(DType type);  // of a state payload; throws Unsupported for block types

}  // namespace ds4::cpu
