// dispatch.cu: every token's row to each distinct rank that owns one of its experts.
//
//   send   each CTA walks over tiles of tokens: it turns their ids into destination masks, and stores their rows and
//          bitmap; the last CTA raises the flags at every peer, opens the round, and waits for those of all peers
//          (or a kernel of its own does, in combine.cu)
//
// Where tokens are few, CTAs share a tile, each with ranks of its own, as one SM stores only so fast; each raises the
// flags of what it sent, as counting CTAs takes longer than a flag; and warps may divide ranks, not planes.
//
// A token's row has the same number at its source and at every destination, so rows of neighbouring tokens that go to
// one rank are a run: contiguous here and there. Two schedules move the rows of a tile:
//
//   general  a warp takes a token and serves every plane, through its registers; for rows too wide for a tile
//   phased   warp i serves plane i, whose rows lie in shared memory: it sends runs by bulk copies, a lane for each, all
//            that goes to one rank before the next, as memory takes long runs faster than short ones in turn. The last
//            warp fetches the tile and sends the bitmap
//
// Rows may come as numbers, to be encoded: few of them in the phased schedule, where the tile is filled.
//
// For a few tokens the time is that of one path through the kernel. So what does not depend on another is under way
// together, what is rare is out of line, and loops that move no rows are not unrolled.
//
// Writes: planes, bitmap and flag of this rank at every peer (window: until the peer's dispatch wait ends); masks,
// counts and round of the own state. Reads: the caller's tensors.
#include "codec.cuh"
#include "tiles.cuh"

namespace {

// ---- general -----------------------------------------------------------------------------------------------------

// A token's rows to the ranks of its mask, the vectors of all planes one behind the other. One warp.
__device__ __forceinline__ void send_token_warp(const DispatchParams& p, const State& state, const Duty& duty,
                                                const Tile& tile, uint32_t token, Shared& shared) {
  constexpr uint32_t kBatch = 3;  // of a lane, under way together: a token of 2,048 NVFP4 values and 22 ids
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, row = tile.first + token;
  const int32_t id = lane < p.top_k ? p.topk_ids[static_cast<uint64_t>(row) * p.top_k + lane] : -1;
  const uint64_t peer_of_lane = lane < c.num_ranks ? c.peers[lane] : 0, policy = evict_first();
  uint32_t mask = 0;
  bool is_left = true;
#pragma unroll 1
  for (uint32_t first = lane; is_left; first += kBatch * kLanes) {
    Vector vectors[kBatch];
    char* to[kBatch];  // less the address of the peer; null: there is none
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      uint32_t plane = 0, v = first + b * kLanes;
#pragma unroll 1
      for (; plane < p.num_planes && v >= p.planes[plane].row_bytes / kVectorBytes; ++plane) {
        v -= p.planes[plane].row_bytes / kVectorBytes;
      }
      is_left = plane < p.num_planes;
      to[b] = nullptr;
      if (!is_left) continue;
      const Plane& at = p.planes[plane];
      vectors[b] = ld_row_vector(p.sources[plane], row, v);
      to[b] = row_in(c, 0, at.offset, at.row_bytes, c.rank, row) + v * kVectorBytes;
    }
    if (first == lane) {
      mask = make_mask_warp(p, tile, token, id, shared);
      if (c.mask_words > 1) __syncwarp();  // all lanes read the other words; a vote alone orders no memory
    }
    is_left = __any_sync(kAllLanes, is_left);
    if (!state.may_send()) continue;
#pragma unroll 1
    for (uint32_t w = 0; w < c.mask_words; ++w) {
#pragma unroll 1
      for (uint32_t bits = duty.rank_bits & (w == 0 ? mask : shared.masks[w][token]); bits; bits &= bits - 1) {
        const uint32_t rank = 32 * w + __ffs(bits) - 1;
        const uint64_t peer = w == 0 ? __shfl_sync(kAllLanes, peer_of_lane, rank) : c.peers[rank];
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
          if (to[b]) st_vector(to[b] + peer, vectors[b], policy);
        }
      }
    }
  }
}

