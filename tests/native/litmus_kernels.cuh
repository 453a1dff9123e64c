// litmus_kernels.cuh: the kernels of litmus.cu. They move rows as the library does, by its own primitives, and count
// what does not hold.
//
// A vector names its round, so what is wrong is either old (it was seen before it had arrived) or new (it was
// overwritten while it was still read).
#pragma once

#include "bulk.cuh"
#include "rows.cuh"

constexpr uint32_t kLitmusRanks = 8;  // at most
constexpr uint32_t kRows = 64, kRowBytes = 1024, kVectors = kRowBytes / kVectorBytes;
constexpr uint32_t kCtas = 16, kThreads = 128, kWaitingCtas = 8;
constexpr uint32_t kParts = 8, kShares = kCtas / kParts;  // of the flags of CTAs that raise their own
constexpr long long kDelayCycles = 20'000;                // about 10 us
constexpr uint64_t kTimeoutNs = 4'000'000'000;
constexpr uint64_t kRowsOffset = 4096, kOutboxOffset = kRowsOffset + kLitmusRanks * kRows * kRowBytes;
constexpr uint64_t kRegionBytes = kOutboxOffset + kLitmusRanks * kRows * kRowBytes;
constexpr size_t kBulkShared = kRowBytes + 64;  // a row and an mbarrier

enum class Send {
  kStores,
  kBulk,
  kParts,
  kPartsBulk,
  kFlagFirst,  // from here on: controls
  kRelaxed,
  kBulkRead,
  kBulkNoFence,
  kPartsOfOthers
};
enum class Read { kLater, kSameKernel, kBulk, kRelaxed, kBulkNoFence };  // from kRelaxed on: controls

struct Found {  // what one rank counted
  unsigned long long rows_seen, rows_old, rows_new;
  unsigned long long outbox_seen, outbox_old, outbox_new;
  unsigned long long records_seen, records_wrong;
  unsigned long long late;  // waits that ended at their deadline
};

struct LitmusParams {
  Channel channel;
  Found* found;
  uint32_t phase;          // of a wait or a signal
  uint32_t delay_one_of;   // in one round of so many, rows are read late; 0 = never
  uint32_t ignores_abort;  // 1 = goes on although the channel has ended
  ChannelState* states[kLitmusRanks];
  Status* statuses[kLitmusRanks];
};

// ---- what all kernels share ----

__device__ __forceinline__ uint32_t round_of(const Channel& c) {
  return static_cast<uint32_t>(ld_word(&c.state->half_rounds) / 2 + 1);
}
__device__ __forceinline__ bool has_ended(const LitmusParams& p) {
  return ld_word(&p.found->late) != 0 || (!p.ignores_abort && !is_alive(p.channel));
}

// Vector `v` of what rank `from` has for rank `to` in a round; `kind` tells rows from results.
__device__ __forceinline__ Vector vector_of(uint32_t round, uint32_t from, uint32_t to, uint32_t v, uint32_t kind) {
  const uint32_t place = from << 28 | to << 24 | kind << 20 | v;
  return Vector{{round, place, (round ^ place) * 0x9e3779b1u, round}};
}

struct Wrong {
  uint32_t seen = 0, old = 0, newer = 0;
  __device__ void look(const Vector& got, const Vector& wanted) {
    ++seen;
    bool same = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) same &= got.words[i] == wanted.words[i];
    const bool later = got.words[0] > wanted.words[0] || got.words[3] > wanted.words[0];
    old += !same && !later;
    newer += !same && later;
  }
  // All lanes of a warp.
  __device__ void add(unsigned long long* totals) const {
    const uint32_t counts[3] = {seen, old, newer};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t all = __reduce_add_sync(kAllLanes, counts[i]);
      if (threadIdx.x % kLanes == 0 && all) atomicAdd(totals + i, static_cast<unsigned long long>(all));
    }
  }
};

