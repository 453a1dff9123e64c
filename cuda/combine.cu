// combine.cu: the end of a round. Results go from the experts' outboxes back to the tokens' sources, or a release.
//
//   stage    copies rows that a caller holds elsewhere into the outbox, or encodes them into it
//   order    the same from rows of pairs (route.cu): those of a row times their routing weights, added in k order
//   signal   tells every peer that this rank's outbox is ready (or that the round is released), and waits if it may
//   leave    tells every peer that this rank will not come any more
//   wait     one warp waits for that word of all peers; the same kernel serves the dispatch wait
//   pull     for each token, adds the rows of its distinct ranks in ascending rank order in fp32; closes the round
//
// An encoded outbox row holds codes, scales and the row's own scale, at offsets of layout.py on multiples of 4 bytes.
//
// Reads: outboxes of peers, from the end of the combine wait until the peer's next dispatch wait ends (sync.cuh).
#include "codec.cuh"
#include "rows.cuh"

namespace {

// A CTA walks over (source, token) pairs and copies the rows that were received this round.
__global__ void outbox_stage_kernel(const __grid_constant__ OutboxParams p) {
  const Channel& c = p.channel;
  if (!is_alive(c) || ld_word(&c.state->half_rounds) % 2 == 0) return;
  const uint32_t row_bytes = p.hidden * number_bytes(p.number);
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    const uint32_t num_tokens = static_cast<uint32_t>(ld_word(source_counts(c) + source));
    for (uint32_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
      if (!row_is_valid(c, source, token)) continue;
      const uint64_t row = static_cast<uint64_t>(source) * c.max_tokens + token;
      const char* from = static_cast<const char*>(p.rows) + row * row_bytes;
      char* to = row_at(c, c.rank, p.outbox_offset, p.outbox_row_bytes, source, token);
      for (uint32_t v = threadIdx.x; v < row_bytes / kVectorBytes; v += blockDim.x) {
        st_vector(to + v * kVectorBytes, ld_vector(from + v * kVectorBytes));
      }
    }
  }
}

// The same with a warp for each token, which encodes the row.
template <class C, Number kNumber>
__global__ void outbox_encode_kernel(const __grid_constant__ OutboxParams p) {
  const Channel& c = p.channel;
  if (!is_alive(c) || ld_word(&c.state->half_rounds) % 2 == 0) return;
  const uint32_t warps = blockDim.x / kLanes, lane = threadIdx.x % kLanes;
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    const uint32_t num_tokens = static_cast<uint32_t>(ld_word(source_counts(c) + source));
    for (uint32_t token = blockIdx.x * warps + threadIdx.x / kLanes; token < num_tokens; token += gridDim.x * warps) {
      if (!row_is_valid(c, source, token)) continue;
      const uint64_t row = static_cast<uint64_t>(source) * c.max_tokens + token;
      const char* from = static_cast<const char*>(p.rows) + row * p.hidden * number_bytes(kNumber);
      char* to = row_at(c, c.rank, p.outbox_offset, p.outbox_row_bytes, source, token);
      const float row_scale = row_scale_warp<C, kNumber>(from, p.hidden);
      if (C::kRowScale && lane == 0) {
        st_word(reinterpret_cast<uint32_t*>(to + p.row_scale_offset), float_to_bits(row_scale));
      }
      encode_row_warp<C, kNumber>(from, p.hidden, row_scale, 0, 1, to, to + p.scales_offset);
    }
  }
}

// This rank ends the channel without its peers, which learn it in their next wait. One warp.
__global__ void leave_kernel(const __grid_constant__ WaitParams p) {
  const Channel& c = p.channel;
  if (!is_alive(c)) return;
  const uint64_t half_rounds = ld_word(&c.state->half_rounds);
  const Phase phase = half_rounds % 2 == 0 ? kPhaseDispatch : kPhaseCombine;  // what it will not finish
  fail_warp(c, Why{kPeerLeft, phase, phase, c.rank, c.rank, half_rounds / 2 + 1, 0, 0});
}

