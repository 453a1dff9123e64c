// dispatch.cu: every token's row to each distinct rank that owns one of its experts.
//
//   send   each CTA walks over tiles of tokens: it turns their ids into destination masks, and stores their rows and
//          bitmap; the last CTA opens the round, raises a flag at every peer, and waits for those of all peers
//          (or a kernel of its own does, in combine.cu)
//
// A token's row has the same number at its source and at every destination, so rows of neighbouring tokens that go to
// one rank are a run: contiguous here and there. Two schedules move the rows of a tile:
//
//   general  every thread serves every plane, vector by vector through its registers; any row
//   phased   warp i serves plane i, whose rows lie in shared memory: it sends runs by bulk copies, a lane for each
//
// The last warp of a CTA serves no plane: it fetches tiles and sends the bitmap. Both schedules send all that goes to
// one rank before the next: memory takes long runs faster than short ones in turn.
//
// For a few tokens the time is that of one path through the kernel, most of it that its instructions take to come from
// memory. So what is rare is out of line, and loops that move no rows are not unrolled.
//
// Writes: planes, bitmap and flag of this rank at every peer (window: until the peer's dispatch wait ends); masks,
// counts and round of the own state. Reads: the caller's tensors.
#include "rows.cuh"

namespace {

constexpr uint32_t kMaskWords = kMaxRanks / 32;
constexpr uint32_t kMaxTileTokens = 16;

struct Shared {                                // of a CTA; the rows of a tile follow
  uint32_t masks[kMaskWords][kMaxTileTokens];  // bit r of a token's words: it goes to rank r
  uint64_t loaded;                             // barrier of the bulk copies into the tile
  uint64_t peers[kMaxRanks];                   // as in the channel
};
static_assert(sizeof(Shared) <= kTileStart);

// The rank of an id; ~0 where it is not that of an expert. Experts are owned in contiguous runs; the first
// `num_longer_ranks` ranks own one more (layout.first_expert).
__device__ __noinline__ uint32_t rank_of(int32_t id, uint32_t num_experts, uint32_t experts_per_rank,
                                         uint32_t num_longer_ranks) {
  if (id < 0 || id >= static_cast<int32_t>(num_experts)) return ~0u;
  const uint32_t expert = static_cast<uint32_t>(id), longer = num_longer_ranks * (experts_per_rank + 1);
  if (expert < longer) return expert / (experts_per_rank + 1);
  return num_longer_ranks + (expert - longer) / experts_per_rank;
}
__device__ __forceinline__ uint32_t rank_of(const DispatchParams& p, int32_t id) {
  return rank_of(id, p.num_experts, p.experts_per_rank, p.num_longer_ranks);
}

struct Tile {
  uint32_t first;  // token
  uint32_t count;  // tokens
};

__device__ __forceinline__ uint32_t num_serving_warps() { return blockDim.x / kLanes - 1; }

__device__ __forceinline__ char* tile_rows(const DispatchParams& p, const Plane& plane) {
  return static_cast<char*>(shared_memory()) + kTileStart + p.tile_tokens * plane.tile_offset;
}

// Word `index` of a token's row of ids, that of its first ones given: the ids, the row's scale if there is one, zeros.
__device__ __forceinline__ uint32_t id_row_word(const DispatchParams& p, uint32_t token, uint32_t index, uint32_t id) {
  const RowSource& source = p.sources[p.ids_plane];
  if (index < p.top_k) return id;
  const bool is_tail = index == p.top_k && source.tail;
  return is_tail ? float_to_bits(source.tail[static_cast<uint64_t>(token) * source.tail_stride]) : 0;
}

// Destination masks of the tokens of a tile, into shared memory and the state; in the phased schedule also their rows
// of ids and weights, as the ids are read here. All serving warps: a token a warp, an id a lane.
template <bool kPhased>
__device__ __forceinline__ void make_masks(const DispatchParams& p, const Tile& tile, Shared& shared) {
  constexpr uint32_t kBatch = 2;  // tokens whose loads are under way together
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, warps = num_serving_warps();
  const uint32_t* weights = static_cast<const uint32_t*>(p.sources[p.ids_plane + 1].rows);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / kLanes; i < tile.count; i += warps * kBatch) {
    int32_t ids[kBatch];
    uint32_t weight[kBatch], id_words[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t token = i + b * warps;
      if (token >= tile.count) break;
      const uint64_t at = static_cast<uint64_t>(tile.first + token) * p.top_k + lane;
      ids[b] = lane < p.top_k ? p.topk_ids[at] : -1;
      if constexpr (kPhased) {
        weight[b] = lane < p.top_k ? weights[at] : 0;
        id_words[b] = id_row_word(p, tile.first + token, lane, static_cast<uint32_t>(ids[b]));
      }
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t token = i + b * warps;
      if (token >= tile.count) break;
      const uint32_t rank = rank_of(p, ids[b]);
#pragma unroll 1
      for (uint32_t w = 0; w < c.mask_words; ++w) {
        const uint32_t bits = __reduce_or_sync(kAllLanes, rank / 32 == w ? 1u << rank % 32 : 0);
        if (lane != 0) continue;
        shared.masks[w][token] = bits;
        st_word(token_mask(c, tile.first + token) + w, bits);
      }
      if (rank == ~0u && ids[b] != -1) {
        red_min_relaxed_gpu(&c.state->bad_routing, static_cast<uint64_t>(tile.first + token) << 32 | lane);
      }
      if constexpr (kPhased) {
        const Plane &ids_plane = p.planes[p.ids_plane], &weights_plane = p.planes[p.ids_plane + 1];
        const uint32_t num_id_words = ids_plane.row_bytes / 4, num_weight_words = weights_plane.row_bytes / 4;
        uint32_t* id_row = reinterpret_cast<uint32_t*>(tile_rows(p, ids_plane)) + token * num_id_words;
        if (lane < num_id_words) id_row[lane] = id_words[b];
        if (lane + kLanes < num_id_words) id_row[lane + kLanes] = id_row_word(p, tile.first + token, lane + kLanes, 0);
        uint32_t* weight_row = reinterpret_cast<uint32_t*>(tile_rows(p, weights_plane)) + token * num_weight_words;
        if (lane < num_weight_words) weight_row[lane] = weight[b];
      }
    }
  }
}

