// The sm_90a back end: NVIDIA Hopper.
#pragma once

#include "core/backend.h"

namespace vcattn::sm90a {

extern const Backend kBackend;

}  // namespace vcattn::sm90a
