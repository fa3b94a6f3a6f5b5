// What the grouping kernels share: the problem as they see it, and who works on what. Internal to src/preprocess.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "arch/sm90a/operands.h"
#include "numerics/attention_math.h"
#include "preprocess/group.h"
#include "preprocess/launch.cuh"
#include "preprocess/rows.cuh"

namespace vcattn::sm90a {

inline constexpr int kPanelClusters = 64;  // centroids in shared memory at a time
inline constexpr int kMaxClusters = 1024;
inline constexpr int kGroupTile = 128;  // positions that a CTA scores at a time
inline constexpr int kGroupWarps = 8;
inline constexpr int kGroupThreads = 32 * kGroupWarps;  // of all kernels but the exchange
inline constexpr int kLevels = 256;                     // of a projection
inline constexpr uint32_t kFullWarp = 0xFFFFFFFF;

struct GroupSequence {
  int32_t batch;
  int32_t first_token;   // in v
  int32_t keys;          // tokens, or what the key mask admits
  int32_t skipped;       // of these, in front of the video grid
  int32_t count;         // positions: of these, those of the grid, or all
  int32_t first_chunk;   // among those of one head
  int32_t first_window;  // likewise
};

// The direction of the path at a cluster: from the centroid before to the one after, or the own at the path's ends.
struct ClusterAxis {
  int32_t before, after;  // clusters
  float centre;           // projection of the own centroid on after - before
  float scale;            // 1 / |after - before|^2; 0 where they are equal
};

// The position of a warp's that lies farthest from its centroid; -1 where there is none.
struct FarToken {
  float distance;  // squared
  int32_t position;
};

struct GroupArgs {
  GroupScratch scratch;
  Operand v;
  int32_t dtype;         // vcattn_dtype of v
  int32_t element_size;  // in bytes
  int32_t clusters;
  int32_t num_heads, num_sequences;
  int64_t seqlen;
  float* centroids;      // [slots, clusters, head_dim]
  int32_t* permutation;  // [batch, num_heads, seqlen]
  int32_t step;          // of Lloyd's algorithm, or kLastAssignment; seed_centroids has its own
};
inline constexpr int32_t kLastAssignment = -1;

// One (sequence, KV head).
struct Slot {
  GroupSequence sequence;
  int32_t head;
  int32_t index;
  int64_t base;  // of its positions in arrays over tokens

  // Clusters that can have a token.
  __device__ int used_clusters(const GroupArgs& g) const { return min(g.clusters, sequence.count); }
  // Token, within the sequence, and its row in v.
  __device__ int token(const GroupArgs& g, int position) const {
    const int key = sequence.skipped + position;
    return g.scratch.admitted == nullptr ? key : g.scratch.admitted[sequence.batch * g.seqlen + key];
  }
  __device__ const std::byte* row(const GroupArgs& g, int position) const {
    const int64_t offset = sequence.batch * g.v.batch_stride + head * g.v.head_stride +
                           (int64_t{sequence.first_token} + token(g, position)) * g.v.token_stride;
    return static_cast<const std::byte*>(g.v.data) + offset * g.element_size;
  }
};

__device__ inline Slot slot_at(const GroupArgs& g, int sequence, int head) {
  const GroupSequence s = g.scratch.sequences[sequence];
  return {s, head, sequence * g.num_heads + head, (int64_t{s.batch} * g.num_heads + head) * g.seqlen + s.first_token};
}

// The sequence of a chunk or window, by first_chunk or first_window.
__device__ inline int sequence_of(const GroupArgs& g, int item, int32_t GroupSequence::*first) {
  return last_starting_at<GroupSequence>(g.scratch.sequences, g.num_sequences, first, item);
}

// The positions offset, offset + stride, ... that an assignment sees, `chunk` of them to a CTA.
struct Sample {
  int stride, offset, count, chunk;
  __device__ int chunks() const { return (count + chunk - 1) / chunk; }
};

// Three has no factor in common with most widths of a video grid. So many tokens of a cluster remain that their mean is
// as good as that of all: the orders of 75,600 tokens in 64 clusters remove the same energy to within 0.3 %.
inline constexpr int kSampleStride = 3;
inline constexpr int kSampledPerCluster = 256;

__device__ inline Sample sample_of(const GroupArgs& g, int count, int step) {
  const bool sampled = step != kLastAssignment && g.clusters <= kPanelClusters &&
                       count >= int64_t{kSampleStride} * kSampledPerCluster * g.clusters;
  const int stride = sampled ? kSampleStride : 1, offset = sampled ? step % kSampleStride : 0;
  const int chunk = (g.scratch.chunk_tokens + stride - 1) / stride;
  return {stride, offset, (count - offset + stride - 1) / stride, (chunk + kGroupTile - 1) / kGroupTile * kGroupTile};
}

// A channel of a row of v, rounded to BF16 and 0 where it is not finite.
__device__ inline float value_at(const GroupArgs& g, const std::byte* row, int channel) {
  const std::byte* element = row + channel * g.v.channel_stride * g.element_size;
  float x;
  switch (g.dtype) {
    case VCATTN_BF16:
      x = reinterpret_cast<const Bf16*>(element)->value();
      break;
    case VCATTN_FP16:
      x = reinterpret_cast<const Fp16*>(element)->value();
      break;
    default:
      x = reinterpret_cast<const Fp32*>(element)->value();
  }
  x = __bfloat162float(__float2bfloat16_rn(x));
  return is_finite(x) ? x : 0.0f;
}

// Whether rows can be copied as they are: BF16 in whole chunks of 16 bytes.
__host__ __device__ inline bool copies_rows(const GroupArgs& g) {
  return g.dtype == VCATTN_BF16 && g.v.chunked != 0 && g.v.head_dim % (kChunkBytes / 2) == 0;
}

// kCount channels of a row from `first` on, as value_at gives them, and 0 behind the last; 2, 4 or 8, and `first` a
// multiple of it.
template <int kCount>
__device__ inline void values_at(const GroupArgs& g, const std::byte* row, int first, float (&x)[kCount]) {
  if (copies_rows(g)) {
    using Words = std::conditional_t<kCount == 8, uint4, std::conditional_t<kCount == 4, uint2, uint1>>;
    Words words{};
    if (first < g.v.head_dim) words = *reinterpret_cast<const Words*>(row + 2 * first);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      widen(Bf16{}, reinterpret_cast<const uint32_t*>(&words)[i], x + 2 * i);
    }
#pragma unroll
    for (float& value : x) value = is_finite(value) ? value : 0.0f;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = first + i < g.v.head_dim ? value_at(g, row, first + i) : 0.0f;
  }
}

