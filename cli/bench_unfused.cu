#include "bench_unfused.h"

#include <algorithm>
#include <cmath>

#include "preprocess/args.cuh"
#include "preprocess/launch.cuh"
#include "preprocess/value_rows.cuh"

namespace vcattn::cli {
namespace {

using namespace sm90a;

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // channels of a thread: 16 bytes of BF16, 32 of FP32, 8 of codes

struct Args {
  PrepareArgs prepare;
  UnfusedScratch scratch;
  Operand x;               // the one of Q, K and V that the step works on
  int32_t batch, heads;    // of x
  int32_t seqlen, tiles;   // of x; tiles of 128 rows that hold any
  int32_t padded_tiles;    // of 128 rows, as the operands have them
  int32_t queries_per_kv;  // query heads
};

// ---- where a thread works ------------------------------------------------------------------------------------------

// This block's tile, of `tiles` in a slot.
struct Tile {
  int slot, index;
  __device__ explicit Tile(int tiles)
      : slot(static_cast<int>(blockIdx.x) / tiles), index(static_cast<int>(blockIdx.x) % tiles) {}
};

// Eight channels of a row; blocks keep to one slot. Rows behind the last are not there.
template <int kDim>
struct Piece {
  static constexpr int kRows = kThreads * kPiece / kDim;  // of a block
  static constexpr int kLanes = kDim / kPiece;            // of a row
  int slot, row, channel;
  bool inside;
  int64_t at;  // in a dense [slots, seqlen, dim]

  // Row `row` of the slot's rows.
  __device__ Piece(const Args& a, int slot, int row) : slot(slot), row(row) {
    channel = static_cast<int>(threadIdx.x) % kLanes * kPiece;
    inside = row < a.seqlen;
    at = (int64_t{slot} * a.seqlen + row) * kDim + channel;
  }
  // This thread's of `kRows` rows of a tile, from row `first` of it on.
  __device__ static Piece of_tile(const Args& a, const Tile& t, int first) {
    return Piece(a, t.slot, t.index * kBlockN + first + static_cast<int>(threadIdx.x) / kLanes);
  }
  // That of this block and thread.
  __device__ static Piece here(const Args& a) {
    const int blocks = (a.seqlen + kRows - 1) / kRows, block = static_cast<int>(blockIdx.x);
    return Piece(a, block / blocks, block % blocks * kRows + static_cast<int>(threadIdx.x) / kLanes);
  }
  static int64_t blocks(const Args& a) { return int64_t{a.batch} * a.heads * ceil_div(a.seqlen, kRows); }
};

// Number of a tile of K or V among the operands'.
__device__ int64_t operand_tile(const Args& a, const Tile& t) { return int64_t{t.slot} * a.padded_tiles + t.index; }

// ---- memory --------------------------------------------------------------------------------------------------------

__device__ void read_bf16(const void* from, float (&x)[kPiece]) {
  const uint4 words = *static_cast<const uint4*>(from);
  widen(Bf16{}, words.x, x);
  widen(Bf16{}, words.y, x + 2);
  widen(Bf16{}, words.z, x + 4);
  widen(Bf16{}, words.w, x + 6);
}
__device__ void read_fp32(const float* from, float (&x)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece; i += 4) {
    const uint4 words = *reinterpret_cast<const uint4*>(from + i);
    x[i] = __uint_as_float(words.x);
    x[i + 1] = __uint_as_float(words.y);
    x[i + 2] = __uint_as_float(words.z);
    x[i + 3] = __uint_as_float(words.w);
  }
}
__device__ void write_fp32(float* to, const float (&x)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece; i += 4) {
    *reinterpret_cast<uint4*>(to + i) = {__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                                         __float_as_uint(x[i + 3])};
  }
}

// ---- arithmetic of several steps -----------------------------------------------------------------------------------

