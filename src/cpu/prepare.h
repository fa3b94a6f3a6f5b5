// The parts of preprocessing, one operand each. Internal to preprocess.cpp and its parts.
#pragma once

#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "core/arena.h"
#include "core/rope.h"
#include "core/tensor_access.h"
#include "core/validate.h"
#include "cpu/plan.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {

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

// row[head_dim] = one row of q, k or v, rotated by `rope`. Where non-finite input is allowed it becomes 0 and is
// reported, and so does what the rotation made of finite input.
template <typename Poisoned>
void load_clean_row(const Problem& problem, const vcattn_tensor& tensor, const vcattn_rope& rope, int64_t batch,
                    int64_t token, int64_t head, float* row, Poisoned poisoned) {
  load_row(tensor, batch, token, head, row);
  if (problem.allows_nonfinite()) clean_row(row, problem.head_dim, poisoned);
  if (rope.pairing == VCATTN_ROPE_NONE) return;
  apply_rope(rope, problem.params->grid, batch, token, head, problem.head_dim, row);
  if (problem.allows_nonfinite()) clean_row(row, problem.head_dim, poisoned);
}

// rows[sequence.keys, dim] = the admitted tokens of one head of k or v, zero-padded.
template <typename Poisoned>
void gather_tokens(const Problem& problem, const Sequence& sequence, const vcattn_tensor& tensor, int64_t head,
                   const int32_t* admitted, int64_t dim, float* rows, Poisoned poisoned, const vcattn_rope& rope = {}) {
  oneapi::tbb::parallel_for(int64_t{0}, sequence.keys, [&](int64_t i) {
    float* row = rows + i * dim;
    load_clean_row(problem, tensor, rope, sequence.batch, sequence.kv_begin + admitted[i], head, row, poisoned);
    std::fill(row + problem.head_dim, row + dim, 0.0f);
  });
}

// Writes to `admitted` the tokens of the sequence that take part, ascending; returns their number.
int64_t admit(const Problem& problem, const Sequence& sequence, int32_t* admitted);

// The problem's grid, with a key mask as what is admitted of it: tokens are numbered as in `admitted`.
vcattn_video_grid admitted_grid(const Problem& problem, const Sequence& sequence, const int32_t* admitted);

// rows[count, dim] times the normalised Hadamard matrix.
void rotate_rows(float* rows, int64_t count, int64_t dim);

}  // namespace vcattn::cpu
