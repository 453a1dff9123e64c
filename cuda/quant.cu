// quant.cu: rows to NVFP4, MXFP4, FP8 or MXFP8 and back, a warp or more a row. What a code and a scale are: codec.cuh.
//
//   encode   the row's scale from its largest finite value unless given, then 16 values a lane
//   decode   code * block scale, then times the row's scale; the result rounded to the values' type
#include "codec.cuh"

namespace {

constexpr unsigned kWarpsPerCta = 4;
constexpr unsigned kFewRows = 512;  // less than these: the warps of a CTA divide a row

template <class C, Number kNumber>
__global__ void encode_kernel(const __grid_constant__ QuantParams p) {
  const uint32_t lane = threadIdx.x % kLanes, warps = gridDim.x * kWarpsPerCta;
  const uint64_t groups = p.hidden / kGroup, blocks = p.hidden / C::kBlock;
  const uint32_t parts = p.num_rows < kFewRows ? kWarpsPerCta : 1, part = threadIdx.x / kLanes % parts;
  const uint32_t first = (blockIdx.x * kWarpsPerCta + threadIdx.x / kLanes) / parts;
  for (uint64_t row = first; row < p.num_rows; row += warps / parts) {
    const char* values = static_cast<const char*>(p.values) + row * p.hidden * number_bytes(kNumber);
    float row_scale = 1.0f;
    if constexpr (C::kRowScale) {
      float& at = p.global_scale[row * p.scale_stride];
      row_scale = p.given_scale ? usable_scale(at) : row_scale_warp<C, kNumber>(values, p.hidden);
      if (!p.given_scale && part == 0 && lane == 0) at = row_scale;
    }
    encode_row_warp<C, kNumber>(values, p.hidden, row_scale, part, parts, p.codes + row * groups * 4 * C::kCodeWords,
                                static_cast<char*>(p.scales) + row * blocks * C::kScaleBytes);
  }
}

template <class C, Number kNumber>
__global__ void decode_kernel(const __grid_constant__ QuantParams p) {
  constexpr int kCodeBytes = 4 * C::kCodeWords;
  const uint32_t lane = threadIdx.x % kLanes, warps = gridDim.x * kWarpsPerCta;
  const uint64_t groups = p.hidden / kGroup;
  for (uint64_t row = blockIdx.x * kWarpsPerCta + threadIdx.x / kLanes; row < p.num_rows; row += warps) {
    const float row_scale = C::kRowScale ? p.global_scale[row * p.scale_stride] : 1.0f;
    for (uint64_t group = row * groups + lane; group < (row + 1) * groups; group += kLanes) {
      uint32_t words[C::kCodeWords] = {};
#pragma unroll
      for (int i = 0; i < kCodeBytes; ++i) {  // by bytes: the codes may start anywhere
        words[i / 4] |= static_cast<uint32_t>(p.codes[group * kCodeBytes + i]) << 8 * (i % 4);
      }
      const uint64_t block = group / C::kBlockLanes;
      uint32_t scale;
      if constexpr (C::kScaleBytes == 4) {
        scale = static_cast<const uint32_t*>(p.scales)[block];
      } else {
        scale = static_cast<const uint8_t*>(p.scales)[block];
      }
      float values[kGroup];
      C::decode(words, scale, row_scale, values);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) st_value<kNumber>(p.values, group * kGroup + i, values[i]);
    }
  }
}

template <auto kKernel>
int launch_rows(const QuantParams& p, void* stream) {
  constexpr unsigned kMaxCtas = 1056;
  const unsigned wanted = p.num_rows < kFewRows ? p.num_rows : (p.num_rows + kWarpsPerCta - 1) / kWarpsPerCta;
  if (wanted == 0) return 0;
  return launch<kKernel>(wanted < kMaxCtas ? wanted : kMaxCtas, kWarpsPerCta * kLanes, 0, stream, p);
}

}  // namespace

int ep_a2a_quant_encode(const QuantParams* p, void* stream) {
  return with_codec(p->coding, [&](auto codec) {
    return with_number(p->number, [&](auto number) {
      return launch_rows<encode_kernel<decltype(codec), decltype(number)::value>>(*p, stream);
    });
  });
}

int ep_a2a_quant_decode(const QuantParams* p, void* stream) {
  return with_codec(p->coding, [&](auto codec) {
    return with_number(p->number, [&](auto number) {
      return launch_rows<decode_kernel<decltype(codec), decltype(number)::value>>(*p, stream);
    });
  });
}
