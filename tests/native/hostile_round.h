// hostile_round.h: what one rank does with one channel under the hostile scheduler: rounds, kernels of the experts,
// and checks against the closed forms of soak_plan.h. Faults of a caller are planted here, those of kernels in cuda/.
#pragma once

#include <memory>

#include "hostile_scheduler.h"
#include "rows.cuh"
#include "soak_plan.h"

namespace {

constexpr int kPoison = 0xEE;
constexpr uint64_t kTimeoutNs = 1'000'000'000;
constexpr unsigned kThreads = 4;  // of the kernels here
constexpr uint32_t kNobody = ~0u;

uint64_t g_seed = 0;

void print_failure(const char* kind, const char* what) {
  const hostile::Machine& m = hostile::g_machine;
  std::printf(
      "{\"seed\": %llu, \"kind\": \"%s\", \"what\": \"rank %u: %s\", \"steps\": %llu, \"schedule\": \"%016llx\"}\n",
      static_cast<unsigned long long>(g_seed), kind, m.current, what, static_cast<unsigned long long>(m.steps),
      static_cast<unsigned long long>(m.schedule));
  std::fflush(stdout);
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;
inline Memory allocate(size_t bytes, int fill) {
  bytes = (bytes + 127) / 128 * 128;
  Memory memory(static_cast<char*>(std::aligned_alloc(128, bytes)));
  std::memset(memory.get(), fill, bytes);
  return memory;
}

struct World;
#if defined(EP_A2A_FAULT_partial_waits)
constexpr bool kPartialWaits = true;
#else
constexpr bool kPartialWaits = false;
#endif

struct Seat;
struct SeatParams {
  Seat* seat;
};

struct Seat {  // one rank's end of one channel
  World& world;
  Script script;
  const Plan& plan;
  uint32_t rank, round = 0, rounds_dead = 0, rounds_healthy = 0;
  bool is_dead = false, direct = false;
  char* region;
  Channel channel{};
  Status status{};
  InputRecord inputs[kNumBadInputs]{};
  Memory staged, out;
  std::vector<Memory> sources;
  std::vector<float> tails;
  int32_t count = 0;

  Seat(World& world, uint32_t rank, uint32_t channel_index, uint64_t seed);
  void dispatch(uint32_t round);
  void finish();
  void send(bool and_wait);
  void wait(Phase phase, bool launched);
  void combine();
  void check_sums(uint32_t num_rows);
  void expect_end() const;
  void expect(bool holds, const char* kind, const char* what, uint32_t source = 0, uint32_t token = 0) const;
  bool receives_nothing() const;
  void poison_outbox();
  uint32_t tokens_of(uint32_t source) const { return is_dead ? 0 : script.num_tokens(source, round); }
  void check_row(uint32_t source, uint32_t token, bool poisons) const;
  void check_bit(uint32_t source, uint32_t token, bool found) const;
};

struct World {
  const Plan& plan;
  size_t channel_bytes, block_bytes, arena_bytes;
  Memory arena;
  std::vector<uint64_t> peers[2];        // [channel][rank]
  std::vector<std::vector<Seat>> seats;  // [rank][channel]
  uint32_t num_rounds = 0, stopped_rank = kNobody, stop_round = 0;
  bool resumes = false;
  uint64_t misnamed = 0;  // times that a rank was named which was late only because it waited for the stopped one

  World(const Plan& plan, uint32_t num_channels, uint64_t seed);
  bool may_store(const void* address) const;
};

// ---- kernels of the experts ----

inline const char* row_of(const Seat& s, uint64_t offset, uint32_t row_bytes, uint32_t source, uint32_t token) {
  return row_at(s.channel, s.rank, offset, row_bytes, source, token);
}

// Each block looks at the flags itself before it reads what peers wrote, in the kernel that waited.
void early_reader_kernel(SeatParams p) {
  const Seat& s = *p.seat;
  const Channel& c = s.channel;
#if defined(EP_A2A_FAULT_no_acquire)
  const bool acquires = blockIdx.x == 0;
#else
  constexpr bool acquires = true;
#endif
  const uint64_t start = time_ns();
  const auto flag = [&](uint32_t word) {
    return hostile::load(flag_at(c, c.rank, c.dispatch_flags_offset, word), acquires);
  };
  for (;;) {
    bool here = true, leaves = time_ns() - start > 2 * kTimeoutNs;
    for (uint32_t source = threadIdx.x; source < c.num_ranks; source += blockDim.x) {
      for (uint32_t part = 0, parts = 1; part < parts; ++part) {
        const uint64_t word = flag(source * c.flag_parts + part);
        here &= epoch_of(word) == s.round + 1;
        if (here) parts = parts_of(word, c.flag_parts);
      }
      leaves |= ld_acquire_sys(flag_at(c, c.rank, c.abort_words_offset, source)) != 0;
    }
    if (__syncthreads_and(here)) break;
    if (__syncthreads_or(leaves)) return;
    pause_waiting(0, false);
  }
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    const uint32_t num_tokens = static_cast<uint32_t>(flag(source * c.flag_parts) & 0xffffff);
    for (uint32_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
      const bool bit = ld_word(bitmap_at(c, c.rank, source) + token / 32) >> token % 32 & 1;
      s.check_bit(source, token, bit);
      if (bit) s.check_row(source, token, false);
    }
  }
}

// Checks and poisons the rows that arrived, and puts results for them into the outbox or into what stage will copy.
void experts_kernel(SeatParams p) {
  const Seat& s = *p.seat;
  const Channel& c = s.channel;
  const uint32_t bytes = s.plan.number_bytes(), per_vector = kVectorBytes / bytes;
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    const uint32_t found = static_cast<uint32_t>(ld_word(source_counts(c) + source));
#if !defined(EP_A2A_FAULT_partial_waits)  // which keeps no counts where it does not wait
    s.expect(found == s.tokens_of(source), "lost", "wrong count", source, found);
#endif
#if defined(EP_A2A_FAULT_unbounded_scan)
    const uint32_t num_tokens = c.max_tokens;
#else
    const uint32_t num_tokens = found;
#endif
    for (uint32_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
      const bool bit = ld_word(bitmap_at(c, c.rank, source) + token / 32) >> token % 32 & 1;
      s.check_bit(source, token, bit);
      if (!bit) continue;
      s.check_row(source, token, true);
      const size_t row = size_t{source} * c.max_tokens + token;
      char* to = s.direct ? s.region + s.plan.outbox + row * s.plan.outbox_row_bytes
                          : s.staged.get() + row * s.plan.hidden * bytes;
      for (uint32_t v = threadIdx.x; v < s.plan.hidden / per_vector; v += blockDim.x) {
        Vector vector;
        for (uint32_t i = 0; i < per_vector; ++i) {
          const uint32_t bits = float_to_bits(s.script.result(c.rank, source, s.round, token, v * per_vector + i));
          std::memcpy(reinterpret_cast<char*>(&vector) + i * bytes, reinterpret_cast<const char*>(&bits) + 4 - bytes,
                      bytes);
        }
        st_vector(to + v * kVectorBytes, vector);
      }
    }
  }
}

