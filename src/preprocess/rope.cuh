// Rotary position embedding of rows on the device, bit for bit that of core/rope.h. Internal to src/preprocess.
//
// Tables per token are twice the bytes of a row of 16-bit elements, those per axis are small. Heads share a token's
// angles: all but the first find them in L2, and the threads of a warp read neighbouring pairs.
#pragma once

#include <cstdint>

#include "core/validate.h"
#include "numerics/rope.h"
#include "preprocess/rows.cuh"

namespace vcattn::sm90a {

// rope_q or rope_k, and what its tables are looked up by.
struct RopeArgs {
  vcattn_rope rope;
  vcattn_video_grid grid;
  int32_t pairs;  // of a row

  __device__ bool interleaved() const { return rope.pairing == VCATTN_ROPE_INTERLEAVED; }
  __device__ RopeRow row(int64_t batch, int64_t token, int64_t head) const {
    return rope_row(rope, grid, batch, token, head);
  }
};

inline RopeArgs rope_args(const Problem& problem, const vcattn_rope& rope) {
  return {rope, problem.params->grid, static_cast<int32_t>(problem.head_dim / 2)};
}

// work.operator()<kPairing>() for a vcattn_rope_pairing.
template <typename Work>
cudaError_t with_pairing(const vcattn_rope& rope, Work work) {
  switch (rope.pairing) {
    case VCATTN_ROPE_INTERLEAVED:
      return work.template operator()<VCATTN_ROPE_INTERLEAVED>();
    case VCATTN_ROPE_HALF_SPLIT:
      return work.template operator()<VCATTN_ROPE_HALF_SPLIT>();
    default:
      return work.template operator()<VCATTN_ROPE_NONE>();
  }
}

// ---- one channel ---------------------------------------------------------------------------------------------------

// Where a channel stands in its pair. What lies behind the pairs is 0 and stays 0, as a partner of itself.
struct RopePlace {
  int pair, partner;
  bool second;
};

__device__ __forceinline__ RopePlace rope_place(const RopeArgs& a, int channel) {
  if (channel >= 2 * a.pairs) return {0, channel, false};
  if (a.interleaved()) return {channel / 2, channel ^ 1, channel % 2 != 0};
  const bool second = channel >= a.pairs;
  return {second ? channel - a.pairs : channel, second ? channel - a.pairs : channel + a.pairs, second};
}

// One channel of a rotated pair. The first takes the negative sine: sums and products are those of the formula.
__device__ __forceinline__ float rope_channel(float own, float partner, RopeAngle angle, bool second) {
  return __fadd_rn(__fmul_rn(own, angle.cos), __fmul_rn(partner, second ? angle.sin : -angle.sin));
}

// A Column of K, rotated: `rows` are those of the tile's tokens.
template <typename Element, int kDim>
class RopeChannel {
 public:
  using Tile = RowTile<Element, kDim>;
  __device__ RopeChannel(const RopeArgs& a, std::byte* tile, int channel, const RopeRow* rows)
      : place_(rope_place(a, channel)),
        angles_(rope_column(a.rope, place_.pair)),
        own_(tile, channel),
        partner_(tile, place_.partner),
        rows_(rows) {}
  __device__ float value(int group, int row) const {
    const RopeAngle angle = rope_angle(rows_[group * Tile::kExchanged + row], angles_);
    return rope_channel(own_.value(group, row), partner_.value(group, row), angle, place_.second);
  }
  __device__ void clean(int rows) const {
    own_.clean(rows);
    partner_.clean(rows);
  }

 private:
  RopePlace place_;
  RopeColumn angles_;
  Column<Element, kDim> own_, partner_;
  const RopeRow* rows_;
};

// ---- rows ----------------------------------------------------------------------------------------------------------

// The angles of kUnitRows rows, for the shared memory of kernels to derive from; nothing without rope.
template <int kDim, int kPairing>
struct RopeTile {
  static constexpr int kPairs = kDim / 2;
  static constexpr int kChunkPairs = kChunkBytes / static_cast<int>(sizeof(RopeAngle));
  static constexpr int kExchanged = 8;  // chunks, by the row's number as in RowTile
  static_assert(kPairs / kChunkPairs % kExchanged == 0);
  alignas(128) RopeAngle angles[kUnitRows * kPairs];
  RopeRow angle_rows[kUnitRows];

  // An even pair and the one behind it are neighbours.
  __device__ __forceinline__ static int place(int row, int pair) {
    return row * kPairs + (pair ^ (row % kExchanged * kChunkPairs));
  }
  __device__ __forceinline__ float4 two_angles(int row, int pair) const {
    return *reinterpret_cast<const float4*>(angles + place(row, pair));
  }

