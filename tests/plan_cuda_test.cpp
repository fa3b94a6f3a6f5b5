// What the sm90a back end says before it needs a card: which requests it serves, and the workspace it asks for.
#include "arch/sm90a/attention.h"
#include "arch/sm90a/backend.h"
#include "arch/sm90a/break_even.h"
#include "arch/sm90a/plan.h"
#include "arch/sm90a/support.h"
#include "support.h"

namespace vcattn::test {
namespace {

// A problem that is described and never touched.
struct Described {
  Tensor tiny = Tensor(1, 1, 1, 8, VCATTN_BF16);
  vcattn_attention_params params = test::params(tiny, tiny, tiny, tiny);
  Problem problem = {};

  Described(int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, int64_t heads, int64_t dim, const char* name) {
    params.recipe = recipe(name);
    params.recipe.v_order = VCATTN_ORDER_SEQUENCE;
    problem.params = &params;
    problem.batch = problem.num_sequences = batch;
    problem.seqlen_q = seqlen_q;
    problem.seqlen_kv = seqlen_kv;
    problem.num_heads = problem.num_heads_kv = heads;
    problem.head_dim = dim;
  }
  vcattn_code choose(sm90a::Config& config, std::string& text) {
    vcattn_message message = {};
    const vcattn_code code = sm90a::choose_config(problem, config, &message);
    text = message.text;
    return code;
  }
};

TEST(Sm90aPlan, EveryServedRecipeHasAKernel) {
  for (const char* name : {"accurate", "exact", "fast", "vsmooth8"}) {
    for (const int64_t dim : {8, 64, 65, 128}) {
      for (const int32_t mean_rows : {0, 128}) {  // steps that the schedule does not smooth run without means
        Described d(1, 100, 100, 1, dim, name);
        d.params.recipe.mean_rows = mean_rows;
        sm90a::Config config;
        std::string text;
        ASSERT_EQ(d.choose(config, text), VCATTN_OK) << name << " " << dim << " " << mean_rows << ": " << text;
        EXPECT_NE(sm90a::find_kernel(config), nullptr) << name << " " << dim << " " << mean_rows;
        EXPECT_GE(config.head_dim, dim);
      }
    }
  }
}

// By recipe and channels as stored, and no sooner where the call groups.
TEST(Sm90aPlan, BreakEvenLengthsAreOfWhatWasMeasured) {
  for (const char* name : {"accurate", "exact", "fast", "vsmooth8"}) {
    for (const int64_t dim : {8, 64, 65, 128}) {
      for (const int32_t mean_rows : {0, 128}) {
        SCOPED_TRACE(std::string(name) + " " + std::to_string(dim) + " " + std::to_string(mean_rows));
        Described d(1, 100, 100, 1, dim, name);
        d.params.recipe.mean_rows = mean_rows;
        sm90a::Config config;
        std::string text;
        ASSERT_EQ(d.choose(config, text), VCATTN_OK) << text;
        const int64_t ordered = sm90a::break_even_seqlen(config, false);
        const bool measured = mean_rows > 0 && std::string(name) != "vsmooth8";
        EXPECT_EQ(ordered > 0, measured) << ordered;
        EXPECT_GE(sm90a::break_even_seqlen(config, true), ordered);
        EXPECT_EQ(sm90a::kBackend.break_even_seqlen(d.problem), ordered);
        d.params.recipe.v_order = VCATTN_ORDER_CHAIN;
        EXPECT_EQ(sm90a::kBackend.break_even_seqlen(d.problem), sm90a::break_even_seqlen(config, true));
        const int32_t permutation = 0;
        d.params.permutation = &permutation;
        EXPECT_EQ(sm90a::kBackend.break_even_seqlen(d.problem), ordered);
      }
    }
  }
}

TEST(Sm90aPlan, RefusesByCondition) {
  const std::pair<const char*, const char*> cases[] = {{"fp8_naive", "qk_format int8, or e4m3 with"},
                                                       {"sage2", "p_log2_peak 8"},
                                                       {"vsmooth8_expcast", "row_max tile_octave with tile_keys 256"},
                                                       {"vsmooth4", "qk_format int8, or e4m3 with"}};
  for (const auto& [name, expected] : cases) {
    Described d(1, 100, 100, 1, 128, name);
    sm90a::Config config;
    std::string text;
    EXPECT_EQ(d.choose(config, text), VCATTN_UNSUPPORTED) << name;
    EXPECT_NE(text.find(expected), std::string::npos) << name << ": " << text;
  }
}

// Numbers of tokens are rounded up to whole blocks in 32 bits.
TEST(Sm90aPlan, RefusesWhatWouldOverflow) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  sm90a::Config config;
  std::string text;
  for (const auto& [q, kv, heads] :
       {std::array{kMost, int64_t{1}, int64_t{1}}, std::array{int64_t{1}, kMost, int64_t{1}},
        std::array{kMost - 1000, int64_t{1}, int64_t{1}}, std::array{kMost / 2, int64_t{1}, int64_t{1000}}}) {
    Described d(1, q, kv, heads, 64, "accurate");
    EXPECT_EQ(d.choose(config, text), VCATTN_UNSUPPORTED) << q << " " << kv << " " << heads;
  }
  Described longest(1, kMost - 1024, kMost - 1024, 1, 64, "accurate");
  ASSERT_EQ(longest.choose(config, text), VCATTN_OK) << text;
  const size_t bytes = sm90a::make_plan(longest.problem, config, nullptr).bytes;
  EXPECT_GT(bytes, static_cast<size_t>(kMost) * 64 * 3);
  EXPECT_LT(bytes, static_cast<size_t>(kMost) * 64 * 4);
}

TEST(Sm90aPlan, WorkspaceIsLessThanTheInputs) {
  for (const auto& [tokens, heads, dim] :
       {std::array{75600, 40, 128}, std::array{4608, 24, 128}, std::array{17776, 48, 64}}) {
    for (const char* name : {"accurate", "fast"}) {
      Described d(1, tokens, tokens, heads, dim, name);
      sm90a::Config config;
      std::string text;
      ASSERT_EQ(d.choose(config, text), VCATTN_OK) << text;
      const double inputs = 3.0 * 2 * tokens * heads * dim;
      EXPECT_LT(static_cast<double>(sm90a::make_plan(d.problem, config, nullptr).bytes), 0.65 * inputs) << tokens;
    }
  }
}

}  // namespace
}  // namespace vcattn::test
