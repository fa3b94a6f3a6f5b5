// Scores of a tile of keys, as wgmma leaves them in registers, to E4M3 probability codes in the order of wgmma's A
// operand. A thread holds 64 scores of a 64 x 128 tile: those of rows a = lane / 4 and b = a + 8 of its warp's 16, at
// keys 8 i + 2 (lane % 4) and the next: s[4 i], s[4 i + 1] of row a, s[4 i + 2], s[4 i + 3] of row b. FP16 scores come
// in pairs: s[2 i] of row a, s[2 i + 1] of row b.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "arch/sm90a/isa.cuh"
#include "arch/sm90a/operands.h"
#include "numerics/attention_math.h"

namespace vcattn::sm90a {

// The same quantity of a thread's rows a and b.
struct RowPair {
  float a, b;
  __device__ __forceinline__ float operator[](int row) const { return row == 0 ? a : b; }
};
__device__ __forceinline__ RowPair operator*(RowPair x, float y) { return {x.a * y, x.b * y}; }
__device__ __forceinline__ RowPair larger(RowPair x, RowPair y) { return {fmaxf(x.a, y.a), fmaxf(x.b, y.b)}; }

// Over the four lanes that share the rows.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// 2^octaves for octaves <= 127; 0 under 2^-126.
__device__ __forceinline__ float pow2(int octaves) { return __int_as_float(max(octaves + 127, 0) << 23); }
__device__ __forceinline__ float pow2(float octaves) { return pow2(__float2int_rn(fmaxf(octaves, -127.0f))); }

// Word w = 4 k + i of a tile's 16 code words holds four keys of row a (i even) or b: two neighbouring scores from here
// on, and the two that lie 4 further (operands.h, key_at).
__device__ __forceinline__ constexpr int first_score(int word) {
  return 16 * (word / 4) + 2 * (word & 1) + 4 * (word & 2);
}

// ---- any range of scores: the maximum of the pair of tiles first, then codes against it ---------------------------

// Beyond so many octaves the row becomes NaN. INT8 scores keep to kCodeRange by themselves; of E4M3 scores the FP16
// offset, 124 - 8 e, must be exact: a multiple of 4 that takes 11 bits.
inline constexpr float kOctaveLimitInt8 = 2 * kCodeRange / kCodesPerOctave, kOctaveLimitE4m3 = 1000.0f;
// FP16 subnormals count in 2^-24: conversion to them rounds to whole codes.
inline constexpr float kCodeUnit = 0x1p-24f;

// Largest score in code units, rounded to whole codes except for kExp2.
// c: code units per score.
template <bool kInt8, bool kExp2>
__device__ __forceinline__ RowPair tile_maximum(const uint32_t* s, RowPair c) {
  RowPair largest;
  if constexpr (kInt8) {
    int a = static_cast<int>(s[0]), b = static_cast<int>(s[2]);
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      a = __vimax3_s32(a, static_cast<int>(s[i]), static_cast<int>(s[i + 1]));
      b = __vimax3_s32(b, static_cast<int>(s[i + 2]), static_cast<int>(s[i + 3]));
    }
    largest = {static_cast<float>(a), static_cast<float>(b)};
  } else {
    uint32_t a = s[0], b = s[1];
#pragma unroll
    for (int i = 2; i < 32; i += 2) {
      a = max_f16x2(a, s[i]);
      b = max_f16x2(b, s[i + 1]);
    }
    auto larger_half = [](uint32_t pair) {
      const __half2 h = *reinterpret_cast<const __half2*>(&pair);
      return fmaxf(__low2float(h), __high2float(h));
    };
    largest = {larger_half(a), larger_half(b)};
  }
  if constexpr (kExp2) return {quad_max(largest.a * c.a), quad_max(largest.b * c.b)};
  auto rounded = [](float x, float factor) { return __fsub_rn(__fmaf_rn(x, factor, kRoundMagic), kRoundMagic); };
  return {quad_max(rounded(largest.a, c.a)), quad_max(rounded(largest.b, c.b))};
}

// x, or NaN beyond `limit`, which makes NaN of the row's codes.
__device__ __forceinline__ float within(float x, float limit) {
  return fabsf(x) < limit ? x : __int_as_float(0x7fffffff);
}

