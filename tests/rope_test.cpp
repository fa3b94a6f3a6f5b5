// Rotary position embedding in the call against rows rotated before it: the same bits on the CPU.
#include <limits>

#include "rope_tables.h"

namespace vcattn::test {
namespace {

// Inputs with tables per token, which each test bends to its case.
struct Case {
  explicit Case(int64_t batch = 2, int64_t seqlen_q = 150, int64_t seqlen_kv = 200, int64_t heads = 4,
                int64_t heads_kv = 2, int64_t dim = 64, vcattn_dtype dtype = VCATTN_BF16)
      : q(batch, seqlen_q, heads, dim, dtype),
        k(batch, seqlen_kv, heads_kv, dim, dtype),
        v(batch, seqlen_kv, heads_kv, dim, dtype),
        out(batch, seqlen_q, heads, dim),
        expected(batch, seqlen_q, heads, dim),
        lse(static_cast<size_t>(batch * seqlen_q * heads)),
        expected_lse(lse.size()) {
    q.fill_normal(1);
    k.fill_normal(2, 1.0f, 0.5f);
    v.fill_normal(3);
  }

  vcattn_attention_params call(const char* recipe = "accurate") {
    vcattn_attention_params p = params(q, k, v, out, recipe);
    set_lse(p, lse);
    return p;
  }
  void set_lse(vcattn_attention_params& p, std::vector<float>& to) const {
    p.lse = to.data();
    p.lse_stride[0] = p.q.shape[1] * p.q.shape[2];
    p.lse_stride[1] = p.q.shape[2];
    p.lse_stride[2] = 1;
  }

  // `p` has the ropes; the same call without them on rows that were rotated before gives the same bits.
  void expect_same(const vcattn_attention_params& p, const AngleOf& of_q, const AngleOf& of_k) {
    const auto pairing = [](const vcattn_rope& rope) { return static_cast<vcattn_rope_pairing>(rope.pairing); };
    const Tensor q_rotated = rotated(q, pairing(p.rope_q), of_q), k_rotated = rotated(k, pairing(p.rope_k), of_k);
    vcattn_attention_params plain = p;
    plain.rope_q = plain.rope_k = {};
    plain.q = q_rotated.view();
    plain.k = k_rotated.view();
    plain.out = expected.view();
    set_lse(plain, expected_lse);
    const Outcome found = attend(p), wanted = attend(plain);
    ASSERT_EQ(found.code, VCATTN_OK) << found.message;
    ASSERT_EQ(wanted.code, VCATTN_OK) << wanted.message;
    for (size_t i = 0; i < lse.size(); ++i) ASSERT_EQ(lse[i], expected_lse[i]) << "lse[" << i << "]";
    const int64_t* shape = p.out.shape;
    for (int64_t b = 0; b < shape[0]; ++b) {
      for (int64_t s = 0; s < shape[1]; ++s) {
        for (int64_t h = 0; h < shape[2]; ++h) {
          const std::vector<float> have = out.row(b, s, h), want = expected.row(b, s, h);
          for (int64_t d = 0; d < shape[3]; ++d) {
            ASSERT_EQ(have[d], want[d]) << "out[" << b << ", " << s << ", " << h << ", " << d << "]";
          }
        }
      }
    }
    // The oracle, too, rotates by itself.
    EXPECT_EQ(relative_error(p), relative_error(plain));
  }

  Tensor q, k, v, out, expected;
  std::vector<float> lse, expected_lse;
};

TEST(Rope, PerTokenWithEachPairingRecipeAndType) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    Case c(2, 150, 200, 4, 2, 64, dtype);
    const TokenTables of_q(150, 32, 10), of_k(200, 32, 20);
    for (const vcattn_rope_pairing pairing : {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_HALF_SPLIT}) {
      for (const char* recipe : {"accurate", "fast", "vsmooth8", "sage3", "bf16", "fp32"}) {
        SCOPED_TRACE(std::string(recipe) + " pairing " + std::to_string(pairing) + " dtype " + std::to_string(dtype));
        vcattn_attention_params p = c.call(recipe);
        p.rope_q = of_q.rope(pairing);
        p.rope_k = of_k.rope(pairing);
        c.expect_same(p, of_q.angles(), of_k.angles());
      }
    }
  }
}

