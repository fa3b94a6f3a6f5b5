// formats.h against the definitions of the formats: the value of every code in double precision, and encoding as a
// search among those values. All quantities here are exact in double.
#include "numerics/formats.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <ostream>
#include <random>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <pmmintrin.h>
#endif

namespace vcattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- the definition --------------------------------------------------------------------------------------------

enum class Sign { kNone, kBit, kTwosComplement };
enum class Specials { kNone, kNanOnly, kIeee };

struct Definition {
  const char* name;
  std::vector<double> finite;  // [magnitude code] -> value, ascending
  bool has_infinity;           // its magnitude code follows the largest finite one
  Sign sign;
  int magnitude_bits;
  uint32_t nan;  // the code that NaN is written as
  uint32_t (*encode)(float);
  float (*decode)(uint32_t);  // null for TF32
};

// GoogleTest names the cases by it.
void PrintTo(const Definition* definition, std::ostream* stream) { *stream << definition->name; }

std::vector<double> finite_magnitudes(int exponent_bits, int mantissa_bits, int bias, Specials specials) {
  std::vector<double> values;
  for (int field = 0; field < 1 << exponent_bits; ++field) {
    for (int mantissa = 0; mantissa < 1 << mantissa_bits; ++mantissa) {
      const double fraction = std::ldexp(mantissa, -mantissa_bits);
      values.push_back(field == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, field - bias));
    }
  }
  if (specials == Specials::kNanOnly) values.pop_back();
  if (specials == Specials::kIeee) values.resize(values.size() - (size_t{1} << mantissa_bits));
  return values;
}

std::vector<double> integers_to(int largest) {
  std::vector<double> values;
  for (int value = 0; value <= largest; ++value) values.push_back(value);
  return values;
}

template <auto kEncode>
uint32_t code_of(float value) {
  return static_cast<std::make_unsigned_t<decltype(kEncode(value))>>(kEncode(value));
}

template <typename Code, float (*kDecode)(Code)>
float value_of(uint32_t code) {
  return kDecode(static_cast<Code>(code));
}

// A TF32 code is a float without its low 13 bits. They are rotated to the top, where they spoil the comparison unless
// they are 0. Reading TF32 is reading a float, so there is nothing to decode.
uint32_t tf32_code_of(float value) { return std::rotr(std::bit_cast<uint32_t>(round_tf32(value)), 13); }

const Definition kDefinitions[] = {
    {"E4M3", finite_magnitudes(4, 3, 7, Specials::kNanOnly), false, Sign::kBit, 7, 0x7F, code_of<encode_e4m3>,
     value_of<uint8_t, decode_e4m3>},
    {"E2M1", finite_magnitudes(2, 1, 1, Specials::kNone), false, Sign::kBit, 3, 0x7, code_of<encode_e2m1>,
     value_of<uint8_t, decode_e2m1>},
    {"UE4M3", finite_magnitudes(4, 3, 7, Specials::kNanOnly), false, Sign::kNone, 7, 0x7F, code_of<encode_ue4m3>,
     value_of<uint8_t, decode_ue4m3>},
    {"BF16", finite_magnitudes(8, 7, 127, Specials::kIeee), true, Sign::kBit, 15, 0x7FFF, code_of<encode_bf16>,
     value_of<uint16_t, decode_bf16>},
    {"FP16", finite_magnitudes(5, 10, 15, Specials::kIeee), true, Sign::kBit, 15, 0x7FFF, code_of<encode_fp16>,
     value_of<uint16_t, decode_fp16>},
    {"TF32", finite_magnitudes(8, 10, 127, Specials::kIeee), true, Sign::kBit, 18, 0x3FFFF, tf32_code_of, nullptr},
    {"INT8", integers_to(127), false, Sign::kTwosComplement, 7, 0, code_of<encode_int8>, value_of<int8_t, decode_int8>},
};

