// Value tokens, and workspaces of exactly the size asked for, for the tests of V-Smooth's grouping.
#pragma once

#include <gtest/gtest.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "io/tensor_file.h"
#include "vsmooth/grouping.h"

namespace vcattn::test {

// vcattn_grouping with defaults, so that a test names only what it is about.
struct Grouping {
  int32_t clusters = 1;
  int32_t iterations = 0;
  int32_t warm_iterations = 0;
  int32_t seeding = VCATTN_SEED_SPACED;
  uint64_t seed = 0;

  operator vcattn_grouping() const { return {clusters, iterations, warm_iterations, seeding, seed}; }
};

class TokenBuffer {
 public:
  TokenBuffer(int64_t count, int64_t dim)
      : count_(count), dim_(dim), stride_((dim + 15) / 16 * 16), data_(static_cast<size_t>(count * stride_)) {}

  // One channel.
  explicit TokenBuffer(const std::vector<float>& values) : TokenBuffer(static_cast<int64_t>(values.size()), 1) {
    for (int64_t i = 0; i < count_; ++i) at(i, 0) = values[static_cast<size_t>(i)];
  }

  float& at(int64_t token, int64_t channel) { return data_[static_cast<size_t>(token * stride_ + channel)]; }
  vsmooth::Tokens tokens() const { return {data_.data(), count_, dim_, stride_}; }
  int64_t stride() const { return stride_; }

 private:
  int64_t count_, dim_, stride_;
  std::vector<float> data_;
};

// Drawn around `groups` centres, which lie a few standard deviations apart. The generator alone is portable between
// standard libraries, so no distribution of <random> is used.
inline TokenBuffer random_tokens(int64_t count, int64_t dim, uint32_t seed, int64_t groups = 8) {
  std::mt19937 random(seed);
  const auto uniform = [&] { return static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f; };
  TokenBuffer centres(groups, dim), buffer(count, dim);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t d = 0; d < dim; ++d) centres.at(g, d) = 2.0f * uniform();
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = random() % groups;
    for (int64_t d = 0; d < dim; ++d) buffer.at(i, d) = centres.at(g, d) + uniform();
  }
  return buffer;
}

// The tensor v, BF16 [1, 1, tokens, head_dim], of a file in data/.
inline TokenBuffer load_values(const std::string& file) {
  const io::Tensor v = io::read_tensors(std::string(VCATTN_TEST_DATA) + "/" + file, {"v"}).tensors.at(0);
  TokenBuffer buffer(v.shape.at(2), v.shape.at(3));
  for (int64_t i = 0; i < v.element_count(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, v.data.data() + i * 2, sizeof bits);
    buffer.at(i / v.shape[3], i % v.shape[3]) = std::bit_cast<float>(uint32_t{bits} << 16);
  }
  return buffer;
}

inline std::vector<int32_t> identity(int64_t count) {
  std::vector<int32_t> permutation(static_cast<size_t>(count));
  std::iota(permutation.begin(), permutation.end(), 0);
  return permutation;
}

inline bool is_permutation_of_tokens(std::vector<int32_t> permutation) {
  std::sort(permutation.begin(), permutation.end());
  return permutation == identity(static_cast<int64_t>(permutation.size()));
}

inline double energy(const TokenBuffer& buffer, const std::vector<int32_t>& permutation, int64_t mean_rows) {
  return vsmooth::energy_removed(buffer.tokens(), permutation.data(), mean_rows);
}

// `size` bytes at the alignment of the contract, between guards whose change a test sees.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(size_t size)
      : size_(size), bytes_(static_cast<std::byte*>(operator new(kGuard + size + kGuard, kAlign))) {
    std::fill_n(bytes_, kGuard + size + kGuard, kMark);
  }
  ~GuardedWorkspace() { operator delete(bytes_, kAlign); }
  GuardedWorkspace(const GuardedWorkspace&) = delete;
  GuardedWorkspace& operator=(const GuardedWorkspace&) = delete;

  std::span<std::byte> span() { return {bytes_ + kGuard, size_}; }
  bool guards_intact() const {
    const auto marked = [](std::byte b) { return b == kMark; };
    return std::all_of(bytes_, bytes_ + kGuard, marked) &&
           std::all_of(bytes_ + kGuard + size_, bytes_ + kGuard + size_ + kGuard, marked);
  }

 private:
  static constexpr size_t kGuard = VCATTN_WORKSPACE_ALIGNMENT;
  static constexpr std::align_val_t kAlign{VCATTN_WORKSPACE_ALIGNMENT};
  static constexpr std::byte kMark{0xA5};
  size_t size_;
  std::byte* bytes_;
};

// Runs `body` with 1, 2 and 3 threads.
inline void for_each_thread_count(const std::function<void(int)>& body) {
  for (const int threads : {1, 2, 3}) {
    const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, static_cast<size_t>(threads));
    body(threads);
  }
}

}  // namespace vcattn::test
