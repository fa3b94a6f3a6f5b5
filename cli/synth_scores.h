// K and Q of one (batch, KV head) and its query heads.
//
// A token's key is gain * (cluster vector + smooth field + noise) + bias: `gain` is larger in a few heavy channels,
// which hold most of the bias as well. Its query sees the same cluster vectors and field with the same gains, so that
// it attends to its own kind and surroundings, with noise and a weaker bias of its own. K's bias adds a constant to
// each softmax row: nothing to exact attention, all the range to a quantiser that does not subtract it.
#pragma once

#include <cstdint>
#include <vector>

#include "synth.h"

namespace vcattn::cli {

// Writes k[batch, :, head_kv, :] and q[batch, :, h, :] of its query heads; returns SynthHead::effective_keys.
double synthesize_scores(const SynthOptions& options, const std::vector<int32_t>& labels, int64_t batch,
                         int64_t head_kv, const vcattn_tensor& q, const vcattn_tensor& k);

}  // namespace vcattn::cli
