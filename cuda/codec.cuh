// codec.cuh: encoded rows, for the quantisers and for outboxes. value = code * scale of its block * scale of its row.
//
// A thread holds groups of 8 values; the lanes of a block find its largest magnitude together, and then its scale:
//
//   e4m3    e4m3(amax / largest code / row scale), saturating; values are multiplied by 1 / row scale / scale
//   ue8m0   2^(floor(log2 amax) - exponent of the largest code), at least 2^-127; values by its inverse, exactly
//   fp32    amax / largest code, at least 2^-100, 1 where amax is 0; values by 1 / scale
//
// Codes round to nearest, ties to even, and saturate; every step is one fp32 rounding. A block of zeros, or with a
// scale of 0, has codes 0. A block with a NaN or an infinity has a NaN scale and codes 0, so that it shows downstream.
#pragma once

#include "fp4.cuh"
#include "sync.cuh"

constexpr int kGroup = 8;                   // values of a block that a thread holds together
constexpr float kFp32ScaleMin = 0x1p-100f;  // keeps 1 / row scale / scale finite
constexpr uint32_t kInfinityBits = 0x7f800000u;

enum class Element { kE2m1, kE4m3 };
enum class Scale { kE4m3, kUe8m0, kFp32 };

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

__device__ __forceinline__ void st_number(uint32_t number, void* values, uint64_t index, float value) {
  if (number == kBf16) return st_value<kBf16>(values, index, value);
  return number == kFp16 ? st_value<kFp16>(values, index, value) : st_value<kFp32>(values, index, value);
}

__device__ __forceinline__ float fp32_scale(float amax, float largest_code) {
  if (amax == 0.0f) return 1.0f;
  const float scale = div_rn(amax, largest_code);
  return scale > kFp32ScaleMin ? scale : kFp32ScaleMin;
}

template <Element kElement, Scale kScale, int kBlockValues>
struct Codec {
  static constexpr int kBlock = kBlockValues;
  static constexpr int kBlockLanes = kBlock / kGroup;
  static constexpr bool kRowScale = kScale == Scale::kE4m3;
  static constexpr int kCodeWords = kElement == Element::kE2m1 ? 1 : 2;  // of a group
  static constexpr int kScaleBytes = kScale == Scale::kFp32 ? 4 : 1;
  static constexpr float kLargest = kElement == Element::kE2m1 ? kE2m1Max : kE4m3Max;
  static constexpr uint32_t kLargestExponent = kElement == Element::kE2m1 ? 2 : 8;

  // The scale of a block, as bits, from the bits of its largest magnitude.
  static __device__ __forceinline__ uint32_t scale(uint32_t amax, float row_scale) {
    const bool finite = amax < kInfinityBits;
    if constexpr (kScale == Scale::kE4m3) {
      return finite ? float_to_e4m3(div_rn(div_rn(bits_to_float(amax), kLargest), row_scale)) : kE4m3Nan;
    } else if constexpr (kScale == Scale::kUe8m0) {
      const uint32_t exponent = amax >> 23;
      return !finite ? kUe8m0Nan : exponent > kLargestExponent ? exponent - kLargestExponent : 0;
    } else {
      return finite ? float_to_bits(fp32_scale(bits_to_float(amax), kLargest)) : 0x7fc00000u;
    }
  }

  // What the values of a block are multiplied by, 0 where all codes are; `inverse`: 1 / row scale.
  static __device__ __forceinline__ float factor(uint32_t amax, uint32_t scale, float inverse) {
    const bool shows = kScale == Scale::kE4m3 && scale == kE4m3Nan;  // a row scale that is none
    if (amax >= kInfinityBits || shows || (kScale == Scale::kE4m3 ? scale : amax) == 0) return 0.0f;
    if constexpr (kScale == Scale::kE4m3) return div_rn(inverse, e4m3_to_float(scale));
    if constexpr (kScale == Scale::kUe8m0) return bits_to_float((254 - scale) << 23);  // scale <= 252: not subnormal
    return div_rn(1.0f, bits_to_float(scale));
  }

  // The codes of a group, in order, low bits first.
  static __device__ __forceinline__ void encode(const float (&values)[kGroup], float factor,
                                                uint32_t (&words)[kCodeWords]) {
    constexpr int kPerWord = kGroup / kCodeWords;
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        const float value = mul_rn(values[w * kPerWord + i], factor);
        const uint32_t code = kElement == Element::kE2m1 ? float_to_e2m1(value) : float_to_e4m3_signed(value);
        words[w] |= code << 32 / kPerWord * i;
      }
      if (factor == 0.0f) words[w] = 0;
    }
  }

  static __device__ __forceinline__ void decode(const uint32_t (&words)[kCodeWords], uint32_t scale, float row_scale,
                                                float (&values)[kGroup]) {
    const float block_scale = kScale == Scale::kE4m3    ? e4m3_to_float(scale)
                              : kScale == Scale::kUe8m0 ? ue8m0_to_float(scale)
                                                        : bits_to_float(scale);
    constexpr int kPerWord = kGroup / kCodeWords;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t code = words[i / kPerWord] >> 32 / kPerWord * (i % kPerWord);
      const float value = kElement == Element::kE2m1 ? e2m1_to_float(code & 0xfu) : e4m3_to_float(code & 0xffu);
      values[i] = mul_rn(value, block_scale);
      if constexpr (kRowScale) values[i] = mul_rn(values[i], row_scale);
    }
  }
};