std::vector<const Definition*> formats() {
  std::vector<const Definition*> all;
  for (const Definition& definition : kDefinitions) all.push_back(&definition);
  return all;
}

std::vector<const Definition*> formats_with_decode() {
  std::vector<const Definition*> with_decode = formats();
  std::erase_if(with_decode, [](const Definition* definition) { return definition->decode == nullptr; });
  return with_decode;
}

uint32_t nearest_magnitude(const Definition& definition, double magnitude) {
  const std::vector<double>& finite = definition.finite;
  const auto above = std::lower_bound(finite.begin(), finite.end(), magnitude);
  if (above != finite.end() && *above == magnitude) return static_cast<uint32_t>(above - finite.begin());
  const auto upper = static_cast<uint32_t>(above - finite.begin());
  const uint32_t lower = upper - 1;
  if (upper == finite.size() && !definition.has_infinity) return lower;
  // IEEE 754 rounds to infinity where the next value of an unbounded exponent range would be nearest, or tied and even.
  const double upper_value = upper < finite.size() ? *above : 2 * finite[lower] - finite[lower - 1];
  const double midpoint = (finite[lower] + upper_value) / 2;
  if (magnitude == midpoint) return upper % 2 == 0 ? upper : lower;
  return magnitude < midpoint ? lower : upper;
}

uint32_t defined_code(const Definition& definition, float value) {
  if (std::isnan(value)) return definition.nan;
  const uint32_t magnitude = nearest_magnitude(definition, std::abs(static_cast<double>(value)));
  if (!std::signbit(value)) return magnitude;
  if (definition.sign == Sign::kNone) return 0;
  const uint32_t sign_bit = 1U << definition.magnitude_bits;
  if (definition.sign == Sign::kBit) return sign_bit | magnitude;
  return (2 * sign_bit - magnitude) & (2 * sign_bit - 1);
}

// Bits beyond the format's are ignored.
double defined_value(const Definition& definition, uint32_t code) {
  const uint32_t sign_bit = 1U << definition.magnitude_bits;
  const uint32_t magnitude = code & (sign_bit - 1);
  const bool negative = definition.sign != Sign::kNone && (code & sign_bit) != 0;
  if (definition.sign == Sign::kTwosComplement) return negative ? double(magnitude) - sign_bit : double(magnitude);
  const size_t first_special = definition.finite.size();
  double value = std::numeric_limits<double>::quiet_NaN();
  if (magnitude < first_special) value = definition.finite[magnitude];
  if (magnitude == first_special && definition.has_infinity) value = std::numeric_limits<double>::infinity();
  return negative ? -value : value;
}

// ---- inputs ----------------------------------------------------------------------------------------------------

// Every representable value, every midpoint between neighbours and the first two midpoints past the largest, each with
// the floats next to it, in both signs.
std::vector<float> boundary_inputs(const Definition& definition) {
  std::vector<float> inputs;
  const auto add = [&inputs](double magnitude) {
    if (magnitude > std::numeric_limits<float>::max()) return;
    const auto exact = static_cast<float>(magnitude);
    ASSERT_EQ(static_cast<double>(exact), magnitude);
    for (const float near : {std::nextafter(exact, -kInfinity), exact, std::nextafter(exact, kInfinity)}) {
      inputs.push_back(near);
      inputs.push_back(-near);
    }
  };
  const std::vector<double>& finite = definition.finite;
  for (size_t code = 0; code < finite.size(); ++code) {
    add(finite[code]);
    if (code > 0) add((finite[code - 1] + finite[code]) / 2);
  }
  const double largest = finite.back();
  const double spacing = largest - finite[finite.size() - 2];
  add(largest + 0.5 * spacing);
  add(largest + 1.5 * spacing);
  return inputs;
}

