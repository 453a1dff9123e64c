// soak.cpp: the ranks of a local world as OS threads, for many rounds, with nothing that orders them but the protocol:
//
//   soak PLAN ROUNDS SEED [DELAYS]
//
// PLAN is written by tests/test_native.py; DELAYS is how many permille of the accesses to flags are delayed. Every
// rank checks all that it receives and all sums that it fetches against closed forms, and poisons inside its windows
// what it has checked. No rank prints, locks or shares a word with another during the rounds, so that ThreadSanitizer
// sees the order that the flags make and no other.
#include <memory>
#include <thread>

#include "check.h"
#include "soak_plan.h"

namespace {

constexpr int kPoison = 0xEE;
constexpr uint64_t kTimeoutNs = 60'000'000'000;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;
Memory allocate(size_t bytes, int fill) {
  Memory memory(static_cast<char*>(std::aligned_alloc(4096, (bytes + 4096) / 4096 * 4096)));
  std::memset(memory.get(), fill, bytes);
  return memory;
}

struct Totals {
  uint64_t rows = 0, sums = 0, order_shows = 0, bad_inputs = 0;
};

class Rank {
 public:
  Rank(const Script& script, uint32_t rank, const std::vector<uint64_t>& peers, bool late);
  void run(uint32_t num_rounds);
  Totals totals;

 private:
  void dispatch();
  void send_rows(DispatchParams& params);
  void expect_input_records();
  void check_received();
  void check_row(uint32_t plane, uint32_t source, uint32_t token, bool valid);
  void fill_outbox();
  void combine();
  void check_sums(uint32_t token, bool has_result);
  void end(Phase phase);
  void loiter(char where) const;
  void expect(bool holds, const char* what, uint32_t source = 0, uint32_t token = 0, uint32_t index = 0) const;
  float load(const char* from) const;
  void store(char* to, float value) const;

