// The CPU back end: every recipe, on the host.
#pragma once

#include "core/backend.h"

namespace vcattn::cpu {

extern const Backend kBackend;

}  // namespace vcattn::cpu
