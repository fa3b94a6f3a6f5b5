#include "numerics/dot_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "dot_model_cases.h"

namespace vcattn {
namespace {

using Values = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Values decode_hex(const char* codes) {
  const std::string text(codes);
  Values values;
  for (size_t i = 0; i < text.size(); i += 2) {
    values.push_back(decode_e4m3(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16))));
  }
  return values;
}

Values floats(std::span<const uint32_t> bits) {
  Values values;
  for (const uint32_t word : bits) values.push_back(float_from_bits(word));
  return values;
}

std::string hex(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", bits);
  return text;
}

// One instruction whose products are `products`, each of which must be the value of an E4M3 code.
float step(float accumulator, const Values& products) {
  return hopper_fp8_step(accumulator, products, Values(products.size(), 1.0f));
}
float f16_step(float accumulator, const Values& products) {
  return hopper_fp8_f16_step(accumulator, products, Values(products.size(), 1.0f));
}

// ---- hardware ----------------------------------------------------------------------------------------------------

TEST(DotModel, ReproducesMeasuredF32) {
  for (const MeasuredFp8& measured : kMeasuredF32) {
    const Values a = decode_hex(measured.a);
    const Values b = decode_hex(measured.b);
    float sum = float_from_bits(measured.accumulator);
    for (size_t k = 0; k < a.size(); k += kHopperGroup) {
      sum = hopper_fp8_step(sum, std::span(a).subspan(k, kHopperGroup), std::span(b).subspan(k, kHopperGroup));
    }
    EXPECT_EQ(hex(bits_from_float(sum)), hex(measured.result))
        << measured.name << ": " << sum << " instead of " << float_from_bits(measured.result);
  }
}

TEST(DotModel, ReproducesMeasuredF16) {
  for (const MeasuredFp8& measured : kMeasuredF16) {
    const Values a = decode_hex(measured.a);
    const Values b = decode_hex(measured.b);
    float sum = decode_fp16(static_cast<uint16_t>(measured.accumulator));
    for (size_t k = 0; k < a.size(); k += kHopperGroup) {
      sum = hopper_fp8_f16_step(sum, std::span(a).subspan(k, kHopperGroup), std::span(b).subspan(k, kHopperGroup));
    }
    EXPECT_EQ(hex(encode_fp16(sum)), hex(measured.result))
        << measured.name << ": " << sum << " instead of " << decode_fp16(static_cast<uint16_t>(measured.result));
  }
}

TEST(DotModel, ReproducesMeasuredTf32) {
  for (const MeasuredTf32& measured : kMeasuredTf32) {
    const float sum = hopper_tf32_step(float_from_bits(measured.accumulator), floats(measured.a), floats(measured.b));
    EXPECT_EQ(hex(bits_from_float(sum)), hex(measured.result))
        << measured.name << ": " << sum << " instead of " << float_from_bits(measured.result);
  }
}

// ---- one group ---------------------------------------------------------------------------------------------------

TEST(DotModel, KeepsThirteenFractionBitsBelowTheLargestExponent) {
  EXPECT_EQ(hopper_fp8_step(0.0f, Values{1, 0x1p-6f}, Values{1, 0x1p-7f}), 1.0f + 0x1p-13f);
  EXPECT_EQ(hopper_fp8_step(0.0f, Values{1, 0x1p-7f}, Values{1, 0x1p-7f}), 1.0f);
  EXPECT_EQ(step(1.0f + 0x1p-13f, {0x1p-9f}), 1.0f + 0x1p-9f + 0x1p-13f);
  EXPECT_EQ(step(1.0f + 0x1p-14f, {0x1p-9f}), 1.0f + 0x1p-9f);
}

TEST(DotModel, CutsEachTermTowardZero) {
  // 31 terms of half a unit each: every one is lost, though their sum is 15.5 units.
  Values a(32, 0x1p-7f);
  a[0] = 1.0f;
  Values b = a;
  EXPECT_EQ(hopper_fp8_step(0.0f, a, b), 1.0f);
  for (size_t k = 1; k < b.size(); ++k) b[k] = -b[k];
  EXPECT_EQ(hopper_fp8_step(0.0f, a, b), 1.0f) << "negative terms toward zero, not down";
  for (float& value : b) value = -value;
  EXPECT_EQ(hopper_fp8_step(0.0f, a, b), -1.0f);
}

