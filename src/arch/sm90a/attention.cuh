// Attention on sm_90a from prepared operands: out = softmax(Q K^T) V, normalised, with block means restored.
//
// A cluster of two CTAs serves a block of query rows of one head and shares K and V by multicast; a CTA is one producer
// warpgroup and two or three consumer warpgroups of 64 rows each. A consumer walks over pairs of 128-key tiles A and B:
//
//   QK(A) -> x, QK(B) -> y    two chains of wgmma; the maximum of A is taken under QK(B)
//   octave e of the pair      per row, over its 256 keys, reduced over the four lanes that share the row
//   codes of A and B          E4M3 bytes against e, in wgmma's A-operand order
//   PV -> z                   256 keys into a fresh FP32 accumulator; eight rows of ones under V^T give row sums
//   O += 2^(e - E) z          in FP32 registers; E stays where the first pair put it unless FP32's range asks
//   O += sums x means         every eight tiles, one TF32 wgmma
//
// All of this is serial in a warpgroup; while one computes the softmax the other one fills the tensor cores.
// docs/sm90a.md tells what else was tried, and docs/algorithm.md the numerics.
#pragma once

#include <cstdint>

#include "arch/sm90a/config.h"
#include "arch/sm90a/isa.cuh"
#include "arch/sm90a/softmax.cuh"
#include "arch/sm90a/store.cuh"
#include "arch/sm90a/work_item.cuh"

