#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kPlainAccurate128, {.head_dim = 128,
                                  .scores = Scores::kInt8,
                                  .probabilities = Probabilities::kExpCast,
                                  .row_maximum = RowMaximum::kPairOctave,
                                  .means = false})
VCATTN_KERNEL(kPlainAccurate64, {.head_dim = 64,
                                 .scores = Scores::kInt8,
                                 .probabilities = Probabilities::kExpCast,
                                 .row_maximum = RowMaximum::kPairOctave,
                                 .means = false})
