// The number formats of the recipes, bit by bit: E4M3FN, E2M1, UE4M3, BF16, FP16, TF32 and INT8. Every code that the
// library writes or reads is defined here, for host and device alike. One element per call: float -> code with round
// to nearest, ties to even, and code -> float, which is exact.
//
//   format  layout s.e.m  bias  largest      smallest   too large, infinite  NaN      -0    defined in
//   E4M3FN  1.4.3            7  448          2^-9       +-448                0x7F     kept  OCP 8-bit FP spec 1.0
//   E2M1    1.2.1            1  6            2^-1       +-6                  +6       kept  OCP MX spec 1.0
//   UE4M3   0.4.3            7  448          2^-9       448; negative: 0     0x7F     0     PTX ISA 5.2.3
//   BF16    1.8.7          127  3.39 * 10^38 2^-133     +-infinity           0x7FFF   kept  PTX ISA 5.2.3
//   FP16    1.5.10          15  65504        2^-24      +-infinity           0x7FFF   kept  IEEE 754-2019 binary16
//   TF32    1.8.10         127  3.40 * 10^38 2^-136     +-infinity           quiet    kept  PTX ISA 5.2.3
//   INT8    two's compl.     -  127          1          +-127                0        0
//
// Sources of what the format definitions leave open:
//  - E4M3 and E2M1 saturate and replace NaN as `cvt.rn.satfinite` does (PTX ISA, cvt): E4M3 has no infinity, and E2M1
//    has neither infinity nor NaN, so that its NaN becomes the largest positive value.
//  - UE4M3 holds the scales of NVFP4 blocks. It is E4M3 without the sign, and its bit 7 is padding, written as 0 and
//    ignored when read. A scale cannot be negative: negative input is an underflow and becomes 0.
//  - BF16, FP16 and TF32 overflow to infinity as IEEE 754 asks for and frameworks do: `cvt.rn` without `.satfinite`.
//  - NaN is written as a quiet NaN of positive sign with all bits set, as `cvt` does; sign and payload are dropped.
//  - INT8 is symmetric so that a code and its negative both exist: -128 is never written, but is read as -128.
//
// Encoding works on the bits of the float alone, and the one product in decoding is exact and has neither subnormal
// operands nor a subnormal result. So nothing here depends on the rounding mode or on denormals being enabled: hosts
// such as PyTorch may flush them (FTZ, DAZ).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define VCATTN_HD __host__ __device__
#else
#define VCATTN_HD
#endif

namespace vcattn {

// A binary floating-point format of at most 8 exponent and 22 mantissa bits. The code without its sign bit, its
// magnitude, is (exponent field << mantissa_bits) | mantissa, and grows with the value.
struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool is_signed;           // the sign bit follows the exponent field
  uint32_t largest_finite;  // magnitude
  uint32_t overflow;        // magnitude that stands for all that is too large: infinity, or the largest finite value
  uint32_t nan;             // code written for NaN
};

// Exponent bits, mantissa bits, bias, signed, largest finite, overflow, NaN.
inline constexpr FloatFormat kE4m3 = {4, 3, 7, true, 0x7E, 0x7E, 0x7F};
inline constexpr FloatFormat kE2m1 = {2, 1, 1, true, 0x7, 0x7, 0x7};
inline constexpr FloatFormat kUe4m3 = {4, 3, 7, false, 0x7E, 0x7E, 0x7F};
inline constexpr FloatFormat kBf16 = {8, 7, 127, true, 0x7F7F, 0x7F80, 0x7FFF};
inline constexpr FloatFormat kFp16 = {5, 10, 15, true, 0x7BFF, 0x7C00, 0x7FFF};
inline constexpr FloatFormat kTf32 = {8, 10, 127, true, 0x3FBFF, 0x3FC00, 0x3FFFF};
// The magnitudes of INT8: subnormals throughout, whose spacing 2^(1 - bias - mantissa_bits) is 1.
inline constexpr FloatFormat kInt8Magnitude = {0, 7, -6, false, 127, 127, 0};

// ---- float as bits ---------------------------------------------------------------------------------------------

inline constexpr int kFloatMantissaBits = 23;
inline constexpr int kFloatBias = 127;
inline constexpr uint32_t kFloatSign = 0x80000000U;
inline constexpr uint32_t kFloatInfinity = 0x7F800000U;
inline constexpr uint32_t kFloatNan = 0x7FFFFFFFU;

// The built-in behind std::bit_cast, which device code may call without nvcc's relaxed constexpr rules.
VCATTN_HD constexpr uint32_t bits_from_float(float value) { return __builtin_bit_cast(uint32_t, value); }
VCATTN_HD constexpr float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// ---- any format ------------------------------------------------------------------------------------------------

// `significand` / 2^shift, to nearest, ties to even; shift >= 1.
VCATTN_HD constexpr uint32_t shift_right_to_nearest_even(uint32_t significand, int shift) {
  const uint32_t below_half = (1U << (shift - 1)) - 1;
  const uint32_t is_odd = (significand >> shift) & 1;
  return (significand + below_half + is_odd) >> shift;
}

// `magnitude`: the bits of a float that is neither negative nor NaN.
template <FloatFormat kFormat>
VCATTN_HD constexpr uint32_t encode_magnitude(uint32_t magnitude) {
  constexpr uint32_t kHiddenBit = 1U << kFloatMantissaBits;
  // Subnormals have the exponent of field 1 and no hidden bit, in float as in every format.
  const int float_field = static_cast<int>(magnitude >> kFloatMantissaBits);
  const uint32_t significand = (magnitude & (kHiddenBit - 1)) | (float_field > 0 ? kHiddenBit : 0);
  const int exponent = (float_field > 0 ? float_field : 1) - kFloatBias + kFormat.bias;
  const int field = exponent > 1 ? exponent : 1;

  // From 25 places on, all 24 bits of the significand lie below half the smallest subnormal.
  const int places = kFloatMantissaBits - kFormat.mantissa_bits + (field - exponent);
  const uint32_t rounded = shift_right_to_nearest_even(significand, places < 25 ? places : 25);
  // Added, not merged: the hidden bit makes field - 1 into field, and a carry out of the mantissa raises it further.
  const uint32_t code = (static_cast<uint32_t>(field - 1) << kFormat.mantissa_bits) + rounded;
  return code < kFormat.overflow ? code : kFormat.overflow;
}

