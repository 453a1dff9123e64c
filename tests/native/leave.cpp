// leave.cpp: a channel that another kernel ends while the CTAs of a dispatch start. One CTA has sent its rows, another
// sends none: nobody may raise a flag over those, open a round, or keep counts. Where flags are apart, those of the
// first CTA are raised.
//
//   leave PLAN     (soak_plan.h), on one rank that stands for all of its peers
#include "check.h"
#include "ptx.cuh"
#include "soak_plan.h"

namespace {

ChannelState* g_state;
bool g_ended;

// As `leave` does on a stream of its own: between two accesses of the second CTA, before it has read the word.
void end_channel(simt::Point) {
  if (g_ended || !simt::t_executor->current || simt::self().block->index.x != 1) return;
  g_ended = true;
  g_state->sticky = 1;
}

struct Seat {
  const Plan& plan;
  std::vector<Vector> region, state, rows;
  std::vector<uint64_t> peers;
  std::vector<float> tail;
  Status status{};
  InputRecord inputs[kNumBadInputs] = {};

  explicit Seat(const Plan& p)
      : plan(p), region(p.channel_bytes / 16 + 1), state(p.state_bytes / 16 + 1), tail(p.max_tokens, 1.0f) {
    peers.assign(plan.num_ranks, reinterpret_cast<uint64_t>(region.data()));
    g_state = reinterpret_cast<ChannelState*>(state.data());
    g_state->bad_routing = ~uint64_t{0};
  }

  void run(bool phased, bool apart) {
    const Channel channel = plan.channel(peers.data(), g_state, &status, inputs, 0);
    DispatchParams params = plan.dispatch(channel, phased, 64, 2, 0, apart);
    params.num_rows = 2 * kTileTokens;
    params.waits = 1;
    uint32_t widest = 0;
    for (const PlanPlane& plane : plan.planes) widest = widest < plane.row_bytes ? plane.row_bytes : widest;
    rows.resize(params.num_rows * (widest / 16 + 1));  // zeros: every token goes to expert 0
    params.topk_ids = reinterpret_cast<const int32_t*>(rows.data());
    for (uint32_t i = 0; i < params.num_planes; ++i) {
      const PlanPlane& plane = plan.planes[i];
      params.sources[i] = {rows.data(), plane.tail_bytes ? tail.data() : nullptr, plane.source_bytes, 4, 1, 0};
      if (i != plan.ids_plane && i != plan.ids_plane + 1) params.narrow_planes |= 1u << i;
    }
    g_ended = false;
    int32_t* counts = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(g_state) + plan.source_counts);
    for (uint32_t source = 0; source < plan.num_ranks; ++source) counts[source] = -1;
    simt::g_hook.store(end_channel);
    CHECK(ep_a2a_dispatch_send(&params, nullptr) == 0);
    simt::g_hook.store(nullptr);
    CHECK(g_ended);
    uint64_t* flags = reinterpret_cast<uint64_t*>(peers[0] + plan.dispatch_flags);
    for (uint32_t part = 0; part < plan.flag_parts; ++part) {
      CHECK((flags[part] != 0) == (params.flags_apart && part == 0));
      flags[part] = 0;
    }
    CHECK(g_state->half_rounds == 0 && g_state->send_counter == 0);
    for (uint32_t source = 0; source < plan.num_ranks; ++source) CHECK(counts[source] == 0);
    g_state->sticky = 0;
  }
};

}  // namespace

int main(int, char** arguments) {
  const Plan plan(arguments[1]);
  Seat seat(plan);
  for (const bool phased : {false, true}) {
    for (const bool apart : {false, true}) seat.run(phased, apart);
  }
  std::printf("no flag\n");
}
