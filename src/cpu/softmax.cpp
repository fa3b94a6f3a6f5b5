#include "cpu/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/recipes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/softmax.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace vcattn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using I = hn::Rebind<int32_t, F>;
using V = hn::Vec<F>;
constexpr int kLanes = hn::MaxLanes(F());
constexpr int kVectors = kBlockN / kLanes;
constexpr int kVectorsPerGroup = kVectors / kSumGroups;

// 2^x for x <= 9; 0 under 2^-126. Relative error under 2e-7. Polynomial for 2^f on [-1/2, 1/2]: Cephes, exp2f.
HWY_INLINE V exp2_lanes(V x) {
  const F f;
  const I i;
  const auto smallest = hn::Set(f, -126.0f);
  const auto clamped = hn::Max(x, smallest);
  const auto whole = hn::Round(clamped);
  const auto part = hn::Sub(clamped, whole);
  auto p = hn::Set(f, 1.535336188319500e-4f);
  p = hn::MulAdd(p, part, hn::Set(f, 1.339887440266574e-3f));
  p = hn::MulAdd(p, part, hn::Set(f, 9.618437357674640e-3f));
  p = hn::MulAdd(p, part, hn::Set(f, 5.550332471162809e-2f));
  p = hn::MulAdd(p, part, hn::Set(f, 2.402264791363012e-1f));
  p = hn::MulAdd(p, part, hn::Set(f, 6.931472028550421e-1f));
  p = hn::MulAdd(p, part, hn::Set(f, 1.0f));
  const auto scale = hn::BitCast(f, hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(i, whole), hn::Set(i, 127))));
  return hn::IfThenElse(hn::Lt(x, smallest), hn::Zero(f), hn::Mul(p, scale));
}

// Non-negative values up to 448 to the nearest E4M3 value, ties to even.
HWY_INLINE V round_e4m3_lanes(V x) {
  const F f;
  const I i;
  const auto bits = hn::BitCast(i, x);
  const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(i, 1));
  const auto rounded = hn::And(hn::Add(bits, hn::Add(odd, hn::Set(i, 0x7FFFF))), hn::Set(i, ~0xFFFFF));
  // Under 2^-6 codes are multiples of 2^-9: adding 1.5 * 2^14 leaves that many bits.
  const auto magic = hn::Set(f, 24576.0f);
  const auto subnormal = hn::Sub(hn::Add(x, magic), magic);
  return hn::IfThenElse(hn::Lt(x, hn::Set(f, 0x1p-6f)), subnormal, hn::BitCast(f, rounded));
}

HWY_INLINE V round_bf16_lanes(V x) {
  const F f;
  const I i;
  const auto bits = hn::BitCast(i, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(i, 1));
  return hn::BitCast(f, hn::And(hn::Add(bits, hn::Add(odd, hn::Set(i, 0x7FFF))), hn::Set(i, ~0xFFFF)));
}

// Whole numbers 0..126 as E4M3 codes to their values.
HWY_INLINE V decode_codes(V code) {
  const F f;
  const I i;
  const auto integer = hn::ConvertTo(i, code);
  const auto normal = hn::BitCast(f, hn::Add(hn::ShiftLeft<20>(integer), hn::Set(i, (127 - 7) << 23)));
  return hn::IfThenElse(hn::Lt(code, hn::Set(f, 8.0f)), hn::Mul(code, hn::Set(f, 0x1p-9f)), normal);
}

// score * factor - reference. The product is rounded as the reference was, so that the maximum gives exactly 0, and
// constants are added afterwards: next to a large reference they would vanish.
HWY_INLINE V below(V score, V factor, V reference) { return hn::Sub(hn::Mul(score, factor), reference); }

HWY_INLINE V clamp(V x, float low, float high) {
  const F f;
  return hn::Min(hn::Max(x, hn::Set(f, low)), hn::Set(f, high));
}

// 2^octaves for whole octaves <= 0; 0 under 2^-126.
HWY_INLINE float pow2(float octaves) { return octaves < -126.0f ? 0.0f : std::ldexp(1.0f, static_cast<int>(octaves)); }

// One row of one tile. The probabilities replace the scores.
class Row {
 public:
  Row(float* scores, int64_t keys) : scores_(scores), keys_(keys) {}

  float max_score() const {
    const F f;
    const auto lowest = hn::Set(f, std::numeric_limits<float>::lowest());
    auto max = lowest;
    for (int v = 0; v < kVectors; ++v) {
      const auto s = hn::Load(f, scores_ + v * kLanes);
      max = hn::Max(max, hn::IfThenElse(valid(v), s, lowest));
    }
    return hn::GetLane(hn::MaxOfLanes(f, max));
  }

