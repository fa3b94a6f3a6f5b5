#include "vsmooth/schedule.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

struct Steps {
  std::vector<int> smooth, regroup, warm;
  bool operator==(const Steps& other) const = default;
};

std::ostream& operator<<(std::ostream& out, const Steps& steps) {
  for (const auto* list : {&steps.smooth, &steps.regroup, &steps.warm}) {
    out << "[ ";
    for (const int step : *list) out << step << ' ';
    out << "] ";
  }
  return out;
}

Steps steps_of(const vcattn_schedule& schedule) {
  Steps steps;
  for (int32_t step = 0; step < schedule.num_steps; ++step) {
    vcattn_schedule_step at{-1, -1, -1};
    vcattn_message message{"untouched"};
    EXPECT_EQ(vcattn_schedule_at(&schedule, step, &at, &message), VCATTN_OK);
    EXPECT_STREQ(message.text, "untouched");
    for (const int32_t flag : {at.smooth, at.regroup, at.warm}) EXPECT_TRUE(flag == 0 || flag == 1);
    if (at.smooth != 0) steps.smooth.push_back(step);
    if (at.regroup != 0) steps.regroup.push_back(step);
    if (at.warm != 0) steps.warm.push_back(step);
  }
  return steps;
}

// From the definition: lists the smoothed steps, then walks them.
Steps expected_steps(const vcattn_schedule& schedule) {
  const int n = schedule.num_steps;
  int quarter = 0;
  while (4 * quarter < n) ++quarter;
  Steps steps;
  switch (schedule.kind) {
    case VCATTN_SCHEDULE_FIRST_QUARTER:
      for (int i = 0; i < quarter; ++i) steps.smooth.push_back(i);
      break;
    case VCATTN_SCHEDULE_UNIFORM_QUARTER:
      for (int i = 0; i < quarter; ++i) steps.smooth.push_back(i * n / quarter);
      break;
    case VCATTN_SCHEDULE_EVERY_STEP:
      for (int i = 0; i < n; ++i) steps.smooth.push_back(i);
      break;
    default:
      break;
  }
  int reuse = schedule.reuse;
  if (reuse == 0) reuse = n <= 8 ? 2 : 4;
  int uses_left = 0;
  for (const int step : steps.smooth) {
    if (uses_left == 0) {
      if (!steps.regroup.empty()) steps.warm.push_back(step);
      steps.regroup.push_back(step);
      uses_left = reuse;
    }
    --uses_left;
  }
  return steps;
}

