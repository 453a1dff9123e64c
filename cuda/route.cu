// route.cu: from received rows to the (row, expert) pairs of this rank's experts, grouped by expert.
//
//   count     a warp for each segment, a run of bitmap words: its pairs of every expert; clears what pairs have
//   scan      a warp for each expert: where each segment's pairs start among those of the expert; the last CTA makes
//             the groups of slots and records an overflow
//   scatter   a warp for each segment: the slot of every pair, and what belongs to the pair into the slot
//   gather    the payload's rows into the slots, zeros where a slot pads its group
//   ids       for other people's kernels: the received ids, -1 where there is none of this rank's
//
// Pairs keep the order (expert, source, token, k): a place is a sum over earlier segments, words and lanes, the same
// in every run. Reads: bitmap, counts and planes of this rank (window: dispatch wait to end signal). Writes: tensors of
// the caller.
#include "rows.cuh"

namespace {

struct Pair {  // of one lane; `expert` counts from the rank's first one, num_experts = no pair of this rank
  uint32_t source, token, k, expert;
  bool exists;  // a received row has it
};

// Position of the n-th set bit, from 0; there are more than n.
__device__ __forceinline__ uint32_t nth_bit(uint32_t bits, uint32_t n) {
  uint32_t position = 0;
#pragma unroll
  for (uint32_t width = 16; width > 0; width /= 2) {
    const uint32_t below = __popc(bits >> position & ((1u << width) - 1));
    if (n < below) continue;
    n -= below;
    position += width;
  }
  return position;
}

// Which of 32 tokens of a source were received: zero where its count of this round ends before them.
__device__ __forceinline__ uint32_t received_word(const Channel& c, uint32_t source, uint32_t word) {
  if (word * 32 >= static_cast<uint32_t>(ld_word(source_counts(c) + source))) return 0;
  return ld_word(bitmap_at(c, c.rank, source) + word);
}

__device__ __forceinline__ uint32_t ld_plane_word(const RouteParams& p, uint32_t plane, const Pair& pair, uint32_t at) {
  const Channel& c = p.channel;
  const char* row = row_at(c, c.rank, p.planes[plane].offset, p.planes[plane].row_bytes, pair.source, pair.token);
  return ld_word(reinterpret_cast<const uint32_t*>(row) + at);
}

// Calls f(source, first token, bitmap word) for the words of a segment in order.
template <class F>
__device__ __forceinline__ void each_word(const RouteParams& p, uint32_t segment, F f) {
  const Channel& c = p.channel;
  const uint32_t num_words = c.num_ranks * c.bitmap_words, first = segment * p.words_per_segment;
  for (uint32_t word = first; word < first + p.words_per_segment && word < num_words; ++word) {
    const uint32_t source = word / c.bitmap_words, in_source = word % c.bitmap_words;
    f(source, in_source * 32, received_word(c, source, in_source));
  }
}

// Calls f(pair, lanes of the same expert) for the pairs of a segment in order, 32 at a time. One warp, all its lanes.
template <class F>
__device__ __forceinline__ void each_pair_warp(const RouteParams& p, uint32_t segment, F f) {
  each_word(p, segment, [&](uint32_t source, uint32_t first_token, uint32_t bits) {
    const uint32_t num_pairs = __popc(bits) * p.top_k;
    for (uint32_t start = 0; start < num_pairs; start += kLanes) {
      const uint32_t i = start + threadIdx.x % kLanes;
      Pair pair{source, first_token, 0, p.num_experts, i < num_pairs};
      if (pair.exists) {
        pair.token += nth_bit(bits, i / p.top_k);
        pair.k = i % p.top_k;
        const uint32_t expert = ld_plane_word(p, p.ids_plane, pair, pair.k) - p.first_expert;
        if (expert < p.num_experts) pair.expert = expert;
      }
      f(pair, __match_any_sync(kAllLanes, pair.expert));
    }
  });
}

// The sum of `value` over this lane and those below it.
__device__ __forceinline__ uint32_t scan_warp(uint32_t value) {
  for (uint32_t step = 1; step < kLanes; step *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % kLanes >= step) value += below;
  }
  return value;
}

__device__ __forceinline__ bool is_lowest(uint32_t lanes) { return threadIdx.x % kLanes == __ffs(lanes) - 1u; }

