// The C++ header: descriptions, statuses and memory.
#include "vcattn/vcattn.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
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
    int64_t break_even = -1;
    EXPECT_TRUE(vcattn::break_even_seqlen(params, break_even).ok());
    EXPECT_EQ(break_even, 0) << "on the CPU nothing was measured";
  }
}

TEST(CppApi, RotatesByTablesOfTokensAndOfAxes) {
  constexpr int64_t kTokens = 6, kPairs = 2;
  vcattn::Workspace workspace;
  std::vector<float> x(kTokens * 2 * kPairs), cos(kTokens * kPairs), sin(cos.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3.0f;
  for (size_t i = 0; i < cos.size(); ++i) {
    cos[i] = std::cos(static_cast<float>(i / kPairs));
    sin[i] = std::sin(static_cast<float>(i / kPairs));
  }
  vcattn_attention_params params = vcattn::make_params();
  params.q = params.k = params.v = vcattn::make_tensor(x.data(), VCATTN_FP32, {1, kTokens, 1, 2 * kPairs});
  params.grid = {.first_token = 0, .frames = kTokens, .height = 1, .width = 1};
  std::vector<float> out[2];
  for (const bool axes : {false, true}) {
    out[axes].resize(x.size());
    params.out = vcattn::make_tensor(out[axes].data(), VCATTN_FP32, {1, kTokens, 1, 2 * kPairs});
    params.rope_q = axes ? vcattn::make_rope(VCATTN_ROPE_INTERLEAVED, {cos.data(), nullptr, nullptr},
                                             {sin.data(), nullptr, nullptr}, {kPairs, 0, 0})
                         : vcattn::make_rope(VCATTN_ROPE_INTERLEAVED, cos.data(), sin.data(), 2 * kPairs);
    const vcattn::Status status = vcattn::attention(params, workspace);
    ASSERT_TRUE(status.ok()) << status.message;
  }
  EXPECT_EQ(out[0], out[1]);
  params.rope_q = {};
  std::vector<float> plain(x.size());
  params.out = vcattn::make_tensor(plain.data(), VCATTN_FP32, {1, kTokens, 1, 2 * kPairs});
  ASSERT_TRUE(vcattn::attention(params, workspace).ok());
  EXPECT_NE(out[0], plain);
}

class GroupingState : public testing::Test {
 protected:
  static constexpr uint64_t kKey = 7;
  vcattn::Shape shape = {1, 400, 2, 32};
  std::vector<float> values = std::vector<float>(400 * 2 * 32);
  vcattn_attention_params params = vcattn::make_params();
  vcattn_attention_params ready = {};
  vcattn_schedule_step done = {};
  vcattn::Workspace workspace;
  vcattn_schedule schedule = {.kind = VCATTN_SCHEDULE_FIRST_QUARTER, .num_steps = 12, .reuse = 2};
  std::vector<int32_t> permutation;
  std::vector<float> centroids;

  void SetUp() override {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 7919 % 101) - 50.0f;
    params.q = params.k = params.v = params.out = vcattn::make_tensor(values.data(), VCATTN_FP32, shape);
    permutation.assign(vcattn::GroupingState::permutation_size(params), -1);
    centroids.assign(vcattn::GroupingState::centroids_size(params), NAN);
  }
  vcattn::GroupingState make() { return {kKey, schedule, permutation.data(), centroids.data()}; }
  void expect_refused(vcattn::GroupingState& state, int32_t step, const std::string& text, uint64_t key = kKey) {
    const auto before = permutation;
    const vcattn::Status status = state.prepare(key, step, params, workspace, ready, done);
    EXPECT_EQ(status.code, VCATTN_INVALID_ARGUMENT);
    EXPECT_EQ(status.message, text);
    EXPECT_EQ(permutation, before);
  }
};

TEST_F(GroupingState, FollowsTheSchedule) {
  vcattn::GroupingState state = make();
  for (int32_t step = 0; step < 12; ++step) {
    const vcattn::Status status = state.prepare(kKey, step, params, workspace, ready, done);
    ASSERT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(done.smooth, step < 3) << step;  // the first quarter
    EXPECT_EQ(done.regroup, step == 0 || step == 2) << step;
    EXPECT_EQ(done.warm, step == 2) << step;
    EXPECT_EQ(ready.permutation, permutation.data());
    EXPECT_EQ(ready.recipe.mean_rows, step < 3 ? 128 : 0);
    EXPECT_EQ(params.permutation, nullptr) << "what was asked stays as it is";
  }
  std::vector<bool> seen(400);
  for (int i = 0; i < 400; ++i) seen[static_cast<size_t>(permutation[static_cast<size_t>(i)])] = true;
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 400);
}

