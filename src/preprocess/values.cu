// V: subtract block means, quantise residuals with one scale per channel, centre the means (V-Smooth).
//
// A thread works on one channel of a tile of 128 keys: sums over keys stay in the CPU's order, and its 128 codes are
// one row of V^T.
#include "core/recipes.h"
#include "preprocess/key_order.cuh"
#include "preprocess/launch.cuh"
#include "preprocess/row_math.cuh"
#include "preprocess/rows.cuh"
#include "preprocess/stages.h"

namespace vcattn::sm90a {
namespace {

struct ValueArgs {
  Operand v;
  KeyOrder order;
  QuantizedQkv qkv;
  PrepareScratch scratch;
  float odd_factor;          // on residuals of odd keys
  float odd_factor_inverse;  // rounded to nearest
  int32_t has_means, centred, bf16_means, per_head;
};

template <typename Element, int kDim>
struct ValueShared {
  alignas(128) std::byte tile[kBlockN * RowTile<Element, kDim>::kRowBytes];
  const Element* rows[kBlockN];
};

// A block's tile and, where it has keys, its rows in shared memory.
struct Tile {
  Sequence s;
  int64_t slot;
  int kv_head, place;  // among the head's tiles
  int index;           // in the sequence
  int keys;            // 0: nothing to do
};

template <typename Element, int kDim>
__device__ __forceinline__ Tile load_values(const ValueArgs& a, ValueShared<Element, kDim>& shared) {
  const QuantizedQkv& qkv = a.qkv;
  Tile tile;
  tile.kv_head = static_cast<int>(blockIdx.x) / qkv.tiles;
  tile.place = static_cast<int>(blockIdx.x) % qkv.tiles;
  const int index = sequence_of(qkv, &Sequence::tile, tile.place);
  tile.s = qkv.sequences[index];
  tile.slot = int64_t{tile.kv_head} * qkv.num_sequences + index;
  tile.index = tile.place - tile.s.tile;
  tile.keys = tile.s.q_count == 0 ? 0 : min(max(tile.s.keys - tile.index * kBlockN, 0), kBlockN);
  if (tile.keys == 0) return tile;
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x); row < kBlockN; row += kDim) {
    // Behind the last key, the last again. In place of what the order does not name, any: K's part marks the head.
    const int key = tile.index * kBlockN + min(row, tile.keys - 1);
    const int token = max(a.order.token_at(tile.s, tile.kv_head, key), 0);
    shared.rows[row] = a.v.row<Element>(tile.s.batch, int64_t{tile.s.kv_begin} + token, tile.kv_head);
  }
  __syncthreads();
  copy_rows<Element, kDim, kBlockN, kDim>(a.v, shared.tile, [&](int row) { return shared.rows[row]; });
  wait_copies<0>();
  __syncthreads();
  return tile;
}

// ---- statistics
// ------------------------------------------------------------------------------------------------------

// PTX ISA, "min" and "max": with .NaN, one NaN makes the result NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

struct Extent {
  float smallest, largest;
  __device__ void include(float x) {
    smallest = min_nan(smallest, x);
    largest = max_nan(largest, x);
  }
  __device__ bool finite() const { return is_finite(smallest) && is_finite(largest); }
  // Largest |factor (x - mean)| of all that was included: both roundings are monotonic.
  __device__ float largest_residual(float mean, float factor) const {
    const float low = __fmul_rn(factor, __fsub_rn(smallest, mean));
    const float high = __fmul_rn(factor, __fsub_rn(largest, mean));
    return fmaxf(fabsf(low), fabsf(high));
  }
};

// One channel over a tile's keys, in order.
struct ChannelStatistics {
  double sum;
  Extent even, odd;  // keys
};

template <typename Element, int kDim>
__device__ __forceinline__ ChannelStatistics measure_channel(const Column<Element, kDim>& column, int keys) {
  constexpr int kGroup = RowTile<Element, kDim>::kExchanged;
  const float first = column.value(0, 0), second = keys > 1 ? column.value(0, 1) : first;
  ChannelStatistics c = {0.0, {first, first}, {second, second}};
  const auto include = [&](int group, int limit) {
#pragma unroll
    for (int row = 0; row < kGroup; ++row) {
      if (row >= limit) break;
      const float x = column.value(group, row);
      c.sum = add_float(c.sum, x);
      (row % 2 == 0 ? c.even : c.odd).include(x);
    }
  };
#pragma unroll 4
  for (int group = 0; group < keys / kGroup; ++group) include(group, kGroup);
  if (keys % kGroup != 0) include(keys / kGroup, keys % kGroup);
  return c;
}

