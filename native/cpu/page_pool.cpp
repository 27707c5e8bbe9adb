#include "cpu/page_pool.h"

#include <algorithm>

namespace ds4::cpu {

namespace {

constexpr size_t kSlabBytes = size_t{16} << 20;
constexpr size_t kHuge = size_t{2} << 20, kSmall = size_t{4} << 10;

// Pages per slab: the number that leaves the smallest share of a slab outside of whole huge pages.
size_t best_pages(size_t page_bytes) {
  const auto outside = [&](size_t n) {
    return static_cast<double>(n * page_bytes % kHuge) / static_cast<double>(n * page_bytes);
  };
  size_t best = std::max<size_t>(1, kSlabBytes / 2 / page_bytes);
  if (page_bytes < 16 * kSmall) return best;
  for (size_t n = best + 1; n * page_bytes <= kSlabBytes; ++n)
    if (outside(n) < outside(best)) best = n;
  return best;
}

}  // namespace

PagePool::PagePool(size_t page_bytes) : page_bytes_(page_bytes), pages_per_slab_(best_pages(page_bytes)) {}

PagePool::Slab* PagePool::add_slab() {
  auto fresh = std::make_unique<Slab>();
  fresh->memory = HugeBuffer(page_bytes_ * pages_per_slab_);
  fresh->free.reserve(pages_per_slab_);
  for (size_t i = pages_per_slab_; i-- > 0;) {
    auto page = std::make_unique<Page>();
    page->data = fresh->memory.data() + i * page_bytes_;
    page->slab = slabs_.size();
    fresh->free.push_back(page.get());
    fresh->pages.push_back(std::move(page));
  }
  slabs_.push_back(std::move(fresh));
  return slabs_.back().get();
}

PagePool::Page* PagePool::take() {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(slabs_.begin(), slabs_.end(), [](const auto& s) { return !s->free.empty(); });
  Slab& slab = found != slabs_.end() ? **found : *add_slab();
  Page* page = slab.free.back();
  slab.free.pop_back();
  page->owners = 1;
  slab.taken = std::max(slab.taken, static_cast<size_t>(page->data - slab.memory.data()) / page_bytes_ + 1);
  ++in_use_;
  return page;
}

void PagePool::share(Page* page) {
  const std::lock_guard lock(mutex_);
  ++page->owners;
}

void PagePool::release(Page* page) {
  const std::lock_guard lock(mutex_);
  if (--page->owners > 0) return;
  --in_use_;
  Slab& slab = *slabs_[page->slab];
  slab.free.push_back(page);  // reserved for all pages: cannot throw
  if (slab.free.size() == slab.pages.size()) slab.memory.forget();
}

void PagePool::expect(int64_t pages) {
  const std::lock_guard lock(mutex_);
  expected_ += pages;
}

void PagePool::holds(int change) {
  const std::lock_guard lock(mutex_);
  holders_ += change;
}

void PagePool::touch_ahead() noexcept {
  const std::lock_guard lock(mutex_);
  int64_t wanted = std::min(holders_, expected_ - in_use_);
  Slab* next = nullptr;
  for (const auto& s : slabs_) {
    const size_t ready = std::max(s->taken, s->touched / page_bytes_);
    wanted -= static_cast<int64_t>(s->free.size() - (s->pages.size() - ready));
    if (!next && ready < s->pages.size()) next = s.get();
  }
  if (wanted <= 0) return;
  if (!next) {
    try {
      next = add_slab();
    } catch (const std::bad_alloc&) {
      return;  // whoever needs the page will say so
    }
  }
  const size_t from = std::max(next->touched, next->taken * page_bytes_);
  const size_t to = std::min((from / kHuge + 1) * kHuge, next->memory.size());
  // Zeros are there already. A page of the system that begins before `from` may be in use: it is not written to.
  for (size_t at = (from + kSmall - 1) / kSmall * kSmall; at < to; at += kSmall)
    *const_cast<volatile std::byte*>(next->memory.data() + at) = std::byte{0};
  next->touched = to;
}

std::shared_ptr<PagePool> PagePools::get(size_t page_bytes) {
  for (const auto& pool : pools_)
    if (pool->page_bytes() == page_bytes) return pool;
  pools_.push_back(std::make_shared<PagePool>(page_bytes));
  return pools_.back();
}

void PagePools::touch_ahead() noexcept {
  for (const auto& pool : pools_) pool->touch_ahead();
}

}  // namespace ds4::cpu
