#include "cpu/attention.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <span>

#include "core/arena.h"
#include "core/message.h"
#include "core/recipes.h"
#include "core/tensor_access.h"
#include "cpu/dot_model_panel.h"
#include "cpu/gemm.h"
#include "cpu/keep_smallest.h"
#include "cpu/panel.h"
#include "cpu/preprocess.h"
#include "cpu/softmax.h"

namespace vcattn::cpu {
namespace {

// [32 keys, 16]: column 0 sums the even keys, column 1 the odd ones.
struct OnesPanel {
  float values[kMinMeanRows * kPanelAlign] = {};
  constexpr OnesPanel() {
    for (int key = 0; key < kMinMeanRows; ++key) values[key * kPanelAlign + key % 2] = 1.0f;
  }
};

// One query block of one head against all keys of its sequence.
class QueryBlock {
 public:
  QueryBlock(const Problem& problem, const Plan& plan, int64_t sequence, int64_t head, int64_t block)
      : problem_(problem),
        recipe_(problem.params->recipe),
        qkv_(plan.qkv),
        scratch_(thread_scratch(plan, problem, oneapi::tbb::this_task_arena::current_thread_index())),
        sequence_(qkv_.sequences[sequence]),
        sequence_index_(sequence),
        head_(head),
        kv_head_(head / (problem.num_heads / problem.num_heads_kv)),
        block_(block),
        rows_(std::min<int64_t>(kBlockM, sequence_.q_count - block * kBlockM)),
        place_((head * qkv_.blocks + sequence_.q_block + block) * kBlockM) {
    float* state = scratch_.row_state;
    const auto take = [&](int64_t floats_per_row) {
      float* const array = state;
      state += floats_per_row * kBlockM;
      return array;
    };
    reference_ = take(1);
    rescale_ = take(1);
    weight_ = take(1);
    for (int t = 0; t < tiles_per_step(recipe_); ++t) {
      tiles_[t] = {0, scratch_.scores + t * kBlockM * kBlockN, take(1), take(kSumGroups)};
    }
  }

  // Returns the first row of the sequence whose softmax overflowed, or -1.
  int64_t run() {
    decode_rows(recipe_.qk_format, kBlockM, qkv_.dim, qkv_.q + place_ * qkv_.dim * stored_size(recipe_.qk_format),
                qkv_.q_groups + place_ * (qkv_.dim / kFp4Group), scratch_.q);
    std::fill(reference_, reference_ + kBlockM, initial_reference());
    std::fill(scratch_.sums, scratch_.sums + kBlockM, 0.0);
    clear_output();
    const int64_t num_tiles = ceil_div(sequence_.keys, kBlockN), step = tiles_per_step(recipe_);
    for (int64_t first = 0; first < num_tiles; first += step) {
      const int64_t count = std::min(step, num_tiles - first);
      for (int64_t t = 0; t < count; ++t) score_tile(first + t, tiles_[t]);
      const std::span<const SoftmaxTile> tiles(tiles_.data(), static_cast<size_t>(count));
      softmax_step(recipe_, {rows_, tiles, reference_, rescale_, weight_});
      rescale_rows();
      accumulate(first, tiles);
    }
    if (tensor_core_accumulates()) promote();
    return write();
  }

 private:
  int64_t tile_place(int64_t tile) const { return kv_head_ * qkv_.tiles + sequence_.tile + tile; }
  bool hopper() const { return recipe_.pv_accumulate == VCATTN_ACC_HOPPER; }
  // The FP8 accumulator lives on from step to step, to be promoted now and then.
  bool tensor_core_accumulates() const { return hopper() && !is_per_tile(recipe_); }
  int64_t output_floats() const { return kBlockM * qkv_.v_dim; }

  void clear_output() {
    std::fill(scratch_.out, scratch_.out + output_floats(), 0.0f);
    std::fill(scratch_.tile_out, scratch_.tile_out + output_floats(), 0.0f);
    if (recipe_.pv_accumulate == VCATTN_ACC_FP64) std::fill(scratch_.out64, scratch_.out64 + output_floats(), 0.0);
    keys_since_promotion_ = 0;
  }

  // ---- first product ----

