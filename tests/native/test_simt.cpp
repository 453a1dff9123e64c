// test_simt.cpp: small kernels with known answers on the CPU's side of CUDA: barriers, warp operations, early exits,
// many blocks. The kernels are what a GPU would run too; how fibers live and die is in test_fibers.cpp.
#include <memory>

#include "check.h"
#include "sync.cuh"

namespace {

using check::test;

template <class T>
struct Array {  // of host memory, filled with `value`
  size_t size;
  std::unique_ptr<T[]> data;
  explicit Array(size_t n, T value = T{}) : size(n), data(new T[n]) {
    for (size_t i = 0; i < n; ++i) data[i] = value;
  }
  T& operator[](size_t i) { return data[i]; }
  T* begin() { return data.get(); }
  T* end() { return begin() + size; }
};

unsigned thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
unsigned block_number() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }
unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }

struct Words {
  uint32_t* out;
};
void finish(const Words& p) { p.out[block_number() * num_threads() + thread_number()] += 1; }

// Every thread of a kernel comes to its end once.
void run(void (*kernel)(Words), unsigned blocks, unsigned threads) {
  Array<uint32_t> out(blocks * threads);
  simt::launch(kernel, dim3(blocks), dim3(threads), 0, {out.begin()});
  for (uint32_t word : out) CHECK(word == 1);
}

// ---- blocks ----

void reduce_kernel(Words p) {
  uint32_t* sums = static_cast<uint32_t*>(shared_memory());
  const unsigned t = threadIdx.x;
  sums[t] = t + 1 + blockIdx.x;
  __syncthreads();
  for (unsigned width = 1; width < blockDim.x; width *= 2) {
    const uint32_t other = t % (2 * width) == 0 && t + width < blockDim.x ? sums[t + width] : 0;
    __syncthreads();
    sums[t] += other;
    __syncthreads();
  }
  if (t == 0) p.out[blockIdx.x] = sums[0];
}

void block_reduction() {
  for (const unsigned threads : {1u, 33u, 128u, 256u, 1024u, 64u}) {
    constexpr unsigned kBlocks = 9;
    Array<uint32_t> out(kBlocks);
    simt::launch(reduce_kernel, dim3(kBlocks), dim3(threads), threads * sizeof(uint32_t), {out.begin()});
    for (unsigned b = 0; b < kBlocks; ++b) CHECK(out[b] == threads * (threads + 1) / 2 + threads * b);
  }
}

void shape_kernel(Words p) {
  uint32_t* mine = p.out + 2 * (block_number() * num_threads() + thread_number());
  mine[0] += 1;
  mine[1] = blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 | threadIdx.x << 12 | threadIdx.y << 18 | threadIdx.z << 24;
}

void shapes() {
  const dim3 grid(3, 4, 5), block(7, 3, 2);
  Array<uint32_t> out(2 * 60 * 42);
  simt::launch(shape_kernel, grid, block, 0, {out.begin()});
  for (unsigned i = 0; i < 60 * 42; ++i) {
    const unsigned b = i / 42, t = i % 42;
    CHECK(out[2 * i] == 1);
    CHECK(out[2 * i + 1] == (b % 3 | b / 3 % 4 << 4 | b / 12 << 8 | t % 7 << 12 | t / 7 % 3 << 18 | t / 21 << 24));
  }
  simt::launch(shape_kernel, dim3(0), dim3(32), 0, {nullptr});  // no blocks, no thread runs
}

void predicate_kernel(Words p) {
  const unsigned t = threadIdx.x, n = blockDim.x;
  for (unsigned i = 0; i <= n; i += n / 10 + 1) {  // i threads say true
    const bool mine = (t + i * 7) % n < i;
    CHECK(__syncthreads_count(mine) == static_cast<int>(i));
    CHECK(__syncthreads_or(mine) == (i > 0));
    CHECK(__syncthreads_and(mine) == (i == n));
  }
  finish(p);
}

