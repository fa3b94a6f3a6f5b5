// The CPU reference against the FP64 oracle: every recipe, shapes, masks, segments, odd inputs.
#include <cmath>
#include <limits>
#include <numeric>

#include "core/recipes.h"
#include "numerics/dot_model.h"
#include "support.h"
#include "targets.h"

namespace vcattn::test {
namespace {

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (int i = 0; i < vcattn_recipe_count(); ++i) names.push_back(vcattn_recipe_name(i));
  return names;
}

// Relative L2 error on Gaussian tensors that no recipe may exceed. About 1.5 times what is measured.
double error_bound(const std::string& name) {
  if (name == "fp32") return 1e-5;
  if (name == "bf16") return 6e-3;
  if (name == "sage3" || name == "vsmooth4") return 0.35;
  if (name == "attn_qat") return 0.25;
  return 0.09;
}

class EveryRecipe : public testing::TestWithParam<std::string> {
 protected:
  const char* name() const { return GetParam().c_str(); }
};

TEST_P(EveryRecipe, IsNearTheOracleAtEveryShape) {
  struct Shape {
    int64_t batch, q, kv, heads, heads_kv, dim;
  };
  const Shape shapes[] = {{1, 1, 1, 1, 1, 128},    {1, 2, 127, 1, 1, 128}, {2, 129, 128, 4, 2, 64},
                          {1, 128, 129, 2, 2, 96}, {1, 5, 700, 8, 2, 128}, {1, 300, 63, 1, 1, 40},
                          {1, 3, 257, 1, 1, 256},  {1, 7, 200, 3, 1, 1},   {1, 64, 1000, 1, 1, 80}};
  uint32_t seed = 1;
  for (const Shape& s : shapes) {
    Tensor q(s.batch, s.q, s.heads, s.dim), k(s.batch, s.kv, s.heads_kv, s.dim), v(s.batch, s.kv, s.heads_kv, s.dim);
    Tensor out(s.batch, s.q, s.heads, s.dim);
    q.fill_normal(seed++);
    k.fill_normal(seed++, 1.0f, 0.5f);
    v.fill_normal(seed++, 1.0f, 0.7f);
    const auto p = params(q, k, v, out, name());
    EXPECT_LT(attend_error(p), error_bound(name())) << s.q << " x " << s.kv << " x " << s.dim;
  }
}

TEST_P(EveryRecipe, ReturnsTheLogarithmOfTheSum) {
  Tensor q(2, 130, 4, 64), k(2, 300, 2, 64), v(2, 300, 2, 64), out(2, 130, 4, 64);
  q.fill_normal(11);
  k.fill_normal(12, 1.0f, 3.0f);  // a mean that centring takes and lse must give back
  v.fill_normal(13);
  std::vector<float> lse(2 * 4 * 130, -7.0f);
  auto p = params(q, k, v, out, name());
  p.lse = lse.data();  // [batch, heads, seqlen] storage
  p.lse_stride[0] = 4 * 130;
  p.lse_stride[1] = 1;
  p.lse_stride[2] = 130;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  std::vector<int64_t> rows(130);
  std::iota(rows.begin(), rows.end(), 0);
  cpu::OracleRows oracle;
  ASSERT_EQ(cpu::oracle_attention(p, rows, oracle, nullptr), VCATTN_OK);
  const double bound = GetParam() == "fp32" ? 1e-4 : error_bound(GetParam()) * 6;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 130; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        ASSERT_NEAR(lse[b * 520 + h * 130 + i], oracle.lse[(b * 130 + i) * 4 + h], bound)
            << "batch " << b << " row " << i << " head " << h;
      }
    }
  }
}

// V rows that are unit vectors: each output channel is one probability, so a misplaced key shows as itself.
TEST_P(EveryRecipe, PutsEachKeyWhereItBelongs) {
  constexpr int64_t kKeys = 128, kDim = 128;
  Tensor q(1, 40, 1, kDim), k(1, kKeys, 1, kDim), v(1, kKeys, 1, kDim), out(1, 40, 1, kDim);
  q.fill_normal(21, 2.0f);
  k.fill_normal(22);
  v.fill([](int64_t, int64_t s, int64_t, int64_t d) { return s == d ? 1.0f : 0.0f; });
  const auto p = params(q, k, v, out, name());
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  std::vector<int64_t> rows(40);
  std::iota(rows.begin(), rows.end(), 0);
  cpu::OracleRows oracle;
  ASSERT_EQ(cpu::oracle_attention(p, rows, oracle, nullptr), VCATTN_OK);
  // A probability is off by the error of its score, which 4-bit operands make large.
  const double bound =
      error_bound(GetParam()) * (params(q, k, v, out, name()).recipe.qk_format == VCATTN_FORMAT_NVFP4 ? 4 : 2);
  for (int64_t i = 0; i < 40; ++i) {
    const auto row = out.row(0, i, 0);
    for (int64_t d = 0; d < kDim; ++d) {
      const double expected = oracle.out[i * kDim + d];
      ASSERT_NEAR(row[d], expected, bound * expected + bound * 0.05) << "row " << i << " key " << d;
    }
  }
}

