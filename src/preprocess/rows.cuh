// Rows of a caller's tensor in shared memory. Internal to src/preprocess.
//
// A thread works on 64 channels of one row (Q, K) or on one channel of 128 rows (V, sums of K). So that neither meets
// bank conflicts, the 16-byte chunks of a row are exchanged by the row's number.
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

// ---- threads that work together ------------------------------------------------------------------------------------

// kThreads neighbouring threads of a block that consists of kGroups (1 or 2) such groups, with a barrier of their own
// (PTX ISA, "bar.sync"). One group does not wait for another and may leave early; code in groups uses no barrier of the
// whole block.
template <int kThreads, int kGroups>
struct ThreadGroup {
  static_assert(kGroups == 1 || kGroups == 2);
  static constexpr int kCount = kThreads, kGroupCount = kGroups;
  __device__ int index() const { return kGroups == 1 ? 0 : static_cast<int>(threadIdx.x / kThreads); }  // in the block
  __device__ int thread() const { return static_cast<int>(threadIdx.x % kThreads); }                    // in the group
  // Barriers by constant number: one known only at run time would make the block reserve all sixteen.
  __device__ void sync() const {
    if (index() == 0) {
      asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory");
    }
  }
};
// work(unit, shared) for the group's own of `units`, where it has one; `block`: of those that share them out. Each
// group has a Shared in the block's dynamic shared memory.
template <typename Shared, typename Group, typename Work>
__device__ __forceinline__ void with_unit(Group group, int block, int64_t units, Work work) {
  extern __shared__ __align__(128) std::byte memory[];
  const int unit = block * Group::kGroupCount + group.index();
  if (unit < units) work(unit, reinterpret_cast<Shared*>(memory)[group.index()]);
}
// A thread for each channel. The tiles of six blocks fill a multiprocessor's shared memory, if of 16-bit elements.
inline constexpr int kChannelThreads = 128, kChannelBlocksPerSm = 6;
template <int kDim>
using ChannelGroup = ThreadGroup<kDim, kChannelThreads / kDim>;

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
    return row * kRowBytes + ((index ^ (row & (kExchanged - 1))) * kChunkBytes);
  }
  __device__ static int element(int row, int channel) {
    const auto byte = static_cast<uint32_t>(channel) * sizeof(Element);
    return chunk(row, static_cast<int>(byte / kChunkBytes)) + static_cast<int>(byte % kChunkBytes);
  }
};

// The place that one thread of a group copies to, and how it goes on from row to row.
template <typename Element, int kDim, typename Group>
struct CopyPlace {
  using Tile = RowTile<Element, kDim>;
  static constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  static constexpr int kRowsAtOnce = Group::kCount / Tile::kRowChunks;
  static_assert(Group::kCount % Tile::kRowChunks == 0, "each thread keeps to one chunk");
  int row, chunk;  // row: its first
  __device__ explicit CopyPlace(Group group)
      : row(static_cast<int>(static_cast<uint32_t>(group.thread()) / Tile::kRowChunks)),
        chunk(static_cast<int>(static_cast<uint32_t>(group.thread()) % Tile::kRowChunks)) {}
  __device__ std::byte* at(std::byte* tile, int rows_later) const {
    if constexpr (kRowsAtOnce % Tile::kExchanged == 0) {
      return tile + Tile::chunk(row, chunk) + rows_later * Tile::kRowBytes;
    } else {
      return tile + Tile::chunk(row + rows_later, chunk);
    }
  }
};

