// K: mean over tokens, rotate, quantise tile by tile in the order of the values.
//
// A thread works on one channel for the mean, on one key's row for everything else.
#include "preprocess/key_order.cuh"
#include "preprocess/launch.cuh"
#include "preprocess/row_math.cuh"
#include "preprocess/rows.cuh"
#include "preprocess/stages.h"

namespace vcattn::sm90a {
namespace {

struct KeyArgs {
  Operand k;
  KeyOrder order;
  Rotation rotation;
  QuantizedQkv qkv;
  PrepareScratch scratch;
  int32_t centred, int8, pow2;
};

// ---- mean over the sequence
// ------------------------------------------------------------------------------------------

// Tokens of one partial sum arrive in slabs, a few ahead of the addition.
constexpr int kSlabRows = 32;
constexpr int kSlabs = 6;
static_assert(kStatisticsRows == kMeanTiles * kBlockN, "partial sums are numbered like mean groups");

// sum plus one channel of `rows` rows, in order; what is not finite counts as 0.
template <typename Element, int kDim>
__device__ __forceinline__ double add_rows(std::byte* slab, int channel, int rows, double sum) {
  constexpr int kGroup = RowTile<Element, kDim>::kExchanged;
  const Column<Element, kDim> column(slab, channel);
  for (;;) {
    double total = sum;
    float check = 0.0f;
    const auto add = [&](int limit) {
#pragma unroll
      for (int row = 0; row < kSlabRows; ++row) {
        if (row >= limit) break;
        const float x = column.value(row / kGroup, row % kGroup);
        check = __fmaf_rn(x, 0.0f, check);
        total = add_float(total, x);
      }
    };
    if (rows >= kSlabRows) {
      add(kSlabRows);
    } else {
      add(rows);
    }
    if (check == 0.0f) return total;
    column.clean(min(rows, kSlabRows));
  }
}

template <typename Element, int kDim>
struct SumShared {
  static constexpr int kSlabBytes = kSlabRows * RowTile<Element, kDim>::kRowBytes;
  alignas(128) std::byte slabs[kSlabs][kSlabBytes];
  bool last;
};

// Whether this block is the last of `blocks` to arrive at the counter, with all that the others wrote visible to it.
__device__ bool arrives_last(uint32_t& arrivals, int blocks, bool& last) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&arrivals, 1U) + 1 == static_cast<uint32_t>(blocks);
  __syncthreads();
  __threadfence();
  return last;
}

// One block for the FP64 sum of kStatisticsRows tokens; the last one of a sequence adds up all and writes the mean.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kDim) sum_keys(const __grid_constant__ KeyArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<SumShared<Element, kDim>*>(memory);
  const QuantizedQkv& qkv = a.qkv;
  const int channel = static_cast<int>(threadIdx.x);
  const int kv_head = static_cast<int>(blockIdx.x) / qkv.mean_groups;
  const int group = static_cast<int>(blockIdx.x) % qkv.mean_groups;
  const int index = sequence_of(qkv, &Sequence::mean_group, group);
  const Sequence s = qkv.sequences[index];
  const int first = (group - s.mean_group) * kStatisticsRows;
  if (s.q_count == 0 || first >= s.keys) return;

  const int rows = min(s.keys - first, kStatisticsRows);
  const Element* tokens = a.k.row<Element>(s.batch, s.kv_begin, kv_head);
  const auto copy_slab = [&](int slab) {
    // Behind the last row, the last again: not added.
    copy_rows<Element, kDim, kSlabRows, kDim>(a.k, shared.slabs[slab % kSlabs], [&](int row) {
      const int key = first + min(slab * kSlabRows + row, rows - 1);
      return tokens + a.order.token(s, key) * a.k.token_stride;
    });
  };
  for (int slab = 0; slab < kSlabs - 1; ++slab) copy_slab(slab);
  double sum = 0.0;
  for (int slab = 0; slab * kSlabRows < rows; ++slab) {
    wait_copies<kSlabs - 2>();
    __syncthreads();  // slab has arrived, and the one before it has been read
    copy_slab(slab + kSlabs - 1);
    sum = add_rows<Element, kDim>(shared.slabs[slab % kSlabs], channel, rows - slab * kSlabRows, sum);
  }

  const int groups = (s.keys + kStatisticsRows - 1) / kStatisticsRows;
  const int64_t slot = int64_t{kv_head} * qkv.num_sequences + index;
  double* sums = a.scratch.key_sums + (int64_t{kv_head} * qkv.mean_groups + s.mean_group) * kDim + channel;
  sums[int64_t{group - s.mean_group} * kDim] = sum;
  if (!arrives_last(a.scratch.key_arrivals[slot], groups, shared.last)) return;
  double total = 0.0;
