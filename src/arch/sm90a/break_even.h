// Where this back end's calls overtake BF16 attention. The one home of these lengths: Python's defaults repeat those of
// `accurate` with 128 channels (python/vcattn/policy.py), and a test holds them together.
#pragma once

#include <cstdint>
#include <limits>

#include "arch/sm90a/config.h"

namespace vcattn::sm90a {

// Calls of at most so many queries or keys take longer than torch's BF16 attention (cuDNN's) of the same shape, as
// whole calls on an H200: the largest of those found for 12, 24 and 40 heads.
struct BreakEven {
  Scores scores;
  Probabilities probabilities;
  int head_dim;      // as stored
  int64_t ordered;   // the order of the keys is given, or that of the sequence
  int64_t grouping;  // the call groups
};

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();  // at no length that was tried

// Measured by bench/break_even.py on 2026-11-30 (docs/benchmarks.md).
inline constexpr BreakEven kBreakEvens[] = {
    {Scores::kInt8, Probabilities::kExpCast, 128, 4608, 10496},
    {Scores::kInt8, Probabilities::kExp2, 128, 7936, 18176},
    {Scores::kE4m3, Probabilities::kExpCast, 128, 4352, 9216},
    {Scores::kInt8, Probabilities::kExpCast, 64, 4608, 11520},
    {Scores::kInt8, Probabilities::kExp2, 64, 17920, kNever},
    {Scores::kE4m3, Probabilities::kExpCast, 64, 3584, 8192},
};

// Of a kernel; 0 where none was measured: without block means, and under a running maximum.
constexpr int64_t break_even_seqlen(const Config& config, bool groups) {
  if (!config.means || config.row_maximum != RowMaximum::kPairOctave) return 0;
  for (const BreakEven& row : kBreakEvens) {
    if (row.scores == config.scores && row.probabilities == config.probabilities && row.head_dim == config.head_dim) {
      return groups ? row.grouping : row.ordered;
    }
  }
  return 0;
}

}  // namespace vcattn::sm90a
