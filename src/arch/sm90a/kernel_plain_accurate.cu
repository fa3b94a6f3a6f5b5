#include "arch/sm90a/kernel.cuh"

VCATTN_KERNELS(kPlainAccurate, .scores = Scores::kInt8, .probabilities = Probabilities::kExpCast,
               .row_maximum = RowMaximum::kPairOctave, .means = false)
