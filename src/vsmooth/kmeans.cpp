#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <limits>

#include "core/arena.h"
#include "cpu/gemm.h"
#include "vsmooth/clusters.h"
#include "vsmooth/row_ops.h"

namespace vcattn::vsmooth {
namespace {

// One task scores this many tokens against this many centroids at a time, on its stack (16 KiB).
constexpr int64_t kPanelTokens = 64;
constexpr int64_t kPanelClusters = 64;
static_assert(kPanelClusters % cpu::kPanelAlign == 0, "gemm_f32 takes whole vectors of columns");

constexpr int64_t round_up_to_panel(int64_t clusters) {
  return (clusters + cpu::kPanelAlign - 1) / cpu::kPanelAlign * cpu::kPanelAlign;
}

struct Scratch {
  Scratch(Arena& arena, int64_t count, int64_t stride, int32_t clusters)
      : columns(round_up_to_panel(clusters)),
        transposed(arena.take<float>(stride * columns)),
        norms(arena.take<float>(clusters)),
        offsets(arena.take<int32_t>(clusters + int64_t{1})),
        members(arena.take<int32_t>(count)),
        sizes(arena.take<int32_t>(clusters)),
        distances(arena.take<float>(count)) {}

  int64_t columns;    // clusters, padded for gemm_f32
  float* transposed;  // [dim, columns]: the centroids as gemm_f32's right-hand side
  float* norms;       // [clusters]: |c|^2
  int32_t* offsets;   // [clusters + 1] and
  int32_t* members;   // [count]: group_by_label
  int32_t* sizes;     // [clusters]: tokens left while empty clusters are filled
  float* distances;   // [count]: |x - c|^2 to the own centroid
};

void transpose_centroids(const Tokens& tokens, const float* centroids, int32_t clusters, Scratch& scratch) {
  std::fill_n(scratch.transposed, tokens.dim * scratch.columns, 0.0f);
  for (int32_t j = 0; j < clusters; ++j) {
    const float* centroid = centroids + j * tokens.stride;
    for (int64_t d = 0; d < tokens.dim; ++d) scratch.transposed[d * scratch.columns + j] = centroid[d];
    scratch.norms[j] = dot(centroid, centroid, tokens.stride);
  }
}

// labels of tokens first .. first + rows: the centroid with the least |c|^2 - 2 x.c, which is |x - c|^2 less |x|^2.
void assign_panel(const Tokens& tokens, int64_t first, int64_t rows, int32_t clusters, const Scratch& scratch,
                  int32_t* labels) {
  alignas(64) float products[kPanelTokens * kPanelClusters];
  float best[kPanelTokens];
  std::fill_n(best, rows, std::numeric_limits<float>::infinity());
  std::fill_n(labels + first, rows, 0);  // stays where a product overflows to NaN
  for (int64_t j0 = 0; j0 < clusters; j0 += kPanelClusters) {
    const int64_t columns = std::min(kPanelClusters, scratch.columns - j0);
    cpu::gemm_f32(rows, columns, tokens.dim, tokens.row(first), tokens.stride, scratch.transposed + j0, scratch.columns,
                  products, kPanelClusters, false);
    const int32_t used = static_cast<int32_t>(std::min(kPanelClusters, clusters - j0));
    for (int64_t i = 0; i < rows; ++i) {
      for (int32_t j = 0; j < used; ++j) {
        const float score = scratch.norms[j0 + j] - 2.0f * products[i * kPanelClusters + j];
        if (score < best[i]) {
          best[i] = score;
          labels[first + i] = static_cast<int32_t>(j0) + j;
        }
      }
    }
  }
}

void assign(const Tokens& tokens, const float* centroids, int32_t clusters, Scratch& scratch, int32_t* labels) {
  transpose_centroids(tokens, centroids, clusters, scratch);
  const int64_t panels = (tokens.count + kPanelTokens - 1) / kPanelTokens;
  tbb::parallel_for(int64_t{0}, panels, [&](int64_t panel) {
    const int64_t first = panel * kPanelTokens;
    assign_panel(tokens, first, std::min(kPanelTokens, tokens.count - first), clusters, scratch, labels);
  });
}

void measure_distances(const Tokens& tokens, const float* centroids, const int32_t* labels, float* distances) {
  constexpr int64_t kGrain = 256;
  tbb::parallel_for(tbb::blocked_range<int64_t>(0, tokens.count, kGrain), [&](const auto& range) {
    for (int64_t i = range.begin(); i != range.end(); ++i) {
      distances[i] = squared_distance(tokens.row(i), centroids + labels[i] * tokens.stride, tokens.stride);
    }
  });
}

// Moves one token to each empty cluster (grouping.h), and groups the tokens again.
void fill_empty_clusters(const Tokens& tokens, const float* centroids, int32_t clusters, Scratch& scratch,
                         int32_t* labels) {
  for (int32_t j = 0; j < clusters; ++j) scratch.sizes[j] = scratch.offsets[j + 1] - scratch.offsets[j];
  if (std::find(scratch.sizes, scratch.sizes + clusters, 0) == scratch.sizes + clusters) return;
  measure_distances(tokens, centroids, labels, scratch.distances);
  for (int32_t j = 0; j < clusters; ++j) {
    if (scratch.sizes[j] > 0) continue;
    int64_t farthest = -1;
    float distance = 0;
    for (int64_t i = 0; i < tokens.count; ++i) {
      if (scratch.distances[i] > distance && scratch.sizes[labels[i]] > 1) {
        farthest = i;
        distance = scratch.distances[i];
      }
    }
    if (farthest < 0) break;
    --scratch.sizes[labels[farthest]];
    ++scratch.sizes[j];
    labels[farthest] = j;
  }
  group_by_label(labels, tokens.count, clusters, scratch.offsets, scratch.members);
}

// Each non-empty cluster's mean: FP64 sums in ascending order of the tokens, so that the tasks share nothing and the
// mean of equal tokens is that token. One task takes kRowLanes channels of a cluster, which fit the registers.
void update_centroids(const Tokens& tokens, int32_t clusters, const Scratch& scratch, float* centroids) {
  const int64_t parts = tokens.stride / kRowLanes;
  tbb::parallel_for(int64_t{0}, clusters * parts, [&](int64_t task) {
    const int64_t cluster = task / parts, channel = task % parts * kRowLanes;
    const int32_t begin = scratch.offsets[cluster], end = scratch.offsets[cluster + 1];
    if (begin == end) return;
    double sums[kRowLanes] = {};
    for (int32_t i = begin; i < end; ++i) {
      const float* x = tokens.row(scratch.members[i]) + channel;
      for (int l = 0; l < kRowLanes; ++l) sums[l] += static_cast<double>(x[l]);
    }
    float* centroid = centroids + cluster * tokens.stride + channel;
    for (int l = 0; l < kRowLanes; ++l) centroid[l] = static_cast<float>(sums[l] / (end - begin));
  });
}

void clear_unused(const Tokens& tokens, int32_t used, int32_t clusters, float* centroids) {
  for (int32_t j = 0; j < used; ++j) {
    std::fill(centroids + j * tokens.stride + tokens.dim, centroids + (j + 1) * tokens.stride, 0.0f);
  }
  std::fill(centroids + used * tokens.stride, centroids + clusters * tokens.stride, 0.0f);
}

}  // namespace

size_t kmeans_workspace_size(int64_t count, int64_t stride, int32_t clusters) {
  Arena arena(nullptr);
  Scratch(arena, count, stride, clusters);
  return arena.used();
}

void group_by_label(const int32_t* labels, int64_t count, int32_t clusters, int32_t* offsets, int32_t* members) {
  std::fill_n(offsets, clusters + int64_t{1}, 0);
  for (int64_t i = 0; i < count; ++i) ++offsets[labels[i] + 1];
  for (int32_t j = 0; j < clusters; ++j) offsets[j + 1] += offsets[j];
  for (int64_t i = 0; i < count; ++i) members[offsets[labels[i]]++] = static_cast<int32_t>(i);
  // Each start has moved to its label's end, which is the next label's start.
  std::copy_backward(offsets, offsets + clusters, offsets + clusters + 1);
  offsets[0] = 0;
}

double kmeans(const Tokens& tokens, const vcattn_grouping& params, bool warm, float* centroids, int32_t* labels,
              std::span<std::byte> workspace) {
  const int32_t clusters = effective_clusters(params, tokens.count);
  Arena arena(workspace.data());
  Scratch scratch(arena, tokens.count, tokens.stride, clusters);
  if (!warm) {
    seed_centroids(tokens, clusters, params.seeding, params.seed, scratch.distances, scratch.members, centroids);
  }
  clear_unused(tokens, clusters, params.clusters, centroids);

  const int32_t iterations = warm ? params.warm_iterations : params.iterations;
  for (int32_t iteration = 0; iteration < iterations; ++iteration) {
    assign(tokens, centroids, clusters, scratch, labels);
    group_by_label(labels, tokens.count, clusters, scratch.offsets, scratch.members);
    fill_empty_clusters(tokens, centroids, clusters, scratch, labels);
    update_centroids(tokens, clusters, scratch, centroids);
  }
  assign(tokens, centroids, clusters, scratch, labels);
  measure_distances(tokens, centroids, labels, scratch.distances);
  double inertia = 0;
  for (int64_t i = 0; i < tokens.count; ++i) inertia += static_cast<double>(scratch.distances[i]);
  return inertia;
}

}  // namespace vcattn::vsmooth
