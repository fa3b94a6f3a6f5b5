// What must be known of all of K and V before either can be quantised: K's mean, V's block means, and what V's scales
// must hold.
#include <algorithm>

#include "preprocess/key_sums.cuh"
#include "preprocess/launch.cuh"
#include "preprocess/value_statistics.cuh"

namespace vcattn::sm90a {
namespace {

struct StatisticsArgs {
  PrepareArgs prepare;
  int32_t sums, tiles;  // units: partial sums of K, tiles of V
  int32_t sum_blocks;   // thread blocks, before those of V
};

// Both in one launch: the few long sums of K run beside the tiles of V.
template <typename Element, int kDim, bool kRope>
__global__ void __launch_bounds__(kChannelThreads, kChannelBlocksPerSm)
    measure(const __grid_constant__ StatisticsArgs a) {
  const ChannelGroup<kDim> group;
  const int block = static_cast<int>(blockIdx.x);
  if (block < a.sum_blocks) {
    with_unit<SumShared<Element, kDim, kRope>>(
        group, block, a.sums, [&](int unit, auto& shared) { add_keys(a.prepare, unit, group, shared); });
  } else {
    with_unit<ValueShared<Element, kDim>>(group, block - a.sum_blocks, a.tiles, [&](int unit, auto& shared) {
      measure_values(a.prepare, unit, group, shared);
    });
  }
}

}  // namespace

cudaError_t prepare_statistics(const PrepareCall& call) {
  const vcattn_attention_params& p = *call.problem.params;
  const QuantizedQkv& qkv = call.qkv;
  const int64_t sums = call.recipe.k_centred != 0 ? int64_t{qkv.num_heads_kv} * qkv.mean_groups : 0;
  StatisticsArgs args{};
  args.prepare = prepare_args(call);
  // One launch, or two where K and V have different element types.
  for (const int32_t dtype : {VCATTN_BF16, VCATTN_FP16, VCATTN_FP32}) {
    args.sums = static_cast<int32_t>(p.k.dtype == dtype ? sums : 0);
    args.tiles = static_cast<int32_t>(p.v.dtype == dtype ? key_units(qkv) : 0);
    const cudaError_t error = with_element_and_dim(dtype, qkv.dim, [&]<typename Element, int kDim>() {
      constexpr int kGroups = ChannelGroup<kDim>::kGroupCount;
      args.sum_blocks = static_cast<int32_t>(ceil_div(args.sums, kGroups));
      return with_pairing(p.rope_k, [&]<int kPairing>() {
        constexpr bool kRope = kPairing != VCATTN_ROPE_NONE;
        constexpr size_t kBytes = std::max(sizeof(SumShared<Element, kDim, kRope>), sizeof(ValueShared<Element, kDim>));
        return launch(measure<Element, kDim, kRope>, args, args.sum_blocks + ceil_div(args.tiles, kGroups),
                      kChannelThreads, static_cast<int>(kBytes) * kGroups, call.stream);
      });
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace vcattn::sm90a
