#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kFast128, {.head_dim = 128,
                         .scores = Scores::kE4m3,
                         .probabilities = Probabilities::kExpCast,
                         .row_maximum = RowMaximum::kPairOctave,
                         .means = true})
VCATTN_KERNEL(kFast64, {.head_dim = 64,
                        .scores = Scores::kE4m3,
                        .probabilities = Probabilities::kExpCast,
                        .row_maximum = RowMaximum::kPairOctave,
                        .means = true})
