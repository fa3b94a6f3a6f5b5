#include "cpu/preprocess.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/prepare.h"
#include "vsmooth/grouping.h"

namespace vcattn::cpu {
namespace {

using oneapi::tbb::parallel_for;

// scratch.admitted = tokens of the sequence that take part, ascending; returns their number.
int64_t admit(const Problem& problem, const Sequence& sequence, int32_t* admitted) {
  const vcattn_attention_params& p = *problem.params;
  if (p.key_mask == nullptr) {
    std::iota(admitted, admitted + sequence.kv_count, 0);
    return sequence.kv_count;
  }
  int64_t count = 0;
  for (int64_t token = 0; token < sequence.kv_count; ++token) {
    if (p.key_mask[sequence.batch * p.key_mask_stride[0] + token * p.key_mask_stride[1]] != 0) {
      admitted[count++] = static_cast<int32_t>(token);
    }
  }
  return count;
}

}  // namespace

void hadamard_row(float* row, int64_t n) {
  for (int64_t half = 1; half < n; half *= 2) {
    for (int64_t i = 0; i < n; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const float a = row[j], b = row[j + half];
        row[j] = a + b;
        row[j + half] = a - b;
      }
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) row[i] *= scale;
}

void rotate_rows(float* rows, int64_t count, int64_t dim) {
  parallel_for(int64_t{0}, count, [=](int64_t i) { hadamard_row(rows + i * dim, dim); });
}

void preprocess(const Problem& problem, Plan& plan) {
  const vcattn_recipe& recipe = problem.params->recipe;
  QuantizedQkv& qkv = plan.qkv;
  const int64_t kv_heads = problem.num_heads_kv * qkv.num_sequences;
  if ((problem.params->flags & VCATTN_ALLOW_NONFINITE) != 0) {
    std::fill(qkv.k_poison, qkv.k_poison + kv_heads, uint8_t{0});
    std::fill(qkv.v_poison, qkv.v_poison + kv_heads * qkv.v_dim, uint8_t{0});
  }
  for (int64_t s = 0; s < qkv.num_sequences; ++s) {
    Sequence& sequence = plan.sequences[s];
    sequence.keys = admit(problem, sequence, plan.head.admitted);
    if (sequence.keys == 0 || sequence.q_count == 0) continue;
    for (int64_t kv_head = 0; kv_head < problem.num_heads_kv; ++kv_head) {
      const Head head = {problem, plan, recipe, sequence, s, kv_head};
      prepare_values(head);
      prepare_keys(head);
    }
    const int64_t blocks = ceil_div(sequence.q_count, kBlockM);
    parallel_for(int64_t{0}, problem.num_heads * blocks, [&](int64_t item) {
      const int64_t block = item % blocks;
      float* rows = thread_scratch(plan, problem, oneapi::tbb::this_task_arena::current_thread_index()).q;
      const int64_t count = std::min<int64_t>(kBlockM, sequence.q_count - block * kBlockM);
      prepare_queries({problem, plan, recipe, sequence, s, item / blocks, block, rows, count});
    });
  }
}

void group(const Problem& problem, const GroupPlan& plan, bool warm, float* centroids, int32_t* permutation) {
  const vcattn_attention_params& p = *problem.params;
  const HeadScratch& scratch = plan.head;
  const int64_t clusters = p.recipe.grouping.clusters, head_dim = problem.head_dim;
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    Sequence sequence = sequence_at(problem, s);
    sequence.keys = admit(problem, sequence, scratch.admitted);
    for (int64_t head = 0; head < problem.num_heads_kv; ++head) {
      int32_t* out =
          permutation + (sequence.batch * problem.num_heads_kv + head) * problem.seqlen_kv + sequence.kv_begin;
      std::fill(out, out + sequence.kv_count, -1);
      if (sequence.keys == 0) continue;
      parallel_for(int64_t{0}, sequence.keys, [&](int64_t i) {
        float* row = scratch.rows + i * plan.dim;
        load_row(p.v, sequence.batch, sequence.kv_begin + scratch.admitted[i], head, row);
        std::fill(row + head_dim, row + plan.dim, 0.0f);
        clean_row(row, head_dim, [](int64_t) {});
      });
      float* kept =
          centroids == nullptr ? nullptr : centroids + (s * problem.num_heads_kv + head) * clusters * head_dim;
      const bool keeps = kept != nullptr && vsmooth::uses_clusters(p.recipe.v_order);
      if (keeps) {
        for (int64_t c = 0; c < clusters; ++c) {
          float* centroid = scratch.centroids + c * plan.dim;
          std::fill(centroid, centroid + plan.dim, 0.0f);
          if (warm) std::copy_n(kept + c * head_dim, head_dim, centroid);
        }
      }
      vsmooth::order_tokens({scratch.rows, sequence.keys, head_dim, plan.dim}, p.recipe.v_order, p.recipe.grouping,
                            p.grid, warm && keeps, scratch.centroids, scratch.order, scratch.grouping);
      for (int64_t i = 0; i < sequence.keys; ++i) out[i] = scratch.admitted[scratch.order[i]];
      if (keeps) {
        for (int64_t c = 0; c < clusters; ++c) {
          std::copy_n(scratch.centroids + c * plan.dim, head_dim, kept + c * head_dim);
        }
      }
    }
  }
}

}  // namespace vcattn::cpu
