// Tensor files: .safetensors and .npy, read and written whole. For the tool and the tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "vcattn/vcattn.h"

namespace vcattn::io {

// One line that names the file, the tensor, what was expected and what was found.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Dense, row-major (C order), little-endian.
struct Tensor {
  std::string name;
  vcattn_dtype dtype = VCATTN_FP32;
  std::vector<int64_t> shape;
  std::vector<std::byte> data;

  int64_t element_count() const;
};

struct TensorFile {
  std::map<std::string, std::string> metadata;  // safetensors' __metadata__
  std::vector<Tensor> tensors;
};

size_t dtype_size(vcattn_dtype dtype);       // in bytes; 0 for any other value
const char* dtype_name(vcattn_dtype dtype);  // "BF16", "FP16", "FP32"; "unknown" for any other value

// Parses file contents; `path` is used in messages only. Throws Error on anything that does not hold: these two face
// hostile bytes and are fuzzed. Extents of 0 and no extents at all are legal. Tensors of other dtypes are skipped
// unless named in `wanted`, and then refused. The result holds one tensor for each of `wanted`, in that order; an empty
// `wanted` means every tensor that can be read, in the order of the header.
TensorFile parse_safetensors(std::span<const std::byte> bytes, const std::string& path,
                             const std::vector<std::string>& wanted = {});
TensorFile parse_npy(std::span<const std::byte> bytes, const std::string& path);

// Reads a regular file by extension; it is mapped, and what is asked for is copied. An .npy file gives one tensor named
// after the file's stem; two-byte void elements, as NumPy saves bfloat16, are BF16.
TensorFile read_tensors(const std::string& path, const std::vector<std::string>& wanted = {});

// Where writing to `path` ends up: absolute, without symbolic links, whether the file exists or not.
std::string destination_of(const std::string& path);

// Writes by extension to a temporary file in the same folder and renames it: a failure leaves the old file, or none.
// The permissions are those of the old file, or a new file's; symbolic links are followed. Pipes and devices are
// written straight to, and /dev/stdout, /dev/stderr and /dev/fd/N continue that descriptor (flush stdio first). .npy
// takes exactly one tensor and no BF16, for which NumPy has no dtype.
void write_tensors(const std::string& path, const TensorFile& file);
// The same guarantee for text, such as a report.
void write_text(const std::string& path, const std::string& text);

}  // namespace vcattn::io
