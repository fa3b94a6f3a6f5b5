// Sequences from batch entries or packed segments, what a key mask admits of them, and the order that leaves it so.
#include <algorithm>

#include "numerics/attention_math.h"
#include "preprocess/admit.cuh"
#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {

__device__ inline int32_t& admitted_keys(GroupSequence& s) { return s.count; }

namespace {

// As many as kernel parameters hold on every driver (4 KB).
constexpr int kSequencesPerLaunch = 128;

struct TableArgs {
  GroupSequence sequences[kSequencesPerLaunch];
  int32_t count;
  GroupSequence* out;
};

__global__ void __launch_bounds__(kSequencesPerLaunch) write_table(const __grid_constant__ TableArgs a) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < a.count) a.out[i] = a.sequences[i];
}

__global__ void __launch_bounds__(kGroupThreads) write_sequence(const __grid_constant__ GroupArgs g) {
  const int head = static_cast<int>(blockIdx.x) % g.num_heads, chunk = static_cast<int>(blockIdx.x) / g.num_heads;
  const Slot slot = slot_at(g, sequence_of(g, chunk, &GroupSequence::first_chunk), head);
  const int begin = (chunk - slot.sequence.first_chunk) * g.scratch.chunk_tokens;
  const int end = min(begin + g.scratch.chunk_tokens, slot.sequence.count);
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kGroupThreads) {
    g.permutation[slot.base + i] = slot.token(g, i);
  }
}

}  // namespace

cudaError_t write_group_sequences(const Problem& problem, const GroupArgs& g, cudaStream_t stream) {
  TableArgs table{};
  GroupSequence next{};
  for (int64_t first = 0; first < problem.num_sequences; first += kSequencesPerLaunch) {
    table.count = static_cast<int32_t>(std::min<int64_t>(problem.num_sequences - first, kSequencesPerLaunch));
    table.out = g.scratch.sequences + first;
    for (int i = 0; i < table.count; ++i) {
      const int64_t s = first + i;
      const Problem::Tokens tokens = problem.keys_of(s);
      next.batch = static_cast<int32_t>(problem.batch_of(s));
      next.first_token = static_cast<int32_t>(tokens.begin);
      next.count = static_cast<int32_t>(tokens.count);
      table.sequences[i] = next;
      next.first_chunk += chunks_of(next.count, g.scratch.chunk_tokens);
      next.first_window += windows_of(next.count);
    }
    const cudaError_t error = launch(write_table, table, 1, kSequencesPerLaunch, 0, stream);
    if (error != cudaSuccess) return error;
  }
  return admit_tokens(problem, g.scratch.sequences, g.scratch.admitted, stream);
}

cudaError_t write_sequence_order(const GroupArgs& g, cudaStream_t stream) {
  return launch(write_sequence, g, int64_t{g.scratch.num_chunks} * g.num_heads, kGroupThreads, 0, stream);
}

}  // namespace vcattn::sm90a
