// Positions to their nearest centroids, on the tensor cores. A CTA of 8 warps takes a chunk of one slot's sample in
// tiles of 128 positions; a warp scores 16 of them against 64 centroids at a time. Scores are |c|^2 - 2 x.c.
//
// Sums of the clusters are a second product, of the tile's transpose with the one-hot matrix of its labels: exact
// products, added in FP32 in an order that depends on the chunk alone. A warp takes kDim / 8 channels of all clusters.
#include "preprocess/group_tile.cuh"

namespace vcattn::sm90a {
namespace {

enum class Mode {
  kSums,   // up to kPanelClusters, before the last assignment
  kLast,   // up to kPanelClusters, the last assignment
  kPanels  // above
};

constexpr int kStages = 2;
constexpr int kSumTiles = kPanelClusters / 16;  // of clusters

struct AssignArgs {
  GroupArgs g;
  int32_t along_path;  // 1: levels too
};

template <int kDim>
struct Shared {
  alignas(256) std::byte rows[kStages][kGroupTile * kDim * 2];
  alignas(256) std::byte panel[kPanelClusters * kDim * 2];
  float norms[kPanelClusters];
  alignas(16) uint16_t sets[kGroupTile];  // set_number of the labels
  int32_t counts[kMaxClusters];
};

// A lane's columns of the products are numbered in the order of their clusters.
constexpr int kColumns = kPanelClusters / 4;
__device__ __forceinline__ int cluster_of(int panel_column) {
  const int column = panel_column % kColumns;
  return panel_column / kColumns * kPanelClusters + column / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + column % 2;
}

struct Nearest {
  float score = INFINITY;
  int label = 0;  // stays where nothing is nearer than infinity
};

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

template <int kDim>
__device__ void load_panel(const GroupArgs& g, const Slot& slot, int panel, Shared<kDim>& s) {
  const int64_t first = (int64_t{slot.index} * g.scratch.panels + panel) * kPanelClusters;
  const auto* source = reinterpret_cast<const uint4*>(g.scratch.panel + first * kDim);
  constexpr int kRowChunks = Bf16Tile<kDim>::kRowChunks;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kPanelClusters * kRowChunks; i += kGroupThreads) {
    *reinterpret_cast<uint4*>(s.panel + Bf16Tile<kDim>::chunk(i / kRowChunks, i % kRowChunks)) = source[i];
  }
  if (thread < kPanelClusters) s.norms[thread] = g.scratch.norms[first + thread];
}

// Offers the centroids of a panel to a warp's 16 positions; `nearest` is that of this lane's columns, and its label the
// number of one.
template <bool kConvert, int kDim>
__device__ __forceinline__ void score(std::byte* rows, int row, int panel, const Shared<kDim>& s,
                                      float (&products)[kPanelClusters / 8][4], Nearest (&nearest)[2]) {
  for (bool cleaned = kConvert;; cleaned = true) {
    multiply_by_panel<kDim>(rows, row, s.panel, products);
    // A row that is not finite has no finite product.
    if (cleaned || __all_sync(kFullWarp, is_finite(products[0][0]) && is_finite(products[0][2]))) break;
    clean_rows<kDim>(rows, row);
  }
  const int lane_column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kPanelClusters / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float score = fmaf(-2.0f, products[n][i], s.norms[8 * n + lane_column + i % 2]);
      if (score < nearest[i / 2].score) nearest[i / 2] = {score, panel * kColumns + 2 * n + i % 2};
    }
  }
}

// The nearest of all lanes' columns, by its cluster; the lower one at a tie.
__device__ __forceinline__ Nearest nearest_of_quad(Nearest nearest) {
  nearest.label = nearest.score < INFINITY ? cluster_of(nearest.label) : 0;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float score = __shfl_xor_sync(kFullWarp, nearest.score, step);
    const int label = __shfl_xor_sync(kFullWarp, nearest.label, step);
    if (score < nearest.score || (score == nearest.score && label < nearest.label)) nearest = {score, label};
  }
  return nearest;
}

