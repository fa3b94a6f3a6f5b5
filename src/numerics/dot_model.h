// How Hopper's tensor cores accumulate a dot product, in scalar form: the definition that vectorised code is tested
// against.
//
// One wgmma instruction adds all its products and the accumulator at once, in fixed point (`F` fraction bits):
//   1. Products are exact. Each takes as exponent the sum of its operands' exponents, whatever the product of the
//      significands is (1.5 * 1.5 = 2.25 counts as 2^0). A subnormal operand counts with the exponent of the smallest
//      normal one. The accumulator counts with its own exponent. Zeros do not count.
//   2. The unit is 2^(largest exponent - F). Every product, and the accumulator, is cut to a multiple of it, toward
//      zero, each on its own.
//   3. What is left is added exactly, so the order within an instruction does not matter. A sum of 0 is +0.
//   4. The sum becomes the accumulator's format:
//        E4M3 x E4M3, FP32 accumulator (m64nNk32)   F = 13   cut to 13 fraction bits, toward zero
//        E4M3 x E4M3, FP16 accumulator (m64nNk32)   F = 13   FP16, to nearest, ties to even; infinity above 65504
//        TF32 x TF32, FP32 accumulator (m64nNk8)    F = 25   cut to 23 fraction bits, toward zero
//      TF32 operands are read from FP32 registers or memory without their low 13 bits.
//
// Evidence: measured on one NVIDIA H200 (driver 580.159.04, CUDA 13.0), 2026-11-29. Bit for bit equal to the hardware
// on 283,027,754 of 283,027,754 random cases (E4M3, FP32), 282,987,392 of 282,987,392 (E4M3, FP16) and 146,066,418 of
// 146,066,418 (TF32): all codes, narrow and wide spreads of exponents, subnormal codes, zeros, cancellation,
// accumulators far above and far below the products, chains of up to 256 instructions (TF32: 64). N = 8, 64 and 128 and
// an A operand from registers or shared memory give the same bits; so does any order of the products within an
// instruction, and an instruction that ignores its accumulator (scale-d = 0) equals one on +0. INT8 products (m64nNk32,
// s32) are exact and need no model.
//
// Every intermediate result is exact in FP32 or int32, and denormals need not be enabled: only an accumulator that is
// itself an FP32 subnormal, which no sum of E4M3 products reaches, would be flushed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "numerics/formats.h"

