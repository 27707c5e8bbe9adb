#include "cpu/pool.h"

#include <sched.h>

#include <algorithm>

#include "types.h"

namespace ds4::cpu {

namespace {

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// About 20 microseconds: longer than the serial stretch between two operations of a step, shorter than what a
// neighbour on the same core would notice.
constexpr int kSpins = 1200;

constexpr int64_t kMostUnits = 65535;

constexpr uint64_t pack(uint32_t generation, uint64_t first, uint64_t end) {
  return (uint64_t{generation} << 32) | (first << 16) | end;
}

template <class T>
void wait_while_equal(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_cpu();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads)
    : count_(static_cast<size_t>(std::max(threads, 1))), tickets_(std::make_unique<Ticket[]>(count_)) {
  workers_.reserve(count_ - 1);
  try {
    for (size_t i = 1; i < count_; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
}

// Of one's own range an eighth of what is left, from the front, of another's a quarter, from the back: little is held
// by a thread whose core is taken away, and what is claimed one after the other still lies one after the other.
bool ThreadPool::take_share(size_t self, size_t owner, uint32_t generation) {
  std::atomic<uint64_t>& at = tickets_[owner].value;
  uint64_t ticket = at.load(std::memory_order_acquire);
  for (;;) {
    const uint64_t first = (ticket >> 16) & 0xffff, end = ticket & 0xffff;
    if (static_cast<uint32_t>(ticket >> 32) != generation || first == end) return false;
    const Invoke invoke = invoke_.load(std::memory_order_relaxed);
    void* body = body_.load(std::memory_order_relaxed);
    const int64_t items = items_.load(std::memory_order_relaxed);
    const int64_t unit = unit_.load(std::memory_order_relaxed);
    const uint64_t share = self == owner ? (end - first + 7) / 8 : (end - first + 3) / 4;
    const uint64_t from = self == owner ? first : end - share;
    const uint64_t left = self == owner ? pack(generation, first + share, end) : pack(generation, first, from);
    if (!at.compare_exchange_weak(ticket, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    const int64_t begin = static_cast<int64_t>(from) * unit;
    const int64_t stop = std::min(items, static_cast<int64_t>(from + share) * unit);
    invoke(body, begin, stop);
    const auto made = static_cast<uint32_t>(stop - begin);
    if (done_.fetch_add(made, std::memory_order_acq_rel) + made == static_cast<uint32_t>(items)) done_.notify_one();
    return true;
  }
}

void ThreadPool::take_all(size_t self, uint32_t generation) {
  for (size_t i = 0; i < count_; ++i)
    while (take_share(self, (self + i) % count_, generation)) {
    }
}

void ThreadPool::run_parallel(int64_t items, int64_t least, Invoke invoke, void* body) {
  if (items > INT32_MAX) throw Invalid("thread pool: more than 2^31 items");
  const int64_t unit = std::max({int64_t{1}, least, (items + kMostUnits - 1) / kMostUnits});
  const int64_t units = (items + unit - 1) / unit, n = threads();
  invoke_.store(invoke, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  items_.store(static_cast<uint32_t>(items), std::memory_order_relaxed);
  unit_.store(static_cast<uint32_t>(unit), std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  for (int64_t i = 0; i < n; ++i)
    tickets_[static_cast<size_t>(i)].value.store(
        pack(generation, static_cast<uint64_t>(units * i / n), static_cast<uint64_t>(units * (i + 1) / n)),
        std::memory_order_release);
  generation_.store(generation, std::memory_order_seq_cst);
  generation_.notify_all();
  take_all(0, generation);
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != items;) wait_while_equal(done_, done);
}

void ThreadPool::work(size_t self) {
  uint32_t seen = 0;
  for (;;) {
    wait_while_equal(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    take_all(self, seen);
  }
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace ds4::cpu