__device__ __forceinline__ void spin() {
  const long long start = clock64();
  while (clock64() - start < kDelayCycles) {
  }
}
// Now and then a rank is late by itself.
__device__ __forceinline__ void loiter(const LitmusParams& p, uint32_t round) {
  if (!p.delay_one_of || (round * 0x9e3779b1u + p.channel.rank * 0x85ebca6bu) % p.delay_one_of) return;
  spin();
}

// ---- dispatch ----

template <Send kSend>
__device__ void send_row_bulk_cta(const Channel& c, uint32_t round, uint32_t owner, uint32_t row) {
  Vector* staged = static_cast<Vector*>(shared_memory());
  for (uint32_t v = threadIdx.x; v < kVectors; v += blockDim.x)
    staged[v] = vector_of(round, c.rank, owner, row * kVectors + v, 0);
  if (kSend != Send::kBulkNoFence) fence_proxy_async();  // by each thread that stored
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(row_at(c, owner, kRowsOffset, kRowBytes, c.rank, row), staged, kRowBytes);
    bulk_commit();
    bulk_wait_read();  // the row is staged anew
  }
  __syncthreads();
}

// Rows to all ranks, then the flag.
template <Send kSend>
__global__ void send_kernel(const __grid_constant__ LitmusParams p) {
  constexpr bool kBulk = kSend == Send::kBulk || kSend == Send::kBulkRead || kSend == Send::kBulkNoFence;
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint32_t round = round_of(c);
  const uint64_t flag = uint64_t{round} << 24 | kRows;
  if (kSend == Send::kFlagFirst) {
    if (blockIdx.x == 0 && threadIdx.x < kLanes) publish_warp(c, c.dispatch_flags_offset, flag);
    if ((round + c.rank) % c.num_ranks == 0) spin();  // one rank alone: its peers, at their reading, find it here
  }
  if constexpr (kBulk) {
    for (uint32_t i = blockIdx.x; i < kRows * c.num_ranks; i += gridDim.x)
      send_row_bulk_cta<kSend>(c, round, i % c.num_ranks, i / c.num_ranks);
    if (kSend != Send::kBulkRead && threadIdx.x == 0) bulk_wait_all();  // the thread that committed
  } else {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kRows * kVectors; i += gridDim.x * blockDim.x) {
      for (uint32_t owner = 0; owner < c.num_ranks; ++owner) {
        char* row = row_at(c, owner, kRowsOffset, kRowBytes, c.rank, i / kVectors);
        st_vector(row + i % kVectors * kVectorBytes, vector_of(round, c.rank, owner, i, 0));
      }
    }
  }
  if constexpr (kSend == Send::kRelaxed) {
    __syncthreads();
    __shared__ bool is_last;
    if (threadIdx.x == 0) is_last = atomicAdd(&c.state->send_counter, 1) == gridDim.x - 1;  // relaxed
    __syncthreads();
    if (!is_last || threadIdx.x >= kLanes) return;
    if (threadIdx.x == 0) st_word(&c.state->send_counter, 0u);
    for (uint32_t owner = threadIdx.x; owner < c.num_ranks; owner += kLanes)
      st_relaxed_sys(flag_at(c, owner, c.dispatch_flags_offset, c.rank), flag);
    return;
  }
  if (!last_cta(&c.state->send_counter) || threadIdx.x >= kLanes) return;
  if (kSend != Send::kFlagFirst) publish_warp(c, c.dispatch_flags_offset, flag);
}

