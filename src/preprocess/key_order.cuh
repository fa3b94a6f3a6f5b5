// Which token lies where: the sequence of a block's work, and the keys' order. Internal to src/preprocess.
#pragma once

#include <cstdint>

#include "arch/sm90a/operands.h"
#include "preprocess/prepare.h"

namespace vcattn::sm90a {

// The sequence that number `index` belongs to, counted as `first` counts (query blocks, tiles, mean groups).
__device__ __forceinline__ int sequence_of(const QuantizedQkv& qkv, int32_t Sequence::*first, int index) {
  return last_starting_at(qkv.sequences, qkv.num_sequences, first, index);
}

__device__ __forceinline__ int filled_tiles(const Sequence& s) { return (s.keys + kBlockN - 1) / kBlockN; }

struct KeyOrder {
  const int32_t* permutation;  // optional [batch, num_heads_kv, seqlen_kv]
  const int32_t* admitted;     // with a key mask [batch, seqlen_kv]
  const uint8_t* key_mask;     // the same
  int64_t mask_stride[2];
  int64_t seqlen_kv;
  int32_t num_heads_kv;

  // The `index`-th key of the sequence, in its own order.
  __device__ int token(const Sequence& s, int index) const {
    return admitted != nullptr ? admitted[s.batch * seqlen_kv + index] : index;
  }
  // The key at `position` of the head's order; -1 where the caller names none that is admitted.
  __device__ int token_at(const Sequence& s, int kv_head, int position) const {
    if (permutation == nullptr) return token(s, position);
    const int64_t row = (int64_t{s.batch} * num_heads_kv + kv_head) * seqlen_kv + s.kv_begin;
    const int token = permutation[row + position];
    if (token < 0 || token >= s.kv_count) return -1;
    if (key_mask != nullptr && key_mask[s.batch * mask_stride[0] + token * mask_stride[1]] == 0) return -1;
    return token;
  }
};

inline KeyOrder key_order(const Problem& problem, const PrepareScratch& scratch) {
  const vcattn_attention_params& p = *problem.params;
  const bool masked = p.key_mask != nullptr;
  return {p.permutation,     masked ? scratch.admitted : nullptr,
          p.key_mask,        {p.key_mask_stride[0], p.key_mask_stride[1]},
          problem.seqlen_kv, static_cast<int32_t>(problem.num_heads_kv)};
}

}  // namespace vcattn::sm90a