// A row scale that a caller gave; NaN, so that it shows, where none can be used.
__device__ __forceinline__ float usable_scale(float given) {
  const bool usable = given >= kFp32ScaleMin && float_to_bits(given) < kInfinityBits;
  return usable ? given : bits_to_float(0x7fc00000u);
}

// Values [8 v, 8 v + 8) of a row as fp32, from memory that a peer or an earlier kernel wrote.
template <Number kNumber>
__device__ __forceinline__ void ld_group(const char* row, uint32_t v, float (&values)[kGroup]) {
  constexpr int kPerVector = kVectorBytes / number_bytes(kNumber);
#pragma unroll
  for (int i = 0; i < kGroup / kPerVector; ++i) {
    const Vector vector = ld_vector(row + (static_cast<uint64_t>(v) * (kGroup / kPerVector) + i) * kVectorBytes);
    unpack<kNumber>(vector, values + i * kPerVector);
  }
}

// The largest of neighbouring lanes.
template <int kNeighbours>
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t value) {
#pragma unroll
  for (int step = 1; step < kNeighbours; step *= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// Magnitudes of numbers as bits, of one or two in a word; as integers they are in the order of their values.
template <Number kNumber>
struct Magnitudes {
  static constexpr uint32_t kHalf = kNumber == kFp32 ? ~0u : 0xffffu;
  static constexpr uint32_t kBits = kNumber == kFp32 ? 0x7fffffffu : 0x7fff7fffu;
  static constexpr uint32_t kExponentOne = kNumber == kFp32   ? 0x00800000u
                                           : kNumber == kBf16 ? 0x00800080u
                                                              : 0x04000400u;
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return kNumber != kFp32 ? max_u16x2(a, b) : a > b ? a : b;
  }
  static __device__ __forceinline__ uint32_t largest(Vector v, uint32_t most) {
#pragma unroll
    for (uint32_t word : v.words) most = larger(most, word & kBits);
    return most;
  }
  // The same, but that what is not finite counts less than zero: with exponents one higher it has none left.
  static __device__ __forceinline__ uint32_t largest_finite(Vector v, uint32_t most) {
#pragma unroll
    for (uint32_t word : v.words) most = larger(most, ((word & kBits) + kExponentOne) & kBits);
    return most;
  }
  static __device__ __forceinline__ uint32_t finite(uint32_t most) {
    return most > (kExponentOne & kHalf) ? most - (kExponentOne & kHalf) : 0;
  }
  // Of the numbers in a word, over neighbouring lanes.
  template <int kNeighbours>
  static __device__ __forceinline__ uint32_t of_lanes(uint32_t most) {
    return max_of_lanes<kNeighbours>(larger(most & kHalf, kNumber == kFp32 ? 0 : most >> 16));
  }
  static __device__ __forceinline__ float value(uint32_t most) {
    const uint16_t half = static_cast<uint16_t>(most);
    return kNumber == kFp32 ? bits_to_float(most) : kNumber == kBf16 ? bf16_to_float(half) : fp16_to_float(half);
  }
};

// The scale of a whole row, from its largest finite magnitude, in all lanes; 1 where the coding has none.
template <class C, Number kNumber>
__device__ __forceinline__ float row_scale_warp(const char* row, uint32_t hidden) {
  if constexpr (!C::kRowScale) return 1.0f;
  using M = Magnitudes<kNumber>;
  constexpr uint32_t kPerVector = kVectorBytes / number_bytes(kNumber);
  uint32_t most = 0;
#pragma unroll 4
  for (uint32_t v = threadIdx.x % kLanes; v < hidden / kPerVector; v += kLanes) {
    most = M::largest_finite(ld_vector(row + uint64_t{v} * kVectorBytes), most);
  }
  return fp32_scale(M::value(M::finite(M::template of_lanes<kLanes>(most))), C::kLargest * kE4m3Max);
}

// Encodes a row, on a multiple of 16 bytes, of which each of `parts` warps takes a part: calls store(group, words,
// scale) for each group.
template <class C, Number kNumber, class Store>
__device__ __forceinline__ void encode_groups_warp(const char* row, uint32_t hidden, float row_scale, uint32_t part,
                                                   uint32_t parts, Store store) {
  using M = Magnitudes<kNumber>;
  constexpr uint32_t kVectors = kGroup * number_bytes(kNumber) / kVectorBytes;
  constexpr uint32_t kOfLane = 2;  // groups of a block: what is done once for both is a third of the work
  static_assert(C::kBlockLanes % kOfLane == 0);
  const uint32_t groups = hidden / kGroup;
  const float inverse = C::kRowScale ? div_rn(1.0f, row_scale) : 1.0f;
#pragma unroll 1
  for (uint32_t first = part * kLanes * kOfLane; first < groups; first += parts * kLanes * kOfLane) {
    const uint32_t group = first + threadIdx.x % kLanes * kOfLane;
    const bool is_inside = group < groups;
    float values[kOfLane][kGroup];
    uint32_t most = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOfLane * kVectors; ++i) {
      const Vector vector = is_inside ? reinterpret_cast<const Vector*>(row)[group * kVectors + i] : Vector{};
      most = M::largest(vector, most);
      unpack<kNumber>(vector, values[0] + i * kGroup / kVectors);
    }
    const uint32_t amax = float_to_bits(M::value(M::template of_lanes<C::kBlockLanes / kOfLane>(most)));
    const uint32_t scale = C::scale(amax, row_scale);
    const float factor = C::factor(amax, scale, inverse);
#pragma unroll
    for (uint32_t g = 0; g < kOfLane; ++g) {
      uint32_t words[C::kCodeWords];
      C::encode(values[g], factor, words);
      if (is_inside) store(group + g, words, scale);
    }
  }
}

