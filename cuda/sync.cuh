// sync.cuh: who tells whom what, when. Flags, deadlines and aborts; every access to a flag is in this file.
//
// Contracts. A line with a tag is a step or an assertion of tests/model/round.pml, under the same tag. `n` is the
// epoch of a channel: its n-th round. All flags are u64, in the region of the rank that reads them, one word for each
// rank that writes (of dispatch flags, for each part of its rows); none is ever reset. A waiter only ever sees epoch
// n-1 or n, since both waits of a round wait for every peer (of a part that was not raised then, n or an older one); so
// words are compared for the exact epoch.                                                                 [epoch.exact]
//
//   dispatch_flag[source, part]   epoch << 24 | token count                                        [dispatch_flag.word]
//     writer    the source, one store for each part and peer: a CTA of few, of the parts that it sent to the peers
//               that are its own; or the last CTA of many, of all. Of the parts, as many as the count has tiles, one
//               at least; publish                                                               [dispatch_flag.writer]
//     reader    the owner: one warp, in its dispatch wait (a kernel of its own, or the last CTA of its dispatch);
//               ld_acquire_sys                                                                   [dispatch_flag.reader]
//     meaning   the rows and bitmap words of round n from `source` that the part's CTA sends are visible;
//               of all parts: all                                                               [dispatch_flag.meaning]
//     chain     rows, those of bulk copies waited for by the threads that committed them -> CTA barrier ->
//               (many: acquire-release add on send_counter, at GPU scope, by one thread -> the last CTA sees all
//               adds -> CTA barrier ->) release at system scope -> flag                           [dispatch_flag.chain]
//     reuse     round n+1: its writer has passed its wait for end_flag n of the owner, which the owner stores
//               after it read this word                                                           [dispatch_flag.reuse]
//
//   end_flag[source]        epoch << 24 | phase (combine or release)                                    [end_flag.word]
//     writer    the source: one warp of a kernel of its own ("outbox ready"), which may wait then; publish
//                                                                                                     [end_flag.writer]
//     reader    the owner: one warp, in its combine or release wait; ld_acquire_sys                   [end_flag.reader]
//     meaning   `source` has written its outbox for round n,
//               and reads its own receive planes no more                                             [end_flag.meaning]
//     agreement where the phase is not the reader's own, the reader ends the channel               [end_flag.agreement]
//     chain     outbox rows of earlier kernels -> kernel boundary -> release at system scope (cumulative) -> flag;
//               the pull kernel starts after the waiting kernel has ended                              [end_flag.chain]
//     reuse     round n+1: its writer has passed its wait for dispatch_flag n+1 of the owner, which the owner
//               stores after it read this word                                                         [end_flag.reuse]
//
//   abort_word[source]      epoch << 24 | phase << 20 | culprit << 12 | reporter << 4 | failure       [abort_word.word]
//     writer    the source: the warp that gave up; again, smaller, if it learns more; publish       [abort_word.writer]
//     reader    the owner: every waiting warp, with its flags, ld_relaxed_sys;
//               before it acts on one, all of them, ld_acquire_sys                                  [abort_word.reader]
//     meaning   `source` left the channel for ever, and why; `reporter` found out; 0: it has not   [abort_word.meaning]
//     reuse     never, but for a smaller word                                                        [abort_word.reuse]
//
// Windows. The receive planes and the bitmap of rank r are r's to read from the end of its dispatch wait to its end
// signal, and its peers' to write from that signal until its next dispatch wait ends.                  [windows.planes]
// The outbox of r is r's to write from the end of its dispatch wait to its end signal, and its peers' to read from
// then until that next wait ends.                                                                      [windows.outbox]
//
// Waits that share a stream come in the same order on every rank, over all channels.                      [waits.order]
#pragma once

#include "ptx.cuh"

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr unsigned kLanes = 32;
constexpr uint64_t kNoBadRouting = ~uint64_t{0};
constexpr uint64_t kGraceNs = 500'000'000;
constexpr unsigned kPollsPerTime = 8;

__device__ __forceinline__ uint64_t epoch_of(uint64_t word) { return word >> 24; }
__device__ __forceinline__ uint64_t* flag_at(const Channel& c, uint32_t owner, uint64_t offset, uint32_t source) {
  return reinterpret_cast<uint64_t*>(c.peers[owner] + offset) + source;
}

