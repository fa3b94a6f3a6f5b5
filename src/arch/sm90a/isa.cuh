// One wrapper per PTX instruction that the kernels use.
#pragma once

#include <cstdint>

#include "arch/sm90a/wgmma.cuh"

namespace vcattn::sm90a {

// ---- matrix descriptors (PTX ISA, "Matrix descriptor") -------------------------------------------------------------

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A descriptor takes 18 bits of an address; in a cluster, higher ones carry the CTA's rank.
__device__ __forceinline__ uint64_t matrix_start(uint32_t address) { return (address & 0x3FFFF) >> 4; }

// Rows of kRowBytes (64 or 128) along k in the swizzle of the same width, groups of 8 rows behind one another.
// Advancing along k by 32 bytes adds 2 to it.
template <int kRowBytes>
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "swizzles of 64 and 128 bytes");
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return kSwizzle << 62 | uint64_t{8 * kRowBytes / 16} << 32 | uint64_t{1} << 16 | matrix_start(address);
}

// Core matrices of 8 rows x 16 bytes without swizzle: `k_step` bytes apart along k, `row_step` along rows.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, uint32_t k_step, uint32_t row_step) {
  return uint64_t{row_step >> 4} << 32 | uint64_t{k_step >> 4} << 16 | matrix_start(address);
}

// ---- wgmma ordering ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a wgmma in flight reads or writes must not be touched: pinned before wgmma_fence and after wgmma_wait,
// no access to them moves across.
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void pin(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// The registers of all warpgroups together must fit what the launch reserved (65,536 / threads, rounded down to a
// multiple of 8, per thread); the kernel hangs otherwise.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- mbarriers and bulk copies -------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&barrier)), "r"(count));
}
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }
__device__ __forceinline__ void mbarrier_expect(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier)) : "memory");
}
// Arrives at the same barrier of CTA `rank` of the cluster. The release it has by default is of CTA scope, which
// suffices: what is handed back this way was read by the asynchronous proxy alone. (Of cluster scope it would cost a
// fence of the whole device.)
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t& barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(smem_address(&barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}\n" ::"r"(smem_address(&barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* dst, const void* src, int bytes, uint64_t& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(dst)),
               "l"(src), "r"(bytes), "r"(smem_address(&barrier))
               : "memory");
}
// To the same place of both CTAs of the cluster, counted by each one's barrier.
__device__ __forceinline__ void bulk_copy_multicast(void* dst, const void* src, int bytes, uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(smem_address(dst)),
      "l"(src), "r"(bytes), "r"(smem_address(&barrier)), "h"(uint16_t{3})
      : "memory");
}

// ---- cluster and thread --------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// threadIdx.x, read anew at each call: no register holds it in between.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
// 2^x within 2 units in the last place; 0 for what would be subnormal.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Both to FP16 by RNE, `low` in the low half.
__device__ __forceinline__ uint32_t to_f16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// The same, negative values to 0.
__device__ __forceinline__ uint32_t to_f16x2_relu(float low, float high) {
  uint32_t y;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// All to E4M3 by RNE, `x0` in the low byte.
__device__ __forceinline__ uint32_t to_e4m3x4(float x0, float x1, float x2, float x3) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
// max(a b + c, 0), rounded once.
__device__ __forceinline__ uint32_t fma_relu_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

}  // namespace vcattn::sm90a
