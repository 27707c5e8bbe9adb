// Pages of session state, cut from slabs of huge pages.
//
//   slab:  | pages that were taken once ............ | touched | not in memory yet |
//            taken now, or free (taken again first)    free      free
//
// Memory that nobody wrote yet costs a page fault when it is first written: 0.2 ms for a huge page that the system has
// to clear, several times that where the machine is a guest whose host has to find it. Sessions that decode together
// come to the end of a page together, so a step would pay for all of them. So between steps a pool touches a huge page
// at a time, until every session that holds pages can take one more, and never more than sessions may come to hold.
//
// The memory of an empty slab stays with the pool, and the system may have it back when it is short of memory: then
// taking pages again costs nothing in the usual case.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/memory.h"

namespace ds4::cpu {

// Pages of one size. Thread safe.
class PagePool {
 public:
  explicit PagePool(size_t page_bytes);
  struct Page {
    std::byte* data = nullptr;
    size_t slab = 0;
    std::atomic<int32_t> owners{0};
  };
  size_t page_bytes() const { return page_bytes_; }
  Page* take();  // one owner; throws std::bad_alloc
  void share(Page* page);
  void release(Page* page);
  // For an owner: whether there are others. None can join while the owner's state is being written; that one leaves
  // meanwhile costs a copy.
  static bool shared(const Page* page) { return page->owners.load(std::memory_order_acquire) > 1; }

  // A holder of at most `pages` pages comes, or goes with -pages.
  void expect(int64_t pages);
  // A holder got its first page (1), or gave its last one back (-1).
  void holds(int change);
  // Brings at most one huge page more into memory. Nothing that it does can be seen but in time and memory.
  void touch_ahead() noexcept;

 private:
  struct Slab {
    HugeBuffer memory;
    std::vector<std::unique_ptr<Page>> pages;
    std::vector<Page*> free;  // taken from the back: what was taken before, then the others in ascending order
    size_t taken = 0;         // pages before this one were taken once
    size_t touched = 0;       // bytes before this one are in memory, or were written
  };
  Slab* add_slab();

  size_t page_bytes_;
  size_t pages_per_slab_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  int64_t expected_ = 0, holders_ = 0, in_use_ = 0;
};

// Page pools of a backend, by page size: sessions of one model use the same ones, and later ones those of former ones.
class PagePools {
 public:
  std::shared_ptr<PagePool> get(size_t page_bytes);
  void touch_ahead() noexcept;

 private:
  std::vector<std::shared_ptr<PagePool>> pools_;
};

}  // namespace ds4::cpu
