// Centroids: the first ones, and their updates. A warp holds a centroid, kDim / 32 channels a lane.
#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {
namespace {

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_of_block() { return static_cast<int>(threadIdx.x) / 32; }

template <int kDim>
struct Centroid {
  static constexpr int kChannels = kDim / 32;
  float x[kChannels];

  __device__ static int channel(int i) { return lane_of_warp() * kChannels + i; }
};

__device__ float* centroid_row(const GroupArgs& g, const Slot& slot, int cluster) {
  return g.centroids + (int64_t{slot.index} * g.clusters + cluster) * g.v.head_dim;
}

// Writes the operands of the next assignment. A centroid that is not finite attracts nothing.
template <int kDim>
__device__ void store_operands(const GroupArgs& g, const Slot& slot, int cluster, const Centroid<kDim>& c, bool used) {
  const int64_t row = int64_t{slot.index} * g.scratch.panels * kPanelClusters + cluster;
  __nv_bfloat16 rounded[Centroid<kDim>::kChannels];
  float norm = 0.0f;
#pragma unroll
  for (int i = 0; i < Centroid<kDim>::kChannels; ++i) {
    rounded[i] = __float2bfloat16_rn(c.x[i]);
    norm = fmaf(__bfloat162float(rounded[i]), __bfloat162float(rounded[i]), norm);
  }
  for (int step = 16; step > 0; step /= 2) norm += __shfl_xor_sync(kFullWarp, norm, step);
  used = used && is_finite(norm);
#pragma unroll
  for (int i = 0; i < Centroid<kDim>::kChannels; ++i) {
    g.scratch.panel[row * kDim + Centroid<kDim>::channel(i)] = used ? __bfloat16_as_ushort(rounded[i]) : uint16_t{0};
  }
  if (lane_of_warp() == 0) g.scratch.norms[row] = used ? norm : INFINITY;
}

template <int kDim>
__device__ void store_centroid(const GroupArgs& g, const Slot& slot, int cluster, const Centroid<kDim>& c) {
  float* out = centroid_row(g, slot, cluster);
#pragma unroll
  for (int i = 0; i < Centroid<kDim>::kChannels; ++i) {
    if (Centroid<kDim>::channel(i) < g.v.head_dim) out[Centroid<kDim>::channel(i)] = c.x[i];
  }
}

template <int kDim>
__device__ Centroid<kDim> load_token(const GroupArgs& g, const Slot& slot, int position) {
  Centroid<kDim> c;
  values_at(g, slot.row(g, position), Centroid<kDim>::channel(0), c.x);
  return c;
}

template <int kDim>
__global__ void __launch_bounds__(kGroupThreads) seed(const __grid_constant__ GroupArgs g) {
  const int rows = g.scratch.panels * kPanelClusters, blocks = rows / kGroupWarps;
  const int index = static_cast<int>(blockIdx.x) / blocks;
  const int cluster = static_cast<int>(blockIdx.x) % blocks * kGroupWarps + warp_of_block();
  const Slot slot = slot_at(g, index / g.num_heads, index % g.num_heads);
  const int used = slot.used_clusters(g);
  const bool warm = g.step != 0;
  Centroid<kDim> c{};
  if (cluster < used && warm) {
    const float* kept = centroid_row(g, slot, cluster);
#pragma unroll
    for (int i = 0; i < Centroid<kDim>::kChannels; ++i) {
      if (Centroid<kDim>::channel(i) < g.v.head_dim) c.x[i] = kept[Centroid<kDim>::channel(i)];
    }
  } else if (cluster < used) {
    c = load_token<kDim>(g, slot,
                         used == 1 ? 0 : static_cast<int>(int64_t{cluster} * (slot.sequence.count - 1) / (used - 1)));
  }
  store_operands(g, slot, cluster, c, cluster < used);
  if (cluster < g.clusters && !(cluster < used && warm)) store_centroid(g, slot, cluster, c);
}

// The position that lies `rank`-th farthest from its centroid, of one that each warp of the assignment found; -1 where
// there are fewer.
__device__ int far_position(const GroupArgs& g, const Slot& slot, int chunks, int rank) {
  uint64_t last = ~uint64_t{0};
  for (int found = 0; found <= rank; ++found) {
    uint64_t best = 0;  // distance, then the lower position
    for (int i = lane_of_warp(); i < chunks * kGroupWarps; i += 32) {
      const int64_t part = int64_t{slot.sequence.first_chunk + i / kGroupWarps} * g.num_heads + slot.head;
      const FarToken far = g.scratch.far_tokens[part * kGroupWarps + i % kGroupWarps];
      if (!(far.distance > 0.0f)) continue;
      const uint64_t key = uint64_t{__float_as_uint(far.distance)} << 32 | ~static_cast<uint32_t>(far.position);
      if (key < last) best = max(best, key);
    }
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kFullWarp, best, step));
    if (best == 0) return -1;
    last = best;
  }
  return static_cast<int>(~static_cast<uint32_t>(last));
}

// The centroid of a cluster without tokens: a token far from its own centroid, or the one it has. size_of(j) is the
// number of tokens of cluster j, asked by single lanes.
template <int kDim, typename SizeOf>
__device__ void refill(const GroupArgs& g, const Slot& slot, int cluster, int chunks, SizeOf size_of) {
  int empty_before = 0;
  for (int j = lane_of_warp(); j < cluster; j += 32) empty_before += size_of(j) == 0;
  empty_before = __reduce_add_sync(kFullWarp, empty_before);
  const int position = far_position(g, slot, chunks, empty_before);
  if (position < 0) return;
  const Centroid<kDim> c = load_token<kDim>(g, slot, position);
  store_operands(g, slot, cluster, c, true);
  store_centroid(g, slot, cluster, c);
}

