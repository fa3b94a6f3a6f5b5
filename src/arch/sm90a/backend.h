// The sm_90a back end: NVIDIA Hopper. core/backend.h says what each function does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/validate.h"
#include "vcattn/vcattn.h"

namespace vcattn::sm90a {

bool available(vcattn_message* reason);
vcattn_code attention_bytes(const Problem& problem, size_t& bytes, vcattn_message* message);
vcattn_code attend(const Problem& problem, void* workspace, vcattn_message* message);
int64_t break_even_seqlen(const Problem& problem);
vcattn_code group_bytes(const Problem& problem, size_t& bytes, vcattn_message* message);
vcattn_code group(const Problem& problem, bool warm, float* centroids, int32_t* permutation, void* workspace,
                  vcattn_message* message);

}  // namespace vcattn::sm90a