// The normalised Hadamard matrix over a row's threads, in the order of sm90a::rotate. All lanes take part.
template <int kDim>
__device__ void rotate_piece(const Rotation& r, int channel, float (&x)[kPiece]) {
  if (r.size == 0) return;
#pragma unroll
  for (float& value : x) value = __fmul_rn(value, r.scale);
#pragma unroll
  for (int half = 1; half < kDim; half *= 2) {
    if (half < kPiece) {
      add_and_subtract(x, half);
    } else {
      const float sign = (channel & half) == 0 ? 1.0f : -1.0f;
#pragma unroll
      for (float& value : x) value = __fmaf_rn(sign, value, __shfl_xor_sync(0xFFFFFFFF, value, half / kPiece));
    }
  }
}

// Over the threads of a row.
template <int kDim, typename Value, typename Join>
__device__ Value join_row(Value value, Join join) {
  for (int lanes = 1; lanes < Piece<kDim>::kLanes; lanes *= 2) {
    value = join(value, __shfl_xor_sync(0xFFFFFFFF, value, lanes));
  }
  return value;
}

// The largest of the block's non-negative numbers, known to thread 0.
__device__ float block_max(float x) {
  __shared__ float of_warps[kThreads / 32];
  const float of_warp = warp_max(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float largest = 0.0f;
  for (const float other : of_warps) largest = fmaxf(largest, other);
  return largest;
}

template <int kDim>
__device__ Scale key_scale(const Args& a, int slot, int tile) {
  if (a.prepare.pow2) {
    const int exponent = pow2_exponent(__uint_as_float(a.prepare.scratch.key_max[slot]), f16_key_max(kDim));
    return {ldexpf(1.0f, -exponent), ldexpf(1.0f, exponent)};
  }
  return absmax_scale(a.scratch.maxima[int64_t{slot} * a.tiles + tile], a.prepare.int8 ? kInt8Max : kE4m3Max);
}

struct QueryScale {
  float encode, factor;
};
template <int kDim>
__device__ QueryScale query_scale(const Args& a, int slot, int row) {
  const float largest = a.scratch.maxima[int64_t{slot} * a.seqlen + row];
  if (a.prepare.pow2) {
    const int kv_slot = slot / a.batch / a.queries_per_kv * a.batch + slot % a.batch;
    const Scale scale = pow2_query_scale<kDim>(a.prepare, kv_slot, largest);
    return {scale.encode, scale.descale};
  }
  const Scale scale = absmax_scale(largest, a.prepare.int8 ? kInt8Max : kE4m3Max);
  return {scale.encode, __fmul_rn(scale.descale, a.prepare.code_units)};
}

__device__ Scale channel_scale(const Args& a, int64_t slot_channel) {
  return absmax_scale(__uint_as_float(a.prepare.scratch.value_max[slot_channel]), kE4m3Max);
}

__device__ uint2 encode_row(const Args& a, const float (&x)[kPiece], float encode) {
  if (a.prepare.int8) return {int8x4(x, encode), int8x4(x + 4, encode)};
  return {e4m3x4(x, encode), e4m3x4(x + 4, encode)};
}

// Euclidean norm of a row's INT8 codes.
template <int kDim>
__device__ float code_norm(const Args& a, const Piece<kDim>& p) {
  int squares = 0;
  if (p.inside) {
    const uint2 codes = *reinterpret_cast<const uint2*>(a.scratch.codes + p.at);
    squares = __dp4a(static_cast<int>(codes.x), static_cast<int>(codes.x), squares);
    squares = __dp4a(static_cast<int>(codes.y), static_cast<int>(codes.y), squares);
  }
  squares = join_row<kDim>(squares, [](int one, int other) { return one + other; });
  return square_root(static_cast<float>(squares));
}

// ---- steps of K and V ----------------------------------------------------------------------------------------------

template <int kDim>
__global__ void gather(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  if (!p.inside) return;
  const int head = p.slot / a.batch, entry = p.slot % a.batch;
  const int32_t* order = a.prepare.order.permutation;
  const int token = order == nullptr ? p.row : order[(int64_t{entry} * a.heads + head) * a.seqlen + p.row];
  *reinterpret_cast<uint4*>(a.scratch.gathered + p.at) =
      *reinterpret_cast<const uint4*>(a.x.row<Bf16>(entry, token, head) + p.channel);
}

// FP64 sums of kStatisticsRows tokens each; a thread for each channel.
template <int kDim>
__global__ void sum_keys(const __grid_constant__ Args a) {
  const int chunks = (a.seqlen + kStatisticsRows - 1) / kStatisticsRows, block = static_cast<int>(blockIdx.x);
  const int slot = block / chunks, first = block % chunks * kStatisticsRows;
  const Bf16* token = a.x.row<Bf16>(slot % a.batch, first, slot / a.batch) + threadIdx.x;
  double sum = 0.0;
#pragma unroll 16
  for (int i = 0; i < min(kStatisticsRows, a.seqlen - first); ++i) {
    sum = add_float(sum, token[i * a.x.token_stride].value());
  }
  a.prepare.scratch.key_sums[int64_t{block} * kDim + threadIdx.x] = sum;
}

template <int kDim>
__global__ void finish_key_mean(const __grid_constant__ Args a) {
  const int chunks = (a.seqlen + kStatisticsRows - 1) / kStatisticsRows;
  const double* sums = a.prepare.scratch.key_sums + int64_t{blockIdx.x} * chunks * kDim + threadIdx.x;
  double total = 0.0;
#pragma unroll 8
  for (int i = 0; i < chunks; ++i) total += sums[int64_t{i} * kDim];
  a.prepare.scratch.key_mean[int64_t{blockIdx.x} * kDim + threadIdx.x] =
      static_cast<float>(total / static_cast<double>(a.seqlen));
}

template <int kDim>
__global__ void centre_keys(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  if (!p.inside) return;
  float x[kPiece], mean[kPiece] = {};
  read_bf16(a.scratch.gathered + p.at, x);
  if (a.prepare.k_centred) read_fp32(a.prepare.scratch.key_mean + int64_t{p.slot} * kDim + p.channel, mean);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = __fsub_rn(x[i], mean[i]);
  write_fp32(a.scratch.rows + p.at, x);
}

template <int kDim>
__global__ void rotate_keys(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  float x[kPiece] = {};
  if (p.inside) read_fp32(a.scratch.rows + p.at, x);
  rotate_piece<kDim>(a.prepare.rotation, p.channel, x);
  if (p.inside) write_fp32(a.scratch.rows + p.at, x);
}

// Of each tile; pow2_f16: of each head.
template <int kDim>
__global__ void key_maxima(const __grid_constant__ Args a) {
  using P = Piece<kDim>;
  const Tile t(a.tiles);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlockN; i += P::kRows) {
    const P p = P::of_tile(a, t, i);
    float x[kPiece] = {};
    if (p.inside) read_fp32(a.scratch.rows + p.at, x);
    largest = fmaxf(largest, part_abs_max(x));
  }
  largest = block_max(largest);
  if (threadIdx.x != 0) return;
  if (a.prepare.pow2) {
    atomicMax(&a.prepare.scratch.key_max[t.slot], __float_as_uint(largest));
  } else {
    a.scratch.maxima[blockIdx.x] = largest;
  }
}

