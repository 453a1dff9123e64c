// soak_plan.h: the layout that a soak runs with, read from a file that tests/test_native.py writes from
// ep_a2a.layout; and what every rank sends in every round, as closed forms of (rank, round, token).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"

struct PlanPlane {
  uint64_t offset;
  uint32_t row_bytes, source_bytes, tail_bytes, tile_offset;
};

struct Plan {
  uint32_t num_ranks = 0, num_experts = 0, top_k = 0, hidden = 0, max_tokens = 0, number = 0;
  uint32_t flag_parts = 0, bitmap_words = 0, mask_words = 0, outbox_row_bytes = 0, copy_threads = 0;
  uint32_t tile_start = 0, token_bytes = 0;
  uint32_t ids_plane = 0, experts_per_rank = 0, num_longer_ranks = 0;
  Divisor per_longer_rank{}, per_rank{};
  uint64_t dispatch_flags = 0, end_flags = 0, abort_words = 0, bitmap = 0, outbox = 0, channel_bytes = 0;
  uint64_t source_counts = 0, masks = 0, state_bytes = 0;
  std::vector<uint32_t> first_expert;  // [num_ranks + 1]
  std::vector<PlanPlane> planes;

  explicit Plan(const char* path);
  // A rank's channel.
  Channel channel(const uint64_t* peers, ChannelState* state, Status* status, InputRecord* inputs,
                  uint32_t rank) const {
    return {.peers = peers,
            .state = state,
            .status = status,
            .inputs = inputs,
            .rank = rank,
            .num_ranks = num_ranks,
            .max_tokens = max_tokens,
            .bitmap_words = bitmap_words,
            .mask_words = mask_words,
            .flag_parts = flag_parts,
            .num_experts = num_experts,
            .reserved = 0,
            .dispatch_flags_offset = dispatch_flags,
            .end_flags_offset = end_flags,
            .abort_words_offset = abort_words,
            .bitmap_offset = bitmap,
            .source_counts_offset = source_counts,
            .masks_offset = masks};
  }
  // A dispatch of a schedule, but for its rows: CTAs of so many shares; `apart`: with flags of their own, if they may.
  DispatchParams dispatch(const Channel& channel, bool phased, uint32_t threads, uint32_t ctas_of_a_share,
                          uint32_t shares_log2, bool apart) const {
    DispatchParams p{};
    p.struct_bytes = sizeof p;
    p.num_planes = static_cast<uint32_t>(planes.size());
    p.top_k = top_k;
    p.experts_per_rank = experts_per_rank;
    p.num_longer_ranks = num_longer_ranks;
    p.ids_plane = ids_plane;
    p.per_longer_rank = per_longer_rank;
    p.per_rank = per_rank;
    p.num_ctas = ctas_of_a_share << shares_log2;
    p.shares_log2 = shares_log2;
    for (uint32_t rank = 0; rank < 32; rank += 1u << shares_log2) p.share_ranks |= 1u << rank;
    p.flags_apart = phased && apart && ctas_of_a_share <= flag_parts;
    p.phased = phased;
    p.num_threads = threads;
    p.shared_bytes = tile_start + (phased ? kTileTokens * token_bytes : 0);
    p.channel = channel;
    for (uint32_t i = 0; i < p.num_planes; ++i) {
      p.planes[i] = {planes[i].offset, planes[i].row_bytes, planes[i].tile_offset};
    }
    return p;
  }
  uint32_t number_bytes() const { return number == kFp32 ? 4 : 2; }
};

// Each line: a name and its values.
inline Plan::Plan(const char* path) {
  std::ifstream file(path);
  std::string name;
  const auto give = [&](auto&... fields) { (void)(file >> ... >> fields); };
  while (file >> name) {
    if (name == "shape") give(num_ranks, num_experts, top_k, hidden, max_tokens, number);
    if (name == "parts") give(flag_parts);
    if (name == "divisors") {
      give(per_longer_rank.multiplier, per_longer_rank.shift, per_rank.multiplier, per_rank.shift);
    }
    if (name == "strides") give(bitmap_words, mask_words, outbox_row_bytes);
    if (name == "flags") give(dispatch_flags, end_flags, abort_words);
    if (name == "channel") give(bitmap, outbox, channel_bytes);
    if (name == "state") give(source_counts, masks, state_bytes);
    if (name == "threads") give(copy_threads);
    if (name == "tile") give(tile_start, token_bytes);
    if (name == "ids_plane") give(ids_plane);
    if (name == "shares") give(experts_per_rank, num_longer_ranks);
    if (name == "first_expert") give(first_expert.emplace_back());
    if (name == "plane") {
      PlanPlane& p = planes.emplace_back();
      give(p.offset, p.row_bytes, p.source_bytes, p.tail_bytes, p.tile_offset);
    }
  }
  if (!file.eof() || planes.empty() || first_expert.size() != num_ranks + 1) {
    std::fprintf(stderr, "%s is not the plan of a soak\n", path);
    std::exit(2);
  }
}

