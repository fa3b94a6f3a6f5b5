// Grouping on the GPU against what its contract says, and against the energy that the CPU's orders remove.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "group_device.cuh"

namespace vcattn::sm90a {
namespace {

constexpr int32_t kOrders[] = {VCATTN_ORDER_SEQUENCE, VCATTN_ORDER_KMEANS, VCATTN_ORDER_CHAIN};

TEST_F(GroupCuda, GivesAPermutationForAnyShapeAndKeepsIt) {
  const std::vector<std::array<int64_t, 4>> shapes = {// batch, tokens, heads, head_dim
                                                      {1, 1, 1, 128},   {1, 2, 1, 64},     {2, 127, 3, 128},
                                                      {1, 128, 2, 1},   {1, 129, 1, 40},   {1, 511, 1, 80},
                                                      {2, 1000, 2, 64}, {1, 2500, 5, 128}, {1, 5000, 1, 127}};
  for (const auto& [batch, tokens, heads, dim] : shapes) {
    const Values v = make_values(batch, tokens, heads, dim, clustered(1));
    for (const int32_t clusters : {1, 5, 63, 64, 65, 200, 1024}) {
      for (const int32_t v_order : kOrders) {
        Call call(v, v_order, {.clusters = clusters, .iterations = 3});
        ASSERT_EQ(group_unsupported(call.problem()), nullptr);
        const std::string what = "[" + std::to_string(batch) + ", " + std::to_string(tokens) + ", " +
                                 std::to_string(heads) + ", " + std::to_string(dim) + "], " + std::to_string(clusters) +
                                 " clusters, order " + std::to_string(v_order);
        const Outcome first = call.run({}, true, 0xFF);
        expect_permutations(first, v, what);
        EXPECT_TRUE(first == call.run({}, true, 0x00)) << what << ": another run, another result";
        if (v_order == VCATTN_ORDER_SEQUENCE) {
          EXPECT_EQ(order_of(first, v, batch - 1, heads - 1), test::identity(tokens)) << what;
          continue;
        }
        EXPECT_EQ(first.permutation, call.run({}, false).permutation) << what << ": without centroids";
        for (const float c : first.centroids) ASSERT_TRUE(std::isfinite(c)) << what;
        const int64_t used = std::min<int64_t>(clusters, tokens);
        for (int64_t slot = 0; slot < batch * heads; ++slot) {
          for (int64_t i = used * dim; i < clusters * dim; ++i) {
            ASSERT_EQ(first.centroids[static_cast<size_t>(slot * clusters * dim + i)], 0.0f) << what << ", unused";
          }
        }
      }
    }
  }
}

// The same numbers, exact in every type, wherever they lie.
TEST_F(GroupCuda, TypesAndStridesDoNotMatter) {
  const Fill base = clustered(2);
  const Fill fill = [&](int64_t b, int64_t t, int64_t h, int64_t d) {
    return std::round(base(b, t, h, d) * 16.0f) / 16.0f;
  };
  for (const int64_t dim : {64, 72, 128}) {
    for (const int32_t clusters : {16, 100}) {
      const test::Grouping grouping{.clusters = clusters, .iterations = 3};
      const Values dense = make_values(2, 700, 3, dim, fill);
      const Outcome expected = Call(dense, VCATTN_ORDER_CHAIN, grouping).run();
      const std::vector<Layout> layouts = {
          {.dtype = VCATTN_FP16},  {.dtype = VCATTN_FP32},
          {.heads_outside = true}, {.padding = 8},
          {.padding = 1},          {.first = 1},
          {.channel_stride = 2},   {.dtype = VCATTN_FP32, .heads_outside = true, .channel_stride = 3, .padding = 5}};
      for (size_t i = 0; i < layouts.size(); ++i) {
        const Values v = make_values(2, 700, 3, dim, fill, layouts[i]);
        EXPECT_TRUE(Call(v, VCATTN_ORDER_CHAIN, grouping).run() == expected)
            << dim << " channels, " << clusters << " clusters, layout " << i;
      }
    }
  }
}

TEST_F(GroupCuda, OffsetsHave64Bits) {
  const Fill fill = clustered(3);
  const int64_t tokens = 1500, heads = 2, dim = 128, token_stride = int64_t{1} << 22;  // 6e9 elements
  const test::Grouping grouping{.clusters = 20, .iterations = 2};
  const Values dense = make_values(1, tokens, heads, dim, fill);
  DeviceBytes far(static_cast<size_t>(2 * tokens * token_stride));
  CUDA_OK(cudaMemcpy2D(far.as<std::byte>(), 2 * token_stride, dense.device->as<std::byte>(), 2 * heads * dim,
                       2 * heads * dim, tokens, cudaMemcpyDeviceToDevice));
  Values spread;
  spread.view = dense.view;
  spread.view.data = far.as<std::byte>();
  spread.view.stride[1] = token_stride;
  EXPECT_TRUE(Call(spread, VCATTN_ORDER_CHAIN, grouping).run() == Call(dense, VCATTN_ORDER_CHAIN, grouping).run());
}

// The order by label is what the returned centroids say, and each centroid is the mean of its tokens once Lloyd's
// algorithm has converged.
TEST_F(GroupCuda, KMeansGroupsByNearestCentroid) {
  for (const int32_t clusters : {12, 90}) {
    constexpr int64_t kTokens = 3000, kDim = 48;
    const Values v = make_values(1, kTokens, 2, kDim, clustered(4, 12));
    const Outcome outcome = Call(v, VCATTN_ORDER_KMEANS, {.clusters = clusters, .iterations = 40}).run();
    for (int64_t h = 0; h < 2; ++h) {
      std::vector<int32_t> labels(kTokens);
      std::vector<double> sums(static_cast<size_t>(clusters * kDim));
      std::vector<int64_t> sizes(static_cast<size_t>(clusters));
      const auto centroid = [&](int32_t j, int64_t d) {
        return double{outcome.centroids[static_cast<size_t>((h * clusters + j) * kDim + d)]};
      };
      for (int64_t t = 0; t < kTokens; ++t) {
        const std::vector<float> row = v.row(0, t, h);
        double best = kInfinity;
        for (int32_t j = 0; j < clusters; ++j) {
          double distance = 0;
          for (int64_t d = 0; d < kDim; ++d) distance += std::pow(row[static_cast<size_t>(d)] - centroid(j, d), 2);
          if (distance < best) {
            best = distance;
            labels[static_cast<size_t>(t)] = j;
          }
        }
        const int32_t label = labels[static_cast<size_t>(t)];
        ++sizes[static_cast<size_t>(label)];
        for (int64_t d = 0; d < kDim; ++d)
          sums[static_cast<size_t>(label * kDim + d)] += double{row[static_cast<size_t>(d)]};
      }
      const std::vector<int32_t> order = order_of(outcome, v, 0, h);
      ASSERT_TRUE(test::is_permutation_of_tokens(order));
      // Centroids are rounded to BF16 on the GPU, so tokens between two of them may be either's.
      int64_t other = 0;
      std::vector<int32_t> expected = test::identity(kTokens);
      std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
        return labels[static_cast<size_t>(a)] < labels[static_cast<size_t>(b)];
      });
      std::vector<int32_t> place(kTokens);
      int64_t descents = 0;
      for (int64_t i = 1; i < kTokens; ++i) {
        const int32_t a = order[static_cast<size_t>(i - 1)], b = order[static_cast<size_t>(i)];
        const int32_t la = labels[static_cast<size_t>(a)], lb = labels[static_cast<size_t>(b)];
        if (la > lb) ++other;
        if (la == lb && a > b) ++descents;
      }
      EXPECT_LE(other, kTokens / 100) << clusters << " clusters: not by nearest centroid";
      EXPECT_LE(descents, kTokens / 100) << clusters << " clusters: not stable";
      double error = 0, norm = 0;
      for (int32_t j = 0; j < clusters; ++j) {
        for (int64_t d = 0; d < kDim && sizes[static_cast<size_t>(j)] > 0; ++d) {
          const double mean =
              sums[static_cast<size_t>(j * kDim + d)] / static_cast<double>(sizes[static_cast<size_t>(j)]);
          error += std::pow(mean - centroid(j, d), 2);
          norm += mean * mean;
        }
      }
      EXPECT_LT(std::sqrt(error / norm), 0.02) << clusters << " clusters: centroids are not the means";
    }
  }
}

