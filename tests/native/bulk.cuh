// bulk.cuh: what programs that try or time bulk copies need beyond the library's own.
#pragma once

#include <cstdio>

#include <unistd.h>

#include "ptx.cuh"

// Ends the program where a call of CUDA fails.
#define CUDA(call)                                                                                    \
  do {                                                                                                \
    if (const cudaError_t error_ = static_cast<cudaError_t>(call)) {                                  \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::fflush(stdout);                                                                            \
      _exit(2);                                                                                       \
    }                                                                                                 \
  } while (false)

__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}
