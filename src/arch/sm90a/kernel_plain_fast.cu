#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kPlainFast128, {.head_dim = 128,
                              .scores = Scores::kE4m3,
                              .probabilities = Probabilities::kExpCast,
                              .row_maximum = RowMaximum::kPairOctave,
                              .means = false})
VCATTN_KERNEL(kPlainFast64, {.head_dim = 64,
                             .scores = Scores::kE4m3,
                             .probabilities = Probabilities::kExpCast,
                             .row_maximum = RowMaximum::kPairOctave,
                             .means = false})