  // Replaces the scores s from key `first` on by to_probability(s, first, term), and padding by 0. With kSumTerms the
  // sums are over what `term` was set to, else over the probabilities.
  template <bool kSumTerms, typename ToProbability>
  HWY_INLINE void map(float* group_sums, ToProbability to_probability) {
    const F f;
    for (int g = 0; g < kSumGroups; ++g) {
      auto sum = hn::Zero(f);
      for (int w = 0; w < kVectorsPerGroup; ++w) {
        const int v = g * kVectorsPerGroup + w;
        V term = hn::Zero(f);
        const auto p =
            hn::IfThenElseZero(valid(v), to_probability(hn::Load(f, scores_ + v * kLanes), v * kLanes, term));
        hn::Store(p, f, scores_ + v * kLanes);
        sum = hn::Add(sum, kSumTerms ? hn::IfThenElseZero(valid(v), term) : p);
      }
      group_sums[g] = hn::GetLane(hn::SumOfLanes(f, sum));
    }
  }

 private:
  HWY_INLINE hn::Mask<F> valid(int v) const {
    const F f;
    return hn::FirstN(f, static_cast<size_t>(std::clamp<int64_t>(keys_ - v * kLanes, 0, kLanes)));
  }

  float* scores_;
  int64_t keys_;
};

// ---- ExpCast -------------------------------------------------------------------------------------------------------

// Rounds score * factor to the nearest whole number once, as the fused multiply-add onto 1.5 * 2^23 does (twice on
// instruction sets without one); products that large already have coarser spacing than 1 and need none.
HWY_INLINE V rounded_codes(V score, V factor) {
  const F f;
  const auto magic = hn::Set(f, kRoundMagic);
  const auto product = hn::Mul(score, factor);
  const auto rounded = hn::Sub(hn::MulAdd(score, factor, magic), magic);
  return hn::IfThenElse(hn::Lt(hn::Abs(product), hn::Set(f, 0x1p21f)), rounded, hn::Round(product));
}

HWY_INLINE float rounded_code(float score, float factor) {
  const F f;
  return hn::GetLane(rounded_codes(hn::Set(f, score), hn::Set(f, factor)));
}

// ceil(code / 8) for a whole code.
HWY_INLINE float code_octaves(float code) { return std::ceil(code / kCodesPerOctave); }

// What the keys of a tile add to their codes and carry in sums: even and odd ones in turn.
struct Phases {
  alignas(64) float codes[16], weights[16];

  explicit Phases(const vcattn_recipe& recipe) {
    const bool two = has_phases(recipe);
    for (int key = 0; key < 16; ++key) {
      codes[key] = two && key % 2 == 1 ? kPhaseCodes : 0;
      weights[key] = two && key % 2 == 1 ? kPhaseFactor : 1.0f;
    }
  }
  // For the lanes from key `first` on.
  HWY_INLINE V codes_at(int first) const { return hn::Load(F(), codes + first % 16); }
  HWY_INLINE V weights_at(int first) const { return hn::Load(F(), weights + first % 16); }
};

void expcast_running(const vcattn_recipe& recipe, const SoftmaxTile& t) {
  const F f;
  const Phases phases(recipe);
  for (int64_t r = 0; r < t.rows; ++r) {
    Row row(t.scores + r * kBlockN, t.keys);
    const float before = t.reference[r];
    const float reference = std::max(before, row.max_score() * t.factor[r]);
    t.reference[r] = reference;
    t.rescale[r] = hn::GetLane(exp2_lanes(hn::Set(f, (before - reference) / kCodesPerOctave)));
    t.weight[r] = 1.0f;
    const auto factor = hn::Set(f, t.factor[r]);
    const auto maximum = hn::Set(f, reference);
    const auto intercept = hn::Set(f, kExpCastIntercept);
    row.map<true>(t.group_sums + r * kSumGroups, [&](V s, int first, V& weighted) {
      const auto code = clamp(hn::Round(hn::Add(below(s, factor, maximum), intercept)), -kPhaseCodes, kExpCastPeak);
      const auto p = decode_codes(hn::Max(hn::Add(code, phases.codes_at(first)), hn::Zero(f)));
      weighted = hn::Mul(p, phases.weights_at(first));
      return p;
    });
  }
}