// One channel: a path through the clusters is the line, and blocks that exchange end up sorted.
TEST_F(GroupCuda, BlocksOfTokensOnALineAreIntervals) {
  constexpr int64_t kTokens = 512;  // integers from -256 are exact in BF16
  std::vector<int32_t> values = test::identity(kTokens);
  std::shuffle(values.begin(), values.end(), std::mt19937(5));
  const Values v = make_values(1, kTokens, 1, 1, [&](int64_t, int64_t t, int64_t, int64_t) {
    return static_cast<float>(values[static_cast<size_t>(t)] - 256);
  });
  for (const int32_t clusters : {2, 5, 40, 100}) {
    const Outcome outcome = Call(v, VCATTN_ORDER_CHAIN, {.clusters = clusters, .iterations = 4}).run();
    for (int64_t block = 0; block < kTokens / 128; ++block) {
      std::set<int32_t> interval;
      for (int64_t i = 0; i < 128; ++i) {
        interval.insert(values[static_cast<size_t>(outcome.permutation[static_cast<size_t>(block * 128 + i)])]);
      }
      EXPECT_EQ(*interval.rbegin() - *interval.begin(), 127) << clusters << " clusters, block " << block;
    }
  }
}

// Ten groups of 128 tokens each, far apart: exactly the blocks.
TEST_F(GroupCuda, KeepsClustersOfWholeBlocksTogether) {
  constexpr int64_t kTokens = 1280;
  std::vector<int32_t> groups(kTokens);
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int32_t>(i % 10);
  std::shuffle(groups.begin() + 10, groups.end(), std::mt19937(9));
  std::vector<float> centres(10 * 16);
  std::mt19937 random(10);
  for (float& c : centres) c = static_cast<float>(random() % 64);
  const Values v = make_values(1, kTokens, 1, 16, [&](int64_t, int64_t t, int64_t, int64_t d) {
    return centres[static_cast<size_t>(groups[static_cast<size_t>(t)] * 16 + d)] +
           static_cast<float>((t * 7 + d * 3) % 5) / 16.0f;
  });
  const Outcome outcome = Call(v, VCATTN_ORDER_CHAIN, {.clusters = 10, .iterations = 6}).run();
  for (size_t i = 0; i < kTokens; ++i) {
    ASSERT_EQ(groups[static_cast<size_t>(outcome.permutation[i])],
              groups[static_cast<size_t>(outcome.permutation[i / 128 * 128])])
        << "position " << i;
  }
}

