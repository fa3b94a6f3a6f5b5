// Launches the attention kernel for prepared operands.
#pragma once

#include <cuda_runtime_api.h>

#include "arch/sm90a/config.h"

namespace vcattn::sm90a {

// One kernel of the family, compiled in a file of its own.
struct Kernel {
  Config config;
  cudaError_t (*launch)(const AttentionParams& params, int clusters, cudaStream_t stream);
};

// The kernel of `config`, or null.
const Kernel* find_kernel(const Config& config);

// Launches it on the current device: never waits nor allocates.
cudaError_t launch_attention(const Kernel& kernel, const AttentionParams& params, cudaStream_t stream);

}  // namespace vcattn::sm90a
