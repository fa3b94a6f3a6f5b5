#include "arch/sm90a/support.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/message.h"
#include "core/recipes.h"

namespace vcattn::sm90a {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
constexpr int64_t kLongest = kLargest - 1024;  // tokens: their number is rounded up to whole blocks

struct Condition {
  const char* text;
  bool (*holds)(const vcattn_recipe&);
};

bool int8(const vcattn_recipe& r) { return r.qk_format == VCATTN_FORMAT_INT8; }
bool running(const vcattn_recipe& r) { return r.row_max == VCATTN_MAX_RUNNING; }

// Fields that the accumulation model of the CPU alone looks at (qk_accumulate, pv_accumulate, promote_keys) may say
// anything: the tensor cores accumulate as they do.
constexpr Condition kConditions[] = {
    {"qk_format int8, or e4m3 with qk_scale_kind pow2_f16",
     [](const vcattn_recipe& r) {
       return (int8(r) && r.qk_scale_kind == VCATTN_SCALE_ABSMAX) ||
              (r.qk_format == VCATTN_FORMAT_E4M3 && r.qk_scale_kind == VCATTN_SCALE_POW2_F16);
     }},
    {"q_scale_span token", [](const vcattn_recipe& r) { return r.q_scale_span == VCATTN_SPAN_TOKEN; }},
    {"k_scale_span block for int8 and head for e4m3",
     [](const vcattn_recipe& r) { return r.k_scale_span == (int8(r) ? VCATTN_SPAN_BLOCK : VCATTN_SPAN_HEAD); }},
    {"q_centred 0", [](const vcattn_recipe& r) { return r.q_centred == 0; }},
    {"p_format expcast, or e4m3 with qk_format int8",
     [](const vcattn_recipe& r) { return r.p_format == VCATTN_P_EXPCAST || (r.p_format == VCATTN_P_E4M3 && int8(r)); }},
    {"p_log2_peak 8 for p_format e4m3",
     [](const vcattn_recipe& r) { return r.p_format != VCATTN_P_E4M3 || r.p_log2_peak == kExpCastLog2Peak; }},
    {"row_max tile_octave with tile_keys 256, or running with p_format e4m3",
     [](const vcattn_recipe& r) {
       return running(r) ? r.p_format == VCATTN_P_E4M3
                         : r.row_max == VCATTN_MAX_TILE_OCTAVE && r.tile_keys == kPairKeys;
     }},
    {"row_sum decoded, or unrounded with row_max running",
     [](const vcattn_recipe& r) { return r.row_sum == (running(r) ? VCATTN_SUM_UNROUNDED : VCATTN_SUM_DECODED); }},
    {"v_format e4m3", [](const vcattn_recipe& r) { return r.v_format == VCATTN_FORMAT_E4M3; }},
    {"v_hadamard 0", [](const vcattn_recipe& r) { return r.v_hadamard == 0; }},
    {"mean_rows 128 with mean_format tf32 or bf16, or mean_rows 0",
     [](const vcattn_recipe& r) {
       return r.mean_rows == 0 || (r.mean_rows == kBlockN && r.mean_format != VCATTN_MEAN_FP32);
     }},
};

}  // namespace

vcattn_code choose_config(const Problem& problem, Config& config, vcattn_message* message) {
  const vcattn_recipe& recipe = problem.params->recipe;
  for (const Condition& condition : kConditions) {
    if (condition.holds(recipe)) continue;
    return fail(message, VCATTN_UNSUPPORTED, "backend sm90a takes recipes with {}; recipe {} differs", condition.text,
                recipe.name);
  }
  if (problem.head_dim > 128) {
    return fail(message, VCATTN_UNSUPPORTED, "backend sm90a takes head_dim up to 128; found {}", problem.head_dim);
  }
  for (const auto& [rope, name] : {std::pair{&problem.params->rope_q, "rope_q"}, {&problem.params->rope_k, "rope_k"}}) {
    if (rope->pairing != VCATTN_ROPE_HALF_SPLIT || problem.head_dim % 16 == 0) continue;
    return fail(message, VCATTN_UNSUPPORTED,
                "backend sm90a takes {} of half-split pairs with head_dim a multiple of 16; found {}", name,
                problem.head_dim);
  }
  config = {.head_dim = problem.head_dim <= 64 ? 64 : 128,
            .scores = int8(recipe) ? Scores::kInt8 : Scores::kE4m3,
            .probabilities = is_expcast(recipe) ? Probabilities::kExpCast : Probabilities::kExp2,
            .row_maximum = running(recipe) ? RowMaximum::kRunning : RowMaximum::kPairOctave,
            .means = recipe.mean_rows > 0 || running(recipe)};  // whose means are 0 where the recipe has none
  // Blocks of queries and tiles of keys are counted in 32 bits, over all heads.
  const int64_t blocks = problem.num_sequences + problem.batch * (problem.seqlen_q / config.block_rows());
  const int64_t tiles = 2 * problem.num_sequences + problem.batch * (problem.seqlen_kv / kBlockN);
  if (std::max(problem.seqlen_q, problem.seqlen_kv) > kLongest ||
      problem.num_heads > kLargest / std::max<int64_t>(1, blocks) ||
      problem.num_heads_kv > kLargest / std::max<int64_t>(1, tiles)) {
    return fail(
        message, VCATTN_UNSUPPORTED,
        "backend sm90a takes sequences of at most {} tokens, and fewer than 2^31 blocks of {} queries and tiles of "
        "{} keys over all heads; found batch {}, seqlen_q {}, seqlen_kv {}, num_heads {}",
        kLongest, config.block_rows(), kBlockN, problem.batch, problem.seqlen_q, problem.seqlen_kv, problem.num_heads);
  }
  return VCATTN_OK;
}

}  // namespace vcattn::sm90a
