// The back ends of this build.
#include <algorithm>
#include <iterator>

#include "core/backend.h"
#include "core/message.h"
#include "cpu/backend.h"
#include "vcattn/vcattn.h"
#if VCATTN_CUDA
#include "arch/sm90a/backend.h"
#endif

#define VCATTN_STRING2(x) #x
#define VCATTN_STRING(x) VCATTN_STRING2(x)

namespace vcattn {
namespace {

#if VCATTN_CUDA
using sm90a::kBackend;
#else
bool built_without_cuda(vcattn_message* reason) {
  set_message(reason, "this build has no CUDA: when it was configured, nvcc was not found or VCATTN_CUDA was OFF");
  return false;
}

constexpr Backend kBackend = {
    .name = "sm90a", .id = VCATTN_BACKEND_SM90A, .memory = VCATTN_MEMORY_CUDA, .available = built_without_cuda};
#endif

constexpr const Backend* kBackends[] = {&cpu::kBackend, &kBackend};

constexpr const char* kMemories[] = {"host", "CUDA"};

}  // namespace

vcattn_code choose_backend(const vcattn_attention_params& params, const Backend*& chosen, vcattn_message* message) {
  if (params.memory != VCATTN_MEMORY_HOST && params.memory != VCATTN_MEMORY_CUDA) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "memory is 0 (host) or 1 (CUDA); found {}", params.memory);
  }
  const bool automatic = params.backend == VCATTN_BACKEND_AUTO;
  const auto* place = std::find_if(std::begin(kBackends), std::end(kBackends), [&](const Backend* b) {
    return automatic ? b->memory == params.memory : b->id == params.backend;
  });
  if (place == std::end(kBackends)) {
    return fail(message, VCATTN_UNSUPPORTED, "backend {} is not known", params.backend);
  }
  const Backend* found = *place;
  if (found->memory != params.memory) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "backend {} takes {} memory; memory says {}", found->name,
                kMemories[found->memory], kMemories[params.memory]);
  }
  vcattn_message reason = {};
  if (!found->available(&reason)) {
    return fail(message, VCATTN_UNSUPPORTED, "backend {} cannot run here: {}", found->name, reason.text);
  }
  chosen = found;
  return VCATTN_OK;
}

}  // namespace vcattn

extern "C" {

const char* vcattn_version(void) {
  return VCATTN_STRING(VCATTN_VERSION_MAJOR) "." VCATTN_STRING(VCATTN_VERSION_MINOR) "." VCATTN_STRING(
      VCATTN_VERSION_PATCH);
}

const char* vcattn_backend_info(int32_t index, int32_t* available, vcattn_message* reason) {
  if (index < 0 || index >= static_cast<int32_t>(std::size(vcattn::kBackends))) return nullptr;
  const vcattn::Backend& backend = *vcattn::kBackends[index];
  const bool runs = backend.available(reason);
  if (available != nullptr) *available = runs ? 1 : 0;
  return backend.name;
}

}  // extern "C"