// One warp a CTA.
__global__ void route_count_kernel(const __grid_constant__ RouteParams p) {
  uint32_t* counts = static_cast<uint32_t*>(shared_memory());  // [num_experts + 1]: the last one is of no interest
  const uint32_t segment = blockIdx.x, lane = threadIdx.x;
  for (uint32_t expert = lane; expert <= p.num_experts; expert += kLanes) counts[expert] = 0;
  for (uint32_t slot = segment * kLanes + lane; slot < p.num_slots; slot += gridDim.x * kLanes) {
    p.row_index[slot] = p.k[slot] = -1;
    p.weights[slot] = 0;
    if (p.global_scale) p.global_scale[slot] = 0;
  }
  if (segment == 0 && lane == 0) *p.counter = 0;
  __syncwarp();
  each_pair_warp(p, segment, [&](const Pair& pair, uint32_t same) {
    if (is_lowest(same)) counts[pair.expert] += __popc(same);
    __syncwarp();
  });
  for (uint32_t expert = lane; expert < p.num_experts; expert += kLanes) {
    p.segment_starts[expert * p.num_segments + segment] = counts[expert];
  }
}

// From the pairs of each expert to the start of each group, and the counts of those pairs that have a slot. One warp.
__device__ void place_groups_warp(const RouteParams& p) {
  const uint32_t lane = threadIdx.x;
  uint32_t end = 0;
  uint64_t crowded = ~uint64_t{0};  // the lowest expert that has more pairs than a group has rows << 32 | its pairs
  for (uint32_t first = 0; first < p.num_experts; first += kLanes) {
    const uint32_t expert = first + lane;
    const bool here = expert < p.num_experts;
    const uint32_t count = here ? p.counts[expert] : 0, padded = (count + p.pad_multiple - 1) / p.pad_multiple;
    const uint32_t size = p.group_rows ? here * p.group_rows : padded * p.pad_multiple;
    const uint32_t through = scan_warp(size), start = end + through - size;
    if (here) {
      const uint32_t left = start < p.num_slots ? p.num_slots - start : 0;
      const uint32_t room = p.group_rows ? p.group_rows : left;
      if (p.group_rows && count > room && crowded == ~uint64_t{0}) crowded = uint64_t{expert} << 32 | count;
      p.expert_offsets[expert] = p.num_slots - left;
      p.counts[expert] = count < room ? count : room;
    }
    end += __shfl_sync(kAllLanes, through, kLanes - 1);
  }
  crowded = min_warp(crowded);
  if (lane != 0) return;
  p.expert_offsets[p.num_experts] = end < p.num_slots ? end : p.num_slots;
  const bool one = crowded != ~uint64_t{0};
  if (!one && end <= p.num_slots) return;
  const int32_t expert = one ? static_cast<int32_t>(p.first_expert + (crowded >> 32)) : -1;
  const int32_t needed = static_cast<int32_t>(one ? crowded & 0xffffffff : end);
  const int32_t available = static_cast<int32_t>(one ? p.group_rows : p.num_slots);
  record_bad_input(p.channel, kCapacityExceeded, {0, expert, 0, needed, available, 0});
}

// One warp a CTA.
__global__ void route_scan_kernel(const __grid_constant__ RouteParams p) {
  const uint32_t expert = blockIdx.x, lane = threadIdx.x;
  uint32_t total = 0;
  for (uint32_t first = 0; expert < p.num_experts && first < p.num_segments; first += kLanes) {
    const uint32_t segment = first + lane;
    const bool here = segment < p.num_segments;
    uint32_t* start = p.segment_starts + expert * p.num_segments + segment;
    const uint32_t count = here ? *start : 0, through = scan_warp(count);
    if (here) *start = total + through - count;
    total += __shfl_sync(kAllLanes, through, kLanes - 1);
  }
  if (expert < p.num_experts && lane == 0) p.counts[expert] = total;
  if (p.expert_offsets && last_cta(p.counter)) place_groups_warp(p);
}

// One warp a CTA.
__global__ void route_scatter_kernel(const __grid_constant__ RouteParams p) {
  uint32_t* next = static_cast<uint32_t*>(shared_memory());  // [num_experts + 1]: place of the expert's next pair
  const uint32_t segment = blockIdx.x, lane = threadIdx.x;
  for (uint32_t expert = lane; expert < p.num_experts; expert += kLanes) {
    next[expert] = p.segment_starts[expert * p.num_segments + segment];
  }
  __syncwarp();
  each_pair_warp(p, segment, [&](const Pair& pair, uint32_t same) {
    const bool here = pair.expert < p.num_experts;
    const uint32_t place = here ? next[pair.expert] + __popc(same & ((1u << lane) - 1)) : 0;
    const bool kept = here && place < p.counts[pair.expert];
    const uint32_t slot = kept ? p.expert_offsets[pair.expert] + place : 0;
    const uint64_t row = static_cast<uint64_t>(pair.source) * p.channel.max_tokens + pair.token;
    if (pair.exists) p.pair_slots[row * p.top_k + pair.k] = kept ? static_cast<int32_t>(slot) : -1;
    if (kept) {
      p.row_index[slot] = static_cast<int32_t>(row);
      p.k[slot] = static_cast<int32_t>(pair.k);
      p.weights[slot] = bits_to_float(ld_plane_word(p, p.ids_plane + 1, pair, pair.k));
      if (p.global_scale) p.global_scale[slot] = bits_to_float(ld_plane_word(p, p.ids_plane, pair, p.top_k));
    }
    __syncwarp();
    if (here && is_lowest(same)) next[pair.expert] += __popc(same);
    __syncwarp();
  });
}

