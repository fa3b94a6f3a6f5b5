// Counter-based random numbers: SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over the element's index,
// then the Box-Muller transform.
#include <cuda_bf16.h>

#include <algorithm>

#include "bench_random.h"

namespace vcattn::cli {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

__device__ uint64_t random_bits(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Two elements a step.
__global__ void fill_normal(__nv_bfloat16* out, int64_t count, uint64_t seed) {
  const int64_t pairs = (count + 1) / 2, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += step) {
    const uint64_t bits = random_bits(seed, static_cast<uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f;  // (0, 1]
    const float radius = sqrtf(-2.0f * logf(u));
    float sine, cosine;
    sincospif(static_cast<float>(bits & 0xFFFFFF) * 0x1p-23f, &sine, &cosine);
    out[2 * i] = __float2bfloat16_rn(radius * cosine);
    if (2 * i + 1 < count) out[2 * i + 1] = __float2bfloat16_rn(radius * sine);
  }
}

}  // namespace

cudaError_t fill_normal_bf16(void* out, int64_t count, uint64_t seed, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min((count + 2 * kThreads - 1) / (2 * kThreads), kMaxBlocks));
  fill_normal<<<blocks, kThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(out), count, seed);
  return cudaGetLastError();
}

}  // namespace vcattn::cli
