#include "vsmooth/grouping.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "value_tokens.h"

namespace vcattn::vsmooth {
namespace {

using test::energy;
using test::Grouping;
using test::GuardedWorkspace;
using test::identity;
using test::is_permutation_of_tokens;
using test::TokenBuffer;

constexpr int32_t kOrders[] = {VCATTN_ORDER_SEQUENCE, VCATTN_ORDER_CUBE, VCATTN_ORDER_KMEANS, VCATTN_ORDER_BALANCED,
                               VCATTN_ORDER_CHAIN};
constexpr int32_t kClusterOrders[] = {VCATTN_ORDER_KMEANS, VCATTN_ORDER_BALANCED, VCATTN_ORDER_CHAIN};

// The workspace has exactly the size asked for. `centroids` as in order_tokens.
std::vector<int32_t> order(const TokenBuffer& buffer, int32_t v_order, const Grouping& params,
                           const vcattn_video_grid& grid = {}, bool warm = false, float* centroids = nullptr) {
  const Tokens tokens = buffer.tokens();
  std::vector<int32_t> permutation(static_cast<size_t>(tokens.count), -1);
  GuardedWorkspace workspace(grouping_workspace_size(tokens.count, tokens.stride, params, v_order));
  order_tokens(tokens, v_order, params, grid, warm, centroids, permutation.data(), workspace.span());
  EXPECT_TRUE(workspace.guards_intact()) << "order " << v_order << ", " << tokens.count << " tokens, "
                                         << params.clusters << " clusters";
  return permutation;
}

TEST(EnergyRemoved, IsTheShareOfTheBlockMeans) {
  // Blocks {1, 3}, {5, 5} and {7}: what is left is 1 + 1 of 1 + 9 + 25 + 25 + 49.
  const TokenBuffer buffer({1, 5, 3, 7, 5});
  EXPECT_DOUBLE_EQ(energy(buffer, {0, 2, 1, 4, 3}, 2), 1.0 - 2.0 / 109.0);
  EXPECT_DOUBLE_EQ(energy(buffer, {0, 2, 1, 4, 3}, 1), 1.0);
  EXPECT_DOUBLE_EQ(energy(buffer, {0, 2, 1, 4, 3}, 32), 21.0 * 21.0 / 5.0 / 109.0);
}

TEST(EnergyRemoved, OfZerosAndOfNoTokensIsZero) {
  EXPECT_EQ(energy(TokenBuffer(70, 8), identity(70), 32), 0.0);
  EXPECT_EQ(energy(TokenBuffer(0, 8), {}, 32), 0.0);
}

TEST(Orders, ArePermutationsWithinTheirWorkspace) {
  std::mt19937 random(1);
  for (const int32_t v_order : kOrders) {
    for (const int32_t clusters : {1, 2, 64, 700}) {
      for (int trial = 0; trial < 10; ++trial) {
        const int64_t count = 1 + random() % 700;
        const TokenBuffer buffer = test::random_tokens(count, 1 + random() % 130, random());
        const int32_t seeding = static_cast<int32_t>(random() % 3);
        const Grouping params{.clusters = clusters, .iterations = 2, .seeding = seeding, .seed = random()};
        const vcattn_video_grid grid{.first_token = count / 9, .frames = 3, .height = 5, .width = count / 20};
        ASSERT_TRUE(is_permutation_of_tokens(order(buffer, v_order, params, grid)))
            << "order " << v_order << ", " << count << " tokens, " << clusters << " clusters";
      }
    }
    EXPECT_TRUE(order(TokenBuffer(0, 16), v_order, {.clusters = 4, .iterations = 1}).empty());
    // Block boundaries, and every number of blocks in a tournament's rounds.
    for (const int64_t count : {1, 32, 127, 128, 129, 256, 257, 384, 640, 1000, 1281}) {
      const TokenBuffer buffer = test::random_tokens(count, 20, 3);
      for (const int32_t clusters : {1, 2, 3, 4, 5, 6, 7, 11, 64}) {
        ASSERT_TRUE(is_permutation_of_tokens(order(buffer, v_order, {.clusters = clusters, .iterations = 1})))
            << "order " << v_order << ", " << count << " tokens, " << clusters << " clusters";
      }
    }
  }
}

TEST(Orders, NeedNoMoreMemoryForFewerTokens) {
  for (const int32_t v_order : kOrders) {
    for (const int32_t clusters : {1, 2, 3, 5, 8, 64, 700}) {
      size_t previous = 0;
      for (int64_t count = 0; count < 3000; ++count) {
        const size_t size = grouping_workspace_size(count, 16, Grouping{.clusters = clusters}, v_order);
        ASSERT_GE(size, previous) << "order " << v_order << ", " << clusters << " clusters, " << count << " tokens";
        previous = size;
      }
    }
  }
}

TEST(Orders, AreTheSameForAnyNumberOfThreads) {
  const TokenBuffer buffer = test::random_tokens(2900, 48, 2, 40);
  const vcattn_video_grid grid{.first_token = 3, .frames = 4, .height = 20, .width = 30};
  for (const int32_t v_order : kOrders) {
    const Grouping params{.clusters = 30, .iterations = 3};
    const std::vector<int32_t> expected = order(buffer, v_order, params, grid);
    test::for_each_thread_count([&](int threads) {
      EXPECT_EQ(order(buffer, v_order, params, grid), expected) << threads << " threads, order " << v_order;
    });
  }
}

TEST(Orders, LeaveIdenticalTokensInSequence) {
  TokenBuffer buffer(600, 16);
  for (int64_t i = 0; i < 600; ++i) {
    for (int64_t d = 0; d < 16; ++d) buffer.at(i, d) = 0.3f * static_cast<float>(d) - 1.0f;
  }
  for (const int32_t v_order : kOrders) {
    EXPECT_EQ(order(buffer, v_order, {.clusters = 8, .iterations = 3}), identity(600)) << "order " << v_order;
  }
}

TEST(Orders, StayPermutationsWhereSumsOverflow) {
  TokenBuffer buffer = test::random_tokens(500, 32, 4);
  for (int64_t i = 0; i < 500; ++i) {
    for (int64_t d = 0; d < 32; ++d) buffer.at(i, d) = std::copysign(3e38f, buffer.at(i, d));
  }
  for (const int32_t v_order : kOrders) {
    for (const int32_t seeding : {VCATTN_SEED_SPACED, VCATTN_SEED_RANDOM, VCATTN_SEED_PLUSPLUS}) {
      const Grouping params{.clusters = 9, .iterations = 3, .seeding = seeding};
      EXPECT_TRUE(is_permutation_of_tokens(order(buffer, v_order, params))) << "order " << v_order;
    }
  }
}

TEST(Orders, WriteAndReadCentroids) {
  const TokenBuffer buffer = test::random_tokens(900, 24, 5, 30);
  const Grouping params{.clusters = 30, .iterations = 2, .warm_iterations = 2};
  for (const int32_t v_order : kClusterOrders) {
    std::vector<float> centroids(30 * 32);
    EXPECT_EQ(order(buffer, v_order, params, {}, false, centroids.data()), order(buffer, v_order, params));
    // Two cold iterations and two warm ones are four.
    const std::vector<int32_t> warm = order(buffer, v_order, params, {}, true, centroids.data());
    EXPECT_EQ(warm, order(buffer, v_order, {.clusters = 30, .iterations = 4})) << "order " << v_order;
    EXPECT_NE(warm, order(buffer, v_order, params)) << "order " << v_order;
    EXPECT_EQ(order(buffer, v_order, params, {}, true, nullptr), order(buffer, v_order, params));
  }
}

// `video` with `before` and `after` other tokens around it, whose values are huge.
TokenBuffer with_outliers(const TokenBuffer& video, int64_t before, int64_t after) {
  const Tokens tokens = video.tokens();
  TokenBuffer buffer(before + tokens.count + after, tokens.dim);
  for (int64_t i = 0; i < buffer.tokens().count; ++i) {
    const int64_t token = i - before;
    const bool inside = token >= 0 && token < tokens.count;
    for (int64_t d = 0; d < tokens.dim; ++d) {
      buffer.at(i, d) = inside ? tokens.row(token)[d] : static_cast<float>((i + d) % 7 - 3) * 1e3f;
    }
  }
  return buffer;
}

TEST(ClusterOrders, GroupTheGridAsIfThereWereNoOtherTokens) {
  struct Case {
    int64_t before, after;
    vcattn_video_grid grid;  // at `before`
  };
  const Case cases[] = {{0, 77, {0, 2, 10, 40}}, {226, 0, {226, 1, 1, 900}}, {5, 130, {5, 3, 5, 43}},
                        {0, 0, {0, 4, 10, 20}},  {60, 70, {60, 1, 1, 1}},    {0, 128, {0, 1, 1, 640}}};
  for (const Case& c : cases) {
    const int64_t count = c.grid.frames * c.grid.height * c.grid.width;
    const TokenBuffer video = test::random_tokens(count, 24, 11, 30);
    const TokenBuffer all = with_outliers(video, c.before, c.after);
    for (const int32_t v_order : kClusterOrders) {
      const Grouping params{.clusters = 30, .iterations = 3, .warm_iterations = 1};
      std::vector<float> alone_centroids(30 * 32), centroids(30 * 32);
      for (const bool warm : {false, true}) {
        std::vector<int32_t> expected = order(video, v_order, params, {}, warm, alone_centroids.data());
        for (int32_t& token : expected) token += static_cast<int32_t>(c.before);
        for (int64_t i = 0; i < c.before + c.after; ++i) {
          expected.push_back(static_cast<int32_t>(i < c.before ? i : count + i));
        }
        EXPECT_EQ(order(all, v_order, params, c.grid, warm, centroids.data()), expected)
            << "order " << v_order << ", " << c.before << " + " << count << " + " << c.after << " tokens, warm "
            << warm;
        EXPECT_EQ(centroids, alone_centroids) << "order " << v_order;
      }
    }
  }
}

TEST(ClusterOrders, LeaveTokensWithoutAVideoInSequence) {
  std::vector<float> centroids(4 * 32, 1.0f);
  for (const int32_t v_order : kClusterOrders) {
    const Grouping params{.clusters = 4, .iterations = 2};
    EXPECT_EQ(order(test::random_tokens(300, 20, 12), v_order, params, {40, 1, 1, 0}, true, centroids.data()),
              identity(300));
    EXPECT_EQ(centroids, std::vector<float>(4 * 32)) << "order " << v_order;
    EXPECT_EQ(order(test::random_tokens(300, 20, 12), v_order, params, {1, 1, 1, 300}), identity(300));
  }
}

TEST(SequenceOrder, IsTheIdentity) {
  EXPECT_EQ(order(test::random_tokens(333, 16, 6), VCATTN_ORDER_SEQUENCE, {}), identity(333));
}

// The token at each position, by sorting the grid's tokens by cube.
std::vector<int32_t> expected_cube_order(const vcattn_video_grid& grid, int64_t count) {
  std::vector<std::array<int64_t, 8>> cubes;  // smaller cube?, cube t, y, x, then t, y, x, token
  std::vector<int32_t> outside;
  for (int64_t token = 0; token < count; ++token) {
    const int64_t g = token - grid.first_token;
    if (g < 0 || g >= grid.frames * grid.height * grid.width) {
      outside.push_back(static_cast<int32_t>(token));
      continue;
    }
    const int64_t x = g % grid.width, y = g / grid.width % grid.height, t = g / grid.width / grid.height;
    const bool whole = t / 2 * 2 + 2 <= grid.frames && y / 8 * 8 + 8 <= grid.height && x / 8 * 8 + 8 <= grid.width;
    cubes.push_back({!whole, t / 2, y / 8, x / 8, t, y, x, token});
  }
  std::sort(cubes.begin(), cubes.end());
  std::vector<int32_t> permutation;
  for (const auto& cube : cubes) permutation.push_back(static_cast<int32_t>(cube[7]));
  permutation.insert(permutation.end(), outside.begin(), outside.end());
  return permutation;
}

TEST(CubeOrder, PutsWholeCubesFirst) {
  const vcattn_video_grid grids[] = {{64, 4, 16, 16}, {0, 2, 8, 8}, {5, 3, 9, 17}, {7, 1, 1, 300}, {3, 5, 20, 6}};
  for (const vcattn_video_grid& grid : grids) {
    const int64_t count = grid.first_token + grid.frames * grid.height * grid.width + 11;
    EXPECT_EQ(order(TokenBuffer(count, 1), VCATTN_ORDER_CUBE, {}, grid), expected_cube_order(grid, count));
  }
  const std::vector<int32_t> permutation = order(TokenBuffer(1088, 1), VCATTN_ORDER_CUBE, {}, {64, 4, 16, 16});
  EXPECT_EQ(permutation[0], 64);
  EXPECT_EQ(permutation[8], 64 + 16);    // the cube's second row
  EXPECT_EQ(permutation[64], 64 + 256);  // its second frame
  EXPECT_EQ(permutation[128], 64 + 8);   // the second cube
  EXPECT_EQ(permutation[1024], 0);       // the tokens before the grid
}

TEST(CubeOrder, IsTheIdentityWhereTheGridDoesNotFit) {
  const int64_t huge = int64_t{1} << 40;
  const vcattn_video_grid grids[] = {
      {1, 2, 8, 8}, {0, 129, 1, 1}, {-1, 2, 8, 8}, {0, -2, -8, 8}, {0, huge, huge, huge}};
  for (const vcattn_video_grid& grid : grids) {
    EXPECT_EQ(order(TokenBuffer(128, 1), VCATTN_ORDER_CUBE, {}, grid), identity(128));
  }
}

TEST(KMeansOrder, IsStableByLabel) {
  const TokenBuffer buffer = test::random_tokens(1000, 16, 7);
  const Tokens tokens = buffer.tokens();
  const Grouping params{.clusters = 12, .iterations = 2};
  std::vector<float> centroids(12 * 16);
  std::vector<int32_t> labels(1000);
  GuardedWorkspace workspace(grouping_workspace_size(1000, 16, params, VCATTN_ORDER_KMEANS));
  kmeans(tokens, params, false, centroids.data(), labels.data(), workspace.span());
  std::vector<int32_t> expected = identity(1000);
  std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
    return labels[static_cast<size_t>(a)] < labels[static_cast<size_t>(b)];
  });
  EXPECT_EQ(order(buffer, VCATTN_ORDER_KMEANS, params), expected);
}