__device__ __forceinline__ void send_tiles_general_cta(const DispatchParams& p, const State& state, const Duty& duty,
                                                       uint32_t num_tokens, Shared& shared) {
  const uint32_t warps = blockDim.x / kLanes, warp = threadIdx.x / kLanes;
  const uint32_t start = duty.first_part * kTileTokens, step = duty.part_step * kTileTokens;
#pragma unroll 1
  for (uint32_t first = start; first < num_tokens; first += step) {
    if (first != start) __syncthreads();  // the same memory takes other masks
    const Tile tile{first, num_tokens - first < kTileTokens ? num_tokens - first : kTileTokens};
#pragma unroll 1
    for (uint32_t token = warp; token < tile.count; token += warps) {
      send_token_warp(p, state, duty, tile, token, shared);
    }
    if (first == start && warp == warps - 1) keep_peers_warp(p.channel, shared);
    __syncthreads();
    if (warp == 0 && state.may_send()) send_bitmap_warp(p.channel, duty, tile, num_tokens, shared);
  }
  if (start >= num_tokens && warp == warps - 1) keep_peers_warp(p.channel, shared);
}

// ---- phased ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t num_serving_warps() { return blockDim.x / kLanes - 1; }

__device__ __forceinline__ char* tile_rows(const Plane& plane) {
  return static_cast<char*>(shared_memory()) + kTileStart + kTileTokens * plane.tile_offset;
}

// Word `index` of a token's row of ids, that of its first ones given: the ids, the row's scale if there is one, zeros.
__device__ __forceinline__ uint32_t id_row_word(const DispatchParams& p, uint32_t token, uint32_t index, uint32_t id) {
  const RowSource& source = p.sources[p.ids_plane];
  if (index < p.top_k) return id;
  const bool is_tail = index == p.top_k && source.tail;
  return is_tail ? float_to_bits(source.tail[static_cast<uint64_t>(token) * source.tail_stride]) : 0;
}

// The masks of a tile, and its rows of ids and weights, as the ids are read here. All serving warps, a token a warp.
__device__ __forceinline__ void make_masks(const DispatchParams& p, const Tile& tile, Shared& shared) {
  constexpr uint32_t kBatch = 2;  // tokens whose loads are under way together
  const uint32_t lane = threadIdx.x % kLanes, warps = num_serving_warps();
  const uint32_t* weights = static_cast<const uint32_t*>(p.sources[p.ids_plane + 1].rows);
  const Plane &ids_plane = p.planes[p.ids_plane], &weights_plane = p.planes[p.ids_plane + 1];
  const uint32_t num_id_words = ids_plane.row_bytes / 4, num_weight_words = weights_plane.row_bytes / 4;
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
      weight[b] = lane < p.top_k ? weights[at] : 0;
      id_words[b] = id_row_word(p, tile.first + token, lane, static_cast<uint32_t>(ids[b]));
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t token = i + b * warps;
      if (token >= tile.count) break;
      make_mask_warp(p, tile, token, ids[b], shared);
      uint32_t* id_row = reinterpret_cast<uint32_t*>(tile_rows(ids_plane)) + token * num_id_words;
      if (lane < num_id_words) id_row[lane] = id_words[b];
      if (lane + kLanes < num_id_words) id_row[lane + kLanes] = id_row_word(p, tile.first + token, lane + kLanes, 0);
      uint32_t* weight_row = reinterpret_cast<uint32_t*>(tile_rows(weights_plane)) + token * num_weight_words;
      if (lane < num_weight_words) weight_row[lane] = weight[b];
    }
  }
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
    bulk_load(tile_rows(plane), rows, tile.count * plane.row_bytes, &shared.loaded, policy);
  });
}

// The rows of a plane that comes neither whole nor with the masks. All serving warps.
static __device__ __noinline__ void stage_plane(const DispatchParams& p, Tile tile, uint32_t plane) {
  const uint32_t num_words = p.planes[plane].row_bytes / 4;
  uint32_t* rows = reinterpret_cast<uint32_t*>(tile_rows(p.planes[plane]));
#pragma unroll 1
  for (uint32_t item = threadIdx.x; item < tile.count * num_words; item += num_serving_warps() * kLanes) {
    const uint32_t token = item / num_words;
    rows[item] = ld_row_word(p.sources[plane], tile.first + token, item - token * num_words);
  }
}