TEST_P(EveryRecipe, GivesFiniteRightAnswersForDegenerateInputs) {
  const auto zero = [](int64_t, int64_t, int64_t, int64_t) { return 0.0f; };
  const auto seven = [](int64_t, int64_t, int64_t, int64_t) { return 7.25f; };
  const auto rows_equal = [](int64_t, int64_t, int64_t, int64_t d) { return 0.1f * static_cast<float>(d) - 3.0f; };
  for (const int64_t keys : {1, 63, 127, 128, 400}) {
    Tensor q(1, 130, 1, 128), k(1, keys, 1, 128), v(1, keys, 1, 128), out(1, 130, 1, 128);
    q.fill_normal(31);
    k.fill_normal(32);
    v.fill_normal(33);
    auto p = params(q, k, v, out, name());
    Tensor zeros_q(1, 130, 1, 128), zeros_kv(1, keys, 1, 128), constant(1, keys, 1, 128), equal(1, keys, 1, 128);
    zeros_q.fill(zero);
    zeros_kv.fill(zero);
    constant.fill(seven);
    equal.fill(rows_equal);
    const double bound = error_bound(GetParam()) * 1.5;

    p.q = zeros_q.view();
    EXPECT_LT(attend_error(p), bound) << "zero q, keys " << keys;
    p.q = q.view();
    p.k = zeros_kv.view();
    EXPECT_LT(attend_error(p), bound) << "zero k, keys " << keys;
    p.k = constant.view();
    EXPECT_LT(attend_error(p), bound) << "constant k, keys " << keys;
    p.k = k.view();
    p.v = zeros_kv.view();
    EXPECT_EQ(attend_error(p), 0.0) << "zero v, keys " << keys;
    p.v = constant.view();
    EXPECT_LT(attend_error(p), bound * 0.5) << "constant v, keys " << keys;
    p.v = equal.view();
    EXPECT_LT(attend_error(p), bound * 0.5) << "equal rows of v, keys " << keys;
  }
}

TEST_P(EveryRecipe, TakesTinyAndHugeScales) {
  for (const float scale : {1e-12f, 1e-3f, 30.0f}) {
    Tensor q(1, 20, 1, 128), k(1, 300, 1, 128), v(1, 300, 1, 128), out(1, 20, 1, 128);
    q.fill_normal(41, scale);
    k.fill_normal(42, 1.0f);
    v.fill_normal(43, scale, scale);
    const double error = attend_error(params(q, k, v, out, name()));
    EXPECT_TRUE(std::isfinite(error));
    if (scale < 1.0f) {
      EXPECT_LT(error, error_bound(GetParam())) << "scale " << scale;
    }
  }
}

TEST_P(EveryRecipe, DoesNotDependOnTheNumberOfThreads) {
  Tensor q(1, 300, 4, 64), k(1, 1300, 2, 64), v(1, 1300, 2, 64), one(1, 300, 4, 64), three(1, 300, 4, 64);
  q.fill_normal(51);
  k.fill_normal(52);
  v.fill_normal(53);
  auto p = params(q, k, v, one, name());
  p.num_threads = 1;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  p.out = three.view();
  p.num_threads = 3;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  EXPECT_EQ(one.bytes(), three.bytes());
}

TEST_P(EveryRecipe, IsRightOnEveryInstructionSet) {
  Tensor q(1, 33, 1, 64), k(1, 300, 1, 64), v(1, 300, 1, 64), out(1, 33, 1, 64);
  q.fill_normal(55);
  k.fill_normal(56);
  v.fill_normal(57);
  on_every_target([&](int64_t) { EXPECT_LT(attend_error(params(q, k, v, out, name())), error_bound(GetParam())); });
}

// Scores of millions of octaves: softmax picks its maximum, and nothing may vanish beside it.
TEST_P(EveryRecipe, StaysFiniteForHugeScores) {
  for (const float scale : {4500.0f, 3e4f, 3e6f}) {
    Tensor q(1, 40, 1, 128), k(1, 300, 1, 128), v(1, 300, 1, 128), out(1, 40, 1, 128);
    q.fill_normal(41, scale);
    k.fill_normal(42, scale);
    v.fill_normal(43);
    ASSERT_EQ(attend(params(q, k, v, out, name())).code, VCATTN_OK);
    for (int64_t i = 0; i < 40; ++i) {
      for (const float x : out.row(0, i, 0)) ASSERT_TRUE(std::fabs(x) < 6.0f) << "scale " << scale << " row " << i;
    }
  }
}

TEST(Attention, SaysWhereScoresLeaveFp32) {
  Tensor q(1, 130, 2, 64), k(1, 20, 2, 64), v(1, 20, 2, 64), out(1, 130, 2, 64);
  q.fill_normal(1);
  k.fill_normal(2, 1e4f);
  v.fill_normal(3);
  q.set(0, 129, 1, std::vector<float>(64, 3e38f));
  for (const char* name : {"accurate", "exact", "vsmooth8", "fp32"}) {
    const Outcome outcome = attend(params(q, k, v, out, name));
    EXPECT_EQ(outcome.code, VCATTN_OVERFLOW) << name;
    EXPECT_EQ(outcome.message, "scores leave the range of FP32 at batch 0, query 129, head 1");
  }
}