TEST(Rope, HeadDimsThatArePadded) {
  for (const int64_t dim : {2, 6, 40, 96, 128, 256}) {
    for (const vcattn_rope_pairing pairing : {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_HALF_SPLIT}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + " pairing " + std::to_string(pairing));
      Case c(1, 70, 90, 1, 1, dim);
      const TokenTables tables(90, dim / 2, 30);
      vcattn_attention_params p = c.call();
      p.rope_q = p.rope_k = tables.rope(pairing);
      c.expect_same(p, tables.angles(), tables.angles());
    }
  }
}

// Strides over all four axes; only q rotated, then only k.
TEST(Rope, TablesOfEachBatchAndHead) {
  Case c;
  const Table cos = random_table(2 * 150 * 4 * 32 * 2, 40), sin = random_table(2 * 150 * 4 * 32 * 2, 41);
  const auto at = [](int64_t b, int64_t s, int64_t h, int64_t pair) {
    return b * 150 * 64 + s * 64 + h * 2 * 150 * 64 + pair * 2;
  };
  const AngleOf angles = [&](int64_t b, int64_t s, int64_t h, int64_t pair) {
    return Angle{cos[at(b, s, h, pair)], sin[at(b, s, h, pair)]};
  };
  const AngleOf none = [](int64_t, int64_t, int64_t, int64_t) { return Angle{1.0f, 0.0f}; };
  vcattn_attention_params p = c.call();
  p.rope_q = {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_PER_TOKEN, {cos.data()}, {sin.data()}, {9600, 64, 19200, 2}, {}};
  c.expect_same(p, angles, none);

  Case d(2, 200, 150, 4, 4);
  p = d.call("exact");
  p.rope_k = {VCATTN_ROPE_HALF_SPLIT, VCATTN_ROPE_PER_TOKEN, {cos.data()}, {sin.data()}, {9600, 64, 19200, 2}, {}};
  d.expect_same(p, none, angles);
}

TEST(Rope, PerAxisWithTextAroundTheVideo) {
  for (const std::array<int64_t, 3> pairs : {std::array<int64_t, 3>{8, 12, 12}, {32, 0, 0}, {0, 15, 17}, {10, 22, 0}}) {
    for (const vcattn_rope_pairing pairing : {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_HALF_SPLIT}) {
      for (const int64_t first : {0, 20}) {
        SCOPED_TRACE("first token " + std::to_string(first) + " pairing " + std::to_string(pairing) +
                     " frames' pairs " + std::to_string(pairs[0]));
        Case c(2, 180, 180);
        const AxisTables tables({first, 3, 6, 8}, pairs);
        vcattn_attention_params p = c.call();
        p.grid = tables.grid;
        p.rope_q = p.rope_k = tables.rope(pairing);
        c.expect_same(p, tables.angles(), tables.angles());
      }
    }
  }
}

// The mask keeps a key out with its row of the tables: neither is read.
TEST(Rope, KeyMask) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Case c;
  TokenTables of_q(150, 32, 60), of_k(200, 32, 70);
  std::vector<uint8_t> mask(200);
  for (int64_t token = 0; token < 200; ++token) {
    mask[token] = token % 3 != 1;
    if (mask[token] == 0) std::fill_n(of_k.cos.begin() + token * 32, 32, kNan);
  }
  vcattn_attention_params p = c.call();
  p.key_mask = mask.data();
  p.key_mask_stride[1] = 1;
  p.rope_q = of_q.rope(VCATTN_ROPE_INTERLEAVED);
  p.rope_k = of_k.rope(VCATTN_ROPE_INTERLEAVED);
  c.expect_same(p, of_q.angles(), of_k.angles());
}

