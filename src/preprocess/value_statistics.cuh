// What V's scales and means need, tile by tile. Internal to src/preprocess.
#pragma once

#include "preprocess/value_rows.cuh"

namespace vcattn::sm90a {

// PTX ISA, "min" and "max": with .NaN, one NaN makes the result NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

struct Extent {
  float smallest, largest;
  __device__ void include(float x) {
    smallest = min_nan(smallest, x);
    largest = max_nan(largest, x);
  }
  __device__ bool finite() const { return is_finite(smallest) && is_finite(largest); }
  // Largest |factor (x - mean)| of all that was included: both roundings are monotonic.
  __device__ float largest_residual(float mean, float factor) const {
    const float low = __fmul_rn(factor, __fsub_rn(smallest, mean));
    const float high = __fmul_rn(factor, __fsub_rn(largest, mean));
    return fmaxf(fabsf(low), fabsf(high));
  }
};

// One channel over a tile's keys, in order.
struct ChannelStatistics {
  double sum;
  Extent even, odd;  // keys
};

template <typename Element, int kDim>
__device__ __forceinline__ ChannelStatistics measure_channel(const Column<Element, kDim>& column, int keys) {
  constexpr int kGroup = RowTile<Element, kDim>::kExchanged;
  const float first = column.value(0, 0), second = keys > 1 ? column.value(0, 1) : first;
  ChannelStatistics c = {0.0, {first, first}, {second, second}};
  const auto include = [&](int group, int limit) {
#pragma unroll
    for (int row = 0; row < kGroup; ++row) {
      if (row >= limit) break;
      const float x = column.value(group, row);
      c.sum = add_float(c.sum, x);
      (row % 2 == 0 ? c.even : c.odd).include(x);
    }
  };
#pragma unroll 4
  for (int group = 0; group < keys / kGroup; ++group) include(group, kGroup);
  if (keys % kGroup != 0) include(keys / kGroup, keys % kGroup);
  return c;
}

// The mean of a tile, and its part in what each channel's scale must hold.
template <typename Element, int kDim>
__device__ __forceinline__ void measure_values(const PrepareArgs& a, int unit, ChannelGroup<kDim> group,
                                               ValueShared<Element, kDim>& shared) {
  const KeyTile tile = key_tile(a.qkv, unit);
  const int keys = keys_in(tile), channel = group.thread();
  if (keys == 0) return;
  load_values(a, tile, keys, group, shared);
  const Column<Element, kDim> column(shared.tile, channel);
  ChannelStatistics c = measure_channel(column, keys);
  if (!c.even.finite() || !c.odd.finite()) {
    a.scratch.value_nonfinite[tile.slot * kDim + channel] = 1;
    column.clean(keys);
    c = measure_channel(column, keys);
  }
  float mean = 0.0f, largest = 0.0f;
  if (a.has_means) {
    mean = static_cast<float>(c.sum / static_cast<double>(keys));
    largest = __fmul_rn(fabsf(mean), kMeanFloor);
    a.scratch.value_means[int64_t{unit} * kDim + channel] = mean;
  }
  largest = fmaxf(largest, c.even.largest_residual(mean, 1.0f));
  if (keys > 1) largest = fmaxf(largest, c.odd.largest_residual(mean, a.odd_factor));
  atomicMax(&a.scratch.value_max[tile.slot * kDim + channel], __float_as_uint(largest));
}

}  // namespace vcattn::sm90a
