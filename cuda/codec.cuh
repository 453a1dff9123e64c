// codec.cuh: encoded rows, for the quantisers and for outboxes. value = code * scale of its block * scale of its row.
//
// A thread holds a group of 8 values; the lanes of a block find its largest magnitude together, and then its scale:
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

constexpr int kGroup = 8;                   // values that a thread holds
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

__device__ __forceinline__ uint32_t magnitude_bits(float value) { return float_to_bits(value) & 0x7fffffffu; }

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

  // The codes of a group, in order, low bits first.
  static __device__ __forceinline__ void encode(const float (&values)[kGroup], uint32_t amax, uint32_t scale,
                                                float row_scale, uint32_t (&words)[kCodeWords]) {
    const bool shows = kScale == Scale::kE4m3 && scale == kE4m3Nan;  // a row scale that is none
    const bool coded = amax < kInfinityBits && !shows && (kScale == Scale::kE4m3 ? scale : amax) != 0;
    float factor = 0.0f;
    if constexpr (kScale == Scale::kE4m3) {
      if (coded) factor = div_rn(div_rn(1.0f, row_scale), e4m3_to_float(scale));
    } else if constexpr (kScale == Scale::kUe8m0) {
      factor = bits_to_float((254 - (scale & 0xffu)) << 23);  // scale <= 252 where coded: never subnormal
    } else {
      factor = div_rn(1.0f, bits_to_float(scale));
    }
    constexpr int kPerWord = kGroup / kCodeWords;
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
      words[w] = 0;
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        const float value = mul_rn(values[w * kPerWord + i], factor);
        const uint32_t code = kElement == Element::kE2m1 ? float_to_e2m1(value) : float_to_e4m3_signed(value);
        if (coded) words[w] |= code << 32 / kPerWord * i;
      }
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

// The scale of a whole row, from its largest finite magnitude, in all lanes.
template <class C, Number kNumber>
__device__ float row_scale_warp(const void* row, uint32_t hidden) {
  uint32_t amax = 0;
  for (uint32_t i = threadIdx.x % kLanes; i < hidden; i += kLanes) {
    const uint32_t magnitude = magnitude_bits(ld_value<kNumber>(row, i));
    if (magnitude < kInfinityBits && magnitude > amax) amax = magnitude;
  }
  for (int step = 16; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, amax, step);
    amax = other > amax ? other : amax;
  }
  return fp32_scale(bits_to_float(amax), C::kLargest * kE4m3Max);
}

// Encodes a row; calls store(group, is_inside, words, scale) in all lanes together, is_inside where there is a group.
template <class C, Number kNumber, class Store>
__device__ void encode_row_warp(const void* row, uint32_t hidden, float row_scale, Store store) {
  const uint32_t groups = hidden / kGroup;
  for (uint32_t first = 0; first < groups; first += kLanes) {
    const uint32_t group = first + threadIdx.x % kLanes;
    const bool is_inside = group < groups;
    float values[kGroup];
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      values[i] = is_inside ? ld_value<kNumber>(row, static_cast<uint64_t>(group) * kGroup + i) : 0.0f;
      const uint32_t magnitude = magnitude_bits(values[i]);
      amax = magnitude > amax ? magnitude : amax;
    }
#pragma unroll
    for (int step = 1; step < C::kBlockLanes; step *= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, amax, step);
      amax = other > amax ? other : amax;
    }
    const uint32_t scale = C::scale(amax, row_scale);
    uint32_t words[C::kCodeWords];
    C::encode(values, amax, scale, row_scale, words);
    store(group, is_inside, words, scale);
  }
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
// The same of an encoded row whose parts start at multiples of 4 bytes; `row_scale` is read if the coding has one.
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

template <class F>
int with_number(uint32_t number, F f) {
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