// Encodes the rows of a tile that came as numbers; a row's scale goes behind its ids, which the same warp has written.
// All serving warps, of which several divide a row where tokens are few.
__device__ __forceinline__ void encode_tile(const DispatchParams& p, const Tile& tile) {
  const uint32_t lane = threadIdx.x % kLanes, warps = num_serving_warps();
  const uint32_t parts = tile.count < warps ? warps / tile.count : 1;
  with_codec(p.coding, [&](auto codec) {
    with_number(p.number, [&](auto number) {
      using C = decltype(codec);
      constexpr Number kNumber = decltype(number)::value;
      const uint32_t hidden = p.sources[0].num_bytes / (4 * C::kCodeWords) * kGroup;
#pragma unroll 1
      for (uint32_t i = threadIdx.x / kLanes; i < tile.count * parts; i += warps) {
        const uint32_t part = i / tile.count, token = i - part * tile.count;
        const uint64_t row_bytes = static_cast<uint64_t>(hidden) * number_bytes(kNumber);
        const char* from = static_cast<const char*>(p.sources[0].rows) + (tile.first + token) * row_bytes;
        const auto to = [&](uint32_t plane) { return tile_rows(p.planes[plane]) + token * p.planes[plane].row_bytes; };
        const float row_scale = row_scale_warp<C, kNumber>(from, hidden);
        encode_row_warp<C, kNumber>(from, hidden, row_scale, part, parts, to(0), to(1));
        if (part != 0) continue;
#pragma unroll
        for (uint32_t plane = 0; plane < 2; ++plane) {  // ends with zeros, less than a sector
          const uint32_t byte = p.sources[plane].num_bytes + lane;
          if (byte < p.planes[plane].row_bytes) to(plane)[byte] = 0;
        }
        __syncwarp();
        if (C::kRowScale && lane == 0) reinterpret_cast<float*>(to(p.ids_plane))[p.top_k] = row_scale;
      }
    });
  });
}

// The rows of one plane of a tile to every rank, its own first, so that not all ranks begin with the same. One warp. A
// tile has at most kRuns runs for a rank: a lane sends one of them, the lanes of a rank those of it.
__device__ __forceinline__ void send_plane_warp(const DispatchParams& p, const Duty& duty, const Tile& tile,
                                                const Shared& shared, const Plane& plane) {
  constexpr uint32_t kRuns = kTileTokens / 2, kRanksAtOnce = kLanes / kRuns;
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes;
  const char* from = tile_rows(plane);
  char* to = row_in(c, 0, plane.offset, plane.row_bytes, c.rank, tile.first);
#pragma unroll 1
  for (uint32_t word = 0; word < c.mask_words; ++word) {
    const uint32_t left = c.num_ranks - word * kLanes, num_ranks = left < kLanes ? left : kLanes;
    const uint32_t tokens_of_ranks = tokens_of_lane(shared, tile, word), own = c.rank < num_ranks ? c.rank : 0;
#pragma unroll 1
    for (uint32_t first = 0; first < num_ranks; first += kRanksAtOnce) {
      const uint32_t i = first + lane / kRuns, behind = own + i,
                     rank = behind < num_ranks ? behind : behind - num_ranks;
      const uint32_t tokens = __shfl_sync(kAllLanes, tokens_of_ranks, rank);
      uint32_t begins = i < num_ranks && duty.rank_bits >> rank & 1 ? tokens & ~(tokens << 1) : 0;
#pragma unroll
      for (uint32_t run = 1; run < kRuns; ++run) begins = run <= lane % kRuns ? begins & (begins - 1) : begins;
      if (!begins) continue;
      const uint32_t token = __ffs(begins) - 1, length = __ffs(~(tokens >> token)) - 1;
      bulk_store(to + shared.peers[word * kLanes + rank] + token * plane.row_bytes, from + token * plane.row_bytes,
                 length * plane.row_bytes);
    }
  }
}

