#include "arch/sm90a/kernel.cuh"

VCATTN_KERNELS(kPlainFast, .scores = Scores::kE4m3, .probabilities = Probabilities::kExpCast,
               .row_maximum = RowMaximum::kPairOctave, .means = false)
