#include "expcast_stats.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace vcattn::cli {
namespace {

// Half the L1 distance after each side is divided by its sum.
double total_variation(std::span<const double> exact, std::span<const double> found) {
  double exact_sum = 0.0, found_sum = 0.0, difference = 0.0;
  for (size_t j = 0; j < exact.size(); ++j) {
    exact_sum += exact[j];
    found_sum += found[j];
  }
  for (size_t j = 0; j < exact.size(); ++j) difference += std::abs(exact[j] / exact_sum - found[j] / found_sum);
  return 0.5 * difference;
}

// Decoded probabilities of ExpCast with a maximum per tile, as multiples of 2^8 at the row's octave.
void expcast_per_tile(std::span<const double> log2_ratio, double max_octaves, std::span<double> found,
                      CodeCounts& counts) {
  // Codes are whole numbers on a fixed grid of scores; counted from the octave at or above the row's maximum, so that
  // they are small however large the scores. Anything under -2^20 octaves is 0 in every format.
  const double above = max_octaves - std::ceil(max_octaves);
  const auto code_of = [&](double u) {
    return static_cast<int>(std::nearbyint(kCodesPerOctave * std::max(u + above, -0x1p20))) + kExpCastPeak;
  };
  for (size_t begin = 0; begin < log2_ratio.size(); begin += kBlockN) {
    const size_t end = std::min(begin + kBlockN, log2_ratio.size());
    const double tile_max = *std::max_element(&log2_ratio[begin], &log2_ratio[begin] + (end - begin));
    const int octaves = octaves_above_peak(code_of(tile_max));
    for (size_t j = begin; j < end; ++j) {
      const int code =
          std::clamp(code_of(log2_ratio[j]) - static_cast<int>(kCodesPerOctave) * octaves, 0, kExpCastMaxCode);
      ++counts[static_cast<size_t>(code)];
      found[j] = std::ldexp(decode_e4m3(static_cast<uint8_t>(code)), octaves);
    }
  }
}

}  // namespace

ExpCastRow expcast_row(std::span<const double> scores) {
  ExpCastRow row;
  const double max_score = *std::max_element(scores.begin(), scores.end());
  std::vector<double> log2_ratio(scores.size()), exact(scores.size()), found(scores.size());
  double sum = 0.0, underflow = 0.0;
  for (size_t j = 0; j < scores.size(); ++j) {
    log2_ratio[j] = (scores[j] - max_score) * std::numbers::log2e;
    exact[j] = std::exp2(log2_ratio[j]);
    sum += exact[j];
    if (log2_ratio[j] < kUnderflowLog2) {
      underflow += exact[j];
      row.underflows = true;
    }
  }
  row.underflow_mass = underflow / sum;

  const auto distance = [&](auto code_of) {
    for (size_t j = 0; j < scores.size(); ++j) {
      found[j] = decode_e4m3(static_cast<uint8_t>(code_of(static_cast<float>(log2_ratio[j]))));
    }
    return total_variation(exact, found);
  };
  row.expcast = distance([&](float u) {
    const int code = expcast_code(u);
    ++row.running_codes[static_cast<size_t>(code)];
    return code;
  });
  row.exp2_e4m3 = distance([](float u) { return int{encode_e4m3(std::exp2(u + kExpCastLog2Peak))}; });
  row.two_lines = distance([](float u) { return expcast_two_line_code(u); });
  expcast_per_tile(log2_ratio, max_score * std::numbers::log2e, found, row.per_tile_codes);
  row.expcast_per_tile = total_variation(exact, found);
  return row;
}

ExpCastStats summarise(std::span<const ExpCastRow> rows) {
  ExpCastStats stats;
  stats.rows = static_cast<int64_t>(rows.size());
  const auto gather = [&](Distance& distance, double value) {
    distance.mean += value / static_cast<double>(rows.size());
    distance.max = std::max(distance.max, value);
  };
  for (const ExpCastRow& row : rows) {
    gather(stats.expcast, row.expcast);
    gather(stats.exp2_e4m3, row.exp2_e4m3);
    gather(stats.two_lines, row.two_lines);
    gather(stats.expcast_per_tile, row.expcast_per_tile);
    stats.mean_underflow_mass += row.underflow_mass / static_cast<double>(rows.size());
    if (row.expcast > kExpCastTvBound + row.underflow_mass) ++stats.bound_violations;
    if (!row.underflows) {
      ++stats.rows_without_underflow;
      stats.max_tv_without_underflow = std::fmax(stats.max_tv_without_underflow, row.expcast);
    }
    for (size_t c = 0; c < stats.running_codes.size(); ++c) {
      stats.running_codes[c] += row.running_codes[c];
      stats.per_tile_codes[c] += row.per_tile_codes[c];
    }
  }
  return stats;
}

}  // namespace vcattn::cli