// Which tokens of a tile go to a rank, in all lanes.
__device__ __forceinline__ uint32_t tokens_of_rank_warp(const Shared& shared, const Tile& tile, uint32_t rank) {
  const uint32_t lane = threadIdx.x % kLanes, mask = lane < tile.count ? shared.masks[rank / kLanes][lane] : 0;
  return __ballot_sync(kAllLanes, mask >> rank % kLanes & 1);
}

// All planes of a tile to one rank, where ranks are more than planes: a lane for each plane and run. One warp.
__device__ __forceinline__ void send_rank_warp(const DispatchParams& p, const Tile& tile, const Shared& shared,
                                               uint32_t rank) {
  constexpr uint32_t kRuns = kTileTokens / 2;
  static_assert(kMaxPlanes * kRuns <= kLanes);
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, tokens = tokens_of_rank_warp(shared, tile, rank);
  uint32_t begins = lane / kRuns < p.num_planes ? tokens & ~(tokens << 1) : 0;
#pragma unroll
  for (uint32_t run = 1; run < kRuns; ++run) begins = run <= lane % kRuns ? begins & (begins - 1) : begins;
  if (!begins) return;
  const Plane& plane = p.planes[lane / kRuns];
  const uint32_t token = __ffs(begins) - 1, length = __ffs(~(tokens >> token)) - 1, at = token * plane.row_bytes;
  char* to = row_in(c, shared.peers[rank], plane.offset, plane.row_bytes, c.rank, tile.first);
  bulk_store(to + at, tile_rows(plane) + at, length * plane.row_bytes);
}

// One plane of a tile to the only rank of the CTA: a lane for each token. One warp.
__device__ __forceinline__ void send_plane_to_rank_warp(const DispatchParams& p, const Tile& tile, const Shared& shared,
                                                        const Plane& plane, uint32_t rank) {
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, tokens = tokens_of_rank_warp(shared, tile, rank);
  if (!(tokens & ~(tokens << 1) & 1u << lane)) return;  // no run begins here
  const uint32_t length = __ffs(~(tokens >> lane)) - 1, at = lane * plane.row_bytes;
  char* to = row_in(c, shared.peers[rank], plane.offset, plane.row_bytes, c.rank, tile.first);
  bulk_store(to + at, tile_rows(plane) + at, length * plane.row_bytes);
}

// A serving warp's part of a tile: where tokens are few, warps divide what there is more of, ranks or planes.
__device__ __forceinline__ void send_tile_warp(const DispatchParams& p, const Duty& duty, const Tile& tile,
                                               const Shared& shared) {
  const uint32_t warp = threadIdx.x / kLanes, warps = num_serving_warps();
  const uint32_t num_ranks = p.channel.num_ranks, shares = 1u << p.shares_log2, first_rank = blockIdx.x % shares;
  if (p.flags_apart && num_ranks > p.num_planes * shares) {
#pragma unroll 1
    for (uint32_t rank = first_rank + warp * shares; rank < num_ranks; rank += warps * shares) {
      send_rank_warp(p, tile, shared, rank);
    }
    return;
  }
  const bool has_one_rank = num_ranks <= shares;
  if (has_one_rank && first_rank >= num_ranks) return;
#pragma unroll 1
  for (uint32_t i = warp; i < p.num_planes; i += warps) {
    if (has_one_rank) {
      send_plane_to_rank_warp(p, tile, shared, p.planes[i], first_rank);
    } else {
      send_plane_warp(p, duty, tile, shared, p.planes[i]);
    }
  }
}

// What comes before the barrier of a tile: its masks and rows in shared memory, or on their way there. All serving
// warps.
template <bool kEncodes>
__device__ __forceinline__ void stage_tile(const DispatchParams& p, const Tile& tile, Shared& shared) {
  make_masks(p, tile, shared);
  each_plane(p.narrow_planes, [&](uint32_t i) { stage_plane(p, tile, i); });
  if constexpr (kEncodes) encode_tile(p, tile);
  fence_proxy_async();  // bulk copies read what threads have written
}