template <FloatFormat kFormat>
VCATTN_HD constexpr uint32_t encode(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint32_t magnitude = bits & ~kFloatSign;
  const uint32_t sign = bits >> 31;
  if (magnitude > kFloatInfinity) return kFormat.nan;
  if constexpr (kFormat.is_signed) {
    return (sign << (kFormat.exponent_bits + kFormat.mantissa_bits)) | encode_magnitude<kFormat>(magnitude);
  } else {
    return sign != 0 ? 0 : encode_magnitude<kFormat>(magnitude);
  }
}

template <FloatFormat kFormat>
VCATTN_HD constexpr float decode_magnitude(uint32_t magnitude) {
  if constexpr (kFormat.bias == kFloatBias) {
    return float_from_bits(magnitude << (kFloatMantissaBits - kFormat.mantissa_bits));
  } else {
    if (magnitude > kFormat.largest_finite) {
      return float_from_bits(magnitude == kFormat.overflow ? kFloatInfinity : kFloatNan);
    }
    constexpr uint32_t kHiddenBit = 1U << kFormat.mantissa_bits;
    const int field = static_cast<int>(magnitude >> kFormat.mantissa_bits);
    const uint32_t significand = (magnitude & (kHiddenBit - 1)) | (field > 0 ? kHiddenBit : 0);
    const int exponent = (field > 0 ? field : 1) - kFormat.bias - kFormat.mantissa_bits;
    const float unit = float_from_bits(static_cast<uint32_t>(exponent + kFloatBias) << kFloatMantissaBits);
    return static_cast<float>(significand) * unit;
  }
}

// Bits of `code` beyond the format's are ignored.
template <FloatFormat kFormat>
VCATTN_HD constexpr float decode(uint32_t code) {
  constexpr int kMagnitudeBits = kFormat.exponent_bits + kFormat.mantissa_bits;
  const float magnitude = decode_magnitude<kFormat>(code & ((1U << kMagnitudeBits) - 1));
  const uint32_t sign = kFormat.is_signed ? (code >> kMagnitudeBits) << 31 : 0;
  return float_from_bits(bits_from_float(magnitude) | sign);
}

// ---- by name ---------------------------------------------------------------------------------------------------

VCATTN_HD constexpr uint8_t encode_e4m3(float value) { return static_cast<uint8_t>(encode<kE4m3>(value)); }
VCATTN_HD constexpr float decode_e4m3(uint8_t code) { return decode<kE4m3>(code); }

// In the low 4 bits, the sign in bit 3.
VCATTN_HD constexpr uint8_t encode_e2m1(float value) { return static_cast<uint8_t>(encode<kE2m1>(value)); }
VCATTN_HD constexpr float decode_e2m1(uint8_t code) { return decode<kE2m1>(code); }

VCATTN_HD constexpr uint8_t encode_ue4m3(float value) { return static_cast<uint8_t>(encode<kUe4m3>(value)); }
VCATTN_HD constexpr float decode_ue4m3(uint8_t code) { return decode<kUe4m3>(code); }

VCATTN_HD constexpr uint16_t encode_bf16(float value) { return static_cast<uint16_t>(encode<kBf16>(value)); }
VCATTN_HD constexpr float decode_bf16(uint16_t code) { return decode<kBf16>(code); }

VCATTN_HD constexpr uint16_t encode_fp16(float value) { return static_cast<uint16_t>(encode<kFp16>(value)); }
VCATTN_HD constexpr float decode_fp16(uint16_t code) { return decode<kFp16>(code); }

// The nearest float whose low 13 bits are 0: a TF32 operand as matrix instructions read it (cvt.rn.tf32.f32).
VCATTN_HD constexpr float round_tf32(float value) {
  return float_from_bits(encode<kTf32>(value) << (kFloatMantissaBits - kTf32.mantissa_bits));
}

VCATTN_HD constexpr int8_t encode_int8(float value) {
  const uint32_t bits = bits_from_float(value);
  const int magnitude = static_cast<int>(encode<kInt8Magnitude>(float_from_bits(bits & ~kFloatSign)));
  return static_cast<int8_t>((bits & kFloatSign) != 0 ? -magnitude : magnitude);
}
VCATTN_HD constexpr float decode_int8(int8_t code) { return static_cast<float>(code); }

// Largest finite values.
inline constexpr float kE4m3Max = decode<kE4m3>(kE4m3.largest_finite);                // 448
inline constexpr float kE2m1Max = decode<kE2m1>(kE2m1.largest_finite);                // 6
inline constexpr float kUe4m3Max = decode<kUe4m3>(kUe4m3.largest_finite);             // 448
inline constexpr float kBf16Max = decode<kBf16>(kBf16.largest_finite);                // (2 - 2^-7) 2^127
inline constexpr float kFp16Max = decode<kFp16>(kFp16.largest_finite);                // 65504
inline constexpr float kTf32Max = decode<kTf32>(kTf32.largest_finite);                // (2 - 2^-10) 2^127
inline constexpr float kInt8Max = static_cast<float>(kInt8Magnitude.largest_finite);  // 127

}  // namespace vcattn
