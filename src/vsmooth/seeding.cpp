#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "vsmooth/clusters.h"
#include "vsmooth/row_ops.h"

namespace vcattn::vsmooth {
namespace {

// SplitMix64 (Steele, Lea and Flood, 2014): the same numbers with every compiler and standard library, which the
// distributions of <random> do not promise.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // Uniform in [0, bound), bound >= 1. Draws below 2^64 mod bound are rejected: the rest are a multiple of bound.
  int64_t below(int64_t bound) {
    const uint64_t size = static_cast<uint64_t>(bound);
    const uint64_t rejected = (0 - size) % size;
    uint64_t draw = next();
    while (draw < rejected) draw = next();
    return static_cast<int64_t>(draw % size);
  }

  // Uniform multiples of 2^-53 in [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

void copy_token(const Tokens& tokens, int64_t token, int32_t cluster, float* centroids) {
  std::copy_n(tokens.row(token), tokens.stride, centroids + cluster * tokens.stride);
}

void seed_spaced(const Tokens& tokens, int32_t clusters, float* centroids) {
  for (int32_t j = 0; j < clusters; ++j) {
    copy_token(tokens, clusters == 1 ? 0 : j * (tokens.count - 1) / (clusters - 1), j, centroids);
  }
}

// The first `clusters` steps of a Fisher-Yates shuffle.
void seed_random(const Tokens& tokens, int32_t clusters, uint64_t seed, int32_t* tokens_left, float* centroids) {
  SplitMix64 random(seed);
  std::iota(tokens_left, tokens_left + tokens.count, 0);
  for (int32_t j = 0; j < clusters; ++j) {
    std::swap(tokens_left[j], tokens_left[j + random.below(tokens.count - j)]);
    copy_token(tokens, tokens_left[j], j, centroids);
  }
}

void lower_to_distance_from(const Tokens& tokens, const float* centroid, float* nearest) {
  constexpr int64_t kGrain = 256;
  tbb::parallel_for(tbb::blocked_range<int64_t>(0, tokens.count, kGrain), [&](const auto& range) {
    for (int64_t i = range.begin(); i != range.end(); ++i) {
      nearest[i] = std::min(nearest[i], squared_distance(tokens.row(i), centroid, tokens.stride));
    }
  });
}

int64_t draw_in_proportion(const float* weights, int64_t count, SplitMix64& random) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += weights[i];
  if (!(total > 0) || !std::isfinite(total)) return random.below(count);
  const double target = random.unit() * total;
  double sum = 0;
  int64_t i = 0;
  // The same sums in the same order: the last one is total, and more than the target.
  while ((sum += weights[i]) <= target) ++i;
  return i;
}

void seed_plusplus(const Tokens& tokens, int32_t clusters, uint64_t seed, float* nearest, float* centroids) {
  SplitMix64 random(seed);
  std::fill_n(nearest, tokens.count, std::numeric_limits<float>::infinity());
  int64_t token = random.below(tokens.count);
  for (int32_t j = 0;;) {
    copy_token(tokens, token, j, centroids);
    if (++j == clusters) return;
    lower_to_distance_from(tokens, tokens.row(token), nearest);
    token = draw_in_proportion(nearest, tokens.count, random);
  }
}

}  // namespace

void seed_centroids(const Tokens& tokens, int32_t clusters, int32_t seeding, uint64_t seed, float* nearest,
                    int32_t* tokens_left, float* centroids) {
  if (clusters == 0) return;
  if (seeding == VCATTN_SEED_RANDOM) {
    seed_random(tokens, clusters, seed, tokens_left, centroids);
  } else if (seeding == VCATTN_SEED_PLUSPLUS) {
    seed_plusplus(tokens, clusters, seed, nearest, centroids);
  } else {
    seed_spaced(tokens, clusters, centroids);
  }
}

}  // namespace vcattn::vsmooth