template <int kDim>
__global__ void quantise_keys(const __grid_constant__ Args a) {
  using P = Piece<kDim>;
  const Tile t(a.tiles);
  const float encode = key_scale<kDim>(a, t.slot, t.index).encode;
#pragma unroll
  for (int i = 0; i < kBlockN; i += P::kRows) {
    const P p = P::of_tile(a, t, i);
    if (!p.inside) return;
    float x[kPiece];
    read_fp32(a.scratch.rows + p.at, x);
    *reinterpret_cast<uint2*>(a.scratch.codes + p.at) = encode_row(a, x, encode);
  }
}

template <int kDim>
__global__ void key_norms(const __grid_constant__ Args a) {
  using P = Piece<kDim>;
  const Tile t(a.tiles);
  const float descale = key_scale<kDim>(a, t.slot, t.index).descale;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlockN; i += P::kRows) {
    const P p = P::of_tile(a, t, i);
    largest = fmaxf(largest, __fmul_rn(code_norm(a, p), descale));
  }
  largest = block_max(largest);
  if (threadIdx.x != 0) return;
  atomicMax(reinterpret_cast<uint32_t*>(&a.prepare.qkv.k_norm[t.slot]), __float_as_uint(largest));
}

// Rows behind the last key repeat it, with its scale.
template <int kDim>
__global__ void store_keys(const __grid_constant__ Args a) {
  const Tile t(a.padded_tiles);
  const int64_t number = operand_tile(a, t);
  auto* out = reinterpret_cast<uint4*>(a.prepare.qkv.k + number * key_tile_bytes(kDim));
  constexpr int kRowChunks = kDim / kChunkBytes;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kBlockN * kRowChunks; i += kThreads) {
    const int row = i / kRowChunks, byte = i % kRowChunks * kChunkBytes;
    const int key = min(t.index * kBlockN + row, a.seqlen - 1);
    out[swizzled(row, byte, kDim) / kChunkBytes] =
        *reinterpret_cast<const uint4*>(a.scratch.codes + (int64_t{t.slot} * a.seqlen + key) * kDim + byte);
  }
  if (threadIdx.x != 0) return;
  a.prepare.qkv.k_descale[number] = key_scale<kDim>(a, t.slot, min(t.index, a.tiles - 1)).descale;
}

