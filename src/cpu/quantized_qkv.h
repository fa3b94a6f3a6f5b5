// What preprocessing hands to attention: codes, scales and block means in the CPU's tile order. The only coupling
// between the two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/attention_math.h"

namespace vcattn::cpu {

inline constexpr int kBlockM = kScaleRows;  // query rows of one work item: those under one block scale
static_assert(kBlockN == kScaleRows, "a tile of keys is what one block scale of K covers");

// One batch entry, or one packed segment.
struct Sequence {
  int64_t batch;
  int64_t q_begin, q_count;
  int64_t kv_begin;  // token 0 of the sequence in k and v
  int64_t kv_count;  // tokens there
  int64_t keys;      // admitted tokens, <= kv_count
  int64_t q_block;   // first query block, among those of one head
  int64_t tile;      // first key tile, among those of one head; ceil(kv_count / 128) are reserved
};

// Leading dimensions: heads outermost, then sequences. `blocks` and `tiles` count all sequences of one head.
struct QuantizedQkv {
  int64_t dim;    // head_dim, zero-padded to a multiple of 16, or to a power of two where Q and K are rotated
  int64_t v_dim;  // the same for V
  int64_t blocks, tiles;
  const Sequence* sequences;
  int64_t num_sequences;

  std::byte* q;       // [num_heads, blocks * 128, dim] in qk_format
  uint8_t* q_groups;  // NVFP4: UE4M3 [num_heads, blocks * 128, dim / 16]
  float* q_factor;    // [num_heads, blocks * 128]: code units per raw product, before k_descale
  std::byte* k;       // [num_heads_kv, tiles, dim, 128] in qk_format
  uint8_t* k_groups;  // NVFP4: UE4M3 [num_heads_kv, tiles, dim / 16, 128]
  float* k_descale;   // [num_heads_kv, tiles]
  std::byte* v;       // [num_heads_kv, tiles, 128, v_dim] in v_format
  uint8_t* v_groups;  // NVFP4: UE4M3 [num_heads_kv, tiles, 8, v_dim]
  float* v_descale;   // [num_heads_kv, num_sequences, v_dim]
  float* means;       // mean_rows > 0: [num_heads_kv, tiles, 128 / mean_rows, v_dim], in units of v_descale
  // q_centred: the exact operands of the term that is added back, FP32.
  float* q_means;  // [num_heads, blocks, dim]
  float* k_exact;  // [num_heads_kv, tiles, dim, 128]
  // lse: what centring took from each row's scores, natural units, [num_heads, blocks * 128].
  float* lse_shift;
  // VCATTN_ALLOW_NONFINITE: non-zero where an input was not finite (and was read as 0).
  uint8_t* q_poison;  // [num_heads, blocks * 128]
  uint8_t* k_poison;  // [num_heads_kv, num_sequences]
  uint8_t* v_poison;  // [num_heads_kv, num_sequences, v_dim]
};

}  // namespace vcattn::cpu
