// vcattn: the C++20 face of the C ABI in vcattn.h. Header only; the same structs, values instead of out-parameters,
// memory that frees itself. Nothing throws but what the standard library throws when memory is short.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "vcattn/vcattn.h"

namespace vcattn {

// What a call came to. `message` names the condition that was not met; empty where all is well.
struct [[nodiscard]] Status {
  vcattn_code code = VCATTN_OK;
  std::string message;

  bool ok() const { return code == VCATTN_OK; }
};

namespace detail {

// Runs a C call that reports through a vcattn_message.
template <typename Call>
Status status_of(Call call) {
  vcattn_message message{};
  const vcattn_code code = call(&message);
  return {code, message.text};
}

}  // namespace detail

// Storage order of a dense tensor.
enum class Layout {
  kBSHD,  // [batch, seqlen, num_heads, head_dim]
  kBHSD   // [batch, num_heads, seqlen, head_dim]
};

struct Shape {
  int64_t batch, seqlen, num_heads, head_dim;
};

// Describes dense memory; for views, change the strides of the result.
inline vcattn_tensor make_tensor(void* data, vcattn_dtype dtype, const Shape& s, Layout layout = Layout::kBSHD) {
  vcattn_tensor t{};
  t.data = data;
  t.dtype = dtype;
  const bool bshd = layout == Layout::kBSHD;
  const std::array<int64_t, 4> shape = {s.batch, s.seqlen, s.num_heads, s.head_dim};
  const std::array<int64_t, 4> stride = {s.seqlen * s.num_heads * s.head_dim,
                                         bshd ? s.num_heads * s.head_dim : s.head_dim,
                                         bshd ? s.head_dim : s.seqlen * s.head_dim, 1};
  for (size_t axis = 0; axis < 4; ++axis) {
    t.shape[axis] = shape[axis];
    t.stride[axis] = stride[axis];
  }
  return t;
}

// An input; the library never writes through it.
inline vcattn_tensor make_tensor(const void* data, vcattn_dtype dtype, const Shape& s, Layout layout = Layout::kBSHD) {
  return make_tensor(const_cast<void*>(data), dtype, s, layout);
}

// rope_q or rope_k with dense tables [seqlen, head_dim / 2] that all batch entries and heads share; for others, change
// the strides of the result. head_dim: of q and k, which nothing can check from here.
inline vcattn_rope make_rope(vcattn_rope_pairing pairing, const float* cos, const float* sin, int64_t head_dim) {
  vcattn_rope rope{};
  rope.pairing = pairing;
  rope.tables = VCATTN_ROPE_PER_TOKEN;
  rope.cos[0] = cos;
  rope.sin[0] = sin;
  rope.stride[1] = head_dim / 2;
  rope.stride[3] = 1;
  return rope;
}

// One table [extent, pairs] each for the frames, the height and the width of params.grid.
inline vcattn_rope make_rope(vcattn_rope_pairing pairing, const std::array<const float*, 3>& cos,
                             const std::array<const float*, 3>& sin, const std::array<int64_t, 3>& pairs) {
  vcattn_rope rope{};
  rope.pairing = pairing;
  rope.tables = VCATTN_ROPE_PER_AXIS;
  for (size_t axis = 0; axis < 3; ++axis) {
    rope.cos[axis] = cos[axis];
    rope.sin[axis] = sin[axis];
    rope.pairs[axis] = pairs[axis];
  }
  return rope;
}

// Parameters with the defaults of vcattn_attention_params_init: recipe `accurate`, softmax_scale 1/sqrt(head_dim).
inline vcattn_attention_params make_params() {
  vcattn_attention_params params;
  vcattn_attention_params_init(&params);
  return params;
}

inline Status find_recipe(const std::string& name, vcattn_recipe& recipe) {
  return detail::status_of([&](vcattn_message* m) { return vcattn_recipe_by_name(name.c_str(), &recipe, m); });
}

inline Status set_recipe_field(vcattn_recipe& recipe, const std::string& field, const std::string& value) {
  return detail::status_of(
      [&](vcattn_message* m) { return vcattn_recipe_set(&recipe, field.c_str(), value.c_str(), m); });
}

inline std::string describe(const vcattn_recipe& recipe) {
  std::string line(vcattn_recipe_describe(&recipe, nullptr, 0), '\0');
  vcattn_recipe_describe(&recipe, line.data(), line.size() + 1);
  return line;
}

// Aligned memory that grows and is kept between calls.
class Workspace {
 public:
  // At least `bytes`; contents are not kept when it grows. Throws std::bad_alloc.
  std::span<std::byte> at_least(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      const size_t rounded =
          (bytes + VCATTN_WORKSPACE_ALIGNMENT - 1) / VCATTN_WORKSPACE_ALIGNMENT * VCATTN_WORKSPACE_ALIGNMENT;
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(VCATTN_WORKSPACE_ALIGNMENT, rounded)));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
    }
    return {memory_.get(), size_};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