// Means of 128 keys in order; a thread for each channel, as in the three kernels behind it.
template <int kDim>
__global__ void block_means(const __grid_constant__ Args a) {
  const Tile t(a.tiles);
  const int first = t.index * kBlockN, keys = min(kBlockN, a.seqlen - first);
  const auto* x =
      reinterpret_cast<const Bf16*>(a.scratch.gathered) + (int64_t{t.slot} * a.seqlen + first) * kDim + threadIdx.x;
  double sum = 0.0;
#pragma unroll 16
  for (int key = 0; key < keys; ++key) sum = add_float(sum, x[key * kDim].value());
  a.prepare.scratch.value_means[operand_tile(a, t) * kDim + threadIdx.x] =
      static_cast<float>(sum / static_cast<double>(keys));
}

// x less its block's mean; of odd keys times their factor.
template <int kDim>
__global__ void value_residuals(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  if (!p.inside) return;
  float x[kPiece], mean[kPiece];
  read_bf16(a.scratch.gathered + p.at, x);
  const int64_t tile = int64_t{p.slot} * a.padded_tiles + p.row / kBlockN;
  read_fp32(a.prepare.scratch.value_means + tile * kDim + p.channel, mean);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    x[i] = __fsub_rn(x[i], mean[i]);
    if (p.row % 2 == 1) x[i] = __fmul_rn(a.prepare.odd_factor, x[i]);
  }
  write_fp32(a.scratch.rows + p.at, x);
}

template <int kDim>
__global__ void value_maxima(const __grid_constant__ Args a) {
  const Tile t(a.tiles);
  const int first = t.index * kBlockN, keys = min(kBlockN, a.seqlen - first);
  const float* r = a.scratch.rows + (int64_t{t.slot} * a.seqlen + first) * kDim + threadIdx.x;
  const float mean = a.prepare.scratch.value_means[operand_tile(a, t) * kDim + threadIdx.x];
  float largest = __fmul_rn(fabsf(mean), kMeanFloor);
#pragma unroll 16
  for (int key = 0; key < keys; ++key) largest = fmaxf(largest, fabsf(r[key * kDim]));
  atomicMax(&a.prepare.scratch.value_max[int64_t{t.slot} * kDim + threadIdx.x], __float_as_uint(largest));
}

