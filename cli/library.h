// The library's calls as the commands use them: failures become exceptions, workspaces are allocated (vcattn.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "vcattn/vcattn.hpp"

namespace vcattn::cli {

// The library's own words, which know tensors but not files.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `work`, putting the file `source` before the library's words.
template <typename Work>
auto naming_source(const std::string& source, Work work) {
  try {
    return work();
  } catch (const Refusal& error) {
    throw std::runtime_error(source + ": " + error.what());
  }
}

// Throws Refusal with the message unless `code` is VCATTN_OK.
void check(vcattn_code code, const vcattn_message& message);

// The recipe `name` with each of `changes` ("field=value") applied. An unknown name is answered with the known ones.
vcattn_recipe make_recipe(const std::string& name, const std::vector<std::string>& changes = {});
std::vector<std::string> recipe_names();

struct AttentionRun {
  double seconds;  // of the whole call: preprocessing and attention, without allocation
  size_t workspace_bytes;
};

// vcattn_attention with a workspace of its own.
AttentionRun run_attention(const vcattn_attention_params& params);

// The same, one (batch, KV head) after the other where the call has more than `max_flops`: they do not depend on one
// another, so the output is the same to the bit. progress(done, total) is called before each part and at the end.
AttentionRun run_attention_by_head(const vcattn_attention_params& params, double max_flops,
                                   const std::function<void(int64_t done, int64_t total)>& progress);

// "auto" or "cpu"; throws for others, naming these.
vcattn_backend backend_by_name(const std::string& name);
// The back end that serves a call with `backend`.
std::string backend_name(vcattn_backend backend);

// Floating-point operations of attention, counted as 4 seqlen_q seqlen_kv head_dim num_heads batch.
double attention_flops(const vcattn_attention_params& params);

}  // namespace vcattn::cli
