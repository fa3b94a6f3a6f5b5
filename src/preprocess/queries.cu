// Q: rotate, quantise each token by its own scale. A thread works on one token's row.
#include "preprocess/key_order.cuh"
#include "preprocess/launch.cuh"
#include "preprocess/row_math.cuh"
#include "preprocess/rows.cuh"
#include "preprocess/stages.h"

namespace vcattn::sm90a {
namespace {

constexpr int kRows = 2 * kTileRowsQ;  // query rows of one thread block
constexpr int kBlocksPerSm = 3;        // threads of 168 registers hold a row without spilling

struct QueryArgs {
  Operand q;
  Rotation rotation;
  QuantizedQkv qkv;
  PrepareScratch scratch;
  float code_units;      // per score
  double softmax_scale;  // lse_shift
  int32_t centred, int8, pow2, shifts;
};

template <typename Element, int kDim>
struct QueryShared {
  alignas(128) std::byte tile[kRows * RowTile<Element, kDim>::kRowBytes];  // then its codes
  double mean[kDim];                                                       // of K, times kFieldScale
  float norm[kRows / 32];
};

// What centring K took from the row's scores: the FP64 sum of products in order, each exact.
template <typename Element, int kDim>
__device__ float lse_shift(const std::byte* tile, int row, const double* mean, double softmax_scale) {
  double dot = 0.0;
#pragma unroll 8
  for (int d = 0; d < kDim; ++d) {
    const auto* x = reinterpret_cast<const Element*>(tile + RowTile<Element, kDim>::element(row, d));
    dot = __fma_rn(as_double_fields(x->value()), mean[d], dot);
  }
  return static_cast<float>(__dmul_rn(dot, softmax_scale));
}

// Codes carry the code units themselves; the product with K's power of two is at least one code unit per raw unit, so
// that it is an exact FP16 factor.
template <int kDim>
__device__ Scale pow2_scale(const QueryArgs& a, int64_t slot, float largest) {
  const int k_exponent = pow2_exponent(__uint_as_float(a.scratch.key_max[slot]), f16_key_max(kDim));
  const int exponent = max(pow2_exponent(__fmul_rn(largest, a.code_units), kF16QueryMax), -k_exponent);
  return {__fmul_rn(a.code_units, ldexpf(1.0f, -exponent)), ldexpf(1.0f, exponent)};
}

template <int kDim>
__device__ void store_zeros(std::byte* tile, int row) {
#pragma unroll
  for (int d = 0; d < kDim; d += kChunkBytes) *reinterpret_cast<uint4*>(tile + row * kDim + d) = {0, 0, 0, 0};
}

template <typename Element, int kDim>
__global__ void __launch_bounds__(kRows, kBlocksPerSm) quantise_queries(const __grid_constant__ QueryArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  auto& shared = *reinterpret_cast<QueryShared<Element, kDim>*>(memory);
  const QuantizedQkv& qkv = a.qkv;
  const int thread = static_cast<int>(threadIdx.x);
  const int unit = static_cast<int>(blockIdx.x);
  const int units = qkv.block_rows / kRows;  // of a query block
  const int block = unit / units % qkv.blocks, head = unit / units / qkv.blocks;
  const int index = sequence_of(qkv, &Sequence::q_block, block);
  const Sequence s = qkv.sequences[index];
  if (s.keys == 0) return;

  const int first = (block - s.q_block) * qkv.block_rows + unit % units * kRows;  // row of the sequence
  const int kv_head = head / (qkv.num_heads / qkv.num_heads_kv);
  const int64_t slot = int64_t{kv_head} * qkv.num_sequences + index;
  const Element* tokens = a.q.row<Element>(s.batch, s.q_begin, head);
  copy_rows<Element, kDim, kRows, kRows>(
      a.q, shared.tile, [&](int row) { return tokens + min(first + row, s.q_count - 1) * a.q.token_stride; });
  const bool shifts = a.shifts != 0;
  if (shifts && thread < kDim) {
    shared.mean[thread] = a.centred ? kFieldScale * double{a.scratch.key_mean[slot * kDim + thread]} : 0.0;
  }
  wait_copies<0>();
  __syncthreads();

  float x[kDim];
  const bool finite = read_row<Element, kDim>(shared.tile, thread, x);
  const int64_t place = int64_t{unit} * kRows + thread;
  if (shifts) {
    qkv.lse_shift[place] = lse_shift<Element, kDim>(shared.tile, thread, shared.mean, a.softmax_scale);
  }
  rotate(a.rotation, x);
  const float largest = abs_max(x);
  const Scale scale = a.pow2 ? pow2_scale<kDim>(a, slot, largest) : absmax_scale(largest, a.int8 ? kInt8Max : kE4m3Max);
  const bool behind = first + thread >= s.q_count;  // the sequence's last row
  const float factor = behind ? 0.0f : a.pow2 ? scale.descale : __fmul_rn(scale.descale, a.code_units);
  qkv.q_factor[place] = finite || behind ? factor : float_from_bits(kFloatNan);

  __syncthreads();  // all rows are read
  int squares = 0;
  if (behind) {
    store_zeros<kDim>(shared.tile, thread);
  } else {
    squares = store_codes(x, scale.encode, a.int8, shared.tile, thread);
  }
  const float norm = warp_max(__fmul_rn(__fsqrt_rn(static_cast<float>(squares)), factor));
  if (thread % 32 == 0) shared.norm[thread / 32] = norm;
  __syncthreads();
  store_tile<kRows * kDim, kRows>(shared.tile, qkv.q + int64_t{unit} * kRows * kDim);
  if (thread % kTileRowsQ == 0) {
    qkv.q_norm[place / kTileRowsQ] = fmaxf(shared.norm[thread / 32], shared.norm[thread / 32 + 1]);
  }
}

}  // namespace

cudaError_t prepare_queries(const PrepareCall& call) {
  const vcattn_attention_params& p = *call.problem.params;
  const QueryArgs args = {operand(p.q),
                          rotation(call.recipe, call.problem.head_dim),
                          call.qkv,
                          call.scratch,
                          code_units_per_score(call.problem.softmax_scale),
                          call.problem.softmax_scale,
                          call.recipe.k_centred,
                          call.recipe.qk_format == VCATTN_FORMAT_INT8,
                          call.recipe.qk_scale_kind == VCATTN_SCALE_POW2_F16,
                          p.lse != nullptr};
  const int64_t units = int64_t{call.qkv.num_heads} * call.qkv.blocks * (call.qkv.block_rows / kRows);
  return with_element_and_dim(p.q.dtype, call.qkv.dim, [&]<typename Element, int kDim>() {
    return launch(quantise_queries<Element, kDim>, args, units, kRows, sizeof(QueryShared<Element, kDim>), call.stream);
  });
}

}  // namespace vcattn::sm90a
