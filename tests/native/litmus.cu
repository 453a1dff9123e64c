// litmus.cu: each ordering contract of cuda/sync.cuh on a real GPU, many times, by the library's own primitives:
//
//   litmus [ROUNDS [RANKS]]
//
// The ranks are streams of this process, each with a graph of rounds that nothing orders but the flags; where several
// GPUs reach each other, ranks take turns on them. For every contract one line of JSON: how many vectors or records
// were wrong. Then controls, whose order is weakened: `flag_first` must be found, or the tests could find nothing; what
// the others find depends on the GPU. Ends with 1 where a contract is broken, that control finds nothing or a wait was
// not answered, with 2 where CUDA itself fails.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <vector>

#include <unistd.h>

#include "litmus_kernels.cuh"

namespace {

constexpr uint32_t kBatch = 100;  // rounds of a graph

enum class End { kInOrder, kEarly, kRelaxed, kAbort };  // the second and third: controls

struct Litmus {
  const char* name;
  Send send;
  Read read;
  End end;
  uint32_t delay_one_of;
  bool control, must_find;
};

constexpr Litmus kContracts[] = {
    {"rounds", Send::kStores, Read::kLater, End::kInOrder, 16, false, false},
    {"acquire.each_cta", Send::kStores, Read::kSameKernel, End::kInOrder, 16, false, false},
    {"bulk.store", Send::kBulk, Read::kLater, End::kInOrder, 16, false, false},
    {"bulk.load", Send::kStores, Read::kBulk, End::kInOrder, 16, false, false},
    {"bulk.store_and_load", Send::kBulk, Read::kBulk, End::kInOrder, 16, false, false},
    {"parts.store", Send::kParts, Read::kLater, End::kInOrder, 16, false, false},
    {"parts.bulk", Send::kPartsBulk, Read::kSameKernel, End::kInOrder, 16, false, false},
    {"abort", Send::kStores, Read::kLater, End::kAbort, 16, false, false},
};
constexpr Litmus kControls[] = {
    {"flag_first", Send::kFlagFirst, Read::kSameKernel, End::kInOrder, 0, true, true},
    {"relaxed", Send::kRelaxed, Read::kRelaxed, End::kInOrder, 0, true, false},
    {"parts.of_others", Send::kPartsOfOthers, Read::kSameKernel, End::kInOrder, 0, true, false},
    {"acquire.missing", Send::kStores, Read::kRelaxed, End::kInOrder, 0, true, false},
    {"end_flag.early", Send::kStores, Read::kLater, End::kEarly, 2, true, false},
    {"end_flag.relaxed", Send::kStores, Read::kLater, End::kRelaxed, 0, true, false},
    {"bulk.store_not_waited_for", Send::kBulkRead, Read::kSameKernel, End::kInOrder, 0, true, false},
    {"bulk.store_not_fenced", Send::kBulkNoFence, Read::kLater, End::kInOrder, 0, true, false},
    {"bulk.load_not_fenced", Send::kStores, Read::kBulkNoFence, End::kInOrder, 0, true, false},
};

struct Rank {
  int device = 0;
  cudaStream_t stream = nullptr;
  char* region = nullptr;
  LitmusParams params{};
  cudaGraphExec_t rounds = nullptr;  // kBatch of them
};

struct World {
  std::vector<Rank> ranks;
  int num_gpus = 1;
  Status* statuses = nullptr;  // in host memory, as are the inputs
  InputRecord* inputs = nullptr;
  bool failed = false;