// Squared lengths of a lane's rows, `row` + lane / 4 and 8 further.
template <int kDim>
__device__ void square_rows(const std::byte* rows, int row, float (&squares)[2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t chunk = chunk_address<kDim>(rows, row + lane % 16, lane / 16);
  squares[0] = squares[1] = 0.0f;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t words[4];
    load_matrices(words, chunk ^ (32 * k));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[2];
      widen(Bf16{}, words[i], x);
      squares[i % 2] = fmaf(x[0], x[0], fmaf(x[1], x[1], squares[i % 2]));
    }
  }
  for (float& square : squares) square = quad_sum(square);
}

// The quantised place of a token between the centroids before and after its own. t = (x - c).(after - before) /
// |after - before|^2 is of the order of 1, but may be far from it: x / (|x| + kKnee) gives 20 levels or more to most
// tokens wherever their spread is between 0.01 and 10. (With 32 levels in all the energy is still the same.)
__device__ __forceinline__ int level_of(float projection, const ClusterAxis& axis) {
  constexpr float kKnee = 0.1f;
  const float t = (projection - axis.centre) * axis.scale;
  return kLevels / 2 + __float2int_rd((kLevels / 2 - 1) * (t / (fabsf(t) + kKnee)));
}

// The product of a lane's row (the first where `half` is 0) with `cluster`, if it is among the lane's columns, else 0.
__device__ __forceinline__ float product_with(const float (&products)[kPanelClusters / 8][4], int half, int cluster) {
  const int n = cluster / 8;
  float x[kPanelClusters / 8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = cluster % 2 != 0 ? products[i][2 * half + 1] : products[i][2 * half];
#pragma unroll
  for (int width = 4; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = (n & width) != 0 ? x[i + width] : x[i];
  }
  return cluster % 8 / 2 == static_cast<int>(threadIdx.x) % 4 ? x[0] : 0.0f;
}

// Projection of a row on the axis of its cluster, from the products with all centroids.
__device__ __forceinline__ float project(const float (&products)[kPanelClusters / 8][4], int half,
                                         const ClusterAxis& axis) {
  return quad_sum(product_with(products, half, axis.after) - product_with(products, half, axis.before));
}

// sums [cluster, channel]: tiles of 16 clusters x 8 channels, laid out as d of multiply_add.
template <int kDim>
__device__ __forceinline__ void add_tile(const std::byte* rows, const uint16_t* sets,
                                         float (&sums)[kSumTiles][kDim / 64][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  // With 64 channels a warp needs the first two matrices only.
  const uint32_t chunk = chunk_address<kDim>(rows, lane % 16, warp * (kDim / 64) + lane / 16 * (kDim / 128));
  const auto* set_pairs = reinterpret_cast<const uint32_t*>(sets);
#pragma unroll
  for (int k = 0; k < kGroupTile / 16; ++k) {
    const uint32_t low = set_pairs[8 * k + lane % 4], high = set_pairs[8 * k + 4 + lane % 4];
    uint32_t b[4];
    load_transposed(b, chunk + 16 * k * Bf16Tile<kDim>::kRowBytes);
#pragma unroll
    for (int m = 0; m < kSumTiles; ++m) {
      const uint32_t set = set_number_twice(16 * m + lane / 4), next = set_number_twice(16 * m + 8 + lane / 4);
      const uint32_t a[4] = {one_hot(low, set), one_hot(low, next), one_hot(high, set), one_hot(high, next)};
#pragma unroll
      for (int n = 0; n < kDim / 64; ++n) multiply_add(sums[m][n], a, b[2 * n], b[2 * n + 1]);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void store_sums(const float (&sums)[kSumTiles][kDim / 64][4], float* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int m = 0; m < kSumTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kDim / 64; ++n) {
      float* at = out + (16 * m + lane / 4) * kDim + warp * (kDim / 8) + 8 * n + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = {sums[m][n][0], sums[m][n][1]};
      *reinterpret_cast<float2*>(at + 8 * kDim) = {sums[m][n][2], sums[m][n][3]};
    }
  }
}

template <bool kConvert, int kDim, Mode kMode>
__global__ void __launch_bounds__(kGroupThreads, 2) assign(const __grid_constant__ AssignArgs a) {
  extern __shared__ __align__(256) std::byte shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kDim>*>(shared_bytes);
  const GroupArgs& g = a.g;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int head = static_cast<int>(blockIdx.x) % g.num_heads, chunk = static_cast<int>(blockIdx.x) / g.num_heads;
  const Slot slot = slot_at(g, sequence_of(g, chunk, &GroupSequence::first_chunk), head);
  const Sample sample = sample_of(g, slot.sequence.count, g.step);
  const int begin = (chunk - slot.sequence.first_chunk) * sample.chunk;
  const int end = min(begin + sample.chunk, sample.count);
  if (begin >= end) return;

  using Fetch = RowFetch<kConvert, kDim, kGroupTile, kGroupThreads>;
  const std::byte* first_source = g.scratch.admitted == nullptr ? slot.row(g, sample.offset) : nullptr;
  const auto fetch = [&](int tile) {
    const int first = begin + tile * kGroupTile, rows = end - first;
    std::byte* to = s.rows[tile % kStages];
    if (first_source != nullptr) {
      const int64_t row_bytes = sample.stride * g.v.token_stride * g.element_size;
      const std::byte* next = first_source + (first + Fetch::first_row(thread)) * row_bytes;
      Fetch::start(g, thread, to, [&](int row) {
        const RowSource source = {next, row < rows};
        next += Fetch::kRowsAtOnce * row_bytes;
        return source;
      });
    } else {
      Fetch::start(g, thread, to, [&](int row) {
        const bool present = row < rows;
        return RowSource{present ? slot.row(g, sample.offset + sample.stride * (first + row)) : nullptr, present};
      });
    }
  };
  fetch(0);
  for (int j = thread; j < g.clusters; j += kGroupThreads) s.counts[j] = 0;
  if constexpr (kMode != Mode::kPanels) load_panel(g, slot, 0, s);

  float sums[kSumTiles][kDim / 64][4] = {};
  FarToken far = {-1.0f, -1};
  const int tiles = (end - begin + kGroupTile - 1) / kGroupTile;
  const int tile_of_far = g.step == kLastAssignment ? -1 : g.step % tiles;
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies<0>();
    __syncthreads();
    if (tile + 1 < tiles) fetch(tile + 1);
    std::byte* rows = s.rows[tile % kStages];

    float products[kPanelClusters / 8][4];
    Nearest nearest[2];
    if constexpr (kMode != Mode::kPanels) {
      score<kConvert, kDim>(rows, 16 * warp, 0, s, products, nearest);
    } else {
      for (int panel = 0; panel < g.scratch.panels; ++panel) {
        __syncthreads();
        load_panel(g, slot, panel, s);
        __syncthreads();
        score<kConvert, kDim>(rows, 16 * warp, panel, s, products, nearest);
      }
    }
    for (Nearest& n : nearest) n = nearest_of_quad(n);
    if (kMode != Mode::kLast && tile == tile_of_far) {
      float squares[2];
      square_rows<kDim>(rows, 16 * warp, squares);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = begin + tile * kGroupTile + 16 * warp + lane / 4 + 8 * half;
        const float distance = squares[half] + nearest[half].score;
        if (i < end && distance > far.distance) far = {distance, sample.offset + sample.stride * i};
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + lane / 4 + 8 * half, i = begin + tile * kGroupTile + row;
      const int label = nearest[half].label;
      [[maybe_unused]] int level = 0;
      if (kMode == Mode::kLast && a.along_path != 0) {
        const ClusterAxis axis = g.scratch.axes[int64_t{slot.index} * g.clusters + label];
        level = level_of(project(products, half, axis), axis);
      }
      if (lane % 4 == 0) {
        if (i < end) {
          atomicAdd(&s.counts[label], 1);
          if constexpr (kMode != Mode::kSums) g.scratch.labels[slot.base + i] = static_cast<uint16_t>(label);
          if (kMode == Mode::kLast && a.along_path != 0) g.scratch.levels[slot.base + i] = static_cast<uint8_t>(level);
        }
        if constexpr (kMode == Mode::kSums) s.sets[row] = set_number(i < end ? label : kPanelClusters);
      }
    }
    if constexpr (kMode == Mode::kSums) {
      __syncthreads();
      add_tile<kDim>(rows, s.sets, sums);
    }
  }

  __syncthreads();
  const int64_t part = int64_t{chunk} * g.num_heads + head;
  for (int j = thread; j < g.clusters; j += kGroupThreads) g.scratch.counts[part * g.clusters + j] = s.counts[j];
  if constexpr (kMode == Mode::kSums) store_sums<kDim>(sums, g.scratch.sums + part * kPanelClusters * kDim);
  if constexpr (kMode != Mode::kLast) {
    for (int step = 16; step > 0; step /= 2) {
      const FarToken other = {__shfl_xor_sync(kFullWarp, far.distance, step),
                              __shfl_xor_sync(kFullWarp, far.position, step)};
      if (other.distance > far.distance || (other.distance == far.distance && other.position < far.position)) {
        far = other;
      }
    }
    if (lane == 0) g.scratch.far_tokens[part * kGroupWarps + warp] = far;
  }
}

constexpr int kProjectLanes = 8;  // share a position
constexpr int kProjectRows = kGroupThreads / kProjectLanes;

// Levels where there are more centroids than fit shared memory.
__global__ void __launch_bounds__(kGroupThreads) project_positions(const __grid_constant__ GroupArgs g) {
  const int lane = static_cast<int>(threadIdx.x) % kProjectLanes, row = static_cast<int>(threadIdx.x) / kProjectLanes;
  const int head = static_cast<int>(blockIdx.x) % g.num_heads, chunk = static_cast<int>(blockIdx.x) / g.num_heads;
  const Slot slot = slot_at(g, sequence_of(g, chunk, &GroupSequence::first_chunk), head);
  const int begin = (chunk - slot.sequence.first_chunk) * g.scratch.chunk_tokens;
  const int end = min(begin + g.scratch.chunk_tokens, slot.sequence.count);
  const auto chunk_of = [&](int cluster, int index) {
    const int64_t first = (int64_t{slot.index} * g.scratch.panels * kPanelClusters + cluster) * g.scratch.dim;
    return reinterpret_cast<const uint4*>(g.scratch.panel + first)[index];
  };
  for (int base = begin; base < end; base += kProjectRows) {
    const int position = min(base + row, end - 1);  // the last one more than once
    const int label = g.scratch.labels[slot.base + position];
    const ClusterAxis axis = g.scratch.axes[int64_t{slot.index} * g.clusters + label];
    const std::byte* source = slot.row(g, position);
    float sum = 0.0f;
    for (int c = lane; c < g.scratch.dim / 8; c += kProjectLanes) {
      float x[8], before[8], after[8];
      values_at(g, source, 8 * c, x);
      const uint4 before_words = chunk_of(axis.before, c), after_words = chunk_of(axis.after, c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        widen(Bf16{}, reinterpret_cast<const uint32_t*>(&before_words)[i], before + 2 * i);
        widen(Bf16{}, reinterpret_cast<const uint32_t*>(&after_words)[i], after + 2 * i);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(x[i], after[i] - before[i], sum);
    }
    for (int step = kProjectLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) g.scratch.levels[slot.base + position] = static_cast<uint8_t>(level_of(sum, axis));
  }
}

}  // namespace

cudaError_t assign_positions(const GroupArgs& g, bool along_path, cudaStream_t stream) {
  const int64_t blocks = int64_t{g.scratch.num_chunks} * g.num_heads;
  const bool one_panel = g.scratch.panels == 1;
  const AssignArgs args = {g, along_path ? 1 : 0};
  const cudaError_t error = with_group_instance(g, [&]<bool kConvert, int kDim>() {
    void (*kernel)(AssignArgs) = !one_panel                  ? assign<kConvert, kDim, Mode::kPanels>
                                 : g.step == kLastAssignment ? assign<kConvert, kDim, Mode::kLast>
                                                             : assign<kConvert, kDim, Mode::kSums>;
    return launch(kernel, args, blocks, kGroupThreads, static_cast<int>(sizeof(Shared<kDim>)), stream);
  });
  if (error != cudaSuccess || one_panel || !along_path) return error;
  return launch(project_positions, g, blocks, kGroupThreads, 0, stream);
}

}  // namespace vcattn::sm90a