// Means that left the range of FP32 leave the centroid where it is.
template <int kDim>
__device__ void move_to_mean(const GroupArgs& g, const Slot& slot, int cluster, Centroid<kDim> sum, int size) {
  bool finite = true;
#pragma unroll
  for (float& x : sum.x) {
    x /= static_cast<float>(size);
    finite = finite && is_finite(x);
  }
  if (!__all_sync(kFullWarp, finite)) return;
  store_operands(g, slot, cluster, sum, true);
  store_centroid(g, slot, cluster, sum);
}

template <int kDim>
__global__ void __launch_bounds__(kGroupThreads) update_from_sums(const __grid_constant__ GroupArgs g) {
  const int blocks = (g.clusters + kGroupWarps - 1) / kGroupWarps;
  const int index = static_cast<int>(blockIdx.x) / blocks;
  const int cluster = static_cast<int>(blockIdx.x) % blocks * kGroupWarps + warp_of_block();
  const Slot slot = slot_at(g, index / g.num_heads, index % g.num_heads);
  if (cluster >= slot.used_clusters(g)) return;
  const int chunks = sample_of(g, slot.sequence.count, g.step).chunks();
  const auto part = [&](int chunk) { return int64_t{slot.sequence.first_chunk + chunk} * g.num_heads + slot.head; };
  int size = 0;
  for (int c = lane_of_warp(); c < chunks; c += 32) size += g.scratch.counts[part(c) * g.clusters + cluster];
  size = __reduce_add_sync(kFullWarp, size);
  if (size == 0) {
    return refill<kDim>(g, slot, cluster, chunks, [&](int j) {
      int sum = 0;
      for (int c = 0; c < chunks; ++c) sum += g.scratch.counts[part(c) * g.clusters + j];
      return sum;
    });
  }
  Centroid<kDim> sum{};
#pragma unroll 4
  for (int c = 0; c < chunks; ++c) {
    const float* row = g.scratch.sums + (part(c) * kPanelClusters + cluster) * kDim;
#pragma unroll
    for (int i = 0; i < Centroid<kDim>::kChannels; ++i) sum.x[i] += row[Centroid<kDim>::channel(i)];
  }
  move_to_mean(g, slot, cluster, sum, size);
}

// A CTA holds a centroid; its warps take members in turn.
template <int kDim>
__global__ void __launch_bounds__(kGroupThreads) update_from_members(const __grid_constant__ GroupArgs g) {
  __shared__ Centroid<kDim> parts[kGroupWarps][32];
  const int index = static_cast<int>(blockIdx.x) / g.clusters, cluster = static_cast<int>(blockIdx.x) % g.clusters;
  const Slot slot = slot_at(g, index / g.num_heads, index % g.num_heads);
  if (cluster >= slot.used_clusters(g)) return;
  const int32_t* offsets = g.scratch.offsets + int64_t{slot.index} * (g.clusters + 1);
  const int begin = offsets[cluster], end = offsets[cluster + 1], warp = warp_of_block();
  Centroid<kDim> sum{};
#pragma unroll 4
  for (int m = begin + warp; m < end; m += kGroupWarps) {
    const Centroid<kDim> token = load_token<kDim>(g, slot, g.scratch.members[slot.base + m]);
#pragma unroll
    for (int i = 0; i < Centroid<kDim>::kChannels; ++i) sum.x[i] += token.x[i];
  }
  parts[warp][lane_of_warp()] = sum;
  __syncthreads();
  if (warp != 0) return;
  if (begin == end) {
    const int chunks = sample_of(g, slot.sequence.count, g.step).chunks();
    return refill<kDim>(g, slot, cluster, chunks, [&](int j) { return offsets[j + 1] - offsets[j]; });
  }
  for (int w = 1; w < kGroupWarps; ++w) {
#pragma unroll
    for (int i = 0; i < Centroid<kDim>::kChannels; ++i) sum.x[i] += parts[w][lane_of_warp()].x[i];
  }
  move_to_mean(g, slot, cluster, sum, end - begin);
}

int64_t slots_of(const GroupArgs& g) { return int64_t{g.num_sequences} * g.num_heads; }

}  // namespace

cudaError_t seed_centroids(const GroupArgs& g, cudaStream_t stream) {
  const int64_t blocks = slots_of(g) * (g.scratch.panels * kPanelClusters / kGroupWarps);
  return launch(g.scratch.dim == 64 ? seed<64> : seed<128>, g, blocks, kGroupThreads, 0, stream);
}

cudaError_t update_centroids(const GroupArgs& g, cudaStream_t stream) {
  const bool wide = g.scratch.dim != 64;
  if (g.scratch.panels > 1) {
    return launch(wide ? update_from_members<128> : update_from_members<64>, g, slots_of(g) * g.clusters, kGroupThreads,
                  0, stream);
  }
  return launch(wide ? update_from_sums<128> : update_from_sums<64>, g, slots_of(g) * ceil_div(g.clusters, kGroupWarps),
                kGroupThreads, 0, stream);
}

}  // namespace vcattn::sm90a
