// Clocks, power and what holds the clocks down, read through NVML where the driver brings it. NVML is loaded at run
// time, so that the tool needs no library of NVIDIA's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace vcattn::cli {

struct ClockReading {
  unsigned sm_mhz = 0, memory_mhz = 0;
  double watts = 0;  // NVML: over the last second on most cards
  unsigned celsius = 0;
  uint64_t reasons = 0;  // bits of nvmlClocksEventReasons
};

// Names of the bits: "sw_power_cap".
std::vector<std::string> clock_reason_names(uint64_t reasons);

// What the readings are of.
struct ClockSource {
  std::string why_not;  // there are no readings; empty where there are
  std::string driver;   // version: "580.82.07"
  unsigned max_sm_mhz = 0;
  double limit_watts = 0;  // enforced
};

class Clocks {
 public:
  // Of the device at `pci_bus_id` ("0000:41:00.0"). A driver without NVML is a finding: source().why_not.
  explicit Clocks(const std::string& pci_bus_id);
  ~Clocks();
  Clocks(const Clocks&) = delete;
  Clocks& operator=(const Clocks&) = delete;

  const ClockSource& source() const { return source_; }
  // Fields that NVML does not answer stay 0. Only where there are readings.
  ClockReading read() const;

 private:
  struct Nvml;
  std::unique_ptr<Nvml> nvml_;
  ClockSource source_;
};

}  // namespace vcattn::cli