__device__ __forceinline__ int32_t* source_counts(const Channel& c) {
  return reinterpret_cast<int32_t*>(reinterpret_cast<char*>(c.state) + c.source_counts_offset);
}

// Has nothing ended this channel? A kernel of a channel that has ended stores nothing to peers.
__device__ __forceinline__ bool is_alive(const Channel& c) {
#if defined(EP_A2A_FAULT_ignore_sticky)
  return true;
#endif
  return ld_state(&c.state->sticky) == 0;
}

// What a CTA of a dispatch sends: the parts first_part, first_part + part_step, ... of the rows, to ranks whose bit,
// their number % 32, is set.
struct Duty {
  uint32_t first_part;
  uint32_t part_step;
  uint32_t rank_bits;
};
__device__ __forceinline__ Duty whole_duty() { return {0, 1, kAllLanes}; }

// Stores `value` to words of this rank at owners, after all that this warp's block has written or seen: to those of
// `duty` among the first `parts` of the words [source, `stride`] at `offset`. One warp; a fence and stores on a GPU,
// release stores on a CPU (a race detector sees no bare fences). `peers`: those of the channel, where they lie nearer.
__device__ __forceinline__ void publish_warp(const Channel& c, uint64_t offset, uint64_t value, const uint64_t* peers,
                                             const Duty& duty, uint32_t parts, uint32_t stride) {
  const uint32_t lane = threadIdx.x % kLanes;
#if defined(__CUDACC__) && !defined(EP_A2A_FAULT_no_release)
  fence_acq_rel_sys();
#endif
#pragma unroll 1
  for (uint32_t owner = lane; owner < c.num_ranks && duty.rank_bits >> lane & 1; owner += kLanes) {
    uint64_t* flags = reinterpret_cast<uint64_t*>(peers[owner] + offset) + c.rank * stride;
#pragma unroll 4
    for (uint32_t part = duty.first_part; part < parts; part += duty.part_step) {
#if defined(__CUDACC__) || defined(EP_A2A_FAULT_no_release)
      st_relaxed_sys(flags + part, value);
#else
      st_release_sys(flags + part, value);
#endif
    }
  }
}

__device__ __forceinline__ void publish_warp(const Channel& c, uint64_t offset, uint64_t value) {
  publish_warp(c, offset, value, c.peers, whole_duty(), 1, 1);
}

// A CTA's place among those of its grid that add to a counter; `all_done`: all of them added that they were done, or
// will be. A kernel uses a counter, which is 0 before and after it, in one of two ways:
//
//   last_cta   at its end, acquire-release: the last one sees what the others wrote
//   starting   relaxed, by the thread that read the state, what is added depending on that (dispatch.cu): the last one
//              knows that all have a place on the GPU and have read the state, which it may change; of rows it knows
//              nothing, those are behind flags
struct Place {
  bool is_last;
  bool all_done;
};
constexpr uint32_t kNotDone = 1u << 17;  // above the CTAs of any grid
__device__ __forceinline__ uint32_t own_of(bool done) { return done ? 1 : 1 + kNotDone; }
// From what the counter held before this CTA's addition; the last one clears it. One thread.
__device__ __forceinline__ Place place_of(uint32_t* counter, uint32_t before, bool done) {
  const uint32_t all = before + own_of(done);
  const bool is_last = all % kNotDone == gridDim.x;
  if (is_last) st_word(counter, 0u);
  return {is_last, all < kNotDone};
}

// True in all threads of the CTA that is the last of its grid to come here; it sees what the others wrote before.
// `done` becomes whether all threads of the grid came with true: another kernel may end the channel while they start.
__device__ __forceinline__ bool last_cta(uint32_t* counter, bool& done) {
  done = __syncthreads_and(done);
  if (gridDim.x == 1) return true;
  Place place{false, true};
  if (threadIdx.x == 0) place = place_of(counter, atom_add_acq_rel_gpu(counter, own_of(done)), done);
  if (!__syncthreads_or(place.is_last)) return false;
  done = __syncthreads_and(place.all_done);
  return true;
}

__device__ __forceinline__ bool last_cta(uint32_t* counter) {
  bool done = true;
  return last_cta(counter, done);
}

struct Why {  // a channel's end, as one warp found it; equal in all its lanes
  Failure failure;
  Phase phase;    // what this rank is doing
  Phase late_in;  // what the culprit did not finish
  uint32_t culprit;
  uint32_t reporter;
  uint64_t epoch_wanted;
  uint64_t epoch_seen;
  uint64_t waited_ns;
};