// Whole octaves: per tile where kTile, else the row's, raised only when a code would pass 126.
template <bool kTile>
void expcast_octave(const vcattn_recipe& recipe, const SoftmaxTile& t) {
  const F f;
  const Phases phases(recipe);
  const int largest_code = kExpCastMaxCode - (has_phases(recipe) ? kPhaseCodes : 0);
  for (int64_t r = 0; r < t.rows; ++r) {
    Row row(t.scores + r * kBlockN, t.keys);
    const float before = t.reference[r];
    const float max_code = rounded_code(row.max_score(), t.factor[r]);
    const float tile_octave = code_octaves(max_code);
    const bool holds = max_code + kExpCastPeak - kCodesPerOctave * before <= largest_code;
    const float running = kTile ? std::max(before, tile_octave) : (holds ? before : tile_octave);
    const float octave = kTile ? tile_octave : running;
    t.reference[r] = running;
    t.rescale[r] = pow2(before - running);
    t.weight[r] = pow2(octave - running);
    const auto factor = hn::Set(f, t.factor[r]);
    const auto lowered = hn::Set(f, kCodesPerOctave * octave);
    const auto peak = hn::Set(f, kExpCastPeak);
    row.map<true>(t.group_sums + r * kSumGroups, [&](V s, int first, V& weighted) {
      const auto code = hn::Add(hn::Sub(rounded_codes(s, factor), lowered), peak);
      const auto p = decode_codes(clamp(hn::Add(code, phases.codes_at(first)), 0.0f, kExpCastMaxCode));
      weighted = hn::Mul(p, phases.weights_at(first));
      return p;
    });
  }
}

// The second line is not a shift of codes, so the octave is taken from the scores before rounding.
template <int kRowMax>
void expcast_two_lines(const SoftmaxTile& t) {
  const F f;
  constexpr bool kTile = kRowMax == VCATTN_MAX_TILE_OCTAVE;
  for (int64_t r = 0; r < t.rows; ++r) {
    Row row(t.scores + r * kBlockN, t.keys);
    const float before = t.reference[r];
    const float max_code = row.max_score() * t.factor[r];
    float peak, intercept;
    if constexpr (kRowMax == VCATTN_MAX_RUNNING) {
      t.reference[r] = peak = std::max(before, max_code);
      t.rescale[r] = hn::GetLane(exp2_lanes(hn::Set(f, (before - peak) / kCodesPerOctave)));
      t.weight[r] = 1.0f;
      intercept = kTwoLineIntercept;
    } else {
      const float tile_octave = code_octaves(max_code);
      const float running = std::max(before, tile_octave);
      const float octave = kTile ? tile_octave : running;
      t.reference[r] = running;
      t.rescale[r] = pow2(before - running);
      t.weight[r] = pow2(octave - running);
      peak = kCodesPerOctave * octave;
      intercept = kTwoLinePeak;
    }
    const auto factor = hn::Set(f, t.factor[r]);
    const auto reference = hn::Set(f, peak);
    const auto first_offset = hn::Set(f, intercept);
    const auto slope = hn::Set(f, kTwoLineSlope);
    const auto second_offset = hn::Set(f, kTwoLinePivot - kTwoLineSlope * kTwoLinePivot);
    row.map<false>(t.group_sums + r * kSumGroups, [&](V s, int, V&) {
      const auto line = hn::Add(below(s, factor, reference), first_offset);
      const auto code = hn::Round(hn::Max(line, hn::MulAdd(slope, line, second_offset)));
      return decode_codes(clamp(code, 0.0f, kExpCastMaxCode));
    });
  }
}

// ---- exp2, then rounding -------------------------------------------------------------------------------------------

// Two-level NVFP4: the tile's largest probability becomes 448 * 6, then each 16 keys share a UE4M3 scale.
void quantise_nvfp4_row(float* p) {
  float largest = 0.0f;
  for (int j = 0; j < kBlockN; ++j) largest = std::max(largest, p[j]);
  const Scale first = nvfp4_tensor_scale(largest);
  for (int g = 0; g < kBlockN; g += kFp4Group) {
    float group_max = 0.0f;
    for (int j = g; j < g + kFp4Group; ++j) group_max = std::max(group_max, p[j] * first.encode);
    const float second = decode_ue4m3(encode_ue4m3(group_max / kE2m1Max));
    const float encode = second > 0.0f ? 1.0f / second : 0.0f;
    for (int j = g; j < g + kFp4Group; ++j) {
      p[j] = decode_e2m1(encode_e2m1(p[j] * first.encode * encode)) * second * first.descale;
    }
  }
}

