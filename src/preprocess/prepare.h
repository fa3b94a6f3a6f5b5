// Preprocessing on the device for sm_90a: from q, k and v to the codes, scales and means of arch/sm90a/operands.h, bit
// for bit what the CPU's preprocessing computes (docs/algorithm.md, "Operands").
//
// Served recipes: qk_format INT8 (absmax scales: Q per token, K per 128 keys of the order) or E4M3 (the same, or
// pow2_f16: K per head, Q per token), qk_hadamard and k_centred 0 or 1, q_centred 0; v_format E4M3 per channel or head,
// v_hadamard 0, mean_rows 0 or 128, mean_centred 0 or 1. head_dim at most 128. Who calls has refused the rest.
//
// Calls only launch on the stream: no allocation, no wait, no copy. Results do not depend on the launch geometry. Where
// rotated rows overflow FP32 (the CPU refuses the call: VCATTN_OVERFLOW) codes have no meaning. IEEE division and
// subnormals are needed: not to be compiled with -use_fast_math.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arch/sm90a/operands.h"
#include "core/arena.h"
#include "core/validate.h"

namespace vcattn::sm90a {

// Device memory for the length of one prepare(). Slots: [num_heads_kv, num_sequences].
struct PrepareScratch {
  int32_t* admitted;   // with a key mask: [batch, seqlen_kv] the admitted tokens, ascending
  double* key_sums;    // k_centred: [num_heads_kv, mean_groups, dim] over kStatisticsRows tokens each
  float* key_mean;     // k_centred: [slots, dim]
  float* value_means;  // mean_rows > 0: [num_heads_kv, tiles, dim] in units of V
  uint32_t* zeroed;    // the four below, which start at 0: one block of `num_zeroed`
  int64_t num_zeroed;
  uint32_t* key_arrivals;     // [slots] partial sums of K that are written
  uint32_t* key_max;          // [slots] pow2_f16: largest magnitude of K, bits of a float
  uint32_t* value_max;        // [slots, dim] largest magnitude that V's scale must hold, bits of a float
  uint32_t* value_nonfinite;  // [slots, dim] non-zero where a value is not finite
};

// `qkv`: dim, num_* and the extents blocks, tiles and mean_groups.
PrepareScratch take_prepare_scratch(const Problem& problem, const QuantizedQkv& qkv, Arena& arena);

// Fills what `qkv` points to. problem.params describes device memory, but for cu_seqlens, which are read here and now.
// params->permutation (optional) orders the keys; entries outside their sequence, or of keys that the mask keeps out,
// are never followed and set k_poison. Nothing but its Sequence is written of a sequence without queries or keys.
cudaError_t prepare(const Problem& problem, const QuantizedQkv& qkv, const PrepareScratch& scratch,
                    cudaStream_t stream);

}  // namespace vcattn::sm90a
