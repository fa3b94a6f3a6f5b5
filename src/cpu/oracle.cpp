#include "cpu/oracle.h"

#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/message.h"
#include "core/rope.h"
#include "core/tensor_access.h"
#include "core/validate.h"

namespace vcattn::cpu {
namespace {

// The keys that one query row sees.
struct KeyRange {
  int64_t begin, end;
};

KeyRange keys_of(const Problem& problem, int64_t query) {
  if (!problem.packed()) return {0, problem.seqlen_kv};
  const int64_t* cu = problem.params->cu_seqlens_q;
  const int64_t segment = std::upper_bound(cu, cu + problem.num_sequences + 1, query) - cu - 1;
  return {problem.params->cu_seqlens_kv[segment], problem.params->cu_seqlens_kv[segment + 1]};
}

// K and V of one head: K transposed, so that the loops over keys and channels are both contiguous.
struct HeadOperands {
  std::vector<double> k;  // [head_dim, seqlen_kv]
  std::vector<double> v;  // [seqlen_kv, head_dim]
};

void load_operands(const Problem& problem, int64_t batch, int64_t head, HeadOperands& operands) {
  const int64_t keys = problem.seqlen_kv, dim = problem.head_dim;
  operands.k.resize(keys * dim);
  operands.v.resize(keys * dim);
  oneapi::tbb::parallel_for(int64_t{0}, keys, [&](int64_t j) {
    float row[VCATTN_MAX_HEAD_DIM];
    load_key(problem, batch, j, head, row);
    for (int64_t d = 0; d < dim; ++d) operands.k[d * keys + j] = row[d];
    load_row(problem.params->v, batch, j, head, row);
    for (int64_t d = 0; d < dim; ++d) operands.v[j * dim + d] = row[d];
  });
}

void oracle_row(const Problem& problem, const HeadOperands& operands, int64_t batch, int64_t query, int64_t head,
                double* out, double* lse) {
  const int64_t keys = problem.seqlen_kv, dim = problem.head_dim;
  const KeyRange range = keys_of(problem, query);
  float q[VCATTN_MAX_HEAD_DIM];
  load_query(problem, batch, query, head, q);
  std::vector<double> scores(range.end - range.begin, 0.0);
  for (int64_t d = 0; d < dim; ++d) {
    const double left = q[d] * problem.softmax_scale;
    const double* k = operands.k.data() + d * keys + range.begin;
    for (size_t j = 0; j < scores.size(); ++j) scores[j] += left * k[j];
  }
  double largest = -std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < scores.size(); ++j) {
    if (!problem.admits(batch, range.begin + static_cast<int64_t>(j))) {
      scores[j] = -std::numeric_limits<double>::infinity();
    }
    largest = std::max(largest, scores[j]);
  }
  std::fill(out, out + dim, 0.0);
  *lse = largest;
  if (largest == -std::numeric_limits<double>::infinity()) return;
  double sum = 0.0;
  for (size_t j = 0; j < scores.size(); ++j) {
    const double weight = std::exp(scores[j] - largest);
    sum += weight;
    if (weight == 0.0) continue;
    const double* v = operands.v.data() + (range.begin + static_cast<int64_t>(j)) * dim;
    for (int64_t d = 0; d < dim; ++d) out[d] += weight * v[d];
  }
  for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
  *lse += std::log(sum);
}

}  // namespace

vcattn_code oracle_attention(const vcattn_attention_params& params, std::span<const int64_t> query_rows,
                             OracleRows& result, vcattn_message* message) {
  Problem problem;
  const vcattn_code code = validate_attention(&params, problem, message);
  if (code != VCATTN_OK) return code;
  for (const int64_t row : query_rows) {
    if (row < 0 || row >= problem.seqlen_q) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "query row {} is outside 0..{}", row, problem.seqlen_q - 1);
    }
  }
  const int64_t rows = static_cast<int64_t>(query_rows.size()), heads = problem.num_heads;
  result.out.assign(problem.batch * rows * heads * problem.head_dim, 0.0);
  result.lse.assign(problem.batch * rows * heads, 0.0);
  HeadOperands operands;
  const int64_t group = heads / problem.num_heads_kv;
  for (int64_t batch = 0; batch < problem.batch; ++batch) {
    for (int64_t kv_head = 0; kv_head < problem.num_heads_kv; ++kv_head) {
      load_operands(problem, batch, kv_head, operands);
      oneapi::tbb::parallel_for(int64_t{0}, rows * group, [&](int64_t item) {
        const int64_t row = item / group, head = kv_head * group + item % group;
        const int64_t place = (batch * rows + row) * heads + head;
        oracle_row(problem, operands, batch, query_rows[row], head, result.out.data() + place * problem.head_dim,
                   result.lse.data() + place);
      });
    }
  }
  return VCATTN_OK;
}

}  // namespace vcattn::cpu
