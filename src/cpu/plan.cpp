#include "cpu/plan.h"

#include <algorithm>
#include <bit>

#include "core/arena.h"
#include "core/recipes.h"
#include "cpu/gemm.h"
#include "cpu/panel.h"
#include "cpu/preprocess.h"
#include "cpu/softmax.h"
#include "vsmooth/grouping.h"

namespace vcattn::cpu {
namespace {

int64_t padded_dim(int64_t head_dim, bool rotated) {
  const int64_t multiple = ceil_div(head_dim, kPanelAlign) * kPanelAlign;
  return rotated ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(multiple))) : multiple;
}

int64_t longest_sequence(const Problem& problem) {
  int64_t longest = 1;
  for (int64_t s = 0; s < problem.num_sequences; ++s) longest = std::max(longest, sequence_at(problem, s).kv_count);
  return longest;
}

// What ordering the values needs, for attention and for vcattn_group alike.
void plan_grouping(const Problem& problem, int64_t v_dim, Arena& arena, HeadScratch& head) {
  const vcattn_recipe& recipe = problem.params->recipe;
  head.admitted = arena.take<int32_t>(head.max_keys);
  head.order = arena.take<int32_t>(head.max_keys);
  head.centroids = arena.take<float>(vsmooth::uses_clusters(recipe.v_order) ? recipe.grouping.clusters * v_dim : 0);
  const size_t bytes = vsmooth::grouping_workspace_size(head.max_keys, v_dim, recipe.grouping, recipe.v_order);
  head.grouping = {arena.take<std::byte>(static_cast<int64_t>(bytes)), bytes};
}

}  // namespace

Sequence sequence_at(const Problem& problem, int64_t s) {
  const Problem::Tokens queries = problem.queries_of(s), keys = problem.keys_of(s);
  Sequence sequence{};
  sequence.batch = problem.batch_of(s);
  sequence.q_begin = queries.begin;
  sequence.q_count = queries.count;
  sequence.kv_begin = keys.begin;
  sequence.kv_count = keys.count;
  return sequence;
}