// CTAs that divide the rows by parts and by ranks: each raises the flags of what it sends, and counts no others.
template <Send kSend>
__global__ void send_parts_kernel(const __grid_constant__ LitmusParams p) {
  constexpr uint32_t kRowsOfPart = kRows / kParts;
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint32_t round = round_of(c), share = blockIdx.x % kShares, part = blockIdx.x / kShares;
  const Duty duty{part, kParts, 0x55555555u << share};
  for (uint32_t owner = share; owner < c.num_ranks; owner += kShares) {
    for (uint32_t row = part * kRowsOfPart; row < (part + 1) * kRowsOfPart; ++row) {
      if constexpr (kSend == Send::kPartsBulk) {
        send_row_bulk_cta<kSend>(c, round, owner, row);
      } else {
        for (uint32_t v = threadIdx.x; v < kVectors; v += blockDim.x) {
          st_vector(row_at(c, owner, kRowsOffset, kRowBytes, c.rank, row) + v * kVectorBytes,
                    vector_of(round, c.rank, owner, row * kVectors + v, 0));
        }
      }
    }
  }
  if (kSend == Send::kPartsBulk && threadIdx.x == 0) bulk_wait_all();
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  const Duty raised = kSend == Send::kPartsOfOthers ? Duty{0, 1, duty.rank_bits} : duty;
  publish_warp(c, c.dispatch_flags_offset, uint64_t{round} << 24 | kRows, c.peers, raised, kParts, kParts);
}

__global__ void litmus_wait_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const Phase phase = static_cast<Phase>(p.phase);
  uint64_t seen;
  wait_for_peers_warp(c, phase, phase == kPhaseDispatch ? dispatch_flags(c) : end_flags(c), round_of(c),
                      c.peers[c.rank], seen);
}

// The rows of one source, by ordinary loads. Every CTA takes its part.
__device__ __forceinline__ void look_at_rows(const Channel& c, uint32_t round, uint32_t source, Wrong& wrong) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kRows * kVectors; i += gridDim.x * blockDim.x) {
    const char* row = row_at(c, c.rank, kRowsOffset, kRowBytes, source, i / kVectors);
    wrong.look(ld_vector(row + i % kVectors * kVectorBytes), vector_of(round, source, c.rank, i, 0));
  }
}

// The same by bulk loads, a row at a time. False: a load did not complete.
template <Read kRead>
__device__ bool look_at_rows_bulk_cta(const Channel& c, uint32_t round, Wrong& wrong) {
  Vector* staged = static_cast<Vector*>(shared_memory());
  uint64_t* barrier = reinterpret_cast<uint64_t*>(staged + kVectors);
  if (threadIdx.x == 0) barrier_init(barrier);
  __syncthreads();
  uint32_t parity = 0;
  for (uint32_t i = blockIdx.x; i < kRows * c.num_ranks; i += gridDim.x, parity ^= 1) {
    const uint32_t source = i % c.num_ranks, row = i / c.num_ranks;
    if (threadIdx.x == 0) {
      if (kRead == Read::kBulk) fence_proxy_async_global();  // behind this CTA's acquire
      barrier_expect_bytes(barrier, kRowBytes);
      bulk_load(staged, row_at(c, c.rank, kRowsOffset, kRowBytes, source, row), kRowBytes, barrier, evict_normal());
    }
    const uint64_t start = time_ns();
    bool done = false;
    while (!(done = barrier_try_wait(barrier, parity)) && time_ns() - start < kTimeoutNs) {
    }
    if (!__syncthreads_and(done)) return false;
    for (uint32_t v = threadIdx.x; v < kVectors; v += blockDim.x)
      wrong.look(staged[v], vector_of(round, source, c.rank, row * kVectors + v, 0));
    __syncthreads();
  }
  return true;
}

// A few CTAs wait and read, each with an acquire of its own. The library lets one wait; here few enough that the
// peers' CTAs fit beside them.
template <Read kRead>
__device__ bool wait_cta(const LitmusParams& p, uint32_t round) {
  const Channel& c = p.channel;
  bool here = true;
  if (kRead == Read::kRelaxed) {
    const uint64_t start = time_ns();
    for (uint32_t source = threadIdx.x; source < c.num_ranks; source += blockDim.x) {
      const uint64_t* flag = flag_at(c, c.rank, c.dispatch_flags_offset, source);
      while (epoch_of(ld_relaxed_sys(flag)) != round && (here = time_ns() - start < kTimeoutNs)) {
      }
    }
  } else if (threadIdx.x < kLanes) {
    uint64_t seen;
    here = wait_for_peers_warp(c, kPhaseDispatch, dispatch_flags(c), round, c.peers[c.rank], seen);
  }
  return __syncthreads_and(here);
}