inline Status attention_workspace_size(const vcattn_attention_params& params, size_t& bytes) {
  return detail::status_of([&](vcattn_message* m) { return vcattn_attention_workspace_size(&params, &bytes, m); });
}

// Calls of at most `seqlen` queries or keys are faster in BF16.
inline Status break_even_seqlen(const vcattn_attention_params& params, int64_t& seqlen) {
  return detail::status_of([&](vcattn_message* m) { return vcattn_break_even_seqlen(&params, &seqlen, m); });
}

inline Status attention(const vcattn_attention_params& params, std::span<std::byte> workspace) {
  return detail::status_of(
      [&](vcattn_message* m) { return vcattn_attention(&params, workspace.data(), workspace.size(), m); });
}

// The same with memory from `workspace`, which may grow.
inline Status attention(const vcattn_attention_params& params, Workspace& workspace) {
  size_t bytes = 0;
  Status status = attention_workspace_size(params, bytes);
  return status.ok() ? attention(params, workspace.at_least(bytes)) : status;
}

// vcattn_group with memory from `workspace`. `centroids` may be empty for a cold start.
inline Status group(const vcattn_attention_params& params, bool warm, std::span<float> centroids,
                    std::span<int32_t> permutation, Workspace& workspace) {
  size_t bytes = 0;
  Status status = detail::status_of([&](vcattn_message* m) { return vcattn_group_workspace_size(&params, &bytes, m); });
  if (!status.ok()) return status;
  const std::span<std::byte> memory = workspace.at_least(bytes);
  return detail::status_of([&](vcattn_message* m) {
    return vcattn_group(&params, warm ? 1 : 0, centroids.empty() ? nullptr : centroids.data(), permutation.data(),
                        memory.data(), memory.size(), m);
  });
}

inline Status schedule_at(const vcattn_schedule& schedule, int32_t step, vcattn_schedule_step& result) {
  return detail::status_of([&](vcattn_message* m) { return vcattn_schedule_at(&schedule, step, &result, m); });
}

// The order of the values that the steps of one stream of calls share: one layer of one request, CFG branch, expert.
// The caller names the stream by a key of its own; a call with another key, other shapes or another grouping is an
// error and not a reuse, and so is a step before the last one (reset() between requests). With a key mask, the mask
// must be the same at all steps: its contents are not looked at.
class GroupingState {
 public:
  // Elements that the two arrays of a state need for these parameters.
  static size_t permutation_size(const vcattn_attention_params& p) {
    return static_cast<size_t>(p.v.shape[0] * p.v.shape[2] * p.v.shape[1]);
  }
  static size_t centroids_size(const vcattn_attention_params& p) {
    const int64_t sequences = p.cu_seqlens_kv != nullptr ? p.num_segments : p.v.shape[0];
    return static_cast<size_t>(sequences * p.v.shape[2] * p.recipe.grouping.clusters * p.v.shape[3]);
  }

  // `permutation` and `centroids` are the caller's, as long as the state; they lie where params.memory says.
  GroupingState(uint64_t key, const vcattn_schedule& schedule, int32_t* permutation, float* centroids)
      : key_(key), schedule_(schedule), permutation_(permutation), centroids_(centroids) {}

  // `ready` becomes `asked` with the order to use at `step`, made now where the schedule says so or where none exists
  // yet, and without means where the schedule does not smooth. `done`: what was done. workspace: as vcattn_group asks.
  Status prepare(uint64_t key, int32_t step, const vcattn_attention_params& asked, std::span<std::byte> workspace,
                 vcattn_attention_params& ready, vcattn_schedule_step& done) {
    Status status = check(key, step, asked);
    if (status.ok()) status = schedule_at(schedule_, step, done);
    if (!status.ok()) return status;
    ready = asked;
    ready.permutation = nullptr;
    done.regroup = done.smooth != 0 && (made_at_ < 0 || outdated(step)) ? 1 : 0;
    done.warm = done.regroup != 0 && made_at_ >= 0 ? 1 : 0;
    if (done.regroup != 0) {
      status = detail::status_of([&](vcattn_message* m) {
        return vcattn_group(&ready, done.warm, centroids_, permutation_, workspace.data(), workspace.size(), m);
      });
      if (!status.ok()) return status;
      made_at_ = step;
      made_for_ = identity(asked);
    }
    last_step_ = step;
    if (done.smooth == 0) ready.recipe.mean_rows = ready.recipe.mean_centred = 0;
    if (made_at_ >= 0) {
      ready.permutation = permutation_;
    } else {
      ready.recipe.v_order = VCATTN_ORDER_SEQUENCE;
    }
    return status;
  }