// Both to memory: codes, on a multiple of 4 bytes, and scales, on a multiple of their size.
template <class C, Number kNumber>
__device__ __forceinline__ void encode_row_warp(const char* row, uint32_t hidden, float row_scale, uint32_t part,
                                                uint32_t parts, void* codes, void* scales) {
  const auto store = [&](uint32_t group, const uint32_t (&words)[C::kCodeWords], uint32_t scale) {
#pragma unroll
    for (uint32_t w = 0; w < C::kCodeWords; ++w) {
      st_word(static_cast<uint32_t*>(codes) + group * C::kCodeWords + w, words[w]);
    }
    if (group % C::kBlockLanes != 0) return;
    const uint32_t block = group / C::kBlockLanes;
    if constexpr (C::kScaleBytes == 4) {
      st_word(static_cast<uint32_t*>(scales) + block, scale);
    } else {
      st_byte(static_cast<uint8_t*>(scales) + block, static_cast<uint8_t>(scale));
    }
  };
  encode_groups_warp<C, kNumber>(row, hidden, row_scale, part, parts, store);
}

// The same as `ld_group` of an encoded row whose parts start at multiples of 4 bytes; `row_scale` is read if the coding
// has one.
template <class C>
__device__ __forceinline__ void ld_encoded(const char* codes, const char* scales, const char* row_scale, uint32_t v,
                                           float (&values)[kGroup]) {
  const auto word_at = [](const char* row, uint32_t index) {
    return ld_word(reinterpret_cast<const uint32_t*>(row) + index);
  };
  uint32_t words[C::kCodeWords];
#pragma unroll
  for (int w = 0; w < C::kCodeWords; ++w) words[w] = word_at(codes, v * C::kCodeWords + w);
  const uint32_t at = v / C::kBlockLanes * C::kScaleBytes, word = word_at(scales, at / 4);
  const uint32_t scale = C::kScaleBytes == 4 ? word : word >> 8 * (at % 4) & 0xffu;
  C::decode(words, scale, C::kRowScale ? bits_to_float(word_at(row_scale, 0)) : 1.0f, values);
}

// ---- from enums to types: f(Codec), f(NumberType) -----------------------------------------------------------------

template <Number kNumber>
struct NumberType {
  static constexpr Number value = kNumber;
};

#pragma nv_exec_check_disable  // of the device too, where f is
template <class F>
__host__ __device__ auto with_number(uint32_t number, F f) {
  switch (number) {
    case kBf16: return f(NumberType<kBf16>{});
    case kFp16: return f(NumberType<kFp16>{});
    default: return f(NumberType<kFp32>{});
  }
}

using Nvfp4 = Codec<Element::kE2m1, Scale::kE4m3, 16>;
using Mxfp4 = Codec<Element::kE2m1, Scale::kUe8m0, 32>;
using Fp8 = Codec<Element::kE4m3, Scale::kFp32, 128>;
using Mxfp8 = Codec<Element::kE4m3, Scale::kUe8m0, 32>;

#pragma nv_exec_check_disable
template <class F>
__host__ __device__ auto with_codec(uint32_t coding, F f) {
  switch (coding) {
    case kNvfp4: return f(Nvfp4{});
    case kMxfp4: return f(Mxfp4{});
    case kFp8: return f(Fp8{});
    default: return f(Mxfp8{});
  }
}
