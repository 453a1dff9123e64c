// hostile_memory.h: a memory that keeps old values, and the accesses of ptx.cuh to it. Build with EP_A2A_HOSTILE.
//
// A location keeps its last values in the order of their stores, each with its number. A view says for every location
// the oldest value that a thread may still read. A load returns any value that the view allows, and raises the view to
// it; a store appends. A release attaches the storing thread's view to the value; only an acquiring load of that very
// value, a barrier among the block's threads, __syncwarp, or the start and end of a kernel joins views. An atomic add
// reads the newest value and hands on what was attached to it. Memory outside of the arena is plain.
//
// Before every access, hostile_scheduler.h may let another fiber of any rank run.
#pragma once

#include <algorithm>
#include <vector>

namespace hostile {

using View = std::vector<int16_t>;  // [location]: number of the oldest value that may be read

constexpr int kKept = 4;  // values of a location
constexpr size_t kMaxLocations = 4096;

struct Value {
  uint64_t words[2];
  bool is_release;
  View attached;
};

struct Location {
  uint32_t num_bytes;
  int16_t newest;
  Value values[kKept];
};

// What one rank runs: its kernels' fibers, and their views. The last view is that of the code between kernels.
struct Rank {
  simt::Executor executor;
  std::vector<View> views = std::vector<View>(simt::kFibersInFlight + 1);
  std::vector<uint32_t> polls = std::vector<uint32_t>(simt::kFibersInFlight);          // since the last event
  std::vector<uint64_t> polled_at = std::vector<uint64_t>(simt::kFibersInFlight);      // number of events then
  std::vector<uint64_t> blocked_since = std::vector<uint64_t>(simt::kFibersInFlight);  // `wakes` then
  uint64_t wakes = 1;                                                                  // ends of barriers
  bool done = false, stopped = false;
  uint64_t steps_to_stop = 0, releases_to_stop = 0;  // 0 = never
  simt::Fiber entry;

