// simt_host.h: the CPU's side of CUDA. g++ compiles the kernels of this folder against it, and they run here.
//
// A launch runs on the calling OS thread. Each thread of a block is a fiber; several blocks are in flight at a time.
// Barriers and warp operations honour lane masks; threads that have left count as arrived. Shared memory starts as a
// pattern. Fibers that wait at barriers for ever are reported. `point` is called where a test may delay or reorder.
#pragma once

#include <sched.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <tuple>
#include <type_traits>
#include <vector>

#include "simt_fiber.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline, unused))
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

// ---- blocks, warps, threads ----

constexpr unsigned kWarpLanes = 32;
constexpr unsigned kMaxThreads = 1024;     // of a block
constexpr unsigned kFibersInFlight = 256;  // per OS thread, unless one block alone has more

struct Warp;
using Collective = void (*)(Warp& warp, uint32_t arrived);

struct Group {  // the lanes of a warp that meet under one mask
  uint32_t arrived = 0, mask = 0;
  uint64_t generation = 0;
  Collective collective = nullptr;
  uint64_t order[2] = {};
};

struct Block;
struct Thread : Fiber {
  uint3 index{0, 0, 0};
  unsigned lane = 0, warp = 0;
  Block* block = nullptr;
  Thread *next = nullptr, *previous = nullptr;  // ring of runnable fibers
  uint64_t value = 0, result = 0;               // operand and result of a warp operation
  uint32_t source_lane = 0;
  const char* waiting_at = nullptr;
  std::vector<std::tuple<void*, const void*, uint32_t>> stores;  // bulk stores under way: to, from, bytes
  size_t committed = 0;                                          // of those
};

struct Warp {
  uint32_t live = 0, busy = 0;  // lanes; groups that somebody waits in
  Thread* lanes[kWarpLanes] = {};
  Group groups[kWarpLanes];
};

struct Block {
  uint3 index{0, 0, 0};
  int live = 0, arrived = 0, predicates = 0, arrived_result = 0, predicates_result = 0;
  uint64_t generation = 0;
  uint64_t order[2] = {};
  Thread* threads = nullptr;
  Warp* warps = nullptr;
  char* shared = nullptr;
};

struct Executor {  // of one OS thread
  Fiber main;
  Fiber* came_from = nullptr;
  Thread* current = nullptr;
  dim3 grid{}, block{};
  size_t shared_bytes = 0;
  void (*body)(const void*) = nullptr;
  const void* argument = nullptr;
  uint64_t next_block = 0, num_blocks = 0, idle = 0;
  uint64_t order_start = 0, order_end = 0;  // of a launch
  unsigned num_running = 0;
  std::vector<Thread> threads;
  std::vector<Block> blocks;
  std::vector<Warp> warps;
  Stacks stacks;

  ~Executor() { release(); }
  void reserve(unsigned num_fibers);
  void release();
};

// At a fixed place in thread-local storage: every `threadIdx` goes through it.
inline constinit thread_local Executor* t_executor __attribute__((tls_model("initial-exec"))) = nullptr;
inline Thread& self() { return *t_executor->current; }

SIMT_NO_TSAN inline void switch_to(Fiber& from, Fiber& to) {
  Executor& executor = *t_executor;
  executor.came_from = &from;
  switch_stack(from, to);
  arrived(from, *t_executor->came_from);
}

SIMT_NO_TSAN inline void yield() {
#if defined(EP_A2A_HOSTILE)
  return hostile::block();
#endif
  Executor& executor = *t_executor;
  Thread* from = executor.current;
  Thread* to = from->next;
  if (to == from) return;
  executor.current = to;
  switch_to(*from, *to);
}

[[noreturn]] SIMT_NO_TSAN inline void report_deadlock() {
  std::fprintf(stderr, "simt: every running thread waits at a barrier for ever:\n");
  Thread* first = t_executor->current;
  Thread* thread = first;
  do {
    std::fprintf(stderr, "  block %u thread %u: %s\n", thread->block->index.x, thread->index.x,
                 thread->waiting_at ? thread->waiting_at : "running");
    thread = thread->next;
  } while (thread != first);
  std::abort();
}

SIMT_NO_TSAN inline void wait_turn() {
  Executor& executor = *t_executor;
  if (++executor.idle > 4 * static_cast<uint64_t>(executor.num_running) + 64) report_deadlock();
  yield();
}

// ---- barriers and warp operations ----

SIMT_NO_TSAN inline void complete(Block& block) {
  block.predicates_result = block.predicates;
  block.arrived_result = block.arrived;
  block.predicates = block.arrived = 0;
  ++block.generation;
  t_executor->idle = 0;
}