void shared_kernel(Words p) {
  constexpr unsigned kWords = 300;
  uint32_t* words = static_cast<uint32_t*>(shared_memory());
  CHECK(reinterpret_cast<uintptr_t>(words) % 128 == 0);
  for (unsigned i = threadIdx.x; i < kWords; i += blockDim.x) {
    CHECK(words[i] == 0xa5a5a5a5u);
    words[i] = blockIdx.x * 1000 + i;
  }
  for (int i = 0; i < 5; ++i) __syncthreads();  // the other blocks in flight write theirs now
  for (unsigned i = 0; i < kWords; ++i) CHECK(words[i] == blockIdx.x * 1000 + i);
  if (threadIdx.x == 0) p.out[blockIdx.x] = 1;
}

void shared_memory_is_per_block_and_poisoned() {
  Array<uint32_t> out(40);
  for (int i = 0; i < 2; ++i) simt::launch(shared_kernel, dim3(40), dim3(48), 1200, {out.begin()});
  for (unsigned b = 0; b < 40; ++b) CHECK(out[b] == 1);
}

// Values that live in registers over many switches, integers and floating point.
void registers_kernel(Words p) {
  const unsigned t = threadIdx.x;
  uint64_t a = t, b = t * 3, c = t * 5, d = t * 7, e = t * 11, f = t * 13;
  double u = t, v = t * 0.5, w = t * 0.25, x = t * 2.0, y = t * 4.0, z = t * 8.0;
  for (int i = 0; i < 50; ++i) {
    __syncthreads();
    a += b, b += c, c += d, d += e, e += f, f += 1;
    u += 1, v += 1, w += 1, x += 1, y += 1, z += 1;
  }
  uint64_t g = t, h = t * 3, k = t * 5, l = t * 7, m = t * 11, n = t * 13;
  for (int i = 0; i < 50; ++i) g += h, h += k, k += l, l += m, m += n, n += 1;
  CHECK(a == g && b == h && c == k && d == l && e == m && f == n);
  CHECK(u == t + 50 && v == t * 0.5 + 50 && w == t * 0.25 + 50 && x == t * 2.0 + 50 && y == t * 4.0 + 50);
  CHECK(z == t * 8.0 + 50);
  finish(p);
}

// ---- warp operations ----

void ballots_kernel(Words p) {
  const unsigned lane = threadIdx.x % 32;
  CHECK(__ballot_sync(kAllLanes, lane % 3 == 0) == 0x49249249u);
  CHECK(__ballot_sync(kAllLanes, 0) == 0);
  CHECK(__any_sync(kAllLanes, lane == 17) && !__any_sync(kAllLanes, lane == 32));
  CHECK(__all_sync(kAllLanes, lane < 32) && !__all_sync(kAllLanes, lane != 17));
  CHECK(__reduce_or_sync(kAllLanes, 1u << lane) == kAllLanes);
  CHECK(__reduce_add_sync(kAllLanes, lane + threadIdx.x / 32) == 496 + 32 * (threadIdx.x / 32));
  CHECK(__match_any_sync(kAllLanes, lane % 4) == 0x11111111u << lane % 4);
  CHECK(__match_any_sync(kAllLanes, static_cast<int64_t>(lane / 16) << 40) == (lane < 16 ? 0xffffu : 0xffff0000u));
  CHECK(__popc(kAllLanes) == 32 && __ffs(0) == 0 && __ffs(8) == 4);
  finish(p);
}

void shuffles_kernel(Words p) {
  const int lane = static_cast<int>(threadIdx.x % 32), value = 100 * lane;
  CHECK(__shfl_sync(kAllLanes, value, 5) == 500);
  CHECK(__shfl_sync(kAllLanes, value, 37) == 500);
  CHECK(__shfl_sync(kAllLanes, value, (lane + 9) % 32) == 100 * ((lane + 9) % 32));
  for (int bits = 0; bits < 32; ++bits) CHECK(__shfl_xor_sync(kAllLanes, value, bits) == 100 * (lane ^ bits));
  for (unsigned step = 0; step < 32; ++step) {
    const int below = lane - static_cast<int>(step), above = lane + static_cast<int>(step);
    CHECK(__shfl_up_sync(kAllLanes, value, step) == (below < 0 ? value : 100 * below));
    CHECK(__shfl_down_sync(kAllLanes, value, step) == (above > 31 ? value : 100 * above));
  }
  CHECK(__shfl_xor_sync(kAllLanes, 0.5f * static_cast<float>(lane), 1) == 0.5f * static_cast<float>(lane ^ 1));
  CHECK(__shfl_xor_sync(kAllLanes, uint64_t{1} << (lane + 20), 3) == uint64_t{1} << ((lane ^ 3) + 20));
  finish(p);
}