TEST(DotModel, TakesTheExponentOfAProductFromItsOperands) {
  const float unit = 0x1p-13f;  // below the exponent 0 of 1.5 * 1.5 = 2.25
  const Values a = {1.5f, 1.5f, 0x1p-6f};
  const Values b = {1.5f, -1.5f, 0x1p-7f};
  EXPECT_EQ(hopper_fp8_step(0.0f, a, b), unit);
  // The accumulator 2.25 does have exponent 1.
  EXPECT_EQ(hopper_fp8_step(2.25f, Values{-1.5f, 0x1p-6f}, Values{1.5f, 0x1p-7f}), 0.0f);
}

TEST(DotModel, CountsSubnormalCodesWithTheSmallestNormalExponent) {
  // 2^-9 * 2^8 counts as 2^(-6 + 8), whose unit is 2^-11.
  EXPECT_EQ(hopper_fp8_step(0.0f, Values{0x1p-9f, 0x1p-9f, 0x1p-6f}, Values{256, -256, 0x1p-6f}), 0.0f);
  EXPECT_EQ(hopper_fp8_step(0.0f, Values{0x1p-9f, 0x1p-9f, 0x1p-5f}, Values{256, -256, 0x1p-6f}), 0x1p-11f);
}

TEST(DotModel, IgnoresTheExponentOfZeroProducts) {
  EXPECT_EQ(hopper_fp8_step(0.0f, Values{0, 0x1p-6f}, Values{448, 0x1p-8f}), 0x1p-14f);
  EXPECT_EQ(hopper_fp8_step(0.0f, Values{448, 0x1p-9f}, Values{-0.0f, 0x1p-9f}), 0x1p-18f);
}

TEST(DotModel, PassesTheAccumulatorThroughZeroProducts) {
  const Values zeros(32, 0.0f);
  EXPECT_EQ(hopper_fp8_step(0x1.fffffep-100f, zeros, zeros), 0x1.fff8p-100f);
  EXPECT_EQ(hopper_fp8_f16_step(0x1p-24f, zeros, zeros), 0x1p-24f);
  EXPECT_EQ(hopper_tf32_step(-0x1.fffffep-120f, zeros, zeros), -0x1.fffffep-120f);
  EXPECT_FALSE(std::signbit(hopper_fp8_step(-0.0f, zeros, zeros)));
  EXPECT_FALSE(std::signbit(hopper_fp8_step(-0x1p-149f, zeros, zeros))) << "cut to zero first";
  EXPECT_FALSE(std::signbit(hopper_fp8_f16_step(-0.0f, zeros, zeros)));
  EXPECT_FALSE(std::signbit(hopper_tf32_step(-0.0f, zeros, zeros)));
  EXPECT_FALSE(std::signbit(hopper_fp8_step(-1.0f, Values{1}, Values{1})));
}

TEST(DotModel, DoesNotDependOnTheOrderWithinAGroup) {
  std::mt19937 random(1);
  Values a(32), b(32);
  for (int round = 0; round < 200; ++round) {
    for (size_t k = 0; k < 32; ++k) {
      a[k] = decode_e4m3(static_cast<uint8_t>((random() % 2) << 7 | random() % 127));
      b[k] = decode_e4m3(static_cast<uint8_t>((random() % 2) << 7 | random() % 127));
    }
    const float accumulator = std::ldexp(static_cast<float>(random()) * 0x1p-32f, static_cast<int>(random() % 24) - 4);
    const float sum = hopper_fp8_step(accumulator, a, b);
    EXPECT_EQ(sum, hopper_fp8_step(accumulator, Values(a.rbegin(), a.rend()), Values(b.rbegin(), b.rend())));
    for (float& value : a) value = -value;
    EXPECT_EQ(sum, -hopper_fp8_step(-accumulator, a, b));
  }
}

