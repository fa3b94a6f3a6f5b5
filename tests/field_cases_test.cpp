// Reports from the field, each by its symptom, on the CPU back end. Each stands for a whole kind of fault. Cases of
// other layers (streams, compilation, hosts) belong to the layers that have them.
#include <limits>
#include <thread>

#include "support.h"

namespace vcattn::test {
namespace {

// Errors that a right answer by `accurate` may have on random tensors.
constexpr double kBound = 0.06;

std::vector<int64_t> spread_rows(int64_t tokens, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(i * tokens / count);
  return rows;
}

// "TMA stride over 2^31, huge temporary": B1 H56 S73,774.
TEST(FieldCase, HugeTemporary) {
  Tensor tiny(1, 1, 1, 128);
  auto p = params(tiny, tiny, tiny, tiny);
  int64_t address = int64_t{1} << 40;  // only described, never touched
  for (vcattn_tensor* t : {&p.q, &p.k, &p.v, &p.out}) {
    const int64_t shape[4] = {1, 73774, 56, 128}, stride[4] = {73774 * 56 * 128, 56 * 128, 128, 1};
    std::copy(shape, shape + 4, t->shape);
    std::copy(stride, stride + 4, t->stride);
    t->dtype = VCATTN_BF16;
    t->data = reinterpret_cast<void*>(address);
    address += int64_t{1} << 40;
  }
  p.num_threads = 2;
  size_t bytes = 0;
  vcattn_message message;
  ASSERT_EQ(vcattn_attention_workspace_size(&p, &bytes, &message), VCATTN_OK) << message.text;
  const double inputs = 3.0 * 2 * 73774 * 56 * 128;
  EXPECT_GT(bytes, inputs / 2) << "codes alone are half the bytes of BF16";
  EXPECT_LT(bytes, 0.60 * inputs);
}

// "overflow past 299,520 keys": Sq 256, Sk 299,521; two of the 56 heads, which only repeat.
TEST(FieldCase, ManyKeys) {
  constexpr int64_t kKeys = 299521;
  Tensor q(1, 256, 2, 64, VCATTN_BF16), k(1, kKeys, 2, 64, VCATTN_BF16), v(1, kKeys, 2, 64, VCATTN_BF16);
  Tensor out(1, 256, 2, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3, 1.0f, 1.0f);  // a common component, which errors of length would eat
  auto p = params(q, k, v, out, "exact");
  p.recipe.v_order = VCATTN_ORDER_SEQUENCE;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  const auto rows = spread_rows(256, 4);
  cpu::OracleRows oracle;
  ASSERT_EQ(cpu::oracle_attention(p, rows, oracle, nullptr), VCATTN_OK);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      const auto row = out.row(0, rows[i], h);
      for (int d = 0; d < 64; ++d) ASSERT_NEAR(row[d], oracle.out[(i * 2 + h) * 64 + d], 2e-3) << rows[i] << " " << d;
    }
  }
}

// "FP8 PV is noise on long clips": S in {99,999; 160,001; 200,001}, as a view of a fused QKV buffer.
TEST(FieldCase, LongClips) {
  for (const int64_t tokens : {99999, 200001}) {
    Tensor fused(1, tokens, 3, 64, VCATTN_BF16), out(1, 130, 1, 64);
    fused.fill_normal(static_cast<uint32_t>(tokens), 1.0f, 0.5f);
    auto p = params(fused, fused, fused, out);
    const auto part = [&](int index, int64_t rows) {
      vcattn_tensor t = fused.view();
      t.data = static_cast<std::byte*>(t.data) + index * 64 * 2;
      t.shape[1] = rows;
      t.shape[2] = 1;
      return t;
    };
    p.q = part(0, 130);
    p.k = part(1, tokens);
    p.v = part(2, tokens);
    p.recipe.v_order = VCATTN_ORDER_KMEANS;
    p.recipe.grouping.iterations = 1;
    ASSERT_EQ(attend(p).code, VCATTN_OK);
    const std::vector<int64_t> rows = {0, 129};
    cpu::OracleRows oracle;
    ASSERT_EQ(cpu::oracle_attention(p, rows, oracle, nullptr), VCATTN_OK);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto row = out.row(0, rows[i], 0);
      for (int d = 0; d < 64; ++d) ASSERT_NEAR(row[d], oracle.out[i * 64 + d], 2e-3) << tokens << " " << d;
    }
  }
}