template <bool kEncodes>
__device__ __forceinline__ void send_tile_phased_cta(const DispatchParams& p, const Duty& duty, const Tile& tile,
                                                     uint32_t num_tokens, uint32_t parity, Shared& shared) {
  const bool serves = threadIdx.x / kLanes < num_serving_warps();
  if (serves) stage_tile<kEncodes>(p, tile, shared);
  __syncthreads();
  if (serves) barrier_wait(&shared.loaded, parity);  // without a deadline: for copies of its own rows alone
  if (!shared.state.may_send()) return;
  if (!serves) return send_bitmap_warp(p.channel, duty, tile, num_tokens, shared);
  send_tile_warp(p, duty, tile, shared);
  bulk_commit();
}

// All tiles of the CTA. Its last warp looks at the state, and counts the CTAs that start.
template <bool kEncodes>
__device__ __forceinline__ void send_tiles_phased_cta(const DispatchParams& p, const Duty& duty, uint32_t num_tokens,
                                                      Shared& shared) {
  const bool is_last_warp = threadIdx.x >= blockDim.x - kLanes, is_first_lane = threadIdx.x % kLanes == 0;
  const uint32_t start = duty.first_part * kTileTokens, step = duty.part_step * kTileTokens;
  const auto tile_at = [&](uint32_t first) {
    return Tile{first, num_tokens - first < kTileTokens ? num_tokens - first : kTileTokens};
  };
  uint32_t parity = 0, before = 0;
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes;
  const State state = is_last_warp ? state_of(c) : State{};
  const uint64_t peer = is_last_warp && lane < c.num_ranks ? c.peers[lane] : 0;
  if (is_last_warp && is_first_lane) barrier_init(&shared.loaded);
  __syncthreads();
  if (is_last_warp) {
    if (is_first_lane && start < num_tokens) load_tile(p, tile_at(start), shared);
    shared.peers[lane] = peer;
    if (c.num_ranks > kLanes) keep_peers_warp(c, shared);
    if (is_first_lane) shared.state = state;
    if (is_first_lane && p.flags_apart && gridDim.x > 1) {  // the answer is not needed before all is sent
      before = atom_add_relaxed_gpu(&c.state->send_counter, own_of(state.may_send()));
    }
  }
#pragma unroll 1
  for (uint32_t first = start; first < num_tokens; first += step, parity ^= 1) {
    if (first != start) {  // the same memory takes another tile
      bulk_wait_read();
      __syncthreads();
      if (is_last_warp && is_first_lane) load_tile(p, tile_at(first), shared);
    }
    send_tile_phased_cta<kEncodes>(p, duty, tile_at(first), num_tokens, parity, shared);
  }
#if !defined(EP_A2A_FAULT_no_bulk_wait)
  bulk_wait_all();  // every thread that committed; before the release (sync.cuh)
#endif
  if (p.flags_apart && is_last_warp && is_first_lane) {
    shared.place = place_of(&p.channel.state->send_counter, before, shared.state.may_send());
  }
}

// ---- both --------------------------------------------------------------------------------------------------------

struct Counts {
  int32_t wanted;  // tokens, as the caller says
  uint32_t sent;   // those that there are
};

// Opens the round. One thread, in the last CTA.
__device__ __forceinline__ void open_round(const DispatchParams& p, const State& state, const Counts& counts) {
  const int32_t most = static_cast<int32_t>(p.num_rows);
  if (counts.wanted < 0 || counts.wanted > most) {
    record_bad_input(p.channel, kInvalidCount, {0, 0, 0, counts.wanted, most, 0});
  }
  st_word(&p.channel.state->num_tokens, static_cast<int32_t>(counts.sent));
  st_word(&p.channel.state->half_rounds, state.half_rounds + 1);
}

__device__ __forceinline__ void fail_if_open_warp(const Channel& c, const State& state) {
  if (state.is_alive() && state.half_rounds % 2) fail_misuse_warp(c, kPhaseDispatch, state.epoch());
}

