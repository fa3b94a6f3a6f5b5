// Which cosine and sine rotate a pair of channels (vcattn_rope), for CPU and GPU alike.
#pragma once

#include <cstdint>

#include "numerics/formats.h"
#include "vcattn/vcattn.h"

namespace vcattn {

inline constexpr int kRopeAxes = 3;

struct RopeAngle {
  float cos, sin;
};

// Where a pair of channels is looked up: the axis, and the pair's element in the first row of that axis's tables.
struct RopeColumn {
  int32_t axis;
  const float* cos;
  const float* sin;
};

VCATTN_HD inline RopeColumn rope_column(const vcattn_rope& rope, int64_t pair) {
  int32_t axis = 0;
  int64_t offset = pair * rope.stride[3];
  if (rope.tables == VCATTN_ROPE_PER_AXIS) {
    for (offset = pair; axis + 1 < kRopeAxes && offset >= rope.pairs[axis]; ++axis) offset -= rope.pairs[axis];
  }
  return {axis, rope.cos[axis] + offset, rope.sin[axis] + offset};
}

// Where a token is looked up: elements from the first to its row, by axis; negative where it lies outside the grid.
struct RopeRow {
  int64_t offset[kRopeAxes];
};

VCATTN_HD inline RopeRow rope_row(const vcattn_rope& rope, const vcattn_video_grid& grid, int64_t batch, int64_t token,
                                  int64_t head) {
  if (rope.tables == VCATTN_ROPE_PER_TOKEN) {
    return {{batch * rope.stride[0] + token * rope.stride[1] + head * rope.stride[2], 0, 0}};
  }
  // There are less than 2^31 tokens, and a GPU divides 32 bits far faster than 64.
  const auto height = static_cast<uint32_t>(grid.height), width = static_cast<uint32_t>(grid.width);
  const auto place = static_cast<uint32_t>(token - grid.first_token);  // wraps before the first
  if (place >= static_cast<uint32_t>(grid.frames) * height * width) return {{-1, -1, -1}};
  const uint32_t line = place / width;
  return {{line / height * rope.pairs[0], line % height * rope.pairs[1], place % width * rope.pairs[2]}};
}

VCATTN_HD inline RopeAngle rope_angle(const RopeRow& row, const RopeColumn& column) {
  const int64_t offset = row.offset[column.axis];
  if (offset < 0) return {1.0f, 0.0f};
  return {column.cos[offset], column.sin[offset]};
}

}  // namespace vcattn
