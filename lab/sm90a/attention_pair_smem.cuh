// Recipe `accurate` on sm_90a, one maximum per (row, 256 keys): INT8 QK, ExpCast codes in whole octaves, two phases,
// E4M3 residual V, row sums and block means on the tensor cores.
//
// A cluster of two CTAs shares K and V by multicast; a CTA is one producer and two consumer warpgroups of 64 query rows
// each. A consumer works on pairs of 128-key tiles, A and B. Its registers: O 64, x 68, y 64.
//
//   PV(j) -> x, QK_A(j+1) -> y     queued together
//   x done: O += 2^(e - E) x       under QK_A
//   QK_B(j+1) -> x
//   y done: scores to 16-bit codes under QK_B
//   x done: the same, octave of the pair, clamp, P to shared memory: under the other warpgroup's wgmma
#pragma once
#include "attention.cuh"

namespace lab::pair_smem {

// Where a consumer hands the tensor cores to the other one.
enum class Pass { kNever, kIssued, kAlmostDone };
struct Config {
  bool phases = true;
  bool p_barrier =
      true;  // a barrier of the warpgroup between the stores of P and PV; also keeps its four warps together
  bool qk_barrier = false;  // the same before QK_B
  Pass pass = Pass::kNever;
};

constexpr int kStages = 2;
constexpr int kBytesK = 2 * kTileBytesK, kBytesV = 2 * kTileBytesV, kBytesP = 64 * kBlockN;
constexpr int kThreads = 384, kRows = 128;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

struct SharedMemory {
  alignas(1024) uint8_t q[2][kTileBytesQ];
  alignas(1024) uint8_t p[2][2][kBytesP];  // [consumer][tile of the pair]
  alignas(1024) uint8_t v[kStages][2][kTileBytesV];
  alignas(1024) uint8_t k[kStages][2][kTileBytesK];
  alignas(1024) uint8_t mean[2][kMeanBytes];
  uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages], full_mean[2], empty_mean[2], full_q,
      empty_q;
};
constexpr int kSharedBytes = sizeof(SharedMemory) + 1024;  // the base is aligned by hand