// A masked call is the call on the admitted tokens alone.
TEST_F(GroupCuda, MaskedTokensTakeNoPart) {
  constexpr int64_t kBatch = 4, kTokens = 1300, kHeads = 2, kDim = 64;
  const Fill fill = clustered(6);
  const Values v = make_values(kBatch, kTokens, kHeads, kDim, fill);
  std::vector<std::vector<int32_t>> admitted(kBatch);
  constexpr int64_t kTokenStride = 3, kBatchStride = kTokens * kTokenStride + 17;
  std::vector<uint8_t> mask(static_cast<size_t>(kBatch * kBatchStride), 1);
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t t = 0; t < kTokens; ++t) {
      const bool admits = b == 0 || (b == 1 && (t * 7919 + 13) % 3 != 0) || (b == 3 && t == 700);  // 2: nothing
      mask[static_cast<size_t>(b * kBatchStride + t * kTokenStride)] = admits ? 0x40 : 0;
      if (admits) admitted[static_cast<size_t>(b)].push_back(static_cast<int32_t>(t));
    }
  }
  for (const int32_t clusters : {10, 64, 80}) {
    for (const int32_t v_order : kOrders) {
      const test::Grouping grouping{.clusters = clusters, .iterations = 3};
      const Outcome masked = Call(v, v_order, grouping).mask(mask, kBatchStride, kTokenStride).run();
      for (int64_t b = 0; b < kBatch; ++b) {
        const auto& kept = admitted[static_cast<size_t>(b)];
        const auto count = static_cast<int64_t>(kept.size());
        const std::string what =
            std::to_string(clusters) + " clusters, order " + std::to_string(v_order) + ", batch " + std::to_string(b);
        Outcome alone;
        if (count > 0) {
          const Values dense = make_values(1, count, kHeads, kDim, [&](int64_t, int64_t t, int64_t h, int64_t d) {
            return fill(b, kept[static_cast<size_t>(t)], h, d);
          });
          alone = Call(dense, v_order, grouping).run();
        }
        for (int64_t h = 0; h < kHeads; ++h) {
          std::vector<int32_t> expected(kTokens, -1);
          for (int64_t i = 0; i < count; ++i) {
            expected[static_cast<size_t>(i)] =
                kept[static_cast<size_t>(alone.permutation[static_cast<size_t>(h * count + i)])];
          }
          EXPECT_EQ(order_of(masked, v, b, h), expected) << what << ", head " << h;
        }
        if (v_order == VCATTN_ORDER_SEQUENCE) continue;
        const int64_t size = kHeads * clusters * kDim;
        const std::vector<float> centroids(masked.centroids.begin() + b * size,
                                           masked.centroids.begin() + (b + 1) * size);
        EXPECT_EQ(centroids, count > 0 ? alone.centroids : std::vector<float>(static_cast<size_t>(size))) << what;
      }
    }
  }
}

