// How far ExpCast moves a row of the softmax from the exact one, and which E4M3 codes it writes.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "numerics/attention_math.h"

namespace vcattn::cli {

// An E4M3 value that is normal comes from u = log2(p / p_max) >= -14: 2^8 at the maximum, 2^-6 the smallest normal.
inline constexpr double kUnderflowLog2 = -14.0;

// Over all normal codes decoded / exact lies in [a, b] = [0.9290, 1.0746]. Normalised probabilities of which each is
// off by a factor in [a, b] are at most (sqrt b - sqrt a) / (sqrt b + sqrt a) away in total variation; a tail of mass
// tau under kUnderflowLog2 adds at most tau.
inline constexpr double kExpCastTvBound = 0.0364;

using CodeCounts = std::array<int64_t, kExpCastMaxCode + 1>;

// One row. Total variation distance: half the sum of |p - p_exact| over the keys, both normalised.
struct ExpCastRow {
  double expcast = 0.0;           // one multiply-add, exact row maximum
  double exp2_e4m3 = 0.0;         // exp2, then E4M3 to nearest even, maximum at 2^8
  double two_lines = 0.0;         // ExpCast with a second, flatter line
  double expcast_per_tile = 0.0;  // each 128 keys against their own maximum, in whole octaves
  double underflow_mass = 0.0;    // tau: exact probability of the keys under kUnderflowLog2
  bool underflows = false;        // some key lies under kUnderflowLog2
  CodeCounts running_codes{};     // codes of `expcast`
  CodeCounts per_tile_codes{};    // codes of `expcast_per_tile`
};

// `scores`: softmax_scale * q . k of one row against all keys, natural units, finite, at least one, in tile order.
ExpCastRow expcast_row(std::span<const double> scores);

struct Distance {
  double mean = 0.0;
  double max = 0.0;
};

struct ExpCastStats {
  int64_t rows = 0;
  Distance expcast, exp2_e4m3, two_lines, expcast_per_tile;
  int64_t rows_without_underflow = 0;
  double max_tv_without_underflow = std::numeric_limits<double>::quiet_NaN();  // NaN: there is no such row
  double mean_underflow_mass = 0.0;
  int64_t bound_violations = 0;  // rows with expcast > kExpCastTvBound + tau
  CodeCounts running_codes{}, per_tile_codes{};
};

ExpCastStats summarise(std::span<const ExpCastRow> rows);

}  // namespace vcattn::cli
