// Sequences from batch entries or packed segments, the keys that a mask admits, and the zeros that other stages start
// from.
#include <algorithm>

#include "preprocess/launch.cuh"
#include "preprocess/stages.h"

namespace vcattn::sm90a {
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

struct AdmitArgs {
  const uint8_t* key_mask;  // [batch, seqlen_kv]
  int64_t mask_stride[2];
  int64_t seqlen_kv;
  Sequence* sequences;  // one for each batch entry
  int32_t* admitted;
};

constexpr int kAdmitThreads = 1024;
constexpr int kTokensPerThread = 8;

// Exclusive prefix sum over the block, and the whole sum.
struct Prefix {
  int before, total;
};
__device__ Prefix block_prefix(int count) {
  __shared__ int warp_sums[kAdmitThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int through = count;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, through, step);
    if (lane >= step) through += other;
  }
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  int before = through - count, total = 0;
  for (int w = 0; w < kAdmitThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  __syncthreads();
  return {before, total};
}

// One block for a batch entry: its admitted tokens, ascending, and their number.
__global__ void __launch_bounds__(kAdmitThreads) admit(AdmitArgs a) {
  const int64_t batch = blockIdx.x;
  const uint8_t* mask = a.key_mask + batch * a.mask_stride[0];
  int32_t* out = a.admitted + batch * a.seqlen_kv;
  int found = 0;
  for (int64_t base = 0; base < a.seqlen_kv; base += kAdmitThreads * kTokensPerThread) {
    const int64_t first = base + int64_t{threadIdx.x} * kTokensPerThread;
    uint32_t admits = 0;
    for (int i = 0; i < kTokensPerThread; ++i) {
      if (first + i < a.seqlen_kv && mask[(first + i) * a.mask_stride[1]] != 0) admits |= 1U << i;
    }
    const Prefix prefix = block_prefix(__popc(admits));
    int place = found + prefix.before;
    for (int i = 0; i < kTokensPerThread; ++i) {
      if ((admits >> i & 1) != 0) out[place++] = static_cast<int32_t>(first) + i;
    }
    found += prefix.total;
  }
  if (threadIdx.x == 0) a.sequences[batch].keys = found;
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
  const vcattn_attention_params& p = *call.problem.params;
  if (p.key_mask == nullptr) return cudaSuccess;
  const AdmitArgs admit_args = {p.key_mask,
                                {p.key_mask_stride[0], p.key_mask_stride[1]},
                                call.problem.seqlen_kv,
                                qkv.sequences,
                                scratch.admitted};
  return launch(admit, admit_args, qkv.num_sequences, kAdmitThreads, 0, call.stream);
}

}  // namespace vcattn::sm90a
