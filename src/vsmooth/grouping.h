// Orders of the value tokens: which tokens share a block, and so a mean. One (batch, head) at a time.
// Every result depends on the tokens, the parameters and the seed alone, never on the number of threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "vcattn/vcattn.h"

namespace vcattn::vsmooth {

// Value tokens of one head, FP32, row-major: [count, dim], rows `stride` floats apart; finite. Fewer than 2^31 tokens,
// because labels and permutations are int32; none at all is allowed everywhere.
struct Tokens {
  const float* data;
  int64_t count;
  int64_t dim;
  int64_t stride;  // >= dim, a multiple of 16, at most VCATTN_MAX_HEAD_DIM; the padding is zero

  const float* row(int64_t token) const { return data + token * stride; }
};

// Clusters in use: a cluster cannot be smaller than a token.
inline int32_t effective_clusters(const vcattn_grouping& params, int64_t count) {
  return static_cast<int32_t>(std::min<int64_t>(params.clusters, count));
}

// Whether a vcattn_v_order runs k-means, and so has centroids.
bool uses_clusters(int32_t v_order);

// Bytes that the functions below need for `count` tokens of `stride` floats; the workspace is aligned to 64 bytes or
// more. kmeans alone needs what VCATTN_ORDER_KMEANS needs. Never fewer for more tokens, so that one workspace for the
// longest of several sequences serves them all.
size_t grouping_workspace_size(int64_t count, int64_t stride, const vcattn_grouping& params, int32_t v_order);

// Lloyd's algorithm with squared Euclidean distance: `iterations` updates of the centroids (`warm_iterations` when
// `warm`), then one more assignment, so that labels and centroids agree. Writes labels [count] in
// [0, effective_clusters); ties go to the lower label. Returns the sum of squared distances to the centroids.
//
// centroids: [clusters, stride]; read first when `warm`, written at the end. Their padding and the rows from
//   effective_clusters on are written as zero, and never read. A row that is not finite attracts no token.
// Empty clusters: before each update, in ascending order, each takes the token farthest from its own centroid (the
//   lower token at a tie) among the clusters that keep another token. Where every such token lies on its centroid,
//   the cluster stays empty and its centroid stays where it is. The last assignment may leave clusters empty.
double kmeans(const Tokens& tokens, const vcattn_grouping& params, bool warm, float* centroids, int32_t* labels,
              std::span<std::byte> workspace);

// permutation[i] = the token at position i.
//   SEQUENCE  the identity.
//   CUBE      the whole 2 x 8 x 8 cubes of `grid`, then the smaller ones at its borders, both in row-major order of
//             the cubes and of the tokens within; then the tokens outside the grid in sequence. So each whole cube is
//             one block of 128.
//   KMEANS    stable sort by label.
//   CHAIN     clusters along a short path through their centroids, tokens along the path within each (chain.h), then
//             a few rounds in which neighbouring blocks exchange tokens (exchange.h).
//   BALANCED  the order that CHAIN starts from, cut into min(clusters, blocks) clusters of equal size to within one
//             block of 128; every two of them exchange tokens once, then neighbouring blocks as in CHAIN. Its time
//             grows with tokens times clusters, as that of k-means does, but is a few times longer. With as many
//             clusters as blocks it removes the most energy; with few clusters of many blocks, no more than CHAIN.
// The last three, given a grid (frames > 0), order its tokens as if there were no others, and put the tokens outside it
// behind them in sequence: in front, they would shift every block of the video against the blocks of 128 that share a
// mean. So where the video does not end with a block, one block holds the last of it and the first of the text.
// A grid that does not lie within the tokens gives the identity in these orders and in CUBE.
// `centroids` is as in kmeans for the last three, or null to start cold and keep none.
void order_tokens(const Tokens& tokens, int32_t v_order, const vcattn_grouping& params, const vcattn_video_grid& grid,
                  bool warm, float* centroids, int32_t* permutation, std::span<std::byte> workspace);

// Share of the energy (sum of squares) that subtracting the mean of each `mean_rows` rows removes, in the given order:
// 1 - sum |v - mean|^2 / sum |v|^2, in FP64. The last block may be short. Tokens that are all zero give 0.
double energy_removed(const Tokens& tokens, const int32_t* permutation, int64_t mean_rows);

}  // namespace vcattn::vsmooth