namespace vcattn {

inline constexpr int kHopperGroup = 32;         // E4M3 products in one instruction
inline constexpr int kHopperFractionBits = 13;  // below the largest exponent of the group
inline constexpr int kHopperTf32Group = 8;
inline constexpr int kHopperTf32FractionBits = 25;

// Bits that an FP32 accumulator loses when it is cut to kHopperFractionBits.
inline constexpr uint32_t kHopperCutBits = (1U << (kFloatMantissaBits - kHopperFractionBits)) - 1;
// Bits of an FP32 operand that a TF32 instruction does not read.
inline constexpr uint32_t kTf32CutBits = (1U << (kFloatMantissaBits - kTf32.mantissa_bits)) - 1;

// ---- powers of two as floats: exponents add by multiplication and compare as values ------------------------------

// 2^exponent for -127 < exponent < 128.
constexpr float power_of_two(int exponent) {
  return float_from_bits(static_cast<uint32_t>(exponent + kFloatBias) << kFloatMantissaBits);
}

// The largest power of two not above |x|; 0 for zeros and FP32 subnormals.
constexpr float exponent_part(float x) { return float_from_bits(bits_from_float(x) & kFloatInfinity); }

inline constexpr float kE4m3SmallestNormal = power_of_two(1 - kE4m3.bias);

// 2^(exponent of an E4M3 operand), given its value.
constexpr float e4m3_exponent_part(float x) {
  return x == 0.0f ? 0.0f : std::max(exponent_part(x), kE4m3SmallestNormal);
}

// 2^fraction_bits / scale for a power of two `scale`, which is at least 2^(fraction_bits - 127).
constexpr float reciprocal_unit(float scale, int fraction_bits) {
  return float_from_bits((static_cast<uint32_t>(fraction_bits + 2 * kFloatBias) << kFloatMantissaBits) -
                         bits_from_float(scale));
}

// ---- E4M3 --------------------------------------------------------------------------------------------------------
//
// a, b: one group, the finite values of E4M3 codes; as many of one as of the other and at most kHopperGroup. Fewer
// behave as a group filled up with zeros. The accumulator may be infinite or NaN and then stays so.

// 2^(largest exponent of the products), 2^-12 to 2^16; 0 where every product is 0.
constexpr float e4m3_largest_exponent_part(std::span<const float> a, std::span<const float> b) {
  float largest = 0.0f;
  for (size_t k = 0; k < a.size(); ++k) {
    largest = std::max(largest, e4m3_exponent_part(a[k]) * e4m3_exponent_part(b[k]));
  }
  return largest;
}

// Steps 1 to 3. Every term is an integer of at most 16 bits in units of 2^(largest exponent - F), so that sums of them
// are exact in FP32 and in int32 alike. `largest_product` is not 0, so the largest term is not 0 either, and a sum of 0
// is a cancellation: +0.
inline float hopper_fp8_sum(float accumulator, std::span<const float> a, std::span<const float> b,
                            float largest_product) {
  const float scale = std::max(exponent_part(accumulator), largest_product);
  const float units = reciprocal_unit(scale, kHopperFractionBits);
  float count = std::trunc(accumulator * units);
  for (size_t k = 0; k < a.size(); ++k) count += std::trunc(a[k] * b[k] * units);
  return count * (scale * power_of_two(-kHopperFractionBits));
}

// `value` cut to kHopperFractionBits, toward zero: all that an instruction leaves in an FP32 accumulator.
constexpr float cut_hopper_accumulator(float value) {
  return float_from_bits(bits_from_float(value) & ~kHopperCutBits);
}

// One instruction with FP32 accumulators.
inline float hopper_fp8_step(float accumulator, std::span<const float> a, std::span<const float> b) {
  const float largest_product = e4m3_largest_exponent_part(a, b);
  if (largest_product == 0.0f) return 0.0f + cut_hopper_accumulator(accumulator);  // -0 becomes +0
  return cut_hopper_accumulator(hopper_fp8_sum(accumulator, a, b, largest_product));
}

// One instruction with FP16 accumulators. `accumulator` and the result are values of FP16.
inline float hopper_fp8_f16_step(float accumulator, std::span<const float> a, std::span<const float> b) {
  const float largest_product = e4m3_largest_exponent_part(a, b);
  if (largest_product == 0.0f) return 0.0f + accumulator;
  return decode_fp16(encode_fp16(hopper_fp8_sum(accumulator, a, b, largest_product)));
}

// A dot product of any length, group by group, with FP32 accumulators. After each `promote_keys` products (a multiple
// of kHopperGroup; 0: never) the accumulator is added to an FP32 register and starts again at 0, as kernels promote.
inline float hopper_fp8_dot(std::span<const float> a, std::span<const float> b, size_t promote_keys) {
  float promoted = 0.0f;
  float accumulator = 0.0f;
  for (size_t k = 0; k < a.size(); k += kHopperGroup) {
    const size_t group = std::min<size_t>(kHopperGroup, a.size() - k);
    accumulator = hopper_fp8_step(accumulator, a.subspan(k, group), b.subspan(k, group));
    if (promote_keys != 0 && (k + kHopperGroup) % promote_keys == 0) {
      promoted += accumulator;
      accumulator = 0.0f;
    }
  }
  return promoted + accumulator;
}

// The same with FP16 accumulators and no promotion.
inline float hopper_fp8_f16_dot(std::span<const float> a, std::span<const float> b) {
  float accumulator = 0.0f;
  for (size_t k = 0; k < a.size(); k += kHopperGroup) {
    const size_t group = std::min<size_t>(kHopperGroup, a.size() - k);
    accumulator = hopper_fp8_f16_step(accumulator, a.subspan(k, group), b.subspan(k, group));
  }
  return accumulator;
}

// ---- TF32 --------------------------------------------------------------------------------------------------------

// `x` as a TF32 instruction reads it: cut, not rounded. Round first (round_tf32) where a bias would hurt.
constexpr float cut_tf32(float x) { return float_from_bits(bits_from_float(x) & ~kTf32CutBits); }

// `count` as FP32, toward zero where it does not fit.
constexpr float float_toward_zero(int32_t count) {
  const uint32_t magnitude = count < 0 ? 0U - static_cast<uint32_t>(count) : static_cast<uint32_t>(count);
  const int excess = std::max(0, static_cast<int>(std::bit_width(magnitude)) - (kFloatMantissaBits + 1));
  const float value = static_cast<float>(magnitude >> excess << excess);
  return count < 0 ? -value : value;
}

// One instruction with FP32 accumulators: at most kHopperTf32Group products. a, b and the accumulator: finite, the
// products zero or of magnitude 2^-100 to 2^124, the accumulator below 2^124.
inline float hopper_tf32_step(float accumulator, std::span<const float> a, std::span<const float> b) {
  float largest_product = 0.0f;
  for (size_t k = 0; k < a.size(); ++k) {
    largest_product = std::max(largest_product, exponent_part(a[k]) * exponent_part(b[k]));
  }
  if (largest_product == 0.0f) return 0.0f + accumulator;

  const float scale = std::max(exponent_part(accumulator), largest_product);
  const float units = reciprocal_unit(scale, kHopperTf32FractionBits);
  // A product is below 2^27 units and the accumulator below 2^26: their sum fits.
  int32_t count = static_cast<int32_t>(accumulator * units);
  for (size_t k = 0; k < a.size(); ++k) count += static_cast<int32_t>(cut_tf32(a[k]) * cut_tf32(b[k]) * units);
  return float_toward_zero(count) * (scale * power_of_two(-kHopperTf32FractionBits));
}

}  // namespace vcattn