inline uint64_t mix(uint64_t z) {  // splitmix64
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// What happens in a round. Every rank can compute it for every rank.
struct Script {
  const Plan& plan;
  uint64_t seed;

  template <class... Values>
  uint64_t draw(Values... values) const {
    uint64_t state = seed;
    ((state = mix(state ^ static_cast<uint64_t>(values))), ...);
    return state;
  }

  bool releases(uint32_t round) const { return draw('e', round) % 5 == 0; }

  uint32_t num_rows(uint32_t rank, uint32_t round) const {  // T
    const uint64_t h = draw('T', rank, round);
    if (h % 8 == 0) return 0;
    if (h % 8 == 1) return plan.max_tokens;
    return static_cast<uint32_t>(h / 8 % (plan.max_tokens + 1));
  }
  bool counts_on_device(uint32_t rank, uint32_t round) const { return draw('d', rank, round) % 3 != 0; }
  int32_t wanted_tokens(uint32_t rank, uint32_t round) const {  // may lie outside of [0, T]
    const int32_t rows = static_cast<int32_t>(num_rows(rank, round));
    const uint64_t h = draw('n', rank, round);
    if (!counts_on_device(rank, round) || h % 4 == 0) return rows;
    if (h % 31 == 1) return rows + 1;
    if (h % 31 == 2) return -3;
    return static_cast<int32_t>(h / 31 % (static_cast<uint64_t>(rows) + 1));
  }
  uint32_t num_tokens(uint32_t rank, uint32_t round) const {
    const int32_t wanted = wanted_tokens(rank, round), rows = static_cast<int32_t>(num_rows(rank, round));
    return static_cast<uint32_t>(wanted < 0 ? 0 : wanted > rows ? rows : wanted);
  }

  int32_t expert(uint32_t rank, uint32_t round, uint32_t token, uint32_t k) const {
    const uint64_t h = draw('x', rank, round, token, k), mood = draw('m', rank, round) % 6;
    if (mood == 0) return static_cast<int32_t>(draw('1', round) % plan.num_experts);   // all to one expert
    if (mood == 1 || h % 8 == 0) return -1;                                            // to nobody
    if (h % 8 == 1 && k > 0) return expert(rank, round, token, 0);                     // twice
    if (h % 4001 == 2) return h & 4096 ? -7 : static_cast<int32_t>(plan.num_experts);  // out of range: to nobody
    return static_cast<int32_t>(h / 8 % plan.num_experts);
  }
  bool in_range(int32_t expert) const { return expert >= 0 && expert < static_cast<int32_t>(plan.num_experts); }

  // Does a token go to `peer`?
  bool goes(uint32_t rank, uint32_t round, uint32_t token, uint32_t peer) const {
    for (uint32_t k = 0; k < plan.top_k; ++k) {
      const int32_t id = expert(rank, round, token, k);
      if (!in_range(id)) continue;
      const uint32_t e = static_cast<uint32_t>(id);
      if (e >= plan.first_expert[peer] && e < plan.first_expert[peer + 1]) return true;
    }
    return false;
  }

  // The first id out of range of a rank's round, as (token, position); token = num_tokens if there is none.
  std::pair<uint32_t, uint32_t> first_bad(uint32_t rank, uint32_t round) const {
    const uint32_t tokens = num_tokens(rank, round);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (uint32_t k = 0; k < plan.top_k; ++k) {
        const int32_t id = expert(rank, round, t, k);
        if (id != -1 && !in_range(id)) return {t, k};
      }
    }
    return {tokens, 0};
  }

  // A row as it must arrive: the source's bytes, its tail, zeros up to the stride.
  void fill_row(uint32_t plane, uint32_t rank, uint32_t round, uint32_t token, char* row) const {
    const PlanPlane& p = plan.planes[plane];
    std::memset(row, 0, p.row_bytes);
    const uint32_t num_bytes = p.source_bytes + p.tail_bytes;
    uint64_t word = draw('r', rank, round, token, plane);
    for (uint32_t i = 0; i < num_bytes; i += 8, word = mix(word)) {
      std::memcpy(row + i, &word, num_bytes - i < 8 ? num_bytes - i : 8);
    }
    for (uint32_t k = 0; plane == plan.ids_plane && k < plan.top_k; ++k) {
      const int32_t id = expert(rank, round, token, k);
      std::memcpy(row + 4 * k, &id, 4);
    }
  }

  // What `owner`'s experts make of a token, value `i`: a float of which bf16 keeps all bits if rows are bf16. Half of
  // them are 2^30 or -2^30, which swallow small ones and cancel, so that a sum shows the order of its terms.
  float result(uint32_t owner, uint32_t rank, uint32_t round, uint32_t token, uint32_t i) const {
    const uint64_t h = mix(draw('o', owner, rank, round, token) + i);
    uint32_t bits = static_cast<uint32_t>(h & 0x807fffffu) | static_cast<uint32_t>(127 + (h >> 33) % 8) << 23;
    if (h >> 32 & 1) bits = static_cast<uint32_t>(h & 0x80000000u) | (127 + 30) << 23;
    if (plan.number == kBf16) bits &= 0xffff0000u;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};
