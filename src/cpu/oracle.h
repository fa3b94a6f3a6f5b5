// Attention in FP64, straight from the definition: no tiles, no quantisation, no online softmax. What everything else
// is measured against. For tests and tools; it allocates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "vcattn/vcattn.h"

namespace vcattn::cpu {

struct OracleRows {
  std::vector<double> out;  // [batch, rows, num_heads, head_dim]
  std::vector<double> lse;  // [batch, rows, num_heads], natural logarithm; -inf where no key is admitted
};

// The output rows `query_rows` (indices along seqlen_q, the same for each batch entry and head) of the attention that
// `params` describes. Reads q, k, v, mask, segments and scale; recipe, permutation, out and lse are not used, but
// validation asks for them.
vcattn_code oracle_attention(const vcattn_attention_params& params, std::span<const int64_t> query_rows,
                             OracleRows& result, vcattn_message* message);

}  // namespace vcattn::cpu
