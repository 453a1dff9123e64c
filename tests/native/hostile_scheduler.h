// hostile_scheduler.h: all ranks in one OS thread; a seed chooses which fiber of which rank runs next.
//
// At every access to the arena, every barrier and every look at a flag the running fiber goes on or another one does.
// How that is chosen changes all the time: fairly, one rank alone, one rank only when no other can run, a block of
// each rank only when nothing else of it can. A rank can be stopped for good. A fiber that waits for a peer sleeps
// once it has seen the newest values; when all sleep, the clock advances. So a deadline only ever passes because
// nothing else can happen, and the same seed gives the same run.
#pragma once

#include "ptx.cuh"

namespace hostile {

enum class Mood { kFair, kAlone, kStarved };
struct Policy {
  Mood mood = Mood::kFair;
  uint32_t target = 0;     // the rank that runs alone, or is starved
  uint32_t avoided = ~0u;  // the block of each rank that has to wait
  uint32_t stay = 0;       // of 256: how often the running fiber goes on
  uint64_t until_step = 0;
};
inline Policy g_policy;
inline simt::Fiber g_main;
inline uint64_t g_step_limit = 0;
constexpr uint64_t kTickNs = 50'000'000;

inline void choose_policy() {
  const uint64_t h = draw();
  constexpr uint32_t kStay[] = {0, 128, 224, 252};
  g_policy = {static_cast<Mood>(h % 3), static_cast<uint32_t>((h >> 8) % g_machine.ranks.size()),
              static_cast<uint32_t>((h >> 16) % 8), kStay[(h >> 24) % 4], g_machine.steps + (2ull << (h >> 32) % 14)};
}

inline bool can_run(const Rank& r, const simt::Thread* thread) {
  const size_t i = r.index(thread);
  const bool asleep = r.polls[i] >= kPollsUntilAsleep && r.polled_at[i] == g_machine.events;
  return r.blocked_since[i] != r.wakes && !asleep;
}

// A fiber of the rank that can run, from a random place on, of the avoided block only if need be; null if none can.
inline simt::Thread* pick(Rank& r) {
  if (r.executor.idle == 0) ++r.wakes;  // a barrier has ended, or a thread
  simt::Thread *thread = r.executor.current, *reserve = nullptr;
  for (uint64_t hops = draw() % 32; hops; --hops) thread = thread->next;
  for (unsigned i = 0; i < r.executor.num_running; ++i, thread = thread->next) {
    if (!can_run(r, thread)) continue;
    if (thread->block->index.x != g_policy.avoided) return thread;
    reserve = thread;
  }
  return reserve;
}

// The fiber that runs: of a kernel, or the rank's own before its first one and after its last.
inline simt::Fiber& running() {
  Rank& r = rank();
  return r.executor.current ? static_cast<simt::Fiber&>(*r.executor.current) : r.entry;
}

inline void go(uint32_t to, simt::Thread* thread) {
  Machine& m = g_machine;
  Rank& next = *m.ranks[to];
  simt::Fiber& from = running();
  m.schedule = mix_bits(m.schedule + (m.steps << 20 | to << 16 | next.index(thread)) + 0x9e3779b97f4a7c15ull);
  m.current = to;
  simt::t_executor = &next.executor;
  next.executor.current = thread;
  if (&from != &running()) simt::switch_stack(from, running());
}

// Lets a fiber run that can, by the policy of the moment.
inline void choose() {
  Machine& m = g_machine;
  for (;;) {
    if (m.steps >= g_policy.until_step) choose_policy();
    const uint32_t count = static_cast<uint32_t>(m.ranks.size()), start = static_cast<uint32_t>(draw() % count);
    bool any_left = false;
    for (uint32_t i = 0; i < 2 * count; ++i) {
      const uint32_t candidate = (start + i) % count;
      Rank& r = *m.ranks[candidate];
      if (r.done || r.stopped) continue;
      any_left = true;
      const bool preferred =
          g_policy.mood == Mood::kFair || (g_policy.mood == Mood::kAlone) == (candidate == g_policy.target);
      if (preferred != (i < count)) continue;
      if (!r.executor.current) return go(candidate, nullptr);
      if (simt::Thread* thread = pick(r)) return go(candidate, thread);
    }
    if (!any_left) return simt::switch_stack(running(), g_main);
    if (++m.steps > g_step_limit) fail("hang", "no step is possible and no deadline helps");
    m.now_ns += kTickNs;
    ++m.events;
  }
}

void step() {
  Machine& m = g_machine;
  ++m.now_ns;
  if (++m.steps > g_step_limit) fail("hang", "too many steps");
  Rank& r = rank();
  if (r.steps_to_stop && --r.steps_to_stop == 0) {
    r.stopped = true;
    return choose();
  }
  if (draw() % 256 >= g_policy.stay) choose();
}

void poll() {
  Rank& r = rank();
  const size_t fiber = r.index(r.executor.current);
  if (r.polled_at[fiber] != g_machine.events) {
    r.polled_at[fiber] = g_machine.events;
    r.polls[fiber] = 0;
  }
  ++r.polls[fiber];
  choose();
}

// What each rank does.
inline void (*g_body)(uint32_t) = nullptr;

inline void entry_main() {
  g_body(g_machine.current);
  rank().done = true;
  choose();
  std::abort();
}

inline constexpr uint32_t kMostRanks = 4;
inline Rank g_ranks[kMostRanks];

// Forgets all values and views: new ranks on the arena, whose bytes are the first values.
inline void begin(char* arena, size_t bytes, uint32_t num_ranks, uint64_t seed) {
  static simt::Stacks stacks = simt::map_stacks(kMostRanks);
  Machine& m = g_machine;
  m.arena = arena;
  m.location_of.assign(bytes / 4, 0);
  m.locations.clear();
  m.locations.reserve(kMaxLocations);
  m.ranks.clear();
  for (View& view : m.meetings) view.clear();
  for (uint32_t i = 0; i < num_ranks; ++i) {
    Rank& r = g_ranks[i];
    m.ranks.push_back(&r);
    for (View& view : r.views) view.clear();
    std::fill(r.polls.begin(), r.polls.end(), 0);
    if (r.executor.current) {  // fibers of a rank that was stopped stand in the middle of a kernel
      r.executor.release();
      r.executor.warps.clear();
      r.executor.current = nullptr;
    }
    r.executor.idle = 0;
    r.done = r.stopped = false;
    r.steps_to_stop = r.releases_to_stop = 0;
    simt::prepare(r.entry, stacks.lowest(i), entry_main);
  }
  m.random = seed;
  g_policy = {};
}

// Runs until every rank has returned or was stopped, in at most `step_limit` steps.
inline void resume(uint64_t step_limit) {
  Machine& m = g_machine;
  g_step_limit = m.steps + step_limit;
  for (m.current = 0; m.current < m.ranks.size() && (rank().done || rank().stopped); ++m.current) {
  }
  if (m.current == m.ranks.size()) return;
  simt::t_executor = &rank().executor;
  simt::switch_stack(g_main, running());
  simt::t_executor = nullptr;
}

}  // namespace hostile

void hostile::arrive(uint64_t& meeting) {
  Rank& r = rank();
  if (r.executor.current && &meeting == &r.executor.order_end) r.polls[r.index(r.executor.current)] = 0;
  meet_arrive(meeting);
}
void hostile::leave(uint64_t& meeting) { meet_leave(meeting); }
void hostile::block() {
  Rank& r = rank();
  if (r.executor.idle == 1) ++r.wakes;  // whoever was blocked before a barrier ended can run
  r.blocked_since[r.index(r.executor.current)] = r.wakes;
  choose();
}