template <int kP, bool kSumUnrounded>
void exp2_rows(const SoftmaxTile& t, int32_t row_max, float peak) {
  const F f;
  const bool octaves = row_max != VCATTN_MAX_RUNNING;
  const bool per_tile = row_max == VCATTN_MAX_TILE_OCTAVE;
  for (int64_t r = 0; r < t.rows; ++r) {
    float* scores = t.scores + r * kBlockN;
    float* sums = t.group_sums + r * kSumGroups;
    Row row(scores, t.keys);
    const float octaves_per_score = t.factor[r] / kCodesPerOctave;
    const float before = t.reference[r];
    const float tile_max = row.max_score() * octaves_per_score;
    const float tile_reference = octaves ? std::ceil(tile_max) : tile_max;
    const float running = std::max(before, tile_reference);
    const float reference = per_tile ? tile_reference : running;
    t.reference[r] = running;
    t.rescale[r] = hn::GetLane(exp2_lanes(hn::Set(f, before - running)));
    t.weight[r] = hn::GetLane(exp2_lanes(hn::Set(f, reference - running)));
    const auto factor = hn::Set(f, octaves_per_score);
    const auto subtracted = hn::Set(f, reference);
    const auto log2_peak = hn::Set(f, peak);
    row.map<kSumUnrounded>(sums, [&](V s, int, V& unrounded) {
      unrounded = exp2_lanes(hn::Add(below(s, factor, subtracted), log2_peak));
      if constexpr (kP == VCATTN_P_E4M3) return round_e4m3_lanes(unrounded);
      if constexpr (kP == VCATTN_P_BF16) return round_bf16_lanes(unrounded);
      return unrounded;
    });
    if constexpr (kP == VCATTN_P_NVFP4) {
      quantise_nvfp4_row(scores);
      if constexpr (!kSumUnrounded) {
        for (int g = 0; g < kSumGroups; ++g) {
          sums[g] = 0.0f;
          for (int j = 0; j < kMinMeanRows; ++j) sums[g] += scores[g * kMinMeanRows + j];
        }
      }
    }
  }
}

template <int kP>
void exp2_tile(const vcattn_recipe& recipe, const SoftmaxTile& tile) {
  const float peak = kP == VCATTN_P_E4M3 ? recipe.p_log2_peak : 0.0f;
  if (recipe.row_sum == VCATTN_SUM_UNROUNDED) {
    exp2_rows<kP, true>(tile, recipe.row_max, peak);
  } else {
    exp2_rows<kP, false>(tile, recipe.row_max, peak);
  }
}

void softmax_tile(const vcattn_recipe& recipe, const SoftmaxTile& tile) {
  switch (recipe.p_format) {
    case VCATTN_P_EXPCAST:
      if (recipe.row_max == VCATTN_MAX_RUNNING) return expcast_running(recipe, tile);
      if (recipe.row_max == VCATTN_MAX_RUNNING_OCTAVE) return expcast_octave<false>(recipe, tile);
      return expcast_octave<true>(recipe, tile);
    case VCATTN_P_EXPCAST_TWO_LINES:
      if (recipe.row_max == VCATTN_MAX_RUNNING) return expcast_two_lines<VCATTN_MAX_RUNNING>(tile);
      if (recipe.row_max == VCATTN_MAX_RUNNING_OCTAVE) return expcast_two_lines<VCATTN_MAX_RUNNING_OCTAVE>(tile);
      return expcast_two_lines<VCATTN_MAX_TILE_OCTAVE>(tile);
    case VCATTN_P_E4M3:
      return exp2_tile<VCATTN_P_E4M3>(recipe, tile);
    case VCATTN_P_BF16:
      return exp2_tile<VCATTN_P_BF16>(recipe, tile);
    case VCATTN_P_NVFP4:
      return exp2_tile<VCATTN_P_NVFP4>(recipe, tile);
    default:
      return exp2_tile<VCATTN_P_FP32>(recipe, tile);
  }
}

}  // namespace vcattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vcattn::cpu {
namespace {
HWY_EXPORT(softmax_tile);
}  // namespace

float initial_reference() { return -std::numeric_limits<float>::infinity(); }

void softmax_tile(const vcattn_recipe& recipe, const SoftmaxTile& tile) {
  HWY_DYNAMIC_DISPATCH(softmax_tile)(recipe, tile);
}

double row_lse(const vcattn_recipe& recipe, float reference, double sum) {
  const bool in_codes = is_expcast(recipe) && recipe.row_max == VCATTN_MAX_RUNNING;
  double octaves = in_codes ? reference / kCodesPerOctave : reference;
  if (recipe.p_format == VCATTN_P_E4M3) octaves -= recipe.p_log2_peak;
  if (is_expcast(recipe)) {
    const bool two_lines = recipe.p_format == VCATTN_P_EXPCAST_TWO_LINES;
    const double peak = two_lines ? kTwoLinePeak : kExpCastPeak;
    const double beta = recipe.row_max == VCATTN_MAX_RUNNING ? kExpCastBeta : 0.0;
    octaves -= kExpCastLog2Peak + (peak + beta - kExpCastPeak) / kCodesPerOctave;
    sum /= kExpCastMeanRatio;
  }
  return octaves * kLn2 + std::log(sum);
}

}  // namespace vcattn::cpu
#endif
