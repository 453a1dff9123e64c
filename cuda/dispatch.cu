// dispatch.cu: every token's row to each distinct rank that owns one of its experts.
//
//   send   each CTA walks over tiles of tokens: it turns their ids into destination masks, and stores their rows and
//          bitmap words; the last CTA opens the round and raises a flag at every peer
//   wait   one warp waits for the flags of all peers and keeps their counts (combine.cu)
//
// A token's row has the same number at its source and at every destination, so rows of neighbouring tokens that go to
// one rank are a run: contiguous here and there. Two schedules move the rows of a tile:
//
//   general  every thread serves every plane, vector by vector through its registers; any row
//   phased   warp i serves plane i, whose rows lie in shared memory: a lane sends the runs of its rank by bulk copies
//
// Writes: planes, bitmap and flag of this rank at every peer (window: until the peer's dispatch wait ends); masks,
// counts and round of the own state. Reads: the caller's tensors.
#include "rows.cuh"

namespace {

constexpr uint32_t kMaskWords = kMaxRanks / 32;
constexpr uint32_t kLargeTile = 16;   // tiles of rounds that are larger than the L2 cache
constexpr uint32_t kWordTokens = 32;  // of a bitmap word; a tile has as many at most, and never parts of two words

struct Shared {                             // of a CTA; the rows of a tile follow
  uint32_t masks[kMaskWords][kWordTokens];  // bit r of a token's words: it goes to rank r
  uint64_t loaded;                          // barrier of the bulk copies into the tile
  uint64_t peers[kMaxRanks];                // as in the channel
};
static_assert(sizeof(Shared) <= kTileStart);

// Experts are owned in contiguous runs; the first `num_experts % num_ranks` ranks own one more (layout.first_expert).
struct ExpertOwner {
  uint32_t base, extra;
  __device__ ExpertOwner(uint32_t num_experts, uint32_t num_ranks)
      : base(num_experts / num_ranks), extra(num_experts % num_ranks) {}
  __device__ uint32_t operator()(uint32_t expert) const {
    const uint32_t longer = extra * (base + 1);
    return expert < longer ? expert / (base + 1) : extra + (expert - longer) / base;
  }
};

struct Tile {
  uint32_t first;      // token
  uint32_t count;      // tokens
  uint32_t num_masks;  // tokens whose masks are made: the first tile of a bitmap word stores that word
};

// Destination masks of tokens first, first + 1, ... into shared memory, those of the tile into the state too.
__device__ __forceinline__ void make_masks_cta(const DispatchParams& p, const ExpertOwner& owner_of, const Tile& tile,
                                               Shared& shared) {
  constexpr uint32_t kBatch = 4;  // loads that are under way together
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, warps = blockDim.x / kLanes;
  for (uint32_t i = threadIdx.x / kLanes; i < tile.num_masks; i += warps * kBatch) {
    int32_t experts[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t token = i + b * warps;
      const bool is_id = token < tile.num_masks && lane < p.top_k;
      experts[b] = is_id ? p.topk_ids[static_cast<uint64_t>(tile.first + token) * p.top_k + lane] : -1;
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t token = i + b * warps;
      if (token >= tile.num_masks) break;
      const bool is_expert = experts[b] >= 0 && experts[b] < static_cast<int32_t>(p.num_experts);
      const uint32_t rank = is_expert ? owner_of(experts[b]) : ~0u;
      for (uint32_t w = 0; w < c.mask_words; ++w) {
        const uint32_t bits = __reduce_or_sync(kAllLanes, rank / 32 == w ? 1u << rank % 32 : 0);
        if (lane != 0) continue;
        shared.masks[w][token] = bits;
        if (token < tile.count) st_word(token_mask(c, tile.first + token) + w, bits);
      }
      if (!is_expert && experts[b] != -1 && token < tile.count) {
        red_min_relaxed_gpu(&c.state->bad_routing, static_cast<uint64_t>(tile.first + token) << 32 | lane);
      }
    }
  }
}

// Which of the first `num_masks` tokens go to `rank`, in all lanes. One warp.
__device__ __forceinline__ uint32_t tokens_to_warp(const Shared& shared, uint32_t num_masks, uint32_t rank) {
  const uint32_t lane = threadIdx.x % kLanes;
  return __ballot_sync(kAllLanes, lane < num_masks && shared.masks[rank / 32][lane] >> rank % 32 & 1);
}
// The same, for rank first_rank + lane in each lane.
__device__ __forceinline__ uint32_t tokens_by_lane_warp(const Shared& shared, uint32_t num_masks, uint32_t first_rank,
                                                        uint32_t num_ranks) {
  uint32_t mine = 0;
  for (uint32_t r = 0; r < kLanes && first_rank + r < num_ranks; ++r) {
    const uint32_t tokens = tokens_to_warp(shared, num_masks, first_rank + r);
    if (threadIdx.x % kLanes == r) mine = tokens;
  }
  return mine;
}

// The bitmap word that begins with this tile, at every peer. One warp.
__device__ __forceinline__ void send_bitmap_word_warp(const Channel& c, const Tile& tile, const Shared& shared) {
  for (uint32_t first_rank = 0; first_rank < c.num_ranks; first_rank += kLanes) {
    const uint32_t tokens = tokens_by_lane_warp(shared, tile.num_masks, first_rank, c.num_ranks);
    const uint32_t rank = first_rank + threadIdx.x % kLanes;
    if (rank < c.num_ranks) st_word(bitmap_at(c, rank, c.rank) + tile.first / kWordTokens, tokens);
  }
}

// ---- general -----------------------------------------------------------------------------------------------------

// Vector `item` of a plane's rows in this tile, which are contiguous at a destination.
__device__ __forceinline__ void send_plane_general(const DispatchParams& p, const Tile& tile, const Shared& shared,
                                                   const Plane& plane, const RowSource& source) {
  constexpr uint32_t kBatch = 4;
  const Channel& c = p.channel;
  const uint32_t num_vectors = plane.row_bytes / kVectorBytes, num_items = tile.count * num_vectors;
  const uint64_t policy = evict_first();
  for (uint32_t item = threadIdx.x; item < num_items; item += blockDim.x * kBatch) {
    Vector vectors[kBatch];
    uint32_t tokens[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t i = item + b * blockDim.x;
      tokens[b] = i / num_vectors;
      if (i < num_items) vectors[b] = ld_row_source(source, tile.first + tokens[b], i - tokens[b] * num_vectors);
    }
    for (uint32_t rank = 0; rank < c.num_ranks; ++rank) {
      char* rows = row_in(c, shared.peers[rank], plane.offset, plane.row_bytes, c.rank, tile.first);
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t i = item + b * blockDim.x;
        if (i >= num_items || !(shared.masks[rank / 32][tokens[b]] >> rank % 32 & 1)) continue;
        st_vector(rows + static_cast<uint64_t>(i) * kVectorBytes, vectors[b], policy);
      }
    }
  }
}

