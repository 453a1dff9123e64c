// quant.cu: NVFP4. value = e2m1 code * e4m3 scale of its 16-value block * fp32 scale of its row.
//
//   encode   one warp a row: the row's scale from its largest finite value unless given, then a block a lane:
//            scale = e4m3(amax / 6 / row scale), code = e2m1(x * (1 / row scale / scale)); every step is one rounding
//   decode   (code * scale), exact in fp32, times the row's scale
//
// A block with a NaN or an infinity gets a NaN scale and zero codes, so that it shows downstream.
#include "fp4.cuh"
#include "sync.cuh"

namespace {

constexpr int kBlock = 16;
constexpr unsigned kWarpsPerCta = 4;
constexpr float kRowScaleMin = 0x1p-100f;  // keeps 1 / row scale / scale finite

template <Number kNumber>
__device__ __forceinline__ float ld_value(const void* values, uint64_t index) {
  if constexpr (kNumber == kFp32) return static_cast<const float*>(values)[index];
  const uint16_t bits = static_cast<const uint16_t*>(values)[index];
  return kNumber == kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}
template <Number kNumber>
__device__ __forceinline__ void st_value(void* values, uint64_t index, float value) {
  if constexpr (kNumber == kFp32) {
    static_cast<float*>(values)[index] = value;
  } else {
    static_cast<uint16_t*>(values)[index] = kNumber == kBf16 ? float_to_bf16(value) : float_to_fp16(value);
  }
}

__device__ __forceinline__ uint32_t magnitude_bits(float value) { return float_to_bits(value) & 0x7fffffffu; }
constexpr uint32_t kInfinityBits = 0x7f800000u;

// Largest finite magnitude of a row's values, as bits (they order as the values do), in all lanes.
template <Number kNumber>
__device__ float row_amax_warp(const Nvfp4Params& p, uint64_t row_start) {
  uint32_t amax = 0;
  for (uint32_t i = threadIdx.x % kLanes; i < p.hidden; i += kLanes) {
    const uint32_t magnitude = magnitude_bits(ld_value<kNumber>(p.values, row_start + i));
    if (magnitude < kInfinityBits && magnitude > amax) amax = magnitude;
  }
  for (int step = 16; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, amax, step);
    amax = other > amax ? other : amax;
  }
  return bits_to_float(amax);
}

__device__ __forceinline__ float row_scale(float amax) {
  if (amax == 0.0f) return 1.0f;
  const float scale = div_rn(amax, kE2m1Max * kE4m3Max);
  return scale > kRowScaleMin ? scale : kRowScaleMin;
}

// Encodes one block: its scale byte, and its 16 codes as 8 bytes.
template <Number kNumber>
__device__ void encode_block(const Nvfp4Params& p, uint64_t block, float global_scale) {
  float values[kBlock];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    values[i] = ld_value<kNumber>(p.values, block * kBlock + i);
    const uint32_t magnitude = magnitude_bits(values[i]);
    amax = magnitude > amax ? magnitude : amax;
  }
  const bool finite = amax < kInfinityBits;
  const uint32_t scale = finite ? float_to_e4m3(div_rn(div_rn(bits_to_float(amax), kE2m1Max), global_scale)) : kE4m3Nan;
  p.scales[block] = static_cast<uint8_t>(scale);
  const bool has_codes = finite && scale != 0;
  const float reciprocal = has_codes ? div_rn(div_rn(1.0f, global_scale), e4m3_to_float(scale)) : 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const uint32_t low = has_codes ? float_to_e2m1(mul_rn(values[2 * i], reciprocal)) : 0;
    const uint32_t high = has_codes ? float_to_e2m1(mul_rn(values[2 * i + 1], reciprocal)) : 0;
    p.packed[block * (kBlock / 2) + i] = static_cast<uint8_t>(low | high << 4);
  }
}

template <Number kNumber>
__global__ void nvfp4_encode_kernel(const __grid_constant__ Nvfp4Params p) {
  const uint32_t lane = threadIdx.x % kLanes, warps = gridDim.x * kWarpsPerCta;
  const uint32_t blocks = p.hidden / kBlock;
  for (uint64_t row = blockIdx.x * kWarpsPerCta + threadIdx.x / kLanes; row < p.num_rows; row += warps) {
    const uint64_t at = row * p.scale_stride;
    const float global_scale =
        p.given_scale ? p.global_scale[at] : row_scale(row_amax_warp<kNumber>(p, row * p.hidden));
    if (!p.given_scale && lane == 0) p.global_scale[at] = global_scale;
    for (uint32_t b = lane; b < blocks; b += kLanes) encode_block<kNumber>(p, row * blocks + b, global_scale);
  }
}

template <Number kNumber>
__global__ void nvfp4_decode_kernel(const __grid_constant__ Nvfp4Params p) {
  const uint32_t lane = threadIdx.x % kLanes, warps = gridDim.x * kWarpsPerCta;
  const uint32_t blocks = p.hidden / kBlock;
  for (uint64_t row = blockIdx.x * kWarpsPerCta + threadIdx.x / kLanes; row < p.num_rows; row += warps) {
    const float global_scale = p.global_scale[row * p.scale_stride];
    for (uint32_t b = lane; b < blocks; b += kLanes) {
      const uint64_t block = row * blocks + b;
      const float scale = e4m3_to_float(p.scales[block]);
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const uint32_t code = p.packed[block * (kBlock / 2) + i / 2] >> (i % 2 * 4) & 0xfu;
        st_value<kNumber>(p.values, block * kBlock + i, mul_rn(mul_rn(e2m1_to_float(code), scale), global_scale));
      }
    }
  }
}

template <class Kernel>
int launch_rows(Kernel kernel, const Nvfp4Params& p, void* stream) {
  constexpr unsigned kMaxCtas = 1056;
  const unsigned wanted = (p.num_rows + kWarpsPerCta - 1) / kWarpsPerCta;
  if (wanted == 0) return 0;
  return launch(kernel, wanted < kMaxCtas ? wanted : kMaxCtas, kWarpsPerCta * kLanes, 0, stream, p);
}

}  // namespace

int ep_a2a_nvfp4_encode(const Nvfp4Params* p, void* stream) {
  switch (p->number) {
    case kBf16: return launch_rows(nvfp4_encode_kernel<kBf16>, *p, stream);
    case kFp16: return launch_rows(nvfp4_encode_kernel<kFp16>, *p, stream);
    default: return launch_rows(nvfp4_encode_kernel<kFp32>, *p, stream);
  }
}

int ep_a2a_nvfp4_decode(const Nvfp4Params* p, void* stream) {
  switch (p->number) {
    case kBf16: return launch_rows(nvfp4_decode_kernel<kBf16>, *p, stream);
    case kFp16: return launch_rows(nvfp4_decode_kernel<kFp16>, *p, stream);
    default: return launch_rows(nvfp4_decode_kernel<kFp32>, *p, stream);
  }
}