// With a grid, the admitted part of the video is grouped as in a call of its own, and the text stands behind it.
TEST_F(GroupCuda, TokensOutsideTheGridTakeNoPart) {
  constexpr int64_t kBatch = 4, kHeads = 2, kDim = 64;
  struct Case {
    int64_t first, video, after;
    bool masked;
  };
  const Fill base = clustered(15);
  for (const Case& c : {Case{0, 1300, 200, false},
                        {226, 1300, 0, false},
                        {50, 1, 70, false},
                        {0, 1300, 0, false},
                        {0, 1300, 200, true},
                        {226, 1300, 3, true},
                        {64, 896, 64, true}}) {
    const int64_t tokens = c.first + c.video + c.after;
    const auto is_video = [&](int64_t t) { return t >= c.first && t < c.first + c.video; };
    const Fill fill = [&](int64_t b, int64_t t, int64_t h, int64_t d) {
      return is_video(t) ? base(b, t, h, d) : static_cast<float>((t + d) % 5 - 2) * 1e4f;
    };
    const Values v = make_values(kBatch, tokens, kHeads, kDim, fill);
    std::vector<uint8_t> mask(static_cast<size_t>(kBatch * tokens));
    std::vector<std::vector<int32_t>> video(kBatch), text(kBatch);
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t t = 0; t < tokens; ++t) {
        // All; gaps in both; text alone; nothing.
        const bool admits = !c.masked || b == 0 || (b == 1 && t * 7919 % 3 != 0) || (b == 2 && !is_video(t));
        mask[static_cast<size_t>(b * tokens + t)] = admits;
        if (admits) (is_video(t) ? video : text)[static_cast<size_t>(b)].push_back(static_cast<int32_t>(t));
      }
    }
    for (const int32_t clusters : {10, 64, 80}) {
      for (const int32_t v_order : kOrders) {
        const test::Grouping grouping{.clusters = clusters, .iterations = 3};
        Call call(v, v_order, grouping);
        call.grid({c.first, 1, 1, c.video});
        if (c.masked) call.mask(mask, tokens, 1);
        const Outcome outcome = call.run();
        for (int64_t b = 0; b < kBatch; ++b) {
          const auto &inside = video[static_cast<size_t>(b)], &outside = text[static_cast<size_t>(b)];
          const auto count = static_cast<int64_t>(inside.size());
          const std::string what = std::to_string(c.first) + " + " + std::to_string(c.video) + " + " +
                                   std::to_string(c.after) + " tokens, masked " + std::to_string(c.masked) + ", " +
                                   std::to_string(clusters) + " clusters, order " + std::to_string(v_order) +
                                   ", batch " + std::to_string(b);
          Outcome alone;
          if (count > 0) {
            const Values dense = make_values(1, count, kHeads, kDim, [&](int64_t, int64_t t, int64_t h, int64_t d) {
              return fill(b, inside[static_cast<size_t>(t)], h, d);
            });
            alone = Call(dense, v_order, grouping).run();
          }
          for (int64_t h = 0; h < kHeads; ++h) {
            std::vector<int32_t> expected;
            for (int64_t i = 0; i < count; ++i) {
              expected.push_back(inside[static_cast<size_t>(alone.permutation[static_cast<size_t>(h * count + i)])]);
            }
            expected.insert(expected.end(), outside.begin(), outside.end());
            // The order that groups nothing does not read the grid.
            if (v_order == VCATTN_ORDER_SEQUENCE) std::sort(expected.begin(), expected.end());
            expected.resize(static_cast<size_t>(tokens), -1);
            EXPECT_EQ(order_of(outcome, v, b, h), expected) << what << ", head " << h;
          }
          if (v_order == VCATTN_ORDER_SEQUENCE) continue;
          const int64_t size = kHeads * clusters * kDim;
          const std::vector<float> centroids(outcome.centroids.begin() + b * size,
                                             outcome.centroids.begin() + (b + 1) * size);
          EXPECT_EQ(centroids, count > 0 ? alone.centroids : std::vector<float>(static_cast<size_t>(size))) << what;
        }
      }
    }
  }
}