// One block for a tile: its mean, and its part in what the channel's scale must hold.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kDim) measure_values(const __grid_constant__ ValueArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<ValueShared<Element, kDim>*>(memory);
  const Tile tile = load_values<Element, kDim>(a, shared);
  if (tile.keys == 0) return;
  const int channel = static_cast<int>(threadIdx.x);
  const Column<Element, kDim> column(shared.tile, channel);
  ChannelStatistics c = measure_channel(column, tile.keys);
  if (!c.even.finite() || !c.odd.finite()) {
    a.scratch.value_nonfinite[tile.slot * kDim + channel] = 1;
    column.clean(tile.keys);
    c = measure_channel(column, tile.keys);
  }
  float mean = 0.0f, largest = 0.0f;
  if (a.has_means) {
    mean = static_cast<float>(c.sum / static_cast<double>(tile.keys));
    largest = __fmul_rn(fabsf(mean), kMeanFloor);
    a.scratch.value_means[(int64_t{tile.kv_head} * a.qkv.tiles + tile.place) * kDim + channel] = mean;
  }
  largest = fmaxf(largest, c.even.largest_residual(mean, 1.0f));
  if (tile.keys > 1) largest = fmaxf(largest, c.odd.largest_residual(mean, a.odd_factor));
  atomicMax(&a.scratch.value_max[tile.slot * kDim + channel], __float_as_uint(largest));
}

// ---- quantisation
// ----------------------------------------------------------------------------------------------------

constexpr int kChunkKeys = kChunkBytes;  // of one channel, whose codes are one chunk
static_assert(position_of(kChunkKeys) == kChunkKeys, "a chunk's keys stay in it");

template <typename Element, int kDim>
struct QuantiseShared {
  ValueShared<Element, kDim> values;
  alignas(128) std::byte codes[value_tile_bytes(kDim)];
  float warp_max[kDim / 32];
};

// The channel's scale; one scale for all channels where the recipe asks for it.
template <int kDim>
__device__ __forceinline__ Scale value_scale(const ValueArgs& a, int64_t slot, int channel, float* warp_maxima) {
  float largest = __uint_as_float(a.scratch.value_max[slot * kDim + channel]);
  if (a.per_head) {
    const float of_warp = warp_max(largest);
    if (channel % 32 == 0) warp_maxima[channel / 32] = of_warp;
    __syncthreads();
    for (int warp = 0; warp < kDim / 32; ++warp) largest = fmaxf(largest, warp_maxima[warp]);
  }
  return absmax_scale(largest, kE4m3Max);
}

// x / a.odd_factor to nearest. The residual of a product with the rounded reciprocal corrects it (Markstein): right for
// this divisor from kSmallestQuick on, where that residual is exact, by trial of every mantissa.
constexpr float kSmallestQuick = 0x1p-96f;
__device__ __forceinline__ float divide_quickly(const ValueArgs& a, float x) {
  const float quotient = __fmul_rn(x, a.odd_factor_inverse);
  return __fmaf_rn(__fmaf_rn(-quotient, a.odd_factor, x), a.odd_factor_inverse, quotient);
}

struct Channel {
  Scale scale;
  float mean;
  double error;  // sum over keys of what quantisation took from the residuals, in units of V
};

