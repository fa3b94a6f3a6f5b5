#include "vsmooth/grouping.h"

#include <numeric>
#include <optional>

#include "core/arena.h"
#include "numerics/attention_math.h"
#include "vsmooth/chain.h"
#include "vsmooth/clusters.h"
#include "vsmooth/exchange.h"

namespace vcattn::vsmooth {
namespace {

// Two latent frames of 8 x 8 latents: one block of keys.
constexpr int64_t kCubeFrames = 2, kCubeHeight = 8, kCubeWidth = 8;
static_assert(kCubeFrames * kCubeHeight * kCubeWidth == kBlockN, "a whole cube is one block");

// What order_tokens cuts from its workspace for an order that clusters.
struct Scratch {
  Scratch(Arena& arena, int64_t count, int64_t stride, int32_t clusters, int32_t v_order)
      : centroids(arena.take<float>(clusters * stride)),
        labels(arena.take<int32_t>(count)),
        kmeans_bytes(kmeans_workspace_size(count, stride, clusters)),
        kmeans(arena.take<std::byte>(static_cast<int64_t>(kmeans_bytes))) {
    if (v_order == VCATTN_ORDER_KMEANS) {
      offsets = arena.take<int32_t>(clusters + int64_t{1});
    } else {
      chain.emplace(arena, count, clusters);
      exchange.emplace(arena,
                       v_order == VCATTN_ORDER_BALANCED ? BlockSets(count, clusters).exchange_capacity() : count);
    }
  }

