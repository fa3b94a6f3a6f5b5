#include "bench_clocks.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <bit>

namespace vcattn::cli {
namespace {

constexpr const char* kLibrary = "libnvidia-ml.so.1";

// nvml.h: nvmlReturn_t 0 is success; nvmlClockType_t; nvmlTemperatureSensors_t.
constexpr int kClockSm = 1, kClockMemory = 2, kTemperatureGpu = 0;

// nvml.h, "nvmlClocksEventReasons": one bit each, from bit 0.
constexpr const char* kReasons[] = {"gpu_idle",
                                    "applications_clocks_setting",
                                    "sw_power_cap",
                                    "hw_slowdown",
                                    "sync_boost",
                                    "sw_thermal_slowdown",
                                    "hw_thermal_slowdown",
                                    "hw_power_brake_slowdown",
                                    "display_clock_setting"};

struct CloseLibrary {
  void operator()(void* handle) const { ::dlclose(handle); }
};

}  // namespace

std::vector<std::string> clock_reason_names(uint64_t reasons) {
  std::vector<std::string> names;
  for (; reasons != 0; reasons &= reasons - 1) {
    const auto bit = static_cast<size_t>(std::countr_zero(reasons));
    names.push_back(bit < std::size(kReasons) ? kReasons[bit] : fmt::format("bit_{}", bit));
  }
  return names;
}

struct Clocks::Nvml {
  ~Nvml() {
    if (initialised) shutdown();
  }

  // The functions, then the device; what is missing otherwise.
  std::string open(const std::string& pci_bus_id) {
    library.reset(::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL));
    if (library == nullptr) return ::dlerror();
    const bool complete =
        bind("nvmlInit_v2", init) && bind("nvmlShutdown", shutdown) && bind("nvmlErrorString", error_string) &&
        bind("nvmlDeviceGetHandleByPciBusId_v2", by_pci_bus_id) && bind("nvmlSystemGetDriverVersion", driver_version) &&
        bind("nvmlDeviceGetClockInfo", clock) && bind("nvmlDeviceGetMaxClockInfo", max_clock) &&
        bind("nvmlDeviceGetPowerUsage", power) && bind("nvmlDeviceGetEnforcedPowerLimit", power_limit) &&
        bind("nvmlDeviceGetTemperature", temperature) &&
        // The name that drivers before 535 know too.
        bind("nvmlDeviceGetCurrentClocksThrottleReasons", reasons);
    if (!complete) return fmt::format("{} lacks a function", kLibrary);
    if (const int result = init(); result != 0) return fmt::format("nvmlInit: {}", error_string(result));
    initialised = true;
    if (const int result = by_pci_bus_id(pci_bus_id.c_str(), &device); result != 0) {
      return fmt::format("no device at {}: {}", pci_bus_id, error_string(result));
    }
    return "";
  }

  template <typename Function>
  bool bind(const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library.get(), symbol));
    return function != nullptr;
  }

  using Device = void*;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int result) = nullptr;
  int (*by_pci_bus_id)(const char* id, Device* device) = nullptr;
  int (*driver_version)(char* text, unsigned size) = nullptr;
  int (*clock)(Device, int type, unsigned* mhz) = nullptr;
  int (*max_clock)(Device, int type, unsigned* mhz) = nullptr;
  int (*power)(Device, unsigned* milliwatts) = nullptr;
  int (*power_limit)(Device, unsigned* milliwatts) = nullptr;
  int (*temperature)(Device, int sensor, unsigned* celsius) = nullptr;
  int (*reasons)(Device, unsigned long long* bits) = nullptr;

  std::unique_ptr<void, CloseLibrary> library;
  bool initialised = false;
  Device device = nullptr;
};

Clocks::Clocks(const std::string& pci_bus_id) : nvml_(std::make_unique<Nvml>()) {
  source_.why_not = nvml_->open(pci_bus_id);
  if (!source_.why_not.empty()) return;
  char version[96] = {};
  unsigned milliwatts = 0;
  if (nvml_->driver_version(version, sizeof version - 1) == 0) source_.driver = version;
  nvml_->max_clock(nvml_->device, kClockSm, &source_.max_sm_mhz);
  if (nvml_->power_limit(nvml_->device, &milliwatts) == 0) source_.limit_watts = milliwatts * 1e-3;
}

Clocks::~Clocks() = default;

ClockReading Clocks::read() const {
  ClockReading reading;
  unsigned milliwatts = 0;
  unsigned long long reasons = 0;
  nvml_->clock(nvml_->device, kClockSm, &reading.sm_mhz);
  nvml_->clock(nvml_->device, kClockMemory, &reading.memory_mhz);
  if (nvml_->power(nvml_->device, &milliwatts) == 0) reading.watts = milliwatts * 1e-3;
  nvml_->temperature(nvml_->device, kTemperatureGpu, &reading.celsius);
  if (nvml_->reasons(nvml_->device, &reasons) == 0) reading.reasons = reasons;
  return reading;
}

}  // namespace vcattn::cli