std::vector<float> special_inputs() {
  std::vector<float> inputs;
  for (const uint32_t magnitude : {0x00000000U,     // zero
                                   0x00000001U,     // the smallest subnormal
                                   0x00400000U,     // half the smallest normal
                                   0x007FFFFFU,     // the largest subnormal
                                   0x00800000U,     // the smallest normal
                                   0x7F7FFFFFU,     // the largest finite value
                                   0x7F800000U,     // infinity
                                   0x7F800001U,     // signalling NaN
                                   0x7FBFFFFFU,     // signalling NaN
                                   0x7FC00000U,     // quiet NaN
                                   0x7FFFFFFFU}) {  // quiet NaN
    inputs.push_back(std::bit_cast<float>(magnitude));
    inputs.push_back(std::bit_cast<float>(magnitude | 0x80000000U));
  }
  return inputs;
}

// Half of them any bits, half of them in and around the range of the format, all binades alike.
std::vector<float> random_inputs(const Definition& definition) {
  constexpr int kCount = 150'000;
  std::mt19937 generator(20240917);
  std::uniform_int_distribution<uint32_t> any;
  const auto smallest = std::bit_cast<uint32_t>(static_cast<float>(definition.finite[1]));
  const auto largest = std::bit_cast<uint32_t>(static_cast<float>(definition.finite.back()));
  constexpr uint32_t kTwoBinades = 2U << 23;
  std::uniform_int_distribution<uint32_t> in_range(smallest - std::min(smallest, kTwoBinades),
                                                   std::min(largest + kTwoBinades, 0x7F800000U));
  std::vector<float> inputs;
  for (int i = 0; i < kCount; ++i) {
    inputs.push_back(std::bit_cast<float>(any(generator)));
    inputs.push_back(std::bit_cast<float>(in_range(generator) | (any(generator) & 0x80000000U)));
  }
  return inputs;
}

void expect_codes(const Definition& definition, const std::vector<float>& inputs) {
  for (const float input : inputs) {
    const uint32_t code = definition.encode(input);
    const uint32_t expected = defined_code(definition, input);
    ASSERT_EQ(code, expected) << fmt::format("{}: {} = {:a}, bits {:#010x}: code {:#x}, not {:#x}", definition.name,
                                             input, input, std::bit_cast<uint32_t>(input), code, expected);
  }
}

uint32_t storage_codes(const Definition& definition) { return definition.magnitude_bits <= 7 ? 1U << 8 : 1U << 16; }

// ---- exhaustive tests, for each format -------------------------------------------------------------------------

class Encode : public testing::TestWithParam<const Definition*> {};
class Decode : public testing::TestWithParam<const Definition*> {};

INSTANTIATE_TEST_SUITE_P(Formats, Encode, testing::ValuesIn(formats()), testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Formats, Decode, testing::ValuesIn(formats_with_decode()), testing::PrintToStringParamName());

TEST_P(Encode, RoundsToNearestEvenAtEveryBoundary) { expect_codes(*GetParam(), boundary_inputs(*GetParam())); }

TEST_P(Encode, KeepsTheContractForZeroSubnormalsInfinityAndNan) { expect_codes(*GetParam(), special_inputs()); }

TEST_P(Encode, RoundsRandomFloats) { expect_codes(*GetParam(), random_inputs(*GetParam())); }

TEST_P(Decode, GivesTheDefinedValueOfEveryCode) {
  const Definition& definition = *GetParam();
  for (uint32_t code = 0; code < storage_codes(definition); ++code) {
    const float value = definition.decode(code);
    const auto expected = static_cast<float>(defined_value(definition, code));
    const auto message = [&] {
      return fmt::format("{} code {:#x}: {} (bits {:#010x}), not {} (bits {:#010x})", definition.name, code, value,
                         std::bit_cast<uint32_t>(value), expected, std::bit_cast<uint32_t>(expected));
    };
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << message();
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(expected)) << message();
    }
  }
}

