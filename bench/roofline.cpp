// What this machine can do at most: reads from huge pages, and int8, bf16 and f32 multiply-adds on registers.
//
//   g++ -O3 -march=native -std=c++20 -pthread bench/roofline.cpp -o roofline && ./roofline [threads]
//
// Prints "read GB/s", "int8 Gop/s", "bf16 Gop/s" and "f32 Gop/s", one per line, the best of many short passes (a pass
// that another process disturbed says nothing). Zero: the CPU lacks the instructions.
#include <immintrin.h>
#include <sys/mman.h>

#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The best rate of `work(thread)`, which does `amount` per thread, over `passes` passes of all threads together.
double best_rate(int threads, int passes, double amount, const std::function<void(int)>& work) {
  double best = 0, start = 0;
  std::barrier<> meet(threads);
  std::vector<std::jthread> pool;
  for (int id = 0; id < threads; ++id)
    pool.emplace_back([&, id] {
      for (int pass = 0; pass < passes; ++pass) {
        meet.arrive_and_wait();
        if (id == 0) start = seconds();
        work(id);
        meet.arrive_and_wait();
        if (id == 0) best = std::max(best, amount * threads / (seconds() - start));
      }
    });
  pool.clear();
  return best;
}

void keep(const void* p) {
  asm volatile("" : : "r"(p) : "memory");
}

#if defined(__AVX512F__)
double read_rate(int threads) {
  const size_t bytes = size_t{96} << 20;  // three times a large last-level cache, in all
  // A pass reads one part in a few hundred microseconds, so that some passes are left undisturbed.
  constexpr size_t kParts = 12;
  const size_t share = bytes / static_cast<size_t>(threads) / kParts / 256 * 256;
  std::vector<size_t> turn(static_cast<size_t>(threads));
  auto* memory = static_cast<char*>(aligned_alloc(size_t{2} << 20, bytes));
  madvise(memory, bytes, MADV_HUGEPAGE);
  for (size_t i = 0; i < bytes; i += 64) memory[i] = 1;
  const double rate = best_rate(threads, 600, static_cast<double>(share), [&](int id) {
    const size_t part = turn[static_cast<size_t>(id)]++ % kParts;
    const char* p = memory + (static_cast<size_t>(id) * kParts + part) * share;
    __m512i s[4] = {};
    for (size_t i = 0; i < share; i += 256)
      for (size_t j = 0; j < 4; ++j) {
        _mm_prefetch(p + i + 64 * j + 4096, _MM_HINT_T0);
        s[j] = _mm512_xor_si512(s[j], _mm512_load_si512(p + i + 64 * j));
      }
    keep(s);
  });
  free(memory);
  return rate / 1e9;
}

// Sixteen independent chains; the empty asm keeps the compiler from merging or hoisting them.
template <class Step>
double arithmetic_rate(int threads, double ops_per_step, Step step) {
  constexpr int kSteps = 20000, kChains = 16;
  return best_rate(threads, 300, ops_per_step * kSteps * kChains,
                   [&](int) {
                     __m512i chain[kChains];
#pragma GCC unroll 16
                     for (int c = 0; c < kChains; ++c) chain[c] = _mm512_setzero_si512();
                     for (int i = 0; i < kSteps; ++i)
#pragma GCC unroll 16
                       for (int c = 0; c < kChains; ++c) {
                         step(chain[c]);
                         asm volatile("" : "+v"(chain[c]));
                       }
                     // A copy: the address of `chain` itself would force it into memory.
                     __m512i out[kChains];
#pragma GCC unroll 16
                     for (int c = 0; c < kChains; ++c) out[c] = chain[c];
                     keep(out);
                   }) /
         1e9;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  double read = 0, int8 = 0, bf16 = 0, f32 = 0;
#if defined(__AVX512F__)
  read = read_rate(threads);
  const __m512i bytes = _mm512_set1_epi8(3);
  const __m512 ones = _mm512_set1_ps(1.0001f);
  f32 = arithmetic_rate(
      threads, 32, [&](__m512i& c) { c = _mm512_castps_si512(_mm512_fmadd_ps(ones, ones, _mm512_castsi512_ps(c))); });
#if defined(__AVX512VNNI__)
  int8 = arithmetic_rate(threads, 128, [&](__m512i& c) { c = _mm512_dpbusd_epi32(c, bytes, bytes); });
#endif
#if defined(__AVX512BF16__)
  bf16 = arithmetic_rate(threads, 64, [&](__m512i& c) {
    c = _mm512_castps_si512(
        _mm512_dpbf16_ps(_mm512_castsi512_ps(c), reinterpret_cast<__m512bh>(bytes), reinterpret_cast<__m512bh>(bytes)));
  });
#endif
#endif
  std::printf("read %.1f\nint8 %.0f\nbf16 %.0f\nf32 %.0f\n", read, int8, bf16, f32);
}