// A segment's tokens are looked up where they lie among all.
TEST(Rope, Segments) {
  Case c(1);
  const TokenTables of_q(150, 32, 80), of_k(200, 32, 90);
  const std::vector<int64_t> cu_q = {0, 70, 70, 150}, cu_kv = {0, 30, 60, 200};
  vcattn_attention_params p = c.call();
  p.cu_seqlens_q = cu_q.data();
  p.cu_seqlens_kv = cu_kv.data();
  p.num_segments = 3;
  p.rope_q = of_q.rope(VCATTN_ROPE_HALF_SPLIT);
  p.rope_k = of_k.rope(VCATTN_ROPE_HALF_SPLIT);
  c.expect_same(p, of_q.angles(), of_k.angles());
}

// The angle does what an angle should: scores depend on distances alone.
TEST(Rope, ScoresDependOnDistance) {
  constexpr int64_t kHalf = 32, kTokens = 200, kShift = 17;
  Case c(1, 150, 150);
  Table cos(kTokens * kHalf), sin(kTokens * kHalf);
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t pair = 0; pair < kHalf; ++pair) {
      const double angle = static_cast<double>(token) * std::pow(1e4, -static_cast<double>(pair) / kHalf);
      cos[token * kHalf + pair] = static_cast<float>(std::cos(angle));
      sin[token * kHalf + pair] = static_cast<float>(std::sin(angle));
    }
  }
  std::vector<float> lse[2];
  for (const int shifted : {0, 1}) {
    vcattn_attention_params p = c.call("fp32");
    const int64_t from = shifted * kShift * kHalf;
    p.rope_q = p.rope_k = {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_PER_TOKEN, {cos.data() + from},
                           {sin.data() + from},     {0, kHalf, 0, 1},      {}};
    const Outcome outcome = attend(p);
    ASSERT_EQ(outcome.code, VCATTN_OK) << outcome.message;
    lse[shifted] = c.lse;
  }
  for (size_t i = 0; i < lse[0].size(); ++i) EXPECT_NEAR(lse[0][i], lse[1][i], 2e-5) << "lse[" << i << "]";
}

// ---- what is not finite
// ----------------------------------------------------------------------------------------------

TEST(Rope, WhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Case c(1, 10, 20, 2, 2, 64, VCATTN_FP32);
  TokenTables tables(20, 32, 100);
  tables.cos[7 * 32 + 3] = kInfinity;
  vcattn_attention_params p = c.call();
  p.rope_k = tables.rope(VCATTN_ROPE_INTERLEAVED);
  Outcome outcome = attend(p);
  EXPECT_EQ(outcome.code, VCATTN_NONFINITE_INPUT);
  EXPECT_EQ(outcome.message, "k: infinity at batch 0, token 7, head 0, channel 6, once rotated by rope");

  p.flags = VCATTN_ALLOW_NONFINITE;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  EXPECT_TRUE(std::isnan(c.out.row(0, 0, 0)[0]));

  p.rope_q = p.rope_k;
  p.rope_k = {};
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  EXPECT_TRUE(std::isnan(c.out.row(0, 7, 1)[0]));
  EXPECT_TRUE(std::isfinite(c.out.row(0, 6, 1)[0]));

  // What was given is named before what became of it.
  std::vector<float> row = c.q.row(0, 7, 0);
  row[1] = std::nanf("");
  c.q.set(0, 7, 0, row);
  p.flags = 0;
  EXPECT_EQ(attend(p).message, "q: NaN at batch 0, token 7, head 0, channel 1");
}

// ---- refusals
// --------------------------------------------------------------------------------------------------------

class RopeRefusal : public ::testing::Test {
 protected:
  RopeRefusal() { p_.grid = axes_.grid; }
  void expect(vcattn_code code, const std::string& text) {
    const Outcome outcome = attend(p_);
    EXPECT_EQ(outcome.code, code) << outcome.message;
    EXPECT_EQ(outcome.message, text);
  }
  Case c_{1, 150, 200};
  TokenTables tokens_{200, 32, 110};
  AxisTables axes_{{2, 3, 6, 8}, {8, 12, 12}};
  vcattn_attention_params p_ = c_.call();
  vcattn_rope per_token_ = tokens_.rope(VCATTN_ROPE_INTERLEAVED), per_axis_ = axes_.rope(VCATTN_ROPE_HALF_SPLIT);
};

