// The C ABI: validate, plan, check the workspace, run. No exception leaves it.
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <exception>

#include "core/message.h"
#include "core/validate.h"
#include "cpu/attention.h"
#include "cpu/plan.h"
#include "cpu/preprocess.h"
#include "vcattn/vcattn.h"

namespace vcattn {
namespace {

// Runs `work` on at most `threads` threads, and no more than the process may use: asked for more, the scheduler would
// print a warning. It may throw (no memory, no threads).
template <typename Work>
vcattn_code run(int threads, vcattn_message* message, Work work) {
  try {
    using oneapi::tbb::global_control;
    const size_t usable = global_control::active_value(global_control::max_allowed_parallelism);
    oneapi::tbb::task_arena arena(std::min(threads, static_cast<int>(usable)));
    return arena.execute(work);
  } catch (const std::exception& error) {
    return fail(message, VCATTN_INTERNAL, "the task scheduler failed: {:.200}", error.what());
  } catch (...) {
    return fail(message, VCATTN_INTERNAL, "the task scheduler failed");
  }
}

}  // namespace
}  // namespace vcattn

using namespace vcattn;

extern "C" {

void vcattn_attention_params_init(vcattn_attention_params* params) {
  *params = vcattn_attention_params{};
  params->struct_size = sizeof *params;
  vcattn_recipe_by_name("accurate", &params->recipe, nullptr);
}

vcattn_code vcattn_attention_workspace_size(const vcattn_attention_params* params, size_t* bytes,
                                            vcattn_message* message) {
  Problem problem;
  const vcattn_code code = validate_attention(params, problem, message);
  if (code != VCATTN_OK) return code;
  if (bytes == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = cpu::make_plan(problem, nullptr).bytes;
  return VCATTN_OK;
}

vcattn_code vcattn_attention(const vcattn_attention_params* params, void* workspace, size_t workspace_bytes,
                             vcattn_message* message) {
  Problem problem;
  vcattn_code code = validate_attention(params, problem, message);
  if (code != VCATTN_OK) return code;
  const size_t needed = cpu::make_plan(problem, nullptr).bytes;
  code = validate_workspace(workspace, workspace_bytes, needed, message);
  if (code != VCATTN_OK) return code;
  return run(problem.num_threads, message, [&] {
    cpu::Plan plan = cpu::make_plan(problem, static_cast<std::byte*>(workspace));
    vcattn_code found = cpu::check_finite(problem, message);
    if (found == VCATTN_OK) found = cpu::check_permutation(problem, plan, message);
    if (found != VCATTN_OK) return found;
    cpu::preprocess(problem, plan);
    return cpu::attend(problem, plan, message);
  });
}

vcattn_code vcattn_group_workspace_size(const vcattn_attention_params* params, size_t* bytes, vcattn_message* message) {
  Problem problem;
  const vcattn_code code = validate_grouping(params, problem, message);
  if (code != VCATTN_OK) return code;
  if (bytes == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = cpu::make_group_plan(problem, nullptr).bytes;
  return VCATTN_OK;
}

vcattn_code vcattn_group(const vcattn_attention_params* params, int32_t warm, float* centroids, int32_t* permutation,
                         void* workspace, size_t workspace_bytes, vcattn_message* message) {
  Problem problem;
  vcattn_code code = validate_grouping(params, problem, message);
  if (code != VCATTN_OK) return code;
  if (permutation == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "permutation is NULL");
  if (warm != 0 && centroids == nullptr) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "a warm start needs centroids; found NULL");
  }
  const size_t needed = cpu::make_group_plan(problem, nullptr).bytes;
  code = validate_workspace(workspace, workspace_bytes, needed, message);
  if (code != VCATTN_OK) return code;
  return run(problem.num_threads, message, [&] {
    const vcattn_code found = cpu::check_finite_values(problem, message);
    if (found != VCATTN_OK) return found;
    cpu::group(problem, cpu::make_group_plan(problem, static_cast<std::byte*>(workspace)), warm != 0, centroids,
               permutation);
    return VCATTN_OK;
  });
}

}  // extern "C"
