#include "preprocess/prepare.h"

#include "preprocess/stages.h"

namespace vcattn::sm90a {

PrepareScratch take_prepare_scratch(const Problem& problem, const QuantizedQkv& qkv, Arena& arena) {
  const vcattn_recipe& recipe = problem.params->recipe;
  const int64_t slots = int64_t{qkv.num_heads_kv} * qkv.num_sequences;
  const bool masked = problem.params->key_mask != nullptr, centred = recipe.k_centred != 0;
  PrepareScratch scratch{};
  scratch.admitted = arena.take<int32_t>(masked ? problem.batch * problem.seqlen_kv : 0);
  scratch.key_sums = arena.take<double>(centred ? int64_t{qkv.num_heads_kv} * qkv.mean_groups * qkv.dim : 0);
  scratch.key_mean = arena.take<float>(centred ? slots * qkv.dim : 0);
  scratch.value_means = arena.take<float>(recipe.mean_rows > 0 ? int64_t{qkv.num_heads_kv} * qkv.tiles * qkv.dim : 0);
  scratch.num_zeroed = slots * (2 + 2 * int64_t{qkv.dim});
  scratch.zeroed = arena.take<uint32_t>(scratch.num_zeroed);
  if (scratch.zeroed == nullptr) return scratch;
  scratch.key_arrivals = scratch.zeroed;
  scratch.key_max = scratch.key_arrivals + slots;
  scratch.value_max = scratch.key_max + slots;
  scratch.value_nonfinite = scratch.value_max + slots * qkv.dim;
  return scratch;
}

cudaError_t prepare(const Problem& problem, const QuantizedQkv& qkv, const PrepareScratch& scratch,
                    cudaStream_t stream) {
  const PrepareCall call = {problem, problem.params->recipe, qkv, scratch, stream};
  // Values first: of short sequences, the L2 cache still holds what the statistics read last.
  for (const auto stage : {prepare_sequences, prepare_statistics, prepare_values, prepare_keys, prepare_queries}) {
    if (const cudaError_t error = stage(call); error != cudaSuccess) return error;
  }
  // A kernel that restores means whatever the recipe says adds nothing.
  if (qkv.means == nullptr || call.recipe.mean_rows > 0) return cudaSuccess;
  const size_t groups = static_cast<size_t>(qkv.num_heads_kv) * static_cast<size_t>(qkv.mean_groups);
  return cudaMemsetAsync(qkv.means, 0, groups * mean_group_bytes(qkv.dim), stream);
}

}  // namespace vcattn::sm90a
