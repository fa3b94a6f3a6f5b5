// Values on the device and one grouping of them: what the tests of grouping on the GPU share.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/tensor_access.h"
#include "preprocess/group.h"
#include "value_tokens.h"

namespace vcattn::sm90a {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline void expect_ok(cudaError_t error, const char* what) {
  ASSERT_EQ(error, cudaSuccess) << what << ": " << cudaGetErrorString(error);
}
#define CUDA_OK(call) expect_ok((call), #call)

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t size) : size_(size) { CUDA_OK(cudaMalloc(&data_, std::max<size_t>(size, 1))); }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  template <typename T>
  T* as() {
    return static_cast<T*>(data_);
  }
  void fill(int byte) { CUDA_OK(cudaMemset(data_, byte, size_)); }
  void write(const void* from, size_t size) { CUDA_OK(cudaMemcpy(data_, from, size, cudaMemcpyHostToDevice)); }
  template <typename T>
  std::vector<T> read(int64_t count, int64_t first = 0) {
    std::vector<T> out(static_cast<size_t>(count));
    CUDA_OK(cudaMemcpy(out.data(), as<T>() + first, sizeof(T) * out.size(), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

// v on host and device. Strides in elements of (batch, token, head, channel).
struct Values {
  std::vector<std::byte> host;
  std::unique_ptr<DeviceBytes> device;
  vcattn_tensor view;  // of the device
  vcattn_tensor host_view;

  std::vector<float> row(int64_t b, int64_t t, int64_t h) const {
    std::vector<float> out(static_cast<size_t>(view.shape[3]));
    load_row(host_view, b, t, h, out.data());
    return out;
  }
};

using Fill = std::function<float(int64_t b, int64_t t, int64_t h, int64_t d)>;

struct Layout {
  vcattn_dtype dtype = VCATTN_BF16;
  bool heads_outside = false;  // [batch, heads, tokens, head_dim] in memory
  int64_t channel_stride = 1;
  int64_t padding = 0;  // elements behind each row
  int64_t first = 0;    // element of the allocation at which v begins
};

inline Values make_values(int64_t batch, int64_t tokens, int64_t heads, int64_t dim, const Fill& fill,
                   const Layout& layout = {}) {
  const int64_t row = dim * layout.channel_stride + layout.padding;
  const int64_t head_stride = layout.heads_outside ? tokens * row : row;
  const int64_t token_stride = layout.heads_outside ? row : heads * row;
  const int64_t element = layout.dtype == VCATTN_FP32 ? 4 : 2;
  Values v;
  // What lies between the rows must not be read.
  v.host.assign(static_cast<size_t>((layout.first + batch * tokens * heads * row) * element), std::byte{0xFF});
  v.host_view = {v.host.data() + layout.first * element,
                 layout.dtype,
                 0,
                 {batch, tokens, heads, dim},
                 {tokens * heads * row, token_stride, head_stride, layout.channel_stride}};
  std::vector<float> values(static_cast<size_t>(dim));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < dim; ++d) values[static_cast<size_t>(d)] = fill(b, t, h, d);
        store_row(v.host_view, b, t, h, values.data());
      }
    }
  }
  v.device = std::make_unique<DeviceBytes>(v.host.size());
  v.device->write(v.host.data(), v.host.size());
  v.view = v.host_view;
  v.view.data = v.device->as<std::byte>() + layout.first * element;
  return v;
}

// Tokens around `groups` centres, another draw for each batch entry and head.
inline Fill clustered(uint32_t seed, int64_t groups = 20) {
  return [=](int64_t b, int64_t t, int64_t h, int64_t d) {
    const auto draw = [](uint64_t x) {
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
      return static_cast<float>(((x ^ (x >> 31)) >> 40) * 0x1p-23 - 1.0);
    };
    const uint64_t place = static_cast<uint64_t>((seed * 131 + b) * 131 + h);
    const int64_t group = static_cast<int64_t>((draw(place * 1000003 + static_cast<uint64_t>(t) * 7 + 5) + 1) / 2 *
                                               static_cast<float>(groups));
    const float centre =
        draw(((place * 1009 + static_cast<uint64_t>(group)) * 1013 + static_cast<uint64_t>(d)) * 0x9E3779B97F4A7C15u);
    const float noise =
        draw(((place * 1000003 + static_cast<uint64_t>(t)) * 131 + static_cast<uint64_t>(d)) * 0xD1B54A32D192ED03u);
    return 2.0f * centre + noise;
  };
}

struct Outcome {
  std::vector<int32_t> permutation;
  std::vector<float> centroids;
  // Of the bits: what a call leaves alone is NaN.
  bool operator==(const Outcome& other) const {
    return permutation == other.permutation && centroids.size() == other.centroids.size() &&
           std::memcmp(centroids.data(), other.centroids.data(), centroids.size() * sizeof(float)) == 0;
  }
};

class Call {
 public:
  Call(const Values& v, int32_t v_order, const test::Grouping& grouping) {
    params_.v = v.view;
    params_.recipe.v_order = v_order;
    params_.recipe.grouping = grouping;
    refresh();
  }
  Call& mask(const std::vector<uint8_t>& bytes, int64_t batch_stride, int64_t token_stride) {
    mask_ = std::make_unique<DeviceBytes>(bytes.size());
    mask_->write(bytes.data(), bytes.size());
    params_.key_mask = mask_->as<uint8_t>();
    params_.key_mask_stride[0] = batch_stride;
    params_.key_mask_stride[1] = token_stride;
    refresh();
    return *this;
  }
  Call& segments(std::vector<int64_t> cu_seqlens) {
    cu_seqlens_ = std::move(cu_seqlens);
    params_.cu_seqlens_q = params_.cu_seqlens_kv = cu_seqlens_.data();
    params_.num_segments = static_cast<int64_t>(cu_seqlens_.size()) - 1;
    refresh();
    return *this;
  }