  const Script& script_;
  const Plan& plan_;
  uint32_t rank_, round_ = 0;
  bool late_;
  char* region_;
  Channel channel_{};
  Status status_{};
  InputRecord inputs_[kNumBadInputs]{};
  Memory state_, staged_, out_;
  std::vector<Memory> sources_;
  std::vector<float> tails_;
  std::vector<char> row_;
  int32_t count_ = 0;
};

Rank::Rank(const Script& script, uint32_t rank, const std::vector<uint64_t>& peers, bool late)
    : script_(script),
      plan_(script.plan),
      rank_(rank),
      late_(late),
      region_(reinterpret_cast<char*>(peers[rank])),
      state_(allocate(plan_.state_bytes, 0)),
      staged_(allocate(size_t{plan_.num_ranks} * plan_.max_tokens * plan_.hidden * plan_.number_bytes(), 0xff)),
      out_(allocate(size_t{plan_.max_tokens} * plan_.hidden * plan_.number_bytes(), 0xff)),
      tails_(plan_.max_tokens) {
  ChannelState* state = reinterpret_cast<ChannelState*>(state_.get());
  state->bad_routing = ~uint64_t{0};
  state->timeout_ns = state->first_timeout_ns = kTimeoutNs;
  channel_ = plan_.channel(peers.data(), state, &status_, inputs_, rank);
  size_t widest = 0;
  for (const PlanPlane& plane : plan_.planes) {
    sources_.push_back(allocate(size_t{plan_.max_tokens} * plane.source_bytes + 16, 0));
    widest = plane.row_bytes > widest ? plane.row_bytes : widest;
  }
  row_.resize(widest);
}

void Rank::expect(bool holds, const char* what, uint32_t source, uint32_t token, uint32_t index) const {
  if (holds) return;
  std::fprintf(stderr, "rank %u, round %u: %s: source %u, token %u, index %u\n", rank_, round_, what, source, token,
               index);
  _exit(1);
}

float Rank::load(const char* from) const {
  uint32_t bits = 0;
  std::memcpy(plan_.number == kFp32 ? reinterpret_cast<char*>(&bits) : reinterpret_cast<char*>(&bits) + 2, from,
              plan_.number_bytes());
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
void Rank::store(char* to, float value) const {  // fp32, or a value that bf16 holds
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  std::memcpy(to, plan_.number == kFp32 ? reinterpret_cast<char*>(&bits) : reinterpret_cast<char*>(&bits) + 2,
              plan_.number_bytes());
}

// Now and then a rank is late by itself.
void Rank::loiter(char where) const {
  const uint64_t h = script_.draw(where, rank_, round_);
  if (!late_ || h % 16) return;
  const timespec time{0, static_cast<long>(h / 16 % 500'000)};
  nanosleep(&time, nullptr);
}

// ---- dispatch ----

void Rank::send_rows(DispatchParams& params) {
  for (uint32_t p = 0; p < plan_.planes.size(); ++p) {
    const PlanPlane& plane = plan_.planes[p];
    const uint32_t step = p == plan_.ids_plane ? 4 : 1;  // ids are read as numbers too
    char* rows = sources_[p].get() + (step << script_.draw('a', rank_, round_, p) % 4) % 16;
    for (uint32_t t = 0; t < params.num_rows; ++t) {
      script_.fill_row(p, rank_, round_, t, row_.data());
      std::memcpy(rows + size_t{t} * plane.source_bytes, row_.data(), plane.source_bytes);
      if (plane.tail_bytes) std::memcpy(&tails_[t], row_.data() + plane.source_bytes, 4);
    }
    const uint64_t odd = reinterpret_cast<uint64_t>(rows) | plane.source_bytes | 16;
    params.sources[p] = {
        rows, plane.tail_bytes ? tails_.data() : nullptr, plane.source_bytes, static_cast<uint32_t>(odd & -odd), 1, 0};
    const bool has_ids = p == plan_.ids_plane || p == plan_.ids_plane + 1;
    const bool is_whole = params.sources[p].align_bytes == kVectorBytes && plane.source_bytes == plane.row_bytes;
    if (!has_ids) (is_whole ? params.whole_planes : params.narrow_planes) |= 1u << p;
    if (p == plan_.ids_plane) params.topk_ids = reinterpret_cast<const int32_t*>(rows);
  }
}

void Rank::dispatch() {
  const uint64_t h = script_.draw('s', rank_, round_);
  DispatchParams params =
      plan_.dispatch(channel_, h % 2, 64 << h / 16 % 3, 1 + h / 2 % 5, h / 1024 % 3, h / 4096 % 4 != 0);
  params.num_rows = script_.num_rows(rank_, round_);
  send_rows(params);
  count_ = script_.wanted_tokens(rank_, round_);
  params.num_tokens = script_.counts_on_device(rank_, round_) ? &count_ : nullptr;
  loiter('1');
  params.waits = h / 512 % 2;
  CHECK(ep_a2a_dispatch_send(&params, nullptr) == 0);
  loiter('2');
  const WaitParams wait{sizeof wait, kPhaseDispatch, 0, 1, channel_};
  if (!params.waits) CHECK(ep_a2a_end(&wait, nullptr) == 0);
  expect(status_.failure == kHealthy, "dispatch failed, culprit as source", status_.culprit);
}

void Rank::expect_input_records() {
  const uint32_t rows = script_.num_rows(rank_, round_), tokens = script_.num_tokens(rank_, round_);
  const auto [token, position] = script_.first_bad(rank_, round_);
  const InputRecord &routing = inputs_[kInvalidRouting], &count = inputs_[kInvalidCount];
  expect(count.present == (count_ < 0 || count_ > static_cast<int32_t>(rows)), "a wrong count is told, no other");
  if (count.present) {
    expect(count.value == count_ && count.limit == static_cast<int32_t>(rows),
           "other numbers in the record of a count");
  }
  expect(routing.present == (token < tokens), "an id out of range is told, no other", rank_, token, position);
  if (routing.present) {
    expect(routing.token == static_cast<int32_t>(token) && routing.position == static_cast<int32_t>(position) &&
               routing.value == script_.expert(rank_, round_, token, position),
           "another id in the record", rank_, token, position);
  }
  totals.bad_inputs += count.present + routing.present;
  for (InputRecord& record : inputs_) record = {};
}

// ---- what arrived ----

void Rank::check_row(uint32_t plane, uint32_t source, uint32_t token, bool valid) {
  const PlanPlane& p = plan_.planes[plane];
  char* row = region_ + p.offset + (size_t{source} * plan_.max_tokens + token) * p.row_bytes;
  if (valid) {
    script_.fill_row(plane, source, round_, token, row_.data());
  } else {
    std::memset(row_.data(), kPoison, p.row_bytes);
  }
  expect(std::memcmp(row, row_.data(), p.row_bytes) == 0, valid ? "wrong row" : "a row that was not sent here", source,
         token, plane);
  if (valid) std::memset(row, kPoison, p.row_bytes);
  totals.rows += valid;
}

void Rank::check_received() {
  for (uint32_t source = 0; source < plan_.num_ranks; ++source) {
    const uint32_t tokens = script_.num_tokens(source, round_);
    const int32_t* counts = reinterpret_cast<const int32_t*>(state_.get() + plan_.source_counts);
    expect(counts[source] == static_cast<int32_t>(tokens), "wrong count", source, tokens);
    const uint32_t* bitmap = reinterpret_cast<const uint32_t*>(region_ + plan_.bitmap) + source * plan_.bitmap_words;
    for (uint32_t token = 0; token < plan_.max_tokens; ++token) {
      const bool valid = token < tokens && script_.goes(source, round_, token, rank_);
      if (token / 32 <= (tokens - 1) / 32 && tokens) {
        expect((bitmap[token / 32] >> token % 32 & 1) == valid, "wrong bit", source, token);
      }
      for (uint32_t p = 0; p < plan_.planes.size(); ++p) check_row(p, source, token, valid);
    }
  }
}

// ---- the end of a round ----

void Rank::end(Phase phase) {
  const uint32_t both = script_.draw('e', rank_, round_) % 2;
  const WaitParams signal{sizeof signal, phase, 1, both, channel_}, wait{sizeof wait, phase, 0, 1, channel_};
  CHECK(ep_a2a_end(&signal, nullptr) == 0);
  loiter('3');
  if (!both) CHECK(ep_a2a_end(&wait, nullptr) == 0);
  expect_input_records();
  expect(status_.failure == kHealthy, "the end of a round failed, culprit as source", status_.culprit);
}

// Results go to the outbox, directly or through the kernel that stages them.
void Rank::fill_outbox() {
  const bool direct = script_.draw('w', rank_, round_) % 2;
  const uint32_t bytes = plan_.number_bytes(), stride = direct ? plan_.outbox_row_bytes : plan_.hidden * bytes;
  char* rows = direct ? region_ + plan_.outbox : staged_.get();
  const size_t num_rows = size_t{plan_.num_ranks} * plan_.max_tokens;
  std::memset(region_ + plan_.outbox, 0xff, num_rows * plan_.outbox_row_bytes);
  for (uint32_t source = 0; source < plan_.num_ranks; ++source) {
    const uint32_t tokens = script_.num_tokens(source, round_);
    for (uint32_t token = 0; token < tokens; ++token) {
      if (!script_.goes(source, round_, token, rank_)) continue;
      char* row = rows + (size_t{source} * plan_.max_tokens + token) * stride;
      for (uint32_t i = 0; i < plan_.hidden; ++i) {
        store(row + i * bytes, script_.result(rank_, source, round_, token, i));
      }
    }
  }
  if (direct) return;
  OutboxParams params{};
  params.struct_bytes = sizeof params;
  params.num_ctas = 3;
  params.num_threads = plan_.copy_threads;
  params.hidden = plan_.hidden;
  params.number = plan_.number;
  params.outbox_offset = plan_.outbox;
  params.outbox_row_bytes = plan_.outbox_row_bytes;
  params.rows = staged_.get();
  params.channel = channel_;
  CHECK(ep_a2a_outbox_stage(&params, nullptr) == 0);
}

float rounded_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

void Rank::check_sums(uint32_t token, bool has_result) {
  std::vector<uint32_t> owners;
  for (uint32_t peer = 0; has_result && peer < plan_.num_ranks; ++peer) {
    if (script_.goes(rank_, round_, token, peer)) owners.push_back(peer);
  }
  const uint32_t bytes = plan_.number_bytes();
  for (uint32_t i = 0; i < plan_.hidden; ++i) {
    float sum = 0, backwards = 0;
    for (size_t n = 0; n < owners.size(); ++n) {
      sum += script_.result(owners[n], rank_, round_, token, i);
      backwards += script_.result(owners[owners.size() - 1 - n], rank_, round_, token, i);
    }
    const float wanted = plan_.number == kBf16 ? rounded_to_bf16(sum) : sum;
    const float found = load(out_.get() + (size_t{token} * plan_.hidden + i) * bytes);
    expect(std::memcmp(&wanted, &found, 4) == 0, "wrong sum", rank_, token, i);
    totals.order_shows += sum != backwards;
  }
  totals.sums += owners.size() > 2 ? plan_.hidden : 0;
}

void Rank::combine() {
  OutboxParams params{};
  params.struct_bytes = sizeof params;
  params.num_ctas = 1 + script_.draw('c', rank_, round_) % 5;
  params.num_threads = plan_.copy_threads;
  params.hidden = plan_.hidden;
  params.number = plan_.number;
  params.num_rows = script_.num_rows(rank_, round_);
  params.outbox_offset = plan_.outbox;
  params.outbox_row_bytes = plan_.outbox_row_bytes;
  params.out = out_.get();
  params.channel = channel_;
  std::memset(out_.get(), 0xff, size_t{plan_.max_tokens} * plan_.hidden * plan_.number_bytes());
  CHECK(ep_a2a_combine_pull(&params, nullptr) == 0);
  for (uint32_t token = 0; token < params.num_rows; ++token) {
    check_sums(token, token < script_.num_tokens(rank_, round_));
  }
}

void Rank::run(uint32_t num_rounds) {
  for (round_ = 0; round_ < num_rounds; ++round_) {
    dispatch();
    check_received();
    loiter('4');
    if (script_.releases(round_)) {
      end(kPhaseRelease);
    } else {
      fill_outbox();
      end(kPhaseCombine);
      combine();
    }
    expect(channel_.state->half_rounds == 2 * (uint64_t{round_} + 1), "the channel counts other rounds");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::printf("soak PLAN ROUNDS SEED [DELAYS]; tests/test_native.py writes the plan\n");
    return argc == 1 ? 0 : 2;
  }
  const Plan plan(argv[1]);
  const uint32_t num_rounds = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
  const uint32_t delays = argc > 4 ? static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10)) : 0;
  const Script script{plan, std::strtoull(argv[3], nullptr, 10)};
  ep_a2a_host_delays(script.seed, delays, 200);

  std::vector<Memory> regions;
  std::vector<uint64_t> peers;
  for (uint32_t r = 0; r < plan.num_ranks; ++r) {
    regions.push_back(allocate(plan.channel_bytes, kPoison));
    peers.push_back(reinterpret_cast<uint64_t>(regions.back().get()));
    for (const uint64_t offset : {plan.dispatch_flags, plan.end_flags, plan.abort_words}) {
      std::memset(regions.back().get() + offset, 0, 8 * plan.flag_parts * plan.num_ranks);
    }
  }
  const double start = check::now_ms();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t r = 0; r < plan.num_ranks; ++r) {
    ranks.push_back(std::make_unique<Rank>(script, r, peers, delays > 0));
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank, num_rounds] { rank->run(num_rounds); });
  for (std::thread& thread : threads) thread.join();

  Totals all;
  for (const auto& rank : ranks) {
    all.rows += rank->totals.rows;
    all.sums += rank->totals.sums;
    all.order_shows += rank->totals.order_shows;
    all.bad_inputs += rank->totals.bad_inputs;
  }
  std::printf(
      "%u ranks, %u rounds: rows %llu, sums of 3 ranks or more %llu, order shows in %llu, bad inputs %llu, %.2f s\n",
      plan.num_ranks, num_rounds, static_cast<unsigned long long>(all.rows), static_cast<unsigned long long>(all.sums),
      static_cast<unsigned long long>(all.order_shows), static_cast<unsigned long long>(all.bad_inputs),
      (check::now_ms() - start) / 1000);
  CHECK(num_rounds < 50 || (all.rows && all.sums && all.order_shows * 8 > all.sums && all.bad_inputs));
  return 0;
}
