// K: apply rope, centre over tokens, rotate, quantise tile by tile in the order of the values.
#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <cmath>

#include "cpu/panel.h"
#include "cpu/prepare.h"
#include "cpu/preprocess.h"
#include "cpu/quantise.h"

namespace vcattn::cpu {
namespace {

using oneapi::tbb::parallel_for;

// Subtracts the mean over the sequence's tokens and keeps it for lse.
void centre_keys(const Head& h, float* mean) {
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = h.plan.qkv.dim, keys = h.sequence.keys, chunks = ceil_div(keys, kStatisticsRows);
  parallel_for(int64_t{0}, chunks, [&](int64_t chunk) {
    double* sum = scratch.partial_sums + chunk * dim;
    std::fill(sum, sum + dim, 0.0);
    const int64_t end = std::min(keys, (chunk + 1) * kStatisticsRows);
    for (int64_t i = chunk * kStatisticsRows; i < end; ++i) {
      for (int64_t d = 0; d < dim; ++d) sum[d] += scratch.rows[i * dim + d];
    }
  });
  for (int64_t d = 0; d < dim; ++d) {
    double sum = 0.0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += scratch.partial_sums[chunk * dim + d];
    mean[d] = static_cast<float>(sum / static_cast<double>(keys));
  }
  parallel_for(int64_t{0}, keys, [&](int64_t i) {
    for (int64_t d = 0; d < dim; ++d) scratch.rows[i * dim + d] -= mean[d];
  });
}

// Largest magnitude in each tile, in the tiles' order, into scratch.tile_abs_max[tile]; returns that of the head.
float key_tile_maxima(const Head& h) {
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = h.plan.qkv.dim, keys = h.sequence.keys;
  parallel_for(int64_t{0}, h.tiles(), [&](int64_t tile) {
    float largest = 0.0f;
    for (int64_t i = tile * kBlockN; i < std::min(keys, (tile + 1) * kBlockN); ++i) {
      largest = std::max(largest, abs_max(scratch.rows + scratch.order[i] * dim, dim));
    }
    scratch.tile_abs_max[tile] = largest;
  });
  return abs_max(scratch.tile_abs_max, h.tiles());
}

Scale key_scale(const vcattn_recipe& recipe, int64_t dim, float tile_max, float head_max) {
  const bool whole_head = recipe.k_scale_span == VCATTN_SPAN_HEAD || recipe.qk_format == VCATTN_FORMAT_NVFP4;
  if (recipe.qk_scale_kind == VCATTN_SCALE_POW2_F16) {
    const int exponent = pow2_exponent(head_max, f16_key_max(dim));
    return {std::ldexp(1.0f, -exponent), std::ldexp(1.0f, exponent)};
  }
  return format_scale(recipe.qk_format, whole_head ? head_max : tile_max);
}

void quantise_keys(const Head& h) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = qkv.dim, keys = h.sequence.keys, size = stored_size(h.recipe.qk_format);
  const float head_max = key_tile_maxima(h);
  parallel_for(int64_t{0}, h.tiles(), [&](int64_t tile) {
    const int64_t at = h.first_tile() + tile;
    const Scale scale = key_scale(h.recipe, dim, scratch.tile_abs_max[tile], head_max);
    qkv.k_descale[at] = scale.descale;
    std::byte* codes = qkv.k + at * dim * kBlockN * size;
    uint8_t* groups = qkv.k_groups + at * (dim / kFp4Group) * kBlockN;
    const int64_t count = std::min<int64_t>(kBlockN, keys - tile * kBlockN);
    std::fill(codes, codes + dim * kBlockN * size, std::byte{0});
    if (h.recipe.qk_format == VCATTN_FORMAT_NVFP4) std::fill(groups, groups + dim / kFp4Group * kBlockN, uint8_t{0});
    for (int64_t j = 0; j < count; ++j) {
      const float* row = scratch.rows + scratch.order[tile * kBlockN + j] * dim;
      quantise_line(h.recipe.qk_format, row, dim, scale.encode, codes + j * size, kBlockN, groups + j, kBlockN);
    }
    if (h.recipe.q_centred != 0) {
      float* exact = qkv.k_exact + at * dim * kBlockN;
      std::fill(exact, exact + dim * kBlockN, 0.0f);
      for (int64_t j = 0; j < count; ++j) {
        const float* row = scratch.rows + scratch.order[tile * kBlockN + j] * dim;
        for (int64_t d = 0; d < dim; ++d) exact[d * kBlockN + j] = row[d];
      }
    }
  });
}

}  // namespace

void prepare_keys(const Head& h) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const vcattn_attention_params& p = *h.problem.params;
  gather_tokens(
      h.problem, h.sequence, p.k, h.kv_head, h.plan.head.admitted, qkv.dim, h.plan.head.rows,
      [&](int64_t) { set_flag(qkv.k_poison[h.slot()]); }, p.rope_k);
  if (h.recipe.k_centred != 0) centre_keys(h, h.plan.head.k_mean + h.slot() * qkv.dim);
  if (h.recipe.qk_hadamard != 0) rotate_rows(h.plan.head.rows, h.sequence.keys, qkv.dim);
  quantise_keys(h);
}

}  // namespace vcattn::cpu