void poison_outbox_kernel(SeatParams p) {
  const Seat& s = *p.seat;
  const size_t num_vectors = size_t{s.plan.num_ranks} * s.plan.max_tokens * s.plan.outbox_row_bytes / kVectorBytes;
  for (size_t v = threadIdx.x; v < num_vectors; v += blockDim.x) {
    st_vector(s.region + s.plan.outbox + v * kVectorBytes, Vector{{~0u, ~0u, ~0u, ~0u}});
  }
}

#if defined(EP_A2A_FAULT_partial_waits)
// Instead of the dispatch wait, on a rank that receives nothing.
void no_rows_kernel(SeatParams p) {
  const Channel& c = p.seat->channel;
  for (uint32_t source = threadIdx.x; source < c.num_ranks; source += blockDim.x) st_word(source_counts(c) + source, 0);
}

// Instead of the wait that ends a round: only for the ranks that hold rows of this one.
void wait_for_holders_kernel(SeatParams p) {
  const Seat& s = *p.seat;
  const Channel& c = s.channel;
  for (uint32_t owner = threadIdx.x; owner < c.num_ranks; owner += blockDim.x) {
    bool holds = false;
    for (uint32_t t = 0; t < s.script.num_tokens(s.rank, s.round); ++t)
      holds |= s.script.goes(s.rank, s.round, t, owner);
    const uint64_t start = time_ns();
    while (holds && epoch_of(ld_acquire_sys(flag_at(c, c.rank, c.end_flags_offset, owner))) != s.round + 1) {
      s.expect(time_ns() - start < 2 * kTimeoutNs, "hang", "a peer's end never came", owner);
      pause_waiting(0, false);
    }
  }
  if (threadIdx.x == 0 && s.script.releases(s.round))
    st_word(&c.state->half_rounds, ld_word(&c.state->half_rounds) + 1);
}
#endif

