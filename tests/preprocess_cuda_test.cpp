// Preprocessing on the device against the CPU's, bit by bit: every code, scale, mean and flag.
#include "preprocess_device.h"

namespace vcattn::preprocess_test {
namespace {

class PreprocessCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0, major = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    if (major != 9) GTEST_SKIP() << "needs compute capability 9.0; this device has " << major << ".x";
  }
};

// ---- cases ----------------------------------------------------------------------------------------------------------

const char* const kRecipes[] = {"accurate", "exact", "fast", "sage2", "vsmooth8", "vsmooth8_expcast"};

TEST_F(PreprocessCuda, Recipes) {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    Case c;
    c.recipe = recipe;
    c.lse = true;
    compare(c);
  }
}

// Each choice turned over from `accurate` and `fast`.
TEST_F(PreprocessCuda, RecipeFields) {
  struct Change {
    const char* field;
    const char* value;
  };
  constexpr Change kChanges[] = {{"qk_hadamard", "0"},    {"k_centred", "0"},      {"mean_rows", "0"},
                                 {"mean_centred", "0"},   {"mean_format", "bf16"}, {"p_phases", "1"},
                                 {"v_scale_span", "head"}};
  for (const char* recipe : {"accurate", "fast"}) {
    for (const Change& change : kChanges) {
      SCOPED_TRACE(std::string(recipe) + " " + change.field + "=" + change.value);
      Case c;
      c.recipe = recipe;
      c.lse = true;
      c.change = [&](vcattn_recipe& r) {
        ASSERT_EQ(vcattn_recipe_set(&r, change.field, change.value, nullptr), VCATTN_OK);
      };
      compare(c);
    }
  }
}

TEST_F(PreprocessCuda, E4m3WithAbsmaxScales) {
  Case c;
  c.change = [](vcattn_recipe& r) { r.qk_format = VCATTN_FORMAT_E4M3; };
  compare(c);
}

TEST_F(PreprocessCuda, HeadDims) {
  for (const int64_t head_dim : {1, 8, 16, 17, 24, 32, 40, 48, 64, 65, 72, 96, 100, 127, 128}) {
    for (const char* recipe : {"accurate", "fast", "sage2"}) {
      SCOPED_TRACE(std::string(recipe) + " head_dim " + std::to_string(head_dim));
      Case c;
      c.head_dim = head_dim;
      c.recipe = recipe;
      c.lse = true;
      compare(c);
    }
  }
}

TEST_F(PreprocessCuda, DtypesAndLayouts) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    for (const Layout layout : {Layout::kBshd, Layout::kBhsd, Layout::kFusedQkv, Layout::kOddTokenStride,
                                Layout::kChannelStride2, Layout::kUnaligned, Layout::kBroadcastBatch}) {
      for (const int64_t head_dim : {128, 96, 64, 40}) {
        SCOPED_TRACE("dtype " + std::to_string(dtype) + " layout " + std::to_string(static_cast<int>(layout)) +
                     " head_dim " + std::to_string(head_dim));
        Case c;
        c.batch = 2;
        c.num_heads = 4;
        c.seqlen_q = 70;
        c.seqlen_kv = 150;
        c.head_dim = head_dim;
        c.dtype = dtype;
        c.layout = layout;
        compare(c);
      }
    }
  }
}

TEST_F(PreprocessCuda, OperandsOfDifferentTypes) {
  for (const char* recipe : {"accurate", "fast"}) {
    for (const int64_t head_dim : {64, 128}) {
      SCOPED_TRACE(std::string(recipe) + " head_dim " + std::to_string(head_dim));
      Case c;
      c.recipe = recipe;
      c.head_dim = head_dim;
      c.lse = true;
      c.k_dtype = VCATTN_FP32;
      c.v_dtype = VCATTN_FP16;
      compare(c);
    }
  }
}

