// tiles.cuh: what the schedules of a dispatch share: which tiles and ranks are a CTA's, their masks, their bitmap.
#pragma once

#include "rows.cuh"

constexpr uint32_t kMaskWords = kMaxRanks / 32;

// Words of the channel's state; compared as late as may be, since all that comes before is under way together.
struct State {
  uint64_t half_rounds;
  uint64_t sticky;
  __device__ bool is_alive() const { return sticky == 0; }
  // False, and nothing is sent to peers, where the channel has ended or has an open round.
  __device__ bool may_send() const { return is_alive() && half_rounds % 2 == 0; }
  __device__ uint64_t epoch() const { return half_rounds / 2 + 1; }
};

struct Shared {                             // of a CTA; the rows of a tile follow
  uint32_t masks[kMaskWords][kTileTokens];  // bit r of a token's words: it goes to rank r
  uint64_t loaded;                          // barrier of the bulk copies into the tile
  uint64_t peers[kMaxRanks];                // as in the channel
  State state;                              // phased: as the last warp has read it
  Place place;                              // flags_apart: of the CTA, among those that start
};
static_assert(sizeof(Shared) <= kTileStart);

__device__ __forceinline__ uint32_t quotient(uint32_t n, const Divisor& d) {
  return static_cast<uint32_t>(static_cast<uint64_t>(n) * d.multiplier >> d.shift);
}

// The rank of an id; ~0 where it is not that of an expert. Experts are owned in contiguous runs; the first
// `num_longer_ranks` ranks own one more (layout.first_expert).
__device__ __forceinline__ uint32_t rank_of(const DispatchParams& p, int32_t id) {
  const uint32_t expert = static_cast<uint32_t>(id), longer = p.num_longer_ranks * (p.experts_per_rank + 1);
  const uint32_t in_longer = quotient(expert, p.per_longer_rank), in_others = quotient(expert - longer, p.per_rank);
  if (id < 0 || id >= static_cast<int32_t>(p.channel.num_experts)) return ~0u;
  return expert < longer ? in_longer : p.num_longer_ranks + in_others;
}

// What this CTA sends; a part is a tile, or several.
__device__ __forceinline__ Duty duty_of(const DispatchParams& p) {
  const uint32_t share = blockIdx.x % (1u << p.shares_log2);
  return {blockIdx.x >> p.shares_log2, gridDim.x >> p.shares_log2, p.share_ranks << share};
}

struct Tile {
  uint32_t first;  // token
  uint32_t count;  // tokens
};

__device__ __forceinline__ State state_of(const Channel& c) {
#if defined(EP_A2A_FAULT_ignore_sticky)
  return {ld_state(&c.state->half_rounds), 0};
#endif
  return {ld_state(&c.state->half_rounds), ld_state(&c.state->sticky)};
}

// The addresses of the peers into shared memory. The last warp, which has no token to wait for.
__device__ __forceinline__ void keep_peers_warp(const Channel& c, Shared& shared) {
#pragma unroll 1
  for (uint32_t rank = threadIdx.x % kLanes; rank < c.num_ranks; rank += kLanes) shared.peers[rank] = c.peers[rank];
}

// Calls f(plane) for every bit of a mask of planes.
template <class F>
__device__ __forceinline__ void each_plane(uint32_t planes, F f) {
#pragma unroll 1
  for (; planes; planes &= planes - 1) f(__ffs(planes) - 1);
}

// The destination mask of a token, an id a lane, into shared memory. One warp. Returns its first word. Of the CTAs that
// share a tile, the one that sends to its own rank keeps it in the state too: flags to that rank say that it is there.
__device__ __forceinline__ uint32_t make_mask_warp(const DispatchParams& p, const Tile& tile, uint32_t token,
                                                   int32_t id, Shared& shared) {
  const bool keeps = (blockIdx.x ^ p.channel.rank) % (1u << p.shares_log2) == 0;
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, rank = rank_of(p, id);
  uint32_t first = 0;
#pragma unroll 1
  for (uint32_t w = 0; w < c.mask_words; ++w) {
    const uint32_t bits = __reduce_or_sync(kAllLanes, rank / 32 == w ? 1u << rank % 32 : 0);
    if (w == 0) first = bits;
    if (lane != 0) continue;
    shared.masks[w][token] = bits;
    if (keeps) st_word(token_mask(c, tile.first + token) + w, bits);
  }
  if (keeps && rank == ~0u && id != -1) {
    const uint64_t place = static_cast<uint64_t>(tile.first + token) << 40 | uint64_t{lane} << 32;
    red_min_relaxed_gpu(&c.state->bad_routing, place | static_cast<uint32_t>(id));
  }
  return first;
}

// Which tokens of a tile go to rank 32 * word + lane.
__device__ __forceinline__ uint32_t tokens_of_lane(const Shared& shared, const Tile& tile, uint32_t word) {
  uint32_t tokens = 0;
#pragma unroll
  for (uint32_t t = 0; t < kTileTokens; ++t) tokens |= (shared.masks[word][t] >> threadIdx.x % kLanes & 1) << t;
  return tokens & ((1u << tile.count) - 1);
}

// The byte of the bitmap that is a tile's, at every peer; behind the last token also those that end its word. One warp.
__device__ __forceinline__ void send_bitmap_warp(const Channel& c, const Duty& duty, const Tile& tile,
                                                 uint32_t num_tokens, const Shared& shared) {
  const uint32_t byte = tile.first / kTileTokens;
  const uint64_t at = c.bitmap_offset + 4 * static_cast<uint64_t>(c.rank) * c.bitmap_words + byte;
#pragma unroll 1
  for (uint32_t rank = threadIdx.x % kLanes; rank / kLanes < c.mask_words; rank += kLanes) {
    const uint32_t tokens = tokens_of_lane(shared, tile, rank / kLanes);
    if (rank >= c.num_ranks || !(duty.rank_bits >> rank % kLanes & 1)) continue;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(shared.peers[rank] + at);
    st_byte(bytes, tokens);
    if (tile.first + tile.count < num_tokens) continue;
#pragma unroll 1
    for (uint32_t i = 1; i < 4 - byte % 4; ++i) st_byte(bytes + i, 0);
  }
}
