// The numerics of the softmax and of quantisation in scalar form: every constant once, every formula once.
// CPU and GPU code include this header; docs/algorithm.md is its prose.
#pragma once

#include <cmath>
#include <cstdint>

#include "numerics/formats.h"

namespace vcattn {

// ---- block sizes -------------------------------------------------------------------------------------------------

inline constexpr int kBlockN = 128;               // keys in a tile
inline constexpr int kMaxTileKeys = 2 * kBlockN;  // keys under one maximum of tile_octave: 128 or 256
inline constexpr int kScaleRows = 128;            // tokens under one block scale of Q or K
inline constexpr int kFp4Group = 16;              // elements under one NVFP4 scale
inline constexpr int kMinMeanRows = 32;           // rows under one mean of V: 32, 64 or 128
// Tokens under one FP64 partial sum of K's mean: fixed, so that the mean does not depend on who adds.
inline constexpr int kStatisticsRows = 1024;

// ---- scales ------------------------------------------------------------------------------------------------------

inline constexpr double kLog2e = 1.4426950408889634;
inline constexpr double kLn2 = 0.6931471805599453;
inline constexpr float kCodesPerOctave = 8.0f;  // E4M3 has 3 mantissa bits

// A block whose largest magnitude lies under this is stored as zeros: its reciprocal would not be finite.
inline constexpr float kSmallestAbsMax = 0x1p-100f;

// x is stored as the code of x * encode and read as code * descale.
struct Scale {
  float encode;
  float descale;
};

// `largest_code` is the value of the largest code (127 for INT8, 448 for E4M3).
VCATTN_HD constexpr Scale absmax_scale(float abs_max, float largest_code) {
  return abs_max < kSmallestAbsMax ? Scale{0.0f, 0.0f} : Scale{largest_code / abs_max, abs_max / largest_code};
}

// NVFP4: values are code * group scale * tensor scale, the tensor scale chosen so that the largest group's is 448.
VCATTN_HD constexpr Scale nvfp4_tensor_scale(float abs_max) { return absmax_scale(abs_max, kE2m1Max * kE4m3Max); }

// VCATTN_SCALE_POW2_F16: powers of two keep E4M3's relative precision, so only range matters. With Q at most 16 and K
// at most 16 (8 above 128 channels), a dot product stays within 32768 < 65504, FP16's largest value.
inline constexpr float kF16QueryMax = 16.0f;
VCATTN_HD constexpr float f16_key_max(int64_t channels) { return channels > 128 ? 8.0f : 16.0f; }

// The least e with abs_max <= limit * 2^e.
VCATTN_HD inline int pow2_exponent(float abs_max, float limit) {
  if (abs_max < kSmallestAbsMax) return 0;
  int exponent;
  const float fraction = std::frexp(abs_max / limit, &exponent);  // in [0.5, 1)
  return fraction == 0.5f ? exponent - 1 : exponent;
}

// A channel's residuals may vanish beside its means (constant V). The scale then follows the means, at FP32's own
// precision, so that means in units of the scale stay far from overflow.
inline constexpr float kMeanFloor = 0x1p-24f;

// ---- scores ------------------------------------------------------------------------------------------------------

// Scores count in E4M3 codes, eighths of an octave: code units = raw product * q_factor * k_descale, in this order.
inline float code_units_per_score(double softmax_scale) {
  return static_cast<float>(softmax_scale * kLog2e * kCodesPerOctave);
}

// ---- ExpCast (method: arXiv 2609.15810, section on softmax casting) -------------------------------------------------
//
// An E4M3 byte c = 8e + m holds 2^(e-7) (1 + m/8), nearly 2^((c - 56) / 8): so the byte of 2^(u + 8) is 8 u + 120,
// rounded. The reference of the row (u = 0) lands on code 120 = 256.0.

inline constexpr int kExpCastPeak = 120;     // code of the reference
inline constexpr int kExpCastMaxCode = 126;  // 448.0; 127 is NaN
inline constexpr float kExpCastLog2Peak = 8.0f;

// Against an exact maximum the constant is 120 + beta with beta = -0.35, which balances the code of the maximum itself
// (always exact) with the mean excess of the chord over the exponential. Against whole octaves the maximum falls
// anywhere in its octave, beta cancels in the division, and the constant is the integer 120: 120 - 8E is exact, and one
// fused multiply-add gives what is rounded to the code.
inline constexpr float kExpCastBeta = -0.35f;
inline constexpr float kExpCastIntercept = 119.65f;

// Two lines: the maximum lands on code 126, and under code 4, where E4M3 is linear, a flatter line follows the
// exponential three octaves further down.
inline constexpr int kTwoLinePeak = 126;
inline constexpr float kTwoLineIntercept = 125.65f;
inline constexpr float kTwoLinePivot = 4.0f;
inline constexpr float kTwoLineSlope = 0.146f;

// Adding it to |x| < 2^22 leaves round-to-nearest-even(x) in the low mantissa bits.
inline constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23

// Two phases: odd keys of a tile write their byte this many codes higher, and their row of V (and their share of row
// sums) carries kPhaseFactor = 2^(-4/8). The ratio of the chord to the exponential has a period of one octave; half an
// octave apart its odd harmonics have opposite signs. 124 <= 126: the room above the maximum suffices.
inline constexpr int kPhaseCodes = 4;
inline constexpr float kPhaseFactor = 0.70710678118654752f;

// Code of log2-domain score u <= 0 (relative to the exact row maximum). The sum is rounded once, then to a whole
// number.
inline int expcast_code(float u) {
  const float code = std::nearbyint(std::fma(kCodesPerOctave, u, kExpCastIntercept));
  return static_cast<int>(std::fmin(std::fmax(code, 0.0f), static_cast<float>(kExpCastPeak)));
}

// The same with two lines.
inline int expcast_two_line_code(float u) {
  const float first = std::fma(kCodesPerOctave, u, kTwoLineIntercept);
  const float second = std::fma(kTwoLineSlope, first, kTwoLinePivot - kTwoLineSlope * kTwoLinePivot);
  const float code = std::nearbyint(std::fmax(first, second));
  return static_cast<int>(std::fmin(std::fmax(code, 0.0f), static_cast<float>(kExpCastMaxCode)));
}

// Whole octaves by which a reference must rise so that `max_code` (relative to it) comes to at most 120.
// Negative: by which it could fall.
VCATTN_HD constexpr int octaves_above_peak(int max_code) {
  return (max_code - (kExpCastPeak - 7)) >> 3;  // ceil((max_code - 120) / 8)
}

// Codes are linear inside an octave where the exponential is convex: over scores spread evenly in an octave their sum
// exceeds the exponentials' by 1.4375 ln 2 / (2^(15/16) - 2^(-1/16)). The output does not see it (the row sum carries
// the same factor); lse is divided by it. Multiply by 2^(beta / 8) where the constant is 120 + beta.
inline constexpr float kExpCastMeanRatio = 1.0405134f;
inline constexpr float kExpCastLogMeanRatio = 0.0397142f;  // its natural logarithm

}  // namespace vcattn