// Codes against the octaves. odd_codes: what two phases add to odd keys. zero: 0, which the compiler must not know.
// kSums adds this thread's unrounded probabilities to `sums` (kExp2).
template <bool kInt8, bool kExp2, bool kSums = false>
__device__ __forceinline__ void make_codes(const uint32_t* s, RowPair c, RowPair octave, float odd_codes, uint32_t zero,
                                           uint32_t (&codes)[16], RowPair* sums = nullptr) {
  auto score = [&](int i) { return static_cast<float>(static_cast<int>(s[i])); };
  if constexpr (kExp2) {
    const RowPair factor = c * (1.0f / kCodesPerOctave);
    const RowPair offset = {kExpCastLog2Peak - octave.a, kExpCastLog2Peak - octave.b};
    // ptxas would put all multiply-adds before the first exponential, and leave each pipe idle in turn. So a word's
    // offset depends on the word four before it.
#pragma unroll
    for (int w = 0; w < 16; ++w) {
      const int i = first_score(w);
      const uint32_t chain = w < 4 || kSums ? 0 : codes[w - 4] & zero;
      const float term = __uint_as_float(__float_as_uint(offset[w & 1]) | chain);
      auto probability = [&](int n) { return exp2_approx(fmaf(score(n), factor[w & 1], term)); };
      const float p[4] = {probability(i), probability(i + 1), probability(i + 4), probability(i + 5)};
      codes[w] = to_e4m3x4(p[0], p[1], p[2], p[3]);
      if constexpr (kSums) (w % 2 == 0 ? sums->a : sums->b) += p[0] + p[1] + (p[2] + p[3]);
    }
    return;
  }
  const RowPair factor = c * kCodeUnit;
  const RowPair even = {(kExpCastPeak - kCodesPerOctave * octave.a) * kCodeUnit,
                        (kExpCastPeak - kCodesPerOctave * octave.b) * kCodeUnit};
  const RowPair odd = {even.a + odd_codes * kCodeUnit, even.b + odd_codes * kCodeUnit};
  const uint32_t factor2[2] = {to_f16x2(factor.a, factor.a), to_f16x2(factor.b, factor.b)};
  const uint32_t offset2[2] = {to_f16x2(even.a, odd.a), to_f16x2(even.b, odd.b)};
#pragma unroll
  for (int w = 0; w < 16; ++w) {
    const int i = first_score(w), row = w & 1;
    auto pair = [&](int n) {
      if constexpr (kInt8) {
        return to_f16x2_relu(fmaf(score(n), factor[row], even[row]), fmaf(score(n + 1), factor[row], odd[row]));
      } else {
        return fma_relu_f16x2(s[n / 2], factor2[row], offset2[row]);
      }
    };
    codes[w] = __byte_perm(pair(i), pair(i + 4), 0x6420);
  }
}

// What keys from `keys` on bring to this thread's unrounded sums (kExp2). They repeat the last key; the ones under V^T
// leave them out, but these sums know nothing of the ones.
__device__ __forceinline__ RowPair sums_behind(const uint32_t (&s)[64], RowPair c, RowPair octave, int keys) {
  RowPair sums = {0, 0};
  const int first = 2 * (thread_index() % 4);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const bool b = i & 2;
    const float u = fmaf(static_cast<float>(static_cast<int>(s[i])), (b ? c.b : c.a) * (1.0f / kCodesPerOctave),
                         kExpCastLog2Peak - (b ? octave.b : octave.a));
    if (first + i / 4 * 8 + (i & 1) >= keys) (b ? sums.b : sums.a) += exp2_approx(u);
  }
  return sums;
}

// ---- integer scores of bounded range: codes against the reference first, moved to the pair's octave afterwards -----
//
// Half of the work can so be done for one tile while the tensor cores are at the other. Codes are 16-bit integers
// until they are clamped, so |code| must stay below 2^15: q_norm x k_norm bounds it (operands.h).

inline constexpr float kCodeBound = 32000.0f;

// t[2 i] of row a, t[2 i + 1] of row b: scores s[4 i ..] in pairs, the even key in the low half. Raises `largest`.
struct CodePairMax {
  uint32_t a = 0x80008000u, b = 0x80008000u;  // of even keys in the low half, of odd ones in the high half
};
__device__ __forceinline__ void codes_by_reference(const uint32_t (&s)[64], RowPair c, RowPair reference,
                                                   uint32_t (&t)[32], CodePairMax& largest) {
  const RowPair offset = {kRoundMagic + kExpCastPeak - kCodesPerOctave * reference.a,
                          kRoundMagic + kExpCastPeak - kCodesPerOctave * reference.b};
  auto code = [&](int i, int row) {
    return __float_as_uint(fmaf(static_cast<float>(static_cast<int>(s[i])), c[row], offset[row]));
  };
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    t[2 * i] = __byte_perm(code(4 * i, 0), code(4 * i + 1, 0), 0x5410);
    t[2 * i + 1] = __byte_perm(code(4 * i + 2, 1), code(4 * i + 3, 1), 0x5410);
    if (i % 2 == 1) {
      largest.a = __vimax3_s16x2(largest.a, t[2 * i - 2], t[2 * i]);
      largest.b = __vimax3_s16x2(largest.b, t[2 * i - 1], t[2 * i + 1]);
    }
  }
}

// Octaves of rows a and b against the reference, from their largest codes.
__device__ __forceinline__ int2 octaves_by_reference(const CodePairMax& largest) {
  // Both rows in one word for the reduction.
  uint32_t max = __vmaxs2(__byte_perm(largest.a, largest.b, 0x5410), __byte_perm(largest.a, largest.b, 0x7632));
  max = __vmaxs2(max, __shfl_xor_sync(~0u, max, 1));
  max = __vmaxs2(max, __shfl_xor_sync(~0u, max, 2));
  return {octaves_above_peak(static_cast<int16_t>(max & 0xffff)), octaves_above_peak(static_cast<int16_t>(max >> 16))};
}

// Moves codes by `octave` and clamps them. t is used up.
__device__ __forceinline__ void finish_codes(uint32_t (&t)[32], int2 octave, uint32_t odd_codes,
                                             uint32_t (&codes)[16]) {
  auto shift = [&](int octaves) { return __vadd2(__byte_perm(-8 * octaves, 0, 0x1010), odd_codes << 16); };
  const uint32_t shift_a = shift(octave.x), shift_b = shift(octave.y);
#pragma unroll
  for (int i = 0; i < 32; ++i)
    t[i] = __viaddmin_s16x2_relu(t[i], i % 2 ? shift_b : shift_a, kExpCastMaxCode * 0x10001u);
#pragma unroll
  for (int w = 0; w < 16; ++w) codes[w] = __byte_perm(t[first_score(w) / 2], t[first_score(w) / 2 + 2], 0x6420);
}

}  // namespace vcattn::sm90a