TEST_P(Decode, IsUndoneByEncode) {
  const Definition& definition = *GetParam();
  const uint32_t sign_bit = definition.sign == Sign::kNone ? 0 : 1U << definition.magnitude_bits;
  const uint32_t code_bits = sign_bit | ((1U << definition.magnitude_bits) - 1);
  for (uint32_t code = 0; code < storage_codes(definition); ++code) {
    uint32_t expected = code & code_bits;
    if (std::isnan(defined_value(definition, code))) expected = definition.nan;
    if (definition.sign == Sign::kTwosComplement && code == 0x80) expected = 0x81;  // -128 saturates
    const float value = definition.decode(code);
    ASSERT_EQ(definition.encode(value), expected) << fmt::format("{} code {:#x}: {} (bits {:#010x})", definition.name,
                                                                 code, value, std::bit_cast<uint32_t>(value));
  }
}

// ---- independence from the floating-point environment ------------------------------------------------------------

#if defined(__x86_64__)
class ControlWord {
 public:
  explicit ControlWord(unsigned bits) : saved_(_mm_getcsr()) {
    _mm_setcsr((saved_ & ~unsigned{_MM_ROUND_MASK}) | bits);
  }
  ~ControlWord() { _mm_setcsr(saved_); }
  ControlWord(const ControlWord&) = delete;
  ControlWord& operator=(const ControlWord&) = delete;

 private:
  unsigned saved_;
};

constexpr unsigned kFlush = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
constexpr unsigned kControlWords[] = {_MM_ROUND_NEAREST | kFlush, _MM_ROUND_DOWN | kFlush, _MM_ROUND_UP | kFlush,
                                      _MM_ROUND_TOWARD_ZERO | kFlush};

// Volatile, so that the arithmetic happens at run time and under the control word.
bool subnormals_are_flushed() {
  volatile float subnormal = std::numeric_limits<float>::denorm_min();
  volatile float doubled = subnormal + subnormal;
  return std::bit_cast<uint32_t>(float{doubled}) == 0;
}

// Nothing but the function under test runs under the control word: the references need subnormals.
TEST_P(Encode, IgnoresRoundingModeAndFlushing) {
  const Definition& definition = *GetParam();
  std::vector<float> inputs = special_inputs();
  const std::vector<float> boundaries = boundary_inputs(definition);
  inputs.insert(inputs.end(), boundaries.begin(), boundaries.end());
  std::vector<uint32_t> codes(inputs.size());
  std::vector<uint32_t> expected(inputs.size());
  std::transform(inputs.begin(), inputs.end(), expected.begin(),
                 [&](float input) { return defined_code(definition, input); });
  for (const unsigned bits : kControlWords) {
    bool flushed = false;
    {
      const ControlWord guard(bits);
      flushed = subnormals_are_flushed();
      std::transform(inputs.begin(), inputs.end(), codes.begin(), definition.encode);
    }
    ASSERT_TRUE(flushed);
    const auto i = std::mismatch(codes.begin(), codes.end(), expected.begin()).first - codes.begin();
    ASSERT_EQ(i, std::ssize(codes)) << fmt::format(
        "{}: {} (bits {:#010x}) under control word {:#06x}: {:#x}, not {:#x}", definition.name, inputs[i],
        std::bit_cast<uint32_t>(inputs[i]), bits, codes[i], expected[i]);
  }
}

TEST_P(Decode, IgnoresRoundingModeAndFlushing) {
  const Definition& definition = *GetParam();
  std::vector<uint32_t> values(storage_codes(definition));
  for (const unsigned bits : kControlWords) {
    {
      const ControlWord guard(bits);
      for (uint32_t code = 0; code < values.size(); ++code) {
        values[code] = std::bit_cast<uint32_t>(definition.decode(code));
      }
    }
    for (uint32_t code = 0; code < values.size(); ++code) {
      const auto expected = static_cast<float>(defined_value(definition, code));
      if (std::isnan(expected)) continue;
      ASSERT_EQ(values[code], std::bit_cast<uint32_t>(expected))
          << fmt::format("{} code {:#x} under control word {:#06x}", definition.name, code, bits);
    }
  }
}
#endif