  // scores = Q K^T in raw units; factor = code units per raw unit.
  void score_tile(int64_t index, SoftmaxTile& tile) {
    const int64_t at = tile_place(index), dim = qkv_.dim;
    tile.keys = std::min<int64_t>(kBlockN, sequence_.keys - index * kBlockN);
    decode_panel(recipe_.qk_format, dim, kBlockN, qkv_.k + at * dim * kBlockN * stored_size(recipe_.qk_format),
                 qkv_.k_groups + at * (dim / kFp4Group) * kBlockN, scratch_.k);
    switch (recipe_.qk_accumulate) {
      case VCATTN_ACC_FP64:
        gemm_f64(rows_, kBlockN, dim, scratch_.q, dim, scratch_.k, kBlockN, tile.scores, kBlockN);
        break;
      case VCATTN_ACC_HOPPER:
        std::fill(tile.scores, tile.scores + kBlockM * kBlockN, 0.0f);
        hopper_fp8_panel(rows_, kBlockN, dim, scratch_.q, dim, scratch_.k, kBlockN, tile.scores, kBlockN);
        break;
      case VCATTN_ACC_HOPPER_F16:
        std::fill(tile.scores, tile.scores + kBlockM * kBlockN, 0.0f);
        hopper_fp8_f16_panel(rows_, kBlockN, dim, scratch_.q, dim, scratch_.k, kBlockN, tile.scores, kBlockN);
        break;
      default:
        gemm_f32(rows_, kBlockN, dim, scratch_.q, dim, scratch_.k, kBlockN, tile.scores, kBlockN, false);
    }
    for (int64_t i = 0; i < rows_; ++i) tile.factor[i] = qkv_.q_factor[place_ + i] * qkv_.k_descale[at];
    if (recipe_.q_centred != 0) add_mean_scores(at, tile);
  }

  // The mean that was taken from the block's queries scores every key exactly; what remains is in code units.
  void add_mean_scores(int64_t at, SoftmaxTile& tile) {
    const int64_t dim = qkv_.dim;
    alignas(64) float mean_scores[kBlockN];
    gemm_f32(1, kBlockN, dim, qkv_.q_means + place_ / kBlockM * dim, dim, qkv_.k_exact + at * dim * kBlockN, kBlockN,
             mean_scores, kBlockN, false);
    const float units = code_units_per_score(problem_.softmax_scale);
    for (int64_t i = 0; i < rows_; ++i) {
      float* scores = tile.scores + i * kBlockN;
      for (int64_t j = 0; j < kBlockN; ++j) scores[j] = scores[j] * tile.factor[i] + mean_scores[j] * units;
      tile.factor[i] = 1.0f;
    }
  }

  // ---- second product ----

  void accumulate(int64_t first, std::span<const SoftmaxTile> tiles) {
    const bool fp64 = recipe_.pv_accumulate == VCATTN_ACC_FP64, per_tile = is_per_tile(recipe_);
    const int64_t v_dim = qkv_.v_dim;
    float* const step_out = per_tile ? scratch_.tile_out : scratch_.out;
    if (per_tile) std::fill(step_out, step_out + output_floats(), 0.0f);
    for (size_t t = 0; t < tiles.size(); ++t) {
      const int64_t at = tile_place(first + static_cast<int64_t>(t));
      decode_panel(recipe_.v_format, kBlockN, v_dim, qkv_.v + at * kBlockN * v_dim * stored_size(recipe_.v_format),
                   qkv_.v_groups + at * (kBlockN / kFp4Group) * v_dim, scratch_.v);
      if (hopper() && recipe_.row_sum == VCATTN_SUM_DECODED) sum_on_tensor_core(tiles[t]);
      if (fp64) {
        accumulate_f64(at, tiles[t]);
      } else {
        multiply(tiles[t].scores, hopper() ? scratch_.tile_out : step_out);
      }
    }
    for (size_t t = 0; t < tiles.size(); ++t) {
      if (!fp64) add_means(tile_place(first + static_cast<int64_t>(t)), tiles[t], step_out);
      add_row_sums(tiles[t]);
    }
    if (!fp64 && per_tile) add_scaled_rows(rows_, v_dim, weight_, step_out, v_dim, scratch_.out, v_dim);
  }

  void add_row_sums(const SoftmaxTile& tile) {
    for (int64_t i = 0; i < rows_; ++i) {
      double sum = 0.0;
      for (int g = 0; g < kSumGroups; ++g) sum += tile.group_sums[i * kSumGroups + g];
      scratch_.sums[i] += weight_[i] * sum;
    }
  }

  void rescale_rows() {
    const int64_t v_dim = qkv_.v_dim;
    for (int64_t i = 0; i < rows_; ++i) {
      if (rescale_[i] == 1.0f) continue;
      scratch_.sums[i] *= rescale_[i];
      for (int64_t d = 0; d < v_dim; ++d) scratch_.out[i * v_dim + d] *= rescale_[i];
      if (tensor_core_accumulates()) {
        for (int64_t d = 0; d < v_dim; ++d) scratch_.tile_out[i * v_dim + d] *= rescale_[i];
      }
      if (recipe_.pv_accumulate == VCATTN_ACC_FP64) {
        for (int64_t d = 0; d < v_dim; ++d) scratch_.out64[i * v_dim + d] *= rescale_[i];
      }
    }
  }

