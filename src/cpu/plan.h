// Where everything of one call lies in the caller's workspace.
#pragma once

#include <cstddef>
#include <span>

#include "core/validate.h"
#include "cpu/quantized_qkv.h"
#include "cpu/softmax.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {

// Preprocessing works on one (sequence, head) of K and V at a time; these hold it, and are used again for the next.
struct HeadScratch {
  int64_t max_keys;       // longest sequence
  int32_t* admitted;      // [max_keys] tokens that the mask admits, ascending
  int32_t* order;         // [max_keys] entry i: which admitted token lies at position i
  float* rows;            // [max_keys, max(dim, v_dim)] K or V in FP32
  double* partial_sums;   // [chunks, dim] centring statistics, one row per 1024 tokens
  float* k_mean;          // [num_heads_kv * num_sequences, dim], kept for lse
  float* tile_abs_max;    // [tiles of max_keys, v_dim]
  float* channel_encode;  // [v_dim] codes per unit of V
  float* centroids;       // [clusters, v_dim]
  std::span<std::byte> grouping;
  uint8_t* seen;  // [max_keys] for checking a caller's permutation
};

// Of one row: reference, rescale and weight; for each tile under one maximum its factor and its sums over groups of 32
// keys.
constexpr int row_state_floats(int tiles) { return 3 + tiles * (1 + kSumGroups); }

// One thread's panels.
struct ThreadScratch {
  float* q;          // [128, dim]
  float* k;          // [dim, 128]
  float* v;          // [128, v_dim]
  float* scores;     // [tiles_per_step, 128, 128]
  float* out;        // [128, v_dim] accumulated output
  float* tile_out;   // [128, v_dim] contribution of one step, or the tensor core's accumulator
  double* out64;     // [128, v_dim] pv_accumulate fp64
  float* row_state;  // [row_state_floats, 128]
  double* sums;      // [128] row sums
};

struct Plan {
  QuantizedQkv qkv;
  Sequence* sequences;
  HeadScratch head;
  std::byte* threads;  // num_threads blocks of thread_bytes
  size_t thread_bytes;
  size_t bytes;  // of the whole
};

// With a null workspace only `bytes` is meaningful. Fills plan.sequences otherwise.
Plan make_plan(const Problem& problem, std::byte* workspace);

// `bytes`, where given, receives the size of one thread's part.
ThreadScratch thread_scratch(const Plan& plan, const Problem& problem, int thread, size_t* bytes = nullptr);

// Bytes of vcattn_group's workspace, and its pieces.
struct GroupPlan {
  HeadScratch head;
  int64_t dim;
  size_t bytes;
};
GroupPlan make_group_plan(const Problem& problem, std::byte* workspace);

// Sequence `s` of the problem, without its place among blocks and tiles.
Sequence sequence_at(const Problem& problem, int64_t s);

}  // namespace vcattn::cpu