// ---- examples worked by hand, at compile time ------------------------------------------------------------------

static_assert(kE4m3Max == 448 && kE2m1Max == 6 && kUe4m3Max == 448 && kFp16Max == 65504 && kInt8Max == 127);
static_assert(kBf16Max == 0x1.FEp127F && kTf32Max == 0x1.FFCp127F);

static_assert(encode_e4m3(1.0F) == 0x38 && decode_e4m3(0x38) == 1.0F);
static_assert(encode_e4m3(-1.0625F) == 0xB8 && encode_e4m3(1.1875F) == 0x3A, "ties go to the even mantissa");
static_assert(encode_e4m3(448.0F) == 0x7E && encode_e4m3(464.0F) == 0x7E && encode_e4m3(465.0F) == 0x7E);
static_assert(encode_e4m3(kInfinity) == 0x7E && encode_e4m3(-kInfinity) == 0xFE && encode_e4m3(-kNan) == 0x7F);
static_assert(encode_e4m3(0x1p-10F) == 0x00 && encode_e4m3(0x1.8p-9F) == 0x02 && encode_e4m3(-0x1p-20F) == 0x80);
static_assert(encode_e4m3(0x1.Ep-7F) == 0x08, "the largest subnormal and the smallest normal value tie");

static_assert(encode_e2m1(0.25F) == 0x0 && encode_e2m1(0.75F) == 0x2 && encode_e2m1(-0.75F) == 0xA);
static_assert(encode_e2m1(2.5F) == 0x4 && encode_e2m1(3.5F) == 0x6 && encode_e2m1(5.0F) == 0x6);
static_assert(encode_e2m1(7.0F) == 0x7 && encode_e2m1(-kInfinity) == 0xF && encode_e2m1(-kNan) == 0x7);
static_assert(decode_e2m1(0xD) == -3.0F && decode_e2m1(0xFD) == -3.0F, "the high four bits are ignored");

static_assert(encode_ue4m3(500.0F) == 0x7E && encode_ue4m3(-1.0F) == 0 && encode_ue4m3(-0.0F) == 0);
static_assert(encode_ue4m3(-kInfinity) == 0 && encode_ue4m3(-kNan) == 0x7F && decode_ue4m3(0xB8) == 1.0F);

static_assert(encode_bf16(-1.0F) == 0xBF80 && encode_bf16(0x1.01p0F) == 0x3F80 && encode_bf16(0x1.03p0F) == 0x3F82);
static_assert(encode_bf16(0x1.FEFFFEp127F) == 0x7F7F && encode_bf16(0x1.FFp127F) == 0x7F80);
static_assert(encode_bf16(0x1p-133F) == 0x0001 && decode_bf16(0x8001) == -0x1p-133F);

static_assert(encode_fp16(65504.0F) == 0x7BFF && encode_fp16(65519.0F) == 0x7BFF && encode_fp16(65520.0F) == 0x7C00);
static_assert(encode_fp16(0x1p-25F) == 0x0000 && encode_fp16(-0x1.8p-24F) == 0x8002 && encode_fp16(-0.0F) == 0x8000);
static_assert(decode_fp16(0x0001) == 0x1p-24F && decode_fp16(0xFC00) == -kInfinity);

static_assert(round_tf32(0x1.002p0F) == 1.0F && round_tf32(0x1.006p0F) == 0x1.008p0F);
static_assert(round_tf32(-0x1.FFEp127F) == -kInfinity && round_tf32(0x1p-137F) == 0.0F);

static_assert(encode_int8(0.5F) == 0 && encode_int8(-1.5F) == -2 && encode_int8(2.5F) == 2);
static_assert(encode_int8(127.5F) == 127 && encode_int8(-kInfinity) == -127 && encode_int8(kNan) == 0);
static_assert(decode_int8(-128) == -128.0F);

}  // namespace
}  // namespace vcattn
