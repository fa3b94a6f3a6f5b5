#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "value_tokens.h"
#include "vsmooth/clusters.h"

namespace vcattn::vsmooth {
namespace {

using test::Grouping;
using test::GuardedWorkspace;
using test::TokenBuffer;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Clustering {
  std::vector<float> centroids;  // [clusters, stride]
  std::vector<int32_t> labels;
  double inertia = 0;

  bool operator==(const Clustering& other) const = default;
};

// Warm from `start` where it is given. The workspace has exactly the size asked for.
Clustering cluster(const TokenBuffer& buffer, const Grouping& params, const std::vector<float>& start = {}) {
  const Tokens tokens = buffer.tokens();
  Clustering result;
  result.centroids.assign(static_cast<size_t>(params.clusters * tokens.stride), kNaN);
  std::copy(start.begin(), start.end(), result.centroids.begin());
  result.labels.assign(static_cast<size_t>(tokens.count), -1);
  GuardedWorkspace workspace(grouping_workspace_size(tokens.count, tokens.stride, params, VCATTN_ORDER_KMEANS));
  result.inertia =
      kmeans(tokens, params, !start.empty(), result.centroids.data(), result.labels.data(), workspace.span());
  EXPECT_TRUE(workspace.guards_intact()) << tokens.count << " tokens, " << params.clusters << " clusters";
  return result;
}

// Centroids of one channel, padded.
std::vector<float> scalars(const std::vector<float>& values) {
  std::vector<float> rows(values.size() * 16);
  for (size_t j = 0; j < values.size(); ++j) rows[j * 16] = values[j];
  return rows;
}

float scalar(const Clustering& result, int32_t cluster) { return result.centroids[static_cast<size_t>(cluster) * 16]; }

double exact_squared_distance(const Tokens& tokens, int64_t token, const std::vector<float>& centroids, int64_t j) {
  double sum = 0;
  for (int64_t d = 0; d < tokens.dim; ++d) {
    const double difference = static_cast<double>(tokens.row(token)[d]) -
                              static_cast<double>(centroids[static_cast<size_t>(j * tokens.stride + d)]);
    sum += difference * difference;
  }
  return sum;
}

TEST(KMeans, AssignsToTheNearestCentroid) {
  // More clusters than one panel of the matrix product takes, and not a multiple of it.
  const TokenBuffer buffer = test::random_tokens(1500, 40, 1);
  const Tokens tokens = buffer.tokens();
  const Clustering result = cluster(buffer, {.clusters = 150, .iterations = 2});
  double inertia = 0;
  for (int64_t i = 0; i < tokens.count; ++i) {
    const int32_t label = result.labels[static_cast<size_t>(i)];
    ASSERT_GE(label, 0);
    ASSERT_LT(label, 150);
    const double own = exact_squared_distance(tokens, i, result.centroids, label);
    for (int64_t j = 0; j < 150; ++j) {
      ASSERT_LE(own, exact_squared_distance(tokens, i, result.centroids, j) + 1e-4)
          << "token " << i << " cluster " << j;
    }
    inertia += own;
  }
  EXPECT_NEAR(result.inertia, inertia, 1e-6 * inertia);
}

TEST(KMeans, CentroidsAreTheMeansOfConvergedClusters) {
  const TokenBuffer buffer = test::random_tokens(400, 20, 2);
  const Tokens tokens = buffer.tokens();
  const Clustering result = cluster(buffer, {.clusters = 8, .iterations = 100, .seeding = VCATTN_SEED_PLUSPLUS});
  for (int32_t j = 0; j < 8; ++j) {
    for (int64_t d = 0; d < tokens.dim; ++d) {
      double sum = 0;
      int count = 0;
      for (int64_t i = 0; i < tokens.count; ++i) {
        if (result.labels[static_cast<size_t>(i)] == j) sum += static_cast<double>(tokens.row(i)[d]), ++count;
      }
      ASSERT_GT(count, 0);
      EXPECT_NEAR(result.centroids[static_cast<size_t>(j * tokens.stride + d)], sum / count, 1e-6) << j << ' ' << d;
    }
  }
}

TEST(KMeans, CountsIterationsAsUpdatesBeforeTheLastAssignment) {
  // 0 and 1 start apart; each update moves the border between the clusters, and one more token to the first.
  const TokenBuffer buffer({0, 1, 2, 3, 10});
  const std::vector<float> start = scalars({0, 1});
  Grouping params{.clusters = 2, .iterations = 50};
  EXPECT_EQ(cluster(buffer, params, start).labels, (std::vector<int32_t>{0, 1, 1, 1, 1}));
  params.warm_iterations = 1;  // centroids 0 and 4
  EXPECT_EQ(cluster(buffer, params, start).labels, (std::vector<int32_t>{0, 0, 0, 1, 1}));
  params.warm_iterations = 2;  // centroids 1 and 6.5
  EXPECT_EQ(cluster(buffer, params, start).labels, (std::vector<int32_t>{0, 0, 0, 0, 1}));
  EXPECT_EQ(scalar(cluster(buffer, params, start), 1), 6.5f);
}

TEST(KMeans, TiesGoToTheLowerLabel) {
  const TokenBuffer buffer({0, 0, 5, -5});
  const Clustering result = cluster(buffer, {.clusters = 3}, scalars({1, -1, 1}));
  EXPECT_EQ(result.labels, (std::vector<int32_t>{0, 0, 0, 1}));
}

TEST(KMeans, IsTheSameForAnyNumberOfThreads) {
  const TokenBuffer buffer = test::random_tokens(3001, 72, 3);
  for (const int32_t seeding : {VCATTN_SEED_SPACED, VCATTN_SEED_RANDOM, VCATTN_SEED_PLUSPLUS}) {
    const Grouping params{.clusters = 65, .iterations = 4, .seeding = seeding, .seed = 9};
    const Clustering expected = cluster(buffer, params);
    test::for_each_thread_count([&](int threads) {
      EXPECT_TRUE(cluster(buffer, params) == expected) << threads << " threads, seeding " << seeding;
    });
  }
}

TEST(KMeans, InertiaNeverIncreases) {
  const TokenBuffer buffer = test::random_tokens(2000, 33, 4, 30);
  for (const int32_t seeding : {VCATTN_SEED_SPACED, VCATTN_SEED_RANDOM, VCATTN_SEED_PLUSPLUS}) {
    double previous = std::numeric_limits<double>::infinity();
    for (int32_t iterations = 0; iterations <= 10; ++iterations) {
      const double inertia =
          cluster(buffer, {.clusters = 24, .iterations = iterations, .seeding = seeding, .seed = 5}).inertia;
      EXPECT_LE(inertia, previous * (1 + 1e-6)) << iterations << " iterations, seeding " << seeding;
      if (iterations == 1) {
        EXPECT_LT(inertia, 0.95 * previous);
      }
      previous = inertia;
    }
  }
}

TEST(KMeans, WarmStartContinuesWhereItStopped) {
  const TokenBuffer buffer = test::random_tokens(1000, 16, 6, 20);
  const Grouping params{.clusters = 20, .iterations = 3, .warm_iterations = 2};
  const Clustering cold = cluster(buffer, params);
  const Clustering warm = cluster(buffer, params, cold.centroids);
  EXPECT_LT(warm.inertia, cold.inertia);
  EXPECT_TRUE(warm == cluster(buffer, {.clusters = 20, .iterations = 5}));
  EXPECT_TRUE(cold == cluster(buffer, {.clusters = 20, .iterations = 7, .warm_iterations = 0}, cold.centroids));
}

TEST(KMeans, EmptyClustersTakeTheFarthestTokens) {
  // All tokens start in cluster 0; 20 is the farthest and goes to cluster 1, then 10 to cluster 2.
  const Clustering result =
      cluster(TokenBuffer({0, 1, 10, 20}), {.clusters = 3, .warm_iterations = 1}, scalars({0, 500, 600}));
  EXPECT_EQ(result.labels, (std::vector<int32_t>{0, 0, 2, 1}));
  EXPECT_EQ(scalar(result, 0), 0.5f);
  EXPECT_EQ(scalar(result, 1), 20.0f);
  EXPECT_EQ(scalar(result, 2), 10.0f);
  EXPECT_EQ(result.inertia, 0.5);
}

TEST(KMeans, EmptyClustersTakeTheLowerTokenAtATie) {
  const Clustering result = cluster(TokenBuffer({0, -5, 5}), {.clusters = 2, .warm_iterations = 1}, scalars({0, 100}));
  EXPECT_EQ(scalar(result, 0), 2.5f);
  EXPECT_EQ(scalar(result, 1), -5.0f);
}

TEST(KMeans, EmptyClustersTakeNoLastTokenAndNoneFromItsCentroid) {
  // 4 is the only token of cluster 0, and both 10s lie on their centroid.
  const Clustering result =
      cluster(TokenBuffer({4, 10, 10}), {.clusters = 3, .warm_iterations = 3}, scalars({0, 10, 99}));
  EXPECT_EQ(result.labels, (std::vector<int32_t>{0, 1, 1}));
  EXPECT_EQ(scalar(result, 0), 4.0f);
  EXPECT_EQ(scalar(result, 2), 99.0f);
}

TEST(KMeans, CentroidsThatAreNotFiniteAttractNoToken) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> start = scalars({kNaN, infinity, 1, -infinity});
  EXPECT_EQ(cluster(TokenBuffer({0, 7, -3}), {.clusters = 4}, start).labels, (std::vector<int32_t>{2, 2, 2}));
  const Clustering updated = cluster(TokenBuffer({0, 7, -3, 2}), {.clusters = 4, .warm_iterations = 1}, start);
  EXPECT_EQ(updated.labels, (std::vector<int32_t>{3, 0, 1, 2}));
  EXPECT_EQ(updated.inertia, 0);
}

TEST(KMeans, IdenticalTokens) {
  TokenBuffer buffer(300, 24);
  for (int64_t i = 0; i < 300; ++i) {
    for (int64_t d = 0; d < 24; ++d) buffer.at(i, d) = 0.1f * static_cast<float>(d) - 1.3f;
  }
  for (const int32_t seeding : {VCATTN_SEED_SPACED, VCATTN_SEED_RANDOM, VCATTN_SEED_PLUSPLUS}) {
    const Clustering result = cluster(buffer, {.clusters = 7, .iterations = 5, .seeding = seeding, .seed = 1});
    EXPECT_EQ(result.labels, std::vector<int32_t>(300, 0));
    EXPECT_EQ(result.inertia, 0);
    for (size_t j = 0; j < 7; ++j) {
      EXPECT_EQ(0, std::memcmp(&result.centroids[j * 32], buffer.tokens().data, 32 * sizeof(float))) << j;
    }
  }
}

TEST(KMeans, MoreClustersThanTokens) {
  const TokenBuffer buffer = test::random_tokens(5, 20, 7);
  for (const int32_t seeding : {VCATTN_SEED_SPACED, VCATTN_SEED_RANDOM, VCATTN_SEED_PLUSPLUS}) {
    const Clustering result = cluster(buffer, {.clusters = 9, .iterations = 3, .seeding = seeding, .seed = 1});
    EXPECT_EQ(std::set<int32_t>(result.labels.begin(), result.labels.end()), (std::set<int32_t>{0, 1, 2, 3, 4}));
    EXPECT_EQ(result.inertia, 0);
    for (size_t e = 5 * 32; e < 9 * 32; ++e) ASSERT_EQ(result.centroids[e], 0.0f) << "element " << e;
  }
}

TEST(KMeans, OneTokenAndNone) {
  for (const int32_t seeding : {VCATTN_SEED_SPACED, VCATTN_SEED_RANDOM, VCATTN_SEED_PLUSPLUS}) {
    const Grouping params{.clusters = 3, .iterations = 2, .seeding = seeding, .seed = 2};
    const Clustering one = cluster(TokenBuffer({2.5f}), params);
    EXPECT_EQ(one.labels, (std::vector<int32_t>{0}));
    EXPECT_EQ(one.centroids, scalars({2.5f, 0, 0}));
    const Clustering none = cluster(TokenBuffer(0, 1), params);
    EXPECT_EQ(none.inertia, 0);
    EXPECT_EQ(none.centroids, scalars({0, 0, 0}));
  }
}

TEST(KMeans, ReadsNoPaddingAndNoUnusedRow) {
  const TokenBuffer buffer = test::random_tokens(6, 20, 8);
  const Grouping params{.clusters = 8, .iterations = 1, .warm_iterations = 1};
  std::vector<float> start = cluster(buffer, params).centroids;
  const Clustering expected = cluster(buffer, params, start);
  for (size_t j = 0; j < 8; ++j) std::fill_n(&start[j * 32 + 20], 12, kNaN);
  std::fill(start.begin() + 6 * 32, start.end(), kNaN);
  EXPECT_TRUE(cluster(buffer, params, start) == expected);
}

TEST(KMeans, KeepsWithinItsWorkspace) {
  std::mt19937 random(10);
  for (const int32_t clusters : {1, 2, 64, 700}) {
    for (int trial = 0; trial < 8; ++trial) {
      const int64_t count = 1 + random() % 700;
      const int32_t seeding = static_cast<int32_t>(random() % 3);
      const TokenBuffer buffer = test::random_tokens(count, 1 + random() % 80, random());
      cluster(buffer, {.clusters = clusters, .iterations = 2, .seeding = seeding, .seed = random()});
    }
  }
}

TEST(Seeding, SpacedTakesTheFloorOfEvenSteps) {
  std::vector<float> values(11);
  std::iota(values.begin(), values.end(), 0.0f);
  const TokenBuffer buffer(values);
  EXPECT_EQ(cluster(buffer, {.clusters = 4}).centroids, scalars({0, 3, 6, 10}));
  EXPECT_EQ(cluster(buffer, {.clusters = 1}).centroids, scalars({0}));
  EXPECT_EQ(cluster(buffer, {.clusters = 11}).centroids, scalars(values));
}

TEST(Seeding, RandomIsSplitMix64AndDistinct) {
  std::vector<float> values(1000);
  std::iota(values.begin(), values.end(), 0.0f);
  const TokenBuffer buffer(values);
  // The generator's published outputs for this seed.
  const uint64_t draws[] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u};
  std::vector<float> left = values, expected;
  for (size_t j = 0; j < 3; ++j) {
    std::swap(left[j], left[j + draws[j] % (1000 - j)]);
    expected.push_back(left[j]);
  }
  EXPECT_EQ(cluster(buffer, {.clusters = 3, .seeding = VCATTN_SEED_RANDOM, .seed = 1234567}).centroids,
            scalars(expected));

