// What a back end is to the C ABI, and the choice among those of this build.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/validate.h"
#include "vcattn/vcattn.h"

namespace vcattn {

struct Backend {
  const char* name;
  vcattn_backend id;
  vcattn_memory memory;  // where its tensors lie
  // Whether it can run here; `reason` says on what, or why not.
  bool (*available)(vcattn_message* reason);
  // The rest is called where it can. Each refuses what the back end cannot serve, naming the unmet condition.
  vcattn_code (*attention_bytes)(const Problem& problem, size_t& bytes, vcattn_message* message) = nullptr;
  vcattn_code (*attend)(const Problem& problem, void* workspace, vcattn_message* message) = nullptr;
  // Of a problem that it serves, for vcattn_break_even_seqlen.
  int64_t (*break_even_seqlen)(const Problem& problem) = nullptr;
  vcattn_code (*group_bytes)(const Problem& problem, size_t& bytes, vcattn_message* message) = nullptr;
  vcattn_code (*group)(const Problem& problem, bool warm, float* centroids, int32_t* permutation, void* workspace,
                       vcattn_message* message) = nullptr;
};

// The back end that params->backend and params->memory ask for.
vcattn_code choose_backend(const vcattn_attention_params& params, const Backend*& backend, vcattn_message* message);

}  // namespace vcattn
