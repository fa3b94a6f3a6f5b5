#include "vsmooth/exchange.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "core/arena.h"
#include "value_tokens.h"
#include "vsmooth/sort_key.h"

namespace vcattn::vsmooth {
namespace {

using test::energy;
using test::identity;
using test::is_permutation_of_tokens;
using test::TokenBuffer;

class ExchangeTest : public testing::Test {
 protected:
  // An arena for `capacity` tokens at a time.
  static std::vector<std::byte> memory(int64_t capacity) {
    Arena count(nullptr);
    ExchangeScratch(count, capacity);
    return std::vector<std::byte>(count.used() + Arena::kAlignment);
  }
  static Arena arena(std::vector<std::byte>& bytes) {
    void* base = bytes.data();
    size_t space = bytes.size();
    return Arena(static_cast<std::byte*>(std::align(Arena::kAlignment, 1, base, space)));
  }
};

TEST_F(ExchangeTest, SplitsTwoSetsByTheirMeans) {
  const TokenBuffer buffer = test::random_tokens(200, 16, 10);
  const Tokens tokens = buffer.tokens();
  const BlockSets sets(200, 2);
  ASSERT_EQ(sets.begin(1), 128);
  std::vector<double> direction(16);
  for (int64_t i = 0; i < 200; ++i) {
    const double weight = i < 128 ? -1.0 / 128 : 1.0 / 72;
    for (size_t d = 0; d < 16; ++d) direction[d] += weight * static_cast<double>(tokens.row(i)[d]);
  }
  std::vector<int32_t> permutation = identity(200);
  std::vector<std::byte> bytes = memory(sets.exchange_capacity());
  Arena cut = arena(bytes);
  exchange_all_sets(tokens, sets, ExchangeScratch(cut, sets.exchange_capacity()), permutation.data());
  ASSERT_TRUE(is_permutation_of_tokens(permutation));
  EXPECT_TRUE(std::is_sorted(permutation.begin(), permutation.begin() + 128));
  EXPECT_TRUE(std::is_sorted(permutation.begin() + 128, permutation.end()));
  const auto projection = [&](int32_t token) {
    double sum = 0;
    for (size_t d = 0; d < 16; ++d) sum += direction[d] * static_cast<double>(tokens.row(token)[d]);
    return sum;
  };
  double largest = -1e30, smallest = 1e30;
  for (size_t i = 0; i < 128; ++i) largest = std::max(largest, projection(permutation[i]));
  for (size_t i = 128; i < 200; ++i) smallest = std::min(smallest, projection(permutation[i]));
  EXPECT_LT(largest, smallest + 1e-5);
  EXPECT_GT(energy(buffer, permutation, 128), energy(buffer, identity(200), 128));
}

TEST_F(ExchangeTest, NeverLowersTheEnergyRemoved) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const int64_t count = 1000 + 37 * seed;
    const TokenBuffer buffer = test::random_tokens(count, 32, seed, 25);
    std::vector<int32_t> permutation = identity(count);
    const BlockSets blocks(count, 1000);
    std::vector<std::byte> bytes = memory(blocks.exchange_capacity());
    Arena cut = arena(bytes);
    const ExchangeScratch scratch(cut, blocks.exchange_capacity());
    const double before = energy(buffer, permutation, 128);
    exchange_neighbours(buffer.tokens(), scratch, permutation.data());
    const double neighbours = energy(buffer, permutation, 128);
    exchange_all_sets(buffer.tokens(), blocks, scratch, permutation.data());
    const double all = energy(buffer, permutation, 128);
    EXPECT_GT(neighbours, before) << "seed " << seed;
    EXPECT_GT(all, neighbours) << "seed " << seed;
  }
}

TEST_F(ExchangeTest, ReachesNeighboursOnBothSides) {
  // Blocks of 0, of 10 and 20, of 10 and 20, and of 30: only the two in the middle have tokens to exchange.
  std::vector<float> values;
  for (int i = 0; i < 512; ++i) {
    const bool twenty = i / 128 == 1 ? i % 4 == 0 : i % 4 != 0;
    values.push_back(i < 128 ? 0.0f : i >= 384 ? 30.0f : twenty ? 20.0f : 10.0f);
  }
  const TokenBuffer buffer(values);
  std::vector<int32_t> permutation = identity(512);
  std::vector<std::byte> bytes = memory(512);
  Arena cut = arena(bytes);
  exchange_neighbours(buffer.tokens(), ExchangeScratch(cut, 512), permutation.data());
  EXPECT_DOUBLE_EQ(energy(buffer, permutation, 128), 1.0);
}

TEST(BlockSets, AreEqualToWithinOneBlock) {
  for (int64_t count = 0; count < 3000; count += 61) {
    for (const int32_t asked : {1, 2, 3, 7, 16, 40}) {
      const BlockSets sets(count, asked);
      const int64_t blocks = (count + 127) / 128;
      ASSERT_EQ(sets.sets(), std::min<int64_t>(asked, blocks));
      ASSERT_EQ(sets.begin(sets.sets()), count);
      ASSERT_GE(sets.exchange_capacity(), count);
      std::set<int64_t> sizes;
      for (int64_t j = 0; j < sets.sets(); ++j) {
        ASSERT_EQ(sets.begin(j) % 128, 0);
        ASSERT_LT(sets.begin(j), sets.begin(j + 1));
        sizes.insert((sets.begin(j + 1) - sets.begin(j) + 127) / 128);
        ASSERT_LE(2 * *sizes.rbegin() * 128, sets.pair_capacity());
      }
      ASSERT_LE(sizes.empty() ? 0 : *sizes.rbegin() - *sizes.begin(), 1) << count << ' ' << asked;
    }
  }
}

TEST(RoundRobin, PairsEveryTwoSetsOnce) {
  for (int64_t sets = 0; sets <= 21; ++sets) {
    const RoundRobin tournament(sets);
    std::set<std::pair<int64_t, int64_t>> met;
    for (int64_t round = 0; round < tournament.rounds(); ++round) {
      std::set<int64_t> busy;
      for (int64_t pair = 0; pair < tournament.pairs(); ++pair) {
        const auto [a, b] = tournament.meeting(round, pair);
        ASSERT_LT(a, b);
        ASSERT_LE(b, sets);
        EXPECT_TRUE(busy.insert(a).second && busy.insert(b).second) << sets << " sets, round " << round;
        if (b == sets) continue;
        EXPECT_TRUE(met.insert({a, b}).second) << sets << " sets, round " << round;
      }
    }
    EXPECT_EQ(static_cast<int64_t>(met.size()), sets * (sets - 1) / 2);
  }
}

TEST(SortKey, OrdersFloatsThenPositions) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float ascending[] = {-infinity, -3e38f, -2.0f, -1e-45f, 0.0f, 1e-45f, 2.0f, 3e38f, infinity};
  for (size_t i = 1; i < std::size(ascending); ++i) {
    EXPECT_LT(sort_key(ascending[i - 1], 9), sort_key(ascending[i], 3)) << ascending[i];
    EXPECT_LT(sort_key(ascending[i], 3), sort_key(ascending[i], 9)) << ascending[i];
  }
  EXPECT_LT(sort_key(0.0f, 1), sort_key(-0.0f, 2));
  EXPECT_LT(sort_key(-0.0f, 1), sort_key(0.0f, 2));
  EXPECT_EQ(key_position(sort_key(-5.0f, 0xFFFFFFFFu)), 0xFFFFFFFFu);
}

}  // namespace
}  // namespace vcattn::vsmooth
