// hostile.cpp: the ranks of a local world under a hostile scheduler and memory, for many rounds and seeds:
//
//   hostile ROUNDS FIRST_SEED NUM_SEEDS PLAN...
//
// A seed chooses a plan (as of soak.cpp), one channel or two, what every rank sends, the schedule, what every load
// finds, and whether a rank is stopped in the middle: for ever, or until its peers have given up. Every rank checks
// what it receives and the sums that it fetches; after an abort all must learn of it and store nothing to peers.
// Prints one line of JSON and ends at the first seed that fails; the same seed fails again in the same way.
#include "hostile_round.h"

namespace {

constexpr uint64_t kStepsPerRound = 400'000;
#if defined(EP_A2A_FAULT_partial_waits)  // whose waits know no abort
constexpr bool kStops = false;
#else
constexpr bool kStops = true;
#endif

struct Totals {
  uint64_t seeds = 0, rounds = 0, aborts = 0, misnamed = 0, steps = 0, schedule = 0;
};
Totals g_totals;
World* g_world = nullptr;

// Rounds of all channels in an order that all ranks share: one after the other, or overlapping.
void run_rank(uint32_t rank) {
  World& w = *g_world;
  std::vector<Seat>& seats = w.seats[rank];
  for (uint32_t round = 0; round < w.num_rounds; ++round) {
    if (rank == w.stopped_rank && round == w.stop_round) {
      const uint64_t h = seats[0].script.draw('S');
      (h % 2 ? hostile::rank().steps_to_stop : hostile::rank().releases_to_stop) = 1 + h / 2 % (h % 2 ? 5000 : 12);
    }
    const uint64_t order = seats.size() == 1 ? 0 : seats[0].script.draw('q', round) % 3;
    for (Seat& seat : seats) {
      seat.dispatch(round);
      if (order == 0) seat.finish();
    }
    if (order == 1) {
      for (Seat& seat : seats) seat.finish();
    } else if (order == 2) {
      for (size_t i = seats.size(); i-- > 0;) seats[i].finish();
    }
    if (std::all_of(seats.begin(), seats.end(), [](const Seat& seat) { return seat.rounds_dead > 1; })) return;
  }
}

// Fresh ranks until `num_rounds` are done or one is stopped. Returns how many they did.
uint32_t run_episode(World& w, uint64_t seed) {
  g_world = &w;
  hostile::g_body = run_rank;
  hostile::begin(w.arena.get(), w.arena_bytes, w.plan.num_ranks, seed);
  hostile::g_machine.may_store = [](const void* address) { return g_world->may_store(address); };
  hostile::resume(kStepsPerRound * (w.num_rounds + 10));
  const bool stopped = w.stopped_rank != kNobody && hostile::g_ranks[w.stopped_rank].stopped;
  g_totals.aborts += stopped;
  if (stopped && w.resumes) {
    hostile::g_ranks[w.stopped_rank].stopped = false;
    hostile::resume(kStepsPerRound * 10);
  }
  uint32_t rounds = w.num_rounds;
  for (const std::vector<Seat>& seats : w.seats) {
    for (const Seat& seat : seats) {
      seat.expect_end();
      rounds = std::min(rounds, seat.rounds_healthy);
    }
  }
  g_totals.misnamed += w.misnamed;
  return stopped ? std::max(rounds, 1u) : rounds;
}

void run_seed(const std::vector<Plan>& plans, uint64_t seed, uint32_t num_rounds) {
  const Plan& plan = plans[seed % plans.size()];
  const uint32_t num_channels = 1 + mix(seed) % 3 / 2;
  hostile::Machine& m = hostile::g_machine;
  m.schedule = m.steps = m.now_ns = 0;
  g_seed = seed;
  for (uint32_t done = 0, episode = 0; done < num_rounds; ++episode) {
    const uint64_t h = mix(seed * 64 + episode);
    World w(plan, num_channels, h);
    w.num_rounds = num_rounds - done;
    if (kStops && h % 4 == 0) {
      w.stopped_rank = h / 4 % plan.num_ranks;
      w.stop_round = h / 64 % w.num_rounds;
      w.resumes = h >> 33 & 1;
    }
    done += run_episode(w, h);
  }
  g_totals.steps += m.steps;
  g_totals.schedule = mix(g_totals.schedule ^ m.schedule ^ m.random);
  g_totals.rounds += num_rounds;
  ++g_totals.seeds;
}

}  // namespace

void hostile::fail(const char* kind, const char* what) {
  print_failure(kind, what);
  _exit(1);
}

int main(int argc, char** argv) {
  if (argc < 5) {
    std::printf("hostile ROUNDS FIRST_SEED NUM_SEEDS PLAN...\n");
    return 2;
  }
  const uint32_t num_rounds = static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10));
  const uint64_t first = std::strtoull(argv[2], nullptr, 10), count = std::strtoull(argv[3], nullptr, 10);
  std::vector<Plan> plans;
  for (int i = 4; i < argc; ++i) {
    plans.emplace_back(argv[i]);
    if (plans.back().num_ranks <= hostile::kMostRanks) continue;
    std::fprintf(stderr, "%s has %u ranks: at most %u\n", argv[i], plans.back().num_ranks, hostile::kMostRanks);
    return 2;
  }
  simt::g_hook.store([](simt::Point) { hostile::step(); });
  for (uint64_t seed = first; seed < first + count; ++seed) run_seed(plans, seed, num_rounds);
  const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("{\"seeds\": %llu, \"rounds\": %llu, \"aborts\": %llu, \"misnamed\": %llu, ", number(g_totals.seeds),
              number(g_totals.rounds), number(g_totals.aborts), number(g_totals.misnamed));
  std::printf("\"steps\": %llu, \"stale_loads\": %llu, \"schedule\": \"%016llx\"}\n", number(g_totals.steps),
              number(hostile::g_machine.stale_loads), number(g_totals.schedule));
  return 0;
}
