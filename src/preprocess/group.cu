// The plan of a grouping and the order of its launches.
#include "preprocess/group.h"

#include <algorithm>

#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {
namespace {

// Two CTAs of an assignment fit a multiprocessor; four for each of 132 even out what they wait for. A constant, since
// sums depend on it.
constexpr int64_t kAssignmentBlocks = 4 * 132;
constexpr int64_t kMinChunk = 512, kMaxChunk = 8192;
static_assert(kMinChunk % kGroupTile == 0 && kMaxChunk % kGroupTile == 0, "chunks are whole tiles");

int64_t slots_of(const Problem& problem) { return problem.num_sequences * problem.num_heads_kv; }

int64_t chunk_tokens(const Problem& problem) {
  const int64_t chunks = std::max<int64_t>(kAssignmentBlocks / problem.num_heads_kv, 1);
  const int64_t grouped = groups_grid(problem) ? problem.grid_tokens().count : problem.seqlen_kv;
  const int64_t tokens = ceil_div(problem.batch * grouped, chunks);
  return std::clamp(ceil_div(tokens, kGroupTile) * kGroupTile, kMinChunk, kMaxChunk);
}

cudaError_t find_centroids(GroupArgs g, const vcattn_grouping& grouping, bool warm, cudaStream_t stream) {
  g.step = warm ? 1 : 0;
  if (const cudaError_t error = seed_centroids(g, stream); error != cudaSuccess) return error;
  const int32_t iterations = warm ? grouping.warm_iterations : grouping.iterations;
  for (g.step = 0; g.step < iterations; ++g.step) {
    if (const cudaError_t error = assign_positions(g, false, stream); error != cudaSuccess) return error;
    if (g.scratch.panels > 1) {
      if (const cudaError_t error = group_by_label(g, LabelOrder::kNumber, stream); error != cudaSuccess) return error;
    }
    if (const cudaError_t error = update_centroids(g, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t order_by_label(const GroupArgs& g, cudaStream_t stream) {
  if (const cudaError_t error = assign_positions(g, false, stream); error != cudaSuccess) return error;
  return group_by_label(g, LabelOrder::kTokens, stream);
}

cudaError_t order_along_path(const GroupArgs& g, cudaStream_t stream) {
  if (const cudaError_t error = find_paths(g, stream); error != cudaSuccess) return error;
  if (const cudaError_t error = assign_positions(g, true, stream); error != cudaSuccess) return error;
  if (const cudaError_t error = group_by_label(g, LabelOrder::kPath, stream); error != cudaSuccess) return error;
  if (const cudaError_t error = sort_by_level(g, stream); error != cudaSuccess) return error;
  return exchange_blocks(g, stream);
}

}  // namespace

const char* group_unsupported(const Problem& problem) {
  const vcattn_recipe& recipe = problem.params->recipe;
  constexpr int64_t kMaxChannels = 128, kMaxTokens = int64_t{1} << 30, kMaxRows = int64_t{1} << 31;
  if (recipe.v_order != VCATTN_ORDER_SEQUENCE && recipe.v_order != VCATTN_ORDER_KMEANS &&
      recipe.v_order != VCATTN_ORDER_CHAIN) {
    return "has v_order sequence, kmeans and chain only";
  }
  if (problem.head_dim > kMaxChannels) return "groups values of at most 128 channels";
  if (problem.seqlen_kv > kMaxTokens) return "groups sequences of at most 2^30 tokens";
  if (slots_of(problem) >= kMaxRows / kMaxClusters) return "groups at most 2^21 pairs of a sequence and a KV head";
  if (!uses_clusters(recipe.v_order)) return nullptr;
  if (recipe.grouping.seeding != VCATTN_SEED_SPACED) return "has k-means with seeding spaced only";
  if (recipe.grouping.clusters > kMaxClusters) return "has k-means with at most 1024 clusters";
  return nullptr;
}

GroupScratch take_group_scratch(const Problem& problem, Arena& arena) {
  const vcattn_recipe& recipe = problem.params->recipe;
  const int64_t clusters = recipe.grouping.clusters, heads = problem.num_heads_kv, slots = slots_of(problem);
  const int64_t positions = problem.batch * heads * problem.seqlen_kv;
  GroupScratch s{};
  s.dim = problem.head_dim <= 64 ? 64 : 128;
  s.panels = static_cast<int32_t>(ceil_div(clusters, kPanelClusters));
  s.chunk_tokens = static_cast<int32_t>(chunk_tokens(problem));
  for (int64_t sequence = 0; sequence < problem.num_sequences; ++sequence) {
    const int64_t grouped = grouped_tokens(problem, sequence);
    s.num_chunks += chunks_of(grouped, s.chunk_tokens);
    s.num_windows += windows_of(grouped);
  }
  s.sequences = arena.take<GroupSequence>(problem.num_sequences);
  if (problem.params->key_mask != nullptr) s.admitted = arena.take<int32_t>(problem.batch * problem.seqlen_kv);
  if (!uses_clusters(recipe.v_order)) return s;
  s.centroids = arena.take<float>(slots * clusters * problem.head_dim);
  s.panel = arena.take<uint16_t>(slots * s.panels * kPanelClusters * s.dim);
  s.norms = arena.take<float>(slots * s.panels * kPanelClusters);
  s.ranks = arena.take<int32_t>(slots * clusters);
  s.axes = arena.take<ClusterAxis>(slots * clusters);
  s.offsets = arena.take<int32_t>(slots * (clusters + 1));
  s.labels = arena.take<uint16_t>(positions);
  s.levels = arena.take<uint8_t>(positions);
  s.members = arena.take<int32_t>(positions);
  s.counts = arena.take<int32_t>(s.num_chunks * heads * clusters);
  if (s.panels == 1) s.sums = arena.take<float>(s.num_chunks * heads * kPanelClusters * s.dim);
  s.far_tokens = arena.take<FarToken>(s.num_chunks * heads * kGroupWarps);
  return s;
}

cudaError_t group(const Problem& problem, const GroupScratch& scratch, bool warm, float* centroids,
                  int32_t* permutation, cudaStream_t stream) {
  const vcattn_attention_params& p = *problem.params;
  const vcattn_grouping& grouping = p.recipe.grouping;
  GroupArgs g{};
  g.scratch = scratch;
  g.v = operand(p.v);
  g.dtype = p.v.dtype;
  g.element_size = p.v.dtype == VCATTN_FP32 ? 4 : 2;
  g.clusters = grouping.clusters;
  g.num_heads = static_cast<int32_t>(problem.num_heads_kv);
  g.num_sequences = static_cast<int32_t>(problem.num_sequences);
  g.seqlen = problem.seqlen_kv;
  g.centroids = centroids != nullptr ? centroids : scratch.centroids;
  g.permutation = permutation;

  if (p.key_mask != nullptr) {
    const int64_t positions = problem.batch * problem.num_heads_kv * problem.seqlen_kv;
    const cudaError_t error =
        cudaMemsetAsync(permutation, 0xFF, static_cast<size_t>(positions) * sizeof(int32_t), stream);
    if (error != cudaSuccess) return error;
  }
  if (const cudaError_t error = write_group_sequences(problem, g, stream); error != cudaSuccess) return error;
  if (!uses_clusters(p.recipe.v_order)) return write_sequence_order(g, stream);
  if (const cudaError_t error = find_centroids(g, grouping, warm && centroids != nullptr, stream);
      error != cudaSuccess) {
    return error;
  }
  g.step = kLastAssignment;
  return p.recipe.v_order == VCATTN_ORDER_KMEANS ? order_by_label(g, stream) : order_along_path(g, stream);
}

}  // namespace vcattn::sm90a
