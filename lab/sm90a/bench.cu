// All variants in one table: bench N H [rounds] [q_scale] [variant]. Interleaved rounds, medians.
#include "attention_pair_regs.cuh"
#include "harness.cuh"

using namespace lab;

template <auto kKernel, int kBytes, int kThreads>
void launch_kernel(const Params& p) {
  static bool ready = false;
  if (!ready) CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  ready = true;
  kKernel<<<132, kThreads, kBytes>>>(p);
}

struct pair_regs_kernel {
  static constexpr pair_regs::Config config{};
};
#define DEFINE(T, ...)                           \
  struct T {                                     \
    static constexpr Config config{__VA_ARGS__}; \
  };
DEFINE(pair_serial, .schedule = Schedule::kPair)
DEFINE(late_128, .schedule = Schedule::kLate)
DEFINE(serial3_128, .p_in_smem = true, .p_barrier = false, .consumers = 3)
DEFINE(fast_late_128, .schedule = Schedule::kLate, .convert = Convert::kF16)

#define V(T) \
  Variant { #T, launch < T>, T::config }
#define P(NS)                                                                                     \
  Variant {                                                                                       \
#NS, launch_kernel < NS::attention < NS##_kernel>, NS::kSharedBytes, NS::kThreads>, Config {} \
  }

int main(int argc, char** argv) {
  return run({P(pair_regs), V(pair_serial), V(late_128), V(serial3_128), V(fast_late_128)}, argc, argv);
}
