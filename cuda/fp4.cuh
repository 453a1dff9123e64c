// fp4.cuh: small floating-point numbers as bits. The same integer steps run on a GPU and a CPU, so bits are equal.
//
// e2m1: s eem, magnitudes 0 0.5 1 1.5 2 3 4 6.  e4m3: s eeee mmm, bias 7, no infinity, 0x7f is NaN, largest 448.
// ue8m0: 2^(bits - 127), 0xff is NaN.
// All conversions round to nearest, ties to even.
#pragma once

#include "ptx.cuh"

constexpr uint32_t kE4m3Nan = 0x7f;
constexpr uint32_t kUe8m0Nan = 0xff;
constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;

__host__ __device__ constexpr int number_bytes(uint32_t number) { return number == kFp32 ? 4 : 2; }

// Rounds a finite, non-negative fp32 pattern to `kept` mantissa bits; the result's low bits are zero.
__device__ __forceinline__ uint32_t round_mantissa(uint32_t bits, int kept) {
  const int dropped = 23 - kept;
  const uint32_t half_less_one = (1u << (dropped - 1)) - 1;
  return (bits + half_less_one + (bits >> dropped & 1)) & ~((1u << dropped) - 1);
}

__device__ __forceinline__ uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
  return bits_to_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above: infinity
  if (magnitude < 0x38800000u) {                                               // below 2^-14: multiples of 2^-24
    const float shifted = add_rn(bits_to_float(magnitude), 0.5f);              // one ulp of 0.5 is 2^-24
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((round_mantissa(magnitude, 10) - 0x38000000u) >> 13));
}
__device__ __forceinline__ float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = mul_rn(static_cast<float>(mantissa), bits_to_float(0x33800000u));  // 2^-24
    return bits_to_float(sign | float_to_bits(magnitude));
  }
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
  return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

// The code of a magnitude with so many bits of mantissa; below 2^kLeast codes are as far apart as right above it. The
// last bit of the sum with a power of two is worth as much as that of the code, so it is rounded there: no branches.
template <int kBits, int kLeast>
__device__ __forceinline__ uint32_t rounded_code(uint32_t magnitude) {
  constexpr uint32_t kLeastPower = static_cast<uint32_t>(127 + kLeast) << 23, kShift = 23 - kBits;
  const uint32_t power = (magnitude > kLeastPower ? magnitude : kLeastPower) & 0x7f800000u;
  const float sum = mul_add(bits_to_float(power), static_cast<float>(1u << kShift), bits_to_float(magnitude));
  return float_to_bits(sum) - power + (power >> kShift) - ((kShift << 23) + (kLeastPower >> kShift));
}

// e4m3 of a value >= 0, saturating at 448; NaN for NaN.
__device__ __forceinline__ uint32_t float_to_e4m3(float value) {
  const uint32_t code = rounded_code<3, -6>(float_to_bits(value < kE4m3Max ? value : kE4m3Max));
  return value == value ? code : kE4m3Nan;
}
__device__ __forceinline__ float e4m3_to_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x80u) << 24, exponent = bits >> 3 & 0xfu, mantissa = bits & 7u;
  if ((bits & 0x7fu) == kE4m3Nan) return bits_to_float(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = mul_rn(static_cast<float>(mantissa), bits_to_float(0x3b000000u));  // 2^-9
    return bits_to_float(sign | float_to_bits(magnitude));
  }
  return bits_to_float(sign | (exponent + 120) << 23 | mantissa << 20);
}

// The same of a finite value of either sign.
__device__ __forceinline__ uint32_t float_to_e4m3_signed(float value) {
  const uint32_t bits = float_to_bits(value);
  return (bits >> 24 & 0x80u) | float_to_e4m3(bits_to_float(bits & 0x7fffffffu));
}

__device__ __forceinline__ float ue8m0_to_float(uint32_t bits) {
  if (bits == kUe8m0Nan) return bits_to_float(0x7fc00000u);
  return bits_to_float(bits ? bits << 23 : 0x00400000u);  // 2^-127 is subnormal
}

// e2m1 code of a value, saturating at 6. The eight magnitudes are multiples of 0.5 below 2, of 1 below 4, then 4, 6.
__device__ __forceinline__ uint32_t float_to_e2m1(float value) {
  const uint32_t bits = float_to_bits(value);
  const float magnitude = bits_to_float(bits & 0x7fffffffu);
  return (bits >> 28 & 8u) | rounded_code<1, 0>(float_to_bits(magnitude < kE2m1Max ? magnitude : kE2m1Max));
}
__device__ __forceinline__ float e2m1_to_float(uint32_t code) {
  const uint32_t sign = (code & 8u) << 28, exponent = code >> 1 & 3u, mantissa = code & 1u;
  const uint32_t magnitude = exponent ? (exponent + 126) << 23 | mantissa << 22 : mantissa * 0x3f000000u;
  return bits_to_float(sign | magnitude);
}

template <Number kNumber>
__device__ __forceinline__ void unpack(const Vector& v, float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kNumber == kFp32) {
      values[i] = bits_to_float(v.words[i]);
    } else {
      const uint16_t low = static_cast<uint16_t>(v.words[i]), high = static_cast<uint16_t>(v.words[i] >> 16);
      values[2 * i] = kNumber == kBf16 ? bf16_to_float(low) : fp16_to_float(low);
      values[2 * i + 1] = kNumber == kBf16 ? bf16_to_float(high) : fp16_to_float(high);
    }
  }
}
template <Number kNumber>
__device__ __forceinline__ Vector pack(const float* values) {
  const auto narrow = [](float value) { return kNumber == kBf16 ? float_to_bf16(value) : float_to_fp16(value); };
  Vector v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v.words[i] = kNumber == kFp32 ? float_to_bits(values[i])
                                  : narrow(values[2 * i]) | static_cast<uint32_t>(narrow(values[2 * i + 1])) << 16;
  }
  return v;
}
