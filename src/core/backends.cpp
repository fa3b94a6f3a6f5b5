// The back ends of this build, in order of preference.
#include <hwy/highway.h>
#include <hwy/targets.h>

#include <string_view>

#include "core/message.h"
#include "vcattn/vcattn.h"

#define VCATTN_STRING2(x) #x
#define VCATTN_STRING(x) VCATTN_STRING2(x)

namespace vcattn {
namespace {

struct Backend {
  const char* name;
  // Whether it can run here; `reason` says on what, or why not.
  bool (*available)(vcattn_message* reason);
};

bool cpu_available(vcattn_message* reason) {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;      // of those that are compiled in
  const std::string_view name = hwy::TargetName(targets & -targets);  // the lowest bit is the best
  set_message(reason, "runs here with {}", name.starts_with("AVX3") ? "AVX-512" : name);
  return true;
}

constexpr Backend kBackends[] = {{"cpu", cpu_available}};

}  // namespace
}  // namespace vcattn

extern "C" {

const char* vcattn_version(void) {
  return VCATTN_STRING(VCATTN_VERSION_MAJOR) "." VCATTN_STRING(VCATTN_VERSION_MINOR) "." VCATTN_STRING(
      VCATTN_VERSION_PATCH);
}

const char* vcattn_backend_info(int32_t index, int32_t* available, vcattn_message* reason) {
  if (index < 0 || index >= static_cast<int32_t>(std::size(vcattn::kBackends))) return nullptr;
  const vcattn::Backend& backend = vcattn::kBackends[index];
  const bool runs = backend.available(reason);
  if (available != nullptr) *available = runs ? 1 : 0;
  return backend.name;
}

}  // extern "C"
