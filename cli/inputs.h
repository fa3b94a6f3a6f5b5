// q, k and v from files, as every command that runs attention takes them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/tensor_file.h"
#include "vcattn/vcattn.h"

namespace vcattn::cli {

// Order of the axes of a file's tensors. Rank 3 leaves out the batch.
enum class Layout { kBshd, kBhsd };  // [batch, seqlen, num_heads, head_dim], [batch, num_heads, seqlen, head_dim]

const char* layout_name(Layout layout);  // "BSHD", "BHSD"
// What safetensors metadata `layout` says: "[batch, heads, tokens, head_dim]"; rank 3 without the batch.
std::string layout_metadata(Layout layout, size_t rank);

// What the options say; what they leave open comes from the file's metadata, then from a default.
struct InputOptions {
  std::string file;                                  // holds all three tensors
  std::string q_file, k_file, v_file;                // or one file each
  std::vector<std::string> names = {"q", "k", "v"};  // of the tensors in `file`
  std::string layout;                                // "BSHD", "BHSD" or empty; metadata `layout`; BSHD
  std::string grid;                                  // "32x16x32" or empty; metadata `video_grid`; no grid
  std::optional<int64_t> text_tokens;                // tokens before the grid; metadata `text_tokens`; 0
  std::optional<double> scale;                       // of the softmax; metadata `softmax_scale`; 1 / sqrt(head_dim)
  bool allow_nonfinite = false;
};

// Adds FILE, --q, --k, --v, --names, --layout, --grid, --text-tokens and --scale.
void add_input_options(CLI::App& command, InputOptions& options);

struct Inputs {
  io::Tensor q, k, v;  // as in the file
  Layout layout = Layout::kBshd;
  vcattn_video_grid grid = {};                  // all zero: none is known
  double softmax_scale = 0;                     // resolved, > 0
  uint32_t flags = 0;                           // of vcattn_attention_params
  std::string source;                           // the file, or the three files, for reports
  std::map<std::string, std::string> metadata;  // of the file
};

// Throws io::Error: each message names file, tensor, what was expected and what was found.
Inputs load_inputs(const InputOptions& options);

// Before the work whose results would be lost: refuses outputs in folders that do not exist, that would replace an
// input, or that are one file twice. Empty paths and "-" are passed over.
void check_outputs(const std::vector<std::string>& paths, const InputOptions& inputs);

// "bf16", "fp16" or "fp32"; throws io::Error for others.
vcattn_dtype parse_dtype(const std::string& text);

// "TxHxW", or with commas as in metadata. `origin` opens the message of the io::Error.
vcattn_video_grid parse_grid(const std::string& text, const std::string& origin);

// A tensor of rank 3 or 4 as the library describes it, without a copy; it lives as long as tensor.data.
vcattn_tensor tensor_view(io::Tensor& tensor, Layout layout);

// The library's parameters with q, k, v, grid, softmax_scale and flags filled in from `inputs`, which must outlive
// them; out, lse, recipe (`accurate`), back end and threads are left to the caller.
vcattn_attention_params attention_params(Inputs& inputs);

// A zeroed tensor of q's shape and layout, for the output; its view is tensor_view(tensor, inputs.layout).
io::Tensor make_output(const Inputs& inputs, const std::string& name, vcattn_dtype dtype);

}  // namespace vcattn::cli
