// What the files of validation share. Internal to src/core.
#pragma once

#include <cstdint>

#include "vcattn/vcattn.h"

namespace vcattn {

// Addresses; an empty one meets none.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// A grid among `seqlen` tokens; `need`: what is said where it has no extents.
vcattn_code validate_grid(const vcattn_video_grid& grid, const char* need, int64_t seqlen, vcattn_message* message);

// rope_q or rope_k of a call whose tensors hold together.
struct RopeArgument {
  const vcattn_rope& rope;
  const char* name;
  const vcattn_tensor& x;  // what it rotates
  Range written[2];        // out and lse
};
vcattn_code validate_rope(const vcattn_attention_params& params, const RopeArgument& argument, vcattn_message* message);

}  // namespace vcattn