// Flags of this rank to all peers, or of this CTA to its own ones. One warp.
__device__ __forceinline__ void raise_flags_warp(const DispatchParams& p, const State& state, const Counts& counts,
                                                 const uint64_t* peers, const Duty& duty) {
  const Channel& c = p.channel;
  const uint64_t flag = state.epoch() << 24 | counts.sent;
  publish_warp(c, c.dispatch_flags_offset, flag, peers, duty, parts_of(flag, c.flag_parts), c.flag_parts);
}

// The end of a CTA that raises flags of its own. That of the last one to start opens the round, and waits: all others
// have read the state, and have a place on the GPU.
__device__ __forceinline__ void end_apart_cta(const DispatchParams& p, const Counts& counts, const Duty& duty,
                                              const Shared& shared) {
  const Channel& c = p.channel;
  __syncthreads();
  const State state = shared.state;
  const Place place = shared.place;
  if (threadIdx.x >= kLanes) {
    const bool opens = place.is_last && place.all_done && threadIdx.x == blockDim.x - 1;
    if (opens) open_round(p, state, counts);
    return;
  }
#if defined(EP_A2A_FAULT_all_parts)
  if (state.may_send()) raise_flags_warp(p, state, counts, shared.peers, {0, 1, duty.rank_bits});
#else
  if (state.may_send()) raise_flags_warp(p, state, counts, shared.peers, duty);
#endif
  if (!place.is_last) return;
  if (!place.all_done) fail_if_open_warp(c, state);
  if (p.waits) wait_for_rows_warp(c, place.all_done, state.epoch(), shared.peers[c.rank]);
}

// The end of a CTA of many: the last one raises all flags, opens the round, and waits.
__device__ __forceinline__ void end_cta(const DispatchParams& p, const State& state, const Counts& counts,
                                        const Shared& shared) {
  const Channel& c = p.channel;
  bool sent = state.may_send();
  if (!last_cta(&c.state->send_counter, sent)) return;
  if (sent && threadIdx.x == blockDim.x - 1) open_round(p, state, counts);  // of another warp, if there is one
  if (threadIdx.x >= kLanes) return;
  if (sent) {
    raise_flags_warp(p, state, counts, shared.peers, whole_duty());
  } else {
    fail_if_open_warp(c, state);
  }
  if (p.waits) wait_for_rows_warp(c, sent, state.epoch(), shared.peers[c.rank]);
}

template <bool kPhased, bool kEncodes>
__global__ void dispatch_send_kernel(const __grid_constant__ DispatchParams p) {
  const int32_t wanted_tokens = p.num_tokens ? *p.num_tokens : static_cast<int32_t>(p.num_rows);
  const uint32_t at_least_0 = wanted_tokens < 0 ? 0 : static_cast<uint32_t>(wanted_tokens);
  const Counts counts{wanted_tokens, at_least_0 < p.num_rows ? at_least_0 : p.num_rows};
  const Duty duty = duty_of(p);
  Shared& shared = *static_cast<Shared*>(shared_memory());

#if defined(EP_A2A_FAULT_flag_first)
  if (const State state = state_of(p.channel); state.may_send() && blockIdx.x == 0 && threadIdx.x < kLanes) {
    raise_flags_warp(p, state, counts, p.channel.peers, whole_duty());
  }
#endif
  if constexpr (kPhased) {
    send_tiles_phased_cta<kEncodes>(p, duty, counts.sent, shared);
    if (p.flags_apart) return end_apart_cta(p, counts, duty, shared);
    __syncthreads();  // where there was no tile, the state is not known before
    end_cta(p, shared.state, counts, shared);
  } else {
    const State state = state_of(p.channel);
    send_tiles_general_cta(p, state, duty, counts.sent, shared);
    end_cta(p, state, counts, shared);
  }
}

}  // namespace

int ep_a2a_dispatch_send(const DispatchParams* p, void* stream) {
  const auto send = !p->phased            ? launch<dispatch_send_kernel<false, false>, DispatchParams>
                    : p->coding == kPlain ? launch<dispatch_send_kernel<true, false>, DispatchParams>
                                          : launch<dispatch_send_kernel<true, true>, DispatchParams>;
  return send(p->num_ctas, p->num_threads, p->shared_bytes, stream, *p);
}
