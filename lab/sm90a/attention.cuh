// Recipe `accurate` on sm_90a: INT8 QK, ExpCast codes against a maximum per (row, 128-key tile) in whole octaves, two
// phases, E4M3 residual V, row sums and block means on the tensor cores.
//
// A cluster of two CTAs shares K and V tiles by multicast; a CTA is one producer and two consumer warpgroups of 64
// query rows each. A tile of 128 keys costs a warpgroup 4 QK wgmmas (s32 scores), 4 PV wgmmas (fp32, fresh in every
// tile) and the promotion O = O + 2^(e - E) O_tile in registers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "isa.cuh"

namespace lab {

enum class Schedule {
  kSerial,  // QK, softmax, PV, promotion one after the other; only the warpgroups overlap. Scores and output share
            // registers
  kPair,    // as kSerial, two tiles at a time under one maximum, one accumulation and one promotion
  kLate,    // QK(j+1) and PV(j) are queued together; PV(j) runs under softmax(j+1) and is promoted after it
};
enum class Convert {
  kI2fp,   // one conversion per score
  kImad,   // score + the bits of 1.5 * 2^23 by an integer multiply-add
  kMagic,  // the accumulator starts at the bits of 1.5 * 2^23
  kF16,    // E4M3 Q and K, scores in code units as pairs of FP16: recipe `fast`
};
struct Config {
  Schedule schedule = Schedule::kSerial;
  Convert convert = Convert::kI2fp;
  bool phases = true;
  bool p_in_smem = false;  // PV reads P from shared memory, not from registers
  bool align = false;      // a barrier of the warpgroup before it issues wgmma
  bool p_barrier = true;   // with p_in_smem: a barrier of the warpgroup between the stores and PV
  int consumers = 2;       // warpgroups of 64 query rows
  int stages = 4;
  __host__ __device__ constexpr int threads() const { return 128 * (consumers + 1); }
  __host__ __device__ constexpr int rows() const { return 64 * consumers; }  // of a CTA
  // Registers of a thread: together no more than the launch reserves, 65536 / threads rounded down to a multiple of 8.
  __host__ __device__ constexpr int consumer_registers() const { return consumers == 3 ? 160 : 240; }
  __host__ __device__ constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
};

constexpr int kHeadDim = 128;
constexpr int kBlockN = 128;                // keys in a tile
constexpr int kMeanBlocks = 8;              // blocks under one mean product
constexpr int kSumBlocks = 4;               // blocks whose two row sums fill the 8 ones rows
constexpr int kTileBytesQ = 64 * kHeadDim;  // of one warpgroup
constexpr int kTileBytesK = kBlockN * kHeadDim;
constexpr int kTileBytesV = (kHeadDim + 8) * kBlockN;  // V^T, then 8 ones rows
constexpr int kMeanBytes = kMeanBlocks * kHeadDim * 4;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23
constexpr uint32_t kRoundMagicBits = 0x4B400000u;
constexpr int kPeak = 120, kMaxCode = 126, kPhaseCodes = 4;
constexpr uint32_t kLowestPair = 0x80008000u;                                // -32768 twice
constexpr uint32_t kOnePair = 0x3c003c00u, kOneSubnormalPair = 0x00010001u;  // FP16: 1 and 2^-24, twice
constexpr float kPhaseFactor = 0.70710678118654752f;

struct Params {
  const uint8_t* q;        // [heads, row_tiles, 2 warpgroups, 64 rows, 128] s8, 128-byte swizzle
  const uint8_t* k;        // [heads, tiles, 128 keys, 128] s8, 128-byte swizzle
  const uint8_t* v;        // [heads, tiles, 136, 128 keys] e4m3, 128-byte swizzle, keys in wgmma's A order
  const float* mean;       // [heads, ceil(tiles / 8), 128 channels, 8 blocks] in core matrices, in units of v_descale
  const float* q_factor;   // [heads, padded rows] code units per raw score and unit of K
  const float* k_descale;  // [heads, tiles]
  const float* v_descale;  // [heads, 128]
  __nv_bfloat16* out;      // [heads, seqlen, 128]
  int seqlen, heads, tiles, row_pairs;  // row_pairs: pairs of CTA row tiles per head
  uint32_t one;                         // 1
  uint64_t* stamps;                     // SM cycles and nanoseconds at the start and the end of CTA 0's producer
};

template <class Variant>
struct SharedMemory {
  static constexpr int kStages = Variant::config.stages, kConsumers = Variant::config.consumers;
  alignas(1024) uint8_t q[kConsumers][kTileBytesQ];
  alignas(1024) uint8_t p[Variant::config.p_in_smem ? kConsumers : 1][Variant::config.p_in_smem ? 64 * kBlockN : 1024];
  alignas(1024) uint8_t v[kStages][kTileBytesV];
  alignas(1024) uint8_t k[kStages][kTileBytesK];
  alignas(1024) uint8_t mean[2][kMeanBytes];
  // Seldom used state of each consumer thread, rows r and r + 8: .x .y its share of the rows' sums, .z .w the sums of
  // the first half of a mean group.
  float4 fold[128 * kConsumers];
  uint64_t full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages], full_mean[2], empty_mean[2], full_q,
      empty_q;
};
template <class Variant>
constexpr int kSharedBytes = sizeof(SharedMemory<Variant>) + 1024;  // the base is aligned by hand