  float* centroids;  // [clusters, stride], where the caller keeps none
  int32_t* labels;   // [count]
  size_t kmeans_bytes;
  std::byte* kmeans;
  int32_t* offsets = nullptr;         // KMEANS: [clusters + 1]
  std::optional<ChainScratch> chain;  // CHAIN and BALANCED
  std::optional<ExchangeScratch> exchange;
};

// Tokens of the grid; nothing where it does not lie within `count` tokens.
std::optional<int64_t> tokens_within(const vcattn_video_grid& grid, int64_t count) {
  int64_t tokens, end;
  const bool within = grid.first_token >= 0 && grid.frames >= 0 && grid.height >= 0 && grid.width >= 0 &&
                      !__builtin_mul_overflow(grid.frames, grid.height, &tokens) &&
                      !__builtin_mul_overflow(tokens, grid.width, &tokens) &&
                      !__builtin_add_overflow(tokens, grid.first_token, &end) && end <= count;
  return within ? std::optional(tokens) : std::nullopt;
}

// Writes the tokens of the cubes that are whole, or of those that are not, and returns the end of what it wrote.
int32_t* write_cubes(const vcattn_video_grid& grid, bool whole, int32_t* out) {
  for (int64_t t0 = 0; t0 < grid.frames; t0 += kCubeFrames) {
    for (int64_t y0 = 0; y0 < grid.height; y0 += kCubeHeight) {
      for (int64_t x0 = 0; x0 < grid.width; x0 += kCubeWidth) {
        const int64_t t1 = std::min(t0 + kCubeFrames, grid.frames), y1 = std::min(y0 + kCubeHeight, grid.height),
                      x1 = std::min(x0 + kCubeWidth, grid.width);
        if (((t1 - t0) * (y1 - y0) * (x1 - x0) == kBlockN) != whole) continue;
        for (int64_t t = t0; t < t1; ++t) {
          for (int64_t y = y0; y < y1; ++y) {
            const int64_t row = grid.first_token + (t * grid.height + y) * grid.width;
            for (int64_t x = x0; x < x1; ++x) *out++ = static_cast<int32_t>(row + x);
          }
        }
      }
    }
  }
  return out;
}

// k-means and what CHAIN and BALANCED make of it, over all of the tokens.
void order_by_clusters(const Tokens& tokens, int32_t v_order, const vcattn_grouping& params, bool warm,
                       float* centroids, int32_t* permutation, std::span<std::byte> workspace) {
  const int32_t clusters = effective_clusters(params, tokens.count);
  Arena arena(workspace.data());
  Scratch scratch(arena, tokens.count, tokens.stride, clusters, v_order);
  vcattn_grouping kept = params;
  if (centroids == nullptr) {
    centroids = scratch.centroids;  // which has rows for the clusters in use only
    kept.clusters = clusters;
    warm = false;
  }
  kmeans(tokens, kept, warm, centroids, scratch.labels, {scratch.kmeans, scratch.kmeans_bytes});
  if (v_order == VCATTN_ORDER_KMEANS) {
    return group_by_label(scratch.labels, tokens.count, clusters, scratch.offsets, permutation);
  }
  order_along_chain(tokens, centroids, scratch.labels, clusters, *scratch.chain, permutation);
  if (v_order == VCATTN_ORDER_BALANCED) {
    exchange_all_sets(tokens, BlockSets(tokens.count, clusters), *scratch.exchange, permutation);
  }
  exchange_neighbours(tokens, *scratch.exchange, permutation);
}

}  // namespace

bool uses_clusters(int32_t v_order) {
  return v_order == VCATTN_ORDER_KMEANS || v_order == VCATTN_ORDER_BALANCED || v_order == VCATTN_ORDER_CHAIN;
}

size_t grouping_workspace_size(int64_t count, int64_t stride, const vcattn_grouping& params, int32_t v_order) {
  if (!uses_clusters(v_order)) return 0;
  Arena arena(nullptr);
  Scratch(arena, count, stride, effective_clusters(params, count), v_order);
  return arena.used();
}

void order_tokens(const Tokens& tokens, int32_t v_order, const vcattn_grouping& params, const vcattn_video_grid& grid,
                  bool warm, float* centroids, int32_t* permutation, std::span<std::byte> workspace) {
  const bool clusters = uses_clusters(v_order);
  if (clusters && grid.frames == 0) {
    return order_by_clusters(tokens, v_order, params, warm, centroids, permutation, workspace);
  }
  const std::optional<int64_t> inside = tokens_within(grid, tokens.count);
  if ((!clusters && v_order != VCATTN_ORDER_CUBE) || !inside) {
    return std::iota(permutation, permutation + tokens.count, 0);
  }
  int32_t* const outside = permutation + *inside;
  if (clusters) {
    const Tokens video = {tokens.row(grid.first_token), *inside, tokens.dim, tokens.stride};
    order_by_clusters(video, v_order, params, warm, centroids, permutation, workspace);
    for (int32_t* token = permutation; token < outside; ++token) *token += static_cast<int32_t>(grid.first_token);
  } else {
    write_cubes(grid, false, write_cubes(grid, true, permutation));
  }
  std::iota(outside, outside + grid.first_token, 0);
  std::iota(outside + grid.first_token, permutation + tokens.count, static_cast<int32_t>(grid.first_token + *inside));
}

double energy_removed(const Tokens& tokens, const int32_t* permutation, int64_t mean_rows) {
  // sum |v - mean|^2 = sum |v|^2 - |sum v|^2 / rows, block by block.
  double energy = 0, removed = 0;
  for (int64_t begin = 0; begin < tokens.count; begin += mean_rows) {
    const int64_t end = std::min(begin + mean_rows, tokens.count);
    double sums[VCATTN_MAX_HEAD_DIM] = {};
    for (int64_t i = begin; i < end; ++i) {
      const float* x = tokens.row(permutation[i]);
      for (int64_t d = 0; d < tokens.dim; ++d) {
        const double value = static_cast<double>(x[d]);
        sums[d] += value;
        energy += value * value;
      }
    }
    for (int64_t d = 0; d < tokens.dim; ++d) removed += sums[d] * sums[d] / static_cast<double>(end - begin);
  }
  return energy > 0 ? removed / energy : 0.0;
}

}  // namespace vcattn::vsmooth