// HunyuanVideo-1.5 at 720p: 111,600 video tokens, then 1,985 of text, of which 120 are valid.
TEST_F(GroupCuda, TextTokensAndTheirPaddingStayBehindALongVideo) {
  constexpr int64_t kVideo = 111600, kText = 1985, kValid = 120, kDim = 128;
  const Fill base = clustered(16, 200);
  const Values v = make_values(1, kVideo + kText, 1, kDim, [&](int64_t b, int64_t t, int64_t h, int64_t d) {
    if (t < kVideo) return base(b, t, h, d);
    return t < kVideo + kValid ? static_cast<float>(d % 3 - 1) * 500.0f : kNan;
  });
  std::vector<uint8_t> mask(kVideo + kText, 1);
  std::fill(mask.begin() + kVideo + kValid, mask.end(), uint8_t{0});
  const Values video = make_values(1, kVideo, 1, kDim, base);
  const test::Grouping grouping{.clusters = 64, .iterations = 4};
  const Outcome alone = Call(video, VCATTN_ORDER_CHAIN, grouping).run();
  const Outcome joint = Call(v, VCATTN_ORDER_CHAIN, grouping).mask(mask, 0, 1).grid({0, 31, 45, 80}).run();
  std::vector<int32_t> expected = alone.permutation;
  for (int64_t t = kVideo; t < kVideo + kText; ++t) {
    expected.push_back(t < kVideo + kValid ? static_cast<int32_t>(t) : -1);
  }
  const auto differs = std::mismatch(expected.begin(), expected.end(), joint.permutation.begin());
  ASSERT_TRUE(differs.first == expected.end())
      << "position " << differs.first - expected.begin() << " holds " << *differs.second << ", not " << *differs.first;
  EXPECT_EQ(joint.centroids, alone.centroids);
}

// Segments are calls of their own; some are empty.
TEST_F(GroupCuda, SegmentsAreGroupedByThemselves) {
  std::vector<int64_t> cu_seqlens = {0, 0, 700, 701, 701, 1400, 2000, 2000};
  // More than one table's worth of segments, most of them of one token.
  for (int64_t i = 0; i < 200; ++i) cu_seqlens.push_back(2000 + i);
  const int64_t tokens = cu_seqlens.back(), heads = 3, dim = 128;
  const Fill fill = clustered(7);
  const Values v = make_values(1, tokens, heads, dim, fill);
  for (const int32_t clusters : {30, 70}) {
    for (const int32_t v_order : kOrders) {
      const test::Grouping grouping{.clusters = clusters, .iterations = 3};
      const Outcome packed = Call(v, v_order, grouping).segments(cu_seqlens).run();
      for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
        const int64_t first = cu_seqlens[s], count = cu_seqlens[s + 1] - first, size = heads * clusters * dim;
        Outcome alone;
        alone.centroids.assign(static_cast<size_t>(size), 0.0f);
        if (count > 0) {
          const Values dense = make_values(
              1, count, heads, dim, [&](int64_t, int64_t t, int64_t h, int64_t d) { return fill(0, first + t, h, d); });
          alone = Call(dense, v_order, grouping).run();
        }
        for (int64_t h = 0; h < heads; ++h) {
          const std::vector<int32_t> expected(alone.permutation.begin() + h * count,
                                              alone.permutation.begin() + (h + 1) * count);
          ASSERT_EQ(order_of(packed, v, 0, h, first, count), expected)
              << clusters << " clusters, order " << v_order << ", segment " << s << ", head " << h;
        }
        if (v_order == VCATTN_ORDER_SEQUENCE) continue;
        const auto begin = packed.centroids.begin() + static_cast<int64_t>(s) * size;
        ASSERT_TRUE(std::equal(begin, begin + size, alone.centroids.begin())) << "centroids of segment " << s;
      }
    }
  }
}

