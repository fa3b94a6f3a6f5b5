// The stages of prepare(), in the order of their launches. Internal to src/preprocess.
#pragma once

#include "preprocess/prepare.h"

namespace vcattn::sm90a {

// One prepare() as its stages see it.
struct PrepareCall {
  const Problem& problem;
  const vcattn_recipe& recipe;
  const QuantizedQkv& qkv;
  const PrepareScratch& scratch;
  cudaStream_t stream;
};

// Sequences, the admitted tokens of each, and zeros where the other stages gather maxima and flags.
cudaError_t prepare_sequences(const PrepareCall& call);
cudaError_t prepare_statistics(const PrepareCall& call);
cudaError_t prepare_values(const PrepareCall& call);
cudaError_t prepare_keys(const PrepareCall& call);
cudaError_t prepare_queries(const PrepareCall& call);

}  // namespace vcattn::sm90a