// Which tokens of a tile go to `rank`, in all lanes. One warp.
__device__ __forceinline__ uint32_t tokens_to_warp(const Shared& shared, const Tile& tile, uint32_t rank) {
  const uint32_t lane = threadIdx.x % kLanes;
  return __ballot_sync(kAllLanes, lane < tile.count && shared.masks[rank / 32][lane] >> rank % 32 & 1);
}

// The bytes of the bitmap that are a tile's, at every peer; behind the last token those that end its word. One warp.
__device__ __forceinline__ void send_bitmap_warp(const Channel& c, const Tile& tile, uint32_t num_tokens,
                                                 const Shared& shared) {
  const uint32_t lane = threadIdx.x % kLanes, end = tile.first + tile.count;
  const uint32_t num_bytes = (end == num_tokens ? (end + 31) / 32 * 32 - tile.first : tile.count) / 8;
  const uint64_t at = c.bitmap_offset + 4 * static_cast<uint64_t>(c.rank) * c.bitmap_words + tile.first / 8 + lane;
#pragma unroll 1
  for (uint32_t rank = 0; rank < c.num_ranks; ++rank) {
    const uint32_t tokens = tokens_to_warp(shared, tile, rank);
    if (lane < num_bytes) st_byte(reinterpret_cast<uint8_t*>(shared.peers[rank] + at), tokens >> 8 * lane & 0xff);
  }
}

// ---- general -----------------------------------------------------------------------------------------------------