TEST_F(GroupCuda, WhatIsNotFiniteCountsAsZero) {
  constexpr int64_t kTokens = 1700, kDim = 128;
  const Fill base = clustered(8);
  const auto broken = [](int64_t t, int64_t d) {
    if (t == 0 || t == 1699 || t % 97 == 5) return d % 3 == 0 ? 1 : 0;  // NaN in parts of a row
    if (t % 101 == 7) return d == 127 ? 2 : 0;
    return t == 800 ? 3 : 0;  // a whole row
  };
  const float bad[] = {0.0f, kNan, kInfinity, -kInfinity};
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    for (const int32_t clusters : {32, 90}) {
      for (const int32_t v_order : kOrders) {
        const test::Grouping grouping{.clusters = clusters, .iterations = 3};
        const Values dirty = make_values(1, kTokens, 1, kDim,
                                         [&](int64_t b, int64_t t, int64_t h, int64_t d) {
                                           return broken(t, d) != 0 ? bad[broken(t, d)] : base(b, t, h, d);
                                         },
                                         {.dtype = dtype});
        const Values clean = make_values(
            1, kTokens, 1, kDim,
            [&](int64_t b, int64_t t, int64_t h, int64_t d) { return broken(t, d) != 0 ? 0.0f : base(b, t, h, d); },
            {.dtype = dtype});
        EXPECT_TRUE(Call(dirty, v_order, grouping).run() == Call(clean, v_order, grouping).run())
            << "dtype " << dtype << ", " << clusters << " clusters, order " << v_order;
      }
    }
  }
}

TEST_F(GroupCuda, ExtremeValuesStillGiveAPermutation) {
  const Fill base = clustered(9);
  const std::vector<Fill> fills = {
      [](int64_t, int64_t, int64_t, int64_t) { return 0.0f; },
      [](int64_t, int64_t, int64_t, int64_t) { return 1.5f; },
      [](int64_t, int64_t t, int64_t, int64_t) { return static_cast<float>(t % 3); },
      [](int64_t, int64_t t, int64_t, int64_t) { return t < 900 ? 1.0f : static_cast<float>(t); },
      [](int64_t, int64_t t, int64_t, int64_t) { return t % 2 == 0 ? 3e38f : -3e38f; },
      [](int64_t, int64_t t, int64_t, int64_t d) { return t % 2 == 0 ? (d == 3 ? 3e38f : 1.0f) : 1e-38f; },
      [&](int64_t b, int64_t t, int64_t h, int64_t d) { return 1e19f * base(b, t, h, d); },
      [](int64_t, int64_t, int64_t, int64_t) { return kNan; },
  };
  for (size_t i = 0; i < fills.size(); ++i) {
    for (const int32_t clusters : {1, 8, 64, 300}) {
      for (const int32_t v_order : kOrders) {
        const Values v = make_values(1, 1800, 1, 128, fills[i]);
        Call call(v, v_order, {.clusters = clusters, .iterations = 3});
        const std::string what = "case " + std::to_string(i) + ", " + std::to_string(clusters) + " clusters, order " +
                                 std::to_string(v_order);
        const Outcome first = call.run();
        expect_permutations(first, v, what);
        EXPECT_TRUE(
            std::memcmp(first.permutation.data(), call.run().permutation.data(), 4 * first.permutation.size()) == 0)
            << what;
      }
    }
  }
}

// Half of the tokens are the same, and so are half of the seeds: the clusters they leave empty are used elsewhere.
TEST_F(GroupCuda, EmptyClustersTakeFarTokens) {
  constexpr int64_t kTokens = 8192;
  const Fill base = clustered(11, 60);
  const Values v = make_values(1, kTokens, 1, 32, [&](int64_t b, int64_t t, int64_t h, int64_t d) {
    return t < kTokens / 2 ? 0.25f : base(b, t, h, d);
  });
  const test::TokenBuffer buffer = tokens_of(v, 0, 0);
  for (const int32_t clusters : {60, 120}) {
    const test::Grouping grouping{.clusters = clusters, .iterations = 6};
    const Outcome outcome = Call(v, VCATTN_ORDER_KMEANS, grouping).run();
    std::set<std::vector<float>> distinct;
    for (int32_t j = 0; j < clusters; ++j) {
      distinct.insert({outcome.centroids.begin() + j * 32, outcome.centroids.begin() + (j + 1) * 32});
    }
    EXPECT_GE(distinct.size(), static_cast<size_t>(clusters * 3 / 4)) << clusters << " clusters";
    EXPECT_GT(test::energy(buffer, order_of(outcome, v, 0, 0), 128),
              0.90 * test::energy(buffer, cpu_order(buffer, VCATTN_ORDER_KMEANS, grouping), 128))
        << clusters << " clusters";
  }
}