TEST_P(EveryRecipe, TakesKeysNearTheLargestBf16) {
  Tensor q(1, 4, 1, 128), k(1, 40, 1, 128), v(1, 40, 1, 128), out(1, 4, 1, 128);
  q.fill_normal(44, 1e-37f);
  k.fill([](int64_t, int64_t s, int64_t, int64_t d) { return (s + d) % 3 == 0 ? 3e37f : 2.9e37f; });
  v.fill_normal(45);
  EXPECT_LT(attend_error(params(q, k, v, out, name())), error_bound(GetParam()) * 1.5);
}

TEST_P(EveryRecipe, HonoursAKeyMask) {
  Tensor q(2, 9, 2, 64), k(2, 200, 2, 64), v(2, 200, 2, 64), out(2, 9, 2, 64);
  q.fill_normal(61);
  k.fill_normal(62);
  v.fill_normal(63);
  std::vector<uint8_t> mask(400);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 != 0 && i != 205 ? 1 : 0;
  auto p = params(q, k, v, out, name());
  p.key_mask = mask.data();
  p.key_mask_stride[0] = 200;
  p.key_mask_stride[1] = 1;
  EXPECT_LT(attend_error(p), error_bound(GetParam()));
  // What is masked out must not matter at all, not even when it is not finite.
  const auto before = out.bytes();
  std::vector<float> poison(64, std::numeric_limits<float>::quiet_NaN());
  k.set(0, 0, 0, poison);
  v.set(1, 5, 1, poison);
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  EXPECT_EQ(before, out.bytes());
}

INSTANTIATE_TEST_SUITE_P(Recipes, EveryRecipe, testing::ValuesIn(recipe_names()),
                         [](const testing::TestParamInfo<std::string>& recipe_name) { return recipe_name.param; });

// ---- masks and segments --------------------------------------------------------------------------------------------

TEST(Attention, GivesZeroAndMinusInfinityWhereNoKeyIsAdmitted) {
  Tensor q(2, 3, 1, 64), k(2, 10, 1, 64), v(2, 10, 1, 64), out(2, 3, 1, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  std::vector<uint8_t> mask(20, 0);
  std::fill(mask.begin(), mask.begin() + 10, 1);
  std::vector<float> lse(6);
  auto p = params(q, k, v, out);
  p.key_mask = mask.data();
  p.key_mask_stride[0] = 10;
  p.key_mask_stride[1] = 1;
  p.lse = lse.data();
  p.lse_stride[0] = 3;
  p.lse_stride[1] = p.lse_stride[2] = 1;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::isfinite(lse[i]));
    EXPECT_EQ(lse[3 + i], -std::numeric_limits<float>::infinity());
    EXPECT_EQ(out.row(1, i, 0), std::vector<float>(64, 0.0f));
  }
}

TEST(Attention, PackedSegmentsEqualSeparateCalls) {
  for (const std::vector<int64_t>& lengths_q : {std::vector<int64_t>{0, 1, 0, 1}, {0, 1, 0, 129}, {200, 3, 0, 64}}) {
    const std::vector<int64_t> lengths_kv = {5, 130, 0, 77};
    std::vector<int64_t> cu_q = {0}, cu_kv = {0};
    for (const int64_t n : lengths_q) cu_q.push_back(cu_q.back() + n);
    for (const int64_t n : lengths_kv) cu_kv.push_back(cu_kv.back() + n);
    Tensor q(1, cu_q.back(), 2, 64), k(1, cu_kv.back(), 2, 64), v(1, cu_kv.back(), 2, 64), out(1, cu_q.back(), 2, 64);
    q.fill_normal(71);
    k.fill_normal(72);
    v.fill_normal(73);
    auto p = params(q, k, v, out);
    p.cu_seqlens_q = cu_q.data();
    p.cu_seqlens_kv = cu_kv.data();
    p.num_segments = 4;
    EXPECT_LT(attend_error(p), 0.09);
    for (int s = 0; s < 4; ++s) {
      if (lengths_q[s] == 0 || lengths_kv[s] == 0) continue;
      Tensor part(1, lengths_q[s], 2, 64);
      auto one = params(q, k, v, part);
      one.q.data = static_cast<float*>(one.q.data) + cu_q[s] * 128;
      one.k.data = static_cast<float*>(one.k.data) + cu_kv[s] * 128;
      one.v.data = static_cast<float*>(one.v.data) + cu_kv[s] * 128;
      one.q.shape[1] = lengths_q[s];
      one.k.shape[1] = one.v.shape[1] = lengths_kv[s];
      ASSERT_EQ(attend(one).code, VCATTN_OK);
      for (int64_t i = 0; i < lengths_q[s]; ++i) {
        for (int64_t h = 0; h < 2; ++h) {
          ASSERT_EQ(part.row(0, i, h), out.row(0, cu_q[s] + i, h)) << "segment " << s << " row " << i;
        }
      }
    }
  }
}

// ---- layouts and dtypes --------------------------------------------------------------------------------------------

