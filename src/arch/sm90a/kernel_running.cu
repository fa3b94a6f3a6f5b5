#include "arch/sm90a/kernel.cuh"

VCATTN_KERNEL(kRunning128, {.head_dim = 128,
                            .scores = Scores::kInt8,
                            .probabilities = Probabilities::kExp2,
                            .row_maximum = RowMaximum::kRunning,
                            .means = true})
VCATTN_KERNEL(kRunning64, {.head_dim = 64,
                           .scores = Scores::kInt8,
                           .probabilities = Probabilities::kExp2,
                           .row_maximum = RowMaximum::kRunning,
                           .means = true})