// Two halves of a warp at the same time, with other operations and in loops of other lengths.
void halves_kernel(Words p) {
  const unsigned lane = threadIdx.x % 32;
  if (lane < 16) {
    for (unsigned i = 0; i < 7; ++i) {
      CHECK(__shfl_xor_sync(0x0000ffffu, lane + i, 15) == (15 - lane) + i);
      CHECK(__ballot_sync(0x0000ffffu, lane == i) == 1u << i);
    }
  } else {
    for (unsigned i = 0; i < 23; ++i) {
      CHECK(__reduce_add_sync(0xffff0000u, lane * i) == 376 * i);
      CHECK(__match_any_sync(0xffff0000u, lane & 1) == (lane & 1 ? 0xaaaa0000u : 0x55550000u));
      if (i % 3 == 0) __syncwarp(0xffff0000u);
    }
  }
  CHECK(__ballot_sync(kAllLanes, lane >= 16) == 0xffff0000u);
  finish(p);
}

void scattered_masks_kernel(Words p) {
  const unsigned lane = threadIdx.x % 32, rest = lane % 5;
  uint32_t mask = 0, sum = 0;
  for (unsigned i = rest; i < 32; i += 5) mask |= 1u << i, sum += i;
  for (unsigned i = 0; i < 3 + 4 * rest; ++i) {
    CHECK(__reduce_add_sync(mask, lane + i) == sum + i * static_cast<uint32_t>(__popc(mask)));
    CHECK(__shfl_down_sync(mask, lane, 5) == (lane + 5 < 32 ? lane + 5 : lane));
  }
  finish(p);
}

// Masks that share their lowest lane: growing ones one after another, then pairs that all want lane 0, which takes
// them in another order than that in which they came.
void shared_lowest_lane_kernel(Words p) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 3; ++i) {
    for (unsigned width = 1; width < 32; ++width) {
      const uint32_t mask = (2u << (lane < width ? width - 1 : 0)) - 1;
      if (lane < width) CHECK(__reduce_add_sync(mask, 1) == width);
    }
  }
  if (lane == 0) {
    pause_waiting(0, false);  // the others come first
    for (unsigned other = 31; other > 0; --other) CHECK(__shfl_sync(1u | 1u << other, 7u, other) == other);
  } else {
    CHECK(__shfl_sync(1u | 1u << lane, lane, 0) == 7);
  }
  finish(p);
}

// ---- threads that leave ----

void one_lane_kernel(Words p) {  // 33 threads: the second warp is a single lane
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  CHECK(__ballot_sync(kAllLanes, 1) == (warp ? 1u : kAllLanes));
  CHECK(__reduce_add_sync(kAllLanes, lane + 1) == (warp ? 1u : 528u));
  CHECK(__syncthreads_count(1) == 33);
  finish(p);
}

void leave_kernel(Words p) {  // thread t passes t barriers; first, last and middle threads leave while others wait
  const unsigned n = blockDim.x, t = threadIdx.x, stay = blockIdx.x % 2 ? t : n - 1 - t;
  for (unsigned i = 0; i < stay; ++i) {
    const int others = static_cast<int>(n - 1 - i);
    CHECK(__syncthreads_count(1) == others);
    CHECK(__syncthreads_and(stay > i) == 1);
  }
  finish(p);
}

void leave_early_kernel(Words p) {  // all but three threads leave before the first barrier
  finish(p);
  if (threadIdx.x % 40) return;
  for (int i = 0; i < 10; ++i) CHECK(__syncthreads_count(i % 2) == 3 * (i % 2));
}