SIMT_NO_TSAN inline void complete(Warp& warp, Group& group) {
  if (group.collective) group.collective(warp, group.arrived);
  group.arrived = 0;
  warp.busy &= ~(1u << (&group - warp.groups));
  ++group.generation;
  t_executor->idle = 0;
}

SIMT_NO_TSAN inline void block_barrier(bool predicate) {
  point(Point::kBarrier);
  Thread& thread = self();
  Block& block = *thread.block;
  const uint64_t generation = block.generation;
  order_arrive(block.order[generation % 2]);
  block.predicates += predicate;
  if (++block.arrived == block.live) {
    complete(block);
  } else {
    thread.waiting_at = "__syncthreads";
    while (block.generation == generation) wait_turn();
    thread.waiting_at = nullptr;
  }
  order_leave(block.order[generation % 2]);
}

// The group in which lanes wait under this mask, or a free one: that of the mask's lowest lane if it can be had, so
// that disjoint masks have nothing in common.
SIMT_NO_TSAN inline Group& group_of(Warp& warp, uint32_t mask) {
  for (uint32_t busy = warp.busy; busy; busy &= busy - 1) {
    Group& group = warp.groups[__builtin_ctz(busy)];
    if (group.mask == mask) return group;
  }
  const uint32_t lowest = mask & -mask;
  return warp.groups[__builtin_ctz(warp.busy & lowest ? ~warp.busy : lowest)];
}

[[noreturn]] inline void report_misuse(const char* what, uint32_t mask) {
  const Thread& thread = self();
  std::fprintf(stderr, "simt: block %u thread %u: %s, mask %08x\n", thread.block->index.x, thread.index.x, what, mask);
  std::abort();
}

SIMT_NO_TSAN inline uint64_t warp_operation(uint32_t mask, uint64_t value, uint32_t source_lane,
                                            Collective collective) {
  point(Point::kBarrier);
  Thread& thread = self();
  Warp& warp = thread.block->warps[thread.warp];
  if (!(mask >> thread.lane & 1)) report_misuse("a warp operation whose mask leaves its caller out", mask);
  Group& group = group_of(warp, mask);
  if (group.arrived && group.collective != collective) report_misuse("lanes meet in different warp operations", mask);
  const uint64_t generation = group.generation;
  if (kVotesOrder || !collective) order_arrive(group.order[generation % 2]);
  thread.value = value;
  thread.source_lane = source_lane;
  group.mask = mask;
  group.collective = collective;
  group.arrived |= 1u << thread.lane;
  warp.busy |= 1u << (&group - warp.groups);
  if (group.arrived == (mask & warp.live)) {
    complete(warp, group);
  } else {
    thread.waiting_at = "a warp operation";
    while (group.generation == generation) wait_turn();
    thread.waiting_at = nullptr;
  }
  if (kVotesOrder || !collective) order_leave(group.order[generation % 2]);
  return thread.result;
}

// What the last lane to come computes for all that arrived.
SIMT_NO_TSAN inline void give_all(Warp& warp, uint32_t arrived, uint64_t result) {
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    if (arrived >> i & 1) warp.lanes[i]->result = result;
  }
}
SIMT_NO_TSAN inline void or_lanes(Warp& warp, uint32_t arrived) {
  uint64_t bits = 0;
  for (unsigned i = 0; i < kWarpLanes; ++i) bits |= arrived >> i & 1 ? warp.lanes[i]->value : 0;
  give_all(warp, arrived, bits);
}
SIMT_NO_TSAN inline void add_lanes(Warp& warp, uint32_t arrived) {
  uint64_t sum = 0;
  for (unsigned i = 0; i < kWarpLanes; ++i) sum += arrived >> i & 1 ? warp.lanes[i]->value : 0;
  give_all(warp, arrived, sum);
}
SIMT_NO_TSAN inline void shuffle_lanes(Warp& warp, uint32_t arrived) {
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    if (!(arrived >> i & 1)) continue;
    const uint32_t source = warp.lanes[i]->source_lane;
    const bool there = source < kWarpLanes && (arrived >> source & 1);
    warp.lanes[i]->result = warp.lanes[there ? source : i]->value;
  }
}
SIMT_NO_TSAN inline void match_lanes(Warp& warp, uint32_t arrived) {
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    if (!(arrived >> i & 1)) continue;
    uint64_t same = 0;
    for (unsigned j = 0; j < kWarpLanes; ++j) {
      if (arrived >> j & 1) same |= uint64_t{warp.lanes[j]->value == warp.lanes[i]->value} << j;
    }
    warp.lanes[i]->result = same;
  }
}

