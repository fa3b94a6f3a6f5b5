// Exchange of positions between blocks of 128, the step that refines an order: two blocks are split anew by the
// projection on the difference of their means, and no such split lowers the energy that the means remove
// (vsmooth/exchange.h). Of the 4 blocks of a window the outer two and the inner two exchange first, then the first two
// and the last two. Two such passes, the second with windows that begin 2 blocks earlier, remove as much as the CPU's 4
// rounds between neighbours: exchanges between blocks farther apart move tokens farther.
//
// V is read once a pass. A CTA walks over windows: while it works on the rows of one, which its 16 warps hold in
// registers as operands of the tensor cores (32 rows each), each warp copies its next ones to shared memory. Rows never
// move; each has the number of the block that it belongs to. A round:
//   sums        of the blocks: the transpose of the rows times the one-hot matrix of their blocks,
//   directions  of the two pairs, rounded to BF16,
//   projections the rows times the directions,
//   split       a histogram of the projections finds the bin in which a block is full; the few rows of that bin are
//               compared one by one. So the split is exact, and does not depend on the order of the atomics.
#include <algorithm>

#include "preprocess/group_tile.cuh"

namespace vcattn::sm90a {
namespace {

constexpr int kWindowRows = kBlocksPerWindow * kBlockN;
constexpr int kThreads = kWindowRows;  // a thread decides for a row
constexpr int kWarps = kThreads / 32;
constexpr int kWarpTiles = 2;  // of 16 rows
constexpr int kPairs = kBlocksPerWindow / 2;
constexpr int kRounds = 2;  // a third would remove 1 % more energy and take 30 % longer
constexpr int kWarpRows = 32;
constexpr int kBins = 256;
constexpr int kNoBlock = kBlocksPerWindow;  // of rows outside the sequence
static_assert(kBlocksPerWindow == 4 && kPairs * kBins == kThreads, "a thread clears one bin");

struct ExchangeArgs {
  GroupArgs g;
  int32_t blocks_before;  // by which windows begin before the sequence
  int32_t tokens;         // 1: tokens are written; 0: positions
};

template <int kDim>
struct Shared {
  static constexpr int kPitch = kDim + 8;  // lanes of a store in different banks
  alignas(256) std::byte rows[kWindowRows * kDim * 2];
  float sums[kWarps][kBlocksPerWindow][kPitch];
  alignas(16) uint16_t directions[kPairs][kDim];  // BF16
  float2 extents[kPairs][kDim / 32];              // parts of: projection of the midpoint, squared length
  float2 projections[kWindowRows];                // on both directions
  const std::byte* sources[kWindowRows];          // rows in v of the next window; null outside the sequence
  alignas(16) uint16_t sets[kWindowRows];         // set_number of the rows' blocks
  alignas(16) int32_t bins[kPairs][kBins];
  int32_t full_bin[kPairs], taken[kPairs];  // where the first block of a pair is full, and its rows of that bin
  int32_t num_tied[kPairs];
  uint64_t tied[kPairs][2 * kBlockN];  // rows of that bin: projection, then row
  int32_t members[kWarps][kBlocksPerWindow];
};

// Where the partner is b ^ p: 3 (the outer and the inner blocks), then 1 (neighbours).
__device__ __forceinline__ int partner_bits(int round) { return round == 0 ? 3 : round; }

// The first block of a pair is the lower one.
__device__ __forceinline__ int first_of_pair(int bits, int pair) { return bits == 1 ? 2 * pair : pair; }
__device__ __forceinline__ int pair_of(int bits, int block) {
  const int first = min(block, block ^ bits);
  return bits == 1 ? first / 2 : first;
}

struct Window {
  Slot slot;
  int begin;  // position of its first row; negative where it begins before the sequence

  __device__ int size(int block) const {
    const int first = begin + block * kBlockN;
    return first < 0 ? 0 : min(max(slot.sequence.count - first, 0), kBlockN);
  }
};

__device__ Window window_at(const ExchangeArgs& a, int item) {
  const int head = item / a.g.scratch.num_windows, window = item % a.g.scratch.num_windows;
  const Slot slot = slot_at(a.g, sequence_of(a.g, window, &GroupSequence::first_window), head);
  return {slot, (window - slot.sequence.first_window) * kWindowRows - a.blocks_before * kBlockN};
}

// A warp's rows: operand a of multiply_add, for tiles of 16 rows and 16 channels.
template <int kDim>
struct Rows {
  static constexpr int kSteps = kDim / 16;
  uint32_t x[kWarpTiles][kSteps][4];

