#include "synth_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>

#include "core/tensor_access.h"
#include "library.h"
#include "numerics/attention_math.h"
#include "random.h"
#include "synth_structure.h"
#include "vsmooth/grouping.h"

namespace vcattn::cli {
namespace {

constexpr double kStopWithin = 0.001;  // of each share; chance leaves that much in the static orders
constexpr int kMaxRounds = 12;         // of the search for the weight of the cluster kind
// k-means may jump over the asked share, as it ends in one local optimum or another: then other noise is drawn.
constexpr int kMaxDraws = 8;

enum KindIndex : size_t { kConstant, kNoise, kCluster, kSmooth };  // the last one only with a grid

using Weights = std::vector<double>;  // [kinds] shares of the total energy
using Permutation = std::vector<int32_t>;

Permutation order_of(const Rows& rows, int32_t v_order, const vcattn_video_grid& grid) {
  const vcattn_grouping grouping = make_recipe("vsmooth8").grouping;
  const vsmooth::Tokens tokens = rows.tokens();
  Workspace memory;
  const size_t bytes = vsmooth::grouping_workspace_size(tokens.count, tokens.stride, grouping, v_order);
  Permutation permutation(static_cast<size_t>(tokens.count));
  vsmooth::order_tokens(tokens, v_order, grouping, grid, false, nullptr, permutation.data(), memory.at_least(bytes));
  return permutation;
}

double removed(const Rows& rows, const Permutation& permutation) {
  return vsmooth::energy_removed(rows.tokens(), permutation.data(), kBlockN);
}

// Solves matrix x = right by Gaussian elimination with partial pivoting; nothing where it is singular.
std::optional<std::vector<double>> solve(std::vector<std::vector<double>> matrix, std::vector<double> right) {
  constexpr double kSmallestPivot = 1e-6;  // coefficients are shares of 1
  const size_t n = right.size();
  for (size_t column = 0; column < n; ++column) {
    size_t pivot = column;
    for (size_t row = column + 1; row < n; ++row) {
      if (std::abs(matrix[row][column]) > std::abs(matrix[pivot][column])) pivot = row;
    }
    if (std::abs(matrix[pivot][column]) < kSmallestPivot) return std::nullopt;
    std::swap(matrix[pivot], matrix[column]);
    std::swap(right[pivot], right[column]);
    for (size_t row = 0; row < n; ++row) {
      if (row == column) continue;
      const double factor = matrix[row][column] / matrix[column][column];
      for (size_t c = column; c < n; ++c) matrix[row][c] -= factor * matrix[column][c];
      right[row] -= factor * right[column];
    }
  }
  for (size_t i = 0; i < n; ++i) right[i] /= matrix[i][i];
  return right;
}

// One static order of the tokens: the share asked for, and what its block means remove from each kind.
struct StaticOrder {
  double asked;
  Permutation permutation;
  std::vector<double> kind_removed;  // [kinds]
};

class ValueMixture {
 public:
  ValueMixture(const SynthOptions& options, const std::vector<int32_t>& labels, int64_t batch, int64_t head, int draw)
      : options_(options) {
    const auto stream = [&](int64_t purpose) {
      return Random(options.seed, {batch, head, static_cast<int64_t>(SynthStream::kValues), draw, purpose});
    };
    Random constant = stream(kConstant), noise = stream(kNoise), cluster = stream(kCluster), smooth = stream(kSmooth);
    const int64_t tokens = options.tokens, dim = options.head_dim;
    kinds_.push_back(constant_rows(tokens, dim, constant));
    kinds_.push_back(noise_rows(tokens, dim, options.outlier_fraction, options.outlier_scale, noise));
    kinds_.push_back(cluster_rows(labels, options.clusters, dim, cluster));
    if (options.energy.cube) {
      kinds_.push_back(smooth_rows(tokens, options.grid, dim, smooth));
      subtract_block_means(kinds_[kSmooth], kBlockN);
    }
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (kind != kConstant) subtract_block_means(kinds_[kind], tokens);
      normalise(kinds_[kind]);
    }
    add_order(options.energy.sequence, VCATTN_ORDER_SEQUENCE);
    if (options.energy.cube) add_order(*options.energy.cube, VCATTN_ORDER_CUBE);
  }

  // The weights that give the shares in the static orders; nothing where these orders do not differ.
  std::optional<Weights> weights_at(double cluster_weight) const {
    std::vector<std::vector<double>> matrix = {std::vector<double>(kinds_.size() - 1, 1.0)};
    std::vector<double> right = {1.0 - cluster_weight};
    for (const StaticOrder& order : orders_) {
      std::vector<double> row = order.kind_removed;
      row.erase(row.begin() + kCluster);
      matrix.push_back(std::move(row));
      right.push_back(order.asked - cluster_weight * order.kind_removed[kCluster]);
    }
    std::optional<Weights> weights = solve(std::move(matrix), std::move(right));
    if (weights) weights->insert(weights->begin() + kCluster, cluster_weight);
    return weights;
  }

  // A negative weight is a kind that the request has no room for: it is left out, and the rest scaled to the same
  // energy.
  Rows mix(const Weights& weights) const {
    double energy = 0;
    for (const double weight : weights) energy += std::max(weight, 0.0);
    Rows mixture(options_.tokens, options_.head_dim);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      add_scaled(kinds_[kind], std::sqrt(std::max(weights[kind], 0.0) / energy), mixture);
    }
    return mixture;
  }

  EnergyShares shares_of(const Rows& mixture) const {
    EnergyShares shares;
    shares.sequence = removed(mixture, orders_[0].permutation);
    if (orders_.size() > 1) shares.cube = removed(mixture, orders_[1].permutation);
    shares.kmeans = removed(mixture, order_of(mixture, VCATTN_ORDER_KMEANS, {}));
    return shares;
  }

