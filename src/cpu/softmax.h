// One step of the blocked softmax: scores of one tile of 128 keys, or of the two that share a maximum, become the
// probabilities that the second product reads, in every format and against every kind of maximum
// (docs/algorithm.md, "Softmax").
#pragma once

#include <cstdint>
#include <span>

#include "numerics/attention_math.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {

inline constexpr int kSumGroups = kBlockN / kMinMeanRows;  // row sums are kept for each 32 keys

struct SoftmaxTile {
  int64_t keys;       // valid keys, 1..128; the rest gets probability 0
  float* scores;      // [rows, 128], 64-byte aligned: raw products in; decoded probabilities out
  float* factor;      // [rows] in: code units per raw product, >= 0
  float* group_sums;  // [rows, kSumGroups] out: sums of this tile's probabilities, rounded or not as row_sum says;
                      // keys of the odd phase count kPhaseFactor
};

struct SoftmaxStep {
  int64_t rows;
  std::span<const SoftmaxTile> tiles;  // those under one maximum: 1, or up to 2 with tile_keys 256
  // The row's reference, carried from step to step. RUNNING: the maximum, in code units for ExpCast and octaves else.
  // OCTAVE kinds: whole octaves.
  float* reference;  // [rows]
  float* rescale;    // [rows] out: factor on everything that was accumulated before this step
  float* weight;     // [rows] out: factor on this step's contribution
};

// `reference` before a row's first step.
float initial_reference();

void softmax_step(const vcattn_recipe& recipe, const SoftmaxStep& step);

// Natural logarithm of a row's sum of exponentials, from its reference and its accumulated sum.
double row_lse(const vcattn_recipe& recipe, float reference, double sum);

}  // namespace vcattn::cpu
