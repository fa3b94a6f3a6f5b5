// FP32 reductions over one padded row. Sixteen partial sums in a fixed order: the compiler keeps them in vector
// registers of any width, and the result is the same for all widths.
#pragma once

#include <cstdint>

namespace vcattn::vsmooth {

inline constexpr int kRowLanes = 16;  // rows are padded to a multiple of this many floats

inline float sum_lanes(float (&lanes)[kRowLanes]) {
  for (int half = kRowLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

inline float dot(const float* a, const float* b, int64_t stride) {
  float lanes[kRowLanes] = {};
  for (int64_t d = 0; d < stride; d += kRowLanes) {
    for (int l = 0; l < kRowLanes; ++l) lanes[l] += a[d + l] * b[d + l];
  }
  return sum_lanes(lanes);
}

inline float squared_distance(const float* a, const float* b, int64_t stride) {
  float lanes[kRowLanes] = {};
  for (int64_t d = 0; d < stride; d += kRowLanes) {
    for (int l = 0; l < kRowLanes; ++l) {
      const float difference = a[d + l] - b[d + l];
      lanes[l] += difference * difference;
    }
  }
  return sum_lanes(lanes);
}

}  // namespace vcattn::vsmooth