TEST(Attention, ReadsAnyStridesAndDtypes) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    // A fused [batch, seqlen, 3, heads, dim] buffer, viewed with an offset of 3 elements.
    constexpr int64_t kSeq = 150, kHeads = 2, kDim = 64, kOffset = 3;
    Tensor fused(1, kSeq + 1, 3 * kHeads, kDim, dtype), dense_q(1, kSeq, kHeads, kDim, dtype);
    fused.fill_normal(81);
    const int64_t size = dtype == VCATTN_FP32 ? 4 : 2;
    Tensor out(1, kSeq, kHeads, kDim, dtype);
    auto p = params(dense_q, dense_q, dense_q, out);
    for (int part = 0; part < 3; ++part) {
      vcattn_tensor& t = part == 0 ? p.q : part == 1 ? p.k : p.v;
      t = fused.view();
      t.data = static_cast<std::byte*>(t.data) + (part * kHeads * kDim + kOffset) * size;
      t.shape[1] = kSeq;
      t.shape[2] = kHeads;
    }
    EXPECT_LT(attend_error(p), 0.09) << "dtype " << dtype;
    // The same values as [batch, heads, seqlen, dim] storage: the answer may not differ.
    Tensor q(1, kHeads, kSeq, kDim, dtype), k(1, kHeads, kSeq, kDim, dtype), v(1, kHeads, kSeq, kDim, dtype);
    Tensor swapped_out(1, kHeads, kSeq, kDim, dtype);
    for (auto [to, from] : {std::pair{&q, &p.q}, std::pair{&k, &p.k}, std::pair{&v, &p.v}}) {
      std::vector<float> row(kDim);
      for (int64_t s = 0; s < kSeq; ++s) {
        for (int64_t h = 0; h < kHeads; ++h) {
          load_row(*from, 0, s, h, row.data());
          to->set(0, h, s, row);
        }
      }
    }
    auto swapped = params(q, k, v, swapped_out);
    for (vcattn_tensor* t : {&swapped.q, &swapped.k, &swapped.v, &swapped.out}) {
      std::swap(t->shape[1], t->shape[2]);
      std::swap(t->stride[1], t->stride[2]);
    }
    ASSERT_EQ(attend(swapped).code, VCATTN_OK);
    for (int64_t s = 0; s < kSeq; ++s) {
      for (int64_t h = 0; h < kHeads; ++h) ASSERT_EQ(out.row(0, s, h), swapped_out.row(0, h, s));
    }
  }
}

TEST(Attention, TakesBroadcastKeysAndValues) {
  Tensor q(2, 20, 4, 64), k(1, 1057, 1, 64), v(1, 1057, 1, 64), out(2, 20, 4, 64);
  q.fill_normal(91);
  k.fill_normal(92);
  v.fill_normal(93);
  auto p = params(q, k, v, out);
  for (vcattn_tensor* t : {&p.k, &p.v}) {
    t->shape[0] = 2;
    t->shape[2] = 4;
    t->stride[0] = t->stride[2] = 0;
  }
  EXPECT_LT(attend_error(p), 0.09);
}

TEST(Attention, MixesDtypes) {
  Tensor q(1, 30, 1, 64, VCATTN_BF16), k(1, 90, 1, 64, VCATTN_FP16), v(1, 90, 1, 64), out(1, 30, 1, 64, VCATTN_BF16);
  q.fill_normal(101);
  k.fill_normal(102);
  v.fill_normal(103);
  EXPECT_LT(attend_error(params(q, k, v, out)), 0.09);
}

TEST(Attention, NeverModifiesItsInputs) {
  Tensor q(1, 30, 1, 64), k(1, 90, 1, 64), v(1, 90, 1, 64), out(1, 30, 1, 64);
  q.fill_normal(111);
  k.fill_normal(112);
  v.fill_normal(113);
  const auto before_q = q.bytes(), before_k = k.bytes(), before_v = v.bytes();
  ASSERT_EQ(attend(params(q, k, v, out)).code, VCATTN_OK);
  EXPECT_EQ(before_q, q.bytes());
  EXPECT_EQ(before_k, k.bytes());
  EXPECT_EQ(before_v, v.bytes());
}

// ---- order of the keys ---------------------------------------------------------------------------------------------

TEST(Attention, PermutingKeysAndValuesTogetherChangesTheExactPathByRoundingOnly) {
  Tensor q(1, 60, 2, 64), k(1, 500, 2, 64), v(1, 500, 2, 64), first(1, 60, 2, 64), second(1, 60, 2, 64);
  q.fill_normal(121);
  k.fill_normal(122);
  v.fill_normal(123);
  auto p = params(q, k, v, first, "fp32");
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  std::vector<int32_t> permutation(1000);
  for (int head = 0; head < 2; ++head) {
    for (int i = 0; i < 500; ++i) permutation[head * 500 + i] = (i * 77 + 13 * head) % 500;
  }
  p.permutation = permutation.data();
  p.out = second.view();
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  double difference = 0.0;
  for (int64_t i = 0; i < 60; ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      const auto a = first.row(0, i, h), b = second.row(0, i, h);
      for (int d = 0; d < 64; ++d) difference = std::max(difference, std::fabs(double{a[d]} - b[d]));
    }
  }
  EXPECT_LT(difference, 1e-6);
  EXPECT_NE(first.bytes(), second.bytes()) << "the permutation was not used";
}