  __device__ void load(const std::byte* tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t chunk = chunk_address<kDim>(tile, lane % 16, lane / 16);
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(x[m][k], (chunk ^ (32 * k)) + 16 * m * Bf16Tile<kDim>::kRowBytes);
      }
    }
  }

  __device__ void clean() {
    FiniteCheck<Bf16> check;
#pragma unroll
    for (auto& tile : x) {
#pragma unroll
      for (auto& step : tile) {
#pragma unroll
        for (const uint32_t word : step) check.add(word);
      }
    }
    if (check.finite()) return;
#pragma unroll
    for (auto& tile : x) {
#pragma unroll
      for (auto& step : tile) {
#pragma unroll
        for (uint32_t& word : step) word = without_nonfinite(word);
      }
    }
  }

  // Sums of the warp's rows of each block.
  __device__ void add_up(const uint16_t* sets, float (*sums)[Shared<kDim>::kPitch]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4, group = lane / 4;
    const auto* set_pairs = reinterpret_cast<const uint32_t*>(sets + threadIdx.x / 32 * 32);
    const uint32_t column = set_number_twice(group < kBlocksPerWindow ? group : kNoBlock + 1);
    uint32_t ones[kWarpTiles][2];
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
      ones[m][0] = one_hot(set_pairs[8 * m + t], column);
      ones[m][1] = one_hot(set_pairs[8 * m + 4 + t], column);
    }
    float sum[kSteps][4] = {};  // channels 16k + group (+ 8) of blocks 2t and 2t + 1
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int m = 0; m < kWarpTiles; ++m) {
        const uint32_t a[4] = {transpose(x[m][k][0]), transpose(x[m][k][2]), transpose(x[m][k][1]),
                               transpose(x[m][k][3])};
        multiply_add(sum[k], a, ones[m][0], ones[m][1]);
      }
    }
    if (t >= kBlocksPerWindow / 2) return;
    float *first = sums[2 * t] + group, *second = sums[2 * t + 1] + group;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      first[16 * k] = sum[k][0];
      second[16 * k] = sum[k][1];
      first[16 * k + 8] = sum[k][2];
      second[16 * k + 8] = sum[k][3];
    }
  }

  // Projections of the warp's rows on both directions.
  __device__ void project(const uint16_t (*directions)[kDim], float2* projections) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4, group = lane / 4;
    const auto* words = reinterpret_cast<const uint32_t*>(directions[group % kPairs]);
    float products[kWarpTiles][4] = {};  // columns 0 and 1 are the directions
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t low = group < kPairs ? words[8 * k + t] : 0, high = group < kPairs ? words[8 * k + 4 + t] : 0;
#pragma unroll
      for (int m = 0; m < kWarpTiles; ++m) multiply_add(products[m], x[m][k], low, high);
    }
    if (t != 0) return;
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
      float2* out = projections + threadIdx.x / 32 * 32 + 16 * m + group;
      out[0] = {products[m][0], products[m][1]};
      out[8] = {products[m][2], products[m][3]};
    }
  }
};

// Directions of the round's pairs, with what places a projection between the two means.
template <int kDim>
__device__ void find_directions(const Window& window, int bits, Shared<kDim>& s) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kPairs * kDim) return;
  const int pair = thread / kDim, channel = thread % kDim;
  const int a = first_of_pair(bits, pair), b = a ^ bits;
  float sum_a = 0.0f, sum_b = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    sum_a += s.sums[w][a][channel];
    sum_b += s.sums[w][b][channel];
  }
  const float mean_a = sum_a / static_cast<float>(max(window.size(a), 1));
  const float mean_b = sum_b / static_cast<float>(max(window.size(b), 1));
  const __nv_bfloat16 direction = __float2bfloat16_rn(mean_b - mean_a);
  s.directions[pair][channel] = __bfloat16_as_ushort(direction);
  const float length = __bfloat162float(direction);
  float2 part = {0.5f * (mean_a + mean_b) * length, length * length};
  for (int step = 16; step > 0; step /= 2) {
    part.x += __shfl_xor_sync(kFullWarp, part.x, step);
    part.y += __shfl_xor_sync(kFullWarp, part.y, step);
  }
  if (thread % 32 == 0) s.extents[pair][channel / 32] = part;
}

