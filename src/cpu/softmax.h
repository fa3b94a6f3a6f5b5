// One step of the blocked softmax: scores of a tile of 128 keys become the probabilities that the second product
// reads, in every format and against every kind of maximum (docs/algorithm.md, "Softmax").
#pragma once

#include <cstdint>

#include "numerics/attention_math.h"
#include "vcattn/vcattn.h"

namespace vcattn::cpu {

inline constexpr int kSumGroups = kBlockN / kMinMeanRows;  // row sums are kept for each 32 keys

struct SoftmaxTile {
  int64_t rows;
  int64_t keys;         // valid keys, 1..128; the rest gets probability 0
  float* scores;        // [rows, 128], 64-byte aligned: raw products in; decoded probabilities out
  const float* factor;  // [rows] code units per raw product, >= 0
  // The row's reference, carried from tile to tile. RUNNING: the maximum, in code units for ExpCast and octaves else.
  // OCTAVE kinds: whole octaves.
  float* reference;   // [rows]
  float* rescale;     // [rows] out: factor on everything that was accumulated before this tile
  float* weight;      // [rows] out: factor on this tile's contribution
  float* group_sums;  // [rows, kSumGroups] out: sums of this tile's probabilities, rounded or not as row_sum says;
                      // keys of the odd phase count kPhaseFactor
};

// `reference` before a row's first tile.
float initial_reference();

void softmax_tile(const vcattn_recipe& recipe, const SoftmaxTile& tile);

// Natural logarithm of a row's sum of exponentials, from its reference and its accumulated sum.
double row_lse(const vcattn_recipe& recipe, float reference, double sum);

}  // namespace vcattn::cpu
