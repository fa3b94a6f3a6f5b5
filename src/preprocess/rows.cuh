// Rows of a caller's tensor in shared memory. Internal to src/preprocess.
//
// A thread works on one row (Q, K) or on one channel (V, sums of K) of a tile. So that neither meets bank conflicts,
// the 16-byte chunks of a row are exchanged by the row's number.
#pragma once

#include <cstddef>
#include <cstdint>

#include "preprocess/elements.cuh"
#include "vcattn/vcattn.h"

namespace vcattn::sm90a {

inline constexpr int kChunkBytes = 16;  // of one memory access

// ---- asynchronous copies (PTX ISA, "cp.async") ---------------------------------------------------------------------

// A chunk from global to shared memory.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// The first `bytes` of a chunk, zeros behind them.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- rows
// ------------------------------------------------------------------------------------------------------------

// One of q, k and v in device memory. Strides in elements.
struct Operand {
  const void* data;
  int64_t batch_stride, token_stride, head_stride, channel_stride;
  int32_t head_dim;
  int32_t chunked;  // rows are contiguous and start at multiples of 16 bytes

  template <typename Element>
  __device__ const Element* row(int batch, int64_t token, int head) const {
    return static_cast<const Element*>(data) + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

inline Operand operand(const vcattn_tensor& t) {
  const int64_t element = t.dtype == VCATTN_FP32 ? 4 : 2;
  bool chunked = t.stride[3] == 1 && reinterpret_cast<uintptr_t>(t.data) % kChunkBytes == 0;
  for (int axis = 0; axis < 3; ++axis) {
    chunked = chunked && (t.shape[axis] == 1 || t.stride[axis] * element % kChunkBytes == 0);
  }
  return {t.data,         t.stride[0], t.stride[1], t.stride[2], t.stride[3], static_cast<int32_t>(t.shape[3]),
          chunked ? 1 : 0};
}

template <typename Element, int kDim>
struct RowTile {
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Element));
  static constexpr int kRowChunks = kRowBytes / kChunkBytes;
  static constexpr int kExchanged = 8;  // rows after which the exchange repeats
  static_assert(kRowChunks % kExchanged == 0, "chunks are exchanged inside groups of eight");

  // Byte of a chunk, and of a channel, of row `row`.
  __device__ static int chunk(int row, int index) {
    return row * kRowBytes + ((index ^ (row % kExchanged)) * kChunkBytes);
  }
  __device__ static int element(int row, int channel) {
    const int byte = channel * static_cast<int>(sizeof(Element));
    return chunk(row, byte / kChunkBytes) + byte % kChunkBytes;
  }
};

// A block of kThreads starts copying kRows rows of x into a tile; channels behind head_dim become 0. row_of(i) points
// to the first element of row i. The threads wait with wait_copies and a barrier.
template <typename Element, int kDim, int kRows, int kThreads, typename RowOf>
__device__ __forceinline__ void copy_rows(const Operand& x, std::byte* tile, RowOf row_of) {
  using Tile = RowTile<Element, kDim>;
  const int thread = static_cast<int>(threadIdx.x);
  if (x.chunked) {
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
    constexpr int kRowsAtOnce = kThreads / Tile::kRowChunks;
    static_assert(kThreads % Tile::kRowChunks == 0 && kRows % kRowsAtOnce == 0, "each thread keeps to one chunk");
    const int first = thread / Tile::kRowChunks, chunk = thread % Tile::kRowChunks;
    if (x.head_dim == kDim) {
#pragma unroll
      for (int row = first; row < kRows; row += kRowsAtOnce) {
        copy_async(tile + Tile::chunk(row, chunk), row_of(row) + chunk * kElements);
      }
    } else {
      const int elements = min(max(x.head_dim - chunk * kElements, 0), kElements);
      const int inside = elements > 0 ? chunk * kElements : 0;
      for (int row = first; row < kRows; row += kRowsAtOnce) {
        copy_async(tile + Tile::chunk(row, chunk), row_of(row) + inside, elements * static_cast<int>(sizeof(Element)));
      }
    }
  } else {
#pragma unroll 4
    for (int i = thread; i < kRows * kDim; i += kThreads) {
      const int row = i / kDim, channel = i % kDim;
      const Element value = channel < x.head_dim ? row_of(row)[channel * x.channel_stride] : Element{};
      *reinterpret_cast<Element*>(tile + Tile::element(row, channel)) = value;
    }
  }
  commit_copies();
}

// Row `row` in FP32, for the thread that owns it; what is not finite is read as 0. Returns whether all of it was
// finite.
template <typename Element, int kDim>
__device__ __forceinline__ bool read_row(std::byte* tile, int row, float (&x)[kDim]) {
  using Tile = RowTile<Element, kDim>;
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(Element));
  for (bool finite = true;; finite = false) {
    FiniteCheck<Element> check;
#pragma unroll
    for (int c = 0; c < Tile::kRowChunks; ++c) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile + Tile::chunk(row, c));
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        check.add(words[w]);
        widen(Element{}, words[w], x + (4 * c + w) * kPerWord);
      }
    }
    if (check.finite()) return finite;
    // Cleaned where it lies and read again: 128 values that two paths merge would not stay in registers.
    for (int d = 0; d < kDim; ++d) {
      auto* element = reinterpret_cast<Element*>(tile + Tile::element(row, d));
      if (!is_finite(element->value())) *element = Element{};
    }
  }
}

// One channel of a tile, for the thread that owns it.
template <typename Element, int kDim>
class Column {
 public:
  using Tile = RowTile<Element, kDim>;
  __device__ Column(std::byte* tile, int channel) : tile_(tile), channel_(channel) {
#pragma unroll
    for (int i = 0; i < Tile::kExchanged; ++i) places_[i] = Tile::element(i, channel);
  }
  // Row kExchanged * group + row; `row` is a constant once loops are unrolled.
  __device__ float value(int group, int row) const {
    const std::byte* rows = tile_ + group * Tile::kExchanged * Tile::kRowBytes;
    return reinterpret_cast<const Element*>(rows + places_[row])->value();
  }
  // What is not finite among the first `rows` rows becomes 0.
  __device__ void clean(int rows) const {
    for (int i = 0; i < rows; ++i) {
      auto* element = reinterpret_cast<Element*>(tile_ + Tile::element(i, channel_));
      if (!is_finite(element->value())) *element = Element{};
    }
  }

 private:
  std::byte* tile_;
  int channel_;
  int places_[Tile::kExchanged];
};

}  // namespace vcattn::sm90a
