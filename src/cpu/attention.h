// Blocked online softmax over QuantizedQkv: the algorithm of the kernels, in FP32 on the CPU.
#pragma once

#include "core/validate.h"
#include "cpu/plan.h"

namespace vcattn::cpu {

// Writes out, and lse where asked for; VCATTN_OVERFLOW where a row's scores left the range of FP32. Runs in the current
// task arena.
vcattn_code attend(const Problem& problem, const Plan& plan, vcattn_message* message);

}  // namespace vcattn::cpu