  explicit World(uint32_t num_ranks);
  void reset();
  void capture(const Litmus& litmus, Rank& rank, uint32_t num_rounds);
  void run(const Litmus& litmus, uint32_t num_rounds);
  void run_records(bool control, uint32_t num_rounds);
  void report(const char* name, bool control, bool must_find, uint32_t num_rounds, uint64_t wrong, uint64_t seen,
              uint64_t wanted_seen, uint64_t late);
};

// ---- the ranks ----

int reachable_gpus() {
  int count = 0, reaches = 1;
  CUDA(cudaGetDeviceCount(&count));
  for (int from = 0; from < count; ++from) {
    for (int to = 0; to < count; ++to) {
      if (from != to) CUDA(cudaDeviceCanAccessPeer(&reaches, from, to));
      if (!reaches) return 1;
    }
  }
  return count;
}

World::World(uint32_t num_ranks) : ranks(num_ranks) {
  const int reachable = reachable_gpus();
  num_gpus = reachable < static_cast<int>(num_ranks) ? reachable : static_cast<int>(num_ranks);
  CUDA(cudaHostAlloc(&statuses, num_ranks * sizeof(Status), cudaHostAllocPortable | cudaHostAllocMapped));
  CUDA(cudaHostAlloc(&inputs, num_ranks * kNumBadInputs * sizeof(InputRecord),
                     cudaHostAllocPortable | cudaHostAllocMapped));
  std::vector<uint64_t> peers;
  for (uint32_t r = 0; r < num_ranks; ++r) {
    Rank& rank = ranks[r];
    rank.device = static_cast<int>(r) % num_gpus;
    CUDA(cudaSetDevice(rank.device));
    for (int other = 0; other < num_gpus && static_cast<int>(r) < num_gpus; ++other) {
      if (other != rank.device) CUDA(cudaDeviceEnablePeerAccess(other, 0));
    }
    CUDA(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&rank.region, kRegionBytes));
    CUDA(cudaMalloc(&rank.params.channel.state, sizeof(ChannelState)));
    CUDA(cudaMalloc(&rank.params.found, sizeof(Found)));
    peers.push_back(reinterpret_cast<uint64_t>(rank.region));
  }
  for (uint32_t r = 0; r < num_ranks; ++r) {
    Rank& rank = ranks[r];
    Channel& c = rank.params.channel;
    CUDA(cudaSetDevice(rank.device));
    uint64_t* table = nullptr;
    CUDA(cudaMalloc(&table, num_ranks * sizeof(uint64_t)));
    CUDA(cudaMemcpy(table, peers.data(), num_ranks * sizeof(uint64_t), cudaMemcpyHostToDevice));
    c.peers = table;
    c.status = statuses + r;
    c.inputs = inputs + r * kNumBadInputs;
    c.rank = r;
    c.num_ranks = num_ranks;
    c.max_tokens = kRows;
    c.dispatch_flags_offset = 0;
    c.end_flags_offset = 1024;
    c.abort_words_offset = 2048;
    for (uint32_t other = 0; other < num_ranks; ++other) {
      rank.params.states[other] = ranks[other].params.channel.state;
      rank.params.statuses[other] = statuses + other;
    }
  }
}

