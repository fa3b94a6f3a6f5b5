// What every kernel of prepare() is given. Internal to src/preprocess.
#pragma once

#include <cstdint>

#include "core/recipes.h"
#include "preprocess/key_order.cuh"
#include "preprocess/rope.cuh"
#include "preprocess/row_math.cuh"
#include "preprocess/rows.cuh"
#include "preprocess/stages.h"

namespace vcattn::sm90a {

static_assert(kUnitRows == kBlockN, "a unit of K or V is a tile");

struct PrepareArgs {
  Operand q, k, v;
  RopeArgs rope_q, rope_k;
  KeyOrder order;
  Rotation rotation;  // of Q and K
  QuantizedQkv qkv;
  PrepareScratch scratch;
  double softmax_scale;
  float code_units;          // per score
  float odd_factor;          // on V's residuals of odd keys
  float odd_factor_inverse;  // rounded to nearest
  int32_t int8, pow2;        // codes of Q and K; E4M3 and absmax scales otherwise
  int32_t k_centred, has_means, means_centred, bf16_means, one_v_scale, shifts_lse;
};

inline PrepareArgs prepare_args(const PrepareCall& call) {
  const vcattn_attention_params& p = *call.problem.params;
  const vcattn_recipe& recipe = call.recipe;
  PrepareArgs args{};
  args.q = operand(p.q);
  args.k = operand(p.k);
  args.v = operand(p.v);
  args.rope_q = rope_args(call.problem, p.rope_q);
  args.rope_k = rope_args(call.problem, p.rope_k);
  args.order = key_order(call.problem, call.scratch);
  args.rotation = rotation(recipe, call.problem.head_dim);
  args.qkv = call.qkv;
  args.scratch = call.scratch;
  args.softmax_scale = call.problem.softmax_scale;
  args.code_units = code_units_per_score(call.problem.softmax_scale);
  args.odd_factor = has_phases(recipe) ? kPhaseFactor : 1.0f;
  args.odd_factor_inverse = 1.0f / args.odd_factor;
  args.int8 = recipe.qk_format == VCATTN_FORMAT_INT8;
  args.pow2 = recipe.qk_scale_kind == VCATTN_SCALE_POW2_F16;
  args.k_centred = recipe.k_centred;
  args.has_means = recipe.mean_rows > 0;
  args.means_centred = recipe.mean_rows > 0 && recipe.mean_centred != 0;
  args.bf16_means = recipe.mean_format == VCATTN_MEAN_BF16;
  args.one_v_scale = recipe.v_scale_span == VCATTN_SPAN_HEAD;
  args.shifts_lse = p.lse != nullptr;
  return args;
}

// Tiles of K or V of all heads.
__host__ __device__ constexpr int64_t key_units(const QuantizedQkv& qkv) {
  return int64_t{qkv.num_heads_kv} * qkv.tiles;
}

// Number `unit` of them.
struct KeyTile {
  Sequence s;
  int64_t slot;
  int kv_head, place;  // among the head's tiles
  int index;           // in the sequence
};

__device__ __forceinline__ KeyTile key_tile(const QuantizedQkv& qkv, int unit) {
  KeyTile tile;
  tile.kv_head = unit / qkv.tiles;
  tile.place = unit % qkv.tiles;
  const int sequence = sequence_of(qkv, &Sequence::tile, tile.place);
  tile.s = qkv.sequences[sequence];
  tile.slot = int64_t{tile.kv_head} * qkv.num_sequences + sequence;
  tile.index = tile.place - tile.s.tile;
  return tile;
}

// Scale of a row of Q under pow2_f16. Codes carry the code units themselves; the product with K's power of two is at
// least one code unit per raw unit, so that it is an exact FP16 factor.
template <int kDim>
__device__ inline Scale pow2_query_scale(const PrepareArgs& a, int64_t slot, float largest) {
  const int k_exponent = pow2_exponent(__uint_as_float(a.scratch.key_max[slot]), f16_key_max(kDim));
  const int exponent = max(pow2_exponent(__fmul_rn(largest, a.code_units), kF16QueryMax), -k_exponent);
  return {__fmul_rn(a.code_units, ldexpf(1.0f, -exponent)), ldexpf(1.0f, exponent)};
}

}  // namespace vcattn::sm90a
