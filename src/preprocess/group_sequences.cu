// Sequences from batch entries or packed segments, what a key mask admits of them and what a video grid groups of that,
// and the order that leaves it so.
#include <algorithm>

#include "numerics/attention_math.h"
#include "preprocess/admit.cuh"
#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {

__device__ inline void set_admitted(GroupSequence& s, int32_t keys) { s.keys = s.count = keys; }

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

struct GridArgs {
  GroupArgs g;
  int32_t begin, end;  // tokens of the grid
};

// A CTA for a slot: what the grid leaves out goes behind the positions that are grouped, as it comes. The first head's
// also tells the sequence which positions those are.
__global__ void __launch_bounds__(kGroupThreads) split_by_grid(const __grid_constant__ GridArgs a) {
  const GroupArgs& g = a.g;
  const int head = static_cast<int>(blockIdx.x) % g.num_heads;
  GroupSequence& s = g.scratch.sequences[static_cast<int>(blockIdx.x) / g.num_heads];
  const int64_t entry = s.batch;
  const int keys = s.keys;
  const int32_t* admitted = g.scratch.admitted == nullptr ? nullptr : g.scratch.admitted + entry * g.seqlen;
  const auto positions_before = [&](int token) {
    if (admitted == nullptr) return min(token, keys);
    int first = 0, last = keys;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (admitted[middle] < token)
        first = middle + 1;
      else
        last = middle;
    }
    return first;
  };
  const int skipped = positions_before(a.begin), count = positions_before(a.end) - skipped;
  int32_t* out = g.permutation + (entry * g.num_heads + head) * g.seqlen + count;
  for (int i = static_cast<int>(threadIdx.x); i < keys - count; i += kGroupThreads) {
    const int position = i < skipped ? i : i + count;
    out[i] = admitted == nullptr ? position : admitted[position];
  }
  if (head == 0 && threadIdx.x == 0) {
    s.skipped = skipped;
    s.count = count;
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
      next.keys = next.count = static_cast<int32_t>(tokens.count);
      table.sequences[i] = next;
      const int64_t grouped = grouped_tokens(problem, s);
      next.first_chunk += chunks_of(grouped, g.scratch.chunk_tokens);
      next.first_window += windows_of(grouped);
    }
    const cudaError_t error = launch(write_table, table, 1, kSequencesPerLaunch, 0, stream);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error = admit_tokens(problem, g.scratch.sequences, g.scratch.admitted, stream);
  if (error != cudaSuccess || !groups_grid(problem)) return error;
  const Problem::Tokens video = problem.grid_tokens();
  const GridArgs args = {g, static_cast<int32_t>(video.begin), static_cast<int32_t>(video.begin + video.count)};
  return launch(split_by_grid, args, int64_t{g.num_sequences} * g.num_heads, kGroupThreads, 0, stream);
}

cudaError_t write_sequence_order(const GroupArgs& g, cudaStream_t stream) {
  return launch(write_sequence, g, int64_t{g.scratch.num_chunks} * g.num_heads, kGroupThreads, 0, stream);
}

}  // namespace vcattn::sm90a
