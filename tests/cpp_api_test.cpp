// The C++ header: descriptions, statuses and memory.
#include "vcattn/vcattn.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace {

TEST(CppApi, DescribesBothLayouts) {
  float data[1];
  const vcattn_tensor bshd = vcattn::make_tensor(data, VCATTN_FP32, {2, 30, 4, 64});
  EXPECT_EQ(std::vector<int64_t>(bshd.stride, bshd.stride + 4), (std::vector<int64_t>{7680, 256, 64, 1}));
  const vcattn_tensor bhsd = vcattn::make_tensor(data, VCATTN_FP32, {2, 30, 4, 64}, vcattn::Layout::kBHSD);
  EXPECT_EQ(std::vector<int64_t>(bhsd.stride, bhsd.stride + 4), (std::vector<int64_t>{7680, 64, 1920, 1}));
  EXPECT_EQ(std::vector<int64_t>(bhsd.shape, bhsd.shape + 4), (std::vector<int64_t>{2, 30, 4, 64}));
}

TEST(CppApi, CarriesCodeAndMessage) {
  vcattn_recipe recipe;
  const vcattn::Status unknown = vcattn::find_recipe("nothing", recipe);
  EXPECT_EQ(unknown.code, VCATTN_INVALID_ARGUMENT);
  EXPECT_NE(unknown.message.find("no recipe \"nothing\""), std::string::npos);
  EXPECT_TRUE(vcattn::find_recipe("exact", recipe).ok());
  EXPECT_TRUE(vcattn::set_recipe_field(recipe, "mean_rows", "64").ok());
  EXPECT_NE(vcattn::describe(recipe).find(" mean_rows=64 "), std::string::npos);
}

TEST(CppApi, AttendsWithAGrowingWorkspace) {
  vcattn::Workspace workspace;
  for (const int64_t tokens : {3, 400, 50}) {
    const vcattn::Shape shape = {1, tokens, 1, 32};
    std::vector<float> q(static_cast<size_t>(tokens) * 32, 0.25f), v(q.size(), 2.0f), out(q.size());
    vcattn_attention_params params = vcattn::make_params();
    params.q = params.k = vcattn::make_tensor(q.data(), VCATTN_FP32, shape);
    params.v = vcattn::make_tensor(v.data(), VCATTN_FP32, shape);
    params.out = vcattn::make_tensor(out.data(), VCATTN_FP32, shape);
    const vcattn::Status status = vcattn::attention(params, workspace);
    ASSERT_TRUE(status.ok()) << status.message;
    for (const float x : out) ASSERT_NEAR(x, 2.0f, 1e-5f);
  }
}

}  // namespace
