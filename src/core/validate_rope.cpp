// rope_q and rope_k: refused where their tables do not fit the tensors.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "core/message.h"
#include "core/validate_parts.h"
#include "numerics/rope.h"

namespace vcattn {
namespace {

// FP32 elements from the first to past the last; false where their bytes do not fit 63 bits.
bool rope_extent(const RopeArgument& r, int64_t& elements) {
  elements = 1;
  const int64_t extents[4] = {r.x.shape[0], r.x.shape[1], r.x.shape[2], r.x.shape[3] / 2};
  for (int axis = 0; axis < 4; ++axis) {
    int64_t span;
    if (__builtin_mul_overflow(extents[axis] - 1, r.rope.stride[axis], &span) ||
        __builtin_add_overflow(elements, span, &elements)) {
      return false;
    }
  }
  return elements <= std::numeric_limits<int64_t>::max() / 8;
}

// One table of cosines and one of sines, each of `elements`, apart from what the call writes.
vcattn_code validate_rope_tables(const RopeArgument& r, int axis, int64_t elements, vcattn_message* message) {
  for (const auto& [table, kind] : {std::pair{r.rope.cos[axis], "cos"}, std::pair{r.rope.sin[axis], "sin"}}) {
    if (table == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "{}: {}[{}] is NULL", r.name, kind, axis);
    const auto begin = reinterpret_cast<uintptr_t>(table);
    if (begin % sizeof(float) != 0) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "{}: {}[{}] is aligned to its element size of 4 bytes", r.name,
                  kind, axis);
    }
    const Range memory = {begin, begin + static_cast<uintptr_t>(elements) * sizeof(float)};
    if (r.written[0].meets(memory) || r.written[1].meets(memory)) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "{}: the memory of {}[{}] must not overlap out or lse", r.name,
                  kind, axis);
    }
  }
  return VCATTN_OK;
}

vcattn_code validate_rope_per_token(const RopeArgument& r, vcattn_message* message) {
  constexpr const char* kStride[4] = {"batch", "token", "head", "pair"};
  for (int axis = 0; axis < 4; ++axis) {
    if (r.rope.stride[axis] >= 0) continue;
    return fail(message, VCATTN_INVALID_ARGUMENT, "{}: stride of {} is not negative; found {}", r.name, kStride[axis],
                r.rope.stride[axis]);
  }
  int64_t elements;
  if (!rope_extent(r, elements)) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "{}: shape times stride overflows 64 bits", r.name);
  }
  return validate_rope_tables(r, 0, elements, message);
}

vcattn_code validate_rope_per_axis(const vcattn_attention_params& p, const RopeArgument& r, vcattn_message* message) {
  if (p.cu_seqlens_q != nullptr) {
    return fail(message, VCATTN_UNSUPPORTED, "{}: with cu_seqlens the tables are per token; found tables per axis",
                r.name);
  }
  if (r.x.shape[1] > std::numeric_limits<int32_t>::max()) {
    return fail(message, VCATTN_UNSUPPORTED, "{}: seqlen is at most 2^31 - 1 with tables per axis; found {}", r.name,
                r.x.shape[1]);
  }
  const std::string need = fmt::format("{} per axis needs the video grid", r.name);
  vcattn_code code = validate_grid(p.grid, need.c_str(), r.x.shape[1], message);
  if (code != VCATTN_OK) return code;
  const int64_t pairs[kRopeAxes] = {r.rope.pairs[0], r.rope.pairs[1], r.rope.pairs[2]};
  const int64_t half = r.x.shape[3] / 2;
  // Each first: sums of what has any size could overflow.
  if (std::any_of(pairs, pairs + kRopeAxes, [&](int64_t n) { return n < 0 || n > half; }) ||
      pairs[0] + pairs[1] + pairs[2] != half) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "{}: pairs add up to head_dim / 2 = {}; found [{}]", r.name, half,
                fmt::join(pairs, ", "));
  }
  const int64_t extents[kRopeAxes] = {p.grid.frames, p.grid.height, p.grid.width};
  for (int axis = 0; axis < kRopeAxes; ++axis) {
    if (pairs[axis] == 0) continue;
    code = validate_rope_tables(r, axis, extents[axis] * pairs[axis], message);
    if (code != VCATTN_OK) return code;
  }
  return VCATTN_OK;
}

}  // namespace

vcattn_code validate_rope(const vcattn_attention_params& p, const RopeArgument& r, vcattn_message* message) {
  const int32_t pairing = r.rope.pairing;
  if (pairing == VCATTN_ROPE_NONE) return VCATTN_OK;
  if (pairing != VCATTN_ROPE_INTERLEAVED && pairing != VCATTN_ROPE_HALF_SPLIT) {
    return fail(message, VCATTN_INVALID_ARGUMENT,
                "{}: pairing is none (0), interleaved (1) or half-split (2); found {}", r.name, pairing);
  }
  if (r.x.shape[3] % 2 != 0) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "{}: head_dim is even; found {}", r.name, r.x.shape[3]);
  }
  switch (r.rope.tables) {
    case VCATTN_ROPE_PER_TOKEN:
      return validate_rope_per_token(r, message);
    case VCATTN_ROPE_PER_AXIS:
      return validate_rope_per_axis(p, r, message);
    default:
      return fail(message, VCATTN_INVALID_ARGUMENT, "{}: tables are per token (0) or per axis (1); found {}", r.name,
                  r.rope.tables);
  }
}

}  // namespace vcattn