__device__ __forceinline__ uint64_t abort_word(const Why& why) {
  return why.epoch_wanted << 24 | why.late_in << 20 | why.culprit << 12 | why.reporter << 4 | why.failure;
}

// Ends the channel: sticky word, status record, and an abort word at every peer. One warp. Two kernels of a rank can be
// here at once, as `leave` has a stream of its own: both words say that the channel has ended, the counter lets one of
// them write the record, and a waiting warp learns of the other by its abort word, with acquire.
__device__ __forceinline__ void fail_warp(const Channel& c, const Why& why) {
  const uint64_t word = abort_word(why);
  __syncwarp();  // a lane that has yet to read `sticky` must still find the channel alive
  if (threadIdx.x % kLanes == 0) {
    st_word(&c.state->sticky, word);
    Status* s = c.status;
    if (atom_add_acq_rel_gpu(&c.state->num_failures, 1) == 0) {  // `leave` may run beside a wait
      s->phase = why.phase;
      s->culprit = why.culprit;
      s->late_in = why.late_in;
      s->reported_by = why.reporter;
      s->epoch_wanted = why.epoch_wanted;
      s->epoch_seen = why.epoch_seen;
      s->waited_ns = why.waited_ns;
      st_release_sys(&s->failure, why.failure);
    }
  }
  __syncwarp();
  publish_warp(c, c.abort_words_offset, word);
}

static __device__ __noinline__ void fail_misuse_warp(const Channel& c, Phase phase, uint64_t epoch) {
  fail_warp(c, Why{kChannelMisuse, phase, phase, c.rank, c.rank, epoch, epoch, 0});
}

// Tells the host of an input that could not be taken as it came; an earlier one that was not read yet stays. One
// thread.
__device__ __forceinline__ void record_bad_input(const Channel& c, BadInput kind, const InputRecord& found) {
  InputRecord& record = c.inputs[kind];
  if (ld_acquire_sys(&record.present)) return;
  record = found;
  st_release_sys(&record.present, 1);
}

__device__ __forceinline__ uint64_t min_warp(uint64_t value) {
#pragma unroll 1
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other < value ? other : value;
  }
  return value;
}

// The smallest `of(source)` over all sources, in all lanes; ~0 where there is none.
template <class Of>
__device__ __forceinline__ uint64_t min_source_warp(const Channel& c, Of of) {
  uint64_t smallest = ~uint64_t{0};
#pragma unroll 1
  for (uint32_t source = threadIdx.x % kLanes; source < c.num_ranks; source += kLanes) {
    const uint64_t value = of(source);
    smallest = value < smallest ? value : smallest;
  }
  return min_warp(smallest);
}

// The abort word that is smallest here, its own one included; ~0 if nobody has left. One warp.
__device__ inline uint64_t smallest_abort_warp(const Channel& c) {
  return min_source_warp(c, [&](uint32_t source) {
    const uint64_t word = ld_acquire_sys(flag_at(c, c.rank, c.abort_words_offset, source));
    return word ? word : ~uint64_t{0};
  });
}

// What an abort word says, for a rank in `phase`.
__device__ __forceinline__ Why why_of(uint64_t word, Phase phase, uint64_t waited_ns) {
  const auto bits = [&](int shift, uint32_t mask) { return static_cast<uint32_t>(word >> shift) & mask; };
  return Why{static_cast<Failure>(bits(0, 0xf)),
             phase,
             static_cast<Phase>(bits(20, 0xf)),
             bits(12, 0xff),
             bits(4, 0xff),
             epoch_of(word),
             epoch_of(word),
             waited_ns};
}

// What a wait is for: the words [source, part] at an offset.
struct Flags {
  uint64_t offset;
  uint32_t parts;
};
__device__ __forceinline__ Flags dispatch_flags(const Channel& c) { return {c.dispatch_flags_offset, c.flag_parts}; }
__device__ __forceinline__ Flags end_flags(const Channel& c) { return {c.end_flags_offset, 1}; }
// Those that a source raises in a round, by the count of its tokens in each: a part has a tile at least.
__device__ __forceinline__ uint32_t parts_of(uint64_t flag, uint32_t parts) {
  const uint32_t tiles = (static_cast<uint32_t>(flag & 0xffffff) + kTileTokens - 1) / kTileTokens;
  return parts == 1 || tiles == 0 ? 1 : tiles < parts ? tiles : parts;
}