TEST_F(GroupingState, MakesUpForASkippedStep) {
  vcattn::GroupingState state = make();
  ASSERT_TRUE(state.prepare(kKey, 1, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 1);
  EXPECT_EQ(done.warm, 0) << "there was nothing to start from";
  vcattn::GroupingState late = make();
  ASSERT_TRUE(late.prepare(kKey, 9, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 0);
  EXPECT_EQ(ready.permutation, nullptr);
  EXPECT_EQ(ready.recipe.v_order, VCATTN_ORDER_SEQUENCE);
}

TEST_F(GroupingState, MakesUpForARegroupingThatWasLeftOut) {
  schedule = {.kind = VCATTN_SCHEDULE_EVERY_STEP, .num_steps = 40, .reuse = 4};
  vcattn::GroupingState state = make();
  ASSERT_TRUE(state.prepare(kKey, 1, params, workspace, ready, done).ok());
  ASSERT_TRUE(state.prepare(kKey, 3, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 0);
  ASSERT_TRUE(state.prepare(kKey, 39, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 1) << "steps 4, 8 ... regroup";
  EXPECT_EQ(done.warm, 1);
  vcattn::GroupingState failing = make();
  ASSERT_TRUE(failing.prepare(kKey, 0, params, workspace, ready, done).ok());
  values[5] = NAN;
  EXPECT_EQ(failing.prepare(kKey, 4, params, workspace, ready, done).code, VCATTN_NONFINITE_INPUT);
  values[5] = 0.0f;
  ASSERT_TRUE(failing.prepare(kKey, 5, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 1) << "the one that failed at step 4";
}

TEST_F(GroupingState, SegmentsHaveTheirOwnOrder) {
  const int64_t bounds[] = {0, 100, 400}, others[] = {0, 200, 400};
  params.cu_seqlens_q = params.cu_seqlens_kv = bounds;
  params.num_segments = 2;
  centroids.assign(vcattn::GroupingState::centroids_size(params), NAN);
  vcattn::GroupingState state = make();
  ASSERT_TRUE(state.prepare(kKey, 0, params, workspace, ready, done).ok());
  params.cu_seqlens_q = params.cu_seqlens_kv = others;
  expect_refused(state, 1, "the grouping state was made for cu_seqlens_kv[1] 100; found 200");
}

TEST_F(GroupingState, NeverLeaks) {
  vcattn::GroupingState state = make();
  ASSERT_TRUE(state.prepare(kKey, 2, params, workspace, ready, done).ok());
  expect_refused(state, 3, "the grouping state of key 7 serves that key; found 8", 8);
  expect_refused(state, 1, "the grouping state has seen step 2; found step 1 (reset it between requests)");
  const vcattn_attention_params right = params;
  params.v.shape[1] = params.k.shape[1] = 300;
  expect_refused(state, 3, "the grouping state was made for seqlen_kv 400; found 300");
  params = right;
  params.recipe.grouping.clusters = 32;
  expect_refused(state, 3, "the grouping state was made for clusters 64; found 32");
  params = right;
  params.recipe.grouping.seed = 5;
  expect_refused(state, 3, "the grouping state was made for seed 0; found 5");
  params = right;
  params.grid = {.first_token = 0, .frames = 1, .height = 1, .width = 300};
  expect_refused(state, 3, "the grouping state was made for grid.frames 0; found 1");
  params = right;
  const uint8_t mask[400] = {1};
  params.key_mask = mask;
  params.key_mask_stride[1] = 1;
  expect_refused(state, 3, "the grouping state was made for key mask 0; found 1");
  params = right;
  EXPECT_TRUE(state.prepare(kKey, 3, params, workspace, ready, done).ok()) << "a refusal changes nothing";
  state.reset();
  EXPECT_TRUE(state.prepare(kKey, 0, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 1);
  EXPECT_EQ(done.warm, 0);
}

TEST_F(GroupingState, AFailedGroupingLeavesNoOrder) {
  vcattn::GroupingState state = make();
  std::byte small[256];
  EXPECT_EQ(state.prepare(kKey, 0, params, std::span<std::byte>(small), ready, done).code, VCATTN_WORKSPACE_TOO_SMALL);
  ASSERT_TRUE(state.prepare(kKey, 1, params, workspace, ready, done).ok());
  EXPECT_EQ(done.regroup, 1);
}

}  // namespace
