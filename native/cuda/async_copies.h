// Copies to shared memory that go on while the threads compute.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ds4::cuda {

// Steps of up to so many rows tell the second cache that they read weights once. With more rows it made them slower,
// experts' weights being read again.
constexpr int kOnceRows = 4;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Barriers that count arriving bytes; `fence_barriers` after the last of a thread's.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Copies `bytes` (a multiple of 16) to shared memory; `barrier` counts their arrival.
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Likewise what is read once (`once`): it leaves the second cache before what small kernels will want again, their code
// and what they leave for each other.
__device__ __forceinline__ uint64_t reading_policy(bool once) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Blocks of threads of one cluster: the address in block `rank` of what stands here at `address`; a store there, whose
// arrival `barrier`, of that block too, counts in bytes. No block may store into one that has not started:
// `cluster_started` at a kernel's beginning, after the barriers' fence, and `wait_cluster` before the first store.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}
__device__ __forceinline__ void store_in(uint32_t to, float v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_in(uint32_t to, float2 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(v.x),
               "f"(v.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_in(uint32_t to, float4 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void cluster_started() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
#else
// Before Hopper nothing copies by itself: the thread that asks for a copy makes it. A barrier is two words, the bytes
// that are still to come (below zero, of a phase that nobody expects yet) and the number of phases that are over.
__device__ __forceinline__ uint32_t* barrier_words(uint32_t barrier) {
  return static_cast<uint32_t*>(__cvta_shared_to_generic(barrier));
}
__device__ __forceinline__ void init_barrier(uint32_t barrier) {
  barrier_words(barrier)[0] = barrier_words(barrier)[1] = 0;
}
__device__ __forceinline__ void fence_barriers() {
  __threadfence_block();
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  uint32_t* words = barrier_words(barrier);
  if (atomicAdd(&words[0], static_cast<uint32_t>(bytes)) + static_cast<uint32_t>(bytes) == 0) atomicAdd(&words[1], 1u);
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  auto* out = static_cast<uint4*>(__cvta_shared_to_generic(to));
  for (int i = 0; i < bytes / 16; ++i) out[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  __threadfence_block();
  expect_bytes(barrier, -bytes);
}
__device__ __forceinline__ uint64_t reading_policy(bool) {
  return 0;
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier, uint64_t) {
  copy_bulk(to, from, bytes, barrier);
}
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  const volatile uint32_t* words = barrier_words(barrier);
  while ((words[1] & 1u) == parity) {
  }
  __threadfence_block();
}
#endif

// Copies of a thread; they have arrived after `wait_for_copies`.
__device__ __forceinline__ void copy_async(void* to, const void* from, std::integral_constant<int, 16>) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}
__device__ __forceinline__ void copy_async(void* to, const void* from, std::integral_constant<int, 4>) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from));
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ds4::cuda
