// links.cu: what lies between two GPUs of a host, as kernels and the copy engine see it:
//
//   links [SECONDS]
//
// One process. A first line names the `device`, then one line of JSON for each variant: op, direction, ctas, threads,
// row_bytes, bytes (each way), us (the median of those of the slower GPU), gbps (each way), wrong (vectors that did not
// arrive as they were sent). Small numbers of rows run `repeats` times in a graph, and us is that of one. What SECONDS
// are too short for is counted in a last line, `left_out`. Ends with 1 where anything was wrong, with 2 where CUDA
// itself fails, with 3 where there are no two GPUs that reach each other.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <unistd.h>

#include "bulk.cuh"

namespace {

constexpr uint32_t kRowBytes = 1344;  // a row of NVFP4, H2048 K22, with all its planes
constexpr uint32_t kPieceBytes = 16384, kSlots = 8, kFlagRounds = 10'000, kRepeats = 20;
constexpr uint64_t kMostBytes = 256u << 20, kLeastBytes = 16u << 20;
constexpr uint64_t kFlagTimeoutNs = 2'000'000'000;
constexpr double kTargetUs = 1000, kSamplesUs = 60'000;

enum class Op { kStore, kLoad, kBulkStore, kBulkLoad, kEngine };
constexpr const char* kNames[] = {"store", "load", "bulk_store", "bulk_load", "copy_engine"};

struct Variant {
  Op op;
  int num_senders;  // 1: one way, 2: both ways
  uint32_t ctas, threads, row_bytes;
};

// ---- kernels ----

struct CopyParams {
  const char* from;
  char* to;
  uint64_t num_rows;
  uint32_t row_bytes;
  uint32_t* late;
};

// A CTA a row at a time, as dispatch sends.
__global__ void copy_rows(CopyParams p) {
  for (uint64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    for (uint32_t i = threadIdx.x * kVectorBytes; i < p.row_bytes; i += blockDim.x * kVectorBytes)
      st_vector(p.to + row * p.row_bytes + i, ld_vector(p.from + row * p.row_bytes + i));
  }
}

// One contiguous piece, four vectors of a thread in flight.
__global__ void copy_whole(CopyParams p) {
  const uint64_t end = p.num_rows * p.row_bytes, stride = uint64_t{gridDim.x} * blockDim.x * kVectorBytes;
  uint64_t at = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kVectorBytes;
  for (; at + 3 * stride < end; at += 4 * stride) {
    Vector v[4];
    for (int i = 0; i < 4; ++i) v[i] = ld_vector(p.from + at + i * stride);
    for (int i = 0; i < 4; ++i) st_vector(p.to + at + i * stride, v[i]);
  }
  for (; at < end; at += stride) st_vector(p.to + at, ld_vector(p.from + at));
}

// One thread of each CTA: a row into shared memory and out of it, by bulk copies.
__global__ void copy_bulk(CopyParams p) {
  constexpr uint32_t kAhead = kSlots / 2;
  if (threadIdx.x) return;
  char* slots = static_cast<char*>(shared_memory());
  uint64_t* barriers = reinterpret_cast<uint64_t*>(slots + kSlots * p.row_bytes);
  for (uint32_t slot = 0; slot < kSlots; ++slot) barrier_init(barriers + slot);
  const auto load = [&](uint32_t step, uint64_t row) {
    const uint32_t slot = step % kSlots;
    barrier_expect_bytes(barriers + slot, p.row_bytes);
    bulk_load(slots + slot * p.row_bytes, p.from + row * p.row_bytes, p.row_bytes, barriers + slot, evict_normal());
  };
  uint32_t step = 0;
  for (; step < kAhead; ++step) {
    const uint64_t row = blockIdx.x + uint64_t{step} * gridDim.x;
    if (row < p.num_rows) load(step, row);
  }
  step = 0;
  for (uint64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x, ++step) {
    if (const uint64_t next = row + uint64_t{kAhead} * gridDim.x; next < p.num_rows) {
      bulk_wait_read<kAhead - 1>();  // the slot's last row has left it
      load(step + kAhead, next);
    }
    const uint32_t slot = step % kSlots;
    for (uint32_t polls = 0; !barrier_try_wait(barriers + slot, step / kSlots & 1);) {
      if (++polls < 10'000'000) continue;
      atomicAdd(p.late, 1u);
      return;
    }
    bulk_store(p.to + row * p.row_bytes, slots + slot * p.row_bytes, p.row_bytes);
    bulk_commit();
  }
  bulk_wait_all();
}

struct FlagParams {
  uint32_t* mine;
  uint32_t* peers;
  uint32_t first, last;
  uint32_t answers;  // 1: waits before it stores
  uint32_t* late;
};

// Two threads that answer each other.
__global__ void exchange_flags(FlagParams p) {
  const uint64_t start = time_ns();
  for (uint32_t value = p.first; value <= p.last; ++value) {
    if (!p.answers) st_release_sys(p.peers, value);
    for (uint32_t polls = 0; ld_acquire_sys(p.mine) < value;) {
      if (++polls % 1024 || time_ns() - start < kFlagTimeoutNs) continue;
      atomicAdd(p.late, 1u);
      return;
    }
    if (p.answers) st_release_sys(p.peers, value);
  }
}

struct PatternParams {
  char* at;
  uint64_t num_vectors;
  uint32_t sender;
  unsigned long long* wrong;
};

__device__ Vector pattern(uint64_t index, uint32_t sender) {
  const uint32_t key = static_cast<uint32_t>(index) * 2654435761u ^ (sender + 1) * 0x9e3779b9u;
  return {{key, key ^ 0x5bd1e995u, key * 3 + 1, ~key}};
}

__global__ void fill(PatternParams p) {
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.num_vectors; i += gridDim.x * blockDim.x)
    st_vector(p.at + i * kVectorBytes, pattern(i, p.sender));
}

