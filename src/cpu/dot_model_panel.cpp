#include "cpu/dot_model_panel.h"

#include <algorithm>

#include "cpu/gemm.h"
#include "numerics/dot_model.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dot_model_panel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace vcattn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, kPanelAlign>;
using I = hn::Rebind<int32_t, F>;
using V = hn::Vec<F>;
constexpr int64_t kLanes = hn::MaxLanes(F());

HWY_INLINE V exponent_lanes(V x) {
  const I i;
  return hn::BitCast(F(), hn::And(hn::BitCast(i, x), hn::Set(i, static_cast<int32_t>(kFloatInfinity))));
}

// FP16 values to FP32, nearest even; infinity above 65504.
HWY_INLINE V round_fp16_lanes(V x) {
  const F f;
  const I i;
  const auto bits = hn::BitCast(i, x);
  const auto odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(i, 1));
  const auto normal = hn::BitCast(f, hn::And(hn::Add(bits, hn::Add(odd, hn::Set(i, 0xFFF))), hn::Set(i, ~0x1FFF)));
  // Under 2^-14 values are multiples of 2^-24: adding 1.5 * 2^-1 leaves that many bits.
  const auto magic = hn::Set(f, 0.75f);
  const auto subnormal = hn::Sub(hn::Add(x, magic), magic);
  const auto rounded = hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(f, 0x1p-14f)), subnormal, normal);
  const auto infinity = hn::CopySign(hn::BitCast(f, hn::Set(i, static_cast<int32_t>(kFloatInfinity))), x);
  return hn::IfThenElse(hn::Gt(hn::Abs(rounded), hn::Set(f, kFp16Max)), infinity, rounded);
}

HWY_INLINE V cut_lanes(V x) {
  const I i;
  return hn::BitCast(F(), hn::And(hn::BitCast(i, x), hn::Set(i, static_cast<int32_t>(~kHopperCutBits))));
}

// One instruction for one row and one vector of columns.
template <bool kF16>
HWY_INLINE V step(V accumulator, int64_t count, const float* a, const float* a_exponents, const float* b, int64_t ldb,
                  const V* b_exponents) {
  const F f;
  const I i;
  auto largest = hn::Zero(f);
  for (int64_t k = 0; k < count; ++k) {
    largest = hn::Max(largest, hn::Mul(hn::Set(f, a_exponents[k]), b_exponents[k]));
  }
  const auto scale = hn::Max(exponent_lanes(accumulator), largest);
  // reciprocal_unit(scale, kHopperFractionBits)
  const auto unit_bits = hn::Set(i, (kHopperFractionBits + 2 * kFloatBias) << kFloatMantissaBits);
  const auto units = hn::BitCast(f, hn::Sub(unit_bits, hn::BitCast(i, scale)));
  auto sum = hn::ConvertTo(i, hn::Mul(accumulator, units));  // toward zero
  for (int64_t k = 0; k < count; ++k) {
    const auto product = hn::Mul(hn::Set(f, a[k]), hn::Load(f, b + k * ldb));
    sum = hn::Add(sum, hn::ConvertTo(i, hn::Mul(product, units)));
  }
  const auto value = hn::Mul(hn::ConvertTo(f, sum), hn::Mul(scale, hn::Set(f, power_of_two(-kHopperFractionBits))));
  const auto stored = kF16 ? round_fp16_lanes(value) : cut_lanes(value);
  const auto unchanged = hn::Add(hn::Zero(f), kF16 ? accumulator : cut_lanes(accumulator));
  return hn::IfThenElse(hn::Eq(largest, hn::Zero(f)), unchanged, stored);
}

template <bool kF16>
void panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
           int64_t ldc) {
  const F f;
  for (int64_t begin = 0; begin < k; begin += kHopperGroup) {
    const int64_t count = std::min<int64_t>(kHopperGroup, k - begin);
    for (int64_t j = 0; j < n; j += kLanes) {
      const float* right = b + begin * ldb + j;
      V b_exponents[kHopperGroup];
      for (int64_t p = 0; p < count; ++p) {
        const auto value = hn::Load(f, right + p * ldb);
        const auto exponent = hn::Max(exponent_lanes(value), hn::Set(f, kE4m3SmallestNormal));
        b_exponents[p] = hn::IfThenElse(hn::Eq(value, hn::Zero(f)), hn::Zero(f), exponent);
      }
      for (int64_t i = 0; i < m; ++i) {
        const float* left = a + i * lda + begin;
        float a_exponents[kHopperGroup];
        for (int64_t p = 0; p < count; ++p) a_exponents[p] = e4m3_exponent_part(left[p]);
        float* out = c + i * ldc + j;
        hn::Store(step<kF16>(hn::Load(f, out), count, left, a_exponents, right, ldb, b_exponents), f, out);
      }
    }
  }
}

void hopper_fp8_panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float* c, int64_t ldc) {
  panel<false>(m, n, k, a, lda, b, ldb, c, ldc);
}

void hopper_fp8_f16_panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                          float* c, int64_t ldc) {
  panel<true>(m, n, k, a, lda, b, ldb, c, ldc);
}

}  // namespace vcattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vcattn::cpu {

HWY_EXPORT(hopper_fp8_panel);
HWY_EXPORT(hopper_fp8_f16_panel);

void hopper_fp8_panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                      float* c, int64_t ldc) {
  HWY_DYNAMIC_DISPATCH(hopper_fp8_panel)(m, n, k, a, lda, b, ldb, c, ldc);
}

void hopper_fp8_f16_panel(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                          float* c, int64_t ldc) {
  HWY_DYNAMIC_DISPATCH(hopper_fp8_f16_panel)(m, n, k, a, lda, b, ldb, c, ldc);
}

}  // namespace vcattn::cpu
#endif
