// What bad arguments get: a code, one line that names the unmet condition, untouched outputs.
#include <fmt/format.h>

#include <functional>
#include <limits>

#include "core/recipes.h"
#include "support.h"

namespace vcattn::test {
namespace {

class Validation : public testing::Test {
 protected:
  Validation() : q(2, 6, 4, 64), k(2, 9, 2, 64), v(2, 9, 2, 64), out(2, 6, 4, 64) {
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3);
    p = params(q, k, v, out);
  }

  // The change makes the call fail with this code and message, and writes nothing.
  void refused(const std::function<void()>& change, vcattn_code code, const std::string& message) {
    const vcattn_attention_params before = p;
    const auto untouched = out.bytes();
    change();
    const Outcome outcome = attend(p);
    EXPECT_EQ(outcome.code, code) << message;
    EXPECT_EQ(outcome.message, message);
    EXPECT_EQ(out.bytes(), untouched) << message;
    p = before;
  }

  Tensor q, k, v, out;
  vcattn_attention_params p;
};

TEST_F(Validation, NamesTheTensorAndTheAxis) {
  refused([&] { p.k.data = nullptr; }, VCATTN_INVALID_ARGUMENT, "k: data is NULL");
  refused([&] { p.v.dtype = 9; }, VCATTN_INVALID_ARGUMENT, "v: dtype is BF16 (1), FP16 (2) or FP32 (3); found 9");
  refused([&] { p.q.shape[1] = 0; }, VCATTN_INVALID_ARGUMENT, "q: seqlen is at least 1; found 0");
  refused([&] { p.out.stride[2] = -64; }, VCATTN_INVALID_ARGUMENT,
          "out: stride of num_heads is not negative; found -64");
  refused([&] { p.k.shape[1] = 8; }, VCATTN_INVALID_ARGUMENT, "k: seqlen is 9, as in v; found 8");
  refused([&] { p.q.shape[3] = 32; }, VCATTN_INVALID_ARGUMENT, "q: head_dim is 64, as in v; found 32");
  refused([&] { p.out.shape[1] = 5; }, VCATTN_INVALID_ARGUMENT, "out: seqlen is 6, as in q; found 5");
  refused([&] { p.q.shape[0] = p.out.shape[0] = 1; }, VCATTN_INVALID_ARGUMENT, "q: batch is 2, as in v; found 1");
  refused([&] { p.q.shape[2] = p.out.shape[2] = 3; }, VCATTN_INVALID_ARGUMENT,
          "q: num_heads 3 is a multiple of num_heads_kv 2");
  refused([&] { p.v.stride[0] = std::numeric_limits<int64_t>::max(); }, VCATTN_INVALID_ARGUMENT,
          "v: shape times stride overflows 64 bits");
  refused([&] { p.q.data = reinterpret_cast<std::byte*>(p.q.data) + 1; }, VCATTN_INVALID_ARGUMENT,
          "q: data is aligned to its element size of 4 bytes");
}

TEST_F(Validation, RefusesWhatItCannotServe) {
  refused([&] { p.v.shape[3] = 257; }, VCATTN_UNSUPPORTED, "v: head_dim is at most 256; found 257");
  refused([&] { p.v.shape[1] = int64_t{1} << 31; }, VCATTN_UNSUPPORTED,
          "v: seqlen is at most 2^31 - 1 (permutations are 32-bit); found 2147483648");
  refused(
      [&] {
        p.k.shape[1] = p.v.shape[1] = 1 << 30;
        p.k.shape[2] = p.v.shape[2] = p.q.shape[2] = p.out.shape[2] = 1 << 20;
        p.k.stride[1] = p.k.stride[2] = p.v.stride[1] = p.v.stride[2] = 0;
      },
      VCATTN_UNSUPPORTED, "v: 2 x 1073741824 x 1048576 rows; at most 2^38");
  refused([&] { p.backend = 7; }, VCATTN_UNSUPPORTED, "backend 7 is not known");
}

TEST_F(Validation, ProtectsMemory) {
  refused([&] { p.out.stride[2] = 0; }, VCATTN_INVALID_ARGUMENT,
          "out: strides [1536, 256, 0, 1] make elements overlap");
  refused([&] { p.out.data = p.q.data; }, VCATTN_INVALID_ARGUMENT, "out: its memory must not overlap q");
  float lse[48];
  p.lse_stride[0] = 24;
  p.lse_stride[1] = 4;
  p.lse_stride[2] = 1;
  refused([&] { p.lse = lse, p.lse_stride[1] = 1; }, VCATTN_INVALID_ARGUMENT,
          "lse: strides [24, 1, 1] make elements overlap");
  refused([&] { p.lse = static_cast<float*>(p.v.data); }, VCATTN_INVALID_ARGUMENT,
          "lse: its memory must not overlap q, k, v or out");
  size_t bytes;
  ASSERT_EQ(vcattn_attention_workspace_size(&p, &bytes, nullptr), VCATTN_OK);
  alignas(256) static std::byte memory[512];
  vcattn_message message;
  EXPECT_EQ(vcattn_attention(&p, nullptr, bytes, &message), VCATTN_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(std::string(message.text), "workspace is NULL; " + std::to_string(bytes) + " bytes are needed");
  EXPECT_EQ(vcattn_attention(&p, memory, 512, &message), VCATTN_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(std::string(message.text), "workspace holds 512 bytes; " + std::to_string(bytes) + " are needed");
  EXPECT_EQ(vcattn_attention(&p, memory + 16, bytes, &message), VCATTN_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(std::string(message.text), "workspace is aligned to 256 bytes");
}

TEST_F(Validation, ChecksScalarsAndFlags) {
  for (const double scale : {-1.0, 1e38, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const vcattn_attention_params before = p;
    p.softmax_scale = scale;
    EXPECT_EQ(attend(p).code, VCATTN_INVALID_ARGUMENT) << scale;
    p = before;
  }
  refused([&] { p.num_threads = -1; }, VCATTN_INVALID_ARGUMENT, "num_threads is from 0 to 4096; found -1");
  refused([&] { p.k.reserved = -7; }, VCATTN_INVALID_ARGUMENT, "k: reserved is 0; found -7");
  const uint8_t mask[18] = {};
  refused([&] { p.key_mask = mask, p.key_mask_stride[1] = -5; }, VCATTN_INVALID_ARGUMENT,
          "key_mask: stride of seqlen is not negative and fits 64 bits; found -5");
  refused([&] { p.flags = 6; }, VCATTN_INVALID_ARGUMENT, "flags: unknown bits in 0x6");
  refused([&] { p.struct_size = 8; }, VCATTN_INVALID_ARGUMENT,
          "params: struct_size is " + std::to_string(sizeof p) +
              "; found 8 (use vcattn_attention_params_init and the header of this version)");
  EXPECT_EQ(vcattn_attention(nullptr, nullptr, 0, nullptr), VCATTN_INVALID_ARGUMENT);
}

TEST_F(Validation, ChecksSegments) {
  Tensor q1(1, 6, 4, 64), k1(1, 9, 2, 64), v1(1, 9, 2, 64), out1(1, 6, 4, 64);
  p = params(q1.fill_normal(1), k1.fill_normal(2), v1.fill_normal(3), out1);
  int64_t cu_q[] = {0, 4, 6}, cu_kv[] = {0, 9, 9};
  p.cu_seqlens_q = cu_q;
  p.cu_seqlens_kv = cu_kv;
  p.num_segments = 2;
  EXPECT_EQ(attend(p).code, VCATTN_OK);
  cu_q[1] = 7;
  EXPECT_EQ(attend(p).message, "cu_seqlens_q: never decreases; entry 2 is 6 after 7");
  cu_q[1] = 2;
  cu_q[2] = 5;
  EXPECT_EQ(attend(p).message, "cu_seqlens_q: ends at the sequence length 6; found 5");
  cu_q[2] = 6;
  cu_kv[0] = 1;
  EXPECT_EQ(attend(p).message, "cu_seqlens_kv: starts at 0; found 1");
  cu_kv[0] = 0;
  const uint8_t mask[9] = {};
  p.key_mask = mask;
  EXPECT_EQ(attend(p).code, VCATTN_UNSUPPORTED);
  p.key_mask = nullptr;
  p.cu_seqlens_kv = nullptr;
  EXPECT_EQ(attend(p).message, "cu_seqlens_q and cu_seqlens_kv come together");
  p.cu_seqlens_q = nullptr;
  EXPECT_EQ(attend(p).message, "num_segments is 0 without cu_seqlens; found 2");
}

TEST_F(Validation, ChecksTheGrid) {
  p.recipe.v_order = VCATTN_ORDER_CUBE;
  EXPECT_EQ(attend(p).message, "v_order cube needs the video grid; found first_token 0, frames 0, height 0, width 0");
  p.grid = {1, 2, 2, 2};
  EXPECT_EQ(attend(p).code, VCATTN_OK);
  p.grid = {2, 2, 2, 2};
  EXPECT_EQ(attend(p).message, "grid: 2 + 2 x 2 x 2 tokens exceed seqlen 9");
  p.grid = {0, int64_t{1} << 40, int64_t{1} << 40, 1};
  EXPECT_EQ(attend(p).code, VCATTN_INVALID_ARGUMENT);
  // A given permutation makes the grid idle in attention, but never in grouping.
  std::vector<int32_t> permutation(36);
  for (int i = 0; i < 36; ++i) permutation[i] = i % 9;
  p.permutation = permutation.data();
  EXPECT_EQ(attend(p).code, VCATTN_OK);
  size_t bytes;
  EXPECT_EQ(vcattn_group_workspace_size(&p, &bytes, nullptr), VCATTN_INVALID_ARGUMENT);
}

TEST_F(Validation, ChecksTheGridOfOrdersThatCluster) {
  for (const int32_t v_order : {VCATTN_ORDER_KMEANS, VCATTN_ORDER_BALANCED, VCATTN_ORDER_CHAIN}) {
    p.recipe.v_order = v_order;
    p.grid = {};
    EXPECT_EQ(attend(p).code, VCATTN_OK) << "no grid is needed";
    p.grid = {1, 1, 1, 8};
    EXPECT_EQ(attend(p).code, VCATTN_OK);
    p.grid = {2, 2, 2, 2};
    EXPECT_EQ(attend(p).message, "grid: 2 + 2 x 2 x 2 tokens exceed seqlen 9");
    for (const vcattn_video_grid& wrong : {vcattn_video_grid{4, 0, 0, 0}, {0, 1, 0, 1}, {0, 0, 1, 1}, {0, 1, 1, -3}}) {
      p.grid = wrong;
      EXPECT_EQ(attend(p).message,
                fmt::format("grid: all zero, or at least one frame, row and column; found first_token {}, frames {}, "
                            "height {}, width {}",
                            wrong.first_token, wrong.frames, wrong.height, wrong.width));
    }
    constexpr int64_t kHuge = int64_t{1} << 40, kMax = std::numeric_limits<int64_t>::max();
    for (const vcattn_video_grid& wrong :
         {vcattn_video_grid{0, kHuge, kHuge, 1}, {0, 1, kHuge, kHuge}, {kMax, 1, 1, 1}, {-1, 1, 1, 1}}) {
      p.grid = wrong;
      EXPECT_EQ(attend(p).code, VCATTN_INVALID_ARGUMENT) << wrong.first_token << " + " << wrong.frames;
    }
  }
  p.grid = {0, 1, 1, 9};
  for (vcattn_tensor* t : {&p.q, &p.k, &p.v, &p.out}) t->shape[0] = 1;
  const int64_t cu_q[] = {0, p.q.shape[1]}, cu_kv[] = {0, 9};
  p.cu_seqlens_q = cu_q;
  p.cu_seqlens_kv = cu_kv;
  p.num_segments = 1;
  EXPECT_EQ(attend(p).code, VCATTN_UNSUPPORTED);
  EXPECT_EQ(attend(p).message, "grid and cu_seqlens do not go together: a grid is of one sequence");
}

// ---- recipes -------------------------------------------------------------------------------------------------------

TEST(Recipe, NamesAreListedWhenOneIsUnknown) {
  vcattn_recipe r;
  vcattn_message message;
  EXPECT_EQ(vcattn_recipe_by_name("acurate", &r, &message), VCATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(message.text).rfind("no recipe \"acurate\"; there are: accurate, exact, fast, bf16", 0), 0u)
      << message.text;
  EXPECT_EQ(vcattn_recipe_by_name("a\nb\x7f", &r, &message), VCATTN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(message.text).rfind("no recipe \"a?b?\"", 0), 0u) << message.text;
  EXPECT_EQ(vcattn_recipe_name(-1), nullptr);
  EXPECT_EQ(vcattn_recipe_name(vcattn_recipe_count()), nullptr);
}

TEST(Recipe, EveryNamedRecipeHoldsTogether) {
  for (const char* name : {"accurate", "exact", "fast", "bf16", "fp8_naive", "fp8_hadamard", "sage2", "sage3",
                           "attn_qat", "vsmooth8", "vsmooth8_expcast", "vsmooth4", "fp32"}) {
    Tensor q(1, 2, 1, 64), k(1, 3, 1, 64), v(1, 3, 1, 64), out(1, 2, 1, 64);
    EXPECT_EQ(attend(params(q.fill_normal(1), k.fill_normal(2), v.fill_normal(3), out, name)).code, VCATTN_OK) << name;
  }
}

// Description and setting are inverse: a recipe rebuilt from its own line is the same recipe.
TEST(Recipe, IsRebuiltFromItsDescription) {
  for (int i = 0; i < vcattn_recipe_count(); ++i) {
    const vcattn_recipe original = recipe(vcattn_recipe_name(i));
    char line[2048];
    const size_t length = vcattn_recipe_describe(&original, line, sizeof line);
    ASSERT_LT(length, sizeof line);
    vcattn_recipe rebuilt = recipe(i == 0 ? "sage3" : "accurate");
    std::memcpy(rebuilt.name, original.name, sizeof rebuilt.name);
    std::string text = line;
    size_t begin = 0;
    while (begin < text.size()) {
      const size_t end = std::min(text.find(' ', begin), text.size());
      const std::string pair = text.substr(begin, end - begin);
      const size_t equals = pair.find('=');
      const std::string field = pair.substr(0, equals), value = pair.substr(equals + 1);
      begin = end + 1;
      if (field == "name") continue;
      vcattn_message message;
      EXPECT_EQ(vcattn_recipe_set(&rebuilt, field.c_str(), value.c_str(), &message), VCATTN_OK) << message.text;
    }
    char again[2048];
    vcattn_recipe_describe(&rebuilt, again, sizeof again);
    EXPECT_STREQ(line, again);
  }
}

TEST(Recipe, DescribeCutsToTheBuffer) {
  const vcattn_recipe r = recipe("accurate");
  char text[8] = {'x', 'x', 'x', 'x', 'x', 'x', 'x', 'x'};
  const size_t whole = vcattn_recipe_describe(&r, text, sizeof text);
  EXPECT_STREQ(text, "name=ac");
  EXPECT_EQ(vcattn_recipe_describe(&r, nullptr, 0), whole);
}

TEST(Recipe, RefusesUnknownFieldsAndValues) {
  vcattn_recipe r = recipe("accurate");
  vcattn_message message;
  EXPECT_EQ(vcattn_recipe_set(&r, "p_fromat", "e4m3", &message), VCATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(message.text, "a recipe has no field \"p_fromat\" (vcattn_recipe_describe names them all)");
  EXPECT_EQ(vcattn_recipe_set(&r, "p_format", "e5m2", &message), VCATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(message.text,
               "recipe field p_format is one of fp32, bf16, e4m3, expcast, expcast_two_lines, nvfp4; found \"e5m2\"");
  EXPECT_EQ(vcattn_recipe_set(&r, "mean_rows", "12x", &message), VCATTN_INVALID_ARGUMENT);
  EXPECT_STREQ(message.text, "recipe field mean_rows is a whole number from 0 to 128; found \"12x\"");
  EXPECT_EQ(vcattn_recipe_set(&r, "p_log2_peak", "x", &message), VCATTN_INVALID_ARGUMENT);
}

TEST(Recipe, NamesTheFieldsThatDisagree) {
  Tensor q(1, 2, 1, 64), k(1, 3, 1, 64), v(1, 3, 1, 64), out(1, 2, 1, 64);
  const auto base = params(q.fill_normal(1), k.fill_normal(2), v.fill_normal(3), out);
  struct Case {
    std::function<void(vcattn_recipe&)> change;
    const char* message;
  };
  const Case cases[] = {
      {[](vcattn_recipe& r) { r.mean_rows = 48; }, "recipe \"accurate\": mean_rows is 0, 32, 64 or 128"},
      {[](vcattn_recipe& r) { r.row_sum = VCATTN_SUM_UNROUNDED; },
       "recipe \"accurate\": row_sum unrounded needs an exponential; ExpCast has none, so its row sums are decoded"},
      {[](vcattn_recipe& r) { r.qk_accumulate = VCATTN_ACC_HOPPER; },
       "recipe \"accurate\": qk_accumulate hopper needs qk_format e4m3"},
      {[](vcattn_recipe& r) { r.v_format = VCATTN_FORMAT_INT8; },
       "recipe \"accurate\": v_format int8 is not defined: P has no integer format"},
      {[](vcattn_recipe& r) { r.p_format = VCATTN_P_NVFP4; },
       "recipe \"accurate\": row_max tile_octave: p_format nvfp4 has its own scale per tile already"},
      {[](vcattn_recipe& r) { r.p_format = 77; }, "recipe field p_format has the unknown value 77"},
      {[](vcattn_recipe& r) { r.grouping.clusters = 0; }, "recipe \"accurate\": clusters is at least 1"},
      {[](vcattn_recipe& r) { r.p_log2_peak = 9.0f; },
       "recipe \"accurate\": p_log2_peak is from 0 to log2(448) = 8.807"},
      {[](vcattn_recipe& r) { r.tile_keys = 192; }, "recipe \"accurate\": tile_keys is 128 or 256; found 192"},
      {[](vcattn_recipe& r) { r.tile_keys = 0, r.row_max = VCATTN_MAX_RUNNING; },
       "recipe \"accurate\": tile_keys is 128 or 256; found 0"},
      {[](vcattn_recipe& r) { r.tile_keys = 512; }, "recipe field tile_keys has the unknown value 512"},
      {[](vcattn_recipe& r) { r.promote_keys = 128; },
       "recipe \"accurate\": row_max tile_octave promotes what each maximum covers: promote_keys is 0 or tile_keys"},
      {[](vcattn_recipe& r) { r.promote_keys = 100; },
       "recipe \"accurate\": promote_keys is a multiple of 32, the keys of one instruction"}};
  for (const Case& c : cases) {
    auto p = base;
    c.change(p.recipe);
    EXPECT_EQ(attend(p).message, c.message);
  }
}

TEST(Recipe, OneMaximumCoversTwoTilesWhereTilesHaveTheirOwn) {
  for (int i = 0; i < vcattn_recipe_count(); ++i) {
    const vcattn_recipe r = recipe(vcattn_recipe_name(i));
    EXPECT_EQ(r.tile_keys, r.row_max == VCATTN_MAX_TILE_OCTAVE ? 256 : 128) << r.name;
  }
  vcattn_recipe r = recipe("accurate");
  for (const int32_t keys : {128, 256}) {
    EXPECT_EQ(vcattn_recipe_set(&r, "tile_keys", std::to_string(keys).c_str(), nullptr), VCATTN_OK);
    EXPECT_EQ(r.tile_keys, keys);
    r.promote_keys = keys;
    EXPECT_EQ(validate_recipe(r, nullptr), VCATTN_OK);
  }
  // The others ignore it.
  r.row_max = VCATTN_MAX_RUNNING;
  r.promote_keys = 32;
  EXPECT_EQ(validate_recipe(r, nullptr), VCATTN_OK);
}

TEST(Recipe, TwoLinesIgnoresPhases) {
  Tensor q(1, 2, 1, 64), k(1, 3, 1, 64), v(1, 3, 1, 64), out(1, 2, 1, 64);
  auto p = params(q.fill_normal(1), k.fill_normal(2), v.fill_normal(3), out);
  p.recipe.p_format = VCATTN_P_EXPCAST_TWO_LINES;
  EXPECT_LT(attend_error(p), 0.09);
}

TEST(Backend, SaysWhatItRunsOn) {
  int32_t available = -1;
  vcattn_message reason;
  EXPECT_STREQ(vcattn_backend_info(0, &available, &reason), "cpu");
  EXPECT_EQ(available, 1);
  EXPECT_EQ(std::string(reason.text).rfind("runs here with ", 0), 0u) << reason.text;
  // Known in every build; it says why where it cannot run.
  EXPECT_STREQ(vcattn_backend_info(1, &available, &reason), "sm90a");
  EXPECT_STRNE(reason.text, "");
  EXPECT_EQ(vcattn_backend_info(2, &available, &reason), nullptr);
}

TEST_F(Validation, Alignment) {
  static float lse[64];
  static int32_t permutation[64];
  const auto off = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<std::byte*>(pointer) + 2);
  };
  refused([&] { p.lse = off(lse); }, VCATTN_INVALID_ARGUMENT, "lse is aligned to its element size of 4 bytes");
  refused([&] { p.permutation = off(permutation); }, VCATTN_INVALID_ARGUMENT,
          "permutation is aligned to its element size of 4 bytes");
}

// Whatever this machine has, device memory never reaches the CPU, nor host memory a GPU.
TEST_F(Validation, MemoryThatTheBackEndDoesNotTake) {
  refused([&] { p.backend = VCATTN_BACKEND_SM90A; }, VCATTN_INVALID_ARGUMENT,
          "backend sm90a takes CUDA memory; memory says host");
  refused([&] { p.backend = VCATTN_BACKEND_CPU, p.memory = VCATTN_MEMORY_CUDA; }, VCATTN_INVALID_ARGUMENT,
          "backend cpu takes host memory; memory says CUDA");
  refused([&] { p.memory = 2; }, VCATTN_INVALID_ARGUMENT, "memory is 0 (host) or 1 (CUDA); found 2");
}

}  // namespace
}  // namespace vcattn::test