template <Read kRead>
__global__ void read_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint32_t round = round_of(c);
  Wrong wrong;
  bool in_time = kRead == Read::kLater || wait_cta<kRead>(p, round);
  loiter(p, round);
  if constexpr (kRead == Read::kBulk || kRead == Read::kBulkNoFence) {
    in_time = in_time && look_at_rows_bulk_cta<kRead>(c, round, wrong);
  } else if (in_time) {
    for (uint32_t source = 0; source < c.num_ranks; ++source) look_at_rows(c, round, source, wrong);
  }
  if (!in_time && threadIdx.x == 0) atomicAdd(&p.found->late, 1ull);
  wrong.add(&p.found->rows_seen);
}

// ---- combine ----

__global__ void outbox_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint32_t round = round_of(c);
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kRows * kVectors; i += gridDim.x * blockDim.x) {
      char* row = row_at(c, c.rank, kOutboxOffset, kRowBytes, source, i / kVectors);
      st_vector(row + i % kVectors * kVectorBytes, vector_of(round, c.rank, source, i, 1));
    }
  }
}

// One warp: all that earlier kernels of the stream wrote is published with the flag.
template <bool kReleases>
__global__ void end_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint64_t flag = uint64_t{round_of(c)} << 24 | kPhaseCombine;
  if constexpr (kReleases) {
    publish_warp(c, c.end_flags_offset, flag);
  } else {
    for (uint32_t owner = threadIdx.x; owner < c.num_ranks; owner += kLanes)
      st_relaxed_sys(flag_at(c, owner, c.end_flags_offset, c.rank), flag);
  }
}

__global__ void pull_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint64_t half_rounds = ld_word(&c.state->half_rounds);
  const uint32_t round = round_of(c);
  Wrong wrong;
  loiter(p, round + 1);
  for (uint32_t owner = 0; owner < c.num_ranks; ++owner) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kRows * kVectors; i += gridDim.x * blockDim.x) {
      const char* row = row_at(c, owner, kOutboxOffset, kRowBytes, c.rank, i / kVectors);
      wrong.look(ld_vector(row + i % kVectors * kVectorBytes), vector_of(round, owner, c.rank, i, 1));
    }
  }
  wrong.add(&p.found->outbox_seen);
  if (last_cta(&c.state->pull_counter) && threadIdx.x == 0) st_word(&c.state->half_rounds, half_rounds + 2);
}

// ---- aborts ----

__device__ __forceinline__ Why why_of_round(uint32_t round, uint32_t rank) {
  return Why{kPeerTimeout, kPhaseCombine, kPhaseDispatch, (rank + round) % 128,
             rank,         round,         round * 3ull,   round * 7ull};
}

// Rows to all ranks, then this rank gives up.
__global__ void abort_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint32_t round = round_of(c);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kRows * kVectors; i += gridDim.x * blockDim.x) {
    for (uint32_t owner = 0; owner < c.num_ranks; ++owner) {
      char* row = row_at(c, owner, kRowsOffset, kRowBytes, c.rank, i / kVectors);
      st_vector(row + i % kVectors * kVectorBytes, vector_of(round, c.rank, owner, i, 0));
    }
  }
  if (last_cta(&c.state->send_counter) && threadIdx.x < kLanes) fail_warp(c, why_of_round(round, c.rank));
}

// Until the word of every source is `wanted(source)`. One warp.
template <class Wanted>
__device__ bool poll_warp(const LitmusParams& p, uint64_t offset, Wanted wanted) {
  const Channel& c = p.channel;
  const uint64_t start = time_ns();
  bool here = true;
  for (uint32_t source = threadIdx.x; source < c.num_ranks; source += kLanes) {
    while (ld_acquire_sys(flag_at(c, c.rank, offset, source)) != wanted(source) &&
           (here = time_ns() - start < kTimeoutNs)) {
    }
  }
  here = __all_sync(kAllLanes, here);
  if (!here && threadIdx.x == 0) atomicAdd(&p.found->late, 1ull);
  return here;
}

