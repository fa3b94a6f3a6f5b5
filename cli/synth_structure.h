// Building blocks of synthetic tensors: token rows of one head with one kind of structure each.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"
#include "vcattn/vcattn.h"
#include "vsmooth/grouping.h"

namespace vcattn::cli {

// The first step of each Random stream of a (batch, KV head), so that nothing depends on the order of the draws.
enum class SynthStream : int64_t { kLabels, kValues, kKeys, kQueries };

// FP32 rows, padded with zeros to whole vectors as vsmooth::Tokens wants them.
class Rows {
 public:
  Rows(int64_t count, int64_t dim);

  float* row(int64_t i) { return data_.data() + i * stride_; }
  const float* row(int64_t i) const { return data_.data() + i * stride_; }
  int64_t count() const { return count_; }
  int64_t dim() const { return dim_; }
  vsmooth::Tokens tokens() const { return {data_.data(), count_, dim_, stride_}; }

 private:
  int64_t count_, dim_, stride_;
  std::vector<float> data_;
};

// One label in [0, clusters) per token, each token for itself; the clusters' sizes are uniform on the simplex.
std::vector<int32_t> draw_labels(int64_t count, int64_t clusters, Random& random);

// Rows of one Gaussian vector per label.
Rows cluster_rows(const std::vector<int32_t>& labels, int64_t clusters, int64_t dim, Random& random);

// Rows of a Gaussian field over the grid that is smooth in space and time; zero outside the grid.
Rows smooth_rows(int64_t count, const vcattn_video_grid& grid, int64_t dim, Random& random);

// Independent Gaussian rows; about `outlier_fraction` of them are `outlier_scale` times as large.
Rows noise_rows(int64_t count, int64_t dim, double outlier_fraction, double outlier_scale, Random& random);

// The same Gaussian row everywhere.
Rows constant_rows(int64_t count, int64_t dim, Random& random);

// Subtracts the mean of each `block` successive rows; `block` = count subtracts the mean over tokens.
void subtract_block_means(Rows& rows, int64_t block);

// Scales to a mean square of 1 per element; leaves zeros as they are.
void normalise(Rows& rows);

// out += factor * rows
void add_scaled(const Rows& rows, double factor, Rows& out);

}  // namespace vcattn::cli
