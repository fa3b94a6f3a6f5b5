// The softmax step and ExpCast against their formulas, evaluated independently in long double.
#include "cpu/softmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/recipes.h"
#include "numerics/attention_math.h"

namespace vcattn {
namespace {

using cpu::kSumGroups;
using cpu::SoftmaxTile;

vcattn_recipe recipe(const char* name) {
  vcattn_recipe r;
  EXPECT_EQ(vcattn_recipe_by_name(name, &r, nullptr), VCATTN_OK);
  return r;
}

// Ties to even without the floating-point environment.
long double round_even(long double x) {
  const long double floor = std::floor(x);
  const long double part = x - floor;
  if (part != 0.5L) return part < 0.5L ? floor : floor + 1;
  return std::fmod(floor, 2.0L) == 0 ? floor : floor + 1;
}

// method: c(u) = clip[0,120](RNE(8 (u + 8) + 56 + beta)), the sum rounded to FP32 once.
int formula_code(float u) {
  const float sum = static_cast<float>(8.0L * u + static_cast<long double>(119.65f));
  return static_cast<int>(std::fmin(std::fmax(round_even(sum), 0.0L), 120.0L));
}

TEST(ExpCast, EqualsTheFormulaOnAGridOfMillions) {
  constexpr int kPoints = 1 << 20;
  for (int i = 0; i <= kPoints; ++i) {
    const float u = -16.0f * static_cast<float>(i) / kPoints;
    ASSERT_EQ(expcast_code(u), formula_code(u)) << "u = " << u;
  }
}

TEST(ExpCast, EqualsTheFormulaAtEveryRoundingBoundary) {
  for (int code = 0; code < 120; ++code) {
    // The score whose exact code is code + 1/2, and floats around it.
    float u = static_cast<float>((code + 0.5L - 119.65L) / 8.0L);
    for (int step = 0; step < 8; ++step) u = std::nextafter(u, -100.0f);
    for (int step = 0; step < 17; ++step, u = std::nextafter(u, 100.0f)) {
      if (u > 0.0f) break;
      ASSERT_EQ(expcast_code(u), formula_code(u)) << "u = " << u;
      // In exact arithmetic with beta = -0.35 the code is the same, or its neighbour within one rounding of the tie.
      const long double exact = 8.0L * u + 119.65L;
      const long double distance = std::fabs(exact - (code + 0.5L));
      if (distance > 0x1p-17L) {
        ASSERT_EQ(expcast_code(u), static_cast<int>(std::fmax(round_even(exact), 0.0L))) << "u = " << u;
      }
    }
  }
}

TEST(ExpCast, PutsTheMaximumOnTheByteOf256) {
  EXPECT_EQ(expcast_code(0.0f), 120);
  EXPECT_EQ(decode_e4m3(120), 256.0f);
  EXPECT_EQ(expcast_code(-100.0f), 0);
  EXPECT_EQ(expcast_two_line_code(0.0f), 126);
  EXPECT_EQ(expcast_two_line_code(-100.0f), 0);
}

TEST(ExpCast, RatioToTheExponentialStaysInItsBand) {
  for (int i = 0; i < 1 << 16; ++i) {
    const float u = -14.0f * static_cast<float>(i) / (1 << 16);
    const double ratio = decode_e4m3(static_cast<uint8_t>(expcast_code(u))) / std::exp2(u + 8.0);
    ASSERT_GE(ratio, 0.9290 - 1e-4) << "u = " << u;
    ASSERT_LE(ratio, 1.0746 + 1e-4) << "u = " << u;
  }
}

TEST(ExpCast, MeanRatioIsThatOfScoresSpreadOverAnOctave) {
  double codes = 0.0, exact = 0.0;
  for (int i = 0; i < 800000; ++i) {
    const double u = -1.0 - i / 800000.0;
    codes += decode_e4m3(static_cast<uint8_t>(std::nearbyint(8.0 * u + 120.0)));
    exact += std::exp2(u + 8.0);
  }
  // Where the octave is cut changes the ratio by a part in a thousand.
  EXPECT_NEAR(codes / exact, kExpCastMeanRatio, 1.5e-3);
}

// ---- the tile step
// ---------------------------------------------------------------------------------------------------

// One row fed tile by tile, and what an exact softmax makes of the same scores.
class RowRun {
 public:
  explicit RowRun(const vcattn_recipe& r) : recipe_(r) {}

