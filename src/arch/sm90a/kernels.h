// The kernels of the family: what is compiled, one name each. kernel_*.cu defines what it declares.
#pragma once

#include "arch/sm90a/attention.h"

namespace vcattn::sm90a {

extern const Kernel kAccurate128, kAccurate64, kExact128, kExact64, kFast128, kFast64;
// `exact` with the published row maximum and row sums: a yardstick.
extern const Kernel kRunning128, kRunning64;
// Without block means.
extern const Kernel kPlainAccurate128, kPlainAccurate64, kPlainExact128, kPlainExact64, kPlainFast128, kPlainFast64;

inline constexpr const Kernel* kKernels[] = {
    &kAccurate128,     &kAccurate64,    &kExact128,     &kExact64,      &kFast128,     &kFast64,     &kPlainAccurate128,
    &kPlainAccurate64, &kPlainExact128, &kPlainExact64, &kPlainFast128, &kPlainFast64, &kRunning128, &kRunning64};

}  // namespace vcattn::sm90a
