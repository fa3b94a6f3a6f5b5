#include "bench_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "terminal.h"

namespace vcattn::cli {

void check_cuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(
      fmt::format("{}: CUDA says {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(std::max<size_t>(bytes, 1)) {
  check_cuda(cudaMalloc(&data_, bytes_), fmt::format("{} of device memory", bytes_text(bytes_)));
}

double Event::milliseconds_since(const Event& earlier) const {
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "event");
  return milliseconds;
}

Card::Card() {
  if (const std::string reason = why_no_sm90a(); !reason.empty()) throw std::runtime_error(reason);
  int device = 0;
  cudaDeviceProp properties = {};
  char pci_bus_id[32] = {};
  check_cuda(cudaGetDevice(&device), "device");
  check_cuda(cudaGetDeviceProperties(&properties, device), "device");
  check_cuda(cudaDeviceGetPCIBusId(pci_bus_id, sizeof pci_bus_id, device), "device");
  check_cuda(cudaDriverGetVersion(&machine_.cuda_driver), "driver");
  check_cuda(cudaRuntimeGetVersion(&machine_.cuda_runtime), "runtime");
  machine_.device = properties.name;
  machine_.multiprocessors = properties.multiProcessorCount;
  machine_.memory_bytes = properties.totalGlobalMem;
  machine_.l2_bytes = static_cast<size_t>(properties.l2CacheSize);
  clocks_ = std::make_unique<Clocks>(pci_bus_id);
  machine_.clocks = clocks_->source();
}

}  // namespace vcattn::cli
