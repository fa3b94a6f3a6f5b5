#include "cpu/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gemm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace vcattn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Lanes = hn::CappedTag<float, kPanelAlign>;
constexpr int kLanes = hn::MaxLanes(Lanes());

// Accumulators of one block fill the register file but for the operands: 32 registers with AVX-512 and NEON, 16 else.
constexpr int kRows = 6;
constexpr int kVectors = (HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON) ? 4 : 2;

template <int kM, int kV>
HWY_INLINE void block(int64_t k, const float* HWY_RESTRICT a, int64_t lda, const float* HWY_RESTRICT b, int64_t ldb,
                      float* HWY_RESTRICT c, int64_t ldc, bool accumulate) {
  const Lanes lanes;
  hn::Vec<Lanes> sum[kM][kV];
  for (int i = 0; i < kM; ++i) {
    for (int v = 0; v < kV; ++v) {
      sum[i][v] = accumulate ? hn::Load(lanes, c + i * ldc + v * kLanes) : hn::Zero(lanes);
    }
  }
  for (int64_t p = 0; p < k; ++p) {
    hn::Vec<Lanes> right[kV];
    for (int v = 0; v < kV; ++v) right[v] = hn::Load(lanes, b + p * ldb + v * kLanes);
    for (int i = 0; i < kM; ++i) {
      const auto left = hn::Set(lanes, a[i * lda + p]);
      for (int v = 0; v < kV; ++v) sum[i][v] = hn::MulAdd(left, right[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kM; ++i) {
    for (int v = 0; v < kV; ++v) hn::Store(sum[i][v], lanes, c + i * ldc + v * kLanes);
  }
}

template <int kV>
HWY_INLINE void column_strip(int64_t m, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                             int64_t ldc, bool accumulate) {
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) block<kRows, kV>(k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
  for (; i + 2 <= m; i += 2) block<2, kV>(k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
  for (; i < m; ++i) block<1, kV>(k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, accumulate);
}

void gemm_f32(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc, bool accumulate) {
  int64_t j = 0;
  constexpr int kWide = kVectors * kLanes;
  for (; j + kWide <= n; j += kWide) column_strip<kVectors>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
  for (; j < n; j += kLanes) column_strip<1>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

void add_scaled_rows(int64_t m, int64_t n, const float* weight, const float* a, int64_t lda, float* c, int64_t ldc) {
  const Lanes lanes;
  for (int64_t i = 0; i < m; ++i) {
    const auto factor = hn::Set(lanes, weight[i]);
    for (int64_t j = 0; j < n; j += kLanes) {
      float* out = c + i * ldc + j;
      hn::Store(hn::MulAdd(factor, hn::Load(lanes, a + i * lda + j), hn::Load(lanes, out)), lanes, out);
    }
  }
}

}  // namespace vcattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vcattn::cpu {

HWY_EXPORT(gemm_f32);
HWY_EXPORT(add_scaled_rows);

void gemm_f32(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc, bool accumulate) {
  HWY_DYNAMIC_DISPATCH(gemm_f32)(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

void add_scaled_rows(int64_t m, int64_t n, const float* weight, const float* a, int64_t lda, float* c, int64_t ldc) {
  HWY_DYNAMIC_DISPATCH(add_scaled_rows)(m, n, weight, a, lda, c, ldc);
}

void gemm_f64(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; j += kPanelAlign) {
      double sum[kPanelAlign] = {};
      for (int64_t p = 0; p < k; ++p) {
        const double left = a[i * lda + p];
        for (int64_t v = 0; v < kPanelAlign; ++v) sum[v] += left * b[p * ldb + j + v];
      }
      for (int64_t v = 0; v < kPanelAlign; ++v) c[i * ldc + j + v] = static_cast<float>(sum[v]);
    }
  }
}

}  // namespace vcattn::cpu
#endif