// The group starts copying kRows rows of x into a tile; channels behind head_dim become 0. row_of(i) points to the
// first element of row i. Threads wait with wait_copies and the group's barrier.
template <typename Element, int kDim, int kRows, typename Group, typename RowOf>
__device__ __forceinline__ void copy_rows(Group group, const Operand& x, std::byte* tile, RowOf row_of) {
  using Place = CopyPlace<Element, kDim, Group>;
  const Place place(group);
  if (x.chunked && x.head_dim == kDim) {
#pragma unroll
    for (int i = 0; i < kRows; i += Place::kRowsAtOnce) {
      copy_async(place.at(tile, i), row_of(place.row + i) + place.chunk * Place::kElements);
    }
  } else if (x.chunked) {
    const int elements = min(max(x.head_dim - place.chunk * Place::kElements, 0), Place::kElements);
    const int inside = elements > 0 ? place.chunk * Place::kElements : 0;
#pragma unroll 1
    for (int i = 0; i < kRows; i += Place::kRowsAtOnce) {
      copy_async(place.at(tile, i), row_of(place.row + i) + inside, elements * static_cast<int>(sizeof(Element)));
    }
  } else {
#pragma unroll 2
    for (int i = group.thread(); i < kRows * kDim; i += Group::kCount) {
      const int row = i / kDim, channel = i % kDim;
      const Element value = channel < x.head_dim ? row_of(row)[channel * x.channel_stride] : Element{};
      *reinterpret_cast<Element*>(tile + RowTile<Element, kDim>::element(row, channel)) = value;
    }
  }
  commit_copies();
}

// The same for rows `stride` elements apart, the first at `first`, whose channels are contiguous and fill the tile's.
template <typename Element, int kDim, int kRows, typename Group>
__device__ __forceinline__ void copy_whole_rows(Group group, const Element* first, int64_t stride, std::byte* tile) {
  using Place = CopyPlace<Element, kDim, Group>;
  const Place place(group);
  const Element* source = first + place.row * stride + place.chunk * Place::kElements;
#pragma unroll
  for (int i = 0; i < kRows; i += Place::kRowsAtOnce) {
    copy_async(place.at(tile, i), source);
    source += Place::kRowsAtOnce * stride;
  }
  commit_copies();
}

// The part of a row of Q or K that one thread holds. The other parts are in the same warp: rows are next to one another
// in its lanes, parts kRowsPerWarp lanes apart.
template <typename RowElement, int kRowChannels>
struct RowPart {
  using Element = RowElement;
  static constexpr int kDim = kRowChannels;
  static constexpr int kChannels = 64;  // more would leave too few threads, fewer too much work besides
  static constexpr int kParts = kDim / kChannels;
  static constexpr int kRowsPerWarp = 32 / kParts;
  int row, first;  // channel
  __device__ explicit RowPart(int thread)
      : row(thread / 32 * kRowsPerWarp + thread % kRowsPerWarp), first(thread % 32 / kRowsPerWarp * kChannels) {}
};

// Threads that hold all parts of kUnitRows rows.
inline constexpr int kUnitRows = 128;
template <typename Element, int kDim>
using RowGroup = ThreadGroup<kUnitRows * RowPart<Element, kDim>::kParts, 128 / kDim>;
template <typename Element>
inline constexpr int kRowThreads = RowGroup<Element, 128>::kCount;  // of a block, for each kDim
inline constexpr int kRowBlocksPerSm = 2;

// A part of a row in FP32, for the thread that owns it; what is not finite is read as 0. Returns whether all of it was
// finite.
template <typename Part>
__device__ __forceinline__ bool read_part(std::byte* tile, Part part, float (&x)[Part::kChannels]) {
  using Element = typename Part::Element;
  using Tile = RowTile<Element, Part::kDim>;
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(Element));
  constexpr int kPartChunks = Tile::kRowChunks / Part::kParts;
  const int first = part.first / Part::kChannels * kPartChunks;
  for (bool finite = true;; finite = false) {
    FiniteCheck<Element> check;
#pragma unroll
    for (int c = 0; c < kPartChunks; ++c) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile + Tile::chunk(part.row, first + c));
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        check.add(words[w]);
        widen(Element{}, words[w], x + (4 * c + w) * kPerWord);
      }
    }
    if (check.finite()) return finite;
      // Cleaned where it lies and read again: values that two paths merge would not stay in registers.
#pragma unroll 1
    for (int d = 0; d < Part::kChannels; ++d) {
      auto* element = reinterpret_cast<Element*>(tile + Tile::element(part.row, part.first + d));
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