TEST(Schedule, FirstQuarterOfThePaper) {
  Steps steps = steps_of({VCATTN_SCHEDULE_FIRST_QUARTER, 40, 0});
  EXPECT_EQ(steps.smooth, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(steps.regroup, (std::vector<int>{0, 4, 8}));
  EXPECT_EQ(steps.warm, (std::vector<int>{4, 8}));
  steps = steps_of({VCATTN_SCHEDULE_FIRST_QUARTER, 50, 0});
  EXPECT_EQ(steps.smooth, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  EXPECT_EQ(steps.regroup, (std::vector<int>{0, 4, 8, 12}));
  EXPECT_EQ(steps.warm, (std::vector<int>{4, 8, 12}));
  steps = steps_of({VCATTN_SCHEDULE_FIRST_QUARTER, 8, 0});
  EXPECT_EQ(steps.smooth, (std::vector<int>{0, 1}));
  EXPECT_EQ(steps.regroup, (std::vector<int>{0}));
  EXPECT_EQ(steps.warm, (std::vector<int>{}));
}

TEST(Schedule, UniformQuarter) {
  const Steps steps = steps_of({VCATTN_SCHEDULE_UNIFORM_QUARTER, 18, 2});
  EXPECT_EQ(steps.smooth, (std::vector<int>{0, 3, 7, 10, 14}));
  EXPECT_EQ(steps.regroup, (std::vector<int>{0, 7, 14}));
  EXPECT_EQ(steps.warm, (std::vector<int>{7, 14}));
}

TEST(Schedule, EveryStep) {
  EXPECT_EQ(steps_of({VCATTN_SCHEDULE_EVERY_STEP, 10, 0}).regroup, (std::vector<int>{0, 4, 8}));
  EXPECT_EQ(steps_of({VCATTN_SCHEDULE_EVERY_STEP, 8, 0}).regroup, (std::vector<int>{0, 2, 4, 6}));
  const Steps each = steps_of({VCATTN_SCHEDULE_EVERY_STEP, 5, 1});
  EXPECT_EQ(each.smooth, (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_EQ(each.regroup, each.smooth);
  EXPECT_EQ(each.warm, (std::vector<int>{1, 2, 3, 4}));
}

TEST(Schedule, Never) { EXPECT_EQ(steps_of({VCATTN_SCHEDULE_NEVER, 40, 0}), Steps{}); }

TEST(Schedule, FollowsTheDefinition) {
  for (int32_t kind = VCATTN_SCHEDULE_FIRST_QUARTER; kind <= VCATTN_SCHEDULE_NEVER; ++kind) {
    for (int32_t num_steps = 1; num_steps <= 64; ++num_steps) {
      for (const int32_t reuse : {0, 1, 2, 3, 4, 7, 64, 1000}) {
        const vcattn_schedule schedule{kind, num_steps, reuse};
        const Steps steps = steps_of(schedule);
        EXPECT_EQ(steps, expected_steps(schedule)) << "kind " << kind << ", " << num_steps << " steps, reuse " << reuse;
        EXPECT_EQ(static_cast<size_t>(vcattn::vsmooth::Schedule(schedule).num_smoothed()), steps.smooth.size());
      }
    }
  }
}

TEST(Schedule, LongestRun) {
  constexpr int32_t kSteps = 2147483647;
  for (int32_t kind = VCATTN_SCHEDULE_FIRST_QUARTER; kind <= VCATTN_SCHEDULE_EVERY_STEP; ++kind) {
    const vcattn_schedule schedule{kind, kSteps, 0};
    const vcattn::vsmooth::Schedule steps(schedule);
    EXPECT_EQ(steps.num_smoothed(), kind == VCATTN_SCHEDULE_EVERY_STEP ? kSteps : 536870912);
    EXPECT_TRUE(steps.at(0).regroup);
    EXPECT_FALSE(steps.at(0).warm);
    EXPECT_EQ(steps.at(kSteps - 1).smooth, kind == VCATTN_SCHEDULE_EVERY_STEP);
  }
  // floor(536870911 (2^31 - 1) / 2^29), the last smoothed step.
  EXPECT_TRUE(vcattn::vsmooth::Schedule({VCATTN_SCHEDULE_UNIFORM_QUARTER, kSteps, 0}).at(2147483643).smooth);
}

void expect_refusal(const vcattn_schedule* schedule, int32_t step, const std::string& text) {
  vcattn_schedule_step result{7, 8, 9};
  vcattn_message message{};
  EXPECT_EQ(vcattn_schedule_at(schedule, step, &result, &message), VCATTN_INVALID_ARGUMENT) << text;
  EXPECT_EQ(message.text, text);
  EXPECT_EQ(vcattn_schedule_at(schedule, step, &result, nullptr), VCATTN_INVALID_ARGUMENT) << text;
  EXPECT_TRUE(result.smooth == 7 && result.regroup == 8 && result.warm == 9) << text;
}

TEST(Schedule, RefusesWhatItsContractExcludes) {
  const vcattn_schedule valid{VCATTN_SCHEDULE_FIRST_QUARTER, 40, 0};
  expect_refusal(nullptr, 0, "schedule is NULL");
  expect_refusal(&valid, -1, "step is 0 to num_steps - 1 = 39; found -1");
  expect_refusal(&valid, 40, "step is 0 to num_steps - 1 = 39; found 40");
  vcattn_schedule invalid{-1, 40, 0};
  expect_refusal(&invalid, 0, "schedule kind is 0 to 3; found -1");
  invalid = {4, 40, 0};
  expect_refusal(&invalid, 0, "schedule kind is 0 to 3; found 4");
  invalid = {VCATTN_SCHEDULE_EVERY_STEP, 0, 0};
  expect_refusal(&invalid, 0, "schedule num_steps is at least 1; found 0");
  invalid = {VCATTN_SCHEDULE_EVERY_STEP, 10, -1};
  expect_refusal(&invalid, 0, "schedule reuse is not negative; found -1");
  vcattn_message message{};
  EXPECT_EQ(vcattn_schedule_at(&valid, 0, nullptr, &message), VCATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(message.text, "schedule step: result is NULL");
}

}  // namespace
