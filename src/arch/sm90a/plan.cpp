#include "arch/sm90a/plan.h"

#include <algorithm>

#include "core/arena.h"
#include "core/recipes.h"

namespace vcattn::sm90a {
namespace {

void count_tiles(const Problem& problem, QuantizedQkv& qkv) {
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    const int32_t tiles = tiles_of(static_cast<int32_t>(problem.keys_of(s).count));
    qkv.blocks += blocks_of(static_cast<int32_t>(problem.queries_of(s).count), qkv.block_rows);
    qkv.tiles += tiles;
    qkv.mean_groups += mean_groups_of(tiles);
  }
}

}  // namespace

QuantizedQkv take_operands(const Problem& problem, int dim, int block_rows, bool means, Arena& arena) {
  QuantizedQkv qkv = {};
  qkv.dim = dim;
  qkv.block_rows = block_rows;
  qkv.num_heads = static_cast<int32_t>(problem.num_heads);
  qkv.num_heads_kv = static_cast<int32_t>(problem.num_heads_kv);
  qkv.num_sequences = static_cast<int32_t>(problem.num_sequences);
  count_tiles(problem, qkv);
  const int64_t rows = problem.num_heads * qkv.blocks * qkv.block_rows;
  const int64_t tiles = problem.num_heads_kv * qkv.tiles;
  const int64_t slots = problem.num_heads_kv * problem.num_sequences;
  qkv.sequences = arena.take<Sequence>(problem.num_sequences);
  qkv.q = arena.take<uint8_t>(rows * qkv.dim);
  qkv.q_factor = arena.take<float>(rows);
  qkv.q_norm = arena.take<float>(rows / kTileRowsQ);
  qkv.k = arena.take<uint8_t>(tiles * key_tile_bytes(qkv.dim));
  qkv.k_descale = arena.take<float>(tiles);
  qkv.k_norm = arena.take<float>(slots);
  qkv.v = arena.take<uint8_t>(tiles * value_tile_bytes(qkv.dim));
  qkv.v_descale = arena.take<float>(slots * qkv.dim);
  qkv.means =
      means ? arena.take<float>(problem.num_heads_kv * qkv.mean_groups * mean_group_bytes(qkv.dim) / 4) : nullptr;
  qkv.lse_shift = arena.take<float>(problem.params->lse != nullptr ? rows : 0);
  qkv.k_poison = arena.take<uint32_t>(slots);
  return qkv;
}

Plan make_plan(const Problem& problem, const Config& config, std::byte* workspace) {
  const int32_t order = problem.params->recipe.v_order;
  Plan plan = {};
  plan.groups = problem.params->permutation == nullptr && order != VCATTN_ORDER_SEQUENCE;
  Arena arena(workspace);
  plan.permutation = arena.take<int32_t>(plan.groups ? problem.batch * problem.num_heads_kv * problem.seqlen_kv : 0);
  Arena grouping = arena;  // over when the operands are made
  if (plan.groups) plan.group = take_group_scratch(problem, grouping);
  plan.qkv = take_operands(problem, config.head_dim, config.block_rows(), config.means, arena);
  plan.prepare = take_prepare_scratch(problem, plan.qkv, arena);
  plan.bytes = std::max(arena.used(), grouping.used());
  return plan;
}

AttentionParams attention_params(const Problem& problem, const QuantizedQkv& qkv) {
  const vcattn_attention_params& p = *problem.params;
  const bool phases = has_phases(p.recipe);
  AttentionParams params = {};
  params.qkv = qkv;
  params.out.data = p.out.data;
  params.out.dtype = p.out.dtype;
  params.out.head_dim = static_cast<int32_t>(problem.head_dim);
  for (int i = 0; i < 4; ++i) params.out.stride[i] = p.out.stride[i];
  params.out.lse = p.lse;
  for (int i = 0; i < 3; ++i) params.out.lse_stride[i] = p.lse_stride[i];
  params.odd_codes = phases ? kPhaseCodes : 0;
  params.odd_weight = phases ? kPhaseFactor : 1.0f;
  return params;
}

}  // namespace vcattn::sm90a