// Names the lowest rank whose flag is missing; `failure` is kHealthy if none is missing any more. One warp.
__device__ inline Why late_peer_warp(const Channel& c, Phase phase, const Flags& flags, uint64_t epoch,
                                     uint64_t waited_ns) {
  const uint64_t late = min_source_warp(c, [&](uint32_t source) {
    for (uint32_t part = 0, parts = 1; part < parts; ++part) {
      const uint64_t word = ld_acquire_sys(flag_at(c, c.rank, flags.offset, source * flags.parts + part));
      if (epoch_of(word) != epoch) return uint64_t{source} << 40 | (part == 0 ? epoch_of(word) : epoch - 1);
      parts = parts_of(word, flags.parts);
    }
    return ~uint64_t{0};
  });
  const Failure failure = late == ~uint64_t{0} ? kHealthy : kPeerTimeout;
  return Why{failure,  phase, phase, static_cast<uint32_t>(late >> 40), c.rank, epoch, late & ((uint64_t{1} << 40) - 1),
             waited_ns};
}

// The flag of a source's first part, after wait_for_peers_warp has returned true with `seen`.
__device__ __forceinline__ uint64_t arrived_flag(const Channel& c, const Flags& flags, uint32_t source, uint64_t seen) {
  return source < kLanes ? seen : ld_relaxed_sys(flag_at(c, c.rank, flags.offset, source * flags.parts));
}

// A waiter has been told of an abort, or its deadline has passed. True: nobody is missing any more, and nobody has
// told.
//
// It tells whom it misses, looks on for a while, and ends with the smallest word of all. So a rank that waits in an
// earlier phase, and knows the true culprit, is heard by those behind it that miss only that rank. It tells so too if
// it is told of a later phase; of its own phase, whoever told first is believed. One warp; out of line, as it is rare.
static __device__ __noinline__ bool give_up_warp(const Channel& c, Phase phase, Flags flags, uint64_t epoch, bool told,
                                                 uint64_t timeout_ns, uint64_t waited_ns) {
  __syncwarp();  // lanes divide the words anew: none may miss what another has seen
  // First: who reads such a word with acquire sees all flags that its writer had raised, and misses none of those.
  const uint64_t first = smallest_abort_warp(c);
  const Why own = late_peer_warp(c, phase, flags, epoch, waited_ns);
  if (!told && own.failure == kHealthy) return true;
  const bool in_later_phase = (first & 0xf) == kPeerTimeout && first >> 20 > (epoch << 4 | phase);
  if (own.failure != kHealthy && (!told || in_later_phase)) publish_warp(c, c.abort_words_offset, abort_word(own));
  const uint64_t start = time_ns(), grace_ns = timeout_ns / 10 < kGraceNs ? timeout_ns / 10 : kGraceNs;
  uint64_t looked_ns = 0;
  for (unsigned num_polls = 0; looked_ns < grace_ns; ++num_polls) {
    pause_waiting(num_polls, threadIdx.x % kLanes == 0);
    looked_ns = __shfl_sync(kAllLanes, time_ns() - start, 0);
  }
  const uint64_t word = smallest_abort_warp(c);
  fail_warp(c, word == abort_word(own) ? own : why_of(word, phase, waited_ns + looked_ns));
  return false;
}

// Do all flags that sources raise in a round carry `epoch`? Several of each, and at most 64: each lane looks at two of
// one source, as a load that acquires holds up the next. `first`: its first one, in the source's first lane. One warp.
__device__ __forceinline__ bool parts_are_here_warp(const Channel& c, const uint64_t* words, uint64_t epoch,
                                                    uint64_t& first) {
  const uint32_t lane = threadIdx.x % kLanes, lanes = c.flag_parts / 2, part = 2 * (lane & (lanes - 1));
  const bool has_source = lane < c.num_ranks * lanes;
  const FlagPair pair = has_source ? ld_acquire_sys_pair(words + 2 * lane) : FlagPair{};
  first = pair.first;
  const uint32_t count = __shfl_sync(kAllLanes, static_cast<uint32_t>(first), lane & ~(lanes - 1));
  const uint32_t parts = parts_of(count, c.flag_parts);  // of a source whose first flag is not here: not of this round
  return !has_source ||
         ((part >= parts || epoch_of(pair.first) == epoch) && (part + 1 >= parts || epoch_of(pair.second) == epoch));
}

