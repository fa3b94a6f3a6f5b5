// Q: apply rope, rotate, quantise each token by its own scale.
#include "preprocess/args.cuh"
#include "preprocess/launch.cuh"

namespace vcattn::sm90a {
namespace {

// 128 rows of one head of Q, as thread 0 finds them for the others.
template <typename Element>
struct QueryUnit {
  const Element* tokens;       // row 0
  int64_t slot;                // of K's head
  int32_t rows;                // of the sequence, from row 0 on; may be negative
  int32_t used;                // 0: the sequence has no keys
  int32_t batch, token, head;  // of row 0
};

template <typename Element, int kDim, int kPairing>
struct QueryShared : RopeTile<kDim, kPairing> {
  alignas(128) std::byte tile[kUnitRows * RowTile<Element, kDim>::kRowBytes];  // then its codes
  double k_mean[kDim];                                                         // times kFieldScale
  QueryUnit<Element> unit;
  float norm[RowGroup<Element, kDim>::kCount / 32];  // of each warp's rows
};

__host__ __device__ constexpr int64_t query_units(const QuantizedQkv& qkv) {
  return int64_t{qkv.num_heads} * qkv.blocks * (qkv.block_rows / kUnitRows);
}

template <typename Element>
__device__ __forceinline__ QueryUnit<Element> query_unit(const PrepareArgs& a, int unit) {
  const QuantizedQkv& qkv = a.qkv;
  const int units = qkv.block_rows / kUnitRows;  // of a query block
  const int head = unit / units / qkv.blocks, block = unit / units % qkv.blocks;
  const int index = sequence_of(qkv, &Sequence::q_block, block);
  const Sequence& s = qkv.sequences[index];
  const int first = (block - s.q_block) * qkv.block_rows + unit % units * kUnitRows;
  const int64_t slot = int64_t{head / (qkv.num_heads / qkv.num_heads_kv)} * qkv.num_sequences + index;
  return {.tokens = a.q.row<Element>(s.batch, int64_t{s.q_begin} + first, head),
          .slot = slot,
          .rows = s.q_count - first,
          .used = s.keys,
          .batch = s.batch,
          .token = s.q_begin + first,
          .head = head};
}

// What centring K took from the row's scores: the FP64 sum of products in order, each exact.
template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ float lse_shift(const PrepareArgs& a, const QueryShared<Element, kDim, kPairing>& shared,
                                           int row) {
  double dot = 0.0;
#pragma unroll 8
  for (int d = 0; d < kDim; ++d) {
    float x;
    if constexpr (kPairing != VCATTN_ROPE_NONE) {
      x = shared.template channel<Element>(a.rope_q, shared.tile, row, d);
    } else {
      x = reinterpret_cast<const Element*>(shared.tile + RowTile<Element, kDim>::element(row, d))->value();
    }
    dot = __fma_rn(as_double_fields(x), shared.k_mean[d], dot);
  }
  return static_cast<float>(__dmul_rn(dot, a.softmax_scale));
}

// `unit`: 128 rows, counted over all heads.
template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ void quantise_unit(const PrepareArgs& a, int unit, RowGroup<Element, kDim> group,
                                              QueryShared<Element, kDim, kPairing>& shared) {
  const QuantizedQkv& qkv = a.qkv;
  const int thread = group.thread();
  if (thread == 0) shared.unit = query_unit<Element>(a, unit);
  group.sync();
  if (shared.unit.used == 0) return;
  const Element* tokens = shared.unit.tokens;
  const int rows = shared.unit.rows;
  const bool whole = rows >= kUnitRows;
  if (whole && a.q.chunked && a.q.head_dim == kDim) {
    copy_whole_rows<Element, kDim, kUnitRows>(group, tokens, a.q.token_stride, shared.tile);
  } else {
    // Behind the sequence's last row, the last again.
    copy_rows<Element, kDim, kUnitRows>(group, a.q, shared.tile,
                                        [&](int row) { return tokens + min(row, rows - 1) * a.q.token_stride; });
  }
  if (a.shifts_lse && thread < kDim) {
    const int64_t place = shared.unit.slot * kDim + thread;
    shared.k_mean[thread] = a.k_centred ? kFieldScale * double{a.scratch.key_mean[place]} : 0.0;
  }
  if constexpr (kPairing != VCATTN_ROPE_NONE) {
    const QueryUnit<Element>& from = shared.unit;
    if (thread < kUnitRows) {
      shared.angle_rows[thread] = a.rope_q.row(from.batch, from.token + min(thread, rows - 1), from.head);
    }
    group.sync();
    shared.load_angles(a.rope_q, group);
  }
  wait_copies<0>();
  group.sync();

  using Part = RowPart<Element, kDim>;
  const Part part(thread);
  float x[Part::kChannels];
  bool finite = read_part(shared.tile, part, x);
  if constexpr (kPairing != VCATTN_ROPE_NONE) finite = shared.rotate_part(a.rope_q, shared.tile, part, x) && finite;
  rotate(a.rotation, part, x);
  const float largest = over_row<Part>(part_abs_max(x), [](float one, float other) { return fmaxf(one, other); });
  const Scale scale = a.pow2 ? pow2_query_scale<kDim>(a, shared.unit.slot, largest)
                             : absmax_scale(largest, a.int8 ? kInt8Max : kE4m3Max);
  const bool behind = part.row >= rows;
  const float factor = behind ? 0.0f : a.pow2 ? scale.descale : __fmul_rn(scale.descale, a.code_units);
  const int64_t place = int64_t{unit} * kUnitRows;
  if (a.shifts_lse && part.first == 0) {
    qkv.lse_shift[place + part.row] = lse_shift(a, shared, part.row);
  }

  group.sync();  // all rows are read
  const int squares = over_row<Part>(store_codes(x, scale.encode, a.int8, shared.tile, part),
                                     [](int one, int other) { return one + other; });
  const float codes_norm = square_root(static_cast<float>(squares));  // 0 where they are E4M3
  const bool row_finite = over_row<Part>(finite ? 1 : 0, [](int one, int other) { return one & other; }) != 0;
  if (part.first == 0) {
    // The row's scores pass kCodeRange beyond this factor, by the norms. (No key's norm is infinite but of keys that
    // are not finite, or whose scores are not.)
    const float largest_factor = __fdividef(__fdividef(kCodeRange, codes_norm), qkv.k_norm[shared.unit.slot]);
    float stored = factor;
    if (factor > largest_factor && largest_factor > 0.0f) {
      // Such a row has one key or a few equal ones: what its softmax tells apart is far finer than INT8's steps. So a
      // smaller scale gives the same row; only lse would show it.
      stored = largest_factor;
      if (a.shifts_lse) qkv.lse_shift[place + part.row] = float_from_bits(kFloatNan);
    }
    qkv.q_factor[place + part.row] = row_finite || behind ? stored : float_from_bits(kFloatNan);
  }
  const float norm = warp_max(__fmul_rn(codes_norm, factor));
  if (thread % 32 == 0) shared.norm[thread / 32] = norm;
  group.sync();
  constexpr int kRowChunks = kDim / kChunkBytes;
  auto* out = reinterpret_cast<uint4*>(qkv.q + place * kDim);
#pragma unroll
  for (int i = 0; i < kUnitRows * kRowChunks; i += group.kCount) {
    uint4 chunk = reinterpret_cast<const uint4*>(shared.tile)[i + thread];
    if (!whole && (i + thread) / kRowChunks >= rows) chunk = {0, 0, 0, 0};
    out[i + thread] = chunk;
  }
  constexpr int kTileWarps = kTileRowsQ / Part::kRowsPerWarp;
  if (thread < kUnitRows / kTileRowsQ) {
    float of_tile = 0.0f;
    for (int warp = 0; warp < kTileWarps; ++warp) of_tile = fmaxf(of_tile, shared.norm[thread * kTileWarps + warp]);
    qkv.q_norm[place / kTileRowsQ + thread] = of_tile;
  }
}

// One group of threads for 128 rows.
template <typename Element, int kDim, int kPairing>
__global__ void __launch_bounds__(kRowThreads<Element>, kRowBlocksPerSm)
    quantise_queries(const __grid_constant__ PrepareArgs a) {
  const RowGroup<Element, kDim> group;
  with_unit<QueryShared<Element, kDim, kPairing>>(
      group, blockIdx.x, query_units(a.qkv), [&](int unit, auto& shared) { quantise_unit(a, unit, group, shared); });
}

}  // namespace

cudaError_t prepare_queries(const PrepareCall& call) {
  const int64_t units = query_units(call.qkv);
  return with_element_and_dim(call.problem.params->q.dtype, call.qkv.dim, [&]<typename Element, int kDim>() {
    constexpr int kGroups = RowGroup<Element, kDim>::kGroupCount;
    return with_pairing(call.problem.params->rope_q, [&]<int kPairing>() {
      return launch(quantise_queries<Element, kDim, kPairing>, prepare_args(call), ceil_div(units, kGroups),
                    kRowThreads<Element>, static_cast<int>(sizeof(QueryShared<Element, kDim, kPairing>)) * kGroups,
                    call.stream);
    });
  });
}

}  // namespace vcattn::sm90a