TEST_F(PreprocessCuda, Lengths) {
  for (const int64_t length : {1, 2, 16, 127, 128, 129, 255, 256, 257, 1000, 1024, 1025, 2500}) {
    for (const char* recipe : {"accurate", "fast"}) {
      SCOPED_TRACE(std::string(recipe) + " length " + std::to_string(length));
      Case c;
      c.recipe = recipe;
      c.seqlen_q = length;
      c.seqlen_kv = length;
      c.lse = true;
      compare(c);
    }
  }
}

TEST_F(PreprocessCuda, ManyPartialSums) {
  Case c;
  c.seqlen_kv = 20000;
  c.num_heads = c.num_heads_kv = 1;
  for (const char* recipe : {"accurate", "fast"}) {
    SCOPED_TRACE(recipe);
    c.recipe = recipe;
    compare(c);
  }
}

TEST_F(PreprocessCuda, GroupedQueryHeadsAndBatches) {
  Case c;
  c.batch = 3;
  c.num_heads = 6;
  for (const bool permuted : {false, true}) {
    c.permuted = permuted;
    compare(c);
  }
}

TEST_F(PreprocessCuda, KeyMasks) {
  const std::function<bool(int64_t, int64_t)> masks[] = {
      [](int64_t, int64_t) { return true; },
      [](int64_t b, int64_t token) { return b != 1 && token < 200; },             // padding; one entry without any
      [](int64_t b, int64_t token) { return (token * 7919 + b) % 5 < 2; },        // scattered
      [](int64_t b, int64_t token) { return b == 1 ? token == 299 : token > 5; }  // a single key
  };
  int number = 0;
  for (const auto& mask : masks) {
    for (const int64_t stride : {1, 3}) {
      for (const bool permuted : {false, true}) {
        for (const char* recipe : {"accurate", "fast"}) {
          SCOPED_TRACE(std::string(recipe) + " mask " + std::to_string(number) + " stride " + std::to_string(stride) +
                       " permuted " + std::to_string(permuted));
          Case c;
          c.batch = 2;
          c.recipe = recipe;
          c.mask = mask;
          c.mask_token_stride = stride;
          c.permuted = permuted;
          // What the mask keeps out is never read.
          c.k = [&, random = normal(5, 1.0f, 1.0f)](int64_t b, int64_t s, int64_t h, int64_t d) mutable {
            const float x = random(b, s, h, d);
            return mask(b, s) ? x : std::nanf("");
          };
          compare(c);
        }
      }
    }
    ++number;
  }
}

// Longer than what one pass over the mask takes.
TEST_F(PreprocessCuda, LongKeyMask) {
  Case c;
  c.seqlen_kv = 20000;
  c.num_heads = c.num_heads_kv = 1;
  c.permuted = false;
  c.mask = [](int64_t, int64_t token) { return token * 2654435761U % 7 != 3; };
  compare(c);
}

TEST_F(PreprocessCuda, Segments) {
  Case c;
  c.cu_q = {0, 0, 100, 100, 101, 500, 500};
  c.cu_kv = {0, 40, 40, 1200, 1456, 1457, 1457};
  c.seqlen_q = c.cu_q.back();
  c.seqlen_kv = c.cu_kv.back();
  for (const bool permuted : {false, true}) {
    for (const char* recipe : {"accurate", "fast"}) {
      SCOPED_TRACE(std::string(recipe) + " permuted " + std::to_string(permuted));
      c.permuted = permuted;
      c.recipe = recipe;
      c.lse = true;
      compare(c);
    }
  }
}

TEST_F(PreprocessCuda, MoreSegmentsThanOneLaunchTakes) {
  Case c;
  c.head_dim = 64;
  std::mt19937 random(6);
  c.cu_q = c.cu_kv = {0};
  for (int s = 0; s < 250; ++s) {
    c.cu_q.push_back(c.cu_q.back() + random() % 4);
    c.cu_kv.push_back(c.cu_kv.back() + random() % 300 * (random() % 4 != 0));
  }
  c.seqlen_q = c.cu_q.back();
  c.seqlen_kv = c.cu_kv.back();
  compare(c);
}