Plan make_plan(const Problem& problem, std::byte* workspace) {
  const vcattn_recipe& r = problem.params->recipe;
  Arena arena(workspace);
  Plan plan{};
  QuantizedQkv& qkv = plan.qkv;
  qkv.dim = padded_dim(problem.head_dim, r.qk_hadamard != 0);
  qkv.v_dim = padded_dim(problem.head_dim, r.v_hadamard != 0);
  qkv.num_sequences = problem.num_sequences;
  plan.sequences = arena.take<Sequence>(problem.num_sequences);
  qkv.sequences = plan.sequences;
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    Sequence sequence = sequence_at(problem, s);
    sequence.q_block = qkv.blocks;
    sequence.tile = qkv.tiles;
    if (workspace != nullptr) plan.sequences[s] = sequence;
    qkv.blocks += ceil_div(sequence.q_count, kBlockM);
    qkv.tiles += ceil_div(sequence.kv_count, kBlockN);
  }

  const int64_t q_rows = problem.num_heads * qkv.blocks * kBlockM;
  const int64_t kv_tiles = problem.num_heads_kv * qkv.tiles;
  const int64_t kv_heads = problem.num_heads_kv * problem.num_sequences;
  const int64_t k_elements = kv_tiles * qkv.dim * kBlockN, v_elements = kv_tiles * kBlockN * qkv.v_dim;
  const bool qk_fp4 = r.qk_format == VCATTN_FORMAT_NVFP4, v_fp4 = r.v_format == VCATTN_FORMAT_NVFP4;
  const bool poison = problem.allows_nonfinite();
  qkv.q = arena.take<std::byte>(q_rows * qkv.dim * stored_size(r.qk_format));
  qkv.q_groups = arena.take<uint8_t>(qk_fp4 ? q_rows * qkv.dim / kFp4Group : 0);
  qkv.q_factor = arena.take<float>(q_rows);
  qkv.k = arena.take<std::byte>(k_elements * stored_size(r.qk_format));
  qkv.k_groups = arena.take<uint8_t>(qk_fp4 ? k_elements / kFp4Group : 0);
  qkv.k_descale = arena.take<float>(kv_tiles);
  qkv.v = arena.take<std::byte>(v_elements * stored_size(r.v_format));
  qkv.v_groups = arena.take<uint8_t>(v_fp4 ? v_elements / kFp4Group : 0);
  qkv.v_descale = arena.take<float>(kv_heads * qkv.v_dim);
  qkv.means = arena.take<float>(r.mean_rows > 0 ? kv_tiles * (kBlockN / r.mean_rows) * qkv.v_dim : 0);
  qkv.q_means = arena.take<float>(r.q_centred != 0 ? problem.num_heads * qkv.blocks * qkv.dim : 0);
  qkv.k_exact = arena.take<float>(r.q_centred != 0 ? k_elements : 0);
  qkv.lse_shift = arena.take<float>(problem.params->lse != nullptr ? q_rows : 0);
  qkv.q_poison = arena.take<uint8_t>(poison ? q_rows : 0);
  qkv.k_poison = arena.take<uint8_t>(poison ? kv_heads : 0);
  qkv.v_poison = arena.take<uint8_t>(poison ? kv_heads * qkv.v_dim : 0);

  HeadScratch& head = plan.head;
  head.max_keys = longest_sequence(problem);
  plan_grouping(problem, qkv.v_dim, arena, head);
  head.seen = arena.take<uint8_t>(problem.params->permutation != nullptr ? head.max_keys : 0);
  head.rows = arena.take<float>(head.max_keys * std::max(qkv.dim, qkv.v_dim));
  const int64_t centred = r.k_centred != 0 ? 1 : 0;
  head.partial_sums = arena.take<double>(centred * ceil_div(head.max_keys, kStatisticsRows) * qkv.dim);
  head.k_mean = arena.take<float>(centred * kv_heads * qkv.dim);
  head.tile_abs_max = arena.take<float>(ceil_div(head.max_keys, kBlockN) * std::max(qkv.dim, qkv.v_dim));
  head.channel_encode = arena.take<float>(qkv.v_dim);

  plan.thread_bytes = 0;
  plan.threads = nullptr;
  thread_scratch(plan, problem, 0, &plan.thread_bytes);
  plan.threads = arena.take<std::byte>(static_cast<int64_t>(plan.thread_bytes) * problem.num_threads);
  plan.bytes = arena.used();
  return plan;
}

ThreadScratch thread_scratch(const Plan& plan, const Problem& problem, int thread, size_t* bytes) {
  std::byte* base = plan.threads == nullptr ? nullptr : plan.threads + plan.thread_bytes * static_cast<size_t>(thread);
  Arena arena(base);
  ThreadScratch scratch{};
  const int64_t dim = plan.qkv.dim, v_dim = plan.qkv.v_dim;
  const int tiles = tiles_per_step(problem.params->recipe);
  scratch.q = arena.take<float>(kBlockM * dim);
  scratch.k = arena.take<float>(dim * kBlockN);
  scratch.v = arena.take<float>(kBlockN * v_dim);
  scratch.scores = arena.take<float>(tiles * kBlockM * kBlockN);
  scratch.out = arena.take<float>(kBlockM * v_dim);
  scratch.tile_out = arena.take<float>(kBlockM * v_dim);
  scratch.out64 = arena.take<double>(problem.params->recipe.pv_accumulate == VCATTN_ACC_FP64 ? kBlockM * v_dim : 0);
  scratch.row_state = arena.take<float>(kBlockM * row_state_floats(tiles));
  scratch.sums = arena.take<double>(kBlockM);
  if (bytes != nullptr) *bytes = arena.used();
  return scratch;
}

GroupPlan make_group_plan(const Problem& problem, std::byte* workspace) {
  Arena arena(workspace);
  GroupPlan plan{};
  plan.dim = padded_dim(problem.head_dim, false);
  plan.head.max_keys = longest_sequence(problem);
  plan_grouping(problem, plan.dim, arena, plan.head);
  plan.head.rows = arena.take<float>(plan.head.max_keys * plan.dim);
  plan.bytes = arena.used();
  return plan;
}

}  // namespace vcattn::cpu
