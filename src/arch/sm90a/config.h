// What distinguishes the attention kernels of sm_90a, and what the kernel is given at launch.
#pragma once

#include <cstdint>

#include "arch/sm90a/operands.h"

namespace vcattn::sm90a {

enum class Scores {
  kInt8,  // INT8 codes, exact 32-bit integer scores
  kE4m3   // E4M3 codes, scores accumulated in FP16, in code units times a power of two
};
enum class Probabilities {
  kExpCast,  // the byte by one multiply-add (numerics/attention_math.h)
  kExp2      // exp2, rounded to E4M3
};

enum class RowMaximum {
  kPairOctave,  // whole octaves for each pair of tiles, row sums of the bytes
  kRunning      // exact, for the whole row, row sums of the unrounded exponentials (kExp2): as published
};

struct Config {
  int head_dim;  // channels as stored: 64 or 128
  Scores scores;
  Probabilities probabilities;
  RowMaximum row_maximum;
  bool means;  // restore block means; without, FP8 sums are promoted to FP32 every 128 keys instead of every 256

  // Warpgroups of 64 query rows in a CTA. Rows of 64 channels need half the products for the same softmax, and half the
  // registers for outputs: so a third one fits, if it holds the scores of one tile at a time.
  constexpr int consumers() const {
    return head_dim == 64 && probabilities == Probabilities::kExpCast && means ? 3 : 2;
  }
  constexpr int threads() const { return 128 * (consumers() + 1); }  // one more warpgroup feeds them
  constexpr int producer_registers() const { return consumers() == 3 ? 32 : means ? 40 : 24; }
  constexpr int consumer_registers() const { return consumers() == 3 ? 160 : means ? 232 : 240; }
  constexpr int block_rows() const { return 2 * consumers() * kTileRowsQ; }  // of a cluster of two CTAs

  friend constexpr bool operator==(const Config&, const Config&) = default;
};

// `out` and `lse` of the caller: [batch, seqlen_q, num_heads(, head_dim)], strides in elements.
struct Output {
  void* data;
  int32_t dtype;     // vcattn_dtype
  int32_t head_dim;  // channels to write, <= QuantizedQkv::dim
  int64_t stride[4];
  float* lse;  // optional
  int64_t lse_stride[3];
};

struct AttentionParams {
  QuantizedQkv qkv;
  Output out;
  // Two phases (numerics/attention_math.h): codes added to odd keys, and their weight in row sums; 0 and 1 without.
  int32_t odd_codes;
  float odd_weight;
  uint32_t zero;  // 0; keeps instructions in order (softmax.cuh)
};

}  // namespace vcattn::sm90a
