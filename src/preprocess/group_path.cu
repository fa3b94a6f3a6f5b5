// The path through the centroids, as src/vsmooth/chain.cpp finds it: from the first cluster on, the one farthest from
// those in the path is inserted where it lengthens the path least, by squared distances and with open ends. Clusters
// that are not in use follow behind. One CTA a slot. The insertions are one warp's, since each depends on the last, and
// the path lies in its registers: place 32e + lane in entry e.
#include "preprocess/group_tile.cuh"

namespace vcattn::sm90a {
namespace {

constexpr int kThreads = 256;
constexpr float kOnPath = -1.0f;

template <int kDim>
struct Shared {
  // Squared distances between up to kPanelClusters centroids, from products on the tensor cores.
  alignas(256) std::byte panel[kPanelClusters * kDim * 2];
  float distances[kPanelClusters][kPanelClusters + 1];
  float row[kMaxClusters];  // where there are more: squared distances from the next cluster
  int32_t path[kMaxClusters];
  int32_t next, length;
};

// The index at the least key of the warp, the lower one at a tie.
__device__ __forceinline__ int argmin(uint32_t key, int index) {
  const uint32_t least = __reduce_min_sync(kFullWarp, key);
  return __reduce_min_sync(kFullWarp, key == least ? index : INT32_MAX);
}

// `x` one place on: entries of place p - 1 at place p. `first` goes to place 0.
template <typename T, int kEntries>
__device__ __forceinline__ void shift(const T (&x)[kEntries], T first, T (&shifted)[kEntries]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    shifted[e] = __shfl_up_sync(kFullWarp, x[e], 1);
    const T carried = e == 0 ? first : __shfl_sync(kFullWarp, x[e == 0 ? 0 : e - 1], 31);
    if (lane == 0) shifted[e] = carried;
  }
}

// A warp's path. kEntries * 32 is at least the number of clusters.
template <int kEntries>
struct Path {
  int length = 0;
  int32_t clusters[kEntries];  // at place 32e + lane
  float edges[kEntries];       // squared length of the step to that place from the one before
  float nearest[kEntries];     // of cluster 32e + lane: squared distance from the path; negative on it and out of use

  __device__ static int index(int e) { return 32 * e + static_cast<int>(threadIdx.x) % 32; }

  __device__ void start(const float* norms, int num_clusters) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      clusters[e] = 0;
      edges[e] = 0.0f;
      nearest[e] = index(e) < num_clusters && is_finite(norms[index(e)]) ? INFINITY : kOnPath;
    }
  }

  // The cluster farthest from the path, or -1.
  __device__ int farthest() const {
    uint32_t least = UINT32_MAX;
    int at = INT32_MAX;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const uint32_t key = nearest[e] < 0.0f ? UINT32_MAX : ~ordered(nearest[e]);
      if (key < least) {
        least = key;
        at = index(e);
      }
    }
    const int found = argmin(least, at);
    return found == INT32_MAX ? -1 : found;
  }

  // Inserts `cluster` where the path grows least, at squared distances `row` from all clusters.
  __device__ void insert(int cluster, const float* row) {
    float after[kEntries], before[kEntries];  // from what would follow the cluster at a place, and precede it
#pragma unroll
    for (int e = 0; e < kEntries; ++e) after[e] = index(e) < length ? row[clusters[e]] : 0.0f;
    shift(after, 0.0f, before);
    uint32_t least = UINT32_MAX;
    int place = INT32_MAX;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const float passed = index(e) > 0 && index(e) < length ? edges[e] : 0.0f;
      const uint32_t key = index(e) <= length ? ordered(before[e] + after[e] - passed) : UINT32_MAX;
      if (key < least) {
        least = key;
        place = index(e);
      }
    }
    place = argmin(least, place);
    int32_t moved_clusters[kEntries];
    float moved_edges[kEntries];
    shift(clusters, 0, moved_clusters);
    shift(edges, 0.0f, moved_edges);
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      // The steps to the cluster and from it on are both from what preceded these places.
      if (index(e) >= place) {
        clusters[e] = index(e) == place ? cluster : moved_clusters[e];
        edges[e] = index(e) <= place + 1 ? before[e] : moved_edges[e];
      }
      if (nearest[e] >= 0.0f) nearest[e] = index(e) == cluster ? kOnPath : fminf(nearest[e], row[index(e)]);
    }
    ++length;
  }
};

template <int kDim>
__device__ void fill_distances(const Bf16* centroids, const float* norms, Shared<kDim>& s) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  constexpr int kRowChunks = Bf16Tile<kDim>::kRowChunks;
  for (int i = thread; i < kPanelClusters * kRowChunks; i += kThreads) {
    *reinterpret_cast<uint4*>(s.panel + Bf16Tile<kDim>::chunk(i / kRowChunks, i % kRowChunks)) =
        reinterpret_cast<const uint4*>(centroids)[i];
  }
  __syncthreads();
  if (warp < kPanelClusters / 16) {
    float products[kPanelClusters / 8][4];
    multiply_by_panel<kDim>(s.panel, 16 * warp, s.panel, products);
#pragma unroll
    for (int n = 0; n < kPanelClusters / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * warp + lane / 4 + i / 2 * 8, column = 8 * n + lane % 4 * 2 + i % 2;
        s.distances[row][column] = fmaxf(norms[row] + norms[column] - 2.0f * products[n][i], 0.0f);
      }
    }
  }
  __syncthreads();
}

