// The element types of q, k and v on the device: to FP32, exactly, and whether what was read is finite. Internal to
// src/preprocess.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vcattn::sm90a {

struct Bf16 {
  uint16_t bits;
  __device__ float value() const { return __uint_as_float(uint32_t{bits} << 16); }
};
struct Fp16 {
  uint16_t bits;
  __device__ float value() const { return __half2float(__ushort_as_half(bits)); }
};
struct Fp32 {
  uint32_t bits;
  __device__ float value() const { return __uint_as_float(bits); }
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000) != 0x7F800000; }

// Four bytes of a row, to as many elements as they hold.
__device__ __forceinline__ void widen(Bf16, uint32_t word, float* out) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xFFFF0000);
}
__device__ __forceinline__ void widen(Fp16, uint32_t word, float* out) {
  const __half2 pair = reinterpret_cast<const __half2&>(word);
  out[0] = __low2float(pair);
  out[1] = __high2float(pair);
}
__device__ __forceinline__ void widen(Fp32, uint32_t word, float* out) { out[0] = __uint_as_float(word); }

// Sums up 0 x over words: 0 as long as all elements are finite, NaN afterwards. Half an instruction an element.
template <typename Element>
struct FiniteCheck;
template <>
struct FiniteCheck<Bf16> {
  __nv_bfloat162 sum = __nv_bfloat162(__ushort_as_bfloat16(0), __ushort_as_bfloat16(0));
  __device__ void add(uint32_t word) {
    const __nv_bfloat162 zero(__ushort_as_bfloat16(0), __ushort_as_bfloat16(0));
    sum = __hfma2(reinterpret_cast<const __nv_bfloat162&>(word), zero, sum);
  }
  __device__ bool finite() const { return (reinterpret_cast<const uint32_t&>(sum) & 0x7FFF7FFF) == 0; }
};
template <>
struct FiniteCheck<Fp16> {
  __half2 sum = __half2(__ushort_as_half(0), __ushort_as_half(0));
  __device__ void add(uint32_t word) {
    const __half2 zero(__ushort_as_half(0), __ushort_as_half(0));
    sum = __hfma2(reinterpret_cast<const __half2&>(word), zero, sum);
  }
  __device__ bool finite() const { return (reinterpret_cast<const uint32_t&>(sum) & 0x7FFF7FFF) == 0; }
};
template <>
struct FiniteCheck<Fp32> {
  float sum = 0.0f;
  __device__ void add(uint32_t word) { sum = __fmaf_rn(__uint_as_float(word), 0.0f, sum); }
  __device__ bool finite() const { return sum == 0.0f; }
};

}  // namespace vcattn::sm90a
