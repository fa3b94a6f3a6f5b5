// The softmax step and ExpCast against their formulas, evaluated independently in long double.
#include "cpu/softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/recipes.h"
#include "numerics/attention_math.h"
#include "targets.h"

namespace vcattn {
namespace {

using cpu::kSumGroups;
using cpu::SoftmaxTile;
using test::on_every_target;

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

// ---- the softmax step ----------------------------------------------------------------------------------------------

struct Scores {
  std::vector<float> values;  // at most 128
  float factor;               // codes per unit
};

// One row of one step: what the second product reads, and the factors.
struct Step {
  std::vector<std::vector<float>> probabilities;  // [tiles][128]
  float rescale = 0.0f, weight = 0.0f;
  double sum = 0.0;  // of the groups of all tiles
};

Step softmax_row(const vcattn_recipe& r, const std::vector<Scores>& tiles, float& reference) {
  struct Storage {
    alignas(64) float scores[kBlockN];
    float factor, sums[kSumGroups];
  };
  std::vector<Storage> storage(tiles.size());
  std::vector<SoftmaxTile> views;
  for (size_t t = 0; t < tiles.size(); ++t) {
    Storage& s = storage[t];
    std::fill(std::begin(s.scores), std::end(s.scores), 1e30f);  // padding must not be seen
    std::copy(tiles[t].values.begin(), tiles[t].values.end(), s.scores);
    s.factor = tiles[t].factor;
    views.push_back({static_cast<int64_t>(tiles[t].values.size()), s.scores, &s.factor, s.sums});
  }
  Step step;
  cpu::softmax_step(r, {1, views, &reference, &step.rescale, &step.weight});
  for (const Storage& s : storage) {
    step.probabilities.emplace_back(std::begin(s.scores), std::end(s.scores));
    for (const float sum : s.sums) step.sum += sum;
  }
  return step;
}

// One row fed step by step, and what an exact softmax makes of the same scores.
class RowRun {
 public:
  explicit RowRun(const vcattn_recipe& r) : recipe_(r) {}