#pragma unroll 8
  for (int i = 0; i < groups; ++i) total += __ldcg(sums + int64_t{i} * kDim);
  a.scratch.key_mean[slot * kDim + channel] = static_cast<float>(total / static_cast<double>(s.keys));
}

// ---- rows
// ------------------------------------------------------------------------------------------------------------

template <typename Element, int kDim>
struct KeyShared {
  alignas(128) std::byte tile[kBlockN * RowTile<Element, kDim>::kRowBytes];  // then its codes
  alignas(16) float mean[kDim];
  const Element* rows[kBlockN];
  float warp_max[kBlockN / 32];
};

// This thread's row less the mean, rotated. Every thread brings its own. Returns whether the row was finite.
template <typename Element, int kDim>
__device__ __forceinline__ bool load_key(const KeyArgs& a, KeyShared<Element, kDim>& shared, int64_t slot,
                                         const Element* row_in_memory, float (&x)[kDim]) {
  const int thread = static_cast<int>(threadIdx.x);
  shared.rows[thread] = row_in_memory;
  if (thread < kDim) shared.mean[thread] = a.centred ? a.scratch.key_mean[slot * kDim + thread] : 0.0f;
  __syncthreads();
  copy_rows<Element, kDim, kBlockN, kBlockN>(a.k, shared.tile, [&](int row) { return shared.rows[row]; });
  wait_copies<0>();
  __syncthreads();
  const bool finite = read_row<Element, kDim>(shared.tile, thread, x);
#pragma unroll
  for (int d = 0; d < kDim; ++d) x[d] = __fsub_rn(x[d], shared.mean[d]);
  rotate(a.rotation, x);
  return finite;
}

// The largest of all threads' non-negative numbers. What was read before the call may be overwritten after it.
template <typename Shared>
__device__ __forceinline__ float block_max(Shared& shared, float x) {
  const int thread = static_cast<int>(threadIdx.x);
  const float of_warp = warp_max(x);
  if (thread % 32 == 0) shared.warp_max[thread / 32] = of_warp;
  __syncthreads();
  float largest = 0.0f;
#pragma unroll
  for (const float of_other : shared.warp_max) largest = fmaxf(largest, of_other);
  return largest;
}

// Threads of 168 registers hold a row of 128 channels without spilling.
constexpr int kBlocksPerSm = 3;

// pow2_f16: largest magnitude over the sequence, 128 tokens to a block.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kBlockN, kBlocksPerSm) measure_keys(const __grid_constant__ KeyArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<KeyShared<Element, kDim>*>(memory);
  const QuantizedQkv& qkv = a.qkv;
  const int kv_head = static_cast<int>(blockIdx.x) / qkv.tiles, place = static_cast<int>(blockIdx.x) % qkv.tiles;
  const int index = sequence_of(qkv, &Sequence::tile, place);
  const Sequence s = qkv.sequences[index];
  const int first = (place - s.tile) * kBlockN;
  if (s.q_count == 0 || first >= s.keys) return;
  const int token = a.order.token(s, min(first + static_cast<int>(threadIdx.x), s.keys - 1));
  const int64_t slot = int64_t{kv_head} * qkv.num_sequences + index;
  float x[kDim];
  load_key(a, shared, slot, a.k.row<Element>(s.batch, int64_t{s.kv_begin} + token, kv_head), x);
  const float largest = block_max(shared, abs_max(x));
  if (threadIdx.x == 0) atomicMax(&a.scratch.key_max[slot], __float_as_uint(largest));
}

// The tile behind a sequence's odd last one: all rows are the last key's, which is row `last` of `codes`.
template <int kDim>
__device__ void store_repeated(const std::byte* codes, int last, uint8_t* out) {
  constexpr int kRowChunks = kDim / kChunkBytes;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockN * kRowChunks; i += kBlockN) {
    const int row = i / kRowChunks, byte = i % kRowChunks * kChunkBytes;
    const uint4 chunk = *reinterpret_cast<const uint4*>(codes + swizzled(last, byte, kDim));
    *reinterpret_cast<uint4*>(out + swizzled(row, byte, kDim)) = chunk;
  }
}