template <int kDim>
__global__ void quantise_values(const __grid_constant__ Args a) {
  using P = Piece<kDim>;
  const Tile t(a.tiles);
  float encode[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    encode[i] = channel_scale(a, int64_t{t.slot} * kDim + P::of_tile(a, t, 0).channel + i).encode;
  }
#pragma unroll
  for (int row = 0; row < kBlockN; row += P::kRows) {
    const P p = P::of_tile(a, t, row);
    if (!p.inside) return;
    float x[kPiece];
    read_fp32(a.scratch.rows + p.at, x);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = __fmul_rn(x[i], encode[i]);
    *reinterpret_cast<uint2*>(a.scratch.codes + p.at) = {e4m3x4(x, 1.0f), e4m3x4(x + 4, 1.0f)};
  }
}

// Adds to each mean what quantisation took from its residuals on average.
template <int kDim>
__global__ void centre_means(const __grid_constant__ Args a) {
  const Tile t(a.tiles);
  const int first = t.index * kBlockN, keys = min(kBlockN, a.seqlen - first);
  const int64_t at = (int64_t{t.slot} * a.seqlen + first) * kDim + threadIdx.x;
  const float descale = channel_scale(a, int64_t{t.slot} * kDim + threadIdx.x).descale;
  double error = 0.0;
#pragma unroll 8
  for (int key = 0; key < keys; ++key) {
    const float value = from_e4m3x2(a.scratch.codes[at + key * kDim]).x;
    const float taken = __fsub_rn(a.scratch.rows[at + key * kDim], __fmul_rn(value, descale));
    error = add_float(error, key % 2 == 0 ? taken : __fdiv_rn(taken, a.prepare.odd_factor));
  }
  float& mean = a.prepare.scratch.value_means[operand_tile(a, t) * kDim + threadIdx.x];
  mean = __fadd_rn(mean, static_cast<float>(error / static_cast<double>(keys)));
}

// Means in units of the scale, those of eight tiles a block.
template <int kDim>
__global__ void store_means(const __grid_constant__ Args a) {
  const int groups = mean_groups_of(a.padded_tiles);
  const Tile group(groups);
  const int channel = static_cast<int>(threadIdx.x);
  const float encode = channel_scale(a, int64_t{group.slot} * kDim + channel).encode;
  for (int i = 0; i < kMeanTiles; ++i) {
    const int tile = group.index * kMeanTiles + i;
    float mean = 0.0f;
    if (tile < a.tiles) {
      const int64_t number = int64_t{group.slot} * a.padded_tiles + tile;
      mean = __fmul_rn(a.prepare.scratch.value_means[number * kDim + channel], encode);
      mean = a.prepare.bf16_means ? decode_bf16(encode_bf16(mean)) : round_tf32(mean);
    }
    a.prepare.qkv.means[int64_t{blockIdx.x} * kMeanTiles * kDim + mean_index(channel, tile)] = mean;
  }
}

