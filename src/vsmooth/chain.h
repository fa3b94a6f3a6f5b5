// Tokens along a path through the clusters: first the clusters, then the tokens within each.
#pragma once

#include <cstdint>

#include "core/arena.h"
#include "vsmooth/grouping.h"

namespace vcattn::vsmooth {

struct ChainScratch {
  ChainScratch(Arena& arena, int64_t count, int32_t clusters)
      : path(arena.take<int32_t>(clusters)),
        nearest(arena.take<float>(clusters)),
        edges(arena.take<float>(clusters)),
        from_new(arena.take<float>(clusters)),
        offsets(arena.take<int32_t>(clusters + int64_t{1})),
        members(arena.take<int32_t>(count)),
        keys(arena.take<uint64_t>(count)) {}

  int32_t* path;     // [clusters]: the clusters in order
  float* nearest;    // [clusters]: squared distance from the path; negative on the path and for empty clusters
  float* edges;      // [clusters]: squared length of the step from position i to i + 1
  float* from_new;   // [clusters]: squared distance from the cluster being inserted to each position
  int32_t* offsets;  // [clusters + 1] and
  int32_t* members;  // [count]: group_by_label
  uint64_t* keys;    // [count]: sort_key
};

// Clusters: farthest insertion (Rosenkrantz, Stearns and Lewis, 1977) with squared distances and open ends. From the
// first non-empty cluster on, the cluster farthest from those in the path is inserted where it lengthens the path
// least; ties go to the lower cluster and to the earlier place. Unlike a nearest-neighbour chain it leaves no long
// way back to the clusters passed by, and needs no choice of a start.
// Tokens: by their projection on the line from the centroid before to the centroid after (the own one at the ends of
// the path); equal projections by token.
void order_along_chain(const Tokens& tokens, const float* centroids, const int32_t* labels, int32_t clusters,
                       const ChainScratch& scratch, int32_t* permutation);

}  // namespace vcattn::vsmooth