// The rows of a tile, the vectors of all planes in one sequence: a thread moves some of all planes. Those of a plane
// are contiguous at a destination.
__device__ __forceinline__ void send_tile_general(const DispatchParams& p, const Tile& tile, const Shared& shared) {
  constexpr uint32_t kBatch = 4;  // loads that are under way together
  const Channel& c = p.channel;
  const uint32_t num_threads = num_serving_warps() * kLanes;
  const uint64_t policy = evict_first();
  bool is_inside = true;
#pragma unroll 1
  for (uint32_t item = threadIdx.x; is_inside; item += num_threads * kBatch) {
    Vector vectors[kBatch];
    uint32_t tokens[kBatch];
    char* to[kBatch];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      uint32_t plane = 0, i = item + b * num_threads, num_vectors = p.planes[0].row_bytes / kVectorBytes;
#pragma unroll 1
      while (i >= tile.count * num_vectors) {
        i -= tile.count * num_vectors;
        if (++plane == p.num_planes) break;
        num_vectors = p.planes[plane].row_bytes / kVectorBytes;
      }
      is_inside = plane < p.num_planes;
      tokens[b] = is_inside ? i / num_vectors : kMaxTileTokens;
      if (!is_inside) continue;
      vectors[b] = ld_row_source(p.sources[plane], tile.first + tokens[b], i - tokens[b] * num_vectors);
      to[b] = row_in(c, 0, p.planes[plane].offset, p.planes[plane].row_bytes, c.rank, tile.first) + i * kVectorBytes;
    }
#pragma unroll 1
    for (uint32_t rank = 0; rank < c.num_ranks; ++rank) {
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        if (tokens[b] == kMaxTileTokens || !(shared.masks[rank / 32][tokens[b]] >> rank % 32 & 1)) continue;
        st_vector(to[b] + shared.peers[rank], vectors[b], policy);
      }
    }
  }
}

// ---- phased ------------------------------------------------------------------------------------------------------

// Calls f(plane) for every bit of a mask of planes.
template <class F>
__device__ __forceinline__ void each_plane(uint32_t planes, F f) {
#pragma unroll 1
  for (; planes; planes &= planes - 1) f(__ffs(planes) - 1);
}

// Starts the bulk copies into the tile, of the planes that come whole. One thread.
__device__ __forceinline__ void load_tile(const DispatchParams& p, const Tile& tile, Shared& shared) {
  uint32_t num_bytes = 0;
  each_plane(p.whole_planes, [&](uint32_t i) { num_bytes += tile.count * p.planes[i].row_bytes; });
  barrier_expect_bytes(&shared.loaded, num_bytes);
  const uint64_t policy = p.is_large ? evict_first() : evict_normal();
  each_plane(p.whole_planes, [&](uint32_t i) {
    const Plane& plane = p.planes[i];
    const char* rows =
        static_cast<const char*>(p.sources[i].rows) + static_cast<uint64_t>(tile.first) * plane.row_bytes;
    bulk_load(tile_rows(p, plane), rows, tile.count * plane.row_bytes, &shared.loaded, policy);
  });
}

// The rows of a plane that come vector by vector. All serving warps.
__device__ __noinline__ void stage_plane(const DispatchParams& p, Tile tile, uint32_t plane) {
  const uint32_t num_vectors = p.planes[plane].row_bytes / kVectorBytes;
  Vector* rows = reinterpret_cast<Vector*>(tile_rows(p, p.planes[plane]));
  for (uint32_t item = threadIdx.x; item < tile.count * num_vectors; item += num_serving_warps() * kLanes) {
    const uint32_t token = item / num_vectors;
    rows[item] = ld_row_source(p.sources[plane], tile.first + token, item - token * num_vectors);
  }
}

