#include "core/validate.h"

#include <oneapi/tbb/info.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "core/message.h"
#include "core/recipes.h"
#include "core/validate_parts.h"

namespace vcattn {
namespace {

constexpr const char* kAxis[4] = {"batch", "seqlen", "num_heads", "head_dim"};

int64_t element_size(int32_t dtype) { return dtype == VCATTN_FP32 ? 4 : 2; }

// Bytes from the first to past the last element; false where that does not fit 63 bits.
bool byte_extent(const vcattn_tensor& t, int64_t& bytes) {
  int64_t elements = 1;
  for (int axis = 0; axis < 4; ++axis) {
    int64_t span;
    if (__builtin_mul_overflow(t.shape[axis] - 1, t.stride[axis], &span) ||
        __builtin_add_overflow(elements, span, &elements)) {
      return false;
    }
  }
  return !__builtin_mul_overflow(elements, element_size(t.dtype), &bytes);
}

// Rows of head_dim that one call may describe: keeps every size below 2^63, also for broadcast tensors, whose memory
// says nothing of their extents.
constexpr int64_t kMaxRows = int64_t{1} << 38;

vcattn_code validate_rows(const char* name, int64_t a, int64_t b, int64_t c, vcattn_message* message) {
  int64_t rows;
  if (!__builtin_mul_overflow(a, b, &rows) && !__builtin_mul_overflow(rows, c, &rows) && rows <= kMaxRows) {
    return VCATTN_OK;
  }
  return fail(message, VCATTN_UNSUPPORTED, "{}: {} x {} x {} rows; at most 2^38", name, a, b, c);
}

vcattn_code validate_tensor(const vcattn_tensor& t, const char* name, vcattn_message* message) {
  constexpr vcattn_code kInvalid = VCATTN_INVALID_ARGUMENT;
  if (t.data == nullptr) return fail(message, kInvalid, "{}: data is NULL", name);
  if (t.dtype != VCATTN_BF16 && t.dtype != VCATTN_FP16 && t.dtype != VCATTN_FP32) {
    return fail(message, kInvalid, "{}: dtype is BF16 (1), FP16 (2) or FP32 (3); found {}", name, t.dtype);
  }
  if (t.reserved != 0) return fail(message, kInvalid, "{}: reserved is 0; found {}", name, t.reserved);
  for (int axis = 0; axis < 4; ++axis) {
    if (t.shape[axis] < 1) {
      return fail(message, kInvalid, "{}: {} is at least 1; found {}", name, kAxis[axis], t.shape[axis]);
    }
    if (t.stride[axis] < 0) {
      return fail(message, kInvalid, "{}: stride of {} is not negative; found {}", name, kAxis[axis], t.stride[axis]);
    }
  }
  if (reinterpret_cast<uintptr_t>(t.data) % element_size(t.dtype) != 0) {
    return fail(message, kInvalid, "{}: data is aligned to its element size of {} bytes", name, element_size(t.dtype));
  }
  int64_t bytes;
  if (!byte_extent(t, bytes)) return fail(message, kInvalid, "{}: shape times stride overflows 64 bits", name);
  return validate_rows(name, t.shape[0], t.shape[1], t.shape[2], message);
}

vcattn_code validate_extent(const char* name, int axis, int64_t found, const char* other, int64_t expected,
                            vcattn_message* message) {
  if (found == expected) return VCATTN_OK;
  return fail(message, VCATTN_INVALID_ARGUMENT, "{}: {} is {}, as in {}; found {}", name, kAxis[axis], expected, other,
              found);
}

// Distinct indices reach distinct elements: each stride steps over everything that the smaller strides reach.
bool self_overlapping(const int64_t* shape, const int64_t* stride, int axes) {
  std::array<int, 4> order{};
  std::iota(order.begin(), order.begin() + axes, 0);
  std::sort(order.begin(), order.begin() + axes, [&](int a, int b) { return stride[a] < stride[b]; });
  int64_t reach = 0;
  for (int i = 0; i < axes; ++i) {
    const int axis = order[i];
    if (shape[axis] == 1) continue;
    if (stride[axis] <= reach) return true;
    reach += (shape[axis] - 1) * stride[axis];
  }
  return false;
}

Range memory_of(const vcattn_tensor& t) {
  int64_t bytes = 0;
  byte_extent(t, bytes);
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  return {begin, begin + static_cast<uintptr_t>(bytes)};
}

// `lse` becomes its memory.
vcattn_code validate_lse(const vcattn_attention_params& p, const Range& out, Range& lse, vcattn_message* message) {
  if (p.lse == nullptr) return VCATTN_OK;
  if (const vcattn_code code = validate_alignment(p.lse, "lse", message); code != VCATTN_OK) return code;
  const int64_t shape[3] = {p.q.shape[0], p.q.shape[1], p.q.shape[2]};
  int64_t last = 0;
  for (int axis = 0; axis < 3; ++axis) {
    int64_t span;
    if (p.lse_stride[axis] < 0 || __builtin_mul_overflow(shape[axis] - 1, p.lse_stride[axis], &span) ||
        __builtin_add_overflow(last, span, &last) || last > std::numeric_limits<int64_t>::max() / 8) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "lse: stride of {} is not negative and fits 64 bits; found {}",
                  kAxis[axis], p.lse_stride[axis]);
    }
  }
  if (self_overlapping(shape, p.lse_stride, 3)) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "lse: strides [{}] make elements overlap",
                fmt::join(p.lse_stride, ", "));
  }
  const auto begin = reinterpret_cast<uintptr_t>(p.lse);
  lse = {begin, begin + static_cast<uintptr_t>(last + 1) * sizeof(float)};
  if (lse.meets(out) || lse.meets(memory_of(p.q)) || lse.meets(memory_of(p.k)) || lse.meets(memory_of(p.v))) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "lse: its memory must not overlap q, k, v or out");
  }
  return VCATTN_OK;
}

