// Checks of the caller's data, as opposed to its description: finite inputs, and a permutation that is one.
#include <oneapi/tbb/parallel_for.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "core/message.h"
#include "core/rope.h"
#include "core/tensor_access.h"
#include "cpu/keep_smallest.h"
#include "cpu/preprocess.h"

namespace vcattn::cpu {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// Index of the first token in [batch, seqlen] whose rows are read and hold something that is not finite, or do once
// they are rotated.
template <typename Load, typename Reads>
int64_t first_bad_token(const vcattn_tensor& t, Load load, Reads reads) {
  std::atomic<int64_t> first{kNone};
  oneapi::tbb::parallel_for(int64_t{0}, t.shape[0] * t.shape[1], [&](int64_t index) {
    const int64_t batch = index / t.shape[1], token = index % t.shape[1];
    if (!reads(batch, token)) return;
    float row[VCATTN_MAX_HEAD_DIM];
    for (int64_t head = 0; head < t.shape[2]; ++head) {
      load(batch, token, head, row);
      // Exponents all ones: one vector pass instead of a branch an element.
      uint32_t bad = 0;
      for (int64_t d = 0; d < t.shape[3]; ++d) {
        bad |= static_cast<uint32_t>((bits_from_float(row[d]) & kFloatInfinity) == kFloatInfinity);
      }
      if (bad == 0) continue;
      keep_smallest(first, index);
      return;
    }
  });
  return first.load();
}

template <typename Load>
vcattn_code report(const vcattn_tensor& t, const char* name, Load load, int64_t index, vcattn_message* message) {
  const int64_t batch = index / t.shape[1], token = index % t.shape[1];
  float given[VCATTN_MAX_HEAD_DIM], rotated[VCATTN_MAX_HEAD_DIM];
  for (int64_t head = 0; head < t.shape[2]; ++head) {
    load_row(t, batch, token, head, given);
    load(batch, token, head, rotated);
    // What was given first: one such channel spoils both of its pair.
    for (const auto& [row, when] : {std::pair{given, ""}, std::pair{rotated, ", once rotated by rope"}}) {
      for (int64_t d = 0; d < t.shape[3]; ++d) {
        if (std::isfinite(row[d])) continue;
        return fail(message, VCATTN_NONFINITE_INPUT, "{}: {} at batch {}, token {}, head {}, channel {}{}", name,
                    std::isnan(row[d]) ? "NaN" : "infinity", batch, token, head, d, when);
      }
    }
  }
  return VCATTN_OK;
}

template <typename Load, typename Reads>
vcattn_code check_tensor(const vcattn_tensor& t, const char* name, Load load, Reads reads, vcattn_message* message) {
  const int64_t bad = first_bad_token(t, load, reads);
  return bad == kNone ? VCATTN_OK : report(t, name, load, bad, message);
}

}  // namespace

vcattn_code check_finite_values(const Problem& problem, vcattn_message* message) {
  const vcattn_tensor& v = problem.params->v;
  if (problem.allows_nonfinite()) return VCATTN_OK;
  return check_tensor(
      v, "v", [&](int64_t b, int64_t t, int64_t h, float* row) { load_row(v, b, t, h, row); },
      [&](int64_t b, int64_t t) { return problem.admits(b, t); }, message);
}

vcattn_code check_finite(const Problem& problem, vcattn_message* message) {
  const vcattn_attention_params& p = *problem.params;
  if (problem.allows_nonfinite()) return VCATTN_OK;
  const vcattn_code q = check_tensor(
      p.q, "q", [&](int64_t b, int64_t t, int64_t h, float* row) { load_query(problem, b, t, h, row); },
      [](int64_t, int64_t) { return true; }, message);
  if (q != VCATTN_OK) return q;
  const vcattn_code k = check_tensor(
      p.k, "k", [&](int64_t b, int64_t t, int64_t h, float* row) { load_key(problem, b, t, h, row); },
      [&](int64_t b, int64_t t) { return problem.admits(b, t); }, message);
  return k != VCATTN_OK ? k : check_finite_values(problem, message);
}

vcattn_code check_permutation(const Problem& problem, const Plan& plan, vcattn_message* message) {
  const vcattn_attention_params& p = *problem.params;
  if (p.permutation == nullptr) return VCATTN_OK;
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    const Sequence sequence = sequence_at(problem, s);
    int64_t keys = 0;
    for (int64_t token = 0; token < sequence.kv_count; ++token) keys += problem.admits(sequence.batch, token) ? 1 : 0;
    for (int64_t head = 0; head < problem.num_heads_kv; ++head) {
      const int32_t* order =
          p.permutation + (sequence.batch * problem.num_heads_kv + head) * problem.seqlen_kv + sequence.kv_begin;
      std::fill(plan.head.seen, plan.head.seen + sequence.kv_count, uint8_t{0});
      for (int64_t i = 0; i < keys; ++i) {
        const int32_t token = order[i];
        const bool inside = token >= 0 && token < sequence.kv_count;
        if (inside && problem.admits(sequence.batch, token) && plan.head.seen[token] == 0) {
          plan.head.seen[token] = 1;
          continue;
        }
        return fail(message, VCATTN_INVALID_ARGUMENT,
                    "permutation: sequence {}, head {}, position {} holds {}, which is {}", s, head, i, token,
                    !inside                      ? fmt::format("outside 0..{}", sequence.kv_count - 1)
                    : plan.head.seen[token] != 0 ? "there twice"
                                                 : "not admitted by key_mask");
      }
    }
  }
  return VCATTN_OK;
}

}  // namespace vcattn::cpu