// ---- checks ----

void Seat::expect(bool holds, const char* kind, const char* what, uint32_t source, uint32_t token) const {
  if (holds) return;
  char text[160];
  std::snprintf(text, sizeof text, "%s (seat of rank %u, round %u, source %u, token %u)", what, rank, round, source,
                token);
  hostile::fail(kind, text);
}

void Seat::check_bit(uint32_t source, uint32_t token, bool found) const {
  const bool valid = token < tokens_of(source) && script.goes(source, round, token, rank);
  expect(found == valid, valid ? "lost" : "stale", "wrong bit", source, token);
}

void Seat::check_row(uint32_t source, uint32_t token, bool poisons) const {
  char row[512];
  Vector poison;
  std::memset(&poison, kPoison, sizeof poison);
  for (uint32_t p = 0; p < plan.planes.size(); ++p) {
    const PlanPlane& plane = plan.planes[p];
    expect(plane.row_bytes <= sizeof row, "misuse", "a row is too wide");
    script.fill_row(p, source, round, token, row);
    char* at = row_at(channel, rank, plane.offset, plane.row_bytes, source, token);
    for (uint32_t v = threadIdx.x; v < plane.row_bytes / kVectorBytes; v += blockDim.x) {
      const Vector found = ld_vector(at + v * kVectorBytes);
      expect(std::memcmp(&found, row + v * kVectorBytes, kVectorBytes) == 0, "stale", "wrong row", source, token);
      if (poisons) st_vector(at + v * kVectorBytes, poison);
    }
  }
}

void Seat::check_sums(uint32_t num_rows) {
  const uint32_t bytes = plan.number_bytes();
  for (uint32_t token = 0; token < num_rows; ++token) {
    for (uint32_t i = 0; i < plan.hidden; ++i) {
      float sum = 0;
      for (uint32_t owner = 0; token < script.num_tokens(rank, round) && owner < plan.num_ranks; ++owner) {
        if (script.goes(rank, round, token, owner)) sum += script.result(owner, rank, round, token, i);
      }
      float found = 0;
      std::memcpy(&found, out.get() + (size_t{token} * plan.hidden + i) * bytes, bytes);
      if (is_dead) expect(found != found, "stale", "a sum after the channel has ended", rank, token);
      if (!is_dead) expect(std::memcmp(&sum, &found, 4) == 0, "stale", "wrong sum", rank, token);
    }
  }
}

// Whoever is not stopped has done all rounds or learnt of the abort.
void Seat::expect_end() const {
  if (hostile::g_ranks[rank].stopped || is_dead) return;
  expect(rounds_healthy == world.num_rounds, "hang", "has left without all rounds and without an abort");
  expect(channel.state->half_rounds == 2 * uint64_t{world.num_rounds}, "hang", "the channel counts other rounds");
}

// ---- a round ----

#if defined(EP_A2A_FAULT_partial_waits)
bool Seat::receives_nothing() const {
  for (uint32_t source = 0; source < plan.num_ranks; ++source) {
    for (uint32_t t = 0; t < script.num_tokens(source, round); ++t) {
      if (script.goes(source, round, t, rank)) return false;
    }
  }
  return true;
}
#endif

void Seat::poison_outbox() { launch<poison_outbox_kernel>(1, kThreads, 0, nullptr, SeatParams{this}); }

