#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kExact128, {.head_dim = 128,
                          .scores = Scores::kInt8,
                          .probabilities = Probabilities::kExp2,
                          .row_maximum = RowMaximum::kPairOctave,
                          .means = true})
VCATTN_KERNEL(kExact64, {.head_dim = 64,
                         .scores = Scores::kInt8,
                         .probabilities = Probabilities::kExp2,
                         .row_maximum = RowMaximum::kPairOctave,
                         .means = true})
