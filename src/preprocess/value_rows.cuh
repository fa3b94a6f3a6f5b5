// A tile of V in shared memory, where a thread works on one channel: sums over keys stay in the CPU's order, and a
// channel's 128 codes are one row of V^T. Internal to src/preprocess.
#pragma once

#include "preprocess/args.cuh"

namespace vcattn::sm90a {

template <typename Element, int kDim>
struct ValueShared {
  alignas(128) std::byte tile[kUnitRows * RowTile<Element, kDim>::kRowBytes];
  const Element* rows[kUnitRows];
  float warp_max[kDim / 32];
};

// Keys of the tile that are there: 0 where it has nothing to do.
__device__ __forceinline__ int keys_in(const KeyTile& tile) {
  return tile.s.q_count == 0 ? 0 : min(max(tile.s.keys - tile.index * kBlockN, 0), kBlockN);
}

// Copies the tile's rows in the order of the keys; behind the last key that one again.
template <typename Element, int kDim>
__device__ __forceinline__ void load_values(const PrepareArgs& a, const KeyTile& tile, int keys,
                                            ChannelGroup<kDim> group, ValueShared<Element, kDim>& shared) {
#pragma unroll
  for (int i = 0; i < kUnitRows; i += kDim) {
    const int row = i + group.thread();
    // In place of what the order does not name, any token: K's part marks the head.
    const int token = max(a.order.token_at(tile.s, tile.kv_head, tile.index * kBlockN + min(row, keys - 1)), 0);
    shared.rows[row] = a.v.row<Element>(tile.s.batch, int64_t{tile.s.kv_begin} + token, tile.kv_head);
  }
  group.sync();
  copy_rows<Element, kDim, kUnitRows>(group, a.v, shared.tile, [&](int row) { return shared.rows[row]; });
  wait_copies<0>();
  group.sync();
}

constexpr int kChunkKeys = kChunkBytes;  // of one channel, whose codes are one chunk
static_assert(position_of(kChunkKeys) == kChunkKeys, "a chunk's keys stay in it");

// Chunk `chunk` of the ones in row `row` (0..7) under the tile at `tile` of its sequence.
__device__ __forceinline__ uint4 ones_chunk(int tile, int row, int chunk, int keys) {
  uint32_t words[4] = {};
#pragma unroll
  for (int byte = 0; byte < kChunkBytes; ++byte) {
    const int key = key_at(byte);  // of the chunk
    const bool counts = row == 2 * (tile % kSumTiles) + key % 2 && chunk * kChunkKeys + key < keys;
    words[byte / 4] |= (counts ? uint32_t{kE4m3One} : 0U) << byte % 4 * 8;
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace vcattn::sm90a
