// What must hold for any bytes at all, shared by the libFuzzer targets and tests/fuzz_corpus_test.cpp. Each function
// throws std::logic_error where it does not hold; anything else that escapes is a defect too.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/format.h"
#include "io/tensor_file.h"

namespace vcattn::io::fuzz {

inline constexpr size_t kMaxMessageBytes = 2000;

inline void require(bool condition, const char* what) {
  if (!condition) throw std::logic_error(what);
}

inline void check_message(const std::string& message) {
  require(message.size() <= kMaxMessageBytes, "a message is bounded");
  require(message.starts_with("fuzz."), "a message begins with the file");
  require(std::none_of(message.begin(), message.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }),
          "a message is one line without control characters");
}

inline bool same(const Tensor& a, const Tensor& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.data == b.data;
}

inline std::vector<std::byte> concatenate(const Encoding& encoding) {
  std::vector<std::byte> bytes;
  for (const char c : encoding.head) bytes.push_back(static_cast<std::byte>(c));
  for (const Tensor* tensor : encoding.data) bytes.insert(bytes.end(), tensor->data.begin(), tensor->data.end());
  return bytes;
}

inline void check_same(const TensorFile& a, const TensorFile& b) {
  require(a.metadata == b.metadata, "metadata survive a round trip");
  require(std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(), same),
          "tensors survive a round trip");
}

inline void check_data(const TensorFile& file, size_t bytes) {
  size_t total = 0;
  for (const Tensor& tensor : file.tensors) {
    require(std::all_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t extent) { return extent >= 0; }),
            "extents are not negative");
    require(tensor.data.size() == static_cast<size_t>(tensor.element_count()) * dtype_size(tensor.dtype),
            "data fill the shape");
    total += tensor.data.size();
  }
  require(total <= bytes, "data come from the file");
}

inline void check_safetensors(std::span<const std::byte> bytes) {
  const std::string path = "fuzz.safetensors";
  TensorFile file;
  try {
    file = parse_safetensors(bytes, path);
  } catch (const Error& error) {
    check_message(error.what());
    return;
  }
  check_data(file, bytes.size());
  check_same(parse_safetensors(concatenate(encode_safetensors(file, path)), path), file);
  for (const Tensor& tensor : file.tensors) {
    const TensorFile one = parse_safetensors(bytes, path, {tensor.name});
    require(one.tensors.size() == 1 && same(one.tensors.front(), tensor), "a named tensor is the same alone");
  }
  const std::vector<std::string> wanted = {"v", "k"};
  try {
    const TensorFile chosen = parse_safetensors(bytes, path, wanted);
    for (size_t i = 0; i < wanted.size(); ++i) {
      require(chosen.tensors.at(i).name == wanted[i], "named tensors come in the order of their names");
    }
  } catch (const Error& error) {
    check_message(error.what());
  }
}

inline void check_npy(std::span<const std::byte> bytes) {
  const std::string path = "fuzz.npy";
  TensorFile file;
  try {
    file = parse_npy(bytes, path);
  } catch (const Error& error) {
    check_message(error.what());
    return;
  }
  require(file.tensors.size() == 1 && file.tensors.front().name == "fuzz", "one tensor, named after the file");
  check_data(file, bytes.size());
  if (file.tensors.front().dtype == VCATTN_BF16) return;  // .npy is not written with it
  check_same(parse_npy(concatenate(encode_npy(file, path)), path), file);
}

}  // namespace vcattn::io::fuzz