// The rows of one plane of a tile to every rank, its own first, so that not all ranks begin with the same. One warp: a
// run is sent by the lane with the number of its first token.
__device__ __forceinline__ void send_plane_phased_warp(const DispatchParams& p, const Tile& tile, const Shared& shared,
                                                       const Plane& plane) {
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes;
  const char* from = tile_rows(p, plane) + lane * plane.row_bytes;
  char* to = row_in(c, 0, plane.offset, plane.row_bytes, c.rank, tile.first + lane);
  const uint64_t policy = evict_first();
  uint32_t rank = c.rank;
#pragma unroll 2
  for (uint32_t i = 0; i < c.num_ranks; ++i) {
    const uint32_t tokens = tokens_to_warp(shared, tile, rank);
    const bool begins_run = (tokens & ~(tokens << 1)) >> lane & 1;
    const uint32_t length = __ffs(~(tokens >> lane)) - 1;
    if (begins_run) bulk_store(to + shared.peers[rank], from, length * plane.row_bytes, policy);
    rank = rank + 1 < c.num_ranks ? rank + 1 : 0;
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

// A serving warp's part of a tile, from ids to rows on their way.
template <bool kPhased>
__device__ __forceinline__ void send_tile_warp(const DispatchParams& p, const State& state, const Tile& tile,
                                               uint32_t parity, Shared& shared) {
  const uint32_t warp = threadIdx.x / kLanes, warps = num_serving_warps();
  make_masks<kPhased>(p, tile, shared);
  if constexpr (kPhased) {
    each_plane(p.narrow_planes, [&](uint32_t i) { stage_plane(p, tile, i); });
    fence_proxy_async();  // bulk copies read what threads have written
  }
  __syncthreads();
  if constexpr (kPhased) {
    barrier_wait(&shared.loaded, parity);
    if (!state.may_send()) return;
#pragma unroll 1
    for (uint32_t i = warp; i < p.num_planes; i += warps) send_plane_phased_warp(p, tile, shared, p.planes[i]);
    bulk_commit();
  } else {
    if (!state.may_send()) return;
    send_tile_general(p, tile, shared);
  }
}

template <bool kPhased>
__device__ __forceinline__ void send_tiles_cta(const DispatchParams& p, const State& state, uint32_t num_tokens,
                                               Shared& shared) {
  const bool serves = threadIdx.x / kLanes < num_serving_warps(), loads = kPhased && threadIdx.x == blockDim.x - kLanes;
  if (loads) barrier_init(&shared.loaded);
#pragma unroll 1
  for (uint32_t rank = threadIdx.x; rank < p.channel.num_ranks; rank += blockDim.x) {
    shared.peers[rank] = p.channel.peers[rank];
  }
  uint32_t parity = 0;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * p.tile_tokens; first < num_tokens; first += gridDim.x * p.tile_tokens) {
    if (first != blockIdx.x * p.tile_tokens) {  // the same memory takes another tile
      if constexpr (kPhased) bulk_wait_read();
      __syncthreads();
    }
    const uint32_t left = num_tokens - first;
    const Tile tile{first, left < p.tile_tokens ? left : p.tile_tokens};
    if (serves) {
      send_tile_warp<kPhased>(p, state, tile, parity, shared);
    } else {
      if (loads) load_tile(p, tile, shared);
      __syncthreads();
      if (state.may_send()) send_bitmap_warp(p.channel, tile, num_tokens, shared);
    }
    parity ^= 1;
  }
  if constexpr (kPhased) bulk_wait_all();  // every thread that committed; before the release (sync.cuh)
}

__device__ __noinline__ void record_bad_inputs(const DispatchParams& p, int32_t wanted_tokens) {
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
  Shared& shared = *static_cast<Shared*>(shared_memory());
  send_tiles_cta<kPhased>(p, state, num_tokens, shared);

  if (!last_cta(&c.state->send_counter)) return;
  if (state.may_send() && threadIdx.x == blockDim.x - 1) {  // of another warp than the flags', if there is one
    record_bad_inputs(p, wanted_tokens);
    st_word(&c.state->num_tokens, static_cast<int32_t>(num_tokens));
    st_word(&c.state->half_rounds, state.half_rounds + 1);
  }
  if (threadIdx.x >= kLanes) return;
  if (state.may_send()) {
    publish_warp(c, c.dispatch_flags_offset, state.epoch() << 24 | num_tokens, shared.peers);
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
