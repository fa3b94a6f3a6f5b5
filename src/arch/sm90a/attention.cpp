#include "arch/sm90a/attention.h"

#include <algorithm>

#include "arch/sm90a/kernels.h"

namespace vcattn::sm90a {

const Kernel* find_kernel(const Config& config) {
  for (const Kernel* kernel : kKernels) {
    if (kernel->config == config) return kernel;
  }
  return nullptr;
}

cudaError_t launch_attention(const Kernel& kernel, const AttentionParams& params, cudaStream_t stream) {
  const int items = params.qkv.blocks * params.qkv.num_heads;
  if (items == 0) return cudaSuccess;
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (status != cudaSuccess) return status;
  // One CTA fills a multiprocessor, and a cluster takes two.
  return kernel.launch(params, std::min(multiprocessors / 2, items), stream);
}

}  // namespace vcattn::sm90a