void Seat::send(bool and_wait) {
  const uint64_t h = script.draw('s', rank, round);
  const uint32_t shares_log2 = h / 64 % 4 == 0, ctas = shares_log2 ? 1 + h / 8 % 2 : 1 + h / 8 % 3;
  DispatchParams params = plan.dispatch(channel, h % 8 == 0, 64 << h / 32 % 2, ctas, shares_log2, h / 256 % 3 != 0);
  params.num_rows = script.num_rows(rank, round);
  for (uint32_t p = 0; p < plan.planes.size(); ++p) {
    const PlanPlane& plane = plan.planes[p];
    char* rows = sources[p].get();
    std::vector<char> row(plane.row_bytes);
    for (uint32_t t = 0; t < params.num_rows; ++t) {
      script.fill_row(p, rank, round, t, row.data());
      std::memcpy(rows + size_t{t} * plane.source_bytes, row.data(), plane.source_bytes);
      if (plane.tail_bytes) std::memcpy(&tails[t], row.data() + plane.source_bytes, 4);
    }
    params.sources[p] = {rows, plane.tail_bytes ? tails.data() : nullptr, plane.source_bytes, 4, 1, 0};
    const bool has_ids = p == plan.ids_plane || p == plan.ids_plane + 1;
    const bool is_whole = params.sources[p].align_bytes == kVectorBytes && plane.source_bytes == plane.row_bytes;
    if (!has_ids) (is_whole ? params.whole_planes : params.narrow_planes) |= 1u << p;
    if (p == plan.ids_plane) params.topk_ids = reinterpret_cast<const int32_t*>(rows);
  }
  count = script.wanted_tokens(rank, round);
  params.num_tokens = script.counts_on_device(rank, round) ? &count : nullptr;
  params.waits = and_wait;
  ep_a2a_dispatch_send(&params, nullptr);
  for (InputRecord& input : inputs) input = {};
}

// Only a rank that was stopped may end a channel, and its peers name it. They may also name one that waits for it on
// the other channel, or that this scheduler starved for longer than a waiter looks on: those are late as well. Counted.
void Seat::wait(Phase phase, bool launched) {
  const WaitParams params{sizeof params, phase, 0, 1, channel};
  if (!launched) ep_a2a_end(&params, nullptr);
  if (is_dead || status.failure == kHealthy) return;
  is_dead = true;
  const uint32_t gone = world.stopped_rank;
  const bool stopped = gone != kNobody && (hostile::g_ranks[gone].stopped || rank == gone);
  expect(stopped, "hang", "a wait ended although nobody was stopped", status.culprit, status.late_in);
  expect(status.failure == kPeerTimeout, "hang", "another failure than a peer's timeout", status.failure);
  expect(status.culprit == gone || world.seats[0].size() > 1 || plan.num_ranks > 2, "hang",
         "names another rank than the stopped one", status.culprit, status.late_in);
  world.misnamed += status.culprit != gone;
}

void Seat::dispatch(uint32_t next_round) {
  round = next_round;
  if (rounds_dead > 1) return;
  const uint64_t h = script.draw('k', rank, round);
  const bool at_once = h % 4 == 0 && !kPartialWaits;
  send(at_once);
#if defined(EP_A2A_FAULT_partial_waits)
  if (receives_nothing()) return launch<no_rows_kernel>(1, kThreads, 0, nullptr, SeatParams{this}), void();
#endif
  if (!is_dead && h % 2) launch<early_reader_kernel>(2, kThreads, 0, nullptr, SeatParams{this});
  wait(kPhaseDispatch, at_once);
#if !defined(EP_A2A_FAULT_early_poison)
  if (!is_dead) poison_outbox();
#endif
}

void Seat::combine() {
  OutboxParams params{};
  params.struct_bytes = sizeof params;
  params.num_ctas = 1 + script.draw('c', rank, round) % 3;
  params.num_threads = 4;
  params.hidden = plan.hidden;
  params.number = plan.number;
  params.num_rows = script.num_rows(rank, round);
  params.outbox_offset = plan.outbox;
  params.outbox_row_bytes = plan.outbox_row_bytes;
  params.out = out.get();
  params.channel = channel;
  ep_a2a_combine_pull(&params, nullptr);
  check_sums(params.num_rows);
}

