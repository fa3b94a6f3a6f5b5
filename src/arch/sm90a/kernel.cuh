// Defines kernels of the family for kernels.h.
#pragma once

#include "arch/sm90a/attention.cuh"
#include "arch/sm90a/attention.h"
#include "preprocess/launch.cuh"

namespace vcattn::sm90a {

template <class Variant>
cudaError_t launch_variant(const AttentionParams& params, int clusters, cudaStream_t stream) {
  return launch(attention<Variant>, params, 2 * int64_t{clusters}, Variant::config.threads(), kSharedBytes<Variant>,
                stream);
}

}  // namespace vcattn::sm90a

#define VCATTN_KERNEL(name, ...)                                              \
  namespace vcattn::sm90a {                                                   \
  struct name##Variant {                                                      \
    static constexpr Config config = __VA_ARGS__;                             \
  };                                                                          \
  extern const Kernel name;                                                   \
  const Kernel name = {name##Variant::config, launch_variant<name##Variant>}; \
  }
// name128 and name64, by the fields of a Config behind head_dim.
#define VCATTN_KERNELS(name, ...)                          \
  VCATTN_KERNEL(name##128, {.head_dim = 128, __VA_ARGS__}) \
  VCATTN_KERNEL(name##64, {.head_dim = 64, __VA_ARGS__})