  // The same with memory from `workspace`, which may grow.
  Status prepare(uint64_t key, int32_t step, const vcattn_attention_params& asked, Workspace& workspace,
                 vcattn_attention_params& ready, vcattn_schedule_step& done) {
    size_t bytes = 0;
    Status status =
        detail::status_of([&](vcattn_message* m) { return vcattn_group_workspace_size(&asked, &bytes, m); });
    return status.ok() ? prepare(key, step, asked, workspace.at_least(bytes), ready, done) : status;
  }

  // Forgets the order: for a new request.
  void reset() { made_at_ = last_step_ = -1; }

 private:
  // What an order depends on, besides the values: by name, then the bounds of the segments.
  static constexpr std::array<const char*, 17> kNames = {
      "memory",  "batch",       "seqlen_kv",   "num_heads_kv", "head_dim",        "num_segments",
      "v_order", "key mask",    "clusters",    "iterations",   "warm_iterations", "seeding",
      "seed",    "grid.frames", "grid.height", "grid.width",   "grid.first_token"};
  static std::vector<int64_t> identity(const vcattn_attention_params& p) {
    const bool packed = p.cu_seqlens_kv != nullptr;
    const vcattn_grouping& g = p.recipe.grouping;
    std::vector<int64_t> facts = {p.memory,
                                  p.v.shape[0],
                                  p.v.shape[1],
                                  p.v.shape[2],
                                  p.v.shape[3],
                                  packed ? p.num_segments : 0,
                                  p.recipe.v_order,
                                  p.key_mask != nullptr,
                                  g.clusters,
                                  g.iterations,
                                  g.warm_iterations,
                                  g.seeding,
                                  static_cast<int64_t>(g.seed),
                                  p.grid.frames,
                                  p.grid.height,
                                  p.grid.width,
                                  p.grid.first_token};
    if (packed) facts.insert(facts.end(), p.cu_seqlens_kv, p.cu_seqlens_kv + p.num_segments + 1);
    return facts;
  }

  // Whether the schedule had an order made after the one that is held, up to `step`: a step that was left out, or whose
  // grouping failed, is made up for.
  bool outdated(int32_t step) const {
    for (int32_t s = made_at_ + 1; s <= step; ++s) {
      vcattn_schedule_step at;
      if (schedule_at(schedule_, s, at).ok() && at.regroup != 0) return true;
    }
    return false;
  }

  Status check(uint64_t key, int32_t step, const vcattn_attention_params& asked) const {
    const auto refused = [](const std::string& text) { return Status{VCATTN_INVALID_ARGUMENT, text}; };
    if (key != key_) {
      return refused("the grouping state of key " + std::to_string(key_) + " serves that key; found " +
                     std::to_string(key));
    }
    if (step < last_step_) {
      return refused("the grouping state has seen step " + std::to_string(last_step_) + "; found step " +
                     std::to_string(step) + " (reset it between requests)");
    }
    const std::vector<int64_t> found = identity(asked);
    for (size_t i = 0; made_at_ >= 0 && i < std::min(found.size(), made_for_.size()); ++i) {
      if (found[i] == made_for_[i]) continue;
      const std::string name =
          i < kNames.size() ? kNames[i] : "cu_seqlens_kv[" + std::to_string(i - kNames.size()) + "]";
      return refused("the grouping state was made for " + name + " " + std::to_string(made_for_[i]) + "; found " +
                     std::to_string(found[i]));
    }
    return {};
  }

  uint64_t key_;
  vcattn_schedule schedule_;
  int32_t* permutation_;
  float* centroids_;
  int32_t made_at_ = -1;    // step of the order that is held; -1: none
  int32_t last_step_ = -1;  // that was asked for
  std::vector<int64_t> made_for_;
};

}  // namespace vcattn