// V^T and the ones, through shared memory. Keys 16 apart lie in neighbouring banks.
template <int kDim>
__global__ void store_values(const __grid_constant__ Args a) {
  __shared__ uint32_t words[(kBlockN * kDim + kBlockN / kChunkKeys * 4) / 4];
  const Tile t(a.padded_tiles);
  const int first = t.index * kBlockN, keys = min(kBlockN, a.seqlen - first), thread = static_cast<int>(threadIdx.x);
  const auto* codes = reinterpret_cast<const uint32_t*>(a.scratch.codes + (int64_t{t.slot} * a.seqlen + first) * kDim);
#pragma unroll
  for (int i = thread; i < kBlockN * kDim / 4; i += kThreads) {
    const int key = i / (kDim / 4);
    words[i + key / kChunkKeys] = key < keys ? codes[i] : 0;
  }
  __syncthreads();
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  auto* out = reinterpret_cast<uint4*>(a.prepare.qkv.v + operand_tile(a, t) * value_tile_bytes(kDim));
  constexpr int kRowChunks = kBlockN / kChunkBytes;
  for (int i = thread; i < (kDim + kOnesRows) * kRowChunks; i += kThreads) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    uint4 stored;
    if (row >= kDim) {
      stored = ones_chunk(t.index, row - kDim, chunk, keys);
    } else {
      uint32_t of_chunk[4] = {};
#pragma unroll
      for (int byte = 0; byte < kChunkBytes; ++byte) {
        const int key = chunk * kChunkKeys + key_at(byte);
        of_chunk[byte / 4] |= uint32_t{bytes[key * kDim + chunk * 4 + row]} << byte % 4 * 8;
      }
      stored = {of_chunk[0], of_chunk[1], of_chunk[2], of_chunk[3]};
    }
    out[swizzled(row, chunk * kChunkBytes, kBlockN) / kChunkBytes] = stored;
  }
  if (t.index != 0 || thread >= kDim) return;
  const int64_t channel = int64_t{t.slot} * kDim + thread;
  a.prepare.qkv.v_descale[channel] = channel_scale(a, channel).descale;
}

// ---- steps of Q ----------------------------------------------------------------------------------------------------

template <int kDim>
__global__ void rotate_queries(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  float x[kPiece] = {};
  if (p.inside) read_bf16(a.x.row<Bf16>(p.slot % a.batch, p.row, p.slot / a.batch) + p.channel, x);
  rotate_piece<kDim>(a.prepare.rotation, p.channel, x);
  if (p.inside) write_fp32(a.scratch.rows + p.at, x);
}

template <int kDim>
__global__ void query_maxima(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  float x[kPiece] = {};
  if (p.inside) read_fp32(a.scratch.rows + p.at, x);
  const float largest = join_row<kDim>(part_abs_max(x), [](float one, float other) { return fmaxf(one, other); });
  if (p.inside && p.channel == 0) a.scratch.maxima[int64_t{p.slot} * a.seqlen + p.row] = largest;
}

template <int kDim>
__global__ void quantise_queries(const __grid_constant__ Args a) {
  const auto p = Piece<kDim>::here(a);
  if (!p.inside) return;
  float x[kPiece];
  read_fp32(a.scratch.rows + p.at, x);
  const float encode = query_scale<kDim>(a, p.slot, p.row).encode;
  *reinterpret_cast<uint2*>(a.scratch.codes + p.at) = encode_row(a, x, encode);
}

// Largest norm of each 64 rows; of E4M3 codes 0.
template <int kDim>
__global__ void query_norms(const __grid_constant__ Args a) {
  using P = Piece<kDim>;
  const Tile t(a.padded_tiles * kBlockN / kTileRowsQ);
  float largest = 0.0f;
  for (int i = 0; a.prepare.int8 && i < kTileRowsQ; i += P::kRows) {
    const P p(a, t.slot, t.index * kTileRowsQ + i + static_cast<int>(threadIdx.x) / P::kLanes);
    const float norm = code_norm(a, p);
    if (p.inside) largest = fmaxf(largest, __fmul_rn(norm, query_scale<kDim>(a, p.slot, p.row).factor));
  }
  largest = block_max(largest);
  if (threadIdx.x == 0) a.prepare.qkv.q_norm[blockIdx.x] = largest;
}

template <int kDim>
__global__ void store_queries(const __grid_constant__ Args a) {
  const Tile t(a.padded_tiles);
  const int64_t number = blockIdx.x;
  auto* out = reinterpret_cast<uint4*>(a.prepare.qkv.q + number * kBlockN * kDim);
  constexpr int kRowChunks = kDim / kChunkBytes;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kBlockN * kRowChunks; i += kThreads) {
    const int row = i / kRowChunks, byte = i % kRowChunks * kChunkBytes, query = t.index * kBlockN + row;
    const bool inside = query < a.seqlen;
    uint4 codes = {0, 0, 0, 0};
    if (inside) {
      codes = *reinterpret_cast<const uint4*>(a.scratch.codes + (int64_t{t.slot} * a.seqlen + query) * kDim + byte);
    }
    out[swizzled(row, byte, kDim) / kChunkBytes] = codes;
    if (byte == 0) {
      a.prepare.qkv.q_factor[number * kBlockN + row] = inside ? query_scale<kDim>(a, t.slot, query).factor : 0.0f;
    }
  }
}

