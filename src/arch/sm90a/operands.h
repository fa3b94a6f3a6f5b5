// What preprocessing hands to the sm_90a attention kernels, and the tile order they read it in. The only coupling
// between the two. Plain pointers to device memory; host and device code include this header.
//
// Attention walks keys in pairs of 128-key tiles and queries in blocks of block_rows rows (config.h). All sequences of
// one head lie behind one another, each starting at a whole block, an even tile and a whole mean group.
#pragma once

#include <cstdint>

#include "numerics/attention_math.h"
#include "numerics/formats.h"

namespace vcattn::sm90a {

inline constexpr int kTileRowsQ = 64;          // query rows of one warpgroup
inline constexpr int kPairKeys = 2 * kBlockN;  // keys under one maximum of a row
inline constexpr int kOnesRows = 8;            // rows of ones under V^T: their products are row sums
inline constexpr int kSumTiles = 4;            // tiles whose two row sums each (even, odd keys) fill them
inline constexpr int kMeanTiles = 8;           // tiles whose means make one operand of the mean product
// Largest |score| of INT8 codes in code units, by the bound of q_norm and k_norm. Up to here the sum with kRoundMagic
// finds a row's maximum to within two codes, and the largest code, 120 + 2 and 4 of the second phase, is still 126.
inline constexpr float kCodeRange = 0x1p25f;
inline constexpr uint8_t kE4m3One = 0x38;

// One batch entry, or one packed segment, in device memory.
struct Sequence {
  int32_t batch;
  int32_t q_begin, q_count;  // query tokens
  int32_t kv_begin;          // token 0 of the sequence in k and v
  int32_t kv_count;          // tokens there
  int32_t keys;              // admitted tokens, <= kv_count: with a key mask counted on the device
  int32_t q_block;           // first query block, among those of one head
  int32_t tile;              // first key tile, among those of one head; even
  int32_t mean_group;        // first mean group, among those of one head
};

VCATTN_HD constexpr int32_t blocks_of(int32_t queries, int32_t block_rows) {
  return (queries + block_rows - 1) / block_rows;
}
VCATTN_HD constexpr int32_t tiles_of(int32_t keys) { return (keys + kPairKeys - 1) / kPairKeys * 2; }
VCATTN_HD constexpr int32_t mean_groups_of(int32_t tiles) { return (tiles + kMeanTiles - 1) / kMeanTiles; }

// The last of `count` items whose `first` is at most `index`: which sequence a block, a tile or a chunk belongs to.
// Empty sequences share their start with the next one.
template <typename Item>
VCATTN_HD constexpr int last_starting_at(const Item* items, int count, int32_t Item::*first, int index) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (items[middle].*first <= index ? low : high) = middle;
  }
  return low;
}

// Bytes of the tiles of `dim` (64 or 128) channels.
VCATTN_HD constexpr int query_tile_bytes(int dim) { return kTileRowsQ * dim; }
VCATTN_HD constexpr int key_tile_bytes(int dim) { return kBlockN * dim; }
VCATTN_HD constexpr int value_tile_bytes(int dim) { return (dim + kOnesRows) * kBlockN; }
VCATTN_HD constexpr int mean_group_bytes(int dim) { return kMeanTiles * dim * 4; }

// Where byte `byte` of row `row` lies in a tile whose rows are `row_bytes` (64 or 128) long: shared-memory swizzle of
// the same width, groups of 8 rows behind one another (PTX ISA, "Asynchronous warpgroup level matrix shared memory
// layout").
VCATTN_HD constexpr int swizzled(int row, int byte, int row_bytes) {
  const int chunk = row_bytes == 128 ? row & 7 : (row >> 1) & 3;
  return row * row_bytes + ((((byte >> 4) ^ chunk) << 4) | (byte & 15));
}

// The 128 keys of a V tile lie in the order in which wgmma's A operand meets the scores that the first product leaves
// in registers: position p holds this key.
VCATTN_HD constexpr int key_at(int position) {
  const int slot = position % 32, byte = slot % 4;
  return position / 32 * 32 + slot / 16 * 16 + 2 * (slot % 16 / 4) + (byte & 1) + 8 * (byte >> 1);
}
VCATTN_HD constexpr int position_of(int key) {
  const int k = key % 16;
  return key / 16 * 16 + k % 8 / 2 * 4 + k / 8 * 2 + (k & 1);
}

// Float index, in a mean group, of the mean of `channel` over tile `tile` of the sequence: core matrices of 8 channels
// x 4 tiles.
VCATTN_HD constexpr int mean_index(int channel, int tile) {
  return channel / 8 * 64 + tile % kMeanTiles / 4 * 32 + channel % 8 * 4 + tile % 4;
}

// Byte, in the tile at `tile` of its sequence, of the one that counts key `key` (0..127) into row sums.
VCATTN_HD constexpr int ones_index(int dim, int tile, int key) {
  return swizzled(dim + 2 * (tile % kSumTiles) + (key & 1), position_of(key), kBlockN);
}

// Scalars of this call that the device computes from data follow `keys` of a Sequence: a sequence has
// tiles_of(keys) tiles and mean_groups_of(tiles) groups that are read; what lies behind them is not.
struct QuantizedQkv {
  int32_t dim;         // channels as stored: 64 or 128
  int32_t block_rows;  // query rows of one work item: a multiple of 128
  int32_t num_heads, num_heads_kv, num_sequences;
  int32_t blocks, tiles, mean_groups;  // of one head, all sequences together, for kv_count keys each
  Sequence* sequences;                 // [num_sequences]

  // Codes of Q: INT8, or E4M3. Rows behind the sequence's last are 0.
  uint8_t* q;       // [num_heads, blocks, block_rows / 64, 64 x dim swizzled]
  float* q_factor;  // [num_heads, blocks * block_rows] code units (eighths of an octave) per raw product, before
                    // k_descale; 0 behind the last row; NaN where the row of q is not finite
  // INT8 codes only (0 for E4M3): with k_norm a bound of every |score| in code units, up to rounding.
  float* q_norm;  // [num_heads, blocks * block_rows / 64]: largest Euclidean norm of 64 rows' codes, times q_factor
  // Keys behind the last repeat the last key: codes and descale are those that it has in its own tile.
  uint8_t* k;        // [num_heads_kv, tiles, 128 x dim swizzled]
  float* k_descale;  // [num_heads_kv, tiles]
  float* k_norm;     // [num_heads_kv, num_sequences]: largest Euclidean norm of a key's codes, times k_descale
  // V^T less its block means, keys as key_at says, then the ones. Keys behind the last are 0, also in the ones. With
  // two phases the row of an odd key carries kPhaseFactor.
  uint8_t* v;        // [num_heads_kv, tiles, (dim + 8) x 128 swizzled], E4M3
  float* v_descale;  // [num_heads_kv, num_sequences, dim]; NaN where the channel is not finite
  float* means;      // optional [num_heads_kv, mean_groups, dim x 8 by mean_index], TF32, in units of v_descale; tiles
                     // behind the last are 0
  float*
      lse_shift;  // optional [num_heads, blocks * block_rows]: what centring K took from a row's scores, natural units
  uint32_t* k_poison;  // [num_heads_kv, num_sequences] non-zero where a key is not finite
};

}  // namespace vcattn::sm90a