  std::set<float> distinct;
  const Clustering all = cluster(buffer, {.clusters = 1000, .seeding = VCATTN_SEED_RANDOM, .seed = 3});
  for (int32_t j = 0; j < 1000; ++j) distinct.insert(scalar(all, j));
  EXPECT_EQ(distinct.size(), 1000u);
  EXPECT_NE(all.centroids, cluster(buffer, {.clusters = 1000, .seeding = VCATTN_SEED_RANDOM, .seed = 4}).centroids);
}

TEST(Seeding, PlusPlusFindsEveryGroup) {
  // Groups so far apart that a second seed in the same one has a probability of about 10^-9.
  std::vector<float> values;
  for (int i = 0; i < 600; ++i) values.push_back(1e5f * static_cast<float>(i % 6) + static_cast<float>(i % 7));
  const TokenBuffer buffer(values);
  std::set<std::vector<float>> outcomes;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Clustering result = cluster(buffer, {.clusters = 6, .seeding = VCATTN_SEED_PLUSPLUS, .seed = seed});
    std::set<int> groups;
    for (int32_t j = 0; j < 6; ++j) groups.insert(static_cast<int>(std::lround(scalar(result, j) / 1e5f)));
    EXPECT_EQ(groups.size(), 6u) << "seed " << seed;
    outcomes.insert(result.centroids);
  }
  EXPECT_GT(outcomes.size(), 15u);
}