TEST(Attention, RefusesAPermutationThatIsNone) {
  Tensor q(1, 4, 1, 64), k(1, 5, 1, 64), v(1, 5, 1, 64), out(1, 4, 1, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  auto p = params(q, k, v, out);
  std::vector<int32_t> permutation = {0, 1, 2, 2, 4};
  p.permutation = permutation.data();
  EXPECT_EQ(attend(p).message, "permutation: sequence 0, head 0, position 3 holds 2, which is there twice");
  permutation[3] = 5;
  EXPECT_EQ(attend(p).message, "permutation: sequence 0, head 0, position 3 holds 5, which is outside 0..4");
  const std::vector<uint8_t> mask = {1, 1, 1, 0, 1};
  p.key_mask = mask.data();
  p.key_mask_stride[1] = 1;
  permutation[3] = 3;
  EXPECT_EQ(attend(p).message,
            "permutation: sequence 0, head 0, position 3 holds 3, which is not admitted by key_mask");
  permutation = {4, 0, 2, 1, -1};
  EXPECT_EQ(attend(p).code, VCATTN_OK);
}

TEST(Attention, AGroupedPermutationEqualsGroupingInTheCall) {
  Tensor q(1, 20, 2, 64), k(1, 700, 2, 64), v(1, 700, 2, 64), inside(1, 20, 2, 64), outside(1, 20, 2, 64);
  q.fill_normal(131);
  k.fill_normal(132);
  v.fill_normal(133);
  std::vector<uint8_t> mask(700, 1);
  mask[3] = mask[699] = 0;
  auto p = params(q, k, v, inside);
  p.key_mask = mask.data();
  p.key_mask_stride[1] = 1;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  size_t bytes;
  ASSERT_EQ(vcattn_group_workspace_size(&p, &bytes, nullptr), VCATTN_OK);
  std::vector<std::byte> memory(bytes + 256);
  void* workspace = memory.data();
  size_t space = memory.size();
  ASSERT_NE(std::align(256, bytes, workspace, space), nullptr);
  std::vector<int32_t> permutation(1400);
  std::vector<float> centroids(2 * 64 * 64);
  ASSERT_EQ(vcattn_group(&p, 0, centroids.data(), permutation.data(), workspace, bytes, nullptr), VCATTN_OK);
  EXPECT_EQ(permutation[698], -1);
  EXPECT_EQ(permutation[699], -1);
  p.permutation = permutation.data();
  p.out = outside.view();
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  EXPECT_EQ(inside.bytes(), outside.bytes());
  // A warm start from these centroids is accepted and gives a permutation again.
  ASSERT_EQ(vcattn_group(&p, 1, centroids.data(), permutation.data(), workspace, bytes, nullptr), VCATTN_OK);
  EXPECT_EQ(attend(p).code, VCATTN_OK);
}

// What the grid leaves out stands last: one order from the admitted video alone, whatever the text holds.
TEST(Attention, TextStaysOutOfTheVideosOrder) {
  constexpr int64_t kBatch = 2, kTokens = 700, kHeads = 2, kClusters = 20;
  for (const int64_t first : {int64_t{0}, int64_t{61}}) {
    const vcattn_video_grid grid = {first, 2, 10, 30};
    const auto is_video = [&](int64_t t) { return t >= first && t < first + 600; };
    Tensor v(kBatch, kTokens, kHeads, 64), q(kBatch, 20, kHeads, 64), out(kBatch, 20, kHeads, 64);
    q.fill_normal(1);
    v.fill_normal(2);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t b = 0; b < kBatch && !is_video(t); ++b) {
        for (int64_t h = 0; h < kHeads; ++h) v.set(b, t, h, std::vector<float>(64, t % 2 == 0 ? 3e3f : -2e3f));
      }
    }
    // Entry 0 has gaps in video and text; entry 1 has text alone.
    std::vector<uint8_t> mask(kBatch * kTokens);
    std::vector<int64_t> video, text[kBatch];
    for (int64_t t = 0; t < kTokens; ++t) {
      mask[t] = t % 5 != 2;
      mask[kTokens + t] = !is_video(t);
      if (is_video(t) && mask[t] != 0) video.push_back(t);
      for (int64_t b = 0; b < kBatch; ++b) {
        if (!is_video(t) && mask[b * kTokens + t] != 0) text[b].push_back(t);
      }
    }
    const auto count = static_cast<int64_t>(video.size());
    Tensor alone(1, count, kHeads, 64);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t h = 0; h < kHeads; ++h) alone.set(0, i, h, v.row(0, video[i], h));
    }
    const auto grouped = [&](vcattn_attention_params& p, std::vector<float>& centroids) {
      p.recipe.grouping.clusters = kClusters;
      std::vector<int32_t> permutation(p.v.shape[0] * kHeads * p.v.shape[1]);
      centroids.resize(p.v.shape[0] * kHeads * kClusters * 64);
      size_t bytes;
      EXPECT_EQ(vcattn_group_workspace_size(&p, &bytes, nullptr), VCATTN_OK);
      std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(256, (bytes + 255) / 256 * 256),
                                                         &std::free);
      EXPECT_EQ(vcattn_group(&p, 0, centroids.data(), permutation.data(), memory.get(), bytes, nullptr), VCATTN_OK);
      return permutation;
    };
    for (const int32_t v_order : {VCATTN_ORDER_KMEANS, VCATTN_ORDER_BALANCED, VCATTN_ORDER_CHAIN}) {
      std::vector<float> centroids, alone_centroids;
      auto p = params(q, v, v, out), just_video = params(q, alone, alone, out);
      p.recipe.v_order = just_video.recipe.v_order = v_order;
      p.grid = grid;
      p.key_mask = mask.data();
      p.key_mask_stride[0] = kTokens;
      p.key_mask_stride[1] = 1;
      const std::vector<int32_t> permutation = grouped(p, centroids);
      const std::vector<int32_t> expected_video = grouped(just_video, alone_centroids);
      alone_centroids.resize(centroids.size(), 0.0f);  // entry 1 has no video
      EXPECT_EQ(centroids, alone_centroids) << "order " << v_order << ", first " << first;
      for (int64_t b = 0; b < kBatch; ++b) {
        for (int64_t h = 0; h < kHeads; ++h) {
          std::vector<int32_t> expected;
          for (int64_t i = 0; i < count && b == 0; ++i) {
            expected.push_back(static_cast<int32_t>(video[expected_video[h * count + i]]));
          }
          expected.insert(expected.end(), text[b].begin(), text[b].end());
          expected.resize(kTokens, -1);
          const auto row = permutation.begin() + (b * kHeads + h) * kTokens;
          EXPECT_EQ(std::vector<int32_t>(row, row + kTokens), expected)
              << "order " << v_order << ", first " << first << ", batch " << b << ", head " << h;
        }
      }
      // In the call the order is the same.
      ASSERT_EQ(attend(p).code, VCATTN_OK);
      const auto inside = out.bytes();
      p.permutation = permutation.data();
      ASSERT_EQ(attend(p).code, VCATTN_OK);
      EXPECT_EQ(out.bytes(), inside) << "order " << v_order << ", first " << first;
    }
  }
}

