// What a key mask admits. Internal to src/preprocess.
#pragma once

#include <cstdint>

#include "core/validate.h"
#include "preprocess/launch.cuh"

namespace vcattn::sm90a {

template <typename Item>
struct AdmitArgs {
  const uint8_t* key_mask;  // [batch, seqlen_kv]
  int64_t mask_stride[2];
  int64_t seqlen_kv;
  Item* sequences;  // one for each batch entry
  int32_t* admitted;
};

inline constexpr int kAdmitThreads = 1024;
inline constexpr int kTokensPerThread = 8;

// Exclusive prefix sum over the block, and the whole sum.
struct Prefix {
  int before, total;
};
__device__ inline Prefix block_prefix(int count) {
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
template <typename Item>
__global__ void __launch_bounds__(kAdmitThreads) admit(AdmitArgs<Item> a) {
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
  if (threadIdx.x == 0) set_admitted(a.sequences[batch], found);
}

// With a key mask: fills `admitted` [batch, seqlen_kv], and calls set_admitted(Item&, number of them), which whoever
// calls defines, for each of the `sequences` in device memory.
template <typename Item>
cudaError_t admit_tokens(const Problem& problem, Item* sequences, int32_t* admitted, cudaStream_t stream) {
  const vcattn_attention_params& p = *problem.params;
  if (p.key_mask == nullptr) return cudaSuccess;
  const AdmitArgs<Item> args = {
      p.key_mask, {p.key_mask_stride[0], p.key_mask_stride[1]}, problem.seqlen_kv, sequences, admitted};
  return launch(admit<Item>, args, problem.num_sequences, kAdmitThreads, 0, stream);
}

}  // namespace vcattn::sm90a
