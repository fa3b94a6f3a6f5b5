// The end of a work item: rows of a warp go through shared memory to `out` and `lse`, in the caller's layout and type.
// The detour makes whole 16-byte stores of them and keeps the many cases of layouts apart from the registers of the
// main loop.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "arch/sm90a/config.h"
#include "arch/sm90a/isa.cuh"
#include "arch/sm90a/softmax.cuh"
#include "arch/sm90a/work_item.cuh"
#include "vcattn/vcattn.h"

namespace vcattn::sm90a {

inline constexpr int kWarpRows = 16;

// A warp's rows, not yet normalised. The padding keeps a half-warp's 8-byte stores apart in the banks.
template <int kDim>
struct WarpRows {
  float out[kWarpRows][kDim + 8];
  float sum[kWarpRows];        // row sums in units of 2^reference
  float reference[kWarpRows];  // octaves
};

// `o` as attention.cuh holds it, for rows a and b of each thread.
template <int kDim>
__device__ __forceinline__ void stage_rows(WarpRows<kDim>& rows, const float (&o)[kDim / 2], RowPair sum,
                                           RowPair reference) {
  const int lane = thread_index() % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    *reinterpret_cast<float2*>(&rows.out[row][8 * i + 2 * quad]) = make_float2(o[4 * i], o[4 * i + 1]);
    *reinterpret_cast<float2*>(&rows.out[row + 8][8 * i + 2 * quad]) = make_float2(o[4 * i + 2], o[4 * i + 3]);
  }
  if (quad == 0) {
    rows.sum[row] = sum.a;
    rows.sum[row + 8] = sum.b;
    rows.reference[row] = reference.a;
    rows.reference[row + 8] = reference.b;
  }
  __syncwarp();
}

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 x) { return *reinterpret_cast<const uint32_t*>(&x); }
__device__ __forceinline__ uint32_t bits_of(__half2 x) { return *reinterpret_cast<const uint32_t*>(&x); }

// Eight channels of a row from `channel` on, those below head_dim. `element`: of [.., .., .., 0] in `out`.
__device__ __forceinline__ void store_channels(const Output& out, int64_t element, int channel, const float (&x)[8]) {
  const int size = out.dtype == VCATTN_FP32 ? 4 : 2;
  uint8_t* data = static_cast<uint8_t*>(out.data) + element * size;
  uint8_t* chunk = data + channel * size;
  if (out.stride[3] == 1 && channel + 8 <= out.head_dim && reinterpret_cast<uintptr_t>(chunk) % 16 == 0) {
    uint4* words = reinterpret_cast<uint4*>(chunk);
    if (out.dtype == VCATTN_BF16) {
      words[0] = make_uint4(bits_of(__floats2bfloat162_rn(x[0], x[1])), bits_of(__floats2bfloat162_rn(x[2], x[3])),
                            bits_of(__floats2bfloat162_rn(x[4], x[5])), bits_of(__floats2bfloat162_rn(x[6], x[7])));
    } else if (out.dtype == VCATTN_FP16) {
      words[0] = make_uint4(bits_of(__floats2half2_rn(x[0], x[1])), bits_of(__floats2half2_rn(x[2], x[3])),
                            bits_of(__floats2half2_rn(x[4], x[5])), bits_of(__floats2half2_rn(x[6], x[7])));
    } else {
      reinterpret_cast<float4*>(chunk)[0] = make_float4(x[0], x[1], x[2], x[3]);
      reinterpret_cast<float4*>(chunk)[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (channel + i >= out.head_dim) break;
    uint8_t* place = data + (channel + i) * out.stride[3] * size;
    if (out.dtype == VCATTN_BF16) {
      *reinterpret_cast<__nv_bfloat16*>(place) = __float2bfloat16_rn(x[i]);
    } else if (out.dtype == VCATTN_FP16) {
      *reinterpret_cast<__half*>(place) = __float2half_rn(x[i]);
    } else {
      *reinterpret_cast<float*>(place) = x[i];
    }
  }
}

// Rows [row, row + 16) of the work item's block. Rows without keys have sums of 0: they become 0, and lse -inf.
// log_ratio: natural logarithm of what row sums exceed the sums of exponentials by.
template <int kDim>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const WarpRows<kDim>& rows, WorkItem work, int row,
                                           float log_ratio) {
  const QuantizedQkv& qkv = p.qkv;
  const int index = work.sequence(qkv), lane = thread_index() % 32;
  const Sequence& sequence = qkv.sequences[index];
  const int64_t kv_slot = int64_t{work.kv_head(qkv)} * qkv.num_sequences + index;
  const bool empty = sequence.keys == 0;  // then nothing of it was prepared
  const bool poisoned = !empty && qkv.k_poison[kv_slot] != 0;
  constexpr int kChunks = kDim / 8;  // of a row
  const int channel = lane % kChunks * 8;
  float v_descale[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) v_descale[i] = empty ? 0.0f : qkv.v_descale[kv_slot * kDim + channel + i];
#pragma unroll 1
  for (int i = lane / kChunks; i < kWarpRows; i += 32 / kChunks) {
    const int64_t query = int64_t{work.block(qkv) - sequence.q_block} * qkv.block_rows + row + i;
    if (query >= sequence.q_count) break;
    const int64_t place = int64_t{work.number()} * qkv.block_rows + row + i;
    const bool nan = poisoned || (!empty && isnan(qkv.q_factor[place]));
    const float sum = nan ? __int_as_float(0x7fffffff) : rows.sum[i];
    const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    const int64_t token = sequence.q_begin + query;
    float x[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = rows.out[i][channel + c] * inverse * v_descale[c];
    const Output& out = p.out;
    store_channels(out, sequence.batch * out.stride[0] + token * out.stride[1] + work.head(qkv) * out.stride[2],
                   channel, x);
    if (out.lse != nullptr && channel == 0) {
      // The code of the reference itself stands for 2^kExpCastLog2Peak.
      const float lse = (rows.reference[i] - kExpCastLog2Peak) * static_cast<float>(kLn2) + logf(sum) - log_ratio;
      out.lse[sequence.batch * out.lse_stride[0] + token * out.lse_stride[1] + work.head(qkv) * out.lse_stride[2]] =
          lse + (empty ? 0.0f : qkv.lse_shift[place]);
    }
  }
  __syncwarp();  // before the next item's rows
}

}  // namespace vcattn::sm90a