__global__ void compare(PatternParams p) {
  unsigned long long wrong = 0;
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.num_vectors; i += gridDim.x * blockDim.x) {
    const Vector found = ld_vector(p.at + i * kVectorBytes), wanted = pattern(i, p.sender);
    bool same = true;
    for (int word = 0; word < 4; ++word) same = same && found.words[word] == wanted.words[word];
    wrong += !same;
  }
  if (wrong) atomicAdd(p.wrong, wrong);
}

// ---- the two GPUs ----

struct Gpu {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr, end = nullptr;
  char *from = nullptr, *to = nullptr;
  unsigned long long* wrong = nullptr;
  uint32_t *flag = nullptr, *late = nullptr;
};

Gpu gpus[2];
bool failed = false;

void make(int device) {
  Gpu& gpu = gpus[device];
  CUDA(cudaSetDevice(device));
  CUDA(cudaDeviceEnablePeerAccess(1 - device, 0));
  CUDA(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
  CUDA(cudaEventCreate(&gpu.start));
  CUDA(cudaEventCreate(&gpu.end));
  CUDA(cudaMalloc(&gpu.from, kMostBytes));
  CUDA(cudaMalloc(&gpu.to, kMostBytes));
  CUDA(cudaMalloc(&gpu.wrong, sizeof *gpu.wrong));
  CUDA(cudaMalloc(&gpu.flag, sizeof *gpu.flag));
  CUDA(cudaMalloc(&gpu.late, sizeof *gpu.late));
  CUDA(cudaMemset(gpu.wrong, 0, sizeof *gpu.wrong));
  CUDA(cudaMemset(gpu.flag, 0, sizeof *gpu.flag));
  CUDA(cudaMemset(gpu.late, 0, sizeof *gpu.late));
  CUDA(cudaFuncSetAttribute(copy_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kSlots * (kPieceBytes + 8)));
  CUDA(launch<fill>(1024, 256, 0, gpu.stream,
                    PatternParams{gpu.from, kMostBytes / kVectorBytes, static_cast<uint32_t>(device), nullptr}));
  CUDA(cudaDeviceSynchronize());
}

bool pulls(Op op) { return op == Op::kLoad || op == Op::kBulkLoad; }

// One copy, on the current device's stream.
void start(const Variant& v, int device, uint64_t num_rows) {
  Gpu &here = gpus[device], &there = gpus[1 - device];
  const char* from = pulls(v.op) ? there.from : here.from;
  const uint32_t row_bytes = v.row_bytes ? v.row_bytes : kVectorBytes;
  const CopyParams p{from, pulls(v.op) ? here.to : there.to, num_rows, row_bytes, here.late};
  if (v.op == Op::kEngine) {
    CUDA(cudaMemcpyPeerAsync(there.to, 1 - device, here.from, device, num_rows * row_bytes, here.stream));
  } else if (v.op == Op::kBulkStore || v.op == Op::kBulkLoad) {
    CUDA(launch<copy_bulk>(v.ctas, v.threads, kSlots * (row_bytes + sizeof(uint64_t)), here.stream, p));
  } else if (v.row_bytes) {
    CUDA(launch<copy_rows>(v.ctas, v.threads, 0, here.stream, p));
  } else {
    CUDA(launch<copy_whole>(v.ctas, v.threads, 0, here.stream, p));
  }
}

// Microseconds of the slower of the GPUs that `begin(device)` gives work to.
template <class Begin>
double time_us(int num_devices, Begin begin) {
  double slowest = 0;
  for (int device = 0; device < num_devices; ++device) {
    CUDA(cudaSetDevice(device));
    CUDA(cudaEventRecord(gpus[device].start, gpus[device].stream));
    begin(device);
    CUDA(cudaEventRecord(gpus[device].end, gpus[device].stream));
  }
  for (int device = 0; device < num_devices; ++device) {
    float ms = 0;
    CUDA(cudaSetDevice(device));
    CUDA(cudaEventSynchronize(gpus[device].end));
    CUDA(cudaEventElapsedTime(&ms, gpus[device].start, gpus[device].end));
    slowest = std::max(slowest, ms * 1e3);
  }
  return slowest;
}

template <class Begin>
double median_us(int num_devices, Begin begin) {
  std::vector<double> times;
  double sum = 0;
  time_us(num_devices, begin);
  while (times.size() < 3 || (times.size() < 9 && sum < kSamplesUs)) {
    times.push_back(time_us(num_devices, begin));
    sum += times.back();
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// ---- variants ----

// Nothing of an earlier variant is where this one writes.
void clear() {
  for (int device = 0; device < 2; ++device) {
    CUDA(cudaSetDevice(device));
    CUDA(cudaMemsetAsync(gpus[device].to, 0xee, kMostBytes, gpus[device].stream));
    CUDA(cudaStreamSynchronize(gpus[device].stream));
  }
}

// The number of vectors that are not what was sent, and of bulk copies that never came.
unsigned long long count_wrong(const Variant& v, uint64_t bytes) {
  unsigned long long sum = 0;
  for (int device = 0; device < v.num_senders; ++device) {
    const int target = pulls(v.op) ? device : 1 - device;
    Gpu& gpu = gpus[target];
    unsigned long long wrong = 0;
    uint32_t late = 0;
    CUDA(cudaSetDevice(target));
    CUDA(launch<compare>(1024, 256, 0, gpu.stream,
                         PatternParams{gpu.to, bytes / kVectorBytes, static_cast<uint32_t>(1 - target), gpu.wrong}));
    CUDA(cudaMemcpyAsync(&wrong, gpu.wrong, sizeof wrong, cudaMemcpyDeviceToHost, gpu.stream));
    CUDA(cudaMemsetAsync(gpu.wrong, 0, sizeof wrong, gpu.stream));
    CUDA(cudaStreamSynchronize(gpu.stream));
    CUDA(cudaMemcpy(&late, gpus[device].late, sizeof late, cudaMemcpyDeviceToHost));
    CUDA(cudaMemset(gpus[device].late, 0, sizeof late));
    sum += wrong + late;
  }
  return sum;
}

void print(const char* op, const Variant& v, uint64_t bytes, uint32_t repeats, double us, unsigned long long wrong) {
  failed = failed || wrong;
  std::printf(
      "{\"op\": \"%s\", \"direction\": \"%s\", \"ctas\": %u, \"threads\": %u, \"row_bytes\": %u, \"bytes\": %llu, "
      "\"repeats\": %u, \"gbps\": %.2f, \"us\": %.3f, \"wrong\": %llu}\n",
      op, v.num_senders == 1 ? "one_way" : "both_ways", v.ctas, v.threads, v.row_bytes,
      static_cast<unsigned long long>(bytes), repeats, static_cast<double>(bytes) / us / 1e3, us, wrong);
  std::fflush(stdout);
}

// As many rows as take about kTargetUs.
void run_large(const Variant& v) {
  const uint32_t row_bytes = v.row_bytes ? v.row_bytes : kVectorBytes;
  const double us = time_us(v.num_senders, [&](int device) { start(v, device, kLeastBytes / row_bytes); });
  const auto wanted = static_cast<uint64_t>(kLeastBytes * (kTargetUs / us));
  const uint64_t num_rows = std::clamp(wanted, kLeastBytes, kMostBytes) / row_bytes;
  clear();
  const double median = median_us(v.num_senders, [&](int device) { start(v, device, num_rows); });
  const uint64_t bytes = num_rows * row_bytes;
  print(kNames[static_cast<int>(v.op)], v, bytes, 1, median, count_wrong(v, bytes));
}

// A few rows, again and again in a graph; none: what an empty kernel takes.
void run_small(const Variant& v, uint64_t num_rows) {
  cudaGraphExec_t execs[2] = {};
  for (int device = 0; device < v.num_senders; ++device) {
    cudaGraph_t graph = nullptr;
    CUDA(cudaSetDevice(device));
    CUDA(cudaStreamBeginCapture(gpus[device].stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < kRepeats; ++i) start(v, device, num_rows);
    CUDA(cudaStreamEndCapture(gpus[device].stream, &graph));
    CUDA(cudaGraphInstantiate(&execs[device], graph, 0));
    CUDA(cudaGraphDestroy(graph));
  }
  clear();
  const double median =
      median_us(v.num_senders, [&](int device) { CUDA(cudaGraphLaunch(execs[device], gpus[device].stream)); });
  const uint64_t bytes = num_rows * v.row_bytes;
  print(num_rows ? kNames[static_cast<int>(v.op)] : "empty", v, bytes, kRepeats, median / kRepeats,
        count_wrong(v, bytes));
  for (int device = 0; device < v.num_senders; ++device) CUDA(cudaGraphExecDestroy(execs[device]));
}

void run_flags() {
  uint32_t first = 1;
  const double us = median_us(2, [&](int device) {
    const FlagParams p{gpus[device].flag,       gpus[1 - device].flag, first,
                       first + kFlagRounds - 1, device ? 1u : 0u,      gpus[device].late};
    CUDA(launch<exchange_flags>(1, 1, 0, gpus[device].stream, p));
    if (device) first += kFlagRounds;
  });
  unsigned long long wrong = 0;
  for (Gpu& gpu : gpus) {
    uint32_t flag = 0, late = 0;
    CUDA(cudaMemcpy(&flag, gpu.flag, sizeof flag, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(&late, gpu.late, sizeof late, cudaMemcpyDeviceToHost));
    CUDA(cudaMemset(gpu.late, 0, sizeof late));
    wrong += late + (flag != first - 1);
  }
  print("flag_round_trip", Variant{Op::kStore, 2, 1, 1, sizeof(uint32_t)}, sizeof(uint32_t), kFlagRounds,
        us / kFlagRounds, wrong);
}

std::vector<Variant> large_variants() {
  std::vector<Variant> all;
  for (const int senders : {1, 2}) {
    all.push_back({Op::kEngine, senders, 0, 0, 0});
    for (const uint32_t ctas : {8, 16, 32, 64, 132, 528, 1056}) {
      for (const Op op : {Op::kBulkStore, Op::kBulkLoad}) {
        for (const uint32_t row_bytes : {kRowBytes, kPieceBytes}) all.push_back({op, senders, ctas, 32, row_bytes});
      }
      for (const uint32_t threads : {32, 64, 128, 256, 512, 1024}) {
        for (const Op op : {Op::kStore, Op::kLoad}) {
          for (const uint32_t row_bytes : {kRowBytes, 0u}) all.push_back({op, senders, ctas, threads, row_bytes});
        }
      }
    }
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 60;
  const auto started = std::chrono::steady_clock::now();
  int count = 0, reaches = 0, back = 0;
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);  // no kernel is loaded while another one waits for it
  CUDA(cudaGetDeviceCount(&count));
  if (count >= 2) {
    CUDA(cudaDeviceCanAccessPeer(&reaches, 0, 1));
    CUDA(cudaDeviceCanAccessPeer(&back, 1, 0));
  }
  if (!reaches || !back) {
    std::fprintf(stderr, "links: %d GPUs, no two that reach each other\n", count);
    return 3;
  }
  cudaDeviceProp found;
  CUDA(cudaGetDeviceProperties(&found, 0));
  std::printf("{\"device\": \"2 x %s\"}\n", found.name);
  make(0);
  make(1);
  run_flags();
  for (const uint64_t rows : {0, 1, 8, 64, 512, 1024, 4096, 8192}) {
    run_small({Op::kStore, 2, rows < 132 ? 64u : 1056u, 128, kRowBytes}, rows);
    run_small({Op::kBulkStore, 2, rows < 132 ? 64u : 528u, 32, kRowBytes}, rows);
    run_small({Op::kLoad, 2, rows < 132 ? 64u : 1056u, 128, kRowBytes}, rows);
  }
  size_t left_out = 0;
  for (const Variant& variant : large_variants()) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - started;
    if (passed.count() < seconds) {
      run_large(variant);
    } else {
      ++left_out;
    }
  }
  if (left_out) std::printf("{\"left_out\": %zu}\n", left_out);
  return failed ? 1 : 0;
}
