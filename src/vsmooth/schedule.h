// Which denoising steps subtract block means, and which of those compute a new permutation.
//
// The n steps have m smoothed ones, numbered i = 0 .. m - 1:
//   FIRST_QUARTER    m = ceil(n / 4), step i.
//   UNIFORM_QUARTER  m = ceil(n / 4), step floor(i n / m).
//   EVERY_STEP       m = n, step i.
//   NEVER            m = 0.
// Smoothed step i regroups where i is a multiple of `reuse`, warm from the second time on. So UNIFORM_QUARTER regroups
// as often as FIRST_QUARTER and costs the same, but its permutations serve steps that lie about four times as far
// apart; reuse = 1 gives each its own. Steps that are not smoothed run on the last permutation there is, in sequence
// order before the first. An old permutation costs fidelity only: any order of the keys gives the same attention.
#pragma once

#include <cstdint>

#include "vcattn/vcattn.h"

namespace vcattn::vsmooth {

struct ScheduleStep {
  bool smooth;   // subtract block means in this step
  bool regroup;  // compute a permutation in this step
  bool warm;     // start it from the previous centroids
};

class Schedule {
 public:
  // Of a schedule that vcattn_schedule_at accepts.
  explicit Schedule(const vcattn_schedule& schedule);

  ScheduleStep at(int step) const;  // step in [0, num_steps)

  int num_smoothed() const { return static_cast<int>(num_smoothed_); }

 private:
  // The number of `step` among the smoothed steps, or -1.
  int64_t smoothed_index(int64_t step) const;

  int32_t kind_;
  int64_t num_steps_, num_smoothed_, reuse_;
};

}  // namespace vcattn::vsmooth