TEST_F(GroupCuda, WarmStartsFromTheGivenCentroids) {
  const Values v = make_values(1, 6000, 2, 128, clustered(12, 100));
  for (const int32_t clusters : {40, 100}) {
    const test::Grouping grouping{.clusters = clusters, .iterations = 5, .warm_iterations = 0};
    const Outcome cold = Call(v, VCATTN_ORDER_KMEANS, grouping).run();
    // No iteration: the same centroids, and the same assignment to them.
    EXPECT_TRUE(Call(v, VCATTN_ORDER_KMEANS, grouping).run(cold.centroids) == cold) << clusters;
    // One more is what six cold ones are.
    const Outcome warm =
        Call(v, VCATTN_ORDER_KMEANS, {.clusters = clusters, .iterations = 5, .warm_iterations = 1}).run(cold.centroids);
    EXPECT_TRUE(warm == Call(v, VCATTN_ORDER_KMEANS, {.clusters = clusters, .iterations = 6}).run()) << clusters;
    // A centroid that is not finite attracts no token, and finds its place again.
    std::vector<float> damaged = cold.centroids;
    damaged[5 * 128 + 3] = kNan;
    const Outcome healed =
        Call(v, VCATTN_ORDER_CHAIN, {.clusters = clusters, .iterations = 5, .warm_iterations = 2}).run(damaged);
    expect_permutations(healed, v, "damaged centroids");
    for (const float c : healed.centroids) ASSERT_TRUE(std::isfinite(c)) << clusters;
  }
}

TEST_F(GroupCuda, RunsInAGraph) {
  for (const int32_t clusters : {64, 100}) {
    const Values v = make_values(1, 4000, 3, 128, clustered(13));
    Call call(v, VCATTN_ORDER_CHAIN, {.clusters = clusters, .iterations = 4});
    const Outcome expected = call.run();
    DeviceBytes scratch(call.scratch_bytes()), permutation(4 * expected.permutation.size()),
        centroids(4 * expected.centroids.size());
    Arena arena(scratch.as<std::byte>());
    const GroupScratch taken = take_group_scratch(call.problem(), arena);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA_OK(group(call.problem(), taken, false, centroids.as<float>(), permutation.as<int32_t>(), stream));
    cudaGraph_t graph;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable;
    CUDA_OK(cudaGraphInstantiate(&executable, graph, 0));
    for (int run = 0; run < 3; ++run) {
      permutation.fill(0x7F);
      centroids.fill(0xFF);
      scratch.fill(0xFF);
      CUDA_OK(cudaGraphLaunch(executable, stream));
      CUDA_OK(cudaStreamSynchronize(stream));
      EXPECT_EQ(permutation.read<int32_t>(static_cast<int64_t>(expected.permutation.size())), expected.permutation);
      EXPECT_EQ(centroids.read<float>(static_cast<int64_t>(expected.centroids.size())), expected.centroids);
    }
    CUDA_OK(cudaGraphExecDestroy(executable));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaStreamDestroy(stream));
  }
}

TEST_F(GroupCuda, RemovesTheEnergyThatTheCpuRemovesFromLargeSequences) {
  struct Case {
    int64_t tokens;
    int32_t clusters;
    int64_t groups;
  };
  for (const Case& c : {Case{111600, 64, 300}, Case{52000, 64, 40}, Case{20000, 200, 150}, Case{20000, 1024, 500}}) {
    const Values v = make_values(1, c.tokens, 1, 64, clustered(14, c.groups));
    const test::TokenBuffer buffer = tokens_of(v, 0, 0);
    const test::Grouping grouping{.clusters = c.clusters, .iterations = 4};
    for (const int32_t v_order : {VCATTN_ORDER_KMEANS, VCATTN_ORDER_CHAIN}) {
      const Outcome outcome = Call(v, v_order, grouping).run();
      const std::vector<int32_t> order = order_of(outcome, v, 0, 0);
      ASSERT_TRUE(test::is_permutation_of_tokens(order));
      const double gpu = test::energy(buffer, order, 128),
                   cpu = test::energy(buffer, cpu_order(buffer, v_order, grouping), 128);
      RecordProperty("energy", std::to_string(gpu) + " against " + std::to_string(cpu));
      EXPECT_GT(gpu, 0.98 * cpu) << c.tokens << " tokens, " << c.clusters << " clusters, order " << v_order << ", CPU "
                                 << cpu;
    }
  }
}