TEST_F(PreprocessCuda, Scales) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP32}) {
    for (const float scale : {1e-42f, 1e-38f, 1e-34f, 1e-31f, 1e-30f, 1e-20f, 1e10f, 1e30f, 1e36f}) {
      for (const char* recipe : {"accurate", "fast"}) {
        SCOPED_TRACE(std::string(recipe) + " dtype " + std::to_string(dtype) + " scale " + std::to_string(scale));
        Case c;
        c.recipe = recipe;
        c.dtype = dtype;
        c.scale = scale;
        compare(c);
      }
    }
  }
  for (const double softmax_scale : {1e-12, 3.0, 0x1p64}) {
    SCOPED_TRACE(softmax_scale);
    Case c;
    c.recipe = "fast";
    c.softmax_scale = softmax_scale;
    compare(c);
  }
}

// Magnitudes far apart inside a channel: FP64 sums that depend on their order.
TEST_F(PreprocessCuda, SumsThatDependOnTheOrder) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP32}) {
    Case c;
    c.dtype = dtype;
    c.seqlen_kv = 3000;
    c.lse = true;
    const auto spread = [](uint32_t seed) {
      return [random = std::mt19937(seed)](int64_t, int64_t, int64_t, int64_t) mutable {
        const float mantissa = 1.0f + static_cast<float>(random() % 65536) / 65536.0f;
        return std::ldexp(random() % 2 == 0 ? mantissa : -mantissa, static_cast<int>(random() % 120) - 80);
      };
    };
    c.q = spread(7);
    c.k = spread(8);
    c.v = spread(9);
    compare(c);
  }
}

TEST_F(PreprocessCuda, ZerosAndConstants) {
  const Fill zero = [](int64_t, int64_t, int64_t, int64_t) { return 0.0f; };
  const Fill minus_zero = [](int64_t, int64_t, int64_t, int64_t) { return -0.0f; };
  const Fill constant = [](int64_t, int64_t, int64_t, int64_t d) { return 0.37f * static_cast<float>(d - 20); };
  for (const Fill& fill : {zero, minus_zero, constant}) {
    for (const char* recipe : {"accurate", "fast", "sage2"}) {
      SCOPED_TRACE(recipe);
      Case c;
      c.recipe = recipe;
      c.q = c.k = c.v = fill;
      compare(c);
    }
  }
}

TEST_F(PreprocessCuda, WhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    for (const Layout layout : {Layout::kBshd, Layout::kUnaligned}) {
      for (const char* recipe : {"accurate", "fast", "sage2"}) {
        SCOPED_TRACE(std::string(recipe) + " dtype " + std::to_string(dtype));
        Case c;
        c.permuted = layout == Layout::kUnaligned;  // else at even and odd places as below
        c.batch = 2;
        c.recipe = recipe;
        c.dtype = dtype;
        c.layout = layout;
        const auto with = [](Fill fill, int64_t batch, int64_t token, int64_t channel, float value) {
          return [=](int64_t b, int64_t s, int64_t h, int64_t d) mutable {
            const float x = fill(b, s, h, d);
            return b == batch && h == 1 && s == token && d == channel ? value : x;
          };
        };
        c.q = with(with(normal(1, 1.0f, 0.1f), 0, 7, 0, std::nanf("")), 1, 199, 127, -kInfinity);
        c.k = with(with(normal(2, 1.0f, 1.0f), 0, 299, 5, kInfinity), 0, 0, 126, std::nanf(""));
        c.v = with(with(normal(3, 1.0f, 0.5f), 0, 290, 11, std::nanf("")), 1, 3, 12, -kInfinity);
        compare(c);
      }
    }
  }
}

// ---- rope -----------------------------------------------------------------------------------------------------------

constexpr vcattn_rope_pairing kPairings[] = {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_HALF_SPLIT};

