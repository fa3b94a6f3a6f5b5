// Arithmetic on rows and sums, rounded as the CPU rounds it. Internal to src/preprocess.
//
// Products and sums are spelled __fmul_rn, __fadd_rn, __fsub_rn: a compiler fuses none of these, whatever its flags.
#pragma once

#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "numerics/attention_math.h"
#include "preprocess/rows.cuh"

namespace vcattn::sm90a {

// ---- rotation ------------------------------------------------------------------------------------------------------

// The Walsh-Hadamard matrix of the first `size` channels, or none where size is 0.
struct Rotation {
  int32_t size;
  float scale;
};

inline constexpr int kSmallestRotation = 16;

// As the CPU pads: to the next power of two, from 16 on.
inline Rotation rotation(const vcattn_recipe& recipe, int64_t head_dim) {
  if (recipe.qk_hadamard == 0) return {0, 1.0f};
  const auto size = std::bit_ceil(static_cast<uint32_t>(head_dim < kSmallestRotation ? kSmallestRotation : head_dim));
  return {static_cast<int32_t>(size), 1.0f / std::sqrt(static_cast<float>(size))};
}

// What the thread has that holds the channels `distance` (32 or 64) away. All lanes take part.
template <typename Part, typename Value>
__device__ __forceinline__ Value from_partner(Value x, int distance) {
  return __shfl_xor_sync(0xFFFFFFFF, x, distance / Part::kChannels * Part::kRowsPerWarp);
}

// One step of the transform among a thread's own values: sums and differences of those `half` apart.
template <int kCount>
__device__ __forceinline__ void add_and_subtract(float (&x)[kCount], int half) {
#pragma unroll
  for (int pair = 0; pair < kCount / 2; ++pair) {
    const int i = pair / half * 2 * half + pair % half;
    const float a = x[i], b = x[i + half];
    x[i] = __fadd_rn(a, b);
    x[i + half] = __fsub_rn(a, b);
  }
}

// cpu::hadamard_row. Channels behind r.size are 0 and stay 0.
template <typename Part>
__device__ __forceinline__ void rotate(const Rotation& r, Part part, float (&x)[Part::kChannels]) {
  constexpr int kDim = Part::kDim, kChannels = Part::kChannels;
  if (r.size == 0) return;
#pragma unroll
  for (int d = 0; d < kChannels; ++d) x[d] = __fmul_rn(x[d], r.scale);
  // Only 64 channels may be stored for fewer.
  constexpr int kSmallestSize = kDim == 64 ? kSmallestRotation : kDim;
#pragma unroll
  for (int half = 1; half < kDim; half *= 2) {
    if (half >= kSmallestSize && half >= r.size) break;
    if (half < kChannels) {
      add_and_subtract(x, half);
    } else {
      // The thread of the lower channels keeps the sums, the other the differences: the products are exact.
      const float sign = (part.first & half) == 0 ? 1.0f : -1.0f;
#pragma unroll
      for (int d = 0; d < kChannels; ++d) x[d] = __fmaf_rn(sign, x[d], from_partner<Part>(x[d], half));
    }
  }
}

template <int kCount>
__device__ __forceinline__ float part_abs_max(const float (&x)[kCount]) {
  float largest = 0.0f;
#pragma unroll
  for (const float value : x) largest = fmaxf(largest, fabsf(value));
  return largest;
}

// From each thread's part of a row to the whole row, known to all of them.
template <typename Part, typename Value, typename Join>
__device__ __forceinline__ Value over_row(Value of_part, Join join) {
#pragma unroll
  for (int distance = Part::kChannels; distance < Part::kDim; distance *= 2) {
    of_part = join(of_part, from_partner<Part>(of_part, distance));
  }
  return of_part;
}

// The largest of a warp's non-negative numbers.
__device__ __forceinline__ float warp_max(float x) {
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(x)));
}

// Within two units in the last place (PTX ISA, "sqrt.approx"), for bounds.
__device__ __forceinline__ float square_root(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- codes ---------------------------------------------------------------------------------------------------------

// encode_int8(x * encode) of four values, the first in the low byte; |x * encode| rounds to at most 127.
__device__ __forceinline__ uint32_t int8x4(const float* x, float encode) {
  uint32_t code[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[i], encode), kRoundMagic));
  return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
}

// encode_e4m3 of both, `low` in the low byte.
__device__ __forceinline__ uint32_t e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ uint32_t e4m3x4(const float* x, float encode) {
  const uint32_t low = e4m3x2(__fmul_rn(x[0], encode), __fmul_rn(x[1], encode));
  const uint32_t high = e4m3x2(__fmul_rn(x[2], encode), __fmul_rn(x[3], encode));
  return low | high << 16;
}

// What two E4M3 codes stand for.
__device__ __forceinline__ float2 from_e4m3x2(uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return __half22float2(__half2(pair));
}

// A part of a row as codes into a tile of rows of kDim bytes in the order of operands.h. Returns the sum of the squares
// of INT8 codes; 0 for E4M3.
template <typename Part>
__device__ __forceinline__ int store_codes(const float (&x)[Part::kChannels], float encode, bool int8, std::byte* tile,
                                           Part part) {
  int squares = 0;
  const auto store = [&](auto encode4) {
#pragma unroll
    for (int d = 0; d < Part::kChannels; d += kChunkBytes) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = encode4(x + d + 4 * w);
      *reinterpret_cast<uint4*>(tile + swizzled(part.row, part.first + d, Part::kDim)) = {words[0], words[1], words[2],
                                                                                          words[3]};
    }
  };
  if (int8) {
    store([&](const float* four) {
      const uint32_t codes = int8x4(four, encode);
      squares = __dp4a(static_cast<int>(codes), static_cast<int>(codes), squares);
      return codes;
    });
  } else {
    store([&](const float* four) { return e4m3x4(four, encode); });
  }
  return squares;
}

// ---- FP64 sums -----------------------------------------------------------------------------------------------------

// A float's bits moved into a double's fields stand for 2^-896 of it, subnormals too; NaN and infinity become finite.
inline constexpr double kFieldScale = 0x1p896;
__device__ __forceinline__ double as_double_fields(float x) {
  const int32_t bits = __float_as_int(x);
  return __hiloint2double((bits >> 3) & static_cast<int32_t>(0x8FFFFFFF), bits << 29);
}

// sum + x, rounded once: the product is exact. A conversion to double has an eighth of the throughput.
__device__ __forceinline__ double add_float(double sum, float x) {
  return __fma_rn(as_double_fields(x), kFieldScale, sum);
}

}  // namespace vcattn::sm90a