// Unsigned integers in the order of the floats.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000;
}

// work.operator()<kConvert, kDim>(): whether rows must be converted, and the channels as stored.
template <typename Work>
cudaError_t with_group_instance(const GroupArgs& g, Work work) {
  if (copies_rows(g)) {
    return g.scratch.dim == 64 ? work.template operator()<false, 64>() : work.template operator()<false, 128>();
  }
  return g.scratch.dim == 64 ? work.template operator()<true, 64>() : work.template operator()<true, 128>();
}

// ---- the plan, on the host ------------------------------------------------------------------------------------------

inline bool uses_clusters(int32_t v_order) { return v_order != VCATTN_ORDER_SEQUENCE; }

// Whether the tokens of a video grid are grouped alone.
inline bool groups_grid(const Problem& problem) {
  return uses_clusters(problem.params->recipe.v_order) && problem.has_grid();
}
// Tokens of sequence `s` that are grouped, at most: what a key mask admits of them, the device knows.
inline int64_t grouped_tokens(const Problem& problem, int64_t s) {
  return groups_grid(problem) ? problem.grid_tokens().count : problem.keys_of(s).count;
}

inline constexpr int kBlocksPerWindow = 4;  // of 128 positions, that exchange with each other

inline int32_t chunks_of(int64_t tokens, int64_t chunk_tokens) {
  return static_cast<int32_t>(ceil_div(tokens, chunk_tokens));
}
// One more half window than the blocks fill: the second pass starts half a window earlier.
inline int32_t windows_of(int64_t tokens) {
  const int64_t blocks = ceil_div(tokens, kBlockN);
  return blocks == 0 ? 0 : static_cast<int32_t>(ceil_div(blocks + kBlocksPerWindow / 2, kBlocksPerWindow));
}

// ---- stages, in the order of their launches -------------------------------------------------------------------------

// Sequences, with what a key mask admits of each; and, behind the grid's places in `permutation`, the tokens outside
// it.
cudaError_t write_group_sequences(const Problem& problem, const GroupArgs& g, cudaStream_t stream);
// `permutation`: the tokens as they come.
cudaError_t write_sequence_order(const GroupArgs& g, cudaStream_t stream);
// The first centroids: tokens evenly spaced over the sequence where g.step is 0, else the caller's.
cudaError_t seed_centroids(const GroupArgs& g, cudaStream_t stream);
// Each position of the sample to its nearest centroid: counts, and before the last assignment far tokens. Sums up to 64
// clusters but in the last assignment; labels above and there; levels there where it is `along_path`.
cudaError_t assign_positions(const GroupArgs& g, bool along_path, cudaStream_t stream);
// Centroids from sums or, above 64 clusters, from members grouped by label.
cudaError_t update_centroids(const GroupArgs& g, cudaStream_t stream);
// Path, ranks and axes.
cudaError_t find_paths(const GroupArgs& g, cudaStream_t stream);
// Stable sort by label: offsets and members, of the clusters by number or along the path; or tokens to `permutation`.
enum class LabelOrder { kNumber, kPath, kTokens };
cudaError_t group_by_label(const GroupArgs& g, LabelOrder order, cudaStream_t stream);
// `permutation` from members: the positions of each cluster by level, stable.
cudaError_t sort_by_level(const GroupArgs& g, cudaStream_t stream);
// `permutation`: positions to tokens, with exchanges between blocks.
cudaError_t exchange_blocks(const GroupArgs& g, cudaStream_t stream);

}  // namespace vcattn::sm90a
