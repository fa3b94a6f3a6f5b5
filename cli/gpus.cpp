#include "gpus.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <memory>

namespace vcattn::cli {
namespace {

// The part of the CUDA driver API that is used here: CUresult and CUdevice are int, 0 is success.
constexpr const char* kDriverLibrary = "libcuda.so.1";
enum DeviceAttribute { kMultiprocessorCount = 16, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };

struct CloseLibrary {
  void operator()(void* handle) const { ::dlclose(handle); }
};

class Driver {
 public:
  // Null where the library cannot be loaded.
  static std::unique_ptr<Driver> load(std::string& why_not) {
    auto driver = std::make_unique<Driver>();
    driver->library_.reset(::dlopen(kDriverLibrary, RTLD_NOW | RTLD_LOCAL));
    if (driver->library_ == nullptr) {
      why_not = fmt::format("none: {}", ::dlerror());
      return nullptr;
    }
    const bool complete = driver->bind("cuInit", driver->init) && driver->bind("cuDriverGetVersion", driver->version) &&
                          driver->bind("cuDeviceGetCount", driver->device_count) &&
                          driver->bind("cuDeviceGet", driver->device) &&
                          driver->bind("cuDeviceGetName", driver->device_name) &&
                          driver->bind("cuDeviceTotalMem_v2", driver->device_memory) &&
                          driver->bind("cuDeviceGetAttribute", driver->device_attribute) &&
                          driver->bind("cuGetErrorName", driver->error_name);
    if (complete) return driver;
    why_not = fmt::format("none: {} lacks a function of the CUDA driver API", kDriverLibrary);
    return nullptr;
  }

  std::string error_text(int result) const {
    const char* name = nullptr;
    return error_name(result, &name) == 0 && name != nullptr ? name : fmt::format("error {}", result);
  }

  int (*init)(unsigned flags) = nullptr;
  int (*version)(int* version) = nullptr;
  int (*device_count)(int* count) = nullptr;
  int (*device)(int* device, int ordinal) = nullptr;
  int (*device_name)(char* name, int size, int device) = nullptr;
  int (*device_memory)(size_t* bytes, int device) = nullptr;
  int (*device_attribute)(int* value, int attribute, int device) = nullptr;
  int (*error_name)(int result, const char** name) = nullptr;

 private:
  template <typename Function>
  bool bind(const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library_.get(), symbol));
    return function != nullptr;
  }

  std::unique_ptr<void, CloseLibrary> library_;
};

Gpu read_gpu(const Driver& driver, int ordinal) {
  Gpu gpu;
  int device = 0;
  if (const int result = driver.device(&device, ordinal); result != 0) {
    gpu.name = fmt::format("device {}: {}", ordinal, driver.error_text(result));
    return gpu;
  }
  char name[256] = {};
  driver.device_name(name, sizeof name - 1, device);
  gpu.name = name;
  driver.device_attribute(&gpu.compute_major, kComputeCapabilityMajor, device);
  driver.device_attribute(&gpu.compute_minor, kComputeCapabilityMinor, device);
  driver.device_attribute(&gpu.multiprocessors, kMultiprocessorCount, device);
  size_t bytes = 0;
  driver.device_memory(&bytes, device);
  gpu.memory_bytes = bytes;
  return gpu;
}

}  // namespace

GpuReport find_gpus() {
  GpuReport report;
  const std::unique_ptr<Driver> driver = Driver::load(report.driver);
  if (driver == nullptr) return report;
  int version = 0, count = 0;
  int result = driver->init(0);
  if (result == 0) result = driver->version(&version);
  if (result == 0) result = driver->device_count(&count);
  if (result != 0) {
    report.driver = fmt::format("{} answers {}", kDriverLibrary, driver->error_text(result));
    return report;
  }
  report.driver_found = true;
  report.driver = fmt::format("CUDA {}.{}", version / 1000, version % 1000 / 10);
  for (int i = 0; i < count; ++i) report.gpus.push_back(read_gpu(*driver, i));
  return report;
}

}  // namespace vcattn::cli
