// Turns the caller's parameters into a checked problem, or a refusal that names the unmet condition.
#pragma once

#include <cstdint>

#include "vcattn/vcattn.h"

namespace vcattn {

// Parameters that hold together. Everything behind validation trusts it.
struct Problem {
  const vcattn_attention_params* params;
  int64_t batch, seqlen_q, seqlen_kv, num_heads, num_heads_kv, head_dim;
  int64_t num_sequences;  // batch, or the number of packed segments
  double softmax_scale;
  int num_threads;

  // Tokens of one sequence among those of its batch entry.
  struct Tokens {
    int64_t begin, count;
  };

  bool packed() const { return params->cu_seqlens_q != nullptr; }
  int64_t batch_of(int64_t sequence) const { return packed() ? 0 : sequence; }
  Tokens queries_of(int64_t sequence) const { return tokens_of(params->cu_seqlens_q, sequence, seqlen_q); }
  Tokens keys_of(int64_t sequence) const { return tokens_of(params->cu_seqlens_kv, sequence, seqlen_kv); }
  // Whether the caller says where the video is, and its tokens.
  bool has_grid() const { return params->grid.frames > 0; }
  Tokens grid_tokens() const {
    const vcattn_video_grid& g = params->grid;
    return {g.first_token, g.frames * g.height * g.width};
  }
  bool allows_nonfinite() const { return (params->flags & VCATTN_ALLOW_NONFINITE) != 0; }
  // Whether the key mask lets `token` of batch entry `batch_index` take part.
  bool admits(int64_t batch_index, int64_t token) const {
    const vcattn_attention_params& p = *params;
    return p.key_mask == nullptr || p.key_mask[batch_index * p.key_mask_stride[0] + token * p.key_mask_stride[1]] != 0;
  }

 private:
  static Tokens tokens_of(const int64_t* cu_seqlens, int64_t sequence, int64_t seqlen) {
    if (cu_seqlens == nullptr) return {0, seqlen};
    return {cu_seqlens[sequence], cu_seqlens[sequence + 1] - cu_seqlens[sequence]};
  }
};

vcattn_code validate_attention(const vcattn_attention_params* params, Problem& problem, vcattn_message* message);

// For vcattn_group: v, its mask or segments, the grid and the recipe.
vcattn_code validate_grouping(const vcattn_attention_params* params, Problem& problem, vcattn_message* message);

// An array of 4-byte elements; NULL passes.
vcattn_code validate_alignment(const void* pointer, const char* name, vcattn_message* message);

// Workspace given against asked for.
vcattn_code validate_workspace(const void* workspace, size_t given, size_t needed, vcattn_message* message);

}  // namespace vcattn