// As connect leaves a channel: nothing written, all flags 0.
void World::reset() {
  std::memset(static_cast<void*>(statuses), 0, ranks.size() * sizeof(Status));
  std::memset(static_cast<void*>(inputs), 0, ranks.size() * kNumBadInputs * sizeof(InputRecord));
  ChannelState state{};
  state.bad_routing = kNoBadRouting;
  state.timeout_ns = state.first_timeout_ns = kTimeoutNs;
  for (Rank& rank : ranks) {
    CUDA(cudaSetDevice(rank.device));
    CUDA(cudaMemset(rank.region, 0, kRegionBytes));
    CUDA(cudaMemset(rank.params.found, 0, sizeof(Found)));
    CUDA(cudaMemcpy(rank.params.channel.state, &state, sizeof state, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
  }
}

// ---- rounds ----

template <auto kKernel>
void start(const Rank& rank, uint32_t ctas, uint32_t threads, size_t shared_bytes, Phase phase = kPhaseDispatch) {
  LitmusParams params = rank.params;
  params.phase = phase;
  CUDA((launch<kKernel, LitmusParams>(ctas, threads, shared_bytes, rank.stream, params)));
}

void start_send(Send send, const Rank& rank) {
  switch (send) {
    case Send::kStores: return start<send_kernel<Send::kStores>>(rank, kCtas, kThreads, 0);
    case Send::kParts: return start<send_parts_kernel<Send::kParts>>(rank, kCtas, kThreads, 0);
    case Send::kPartsBulk: return start<send_parts_kernel<Send::kPartsBulk>>(rank, kCtas, kThreads, kBulkShared);
    case Send::kPartsOfOthers: return start<send_parts_kernel<Send::kPartsOfOthers>>(rank, kCtas, kThreads, 0);
    case Send::kFlagFirst: return start<send_kernel<Send::kFlagFirst>>(rank, kCtas, kThreads, 0);
    case Send::kRelaxed: return start<send_kernel<Send::kRelaxed>>(rank, kCtas, kThreads, 0);
    case Send::kBulk: return start<send_kernel<Send::kBulk>>(rank, kCtas, kThreads, kBulkShared);
    case Send::kBulkRead: return start<send_kernel<Send::kBulkRead>>(rank, kCtas, kThreads, kBulkShared);
    case Send::kBulkNoFence: return start<send_kernel<Send::kBulkNoFence>>(rank, kCtas, kThreads, kBulkShared);
  }
}

void start_read(Read read, const Rank& rank) {
  switch (read) {
    case Read::kLater: return start<read_kernel<Read::kLater>>(rank, kCtas, kThreads, 0);
    case Read::kSameKernel: return start<read_kernel<Read::kSameKernel>>(rank, kWaitingCtas, kThreads, 0);
    case Read::kRelaxed: return start<read_kernel<Read::kRelaxed>>(rank, kWaitingCtas, kThreads, 0);
    case Read::kBulk: return start<read_kernel<Read::kBulk>>(rank, kWaitingCtas, kThreads, kBulkShared);
    case Read::kBulkNoFence: return start<read_kernel<Read::kBulkNoFence>>(rank, kWaitingCtas, kThreads, kBulkShared);
  }
}

void start_round(const Litmus& litmus, const Rank& rank) {
  if (litmus.end == End::kAbort) {
    start<abort_kernel>(rank, kCtas, kThreads, 0);
    start<learn_kernel>(rank, 1, kLanes, 0);
    start_read(litmus.read, rank);
    start<end_kernel<true>>(rank, 1, kLanes, 0);
    return start<forget_kernel>(rank, 1, kLanes, 0);
  }
  start_send(litmus.send, rank);
  if (litmus.read == Read::kLater) start<litmus_wait_kernel>(rank, 1, kLanes, 0, kPhaseDispatch);
  if (litmus.end == End::kEarly) start<end_kernel<true>>(rank, 1, kLanes, 0);
  start_read(litmus.read, rank);
  start<outbox_kernel>(rank, kCtas, kThreads, 0);
  if (litmus.end == End::kInOrder) start<end_kernel<true>>(rank, 1, kLanes, 0);
  if (litmus.end == End::kRelaxed) start<end_kernel<false>>(rank, 1, kLanes, 0);
  start<litmus_wait_kernel>(rank, 1, kLanes, 0, kPhaseCombine);
  start<pull_kernel>(rank, kCtas, kThreads, 0);
}

void World::capture(const Litmus& litmus, Rank& rank, uint32_t num_rounds) {
  const bool by_parts =
      litmus.send == Send::kParts || litmus.send == Send::kPartsBulk || litmus.send == Send::kPartsOfOthers;
  rank.params.channel.flag_parts = by_parts ? kParts : 1;
  rank.params.ignores_abort = litmus.end == End::kAbort;
  rank.params.delay_one_of = litmus.delay_one_of;
  CUDA(cudaSetDevice(rank.device));
  cudaGraph_t graph = nullptr;
  CUDA(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
  for (uint32_t i = 0; i < num_rounds; ++i) start_round(litmus, rank);
  CUDA(cudaStreamEndCapture(rank.stream, &graph));
  CUDA(cudaGraphInstantiate(&rank.rounds, graph, 0));
  CUDA(cudaGraphUpload(rank.rounds, rank.stream));
  CUDA(cudaStreamSynchronize(rank.stream));
  CUDA(cudaGraphDestroy(graph));
}

void World::run(const Litmus& litmus, uint32_t num_rounds) {
  const uint32_t batch = num_rounds < kBatch ? num_rounds : kBatch;
  reset();
  for (Rank& rank : ranks) capture(litmus, rank, batch);
  for (uint32_t done = 0; done < num_rounds; done += batch) {
    for (Rank& rank : ranks) {
      CUDA(cudaSetDevice(rank.device));
      CUDA(cudaGraphLaunch(rank.rounds, rank.stream));
    }
  }
  Found all{};
  for (Rank& rank : ranks) {
    Found found;
    ChannelState state;
    CUDA(cudaSetDevice(rank.device));
    CUDA(cudaStreamSynchronize(rank.stream));
    CUDA(cudaMemcpy(&found, rank.params.found, sizeof found, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(&state, rank.params.channel.state, sizeof state, cudaMemcpyDeviceToHost));
    CUDA(cudaGraphExecDestroy(rank.rounds));
    all.rows_seen += found.rows_seen, all.rows_old += found.rows_old, all.rows_new += found.rows_new;
    all.outbox_seen += found.outbox_seen, all.outbox_old += found.outbox_old, all.outbox_new += found.outbox_new;
    all.records_seen += found.records_seen, all.records_wrong += found.records_wrong;
    all.late += found.late + (state.sticky != 0);
  }
  const uint64_t pairs = ranks.size() * ranks.size() * num_rounds, vectors = pairs * kRows * kVectors;
  const auto tell = [&](const char* name, uint64_t wrong, uint64_t seen, uint64_t wanted_seen) {
    report(name, litmus.control, litmus.must_find, num_rounds, wrong, seen, wanted_seen, all.late);
  };
  if (litmus.end == End::kAbort) {
    tell("abort_word.rows", all.rows_old + all.rows_new, all.rows_seen, vectors);
    tell("abort_word.record", all.records_wrong, all.records_seen, pairs);
  } else if (std::strcmp(litmus.name, "rounds") == 0) {
    tell("dispatch_flag.chain", all.rows_old, all.rows_seen, vectors);
    tell("windows.planes", all.rows_new, all.rows_seen, vectors);
    tell("end_flag.chain", all.outbox_old, all.outbox_seen, vectors);
    tell("windows.outbox", all.outbox_new, all.outbox_seen, vectors);
  } else {
    tell(litmus.name, all.rows_old + all.rows_new + all.outbox_old + all.outbox_new, all.rows_seen + all.outbox_seen,
         2 * vectors);
  }
}

// ---- records that the host reads ----

bool host_reads(uint32_t* word, uint32_t wanted_not) {
  const auto start = std::chrono::steady_clock::now();
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == wanted_not) {
    if (std::chrono::steady_clock::now() - start > std::chrono::nanoseconds(kTimeoutNs)) return false;
  }
  return true;
}

bool is_status_of_round(const Status& s, uint32_t round) {
  return s.failure == kPeerTimeout && s.phase == kPhaseCombine && s.late_in == kPhaseDispatch &&
         s.culprit == round % 128 && s.reported_by == 0 && s.epoch_wanted == round && s.epoch_seen == round * 3ull &&
         s.waited_ns == round * 7ull;
}
bool is_input_of_round(const InputRecord& r, uint32_t round) {
  const int32_t n = static_cast<int32_t>(round);
  return r.present == 1 && r.token == n && r.position == n * 3 && r.value == n * 5 && r.limit == n * 7;
}

void World::run_records(bool control, uint32_t num_rounds) {
  reset();
  const Rank& rank = ranks[0];
  RecordParams params{rank.params.channel, num_rounds};
  params.channel.num_ranks = 1;
  CUDA(cudaSetDevice(rank.device));
  const auto start_records =
      control ? launch<record_kernel<false>, RecordParams> : launch<record_kernel<true>, RecordParams>;
  CUDA(start_records(1, kLanes, 0, rank.stream, params));
  Status& status = statuses[0];
  InputRecord& record = inputs[kInvalidRouting];
  uint64_t wrong_statuses = 0, wrong_inputs = 0, seen = 0;
  for (uint32_t round = 1; round <= num_rounds; ++round, ++seen) {
    if (!host_reads(&status.failure, kHealthy)) break;
    wrong_statuses += !is_status_of_round(status, round);
    if (!host_reads(&record.present, 0)) break;
    wrong_inputs += !is_input_of_round(record, round);
    __atomic_store_n(&record.present, 0u, __ATOMIC_RELEASE);
    __atomic_store_n(&status.failure, 0u, __ATOMIC_RELEASE);
  }
  CUDA(cudaStreamSynchronize(rank.stream));
  const uint64_t late = seen != num_rounds;
  report(control ? "record.status_first" : "record.status", control, false, num_rounds, wrong_statuses, seen,
         num_rounds, late);
  report(control ? "record.input_first" : "record.input", control, false, num_rounds, wrong_inputs, seen, num_rounds,
         late);
}

void World::report(const char* name, bool control, bool must_find, uint32_t num_rounds, uint64_t wrong, uint64_t seen,
                   uint64_t wanted_seen, uint64_t late) {
  const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("{\"litmus\": \"%s\", \"rounds\": %u, \"wrong\": %llu, \"control\": %s, ", name, num_rounds,
              number(wrong), control ? "true" : "false");
  std::printf("\"seen\": %llu, \"unseen\": %llu, \"late\": %llu, \"ranks\": %u, \"gpus\": %d}\n", number(seen),
              number(wanted_seen - seen), number(late), static_cast<unsigned>(ranks.size()), num_gpus);
  std::fflush(stdout);
  failed |= late || seen != wanted_seen || (!control && wrong) || (must_find && !wrong);
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned long wanted = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 20'000;
  const unsigned long num_ranks = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 2;
  if (argc > 3 || wanted < 1 || wanted > 10'000'000 || num_ranks < 2 || num_ranks > kLitmusRanks) {
    std::fprintf(stderr, "litmus [ROUNDS [RANKS]]: ROUNDS in [1, 10000000], RANKS in [2, %u]\n", kLitmusRanks);
    return 2;
  }
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // a queue for each stream
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);       // a kernel that is loaded late waits for those that wait for it
  alarm(600);
  const uint32_t num_rounds = static_cast<uint32_t>(wanted < kBatch ? wanted : (wanted + kBatch - 1) / kBatch * kBatch);
  World world(static_cast<uint32_t>(num_ranks));
  for (const Litmus& litmus : kContracts) world.run(litmus, num_rounds);
  world.run_records(false, num_rounds);
  for (const Litmus& litmus : kControls) world.run(litmus, num_rounds);
  world.run_records(true, num_rounds);
  return world.failed;
}