// ---- the chain -----------------------------------------------------------------------------------------------------

using Kernel = void (*)(Args);

// Bytes an element that a step reads and writes.
constexpr double kBf16 = 2, kFp32 = 4, kCode = 1;

class Chain {
 public:
  Chain(const PrepareCall& call, const UnfusedScratch& scratch) : stream_(call.stream) {
    args_.prepare = prepare_args(call);
    args_.scratch = scratch;
    args_.batch = static_cast<int32_t>(call.problem.batch);
    args_.queries_per_kv = call.qkv.num_heads / call.qkv.num_heads_kv;
  }

  template <int kDim>
  void add_keys(const Problem& problem) {
    take(args_.prepare.k, problem.num_heads_kv, problem.seqlen_kv, tiles_of(static_cast<int32_t>(problem.seqlen_kv)));
    const int64_t pieces = Piece<kDim>::blocks(args_), tiles = slots() * args_.tiles;
    if (args_.prepare.k_centred) {
      add("k: sums", kBf16, sum_keys<kDim>, slots() * ceil_div(args_.seqlen, kStatisticsRows), kDim);
      add("k: mean", 0, finish_key_mean<kDim>, slots(), kDim);
    }
    add("k: gather", kBf16 + kBf16, gather<kDim>, pieces);
    add("k: subtract the mean", kBf16 + kFp32, centre_keys<kDim>, pieces);
    if (args_.prepare.rotation.size > 0) add("k: Hadamard", kFp32 + kFp32, rotate_keys<kDim>, pieces);
    add("k: maxima", kFp32, key_maxima<kDim>, tiles);
    add("k: quantise", kFp32 + kCode, quantise_keys<kDim>, tiles);
    if (args_.prepare.int8) add("k: norms", kCode, key_norms<kDim>, tiles);
    add("k: tile order", kCode + kCode, store_keys<kDim>, slots() * args_.padded_tiles);
  }

  template <int kDim>
  void add_values(const Problem& problem) {
    take(args_.prepare.v, problem.num_heads_kv, problem.seqlen_kv, tiles_of(static_cast<int32_t>(problem.seqlen_kv)));
    const int64_t pieces = Piece<kDim>::blocks(args_), tiles = slots() * args_.tiles;
    add("v: gather", kBf16 + kBf16, gather<kDim>, pieces);
    add("v: block means", kBf16, block_means<kDim>, tiles, kDim);
    add("v: subtract the means", kBf16 + kFp32, value_residuals<kDim>, pieces);
    add("v: maxima", kFp32, value_maxima<kDim>, tiles, kDim);
    add("v: quantise", kFp32 + kCode, quantise_values<kDim>, tiles);
    if (args_.prepare.means_centred) add("v: centre the means", kFp32 + kCode, centre_means<kDim>, tiles, kDim);
    add("v: store the means", 0, store_means<kDim>, slots() * mean_groups_of(args_.padded_tiles), kDim);
    add("v: tile order", kCode + kCode, store_values<kDim>, slots() * args_.padded_tiles);
  }

