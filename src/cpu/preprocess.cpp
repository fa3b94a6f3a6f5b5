#include "cpu/preprocess.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>

#include "cpu/prepare.h"

namespace vcattn::cpu {

using oneapi::tbb::parallel_for;

void hadamard_row(float* row, int64_t n) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) row[i] *= scale;  // first: sums of large values must not overflow
  for (int64_t half = 1; half < n; half *= 2) {
    for (int64_t i = 0; i < n; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const float a = row[j], b = row[j + half];
        row[j] = a + b;
        row[j + half] = a - b;
      }
    }
  }
}

void rotate_rows(float* rows, int64_t count, int64_t dim) {
  parallel_for(int64_t{0}, count, [=](int64_t i) { hadamard_row(rows + i * dim, dim); });
}

int64_t admit(const Problem& problem, const Sequence& sequence, int32_t* admitted) {
  int64_t count = 0;
  for (int64_t token = 0; token < sequence.kv_count; ++token) {
    if (problem.admits(sequence.batch, token)) admitted[count++] = static_cast<int32_t>(token);
  }
  return count;
}

vcattn_video_grid admitted_grid(const Problem& problem, const Sequence& sequence, const int32_t* admitted) {
  if (problem.params->key_mask == nullptr || !problem.has_grid()) return problem.params->grid;
  const Problem::Tokens video = problem.grid_tokens();
  const int32_t* end = admitted + sequence.keys;
  const int32_t* first = std::lower_bound(admitted, end, video.begin);
  return {first - admitted, 1, 1, std::lower_bound(first, end, video.begin + video.count) - first};
}

void preprocess(const Problem& problem, Plan& plan) {
  const vcattn_recipe& recipe = problem.params->recipe;
  QuantizedQkv& qkv = plan.qkv;
  const int64_t kv_heads = problem.num_heads_kv * qkv.num_sequences;
  if (problem.allows_nonfinite()) {
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

}  // namespace vcattn::cpu
