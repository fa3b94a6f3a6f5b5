#include "vsmooth/schedule.h"

#include "core/message.h"

namespace vcattn::vsmooth {
namespace {

constexpr int64_t kDefaultReuse = 4;
constexpr int64_t kShortRunReuse = 2;  // steps of a short run lie farther apart
constexpr int64_t kShortRunSteps = 8;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t count_smoothed(const vcattn_schedule& schedule) {
  switch (schedule.kind) {
    case VCATTN_SCHEDULE_EVERY_STEP:
      return schedule.num_steps;
    case VCATTN_SCHEDULE_NEVER:
      return 0;
    default:
      return ceil_div(schedule.num_steps, 4);
  }
}

}  // namespace

Schedule::Schedule(const vcattn_schedule& schedule)
    : kind_(schedule.kind),
      num_steps_(schedule.num_steps),
      num_smoothed_(count_smoothed(schedule)),
      reuse_(schedule.reuse > 0             ? schedule.reuse
             : num_steps_ <= kShortRunSteps ? kShortRunReuse
                                            : kDefaultReuse) {}

int64_t Schedule::smoothed_index(int64_t step) const {
  if (kind_ != VCATTN_SCHEDULE_UNIFORM_QUARTER) return step < num_smoothed_ ? step : -1;
  // floor(i n / m) = step just where step m <= i n < (step + 1) m; the least i that meets the first is the only
  // candidate, as m <= n.
  const int64_t index = ceil_div(step * num_smoothed_, num_steps_);
  return index * num_steps_ < (step + 1) * num_smoothed_ ? index : -1;
}

ScheduleStep Schedule::at(int step) const {
  const int64_t index = smoothed_index(step);
  const bool regroup = index >= 0 && index % reuse_ == 0;
  return {.smooth = index >= 0, .regroup = regroup, .warm = regroup && index > 0};
}

}  // namespace vcattn::vsmooth

vcattn_code vcattn_schedule_at(const vcattn_schedule* schedule, int32_t step, vcattn_schedule_step* result,
                               vcattn_message* message) {
  using vcattn::fail;
  if (schedule == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "schedule is NULL");
  if (result == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "schedule step: result is NULL");
  const auto& [kind, num_steps, reuse] = *schedule;
  if (kind < VCATTN_SCHEDULE_FIRST_QUARTER || kind > VCATTN_SCHEDULE_NEVER) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "schedule kind is 0 to {}; found {}",
                static_cast<int>(VCATTN_SCHEDULE_NEVER), kind);
  }
  if (num_steps < 1) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "schedule num_steps is at least 1; found {}", num_steps);
  }
  if (reuse < 0) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "schedule reuse is not negative; found {}", reuse);
  }
  if (step < 0 || step >= num_steps) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "step is 0 to num_steps - 1 = {}; found {}", num_steps - 1, step);
  }
  const vcattn::vsmooth::ScheduleStep at = vcattn::vsmooth::Schedule(*schedule).at(step);
  *result = {.smooth = at.smooth, .regroup = at.regroup, .warm = at.warm};
  return VCATTN_OK;
}
