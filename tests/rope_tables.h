// Tables of vcattn_rope, and rows rotated before a call as it rotates them.
#pragma once

#include <array>
#include <functional>
#include <random>
#include <vector>

#include "support.h"

namespace vcattn::test {

// A table of cosines or sines of its own memory.
using Table = std::vector<float>;

// Not the cosine and sine of one angle: nothing may assume that a rotation keeps lengths.
inline Table random_table(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.2f, 1.2f);
  Table table(static_cast<size_t>(size));
  for (float& x : table) x = uniform(random);
  return table;
}

struct Angle {
  float cos, sin;
};
using AngleOf = std::function<Angle(int64_t batch, int64_t token, int64_t head, int64_t pair)>;

// `x` in FP32, rotated by the formula of vcattn_rope.
inline Tensor rotated(const Tensor& x, vcattn_rope_pairing pairing, const AngleOf& angle_of) {
  const int64_t* shape = x.view().shape;
  const int64_t half = shape[3] / 2;
  Tensor out(shape[0], shape[1], shape[2], shape[3]);
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t s = 0; s < shape[1]; ++s) {
      for (int64_t h = 0; h < shape[2]; ++h) {
        std::vector<float> row = x.row(b, s, h);
        for (int64_t pair = 0; pair < half; ++pair) {
          const bool interleaved = pairing == VCATTN_ROPE_INTERLEAVED;
          float& first = row[interleaved ? 2 * pair : pair];
          float& second = row[interleaved ? 2 * pair + 1 : pair + half];
          const Angle angle = angle_of(b, s, h, pair);
          const float a = first * angle.cos, b_ = second * angle.sin, c = first * angle.sin, d = second * angle.cos;
          first = a - b_;
          second = c + d;
        }
        out.set(b, s, h, row);
      }
    }
  }
  return out;
}

// Tables over tokens alone, and the angles in them.
struct TokenTables {
  TokenTables(int64_t tokens, int64_t half, uint32_t seed)
      : cos(random_table(tokens * half, seed)), sin(random_table(tokens * half, seed + 1)), half_(half) {}
  vcattn_rope rope(vcattn_rope_pairing pairing) const {
    return {pairing, VCATTN_ROPE_PER_TOKEN, {cos.data()}, {sin.data()}, {0, half_, 0, 1}, {}};
  }
  AngleOf angles() const {
    return [this](int64_t, int64_t token, int64_t, int64_t pair) {
      return Angle{cos[token * half_ + pair], sin[token * half_ + pair]};
    };
  }
  Table cos, sin;

 private:
  int64_t half_;
};

// Tables of frames, height and width.
struct AxisTables {
  AxisTables(const vcattn_video_grid& g, std::array<int64_t, 3> pairs) : grid(g), pairs_(pairs) {
    for (size_t axis = 0; axis < 3; ++axis) {
      const auto seed = static_cast<uint32_t>(50 + axis);
      cos[axis] = random_table(extent(axis) * pairs[axis], seed);
      sin[axis] = random_table(extent(axis) * pairs[axis], seed + 10);
    }
  }
  int64_t extent(size_t axis) const { return std::array{grid.frames, grid.height, grid.width}[axis]; }
  vcattn_rope rope(vcattn_rope_pairing pairing) const {
    vcattn_rope r{pairing, VCATTN_ROPE_PER_AXIS, {}, {}, {}, {pairs_[0], pairs_[1], pairs_[2]}};
    for (size_t axis = 0; axis < 3; ++axis) {
      if (pairs_[axis] == 0) continue;
      r.cos[axis] = cos[axis].data();
      r.sin[axis] = sin[axis].data();
    }
    return r;
  }
  AngleOf angles() const {
    return [this](int64_t, int64_t token, int64_t, int64_t pair) {
      const int64_t place = token - grid.first_token;
      if (place < 0 || place >= grid.frames * grid.height * grid.width) return Angle{1.0f, 0.0f};
      const std::array<int64_t, 3> at = {place / grid.width / grid.height, place / grid.width % grid.height,
                                         place % grid.width};
      size_t axis = 0;
      while (pair >= pairs_[axis]) pair -= pairs_[axis++];
      return Angle{cos[axis][at[axis] * pairs_[axis] + pair], sin[axis][at[axis] * pairs_[axis] + pair]};
    };
  }
  vcattn_video_grid grid;
  std::array<Table, 3> cos, sin;

 private:
  std::array<int64_t, 3> pairs_;
};

}  // namespace vcattn::test
