// The mean of K over a sequence's tokens. A thread works on one channel. Internal to src/preprocess.
#pragma once

#include "preprocess/args.cuh"

namespace vcattn::sm90a {

// Tokens of one partial sum arrive in slabs, a few ahead of the addition.
constexpr int kSlabRows = 32;
constexpr int kSlabs = 4;
static_assert(kStatisticsRows == kMeanTiles * kBlockN, "partial sums are numbered like mean groups");

// Rows of the tables of rope_k for the tokens of each slab; nothing without rope.
template <bool kRope>
struct SlabAngles {};
template <>
struct SlabAngles<true> {
  RopeRow angle_rows[kSlabs][kSlabRows];
};

template <typename Element, int kDim, bool kRope>
struct SumShared : SlabAngles<kRope> {
  alignas(128) std::byte slabs[kSlabs][kSlabRows * RowTile<Element, kDim>::kRowBytes];
  int32_t last;
};

// sum plus one channel of `rows` rows, in order; what is not finite counts as 0, or where kRotated, whose tables may
// hold as much, spoils the sum: the head is marked when its keys are quantised.
template <bool kRotated, typename Values>
__device__ __forceinline__ double add_rows(const Values& column, int rows, double sum) {
  constexpr int kGroup = Values::Tile::kExchanged;
  for (bool cleaned = false;; cleaned = true) {
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
    if (check == 0.0f || (kRotated && cleaned)) return total;
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
template <typename Element, int kDim, bool kRope>
__device__ __forceinline__ void add_keys(const PrepareArgs& a, int unit, ChannelGroup<kDim> group,
                                         SumShared<Element, kDim, kRope>& shared) {
  const QuantizedQkv& qkv = a.qkv;
  const int channel = group.thread(), kv_head = unit / qkv.mean_groups, place = unit % qkv.mean_groups;
  const int index = sequence_of(qkv, &Sequence::mean_group, place);
  const Sequence s = qkv.sequences[index];
  const int first = (place - s.mean_group) * kStatisticsRows;
  if (s.q_count == 0 || first >= s.keys) return;

  const int rows = min(s.keys - first, kStatisticsRows);
  const Element* tokens = a.k.row<Element>(s.batch, s.kv_begin, kv_head);
  const bool plain = a.order.admitted == nullptr && a.k.chunked && a.k.head_dim == kDim;
  // Behind the last row, the last again: not added.
  const auto key_of = [&](int slab, int row) { return first + min(slab * kSlabRows + row, rows - 1); };
  const auto copy_slab = [&](int slab) {
    std::byte* to = shared.slabs[slab % kSlabs];
    if constexpr (kRope) {
      if (channel < kSlabRows) {
        const int64_t token = int64_t{s.kv_begin} + a.order.token(s, key_of(slab, channel));
        shared.angle_rows[slab % kSlabs][channel] = a.rope_k.row(s.batch, token, kv_head);
      }
    }
    if (plain && (slab + 1) * kSlabRows <= rows) {
      const Element* slab_tokens = tokens + int64_t{first + slab * kSlabRows} * a.k.token_stride;
      copy_whole_rows<Element, kDim, kSlabRows>(group, slab_tokens, a.k.token_stride, to);
    } else {
      copy_rows<Element, kDim, kSlabRows>(
          group, a.k, to, [&](int row) { return tokens + a.order.token(s, key_of(slab, row)) * a.k.token_stride; });
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
    std::byte* const tile = shared.slabs[slab % kSlabs];
    const int left = rows - slab * kSlabRows;
    if constexpr (kRope) {
      const RopeRow* const angle_rows = shared.angle_rows[slab % kSlabs];
      sum = add_rows<true>(RopeChannel<Element, kDim>(a.rope_k, tile, channel, angle_rows), left, sum);
    } else {
      sum = add_rows<false>(Column<Element, kDim>(tile, channel), left, sum);
    }
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
