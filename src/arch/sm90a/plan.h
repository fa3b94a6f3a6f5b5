// Where everything of one call lies in the caller's workspace.
#pragma once

#include <cstddef>

#include "arch/sm90a/config.h"
#include "core/arena.h"
#include "core/validate.h"
#include "preprocess/group.h"
#include "preprocess/prepare.h"

namespace vcattn::sm90a {

struct Plan {
  QuantizedQkv qkv;
  PrepareScratch prepare;
  bool groups;           // the call makes its own permutation:
  int32_t* permutation;  // [batch, num_heads_kv, seqlen_kv]
  GroupScratch group;    // in the memory that qkv takes afterwards
  size_t bytes;          // of the whole
};

// The operands of heads stored with `dim` channels, in blocks of so many queries, with block means or without. What a
// call does not use has no memory behind its pointer.
QuantizedQkv take_operands(const Problem& problem, int dim, int block_rows, bool means, Arena& arena);

// With a null workspace only `groups` and `bytes` are meaningful.
Plan make_plan(const Problem& problem, const Config& config, std::byte* workspace);

// What the attention kernel is given: the operands, and where the caller wants its results.
AttentionParams attention_params(const Problem& problem, const QuantizedQkv& qkv);

}  // namespace vcattn::sm90a