// Squared distances from `cluster` to all; four lanes share one.
template <int kDim>
__device__ void fill_row(const Bf16* centroids, int cluster, int clusters, float* row) {
  constexpr int kLanes = 4, kChunks = Bf16Tile<kDim>::kRowChunks;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, first = static_cast<int>(threadIdx.x) / kLanes;
  const auto* chunks = reinterpret_cast<const uint4*>(centroids);
#pragma unroll 2
  for (int base = 0; base < clusters; base += kThreads / kLanes) {
    const int j = min(base + first, clusters - 1);  // the last one more than once
    float sum = 0.0f;
#pragma unroll
    for (int c = lane; c < kChunks; c += kLanes) {
      const uint4 a = chunks[cluster * kChunks + c], b = chunks[j * kChunks + c];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float x[2], y[2];
        widen(Bf16{}, reinterpret_cast<const uint32_t*>(&a)[w], x);
        widen(Bf16{}, reinterpret_cast<const uint32_t*>(&b)[w], y);
        sum = fmaf(x[0] - y[0], x[0] - y[0], fmaf(x[1] - y[1], x[1] - y[1], sum));
      }
    }
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) row[j] = sum;
  }
}

// Fills s.path and s.length, by a matrix of distances up to kPanelClusters; above, the whole block computes a row of it
// for each step.
template <int kDim, int kEntries>
__device__ void walk(const Bf16* centroids, const float* norms, int clusters, Shared<kDim>& s) {
  constexpr bool kMatrix = kEntries * 32 <= kPanelClusters;
  const bool leads = threadIdx.x < 32;
  Path<kEntries> path;
  if (kMatrix) {
    fill_distances<kDim>(centroids, norms, s);
    if (!leads) return;
  }
  if (leads) path.start(norms, clusters);
  while (true) {
    int cluster = leads ? path.farthest() : 0;
    const float* row = s.row;
    if constexpr (kMatrix) {
      if (cluster < 0) break;
      row = s.distances[cluster];
    } else {
      if (threadIdx.x == 0) s.next = cluster;
      __syncthreads();
      cluster = s.next;
      if (cluster < 0) break;
      fill_row<kDim>(centroids, cluster, clusters, s.row);
      __syncthreads();
    }
    if (leads) path.insert(cluster, row);
  }
  if (!leads) return;
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    if (path.index(e) < path.length) s.path[path.index(e)] = path.clusters[e];
  }
  const int lane = static_cast<int>(threadIdx.x);
  for (int base = 0, place = path.length; base < clusters; base += 32) {
    const bool unused = base + lane < clusters && !is_finite(norms[base + lane]);
    const uint32_t lanes = __ballot_sync(kFullWarp, unused);
    if (unused) s.path[place + __popc(lanes & ((1U << lane) - 1))] = base + lane;
    place += __popc(lanes);
  }
  if (lane == 0) s.length = path.length;
}

// A warp takes a place of the path at a time.
template <int kDim>
__device__ void write_axes(const GroupArgs& g, const Slot& slot, const Bf16* centroids, const int32_t* path,
                           int length) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = int64_t{slot.index} * g.clusters;
  for (int place = static_cast<int>(threadIdx.x) / 32; place < g.clusters; place += kThreads / 32) {
    const int cluster = path[place];
    const bool on_path = place < length;
    const int before = on_path ? path[max(place - 1, 0)] : cluster;
    const int after = on_path ? path[min(place + 1, length - 1)] : cluster;
    float centre = 0.0f, square = 0.0f;
    for (int d = lane; d < kDim; d += 32) {
      const float direction = centroids[after * kDim + d].value() - centroids[before * kDim + d].value();
      centre = fmaf(centroids[cluster * kDim + d].value(), direction, centre);
      square = fmaf(direction, direction, square);
    }
    for (int step = 16; step > 0; step /= 2) {
      centre += __shfl_xor_sync(kFullWarp, centre, step);
      square += __shfl_xor_sync(kFullWarp, square, step);
    }
    if (lane == 0) {
      g.scratch.ranks[first + cluster] = place;
      g.scratch.axes[first + cluster] = {before, after, centre, square > 0.0f ? 1.0f / square : 0.0f};
    }
  }
}

template <int kDim, int kEntries>
__global__ void __launch_bounds__(kThreads, 1) find_path(const __grid_constant__ GroupArgs g) {
  extern __shared__ __align__(256) std::byte shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kDim>*>(shared_bytes);
  const int index = static_cast<int>(blockIdx.x);
  const Slot slot = slot_at(g, index / g.num_heads, index % g.num_heads);
  const int64_t first_row = int64_t{slot.index} * g.scratch.panels * kPanelClusters;
  const auto* centroids = reinterpret_cast<const Bf16*>(g.scratch.panel) + first_row * kDim;
  walk<kDim, kEntries>(centroids, g.scratch.norms + first_row, g.clusters, s);
  __syncthreads();
  write_axes<kDim>(g, slot, centroids, s.path, s.length);
}

}  // namespace

cudaError_t find_paths(const GroupArgs& g, cudaStream_t stream) {
  constexpr int kFew = kPanelClusters / 32, kMore = 8, kMost = kMaxClusters / 32;
  const int64_t slots = int64_t{g.num_sequences} * g.num_heads;
  const auto run = [&]<int kDim>() {
    void (*kernel)(GroupArgs) = g.clusters <= 32 * kFew    ? find_path<kDim, kFew>
                                : g.clusters <= 32 * kMore ? find_path<kDim, kMore>
                                                           : find_path<kDim, kMost>;
    return launch(kernel, g, slots, kThreads, static_cast<int>(sizeof(Shared<kDim>)), stream);
  };
  return g.scratch.dim == 64 ? run.template operator()<64>() : run.template operator()<128>();
}

}  // namespace vcattn::sm90a
