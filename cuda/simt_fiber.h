// simt_fiber.h: one thread of a kernel as a fiber: its stack with a guard page, and the switch between two of them.
//
// The switch is written by hand for x86-64 and arm64 (a few nanoseconds; ucontext saves the signal mask by a system
// call each time) and tells AddressSanitizer and ThreadSanitizer what happens. ThreadSanitizer gets the no-sync flag:
// a switch orders nothing, only the barriers and atomics of the kernel do, as between the threads of a GPU.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(SIMT_UCONTEXT)
#define SIMT_UCONTEXT 1
#endif
#if defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define SIMT_TSAN 1
#define SIMT_NO_TSAN __attribute__((no_sanitize("thread"), noinline))
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#else
#define SIMT_NO_TSAN
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
void __asan_unpoison_memory_region(const volatile void* start, size_t size);
}
#endif

#if defined(EP_A2A_HOSTILE)
namespace hostile {  // tests/native/hostile_memory.h
void arrive(uint64_t& meeting);
void leave(uint64_t& meeting);
void block();
}  // namespace hostile
#endif

namespace simt {

// Do votes and shuffles order memory, as __syncwarp does? They need not on a GPU.
#if defined(EP_A2A_HOSTILE) || defined(SIMT_TSAN)
constexpr bool kVotesOrder = false;
#else
constexpr bool kVotesOrder = true;
#endif

constexpr size_t kStackBytes = 64 << 10;  // a multiple of every page size that Linux uses
inline size_t guard_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

struct Fiber {
#if defined(SIMT_UCONTEXT)
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
  const void* stack_low = nullptr;  // lowest usable byte
  size_t stack_bytes = 0;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
};

#if defined(SIMT_UCONTEXT)
inline void switch_registers(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#else
// Saves the callee-saved registers on the stack, the stack pointer in *save, and continues on `load`.
extern "C" __attribute__((visibility("hidden"))) void simt_switch_stack(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
  .text
  .p2align 4
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int kSavedWords = 6;  // below the address to continue at
#else
asm(R"(
  .text
  .p2align 4
simt_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr int kSavedWords = 20;
#endif
SIMT_NO_TSAN inline void switch_registers(Fiber& from, Fiber& to) {
  simt_switch_stack(&from.stack_pointer, to.stack_pointer);
}
#endif

SIMT_NO_TSAN inline void switch_stack(Fiber& from, Fiber& to) {
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(&from.asan_fake_stack, to.stack_low, to.stack_bytes);
#endif
#if defined(SIMT_TSAN)
  __tsan_switch_to_fiber(to.tsan_fiber, 1);  // 1: no synchronisation
#endif
  switch_registers(from, to);
}

// Makes `fiber` start in `entry`, which never returns, on the stack [low, low + kStackBytes).
inline void prepare(Fiber& fiber, char* low, void (*entry)()) {
  fiber.stack_low = low;
  fiber.stack_bytes = kStackBytes;
#if defined(SIMT_TSAN)
  fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
#if defined(SIMT_UCONTEXT)
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = low;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  void** top = reinterpret_cast<void**>(low + kStackBytes);
#if defined(__x86_64__)
  *--top = nullptr;  // where `entry` would return to; leaves the alignment that a call leaves
  *--top = reinterpret_cast<void*>(entry);
  top -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) top[i] = nullptr;
#else
  top -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) top[i] = nullptr;
  top[11] = reinterpret_cast<void*>(entry);  // x30, the link register
#endif
  fiber.stack_pointer = top;
#endif
}

// What a fiber does first on its own stack: AddressSanitizer learns where it is and where it came from.
SIMT_NO_TSAN inline void arrived(Fiber& self, Fiber& came_from) {
#if defined(SIMT_ASAN)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(self.asan_fake_stack, &bottom, &size);
  if (came_from.stack_bytes == 0) {
    came_from.stack_low = bottom;
    came_from.stack_bytes = size;
  }
#endif
  (void)self, (void)came_from;
}

// Ordering for the race detector: these two are seen by it, the scheduler around them is not. A barrier has two words
// that its generations take in turn: with one, a thread that leaves late would seem ordered after what the others did
// behind the barrier. The same fiber serves threads of several blocks, which orders those, and only those.
inline void order_arrive([[maybe_unused]] uint64_t& word) {
#if defined(SIMT_TSAN)
  __atomic_fetch_add(&word, 1, __ATOMIC_RELEASE);
#elif defined(EP_A2A_HOSTILE)
  hostile::arrive(word);
#endif
}
inline void order_leave([[maybe_unused]] uint64_t& word) {
#if defined(SIMT_TSAN)
  (void)__atomic_load_n(&word, __ATOMIC_ACQUIRE);
#elif defined(EP_A2A_HOSTILE)
  hostile::leave(word);
#endif
}

// ---- places where a test may interfere ----

enum class Point { kFlagLoad, kFlagStore, kRowLoad, kRowStore, kBarrier };
using Hook = void (*)(Point);
inline std::atomic<Hook> g_hook{nullptr};
inline void point(Point where) {
  if (Hook hook = g_hook.load(std::memory_order_relaxed)) hook(where);
}

// Shared memory as a block finds it: of its very size, filled with a pattern, and new to the race detector.
SIMT_NO_TSAN inline char* fresh_shared(char* old, size_t bytes) {
#if defined(SIMT_TSAN)
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  std::free(old);
  void* memory = nullptr;
  if (bytes && posix_memalign(&memory, 128, bytes) != 0) std::abort();
  if (bytes) std::memset(memory, 0xA5, bytes);
#if defined(SIMT_TSAN)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  return static_cast<char*>(memory);
}

// Guards divide a mapping, and a process has some 65,000 pieces (vm.max_map_count), two for each guarded stack: with
// more stacks than this, as those of 128 ranks in a process, the later ones have no guard.
constexpr size_t kMaxGuards = 20'000;
inline std::atomic<size_t> g_num_guards{0};

struct Stacks {  // of an OS thread's fibers, each above a page that may not be touched
  char* memory = nullptr;
  size_t count = 0;
  bool guarded = false;

  static size_t bytes(size_t count) { return count * (kStackBytes + guard_bytes()); }
  char* lowest(size_t i) const { return memory + bytes(i) + guard_bytes(); }
};

inline Stacks map_stacks(size_t count) {
  void* memory = mmap(nullptr, Stacks::bytes(count), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("simt: no memory for the stacks of a block");
    std::abort();
  }
  Stacks stacks{static_cast<char*>(memory), count, false};
  stacks.guarded = g_num_guards.fetch_add(count, std::memory_order_relaxed) + count <= kMaxGuards;
  if (!stacks.guarded) g_num_guards.fetch_sub(count, std::memory_order_relaxed);
  for (size_t i = 0; stacks.guarded && i < count; ++i) {
    if (mprotect(stacks.memory + Stacks::bytes(i), guard_bytes(), PROT_NONE) == 0) continue;
    std::perror("simt: cannot protect the end of a stack");
    std::abort();
  }
  return stacks;
}

inline void unmap_stacks(Stacks& stacks) {
  if (!stacks.memory) return;
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(stacks.memory, Stacks::bytes(stacks.count));  // left by frames that never returned
#endif
  munmap(stacks.memory, Stacks::bytes(stacks.count));
  if (stacks.guarded) g_num_guards.fetch_sub(stacks.count, std::memory_order_relaxed);
  stacks = {};
}

}  // namespace simt