  Call& grid(const vcattn_video_grid& grid) {
    params_.grid = grid;
    return *this;
  }

  const Problem& problem() const { return problem_; }
  size_t scratch_bytes() const {
    Arena arena(nullptr);
    take_group_scratch(problem_, arena);
    return arena.used();
  }

  // Runs with poisoned scratch and outputs between guards. `first_centroids` empty: cold, and none are kept where
  // `keeps` is false.
  Outcome run(std::vector<float> first_centroids = {}, bool keeps = true, int poison = 0xFF) {
    constexpr size_t kGuard = 4096;
    constexpr unsigned char kMark = 0xA5;
    const size_t bytes = scratch_bytes();
    DeviceBytes scratch(bytes + 2 * kGuard);
    scratch.fill(kMark);
    CUDA_OK(cudaMemset(scratch.as<std::byte>() + kGuard, poison, bytes));
    Arena arena(scratch.as<std::byte>() + kGuard);
    const GroupScratch taken = take_group_scratch(problem_, arena);
    const int64_t positions = problem_.batch * problem_.num_heads_kv * problem_.seqlen_kv;
    const int64_t num_centroids =
        problem_.num_sequences * problem_.num_heads_kv * params_.recipe.grouping.clusters * problem_.head_dim;
    DeviceBytes permutation(sizeof(int32_t) * positions), centroids(sizeof(float) * num_centroids);
    permutation.fill(0x7F);
    centroids.fill(0xFF);
    const bool warm = !first_centroids.empty();
    if (warm) centroids.write(first_centroids.data(), sizeof(float) * first_centroids.size());
    CUDA_OK(group(problem_, taken, warm, keeps ? centroids.as<float>() : nullptr, permutation.as<int32_t>(), nullptr));
    CUDA_OK(cudaDeviceSynchronize());
    for (const size_t begin : {size_t{0}, kGuard + bytes}) {
      const auto guard = scratch.read<unsigned char>(kGuard, static_cast<int64_t>(begin));
      EXPECT_TRUE(std::all_of(guard.begin(), guard.end(), [](unsigned char b) { return b == kMark; }))
          << "wrote outside the scratch";
    }
    return {permutation.read<int32_t>(positions), keeps ? centroids.read<float>(num_centroids) : std::vector<float>{}};
  }

 private:
  void refresh() {
    problem_ = {};
    problem_.params = &params_;
    problem_.batch = params_.v.shape[0];
    problem_.seqlen_kv = params_.v.shape[1];
    problem_.num_heads_kv = params_.v.shape[2];
    problem_.head_dim = params_.v.shape[3];
    problem_.num_sequences = params_.num_segments > 0 ? params_.num_segments : problem_.batch;
  }

  vcattn_attention_params params_{};
  Problem problem_{};
  std::unique_ptr<DeviceBytes> mask_;
  std::vector<int64_t> cu_seqlens_;
};

// The row of (batch, head) in a permutation, `count` entries from `first` on.
inline std::vector<int32_t> order_of(const Outcome& outcome, const Values& v, int64_t b, int64_t h, int64_t first = 0,
                                     int64_t count = -1) {
  const int64_t tokens = v.view.shape[1];
  const auto begin = outcome.permutation.begin() + (b * v.view.shape[2] + h) * tokens + first;
  return {begin, begin + (count < 0 ? tokens : count)};
}

inline test::TokenBuffer tokens_of(const Values& v, int64_t b, int64_t h) {
  test::TokenBuffer buffer(v.view.shape[1], v.view.shape[3]);
  for (int64_t t = 0; t < v.view.shape[1]; ++t) {
    const std::vector<float> row = v.row(b, t, h);
    for (int64_t d = 0; d < v.view.shape[3]; ++d) buffer.at(t, d) = row[static_cast<size_t>(d)];
  }
  return buffer;
}

inline std::vector<int32_t> cpu_order(const test::TokenBuffer& buffer, int32_t v_order,
                                      const test::Grouping& grouping) {
  const vsmooth::Tokens tokens = buffer.tokens();
  std::vector<int32_t> permutation(static_cast<size_t>(tokens.count));
  test::GuardedWorkspace workspace(vsmooth::grouping_workspace_size(tokens.count, tokens.stride, grouping, v_order));
  vsmooth::order_tokens(tokens, v_order, grouping, {}, false, nullptr, permutation.data(), workspace.span());
  return permutation;
}

inline void expect_permutations(const Outcome& outcome, const Values& v, const std::string& what) {
  for (int64_t b = 0; b < v.view.shape[0]; ++b) {
    for (int64_t h = 0; h < v.view.shape[2]; ++h) {
      EXPECT_TRUE(test::is_permutation_of_tokens(order_of(outcome, v, b, h)))
          << what << ", batch " << b << ", head " << h;
    }
  }
}

class GroupCuda : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
    cudaDeviceProp properties{};
    CUDA_OK(cudaGetDeviceProperties(&properties, 0));
    if (properties.major != 9 || properties.minor != 0) GTEST_SKIP() << properties.name << " is not sm_90";
  }
};

}  // namespace vcattn::sm90a
