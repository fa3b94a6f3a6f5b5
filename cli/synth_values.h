// V of one (batch, KV head): a mixture of independent kinds of rows, weighted so that block means remove the asked
// shares of its energy.
//
//   kind      sequence order   cube order   k-means
//   constant  1                1            1         one vector for all tokens
//   smooth    0                r            depends   smooth in the grid, less its means of 128 tokens in sequence
//   cluster   1/128            1/128        depends   one vector per label
//   noise     1/128            1/128        depends   token by token, with outliers
//
// The table gives the share that means of 128 rows remove from each kind, up to chance; the shares used are measured on
// the kinds as drawn. Energies of independent kinds add, and so do the removed ones: for a given weight of the cluster
// kind (a share of the total energy) the sum of one and the shares in the two static orders are a linear system for
// the other weights. The share after k-means, which depends on the mixture, grows with the weight of the cluster kind,
// and so that weight is searched for, measuring V as stored. Without a grid there is no smooth kind and no cube order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "synth.h"

namespace vcattn::cli {

// Refuses shares that no mixture has, whatever the random numbers. Throws std::runtime_error.
void check_shares(const EnergyShares& asked);

// Writes v[batch, :, head, :], and returns the shares reached. Throws std::runtime_error where the asked ones are not,
// with the reason and the closest ones.
EnergyShares synthesize_values(const SynthOptions& options, const std::vector<int32_t>& labels, int64_t batch,
                               int64_t head, const vcattn_tensor& v);

// "8.0, 12.0, 36.0 %"
std::string shares_text(const EnergyShares& shares);

}  // namespace vcattn::cli