// ---- phased ------------------------------------------------------------------------------------------------------

// Whether a tile's rows at the source are, bytes and alignment, what a destination gets.
__device__ __forceinline__ bool is_copied_whole(const Plane& plane, const RowSource& source) {
  return source.num_bytes == plane.row_bytes && source.align_bytes == kVectorBytes;
}

__device__ __forceinline__ char* tile_rows(const DispatchParams& p, const Plane& plane) {
  return static_cast<char*>(shared_memory()) + kTileStart + p.tile_tokens * plane.tile_offset;
}

// Starts the bulk copies into the tile. One thread.
__device__ __forceinline__ void load_tile(const DispatchParams& p, const Tile& tile, Shared& shared) {
  uint32_t num_bytes = 0;
  for (uint32_t i = 0; i < p.num_planes; ++i) {
    if (is_copied_whole(p.planes[i], p.sources[i])) num_bytes += tile.count * p.planes[i].row_bytes;
  }
  barrier_expect_bytes(&shared.loaded, num_bytes);
  const uint64_t policy = p.tile_tokens < kLargeTile ? evict_normal() : evict_first();
  for (uint32_t i = 0; i < p.num_planes; ++i) {
    const Plane& plane = p.planes[i];
    if (!is_copied_whole(plane, p.sources[i])) continue;
    const char* rows =
        static_cast<const char*>(p.sources[i].rows) + static_cast<uint64_t>(tile.first) * plane.row_bytes;
    bulk_load(tile_rows(p, plane), rows, tile.count * plane.row_bytes, &shared.loaded, policy);
  }
}

