// ptx.cuh: memory accesses with their order and scope in the name, and what else differs between a GPU and a CPU.
//
// The only file with inline assembly. On a CPU `sys` and `gpu` scope are the same: the C++ atomics of that order.
// Memory that a peer writes is only ever read through these functions, never through a const __restrict__ pointer.
#pragma once

#include "abi.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "simt_host.h"
#endif

struct alignas(16) Vector {  // what one thread moves at once
  uint32_t words[4];
};

#if defined(__CUDACC__)

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
struct FlagPair {
  uint64_t first, second;
};
__device__ __forceinline__ FlagPair ld_acquire_sys_pair(const uint64_t* p) {  // on a multiple of 16 bytes
  FlagPair v;
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.first), "=l"(v.second) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void st_release_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint32_t atom_add_acq_rel_gpu(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
// Orders nothing but what the added value depends on: that was read before.
__device__ __forceinline__ uint32_t atom_add_relaxed_gpu(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ void red_min_relaxed_gpu(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ Vector ld_vector(const void* p) {
  Vector v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_vector(void* p, const Vector& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]),
               "r"(v.words[3])
               : "memory");
}
// Bulk copies between global and shared memory: whole vectors, from and to multiples of 16 bytes. One thread starts a
// load and tells the barrier how many bytes to expect; a store belongs to the thread that issues it, which commits and
// waits. `read`: the shared memory may be written again; `all`: the stores are done, and a release hands them on. Bulk
// copies see what threads wrote to shared memory behind fence_proxy_async and a barrier.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect_bytes(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
}
// What is used once leaves the L2 cache first, so that rows of a round that is larger than it make room in order.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void bulk_load(void* shared, const void* from, uint32_t num_bytes, uint64_t* barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
               "r"(shared_address(shared)), "r"(num_bytes), "l"(evict_first())
               : "memory");
}
__device__ __forceinline__ void st_vector(void* p, const Vector& v, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.words[0]), "r"(v.words[1]),
               "r"(v.words[2]), "r"(v.words[3]), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending = 0>  // so many of the last groups may still read
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <class Word>
__device__ __forceinline__ Word ld_word(const Word* p) {
  static_assert(sizeof(Word) >= 4, "a word, not a byte of one");
  return *p;
}
template <class Word>
__device__ __forceinline__ void st_word(Word* p, Word v) {
  *p = v;
}
// A word of the own state that is the same for all threads, of which the compiler must not know so: it would wait at
// once, to keep it once for the warp.
__device__ __forceinline__ uint64_t ld_state(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_byte(uint8_t* p, uint8_t v) { *p = v; }
__device__ __forceinline__ uint64_t time_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
__device__ __forceinline__ void pause_waiting(unsigned, bool) {}
__device__ __forceinline__ void* shared_memory() {
  extern __shared__ __align__(128) unsigned char dynamic_shared[];
  return dynamic_shared;
}
__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float mul_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// The kernels of this library, a list that grows while it is loaded: `launch` is the only way to start one.
struct KernelNode {
  const void* kernel;
  const KernelNode* next;
  static inline const KernelNode* first = nullptr;
  explicit KernelNode(const void* k) : kernel(k), next(first) { first = this; }
};
template <auto kKernel>
struct Listed {
  static inline const KernelNode node{reinterpret_cast<const void*>(kKernel)};
};

// Launches kKernel<<<ctas, threads, shared_bytes, stream>>>(params); 0 or the error of the launch.
template <auto kKernel, class Params>
int launch(unsigned ctas, unsigned threads, size_t shared_bytes, void* stream, const Params& params) {
  (void)&Listed<kKernel>::node;
  kKernel<<<ctas, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return static_cast<int>(cudaGetLastError());
}

#else

#include "simt_ptx.h"

#endif