  // accumulator += P V. On the tensor core, promoted to FP32 each `promote_keys` keys where it lives on.
  void multiply(const float* p, float* accumulator) {
    const int64_t v_dim = qkv_.v_dim;
    if (!hopper()) {
      gemm_f32(rows_, v_dim, kBlockN, p, kBlockN, scratch_.v, v_dim, accumulator, v_dim, true);
      return;
    }
    const bool promotes = tensor_core_accumulates() && recipe_.promote_keys != 0;
    const int64_t interval = promotes ? recipe_.promote_keys : std::numeric_limits<int64_t>::max();
    for (int64_t key = 0; key < kBlockN;) {
      const int64_t count = std::min(kBlockN - key, interval - keys_since_promotion_);
      hopper_fp8_panel(rows_, v_dim, count, p + key, kBlockN, scratch_.v + key * v_dim, v_dim, accumulator, v_dim);
      key += count;
      keys_since_promotion_ += count;
      if (keys_since_promotion_ >= interval) promote();
    }
  }

  void promote() {
    for (int64_t i = 0; i < rows_ * qkv_.v_dim; ++i) scratch_.out[i] += scratch_.tile_out[i];
    std::fill(scratch_.tile_out, scratch_.tile_out + output_floats(), 0.0f);
    keys_since_promotion_ = 0;
  }

  // Row sums as rows of ones beside V would give them: one row for each group of 32 keys and phase.
  void sum_on_tensor_core(const SoftmaxTile& tile) {
    alignas(64) static constexpr OnesPanel kOnes;
    alignas(64) float sums[kBlockM * kPanelAlign];
    const float odd_weight = has_phases(recipe_) ? kPhaseFactor : 1.0f;
    for (int g = 0; g < kSumGroups; ++g) {
      std::fill(sums, sums + kBlockM * kPanelAlign, 0.0f);
      hopper_fp8_panel(rows_, kPanelAlign, kMinMeanRows, tile.scores + g * kMinMeanRows, kBlockN, kOnes.values,
                       kPanelAlign, sums, kPanelAlign);
      for (int64_t i = 0; i < rows_; ++i) {
        tile.group_sums[i * kSumGroups + g] = sums[i * kPanelAlign] + odd_weight * sums[i * kPanelAlign + 1];
      }
    }
  }

  // The restored means: row sums of each block times its mean, in FP32.
  void add_means(int64_t at, const SoftmaxTile& tile, float* accumulator) {
    if (recipe_.mean_rows == 0) return;
    const int64_t v_dim = qkv_.v_dim, blocks = kBlockN / recipe_.mean_rows;
    alignas(64) float sums[kBlockM * kSumGroups];
    for (int64_t i = 0; i < rows_; ++i) block_sums(tile.group_sums + i * kSumGroups, sums + i * blocks);
    gemm_f32(rows_, v_dim, blocks, sums, blocks, qkv_.means + at * blocks * v_dim, v_dim, accumulator, v_dim, true);
  }

  void block_sums(const float* group_sums, float* sums) const {
    const int64_t groups = recipe_.mean_rows / kMinMeanRows;
    for (int64_t block = 0; block < kSumGroups / groups; ++block) {
      sums[block] = 0.0f;
      for (int64_t g = 0; g < groups; ++g) sums[block] += group_sums[block * groups + g];
    }
  }

  void accumulate_f64(int64_t at, const SoftmaxTile& tile) {
    const int64_t v_dim = qkv_.v_dim, blocks = recipe_.mean_rows > 0 ? kBlockN / recipe_.mean_rows : 0;
    for (int64_t i = 0; i < rows_; ++i) {
      double* out = scratch_.out64 + i * v_dim;
      const double weight = weight_[i];
      for (int64_t j = 0; j < kBlockN; ++j) {
        const double p = weight * tile.scores[i * kBlockN + j];
        if (p == 0.0) continue;
        for (int64_t d = 0; d < v_dim; ++d) out[d] += p * scratch_.v[j * v_dim + d];
      }
      float sums[kSumGroups];
      if (blocks > 0) block_sums(tile.group_sums + i * kSumGroups, sums);
      for (int64_t block = 0; block < blocks; ++block) {
        const double sum = weight * sums[block];
        const float* mean = qkv_.means + (at * blocks + block) * v_dim;
        for (int64_t d = 0; d < v_dim; ++d) out[d] += sum * mean[d];
      }
    }
  }