TEST(ChainOrder, SortsTokensOnALine) {
  std::vector<float> values(1500);
  std::iota(values.begin(), values.end(), -700.0f);
  std::shuffle(values.begin(), values.end(), std::mt19937(8));
  std::vector<int32_t> ascending = identity(1500);
  std::sort(ascending.begin(), ascending.end(),
            [&](int32_t a, int32_t b) { return values[static_cast<size_t>(a)] < values[static_cast<size_t>(b)]; });
  const std::vector<int32_t> descending(ascending.rbegin(), ascending.rend());
  for (const int32_t clusters : {2, 5, 40}) {
    const std::vector<int32_t> permutation =
        order(TokenBuffer(values), VCATTN_ORDER_CHAIN, {.clusters = clusters, .iterations = 4});
    EXPECT_TRUE(permutation == ascending || permutation == descending) << clusters << " clusters";
  }
}

TEST(ChainOrder, KeepsClustersOfWholeBlocksTogether) {
  // Ten groups of 128 tokens each, at random places and in random order, far apart.
  TokenBuffer buffer(1280, 12);
  std::vector<int32_t> groups(1280);
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int32_t>(i % 10);
  std::mt19937 random(9);
  std::shuffle(groups.begin(), groups.end(), random);
  for (int64_t i = 0; i < 1280; ++i) {
    std::mt19937 centre(static_cast<uint32_t>(groups[static_cast<size_t>(i)]));
    for (int64_t d = 0; d < 12; ++d) {
      buffer.at(i, d) = static_cast<float>(centre() % 1000) + static_cast<float>(random() % 1000) * 1e-3f;
    }
  }
  for (const int32_t v_order : {VCATTN_ORDER_BALANCED, VCATTN_ORDER_CHAIN}) {
    const std::vector<int32_t> permutation =
        order(buffer, v_order, {.clusters = 10, .iterations = 4, .seeding = VCATTN_SEED_PLUSPLUS});
    for (size_t i = 0; i < 1280; ++i) {
      ASSERT_EQ(groups[static_cast<size_t>(permutation[i])], groups[static_cast<size_t>(permutation[i / 128 * 128])])
          << "order " << v_order << ", position " << i;
    }
  }
}

