#include "arch/sm90a/kernel.cuh"

VCATTN_KERNELS(kRunning, .scores = Scores::kInt8, .probabilities = Probabilities::kExp2,
               .row_maximum = RowMaximum::kRunning, .means = true)
