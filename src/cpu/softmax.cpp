#include "cpu/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

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
  Row(const SoftmaxTile& tile, int64_t row)
      : scores_(tile.scores + row * kBlockN), group_sums_(tile.group_sums + row * kSumGroups), keys_(tile.keys) {}

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
  HWY_INLINE void map(ToProbability to_probability) {
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
      group_sums_[g] = hn::GetLane(hn::SumOfLanes(f, sum));
    }
  }

 private:
  HWY_INLINE hn::Mask<F> valid(int v) const {
    const F f;
    return hn::FirstN(f, static_cast<size_t>(std::clamp<int64_t>(keys_ - v * kLanes, 0, kLanes)));
  }

  float* scores_;
  float* group_sums_;
  int64_t keys_;
};

// The largest score * (factor * unit) over the tiles of the step: codes with unit 1, octaves with kOctavesPerCode.
HWY_INLINE float max_product(const SoftmaxStep& step, int64_t r, float unit = 1.0f) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const SoftmaxTile& tile : step.tiles) {
    largest = std::max(largest, Row(tile, r).max_score() * (tile.factor[r] * unit));
  }
  return largest;
}

// Row::map over the tiles of the step with to_probability(s, factor, first, term), factor as in max_product.
template <bool kSumTerms, typename ToProbability>
HWY_INLINE void map_row(const SoftmaxStep& step, int64_t r, float unit, ToProbability to_probability) {
  for (const SoftmaxTile& tile : step.tiles) {
    const auto factor = hn::Set(F(), tile.factor[r] * unit);
    Row(tile, r).map<kSumTerms>([&](V s, int first, V& term) { return to_probability(s, factor, first, term); });
  }
}

// ---- ExpCast -------------------------------------------------------------------------------------------------------

// Products below this keep at least 3 bits behind the point, and 120 - 8E is exact for octaves E among them. Larger
// ones are rounded to FP32 before the octave is taken from them and before it is subtracted: against exact products
// that octave could lie so far off that no key of the row kept a code, and 120 would vanish beside 8E.
constexpr float kFusedCodes = 0x1p21f;

// Rounds score * factor to the nearest whole number once, as the fused multiply-add onto 1.5 * 2^23 does (twice on
// instruction sets without one).
HWY_INLINE float rounded_code(float score, float factor) {
  const F f;
  const float product = score * factor;
  if (!(std::fabs(product) < kFusedCodes)) return hn::GetLane(hn::Round(hn::Set(f, product)));
  const auto magic = hn::Set(f, kRoundMagic);
  return hn::GetLane(hn::Sub(hn::MulAdd(hn::Set(f, score), hn::Set(f, factor), magic), magic));
}

// ceil(code / 8).
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

// The row's reference becomes `maximum`, in codes.
HWY_INLINE void set_maximum(const SoftmaxStep& step, int64_t r, float maximum) {
  step.rescale[r] = hn::GetLane(exp2_lanes(hn::Set(F(), (step.reference[r] - maximum) / kCodesPerOctave)));
  step.weight[r] = 1.0f;
  step.reference[r] = maximum;
}

// The row's reference becomes `running`, the step's is `octave`: whole octaves both.
HWY_INLINE void set_octaves(const SoftmaxStep& step, int64_t r, float running, float octave) {
  step.rescale[r] = pow2(step.reference[r] - running);
  step.weight[r] = pow2(octave - running);
  step.reference[r] = running;
}

void expcast_running(const vcattn_recipe& recipe, const SoftmaxStep& step) {
  const F f;
  const Phases phases(recipe);
  for (int64_t r = 0; r < step.rows; ++r) {
    set_maximum(step, r, std::max(step.reference[r], max_product(step, r)));
    const auto maximum = hn::Set(f, step.reference[r]);
    const auto intercept = hn::Set(f, kExpCastIntercept);
    map_row<true>(step, r, 1.0f, [&](V s, V factor, int first, V& weighted) {
      const auto code = clamp(hn::Round(hn::Add(below(s, factor, maximum), intercept)), -kPhaseCodes, kExpCastPeak);
      const auto p = decode_codes(hn::Max(hn::Add(code, phases.codes_at(first)), hn::Zero(f)));
      weighted = hn::Mul(p, phases.weights_at(first));
      return p;
    });
  }
}

