// vcattn: the C++20 face of the C ABI in vcattn.h. Header only; the same structs, values instead of out-parameters,
// memory that frees itself. Nothing throws but what the standard library throws when memory is short.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>

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

}  // namespace vcattn