template <class Variant>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) attention(const __grid_constant__ Params p) {
  extern __shared__ uint8_t shared_raw[];
  SharedMemory& sm =
      *reinterpret_cast<SharedMemory*>((reinterpret_cast<uintptr_t>(shared_raw) + 1023) & ~uintptr_t{1023});
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&sm.full_k[i]), 1);
      mbarrier_init(smem_address(&sm.empty_k[i]), 4);
      mbarrier_init(smem_address(&sm.full_v[i]), 1);
      mbarrier_init(smem_address(&sm.empty_v[i]), 4);
      mbarrier_init(smem_address(&sm.full_mean[i]), 1);
      mbarrier_init(smem_address(&sm.empty_mean[i]), 4);
    }
    mbarrier_init(smem_address(&sm.full_q), 1);
    mbarrier_init(smem_address(&sm.empty_q), 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
  const int first_tile = blockIdx.x / 2, tile_step = gridDim.x / 2, row_tiles = p.row_pairs * p.heads,
            pairs = p.tiles / 2;
  const uint32_t mean_groups = (p.tiles + kMeanBlocks - 1) / kMeanBlocks;

  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0) stamp(p.stamps);
      Ring<kStages> ring;
      Ring<2> mean_ring;
      int q_parity = 1;
      // Each CTA of the cluster loads half of it, for both.
      auto load = [&](void* dst, const uint8_t* src, int bytes, uint64_t& full) {
        mbarrier_expect(smem_address(&full), bytes);
        const uint32_t half = rank * (bytes / 2);
        bulk_copy_multicast(smem_address(dst) + half, src + half, bytes / 2, smem_address(&full));
      };
      for (int t = first_tile; t < row_tiles; t += tile_step, q_parity ^= 1) {
        mbarrier_wait(smem_address(&sm.empty_q), q_parity);
        mbarrier_expect(smem_address(&sm.full_q), sizeof(sm.q));
        bulk_copy(smem_address(sm.q), p.q + (size_t(t) * 2 + rank) * sizeof(sm.q), sizeof(sm.q),
                  smem_address(&sm.full_q));
        const uint32_t head = t / p.row_pairs;
        const uint32_t pair0 = head * pairs, group0 = head * mean_groups;  // heads * tiles < 2^32
#pragma unroll 1
        for (uint32_t j = 0; j < uint32_t(pairs); ++j) {
          const int s = ring.stage;
          mbarrier_wait(smem_address(&sm.empty_k[s]), ring.parity ^ 1);
          load(sm.k[s], p.k + size_t(pair0 + j) * kBytesK, kBytesK, sm.full_k[s]);
          if (2 * j % kMeanBlocks == 0) {
            const int m = mean_ring.stage;
            mbarrier_wait(smem_address(&sm.empty_mean[m]), mean_ring.parity ^ 1);
            load(sm.mean[m],
                 reinterpret_cast<const uint8_t*>(p.mean) + size_t(group0 + 2 * j / kMeanBlocks) * kMeanBytes,
                 kMeanBytes, sm.full_mean[m]);
            mean_ring.advance();
          }
          mbarrier_wait(smem_address(&sm.empty_v[s]), ring.parity ^ 1);
          load(sm.v[s], p.v + size_t(pair0 + j) * kBytesV, kBytesV, sm.full_v[s]);
          ring.advance();
        }
      }
      if (blockIdx.x == 0) stamp(p.stamps + 2);
    }
    __syncwarp();
    cluster_sync();
    return;
  }

  setmaxnreg_inc<kConsumerRegisters>();
  const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool elected = threadIdx.x % 128 == 0;
  const uint64_t desc_q = descriptor_128b(smem_address(sm.q[consumer])),
                 desc_p = descriptor_128b(smem_address(sm.p[consumer]));
  const uint64_t desc_k0 = descriptor_128b(smem_address(sm.k)), desc_v0 = descriptor_128b(smem_address(sm.v));
  // Where this lane's rows of stmatrix go: row of 128 bytes, chunks of 16 permuted by row % 8.
  const int p_row = warp * 16 + (lane & 15);
  const uint32_t p_address = smem_address(sm.p[consumer]) + p_row * 128 + (((lane >> 4) ^ (p_row & 7)) << 4);
  auto release = [&](uint64_t& empty) {
    if (elected) {
      mbarrier_arrive_cluster(smem_address(&empty), 0);
      mbarrier_arrive_cluster(smem_address(&empty), 1);
    }
  };

  // Barrier 3 + i: consumer i may issue.
  auto take_turn = [&] {
    if constexpr (Variant::config.pass != Pass::kNever) named_barrier_sync(3 + consumer, 256);
  };
  auto pass_turn = [&](Pass here) {
    if (Variant::config.pass == here) named_barrier_arrive(4 - consumer, 256);
  };
  if (Variant::config.pass != Pass::kNever && consumer == 1) named_barrier_arrive(3, 256);

  Ring<kStages> k_ring, v_ring;
  Ring<2> mean_ring;
  int q_parity = 0;
  float o[64];  // fp32 output, thread's rows r and r + 8: o[4i], o[4i+1] and o[4i+2], o[4i+3]

  for (int t = first_tile; t < row_tiles; t += tile_step, q_parity ^= 1) {
    const int head = t / p.row_pairs;
    const int first_row = ((t % p.row_pairs) * 2 + rank) * kRows + consumer * 64;  // of this warpgroup
    const float* q_factor = p.q_factor + size_t(head) * p.row_pairs * 2 * kRows + first_row + warp * 16 + lane / 4;
    const float factor_a = q_factor[0], factor_b = q_factor[8];
    const float2* k_descale = reinterpret_cast<const float2*>(p.k_descale) + size_t(head) * pairs;
    float sum_a = 0, sum_b = 0;              // weighted row sums of this thread's block of four, rows r and r + 8
    float first_a = 0, first_b = 0;          // the same for the first half of a mean group
    float l_a = 0, l_b = 0;                  // this thread's share of the rows' sums
    float reference_a = 0, reference_b = 0;  // 8 * octave that weights refer to
    float weight_a, weight_b;                // 2^(e - E) of the pair whose P is stored
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0;

    auto issue_qk = [&](auto& s, int tile) {
      pin(s);
      wgmma_fence();
      const uint64_t desc_k = desc_k0 + (k_ring.stage * kBytesK + tile * kTileBytesK) / 16;
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma_s8_ss_n128(s, desc_q + 2 * k, desc_k + 2 * k, k > 0);
      wgmma_commit();
    };
    auto issue_pv = [&](uint32_t(&x)[68]) {
      pin(x);
      wgmma_fence();
      const uint64_t desc_v = desc_v0 + v_ring.stage * kBytesV / 16;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        wgmma_e4m3_ss_n136(x, desc_p + k / 4 * (kBytesP / 16) + k % 4 * 2,
                           desc_v + k / 4 * (kTileBytesV / 16) + k % 4 * 2, k > 0);
      }
      wgmma_commit();
    };
    auto promote = [&](const uint32_t(&x)[68]) {
      auto f = [&](int i) { return __uint_as_float(x[i]); };
#pragma unroll
      for (int i = 0; i < 64; i += 4) {
        o[i] = fmaf(f(i), weight_a, o[i]);
        o[i + 1] = fmaf(f(i + 1), weight_a, o[i + 1]);
        o[i + 2] = fmaf(f(i + 2), weight_b, o[i + 2]);
        o[i + 3] = fmaf(f(i + 3), weight_b, o[i + 3]);
      }
      constexpr float kOdd = Variant::config.phases ? kPhaseFactor : 1.0f;
      sum_a = fmaf(fmaf(kOdd, f(65), f(64)), weight_a, sum_a);
      sum_b = fmaf(fmaf(kOdd, f(67), f(66)), weight_b, sum_b);
    };
    // Scores to 16-bit codes against the reference, unclamped; even words: row r, odd: row r + 8; low half: the even
    // key. Raises the largest of each row's (low half of max_a and max_b: even keys, high half: odd ones).
    auto convert = [&](const auto& s, float descale, uint32_t(&t16)[32], uint32_t& max_a, uint32_t& max_b) {
      const float ca = factor_a * descale, cb = factor_b * descale;
      const float offset_a = kRoundMagic + kPeak - reference_a, offset_b = kRoundMagic + kPeak - reference_b;
      auto code = [](uint32_t score, float c, float offset) {
        return __float_as_uint(fmaf(static_cast<float>(static_cast<int>(score)), c, offset));
      };
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        t16[2 * i] = __byte_perm(code(s[4 * i], ca, offset_a), code(s[4 * i + 1], ca, offset_a), 0x5410);
        t16[2 * i + 1] = __byte_perm(code(s[4 * i + 2], cb, offset_b), code(s[4 * i + 3], cb, offset_b), 0x5410);
        if (i % 2 == 1) {
          max_a = __vimax3_s16x2(max_a, t16[2 * i - 2], t16[2 * i]);
          max_b = __vimax3_s16x2(max_b, t16[2 * i - 1], t16[2 * i + 1]);
        }
      }
    };
    // From the largest codes: what moves codes to the pair's own octave, and the pair's weight. Moves the reference,
    // and what was accumulated under it, where fp32's range asks for it.
    uint32_t shift_a, shift_b;
    auto choose_octaves = [&](uint32_t max_a, uint32_t max_b, bool first) {
      // Both rows in one word for the reduction over the quad.
      max_a = __vmaxs2(__byte_perm(max_a, max_b, 0x5410), __byte_perm(max_a, max_b, 0x7632));
      max_a = __vmaxs2(max_a, __shfl_xor_sync(~0u, max_a, 1));
      max_a = __vmaxs2(max_a, __shfl_xor_sync(~0u, max_a, 2));
      int octave_a = (static_cast<int16_t>(max_a & 0xffff) - (kPeak - 7)) >> 3;  // e - E
      int octave_b = (static_cast<int16_t>(max_a >> 16) - (kPeak - 7)) >> 3;
      constexpr uint32_t kPhaseShift = Variant::config.phases ? kPhaseCodes << 16 : 0;
      shift_a = __vadd2(__byte_perm(-8 * octave_a, 0, 0x1010), kPhaseShift);
      shift_b = __vadd2(__byte_perm(-8 * octave_b, 0, 0x1010), kPhaseShift);
      if (first || __any_sync(~0u, max(octave_a, octave_b) > kMaxWeightOctave)) {
        const int raise_a = first || octave_a > kMaxWeightOctave ? octave_a : 0;
        const int raise_b = first || octave_b > kMaxWeightOctave ? octave_b : 0;
        reference_a += 8 * raise_a;
        reference_b += 8 * raise_b;
        octave_a -= raise_a;
        octave_b -= raise_b;
        if (!first) {
          const float scale_a = pow2(-raise_a), scale_b = pow2(-raise_b);
#pragma unroll
          for (int i = 0; i < 64; i += 4) {
            o[i] *= scale_a;
            o[i + 1] *= scale_a;
            o[i + 2] *= scale_b;
            o[i + 3] *= scale_b;
          }
          sum_a *= scale_a;
          first_a *= scale_a;
          l_a *= scale_a;
          sum_b *= scale_b;
          first_b *= scale_b;
          l_b *= scale_b;
        }
      }
      weight_a = pow2(octave_a);
      weight_b = pow2(octave_b);
    };
    // Clamps to E4M3 codes and stores them as a tile of wgmma's A operand. The last PV of this warpgroup must be
    // complete.
    auto store_p = [&](uint32_t(&t16)[32], int tile) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        t16[i] = __viaddmin_s16x2_relu(t16[i], i % 2 ? shift_b : shift_a, kMaxCode * 0x10001u);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t x[4];  // rows r, r + 8, r, r + 8; bytes 0 to 15 of 32, then 16 to 31
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 8 * k + (i & 1) + (i & 2) * 2;
          x[i] = __byte_perm(t16[word], t16[word + 2], 0x6420);
        }
        stmatrix_x4((p_address ^ (32 * k)) + tile * kBytesP, x);
      }
    };
    auto publish_p = [&] {
      fence_proxy_async();
      if constexpr (Variant::config.p_barrier) {
        named_barrier_sync(1 + consumer, 128);
      } else {
        __syncwarp();
      }
    };
    // Every 4 tiles, and every 8 adds row sums times means to O. No PV may be in flight. j: pairs promoted so far.
    auto fold_sums = [&](int j) {
      const bool last = j == pairs;
      if (2 * j % kSumBlocks != 0 && !last) return;
      const bool second_half = 2 * (j - 1) % kMeanBlocks >= kSumBlocks;
      l_a += sum_a;
      l_b += sum_b;
      if (second_half || last) {
        uint32_t a[4];
        a[0] = round_tf32(second_half ? first_a : sum_a);
        a[1] = round_tf32(second_half ? first_b : sum_b);
        a[2] = second_half ? round_tf32(sum_a) : 0;
        a[3] = second_half ? round_tf32(sum_b) : 0;
        mbarrier_wait(smem_address(&sm.full_mean[mean_ring.stage]), mean_ring.parity);
        pin(a);
        pin(o);
        wgmma_fence();
        wgmma_tf32_rs_n128(o, a, descriptor_plain(smem_address(sm.mean[mean_ring.stage]), 128, 256), 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        release(sm.empty_mean[mean_ring.stage]);
        mean_ring.advance();
      } else {
        first_a = sum_a;
        first_b = sum_b;
      }
      sum_a = sum_b = 0;
    };

    mbarrier_wait(smem_address(&sm.full_q), q_parity);
    {
      uint32_t x[64], y[64], tx[32], ty[32], max_a = kLowestPair, max_b = kLowestPair;
      mbarrier_wait(smem_address(&sm.full_k[k_ring.stage]), k_ring.parity);
      issue_qk(y, 0);
      issue_qk(x, 1);
      const float2 descale = k_descale[0];
      wgmma_wait<0>();
      pin(x);
      pin(y);
      release(sm.empty_k[k_ring.stage]);
      k_ring.advance();
      convert(y, descale.x, ty, max_a, max_b);
      convert(x, descale.y, tx, max_a, max_b);
      choose_octaves(max_a, max_b, true);
      store_p(ty, 0);
      store_p(tx, 1);
      publish_p();
    }
    mbarrier_wait(smem_address(&sm.full_v[v_ring.stage]), v_ring.parity);
    if (pairs > 1) mbarrier_wait(smem_address(&sm.full_k[k_ring.stage]), k_ring.parity);
#pragma unroll 1
    for (int j = 1; j < pairs; ++j) {  // scores of pair j, output of pair j - 1
      uint32_t x[68], y[64];
      take_turn();
      issue_pv(x);
      issue_qk(y, 0);
      const float2 descale = k_descale[j];
      const int v_stage = v_ring.stage;
      v_ring.advance();
      wgmma_wait<1>();
      pin(x);
      release(sm.empty_v[v_stage]);
      promote(x);
      pin(o);
      if constexpr (Variant::config.qk_barrier) named_barrier_sync(1 + consumer, 128);
      issue_qk(x, 1);
      pass_turn(Pass::kIssued);
      const int k_stage = k_ring.stage;
      k_ring.advance();
      uint32_t tx[32], ty[32], max_a = kLowestPair, max_b = kLowestPair;
      wgmma_wait<1>();
      pin(y);
      pass_turn(Pass::kAlmostDone);
      convert(y, descale.x, ty, max_a, max_b);
      // This poll also ends a basic block: without it ptxas waits for QK_B before it makes the codes of A.
      mbarrier_wait(smem_address(&sm.full_v[v_ring.stage]), v_ring.parity);
      wgmma_wait<0>();
      pin(x);
      release(sm.empty_k[k_stage]);
      convert(x, descale.y, tx, max_a, max_b);
      fold_sums(j);
      choose_octaves(max_a, max_b, false);
      store_p(ty, 0);
      store_p(tx, 1);
      publish_p();
      if (j + 1 < pairs) mbarrier_wait(smem_address(&sm.full_k[k_ring.stage]), k_ring.parity);
    }
    {
      uint32_t x[68];
      issue_pv(x);
      wgmma_wait<0>();
      pin(x);
      release(sm.empty_v[v_ring.stage]);
      v_ring.advance();
      promote(x);
      if (elected) mbarrier_arrive(smem_address(&sm.empty_q));
      fold_sums(pairs);
    }
    l_a += __shfl_xor_sync(~0u, l_a, 1);
    l_a += __shfl_xor_sync(~0u, l_a, 2);
    l_b += __shfl_xor_sync(~0u, l_b, 1);
    l_b += __shfl_xor_sync(~0u, l_b, 2);
    const float inverse_a = 1.0f / l_a, inverse_b = 1.0f / l_b;
    const int thread = thread_index();  // read again: no register holds the row during the loop
    const int row = first_row + thread % 128 / 32 * 16 + thread % 32 / 4, quad_lane = thread % 4;
    const float* v_descale = p.v_descale + head * kHeadDim + 2 * quad_lane;
    __nv_bfloat16* out = p.out + (size_t(head) * p.seqlen + row) * kHeadDim + 2 * quad_lane;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 v = *reinterpret_cast<const float2*>(v_descale + 8 * i);
      if (row < p.seqlen) {
        *reinterpret_cast<__nv_bfloat162*>(out + 8 * i) =
            __floats2bfloat162_rn(o[4 * i] * inverse_a * v.x, o[4 * i + 1] * inverse_a * v.y);
      }
      if (row + 8 < p.seqlen) {
        *reinterpret_cast<__nv_bfloat162*>(out + 8 * kHeadDim + 8 * i) =
            __floats2bfloat162_rn(o[4 * i + 2] * inverse_b * v.x, o[4 * i + 3] * inverse_b * v.y);
      }
    }
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace lab::pair_smem