// t = (x - midpoint).direction / |direction|^2 is -1/2 and 1/2 at the means; blocks part near 0.
template <int kDim>
__device__ int bin_of(float projection, const float2 (&extents)[kDim / 32]) {
  constexpr float kKnee = 0.25f;
  float2 extent = {0.0f, 0.0f};
#pragma unroll
  for (const float2& part : extents) {
    extent.x += part.x;
    extent.y += part.y;
  }
  const float t = extent.y > 0.0f ? __fdividef(projection - extent.x, extent.y) : 0.0f;
  return kBins / 2 + __float2int_rd((kBins / 2 - 1) * __fdividef(t, fabsf(t) + kKnee));
}

// The bin in which the first `target` rows end, and how many of them lie in it. A warp calls it.
__device__ void find_full_bin(const int32_t* bins, int target, int32_t& full_bin, int32_t& taken) {
  constexpr int kPerLane = kBins / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 4) {
    const int4 four = *reinterpret_cast<const int4*>(bins + lane * kPerLane + i);
    sum += four.x + four.y + four.z + four.w;
  }
  const auto prefix_sum = [lane](int through) {
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullWarp, through, step);
      if (lane >= step) through += other;
    }
    return through;
  };
  const int through = prefix_sum(sum);
  const uint32_t reached = __ballot_sync(kFullWarp, through >= target);
  if (target == 0 || reached == 0) {
    if (lane == 0) full_bin = -1;
    return;
  }
  const int run = __ffs(static_cast<int>(reached)) - 1;  // of kPerLane bins
  const int before = __shfl_sync(kFullWarp, through - sum, run);
  const int rows = lane < kPerLane ? bins[run * kPerLane + lane] : 0;
  const int rows_through = before + prefix_sum(rows);
  const int last = __ffs(static_cast<int>(__ballot_sync(kFullWarp, rows_through >= target))) - 1;
  if (lane == last) {
    full_bin = run * kPerLane + last;
    taken = target - (rows_through - rows);
  }
}

// One round for the calling thread's row, which belongs to block `block`; returns its block afterwards.
template <int kDim>
__device__ int exchange(const Rows<kDim>& rows, const Window& window, int bits, int block, Shared<kDim>& s) {
  const int row = static_cast<int>(threadIdx.x), warp = row / 32;
  rows.add_up(s.sets, s.sums[warp]);
  __syncthreads();
  find_directions<kDim>(window, bits, s);
  if (row < kPairs) s.num_tied[row] = 0;
  __syncthreads();
  rows.project(s.directions, s.projections);
  __syncwarp();
  const bool inside = block != kNoBlock;
  const int pair = inside ? pair_of(bits, block) : 0, first = first_of_pair(bits, pair), second = first ^ bits;
  const float projection = pair == 0 ? s.projections[row].x : s.projections[row].y;
  const int bin = bin_of<kDim>(projection, s.extents[pair]);
  if (inside) atomicAdd(&s.bins[pair][bin], 1);
  __syncthreads();
  if (warp < kPairs) {
    find_full_bin(s.bins[warp], window.size(first_of_pair(bits, warp)), s.full_bin[warp], s.taken[warp]);
  }
  __syncthreads();
  const int full_bin = s.full_bin[pair];
  const bool tied = inside && bin == full_bin;
  const uint64_t key = uint64_t{ordered(projection)} << 32 | static_cast<uint32_t>(row);
  if (tied) s.tied[pair][atomicAdd(&s.num_tied[pair], 1)] = key;
  s.bins[row / kBins][row % kBins] = 0;
  __syncthreads();
  bool goes_first = bin < full_bin;
  if (tied) {
    const int num_tied = s.num_tied[pair];
    int before = 0;
    for (int i = 0; i < num_tied; ++i) before += s.tied[pair][i] < key;
    goes_first = before < s.taken[pair];
  }
  if (!inside) return kNoBlock;
  return goes_first ? first : second;
}