// Waits for all peers to end this round; false, and the channel ends, if one ends it in another way than this rank.
__device__ bool wait_for_ends_warp(const Channel& c, Phase phase, uint64_t epoch, uint64_t own) {
  const Flags flags = end_flags(c);
  uint64_t seen = 0;
  if (!wait_for_peers_warp(c, phase, flags, epoch, own, seen)) return false;
  const uint64_t other = min_source_warp(c, [&](uint32_t source) {
    const uint64_t found = arrived_flag(c, flags, source, seen) & 0xff;
    return found == phase ? ~uint64_t{0} : uint64_t{source} << 8 | found;
  });
  if (other == ~uint64_t{0}) return true;
  fail_warp(c, Why{kRoundMismatch, phase, static_cast<Phase>(other & 0xff), static_cast<uint32_t>(other >> 8), c.rank,
                   epoch, epoch, 0});
  return false;
}

// The end of a phase: the signal of a combine or release, the wait, or one behind the other. One warp.
__global__ void end_kernel(const __grid_constant__ WaitParams p) {
  const Channel& c = p.channel;
  const Phase phase = static_cast<Phase>(p.phase);
  const bool alive = is_alive(c);
  const uint64_t half_rounds = ld_word(&c.state->half_rounds), epoch = half_rounds / 2 + 1, own = c.peers[c.rank];
  const uint64_t bad_routing = threadIdx.x == 0 ? ld_word(&c.state->bad_routing) : kNoBadRouting;
  if (phase == kPhaseDispatch) return wait_for_rows_warp(c, alive, epoch, own);
  if (!alive) return;
  if (p.signals) {
    if (half_rounds % 2 == 0) return fail_misuse_warp(c, phase, epoch);
    publish_warp(c, c.end_flags_offset, epoch << 24 | phase);
    if (bad_routing != kNoBadRouting) record_bad_routing(c, bad_routing);
  }
  if (!p.waits || !wait_for_ends_warp(c, phase, epoch, own)) return;
  __syncwarp();  // all lanes have read `half_rounds`; votes and shuffles alone order no memory
  if (phase == kPhaseRelease && threadIdx.x == 0) st_word(&c.state->half_rounds, half_rounds + 1);
}

template <Number kNumber>
struct PlainRow {
  static __device__ __forceinline__ void load(const OutboxParams&, const char* row, uint32_t v,
                                              float (&values)[kGroup]) {
    ld_group<kNumber>(row, v, values);
  }
};
template <class C>
struct EncodedRow {
  static __device__ __forceinline__ void load(const OutboxParams& p, const char* row, uint32_t v,
                                              float (&values)[kGroup]) {
    ld_encoded<C>(row, row + p.scales_offset, row + p.row_scale_offset, v, values);
  }
};
template <Number kNumber>
__device__ __forceinline__ void st_group(char* row, uint32_t v, const float (&values)[kGroup]) {
  constexpr int kPerVector = kVectorBytes / number_bytes(kNumber);
#pragma unroll
  for (int i = 0; i < kGroup / kPerVector; ++i) {
    st_vector(row + (static_cast<uint64_t>(v) * (kGroup / kPerVector) + i) * kVectorBytes,
              pack<kNumber>(values + i * kPerVector));
  }
}

// As stage, from a row for each slot. Sums start from zero; each product and each sum is one rounding.
template <Number kRows, Number kTo>
__global__ void outbox_order_kernel(const __grid_constant__ OrderParams p) {
  const Channel& c = p.channel;
  if (!is_alive(c) || ld_word(&c.state->half_rounds) % 2 == 0) return;
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    const uint32_t num_tokens = static_cast<uint32_t>(ld_word(source_counts(c) + source));
    for (uint32_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
      if (!row_is_valid(c, source, token)) continue;
      const uint64_t row = static_cast<uint64_t>(source) * c.max_tokens + token;
      const int32_t* slots = p.pair_slots + row * p.top_k;
      for (uint32_t v = threadIdx.x; v < p.hidden / kGroup; v += blockDim.x) {
        float sum[kGroup] = {};
        for (uint32_t k = 0; k < p.top_k; ++k) {
          const int32_t slot = slots[k];
          if (slot < 0) continue;
          const float weight = p.weights[slot];
          const uint64_t start = static_cast<uint64_t>(slot) * p.hidden * number_bytes(kRows);
          float values[kGroup];
          ld_group<kRows>(static_cast<const char*>(p.rows) + start, v, values);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) sum[i] = add_rn(sum[i], mul_rn(weight, values[i]));
        }
        st_group<kTo>(static_cast<char*>(p.to) + row * p.to_row_bytes, v, sum);
      }
    }
  }
}