// ---- what is not finite --------------------------------------------------------------------------------------------

TEST(Attention, SaysWhereAnInputIsNotFinite) {
  Tensor q(1, 4, 2, 64), k(1, 5, 2, 64), v(1, 5, 2, 64), out(1, 4, 2, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  const auto untouched = out.bytes();
  const auto p = params(q, k, v, out);
  auto row = v.row(0, 3, 1);
  row[17] = std::numeric_limits<float>::quiet_NaN();
  v.set(0, 3, 1, row);
  Outcome outcome = attend(p);
  EXPECT_EQ(outcome.code, VCATTN_NONFINITE_INPUT);
  EXPECT_EQ(outcome.message, "v: NaN at batch 0, token 3, head 1, channel 17");
  row = q.row(0, 0, 0);
  row[2] = -std::numeric_limits<float>::infinity();
  q.set(0, 0, 0, row);
  outcome = attend(p);
  EXPECT_EQ(outcome.message, "q: infinity at batch 0, token 0, head 0, channel 2");
  EXPECT_EQ(out.bytes(), untouched);
}

TEST(Attention, PassesNonFiniteInputsThroughWhenAllowed) {
  Tensor q(1, 4, 2, 64), k(1, 300, 2, 64), v(1, 300, 2, 64), out(1, 4, 2, 64), clean(1, 4, 2, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  auto p = params(q, k, v, clean);
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  p.out = out.view();
  p.flags = VCATTN_ALLOW_NONFINITE;
  auto row = q.row(0, 2, 0);
  row[5] = std::numeric_limits<float>::infinity();
  q.set(0, 2, 0, row);
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      const auto got = out.row(0, i, h);
      if (i == 2 && h == 0) {
        for (const float x : got) EXPECT_TRUE(std::isnan(x));
      } else {
        EXPECT_EQ(got, clean.row(0, i, h)) << "row " << i << " head " << h;
      }
    }
  }
  row = v.row(0, 200, 1);
  row[9] = std::numeric_limits<float>::quiet_NaN();
  v.set(0, 200, 1, row);
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  for (int64_t i = 0; i < 4; ++i) {
    const auto got = out.row(0, i, 1);
    for (int d = 0; d < 64; ++d) EXPECT_EQ(std::isnan(got[d]), d == 9) << "row " << i << " channel " << d;
  }
}

TEST(Attention, ANonFiniteKeyPoisonsItsHeadAndLse) {
  Tensor q(1, 3, 2, 64), k(1, 30, 2, 64), v(1, 30, 2, 64), out(1, 3, 2, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  auto row = k.row(0, 29, 1);
  row[0] = std::numeric_limits<float>::quiet_NaN();
  k.set(0, 29, 1, row);
  std::vector<float> lse(6);
  auto p = params(q, k, v, out);
  p.flags = VCATTN_ALLOW_NONFINITE;
  p.lse = lse.data();
  p.lse_stride[0] = 6;
  p.lse_stride[1] = 2;
  p.lse_stride[2] = 1;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_EQ(std::isnan(lse[i * 2 + h]), h == 1);
      for (const float x : out.row(0, i, h)) EXPECT_EQ(std::isnan(x), h == 1);
    }
  }
}

