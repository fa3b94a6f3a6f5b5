// Random tensors made on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace vcattn::cli {

// Writes `count` BF16 numbers, normal with mean 0 and variance 1, to device memory: element i depends on `seed` and i
// alone. Only launches on `stream`.
cudaError_t fill_normal_bf16(void* out, int64_t count, uint64_t seed, cudaStream_t stream);

}  // namespace vcattn::cli