namespace vcattn::sm90a {

inline constexpr int kStages = 2;  // pairs of tiles in flight

// setmaxnreg would wait for ever for registers beyond those that the launch reserves of 65,536.
constexpr bool registers_fit(const Config& c) {
  return c.producer_registers() + c.consumers() * c.consumer_registers() <=
         (c.consumers() + 1) * (65536 / c.threads() / 8 * 8);
}

// A pair may outweigh the reference by so many octaves before the reference moves: FP32 has the range.
inline constexpr int kMaxWeightOctave = 32;

template <class Variant>
struct SharedMemoryPlan {
  static constexpr int kDim = Variant::config.head_dim, kConsumers = Variant::config.consumers();
  alignas(1024) uint8_t q[kConsumers][query_tile_bytes(kDim)];
  alignas(1024) uint8_t v[kStages][2][value_tile_bytes(kDim)];
  alignas(1024) uint8_t k[kStages][2][key_tile_bytes(kDim)];
  alignas(1024) uint8_t means[2][mean_group_bytes(kDim)];
  alignas(16) WarpRows<kDim> rows[4 * kConsumers];
  uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
  uint64_t full_means[2], empty_means[2], full_q, empty_q;
};
template <class Variant>
inline constexpr int kSharedBytes = sizeof(SharedMemoryPlan<Variant>) + 1024;  // the base is aligned by hand

// Position in a ring of two shared-memory stages, in one register.
struct Ring {
  uint32_t step = 0;
  __device__ __forceinline__ int stage() const { return step % 2; }
  __device__ __forceinline__ int parity() const { return step / 2 % 2; }
  __device__ __forceinline__ void advance() { ++step; }
  __device__ __forceinline__ Ring next() const { return {step + 1}; }
};
static_assert(kStages == 2, "Ring");

// Variant::config is a Config; kernels are named by types, as nvcc cannot name them by values of class type.
template <class Variant>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Variant::config.threads(), 1)
    attention(const __grid_constant__ AttentionParams p) {
  constexpr Config kConfig = Variant::config;
  constexpr int kDim = kConfig.head_dim;
  constexpr bool kInt8 = kConfig.scores == Scores::kInt8, kExp2 = kConfig.probabilities == Probabilities::kExp2;
  constexpr bool kMeans = kConfig.means, kRunning = kConfig.row_maximum == RowMaximum::kRunning;
  static_assert(kDim == 64 || kDim == 128, "head dimensions as stored");
  static_assert(registers_fit(kConfig), "registers of the warpgroups");
  static_assert(kInt8 || !kExp2, "FP16 scores feed ExpCast only");
  static_assert(!kRunning || (kExp2 && kMeans), "a running maximum goes with exp2 and means");
  constexpr int kConsumers = kConfig.consumers();
  constexpr bool kOneTileOfScores = kInt8 && kConsumers == 3;  // no registers for two
  constexpr int kTileBytesK = key_tile_bytes(kDim), kTileBytesV = value_tile_bytes(kDim),
                kMeanBytes = mean_group_bytes(kDim);
  constexpr int kOutputs = kDim / 2;       // FP32 outputs of a thread: rows r and r + 8
  constexpr int kProducts = kOutputs + 4;  // of a pair: outputs and four row sums
  const QuantizedQkv& qkv = p.qkv;

  extern __shared__ uint8_t shared_raw[];
  auto& sm = *reinterpret_cast<SharedMemoryPlan<Variant>*>((reinterpret_cast<uintptr_t>(shared_raw) + 1023) &
                                                           ~uintptr_t{1023});
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    // Every consumer warpgroup of the cluster hands a stage back.
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(sm.full_k[i], 1);
      mbarrier_init(sm.empty_k[i], 2 * kConsumers);
      mbarrier_init(sm.full_v[i], 1);
      mbarrier_init(sm.empty_v[i], 2 * kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(sm.full_means[i], 1);
      mbarrier_init(sm.empty_means[i], 2 * kConsumers);
    }
    mbarrier_init(sm.full_q, 1);
    mbarrier_init(sm.empty_q, kConsumers);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
  const int items = qkv.blocks * qkv.num_heads;

  // ---- producer: one thread ----
  if (warpgroup == 0) {
    setmaxnreg_dec<kConfig.producer_registers()>();
    if (threadIdx.x == 0) {
      Ring ring;
      Ring mean_ring;
      int q_parity = 1;
      // Each CTA of the cluster loads half of it, for both.
      auto load = [&](uint8_t* dst, const uint8_t* src, int bytes, uint64_t& full) {
        mbarrier_expect(full, bytes);
        const int half = rank * (bytes / 2);
        bulk_copy_multicast(dst + half, src + half, bytes / 2, full);
      };
      for (int item = blockIdx.x / 2; item < items; item += gridDim.x / 2) {
        const WorkItem work(item);
        mbarrier_wait(sm.empty_q, q_parity);
        q_parity ^= 1;
        mbarrier_expect(sm.full_q, sizeof(sm.q));
        bulk_copy(sm.q, qkv.q + (int64_t{item} * 2 + rank) * sizeof(sm.q), sizeof(sm.q), sm.full_q);
        const Sequence& sequence = qkv.sequences[work.sequence(qkv)];
        const int tiles = tiles_of(sequence.keys);
        // 32-bit places, multiplied out at each load: this thread has few registers.
        uint32_t place = uint32_t(work.kv_head(qkv)) * qkv.tiles + sequence.tile;
        uint32_t group = uint32_t(work.kv_head(qkv)) * qkv.mean_groups + sequence.mean_group;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile += 2, place += 2) {
          const int s = ring.stage();
          mbarrier_wait(sm.empty_k[s], ring.parity() ^ 1);
          load(sm.k[s][0], qkv.k + size_t(place) * kTileBytesK, 2 * kTileBytesK, sm.full_k[s]);
          if (kMeans && tile % kMeanTiles == 0) {
            const int m = mean_ring.stage();
            mbarrier_wait(sm.empty_means[m], mean_ring.parity() ^ 1);
            load(sm.means[m], reinterpret_cast<const uint8_t*>(qkv.means) + size_t(group++) * kMeanBytes, kMeanBytes,
                 sm.full_means[m]);
            mean_ring.advance();
          }
          mbarrier_wait(sm.empty_v[s], ring.parity() ^ 1);
          load(sm.v[s][0], qkv.v + size_t(place) * kTileBytesV, 2 * kTileBytesV, sm.full_v[s]);
          ring.advance();
        }
      }
    }
    __syncwarp();
    cluster_sync();  // no CTA leaves while the other may still write to its shared memory
    return;
  }

  // ---- consumers ----
  setmaxnreg_inc<kConfig.consumer_registers()>();
  const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool elected = threadIdx.x % 128 == 0;
  const uint64_t desc_q = swizzled_descriptor<kDim>(smem_address(sm.q[consumer]));
  const uint64_t desc_k0 = swizzled_descriptor<kDim>(smem_address(sm.k));
  const uint64_t desc_v0 = swizzled_descriptor<kBlockN>(smem_address(sm.v));
  // wgmma of all four warps is done once one of them has waited for it.
  auto release = [&](uint64_t& empty) {
    if (elected) {
      mbarrier_arrive_cluster(empty, 0);
      mbarrier_arrive_cluster(empty, 1);
    }
  };

  Ring ring;  // of K and of V
  Ring mean_ring;
  int q_parity = 0;
  // A thread holds rows r and r + 8 of its warp's 16 ("a" and "b"), r = lane / 4, and of each 8 columns those at
  // 2 (lane % 4) and the next: o[4 i], o[4 i + 1] of row a, o[4 i + 2], o[4 i + 3] of row b.
  float o[kOutputs];

  for (int item = blockIdx.x / 2; item < items; item += gridDim.x / 2) {
    const WorkItem work(item);
    const Sequence& sequence = qkv.sequences[work.sequence(qkv)];
    const int pairs = tiles_of(sequence.keys) / 2;
    const int64_t first_row = ((int64_t{item} * 2 + rank) * kConsumers + consumer) * kTileRowsQ;
    const float* q_factor = qkv.q_factor + first_row + warp * 16 + lane / 4;
    auto usable = [](float factor) { return isnan(factor) ? 0.0f : factor; };  // NaN rows are written at the end
    const RowPair factor = {usable(q_factor[0]), usable(q_factor[8])};
    const float2* k_descale =
        reinterpret_cast<const float2*>(qkv.k_descale + int64_t{work.kv_head(qkv)} * qkv.tiles + sequence.tile);
    RowPair l = {0, 0};          // this thread's share of the rows' sums
    RowPair sum = {0, 0};        // row sums that the means have not seen: lane q of a quad holds those of tiles 4 i + q
    RowPair first_sum = {0, 0};  // the same of the first half of a mean group
    RowPair reference = {0, 0};  // E, octaves
    RowPair weight = {0, 0};     // 2^(e - E) of the pair whose codes are held
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0;

    // Starts on the scores of tile `tile`, or with kE4m3 of both.
    auto issue_qk = [&](uint32_t(&s)[64], int tile) {
      const uint64_t desc_k = desc_k0 + (ring.stage() * 2 + tile) * (kTileBytesK / 16);
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 32; ++k) {
        if constexpr (kInt8) {
          wgmma_s8_ss_n128(s, desc_q + 2 * k, desc_k + 2 * k, k > 0);
        } else {
          wgmma_e4m3_f16_ss_n256(s, desc_q + 2 * k, desc_k + 2 * k, k > 0);
        }
      }
      wgmma_commit();
    };
    // Waits for them.
    auto take_scores = [&](uint32_t(&s)[64]) {
      wgmma_wait<0>();
      pin(s);
    };
    auto issue_pv = [&](uint32_t(&z)[kProducts], uint32_t(&codes)[16], int tile, bool accumulate) {
      const uint64_t desc_v = desc_v0 + (ring.stage() * 2 + tile) * (kTileBytesV / 16);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kDim == 128) {
          wgmma_e4m3_rs_n136(z, codes + 4 * k, desc_v + 2 * k, accumulate || k > 0);
        } else {
          wgmma_e4m3_rs_n72(z, codes + 4 * k, desc_v + 2 * k, accumulate || k > 0);
        }
      }
    };
    auto promote = [&](const uint32_t(&z)[kProducts]) {
      auto f = [&](int i) { return __uint_as_float(z[i]); };
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] = fmaf(f(i), weight[i / 2 % 2], o[i]);
      if constexpr (!kRunning) {
        sum.a = fmaf(fmaf(p.odd_weight, f(kOutputs + 1), f(kOutputs)), weight.a, sum.a);
        sum.b = fmaf(fmaf(p.odd_weight, f(kOutputs + 3), f(kOutputs + 2)), weight.b, sum.b);
      }
    };
    // Everything that was accumulated, to a reference that has moved.
    auto rescale = [&](RowPair scale) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= scale[i / 2 % 2];
      l = {l.a * scale.a, l.b * scale.b};
      sum = {sum.a * scale.a, sum.b * scale.b};
      first_sum = {first_sum.a * scale.a, first_sum.b * scale.b};
    };
    // After `done` pairs: row sums go to l every four tiles, and times means to O every eight. No PV is in flight.
    auto fold_sums = [&](int done) {
      const bool last = done == pairs;
      if (2 * done % kSumTiles != 0 && !last) return;
      l = {l.a + sum.a, l.b + sum.b};
      if constexpr (kMeans) {
        const bool second_half = 2 * (done - 1) % kMeanTiles >= kSumTiles;
        if (second_half || last) {
          uint32_t a[4];
          a[0] = round_to_tf32(second_half ? first_sum.a : sum.a);
          a[1] = round_to_tf32(second_half ? first_sum.b : sum.b);
          a[2] = second_half ? round_to_tf32(sum.a) : 0;
          a[3] = second_half ? round_to_tf32(sum.b) : 0;
          mbarrier_wait(sm.full_means[mean_ring.stage()], mean_ring.parity());
          const uint64_t desc = plain_descriptor(smem_address(sm.means[mean_ring.stage()]), 128, 256);
          pin(a);
          pin(o);
          wgmma_fence();
          if constexpr (kDim == 128) {
            wgmma_tf32_rs_n128(o, a, desc, 1);
          } else {
            wgmma_tf32_rs_n64(o, a, desc, 1);
          }
          wgmma_commit();
          wgmma_wait<0>();
          pin(o);
          release(sm.empty_means[mean_ring.stage()]);
          mean_ring.advance();
        } else {
          first_sum = sum;
        }
      }
      sum = {0, 0};
    };

    // kBounded: integer scores whose codes fit 16 bits (softmax.cuh).
    auto walk = [&]<bool kBounded>() {
#pragma unroll 1
      for (int j = 0; j < pairs; ++j) {
        uint32_t x[64], y[64];  // scores of A and B, or with kE4m3 of both in x
        issue_qk(x, 0);
        if constexpr (kInt8 && !kOneTileOfScores) issue_qk(y, 1);
        const float2 descale = k_descale[j];
        const RowPair c_a = factor * descale.x, c_b = factor * descale.y;
        wgmma_wait<(kInt8 && !kOneTileOfScores) ? 1 : 0>();
        pin(x);
        uint32_t codes_a[16], codes_b[16];
        // Polls of full_v also end a basic block: without it ptxas waits for QK(B) before it works on A.
        if constexpr (kBounded) {
          uint32_t t_a[32], t_b[32];
          CodePairMax largest;
          codes_by_reference(x, c_a, reference, t_a, largest);
          mbarrier_wait(sm.full_v[ring.stage()], ring.parity());
          issue_qk(y, 1);
          take_scores(y);
          release(sm.empty_k[ring.stage()]);
          codes_by_reference(y, c_b, reference, t_b, largest);
          const int2 octave = octaves_by_reference(largest);  // e - E
          int2 raise = {0, 0};
          if (j == 0 || __any_sync(~0u, max(octave.x, octave.y) > kMaxWeightOctave)) {
            raise = {j == 0 || octave.x > kMaxWeightOctave ? octave.x : 0,
                     j == 0 || octave.y > kMaxWeightOctave ? octave.y : 0};
            reference = {reference.a + raise.x, reference.b + raise.y};
            if (j > 0) rescale({pow2(-raise.x), pow2(-raise.y)});
          }
          weight = {pow2(octave.x - raise.x), pow2(octave.y - raise.y)};
          finish_codes(t_a, octave, p.odd_codes, codes_a);
          finish_codes(t_b, octave, p.odd_codes, codes_b);
        } else {
          RowPair largest = tile_maximum<kInt8, kExp2>(x, c_a);
          mbarrier_wait(sm.full_v[ring.stage()], ring.parity());
          if constexpr (kOneTileOfScores) issue_qk(y, 1);
          if constexpr (kInt8) take_scores(y);
          if constexpr (!kOneTileOfScores) release(sm.empty_k[ring.stage()]);
          uint32_t* scores_b = kInt8 ? y : x + 32;
          largest = larger(largest, tile_maximum<kInt8, kExp2>(scores_b, c_b));
          constexpr float kLimit = kInt8 ? kOctaveLimitInt8 : kOctaveLimitE4m3;
          const RowPair octave = {within(ceilf(largest.a / kCodesPerOctave), kLimit),
                                  within(ceilf(largest.b / kCodesPerOctave), kLimit)};
          const RowPair before = reference;
          const bool raise_a = j == 0 || octave.a > reference.a + kMaxWeightOctave;
          const bool raise_b = j == 0 || octave.b > reference.b + kMaxWeightOctave;
          if (raise_a) reference.a = octave.a;
          if (raise_b) reference.b = octave.b;
          if (j > 0 && __any_sync(~0u, raise_a || raise_b)) {
            rescale({pow2(before.a - reference.a), pow2(before.b - reference.b)});
          }
          weight = {pow2(octave.a - reference.a), pow2(octave.b - reference.b)};
          // With kOneTileOfScores both were given up for their maximum.
          if constexpr (kOneTileOfScores) {
            uint32_t again[64];
            issue_qk(again, 0);
            take_scores(again);
            make_codes<kInt8, kExp2>(again, c_a, octave, p.odd_codes, p.zero, codes_a);
            uint32_t again_b[64];
            issue_qk(again_b, 1);
            take_scores(again_b);
            release(sm.empty_k[ring.stage()]);
            make_codes<kInt8, kExp2>(again_b, c_b, octave, p.odd_codes, p.zero, codes_b);
          } else {
            make_codes<kInt8, kExp2>(x, c_a, octave, p.odd_codes, p.zero, codes_a);
            make_codes<kInt8, kExp2>(scores_b, c_b, octave, p.odd_codes, p.zero, codes_b);
          }
        }
        uint32_t z[kProducts];
        pin(codes_a);
        pin(codes_b);
        pin(z);
        wgmma_fence();
        issue_pv(z, codes_a, 0, false);
        if constexpr (!kMeans) {
          wgmma_commit();
          wgmma_wait<0>();
          pin(z);
          promote(z);
          pin(z);
          wgmma_fence();
        }
        issue_pv(z, codes_b, 1, kMeans);
        wgmma_commit();
        if (j + 1 < pairs) mbarrier_wait(sm.full_k[ring.next().stage()], ring.next().parity());
        wgmma_wait<0>();
        pin(codes_a);
        pin(codes_b);
        pin(z);
        release(sm.empty_v[ring.stage()]);
        ring.advance();
        promote(z);
        fold_sums(j + 1);
      }
    };

    // kRunning, tile by tile.
    auto walk_tiles = [&] {
      weight = {1.0f, 1.0f};
#pragma unroll 1
      for (int tile = 0; tile < 2 * pairs; ++tile) {
        const bool second = tile % 2 == 1;
        uint32_t x[64], z[kProducts], codes[16];
        issue_qk(x, second);
        const RowPair c = factor * reinterpret_cast<const float*>(k_descale)[tile];
        take_scores(x);
        if (second) release(sm.empty_k[ring.stage()]);
        const RowPair largest = tile_maximum<kInt8, kExp2>(x, c) * (1.0f / kCodesPerOctave);
        const RowPair before = reference;
        reference = tile == 0 ? largest : larger(largest, reference);
        reference = {within(reference.a, kOctaveLimitInt8), within(reference.b, kOctaveLimitInt8)};
        if (tile > 0 && __any_sync(~0u, before.a != reference.a || before.b != reference.b)) {
          rescale({exp2_approx(before.a - reference.a), exp2_approx(before.b - reference.b)});
        }
        RowPair sums = {0, 0};
        const int keys = sequence.keys - tile * kBlockN;
        if (keys < kBlockN) sums = sums_behind(x, c, reference, keys) * -1.0f;
        make_codes<kInt8, kExp2, kRunning>(x, c, reference, p.odd_codes, p.zero, codes, &sums);
        const RowPair all = {quad_sum(sums.a), quad_sum(sums.b)};
        if ((tile - lane) % kSumTiles == 0) sum = {sum.a + all.a, sum.b + all.b};  // whose tile it is
        if (!second) mbarrier_wait(sm.full_v[ring.stage()], ring.parity());
        pin(codes);
        pin(z);
        wgmma_fence();
        issue_pv(z, codes, second, false);
        wgmma_commit();
        wgmma_wait<0>();
        pin(codes);
        pin(z);
        promote(z);
        if (second) {
          release(sm.empty_v[ring.stage()]);
          ring.advance();
          fold_sums((tile + 1) / 2);
          if (tile + 1 < 2 * pairs) mbarrier_wait(sm.full_k[ring.stage()], ring.parity());
        }
      }
    };

    mbarrier_wait(sm.full_q, q_parity);
    q_parity ^= 1;
    if (pairs > 0) mbarrier_wait(sm.full_k[ring.stage()], ring.parity());
    if constexpr (kRunning) {
      walk_tiles();
    } else if constexpr (kOneTileOfScores && !kExp2) {
      const float bound = qkv.q_norm[first_row / kTileRowsQ] *
                          qkv.k_norm[int64_t{work.kv_head(qkv)} * qkv.num_sequences + work.sequence(qkv)];
      if (bound < kCodeBound) {
        walk.template operator()<true>();
      } else {
        walk.template operator()<false>();
      }
    } else {
      walk.template operator()<false>();
    }
    if (elected) mbarrier_arrive(sm.empty_q);
    const int thread = thread_index() - 128;  // of the consumers
    WarpRows<kDim>& rows = sm.rows[thread / 32];
    stage_rows<kDim>(rows, o, {quad_sum(l.a), quad_sum(l.b)}, reference);
    store_rows<kDim>(p, rows, work, (cluster_rank() * 4 * kConsumers + thread / 32) * kWarpRows,
                     kExp2 ? 0.0f : kExpCastLogMeanRatio);
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace vcattn::sm90a
