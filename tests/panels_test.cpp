// The vectorised inner loops against scalar definitions, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "cpu/dot_model_panel.h"
#include "cpu/gemm.h"
#include "cpu/panel.h"
#include "cpu/preprocess.h"
#include "numerics/dot_model.h"
#include "targets.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {
namespace {

struct FreeDelete {
  void operator()(float* p) const { std::free(p); }
};
using Panel = std::unique_ptr<float[], FreeDelete>;

Panel make_panel(int64_t count) {
  return Panel(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
}

// Highway's x86 instruction sets with fused multiply-add are those from AVX2 on: lower values are wider.
bool fuses(int64_t target) { return target <= HWY_AVX2; }

std::vector<float> random_e4m3(int64_t count, uint32_t seed, int spread) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& x : values) {
    const uint32_t code = random();
    x = code % 5 == 0 ? 0.0f : decode_e4m3(static_cast<uint8_t>((code >> 8 & 0x80) | (code % 127) * spread / 16 % 127));
  }
  return values;
}

TEST(Gemm, SumsInOrderWithFusedMultiplyAdd) {
  test::on_every_target([](int64_t target) {
    int64_t different = 0;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 16, 1}, {7, 128, 128}, {13, 80, 33}, {128, 64, 5}}) {
      const int64_t lda = k + 3, ldb = n + 16, ldc = n + 32;
      std::vector<float> a(m * lda);
      Panel b = make_panel(k * ldb), c = make_panel(m * ldc);
      for (float& x : a) x = normal(random);
      for (int64_t i = 0; i < k * ldb; ++i) b[i] = normal(random);
      std::fill(c.get(), c.get() + m * ldc, 0.5f);
      for (const bool accumulate : {true, false}) {
        std::vector<float> expected(m * ldc);
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            float sum = accumulate ? c[i * ldc + j] : 0.0f;
            for (int64_t p = 0; p < k; ++p) sum = std::fma(a[i * lda + p], b[p * ldb + j], sum);
            expected[i * ldc + j] = sum;
          }
        }
        gemm_f32(m, n, k, a.data(), lda, b.get(), ldb, c.get(), ldc, accumulate);
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            ASSERT_NEAR(c[i * ldc + j], expected[i * ldc + j], 1e-5 * std::sqrt(double(k))) << i << ", " << j;
            different += c[i * ldc + j] != expected[i * ldc + j] ? 1 : 0;
          }
          ASSERT_EQ(c[i * ldc + n], 0.5f) << "wrote past column " << n;
        }
      }
    }
    // Without fused multiply-add products are rounded too: this also shows that the forced instruction set ran.
    EXPECT_EQ(different == 0, fuses(target)) << different << " elements differ";
  });
}

TEST(DecodePanel, EqualsTheFormatsForEveryCode) {
  test::on_every_target([](int64_t) {
    constexpr int64_t kCount = 256;
    std::array<uint8_t, kCount> codes;
    for (int64_t i = 0; i < kCount; ++i) codes[i] = static_cast<uint8_t>(i);
    Panel out = make_panel(kCount);
    decode_panel(VCATTN_FORMAT_E4M3, 1, kCount, codes.data(), nullptr, out.get());
    for (int64_t i = 0; i < kCount; ++i) {
      if (i % 128 == 127) continue;  // NaN, which no preprocessing writes
      ASSERT_EQ(out[i], decode_e4m3(static_cast<uint8_t>(i))) << "code " << i;
    }
    decode_panel(VCATTN_FORMAT_INT8, 1, kCount, codes.data(), nullptr, out.get());
    for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(out[i], static_cast<int8_t>(i));
  });
}

TEST(DotModelPanel, EqualsTheScalarDefinitionBitForBit) {
  test::on_every_target([](int64_t) {
    for (const int spread : {2, 8, 16}) {
      for (const int64_t k : {16, 32, 128, 144}) {
        constexpr int64_t kM = 5, kN = 48;
        const auto a = random_e4m3(kM * k, 17 + spread, spread), values = random_e4m3(k * kN, 99 + spread, spread);
        Panel b = make_panel(k * kN), c = make_panel(kM * kN), h = make_panel(kM * kN);
        std::copy(values.begin(), values.end(), b.get());
        std::fill(c.get(), c.get() + kM * kN, 0.0f);
        std::fill(h.get(), h.get() + kM * kN, 0.0f);
        hopper_fp8_panel(kM, kN, k, a.data(), k, b.get(), kN, c.get(), kN);
        hopper_fp8_f16_panel(kM, kN, k, a.data(), k, b.get(), kN, h.get(), kN);
        for (int64_t i = 0; i < kM; ++i) {
          for (int64_t j = 0; j < kN; ++j) {
            std::vector<float> column(k);
            for (int64_t p = 0; p < k; ++p) column[p] = values[p * kN + j];
            const std::span<const float> row(a.data() + i * k, static_cast<size_t>(k));
            ASSERT_EQ(bits_from_float(c[i * kN + j]), bits_from_float(hopper_fp8_dot(row, column, 0)))
                << i << ", " << j << " k " << k << ": " << c[i * kN + j] << " and " << hopper_fp8_dot(row, column, 0);
            ASSERT_EQ(bits_from_float(h[i * kN + j]), bits_from_float(hopper_fp8_f16_dot(row, column)))
                << i << ", " << j << " k " << k << ": " << h[i * kN + j] << " and " << hopper_fp8_f16_dot(row, column);
          }
        }
      }
    }
  });
}

TEST(Hadamard, IsOrthonormalAndItsOwnInverse) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const int64_t n : {1, 2, 64, 128, 256}) {
    std::vector<float> row(n), copy;
    for (float& x : row) x = normal(random);
    copy = row;
    double before = 0.0, after = 0.0;
    for (const float x : row) before += double{x} * x;
    hadamard_row(row.data(), n);
    for (const float x : row) after += double{x} * x;
    EXPECT_NEAR(after, before, 1e-5 * before);
    // Entry (0, j) of the matrix is 1 / sqrt(n).
    double sum = 0.0;
    for (const float x : copy) sum += x;
    EXPECT_NEAR(row[0], sum / std::sqrt(double(n)), 1e-5 * std::sqrt(before));
    hadamard_row(row.data(), n);
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(row[i], copy[i], 1e-5);
  }
}

}  // namespace
}  // namespace vcattn::cpu