  void feed(const std::vector<Scores>& tiles) {
    const Step step = softmax_row(recipe_, tiles, reference_);
    for (double& p : probabilities_) p *= step.rescale;
    sum_ = sum_ * step.rescale + step.weight * step.sum;
    for (size_t t = 0; t < tiles.size(); ++t) {
      const auto& [scores, factor] = tiles[t];
      for (size_t j = 0; j < kBlockN; ++j) {
        const float p = step.probabilities[t][j];
        if (j >= scores.size()) {
          EXPECT_EQ(p, 0.0f) << "padding at " << j;
          continue;
        }
        EXPECT_GE(p, 0.0f);
        EXPECT_LE(p, 448.0f);
        const float phase = has_phases(recipe_) && j % 2 == 1 ? kPhaseFactor : 1.0f;
        probabilities_.push_back(double{p} * step.weight * phase);
        exact_.push_back(std::exp2(double{scores[j]} * factor / 8.0));
      }
    }
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
      std::vector<Scores> step;
      for (const int keys : {128, 128, 128, 1, 127, 63, 17}) {
        // Tiles of one step have scales of their own.
        Scores tile = {std::vector<float>(keys),
                       static_cast<float>(8.0 * kLog2e) / static_cast<float>(1 + step.size())};
        for (float& s : tile.values) s = (base + spread * normal(random)) * static_cast<float>(1 + step.size());
        step.push_back(std::move(tile));
        if (static_cast<int>(step.size()) < tiles_per_step(r) && keys != 17) continue;
        row.feed(step);
        step.clear();
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

// A tile whose scores are whole octaves.
Scores octaves(size_t keys, float value) { return {std::vector<float>(keys, value), 8.0f}; }

// A running maximum far under a later tile, and far above it: nothing may reach code 127, vanish or overflow.
TEST(SoftmaxStep, SurvivesTilesHundredsOfOctavesApart) {
  for (const char* name : {"accurate", "exact", "vsmooth8_expcast", "vsmooth8", "fp32", "sage3"}) {
    for (int row_max = 0; row_max < 3; ++row_max) {
      vcattn_recipe r = recipe(name);
      r.row_max = row_max;
      if (validate_recipe(r, nullptr) != VCATTN_OK) continue;
      RowRun row(r);
      row.feed({octaves(128, -900.0f)});  // the sums of the test are FP64
      row.feed({octaves(128, 1000.0f)});
      row.feed({octaves(5, -300.0f)});
      EXPECT_LT(row.total_variation(), 0.05) << name << " row_max " << row_max;
      EXPECT_LT(std::fabs(row.lse_error()), 0.08) << name << " row_max " << row_max;
    }
  }
}

// Scores whose codes span the octave of the largest and everything below, some within an ulp of a tie.
std::vector<float> scores_around_ties(std::mt19937& random, float largest, float factor) {
  std::uniform_real_distribution<float> code(-140.0f, 0.0f);
  std::vector<float> scores(kBlockN);
  for (size_t j = 0; j < scores.size(); ++j) {
    float below = code(random);
    if (j % 3 == 0) below = std::floor(below) + 0.5f;
    scores[j] = (largest + below) / factor;
    if (j % 6 == 0) scores[j] = std::nextafter(scores[j], j % 12 == 0 ? -1e30f : 1e30f);
  }
  scores[31] = largest / factor;
  return scores;
}

// docs/algorithm.md: e = max over tiles of ceil(RNE(s_max c) / 8); code = RNE(fma(s, c, 120 - 8e + phase)), the fma in
// FP32. Without a fused instruction only codes near a tie may differ.
TEST(TileOctave, CodesEqualTheFormula) {
  on_every_target([](int64_t target) {
    const std::string instructions = hwy::TargetName(target);
    const bool fused =
        instructions.find("SSE") == std::string::npos && instructions != "EMU128" && instructions != "SCALAR";
    std::mt19937 random(11);
    std::uniform_real_distribution<float> any(0.3f, 1.7f);
    for (const char* name : {"accurate", "vsmooth8_expcast"}) {
      vcattn_recipe r = recipe(name);
      r.row_max = VCATTN_MAX_TILE_OCTAVE;
      for (const float base : {0.0f, 90.0f, -3000.0f, 70000.0f}) {
        for (int i = 0; i < 300; ++i) {
          std::vector<Scores> tiles(1 + i % 2);
          for (Scores& tile : tiles) {
            tile.factor = any(random) * 0.01f;
            tile.values = scores_around_ties(random, base + 40.0f * any(random), tile.factor);
          }
          long double octave = -1e30L;
          for (const auto& [scores, factor] : tiles) {
            const float largest = *std::max_element(scores.begin(), scores.end());
            octave = std::max(octave, std::ceil(round_even(static_cast<long double>(largest) * factor) / 8));
          }
          float reference = cpu::initial_reference();
          const Step step = softmax_row(r, tiles, reference);
          ASSERT_EQ(reference, static_cast<float>(octave));
          for (size_t t = 0; t < tiles.size(); ++t) {
            for (int j = 0; j < kBlockN; ++j) {
              const int phase = has_phases(r) && j % 2 == 1 ? 4 : 0;
              const long double product = static_cast<long double>(tiles[t].values[j]) * tiles[t].factor;
              const float sum = static_cast<float>(product + (120 - 8 * octave + phase));
              const long double tie = std::fabs(std::fabs(sum - std::floor(sum)) - 0.5L);
              if (!fused && tie < 0.01L) continue;
              const auto code = static_cast<uint8_t>(std::min(std::max(round_even(sum), 0.0L), 126.0L));
              ASSERT_EQ(step.probabilities[t][j], decode_e4m3(code))
                  << name << " base " << base << " run " << i << " tile " << t << " key " << j << " sum " << sum;
            }
          }
        }
      }
    }
  });
}

// A sum that FP32 rounds onto a tie goes to the even code, as it does where a GPU converts the sum: 111.5 - 2^-21, and
// at an odd key 63.5 + 4 - 2^-18, where 63.5 - 2^-18 would have been exact.
TEST(TileOctave, CodesAreRoundedFromTheSumInFp32) {
  float reference = cpu::initial_reference();
  const Step step = softmax_row(recipe("accurate"), {{{8.0f, -48.5f - 0x1p-18f, -0.5f - 0x1p-21f}, 1.0f}}, reference);
  EXPECT_EQ(reference, 1.0f);
  EXPECT_EQ(step.probabilities[0][0], decode_e4m3(120));
  EXPECT_EQ(step.probabilities[0][1], decode_e4m3(68));
  EXPECT_EQ(step.probabilities[0][2], decode_e4m3(112));
}

// Scores of any size: within an octave of the largest nothing is lost and nothing exceeds it, fused or not.
TEST(TileOctave, KeepsTheLargestKeyOfScoresOfAnySize) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> any(1.0f, 2.0f);
  for (const char* name : {"accurate", "exact", "fast"}) {
    const vcattn_recipe r = recipe(name);
    for (int exponent = 0; exponent <= 103; ++exponent) {
      for (const float sign : {-1.0f, 1.0f}) {
        for (int i = 0; i < 20; ++i) {
          std::vector<Scores> tiles(2);
          for (Scores& tile : tiles)
            tile = {std::vector<float>(6, sign * any(random)), std::ldexp(any(random), exponent)};
          float reference = cpu::initial_reference();
          const Step step = softmax_row(r, tiles, reference);
          float largest = 0.0f;
          for (const auto& p : step.probabilities) largest = std::max(largest, p[0]);
          ASSERT_GT(largest, 120.0f) << name << " 2^" << exponent << " run " << i;
          ASSERT_LE(largest, 260.0f) << name << " 2^" << exponent << " run " << i;
        }
      }
    }
  }
}

// Two tiles of one step 18 octaves apart: the lower one keeps no code of its own, as it would alone.
TEST(TileOctave, TwoTilesShareTheLargerOctave) {
  for (const char* name : {"accurate", "exact"}) {
    const vcattn_recipe r = recipe(name);
    for (const bool first_is_larger : {true, false}) {
      std::vector<Scores> tiles = {octaves(128, 3.0f), octaves(100, -16.0f)};
      if (!first_is_larger) std::swap(tiles[0], tiles[1]);
      float reference = cpu::initial_reference();
      const Step step = softmax_row(r, tiles, reference);
      EXPECT_EQ(reference, 3.0f);
      EXPECT_EQ(step.weight, 1.0f);
      EXPECT_EQ(step.probabilities[first_is_larger ? 0 : 1][0], 256.0f) << name;
      EXPECT_EQ(step.probabilities[first_is_larger ? 1 : 0][0], 0.0f) << name;
      const Step alone = softmax_row(r, {octaves(100, -16.0f)}, reference);
      EXPECT_EQ(alone.probabilities[0][0], 256.0f) << name;
      EXPECT_EQ(alone.weight, 0x1p-19f) << name;
    }
  }
}

TEST(SoftmaxStep, TwoLinesKeepsWhatOneLineDrops) {
  vcattn_recipe one = recipe("vsmooth8_expcast"), two = one;
  two.p_format = VCATTN_P_EXPCAST_TWO_LINES;
  // One sharp key and a long tail 16 octaves below it that holds a tenth of the mass.
  Scores sharp = octaves(128, -16.0f);
  sharp.values[3] = 0.0f;
  RowRun first(one), second(two);
  first.feed({sharp});
  second.feed({sharp});
  for (int i = 0; i < 50; ++i) {
    first.feed({octaves(128, -16.0f)});
    second.feed({octaves(128, -16.0f)});
  }
  EXPECT_LT(second.total_variation(), 0.5 * first.total_variation());
}

}  // namespace
}  // namespace vcattn
