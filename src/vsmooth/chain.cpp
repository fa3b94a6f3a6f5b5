#include "vsmooth/chain.h"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <limits>

#include "vsmooth/clusters.h"
#include "vsmooth/row_ops.h"
#include "vsmooth/sort_key.h"

namespace vcattn::vsmooth {
namespace {

constexpr float kOnPath = -1.0f;

int32_t farthest_from_path(const float* nearest, int32_t clusters) {
  int32_t farthest = -1;
  float distance = kOnPath;
  for (int32_t j = 0; j < clusters; ++j) {
    if (nearest[j] > distance) {
      farthest = j;
      distance = nearest[j];
    }
  }
  return farthest;
}

// Where scratch.from_new lengthens a path of `length` >= 1 clusters least: the position that the new one will have.
int32_t cheapest_place(const ChainScratch& scratch, int32_t length) {
  const float* from_new = scratch.from_new;
  int32_t place = 0;
  float increase = from_new[0];
  for (int32_t i = 1; i < length; ++i) {
    const float detour = from_new[i - 1] + from_new[i] - scratch.edges[i - 1];
    if (detour < increase) {
      place = i;
      increase = detour;
    }
  }
  return from_new[length - 1] < increase ? length : place;
}

void insert_at(int32_t place, int32_t cluster, int32_t length, const ChainScratch& scratch) {
  std::copy_backward(scratch.path + place, scratch.path + length, scratch.path + length + 1);
  scratch.path[place] = cluster;
  if (place < length) {
    std::copy_backward(scratch.edges + place, scratch.edges + length - 1, scratch.edges + length);
    scratch.edges[place] = scratch.from_new[place];
  }
  if (place > 0) scratch.edges[place - 1] = scratch.from_new[place - 1];
}

// Fills scratch.path and returns its length: the number of clusters that have tokens.
int32_t find_path(const Tokens& tokens, const float* centroids, int32_t clusters, const ChainScratch& scratch) {
  const auto distance = [&](int32_t a, int32_t b) {
    return squared_distance(centroids + a * tokens.stride, centroids + b * tokens.stride, tokens.stride);
  };
  for (int32_t j = 0; j < clusters; ++j) {
    const bool empty = scratch.offsets[j] == scratch.offsets[j + 1];
    scratch.nearest[j] = empty ? kOnPath : std::numeric_limits<float>::max();
  }
  int32_t length = 0;
  for (int32_t next; (next = farthest_from_path(scratch.nearest, clusters)) >= 0; ++length) {
    for (int32_t i = 0; i < length; ++i) scratch.from_new[i] = distance(next, scratch.path[i]);
    insert_at(length == 0 ? 0 : cheapest_place(scratch, length), next, length, scratch);
    scratch.nearest[next] = kOnPath;
    for (int32_t j = 0; j < clusters; ++j) {
      if (scratch.nearest[j] > kOnPath) scratch.nearest[j] = std::min(scratch.nearest[j], distance(next, j));
    }
  }
  return length;
}

}  // namespace

void order_along_chain(const Tokens& tokens, const float* centroids, const int32_t* labels, int32_t clusters,
                       const ChainScratch& scratch, int32_t* permutation) {
  group_by_label(labels, tokens.count, clusters, scratch.offsets, scratch.members);
  const int32_t length = find_path(tokens, centroids, clusters, scratch);
  tbb::parallel_for(0, length, [&](int32_t i) {
    const float* before = centroids + scratch.path[std::max(i - 1, 0)] * tokens.stride;
    const float* after = centroids + scratch.path[std::min(i + 1, length - 1)] * tokens.stride;
    float direction[VCATTN_MAX_HEAD_DIM];
    for (int64_t d = 0; d < tokens.stride; ++d) direction[d] = after[d] - before[d];
    const int32_t cluster = scratch.path[i];
    for (int32_t m = scratch.offsets[cluster]; m < scratch.offsets[cluster + 1]; ++m) {
      const int32_t token = scratch.members[m];
      scratch.keys[m] = sort_key(dot(tokens.row(token), direction, tokens.stride), static_cast<uint32_t>(token));
    }
    std::sort(scratch.keys + scratch.offsets[cluster], scratch.keys + scratch.offsets[cluster + 1]);
  });
  for (int32_t i = 0; i < length; ++i) {
    const int32_t cluster = scratch.path[i];
    for (int32_t m = scratch.offsets[cluster]; m < scratch.offsets[cluster + 1]; ++m) {
      *permutation++ = static_cast<int32_t>(key_position(scratch.keys[m]));
    }
  }
}

}  // namespace vcattn::vsmooth