// Learns from the abort words that all have given up; their sticky words and records came before.
__global__ void learn_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint32_t round = round_of(c);
  const auto word_of = [&](uint32_t source) { return abort_word(why_of_round(round, source)); };
  if (!poll_warp(p, c.abort_words_offset, word_of)) return;
  for (uint32_t source = threadIdx.x; source < c.num_ranks; source += kLanes) {
    const Why why = why_of_round(round, source);
    const volatile Status* s = p.statuses[source];
    const bool holds = ld_word(&p.states[source]->sticky) == word_of(source) && s->failure == why.failure &&
                       s->phase == why.phase && s->culprit == why.culprit && s->late_in == why.late_in &&
                       s->reported_by == why.reporter && s->epoch_wanted == why.epoch_wanted &&
                       s->epoch_seen == why.epoch_seen && s->waited_ns == why.waited_ns;
    atomicAdd(&p.found->records_seen, 1ull);
    if (!holds) atomicAdd(&p.found->records_wrong, 1ull);
  }
}

// All have seen that this rank gave up: it forgets it, for the next round. (A channel of the library never does.)
__global__ void forget_kernel(const __grid_constant__ LitmusParams p) {
  const Channel& c = p.channel;
  if (has_ended(p)) return;
  const uint64_t half_rounds = ld_word(&c.state->half_rounds), flag = uint64_t{round_of(c)} << 24 | kPhaseCombine;
  if (!poll_warp(p, c.end_flags_offset, [&](uint32_t) { return flag; })) return;
  if (threadIdx.x) return;
  st_word(&c.state->sticky, uint64_t{0});
  st_word(&c.state->num_failures, 0u);  // the next one writes the record again
  st_release_sys(&c.status->failure, kHealthy);
  st_word(&c.state->half_rounds, half_rounds + 2);
}

// ---- records in host memory ----

__device__ __forceinline__ InputRecord input_of_round(uint32_t round) {
  const int32_t n = static_cast<int32_t>(round);
  return InputRecord{0, n, n * 3, n * 5, n * 7, 0};
}

struct RecordParams {
  Channel channel;
  uint32_t num_rounds;
};

// Fails and records a bad input in every round; the host reads both, then clears both. One warp.
template <bool kReleases>
__global__ void record_kernel(const __grid_constant__ RecordParams p) {
  const Channel& c = p.channel;
  for (uint32_t round = 1; round <= p.num_rounds; ++round) {
    if (kReleases) {
      if (threadIdx.x == 0) st_word(&c.state->num_failures, 0u);  // else the first record is the last
      fail_warp(c, why_of_round(round, 0));
      if (threadIdx.x == 0) record_bad_input(c, kInvalidRouting, input_of_round(round));
    } else if (threadIdx.x == 0) {  // what says that they are valid comes first
      volatile Status* s = c.status;
      volatile InputRecord* record = &c.inputs[kInvalidRouting];
      const Why why = why_of_round(round, 0);
      const InputRecord found = input_of_round(round);
      s->failure = why.failure;
      record->present = 1;
      s->phase = why.phase, s->culprit = why.culprit, s->late_in = why.late_in, s->reported_by = why.reporter;
      s->epoch_wanted = why.epoch_wanted, s->epoch_seen = why.epoch_seen, s->waited_ns = why.waited_ns;
      record->token = found.token, record->position = found.position;
      record->value = found.value, record->limit = found.limit;
    }
    const uint64_t start = time_ns();
    for (bool read = false; !read;) {
      read = ld_acquire_sys(&c.status->failure) == kHealthy && !ld_acquire_sys(&c.inputs[kInvalidRouting].present);
      read = __all_sync(kAllLanes, read);
      if (!read && __any_sync(kAllLanes, time_ns() - start > kTimeoutNs)) return;  // the host counts what it read
    }
  }
}
