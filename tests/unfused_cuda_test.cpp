// The unfused chain that `vcattn bench call --unfused` times makes what the CPU and the fused kernels make, bit by bit.
#include "bench_unfused.h"
#include "preprocess_device.h"

namespace vcattn::preprocess_test {
namespace {

class UnfusedCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0, major = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    if (major != 9) GTEST_SKIP() << "needs compute capability 9.0; this device has " << major << ".x";
  }
};

cudaError_t prepare_unfused(const Problem& problem, const sm90a::QuantizedQkv& qkv,
                            const sm90a::PrepareScratch& scratch, cudaStream_t stream) {
  const char* unsupported = cli::unfused_unsupported(problem);
  EXPECT_EQ(unsupported, nullptr) << unsupported;
  Arena counted(nullptr);
  cli::take_unfused_scratch(problem, qkv, counted);
  const DeviceBytes memory(counted.used());
  Arena arena(memory.data());
  const sm90a::PrepareCall call = {problem, problem.params->recipe, qkv, scratch, stream};
  check(sm90a::prepare_sequences(call));
  for (const cli::UnfusedStep& step : cli::unfused_steps(call, cli::take_unfused_scratch(problem, qkv, arena))) {
    SCOPED_TRACE(step.name);
    check(step.launch());
  }
  return cudaStreamSynchronize(stream);  // `memory` goes
}

void compare_unfused(const Case& c) { compare(c, false, prepare_unfused); }

TEST_F(UnfusedCuda, RecipesAndHeadDims) {
  for (const char* recipe : {"accurate", "exact", "fast", "vsmooth8"}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const bool permuted : {false, true}) {
        SCOPED_TRACE(std::string(recipe) + " head_dim " + std::to_string(head_dim));
        Case c;
        c.recipe = recipe;
        c.head_dim = head_dim;
        c.permuted = permuted;
        compare_unfused(c);
      }
    }
  }
}

TEST_F(UnfusedCuda, RecipeFields) {
  constexpr const char* kChanges[][2] = {
      {"qk_hadamard", "0"}, {"k_centred", "0"}, {"mean_centred", "0"}, {"mean_format", "bf16"}, {"p_phases", "1"}};
  for (const char* recipe : {"accurate", "fast"}) {
    for (const auto& [field, value] : kChanges) {
      SCOPED_TRACE(std::string(recipe) + " " + field + "=" + value);
      Case c;
      c.recipe = recipe;
      c.change = [field = field, value = value](vcattn_recipe& r) {
        ASSERT_EQ(vcattn_recipe_set(&r, field, value, nullptr), VCATTN_OK);
      };
      compare_unfused(c);
    }
  }
}

TEST_F(UnfusedCuda, Lengths) {
  for (const int64_t length : {1, 2, 127, 128, 129, 256, 257, 1024, 1025, 2500}) {
    for (const char* recipe : {"accurate", "fast"}) {
      SCOPED_TRACE(std::string(recipe) + " length " + std::to_string(length));
      Case c;
      c.recipe = recipe;
      c.seqlen_q = length;
      c.seqlen_kv = length;
      compare_unfused(c);
    }
  }
}

TEST_F(UnfusedCuda, GroupedQueryHeadsBatchesAndLayouts) {
  for (const Layout layout : {Layout::kBshd, Layout::kBhsd, Layout::kFusedQkv}) {
    for (const char* recipe : {"accurate", "fast"}) {
      SCOPED_TRACE(std::string(recipe) + " layout " + std::to_string(static_cast<int>(layout)));
      Case c;
      c.batch = 3;
      c.num_heads = 6;
      c.recipe = recipe;
      c.layout = layout;
      compare_unfused(c);
    }
  }
}

}  // namespace

// What is named is what is not met; needs no card.
TEST(Unfused, SaysWhatItDoesNotServe) {
  const auto unsupported = [](const Case& c) {
    const Inputs inputs(c);
    Problem problem;
    EXPECT_EQ(validate_attention(&inputs.params, problem, nullptr), VCATTN_OK);
    const char* reason = cli::unfused_unsupported(problem);
    return std::string(reason == nullptr ? "" : reason);
  };
  Case c;
  EXPECT_EQ(unsupported(c), "");
  c.head_dim = 96;
  EXPECT_EQ(unsupported(c), "takes head_dim 64 or 128");
  c = Case();
  c.lse = true;
  EXPECT_EQ(unsupported(c), "takes no mask, segments or lse");
  c = Case();
  c.v_dtype = VCATTN_FP16;
  EXPECT_EQ(unsupported(c), "takes contiguous rows of BF16");
  c = Case();
  c.change = [](vcattn_recipe& r) { r.mean_rows = 0; };
  EXPECT_EQ(unsupported(c), "takes recipes with mean_rows 128");
  c.change = [](vcattn_recipe& r) { r.v_scale_span = VCATTN_SPAN_HEAD; };
  EXPECT_EQ(unsupported(c), "takes recipes with v_scale_span channel");
}

}  // namespace vcattn::preprocess_test