TEST_F(PreprocessCuda, RopePerToken) {
  for (const vcattn_rope_pairing pairing : kPairings) {
    for (const char* recipe : {"accurate", "fast", "sage2"}) {
      for (const bool strided : {false, true}) {
        SCOPED_TRACE(std::string(recipe) + " pairing " + std::to_string(pairing) + " strided " +
                     std::to_string(strided));
        Case c;
        c.batch = 2;
        c.num_heads = 4;
        c.recipe = recipe;
        c.lse = true;
        c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_TOKEN, strided};
        compare(c);
      }
    }
  }
}

// Text before and behind the video; all of the video; more than one partial sum.
TEST_F(PreprocessCuda, RopePerAxis) {
  for (const vcattn_rope_pairing pairing : kPairings) {
    for (const vcattn_video_grid grid : {vcattn_video_grid{7, 3, 5, 12}, {0, 2, 10, 10}, {0, 200, 1, 1}}) {
      for (const char* recipe : {"accurate", "fast"}) {
        SCOPED_TRACE(std::string(recipe) + " pairing " + std::to_string(pairing) + " frames " +
                     std::to_string(grid.frames));
        Case c;
        c.seqlen_kv = 2200;
        c.recipe = recipe;
        c.lse = true;
        c.grid = grid;
        c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_AXIS};
        compare(c);
      }
    }
  }
}

TEST_F(PreprocessCuda, RopeOfOneOperand) {
  for (const vcattn_rope_pairing pairing : kPairings) {
    Case c;
    c.lse = true;
    c.rope_q.pairing = pairing;
    compare(c);
    std::swap(c.rope_q, c.rope_k);
    compare(c);
  }
}

TEST_F(PreprocessCuda, RopeHeadDimsTypesAndLayouts) {
  for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    for (const Layout layout : {Layout::kBshd, Layout::kUnaligned}) {
      for (const int64_t head_dim : {2, 6, 16, 48, 64, 80, 96, 112, 128}) {
        for (const vcattn_rope_pairing pairing : kPairings) {
          if (pairing == VCATTN_ROPE_HALF_SPLIT && head_dim % 16 != 0) continue;
          for (const char* hadamard : {"0", "1"}) {
            SCOPED_TRACE("dtype " + std::to_string(dtype) + " layout " + std::to_string(static_cast<int>(layout)) +
                         " head_dim " + std::to_string(head_dim) + " pairing " + std::to_string(pairing) +
                         " qk_hadamard " + hadamard);
            Case c;
            c.dtype = dtype;
            c.layout = layout;
            c.head_dim = head_dim;
            c.lse = true;
            c.change = [&](vcattn_recipe& r) {
              r.qk_format = VCATTN_FORMAT_E4M3;  // where zeros keep their signs
              ASSERT_EQ(vcattn_recipe_set(&r, "qk_hadamard", hadamard, nullptr), VCATTN_OK);
            };
            c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_TOKEN};
            compare(c);
          }
        }
      }
    }
  }
}

TEST_F(PreprocessCuda, RopeWithMasksAndSegments) {
  for (const vcattn_rope_pairing pairing : kPairings) {
    for (const bool permuted : {false, true}) {
      SCOPED_TRACE("pairing " + std::to_string(pairing) + " permuted " + std::to_string(permuted));
      Case c;
      c.batch = 2;
      c.seqlen_kv = 1500;
      c.num_heads = 4;
      c.permuted = permuted;
      c.lse = true;
      c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_TOKEN, true};
      c.mask = [](int64_t b, int64_t token) { return (token * 7919 + b) % 5 < 2; };
      compare(c);
      c.grid = {3, 4, 5, 7};
      c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_AXIS};
      compare(c);

      Case packed;
      packed.cu_q = {0, 0, 100, 100, 101, 500, 500};
      packed.cu_kv = {0, 40, 40, 1200, 1456, 1457, 1457};
      packed.seqlen_q = packed.cu_q.back();
      packed.seqlen_kv = packed.cu_kv.back();
      packed.permuted = permuted;
      packed.lse = true;
      packed.rope_q = packed.rope_k = {pairing, VCATTN_ROPE_PER_TOKEN};
      compare(packed);
    }
  }
}

