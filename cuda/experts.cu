// experts.cu: the local experts on a round's pairs of received rows and experts, with counts that stay on the device.
//
//   gate_up     a CTA walks over (tile of slots, slice of I): rows from the receive planes times w13, the activation
//   requantize  a warp walks over the slots: an fp32 intermediate encoded and decoded, where it has 4 bits
//   down        a CTA walks over (received row, slice of H): of its pairs in k order adds weight * (w2 m + b2), and
//               rounds once
//
// A thread makes one column, from shared memory and a weight row of its own, in one chain of fp32 sums: the same bits
// every run. Simple, not fast. Reads: planes, bitmap and counts of this rank (window: dispatch wait to end signal) and
// what route.cu made of them; row_index is -1 where a slot has no pair. Writes: the intermediate, `to` at valid rows.
#include "codec.cuh"
#include "rows.cuh"

namespace {

constexpr uint32_t kChunk = 256;  // columns of rows in shared memory at a time
constexpr uint32_t kChunkGroups = kChunk / kGroup;
constexpr uint32_t kMaxThreads = 128;  // columns that a CTA makes at a time

// The expert in whose group of slots a slot lies; experts without pairs have empty groups.
__device__ __forceinline__ uint32_t expert_of(const RouteParams& r, uint32_t slot) {
  uint32_t low = 0, high = r.num_experts;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (r.expert_offsets[middle] <= slot ? low : high) = middle;
  }
  return low;
}

// Values [8 group, 8 group + 8) of a received row.
__device__ __forceinline__ void ld_received(const ExpertsParams& p, int32_t row, uint32_t group,
                                            float (&values)[kGroup]) {
  const auto plane = [&](uint32_t index) {
    const Channel& c = p.route.channel;
    const Plane& at = p.route.planes[index];
    return row_at(c, c.rank, at.offset, at.row_bytes, 0, static_cast<uint32_t>(row));
  };
  const char* row_scale = plane(p.route.ids_plane) + p.route.top_k * sizeof(int32_t);
  if (p.coding == kPlain) {
    return p.number == kBf16 ? ld_group<kBf16>(plane(0), group, values) : ld_group<kFp16>(plane(0), group, values);
  }
  with_codec(p.coding, [&](auto codec) { ld_encoded<decltype(codec)>(plane(0), plane(1), row_scale, group, values); });
}

// sums[t] += columns [8 first, 8 (first + num)) of a weight row, which counts over all experts, times values
// [column, kRows] in shared memory.
template <class W, int kRows>
__device__ __forceinline__ void add_products(const ExpertMatrix& m, uint64_t row, uint32_t first, uint32_t num,
                                             const float* values, float (&sums)[kRows]) {
  const uint32_t* codes = reinterpret_cast<const uint32_t*>(m.codes) + row * (m.num_columns / kGroup);
  const uint8_t* scales = m.scales + row * (m.num_columns / W::kBlock);
  const Vector* vectors = reinterpret_cast<const Vector*>(values);
  for (uint32_t group = 0; group < num; ++group) {
    const uint32_t words[1] = {codes[first + group]};
    float weights[kGroup];
    W::decode(words, scales[(first + group) / W::kBlockLanes], 1.0f, weights);
#pragma unroll
    for (int v = 0; v < kGroup * kRows / 4; ++v) {
      float four[4];
      unpack<kFp32>(vectors[group * (kGroup * kRows / 4) + v], four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[(4 * v + i) % kRows];
        sum = mul_add(weights[(4 * v + i) / kRows], four[i], sum);
      }
    }
  }
}

__device__ __forceinline__ float scaled_and_biased(const ExpertMatrix& m, uint32_t expert, uint64_t row, float sum) {
  if (m.global_scale) sum = mul_rn(sum, m.global_scale[expert]);
  if (!m.bias) return sum;
  return add_rn(sum, m.bias_number == kBf16 ? ld_value<kBf16>(m.bias, row) : ld_value<kFp32>(m.bias, row));
}