vcattn_code validate_cu_seqlens(const int64_t* cu, const char* name, int64_t segments, int64_t seqlen,
                                vcattn_message* message) {
  if (cu[0] != 0) return fail(message, VCATTN_INVALID_ARGUMENT, "{}: starts at 0; found {}", name, cu[0]);
  for (int64_t s = 0; s < segments; ++s) {
    if (cu[s + 1] < cu[s]) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "{}: never decreases; entry {} is {} after {}", name, s + 1,
                  cu[s + 1], cu[s]);
    }
  }
  if (cu[segments] != seqlen) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "{}: ends at the sequence length {}; found {}", name, seqlen,
                cu[segments]);
  }
  return VCATTN_OK;
}

vcattn_code validate_segments(const vcattn_attention_params& p, bool needs_q, vcattn_message* message) {
  const bool any = p.cu_seqlens_q != nullptr || p.cu_seqlens_kv != nullptr;
  if (!any) {
    if (p.num_segments == 0) return VCATTN_OK;
    return fail(message, VCATTN_INVALID_ARGUMENT, "num_segments is 0 without cu_seqlens; found {}", p.num_segments);
  }
  if (p.cu_seqlens_kv == nullptr || p.cu_seqlens_q == nullptr) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "cu_seqlens_q and cu_seqlens_kv come together");
  }
  if (p.num_segments < 1) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "num_segments is at least 1 with cu_seqlens; found {}",
                p.num_segments);
  }
  if (p.v.shape[0] != 1) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "cu_seqlens: batch is 1; found {}", p.v.shape[0]);
  }
  if (p.key_mask != nullptr) {
    return fail(message, VCATTN_UNSUPPORTED,
                "cu_seqlens and key_mask do not go together: give the segments' own lengths");
  }
  vcattn_code code = validate_rows("num_segments", p.num_segments, p.v.shape[2], 1, message);
  if (code == VCATTN_OK && needs_q)
    code = validate_cu_seqlens(p.cu_seqlens_q, "cu_seqlens_q", p.num_segments, p.q.shape[1], message);
  if (code != VCATTN_OK) return code;
  return validate_cu_seqlens(p.cu_seqlens_kv, "cu_seqlens_kv", p.num_segments, p.v.shape[1], message);
}

vcattn_code validate_order(const vcattn_attention_params& p, vcattn_message* message) {
  const vcattn_video_grid& g = p.grid;
  const bool cube = p.recipe.v_order == VCATTN_ORDER_CUBE;
  const bool given = g.first_token != 0 || g.frames != 0 || g.height != 0 || g.width != 0;
  if (!cube && !given) return VCATTN_OK;
  const char* need =
      cube ? "v_order cube needs the video grid" : "grid: all zero, or at least one frame, row and column";
  const vcattn_code code = validate_grid(g, need, p.v.shape[1], message);
  if (code != VCATTN_OK) return code;
  if (p.recipe.v_order == VCATTN_ORDER_SEQUENCE) return VCATTN_OK;
  if (cube && (p.key_mask != nullptr || p.cu_seqlens_kv != nullptr)) {
    return fail(message, VCATTN_UNSUPPORTED, "v_order cube does not go with key_mask or cu_seqlens");
  }
  if (p.cu_seqlens_kv != nullptr) {
    return fail(message, VCATTN_UNSUPPORTED, "grid and cu_seqlens do not go together: a grid is of one sequence");
  }
  return VCATTN_OK;
}

