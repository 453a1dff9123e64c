// test_fibers.cpp: how the fibers behind a kernel's threads live and die: stacks and their guards, deadlocks that are
// reported, launches from many OS threads, the cost of a switch, and the races that ThreadSanitizer must (not) see.
#include <atomic>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "sync.cuh"

namespace {

using check::End;
using check::in_child;
using check::test;

struct Words {
  uint32_t* out;
};

// ---- kernels that end their process ----

#pragma GCC diagnostic ignored "-Winfinite-recursion"
__attribute__((noinline)) uint32_t recurse(volatile uint32_t* above, uint32_t depth) {
  volatile uint32_t here[64];
  here[depth % 64] = *above + depth;
  return recurse(here, depth + 1) + here[depth % 64];
}
void overflow_kernel(Words p) {
  uint32_t start = 0;
  if (threadIdx.x == 3) p.out[0] = recurse(&start, 0);
}

void stack_overflow() {
  uint32_t out = 0;
  const End end = in_child([&] { simt::launch(overflow_kernel, dim3(1), dim3(32), 0, {&out}); });
  CHECK(end.died());
  if (!check::kSanitized) CHECK(end.signal == SIGSEGV);
}

void block_deadlock_kernel(Words) {
  if (threadIdx.x == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
void missing_lane_kernel(Words) { __syncwarp(2); }
void two_operations_kernel(Words) {
  if (threadIdx.x % 2) {
    __ballot_sync(kAllLanes, 1);
  } else {
    __shfl_sync(kAllLanes, 1, 0);
  }
}
void throwing_kernel(Words) { throw std::runtime_error("a kernel threw this"); }
void idle_kernel(Words) {}

void expect_abort(void (*kernel)(Words), unsigned threads, const char* words, const char* more_words = "") {
  const End end = in_child([&] { simt::launch(kernel, dim3(2), dim3(threads), 0, {nullptr}); });
  if (!end.died() || !end.says(words) || !end.says(more_words)) std::fprintf(stderr, "%s\n", end.text.c_str());
  CHECK(end.died() && end.says(words) && end.says(more_words));
  if (!check::kSanitized) CHECK(end.signal == SIGABRT);
}

void catching_kernel(Words p) {
  try {
    if (threadIdx.x % 2) throw std::runtime_error("odd");
    p.out[threadIdx.x] = 2;
  } catch (const std::runtime_error&) {
    p.out[threadIdx.x] = 1;
  }
  __syncthreads();
}

void exceptions_inside_a_kernel() {
  uint32_t out[64] = {};
  simt::launch(catching_kernel, dim3(1), dim3(64), 0, {out});
  for (unsigned t = 0; t < 64; ++t) CHECK(out[t] == (t % 2 ? 1 : 2));
}

// ---- many OS threads ----

struct Sums {
  uint32_t* out;
  uint32_t seed;
};

void sums_kernel(Sums p) {
  uint32_t* total = static_cast<uint32_t*>(shared_memory());
  if (threadIdx.x == 0) *total = 0;
  for (uint32_t t = 0; t < blockDim.x; ++t) {
    __syncthreads();
    if (threadIdx.x == t) *total += t * p.seed + blockIdx.x;
  }
  __syncthreads();
  const uint32_t seen = __reduce_or_sync(kAllLanes, *total);
  if (threadIdx.x == 0) p.out[blockIdx.x] = seen;
}

void launch_sums(uint32_t seed) {
  const unsigned threads = 1 + seed * 37 % 200, blocks = 1 + seed % 9;
  uint32_t out[9];
  simt::launch(sums_kernel, dim3(blocks), dim3(threads), 4, {out, seed});
  for (unsigned b = 0; b < blocks; ++b) CHECK(out[b] == threads * (threads - 1) / 2 * seed + threads * b);
}

void many_os_threads() {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < (check::kSanitized ? 3 : 6); ++t) {
    threads.emplace_back([t] {
      for (uint32_t i = 0; i < (check::kSanitized ? 8 : 40); ++i) launch_sums(t * 1000 + i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

size_t num_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

void thread_exit_frees_stacks() {
  const auto run_one = [] { std::thread([] { launch_sums(5); }).join(); };
  run_one();
  const size_t before = num_mappings();
  for (int i = 0; i < (check::kSanitized ? 4 : 20); ++i) run_one();
  CHECK(num_mappings() < before + 100);  // the stacks of one thread alone are more
}

// The address space of an ended thread's stacks is as good as new for its next user.
void freed_stacks_leave_nothing_behind() {
  char* low = nullptr;
  size_t bytes = 0;
  std::thread([&] {
    launch_sums(5);
    low = simt::t_executor->stacks.memory;
    bytes = simt::Stacks::bytes(simt::t_executor->stacks.count);
  }).join();
  void* again = mmap(low, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (again == MAP_FAILED) return;  // somebody else has it already
  CHECK(again == low);
  for (size_t i = 0; i < bytes; i += 8) static_cast<volatile char*>(again)[i] = 1;
  std::memset(again, 2, bytes);
  CHECK(munmap(again, bytes) == 0);
}

// ---- what a switch costs ----

struct Loop {
  unsigned rounds;
};
void yield_kernel(Loop p) {
  for (unsigned i = 0; i < p.rounds; ++i) simt::yield();
}
void barrier_kernel(Loop p) {
  for (unsigned i = 0; i < p.rounds; ++i) __syncthreads();
}
void warp_kernel(Loop p) {
  for (unsigned i = 0; i < p.rounds; ++i) __syncwarp();
}

double cost_ns(void (*kernel)(Loop), unsigned threads) {
  const Loop loop{check::kSanitized ? 200u : 4000u};
  simt::launch(kernel, dim3(1), dim3(threads), 0, {2});
  const double start = check::now_ms();
  simt::launch(kernel, dim3(1), dim3(threads), 0, loop);
  return (check::now_ms() - start) * 1e6 / loop.rounds / threads;
}

void switch_cost() {
  const double yield_ns = cost_ns(yield_kernel, 128);
  std::printf("\n  yield %.1f ns, barrier %.1f ns, warp operation %.1f ns a thread;", yield_ns,
              cost_ns(barrier_kernel, 128), cost_ns(warp_kernel, 128));
  CHECK(check::kSanitized || yield_ns < 1000);  // a machine may be busy; ucontext takes some hundreds
}

// ---- what ThreadSanitizer sees ----

#if defined(SIMT_TSAN)

void threads_race_kernel(Words p) {  // no switch between the two
  if (threadIdx.x == 0) p.out[0] = 1;
  if (threadIdx.x == 1) p.out[1] = p.out[0];
}
void barrier_orders_kernel(Words p) {
  for (uint32_t i = 0; i < 4; ++i) {
    if (threadIdx.x == i) p.out[0] += i;
    __syncthreads();
    p.out[1 + threadIdx.x] = p.out[0];
    __syncthreads();
  }
}
void next_phase_races_kernel(Words p) {  // thread 63 stores behind the barrier, before thread 0 has left it
  __syncthreads();
  if (threadIdx.x == 63) p.out[0] = 1;
  __syncthreads();
  __syncthreads();
  if (threadIdx.x == 0) p.out[1] = 1;
  if (threadIdx.x == 63) p.out[2] = p.out[1];
  __syncthreads();
}
void next_phase_before_leaving_kernel(Words p) {  // the last to arrive goes on to the next barrier at once
  __syncthreads();
  if (threadIdx.x == 63) p.out[0] = 1;
  if (threadIdx.x == 5) p.out[1] = p.out[0];
  __syncthreads();
}
void halves_race_kernel(Words p) {  // disjoint masks order nothing between them
  const bool low = threadIdx.x < 16;
  for (int i = 0; i < 3; ++i) __syncwarp(low ? 0xffffu : 0xffff0000u);
  if (threadIdx.x == 2) p.out[0] = 1;
  for (int i = 0; i < 3; ++i) __syncwarp(low ? 0xffffu : 0xffff0000u);
  if (threadIdx.x == 20) p.out[1] = p.out[0];
}
void warp_orders_kernel(Words p) {
  const uint32_t mask = threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u;
  const unsigned half = threadIdx.x / 16;
  for (unsigned i = 0; i < 16; ++i) {
    if (threadIdx.x % 16 == i) p.out[half] += 1;
    __syncwarp(mask);
    CHECK(__reduce_add_sync(mask, 1) == 16);
    CHECK(p.out[half] == i + 1);
    CHECK(__ballot_sync(mask, i % 2) == (i % 2 ? mask : 0));
    __syncwarp(mask);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 7) p.out[8 + half] = p.out[half / 2 * 2] + p.out[half / 2 * 2 + 1];
}
void votes_race_kernel(Words p) {  // a vote brings lanes together, but orders no memory
  if (threadIdx.x == 1) p.out[0] = 1;
  CHECK(__any_sync(0xffffffffu, threadIdx.x % 32 == 3));
  if (threadIdx.x == 2) p.out[1] = p.out[0];
}
void blocks_race_kernel(Words p) {  // the second block starts when the first has ended
  if (threadIdx.x == blockIdx.x) p.out[blockIdx.x] = p.out[0];
}
void shared_kernel(Words) {  // memory that one block after another has
  uint32_t* words = static_cast<uint32_t*>(shared_memory());
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  CHECK(words[(threadIdx.x + 100) % blockDim.x] == (threadIdx.x + 100) % blockDim.x);
}
void counter_kernel(Words p) {
  p.out[1 + blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (!last_cta(p.out)) return;
  for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) CHECK(p.out[1 + i] == 1);
}
void relaxed_counter_kernel(Words p) {
  p.out[8 + blockIdx.x] = 1;
  const uint32_t before = __atomic_fetch_add(p.out, 1, __ATOMIC_RELAXED);
  if (before == gridDim.x - 1) p.out[16] = p.out[8];
}

void expect_race(bool wanted, void (*kernel)(Words), unsigned blocks, unsigned threads) {
  const End end = in_child([&] {
    uint32_t out[1024] = {};
    simt::launch(kernel, dim3(blocks), dim3(threads), 4096, {out});
    simt::launch(kernel, dim3(blocks), dim3(threads), 4096, {out + 512});
  });
  if (end.says("data race") != wanted) std::fprintf(stderr, "%s\n", end.text.c_str());
  CHECK(end.says("data race") == wanted);
  CHECK(end.died() == (wanted && end.code != 0));
}

void races() {
  test("race: threads without a barrier", [] { expect_race(true, threads_race_kernel, 1, 32); });
  test("race: behind a barrier", [] { expect_race(true, next_phase_races_kernel, 1, 64); });
  test("race: one thread is a barrier ahead", [] { expect_race(true, next_phase_before_leaving_kernel, 1, 64); });
  test("race: two halves of a warp", [] { expect_race(true, halves_race_kernel, 1, 32); });
  test("race: two blocks, one after the other", [] { expect_race(true, blocks_race_kernel, 2, 256); });
  test("race: a relaxed counter of blocks", [] { expect_race(true, relaxed_counter_kernel, 4, 1); });
  test("race: a vote", [] { expect_race(true, votes_race_kernel, 1, 32); });
  test("no race: barriers", [] { expect_race(false, barrier_orders_kernel, 1, 96); });
  test("no race: warp operations", [] { expect_race(false, warp_orders_kernel, 1, 64); });
  test("no race: shared memory of many blocks", [] { expect_race(false, shared_kernel, 20, 256); });
  test("no race: last_cta", [] { expect_race(false, counter_kernel, 7, 64); });
}

#else
void races() {}
#endif

}  // namespace

int main() {
  races();  // first: these fork, and the process has one OS thread yet
  test("a stack overflow ends at the guard page", stack_overflow);
  test("a barrier that cannot be met is reported", [] {
    expect_abort(block_deadlock_kernel, 64, "block 0 thread 0: __syncthreads", "block 1 thread 5: a warp operation");
  });
  test("a mask without the caller is reported",
       [] { expect_abort(missing_lane_kernel, 1, "leaves its caller out, mask 00000002"); });
  test("two operations under one mask are reported",
       [] { expect_abort(two_operations_kernel, 32, "different warp operations", "mask ffffffff"); });
  test("a kernel that throws ends the process", [] { expect_abort(throwing_kernel, 32, "a kernel threw this"); });
  test("a block of no or too many threads is reported", [] {
    expect_abort(idle_kernel, 0, "a block of 0 threads");
    expect_abort(idle_kernel, 1025, "a block of 1025 threads");
  });
  test("exceptions inside a kernel", exceptions_inside_a_kernel);
  test("launches from many OS threads", many_os_threads);
  test("the end of an OS thread frees its stacks", thread_exit_frees_stacks);
  test("freed stacks leave nothing behind", freed_stacks_leave_nothing_behind);
  test("cost of a switch", switch_cost);
}
