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

constexpr uint64_t pack(uint32_t generation, uint32_t left) {
  return (uint64_t{generation} << 32) | left;
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

ThreadPool::ThreadPool(int threads) {
  workers_.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
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

bool ThreadPool::take_share(uint32_t generation) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const auto left = static_cast<uint32_t>(ticket);
    if (static_cast<uint32_t>(ticket >> 32) != generation || left == 0) return false;
    const Invoke invoke = invoke_.load(std::memory_order_relaxed);
    void* body = body_.load(std::memory_order_relaxed);
    const uint32_t items = items_.load(std::memory_order_relaxed);
    const uint32_t least = least_.load(std::memory_order_relaxed);
    const auto sharers = static_cast<uint32_t>(threads());
    const uint32_t share = std::min(left, std::max(least, left / (2 * sharers)));
    if (!ticket_.compare_exchange_weak(ticket, pack(generation, left - share), std::memory_order_acq_rel,
                                       std::memory_order_acquire))
      continue;
    const int64_t begin = items - left;
    invoke(body, begin, begin + share);
    if (done_.fetch_add(share, std::memory_order_acq_rel) + share == items) done_.notify_one();
    return true;
  }
}

void ThreadPool::run_parallel(int64_t items, int64_t least, Invoke invoke, void* body) {
  if (items > INT32_MAX) throw Invalid("thread pool: more than 2^31 items");
  invoke_.store(invoke, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  items_.store(static_cast<uint32_t>(items), std::memory_order_relaxed);
  least_.store(static_cast<uint32_t>(std::max<int64_t>(least, 1)), std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  ticket_.store(pack(generation, static_cast<uint32_t>(items)), std::memory_order_release);
  generation_.store(generation, std::memory_order_seq_cst);
  generation_.notify_all();
  while (take_share(generation)) {
  }
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != items;) wait_while_equal(done_, done);
}

void ThreadPool::work() {
  uint32_t seen = 0;
  for (;;) {
    wait_while_equal(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    while (take_share(seen)) {
    }
  }
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace ds4::cpu
