// CUDA objects that free themselves, for the measuring commands. CUDA's errors become exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "bench.h"

namespace vcattn::cli {

// Throws std::runtime_error that says what failed, unless `status` is cudaSuccess.
void check_cuda(cudaError_t status, const std::string& what);

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "bench"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A point of a stream with the time at which the device passed it.
class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const Stream& stream) const { check_cuda(cudaEventRecord(event_, stream.get()), "event"); }
  void wait() const { check_cuda(cudaEventSynchronize(event_), "bench"); }
  double milliseconds_since(const Event& earlier) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// The current device, which the sm90a back end runs on. Throws where it cannot.
class Card {
 public:
  Card();
  const BenchMachine& machine() const { return machine_; }
  const Clocks& clocks() const { return *clocks_; }

 private:
  BenchMachine machine_;
  std::unique_ptr<Clocks> clocks_;
};

}  // namespace vcattn::cli