  size_t index(const simt::Thread* thread) const {
    return thread ? static_cast<size_t>(thread - executor.threads.data()) : simt::kFibersInFlight;
  }
  View& view() { return views[index(executor.current)]; }
};

struct Machine {
  char* arena = nullptr;
  std::vector<uint16_t> location_of;  // [4 bytes of the arena]: 1 + location; 0 = none yet
  std::vector<Location> locations;
  std::vector<View> meetings;
  std::vector<Rank*> ranks;
  uint32_t current = 0;
  uint64_t random = 0, schedule = 0, steps = 0, now_ns = 0, events = 0,
           stale_loads = 0;  // events: stores, and steps of the clock
  bool (*may_store)(const void*) = nullptr;
};
inline Machine g_machine;

void step();                                                 // hostile_scheduler.h: a place where another fiber may run
void poll();                                                 // a waiting thread has looked and not found
[[noreturn]] void fail(const char* kind, const char* what);  // ends the run, with its seed and schedule

constexpr uint32_t kPollsUntilNewest = 4, kPollsUntilAsleep = 8;

inline uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
inline uint64_t draw() { return mix_bits(g_machine.random += 0x9e3779b97f4a7c15ull); }
inline Rank& rank() { return *g_machine.ranks[g_machine.current]; }

inline void join(View& into, const View& from) {
  if (into.size() < from.size()) into.resize(from.size());
  int16_t* a = into.data();
  const int16_t* b = from.data();
  for (size_t i = 0, n = from.size(); i < n; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
}
inline int16_t& entry(View& view, size_t location) {
  if (view.size() <= location) view.resize((location + 64) / 64 * 64);
  return view[location];
}

inline void meet_arrive(uint64_t& meeting) {
  if (!meeting) {
    g_machine.meetings.emplace_back();
    meeting = g_machine.meetings.size();
  }
  join(g_machine.meetings[meeting - 1], rank().view());
}
inline void meet_leave(uint64_t meeting) {
  if (meeting) join(rank().view(), g_machine.meetings[meeting - 1]);
}

// The location at an address of the arena, its first value read from there; null outside of it.
inline Location* find(const void* address, uint32_t num_bytes, size_t& index) {
  Machine& m = g_machine;
  const size_t word = static_cast<size_t>(static_cast<const char*>(address) - m.arena) / 4;
  if (static_cast<const char*>(address) < m.arena || word >= m.location_of.size()) return nullptr;
  if (!m.location_of[word]) {
    if (m.locations.size() == kMaxLocations) fail("misuse", "too many locations: make the plan smaller");
    m.location_of[word] = static_cast<uint16_t>(m.locations.size() + 1);
    Location& fresh = m.locations.emplace_back();
    fresh = {num_bytes, 0, {}};
    std::memcpy(fresh.values[0].words, address, num_bytes);
  }
  index = m.location_of[word] - 1u;
  Location& location = m.locations[index];
  if (location.num_bytes != num_bytes) fail("misuse", "one address accessed in two sizes");
  return &location;
}

// Which value a load finds: often the newest, else any that the view allows. One that has polled often finds the
// newest, since a store becomes visible in the end.
inline int16_t choose_value(const Location& location, int16_t oldest) {
  Rank& r = rank();
  const size_t fiber = r.index(r.executor.current);
  oldest = std::max<int16_t>(oldest, static_cast<int16_t>(location.newest - kKept + 1));
  const bool eager = r.polled_at[fiber] == g_machine.events && r.polls[fiber] >= kPollsUntilNewest;
  if (oldest == location.newest || eager) return location.newest;
  const uint64_t h = draw();
  if (h & 1) return location.newest;
  return static_cast<int16_t>(oldest +
                              static_cast<int16_t>((h >> 1) % static_cast<uint64_t>(location.newest - oldest + 1)));
}

template <class T>
T load(const T* p, bool acquire) {
  static_assert(sizeof(T) <= sizeof(Value::words));
  size_t index = 0;
  if (!find(p, sizeof(T), index)) return *p;
  step();
  Location& location = g_machine.locations[index];
  View& view = rank().view();
  int16_t& oldest = entry(view, index);
  const int16_t number = choose_value(location, oldest);
  g_machine.stale_loads += number != location.newest;
  oldest = number;
  const Value& value = location.values[number % kKept];
  if (acquire && value.is_release) join(view, value.attached);
  T result;
  std::memcpy(static_cast<void*>(&result), value.words, sizeof(T));
  return result;
}

// Appends a value; `attached` holds what it hands on from the one before, if anything.
template <class T>
void append(Location& location, size_t index, T* p, T v, bool release, bool hands_on) {
  if (location.newest == INT16_MAX) fail("misuse", "too many stores to a location: fewer rounds");
  if (g_machine.may_store && !g_machine.may_store(p)) fail("stale", "a store to a peer after the channel has ended");
  const Value& before = location.values[location.newest % kKept];
  Value& value = location.values[++location.newest % kKept];
  entry(rank().view(), index) = location.newest;
  hands_on &= before.is_release;
  value.is_release = release || hands_on;
  std::memcpy(value.words, &v, sizeof(T));
  std::memcpy(static_cast<void*>(p), &v, sizeof(T));
  if (hands_on) value.attached = before.attached;
  if (release && hands_on) join(value.attached, rank().view());
  if (release && !hands_on) value.attached = rank().view();
  if (release && rank().releases_to_stop && --rank().releases_to_stop == 0) rank().steps_to_stop = 1;
  ++g_machine.events;
}

template <class T>
void store(T* p, T v, bool release) {
  size_t index = 0;
  Location* location = find(p, sizeof(T), index);
  if (!location) {
    *p = v;
    return;
  }
  step();
  append(g_machine.locations[index], index, p, v, release, false);
}

template <class T, class F>
T modify(T* p, F f, bool acquire, bool release) {
  size_t index = 0;
  Location* location = find(p, sizeof(T), index);
  if (!location) {
    const T old = *p;
    *p = f(old);
    return old;
  }
  step();
  location = &g_machine.locations[index];
  const Value& newest = location->values[location->newest % kKept];
  T old;
  std::memcpy(&old, newest.words, sizeof(T));
  if (acquire && newest.is_release) join(rank().view(), newest.attached);
  append(*location, index, p, f(old), release, true);
  return old;
}

}  // namespace hostile

inline uint64_t ld_state(const uint64_t* p) { return hostile::load(p, false); }
inline void st_byte(uint8_t* p, uint8_t v) {  // of a location that is read as a word
  const uintptr_t address = reinterpret_cast<uintptr_t>(p), shift = address % 4 * 8;
  const auto with_byte = [v, shift](uint32_t old) { return (old & ~(0xffu << shift)) | uint32_t{v} << shift; };
  hostile::modify(reinterpret_cast<uint32_t*>(address - address % 4), with_byte, false, false);
}
inline uint64_t ld_relaxed_sys(const uint64_t* p) { return hostile::load(p, false); }
inline uint64_t ld_acquire_sys(const uint64_t* p) { return hostile::load(p, true); }
inline uint32_t ld_acquire_sys(const uint32_t* p) { return hostile::load(p, true); }
inline void st_relaxed_sys(uint64_t* p, uint64_t v) { hostile::store(p, v, false); }
inline void st_release_sys(uint64_t* p, uint64_t v) { hostile::store(p, v, true); }
inline void st_release_sys(uint32_t* p, uint32_t v) { hostile::store(p, v, true); }
inline uint32_t atom_add_acq_rel_gpu(uint32_t* p, uint32_t v) {
#if defined(EP_A2A_FAULT_no_cta_release)
  constexpr bool kRelease = false;
#else
  constexpr bool kRelease = true;
#endif
  return hostile::modify(p, [v](uint32_t old) { return old + v; }, true, kRelease);
}
inline uint32_t atom_add_relaxed_gpu(uint32_t* p, uint32_t v) {
  return hostile::modify(p, [v](uint32_t old) { return old + v; }, false, false);
}
inline void red_min_relaxed_gpu(uint64_t* p, uint64_t v) {
  hostile::modify(p, [v](uint64_t old) { return v < old ? v : old; }, false, false);
}
inline Vector ld_vector(const void* p) { return hostile::load(static_cast<const Vector*>(p), false); }
inline void st_vector(void* p, const Vector& v) { hostile::store(static_cast<Vector*>(p), v, false); }
template <class Word>
Word ld_word(const Word* p) {
  static_assert(sizeof(Word) >= 4, "a word, not a byte of one");
  return hostile::load(p, false);
}
template <class Word>
void st_word(Word* p, Word v) {
  hostile::store(p, v, false);
}
inline uint64_t time_ns() { return hostile::g_machine.now_ns; }
inline void pause_waiting(unsigned, bool) { hostile::poll(); }