  // ---- epilogue ----

  int64_t write() {
    int64_t overflow = -1;
    const vcattn_attention_params& p = *problem_.params;
    const int64_t v_dim = qkv_.v_dim, slot = kv_head_ * qkv_.num_sequences + sequence_index_;
    const float* descale = qkv_.v_descale + slot * v_dim;
    for (int64_t i = 0; i < rows_; ++i) {
      float* out = scratch_.out + i * v_dim;
      for (int64_t d = 0; d < v_dim; ++d) {
        const double sum = recipe_.pv_accumulate == VCATTN_ACC_FP64 ? scratch_.out64[i * v_dim + d] : out[d];
        out[d] = static_cast<float>(sum / scratch_.sums[i]) * descale[d];
      }
      if (recipe_.v_hadamard != 0) hadamard_row(out, v_dim);
      double lse = row_lse(recipe_, reference_[i], scratch_.sums[i]);
      if (!std::isfinite(lse) && overflow < 0) overflow = block_ * kBlockM + i;
      if (p.lse != nullptr) lse += qkv_.lse_shift[place_ + i];
      if (problem_.allows_nonfinite()) poison(i, slot, out, lse);
      store(i, out, lse);
    }
    return overflow;
  }

  void poison(int64_t row, int64_t slot, float* out, double& lse) const {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const bool whole_row = qkv_.q_poison[place_ + row] != 0 || qkv_.k_poison[slot] != 0;
    if (whole_row) lse = nan;
    const uint8_t* channels = qkv_.v_poison + slot * qkv_.v_dim;
    for (int64_t d = 0; d < problem_.head_dim; ++d) {
      if (whole_row || channels[d] != 0) out[d] = nan;
    }
  }

  void store(int64_t row, const float* out, double lse) const {
    const vcattn_attention_params& p = *problem_.params;
    const int64_t token = sequence_.q_begin + block_ * kBlockM + row;
    store_row(p.out, sequence_.batch, token, head_, out);
    if (p.lse == nullptr) return;
    p.lse[sequence_.batch * p.lse_stride[0] + token * p.lse_stride[1] + head_ * p.lse_stride[2]] =
        static_cast<float>(lse);
  }

  const Problem& problem_;
  const vcattn_recipe& recipe_;
  const QuantizedQkv& qkv_;
  const ThreadScratch scratch_;
  const Sequence& sequence_;
  const int64_t sequence_index_, head_, kv_head_, block_, rows_;
  const int64_t place_;  // first row in the arrays over query rows
  float *reference_, *rescale_, *weight_;
  std::array<SoftmaxTile, kMaxTileKeys / kBlockN> tiles_{};
  int64_t keys_since_promotion_ = 0;
};

// Rows that no key is admitted for.
void write_empty(const Problem& problem, const Sequence& sequence) {
  const vcattn_attention_params& p = *problem.params;
  const float zeros[VCATTN_MAX_HEAD_DIM] = {};
  for (int64_t i = 0; i < sequence.q_count; ++i) {
    const int64_t token = sequence.q_begin + i;
    for (int64_t head = 0; head < problem.num_heads; ++head) {
      store_row(p.out, sequence.batch, token, head, zeros);
      if (p.lse == nullptr) continue;
      p.lse[sequence.batch * p.lse_stride[0] + token * p.lse_stride[1] + head * p.lse_stride[2]] =
          -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace

vcattn_code attend(const Problem& problem, const Plan& plan, vcattn_message* message) {
  for (int64_t s = 0; s < plan.qkv.num_sequences; ++s) {
    const Sequence& sequence = plan.qkv.sequences[s];
    if (sequence.keys == 0) {
      write_empty(problem, sequence);
      continue;
    }
    const int64_t blocks = ceil_div(sequence.q_count, kBlockM);
    constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
    std::atomic<int64_t> first{kNone};  // row * num_heads + head of the first overflow
    oneapi::tbb::parallel_for(int64_t{0}, problem.num_heads * blocks, [&](int64_t item) {
      const int64_t row = QueryBlock(problem, plan, s, item / blocks, item % blocks).run();
      if (row >= 0) keep_smallest(first, row * problem.num_heads + item / blocks);
    });
    if (first != kNone) {
      return fail(message, VCATTN_OVERFLOW, "scores leave the range of FP32 at batch {}, query {}, head {}",
                  sequence.batch, sequence.q_begin + first / problem.num_heads, first % problem.num_heads);
    }
  }
  return VCATTN_OK;
}

}  // namespace vcattn::cpu
