// Single-precision matrix product on small, cache-resident panels: the one inner loop that QK, PV and the k-means
// distances share. Dispatched at run time to the widest instruction set of the machine.
#pragma once

#include <cstdint>

namespace vcattn::cpu {

// Row alignment of the right-hand panel and of C: leading dimensions and n are multiples of this many floats.
inline constexpr int kPanelAlign = 16;

// c[m, n] = a[m, k] * b[k, n], plus c where `accumulate`. All row-major with leading dimensions in floats.
// n, ldb and ldc are multiples of kPanelAlign; b and c are aligned to 64 bytes. Products are summed along k in order,
// in FP32, fused where the instruction set can.
void gemm_f32(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc, bool accumulate);

// c[i, :] += weight[i] * a[i, :] over m rows of n floats, fused; alignment and leading dimensions as c above.
void add_scaled_rows(int64_t m, int64_t n, const float* weight, const float* a, int64_t lda, float* c, int64_t ldc);

// The product of gemm_f32 accumulated in FP64 and rounded to FP32 at the end; c is overwritten.
void gemm_f64(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc);

}  // namespace vcattn::cpu
