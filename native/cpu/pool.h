// The thread pool of the CPU backend: fork-join over an index range, about a microsecond per call.
//
//   ticket of each thread (a 64-bit atomic)   | generation : 32 | first unit left : 16 | end : 16 |
//
// Every thread has a range of units of its own, so that what it reads is one stream, and claims them from the front;
// with none left it takes from the back of the others'. A claim is one compare-and-swap on a ticket. It can only
// succeed while its generation is the current one and units are left, that is, while the caller still waits: so a
// worker that comes late (preempted, just unparked) can neither run an old job nor hold up a new one, and the caller
// waits for nobody who has not claimed a share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace ds4::cpu {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(count_); }

  // Calls body(begin, end) for disjoint ranges that cover [0, items), on the caller and the workers; returns when all
  // are done. Shares shrink as items run out, so that one slow core does not hold the rest. `body` must not throw.
  // `least` is the smallest range worth handing out; with items <= least the caller runs it alone.
  template <class Body>
  void run(int64_t items, int64_t least, Body&& body) {
    if (items <= 0) return;
    if (count_ == 1 || items <= least) {
      body(int64_t{0}, items);
      return;
    }
    run_parallel(
        items, least, [](void* b, int64_t i, int64_t j) { (*static_cast<std::decay_t<Body>*>(b))(i, j); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Invoke = void (*)(void*, int64_t, int64_t);
  void run_parallel(int64_t items, int64_t least, Invoke invoke, void* body);
  void work(size_t self);
  bool take_share(size_t self, size_t owner, uint32_t generation);
  void take_all(size_t self, uint32_t generation);

  // Each on its own cache line: tickets are contended, the job is read, `done_` is spun on by the caller.
  struct alignas(64) Ticket {
    std::atomic<uint64_t> value{0};
  };
  const size_t count_;  // threads, the caller among them
  std::unique_ptr<Ticket[]> tickets_;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<Invoke> invoke_{nullptr};
  std::atomic<void*> body_{nullptr};
  std::atomic<uint32_t> items_{0};
  std::atomic<uint32_t> unit_{1};  // items per unit
  std::atomic<bool> stop_{false};
  std::vector<std::jthread> workers_;
};

// Cores that this process may use.
int usable_cores();

}  // namespace ds4::cpu