// Comparisons are such that NaN stays NaN.
__device__ __forceinline__ float activate(const ExpertsParams& p, float gate, float up) {
  const float x = gate > p.limit ? p.limit : gate;
  float f;
  if (p.curve == kSigmoid) {
    f = div_rn(x, add_rn(1.0f, expf(mul_rn(-p.alpha, x))));
  } else if (p.curve == kGeluTanh) {
    const float cubic = mul_rn(mul_rn(mul_rn(x, x), x), 0.044715f);
    f = mul_rn(mul_rn(0.5f, x), add_rn(1.0f, tanhf(mul_rn(0.7978845608f, add_rn(x, cubic)))));
  } else {
    f = x < 0.0f ? 0.0f : mul_rn(x, x);
  }
  if (p.num_matrices == 1) return f;
  const float clamped = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  return mul_rn(f, add_rn(clamped, p.beta));
}

template <class W>
__global__ void gate_up_kernel(const __grid_constant__ ExpertsParams p) {
  const RouteParams& r = p.route;
  float* values = static_cast<float*>(shared_memory());  // [kChunk, kExpertTileRows]
  const uint32_t num_columns = p.w2.num_columns, num_groups = p.w13.num_columns / kGroup;
  const uint32_t slices = (num_columns + blockDim.x - 1) / blockDim.x;
  const uint64_t num_items = static_cast<uint64_t>(r.expert_offsets[r.num_experts]) / kExpertTileRows * slices;
  for (uint64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const uint32_t first_slot = static_cast<uint32_t>(item / slices) * kExpertTileRows,
                   expert = expert_of(r, first_slot);
    const uint32_t column = static_cast<uint32_t>(item % slices) * blockDim.x + threadIdx.x;
    const uint64_t row = static_cast<uint64_t>(expert) * p.w13.num_rows + column * p.row_step;
    float gate[kExpertTileRows] = {}, up[kExpertTileRows] = {};
    for (uint32_t first = 0; first < num_groups; first += kChunkGroups) {
      const uint32_t num = num_groups - first < kChunkGroups ? num_groups - first : kChunkGroups;
      __syncthreads();  // the chunk before this one is read
      for (uint32_t i = threadIdx.x; i < num * kExpertTileRows; i += blockDim.x) {
        const uint32_t slot = i % kExpertTileRows, group = i / kExpertTileRows;
        const int32_t received = r.row_index[first_slot + slot];
        float eight[kGroup] = {};
        if (received >= 0) ld_received(p, received, first + group, eight);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) values[(group * kGroup + j) * kExpertTileRows + slot] = eight[j];
      }
      __syncthreads();
      if (column >= num_columns) continue;
      add_products<W>(p.w13, row + p.gate_row, first, num, values, gate);
      if (p.num_matrices == 2) add_products<W>(p.w13, row + p.up_row, first, num, values, up);
    }
    if (column >= num_columns) continue;
#pragma unroll
    for (int t = 0; t < kExpertTileRows; ++t) {
      if (r.row_index[first_slot + t] < 0) continue;
      const float x = scaled_and_biased(p.w13, expert, row + p.gate_row, gate[t]);
      const float y = p.num_matrices == 2 ? scaled_and_biased(p.w13, expert, row + p.up_row, up[t]) : 0.0f;
      const uint32_t number = p.intermediate_coding == kPlain ? kBf16 : kFp32;
      st_number(number, p.intermediate, static_cast<uint64_t>(first_slot + t) * num_columns + column,
                activate(p, x, y));
    }
  }
}

template <class C>
__global__ void requantize_kernel(const __grid_constant__ ExpertsParams p) {
  const RouteParams& r = p.route;
  const uint32_t num_columns = p.w2.num_columns, warps = gridDim.x * (blockDim.x / kLanes);
  const uint32_t num_slots = r.expert_offsets[r.num_experts];
  for (uint32_t slot = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes; slot < num_slots; slot += warps) {
    if (r.row_index[slot] < 0) continue;
    float* row = static_cast<float*>(p.intermediate) + static_cast<uint64_t>(slot) * num_columns;
    const char* from = reinterpret_cast<const char*>(row);
    const float row_scale = row_scale_warp<C, kFp32>(from, num_columns);
    __syncwarp();  // all lanes have read the row
    const auto replace = [&](uint32_t group, const uint32_t (&words)[C::kCodeWords], uint32_t scale) {
      float values[kGroup];
      C::decode(words, scale, row_scale, values);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) row[group * kGroup + i] = values[i];
    };
    encode_groups_warp<C, kFp32>(from, num_columns, row_scale, 0, 1, replace);
  }
}