// Waits until all flags of every source carry `epoch`. One warp. False: the channel has ended. `seen` is the first flag
// of the source with the number of the lane; `own` is the address of this rank's channel. Abort words go before flags:
// a late rank finds all flags there, and that its peers gave up.
__device__ __forceinline__ bool wait_for_peers_warp(const Channel& c, Phase phase, const Flags& flags, uint64_t epoch,
                                                    uint64_t own, uint64_t& seen) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t *words = reinterpret_cast<const uint64_t*>(own + flags.offset),
                 *abort_words = reinterpret_cast<const uint64_t*>(own + c.abort_words_offset);
  uint64_t start = 0, first = 0;
  for (unsigned num_polls = 0;; ++num_polls) {
    // Where nobody is late there is no look at the clock, and later one in a few.
    // The time is older than what is seen below: a rank that stood still past its deadline sees that it was given up.
    const bool sees_time = num_polls % kPollsPerTime == 1;
    uint64_t waited_ns = 0, timeout_ns = 0;
    if (sees_time) {
      const uint64_t now = __shfl_sync(kAllLanes, time_ns(), 0);
      if (!start) start = now;  // once: the number of polls wraps within the hour
      waited_ns = now - start;
      timeout_ns = epoch == 1 ? c.state->first_timeout_ns : c.state->timeout_ns;
    }
    bool here = true, told = false;
    if (flags.parts > 1) {  // at most 32 sources
      const uint64_t abort_word = lane < c.num_ranks ? ld_relaxed_sys(abort_words + lane) : 0;
      here = parts_are_here_warp(c, words, epoch, first);
      told = abort_word != 0;  // only now: both are under way together
    } else {
#pragma unroll 1
      for (uint32_t source = lane; source < c.num_ranks; source += kLanes) {
        told |= ld_relaxed_sys(abort_words + source) != 0;
        const uint64_t flag = ld_acquire_sys(words + source);
        here &= epoch_of(flag) == epoch;
        if (source < kLanes) first = flag;
      }
    }
#if defined(EP_A2A_FAULT_no_wait)
    here = true;
#elif defined(EP_A2A_FAULT_no_end_wait)  // of a rank that fetches nothing
    here |= phase == kPhaseRelease || (phase == kPhaseCombine && ld_word(&c.state->num_tokens) == 0);
#endif
    told = __any_sync(kAllLanes, told);
    if (!told && __all_sync(kAllLanes, here)) {
      seen = flags.parts > 1 ? __shfl_sync(kAllLanes, first, lane * (flags.parts / 2) % kLanes) : first;
      return true;
    }
    if (sees_time && (told || waited_ns >= timeout_ns) &&
        !give_up_warp(c, phase, flags, epoch, told, timeout_ns, waited_ns)) {
      return false;
    }
    pause_waiting(num_polls, threadIdx.x % kLanes == 0);
  }
}

// Tells the host of an id out of range in the round that ends, by its place in the state. One thread.
static __device__ __noinline__ void record_bad_routing(const Channel& c, uint64_t bad) {
  st_word(&c.state->bad_routing, kNoBadRouting);
  const int32_t token = static_cast<int32_t>(bad >> 40), position = static_cast<int32_t>(bad >> 32 & 0xff);
  record_bad_input(c, kInvalidRouting,
                   {0, token, position, static_cast<int32_t>(bad), static_cast<int32_t>(c.num_experts), 0});
}

// The end of a dispatch on this rank: waits for the rows of all sources and keeps the counts that came with the flags;
// 0 for all if the channel has ended. One warp.
__device__ __forceinline__ void wait_for_rows_warp(const Channel& c, bool alive, uint64_t epoch, uint64_t own) {
  const Flags flags = dispatch_flags(c);
  uint64_t seen = 0;
  const bool arrived = alive && wait_for_peers_warp(c, kPhaseDispatch, flags, epoch, own, seen);
#pragma unroll 1
  for (uint32_t source = threadIdx.x % kLanes; source < c.num_ranks; source += kLanes) {
    const uint64_t flag = arrived ? arrived_flag(c, flags, source, seen) : 0;
    st_word(source_counts(c) + source, static_cast<int32_t>(flag & 0xffffff));
  }
}
