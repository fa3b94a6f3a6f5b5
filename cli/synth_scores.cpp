#include "synth_scores.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/tensor_access.h"
#include "random.h"
#include "synth_structure.h"

namespace vcattn::cli {
namespace {

constexpr int64_t kHeavyChannels = 4;  // of all channels, as keys after RoPE show
constexpr double kHeavyGain = 2;       // of what varies from token to token
constexpr double kHeavyBias = 8;       // of the bias
constexpr double kQueryBias = 0.5;     // of Q's bias relative to K's
// Shares of the energy that varies from token to token.
constexpr double kClusterShare = 0.4, kSmoothShare = 0.3, kNoiseShare = 0.3;
constexpr int64_t kSampledRows = 64;  // for the sharpness of the softmax

struct Channels {
  std::vector<double> gain;    // [head_dim]
  std::vector<bool> is_heavy;  // [head_dim]
};

Channels draw_channels(int64_t dim, Random& random) {
  Channels channels{std::vector<double>(dim, 1.0), std::vector<bool>(dim, false)};
  for (int64_t i = 0; i < std::min(kHeavyChannels, dim); ++i) {
    const auto d = static_cast<size_t>(random.uniform() * static_cast<double>(dim));  // twice the same: one fewer
    channels.gain[d] = kHeavyGain;
    channels.is_heavy[d] = true;
  }
  return channels;
}

// The structure that queries and keys share, each kind normalised.
struct Shared {
  Channels channels;
  Rows clusters, field;
};

Shared draw_shared(const SynthOptions& options, const std::vector<int32_t>& labels, Random& random) {
  Channels channels = draw_channels(options.head_dim, random);
  Rows clusters = cluster_rows(labels, options.clusters, options.head_dim, random);
  Rows field = smooth_rows(options.tokens, options.grid, options.head_dim, random);
  normalise(clusters);
  normalise(field);
  return {std::move(channels), std::move(clusters), std::move(field)};
}

// Rows of gain * (shared structure + noise of their own), mean 0 over tokens.
Rows token_rows(const SynthOptions& options, const Shared& shared, Random& random) {
  Rows rows = noise_rows(options.tokens, options.head_dim, 0, 1, random);
  normalise(rows);
  Rows sum(options.tokens, options.head_dim);
  add_scaled(rows, std::sqrt(kNoiseShare), sum);
  add_scaled(shared.clusters, std::sqrt(kClusterShare), sum);
  add_scaled(shared.field, std::sqrt(kSmoothShare), sum);
  for (int64_t i = 0; i < sum.count(); ++i) {
    for (int64_t d = 0; d < sum.dim(); ++d) sum.row(i)[d] *= static_cast<float>(shared.channels.gain[d]);
  }
  subtract_block_means(sum, sum.count());
  normalise(sum);
  return sum;
}

// A common vector, heavy in the heavy channels, whose mean square per channel is strength^2.
std::vector<double> draw_bias(const Channels& channels, double strength, Random& random) {
  std::vector<double> bias(channels.gain.size());
  double energy = 0;
  for (size_t d = 0; d < bias.size(); ++d) {
    bias[d] = random.normal() * (channels.is_heavy[d] ? kHeavyBias : 1);
    energy += bias[d] * bias[d];
  }
  const double scale = strength * std::sqrt(static_cast<double>(bias.size()) / energy);
  for (double& b : bias) b *= scale;
  return bias;
}

void store_biased(const Rows& rows, const std::vector<double>& bias, double factor, int64_t batch, int64_t head,
                  const vcattn_tensor& out) {
  std::vector<float> biased(bias.size());
  for (int64_t i = 0; i < rows.count(); ++i) {
    for (size_t d = 0; d < bias.size(); ++d) {
      biased[d] = static_cast<float>(factor * (static_cast<double>(rows.row(i)[d]) + bias[d]));
    }
    store_row(out, batch, i, head, biased.data());
  }
}

// Scores of sampled query rows, less their mean over the keys, for Q without its factor.
struct Scores {
  std::vector<std::vector<double>> rows;
  double deviation;  // RMS over rows of the standard deviation over keys
};

Scores sample_scores(const Rows& q, const std::vector<double>& q_bias, const Rows& k) {
  const int64_t samples = std::min(kSampledRows, q.count());
  const double softmax_scale = 1 / std::sqrt(static_cast<double>(k.dim()));
  Scores scores;
  double variance = 0;
  std::vector<float> query(q_bias.size());
  for (int64_t s = 0; s < samples; ++s) {
    const float* row = q.row((2 * s + 1) * q.count() / (2 * samples));
    for (size_t d = 0; d < query.size(); ++d) query[d] = row[d] + static_cast<float>(q_bias[d]);
    std::vector<double> values(static_cast<size_t>(k.count()));
    double mean = 0;
    for (int64_t j = 0; j < k.count(); ++j) {
      float product = 0;
      for (int64_t d = 0; d < k.dim(); ++d) product += query[d] * k.row(j)[d];
      values[j] = softmax_scale * static_cast<double>(product);
      mean += values[j];
    }
    mean /= static_cast<double>(k.count());
    for (double& value : values) {
      value -= mean;
      variance += value * value;
    }
    scores.rows.push_back(std::move(values));
  }
  scores.deviation = std::sqrt(variance / static_cast<double>(samples * k.count()));
  return scores;
}

// Entropy of the softmax of factor * scores, in nats.
double entropy(const std::vector<double>& scores, double factor) {
  const double largest = factor * *std::max_element(scores.begin(), scores.end());
  double sum = 0, weighted = 0;
  for (const double score : scores) {
    const double u = factor * score - largest;
    sum += std::exp(u);
    weighted += std::exp(u) * u;
  }
  return std::log(sum) - weighted / sum;
}

}  // namespace

double synthesize_scores(const SynthOptions& options, const std::vector<int32_t>& labels, int64_t batch,
                         int64_t head_kv, const vcattn_tensor& q, const vcattn_tensor& k) {
  Random key_random(options.seed, {batch, head_kv, static_cast<int64_t>(SynthStream::kKeys)});
  const Shared shared = draw_shared(options, labels, key_random);
  const Rows keys = token_rows(options, shared, key_random);
  store_biased(keys, draw_bias(shared.channels, options.k_bias, key_random), 1, batch, head_kv, k);

  const int64_t group = options.heads / options.heads_kv;
  double entropy_sum = 0;
  int64_t rows = 0;
  for (int64_t h = head_kv * group; h < (head_kv + 1) * group; ++h) {
    Random query_random(options.seed, {batch, head_kv, static_cast<int64_t>(SynthStream::kQueries), h});
    const Rows queries = token_rows(options, shared, query_random);
    const std::vector<double> bias = draw_bias(shared.channels, kQueryBias * options.k_bias, query_random);
    const Scores scores = sample_scores(queries, bias, keys);
    const double factor = scores.deviation > 0 ? options.sharpness / scores.deviation : 1;
    store_biased(queries, bias, factor, batch, h, q);
    for (const std::vector<double>& row : scores.rows) entropy_sum += entropy(row, factor);
    rows += static_cast<int64_t>(scores.rows.size());
  }
  return std::exp(entropy_sum / static_cast<double>(rows));
}

}  // namespace vcattn::cli