TEST(Seeding, PlusPlusDrawsInProportionToTheSquaredDistance) {
  // From the first seed 0 the others lie 1, 2 and 4 away: probabilities 1/21, 4/21 and 16/21. From the other first
  // seeds likewise; what is counted is the pair.
  const std::vector<float> values = {0, 1, 2, 4};
  double expected[4][4] = {};
  for (int a = 0; a < 4; ++a) {
    double total = 0;
    for (int b = 0; b < 4; ++b) total += std::pow(values[static_cast<size_t>(a)] - values[static_cast<size_t>(b)], 2);
    for (int b = 0; b < 4; ++b) {
      expected[a][b] = std::pow(values[static_cast<size_t>(a)] - values[static_cast<size_t>(b)], 2) / total / 4;
    }
  }
  constexpr int kDraws = 20000;
  double seen[4][4] = {};
  const TokenBuffer buffer(values);
  for (int seed = 0; seed < kDraws; ++seed) {
    const Clustering result =
        cluster(buffer, {.clusters = 2, .seeding = VCATTN_SEED_PLUSPLUS, .seed = static_cast<uint64_t>(seed)});
    const auto index = [&](int32_t j) {
      return std::find(values.begin(), values.end(), scalar(result, j)) - values.begin();
    };
    seen[index(0)][index(1)] += 1.0 / kDraws;
  }
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) EXPECT_NEAR(seen[a][b], expected[a][b], 0.01) << a << ' ' << b;
  }
}

TEST(GroupByLabel, IsAStableSort) {
  const std::vector<int32_t> labels = {2, 0, 2, 4, 0, 2};
  std::vector<int32_t> offsets(6), members(6);
  group_by_label(labels.data(), 6, 5, offsets.data(), members.data());
  EXPECT_EQ(members, (std::vector<int32_t>{1, 4, 0, 2, 5, 3}));
  EXPECT_EQ(offsets, (std::vector<int32_t>{0, 2, 2, 5, 5, 6}));
}

}  // namespace
}  // namespace vcattn::vsmooth