template <class Word>
__device__ __forceinline__ void st_target(char* to, const Vector& v, uint32_t num_bytes) {
  union {
    Vector vector;
    Word words[kVectorBytes / sizeof(Word)];
  } u{v};
#pragma unroll
  for (uint32_t i = 0; i < kVectorBytes / sizeof(Word); ++i) {
    if (i * sizeof(Word) < num_bytes) reinterpret_cast<Word*>(to)[i] = u.words[i];
  }
}

// Vector `index` of a slot's row: rows of the target have no gaps, so its end may be part of a vector.
__device__ __forceinline__ void st_row_target(const RowTarget& t, uint32_t slot, uint32_t index, const Vector& v) {
  const uint32_t byte = index * kVectorBytes, left = t.num_bytes - byte;
  char* to = static_cast<char*>(t.rows) + static_cast<uint64_t>(slot) * t.num_bytes + byte;
  switch (t.align_bytes) {
    case 16: return st_vector(to, v);
    case 8: return st_target<uint64_t>(to, v, left);
    case 4: return st_target<uint32_t>(to, v, left);
    case 2: return st_target<uint16_t>(to, v, left);
    default: return st_target<uint8_t>(to, v, left);
  }
}

// A CTA walks over the slots of all groups; those behind the last group stay as they are.
__global__ void route_gather_kernel(const __grid_constant__ RouteParams p) {
  const Channel& c = p.channel;
  const uint32_t end = p.expert_offsets[p.num_experts];
  for (uint32_t slot = blockIdx.x; slot < end; slot += gridDim.x) {
    const int32_t row = p.row_index[slot];
    for (uint32_t plane = 0; plane < p.ids_plane; ++plane) {  // those of the payload stand before the ids
      const RowTarget& target = p.targets[plane];
      const char* from = row_at(c, c.rank, p.planes[plane].offset, p.planes[plane].row_bytes, 0, row < 0 ? 0 : row);
      for (uint32_t v = threadIdx.x; v * kVectorBytes < target.num_bytes; v += blockDim.x) {
        st_row_target(target, slot, v, row < 0 ? Vector{} : ld_vector(from + v * kVectorBytes));
      }
    }
  }
}

// One warp a CTA; walks over all places of all tokens, received or not.
__global__ void route_ids_kernel(const __grid_constant__ RouteParams p) {
  const Channel& c = p.channel;
  each_word(p, blockIdx.x, [&](uint32_t source, uint32_t first_token, uint32_t bits) {
    const uint32_t left = c.max_tokens - first_token, num_places = (left < 32 ? left : 32) * p.top_k;
    const uint64_t first = (static_cast<uint64_t>(source) * c.max_tokens + first_token) * p.top_k;
    for (uint32_t i = threadIdx.x; i < num_places; i += kLanes) {
      const Pair pair{source, first_token + i / p.top_k, i % p.top_k, 0, (bits >> i / p.top_k & 1) != 0};
      const uint32_t id = pair.exists ? ld_plane_word(p, p.ids_plane, pair, pair.k) : ~0u;
      p.topk_ids[first + i] = id - p.first_expert < p.num_experts ? static_cast<int32_t>(id) : -1;
    }
  });
}

}  // namespace

int ep_a2a_route(const RouteParams* p, void* stream) {
  const size_t shared_bytes = sizeof(uint32_t) * (p->num_experts + 1);
  int error = launch<route_count_kernel>(p->num_segments, kLanes, shared_bytes, stream, *p);
  if (!error) error = launch<route_scan_kernel>(p->num_experts ? p->num_experts : 1, kLanes, 0, stream, *p);
  if (error || !p->expert_offsets) return error;
  error = launch<route_scatter_kernel>(p->num_segments, kLanes, shared_bytes, stream, *p);
  if (error || !p->targets[0].rows) return error;
  return launch<route_gather_kernel>(p->num_ctas, p->num_threads, 0, stream, *p);
}

int ep_a2a_route_ids(const RouteParams* p, void* stream) {
  return launch<route_ids_kernel>(p->num_segments, kLanes, 0, stream, *p);
}