TEST(DotModel, KeepsInfinityAndNan) {
  EXPECT_EQ(step(kInfinity, {1, -448}), kInfinity);
  EXPECT_EQ(step(-kInfinity, {0}), -kInfinity);
  EXPECT_EQ(f16_step(-kInfinity, {448}), -kInfinity);
  EXPECT_TRUE(std::isnan(step(std::numeric_limits<float>::quiet_NaN(), {1})));
  EXPECT_TRUE(std::isnan(f16_step(std::numeric_limits<float>::quiet_NaN(), {1})));
}

// ---- long sums ---------------------------------------------------------------------------------------------------

TEST(DotModel, IsExactForSmallIntegers) {
  std::mt19937 random(2);
  Values a(1024), b(1024);
  for (int round = 0; round < 20; ++round) {
    int64_t exact = 0;
    for (size_t k = 0; k < a.size(); ++k) {
      const int x = static_cast<int>(random() % 17) - 8;
      const int y = static_cast<int>(random() % 17) - 8;
      a[k] = static_cast<float>(x);
      b[k] = static_cast<float>(y);
      exact += x * y;
    }
    ASSERT_LT(std::abs(exact), 1 << 12);
    EXPECT_EQ(hopper_fp8_dot(a, b, 0), static_cast<float>(exact));
    EXPECT_EQ(hopper_fp8_dot(a, b, 128), static_cast<float>(exact));
  }
}

TEST(DotModel, CountsOnesUpToTwoToTheFourteenth) {
  const Values ones(1 << 15, 1.0f);
  const auto count = [&](size_t n, size_t promote_keys) {
    const std::span<const float> first(ones.data(), n);
    return hopper_fp8_dot(first, first, promote_keys);
  };
  EXPECT_EQ(count(4096, 0), 4096.0f);
  EXPECT_EQ(count(1 << 14, 0), 16384.0f);
  // From 2^14 on the unit is 2, so every further 1 is lost.
  EXPECT_EQ(count((1 << 14) + 32, 0), 16384.0f);
  EXPECT_EQ(count(1 << 15, 0), 16384.0f);
  EXPECT_EQ(count(1 << 15, 1 << 14), 32768.0f);
  EXPECT_EQ(count(1 << 15, 128), 32768.0f);
}

TEST(DotModel, PromotesAfterTheLastGroupOfEachSpan) {
  Values a(128, 0.0f);
  a[0] = 1.0f;      // group 0
  a[32] = 0x1p-7f;  // group 1: half a unit, lost beside the 1
  a[64] = 0x1p-7f;  // group 2: kept, since the 1 was promoted
  EXPECT_EQ(hopper_fp8_dot(a, a, 64), 1.0f + 0x1p-14f);
  EXPECT_EQ(hopper_fp8_dot(a, a, 32), 1.0f + 0x1p-13f);
  EXPECT_EQ(hopper_fp8_dot(a, a, 128), 1.0f);
  EXPECT_EQ(hopper_fp8_dot(a, a, 0), 1.0f);
}

TEST(DotModel, TakesGroupsThatAreNotFull) {
  const Values ones(45, 1.0f);
  EXPECT_EQ(hopper_fp8_dot(ones, ones, 0), 45.0f);
  EXPECT_EQ(hopper_fp8_dot(ones, ones, 32), 45.0f);
  EXPECT_EQ(hopper_fp8_f16_dot(ones, ones), 45.0f);
  EXPECT_EQ(hopper_fp8_dot({}, {}, 32), 0.0f);
}

TEST(DotModel, SumsOfPositiveTermsFallShortUntilPromoted) {
  std::mt19937 random(3);
  Values a(1 << 14), b(1 << 14);
  double exact = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    a[k] = decode_e4m3(static_cast<uint8_t>(56 + random() % 8));  // 1 to 1.875
    b[k] = decode_e4m3(static_cast<uint8_t>(56 + random() % 8));
    exact += static_cast<double>(a[k]) * static_cast<double>(b[k]);
  }
  const auto relative_error = [&](size_t promote_keys) {
    return (static_cast<double>(hopper_fp8_dot(a, b, promote_keys)) - exact) / exact;
  };
  const double never = relative_error(0);
  const double every_2048 = relative_error(2048);
  const double every_128 = relative_error(128);
  EXPECT_LT(never, -0.1);
  EXPECT_LT(never, 5 * every_2048);
  EXPECT_LT(every_2048, 10 * every_128);
  EXPECT_LE(every_128, 0.0);
  EXPECT_GT(every_128, -1e-4);

  for (float& value : b) value = -value;
  exact = -exact;
  EXPECT_EQ(relative_error(0), never) << "toward zero on both sides";
}