vcattn_code validate_mask(const vcattn_attention_params& p, vcattn_message* message) {
  if (p.key_mask == nullptr) return VCATTN_OK;
  int64_t last = 0;
  for (int axis = 0; axis < 2; ++axis) {
    int64_t span;
    if (p.key_mask_stride[axis] < 0 || __builtin_mul_overflow(p.v.shape[axis] - 1, p.key_mask_stride[axis], &span) ||
        __builtin_add_overflow(last, span, &last)) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "key_mask: stride of {} is not negative and fits 64 bits; found {}",
                  kAxis[axis], p.key_mask_stride[axis]);
    }
  }
  return VCATTN_OK;
}

// Scores are scaled by 8 log2(e) softmax_scale in FP32: beyond this they overflow whatever q and k are.
constexpr double kMaxSoftmaxScale = 0x1p64;

vcattn_code validate_softmax_scale(double scale, vcattn_message* message) {
  if (scale >= 0.0 && scale <= kMaxSoftmaxScale) return VCATTN_OK;
  return fail(message, VCATTN_INVALID_ARGUMENT,
              "softmax_scale is positive and at most 2^64, or 0 for 1/sqrt(head_dim); found {}", scale);
}

vcattn_code validate_common(const vcattn_attention_params* params, vcattn_message* message) {
  if (params == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "params is NULL");
  if (params->struct_size != sizeof(vcattn_attention_params)) {
    return fail(message, VCATTN_INVALID_ARGUMENT,
                "params: struct_size is {}; found {} (use vcattn_attention_params_init and the header of this version)",
                sizeof(vcattn_attention_params), params->struct_size);
  }
  if (params->num_threads < 0 || params->num_threads > 4096) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "num_threads is from 0 to 4096; found {}", params->num_threads);
  }
  if ((params->flags & ~uint32_t{VCATTN_ALLOW_NONFINITE}) != 0) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "flags: unknown bits in {:#x}", params->flags);
  }
  if (const vcattn_code code = validate_recipe(params->recipe, message); code != VCATTN_OK) return code;
  if (const vcattn_code code = validate_tensor(params->v, "v", message); code != VCATTN_OK) return code;
  if (params->v.shape[1] > std::numeric_limits<int32_t>::max()) {
    return fail(message, VCATTN_UNSUPPORTED, "v: seqlen is at most 2^31 - 1 (permutations are 32-bit); found {}",
                params->v.shape[1]);
  }
  if (params->v.shape[3] > VCATTN_MAX_HEAD_DIM) {
    return fail(message, VCATTN_UNSUPPORTED, "v: head_dim is at most {}; found {}", VCATTN_MAX_HEAD_DIM,
                params->v.shape[3]);
  }
  return validate_mask(*params, message);
}

void fill_problem(const vcattn_attention_params& p, Problem& problem) {
  problem.params = &p;
  problem.batch = p.v.shape[0];
  problem.seqlen_kv = p.v.shape[1];
  problem.num_heads_kv = p.v.shape[2];
  problem.head_dim = p.v.shape[3];
  problem.seqlen_q = problem.num_heads = 0;
  problem.num_sequences = p.cu_seqlens_kv != nullptr ? p.num_segments : problem.batch;
  problem.softmax_scale =
      p.softmax_scale == 0.0 ? 1.0 / std::sqrt(static_cast<double>(problem.head_dim)) : p.softmax_scale;
  const int usable = std::max(1, oneapi::tbb::info::default_concurrency());
  problem.num_threads = p.num_threads > 0 ? std::min(p.num_threads, usable) : usable;
}

vcattn_code validate_shapes(const vcattn_attention_params& p, vcattn_message* message) {
  struct Rule {
    const vcattn_tensor* tensor;
    const char* name;
    int axis;
    const vcattn_tensor* like;
    const char* like_name;
  };
  const Rule rules[] = {{&p.k, "k", 0, &p.v, "v"},     {&p.k, "k", 1, &p.v, "v"},     {&p.k, "k", 2, &p.v, "v"},
                        {&p.k, "k", 3, &p.v, "v"},     {&p.q, "q", 0, &p.v, "v"},     {&p.q, "q", 3, &p.v, "v"},
                        {&p.out, "out", 0, &p.q, "q"}, {&p.out, "out", 1, &p.q, "q"}, {&p.out, "out", 2, &p.q, "q"},
                        {&p.out, "out", 3, &p.q, "q"}};
  for (const Rule& r : rules) {
    const vcattn_code code =
        validate_extent(r.name, r.axis, r.tensor->shape[r.axis], r.like_name, r.like->shape[r.axis], message);
    if (code != VCATTN_OK) return code;
  }
  if (p.q.shape[2] % p.v.shape[2] != 0) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "q: num_heads {} is a multiple of num_heads_kv {}", p.q.shape[2],
                p.v.shape[2]);
  }
  return VCATTN_OK;
}

}  // namespace