// ---- the life of a block ----

SIMT_NO_TSAN inline void link_after(Thread* position, Thread* thread) {
  if (!position) {
    thread->next = thread->previous = thread;
    return;
  }
  thread->next = position->next;
  thread->previous = position;
  position->next->previous = thread;
  position->next = thread;
}

// Starts the next block of the grid in `block`'s place; its threads join the ring after `position`.
SIMT_NO_TSAN inline Thread* start_block(Block& block, Thread* position) {
  Executor& executor = *t_executor;
  const uint64_t index = executor.next_block++;
  const dim3 grid = executor.grid, shape = executor.block;
  block.index = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                 static_cast<unsigned>(index / grid.x / grid.y)};
  const unsigned num_threads = shape.x * shape.y * shape.z;
  block.live = static_cast<int>(num_threads);
  block.shared = fresh_shared(block.shared, executor.shared_bytes);
  for (unsigned i = 0; i < num_threads; ++i) {
    Thread& thread = block.threads[i];
    thread.index = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
    thread.lane = i % kWarpLanes;
    thread.warp = i / kWarpLanes;
    thread.block = &block;
    Warp& warp = block.warps[thread.warp];
    warp.live = thread.lane == 0 ? 1 : warp.live | 1u << thread.lane;
    warp.lanes[thread.lane] = &thread;
    link_after(position, &thread);
    position = &thread;
  }
  executor.num_running += num_threads;
  return &block.threads[0];
}

// The current thread has left its kernel: whoever waits for it alone may go on, and the next fiber runs.
SIMT_NO_TSAN inline void finish_thread() {
  Executor& executor = *t_executor;
  Thread& thread = *executor.current;
  Block& block = *thread.block;
  Warp& warp = block.warps[thread.warp];
  executor.idle = 0;
  --executor.num_running;
  --block.live;
  warp.live &= ~(1u << thread.lane);
  if (block.arrived && block.arrived == block.live) complete(block);
  for (uint32_t busy = warp.busy; busy; busy &= busy - 1) {
    Group& group = warp.groups[__builtin_ctz(busy)];
    if (group.arrived == (group.mask & warp.live)) complete(warp, group);
  }
  Thread* next = thread.next == &thread ? nullptr : thread.next;
  thread.previous->next = thread.next;
  thread.next->previous = thread.previous;
  if (block.live == 0 && executor.next_block < executor.num_blocks) {
    Thread* first = start_block(block, next ? next->previous : nullptr);
    if (!next) next = first;
  }
  executor.current = next;
  if (next == &thread) return;
  switch_to(thread, next ? static_cast<Fiber&>(*next) : executor.main);
}

SIMT_NO_TSAN inline void fiber_main() noexcept {
  arrived(*t_executor->current, *t_executor->came_from);
  for (;;) {
    order_leave(t_executor->order_start);
    t_executor->body(t_executor->argument);
    order_arrive(t_executor->order_end);
    finish_thread();
  }
}

inline void Executor::reserve(unsigned num_fibers) {
  if (threads.size() >= num_fibers) return;
  release();
  threads = std::vector<Thread>(num_fibers);
  stacks = map_stacks(num_fibers);
  for (unsigned i = 0; i < num_fibers; ++i) {
    prepare(threads[i], stacks.lowest(i), fiber_main);
  }
}

inline void Executor::release() {
#if defined(SIMT_TSAN)
  for (Thread& thread : threads) __tsan_destroy_fiber(thread.tsan_fiber);
#endif
  unmap_stacks(stacks);
  threads.clear();
  for (Block& block : blocks) std::free(block.shared);
  blocks.clear();
}