// Adds to c.error what the codes `pairs` took from the residuals `r`.
__device__ __forceinline__ void add_errors(const ValueArgs& a, const float (&r)[kChunkKeys],
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
__device__ __forceinline__ uint4 quantise_chunk(const ValueArgs& a, const Column<Element, kDim>& column, int chunk,
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
  if (a.centred) add_errors(a, r, pairs, c);
  // key_at: a word holds keys 2w, 2w + 1, 2w + 8, 2w + 9.
  return {pairs[0] | pairs[4] << 16, pairs[1] | pairs[5] << 16, pairs[2] | pairs[6] << 16, pairs[3] | pairs[7] << 16};
}

// The eight rows of ones under tile `tile` of its sequence.
template <int kDim>
__device__ __forceinline__ void store_ones(int tile, int keys, std::byte* codes) {
  constexpr int kRowChunks = kBlockN / kChunkBytes;
  for (int i = static_cast<int>(threadIdx.x); i < kOnesRows * kRowChunks; i += kDim) {
    const int row = i / kRowChunks, first = i % kRowChunks * kChunkBytes;
    uint32_t words[4] = {};
#pragma unroll
    for (int byte = 0; byte < kChunkBytes; ++byte) {
      const int key = key_at(byte);  // of the chunk
      const bool counts = row == 2 * (tile % kSumTiles) + key % 2 && first + key < keys;
      words[byte / 4] |= (counts ? uint32_t{kE4m3One} : 0U) << byte % 4 * 8;
    }
    *reinterpret_cast<uint4*>(codes + swizzled(kDim + row, first, kBlockN)) = {words[0], words[1], words[2], words[3]};
  }
}

// One block for a tile.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kDim) quantise_values(const __grid_constant__ ValueArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<QuantiseShared<Element, kDim>*>(memory);
  const QuantizedQkv& qkv = a.qkv;
  const Tile tile = load_values<Element, kDim>(a, shared.values);
  if (tile.keys == 0) return;
  const int channel = static_cast<int>(threadIdx.x);
  const Column<Element, kDim> column(shared.values.tile, channel);
  const bool nonfinite = a.scratch.value_nonfinite[tile.slot * kDim + channel] != 0;
  if (nonfinite) column.clean(tile.keys);

  const int64_t at = int64_t{tile.kv_head} * qkv.tiles + tile.place;
  Channel c = {value_scale<kDim>(a, tile.slot, channel, shared.warp_max),
               a.has_means ? a.scratch.value_means[at * kDim + channel] : 0.0f, 0.0};
  for (int chunk = 0; chunk < kBlockN / kChunkKeys; ++chunk) {
    const int limit = tile.keys - chunk * kChunkKeys;
    const uint4 codes = limit >= kChunkKeys ? quantise_chunk<true>(a, column, chunk, limit, c)
                                            : quantise_chunk<false>(a, column, chunk, limit, c);
    *reinterpret_cast<uint4*>(shared.codes + swizzled(channel, chunk * kChunkBytes, kBlockN)) = codes;
  }
  store_ones<kDim>(tile.index, tile.keys, shared.codes);
  __syncthreads();
  uint8_t* out = qkv.v + at * value_tile_bytes(kDim);
  store_tile<value_tile_bytes(kDim), kDim>(shared.codes, out);
  if (tile.index == 0) {
    qkv.v_descale[tile.slot * kDim + channel] = nonfinite ? float_from_bits(kFloatNan) : c.scale.descale;
  }

  const int64_t group = int64_t{tile.kv_head} * qkv.mean_groups + tile.s.mean_group + tile.index / kMeanTiles;
  float* means = qkv.means + group * kMeanTiles * kDim;
  if (a.has_means) {
    float mean = c.mean;
    if (a.centred) mean = __fadd_rn(mean, static_cast<float>(c.error / static_cast<double>(tile.keys)));
    mean = __fmul_rn(mean, c.scale.encode);
    means[mean_index(channel, tile.index)] = a.bf16_means ? decode_bf16(encode_bf16(mean)) : round_tf32(mean);
  }

  // Behind a sequence's last tile: the second one of its pair, and the means to the end of the group.
  if (tile.index + 1 != filled_tiles(tile.s)) return;
  if (tile.index % 2 == 0) {
    for (int i = channel; i < value_tile_bytes(kDim) / kChunkBytes; i += kDim) {
      reinterpret_cast<uint4*>(out + value_tile_bytes(kDim))[i] = {0, 0, 0, 0};
    }
  }
  if (!a.has_means) return;
  for (int i = tile.index + 1; i % kMeanTiles != 0; ++i) means[mean_index(channel, i)] = 0.0f;
}

}  // namespace

cudaError_t prepare_values(const PrepareCall& call) {
  const vcattn_attention_params& p = *call.problem.params;
  const vcattn_recipe& recipe = call.recipe;
  const float odd_factor = has_phases(recipe) ? kPhaseFactor : 1.0f;
  const ValueArgs args = {operand(p.v),
                          key_order(call.problem, call.scratch),
                          call.qkv,
                          call.scratch,
                          odd_factor,
                          1.0f / odd_factor,
                          recipe.mean_rows > 0,
                          recipe.mean_rows > 0 && recipe.mean_centred != 0,
                          recipe.mean_format == VCATTN_MEAN_BF16,
                          recipe.v_scale_span == VCATTN_SPAN_HEAD};
  const int64_t tiles = int64_t{call.qkv.num_heads_kv} * call.qkv.tiles;
  return with_element_and_dim(p.v.dtype, call.qkv.dim, [&]<typename Element, int kDim>() {
    const cudaError_t error =
        launch(measure_values<Element, kDim>, args, tiles, kDim, sizeof(ValueShared<Element, kDim>), call.stream);
    if (error != cudaSuccess) return error;
    return launch(quantise_values<Element, kDim>, args, tiles, kDim, sizeof(QuantiseShared<Element, kDim>),
                  call.stream);
  });
}

}  // namespace vcattn::sm90a
