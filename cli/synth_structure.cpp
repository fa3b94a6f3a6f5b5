#include "synth_structure.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace vcattn::cli {
namespace {

constexpr int64_t kStrideFloats = 16;  // vsmooth::Tokens

// Distance between the independent values of the smooth field, in grid cells: about the size of an object in a latent
// video, and longer in time than the 2 frames of a cube.
constexpr std::array<int64_t, 3> kFieldSpacing = {6, 8, 8};  // frames, height, width

// The two lattice values around a grid cell along one axis, and the weight of the second.
struct Bracket {
  int64_t first;
  float weight;
};

// `phase` in [0, 1) shifts the lattice against the grid, so that no block of tokens is favoured.
Bracket bracket(int64_t cell, int64_t spacing, double phase) {
  const double place = static_cast<double>(cell) / static_cast<double>(spacing) + phase;
  const double first = std::floor(place);
  return {static_cast<int64_t>(first), static_cast<float>(place - first)};
}

void fill_normal(float* row, int64_t dim, double scale, Random& random) {
  for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<float>(scale * random.normal());
}

}  // namespace

Rows::Rows(int64_t count, int64_t dim)
    : count_(count),
      dim_(dim),
      stride_((dim + kStrideFloats - 1) / kStrideFloats * kStrideFloats),
      data_(static_cast<size_t>(count * stride_)) {}

std::vector<int32_t> draw_labels(int64_t count, int64_t clusters, Random& random) {
  // The gaps between sorted uniform numbers are uniform on the simplex: a token falls into a cluster with the
  // probability of the gap that its own uniform number falls into.
  std::vector<double> bounds(static_cast<size_t>(clusters - 1));
  for (double& bound : bounds) bound = random.uniform();
  std::sort(bounds.begin(), bounds.end());
  std::vector<int32_t> labels(static_cast<size_t>(count));
  for (int32_t& label : labels) {
    label = static_cast<int32_t>(std::upper_bound(bounds.begin(), bounds.end(), random.uniform()) - bounds.begin());
  }
  return labels;
}

Rows cluster_rows(const std::vector<int32_t>& labels, int64_t clusters, int64_t dim, Random& random) {
  Rows centres(clusters, dim);
  for (int64_t c = 0; c < clusters; ++c) fill_normal(centres.row(c), dim, 1, random);
  Rows rows(static_cast<int64_t>(labels.size()), dim);
  for (int64_t i = 0; i < rows.count(); ++i) std::copy_n(centres.row(labels[i]), dim, rows.row(i));
  return rows;
}

Rows smooth_rows(int64_t count, const vcattn_video_grid& grid, int64_t dim, Random& random) {
  const std::array<int64_t, 3> cells = {grid.frames, grid.height, grid.width};
  std::array<int64_t, 3> points;  // lattice values along each axis: one more than a phase below 1 can reach
  std::array<double, 3> phase;
  for (size_t axis = 0; axis < 3; ++axis) {
    points[axis] = cells[axis] / kFieldSpacing[axis] + 3;
    phase[axis] = random.uniform();
  }
  Rows lattice(points[0] * points[1] * points[2], dim);
  for (int64_t p = 0; p < lattice.count(); ++p) fill_normal(lattice.row(p), dim, 1, random);

  Rows rows(count, dim);
  int64_t token = grid.first_token;
  for (int64_t t = 0; t < grid.frames; ++t) {
    const Bracket bt = bracket(t, kFieldSpacing[0], phase[0]);
    for (int64_t y = 0; y < grid.height; ++y) {
      const Bracket by = bracket(y, kFieldSpacing[1], phase[1]);
      for (int64_t x = 0; x < grid.width; ++x, ++token) {
        const Bracket bx = bracket(x, kFieldSpacing[2], phase[2]);
        for (int corner = 0; corner < 8; ++corner) {
          const int dt = corner / 4, dy = corner / 2 % 2, dx = corner % 2;
          const float weight =
              (dt ? bt.weight : 1 - bt.weight) * (dy ? by.weight : 1 - by.weight) * (dx ? bx.weight : 1 - bx.weight);
          const float* value = lattice.row(((bt.first + dt) * points[1] + by.first + dy) * points[2] + bx.first + dx);
          float* out = rows.row(token);
          for (int64_t d = 0; d < dim; ++d) out[d] += weight * value[d];
        }
      }
    }
  }
  return rows;
}

Rows noise_rows(int64_t count, int64_t dim, double outlier_fraction, double outlier_scale, Random& random) {
  Rows rows(count, dim);
  for (int64_t i = 0; i < count; ++i) {
    fill_normal(rows.row(i), dim, random.uniform() < outlier_fraction ? outlier_scale : 1, random);
  }
  return rows;
}

Rows constant_rows(int64_t count, int64_t dim, Random& random) {
  Rows rows(count, dim);
  fill_normal(rows.row(0), dim, 1, random);
  for (int64_t i = 1; i < count; ++i) std::copy_n(rows.row(0), dim, rows.row(i));
  return rows;
}

void subtract_block_means(Rows& rows, int64_t block) {
  std::vector<double> mean(static_cast<size_t>(rows.dim()));
  for (int64_t begin = 0; begin < rows.count(); begin += block) {
    const int64_t end = std::min(begin + block, rows.count());
    std::fill(mean.begin(), mean.end(), 0.0);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t d = 0; d < rows.dim(); ++d) mean[d] += static_cast<double>(rows.row(i)[d]);
    }
    for (double& m : mean) m /= static_cast<double>(end - begin);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t d = 0; d < rows.dim(); ++d) rows.row(i)[d] -= static_cast<float>(mean[d]);
    }
  }
}

void normalise(Rows& rows) {
  double energy = 0;
  for (int64_t i = 0; i < rows.count(); ++i) {
    for (int64_t d = 0; d < rows.dim(); ++d) energy += static_cast<double>(rows.row(i)[d]) * rows.row(i)[d];
  }
  if (energy == 0) return;
  const double scale = std::sqrt(static_cast<double>(rows.count() * rows.dim()) / energy);
  for (int64_t i = 0; i < rows.count(); ++i) {
    for (int64_t d = 0; d < rows.dim(); ++d) rows.row(i)[d] = static_cast<float>(scale * rows.row(i)[d]);
  }
}

void add_scaled(const Rows& rows, double factor, Rows& out) {
  const float f = static_cast<float>(factor);
  for (int64_t i = 0; i < rows.count(); ++i) {
    for (int64_t d = 0; d < rows.dim(); ++d) out.row(i)[d] += f * rows.row(i)[d];
  }
}

}  // namespace vcattn::cli
