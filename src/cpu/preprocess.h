// From q, k and v to QuantizedQkv: gather the admitted tokens, centre, rotate, order, subtract block means, quantise.
// The CPU twin of the fused GPU preprocessing; docs/algorithm.md, "Operands".
#pragma once

#include <cstdint>

#include "core/validate.h"
#include "cpu/plan.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {

// Refuses the first NaN or infinity among the q rows and the admitted k and v rows, unless the caller allows them.
vcattn_code check_finite(const Problem& problem, vcattn_message* message);

// The same for v alone.
vcattn_code check_finite_values(const Problem& problem, vcattn_message* message);

// Refuses a caller's permutation that is not one of the admitted tokens of its sequence.
vcattn_code check_permutation(const Problem& problem, const Plan& plan, vcattn_message* message);

// Fills plan.qkv and the `keys` of its sequences. Runs in the current task arena.
void preprocess(const Problem& problem, Plan& plan);

// vcattn_group after validation.
void group(const Problem& problem, const GroupPlan& plan, bool warm, float* centroids, int32_t* permutation);

// Normalised Walsh-Hadamard transform in place; n is a power of two.
void hadamard_row(float* row, int64_t n);

}  // namespace vcattn::cpu