class GroupCudaData : public GroupCuda, public testing::WithParamInterface<const char*> {};

TEST_P(GroupCudaData, RemovesTheEnergyThatTheCpuRemoves) {
  const test::TokenBuffer buffer = test::load_values(GetParam());
  const vsmooth::Tokens tokens = buffer.tokens();
  const Values v = make_values(1, tokens.count, 1, tokens.dim,
                               [&](int64_t, int64_t t, int64_t, int64_t d) { return tokens.row(t)[d]; });
  const test::Grouping grouping{.clusters = 64, .iterations = 4, .warm_iterations = 2};
  std::vector<float> centroids;
  for (const int32_t v_order : {VCATTN_ORDER_KMEANS, VCATTN_ORDER_CHAIN}) {
    const Outcome cold = Call(v, v_order, grouping).run();
    const Outcome warm = Call(v, v_order, grouping).run(cold.centroids);
    const double cpu = test::energy(buffer, cpu_order(buffer, v_order, grouping), 128);
    for (const Outcome* outcome : {&cold, &warm}) {
      const std::vector<int32_t> order = order_of(*outcome, v, 0, 0);
      ASSERT_TRUE(test::is_permutation_of_tokens(order));
      EXPECT_GT(test::energy(buffer, order, 128), 0.98 * cpu)
          << (outcome == &cold ? "cold" : "warm") << ", order " << v_order << ", CPU " << cpu;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, GroupCudaData,
                         testing::Values("qkv_layer2_16448.safetensors", "qkv_layer6_4160.safetensors"));

TEST(GroupCudaPlan, RefusesByName) {
  vcattn_attention_params p{};
  p.v.shape[0] = p.v.shape[1] = p.v.shape[2] = p.v.shape[3] = 1;
  p.recipe.v_order = VCATTN_ORDER_CHAIN;
  p.recipe.grouping = test::Grouping{.clusters = 64};
  Problem problem{};
  problem.params = &p;
  problem.batch = problem.seqlen_kv = problem.num_heads_kv = problem.head_dim = problem.num_sequences = 1;
  EXPECT_EQ(group_unsupported(problem), nullptr);
  p.recipe.grouping.seeding = VCATTN_SEED_PLUSPLUS;
  EXPECT_STREQ(group_unsupported(problem), "has k-means with seeding spaced only");
  p.recipe.grouping = test::Grouping{.clusters = 1025};
  EXPECT_STREQ(group_unsupported(problem), "has k-means with at most 1024 clusters");
  p.recipe.v_order = VCATTN_ORDER_SEQUENCE;
  EXPECT_EQ(group_unsupported(problem), nullptr);
  p.recipe.v_order = VCATTN_ORDER_CUBE;
  EXPECT_STREQ(group_unsupported(problem), "has v_order sequence, kmeans and chain only");
  p.recipe.v_order = VCATTN_ORDER_KMEANS;
  p.recipe.grouping = test::Grouping{.clusters = 4};
  problem.head_dim = 129;
  EXPECT_STREQ(group_unsupported(problem), "groups values of at most 128 channels");
  problem.head_dim = 128;
  problem.seqlen_kv = (int64_t{1} << 30) + 1;
  EXPECT_STREQ(group_unsupported(problem), "groups sequences of at most 2^30 tokens");
}

TEST(GroupCudaPlan, ScratchIsASmallPartOfLongSequences) {
  for (const auto& [tokens, heads] : {std::pair<int64_t, int64_t>{75600, 40}, {32760, 40}, {111600, 24}}) {
    vcattn_attention_params p{};
    p.recipe.v_order = VCATTN_ORDER_CHAIN;
    p.recipe.grouping = test::Grouping{.clusters = 64};
    Problem problem{};
    problem.params = &p;
    problem.batch = problem.num_sequences = 1;
    problem.seqlen_kv = tokens;
    problem.num_heads_kv = heads;
    problem.head_dim = 128;
    Arena arena(nullptr);
    take_group_scratch(problem, arena);
    EXPECT_LT(static_cast<double>(arena.used()), 0.10 * static_cast<double>(tokens * heads * 256))
        << tokens << " x " << heads;
  }
}

}  // namespace
}  // namespace vcattn::sm90a