 private:
  void add_order(double asked, int32_t v_order) {
    StaticOrder order = {asked, order_of(kinds_[0], v_order, options_.grid), {}};
    for (const Rows& kind : kinds_) order.kind_removed.push_back(removed(kind, order.permutation));
    orders_.push_back(std::move(order));
  }

  const SynthOptions& options_;
  std::vector<Rows> kinds_;  // each of mean square 1
  std::vector<StaticOrder> orders_;
};

double largest_difference(const EnergyShares& a, const EnergyShares& b) {
  return std::max({std::abs(a.sequence - b.sequence), std::abs(a.cube.value_or(0) - b.cube.value_or(0)),
                   std::abs(a.kmeans - b.kmeans)});
}

struct Attempt {
  double difference = std::numeric_limits<double>::infinity();
  EnergyShares shares;
  std::optional<Rows> values;  // as stored
  std::string reason;          // why it is not closer; empty: chance
};

// Searches the weight of the cluster kind in [0, largest] by regula falsi (Illinois), which is quick where the share
// after k-means is smooth and safe where it jumps.
Attempt search(const ValueMixture& mixture, const EnergyShares& asked, int64_t tokens,
               const std::function<void(Rows&)>& round_to_dtype) {
  Attempt best;
  const std::optional<Weights> without = mixture.weights_at(0), alone = mixture.weights_at(1);
  if (!without || !alone) {
    best.reason = fmt::format("the orders group these {} tokens alike", tokens);
    return best;
  }
  // The other weights fall linearly as that of the cluster kind grows, the noise first.
  const double noise_falls = (*without)[kNoise] - (*alone)[kNoise];
  const double largest = std::clamp((*without)[kNoise] / noise_falls, 0.0, 1.0);
  // Shares less the asked one at the ends: guesses until the search gets there.
  double low = 0, low_error = std::min(asked.cube.value_or(asked.sequence) - asked.kmeans, -kStopWithin);
  double high = largest, high_error = std::max(1 - asked.kmeans, kStopWithin);
  int last_side = 0;
  for (int round = 0; round < kMaxRounds && best.difference > kStopWithin; ++round) {
    const double weight = (low_error * high - high_error * low) / (low_error - high_error);
    Rows values = mixture.mix(*mixture.weights_at(weight));
    round_to_dtype(values);
    const EnergyShares shares = mixture.shares_of(values);
    const double error = shares.kmeans - asked.kmeans;
    const int side = error < 0 ? -1 : 1;
    (side < 0 ? low : high) = weight;
    (side < 0 ? low_error : high_error) = error;
    if (side == last_side) (side < 0 ? high_error : low_error) /= 2;
    last_side = side;
    if (const double difference = largest_difference(asked, shares); difference < best.difference) {
      best = {difference, shares, std::move(values), {}};
    }
  }
  constexpr double kNearEnd = 0.02;  // of the total energy
  if (high < kNearEnd) best.reason = "k-means removes more even without clusters";
  if (largest - low < kNearEnd) best.reason = "out of reach for these tokens, even without noise";
  return best;
}

}  // namespace

std::string shares_text(const EnergyShares& shares) {
  const std::string cube = shares.cube ? fmt::format("{:.1f}, ", 100 * *shares.cube) : "";
  return fmt::format("{:.1f}, {}{:.1f} %", 100 * shares.sequence, cube, 100 * shares.kmeans);
}

void check_shares(const EnergyShares& asked) {
  constexpr double kLeast = 1.0 / kBlockN;
  const double cube = asked.cube.value_or(asked.sequence);
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error(fmt::format("--energy {}: {}", shares_text(asked), why));
  };
  for (const double share : {asked.sequence, cube, asked.kmeans}) {
    if (!(share >= kLeast && share < 1)) {
      refuse(fmt::format("each share is at least {:.2f} %, what means of {} rows remove from noise, and below 100 %",
                         100 * kLeast, kBlockN));
    }
  }
  if (asked.sequence > cube) refuse("the share in sequence order is at most that in cube order");
  if (cube > asked.kmeans) {
    refuse(fmt::format("the share in {} order is at most that after k-means", asked.cube ? "cube" : "sequence"));
  }
}

EnergyShares synthesize_values(const SynthOptions& options, const std::vector<int32_t>& labels, int64_t batch,
                               int64_t head, const vcattn_tensor& v) {
  const auto store = [&](const Rows& rows) {
    for (int64_t i = 0; i < rows.count(); ++i) store_row(v, batch, i, head, rows.row(i));
  };
  const auto round_to_dtype = [&](Rows& rows) {
    store(rows);
    for (int64_t i = 0; i < rows.count(); ++i) load_row(v, batch, i, head, rows.row(i));
  };
  Attempt best;
  for (int draw = 0; draw < kMaxDraws && best.reason.empty() && best.difference > kShareTolerance; ++draw) {
    Attempt attempt =
        search(ValueMixture(options, labels, batch, head, draw), options.energy, options.tokens, round_to_dtype);
    if (draw == 0 || attempt.difference < best.difference) best = std::move(attempt);
  }
  if (best.difference > kShareTolerance) {
    std::string message = fmt::format("--energy {}: {}", shares_text(options.energy),
                                      best.reason.empty() ? "k-means jumps over this share" : best.reason);
    if (best.values) {
      message += fmt::format("; batch {}, KV head {} comes to {} at best", batch, head, shares_text(best.shares));
    }
    throw std::runtime_error(message);
  }
  store(*best.values);
  return best.shares;
}

}  // namespace vcattn::cli
