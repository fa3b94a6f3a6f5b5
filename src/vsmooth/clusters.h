// What k-means and the orders built on it share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vsmooth/grouping.h"

namespace vcattn::vsmooth {

size_t kmeans_workspace_size(int64_t count, int64_t stride, int32_t clusters);

// Stable counting sort: members [count] lists the tokens of label 0 in ascending order, then those of label 1, ...;
// label j has members[offsets[j] .. offsets[j + 1]). offsets: [clusters + 1].
void group_by_label(const int32_t* labels, int64_t count, int32_t clusters, int32_t* offsets, int32_t* members);

// Writes `clusters` <= count tokens as the first centroids, [clusters, stride].
//   SPACED    token floor(j (count - 1) / (clusters - 1)); the first where there is one cluster.
//   RANDOM    distinct tokens, each set of them equally likely.
//   PLUSPLUS  k-means++ (Arthur and Vassilvitskii, 2007): the first uniformly, each next one with a probability
//             proportional to its squared distance from the nearest so far; uniformly where all of these are 0.
// nearest: [count] floats and tokens_left: [count] integers of scratch.
void seed_centroids(const Tokens& tokens, int32_t clusters, int32_t seeding, uint64_t seed, float* nearest,
                    int32_t* tokens_left, float* centroids);

}  // namespace vcattn::vsmooth
