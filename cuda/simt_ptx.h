// simt_ptx.h: the CPU's side of ptx.cuh, which includes it: the same functions. All scopes are the same here.
#pragma once

#if defined(EP_A2A_HOSTILE)
#include "hostile_memory.h"  // tests/native: the same accesses to a memory that keeps old values
#else
inline uint64_t ld_acquire_sys(const uint64_t* p) {
  simt::point(simt::Point::kFlagLoad);
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint32_t ld_acquire_sys(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline uint64_t ld_relaxed_sys(const uint64_t* p) {
  simt::point(simt::Point::kFlagLoad);
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void st_relaxed_sys(uint64_t* p, uint64_t v) {
  simt::point(simt::Point::kFlagStore);
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void st_release_sys(uint64_t* p, uint64_t v) {
  simt::point(simt::Point::kFlagStore);
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void st_release_sys(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline uint32_t atom_add_acq_rel_gpu(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
// A race detector sees no dependencies.
inline uint32_t atom_add_relaxed_gpu(uint32_t* p, uint32_t v) { return atom_add_acq_rel_gpu(p, v); }
inline void red_min_relaxed_gpu(uint64_t* p, uint64_t v) {
  uint64_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v < old && !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline Vector ld_vector(const void* p) {
  simt::point(simt::Point::kRowLoad);
  return *static_cast<const Vector*>(p);
}
inline void st_vector(void* p, const Vector& v) {
  simt::point(simt::Point::kRowStore);
  *static_cast<Vector*>(p) = v;
}
template <class Word>
Word ld_word(const Word* p) {
  static_assert(sizeof(Word) >= 4, "a word, not a byte of one");
  simt::point(simt::Point::kRowLoad);
  return *p;
}
template <class Word>
void st_word(Word* p, Word v) {
  simt::point(simt::Point::kRowStore);
  *p = v;
}
inline uint64_t ld_state(const uint64_t* p) { return ld_word(p); }
inline void st_byte(uint8_t* p, uint8_t v) {
  simt::point(simt::Point::kRowStore);
  *p = v;
}
inline uint64_t time_ns() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}
inline void pause_waiting(unsigned num_polls, bool may_sleep) { simt::pause(num_polls, may_sleep); }
#endif
struct FlagPair {
  uint64_t first, second;
};
inline FlagPair ld_acquire_sys_pair(const uint64_t* p) { return {ld_acquire_sys(p), ld_acquire_sys(p + 1)}; }
// A bulk load is done when it is issued; a bulk store as late as a GPU may do it, when its thread waits for it.
inline void barrier_init(uint64_t*) {}
inline void barrier_expect_bytes(uint64_t*, uint32_t) {}
inline void barrier_wait(uint64_t*, uint32_t) {}
inline uint64_t evict_first() { return 0; }
inline uint64_t evict_normal() { return 0; }
inline void st_vector(void* p, const Vector& v, uint64_t) { st_vector(p, v); }
inline void bulk_load(void* shared, const void* from, uint32_t num_bytes, uint64_t*, uint64_t) {
  for (uint32_t i = 0; i < num_bytes; i += kVectorBytes) {
    *reinterpret_cast<Vector*>(static_cast<char*>(shared) + i) = ld_vector(static_cast<const char*>(from) + i);
  }
}
inline void bulk_store(void* to, const void* shared, uint32_t num_bytes) {
  simt::self().stores.emplace_back(to, shared, num_bytes);
}
inline void bulk_commit() { simt::self().committed = simt::self().stores.size(); }
inline void bulk_wait_all() {
  simt::Thread& self = simt::self();
  for (size_t s = 0; s < self.committed; ++s) {
    const auto [to, shared, num_bytes] = self.stores[s];
    for (uint32_t i = 0; i < num_bytes; i += kVectorBytes) {
      st_vector(static_cast<char*>(to) + i, *reinterpret_cast<const Vector*>(static_cast<const char*>(shared) + i));
    }
  }
  self.stores.erase(self.stores.begin(), self.stores.begin() + static_cast<ptrdiff_t>(self.committed));
  self.committed = 0;
}
inline void bulk_wait_read() { bulk_wait_all(); }
inline void fence_proxy_async() {}
inline void* shared_memory() { return simt::shared_memory(); }
inline float bits_to_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t float_to_bits(float value) { return std::bit_cast<uint32_t>(value); }
// Contraction is off in the host build, so these are single IEEE operations as on the GPU.
inline float mul_rn(float a, float b) { return a * b; }
inline float add_rn(float a, float b) { return a + b; }
inline float div_rn(float a, float b) { return a / b; }
// Rounded twice here, where one rounding can be a library call: the same bits as on a GPU where the product is exact.
inline float mul_add(float a, float b, float c) { return a * b + c; }
inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0xffff, b & 0xffff), high = std::max(a >> 16, b >> 16);
  return high << 16 | low;
}

template <auto kKernel, class Params>
int launch(unsigned ctas, unsigned threads, size_t shared_bytes, void*, const Params& params) {
  simt::launch<Params>(kKernel, dim3(ctas), dim3(threads), shared_bytes, params);
  return 0;
}