struct RealCase {
  const char* file;
  vcattn_video_grid grid;
  // Shares by order and by rows per mean, 128 and 32, with 64 clusters, 4 iterations and spaced seeds.
  double removed[5][2];
  // With the text kept apart: of KMEANS, BALANCED and CHAIN.
  double apart[3][2];
};

class RealValues : public testing::TestWithParam<RealCase> {};

TEST_P(RealValues, EnergyRemovedByEachOrder) {
  const RealCase& real = GetParam();
  const TokenBuffer buffer = test::load_values(real.file);
  const Grouping params{.clusters = 64, .iterations = 4, .seeding = VCATTN_SEED_SPACED};
  const auto expect_removed = [&](int32_t v_order, const vcattn_video_grid& grid, const double(&expected)[2]) {
    const std::vector<int32_t> permutation = order(buffer, v_order, params, grid);
    ASSERT_TRUE(is_permutation_of_tokens(permutation));
    // Where k-means rounds a near tie the other way, on another instruction set, the later steps differ a little.
    EXPECT_NEAR(energy(buffer, permutation, 128), expected[0], 0.002) << "order " << v_order;
    EXPECT_NEAR(energy(buffer, permutation, 32), expected[1], 0.002) << "order " << v_order;
  };
  for (const int32_t v_order : kOrders) {
    expect_removed(v_order, v_order == VCATTN_ORDER_CUBE ? real.grid : vcattn_video_grid{}, real.removed[v_order]);
  }
  for (const int32_t v_order : kClusterOrders) {
    expect_removed(v_order, real.grid, real.apart[v_order - VCATTN_ORDER_KMEANS]);
  }
}