// One column of a received row: its pairs in k order. All threads of a CTA.
template <class W>
__device__ __forceinline__ float sum_pairs(const ExpertsParams& p, uint64_t received, uint32_t column, float* values) {
  const RouteParams& r = p.route;
  const uint32_t num_columns = p.w2.num_columns, num_groups = num_columns / kGroup;
  float total = 0.0f;
  for (uint32_t k = 0; k < r.top_k; ++k) {
    const uint32_t slot = static_cast<uint32_t>(r.pair_slots[received * r.top_k + k]);
    if (slot >= r.num_slots) continue;  // -1: not here
    const uint32_t expert = expert_of(r, slot);
    const uint64_t start = static_cast<uint64_t>(slot) * num_columns;
    const uint64_t row = static_cast<uint64_t>(expert) * p.w2.num_rows + column;
    float sum[1] = {};
    for (uint32_t first = 0; first < num_groups; first += kChunkGroups) {
      const uint32_t num = num_groups - first < kChunkGroups ? num_groups - first : kChunkGroups;
      __syncthreads();  // the chunk before this one is read
      for (uint32_t i = threadIdx.x; i < num * kGroup; i += blockDim.x) {
        const uint64_t at = start + first * kGroup + i;
        values[i] =
            p.intermediate_coding == kPlain ? ld_value<kBf16>(p.intermediate, at) : ld_value<kFp32>(p.intermediate, at);
      }
      __syncthreads();
      if (column < p.w2.num_rows) add_products<W>(p.w2, row, first, num, values, sum);
    }
    if (column >= p.w2.num_rows) continue;
    total = add_rn(total, mul_rn(r.weights[slot], scaled_and_biased(p.w2, expert, row, sum[0])));
  }
  return total;
}

template <class W>
__global__ void down_kernel(const __grid_constant__ ExpertsParams p) {
  const Channel& c = p.route.channel;
  if (!is_alive(c) || ld_word(&c.state->half_rounds) % 2 == 0) return;
  const uint32_t slices = (p.w2.num_rows + blockDim.x - 1) / blockDim.x;
  for (uint32_t source = 0; source < c.num_ranks; ++source) {
    const uint64_t num_items = static_cast<uint64_t>(ld_word(source_counts(c) + source)) * slices;
    for (uint64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
      const uint32_t token = static_cast<uint32_t>(item / slices);
      if (!row_is_valid(c, source, token)) continue;
      const uint32_t column = static_cast<uint32_t>(item % slices) * blockDim.x + threadIdx.x;
      const uint64_t received = static_cast<uint64_t>(source) * c.max_tokens + token;
      const float total = sum_pairs<W>(p, received, column, static_cast<float*>(shared_memory()));
      if (column >= p.w2.num_rows) continue;
      st_number(p.to_number, p.to, source * p.to_strides[0] + token * p.to_strides[1] + column * p.to_strides[2],
                total);
    }
  }
}

template <auto kKernel>
int launch_columns(const ExpertsParams& p, uint32_t num_columns, uint32_t num_rows, void* stream) {
  const uint32_t threads = num_columns < kMaxThreads ? (num_columns + kLanes - 1) / kLanes * kLanes : kMaxThreads;
  return launch<kKernel>(p.num_ctas, threads, sizeof(float) * kChunk * num_rows, stream, p);
}

}  // namespace

int ep_a2a_experts(const ExpertsParams* p, void* stream) {
  const bool nvfp4 = p->weights_coding == kNvfp4;
  int error = 0;
  if (p->route.num_slots) {
    error = nvfp4 ? launch_columns<gate_up_kernel<Nvfp4>>(*p, p->w2.num_columns, kExpertTileRows, stream)
                  : launch_columns<gate_up_kernel<Mxfp4>>(*p, p->w2.num_columns, kExpertTileRows, stream);
  }
  if (!error && p->route.num_slots && p->intermediate_coding != kPlain) {
    error = p->intermediate_coding == kNvfp4
                ? launch<requantize_kernel<Nvfp4>>(p->num_ctas, kMaxThreads, 0, stream, *p)
                : launch<requantize_kernel<Mxfp4>>(p->num_ctas, kMaxThreads, 0, stream, *p);
  }
  if (error) return error;
  return nvfp4 ? launch_columns<down_kernel<Nvfp4>>(*p, p->w2.num_rows, 1, stream)
               : launch_columns<down_kernel<Mxfp4>>(*p, p->w2.num_rows, 1, stream);
}
