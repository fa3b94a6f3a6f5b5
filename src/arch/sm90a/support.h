// Which requests the sm_90a kernels serve.
#pragma once

#include "arch/sm90a/config.h"
#include "core/validate.h"
#include "vcattn/vcattn.h"

namespace vcattn::sm90a {

// The kernel's configuration for the problem, or a refusal that names the first condition that is not met.
vcattn_code choose_config(const Problem& problem, Config& config, vcattn_message* message);

}  // namespace vcattn::sm90a