TEST(Attention, Fp16ScoresFitAtEveryHeadDim) {
  for (const int64_t dim : {128, 256}) {
    Tensor q(1, 2, 1, dim), k(1, 4, 1, dim), v(1, 4, 1, dim), out(1, 2, 1, dim);
    // After rotation every channel of both holds the operand's limit.
    q.fill([](int64_t, int64_t, int64_t, int64_t d) { return d == 0 ? 256.0f : 0.0f; });
    k.fill([](int64_t, int64_t s, int64_t, int64_t d) { return d == 0 ? (s % 2 == 0 ? 256.0f : -256.0f) : 0.0f; });
    v.fill_normal(3);
    EXPECT_LT(attend_error(params(q, k, v, out, "fast")), 0.09) << "head_dim " << dim;
  }
}

TEST(Attention, WarmGroupingMeetsEmptySegmentsAndOtherLengths) {
  Tensor v(1, 300, 1, 64);
  v.fill_normal(3);
  auto p = params(v, v, v, v);
  std::vector<int64_t> cu = {0, 0, 300};
  p.cu_seqlens_q = p.cu_seqlens_kv = cu.data();
  p.num_segments = 2;
  std::vector<float> centroids(2 * 64 * 64, std::numeric_limits<float>::quiet_NaN());
  std::vector<int32_t> permutation(300);
  for (const int64_t cut : {0, 20, 290, 300}) {
    cu[1] = cut;
    size_t bytes;
    ASSERT_EQ(vcattn_group_workspace_size(&p, &bytes, nullptr), VCATTN_OK);
    std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(256, (bytes + 255) / 256 * 256), &std::free);
    ASSERT_EQ(vcattn_group(&p, cut > 0 ? 1 : 0, centroids.data(), permutation.data(), memory.get(), bytes, nullptr),
              VCATTN_OK);
    for (const float x : centroids) ASSERT_TRUE(std::isfinite(x)) << "cut " << cut;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, int64_t{300}}}) {
      std::vector<int32_t> sorted(permutation.begin() + begin, permutation.begin() + end);
      std::sort(sorted.begin(), sorted.end());
      for (size_t i = 0; i < sorted.size(); ++i) ASSERT_EQ(sorted[i], static_cast<int32_t>(i)) << "cut " << cut;
    }
  }
}

// ---- accumulation models -------------------------------------------------------------------------------------------

TEST(Attention, Fp64AccumulationAgreesWithFp32) {
  Tensor q(1, 140, 1, 128), k(1, 700, 1, 128), v(1, 700, 1, 128), out(1, 140, 1, 128);
  q.fill_normal(141);
  k.fill_normal(142);
  v.fill_normal(143, 1.0f, 1.0f);
  auto p = params(q, k, v, out, "fp32");
  p.recipe.qk_accumulate = p.recipe.pv_accumulate = VCATTN_ACC_FP64;
  EXPECT_LT(attend_error(p), 1e-6);
  p = params(q, k, v, out);
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  const auto fp32 = out.row(0, 100, 0);
  p.recipe.qk_accumulate = p.recipe.pv_accumulate = VCATTN_ACC_FP64;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  const auto fp64 = out.row(0, 100, 0);
  for (int d = 0; d < 128; ++d) EXPECT_NEAR(fp32[d], fp64[d], 2e-6);
}

// V = 1 over many keys: truncation in the FP8 accumulator shrinks the output unless it is promoted often.
TEST(Attention, HopperAccumulationLosesLengthUnlessPromoted) {
  constexpr int64_t kKeys = 32768;
  Tensor q(1, 2, 1, 64), k(1, kKeys, 1, 64), v(1, kKeys, 1, 64), out(1, 2, 1, 64);
  q.fill_normal(151, 0.1f);
  k.fill_normal(152);
  v.fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0f; });
  auto p = params(q, k, v, out, "fp8_naive");
  p.recipe.pv_accumulate = VCATTN_ACC_HOPPER;
  const auto bias = [&](int32_t promote, int32_t row_sum) {
    p.recipe.promote_keys = promote;
    p.recipe.row_sum = row_sum;
    EXPECT_EQ(attend(p).code, VCATTN_OK);
    return out.row(0, 1, 0)[3] - 1.0;
  };
  const double never = bias(0, VCATTN_SUM_UNROUNDED), often = bias(128, VCATTN_SUM_UNROUNDED);
  EXPECT_LT(never, -0.05) << "truncation is toward zero";
  EXPECT_LT(std::fabs(often), 4e-3);
  // `accurate` restores the mean from row sums: nothing is left to lose.
  p = params(q, k, v, out);
  p.recipe.pv_accumulate = VCATTN_ACC_HOPPER;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  EXPECT_NEAR(out.row(0, 1, 0)[3], 1.0, 1e-5);
}

TEST(Attention, PromotionHappensWhereItIsAsked) {
  Tensor q(1, 8, 1, 64), k(1, 1000, 1, 64), v(1, 1000, 1, 64), out(1, 8, 1, 64);
  q.fill_normal(171);
  k.fill_normal(172);
  v.fill_normal(173, 1.0f, 1.0f);
  auto p = params(q, k, v, out, "fp8_naive");
  p.recipe.pv_accumulate = VCATTN_ACC_HOPPER;
  std::vector<double> errors;
  for (const int32_t keys : {32, 96, 128, 512, 0}) {
    p.recipe.promote_keys = keys;
    ASSERT_EQ(attend(p).code, VCATTN_OK);
    errors.push_back(relative_error(p));
    if (errors.size() > 1) {
      EXPECT_NE(errors.back(), errors[errors.size() - 2]) << keys;
    }
  }
  EXPECT_LT(errors.front(), errors.back());
}