  void feed(const std::vector<float>& scores, float factor) {
    alignas(64) float tile[kBlockN];
    std::fill(std::begin(tile), std::end(tile), std::numeric_limits<float>::quiet_NaN());
    std::copy(scores.begin(), scores.end(), tile);
    for (size_t j = scores.size(); j < kBlockN; ++j) tile[j] = 1e30f;  // padding must not be seen
    float rescale, weight, sums[kSumGroups];
    cpu::softmax_tile(recipe_,
                      {1, static_cast<int64_t>(scores.size()), tile, &factor, &reference_, &rescale, &weight, sums});
    for (double& p : probabilities_) p *= rescale;
    sum_ *= rescale;
    for (int j = 0; j < kBlockN; ++j) {
      if (j >= static_cast<int>(scores.size())) {
        EXPECT_EQ(tile[j], 0.0f) << "padding at " << j;
        continue;
      }
      EXPECT_GE(tile[j], 0.0f);
      EXPECT_LE(tile[j], 448.0f);
      const float phase = has_phases(recipe_) && j % 2 == 1 ? kPhaseFactor : 1.0f;
      probabilities_.push_back(double{tile[j]} * weight * phase);
      exact_.push_back(std::exp2(double{scores[j]} * factor / 8.0));
    }
    for (const float s : sums) sum_ += double{weight} * s;
  }

  double total_variation() const {
    double exact_sum = 0.0, distance = 0.0;
    for (const double e : exact_) exact_sum += e;
    for (size_t j = 0; j < exact_.size(); ++j) distance += std::fabs(probabilities_[j] / sum_ - exact_[j] / exact_sum);
    return distance / 2;
  }

  double lse_error() const {
    double exact_sum = 0.0;
    for (const double e : exact_) exact_sum += e;
    return cpu::row_lse(recipe_, reference_, sum_) - std::log(exact_sum);
  }

  double decoded_sum_error() const {
    double sum = 0.0;
    for (const double p : probabilities_) sum += p;
    return std::fabs(sum - sum_) / sum_;
  }

