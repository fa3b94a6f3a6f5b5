// V: order, subtract block means, quantise residuals with one scale per channel, centre the means (V-Smooth).
#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <cmath>

#include "core/recipes.h"
#include "cpu/panel.h"
#include "cpu/prepare.h"
#include "cpu/quantise.h"
#include "vsmooth/grouping.h"

namespace vcattn::cpu {
namespace {

using oneapi::tbb::parallel_for;

// Rows [begin, end) of a tile's order that share one mean.
struct MeanBlock {
  int64_t begin, end;
};

MeanBlock mean_block(const Head& h, int64_t tile, int64_t block) {
  const int64_t rows = h.recipe.mean_rows;
  const int64_t begin = tile * kBlockN + block * rows;
  return {std::min(begin, h.sequence.keys), std::min(begin + rows, h.sequence.keys)};
}

void block_mean(const Head& h, MeanBlock block, float* mean) {
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = h.plan.qkv.v_dim;
  double sum[VCATTN_MAX_HEAD_DIM] = {};
  for (int64_t i = block.begin; i < block.end; ++i) {
    const float* row = scratch.rows + scratch.order[i] * dim;
    for (int64_t d = 0; d < dim; ++d) sum[d] += row[d];
  }
  const double count = static_cast<double>(std::max<int64_t>(1, block.end - block.begin));
  for (int64_t d = 0; d < dim; ++d) mean[d] = static_cast<float>(sum[d] / count);
}

// What the value row at position `i` of the order is multiplied by (numerics/attention_math.h, two phases).
float phase_factor(const vcattn_recipe& recipe, int64_t i) {
  return has_phases(recipe) && i % 2 == 1 ? kPhaseFactor : 1.0f;
}

// Means of each block into qkv.means (still in units of V), and the tile's largest residual in each channel.
void value_statistics(const Head& h) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = qkv.v_dim, mean_rows = h.recipe.mean_rows;
  const int64_t blocks = mean_rows > 0 ? kBlockN / mean_rows : 0;
  parallel_for(int64_t{0}, h.tiles(), [&](int64_t tile) {
    float* largest = scratch.tile_abs_max + tile * dim;
    std::fill(largest, largest + dim, 0.0f);
    float* means = qkv.means + (h.first_tile() + tile) * blocks * dim;
    for (int64_t block = 0; block < blocks; ++block) {
      const float* mean = means + block * dim;
      block_mean(h, mean_block(h, tile, block), means + block * dim);
      for (int64_t d = 0; d < dim; ++d) largest[d] = std::max(largest[d], std::fabs(mean[d]) * kMeanFloor);
    }
    const int64_t end = std::min(h.sequence.keys, (tile + 1) * kBlockN);
    for (int64_t i = tile * kBlockN; i < end; ++i) {
      const float* row = scratch.rows + scratch.order[i] * dim;
      const float* mean = blocks > 0 ? means + (i - tile * kBlockN) / mean_rows * dim : nullptr;
      const float phase = phase_factor(h.recipe, i);
      for (int64_t d = 0; d < dim; ++d) {
        largest[d] = std::max(largest[d], std::fabs(phase * (mean != nullptr ? row[d] - mean[d] : row[d])));
      }
    }
  });
}

// One scale per channel, into scratch.channel_encode and qkv.v_descale.
void value_scales(const Head& h) {
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = h.plan.qkv.v_dim;
  float* descale = h.plan.qkv.v_descale + h.slot() * dim;
  float* largest = scratch.channel_encode;
  std::fill(largest, largest + dim, 0.0f);
  for (int64_t tile = 0; tile < h.tiles(); ++tile) {
    for (int64_t d = 0; d < dim; ++d) largest[d] = std::max(largest[d], scratch.tile_abs_max[tile * dim + d]);
  }
  const bool per_head = h.recipe.v_format == VCATTN_FORMAT_NVFP4 || h.recipe.v_scale_span == VCATTN_SPAN_HEAD;
  if (per_head) std::fill(largest, largest + dim, abs_max(largest, dim));
  for (int64_t d = 0; d < dim; ++d) {
    const Scale scale = format_scale(h.recipe.v_format, largest[d]);
    descale[d] = scale.descale;
    scratch.channel_encode[d] = scale.encode;
  }
}

// Quantises one channel of one tile. `residuals` [128] are zero past the tile's keys.
void quantise_channel(const Head& h, int64_t at, int64_t channel, const float* residuals) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const int64_t dim = qkv.v_dim, size = stored_size(h.recipe.v_format);
  quantise_line(h.recipe.v_format, residuals, kBlockN, h.plan.head.channel_encode[channel],
                qkv.v + (at * kBlockN * dim + channel) * size, dim,
                qkv.v_groups + at * (kBlockN / kFp4Group) * dim + channel, dim);
}

