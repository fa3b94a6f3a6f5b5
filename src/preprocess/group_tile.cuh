// Rows of v as BF16 in shared memory, and products with them on the tensor cores. Internal to src/preprocess.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "preprocess/group_layout.cuh"

namespace vcattn::sm90a {

template <int kDim>
using Bf16Tile = RowTile<Bf16, kDim>;

// ---- warp-wide matrix instructions ----------------------------------------------------------------------------------
// Lane l holds, of an 8 x 8 matrix of 16-bit elements, row l / 4 and columns 2 (l % 4) and one further.

// PTX ISA, "ldmatrix": four matrices; lane l gives the shared-memory address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// PTX ISA, "movmatrix".
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// PTX ISA, "mma.sync", m16n8k16: d += a b, BF16 products with FP32 sums. With g = lane / 4, t = lane % 4:
// d[i]: row g + 8 (i / 2), column 2t + i % 2. a[i]: row g + 8 (i % 2), columns 2t + 8 (i / 2) and one further.
// b0, b1: column g, rows 2t (+ 8 for b1) and one further.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- one-hot operands -----------------------------------------------------------------------------------------------
// The product of V^T with a matrix that has a one where a row of V belongs to a column's set is the sets' sums. Sets
// are numbered in BF16, which is exact to 256, so that one comparison makes two elements.

__device__ __forceinline__ uint16_t set_number(int set) { return __bfloat16_as_ushort(__int2bfloat16_rn(set)); }
__device__ __forceinline__ uint32_t set_number_twice(int set) { return set_number(set) * 0x10001U; }

// 1.0 where an element of `sets` is that of `set`, else 0.
__device__ __forceinline__ uint32_t one_hot(uint32_t sets, uint32_t set) {
  const __nv_bfloat162 ones =
      __heq2(reinterpret_cast<const __nv_bfloat162&>(sets), reinterpret_cast<const __nv_bfloat162&>(set));
  return reinterpret_cast<const uint32_t&>(ones);
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// PTX ISA, "cp.async": one chunk, or zeros without a look at `from`.
__device__ __forceinline__ void copy_chunk(std::byte* to, const std::byte* from, bool zeros) {
  asm volatile(
      "{\n.reg .pred zeros;\nsetp.ne.b32 zeros, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, zeros;\n}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(static_cast<int>(zeros))
      : "memory");
}

// A row of v to bring; zeros where it is not present.
struct RowSource {
  const std::byte* row;
  bool present;
};

// kThreads threads (a block or a warp, `thread` the number among them) start bringing kRows rows of v into a tile;
// wait_copies and a barrier of them end it. next(i) tells row i: each thread asks for every kRowsAtOnce-th, in
// ascending order from first_row on. Others than copies_rows are rounded, and what is not finite becomes 0.
template <bool kConvert, int kDim, int kRows, int kThreads>
struct RowFetch {
  using Tile = Bf16Tile<kDim>;
  static constexpr int kRowsAtOnce = kThreads / Tile::kRowChunks;
  static_assert(kThreads % Tile::kRowChunks == 0 && kRows % kRowsAtOnce == 0, "a thread keeps to one chunk");
  static_assert((kRowsAtOnce & (kRowsAtOnce - 1)) == 0, "first_row and the rows further on have no bit in common");

  __device__ static int first_row(int thread) { return thread / Tile::kRowChunks; }

  template <typename Next>
  __device__ __forceinline__ static void start(const GroupArgs& g, int thread, std::byte* tile, Next next) {
    constexpr int kElements = kChunkBytes / 2;
    const int chunk = thread % Tile::kRowChunks;
    const bool inside = chunk * kElements < g.v.head_dim;
    const int place = Tile::chunk(first_row(thread), chunk);
    constexpr int kUnrolled = kConvert && kThreads == 32 ? 16 : 4;  // by trial: no caller spills
#pragma unroll kUnrolled
    for (int first = 0; first < kRows; first += kRowsAtOnce) {
      const RowSource source = next(first_row(thread) + first);
      // Tile::chunk of that row
      std::byte* to = tile + (place ^ (first % Tile::kExchanged * kChunkBytes)) + first * Tile::kRowBytes;
      if constexpr (kConvert) {
        float x[kElements] = {};
        if (source.present) values_at(g, source.row, chunk * kElements, x);
#pragma unroll
        for (int i = 0; i < kElements; ++i) reinterpret_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(x[i]);
      } else {
        copy_chunk(to, source.row + chunk * kChunkBytes, !source.present || !inside);
      }
    }
    commit_copies();
  }
};

// Shared-memory address of a chunk of a tile that is aligned to its rows. Chunk c + 2k of the same row, k below
// kDim / 16, lies at the address with the bits of 32k exchanged, as c < 2.
template <int kDim>
__device__ __forceinline__ uint32_t chunk_address(const std::byte* tile, int row, int chunk) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + Bf16Tile<kDim>::chunk(row, chunk);
}

// What is not finite in a pair of BF16 becomes 0.
__device__ __forceinline__ uint32_t without_nonfinite(uint32_t pair) {
  constexpr uint32_t kExponent = 0x7F80;
  if ((pair & kExponent) == kExponent) pair &= 0xFFFF0000;
  if ((pair >> 16 & kExponent) == kExponent) pair &= 0x0000FFFF;
  return pair;
}

// The same for the 16 rows of a warp's tile from `row` on. The warp calls it.
template <int kDim>
__device__ void clean_rows(std::byte* tile, int row) {
  constexpr int kWords = 16 * Bf16Tile<kDim>::kRowBytes / 4;
  auto* words = reinterpret_cast<uint32_t*>(tile + row * Bf16Tile<kDim>::kRowBytes);
  for (int i = static_cast<int>(threadIdx.x) % 32; i < kWords; i += 32) words[i] = without_nonfinite(words[i]);
  __syncwarp();
}

// products[n] of the 16 rows of `tile` from `row` on with rows 8n .. 8n + 7 of `panel` (64 rows): laid out as d of
// multiply_add.
template <int kDim>
__device__ __forceinline__ void multiply_by_panel(const std::byte* tile, int row, const std::byte* panel,
                                                  float (&products)[kPanelClusters / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t x_chunk = chunk_address<kDim>(tile, row + lane % 16, lane / 16);
  const uint32_t c_chunk = chunk_address<kDim>(panel, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (auto& product : products) {
#pragma unroll
    for (float& x : product) x = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[4];
    load_matrices(a, x_chunk ^ (32 * k));
#pragma unroll
    for (int n = 0; n < kPanelClusters / 8; n += 2) {
      uint32_t b[4];
      load_matrices(b, (c_chunk ^ (32 * k)) + 8 * n * Bf16Tile<kDim>::kRowBytes);
      multiply_add(products[n], a, b[0], b[1]);
      multiply_add(products[n + 1], a, b[2], b[3]);
    }
  }
}

}  // namespace vcattn::sm90a
