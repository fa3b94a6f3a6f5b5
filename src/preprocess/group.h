// Grouping of value tokens on the GPU: what vsmooth/grouping.h does for VCATTN_ORDER_SEQUENCE, KMEANS and CHAIN, for
// every (sequence, KV head) of a call at once. Not the same bits as the CPU's; the same bits in every run.
//
//   k-means  Lloyd's algorithm with centroids rounded to BF16 and products on the tensor cores. V is read rounded to
//            BF16, what is not finite as 0. From 768 tokens a cluster on, updates see every third token (another third
//            in each iteration); the last assignment always sees all. An empty cluster takes one of the tokens that
//            lie farthest from their centroids.
//   chain    The CPU's path through the centroids. Within a cluster tokens are sorted by 256 levels of their
//            projection on the path's direction. Then two passes of exchanges within windows of 4 blocks of 128. That
//            removes as much energy by 128-row means as the CPU's order, to within a percent. Halves and quarters of
//            blocks do not exchange: 32-row means remove about 5 % less.
//
// FP32 and FP16 values that BF16 cannot tell apart are equal here: a sequence whose mean is hundreds of times its
// spread should be centred before it comes in those types.
//
// Scratch at long sequences: 7 bytes a (token, KV head) and, up to 64 clusters, 32 KiB for each chunk of a head, of
// which there are at most 528 in all or one for 8,192 tokens: 5 % of a BF16 v of 75,600 tokens and 40 heads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/arena.h"
#include "core/validate.h"

namespace vcattn::sm90a {

struct GroupSequence;  // group_layout.cuh
struct ClusterAxis;
struct FarToken;

// A slot is a (sequence, KV head): sequence * num_heads_kv + head. A position is the number of a token among those of
// its sequence that are grouped: the admitted ones or, of these, those of the video grid. Arrays over tokens have the
// layout of the permutation, [batch, num_heads_kv, seqlen_kv], and hold what is at a position.
struct GroupScratch {
  int32_t dim;           // channels as stored: 64 or 128
  int32_t panels;        // of 64 clusters
  int32_t chunk_tokens;  // positions of one CTA in an assignment
  int32_t num_chunks;    // of one head, all sequences together
  int32_t num_windows;   // likewise: of 4 blocks that exchange

  GroupSequence* sequences;  // [num_sequences]
  int32_t* admitted;         // [batch, seqlen_kv] token at each position; null without a key mask
  float* centroids;          // [slots, clusters, head_dim], where the caller keeps none
  uint16_t* panel;           // [slots, panels * 64, dim] BF16 centroids
  float* norms;              // [slots, panels * 64] their squared lengths; infinite where a cluster is not in use
  int32_t* ranks;            // [slots, clusters] the place of each cluster in the path
  ClusterAxis* axes;         // [slots, clusters]
  int32_t* offsets;          // [slots, clusters + 1] first position of the cluster at each place of the order
  uint16_t* labels;          // over tokens
  uint8_t* levels;           // over tokens: the quantised projection
  int32_t* members;          // over tokens: positions in order
  int32_t* counts;           // [num_chunks, num_heads_kv, clusters] tokens of each cluster
  float* sums;               // [num_chunks, num_heads_kv, 64, dim]; null above 64 clusters
  FarToken* far_tokens;      // [num_chunks, num_heads_kv, 8]
};

// What `group` does not do, as the end of a sentence that begins "the sm90a back end "; null where it does all that is
// asked. Of the problem it reads v, cu_seqlens_kv and the recipe.
const char* group_unsupported(const Problem& problem);

// For problems that group_unsupported finds nothing in. Reads cu_seqlens_kv, which is host memory.
GroupScratch take_group_scratch(const Problem& problem, Arena& arena);

// Launches the grouping on `stream`. v and key_mask are device memory.
// centroids: optional FP32 [num_sequences, num_heads_kv, clusters, head_dim]; read first when `warm`, then written, 0
//   beyond the clusters that the tokens fill. Without them the start is cold.
// permutation: int32 [batch, num_heads_kv, seqlen_kv]: the token at each place, numbered within its sequence. KMEANS
// and
//   CHAIN with a grid: its tokens first, the others behind them in sequence. With a key mask -1 behind the admitted
//   ones.
cudaError_t group(const Problem& problem, const GroupScratch& scratch, bool warm, float* centroids,
                  int32_t* permutation, cudaStream_t stream);

}  // namespace vcattn::sm90a
