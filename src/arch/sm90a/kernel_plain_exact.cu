#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kPlainExact128, {.head_dim = 128,
                               .scores = Scores::kInt8,
                               .probabilities = Probabilities::kExp2,
                               .row_maximum = RowMaximum::kPairOctave,
                               .means = false})
VCATTN_KERNEL(kPlainExact64, {.head_dim = 64,
                              .scores = Scores::kInt8,
                              .probabilities = Probabilities::kExp2,
                              .row_maximum = RowMaximum::kPairOctave,
                              .means = false})
