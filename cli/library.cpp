#include "library.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <stdexcept>

namespace vcattn::cli {

void check(vcattn_code code, const vcattn_message& message) {
  if (code != VCATTN_OK) throw Refusal(message.text);
}

vcattn_recipe make_recipe(const std::string& name, const std::vector<std::string>& changes) {
  vcattn_recipe recipe;
  vcattn_message message = {};
  check(vcattn_recipe_by_name(name.c_str(), &recipe, &message), message);
  for (const std::string& change : changes) {
    const size_t equals = change.find('=');
    if (equals == std::string::npos) {
      throw std::runtime_error(fmt::format("expected field=value, found {:?}", change));
    }
    const std::string field = change.substr(0, equals), value = change.substr(equals + 1);
    check(vcattn_recipe_set(&recipe, field.c_str(), value.c_str(), &message), message);
  }
  return recipe;
}

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (int32_t i = 0; i < vcattn_recipe_count(); ++i) names.emplace_back(vcattn_recipe_name(i));
  return names;
}

AttentionRun run_attention(const vcattn_attention_params& params) {
  size_t bytes = 0;
  vcattn_message message = {};
  check(vcattn_attention_workspace_size(&params, &bytes, &message), message);
  Workspace memory;
  const std::span<std::byte> workspace = memory.at_least(bytes);
  const auto start = std::chrono::steady_clock::now();
  check(vcattn_attention(&params, workspace.data(), workspace.size(), &message), message);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return {.seconds = elapsed.count(), .workspace_bytes = bytes};
}

namespace {

// `count` indices of one axis, from `first`.
void narrow(vcattn_tensor& tensor, int axis, int64_t first, int64_t count) {
  const int64_t size = tensor.dtype == VCATTN_FP32 ? 4 : 2;
  tensor.data = static_cast<std::byte*>(tensor.data) + first * tensor.stride[axis] * size;
  tensor.shape[axis] = count;
}

}  // namespace

AttentionRun run_attention_by_head(const vcattn_attention_params& params, double max_flops,
                                   const std::function<void(int64_t done, int64_t total)>& progress) {
  size_t bytes = 0;
  vcattn_message message = {};
  check(vcattn_attention_workspace_size(&params, &bytes, &message), message);  // the whole call's own refusals
  const int64_t batch = params.v.shape[0], heads_kv = params.v.shape[2], group = params.q.shape[2] / heads_kv;
  if (attention_flops(params) <= max_flops || batch * heads_kv == 1) return run_attention(params);
  AttentionRun total = {.seconds = 0.0, .workspace_bytes = 0};
  for (int64_t part = 0; part < batch * heads_kv; ++part) {
    progress(part, batch * heads_kv);
    const int64_t b = part / heads_kv, head = part % heads_kv;
    vcattn_attention_params one = params;
    for (vcattn_tensor* t : {&one.q, &one.k, &one.v, &one.out}) narrow(*t, 0, b, 1);
    for (vcattn_tensor* t : {&one.q, &one.out}) narrow(*t, 2, head * group, group);
    for (vcattn_tensor* t : {&one.k, &one.v}) narrow(*t, 2, head, 1);
    if (one.lse != nullptr) one.lse += b * one.lse_stride[0] + head * group * one.lse_stride[2];
    try {
      const AttentionRun run = run_attention(one);
      total.seconds += run.seconds;
      total.workspace_bytes = std::max(total.workspace_bytes, run.workspace_bytes);
    } catch (const std::runtime_error&) {
      run_attention(params);  // refused for the same reason, but in the coordinates of the whole
      throw;
    }
  }
  progress(batch * heads_kv, batch * heads_kv);
  return total;
}

vcattn_backend backend_by_name(const std::string& name) {
  if (name == "auto") return VCATTN_BACKEND_AUTO;
  if (name == "cpu") return VCATTN_BACKEND_CPU;
  throw std::runtime_error(fmt::format("expected back end auto or cpu, found {:?}", name));
}

std::string backend_name(vcattn_backend backend) {
  if (backend == VCATTN_BACKEND_CPU) return "cpu";
  int32_t available = 0;
  for (int32_t i = 0;; ++i) {
    const char* name = vcattn_backend_info(i, &available, nullptr);
    if (name == nullptr) throw std::runtime_error("no back end is available here; vcattn info says why");
    if (available != 0) return name;
  }
}

double attention_flops(const vcattn_attention_params& params) {
  const int64_t* q = params.q.shape;
  return 4.0 * static_cast<double>(q[1]) * static_cast<double>(params.k.shape[1]) * static_cast<double>(q[3]) *
         static_cast<double>(q[2]) * static_cast<double>(q[0]);
}

}  // namespace vcattn::cli