void lanes_leave_kernel(Words p) {  // lanes leave one by one, from below or from above
  const unsigned lane = threadIdx.x % 32, from_above = blockIdx.x % 2, stay = from_above ? 31 - lane : lane;
  uint32_t live = kAllLanes;
  for (unsigned i = 0; i < stay; ++i) {
    live &= ~(1u << (from_above ? 31 - i : i));
    CHECK(__ballot_sync(kAllLanes, 1) == live);
    CHECK(__reduce_add_sync(kAllLanes, 1) == 31 - i);
    CHECK(__match_any_sync(kAllLanes, 5) == live);
  }
  finish(p);
}

// ---- many blocks ----

struct LastBlock {
  uint32_t *values, *counter, *started, *finished;
  uint32_t *sum, *num_last, *most_open;
};

void last_block_kernel(LastBlock p) {
  if (threadIdx.x == 0) atom_add_acq_rel_gpu(p.started, 1);
  p.values[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x + threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t open = atom_add_acq_rel_gpu(p.started, 0) - atom_add_acq_rel_gpu(p.finished, 0);
    if (open > ld_acquire_sys(p.most_open)) st_release_sys(p.most_open, open);
  }
  const bool last = last_cta(p.counter);
  if (threadIdx.x == 0) atom_add_acq_rel_gpu(p.finished, 1);
  if (!last) return;
  uint32_t sum = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) sum += p.values[i];
  atom_add_acq_rel_gpu(p.sum, sum);
  if (threadIdx.x == 0) *p.num_last += 1;
}

void last_block() {
  for (const unsigned threads : {32u, 64u, 96u, 256u, 1024u}) {
    const unsigned blocks = check::kSanitized ? 17 : 101;
    Array<uint32_t> values(blocks * threads), counts(6);
    LastBlock p{values.begin(), &counts[0], &counts[1], &counts[2], &counts[3], &counts[4], &counts[5]};
    for (unsigned launches = 1; launches <= 3; ++launches) {
      simt::launch(last_block_kernel, dim3(blocks), dim3(threads), 0, p);
      CHECK(counts[0] == 0);
      CHECK(*p.sum == launches * (threads * blocks * (blocks - 1) / 2 + blocks * threads * (threads - 1) / 2));
      CHECK(*p.num_last == launches);
    }
    const unsigned in_flight = threads >= 256 ? 1 : 256 / threads;
    CHECK(*p.most_open == in_flight);  // blocks overlap
  }
}

void sizes_one_after_another() {  // stacks grow and slots are used again
  for (const unsigned threads : {1u, 1024u, 32u, 300u, 33u, 1024u, 2u}) {
    run(leave_kernel, 2, threads > 40 ? 40 : threads);
    Array<uint32_t> out(7);
    simt::launch(reduce_kernel, dim3(7), dim3(threads), threads * sizeof(uint32_t), {out.begin()});
    for (unsigned b = 0; b < 7; ++b) CHECK(out[b] == threads * (threads + 1) / 2 + threads * b);
  }
}

}  // namespace

int main() {
  test("block reduction, 1 to 1024 threads", block_reduction);
  test("two and three dimensions", shapes);
  test("barriers that count, or, and", [] {
    for (const unsigned threads : {1u, 33u, 128u, 1024u}) run(predicate_kernel, 5, threads);
  });
  test("shared memory is per block and poisoned", shared_memory_is_per_block_and_poisoned);
  test("registers survive switches", [] { run(registers_kernel, 3, 70); });
  test("ballots, reductions, match", [] { run(ballots_kernel, 3, 96); });
  test("shuffles", [] { run(shuffles_kernel, 3, 96); });
  test("two halves of a warp at once", [] { run(halves_kernel, 3, 64); });
  test("five scattered masks at once", [] { run(scattered_masks_kernel, 3, 64); });
  test("masks that share their lowest lane", [] { run(shared_lowest_lane_kernel, 2, 64); });
  test("a warp of one lane", [] { run(one_lane_kernel, 3, 33); });
  test("threads leave between barriers", [] { run(leave_kernel, 4, 70); });
  test("threads leave before barriers", [] { run(leave_early_kernel, 4, 120); });
  test("lanes leave a warp", [] { run(lanes_leave_kernel, 4, 64); });
  test("the last block, blocks overlap", last_block);
  test("sizes one after another", sizes_one_after_another);
}