// "mask silently ignored": what is not a key-padding mask cannot be expressed; the mask there is, is honoured (see
// EveryRecipe.HonoursAKeyMask). Broadcast over the batch it means the same for each entry.
TEST(FieldCase, MaskIsHonouredWhenBroadcast) {
  Tensor q(2, 5, 1, 64), k(2, 40, 1, 64), v(2, 40, 1, 64), out(2, 5, 1, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  std::vector<uint8_t> mask(40, 1);
  std::fill(mask.begin() + 20, mask.end(), uint8_t{0});
  auto p = params(q, k, v, out);
  p.key_mask = mask.data();
  p.key_mask_stride[0] = 0;
  p.key_mask_stride[1] = 1;
  EXPECT_LT(attend_error(p), kBound);
}

// "joint text tail, D = 512 VAE attention": D = 512 is refused, with the reason.
TEST(FieldCase, HeadDim512) {
  Tensor q(1, 4, 1, 512), out(1, 4, 1, 512);
  q.fill_normal(1);
  const Outcome outcome = attend(params(q, q, q, out));
  EXPECT_EQ(outcome.code, VCATTN_UNSUPPORTED);
  EXPECT_EQ(outcome.message, "v: head_dim is at most 256; found 512");
}

// "joint text tail": 1,985 text tokens of which 120 are valid, behind the video tokens.
TEST(FieldCase, JointTextTail) {
  constexpr int64_t kVideo = 2048, kText = 1985, kValid = 120;
  Tensor q(1, kVideo + kText, 1, 64, VCATTN_BF16), k(1, kVideo + kText, 1, 64, VCATTN_BF16);
  Tensor v(1, kVideo + kText, 1, 64, VCATTN_BF16), out(1, kVideo + kText, 1, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  std::vector<uint8_t> mask(kVideo + kText, 0);
  std::fill(mask.begin(), mask.begin() + kVideo + kValid, uint8_t{1});
  auto p = params(q, k, v, out);
  p.key_mask = mask.data();
  p.key_mask_stride[1] = 1;
  EXPECT_LT(attend_error(p), kBound);
}

// "wrong with offset views": off in {1, 3, 8} elements, every dtype.
TEST(FieldCase, OffsetViews) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    for (const int64_t offset : {1, 3, 8}) {
      Tensor storage(1, 71, 1, 64, dtype), out(1, 70, 1, 64);
      storage.fill_normal(7);
      vcattn_tensor view = storage.view();
      view.data = static_cast<std::byte*>(view.data) + offset * (dtype == VCATTN_FP32 ? 4 : 2);
      view.shape[1] = 70;
      auto p = params(storage, storage, storage, out);
      p.q = p.k = p.v = view;
      EXPECT_LT(attend_error(p), kBound) << "dtype " << dtype << " offset " << offset;
    }
  }
}

// "wrong on transposed views": storage [batch, heads, seqlen, dim] seen as [batch, seqlen, heads, dim]; D 64 and 128.
TEST(FieldCase, TransposedViews) {
  for (const int64_t dim : {64, 128}) {
    Tensor q(1, 3, 90, dim), k(1, 3, 200, dim), v(1, 3, 200, dim), out(1, 3, 90, dim);
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3);
    auto p = params(q, k, v, out);
    for (vcattn_tensor* t : {&p.q, &p.k, &p.v, &p.out}) {
      std::swap(t->shape[1], t->shape[2]);
      std::swap(t->stride[1], t->stride[2]);
    }
    EXPECT_LT(attend_error(p), kBound) << "dim " << dim;
  }
}

// "overflow to black": fp16 V of +-3e4, 75,600 tokens, output fp16.
TEST(FieldCase, OverflowToBlack) {
  constexpr int64_t kTokens = 75600;
  Tensor q(1, 64, 1, 64, VCATTN_FP16), k(1, kTokens, 1, 64, VCATTN_FP16), v(1, kTokens, 1, 64, VCATTN_FP16);
  Tensor out(1, 64, 1, 64, VCATTN_FP16);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill([](int64_t, int64_t s, int64_t, int64_t d) { return (s * 7 + d) % 3 == 0 ? -3e4f : 3e4f; });
  auto p = params(q, k, v, out);
  p.recipe.v_order = VCATTN_ORDER_SEQUENCE;
  ASSERT_EQ(attend(p).code, VCATTN_OK);
  const std::vector<int64_t> rows = {0, 63};
  cpu::OracleRows oracle;
  ASSERT_EQ(cpu::oracle_attention(p, rows, oracle, nullptr), VCATTN_OK);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = out.row(0, rows[i], 0);
    for (int d = 0; d < 64; ++d) ASSERT_NEAR(row[d], oracle.out[i * 64 + d], 3e4 * 4e-3) << d;
  }
}

// "black Wan and Qwen frames": one Q/K channel x 1e3 (and more), some tokens x 50: finite.
class BlackFrames : public testing::TestWithParam<float> {};