// ---- FP16 accumulators -------------------------------------------------------------------------------------------

TEST(DotModel, F16RoundsToNearestEven) {
  EXPECT_EQ(f16_step(2048.0f, {1}), 2048.0f);
  EXPECT_EQ(f16_step(2048.0f, {3}), 2052.0f);
  EXPECT_EQ(f16_step(2048.0f, {1, 0.5f}), 2050.0f);
  EXPECT_EQ(f16_step(2048.0f, {1, 0.125f}), 2048.0f) << "2^-3 lies under the unit 2^-2";
}

TEST(DotModel, F16RoundsTheWholeSumOnce) {
  // 2^11 + 1 + 2^-2 plus a carry into the next octave: cut to 13 bits first it would be a tie.
  EXPECT_EQ(f16_step(0.0f, {256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 256, 2, 0.25f}),
            4100.0f);
}

TEST(DotModel, F16OverflowsToInfinity) {
  EXPECT_EQ(f16_step(65504.0f, {8}), 65504.0f);
  EXPECT_EQ(f16_step(65504.0f, {16}), kInfinity);
  EXPECT_EQ(f16_step(-65504.0f, {-16}), -kInfinity);
  const Values large(64, 448.0f);
  EXPECT_EQ(hopper_fp8_f16_dot(large, large), kInfinity);
}

// ---- TF32 --------------------------------------------------------------------------------------------------------

TEST(DotModel, Tf32CutsItsOperands) {
  EXPECT_EQ(hopper_tf32_step(0.0f, Values{1.0f + 0x1p-10f}, Values{1.0f}), 1.0f + 0x1p-10f);
  EXPECT_EQ(hopper_tf32_step(0.0f, Values{1.0f + 0x1.fffp-11f}, Values{-1.0f}), -1.0f);
}

TEST(DotModel, Tf32KeepsTwentyFiveFractionBitsThenCutsToFloat) {
  const Values ones(8, 1.0f);
  EXPECT_EQ(hopper_tf32_step(1.0f, Values(4, 0x1p-25f), Values(4, 1.0f)), 1.0f + 0x1p-23f);
  EXPECT_EQ(hopper_tf32_step(1.0f, Values(3, 0x1p-25f), Values(3, 1.0f)), 1.0f);
  EXPECT_EQ(hopper_tf32_step(1.0f, Values(8, 0x1p-26f), ones), 1.0f);
  EXPECT_EQ(hopper_tf32_step(-1.0f, Values(7, -0x1p-25f), Values(7, 1.0f)), -1.0f - 0x1p-23f);
}

TEST(DotModel, Tf32HoldsTheLargestSum) {
  const Values largest(8, 0x1.ffcp0f);
  EXPECT_EQ(hopper_tf32_step(0x1.fffffep0f, largest, largest), 34.0f - 0x1p-5f + 0x1p-18f);
}

TEST(DotModel, FloatTowardZeroCutsLongIntegers) {
  EXPECT_EQ(float_toward_zero(0), 0.0f);
  EXPECT_EQ(float_toward_zero((1 << 24) - 1), 16777215.0f);
  EXPECT_EQ(float_toward_zero((1 << 25) - 1), 33554430.0f);
  EXPECT_EQ(float_toward_zero(-(1 << 25) + 1), -33554430.0f);
  EXPECT_EQ(float_toward_zero(std::numeric_limits<int32_t>::max()), 2147483520.0f);
  EXPECT_EQ(float_toward_zero(std::numeric_limits<int32_t>::min()), -2147483648.0f);
}

}  // namespace
}  // namespace vcattn
