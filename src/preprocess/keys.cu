// K: apply rope, subtract the mean, rotate, quantise tile by tile in the order of the values.
#include "preprocess/args.cuh"
#include "preprocess/launch.cuh"

namespace vcattn::sm90a {
namespace {

// A tile of K, as thread 0 finds it for the others.
struct KeyUnit {
  int64_t slot;
  int32_t number;    // among the tiles of all heads
  int32_t used;      // 0: the sequence has no queries, or the tile no keys
  int32_t repeated;  // the row that all rows repeat; -1: none
};

template <typename Element, int kDim, int kPairing>
struct KeyShared : RopeTile<kDim, kPairing> {
  alignas(128) std::byte tile[kUnitRows * RowTile<Element, kDim>::kRowBytes];  // then its codes
  alignas(16) float mean[kDim];
  const Element* rows[kUnitRows];
  KeyUnit unit;
  float warp_max[RowGroup<Element, kDim>::kCount / 32];
};

// Names the token of a row to those who copy it.
template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ void set_row(const PrepareArgs& a, const KeyTile& tile, int row, int token,
                                        KeyShared<Element, kDim, kPairing>& shared) {
  const int64_t of_batch = int64_t{tile.s.kv_begin} + token;
  shared.rows[row] = a.k.row<Element>(tile.s.batch, of_batch, tile.kv_head);
  if constexpr (kPairing != VCATTN_ROPE_NONE)
    shared.angle_rows[row] = a.rope_k.row(tile.s.batch, of_batch, tile.kv_head);
}

// This thread's part of a row less the mean, rotated. Needs the unit and the rows. What is not finite marks the head.
template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ void load_keys(const PrepareArgs& a, RowGroup<Element, kDim> group,
                                          KeyShared<Element, kDim, kPairing>& shared, RowPart<Element, kDim> part,
                                          float (&x)[RowPart<Element, kDim>::kChannels]) {
  const int thread = group.thread();
  copy_rows<Element, kDim, kUnitRows>(group, a.k, shared.tile, [&](int row) { return shared.rows[row]; });
  if constexpr (kPairing != VCATTN_ROPE_NONE) shared.load_angles(a.rope_k, group);
  if (thread < kDim) {
    shared.mean[thread] = a.k_centred ? a.scratch.key_mean[shared.unit.slot * kDim + thread] : 0.0f;
  }
  wait_copies<0>();
  group.sync();
  bool finite = read_part(shared.tile, part, x);
  if constexpr (kPairing != VCATTN_ROPE_NONE) finite = shared.rotate_part(a.rope_k, shared.tile, part, x) && finite;
  if (!finite) a.qkv.k_poison[shared.unit.slot] = 1;
#pragma unroll
  for (int d = 0; d < RowPart<Element, kDim>::kChannels; ++d) {
    // Loads of the mean stay behind: hoisted to those of the row they would not all find registers.
    x[d] = __fsub_rn(x[d], shared.mean[part.first + d]);
  }
  rotate(a.rotation, part, x);
}

// The largest magnitude of all rows. The tile may be overwritten afterwards.
template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ float tile_abs_max(RowGroup<Element, kDim> group, KeyShared<Element, kDim, kPairing>& shared,
                                              const float (&x)[RowPart<Element, kDim>::kChannels]) {
  const float of_warp = warp_max(part_abs_max(x));
  if (group.thread() % 32 == 0) shared.warp_max[group.thread() / 32] = of_warp;
  group.sync();
  float largest = 0.0f;
#pragma unroll
  for (const float of_other : shared.warp_max) largest = fmaxf(largest, of_other);
  return largest;
}

// pow2_f16: largest magnitude over a sequence, in the sequence's own order.
template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ void measure_tile(const PrepareArgs& a, int unit, RowGroup<Element, kDim> group,
                                             KeyShared<Element, kDim, kPairing>& shared) {
  const int thread = group.thread();
  if (thread < kUnitRows) {
    const KeyTile tile = key_tile(a.qkv, unit);
    const bool used = tile.s.q_count != 0 && tile.index < filled_tiles(tile.s);
    if (thread == 0) shared.unit = {tile.slot, unit, used ? 1 : 0, -1};
    if (used) {
      const int token = a.order.token(tile.s, min(tile.index * kBlockN + thread, tile.s.keys - 1));
      set_row(a, tile, thread, token, shared);
    }
  }
  group.sync();
  if (shared.unit.used == 0) return;
  using Part = RowPart<Element, kDim>;
  const Part part(thread);
  float x[Part::kChannels];
  load_keys(a, group, shared, part, x);
  const float largest = tile_abs_max(group, shared, x);
  if (thread == 0) atomicMax(&a.scratch.key_max[shared.unit.slot], __float_as_uint(largest));
}

template <typename Element, int kDim, int kPairing>
__device__ __forceinline__ void quantise_tile(const PrepareArgs& a, int unit, RowGroup<Element, kDim> group,
                                              KeyShared<Element, kDim, kPairing>& shared) {
  const QuantizedQkv& qkv = a.qkv;
  const int thread = group.thread();
  if (thread < kUnitRows) {
    const KeyTile tile = key_tile(qkv, unit);
    const Sequence& s = tile.s;
    const bool used = s.q_count != 0 && tile.index < tiles_of(s.keys);
    // The tile behind a sequence's odd last one repeats the last key as that one has it, and so is made from its keys.
    const int source = min(tile.index, filled_tiles(s) - 1);
    if (thread == 0) {
      shared.unit = {tile.slot, unit, used ? 1 : 0, source == tile.index ? -1 : (s.keys - 1) % kBlockN};
    }
    if (used) {
      // Rows behind the last key repeat it, too.
      const int token = a.order.token_at(s, tile.kv_head, min(source * kBlockN + thread, s.keys - 1));
      if (token < 0) qkv.k_poison[tile.slot] = 1;
      set_row(a, tile, thread, max(token, 0), shared);
    }
  }
  group.sync();
  if (shared.unit.used == 0) return;

  using Part = RowPart<Element, kDim>;
  const Part part(thread);
  float x[Part::kChannels];
  load_keys(a, group, shared, part, x);
  const float largest = tile_abs_max(group, shared, x);
  Scale scale;
  if (a.pow2) {
    const int exponent = pow2_exponent(__uint_as_float(a.scratch.key_max[shared.unit.slot]), f16_key_max(kDim));
    scale = {ldexpf(1.0f, -exponent), ldexpf(1.0f, exponent)};
  } else {
    scale = absmax_scale(largest, a.int8 ? kInt8Max : kE4m3Max);
  }
  const int squares = over_row<Part>(store_codes(x, scale.encode, a.int8, shared.tile, part),
                                     [](int one, int other) { return one + other; });
  const float norm = warp_max(__fmul_rn(square_root(static_cast<float>(squares)), scale.descale));
  if (thread % 32 == 0) {
    atomicMax(reinterpret_cast<uint32_t*>(&qkv.k_norm[shared.unit.slot]), __float_as_uint(norm));
  }
  group.sync();
  const int number = shared.unit.number;
  if (thread == 0) qkv.k_descale[number] = scale.descale;

  constexpr int kRowChunks = kDim / kChunkBytes;
  auto* out = reinterpret_cast<uint4*>(qkv.k + int64_t{number} * key_tile_bytes(kDim));
  const int repeated = shared.unit.repeated;
  if (repeated < 0) {
#pragma unroll
    for (int i = 0; i < kUnitRows * kRowChunks; i += group.kCount) {
      out[i + thread] = reinterpret_cast<const uint4*>(shared.tile)[i + thread];
    }
    return;
  }
  for (int i = thread; i < kUnitRows * kRowChunks; i += group.kCount) {
    const int row = i / kRowChunks, byte = i % kRowChunks * kChunkBytes;
    out[swizzled(row, byte, kDim) / kChunkBytes] =
        *reinterpret_cast<const uint4*>(shared.tile + swizzled(repeated, byte, kDim));
  }
}

// One group of threads for a tile.
template <typename Element, int kDim, int kPairing>
__global__ void __launch_bounds__(kRowThreads<Element>, kRowBlocksPerSm)
    measure_keys(const __grid_constant__ PrepareArgs a) {
  const RowGroup<Element, kDim> group;
  with_unit<KeyShared<Element, kDim, kPairing>>(group, blockIdx.x, key_units(a.qkv),
                                                [&](int unit, auto& shared) { measure_tile(a, unit, group, shared); });
}
template <typename Element, int kDim, int kPairing>
__global__ void __launch_bounds__(kRowThreads<Element>, kRowBlocksPerSm)
    quantise_keys(const __grid_constant__ PrepareArgs a) {
  const RowGroup<Element, kDim> group;
  with_unit<KeyShared<Element, kDim, kPairing>>(group, blockIdx.x, key_units(a.qkv),
                                                [&](int unit, auto& shared) { quantise_tile(a, unit, group, shared); });
}

}  // namespace

cudaError_t prepare_keys(const PrepareCall& call) {
  const PrepareArgs args = prepare_args(call);
  return with_element_and_dim(call.problem.params->k.dtype, call.qkv.dim, [&]<typename Element, int kDim>() {
    constexpr int kGroups = RowGroup<Element, kDim>::kGroupCount;
    const int64_t blocks = ceil_div(key_units(call.qkv), kGroups);
    return with_pairing(call.problem.params->rope_k, [&]<int kPairing>() {
      constexpr int kBytes = sizeof(KeyShared<Element, kDim, kPairing>) * kGroups;
      if (args.pow2) {
        const cudaError_t error =
            launch(measure_keys<Element, kDim, kPairing>, args, blocks, kRowThreads<Element>, kBytes, call.stream);
        if (error != cudaSuccess) return error;
      }
      return launch(quantise_keys<Element, kDim, kPairing>, args, blocks, kRowThreads<Element>, kBytes, call.stream);
    });
  });
}

}  // namespace vcattn::sm90a