// 256 keys under one maximum are one chain of instructions; each 128 by itself gives other bits.
TEST(Attention, HopperAccumulatesWhatAMaximumCovers) {
  constexpr int64_t kKeys = 512, kDim = 16;
  Tensor q(1, 1, 1, kDim), k(1, kKeys, 1, kDim), v(1, kKeys, 1, kDim), out(1, 1, 1, kDim);
  q.fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0f; });
  k.fill_normal(1);
  std::mt19937 random(2);
  // Values that are E4M3 codes at scale 1: the first row holds the largest.
  v.fill([&](int64_t, int64_t s, int64_t, int64_t) {
    return s == 0 ? 448.0f : decode_e4m3(static_cast<uint8_t>(random() % 0x7F + (random() % 2 << 7)));
  });
  for (const int32_t tile_keys : {128, 256}) {
    auto p = params(q, k, v, out, "exact");
    p.recipe.mean_rows = 0;
    p.recipe.v_order = VCATTN_ORDER_SEQUENCE;
    p.recipe.pv_accumulate = VCATTN_ACC_HOPPER;
    p.recipe.tile_keys = tile_keys;
    ASSERT_EQ(attend(p).code, VCATTN_OK);
    const std::vector<float> probabilities(tile_keys, 256.0f);  // of equal scores
    for (int64_t d = 0; d < kDim; ++d) {
      float sum = 0.0f;
      for (int64_t begin = 0; begin < kKeys; begin += tile_keys) {
        std::vector<float> column;
        for (int64_t s = begin; s < begin + tile_keys; ++s) column.push_back(v.row(0, s, 0)[d]);
        sum += hopper_fp8_dot(probabilities, column, 0);
      }
      ASSERT_EQ(out.row(0, 0, 0)[d], static_cast<float>(sum / (256.0 * kKeys))) << tile_keys << " channel " << d;
    }
  }
}

// Channel t of V marks the keys of tile t, so that the output is the mass of each tile. Tiles 2j and 2j + 1 of a
// sequence share a maximum: 19 octaves below it a key is zero.
TEST(Attention, TwoNeighbouringTilesShareAMaximum) {
  constexpr int64_t kTiles = 5, kKeys = 4 * kBlockN + 3;
  const float octaves[kTiles] = {0.0f, -19.0f, -19.0f, -38.0f, -30.0f};
  Tensor q(1, 2, 1, 8), k(1, kKeys, 1, 8), v(1, kKeys, 1, 8), out(1, 2, 1, 8);
  q.fill([](int64_t, int64_t, int64_t, int64_t d) { return d == 0 ? 1.0f : 0.0f; });
  k.fill([&](int64_t, int64_t s, int64_t, int64_t d) { return d == 0 ? octaves[s / kBlockN] : 0.0f; });
  v.fill([](int64_t, int64_t s, int64_t, int64_t d) { return s / kBlockN == d ? 1.0f : 0.0f; });
  for (const char* name : {"accurate", "exact"}) {
    for (const vcattn_accumulate accumulate : {VCATTN_ACC_FP32, VCATTN_ACC_FP64}) {
      auto p = params(q, k, v, out, name);
      p.softmax_scale = kLn2;
      p.recipe.qk_format = p.recipe.v_format = VCATTN_FORMAT_FP32;
      p.recipe.k_centred = p.recipe.qk_hadamard = 0;
      p.recipe.mean_rows = 0;
      p.recipe.p_phases = 1;
      p.recipe.v_order = VCATTN_ORDER_SEQUENCE;
      p.recipe.pv_accumulate = accumulate;
      for (const int32_t tile_keys : {128, 256}) {
        p.recipe.tile_keys = tile_keys;
        ASSERT_EQ(attend(p).code, VCATTN_OK);
        for (int64_t t = 0; t < kTiles; ++t) {
          const bool kept = tile_keys == 128 || t % 2 == 0;
          const double keys = t == 4 ? 3.0 : kBlockN;
          const double mass = kept ? std::exp2(octaves[t]) * keys / kBlockN : 0.0;
          EXPECT_NEAR(out.row(0, 1, 0)[t], mass, 1e-4 * mass) << name << " " << tile_keys << " tile " << t;
        }
      }
    }
  }
}

TEST(Attention, HopperAccumulationIsCloseToFp32WhenPromotedEveryTile) {
  Tensor q(1, 200, 1, 128), k(1, 900, 1, 128), v(1, 900, 1, 128), out(1, 200, 1, 128);
  q.fill_normal(161);
  k.fill_normal(162);
  v.fill_normal(163);
  for (const char* name : {"accurate", "exact", "vsmooth8_expcast", "fp8_naive"}) {
    auto p = params(q, k, v, out, name);
    const double fp32 = attend_error(p);
    p.recipe.pv_accumulate = VCATTN_ACC_HOPPER;
    p.recipe.promote_keys = p.recipe.tile_keys;
    EXPECT_NEAR(attend_error(p), fp32, 0.05 * fp32 + 1e-4) << name;
  }
}

}  // namespace
}  // namespace vcattn::test
