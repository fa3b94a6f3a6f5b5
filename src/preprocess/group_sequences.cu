// Sequences from batch entries or packed segments, what a key mask admits of them, and the order that leaves it so.
#include <algorithm>

#include "numerics/attention_math.h"
#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {
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

struct AdmitArgs {
  const uint8_t* key_mask;  // [batch, seqlen]
  int64_t mask_stride[2];
  int64_t seqlen;
  GroupSequence* sequences;  // one for each batch entry
  int32_t* admitted;
};

constexpr int kAdmitThreads = 1024;
constexpr int kTokensPerThread = 8;

// One block for a batch entry: its admitted tokens, ascending, and their number.
__global__ void __launch_bounds__(kAdmitThreads) admit(const __grid_constant__ AdmitArgs a) {
  __shared__ int warp_sums[kAdmitThreads / 32];
  const int64_t batch = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint8_t* mask = a.key_mask + batch * a.mask_stride[0];
  int32_t* out = a.admitted + batch * a.seqlen;
  int found = 0;
  for (int64_t base = 0; base < a.seqlen; base += kAdmitThreads * kTokensPerThread) {
    const int64_t first = base + int64_t{threadIdx.x} * kTokensPerThread;
    uint32_t admits = 0;
    for (int i = 0; i < kTokensPerThread; ++i) {
      if (first + i < a.seqlen && mask[(first + i) * a.mask_stride[1]] != 0) admits |= 1U << i;
    }
    int through = __popc(admits);
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) warp_sums[warp] = through;
    __syncthreads();
    int place = found + through - __popc(admits);
    for (int w = 0; w < kAdmitThreads / 32; ++w) {
      if (w < warp) place += warp_sums[w];
      found += warp_sums[w];
    }
    for (int i = 0; i < kTokensPerThread; ++i) {
      if ((admits >> i & 1) != 0) out[place++] = static_cast<int32_t>(first) + i;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) a.sequences[batch].count = found;
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
  const vcattn_attention_params& p = *problem.params;
  if (p.key_mask == nullptr) return cudaSuccess;
  const AdmitArgs args = {p.key_mask,
                          {p.key_mask_stride[0], p.key_mask_stride[1]},
                          problem.seqlen_kv,
                          g.scratch.sequences,
                          g.scratch.admitted};
  return launch(admit, args, problem.num_sequences, kAdmitThreads, 0, stream);
}

cudaError_t write_sequence_order(const GroupArgs& g, cudaStream_t stream) {
  return launch(write_sequence, g, int64_t{g.scratch.num_chunks} * g.num_heads, kGroupThreads, 0, stream);
}

}  // namespace vcattn::sm90a
