// What the two formats and the file layer share below the public interface.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/tensor_file.h"

namespace vcattn::io {

inline constexpr size_t kMaxRank = 64;  // NumPy's limit

// Bytes of a dense tensor. None where an extent is negative, or where the product of the extents other than zero does
// not fit 63 bits: an empty tensor must still have strides.
std::optional<int64_t> byte_count(std::span<const int64_t> shape, vcattn_dtype dtype);

// A file: `head`, then the tensors' data in this order. The tensors stay where they are.
struct Encoding {
  std::string head;
  std::vector<const Tensor*> data;
};

// Both throw Error on a tensor that the format, or its own shape, does not admit.
Encoding encode_safetensors(const TensorFile& file, const std::string& path);
Encoding encode_npy(const TensorFile& file, const std::string& path);

// Throws Error unless the tensor's dtype, shape and data fit together.
void check_tensor(const Tensor& tensor, const std::string& path);

}  // namespace vcattn::io