TEST_F(RopeRefusal, Fields) {
  constexpr vcattn_code kInvalid = VCATTN_INVALID_ARGUMENT;
  p_.rope_q = per_token_;
  p_.rope_q.pairing = 3;
  expect(kInvalid, "rope_q: pairing is none (0), interleaved (1) or half-split (2); found 3");
  p_.rope_q = per_token_;
  p_.rope_q.tables = 2;
  expect(kInvalid, "rope_q: tables are per token (0) or per axis (1); found 2");
  p_.rope_q = per_token_;
  p_.rope_q.sin[0] = nullptr;
  expect(kInvalid, "rope_q: sin[0] is NULL");
  p_.rope_q = per_token_;
  p_.rope_q.cos[0] = reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(tokens_.cos.data()) + 2);
  expect(kInvalid, "rope_q: cos[0] is aligned to its element size of 4 bytes");
  p_.rope_q = per_token_;
  p_.rope_q.stride[1] = -32;
  expect(kInvalid, "rope_q: stride of token is not negative; found -32");
  p_.rope_q.stride[1] = std::numeric_limits<int64_t>::max() / 8;
  expect(kInvalid, "rope_q: shape times stride overflows 64 bits");
  p_.rope_q = {};
  p_.rope_k = per_token_;
  p_.rope_k.cos[0] = static_cast<const float*>(p_.out.data) + 5;
  expect(kInvalid, "rope_k: the memory of cos[0] must not overlap out or lse");
  p_.rope_k = per_token_;
  p_.rope_k.sin[0] = p_.lse;
  expect(kInvalid, "rope_k: the memory of sin[0] must not overlap out or lse");
}

TEST_F(RopeRefusal, TablesPerAxis) {
  constexpr vcattn_code kInvalid = VCATTN_INVALID_ARGUMENT;
  p_.rope_k = per_axis_;
  p_.rope_k.pairs[2] = 13;
  expect(kInvalid, "rope_k: pairs add up to head_dim / 2 = 32; found [8, 12, 13]");
  p_.rope_k.pairs[0] = -1;
  p_.rope_k.pairs[2] = 21;
  expect(kInvalid, "rope_k: pairs add up to head_dim / 2 = 32; found [-1, 12, 21]");
  p_.rope_k = per_axis_;
  p_.rope_k.sin[2] = nullptr;
  expect(kInvalid, "rope_k: sin[2] is NULL");
  p_.rope_k = per_axis_;
  p_.grid = {};
  expect(kInvalid, "rope_k per axis needs the video grid; found first_token 0, frames 0, height 0, width 0");
  // The grid lies among the tokens of each operand that is rotated by it.
  p_.grid = {10, 3, 6, 8};
  p_.rope_q = per_axis_;
  expect(kInvalid, "grid: 10 + 3 x 6 x 8 tokens exceed seqlen 150");
  p_.rope_q = {};
  EXPECT_EQ(attend(p_).code, VCATTN_OK);
  const std::vector<int64_t> cu_q = {0, 150}, cu_kv = {0, 200};
  p_.recipe = recipe("fp32");  // no order of the values would take the grid either
  p_.cu_seqlens_q = cu_q.data();
  p_.cu_seqlens_kv = cu_kv.data();
  p_.num_segments = 1;
  expect(VCATTN_UNSUPPORTED, "rope_k: with cu_seqlens the tables are per token; found tables per axis");
}

TEST(Rope, OddHeadDimIsRefused) {
  Case c(1, 5, 5, 1, 1, 7);
  const TokenTables tables(5, 3, 120);
  vcattn_attention_params p = c.call();
  p.rope_q = tables.rope(VCATTN_ROPE_INTERLEAVED);
  const Outcome outcome = attend(p);
  EXPECT_EQ(outcome.code, VCATTN_INVALID_ARGUMENT);
  EXPECT_EQ(outcome.message, "rope_q: head_dim is even; found 7");
}

}  // namespace
}  // namespace vcattn::test
