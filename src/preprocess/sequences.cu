// Sequences from batch entries or packed segments, the keys that a mask admits, and the zeros that other stages start
// from.
#include <algorithm>

#include "preprocess/admit.cuh"
#include "preprocess/launch.cuh"
#include "preprocess/stages.h"

namespace vcattn::sm90a {

__device__ inline void set_admitted(Sequence& s, int32_t keys) { s.keys = keys; }

namespace {

constexpr int kThreads = 256;

// As many as kernel parameters hold on every driver (4 KB).
constexpr int kSequencesPerLaunch = 96;

struct StartArgs {
  Sequence sequences[kSequencesPerLaunch];
  int32_t first, count;
  Sequence* out;
  uint32_t* zeroed[3];  // by the first launch
  int64_t num_zeroed[3];
};

__global__ void __launch_bounds__(kThreads) start(const __grid_constant__ StartArgs a) {
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (index < a.count) a.out[a.first + index] = a.sequences[index];
  if (a.first != 0) return;
#pragma unroll
  for (int block = 0; block < 3; ++block) {
    for (int64_t i = index; i < a.num_zeroed[block]; i += int64_t{gridDim.x} * kThreads) a.zeroed[block][i] = 0;
  }
}

// Sequence `s` behind the blocks, tiles and mean groups of those before it.
Sequence sequence_at(const Problem& problem, int64_t s, const Sequence& end) {
  const Problem::Tokens queries = problem.queries_of(s), keys = problem.keys_of(s);
  Sequence sequence = end;
  sequence.batch = static_cast<int32_t>(problem.batch_of(s));
  sequence.q_begin = static_cast<int32_t>(queries.begin);
  sequence.q_count = static_cast<int32_t>(queries.count);
  sequence.kv_begin = static_cast<int32_t>(keys.begin);
  sequence.kv_count = static_cast<int32_t>(keys.count);
  sequence.keys = sequence.kv_count;
  return sequence;
}

}  // namespace

cudaError_t prepare_sequences(const PrepareCall& call) {
  const QuantizedQkv& qkv = call.qkv;
  const PrepareScratch& scratch = call.scratch;
  const int64_t slots = int64_t{qkv.num_heads_kv} * qkv.num_sequences;
  Sequence end{};
  StartArgs args{};
  args.out = qkv.sequences;
  args.zeroed[0] = scratch.zeroed;
  args.num_zeroed[0] = scratch.num_zeroed;
  args.zeroed[1] = qkv.k_poison;
  args.num_zeroed[1] = slots;
  args.zeroed[2] = reinterpret_cast<uint32_t*>(qkv.k_norm);
  args.num_zeroed[2] = slots;
  constexpr int64_t kZeroingBlocks = 64;
  const int64_t blocks = std::clamp<int64_t>(ceil_div(scratch.num_zeroed, kThreads), 1, kZeroingBlocks);
  for (args.first = 0; args.first < qkv.num_sequences; args.first += kSequencesPerLaunch) {
    args.count = std::min(qkv.num_sequences - args.first, kSequencesPerLaunch);
    for (int i = 0; i < args.count; ++i) {
      const Sequence s = args.sequences[i] = sequence_at(call.problem, args.first + i, end);
      const int tiles = tiles_of(s.kv_count);
      end.q_block += blocks_of(s.q_count, qkv.block_rows);
      end.tile += tiles;
      end.mean_group += mean_groups_of(tiles);
    }
    const cudaError_t error = launch(start, args, args.first == 0 ? blocks : 1, kThreads, 0, call.stream);
    if (error != cudaSuccess) return error;
  }
  return admit_tokens(call.problem, qkv.sequences, scratch.admitted, call.stream);
}

}  // namespace vcattn::sm90a