// The rows that are not copied whole, by all threads.
__device__ __forceinline__ void stage_tile(const DispatchParams& p, const Tile& tile) {
  for (uint32_t i = 0; i < p.num_planes; ++i) {
    const Plane& plane = p.planes[i];
    if (is_copied_whole(plane, p.sources[i])) continue;
    const uint32_t num_vectors = plane.row_bytes / kVectorBytes;
    for (uint32_t item = threadIdx.x; item < tile.count * num_vectors; item += blockDim.x) {
      const uint32_t token = item / num_vectors;
      reinterpret_cast<Vector*>(tile_rows(p, plane))[item] =
          ld_row_source(p.sources[i], tile.first + token, item - token * num_vectors);
    }
  }
}

// The rows of one plane of a tile to every rank, a lane each. One warp.
__device__ __forceinline__ void send_plane_phased_warp(const DispatchParams& p, const Tile& tile, const Shared& shared,
                                                       const Plane& plane) {
  const Channel& c = p.channel;
  const char* from = tile_rows(p, plane);
  const uint64_t policy = evict_first();
  for (uint32_t first_rank = 0; first_rank < c.num_ranks; first_rank += kLanes) {
    uint32_t tokens = tokens_by_lane_warp(shared, tile.count, first_rank, c.num_ranks);
    const uint32_t rank = first_rank + threadIdx.x % kLanes;
    while (tokens) {
      const uint32_t begin = __ffs(tokens) - 1,
                     length = __ffs(~(tokens >> begin)) ? __ffs(~(tokens >> begin)) - 1 : kLanes;
      bulk_store(row_in(c, shared.peers[rank], plane.offset, plane.row_bytes, c.rank, tile.first + begin),
                 from + begin * plane.row_bytes, length * plane.row_bytes, policy);
      tokens = begin + length < kLanes ? tokens >> (begin + length) << (begin + length) : 0;
    }
  }
}

// ---- both --------------------------------------------------------------------------------------------------------

// False, and nothing is sent to peers, where the channel has ended or has an open round; looked at as late as may be,
// since all that comes before is under way together.
struct State {
  uint64_t half_rounds;
  bool alive;
  __device__ bool may_send() const { return alive && half_rounds % 2 == 0; }
  __device__ uint64_t epoch() const { return half_rounds / 2 + 1; }
};

template <bool kPhased>
__device__ void send_tiles_cta(const DispatchParams& p, const State& state, uint32_t num_tokens) {
  Shared& shared = *static_cast<Shared*>(shared_memory());
  const ExpertOwner owner_of(p.num_experts, p.channel.num_ranks);
  const uint32_t warps = blockDim.x / kLanes, warp = threadIdx.x / kLanes;
  if (kPhased && threadIdx.x == 0) barrier_init(&shared.loaded);
  for (uint32_t rank = threadIdx.x; rank < p.channel.num_ranks; rank += blockDim.x) {
    shared.peers[rank] = p.channel.peers[rank];
  }
  uint32_t parity = 0;
  for (uint32_t first = blockIdx.x * p.tile_tokens; first < num_tokens; first += gridDim.x * p.tile_tokens) {
    const uint32_t left = num_tokens - first;
    Tile tile{first, left < p.tile_tokens ? left : p.tile_tokens, 0};
    tile.num_masks = first % kWordTokens ? tile.count : left < kWordTokens ? left : kWordTokens;
    if (kPhased && threadIdx.x == 0) load_tile(p, tile, shared);
    make_masks_cta(p, owner_of, tile, shared);
    if constexpr (kPhased) {
      stage_tile(p, tile);
      fence_proxy_async();  // bulk copies read what threads have written
    }
    __syncthreads();
    if constexpr (kPhased) {
      barrier_wait(&shared.loaded, parity);
      parity ^= 1;
    }
    if (!state.may_send()) return;
    if constexpr (kPhased) {
      for (uint32_t i = warp; i < p.num_planes; i += warps) send_plane_phased_warp(p, tile, shared, p.planes[i]);
      bulk_commit();
    } else {
      for (uint32_t i = 0; i < p.num_planes; ++i) send_plane_general(p, tile, shared, p.planes[i], p.sources[i]);
    }
    if (first % kWordTokens == 0 && warp == warps - 1) send_bitmap_word_warp(p.channel, tile, shared);
    if constexpr (kPhased) bulk_wait_read();
    __syncthreads();  // the next tile takes the same memory
  }
  if constexpr (kPhased) bulk_wait_all();  // every thread that committed; before the release (sync.cuh)
}