SIMT_NO_TSAN inline void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*),
                                  const void* argument) {
  thread_local Executor own;
  if (!t_executor) t_executor = &own;
  Executor& executor = *t_executor;
  const unsigned num_threads = block.x * block.y * block.z, num_warps = (num_threads + kWarpLanes - 1) / kWarpLanes;
  if (num_threads == 0 || num_threads > kMaxThreads) {
    std::fprintf(stderr, "simt: a block of %u threads, it must have 1 to %u\n", num_threads, kMaxThreads);
    std::abort();
  }
  const unsigned in_flight = num_threads >= kFibersInFlight ? 1 : kFibersInFlight / num_threads;
  executor.reserve(num_threads > kFibersInFlight ? num_threads : kFibersInFlight);
  executor.grid = grid;
  executor.block = block;
  executor.shared_bytes = shared_bytes;
  executor.body = body;
  executor.argument = argument;
  executor.next_block = executor.idle = executor.num_running = 0;
  executor.num_blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  if (executor.blocks.size() < in_flight) executor.blocks.resize(in_flight);
  if (executor.warps.size() < in_flight * num_warps) executor.warps.resize(in_flight * num_warps);
#if defined(SIMT_TSAN)
  executor.main.tsan_fiber = __tsan_get_current_fiber();
#endif
  order_arrive(executor.order_start);
  Thread* first = nullptr;
  for (unsigned i = 0; i < in_flight && executor.next_block < executor.num_blocks; ++i) {
    Block& slot = executor.blocks[i];
    slot.threads = &executor.threads[static_cast<size_t>(i) * num_threads];
    slot.warps = &executor.warps[static_cast<size_t>(i) * num_warps];
    Thread* started = start_block(slot, first ? first->previous : nullptr);
    if (!first) first = started;
  }
  if (first) {
    executor.current = first;
    switch_to(executor.main, *first);
  }
  executor.current = nullptr;
  order_leave(executor.order_end);
}

// Runs kernel<<<grid, block, shared_bytes>>>(params) to its end.
template <class Params>
void launch(void (*kernel)(Params), dim3 grid, dim3 block, size_t shared_bytes,
            const std::type_identity_t<Params>& params) {
  struct Call {
    void (*kernel)(Params);
    const std::remove_cv_t<Params>& params;
  } call{kernel, params};
  run_grid(
      grid, block, shared_bytes,
      [](const void* p) {
        const Call& c = *static_cast<const Call*>(p);
        c.kernel(c.params);
      },
      &call);
}

inline void* shared_memory() { return self().block->shared; }

// What a thread does between two looks at a word that another rank writes: let the other fibers run, then the other
// OS threads, then sleep, at most a millisecond. `may_sleep`: one lane of a warp sleeps for all.
SIMT_NO_TSAN inline void pause(unsigned num_polls, bool may_sleep) {
  t_executor->idle = 0;
  yield();
  if (!may_sleep || num_polls < 8) return;
  if (num_polls < 64) {
    sched_yield();
    return;
  }
  const unsigned doublings = (num_polls - 64) / 16;
  const long ns = doublings >= 6 ? 1'000'000 : 20'000L << doublings;
  timespec time{0, ns > 1'000'000 ? 1'000'000 : ns};
  nanosleep(&time, nullptr);
}

inline uint64_t bits_of(auto value) {
  static_assert(sizeof(value) <= 8 && std::is_trivially_copyable_v<decltype(value)>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T shuffle(uint32_t mask, T value, uint32_t source_lane) {
  const uint64_t bits = warp_operation(mask, bits_of(value), source_lane, shuffle_lanes);
  T result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

}  // namespace simt

#define threadIdx (simt::self().index)
#define blockIdx (simt::self().block->index)
#define blockDim (simt::t_executor->block)
#define gridDim (simt::t_executor->grid)

inline void __syncthreads() { simt::block_barrier(false); }
inline int __syncthreads_count(int predicate) {
  simt::block_barrier(predicate != 0);
  return simt::self().block->predicates_result;
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) {
  simt::block_barrier(predicate != 0);
  return simt::self().block->predicates_result == simt::self().block->arrived_result;
}
inline void __syncwarp(uint32_t mask = 0xffffffffu) { simt::warp_operation(mask, 0, 0, nullptr); }
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const uint64_t bit = uint64_t{predicate != 0} << simt::self().lane;
  return static_cast<uint32_t>(simt::warp_operation(mask, bit, 0, simt::or_lanes));
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <class T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  return static_cast<uint32_t>(simt::warp_operation(mask, simt::bits_of(value), 0, simt::match_lanes));
}
template <class T>
T __shfl_sync(uint32_t mask, T value, int source_lane) {
  return simt::shuffle(mask, value, static_cast<uint32_t>(source_lane) % simt::kWarpLanes);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask) {
  return simt::shuffle(mask, value, simt::self().lane ^ static_cast<uint32_t>(lane_mask));
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta) {
  return simt::shuffle(mask, value, simt::self().lane + delta);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta) {
  return simt::shuffle(mask, value, simt::self().lane - delta);
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(simt::warp_operation(mask, value, 0, simt::or_lanes));
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(simt::warp_operation(mask, value, 0, simt::add_lanes));
}
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __ffs(uint32_t bits) { return bits ? std::countr_zero(bits) + 1 : 0; }
