// Launching kernels with their errors checked, and choosing their instance. Internal to the GPU back ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "preprocess/elements.cuh"
#include "vcattn/vcattn.h"

namespace vcattn::sm90a {

// A grid of `blocks` blocks in one dimension; none is no launch.
template <typename Args>
cudaError_t launch(void (*kernel)(Args), const Args& args, int64_t blocks, int threads, int shared_bytes,
                   cudaStream_t stream) {
  constexpr int kSharedWithoutAsking = 32 * 1024;  // of 48 KiB, which static shared memory takes a part of
  if (blocks == 0) return cudaSuccess;
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  if (shared_bytes > kSharedWithoutAsking) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// work.operator()<Element, kDim>() for a tensor of vcattn_dtype `dtype`, stored with `dim` channels.
template <typename Work>
cudaError_t with_element_and_dim(int32_t dtype, int dim, Work work) {
  const auto with_element = [&]<typename Element>() {
    return dim == 64 ? work.template operator()<Element, 64>() : work.template operator()<Element, 128>();
  };
  switch (dtype) {
    case VCATTN_BF16:
      return with_element.template operator()<Bf16>();
    case VCATTN_FP16:
      return with_element.template operator()<Fp16>();
    default:
      return with_element.template operator()<Fp32>();
  }
}

}  // namespace vcattn::sm90a
