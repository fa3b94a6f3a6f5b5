// The parts of preprocessing, one operand each. Internal to preprocess.cpp and its parts.
#pragma once

#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "core/tensor_access.h"
#include "core/validate.h"
#include "cpu/plan.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One (sequence, head of K and V), whose tokens lie in head.rows.
struct Head {
  const Problem& problem;
  Plan& plan;
  const vcattn_recipe& recipe;
  Sequence sequence;
  int64_t index;  // sequence
  int64_t kv_head;
  int64_t tiles() const { return ceil_div(sequence.keys, kBlockN); }
  int64_t first_tile() const { return kv_head * plan.qkv.tiles + sequence.tile; }
  int64_t slot() const { return kv_head * plan.qkv.num_sequences + index; }
  bool poisons() const { return (problem.params->flags & VCATTN_ALLOW_NONFINITE) != 0; }
};

// 128 query rows of one head.
struct QueryRows {
  const Problem& problem;
  const Plan& plan;
  const vcattn_recipe& recipe;
  const Sequence& sequence;
  int64_t sequence_index, head, block;
  float* rows;    // [128, dim]
  int64_t count;  // valid rows
  int64_t place() const { return (head * plan.qkv.blocks + sequence.q_block + block) * kBlockM; }
  int64_t kv_head() const { return head / (problem.num_heads / problem.num_heads_kv); }
};

// Orders the head's values, then fills qkv.v, v_groups, v_descale and means. Leaves the order in head scratch.
void prepare_values(const Head& head);

// Fills qkv.k, k_groups, k_descale and k_exact in that order.
void prepare_keys(const Head& head);

// Fills qkv.q, q_groups, q_factor, q_means and lse_shift of the block.
void prepare_queries(const QueryRows& block);

// Sets a flag that several threads may set.
inline void set_flag(uint8_t& flag) { std::atomic_ref<uint8_t>(flag).store(1, std::memory_order_relaxed); }

// Replaces what is not finite by 0, and says through `poisoned(channel)` where.
template <typename Poisoned>
void clean_row(float* row, int64_t count, Poisoned poisoned) {
  for (int64_t d = 0; d < count; ++d) {
    if (!std::isfinite(row[d])) {
      row[d] = 0.0f;
      poisoned(d);
    }
  }
}

// rows[keys, dim] = the admitted tokens of one head, zero-padded.
template <typename Poisoned>
void load_head(const Head& h, const vcattn_tensor& tensor, int64_t dim, Poisoned poisoned) {
  const HeadScratch& scratch = h.plan.head;
  oneapi::tbb::parallel_for(int64_t{0}, h.sequence.keys, [&](int64_t i) {
    float* row = scratch.rows + i * dim;
    load_row(tensor, h.sequence.batch, h.sequence.kv_begin + scratch.admitted[i], h.kv_head, row);
    std::fill(row + h.problem.head_dim, row + dim, 0.0f);
    if (h.poisons()) clean_row(row, h.problem.head_dim, poisoned);
  });
}

// rows[count, dim] times the normalised Hadamard matrix.
void rotate_rows(float* rows, int64_t count, int64_t dim);

}  // namespace vcattn::cpu