TEST_P(RealValues, WarmStartCostsHalfForTheSameEnergy) {
  // Centroids of the layer's first half of tokens stand in for those of an earlier step.
  const RealCase& real = GetParam();
  const TokenBuffer buffer = test::load_values(real.file);
  Tokens half = buffer.tokens();
  half.count /= 2;
  const Grouping params{.clusters = 64, .iterations = 4, .warm_iterations = 2};
  std::vector<float> centroids(64 * 128);
  std::vector<int32_t> labels(static_cast<size_t>(half.count));
  GuardedWorkspace workspace(grouping_workspace_size(half.count, half.stride, params, VCATTN_ORDER_KMEANS));
  kmeans(half, params, false, centroids.data(), labels.data(), workspace.span());
  const double cold = energy(buffer, order(buffer, VCATTN_ORDER_CHAIN, params), 128);
  const double warm = energy(buffer, order(buffer, VCATTN_ORDER_CHAIN, params, {}, true, centroids.data()), 128);
  EXPECT_GT(warm, cold - 0.02);
}

INSTANTIATE_TEST_SUITE_P(
    Layers, RealValues,
    testing::Values(RealCase{"qkv_layer2_16448.safetensors",
                             {64, 32, 16, 32},
                             {{0.0511, 0.0770}, {0.1208, 0.1528}, {0.3433, 0.4167}, {0.4364, 0.4927}, {0.4357, 0.4935}},
                             {{0.3327, 0.4159}, {0.4374, 0.4940}, {0.4370, 0.4944}}},
                    RealCase{"qkv_layer6_4160.safetensors",
                             {64, 8, 16, 32},
                             {{0.1677, 0.2659}, {0.2935, 0.3260}, {0.3995, 0.6296}, {0.6485, 0.7877}, {0.6353, 0.7861}},
                             {{0.4268, 0.6445}, {0.6570, 0.8018}, {0.6419, 0.7951}}}));

}  // namespace
}  // namespace vcattn::vsmooth