// The codes of one row against `octave`.
HWY_INLINE void expcast_row(const SoftmaxStep& step, int64_t r, float octave, const Phases& phases) {
  const F f;
  const auto write = [&](auto code_of) {
    map_row<true>(step, r, 1.0f, [&](V s, V factor, int first, V& weighted) {
      const auto code = hn::Round(code_of(s, factor, phases.codes_at(first)));
      const auto p = decode_codes(clamp(code, 0.0f, kExpCastMaxCode));
      weighted = hn::Mul(p, phases.weights_at(first));
      return p;
    });
  };
  const float lowered = kCodesPerOctave * octave;
  if (std::fabs(lowered) < kFusedCodes) {
    const auto offset = hn::Set(f, kExpCastPeak - lowered);
    write([&](V s, V factor, V phase) { return hn::MulAdd(s, factor, hn::Add(offset, phase)); });
  } else {
    const auto reference = hn::Set(f, lowered);
    const auto peak = hn::Set(f, kExpCastPeak);
    write([&](V s, V factor, V phase) { return hn::Add(below(s, factor, reference), hn::Add(peak, phase)); });
  }
}

// Whole octaves: of the step where kTile, else the row's, raised only when a code would pass 126.
template <bool kTile>
void expcast_octave(const vcattn_recipe& recipe, const SoftmaxStep& step) {
  const Phases phases(recipe);
  const int largest_code = kExpCastMaxCode - (has_phases(recipe) ? kPhaseCodes : 0);
  for (int64_t r = 0; r < step.rows; ++r) {
    const float before = step.reference[r];
    float max_code = -std::numeric_limits<float>::infinity();
    for (const SoftmaxTile& tile : step.tiles) {
      max_code = std::max(max_code, rounded_code(Row(tile, r).max_score(), tile.factor[r]));
    }
    const float step_octave = code_octaves(max_code);
    const bool holds = max_code + kExpCastPeak - kCodesPerOctave * before <= largest_code;
    const float running = kTile ? std::max(before, step_octave) : (holds ? before : step_octave);
    const float octave = kTile ? step_octave : running;
    set_octaves(step, r, running, octave);
    expcast_row(step, r, octave, phases);
  }
}

// The second line is not a shift of codes, so the octave is taken from the scores before rounding.
template <int kRowMax>
void expcast_two_lines(const SoftmaxStep& step) {
  const F f;
  constexpr bool kTile = kRowMax == VCATTN_MAX_TILE_OCTAVE;
  for (int64_t r = 0; r < step.rows; ++r) {
    const float before = step.reference[r];
    const float max_code = max_product(step, r);
    float peak, intercept;
    if constexpr (kRowMax == VCATTN_MAX_RUNNING) {
      peak = std::max(before, max_code);
      set_maximum(step, r, peak);
      intercept = kTwoLineIntercept;
    } else {
      const float step_octave = code_octaves(max_code);
      const float running = std::max(before, step_octave);
      const float octave = kTile ? step_octave : running;
      set_octaves(step, r, running, octave);
      peak = kCodesPerOctave * octave;
      intercept = kTwoLinePeak;
    }
    const auto reference = hn::Set(f, peak);
    const auto first_offset = hn::Set(f, intercept);
    const auto slope = hn::Set(f, kTwoLineSlope);
    const auto second_offset = hn::Set(f, kTwoLinePivot - kTwoLineSlope * kTwoLinePivot);
    map_row<false>(step, r, 1.0f, [&](V s, V factor, int, V&) {
      const auto line = hn::Add(below(s, factor, reference), first_offset);
      const auto code = hn::Round(hn::Max(line, hn::MulAdd(slope, line, second_offset)));
      return decode_codes(clamp(code, 0.0f, kExpCastMaxCode));
    });
  }
}

// ---- exp2, then rounding -------------------------------------------------------------------------------------------

constexpr float kOctavesPerCode = 1.0f / kCodesPerOctave;

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

