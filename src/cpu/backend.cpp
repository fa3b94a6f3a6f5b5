#include "cpu/backend.h"

#include <hwy/highway.h>
#include <hwy/targets.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "core/message.h"
#include "cpu/attention.h"
#include "cpu/plan.h"
#include "cpu/preprocess.h"

namespace vcattn::cpu {
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

bool available(vcattn_message* reason) {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;      // of those that are compiled in
  const std::string_view name = hwy::TargetName(targets & -targets);  // the lowest bit is the best
  set_message(reason, "runs here with {}", name.starts_with("AVX3") ? "AVX-512" : name);
  return true;
}

vcattn_code attention_bytes(const Problem& problem, size_t& bytes, vcattn_message*) {
  bytes = make_plan(problem, nullptr).bytes;
  return VCATTN_OK;
}

vcattn_code attend(const Problem& problem, void* workspace, vcattn_message* message) {
  return run(problem.num_threads, message, [&] {
    Plan plan = make_plan(problem, static_cast<std::byte*>(workspace));
    vcattn_code found = check_finite(problem, message);
    if (found == VCATTN_OK) found = check_permutation(problem, plan, message);
    if (found != VCATTN_OK) return found;
    preprocess(problem, plan);
    return attend(problem, plan, message);
  });
}

// Slower than any BF16 attention: it is what results are held against.
int64_t break_even_seqlen(const Problem&) { return 0; }

vcattn_code group_bytes(const Problem& problem, size_t& bytes, vcattn_message*) {
  bytes = make_group_plan(problem, nullptr).bytes;
  return VCATTN_OK;
}

vcattn_code group(const Problem& problem, bool warm, float* centroids, int32_t* permutation, void* workspace,
                  vcattn_message* message) {
  return run(problem.num_threads, message, [&] {
    const vcattn_code found = check_finite_values(problem, message);
    if (found != VCATTN_OK) return found;
    group(problem, make_group_plan(problem, static_cast<std::byte*>(workspace)), warm, centroids, permutation);
    return VCATTN_OK;
  });
}

}  // namespace

const Backend kBackend = {.name = "cpu",
                          .id = VCATTN_BACKEND_CPU,
                          .memory = VCATTN_MEMORY_HOST,
                          .available = available,
                          .attention_bytes = attention_bytes,
                          .attend = attend,
                          .break_even_seqlen = break_even_seqlen,
                          .group_bytes = group_bytes,
                          .group = group};

}  // namespace vcattn::cpu