  // Fills `angles`; what lies behind the pairs does not rotate. Needs angle_rows; threads wait with the group's
  // barrier.
  template <typename Group>
  __device__ __forceinline__ void load_angles(const RopeArgs& a, Group group) {
    static_assert(Group::kCount % kPairs == 0, "each thread keeps to one pair");
    constexpr int kRowsAtOnce = Group::kCount / kPairs, kAhead = 8;
    const int pair = group.thread() % kPairs, first = group.thread() / kPairs;
    const RopeColumn column = rope_column(a.rope, pair);
#pragma unroll 1
    for (int row = first; row < kUnitRows; row += kAhead * kRowsAtOnce) {
      RopeAngle found[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        found[i] = pair < a.pairs ? rope_angle(angle_rows[row + i * kRowsAtOnce], column) : RopeAngle{1.0f, 0.0f};
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) angles[place(row + i * kRowsAtOnce, pair)] = found[i];
    }
  }

  // Channel `channel` of row `row`, rotated.
  template <typename Element>
  __device__ __forceinline__ float channel(const RopeArgs& a, const std::byte* tile, int row, int channel) const {
    const auto value = [&](int of) {
      return reinterpret_cast<const Element*>(tile + RowTile<Element, kDim>::element(row, of))->value();
    };
    const RopePlace p = rope_place(a, channel);
    return rope_channel(value(channel), value(p.partner), angles[place(row, p.pair)], p.second);
  }

  // Rotates what read_part gave of the rows in `tile`. Returns whether all of it is finite; what is not stays.
  template <typename Part>
  __device__ __forceinline__ bool rotate_part(const RopeArgs& a, const std::byte* tile, Part part,
                                              float (&x)[Part::kChannels]) const {
    if constexpr (kPairing == VCATTN_ROPE_INTERLEAVED) {
      rotate_interleaved(part, x);
    } else {
      rotate_half_split(a, tile, part, x);
    }
    float check = 0.0f;
#pragma unroll
    for (int d = 0; d < Part::kChannels; ++d) check = __fmaf_rn(x[d], 0.0f, check);
    // Here, not where it is needed: until then all of x would have to be kept.
    asm volatile("" : "+f"(check));
    return check == 0.0f;
  }

 private:
  template <typename Part>
  __device__ __forceinline__ void rotate_interleaved(Part part, float (&x)[Part::kChannels]) const {
#pragma unroll
    for (int d = 0; d < Part::kChannels; d += 2 * kChunkPairs) {
      const float4 two = two_angles(part.row, (part.first + d) / 2);
      rotate_pair(x[d], x[d + 1], {two.x, two.y});
      rotate_pair(x[d + 2], x[d + 3], {two.z, two.w});
    }
  }

  // A chunk of channels has its partners in one chunk: pairs are a multiple of a chunk's elements.
  template <typename Part>
  __device__ __forceinline__ void rotate_half_split(const RopeArgs& a, const std::byte* tile, Part part,
                                                    float (&x)[Part::kChannels]) const {
    using Element = typename Part::Element;
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
    __syncwarp();  // the other part may have cleaned its own
#pragma unroll
    for (int d = 0; d < Part::kChannels; d += kElements) {
      const int channel = part.first + d;
      const RopePlace p = rope_place(a, channel);
      const uint4 chunk =
          *reinterpret_cast<const uint4*>(tile + RowTile<Element, kDim>::chunk(part.row, p.partner / kElements));
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      float partner[kElements];
#pragma unroll
      for (int w = 0; w < 4; ++w) widen(Element{}, words[w], partner + w * (kElements / 4));
#pragma unroll
      for (int i = 0; i < kElements; i += kChunkPairs) {
        const float4 two =
            channel < 2 * a.pairs ? two_angles(part.row, p.pair + i) : make_float4(1.0f, 0.0f, 1.0f, 0.0f);
        x[d + i] = rope_channel(x[d + i], partner[i], {two.x, two.y}, p.second);
        x[d + i + 1] = rope_channel(x[d + i + 1], partner[i + 1], {two.z, two.w}, p.second);
      }
    }
  }

  __device__ __forceinline__ static void rotate_pair(float& first, float& second, RopeAngle angle) {
    const float x0 = first, x1 = second;
    first = rope_channel(x0, x1, angle, false);
    second = rope_channel(x1, x0, angle, true);
  }
};

template <int kDim>
struct RopeTile<kDim, VCATTN_ROPE_NONE> {};

}  // namespace vcattn::sm90a