__device__ void record_bad_inputs(const DispatchParams& p, int32_t wanted_tokens) {
  const int32_t num_rows = static_cast<int32_t>(p.num_rows), num_experts = static_cast<int32_t>(p.num_experts);
  if (wanted_tokens < 0 || wanted_tokens > num_rows) {
    record_bad_input(p.channel, kInvalidCount, {0, 0, 0, wanted_tokens, num_rows, 0});
  }
  const uint64_t bad = ld_word(&p.channel.state->bad_routing);
  if (bad == kNoBadRouting) return;
  st_word(&p.channel.state->bad_routing, kNoBadRouting);
  const int32_t token = static_cast<int32_t>(bad >> 32), position = static_cast<int32_t>(bad);
  const int32_t id = p.topk_ids[static_cast<uint64_t>(token) * p.top_k + position];
  record_bad_input(p.channel, kInvalidRouting, {0, token, position, id, num_experts, 0});
}

template <bool kPhased>
__global__ void dispatch_send_kernel(const __grid_constant__ DispatchParams p) {
  const Channel& c = p.channel;
  const State state{ld_word(&c.state->half_rounds), is_alive(c)};
  const int32_t wanted_tokens = p.num_tokens ? *p.num_tokens : static_cast<int32_t>(p.num_rows);
  const uint32_t at_least_0 = wanted_tokens < 0 ? 0 : static_cast<uint32_t>(wanted_tokens);
  const uint32_t num_tokens = at_least_0 < p.num_rows ? at_least_0 : p.num_rows;

#if defined(EP_A2A_FAULT_flag_first)
  if (state.may_send() && blockIdx.x == 0 && threadIdx.x < kLanes) {
    publish_warp(c, c.dispatch_flags_offset, state.epoch() << 24 | num_tokens);
  }
#endif
  send_tiles_cta<kPhased>(p, state, num_tokens);

  if (!last_cta(&c.state->send_counter)) return;
  if (state.may_send() && threadIdx.x == blockDim.x - 1) {  // of another warp than the flags', if there is one
    record_bad_inputs(p, wanted_tokens);
    st_word(&c.state->num_tokens, static_cast<int32_t>(num_tokens));
    st_word(&c.state->half_rounds, state.half_rounds + 1);
  }
  if (threadIdx.x >= kLanes) return;
  if (state.may_send()) {
    publish_warp(c, c.dispatch_flags_offset, state.epoch() << 24 | num_tokens);
  } else if (state.alive) {
    fail_misuse_warp(c, kPhaseDispatch, state.epoch());
  }
  if (p.waits) wait_for_rows_warp(c, state.may_send(), state.epoch());
}

}  // namespace

int ep_a2a_dispatch_send(const DispatchParams* p, void* stream) {
  const auto send = p->phased ? launch<dispatch_send_kernel<true>, DispatchParams>
                              : launch<dispatch_send_kernel<false>, DispatchParams>;
  return send(p->num_ctas, p->num_threads, p->shared_bytes, stream, *p);
}
