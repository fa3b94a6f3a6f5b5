// A call's tensors on the device and back: what the tests of GPU back ends share.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "support.h"

namespace vcattn::test {

inline void check(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

// Why the sm90a back end cannot run here; empty where it can.
inline std::string no_sm90a() {
  for (int32_t i = 0;; ++i) {
    int32_t available = 0;
    vcattn_message reason{};
    const char* name = vcattn_backend_info(i, &available, &reason);
    if (name == nullptr) return "the build knows no back end sm90a";
    if (std::string(name) == "sm90a") return available != 0 ? "" : reason.text;
  }
}

#define VCATTN_NEEDS_SM90A()                                              \
  do {                                                                    \
    const std::string reason = ::vcattn::test::no_sm90a();                \
    if (!reason.empty()) GTEST_SKIP() << "no sm90a back end: " << reason; \
  } while (false)

// Device memory that starts as 0xFF (NaN in every type), or as a copy.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(std::max<size_t>(bytes, 1)) {
    check(cudaMalloc(&data_, bytes_));
    check(cudaMemset(data_, 0xFF, bytes_));
  }
  DeviceMemory(const void* host, size_t bytes) : DeviceMemory(bytes) {
    check(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice));
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }
  void* data() const { return data_; }
  void read(void* host, size_t bytes) const { check(cudaMemcpy(host, data_, bytes, cudaMemcpyDeviceToHost)); }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// Bytes from the first to the last element of a tensor whose strides are not negative.
inline size_t span_bytes(const vcattn_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < 4; ++i) last += (t.shape[i] - 1) * t.stride[i];
  return static_cast<size_t>(last + 1) * (t.dtype == VCATTN_FP32 ? 4 : 2);
}

// The call `host` with everything in device memory. Outputs start as NaN.
class DeviceCall {
 public:
  explicit DeviceCall(const vcattn_attention_params& host) : host_(host), params(host) {
    params.memory = VCATTN_MEMORY_CUDA;
    for (vcattn_tensor* t : {&params.q, &params.k, &params.v}) t->data = upload(t->data, span_bytes(*t));
    params.out.data = take(span_bytes(params.out));
    if (host.lse != nullptr) {
      lse_bytes_ = 4;
      for (int i = 0; i < 3; ++i) lse_bytes_ += static_cast<size_t>(host.lse_stride[i] * (host.out.shape[i] - 1)) * 4;
      params.lse = static_cast<float*>(take(lse_bytes_));
    }
    if (host.key_mask != nullptr) {
      const size_t bytes = static_cast<size_t>(host.key_mask_stride[0] * (host.k.shape[0] - 1) +
                                               host.key_mask_stride[1] * (host.k.shape[1] - 1) + 1);
      params.key_mask = static_cast<const uint8_t*>(upload(host.key_mask, bytes));
    }
    if (host.permutation != nullptr) {
      const int64_t* k = host.k.shape;
      params.permutation =
          static_cast<const int32_t*>(upload(host.permutation, static_cast<size_t>(k[0] * k[1] * k[2]) * 4));
    }
    params.rope_q = upload_rope(host.rope_q, host.q);
    params.rope_k = upload_rope(host.rope_k, host.k);
  }

  // Runs on a stream of its own, with exactly the workspace asked for, and copies out and lse to the host's.
  Outcome run() {
    vcattn_message message{};
    size_t bytes = 0;
    vcattn_code code = vcattn_attention_workspace_size(&params, &bytes, &message);
    if (code != VCATTN_OK) return {code, message.text};
    DeviceMemory workspace(bytes + kGuard);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    params.stream = stream;
    code = vcattn_attention(&params, workspace.data(), bytes, &message);
    const cudaError_t status = cudaStreamSynchronize(stream);
    EXPECT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
    cudaStreamDestroy(stream);
    std::vector<unsigned char> all(bytes + kGuard);
    workspace.read(all.data(), all.size());
    for (size_t i = bytes; i < all.size(); ++i) {
      if (all[i] != 0xFF) {
        ADD_FAILURE() << "wrote past the workspace, byte " << i - bytes;
        break;
      }
    }
    if (code == VCATTN_OK) download();
    return {code, message.text};
  }

  void download() const {
    check(cudaMemcpy(host_.out.data, params.out.data, span_bytes(host_.out), cudaMemcpyDeviceToHost));
    if (host_.lse != nullptr) check(cudaMemcpy(host_.lse, params.lse, lse_bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  static constexpr size_t kGuard = 4096;

  void* take(size_t bytes) {
    memory_.push_back(std::make_unique<DeviceMemory>(bytes));
    return memory_.back()->data();
  }
  void* upload(const void* host, size_t bytes) {
    memory_.push_back(std::make_unique<DeviceMemory>(host, bytes));
    return memory_.back()->data();
  }

  vcattn_rope upload_rope(vcattn_rope rope, const vcattn_tensor& x) {
    if (rope.pairing == VCATTN_ROPE_NONE) return rope;
    const int64_t extents[3] = {host_.grid.frames, host_.grid.height, host_.grid.width};
    for (int axis = 0; axis < 3; ++axis) {
      int64_t elements = extents[axis] * rope.pairs[axis];
      if (rope.tables == VCATTN_ROPE_PER_TOKEN) {
        elements = 1 + (x.shape[3] / 2 - 1) * rope.stride[3];
        for (int i = 0; i < 3; ++i) elements += (x.shape[i] - 1) * rope.stride[i];
      }
      for (const float** table : {&rope.cos[axis], &rope.sin[axis]}) {
        if (*table != nullptr) *table = static_cast<const float*>(upload(*table, static_cast<size_t>(elements) * 4));
      }
    }
    return rope;
  }

  vcattn_attention_params host_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  size_t lse_bytes_ = 0;

 public:
  vcattn_attention_params params;  // of device memory
};

}  // namespace vcattn::test