 private:
  vcattn_recipe recipe_;
  float reference_ = cpu::initial_reference();
  double sum_ = 0.0;
  std::vector<double> probabilities_, exact_;
};

struct Case {
  const char* recipe;
  int row_max;
  double bound;  // of the total variation; measured worst case over these rows is about half
};

class SoftmaxStep : public testing::TestWithParam<Case> {};

TEST_P(SoftmaxStep, StaysNearTheExactRow) {
  const bool two_lines = std::string(GetParam().recipe) == "two_lines";
  vcattn_recipe r = recipe(two_lines ? "vsmooth8_expcast" : GetParam().recipe);
  if (two_lines) r.p_format = VCATTN_P_EXPCAST_TWO_LINES;
  if (GetParam().row_max >= 0) r.row_max = GetParam().row_max;
  ASSERT_EQ(validate_recipe(r, nullptr), VCATTN_OK);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const float spread : {0.01f, 1.0f, 12.0f}) {
    for (const float base : {0.0f, -40.0f, 300.0f}) {
      RowRun row(r);
      for (const int keys : {128, 128, 128, 1, 127, 63}) {
        std::vector<float> scores(keys);
        for (float& s : scores) s = base + spread * normal(random);
        row.feed(scores, 8.0f * kLog2e);
      }
      EXPECT_LT(row.total_variation(), GetParam().bound) << "spread " << spread << " base " << base;
      // Quantised: one key may hold the whole row, and then the error is that of its code.
      EXPECT_LT(std::fabs(row.lse_error()), r.p_format == VCATTN_P_FP32 ? 1e-4 : 0.08)
          << "spread " << spread << " base " << base;
      if (r.row_sum == VCATTN_SUM_DECODED) {
        EXPECT_LT(row.decoded_sum_error(), 1e-5);
      }
    }
  }
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  constexpr const char* kMaximum[] = {"", "_row", "_octave", "_tile"};
  return std::string(info.param.recipe) + kMaximum[info.param.row_max + 1];
}

INSTANTIATE_TEST_SUITE_P(Recipes, SoftmaxStep,
                         testing::Values(Case{"fp32", -1, 1e-5}, Case{"bf16", -1, 2.5e-3}, Case{"fp8_naive", -1, 0.025},
                                         Case{"fp8_naive", VCATTN_MAX_RUNNING_OCTAVE, 0.025},
                                         Case{"fp8_naive", VCATTN_MAX_TILE_OCTAVE, 0.025}, Case{"sage2", -1, 0.025},
                                         Case{"vsmooth8_expcast", -1, 0.0364},
                                         Case{"vsmooth8_expcast", VCATTN_MAX_RUNNING_OCTAVE, 0.0364},
                                         Case{"vsmooth8_expcast", VCATTN_MAX_TILE_OCTAVE, 0.0364},
                                         Case{"accurate", -1, 0.0364}, Case{"accurate", VCATTN_MAX_RUNNING, 0.0364},
                                         Case{"accurate", VCATTN_MAX_RUNNING_OCTAVE, 0.0364}, Case{"exact", -1, 0.025},
                                         Case{"sage3", -1, 0.13}, Case{"two_lines", VCATTN_MAX_RUNNING, 0.0364},
                                         Case{"two_lines", VCATTN_MAX_RUNNING_OCTAVE, 0.0364},
                                         Case{"two_lines", VCATTN_MAX_TILE_OCTAVE, 0.0364}),
                         case_name);

// A running maximum far under a later tile, and far above it: nothing may reach code 127, vanish or overflow.
TEST(SoftmaxStep, SurvivesTilesHundredsOfOctavesApart) {
  for (const char* name : {"accurate", "exact", "vsmooth8_expcast", "vsmooth8", "fp32", "sage3"}) {
    for (int row_max = 0; row_max < 3; ++row_max) {
      vcattn_recipe r = recipe(name);
      r.row_max = row_max;
      if (validate_recipe(r, nullptr) != VCATTN_OK) continue;
      RowRun row(r);
      row.feed(std::vector<float>(128, -900.0f), 8.0f);  // octaves; the sums of the test are FP64
      row.feed(std::vector<float>(128, 1000.0f), 8.0f);
      row.feed(std::vector<float>(5, -300.0f), 8.0f);
      EXPECT_LT(row.total_variation(), 0.05) << name << " row_max " << row_max;
      EXPECT_LT(std::fabs(row.lse_error()), 0.08) << name << " row_max " << row_max;
    }
  }
}

TEST(SoftmaxStep, TwoLinesKeepsWhatOneLineDrops) {
  vcattn_recipe one = recipe("vsmooth8_expcast"), two = one;
  two.p_format = VCATTN_P_EXPCAST_TWO_LINES;
  // One sharp key and a long tail 16 octaves below it that holds a tenth of the mass.
  std::vector<float> scores(128, -16.0f);
  scores[3] = 0.0f;
  RowRun first(one), second(two);
  first.feed(scores, 8.0f);
  second.feed(scores, 8.0f);
  for (int i = 0; i < 50; ++i) {
    first.feed(std::vector<float>(128, -16.0f), 8.0f);
    second.feed(std::vector<float>(128, -16.0f), 8.0f);
  }
  EXPECT_LT(second.total_variation(), 0.5 * first.total_variation());
}

}  // namespace
}  // namespace vcattn
