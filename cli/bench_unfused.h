// Preparation of Q, K and V with every step a kernel of its own that goes through memory: what the fused kernels of
// src/preprocess are measured against (the comparison of the paper's Figure 7). Its codes, scales and means are theirs
// bit for bit, which fixes the intermediates: BF16 for rows that are only moved, FP32 for what was computed.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "core/arena.h"
#include "preprocess/stages.h"

namespace vcattn::cli {

// Rows are dense, [slots, seqlen, dim]; slot = head * batch + batch entry. Each of Q, K and V uses them in its turn.
struct UnfusedScratch {
  uint16_t* gathered;  // BF16: K or V in the order of the keys
  float* rows;         // what is to be quantised
  uint8_t* codes;
  float* maxima;  // of each row of Q; of each tile of K
};

UnfusedScratch take_unfused_scratch(const Problem& problem, const sm90a::QuantizedQkv& qkv, Arena& arena);

// Why the chain does not serve the problem; null where it does. It is for timing: dense batches, head_dim 64 or 128,
// finite inputs.
const char* unfused_unsupported(const Problem& problem);

struct UnfusedStep {
  const char* name;
  double bytes;  // read and written, without scales and means, which are under 2 % of it
  std::function<cudaError_t()> launch;
};

// In order, to be run behind prepare_sequences of the same call: together they do what the other stages do.
std::vector<UnfusedStep> unfused_steps(const sm90a::PrepareCall& call, const UnfusedScratch& scratch);

}  // namespace vcattn::cli
