// Rotary position embedding of rows in host memory.
#pragma once

#include <cstdint>

#include "core/tensor_access.h"
#include "core/validate.h"
#include "numerics/rope.h"

namespace vcattn {

// row[head_dim] of q or k at its token, rotated. Compiled without contraction: products and sums round one by one.
inline void apply_rope(const vcattn_rope& rope, const vcattn_video_grid& grid, int64_t batch, int64_t token,
                       int64_t head, int64_t head_dim, float* row) {
  if (rope.pairing == VCATTN_ROPE_NONE) return;
  const bool interleaved = rope.pairing == VCATTN_ROPE_INTERLEAVED;
  const int64_t half = head_dim / 2;
  const RopeRow at = rope_row(rope, grid, batch, token, head);
  for (int64_t pair = 0; pair < half; ++pair) {
    const RopeAngle angle = rope_angle(at, rope_column(rope, pair));
    float& first = row[interleaved ? 2 * pair : pair];
    float& second = row[interleaved ? 2 * pair + 1 : pair + half];
    const float x0 = first, x1 = second;
    first = x0 * angle.cos - x1 * angle.sin;
    second = x0 * angle.sin + x1 * angle.cos;
  }
}

// out[head_dim] = q[batch, token, head, :] as the scores take it.
inline void load_query(const Problem& problem, int64_t batch, int64_t token, int64_t head, float* out) {
  const vcattn_attention_params& p = *problem.params;
  load_row(p.q, batch, token, head, out);
  apply_rope(p.rope_q, p.grid, batch, token, head, problem.head_dim, out);
}

// out[head_dim] = k[batch, token, head, :] likewise.
inline void load_key(const Problem& problem, int64_t batch, int64_t token, int64_t head, float* out) {
  const vcattn_attention_params& p = *problem.params;
  load_row(p.k, batch, token, head, out);
  apply_rope(p.rope_k, p.grid, batch, token, head, problem.head_dim, out);
}

}  // namespace vcattn
