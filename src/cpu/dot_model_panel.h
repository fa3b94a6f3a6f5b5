// Hopper's FP8 accumulation (numerics/dot_model.h) over panels, bit for bit.
#pragma once

#include <cstdint>

namespace vcattn::cpu {

// c[m, n] = the tensor core's accumulator after chaining the instructions of all k products onto c. a and b hold values
// of E4M3 codes. Shapes, alignment and leading dimensions as gemm_f32; groups of 32 along k start at 0.
void hopper_fp8_panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float* c, int64_t ldc);

// The same with FP16 accumulators, whose values c holds.
void hopper_fp8_f16_panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                          float* c, int64_t ldc);

}  // namespace vcattn::cpu
