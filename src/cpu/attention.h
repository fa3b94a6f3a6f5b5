// Blocked online softmax over QuantizedQkv: the algorithm of the kernels, in FP32 on the CPU.
#pragma once

#include "core/validate.h"
#include "cpu/plan.h"

namespace vcattn::cpu {

// Writes out, and lse where asked for. Runs in the current task arena.
void attend(const Problem& problem, const Plan& plan);

}  // namespace vcattn::cpu
