// Rotary position embedding in a call on sm90a against rows rotated before it: the same bits.
#include "device.h"
#include "rope_tables.h"

namespace vcattn::test {
namespace {

class SmRope : public testing::Test {
 protected:
  void SetUp() override { VCATTN_NEEDS_SM90A(); }

  struct Result {
    std::vector<float> out, lse;
  };

  static Result run(vcattn_attention_params p) {
    const int64_t* shape = p.q.shape;
    Tensor out(shape[0], shape[1], shape[2], shape[3]);
    Result result;
    result.lse.resize(static_cast<size_t>(shape[0] * shape[1] * shape[2]));
    p.out = out.view();
    p.lse = result.lse.data();
    p.lse_stride[0] = shape[1] * shape[2];
    p.lse_stride[1] = shape[2];
    p.lse_stride[2] = 1;
    const Outcome outcome = DeviceCall(p).run();
    EXPECT_EQ(outcome.code, VCATTN_OK) << outcome.message;
    const auto* data = static_cast<const float*>(p.out.data);
    result.out.assign(data, data + result.lse.size() * static_cast<size_t>(shape[3]));
    return result;
  }

  static void expect_same(const std::vector<float>& found, const std::vector<float>& expected, const char* name) {
    for (size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], expected[i]) << name << "[" << i << "]";
  }
};

TEST_F(SmRope, SameBitsAsRowsRotatedBefore) {
  constexpr int64_t kTokens = 700;
  for (const int64_t dim : {64, 128}) {
    Tensor q(1, kTokens, 4, dim, VCATTN_BF16), k(1, kTokens, 2, dim, VCATTN_BF16), v(1, kTokens, 2, dim, VCATTN_BF16);
    q.fill_normal(1);
    k.fill_normal(2, 1.0f, 0.5f);
    v.fill_normal(3);
    const TokenTables per_token(kTokens, dim / 2, 10);
    const AxisTables per_axis({30, 5, 8, 16}, {dim / 8, 3 * dim / 16, 3 * dim / 16});
    for (const vcattn_rope_pairing pairing : {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_HALF_SPLIT}) {
      for (const bool axes : {false, true}) {
        const AngleOf angles = axes ? per_axis.angles() : per_token.angles();
        const Tensor q_rotated = rotated(q, pairing, angles), k_rotated = rotated(k, pairing, angles);
        for (const char* recipe_name : {"accurate", "fast", "exact"}) {
          SCOPED_TRACE(std::string(recipe_name) + " head_dim " + std::to_string(dim) + " pairing " +
                       std::to_string(pairing) + " axes " + std::to_string(axes));
          vcattn_attention_params p = params(q, k, v, q, recipe_name);
          p.grid = per_axis.grid;
          p.rope_q = p.rope_k = axes ? per_axis.rope(pairing) : per_token.rope(pairing);
          const Result found = run(p);
          p.q = q_rotated.view();
          p.k = k_rotated.view();
          p.rope_q = p.rope_k = {};
          const Result expected = run(p);
          expect_same(found.out, expected.out, "out");
          expect_same(found.lse, expected.lse, "lse");
        }
      }
    }
  }
}

TEST_F(SmRope, Refusals) {
  Tensor x(1, 10, 1, 24), out(1, 10, 1, 24);
  x.fill_normal(1);
  const TokenTables tables(10, 12, 2);
  vcattn_attention_params p = params(x, x, x, out);
  p.rope_k = tables.rope(VCATTN_ROPE_HALF_SPLIT);
  EXPECT_EQ(DeviceCall(p).run().message,
            "backend sm90a takes rope_k of half-split pairs with head_dim a multiple of 16; found 24");
  p.rope_k = tables.rope(VCATTN_ROPE_INTERLEAVED);
  DeviceCall call(p);
  call.params.rope_k.sin[0] = tables.sin.data();
  EXPECT_EQ(call.run().message, "rope_k lies in host memory; memory says CUDA");
}

}  // namespace
}  // namespace vcattn::test