// Whole numbers as FP16 multiples of 2^-24: low half x, high half x + more.
__device__ __forceinline__ uint32_t subnormal_pair(float x, float more = 0.0f) {
  const __half2 pair = __floats2half2_rn(x * 0x1p-24f, (x + more) * 0x1p-24f);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float max_of_f16x2(uint32_t x) {
  const __half2 pair = *reinterpret_cast<const __half2*>(&x);
  return fmaxf(__low2float(pair), __high2float(pair));
}

// A ring of shared-memory stages.
template <int kStages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A tile may outweigh the reference by so many octaves before the reference moves: fp32 has the range, and a move costs
// 64 multiplications.
constexpr int kMaxWeightOctave = 32;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(uint32_t x) { return __uint_as_float(x); }

// 2^octaves for octaves < 128; 0 under 2^-126.
__device__ __forceinline__ float pow2(int octaves) { return __int_as_float(max(octaves + 127, 0) << 23); }

// Variant is a type whose `config` is a Config: nvcc cannot name kernels by a class-type argument.
template <class Variant>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Variant::config.threads(), 1)
    attention(const __grid_constant__ Params p) {
  using Shared = SharedMemory<Variant>;
  constexpr int kScoreWords = Variant::config.convert == Convert::kF16 ? 32 : 64;
  constexpr int kConsumers = Variant::config.consumers, kRows = Variant::config.rows();
  extern __shared__ uint8_t shared_raw[];
  Shared& sm = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(shared_raw) + 1023) & ~uintptr_t{1023});
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Variant::config.stages; ++i) {
      mbarrier_init(smem_address(&sm.full_k[i]), 1);
      mbarrier_init(smem_address(&sm.empty_k[i]), 2 * kConsumers);
      mbarrier_init(smem_address(&sm.full_v[i]), 1);
      mbarrier_init(smem_address(&sm.empty_v[i]), 2 * kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&sm.full_mean[i]), 1);
      mbarrier_init(smem_address(&sm.empty_mean[i]), 2 * kConsumers);
    }
    mbarrier_init(smem_address(&sm.full_q), 1);
    mbarrier_init(smem_address(&sm.empty_q), kConsumers);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
  const int first_tile = blockIdx.x / 2, tile_step = gridDim.x / 2, row_tiles = p.row_pairs * p.heads;
  const uint32_t mean_groups = (p.tiles + kMeanBlocks - 1) / kMeanBlocks;

  if (warpgroup == 0) {
    setmaxnreg_dec<Variant::config.producer_registers()>();
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0) stamp(p.stamps);
      Ring<Variant::config.stages> ring;
      Ring<2> mean_ring;
      int q_parity = 1;
      // Each CTA of the cluster loads half of a tile, for both.
      auto load = [&](uint8_t* dst, const uint8_t* src, int bytes, uint64_t& full) {
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
        const uint32_t tile0 = head * p.tiles, group0 = head * mean_groups;  // heads * tiles < 2^32
#pragma unroll 1
        for (uint32_t j = 0; j < uint32_t(p.tiles); ++j) {
          const int s = ring.stage;
          mbarrier_wait(smem_address(&sm.empty_k[s]), ring.parity ^ 1);
          load(sm.k[s], p.k + size_t(tile0 + j) * kTileBytesK, kTileBytesK, sm.full_k[s]);
          if (j % kMeanBlocks == 0) {
            const int m = mean_ring.stage;
            mbarrier_wait(smem_address(&sm.empty_mean[m]), mean_ring.parity ^ 1);
            load(sm.mean[m], reinterpret_cast<const uint8_t*>(p.mean) + size_t(group0 + j / kMeanBlocks) * kMeanBytes,
                 kMeanBytes, sm.full_mean[m]);
            mean_ring.advance();
          }
          mbarrier_wait(smem_address(&sm.empty_v[s]), ring.parity ^ 1);
          load(sm.v[s], p.v + size_t(tile0 + j) * kTileBytesV, kTileBytesV, sm.full_v[s]);
          ring.advance();
        }
      }
      if (blockIdx.x == 0) stamp(p.stamps + 2);
    }
    __syncwarp();
    cluster_sync();
    return;
  }

  setmaxnreg_inc<Variant::config.consumer_registers()>();
  const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool elected = threadIdx.x % 128 == 0;
  const uint64_t desc_q = descriptor_128b(smem_address(sm.q[consumer]));
  const uint64_t desc_p = descriptor_128b(smem_address(sm.p[Variant::config.p_in_smem ? consumer : 0]));
  const uint64_t desc_k0 = descriptor_128b(smem_address(sm.k[0])), desc_v0 = descriptor_128b(smem_address(sm.v[0]));
  // Where this lane's rows of stmatrix go: row of 128 bytes, chunks of 16 permuted by row % 8.
  const int p_row = warp * 16 + (lane & 15);
  const uint32_t p_address =
      smem_address(sm.p[Variant::config.p_in_smem ? consumer : 0]) + p_row * 128 + (((lane >> 4) ^ (p_row & 7)) << 4);
  auto release = [&](uint64_t& empty) {
    if (elected) {
      mbarrier_arrive_cluster(smem_address(&empty), 0);
      mbarrier_arrive_cluster(smem_address(&empty), 1);
    }
  };
  Ring<Variant::config.stages> ring;
  Ring<2> mean_ring;
  int q_parity = 0;
  float o[64];         // fp32 output, thread's rows r and r + 8: o[4i], o[4i+1] and o[4i+2], o[4i+3]
  float sum_a, sum_b;  // weighted row sums of this thread's block of four, rows r and r + 8

  for (int t = first_tile; t < row_tiles; t += tile_step, q_parity ^= 1) {
    const int head = t / p.row_pairs;
    const int first_row = ((t % p.row_pairs) * 2 + rank) * kRows + consumer * 64;  // of this warpgroup
    const float* q_factor = p.q_factor + size_t(head) * p.row_pairs * 2 * kRows + first_row + warp * 16 + lane / 4;
    const float factor_a = q_factor[0], factor_b = q_factor[8];
    const float* k_descale = p.k_descale + size_t(head) * p.tiles;
    auto fold_state = [&]() -> float4& { return sm.fold[thread_index() - 128]; };
    fold_state() = make_float4(0, 0, 0, 0);
    float reference_a = 0, reference_b = 0;  // 8 * running octave
    float weight_a, weight_b;                // 2^(e - E) of the tile in `codes`
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = 0;
    sum_a = sum_b = 0;

    auto align = [&] {
      if constexpr (Variant::config.align) named_barrier_sync(4 + consumer, 128);
    };
    auto issue_qk = [&](auto& s, int stage) {
      if constexpr (Variant::config.convert == Convert::kMagic) {
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] = kRoundMagicBits;
      }
      pin(s);
      align();
      wgmma_fence();
      const uint64_t desc_k = desc_k0 + stage * (kTileBytesK >> 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (Variant::config.convert == Convert::kF16) {
          wgmma_e4m3_f16_ss_n128(s, desc_q + 2 * k, desc_k + 2 * k, k > 0);
        } else {
          wgmma_s8_ss_n128(s, desc_q + 2 * k, desc_k + 2 * k, Variant::config.convert == Convert::kMagic || k > 0);
        }
      }
    };
    auto issue_pv = [&](auto& acc, auto& codes, int stage) {
      if constexpr (!Variant::config.p_in_smem) pin(codes);
      pin(acc);
      wgmma_fence();
      const uint64_t desc_v = desc_v0 + stage * (kTileBytesV >> 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (Variant::config.p_in_smem) {
          wgmma_e4m3_ss_n136(acc, desc_p + 2 * k, desc_v + 2 * k, k > 0);
        } else {
          wgmma_e4m3_rs_n136(acc, codes + 4 * k, desc_v + 2 * k, k > 0);
        }
      }
    };
    auto promote = [&](const auto& bits) {
      auto acc = [&](int i) { return as_float(bits[i]); };
#pragma unroll
      for (int i = 0; i < 64; i += 4) {
        o[i] = fmaf(acc(i), weight_a, o[i]);
        o[i + 1] = fmaf(acc(i + 1), weight_a, o[i + 1]);
        o[i + 2] = fmaf(acc(i + 2), weight_b, o[i + 2]);
        o[i + 3] = fmaf(acc(i + 3), weight_b, o[i + 3]);
      }
      constexpr float kOdd = Variant::config.phases ? kPhaseFactor : 1.0f;
      sum_a = fmaf(fmaf(kOdd, acc(65), acc(64)), weight_a, sum_a);
      sum_b = fmaf(fmaf(kOdd, acc(67), acc(66)), weight_b, sum_b);
    };
    bool moved;  // the last tile raised the reference of a row of this warp, by so many octaves:
    int raise_a, raise_b;
    float next_weight_a, next_weight_b;
    // What was accumulated, to the raised reference.
    auto rescale = [&] {
      // Before the first tile all is 0, and must stay finite.
      const float scale_a = pow2(min(-raise_a, 100)), scale_b = pow2(min(-raise_b, 100));
#pragma unroll
      for (int i = 0; i < 64; i += 4) {
        o[i] *= scale_a;
        o[i + 1] *= scale_a;
        o[i + 2] *= scale_b;
        o[i + 3] *= scale_b;
      }
      sum_a *= scale_a;
      sum_b *= scale_b;
      float4& f = fold_state();
      f = make_float4(f.x * scale_a, f.y * scale_b, f.z * scale_a, f.w * scale_b);
    };
    // Scores to 16-bit codes against the reference, unclamped; even words: row r, odd: row r + 8; low half: the even
    // key. Raises the largest of each row's (low half of max_a and max_b: even keys, high half: odd ones).
    auto convert = [&](const auto& s, float descale, uint32_t(&t16)[32], uint32_t& max_a, uint32_t& max_b) {
      float ca = factor_a * descale, cb = factor_b * descale;
      float offset_a = kRoundMagic + kPeak - reference_a, offset_b = kRoundMagic + kPeak - reference_b;
      if constexpr (Variant::config.convert != Convert::kI2fp) {
        // Multiples of 2^-22, so that 1.5 * 2^23 of them is a whole number and the offset exact.
        ca = __fadd_rn(__fadd_rn(ca, 3.0f), -3.0f);
        cb = __fadd_rn(__fadd_rn(cb, 3.0f), -3.0f);
        offset_a = fmaf(-kRoundMagic, ca, offset_a);
        offset_b = fmaf(-kRoundMagic, cb, offset_b);
      }
      auto code = [&](uint32_t score, float c, float offset) {
        float f = 0;
        if constexpr (Variant::config.convert == Convert::kI2fp) f = static_cast<float>(static_cast<int>(score));
        if constexpr (Variant::config.convert == Convert::kImad)
          f = __uint_as_float(multiply_add(score, p.one, kRoundMagicBits));
        if constexpr (Variant::config.convert == Convert::kMagic) f = __uint_as_float(score);
        return __float_as_uint(fmaf(f, c, offset));
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
    // From the largest codes: what moves codes to the tile's own octave, and the tile's weight. Moves the reference
    // where fp32's range asks for it.
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
      const bool move_a = first || octave_a > kMaxWeightOctave, move_b = first || octave_b > kMaxWeightOctave;
      moved = __any_sync(~0u, move_a || move_b);
      if (moved) {
        raise_a = move_a ? octave_a : 0;
        raise_b = move_b ? octave_b : 0;
        reference_a += 8 * raise_a;
        reference_b += 8 * raise_b;
        octave_a -= raise_a;
        octave_b -= raise_b;
      }
      next_weight_a = pow2(octave_a);
      next_weight_b = pow2(octave_b);
    };
    // Clamps to E4M3 codes, in the order of wgmma's A operand.
    auto pack = [&](uint32_t(&t16)[32], uint32_t* codes) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        t16[i] = __viaddmin_s16x2_relu(t16[i], i % 2 ? shift_b : shift_a, kMaxCode * 0x10001u);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first_pair = 8 * k + (i & 1) + (i & 2) * 2;
          codes[4 * k + i] = __byte_perm(t16[first_pair], t16[first_pair + 2], 0x6420);
        }
      }
    };
    // The same from FP16 scores: codes are FP16 subnormals, whose bits are whole numbers of 2^-24 with a sign.
    auto convert_f16 = [&](const uint32_t(&s)[32], float origin_a, float origin_b, uint32_t(&t16)[32], uint32_t& max_a,
                           uint32_t& max_b) {
      const uint32_t offset_a = subnormal_pair(kPeak - origin_a), offset_b = subnormal_pair(kPeak - origin_b);
#pragma unroll
      for (int i = 0; i < 32; ++i) t16[i] = fma_f16x2(s[i], kOneSubnormalPair, i % 2 ? offset_b : offset_a);
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        max_a = __vimax3_s16x2(max_a, t16[i], t16[i + 2]);
        max_b = __vimax3_s16x2(max_b, t16[i + 1], t16[i + 3]);
      }
    };
    auto softmax_f16 = [&](const uint32_t(&s)[32], uint32_t(&codes)[16], bool first) {
      uint32_t t16[32], max_a = kLowestPair, max_b = kLowestPair;
      convert_f16(s, reference_a, reference_b, t16, max_a, max_b);
      max_a = __vmaxs2(__byte_perm(max_a, max_b, 0x5410), __byte_perm(max_a, max_b, 0x7632));
      max_a = __vmaxs2(max_a, __shfl_xor_sync(~0u, max_a, 1));
      max_a = __vmaxs2(max_a, __shfl_xor_sync(~0u, max_a, 2));
      // As integers, bits of negative and of large FP16 numbers mislead: then the maximum is taken as floats.
      const int code_a = static_cast<int16_t>(max_a & 0xffff), code_b = static_cast<int16_t>(max_a >> 16);
      int octave_a = (code_a - (kPeak - 7)) >> 3, octave_b = (code_b - (kPeak - 7)) >> 3;
      moved = false;
      if (first || __any_sync(~0u, min(code_a, code_b) < 8 || max(code_a, code_b) >= 512)) {
        float largest_a = -65504.0f, largest_b = -65504.0f;
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
          largest_a = fmaxf(largest_a, max_of_f16x2(s[i]));
          largest_b = fmaxf(largest_b, max_of_f16x2(s[i + 1]));
        }
        largest_a = fmaxf(largest_a, __shfl_xor_sync(~0u, largest_a, 1));
        largest_a = fmaxf(largest_a, __shfl_xor_sync(~0u, largest_a, 2));
        largest_b = fmaxf(largest_b, __shfl_xor_sync(~0u, largest_b, 1));
        largest_b = fmaxf(largest_b, __shfl_xor_sync(~0u, largest_b, 2));
        const int e_a = (__float2int_rn(largest_a) + 7) >> 3, e_b = (__float2int_rn(largest_b) + 7) >> 3;
        const int relative_a = e_a - static_cast<int>(reference_a) / 8,
                  relative_b = e_b - static_cast<int>(reference_b) / 8;
        raise_a = first || relative_a > kMaxWeightOctave ? relative_a : 0;
        raise_b = first || relative_b > kMaxWeightOctave ? relative_b : 0;
        moved = true;
        reference_a += 8 * raise_a;
        reference_b += 8 * raise_b;
        next_weight_a = pow2(relative_a - raise_a);
        next_weight_b = pow2(relative_b - raise_b);
        convert_f16(s, 8.0f * e_a, 8.0f * e_b, t16, max_a, max_b);
        octave_a = octave_b = 0;
      } else {
        next_weight_a = pow2(octave_a);
        next_weight_b = pow2(octave_b);
      }
      const uint32_t shift16_a = subnormal_pair(-8.0f * octave_a, Variant::config.phases ? kPhaseCodes : 0);
      const uint32_t shift16_b = subnormal_pair(-8.0f * octave_b, Variant::config.phases ? kPhaseCodes : 0);