TEST_P(BlackFrames, AreNotMade) {
  for (int i = 0; i < vcattn_recipe_count(); ++i) {
    Tensor q(1, 200, 1, 128), k(1, 500, 1, 128), v(1, 500, 1, 128), out(1, 200, 1, 128);
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3);
    const auto loud = [](float x, int64_t s, int64_t d) {
      return x * (d == 77 ? GetParam() : 1.0f) * (s % 97 == 5 ? 50.0f : 1.0f);
    };
    for (Tensor* t : {&q, &k}) {
      for (int64_t s = 0; s < t->view().shape[1]; ++s) {
        auto row = t->row(0, s, 0);
        for (int64_t d = 0; d < 128; ++d) row[d] = loud(row[d], s, d);
        t->set(0, s, 0, row);
      }
    }
    ASSERT_EQ(attend(params(q, k, v, out, vcattn_recipe_name(i))).code, VCATTN_OK);
    for (int64_t s = 0; s < 200; ++s) {
      for (const float x : out.row(0, s, 0))
        ASSERT_TRUE(std::isfinite(x) && std::fabs(x) < 10) << vcattn_recipe_name(i);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(FieldCase, BlackFrames, testing::Values(1e3f, 2e3f, 1e4f));

// "wrong if Sq != Sk": D 96, 2,048 x 8,192 and the reverse.
TEST(FieldCase, DifferentLengths) {
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{2048, 8192}, {8192, 2048}}) {
    Tensor q(1, queries, 1, 96), k(1, keys, 1, 96), v(1, keys, 1, 96), out(1, queries, 1, 96);
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3, 1.0f, 0.3f);
    const auto p = params(q, k, v, out);
    ASSERT_EQ(attend(p).code, VCATTN_OK);
    const auto rows = spread_rows(queries, 16);
    cpu::OracleRows oracle;
    ASSERT_EQ(cpu::oracle_attention(p, rows, oracle, nullptr), VCATTN_OK);
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto row = out.row(0, rows[i], 0);
      for (int d = 0; d < 96; ++d) {
        error += (row[d] - oracle.out[i * 96 + d]) * (row[d] - oracle.out[i * 96 + d]);
        norm += oracle.out[i * 96 + d] * oracle.out[i * 96 + d];
      }
    }
    EXPECT_LT(std::sqrt(error / norm), kBound) << queries << " x " << keys;
  }
}

// "short queries rejected": Sq, Sk in {1, 2, 127, 128, 129}.
TEST(FieldCase, ShortSequences) {
  for (const int64_t queries : {1, 2, 127, 128, 129}) {
    for (const int64_t keys : {1, 2, 127, 128, 129}) {
      Tensor q(1, queries, 1, 128), k(1, keys, 1, 128), v(1, keys, 1, 128), out(1, queries, 1, 128);
      q.fill_normal(1);
      k.fill_normal(2);
      v.fill_normal(3);
      EXPECT_LT(attend_error(params(q, k, v, out)), kBound) << queries << " x " << keys;
    }
  }
}

// "no enable_gqa": Hq 8, Hkv 2 equals repeated keys and values bit for bit.
TEST(FieldCase, GroupedQueryHeads) {
  Tensor q(1, 50, 8, 64), k(1, 300, 2, 64), v(1, 300, 2, 64), out(1, 50, 8, 64), repeated_out(1, 50, 8, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  Tensor k8(1, 300, 8, 64), v8(1, 300, 8, 64);
  for (int64_t s = 0; s < 300; ++s) {
    for (int64_t h = 0; h < 8; ++h) {
      k8.set(0, s, h, k.row(0, s, h / 4));
      v8.set(0, s, h, v.row(0, s, h / 4));
    }
  }
  ASSERT_EQ(attend(params(q, k, v, out)).code, VCATTN_OK);
  ASSERT_EQ(attend(params(q, k8, v8, repeated_out)).code, VCATTN_OK);
  EXPECT_EQ(out.bytes(), repeated_out.bytes());
}

// Thread-safety: calls at the same time give what they give alone.
TEST(FieldCase, CallsAtTheSameTime) {
  Tensor q(1, 200, 1, 64), k(1, 900, 1, 64), v(1, 900, 1, 64), alone(1, 200, 1, 64);
  q.fill_normal(1);
  k.fill_normal(2);
  v.fill_normal(3);
  ASSERT_EQ(attend(params(q, k, v, alone)).code, VCATTN_OK);
  std::vector<Tensor> outs;
  for (int i = 0; i < 4; ++i) outs.emplace_back(1, 200, 1, 64);
  std::vector<vcattn_code> codes(4, VCATTN_INTERNAL);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&, i] { codes[i] = attend(params(q, k, v, outs[i])).code; });
  for (std::thread& t : threads) t.join();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(codes[i], VCATTN_OK);
    EXPECT_EQ(outs[i].bytes(), alone.bytes());
  }
}

}  // namespace
}  // namespace vcattn::test