template <auto kKernel, class Params>
int launch_over(const Params& p, void* stream) {
  return launch<kKernel>(p.num_ctas, p.num_threads, 0, stream, p);
}

template <class Row, Number kNumber>
__global__ void combine_pull_kernel(const __grid_constant__ OutboxParams p) {
  const Channel& c = p.channel;
  const bool alive = is_alive(c);
  const uint64_t half_rounds = ld_word(&c.state->half_rounds);
  const uint32_t num_tokens = static_cast<uint32_t>(ld_word(&c.state->num_tokens));
  const float empty = alive ? 0.0f : bits_to_float(0x7fc00000u);
  for (uint32_t token = blockIdx.x; token < p.num_rows; token += gridDim.x) {
    char* out = static_cast<char*>(p.out) + static_cast<uint64_t>(token) * p.hidden * number_bytes(kNumber);
    const bool has_result = alive && token < num_tokens;
    for (uint32_t v = threadIdx.x; v < p.hidden / kGroup; v += blockDim.x) {
      float sum[kGroup];
#pragma unroll
      for (float& value : sum) value = empty;
      if (has_result) {
        each_rank(token_mask(c, token), c.mask_words, [&](uint32_t rank) {
          float row[kGroup];
          Row::load(p, row_at(c, rank, p.outbox_offset, p.outbox_row_bytes, c.rank, token), v, row);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) sum[i] = add_rn(sum[i], row[i]);
        });
      }
      st_group<kNumber>(out, v, sum);
    }
  }
  bool done = alive;
  if (last_cta(&c.state->pull_counter, done) && done && threadIdx.x == 0) {
    st_word(&c.state->half_rounds, half_rounds + 1);
  }
}

}  // namespace

int ep_a2a_outbox_stage(const OutboxParams* p, void* stream) {
  if (p->coding == kPlain) return launch_over<outbox_stage_kernel>(*p, stream);
  return with_number(p->number, [&](auto number) {
    constexpr Number kNumber = decltype(number)::value;
    if (p->coding == kNvfp4) return launch_over<outbox_encode_kernel<Nvfp4, kNumber>>(*p, stream);
    return launch_over<outbox_encode_kernel<Fp8, kNumber>>(*p, stream);
  });
}

int ep_a2a_outbox_order(const OrderParams* p, void* stream) {
  return with_number(p->rows_number, [&](auto rows) {
    return with_number(p->to_number, [&](auto to) {
      return launch_over<outbox_order_kernel<decltype(rows)::value, decltype(to)::value>>(*p, stream);
    });
  });
}

int ep_a2a_leave(const WaitParams* p, void* stream) { return launch<leave_kernel>(1, kLanes, 0, stream, *p); }

int ep_a2a_end(const WaitParams* p, void* stream) { return launch<end_kernel>(1, kLanes, 0, stream, *p); }

int ep_a2a_combine_pull(const OutboxParams* p, void* stream) {
  if (p->coding == kNvfp4) return launch_over<combine_pull_kernel<EncodedRow<Nvfp4>, kBf16>>(*p, stream);
  if (p->coding == kFp8) return launch_over<combine_pull_kernel<EncodedRow<Fp8>, kBf16>>(*p, stream);
  return with_number(p->number, [&](auto number) {
    constexpr Number kNumber = decltype(number)::value;
    return launch_over<combine_pull_kernel<PlainRow<kNumber>, kNumber>>(*p, stream);
  });
}
