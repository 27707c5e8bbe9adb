// Anonymous memory in huge pages: weights and KV pages are read in long streams, and 4 KiB pages halve their speed.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace ds4::cpu {

// Owns an anonymous mapping, zero-filled, aligned to 2 MiB when it is at least that large. Move only.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes);  // throws std::bad_alloc
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& o) noexcept { swap(o); }
  HugeBuffer& operator=(HugeBuffer&& o) noexcept {
    HugeBuffer gone(std::move(o));
    swap(gone);
    return *this;
  }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  // The content is no longer needed: until it is written again the system may take the memory back, where it can.
  void forget() noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(HugeBuffer& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
    std::swap(mapping_, o.mapping_);
    std::swap(mapped_, o.mapped_);
  }
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;  // the whole mapping: up to 2 MiB more than what is used, never touched
  size_t mapped_ = 0;
};

// Pieces of anonymous memory that are never given back one by one, taken from shared slabs: a matrix of a small model
// is smaller than a huge page, and weights that are read one after the other lie one after the other. A slab lives as
// long as a piece of it.
class SlabArena {
 public:
  // Zero-filled, aligned to 64 bytes. Throws std::bad_alloc.
  std::shared_ptr<std::byte> take(size_t bytes);

 private:
  std::shared_ptr<HugeBuffer> slab_;
  size_t used_ = 0;
};

// True when the kernel gives transparent huge pages on request (madvise or always).
bool huge_pages_available();

}  // namespace ds4::cpu
