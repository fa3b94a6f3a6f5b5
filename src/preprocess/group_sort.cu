// Stable counting sorts of positions: of a slot by label, of a cluster by level. Each warp of a CTA takes a contiguous
// part of the input and has counters of its own, so that the order does not depend on the race between warps.
#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {
namespace {

// The warps' counters: first of the keys in a warp's part, then where its next one goes.
template <int kKeys>
struct Counters {
  int32_t of[kGroupWarps][kKeys];
};

struct Part {
  int begin, end;  // of the calling warp
};

__device__ Part part_of_warp(int begin, int end) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = kGroupWarps;
  const int size = ((end - begin + warps - 1) / warps + 31) / 32 * 32;
  return {min(begin + warp * size, end), min(begin + (warp + 1) * size, end)};
}

// Keys that a lane loads before it uses the first: the loads wait for each other otherwise.
constexpr int kBatch = 4;

// visit(i, key) of the warp's part in ascending runs of 32, lane by lane; keys are -1 behind the end.
template <typename KeyOf, typename Visit>
__device__ void for_each_run(Part part, KeyOf key_of, Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = part.begin; base < part.end; base += 32 * kBatch) {
    int keys[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = base + 32 * b + lane;
      keys[b] = i < part.end ? key_of(i) : -1;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) visit(base + 32 * b + lane, keys[b]);
  }
}

template <int kKeys, typename KeyOf>
__device__ void count_keys(Counters<kKeys>& counters, Part part, KeyOf key_of) {
  int32_t* counts = counters.of[threadIdx.x / 32];
  for_each_run(part, key_of, [&](int, int key) {
    if (key >= 0) atomicAdd(&counts[key], 1);
  });
}

template <int kKeys>
__device__ void clear(Counters<kKeys>& counters, int keys) {
  for (int k = static_cast<int>(threadIdx.x); k < kGroupWarps * keys; k += kGroupThreads) {
    counters.of[k / keys][k % keys] = 0;
  }
}

// Counts become places, the first warp's from `first` on.
template <int kKeys>
__device__ void place_warps(Counters<kKeys>& counters, int key, int first) {
  for (int w = 0; w < kGroupWarps; ++w) {
    const int count = counters.of[w][key];
    counters.of[w][key] = first;
    first += count;
  }
}

// write(place, i) for the warp's part.
template <int kKeys, typename KeyOf, typename Write>
__device__ void write_by_key(Counters<kKeys>& counters, Part part, KeyOf key_of, Write write) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int32_t* places = counters.of[threadIdx.x / 32];
  for_each_run(part, key_of, [&](int i, int key) {
    const uint32_t same = __match_any_sync(kFullWarp, key);
    const int before = __popc(same & ((1U << lane) - 1));
    const int place = key < 0 ? 0 : places[key];
    __syncwarp();
    if (key >= 0 && before == 0) places[key] = place + __popc(same);
    __syncwarp();
    if (key >= 0) write(place + before, i);
  });
}

// In place; the first warp calls it.
__device__ void exclusive_prefix_sum(int32_t* values, int count) {
  const int lane = static_cast<int>(threadIdx.x);
  int total = 0;
  for (int base = 0; base < count; base += 32) {
    const int value = base + lane < count ? values[base + lane] : 0;
    int through = value;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, step);
      if (lane >= step) through += other;
    }
    if (base + lane < count) values[base + lane] = total + through - value;
    total += __shfl_sync(kFullWarp, through, 31);
  }
}

struct LabelArgs {
  GroupArgs g;
  const int32_t* ranks;  // [slots, clusters]; null: by label
  int32_t* out;          // over tokens
  int32_t tokens;        // 1: tokens are written; 0: positions
};

