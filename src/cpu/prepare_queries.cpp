// Q: apply rope, rotate, scale per token or block, quantise.
#include <algorithm>
#include <cmath>

#include "cpu/panel.h"
#include "cpu/prepare.h"
#include "cpu/preprocess.h"
#include "cpu/quantise.h"

namespace vcattn::cpu {
namespace {

void load_queries(const QueryRows& b) {
  const QuantizedQkv& qkv = b.plan.qkv;
  const vcattn_attention_params& p = *b.problem.params;
  std::fill(b.rows, b.rows + kBlockM * qkv.dim, 0.0f);
  for (int64_t i = 0; i < b.count; ++i) {
    float* row = b.rows + i * qkv.dim;
    uint8_t poisoned = 0;
    load_clean_row(b.problem, p.q, p.rope_q, b.sequence.batch, b.sequence.q_begin + b.block * kBlockM + i, b.head, row,
                   [&](int64_t) { poisoned = 1; });
    if (b.problem.allows_nonfinite()) qkv.q_poison[b.place() + i] = poisoned;
  }
}

// Centring K lowers every score of a row by softmax_scale * q . mean; lse gets it back.
void note_lse_shift(const QueryRows& b) {
  const QuantizedQkv& qkv = b.plan.qkv;
  const float* mean = b.plan.head.k_mean + (b.kv_head() * qkv.num_sequences + b.sequence_index) * qkv.dim;
  for (int64_t i = 0; i < b.count; ++i) {
    double dot = 0.0;
    if (b.recipe.k_centred != 0) {
      for (int64_t d = 0; d < qkv.dim; ++d) dot += double{b.rows[i * qkv.dim + d]} * mean[d];
    }
    qkv.lse_shift[b.place() + i] = static_cast<float>(dot * b.problem.softmax_scale);
  }
}

void centre_queries(const QueryRows& b) {
  const int64_t dim = b.plan.qkv.dim;
  float* mean = b.plan.qkv.q_means + b.place() / kBlockM * dim;
  for (int64_t d = 0; d < dim; ++d) {
    double sum = 0.0;
    for (int64_t i = 0; i < b.count; ++i) sum += b.rows[i * dim + d];
    mean[d] = static_cast<float>(sum / static_cast<double>(b.count));
    for (int64_t i = 0; i < b.count; ++i) b.rows[i * dim + d] -= mean[d];
  }
}

// Codes carry the code units themselves; the product with K's power of two is at least one code unit per raw unit, so
// that it is an exact FP16 factor.
Scale query_pow2_scale(const QueryRows& b, float largest, float code_units) {
  const QuantizedQkv& qkv = b.plan.qkv;
  const float k_descale = qkv.k_descale[b.kv_head() * qkv.tiles + b.sequence.tile];
  const int exponent = std::max(pow2_exponent(largest * code_units, kF16QueryMax), -std::ilogb(k_descale));
  return {code_units * std::ldexp(1.0f, -exponent), std::ldexp(1.0f, exponent)};
}

void quantise_queries(const QueryRows& b) {
  const QuantizedQkv& qkv = b.plan.qkv;
  const int64_t dim = qkv.dim, size = stored_size(b.recipe.qk_format);
  const float code_units = code_units_per_score(b.problem.softmax_scale);
  const bool pow2 = b.recipe.qk_scale_kind == VCATTN_SCALE_POW2_F16;
  const float block_max = abs_max(b.rows, kBlockM * dim);
  for (int64_t i = 0; i < kBlockM; ++i) {
    const float* row = b.rows + i * dim;
    const float largest = b.recipe.q_scale_span == VCATTN_SPAN_TOKEN ? abs_max(row, dim) : block_max;
    const Scale scale = pow2 ? query_pow2_scale(b, largest, code_units) : format_scale(b.recipe.qk_format, largest);
    const int64_t place = b.place() + i;
    qkv.q_factor[place] = pow2 ? scale.descale : scale.descale * code_units;
    quantise_line(b.recipe.qk_format, row, dim, scale.encode, qkv.q + place * dim * size, 1,
                  qkv.q_groups + place * (dim / kFp4Group), 1);
  }
}

}  // namespace

void prepare_queries(const QueryRows& b) {
  const int64_t dim = b.plan.qkv.dim;
  load_queries(b);
  if (b.problem.params->lse != nullptr) note_lse_shift(b);
  if (b.recipe.q_centred != 0) centre_queries(b);
  if (b.recipe.qk_hadamard != 0) {
    for (int64_t i = 0; i < b.count; ++i) hadamard_row(b.rows + i * dim, dim);
    if (b.recipe.q_centred != 0) hadamard_row(b.plan.qkv.q_means + b.place() / kBlockM * dim, dim);
  }
  quantise_queries(b);
}

}  // namespace vcattn::cpu
