#include "arch/sm90a/kernel.cuh"

VCATTN_KERNELS(kExact, .scores = Scores::kInt8, .probabilities = Probabilities::kExp2,
               .row_maximum = RowMaximum::kPairOctave, .means = true)
