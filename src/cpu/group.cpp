// vcattn_group on the CPU: the order of each (sequence, KV head), and its centroids for a later warm start.
#include <algorithm>

#include "cpu/prepare.h"
#include "cpu/preprocess.h"
#include "vsmooth/grouping.h"

namespace vcattn::cpu {
namespace {

// Centroids of one head between the caller's rows of head_dim floats and the scratch's padded ones.
struct Centroids {
  float* kept;  // [clusters, head_dim]
  float* scratch;
  int64_t clusters, head_dim, dim;

  void load(bool warm) const {
    for (int64_t c = 0; c < clusters; ++c) {
      float* row = scratch + c * dim;
      std::fill(row, row + dim, 0.0f);
      if (warm) std::copy_n(kept + c * head_dim, head_dim, row);
    }
  }
  void store() const {
    for (int64_t c = 0; c < clusters; ++c) std::copy_n(scratch + c * dim, head_dim, kept + c * head_dim);
  }
};

}  // namespace

void group(const Problem& problem, const GroupPlan& plan, bool warm, float* centroids, int32_t* permutation) {
  const vcattn_attention_params& p = *problem.params;
  const HeadScratch& scratch = plan.head;
  const int64_t clusters = p.recipe.grouping.clusters, head_dim = problem.head_dim;
  const bool keeps = centroids != nullptr && vsmooth::uses_clusters(p.recipe.v_order);
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    Sequence sequence = sequence_at(problem, s);
    sequence.keys = admit(problem, sequence, scratch.admitted);
    for (int64_t head = 0; head < problem.num_heads_kv; ++head) {
      const int64_t slot = s * problem.num_heads_kv + head;
      int32_t* out =
          permutation + (sequence.batch * problem.num_heads_kv + head) * problem.seqlen_kv + sequence.kv_begin;
      std::fill(out, out + sequence.kv_count, -1);
      const Centroids state = {keeps ? centroids + slot * clusters * head_dim : nullptr, scratch.centroids, clusters,
                               head_dim, plan.dim};
      if (keeps) state.load(warm);
      if (sequence.keys > 0) {
        gather_tokens(problem, sequence, p.v, head, scratch.admitted, plan.dim, scratch.rows, [](int64_t) {});
        vsmooth::order_tokens({scratch.rows, sequence.keys, head_dim, plan.dim}, p.recipe.v_order, p.recipe.grouping,
                              admitted_grid(problem, sequence, scratch.admitted), warm && keeps, scratch.centroids,
                              scratch.order, scratch.grouping);
        for (int64_t i = 0; i < sequence.keys; ++i) out[i] = scratch.admitted[scratch.order[i]];
      }
      if (keeps) state.store();
    }
  }
}

}  // namespace vcattn::cpu