vcattn_code validate_grid(const vcattn_video_grid& g, const char* need, int64_t seqlen, vcattn_message* message) {
  int64_t tokens, end;
  if (g.frames < 1 || g.height < 1 || g.width < 1 || g.first_token < 0) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "{}; found first_token {}, frames {}, height {}, width {}", need,
                g.first_token, g.frames, g.height, g.width);
  }
  if (__builtin_mul_overflow(g.frames, g.height, &tokens) || __builtin_mul_overflow(tokens, g.width, &tokens) ||
      __builtin_add_overflow(tokens, g.first_token, &end) || end > seqlen) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "grid: {} + {} x {} x {} tokens exceed seqlen {}", g.first_token,
                g.frames, g.height, g.width, seqlen);
  }
  return VCATTN_OK;
}

vcattn_code validate_attention(const vcattn_attention_params* params, Problem& problem, vcattn_message* message) {
  vcattn_code code = validate_common(params, message);
  if (code != VCATTN_OK) return code;
  const vcattn_attention_params& p = *params;
  for (const auto& [tensor, name] : {std::pair{&p.q, "q"}, std::pair{&p.k, "k"}, std::pair{&p.out, "out"}}) {
    code = validate_tensor(*tensor, name, message);
    if (code != VCATTN_OK) return code;
  }
  code = validate_shapes(p, message);
  if (code == VCATTN_OK) code = validate_segments(p, true, message);
  if (code != VCATTN_OK) return code;
  code = validate_softmax_scale(p.softmax_scale, message);
  if (code == VCATTN_OK && p.permutation == nullptr) code = validate_order(p, message);
  if (code != VCATTN_OK) return code;
  if (self_overlapping(p.out.shape, p.out.stride, 4)) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "out: strides [{}] make elements overlap",
                fmt::join(p.out.stride, ", "));
  }
  const Range out = memory_of(p.out);
  for (const auto& [tensor, name] : {std::pair{&p.q, "q"}, std::pair{&p.k, "k"}, std::pair{&p.v, "v"}}) {
    if (out.meets(memory_of(*tensor))) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "out: its memory must not overlap {}", name);
    }
  }
  Range lse;
  code = validate_lse(p, out, lse, message);
  if (code == VCATTN_OK) code = validate_rope(p, {p.rope_q, "rope_q", p.q, {out, lse}}, message);
  if (code == VCATTN_OK) code = validate_rope(p, {p.rope_k, "rope_k", p.k, {out, lse}}, message);
  if (code == VCATTN_OK) code = validate_alignment(p.permutation, "permutation", message);
  if (code != VCATTN_OK) return code;
  fill_problem(p, problem);
  problem.seqlen_q = p.q.shape[1];
  problem.num_heads = p.q.shape[2];
  return VCATTN_OK;
}

vcattn_code validate_grouping(const vcattn_attention_params* params, Problem& problem, vcattn_message* message) {
  vcattn_code code = validate_common(params, message);
  if (code == VCATTN_OK) code = validate_segments(*params, false, message);
  if (code == VCATTN_OK) code = validate_order(*params, message);
  if (code != VCATTN_OK) return code;
  fill_problem(*params, problem);
  return VCATTN_OK;
}

vcattn_code validate_alignment(const void* pointer, const char* name, vcattn_message* message) {
  if (reinterpret_cast<uintptr_t>(pointer) % 4 == 0) return VCATTN_OK;
  return fail(message, VCATTN_INVALID_ARGUMENT, "{} is aligned to its element size of 4 bytes", name);
}

vcattn_code validate_workspace(const void* workspace, size_t given, size_t needed, vcattn_message* message) {
  if (workspace == nullptr)
    return fail(message, VCATTN_WORKSPACE_TOO_SMALL, "workspace is NULL; {} bytes are needed", needed);
  if (reinterpret_cast<uintptr_t>(workspace) % VCATTN_WORKSPACE_ALIGNMENT != 0) {
    return fail(message, VCATTN_WORKSPACE_TOO_SMALL, "workspace is aligned to {} bytes", VCATTN_WORKSPACE_ALIGNMENT);
  }
  if (given < needed) {
    return fail(message, VCATTN_WORKSPACE_TOO_SMALL, "workspace holds {} bytes; {} are needed", given, needed);
  }
  return VCATTN_OK;
}

}  // namespace vcattn