void Seat::finish() {
  if (rounds_dead > 1) return;
  const uint64_t h = script.draw('w', rank, round);
  const Phase phase = script.releases(round) ? kPhaseRelease : kPhaseCombine;
  direct = h % 3 != 0;
  launch<experts_kernel>(1 + h / 4 % 3, kThreads, 0, nullptr, SeatParams{this});
  if (!direct) {
    OutboxParams params{};
    params.struct_bytes = sizeof params;
    params.num_ctas = 2;
    params.num_threads = 4;
    params.hidden = plan.hidden;
    params.number = plan.number;
    params.outbox_offset = plan.outbox;
    params.outbox_row_bytes = plan.outbox_row_bytes;
    params.rows = staged.get();
    params.channel = channel;
    ep_a2a_outbox_stage(&params, nullptr);
  }
  const bool at_once = script.draw('e', rank, round) % 2 && !kPartialWaits;
  const WaitParams signal{sizeof signal, phase, 1, at_once, channel};
  ep_a2a_end(&signal, nullptr);
#if defined(EP_A2A_FAULT_partial_waits)
  launch<wait_for_holders_kernel>(1, kThreads, 0, nullptr, SeatParams{this});
#else
  wait(phase, at_once);
#endif
  if (phase == kPhaseCombine) combine();
#if defined(EP_A2A_FAULT_early_poison)
  poison_outbox();
#endif
  is_dead ? ++rounds_dead : ++rounds_healthy;
}

// ---- the ranks' memory ----

size_t rounded(size_t bytes) { return (bytes + 127) / 128 * 128; }

World::World(const Plan& plan_, uint32_t num_channels, uint64_t seed)
    : plan(plan_),
      channel_bytes(rounded(plan.channel_bytes)),
      block_bytes(channel_bytes + rounded(plan.state_bytes)),
      arena_bytes(block_bytes * num_channels * plan.num_ranks),
      arena(allocate(arena_bytes, kPoison)),
      seats(plan.num_ranks) {
  for (uint32_t c = 0; c < num_channels; ++c) {
    for (uint32_t r = 0; r < plan.num_ranks; ++r) {
      peers[c].push_back(reinterpret_cast<uint64_t>(arena.get() + (r * num_channels + c) * block_bytes));
    }
  }
  for (uint32_t r = 0; r < plan.num_ranks; ++r) {
    seats[r].reserve(num_channels);
    for (uint32_t c = 0; c < num_channels; ++c) seats[r].emplace_back(*this, r, c, seed);
  }
}

// A channel that has ended stores nothing to peers but its abort word.
bool World::may_store(const void* address) const {
  const size_t byte = static_cast<size_t>(static_cast<const char*>(address) - arena.get());
  const size_t block = byte / block_bytes, offset = byte % block_bytes, num_channels = seats[0].size();
  const uint32_t rank = hostile::g_machine.current;
  if (block / num_channels == rank || !seats[rank][block % num_channels].is_dead) return true;
  return offset >= plan.abort_words && offset < plan.abort_words + 8 * plan.num_ranks;
}

Seat::Seat(World& world_, uint32_t rank_, uint32_t channel_index, uint64_t seed)
    : world(world_),
      script{world_.plan, mix(seed + channel_index)},
      plan(world_.plan),
      rank(rank_),
      region(reinterpret_cast<char*>(world_.peers[channel_index][rank_])),
      staged(allocate(size_t{plan.num_ranks} * plan.max_tokens * plan.hidden * 4, 0xff)),
      out(allocate(size_t{plan.max_tokens} * plan.hidden * 4, 0xff)),
      tails(plan.max_tokens) {
  ChannelState* state = reinterpret_cast<ChannelState*>(region + world.channel_bytes);
  std::memset(static_cast<void*>(state), 0, plan.state_bytes);
  state->bad_routing = ~uint64_t{0};
  state->timeout_ns = state->first_timeout_ns = kTimeoutNs;
  for (const uint64_t offset : {plan.dispatch_flags, plan.end_flags, plan.abort_words}) {
    std::memset(region + offset, 0, 8 * plan.flag_parts * plan.num_ranks);
  }
  channel = plan.channel(world.peers[channel_index].data(), state, &status, inputs, rank);
  for (const PlanPlane& plane : plan.planes) {
    sources.push_back(allocate(size_t{plan.max_tokens} * plane.source_bytes + 16, 0));
  }
}

}  // namespace