// Writes the window's rows block by block, each block's in the order that they came in.
template <int kDim>
__device__ void store_order(const ExchangeArgs& a, const Window& window, int position, int block, Shared<kDim>& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t same = 0;
#pragma unroll
  for (int b = 0; b < kBlocksPerWindow; ++b) {
    const uint32_t lanes = __ballot_sync(kFullWarp, block == b);
    if (block == b) same = lanes;
    if (lane == 0) s.members[warp][b] = __popc(lanes);
  }
  __syncthreads();
  if (block == kNoBlock) return;
  int place = window.begin + block * kBlockN + __popc(same & ((1U << lane) - 1));
  for (int w = 0; w < warp; ++w) place += s.members[w][block];
  a.g.permutation[window.slot.base + place] = a.tokens != 0 ? window.slot.token(a.g, position) : position;
}

template <bool kConvert, int kDim>
__global__ void __launch_bounds__(kThreads, 1) exchange_windows(const __grid_constant__ ExchangeArgs a) {
  extern __shared__ __align__(256) std::byte shared_bytes[];
  auto& s = *reinterpret_cast<Shared<kDim>*>(shared_bytes);
  const GroupArgs& g = a.g;
  const int row = static_cast<int>(threadIdx.x), stride = static_cast<int>(gridDim.x);
  const int items = g.scratch.num_windows * g.num_heads;
  constexpr int kNone = -1;

  // What the order holds at the thread's row of a window.
  const auto position_in = [&](int item) {
    if (item >= items) return kNone;
    const Window window = window_at(a, item);
    const int place = window.begin + row;
    return place >= 0 && place < window.slot.sequence.count ? g.permutation[window.slot.base + place] : kNone;
  };
  const int lane = row % kWarpRows, warp_row = row - lane;
  std::byte* warp_rows = s.rows + warp_row * Bf16Tile<kDim>::kRowBytes;
  const auto fetch = [&](int item, int position) {
    if (item >= items) return;
    s.sources[row] = position == kNone ? nullptr : window_at(a, item).slot.row(g, position);
    __syncwarp();
    RowFetch<kConvert, kDim, kWarpRows, 32>::start(g, lane, warp_rows, [&](int r) {
      const std::byte* source = s.sources[warp_row + r];
      return RowSource{source, source != nullptr};
    });
  };

  s.bins[row / kBins][row % kBins] = 0;
  const int first_item = static_cast<int>(blockIdx.x);
  int position = position_in(first_item), next_position = position_in(first_item + stride);
  fetch(first_item, position);
  for (int item = first_item; item < items; item += stride) {
    wait_copies<0>();
    __syncwarp();
    Rows<kDim> rows;
    rows.load(warp_rows);
    if constexpr (!kConvert) rows.clean();
    __syncwarp();
    if constexpr (!kConvert) fetch(item + stride, next_position);
    const int position_after = position_in(item + 2 * stride);

    const Window window = window_at(a, item);
    int block = position == kNone ? kNoBlock : row / kBlockN;
    s.sets[row] = set_number(block);
    __syncwarp();
    for (int round = 0; round < kRounds; ++round) {
      block = exchange<kDim>(rows, window, partner_bits(round), block, s);
      s.sets[row] = set_number(block);
      __syncwarp();
    }
    store_order<kDim>(a, window_at(a, item), position, block, s);
    if constexpr (kConvert) fetch(item + stride, next_position);  // no copy to overlap, and registers to spare by now
    position = next_position;
    next_position = position_after;
  }
}

}  // namespace

cudaError_t exchange_blocks(const GroupArgs& g, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t items = int64_t{g.scratch.num_windows} * g.num_heads;
  const int64_t blocks = std::min<int64_t>(items, processors);
  for (const bool last : {false, true}) {
    const ExchangeArgs args = {g, last ? kBlocksPerWindow / 2 : 0, last ? 1 : 0};
    error = with_group_instance(g, [&]<bool kConvert, int kDim>() {
      return launch(exchange_windows<kConvert, kDim>, args, blocks, kThreads, static_cast<int>(sizeof(Shared<kDim>)),
                    stream);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace vcattn::sm90a
