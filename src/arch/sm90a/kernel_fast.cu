#include "arch/sm90a/kernel.cuh"

VCATTN_KERNELS(kFast, .scores = Scores::kE4m3, .probabilities = Probabilities::kExpCast,
               .row_maximum = RowMaximum::kPairOctave, .means = true)
