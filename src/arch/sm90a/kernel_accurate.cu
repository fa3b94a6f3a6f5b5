#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kAccurate128, {.head_dim = 128,
                             .scores = Scores::kInt8,
                             .probabilities = Probabilities::kExpCast,
                             .row_maximum = RowMaximum::kPairOctave,
                             .means = true})
VCATTN_KERNEL(kAccurate64, {.head_dim = 64,
                            .scores = Scores::kInt8,
                            .probabilities = Probabilities::kExpCast,
                            .row_maximum = RowMaximum::kPairOctave,
                            .means = true})