void sum_groups(const float* p, float* sums) {
  for (int g = 0; g < kSumGroups; ++g, p += kMinMeanRows) sums[g] = std::accumulate(p, p + kMinMeanRows, 0.0f);
}

template <int kP, bool kSumUnrounded>
void exp2_rows(const SoftmaxStep& step, int32_t row_max, float peak) {
  const F f;
  const bool octaves = row_max != VCATTN_MAX_RUNNING;
  const bool per_tile = row_max == VCATTN_MAX_TILE_OCTAVE;
  for (int64_t r = 0; r < step.rows; ++r) {
    const float before = step.reference[r];
    const float step_max = max_product(step, r, kOctavesPerCode);
    const float step_reference = octaves ? std::ceil(step_max) : step_max;
    const float running = std::max(before, step_reference);
    const float reference = per_tile ? step_reference : running;
    step.reference[r] = running;
    step.rescale[r] = hn::GetLane(exp2_lanes(hn::Set(f, before - running)));
    step.weight[r] = hn::GetLane(exp2_lanes(hn::Set(f, reference - running)));
    const auto subtracted = hn::Set(f, reference);
    const auto log2_peak = hn::Set(f, peak);
    map_row<kSumUnrounded>(step, r, kOctavesPerCode, [&](V s, V factor, int, V& unrounded) {
      unrounded = exp2_lanes(hn::Add(below(s, factor, subtracted), log2_peak));
      if constexpr (kP == VCATTN_P_E4M3) return round_e4m3_lanes(unrounded);
      if constexpr (kP == VCATTN_P_BF16) return round_bf16_lanes(unrounded);
      return unrounded;
    });
    if constexpr (kP == VCATTN_P_NVFP4) {
      for (const SoftmaxTile& tile : step.tiles) {
        float* p = tile.scores + r * kBlockN;
        quantise_nvfp4_row(p);
        if constexpr (!kSumUnrounded) sum_groups(p, tile.group_sums + r * kSumGroups);
      }
    }
  }
}

template <int kP>
void exp2_step(const vcattn_recipe& recipe, const SoftmaxStep& step) {
  const float peak = kP == VCATTN_P_E4M3 ? recipe.p_log2_peak : 0.0f;
  if (recipe.row_sum == VCATTN_SUM_UNROUNDED) {
    exp2_rows<kP, true>(step, recipe.row_max, peak);
  } else {
    exp2_rows<kP, false>(step, recipe.row_max, peak);
  }
}

void softmax_step(const vcattn_recipe& recipe, const SoftmaxStep& step) {
  switch (recipe.p_format) {
    case VCATTN_P_EXPCAST:
      if (recipe.row_max == VCATTN_MAX_RUNNING) return expcast_running(recipe, step);
      if (recipe.row_max == VCATTN_MAX_RUNNING_OCTAVE) return expcast_octave<false>(recipe, step);
      return expcast_octave<true>(recipe, step);
    case VCATTN_P_EXPCAST_TWO_LINES:
      if (recipe.row_max == VCATTN_MAX_RUNNING) return expcast_two_lines<VCATTN_MAX_RUNNING>(step);
      if (recipe.row_max == VCATTN_MAX_RUNNING_OCTAVE) return expcast_two_lines<VCATTN_MAX_RUNNING_OCTAVE>(step);
      return expcast_two_lines<VCATTN_MAX_TILE_OCTAVE>(step);
    case VCATTN_P_E4M3:
      return exp2_step<VCATTN_P_E4M3>(recipe, step);
    case VCATTN_P_BF16:
      return exp2_step<VCATTN_P_BF16>(recipe, step);
    case VCATTN_P_NVFP4:
      return exp2_step<VCATTN_P_NVFP4>(recipe, step);
    default:
      return exp2_step<VCATTN_P_FP32>(recipe, step);
  }
}

}  // namespace vcattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vcattn::cpu {
namespace {
HWY_EXPORT(softmax_step);
}  // namespace

float initial_reference() { return -std::numeric_limits<float>::infinity(); }

void softmax_step(const vcattn_recipe& recipe, const SoftmaxStep& step) {
  HWY_DYNAMIC_DISPATCH(softmax_step)(recipe, step);
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