// A CTA takes a chunk of the assignment, whose counts say where the others' positions go.
template <int kKeys>
__global__ void __launch_bounds__(kGroupThreads) sort_by_label(const __grid_constant__ LabelArgs a) {
  __shared__ Counters<kKeys> counters;
  __shared__ int32_t starts[kKeys];  // of the clusters, by place in the order
  const GroupArgs& g = a.g;
  const int thread = static_cast<int>(threadIdx.x), clusters = g.clusters;
  const int head = static_cast<int>(blockIdx.x) % g.num_heads, chunk = static_cast<int>(blockIdx.x) / g.num_heads;
  const Slot slot = slot_at(g, sequence_of(g, chunk, &GroupSequence::first_chunk), head);
  const int own = chunk - slot.sequence.first_chunk;
  const int begin = own * g.scratch.chunk_tokens;
  const int end = min(begin + g.scratch.chunk_tokens, slot.sequence.count);
  if (begin >= end) return;

  const int64_t first = int64_t{slot.index} * clusters;
  const auto rank = [&](int cluster) { return a.ranks == nullptr ? cluster : a.ranks[first + cluster]; };
  const auto label = [&](int position) { return int{g.scratch.labels[slot.base + position]}; };
  const auto count_in = [&](int other, int cluster) {
    const int64_t part = int64_t{slot.sequence.first_chunk + other} * g.num_heads + head;
    return g.scratch.counts[part * clusters + cluster];
  };
  const int chunks = sample_of(g, slot.sequence.count, kLastAssignment).chunks();
  for (int j = thread; j < clusters; j += kGroupThreads) {
    int total = 0;
    for (int c = 0; c < chunks; ++c) total += count_in(c, j);
    starts[rank(j)] = total;
  }
  clear(counters, clusters);
  __syncthreads();
  const Part part = part_of_warp(begin, end);
  if (thread < 32) exclusive_prefix_sum(starts, clusters);
  count_keys(counters, part, label);
  __syncthreads();
  for (int j = thread; j < clusters; j += kGroupThreads) {
    int place = starts[rank(j)];
    for (int c = 0; c < own; ++c) place += count_in(c, j);
    place_warps(counters, j, place);
    if (own == 0) g.scratch.offsets[int64_t{slot.index} * (clusters + 1) + j] = starts[j];
  }
  if (own == 0 && thread == 0) g.scratch.offsets[int64_t{slot.index} * (clusters + 1) + clusters] = slot.sequence.count;
  __syncthreads();
  int32_t* out = a.out + slot.base;
  write_by_key(counters, part, label,
               [&](int place, int position) { out[place] = a.tokens != 0 ? slot.token(g, position) : position; });
}

// A CTA takes the cluster at one place of the path.
__global__ void __launch_bounds__(kGroupThreads) sort_clusters(const __grid_constant__ GroupArgs g) {
  __shared__ Counters<kLevels> counters;
  __shared__ int32_t starts[kLevels];
  const int thread = static_cast<int>(threadIdx.x);
  const int index = static_cast<int>(blockIdx.x) / g.clusters, place = static_cast<int>(blockIdx.x) % g.clusters;
  const Slot slot = slot_at(g, index / g.num_heads, index % g.num_heads);
  if (slot.sequence.count == 0) return;
  const int32_t* offsets = g.scratch.offsets + int64_t{slot.index} * (g.clusters + 1) + place;
  const int begin = offsets[0], end = offsets[1];
  if (begin == end) return;
  const int32_t* members = g.scratch.members + slot.base;
  const auto level = [&](int i) { return int{g.scratch.levels[slot.base + members[i]]}; };
  clear(counters, kLevels);
  __syncthreads();
  const Part part = part_of_warp(begin, end);
  count_keys(counters, part, level);
  __syncthreads();
  static_assert(kGroupThreads == kLevels, "a thread takes a level");
  int total = 0;
  for (const auto& counts : counters.of) total += counts[thread];
  starts[thread] = total;
  __syncthreads();
  if (thread < 32) exclusive_prefix_sum(starts, kLevels);
  __syncthreads();
  place_warps(counters, thread, begin + starts[thread]);
  __syncthreads();
  int32_t* out = g.permutation + slot.base;
  write_by_key(counters, part, level, [&](int to, int i) { out[to] = members[i]; });
}

}  // namespace

cudaError_t group_by_label(const GroupArgs& g, LabelOrder order, cudaStream_t stream) {
  const LabelArgs args = {g, order == LabelOrder::kPath ? g.scratch.ranks : nullptr,
                          order == LabelOrder::kTokens ? g.permutation : g.scratch.members,
                          order == LabelOrder::kTokens ? 1 : 0};
  return launch(g.scratch.panels == 1 ? sort_by_label<kPanelClusters> : sort_by_label<kMaxClusters>, args,
                int64_t{g.scratch.num_chunks} * g.num_heads, kGroupThreads, 0, stream);
}

cudaError_t sort_by_level(const GroupArgs& g, cudaStream_t stream) {
  return launch(sort_clusters, g, int64_t{g.num_sequences} * g.num_heads * g.clusters, kGroupThreads, 0, stream);
}

}  // namespace vcattn::sm90a