// In the rows: as without rope. In the tables: the rows that they rotate, whose codes then mean nothing.
TEST_F(PreprocessCuda, RopeOfWhatIsNotFinite) {
  for (const vcattn_rope_pairing pairing : kPairings) {
    for (const vcattn_dtype dtype : {VCATTN_BF16, VCATTN_FP32}) {
      SCOPED_TRACE("pairing " + std::to_string(pairing) + " dtype " + std::to_string(dtype));
      Case c;
      c.batch = 2;
      c.dtype = dtype;
      c.lse = true;
      c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_TOKEN};
      const auto with = [](Fill fill, int64_t token, int64_t channel, float value) {
        return [=](int64_t b, int64_t s, int64_t h, int64_t d) mutable {
          const float x = fill(b, s, h, d);
          return b == 0 && h == 1 && s == token && d == channel ? value : x;
        };
      };
      c.q = with(with(normal(1, 1.0f, 0.1f), 7, 0, std::nanf("")), 9, 100, std::numeric_limits<float>::infinity());
      c.k = with(with(normal(2, 1.0f, 1.0f), 299, 5, std::nanf("")), 0, 126, -std::numeric_limits<float>::infinity());
      compare(c);
    }
    Case c;
    c.rope_q = c.rope_k = {pairing, VCATTN_ROPE_PER_TOKEN};
    Inputs inputs(c);
    inputs.rope_q.values()[30 * 64 + 63] = std::nanf("");  // token 30, pair 63
    inputs.rope_k.values()[299 * 64] = std::numeric_limits<float>::infinity();
    Problem problem;
    ASSERT_EQ(validate_attention(&inputs.params, problem, nullptr), VCATTN_OK);
    const DeviceResult found = prepare_on_device(inputs, problem);
    for (int64_t head = 0; head < 2; ++head) {
      EXPECT_NE(found.qkv.k_poison[head], 0U) << "head " << head;
      for (int64_t row = 0; row < c.seqlen_q; ++row) {
        const float factor = found.qkv.q_factor[head * found.qkv.blocks * found.qkv.block_rows + row];
        EXPECT_EQ(std::isnan(factor), row == 30) << "head " << head << ", row " << row;
      }
    }
  }
}

TEST_F(PreprocessCuda, RopeRunsInAGraph) {
  Case c;
  c.lse = true;
  c.rope_q = c.rope_k = {VCATTN_ROPE_INTERLEAVED, VCATTN_ROPE_PER_TOKEN};
  compare(c, true);
}

TEST_F(PreprocessCuda, RunsInAGraph) {
  Case c;
  c.lse = true;
  for (const char* recipe : {"accurate", "fast"}) {
    c.recipe = recipe;
    compare(c, true);
  }
}

// Entries that name no admitted key of the sequence are not followed, and their head is marked.
TEST_F(PreprocessCuda, WrongPermutations) {
  constexpr int32_t kWrong[] = {-1, 300, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), 4};
  for (const int32_t wrong : kWrong) {
    SCOPED_TRACE(wrong);
    Case c;
    c.mask = [](int64_t, int64_t token) { return token != 4; };
    Inputs inputs(c);
    inputs.permutation[c.seqlen_kv + 130] = wrong;  // head 1
    Problem problem;
    ASSERT_EQ(validate_attention(&inputs.params, problem, nullptr), VCATTN_OK);
    const DeviceResult found = prepare_on_device(inputs, problem);
    EXPECT_EQ(found.qkv.k_poison[0], 0U);
    EXPECT_NE(found.qkv.k_poison[1], 0U);
  }
}

}  // namespace
}  // namespace vcattn::preprocess_test
