// dispatch.cu: every token's row to each distinct rank that owns one of its experts.
//
//   send   each warp turns the ids of 32 tokens into destination masks and bitmap words; then each CTA walks over
//          tokens and stores their rows; the last CTA opens the round and raises a flag at every peer
//   wait   one warp waits for the flags of all peers and keeps their counts
//
// Writes: planes, bitmap and flag of this rank at every peer (window: until the peer's dispatch wait ends); masks,
// counts and round of the own state. Reads: the caller's tensors.
#include "rows.cuh"

namespace {

constexpr int kMaskWords = kMaxRanks / 32;

struct Mask {
  uint32_t words[kMaskWords];
};

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

__device__ __forceinline__ void set_bit(Mask& mask, uint32_t rank) {
#pragma unroll
  for (uint32_t w = 0; w < kMaskWords; ++w) mask.words[w] |= (w == rank / 32) << rank % 32;
}

// Masks of the tokens of one bitmap word, a token a lane, and that word at every peer. One warp.
__device__ void send_bitmap_word_warp(const DispatchParams& p, const ExpertOwner& owner_of, uint32_t word,
                                      uint32_t num_tokens) {
  const Channel& c = p.channel;
  const uint32_t lane = threadIdx.x % kLanes, token = word * 32 + lane;
  Mask mask{};
  if (token < num_tokens) {
    const int32_t* ids = p.topk_ids + static_cast<uint64_t>(token) * p.top_k;
    for (uint32_t k = 0; k < p.top_k; ++k) {
      const int32_t expert = ids[k];
      if (expert >= 0 && expert < static_cast<int32_t>(p.num_experts)) {
        set_bit(mask, owner_of(expert));
      } else if (expert != -1) {
        red_min_relaxed_gpu(&c.state->bad_routing, static_cast<uint64_t>(token) << 32 | k);
      }
    }
    uint32_t* kept = token_mask(c, token);
    for (uint32_t w = 0; w < c.mask_words; ++w) st_word(kept + w, mask.words[w]);
  }
  for (uint32_t rank = 0; rank < c.num_ranks; ++rank) {
    const uint32_t bits = __ballot_sync(kAllLanes, mask.words[rank / 32] >> rank % 32 & 1);
    if (lane == rank % kLanes) st_word(bitmap_at(c, rank, c.rank) + word, bits);
  }
}

// The destination mask of one token, in all lanes, straight from its ids. One warp.
__device__ __forceinline__ Mask token_mask_warp(const DispatchParams& p, const ExpertOwner& owner_of, uint32_t token) {
  const uint32_t lane = threadIdx.x % kLanes;
  const int32_t expert = lane < p.top_k ? p.topk_ids[static_cast<uint64_t>(token) * p.top_k + lane] : -1;
  Mask mask{};
  if (expert >= 0 && expert < static_cast<int32_t>(p.num_experts)) set_bit(mask, owner_of(expert));
  for (uint32_t w = 0; w < p.channel.mask_words; ++w) mask.words[w] = __reduce_or_sync(kAllLanes, mask.words[w]);
  return mask;
}

// Vectors first, first + step, ... of a token's row in one plane, to every rank of its mask.
__device__ __forceinline__ void send_plane(const DispatchParams& p, uint32_t plane_index, uint32_t first, uint32_t step,
                                           uint32_t token, const Mask& mask) {
  const Channel& c = p.channel;
  const Plane& plane = p.planes[plane_index];
  const RowSource& source = p.sources[plane_index];
  for (uint32_t v = first; v < plane.row_bytes / kVectorBytes; v += step) {
    const Vector vector = ld_row_source(source, token, v);
    each_rank(mask.words, c.mask_words, [&](uint32_t rank) {
      st_vector(row_at(c, rank, plane.offset, plane.row_bytes, c.rank, token) + v * kVectorBytes, vector);
    });
  }
}

// The plane that this thread serves in the phased schedule; num_planes if none.
__device__ __forceinline__ uint32_t phased_plane(const DispatchParams& p) {
  uint32_t plane = 0;
  while (plane < p.num_planes && threadIdx.x - p.planes[plane].first_thread >= p.planes[plane].num_threads) ++plane;
  return plane;
}

template <bool kPhased>
__device__ void send_rows_cta(const DispatchParams& p, const ExpertOwner& owner_of, uint32_t num_tokens) {
  [[maybe_unused]] const uint32_t mine = kPhased ? phased_plane(p) : 0;
  for (uint32_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const Mask mask = token_mask_warp(p, owner_of, token);
    if constexpr (kPhased) {
      if (mine == p.num_planes) continue;
      const Plane& plane = p.planes[mine];
      send_plane(p, mine, threadIdx.x - plane.first_thread, plane.num_threads, token, mask);
    } else {
      for (uint32_t plane = 0; plane < p.num_planes; ++plane) {
        send_plane(p, plane, threadIdx.x, blockDim.x, token, mask);
      }
    }
  }
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
  const uint64_t half_rounds = ld_word(&c.state->half_rounds);
  const bool alive = is_alive(c), closed = half_rounds % 2 == 0;
  const int32_t wanted_tokens = p.num_tokens ? *p.num_tokens : static_cast<int32_t>(p.num_rows);
  const uint32_t at_least_0 = wanted_tokens < 0 ? 0 : static_cast<uint32_t>(wanted_tokens);
  const uint32_t num_tokens = at_least_0 < p.num_rows ? at_least_0 : p.num_rows;

#if defined(EP_A2A_FAULT_flag_first)
  if (alive && closed && blockIdx.x == 0 && threadIdx.x < kLanes) {
    publish_warp(c, c.dispatch_flags_offset, (half_rounds / 2 + 1) << 24 | num_tokens);
  }
#endif
  if (alive && closed) {
    const ExpertOwner owner_of(p.num_experts, c.num_ranks);
    const uint32_t warps = blockDim.x / kLanes, warp = blockIdx.x * warps + threadIdx.x / kLanes;
    for (uint32_t word = warp; word * 32 < num_tokens; word += gridDim.x * warps) {
      send_bitmap_word_warp(p, owner_of, word, num_tokens);
    }
    send_rows_cta<kPhased>(p, owner_of, num_tokens);
  }

  if (!last_cta(&c.state->send_counter) || threadIdx.x >= kLanes || !alive) return;
  const uint64_t epoch = half_rounds / 2 + 1;
  if (!closed) return fail_misuse_warp(c, kPhaseDispatch, epoch);
  if (threadIdx.x == 0) {
    record_bad_inputs(p, wanted_tokens);
    st_word(&c.state->num_tokens, static_cast<int32_t>(num_tokens));
    st_word(&c.state->half_rounds, half_rounds + 1);
  }
  publish_warp(c, c.dispatch_flags_offset, epoch << 24 | num_tokens);
}

}  // namespace

int ep_a2a_dispatch_send(const DispatchParams* p, void* stream) {
  const auto send = p->phased ? launch<dispatch_send_kernel<true>, DispatchParams>
                              : launch<dispatch_send_kernel<false>, DispatchParams>;
  return send(p->num_ctas, p->num_threads, 0, stream, *p);
}
