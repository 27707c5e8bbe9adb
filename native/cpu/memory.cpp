#include "cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <new>
#include <string>

namespace ds4::cpu {

namespace {
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kSlab = size_t{32} << 20;
}  // namespace

HugeBuffer::HugeBuffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  const size_t slack = bytes >= kHuge ? kHuge : 0;
  if (bytes > SIZE_MAX - 2 * kHuge) throw std::bad_alloc();
  mapped_ = (bytes + slack + 4095) & ~size_t{4095};
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(mapping_);
  data_ = static_cast<std::byte*>(mapping_) + (slack ? (kHuge - at % kHuge) % kHuge : 0);
#ifdef MADV_HUGEPAGE
  // Advice only: where the kernel refuses, the memory works with small pages.
  if (slack) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

HugeBuffer::~HugeBuffer() {
  if (mapping_) munmap(mapping_, mapped_);
}

void HugeBuffer::forget() noexcept {
#ifdef MADV_FREE
  if (mapping_) madvise(mapping_, mapped_, MADV_FREE);
#endif
}

std::shared_ptr<std::byte> SlabArena::take(size_t bytes) {
  if (bytes >= kSlab / 4) {
    auto own = std::make_shared<HugeBuffer>(bytes);
    return {own, own->data()};
  }
  if (!slab_ || slab_->size() - used_ < bytes) {
    slab_ = std::make_shared<HugeBuffer>(kSlab);
    used_ = 0;
  }
  std::shared_ptr<std::byte> piece(slab_, slab_->data() + used_);
  used_ = std::min(kSlab, used_ + (bytes + 63) / 64 * 64);
  return piece;
}

bool huge_pages_available() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  return line.find("[madvise]") != std::string::npos || line.find("[always]") != std::string::npos;
}

}  // namespace ds4::cpu