#pragma unroll
      for (int i = 0; i < 32; ++i) t16[i] = fma_relu_f16x2(t16[i], kOnePair, i % 2 ? shift16_b : shift16_a);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 8 * k + (i & 1) + (i & 2) * 2;
          codes[4 * k + i] = __byte_perm(t16[word], t16[word + 2], 0x6420);
        }
      }
    };
    auto softmax = [&](const auto& s, float descale, uint32_t(&codes)[16], bool first) {
      if constexpr (Variant::config.convert == Convert::kF16) {
        softmax_f16(s, codes, first);
        return;
      } else {
        uint32_t t16[32], max_a = kLowestPair, max_b = kLowestPair;
        convert(s, descale, t16, max_a, max_b);
        choose_octaves(max_a, max_b, first);
        pack(t16, codes);
      }
    };
    // P to shared memory, ready for wgmma. The last PV of this warpgroup must be complete.
    auto store_p = [&](const uint32_t(&codes)[16]) {
      if constexpr (Variant::config.p_in_smem) {
#pragma unroll
        for (int k = 0; k < 4; ++k) stmatrix_x4(p_address ^ (32 * k), codes + 4 * k);
        fence_proxy_async();
        if constexpr (Variant::config.p_barrier) {
          named_barrier_sync(3 + thread_index() / 128, 128);  // the id is made anew: it would cost a register
        } else {
          __syncwarp();
        }
      }
    };
    // Every 8 tiles: adds row sums times means to O. No PV may be in flight.
    auto fold_sums = [&](int j) {
      const bool last = j + 1 == p.tiles;
      if (j % kSumBlocks != kSumBlocks - 1 && !last) return;
      float4& state = fold_state();
      float4 f = state;
      const float r_a = sum_a, r_b = sum_b;
      sum_a = sum_b = 0;
      f.x += r_a;
      f.y += r_b;
      const bool second_half = j % kMeanBlocks >= kSumBlocks;
      if (second_half || last) {
        uint32_t a[4];
        a[0] = round_tf32(second_half ? f.z : r_a);
        a[1] = round_tf32(second_half ? f.w : r_b);
        a[2] = second_half ? round_tf32(r_a) : 0;
        a[3] = second_half ? round_tf32(r_b) : 0;
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
        f.z = r_a;
        f.w = r_b;
      }
      state = f;
    };

    mbarrier_wait(smem_address(&sm.full_q), q_parity);
    if constexpr (Variant::config.schedule == Schedule::kSerial) {
      mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
      float descale = k_descale[0];
#pragma unroll 1
      for (int j = 0; j < p.tiles; ++j) {
        uint32_t x[68];  // scores, then the tile's output and row sums
        const int stage = ring.stage;
        issue_qk(x, stage);
        wgmma_commit();
        // Under QK: what does not depend on the scores.
        if (j > 0) fold_sums(j - 1);
        const float next_descale = k_descale[min(j + 1, p.tiles - 1)];
        mbarrier_wait(smem_address(&sm.full_v[stage]), ring.parity);
        wgmma_wait<0>();
        pin(x);
        release(sm.empty_k[stage]);
        uint32_t codes[16];
        softmax(x, descale, codes, j == 0);
        if (moved) rescale();
        weight_a = next_weight_a;
        weight_b = next_weight_b;
        descale = next_descale;
        store_p(codes);
        issue_pv(x, codes, stage);
        wgmma_commit();
        ring.advance();
        if (j + 1 < p.tiles) mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
        wgmma_wait<0>();
        pin(x);
        if constexpr (!Variant::config.p_in_smem) pin(codes);
        release(sm.empty_v[stage]);
        promote(x);
        pin(o);
      }
      fold_sums(p.tiles - 1);
    } else if constexpr (Variant::config.schedule == Schedule::kPair) {
      // p.tiles is even: preprocessing pads with a tile of repeated keys and zeros for V and ones.
      mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
#pragma unroll 1
      for (int j = 0; j < p.tiles; j += 2) {
        uint32_t x[68], y[64];  // scores of both tiles; x then their output and row sums
        Ring<Variant::config.stages> second = ring;
        second.advance();
        const float descale_x = k_descale[j], descale_y = k_descale[j + 1];
        issue_qk(x, ring.stage);
        wgmma_commit();
        mbarrier_wait(smem_address(&sm.full_k[second.stage]), second.parity);
        issue_qk(y, second.stage);
        wgmma_commit();
        mbarrier_wait(smem_address(&sm.full_v[ring.stage]), ring.parity);
        mbarrier_wait(smem_address(&sm.full_v[second.stage]), second.parity);
        uint32_t tx[32], ty[32], max_a = kLowestPair, max_b = kLowestPair;
        wgmma_wait<1>();
        pin(x);
        release(sm.empty_k[ring.stage]);
        convert(x, descale_x, tx, max_a, max_b);
        pin(tx);
        wgmma_wait<0>();
        pin(y);
        release(sm.empty_k[second.stage]);
        convert(y, descale_y, ty, max_a, max_b);
        choose_octaves(max_a, max_b, j == 0);
        uint32_t codes[32];
        pack(tx, codes);
        pack(ty, codes + 16);
        if (moved) rescale();
        weight_a = next_weight_a;
        weight_b = next_weight_b;
        pin(codes);
        pin(x);
        align();
        wgmma_fence();
        const uint64_t desc_x = desc_v0 + ring.stage * (kTileBytesV >> 4),
                       desc_y = desc_v0 + second.stage * (kTileBytesV >> 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_e4m3_rs_n136(x, codes + 4 * k, desc_x + 2 * k, k > 0);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_e4m3_rs_n136(x, codes + 16 + 4 * k, desc_y + 2 * k, 1);
        wgmma_commit();
        const int stage = ring.stage;
        ring.advance();
        ring.advance();
        if (j + 2 < p.tiles) mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
        wgmma_wait<0>();
        pin(x);
        pin(codes);
        release(sm.empty_v[stage]);
        release(sm.empty_v[second.stage]);
        promote(x);
        fold_sums(j + 1);
      }
    } else {
      uint32_t codes[16];
      Ring<Variant::config.stages> v_ring = ring;
      float descale = k_descale[min(1, p.tiles - 1)];
      {
        uint32_t s[kScoreWords];
        mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
        issue_qk(s, ring.stage);
        wgmma_commit();
        mbarrier_wait(smem_address(&sm.full_v[v_ring.stage]), v_ring.parity);
        const float first_descale = k_descale[0];
        wgmma_wait<0>();
        pin(s);
        release(sm.empty_k[ring.stage]);
        ring.advance();
        softmax(s, first_descale, codes, true);
        weight_a = next_weight_a;
        weight_b = next_weight_b;
        if (p.tiles > 1) mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
      }
#pragma unroll 1
      for (int j = 0; j + 1 < p.tiles; ++j) {
        uint32_t s[kScoreWords], next[16];
        float acc[68];
        const int k_stage = ring.stage, v_stage = v_ring.stage;
        issue_qk(s, k_stage);
        wgmma_commit();
        issue_pv(acc, codes, v_stage);
        wgmma_commit();
        // Under both: the next step's waits.
        ring.advance();
        v_ring.advance();
        const float next_descale = k_descale[min(j + 2, p.tiles - 1)];
        mbarrier_wait(smem_address(&sm.full_v[v_ring.stage]), v_ring.parity);
        if (j + 2 < p.tiles) mbarrier_wait(smem_address(&sm.full_k[ring.stage]), ring.parity);
        wgmma_wait<1>();
        pin(s);
        release(sm.empty_k[k_stage]);
        softmax(s, descale, next, false);
        descale = next_descale;
        wgmma_wait<0>();
        pin(acc);
        pin(codes);
        pin(next);
        release(sm.empty_v[v_stage]);
        promote(acc);
        fold_sums(j);
        if (moved) rescale();
        weight_a = next_weight_a;
        weight_b = next_weight_b;
#pragma unroll
        for (int i = 0; i < 16; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(codes[i]) : "r"(next[i]));
      }
      float acc[68];
      issue_pv(acc, codes, v_ring.stage);
      wgmma_commit();
      wgmma_wait<0>();
      pin(acc);
      release(sm.empty_v[v_ring.stage]);
      promote(acc);
      fold_sums(p.tiles - 1);
    }
    if (elected) mbarrier_arrive(smem_address(&sm.empty_q));
    float l_a = fold_state().x, l_b = fold_state().y;
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

}  // namespace lab