// Mean over the block of what quantisation took from its residuals, in units of V.
float mean_rounding_error(const Head& h, int64_t at, int64_t channel, const float* residuals, int64_t begin,
                          int64_t end) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const int64_t dim = qkv.v_dim;
  const std::byte* codes = qkv.v + at * kBlockN * dim * stored_size(h.recipe.v_format);
  const float descale = qkv.v_descale[h.slot() * dim + channel];
  double error = 0.0;
  for (int64_t j = begin; j < end; ++j) {
    float value = stored_value(h.recipe.v_format, codes, j * dim + channel);
    if (h.recipe.v_format == VCATTN_FORMAT_NVFP4) {
      value *= decode_ue4m3(qkv.v_groups[(at * (kBlockN / kFp4Group) + j / kFp4Group) * dim + channel]);
    }
    error += (residuals[j] - value * descale) / phase_factor(h.recipe, j);
  }
  return end > begin ? static_cast<float>(error / static_cast<double>(end - begin)) : 0.0f;
}

void quantise_values(const Head& h) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const HeadScratch& scratch = h.plan.head;
  const int64_t dim = qkv.v_dim, mean_rows = h.recipe.mean_rows;
  const int64_t blocks = mean_rows > 0 ? kBlockN / mean_rows : 0;
  parallel_for(int64_t{0}, h.tiles(), [&](int64_t tile) {
    const int64_t at = h.first_tile() + tile;
    const int64_t count = std::min<int64_t>(kBlockN, h.sequence.keys - tile * kBlockN);
    float* means = qkv.means + at * blocks * dim;
    for (int64_t d = 0; d < dim; ++d) {
      float residuals[kBlockN] = {};
      for (int64_t j = 0; j < count; ++j) {
        const float value = scratch.rows[scratch.order[tile * kBlockN + j] * dim + d];
        residuals[j] = phase_factor(h.recipe, j) * (blocks > 0 ? value - means[j / mean_rows * dim + d] : value);
      }
      quantise_channel(h, at, d, residuals);
      for (int64_t block = 0; block < blocks; ++block) {
        float& mean = means[block * dim + d];
        if (h.recipe.mean_centred != 0) {
          const int64_t begin = std::min(count, block * mean_rows), end = std::min(count, (block + 1) * mean_rows);
          mean += mean_rounding_error(h, at, d, residuals, begin, end);
        }
        mean = round_mean(h.recipe.mean_format, mean * scratch.channel_encode[d]);
      }
    }
  });
}

// The caller's permutation names tokens; the order names places in `admitted`.
void order_from_permutation(const Head& h) {
  const HeadScratch& scratch = h.plan.head;
  const int32_t* permutation = h.problem.params->permutation +
                               (h.sequence.batch * h.problem.num_heads_kv + h.kv_head) * h.problem.seqlen_kv +
                               h.sequence.kv_begin;
  for (int64_t i = 0; i < h.sequence.keys; ++i) {
    const int32_t* place = std::lower_bound(scratch.admitted, scratch.admitted + h.sequence.keys, permutation[i]);
    scratch.order[i] = static_cast<int32_t>(place - scratch.admitted);
  }
}

}  // namespace

void prepare_values(const Head& h) {
  const QuantizedQkv& qkv = h.plan.qkv;
  const HeadScratch& scratch = h.plan.head;
  gather_tokens(h.problem, h.sequence, h.problem.params->v, h.kv_head, scratch.admitted, qkv.v_dim, scratch.rows,
                [&](int64_t channel) { set_flag(qkv.v_poison[h.slot() * qkv.v_dim + channel]); });
  if (h.problem.params->permutation != nullptr) {
    order_from_permutation(h);
  } else {
    const vsmooth::Tokens tokens = {scratch.rows, h.sequence.keys, h.problem.head_dim, qkv.v_dim};
    vsmooth::order_tokens(tokens, h.recipe.v_order, h.recipe.grouping,
                          admitted_grid(h.problem, h.sequence, scratch.admitted), false, scratch.centroids,
                          scratch.order, scratch.grouping);
  }
  if (h.recipe.v_hadamard != 0) rotate_rows(scratch.rows, h.sequence.keys, qkv.v_dim);
  value_statistics(h);
  value_scales(h);
  quantise_values(h);
}

}  // namespace vcattn::cpu