// One block for a tile.
template <typename Element, int kDim>
__global__ void __launch_bounds__(kBlockN, kBlocksPerSm) quantise_keys(const __grid_constant__ KeyArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<KeyShared<Element, kDim>*>(memory);
  const QuantizedQkv& qkv = a.qkv;
  const int thread = static_cast<int>(threadIdx.x);
  const int kv_head = static_cast<int>(blockIdx.x) / qkv.tiles, place = static_cast<int>(blockIdx.x) % qkv.tiles;
  const int index = sequence_of(qkv, &Sequence::tile, place);
  const Sequence s = qkv.sequences[index];
  const int tile = place - s.tile;
  if (s.q_count == 0 || tile >= filled_tiles(s)) return;

  // Rows behind the last key repeat it.
  const int token = a.order.token_at(s, kv_head, min(tile * kBlockN + thread, s.keys - 1));
  const int64_t slot = int64_t{kv_head} * qkv.num_sequences + index;
  float x[kDim];
  const Element* row = a.k.row<Element>(s.batch, int64_t{s.kv_begin} + max(token, 0), kv_head);
  const bool finite = load_key(a, shared, slot, row, x);
  if (token < 0 || !finite) qkv.k_poison[slot] = 1;

  const float tile_max = block_max(shared, abs_max(x));
  Scale scale;
  if (a.pow2) {
    const int exponent = pow2_exponent(__uint_as_float(a.scratch.key_max[slot]), f16_key_max(kDim));
    scale = {ldexpf(1.0f, -exponent), ldexpf(1.0f, exponent)};
  } else {
    scale = absmax_scale(tile_max, a.int8 ? kInt8Max : kE4m3Max);
  }
  const int squares = store_codes(x, scale.encode, a.int8, shared.tile, thread);
  const auto largest = static_cast<float>(__reduce_max_sync(0xFFFFFFFF, squares));
  if (thread % 32 == 0) {
    const float norm = __fmul_rn(__fsqrt_rn(largest), scale.descale);
    atomicMax(reinterpret_cast<uint32_t*>(&qkv.k_norm[slot]), __float_as_uint(norm));
  }
  __syncthreads();
  const int64_t at = int64_t{kv_head} * qkv.tiles + place;
  uint8_t* out = qkv.k + at * key_tile_bytes(kDim);
  store_tile<key_tile_bytes(kDim), kBlockN>(shared.tile, out);
  if (thread == 0) qkv.k_descale[at] = scale.descale;
  if (tile % 2 == 0 && tile + 1 == filled_tiles(s)) {
    store_repeated<kDim>(shared.tile, (s.keys - 1) % kBlockN, out + key_tile_bytes(kDim));
    if (thread == 0) qkv.k_descale[at + 1] = scale.descale;
  }
}

}  // namespace

cudaError_t prepare_keys(const PrepareCall& call) {
  const vcattn_attention_params& p = *call.problem.params;
  const KeyArgs args = {operand(p.k),
                        key_order(call.problem, call.scratch),
                        rotation(call.recipe, call.problem.head_dim),
                        call.qkv,
                        call.scratch,
                        call.recipe.k_centred,
                        call.recipe.qk_format == VCATTN_FORMAT_INT8,
                        call.recipe.qk_scale_kind == VCATTN_SCALE_POW2_F16};
  const int64_t heads = call.qkv.num_heads_kv;
  return with_element_and_dim(p.k.dtype, call.qkv.dim, [&]<typename Element, int kDim>() {
    constexpr int kSumBytes = sizeof(SumShared<Element, kDim>);
    constexpr int kTileBytes = sizeof(KeyShared<Element, kDim>);
    cudaError_t error = cudaSuccess;
    if (args.centred) {
      error = launch(sum_keys<Element, kDim>, args, heads * call.qkv.mean_groups, kDim, kSumBytes, call.stream);
    }
    if (error == cudaSuccess && args.pow2) {
      error = launch(measure_keys<Element, kDim>, args, heads * call.qkv.tiles, kBlockN, kTileBytes, call.stream);
    }
    if (error != cudaSuccess) return error;
    return launch(quantise_keys<Element, kDim>, args, heads * call.qkv.tiles, kBlockN, kTileBytes, call.stream);
  });
}

}  // namespace vcattn::sm90a
