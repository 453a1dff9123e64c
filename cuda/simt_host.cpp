// simt_host.cpp: delays at the places where another rank's timing could matter, for tests of the host library.
#include "simt_host.h"

#include "abi.h"

namespace {

struct Delays {
  uint64_t seed;
  uint32_t permille, max_us;
};
Delays g_delays{};

SIMT_NO_TSAN uint64_t next_random(uint64_t& state) {  // splitmix64
  state += 0x9e3779b97f4a7c15ull;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::atomic<uint64_t> g_num_threads{0};

// All fibers of an OS thread draw from one sequence; what they do there is none of the race detector's business.
SIMT_NO_TSAN void delay(simt::Point where) {
  if (where != simt::Point::kFlagLoad && where != simt::Point::kFlagStore) return;
  thread_local uint64_t random = g_delays.seed + g_num_threads.fetch_add(1) * 0x632be59bd9b4e019ull;
  if (next_random(random) % 1000 >= g_delays.permille) return;
  const timespec time{0, static_cast<long>(next_random(random) % (g_delays.max_us * 1000ull + 1))};
  nanosleep(&time, nullptr);
}

}  // namespace

void ep_a2a_host_delays(uint64_t seed, uint32_t permille, uint32_t max_us) {
  if (max_us > 500'000) max_us = 500'000;
  g_delays = {seed, permille, max_us};
  simt::g_hook.store(permille ? delay : nullptr);
}
