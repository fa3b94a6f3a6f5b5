// NVIDIA GPUs of this machine, asked of the driver at run time: the tool links to no CUDA library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace vcattn::cli {

struct Gpu {
  std::string name;
  int compute_major = 0, compute_minor = 0;
  int multiprocessors = 0;
  uint64_t memory_bytes = 0;
};

struct GpuReport {
  bool driver_found = false;
  std::string driver;  // "CUDA 12.4", or why there is none
  std::vector<Gpu> gpus;
};

// A machine without driver or GPU is a finding, not a failure; never throws for it.
GpuReport find_gpus();

}  // namespace vcattn::cli