  template <int kDim>
  void add_queries(const Problem& problem) {
    const int32_t block_rows = args_.prepare.qkv.block_rows;
    take(args_.prepare.q, problem.num_heads, problem.seqlen_q,
         blocks_of(static_cast<int32_t>(problem.seqlen_q), block_rows) * (block_rows / kBlockN));
    const int64_t pieces = Piece<kDim>::blocks(args_), tiles = slots() * args_.padded_tiles;
    add(args_.prepare.rotation.size > 0 ? "q: Hadamard" : "q: to FP32", kBf16 + kFp32, rotate_queries<kDim>, pieces);
    add("q: maxima", kFp32, query_maxima<kDim>, pieces);
    add("q: quantise", kFp32 + kCode, quantise_queries<kDim>, pieces);
    add("q: norms", args_.prepare.int8 ? kCode : 0, query_norms<kDim>, tiles * (kBlockN / kTileRowsQ));
    add("q: tile order", kCode + kCode, store_queries<kDim>, tiles);
  }

  std::vector<UnfusedStep> steps() && { return std::move(steps_); }

 private:
  int64_t slots() const { return int64_t{args_.batch} * args_.heads; }

  // Turns to one of q, k and v.
  void take(const Operand& x, int64_t heads, int64_t seqlen, int32_t padded_tiles) {
    args_.x = x;
    args_.heads = static_cast<int32_t>(heads);
    args_.seqlen = static_cast<int32_t>(seqlen);
    args_.tiles = static_cast<int32_t>(ceil_div(seqlen, kBlockN));
    args_.padded_tiles = padded_tiles;
  }

  void add(const char* name, double element_bytes, Kernel kernel, int64_t blocks, int threads = kThreads) {
    const double elements = static_cast<double>(slots() * args_.seqlen) * args_.prepare.qkv.dim;
    steps_.push_back({name, element_bytes * elements, [=, args = args_, stream = stream_] {
                        return launch(kernel, args, blocks, threads, 0, stream);
                      }});
  }

  Args args_{};
  cudaStream_t stream_;
  std::vector<UnfusedStep> steps_;
};

template <int kDim>
std::vector<UnfusedStep> steps_of(const PrepareCall& call, const UnfusedScratch& scratch) {
  Chain chain(call, scratch);
  chain.add_keys<kDim>(call.problem);
  chain.add_values<kDim>(call.problem);
  chain.add_queries<kDim>(call.problem);
  return std::move(chain).steps();
}

bool is_bf16_rows(const vcattn_tensor& t) { return t.dtype == VCATTN_BF16 && operand(t).chunked != 0; }

}  // namespace

UnfusedScratch take_unfused_scratch(const Problem& problem, const QuantizedQkv& qkv, Arena& arena) {
  const int64_t queries = problem.batch * problem.num_heads * problem.seqlen_q;
  const int64_t keys = problem.batch * problem.num_heads_kv * problem.seqlen_kv;
  UnfusedScratch scratch{};
  scratch.gathered = arena.take<uint16_t>(keys * qkv.dim);
  scratch.rows = arena.take<float>(std::max(queries, keys) * qkv.dim);
  scratch.codes = arena.take<uint8_t>(std::max(queries, keys) * qkv.dim);
  scratch.maxima = arena.take<float>(std::max(queries, keys));
  return scratch;
}

const char* unfused_unsupported(const Problem& problem) {
  const vcattn_attention_params& p = *problem.params;
  if (problem.head_dim != 64 && problem.head_dim != 128) return "takes head_dim 64 or 128";
  if (p.key_mask != nullptr || p.cu_seqlens_q != nullptr || p.lse != nullptr) return "takes no mask, segments or lse";
  if (!is_bf16_rows(p.q) || !is_bf16_rows(p.k) || !is_bf16_rows(p.v)) return "takes contiguous rows of BF16";
  if (p.recipe.mean_rows == 0) return "takes recipes with mean_rows 128";
  if (p.recipe.v_scale_span != VCATTN_SPAN_CHANNEL) return "takes recipes with v_scale_span channel";
  return nullptr;
}

std::vector<UnfusedStep> unfused_steps(const PrepareCall& call, const UnfusedScratch& scratch) {
  return call.qkv.dim == 64 ? steps_of<64>(call, scratch) : steps_of<128>(call, scratch);
}

}  // namespace vcattn::cli
