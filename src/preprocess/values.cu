// V: subtract block means, quantise residuals with one scale per channel, centre the means (V-Smooth).
#include "preprocess/launch.cuh"
#include "preprocess/value_rows.cuh"

namespace vcattn::sm90a {
namespace {

// Codes take the place of rows that all threads have read: those of kStepKeys keys at a time, at the beginning of these
// rows, channel behind channel. Each chunk number shifts by one place, so that neither writing one chunk of many
// channels nor reading all chunks of one meets bank conflicts.
template <typename Element, int kDim>
struct StagedCodes {
  static constexpr int kStepChunks = 2;
  static constexpr int kStepKeys = kStepChunks * kChunkKeys;
  static constexpr int kStepBytes = kStepKeys * RowTile<Element, kDim>::kRowBytes;
  static_assert((kStepChunks * kDim + kBlockN / kChunkKeys) * kChunkBytes <= kStepBytes, "codes fit where keys were");
  __device__ static int place(int channel, int chunk) {
    return chunk / kStepChunks * kStepBytes + (chunk % kStepChunks * kDim + channel + chunk) * kChunkBytes;
  }
};

// The channel's scale; one scale for all channels where the recipe asks for it.
template <int kDim>
__device__ __forceinline__ Scale value_scale(const PrepareArgs& a, int64_t slot, ChannelGroup<kDim> group,
                                             float* warp_maxima) {
  float largest = __uint_as_float(a.scratch.value_max[slot * kDim + group.thread()]);
  if (a.one_v_scale) {
    const float of_warp = warp_max(largest);
    if (group.thread() % 32 == 0) warp_maxima[group.thread() / 32] = of_warp;
    group.sync();
    for (int warp = 0; warp < kDim / 32; ++warp) largest = fmaxf(largest, warp_maxima[warp]);
  }
  return absmax_scale(largest, kE4m3Max);
}

// x / a.odd_factor to nearest. The residual of a product with the rounded reciprocal corrects it (Markstein): right for
// this divisor from kSmallestQuick on, where that residual is exact, by trial of every mantissa.
constexpr float kSmallestQuick = 0x1p-96f;
__device__ __forceinline__ float divide_quickly(const PrepareArgs& a, float x) {
  const float quotient = __fmul_rn(x, a.odd_factor_inverse);
  return __fmaf_rn(__fmaf_rn(-quotient, a.odd_factor, x), a.odd_factor_inverse, quotient);
}

struct Channel {
  Scale scale;
  float mean;
  double error;  // sum over keys of what quantisation took from the residuals, in units of V
};

// Adds to c.error what the codes `pairs` took from the residuals `r`.
__device__ __forceinline__ void add_errors(const PrepareArgs& a, const float (&r)[kChunkKeys],
                                           const uint32_t (&pairs)[kChunkKeys / 2], Channel& c) {
  float error[kChunkKeys];
  float smallest = kSmallestQuick;
#pragma unroll
  for (int key = 0; key < kChunkKeys; key += 2) {
    const float2 value = from_e4m3x2(pairs[key / 2]);
    error[key] = __fsub_rn(r[key], __fmul_rn(value.x, c.scale.descale));
    const float odd = __fsub_rn(r[key + 1], __fmul_rn(value.y, c.scale.descale));
    smallest = fminf(smallest, fabsf(odd));
    error[key + 1] = divide_quickly(a, odd);
  }
  if (smallest < kSmallestQuick) {
#pragma unroll
    for (int key = 1; key < kChunkKeys; key += 2) {
      const float2 value = from_e4m3x2(pairs[key / 2]);
      error[key] = __fdiv_rn(__fsub_rn(r[key], __fmul_rn(value.y, c.scale.descale)), a.odd_factor);
    }
  }
#pragma unroll
  for (int key = 0; key < kChunkKeys; ++key) c.error = add_float(c.error, error[key]);
}

// Codes of the chunk's keys, in positions of operands.h; keys from `limit` on are 0.
template <bool kWhole, typename Element, int kDim>
__device__ __forceinline__ uint4 quantise_chunk(const PrepareArgs& a, const Column<Element, kDim>& column, int chunk,
                                                int limit, Channel& c) {
  constexpr int kGroup = RowTile<Element, kDim>::kExchanged;
  float r[kChunkKeys];
#pragma unroll
  for (int key = 0; key < kChunkKeys; ++key) {
    const int group = chunk * (kChunkKeys / kGroup) + key / kGroup;
    r[key] = __fsub_rn(column.value(group, key % kGroup), c.mean);
    if (key % 2 == 1) r[key] = __fmul_rn(a.odd_factor, r[key]);
    if (!kWhole && key >= limit) r[key] = 0.0f;
  }
  uint32_t pairs[kChunkKeys / 2];
#pragma unroll
  for (int key = 0; key < kChunkKeys; key += 2) {
    pairs[key / 2] = e4m3x2(__fmul_rn(r[key], c.scale.encode), __fmul_rn(r[key + 1], c.scale.encode));
  }
  if (a.means_centred) add_errors(a, r, pairs, c);
  // key_at: a word holds keys 2w, 2w + 1, 2w + 8, 2w + 9.
  return {pairs[0] | pairs[4] << 16, pairs[1] | pairs[5] << 16, pairs[2] | pairs[6] << 16, pairs[3] | pairs[7] << 16};
}

// V^T of the tile, then the ones.
template <typename Element, int kDim>
__device__ __forceinline__ void store_values(int tile, int keys, ChannelGroup<kDim> group, const std::byte* staged,
                                             uint4* out) {
  using Staged = StagedCodes<Element, kDim>;
  constexpr int kRowChunks = kBlockN / kChunkBytes;
#pragma unroll
  for (int i = 0; i < kDim * kRowChunks; i += kDim) {
    const int row = (i + group.thread()) / kRowChunks, byte = (i + group.thread()) % kRowChunks * kChunkBytes;
    // The swizzle is its own inverse.
    const int chunk = swizzled(row, byte, kBlockN) / kChunkBytes - row * kRowChunks;
    out[i + group.thread()] = *reinterpret_cast<const uint4*>(staged + Staged::place(row, chunk));
  }
  for (int i = group.thread(); i < kOnesRows * kRowChunks; i += kDim) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    out[swizzled(kDim + row, chunk * kChunkBytes, kBlockN) / kChunkBytes] = ones_chunk(tile, row, chunk, keys);
  }
}

template <typename Element, int kDim>
__device__ __forceinline__ void quantise_tile(const PrepareArgs& a, int unit, ChannelGroup<kDim> group,
                                              ValueShared<Element, kDim>& shared) {
  using Staged = StagedCodes<Element, kDim>;
  const QuantizedQkv& qkv = a.qkv;
  const KeyTile tile = key_tile(qkv, unit);
  const int keys = keys_in(tile), channel = group.thread();
  auto* out = reinterpret_cast<uint4*>(qkv.v + int64_t{unit} * value_tile_bytes(kDim));
  if (keys == 0) {
    // The second tile of a sequence's last pair is zeros; what lies behind is not read.
    if (tile.s.q_count == 0 || tile.index >= tiles_of(tile.s.keys)) return;
    for (int i = channel; i < value_tile_bytes(kDim) / kChunkBytes; i += kDim) out[i] = {0, 0, 0, 0};
    return;
  }
  load_values(a, tile, keys, group, shared);
  const Column<Element, kDim> column(shared.tile, channel);
  const bool nonfinite = a.scratch.value_nonfinite[tile.slot * kDim + channel] != 0;
  if (nonfinite) column.clean(keys);
  Channel c = {value_scale(a, tile.slot, group, shared.warp_max),
               a.has_means ? a.scratch.value_means[int64_t{unit} * kDim + channel] : 0.0f, 0.0};
#pragma unroll 1
  for (int step = 0; step < kBlockN / Staged::kStepKeys; ++step) {
    uint4 codes[Staged::kStepChunks];
#pragma unroll
    for (int i = 0; i < Staged::kStepChunks; ++i) {
      const int chunk = step * Staged::kStepChunks + i, limit = keys - chunk * kChunkKeys;
      codes[i] = limit >= kChunkKeys ? quantise_chunk<true>(a, column, chunk, limit, c)
                                     : quantise_chunk<false>(a, column, chunk, limit, c);
    }
    group.sync();  // all channels of these keys are read
#pragma unroll
    for (int i = 0; i < Staged::kStepChunks; ++i) {
      const int place = Staged::place(channel, step * Staged::kStepChunks + i);
      *reinterpret_cast<uint4*>(shared.tile + place) = codes[i];
    }
  }
  group.sync();
  store_values<Element, kDim>(tile.index, keys, group, shared.tile, out);
  if (tile.index == 0) {
    qkv.v_descale[tile.slot * kDim + channel] = nonfinite ? float_from_bits(kFloatNan) : c.scale.descale;
  }
  if (!a.has_means) return;
  float mean = c.mean;
  if (a.means_centred) mean = __fadd_rn(mean, static_cast<float>(c.error / static_cast<double>(keys)));
  mean = __fmul_rn(mean, c.scale.encode);
  const int64_t mean_group = int64_t{tile.kv_head} * qkv.mean_groups + tile.s.mean_group + tile.index / kMeanTiles;
  float* means = qkv.means + mean_group * kMeanTiles * kDim;
  means[mean_index(channel, tile.index)] = a.bf16_means ? decode_bf16(encode_bf16(mean)) : round_tf32(mean);
  if (tile.index + 1 != filled_tiles(tile.s)) return;
  // Behind a sequence's last tile, to the end of the group.
  for (int i = tile.index + 1; i % kMeanTiles != 0; ++i) means[mean_index(channel, i)] = 0.0f;
}

// One group of threads for a tile.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kChannelThreads, kChannelBlocksPerSm)
    quantise_values(const __grid_constant__ PrepareArgs a) {
  const ChannelGroup<kDim> group;
  with_unit<ValueShared<Element, kDim>>(group, blockIdx.x, key_units(a.qkv),
                                        [&](int unit, auto& shared) { quantise_tile(a, unit, group, shared); });
}

}  // namespace

cudaError_t prepare_values(const PrepareCall& call) {
  return with_element_and_dim(call.problem.params->v.dtype, call.qkv.dim, [&]<typename Element, int kDim>() {
    constexpr int kGroups = ChannelGroup<kDim>::kGroupCount;
    return launch(quantise_values<Element, kDim>, prepare_args(call), ceil_div(key_units(call.qkv), kGroups),
                  kChannelThreads, static_cast<int>(sizeof(ValueShared<Element, kDim>)) * kGroups, call.stream);
  });
}

}  // namespace vcattn::sm90a
