// The mean of K over a sequence's tokens. A thread works on one channel. Internal to src/preprocess.
#pragma once

#include "preprocess/args.cuh"

namespace vcattn::sm90a {

// Tokens of one partial sum arrive in slabs, a few ahead of the addition.
constexpr int kSlabRows = 32;
constexpr int kSlabs = 4;
static_assert(kStatisticsRows == kMeanTiles * kBlockN, "partial sums are numbered like mean groups");

template <typename Element, int kDim>
struct SumShared {
  alignas(128) std::byte slabs[kSlabs][kSlabRows * RowTile<Element, kDim>::kRowBytes];
  int32_t last;
};

// sum plus one channel of `rows` rows, in order; what is not finite counts as 0.
template <typename Element, int kDim>
__device__ __forceinline__ double add_rows(std::byte* slab, int channel, int rows, double sum) {
  constexpr int kGroup = RowTile<Element, kDim>::kExchanged;
  const Column<Element, kDim> column(slab, channel);
  for (;;) {
    double total = sum;
    float check = 0.0f;
    const auto add = [&](int limit) {
#pragma unroll 2
      for (int group = 0; group < kSlabRows / kGroup; ++group) {
#pragma unroll
        for (int row = 0; row < kGroup; ++row) {
          if (group * kGroup + row >= limit) break;
          const float x = column.value(group, row);
          check = __fmaf_rn(x, 0.0f, check);
          total = add_float(total, x);
        }
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

// Whether this group is the last of `groups` to arrive at the counter, with all that the others wrote visible to it.
template <typename Group>
__device__ __forceinline__ bool arrives_last(uint32_t& arrivals, int groups, Group group, int32_t& last) {
  __threadfence();
  group.sync();
  if (group.thread() == 0) last = atomicAdd(&arrivals, 1U) + 1 == static_cast<uint32_t>(groups);
  group.sync();
  __threadfence();
  return last != 0;
}

// The FP64 sum of kStatisticsRows tokens; `unit` counts them over all heads. The last of a sequence to be ready adds up
// all and writes the mean.
template <typename Element, int kDim>
__device__ __forceinline__ void add_keys(const PrepareArgs& a, int unit, ChannelGroup<kDim> group,
                                         SumShared<Element, kDim>& shared) {
  const QuantizedQkv& qkv = a.qkv;
  const int channel = group.thread(), kv_head = unit / qkv.mean_groups, place = unit % qkv.mean_groups;
  const int index = sequence_of(qkv, &Sequence::mean_group, place);
  const Sequence s = qkv.sequences[index];
  const int first = (place - s.mean_group) * kStatisticsRows;
  if (s.q_count == 0 || first >= s.keys) return;

  const int rows = min(s.keys - first, kStatisticsRows);
  const Element* tokens = a.k.row<Element>(s.batch, s.kv_begin, kv_head);
  const bool plain = a.order.admitted == nullptr && a.k.chunked && a.k.head_dim == kDim;
  const auto copy_slab = [&](int slab) {
    std::byte* to = shared.slabs[slab % kSlabs];
    if (plain && (slab + 1) * kSlabRows <= rows) {
      const Element* slab_tokens = tokens + int64_t{first + slab * kSlabRows} * a.k.token_stride;
      copy_whole_rows<Element, kDim, kSlabRows>(group, slab_tokens, a.k.token_stride, to);
    } else {
      // Behind the last row, the last again: not added.
      copy_rows<Element, kDim, kSlabRows>(group, a.k, to, [&](int row) {
        const int key = first + min(slab * kSlabRows + row, rows - 1);
        return tokens + a.order.token(s, key) * a.k.token_stride;
      });
    }
  };
#pragma unroll 1
  for (int slab = 0; slab < kSlabs - 1; ++slab) copy_slab(slab);
  double sum = 0.0;
#pragma unroll 1
  for (int slab = 0; slab * kSlabRows < rows; ++slab) {
    wait_copies<kSlabs - 2>();
    group.sync();  // slab has arrived, and the one before it has been read
    copy_slab(slab + kSlabs - 1);
    sum = add_rows<Element, kDim>(shared.slabs[slab % kSlabs], channel, rows - slab * kSlabRows, sum);
  }

  const int groups = (s.keys + kStatisticsRows - 1) / kStatisticsRows;
  const int64_t slot = int64_t{kv_head} * qkv.num_sequences + index;
  double* sums = a.scratch.key_sums + (int64_t{kv_head} * qkv.mean_groups + s.mean_group) * kDim + channel;
  sums[int64_t{place - s.mean_group} * kDim] = sum;
  if (!arrives_last(a.scratch.key_arrivals[slot], groups, group, shared.last)) return;
  double total = 0.0;
#pragma unroll 8
  for (int i = 0; i < groups; ++i) total += __ldcg(sums + int64_t{i} * kDim);
  a.scratch.key_mean[slot * kDim + channel] = static_cast<float>(total / static_cast<double>(s.keys));
}

}  // namespace vcattn::sm90a
