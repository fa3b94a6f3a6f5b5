#include "inputs.h"

#include <fmt/format.h>

#include <filesystem>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "io/message.h"
#include "terminal.h"

namespace vcattn::cli {
namespace {

enum Axis { kBatch, kSeqlen, kHeads, kHeadDim };  // of vcattn_tensor
constexpr const char* kAxisNames[] = {"batch", "seqlen", "num_heads", "head_dim"};

// Where each of vcattn_tensor's axes lies in a file's tensor of rank 4.
using AxisOrder = std::array<size_t, 4>;

AxisOrder axis_order(Layout layout) { return layout == Layout::kBshd ? AxisOrder{0, 1, 2, 3} : AxisOrder{0, 2, 1, 3}; }

struct Named {
  io::Tensor* tensor;
  std::string file;

  std::string title() const { return fmt::format("{}: tensor {}", io::shown_path(file), io::shown(tensor->name)); }
};

[[noreturn]] void fail_metadata(const std::string& file, const char* key, const char* expected,
                                const std::string& found) {
  io::fail(file, "metadata {:?}: expected {}, found {}", key, expected, io::shown(found));
}

template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool valid_scale(double scale) { return std::isfinite(scale) && scale > 0; }

Layout resolve_layout(const InputOptions& options, const std::map<std::string, std::string>& metadata) {
  if (options.layout == layout_name(Layout::kBhsd)) return Layout::kBhsd;
  if (options.layout == layout_name(Layout::kBshd)) return Layout::kBshd;
  if (!options.layout.empty()) {
    throw io::Error(fmt::format("--layout: expected BSHD or BHSD, found {}", io::shown(options.layout)));
  }
  const auto entry = metadata.find("layout");
  if (entry == metadata.end()) return Layout::kBshd;
  for (const Layout layout : {Layout::kBshd, Layout::kBhsd}) {
    for (const size_t rank : {size_t{3}, size_t{4}}) {
      if (entry->second == layout_metadata(layout, rank)) return layout;
    }
  }
  fail_metadata(options.file, "layout", "\"[batch, heads, tokens, head_dim]\" or \"[batch, tokens, heads, head_dim]\"",
                entry->second);
}

vcattn_video_grid resolve_grid(const InputOptions& options, const std::map<std::string, std::string>& metadata) {
  vcattn_video_grid grid = {};
  if (!options.grid.empty()) {
    grid = parse_grid(options.grid, "--grid");
  } else if (const auto entry = metadata.find("video_grid"); entry != metadata.end()) {
    grid = parse_grid(entry->second, fmt::format("{}: metadata \"video_grid\"", io::shown_path(options.file)));
  } else if (options.text_tokens) {
    throw io::Error("--text-tokens needs --grid: they lie before the video's grid, and no grid is given");
  } else {
    return grid;
  }
  if (options.text_tokens) {
    grid.first_token = *options.text_tokens;
    if (grid.first_token < 0)
      throw io::Error(fmt::format("--text-tokens: expected 0 or more, found {}", grid.first_token));
  } else if (const auto entry = metadata.find("text_tokens"); entry != metadata.end()) {
    if (!parse_number(entry->second, grid.first_token) || grid.first_token < 0) {
      fail_metadata(options.file, "text_tokens", "a whole number", entry->second);
    }
  }
  return grid;
}

double resolve_scale(const InputOptions& options, const std::map<std::string, std::string>& metadata,
                     int64_t head_dim) {
  if (options.scale) {
    if (!valid_scale(*options.scale)) {
      throw io::Error(fmt::format("--scale: expected a positive finite number, found {}", *options.scale));
    }
    return *options.scale;
  }
  const auto entry = metadata.find("softmax_scale");
  if (entry == metadata.end()) return 1.0 / std::sqrt(static_cast<double>(head_dim));
  double scale = 0;
  if (!parse_number(entry->second, scale) || !valid_scale(scale)) {
    fail_metadata(options.file, "softmax_scale", "a positive finite number", entry->second);
  }
  return scale;
}

int64_t extent(const io::Tensor& tensor, Layout layout, Axis axis) {
  const size_t batch_axes = tensor.shape.size() - 3;  // 0 or 1
  if (axis == kBatch) return batch_axes == 0 ? 1 : tensor.shape[0];
  return tensor.shape[axis_order(layout)[axis] - 1 + batch_axes];
}

void check_extent(const Named& found, const Named& like, Layout layout, Axis axis) {
  const int64_t expected = extent(*like.tensor, layout, axis), value = extent(*found.tensor, layout, axis);
  if (value == expected) return;
  throw io::Error(fmt::format("{}: expected {} {} as in {}, found {} (shape {} read as {})", found.title(),
                              kAxisNames[axis], expected, io::shown(like.tensor->name), value,
                              io::shown_shape(found.tensor->shape),
                              layout_metadata(layout, found.tensor->shape.size())));
}

void check_shapes(const Named& q, const Named& k, const Named& v, Layout layout) {
  for (const Named& named : {q, k, v}) {
    const std::vector<int64_t>& shape = named.tensor->shape;
    if (shape.size() != 3 && shape.size() != 4) {
      throw io::Error(fmt::format("{}: expected 3 or 4 axes, found shape {}", named.title(), io::shown_shape(shape)));
    }
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
      throw io::Error(fmt::format("{}: expected no empty axis, found shape {}", named.title(), io::shown_shape(shape)));
    }
  }
  for (const Axis axis : {kBatch, kSeqlen, kHeads, kHeadDim}) check_extent(k, v, layout, axis);
  for (const Axis axis : {kBatch, kHeadDim}) check_extent(q, v, layout, axis);
  const int64_t heads = extent(*q.tensor, layout, kHeads), heads_kv = extent(*v.tensor, layout, kHeads);
  if (heads % heads_kv != 0) {
    throw io::Error(
        fmt::format("{}: expected num_heads to be a multiple of the {} of {}, found {} (shape {} read as {})",
                    q.title(), heads_kv, io::shown(v.tensor->name), heads, io::shown_shape(q.tensor->shape),
                    layout_metadata(layout, q.tensor->shape.size())));
  }
}

// The three tensors of one file. Two of them may be the same.
void read_one_file(const InputOptions& options, Inputs& inputs) {
  if (options.names.size() != 3) {
    throw io::Error(fmt::format("--names: expected three names, found {}", options.names.size()));
  }
  if (options.file.ends_with(".npy")) {
    io::fail(options.file, "expected a .safetensors file with q, k and v; .npy files come by --q, --k and --v");
  }
  io::TensorFile file = io::read_tensors(options.file, options.names);
  inputs.metadata = std::move(file.metadata);
  inputs.source = options.file;
  io::Tensor* const targets[] = {&inputs.q, &inputs.k, &inputs.v};
  for (size_t i = 0; i < 3; ++i) {
    const std::string& name = options.names[i];
    const auto tensor = std::find_if(file.tensors.begin(), file.tensors.end(),
                                     [&](const io::Tensor& candidate) { return candidate.name == name; });
    const bool needed_again =
        std::find(options.names.begin() + i + 1, options.names.end(), name) != options.names.end();
    *targets[i] = needed_again ? *tensor : std::move(*tensor);
  }
}

io::Tensor read_single(const std::string& path) {
  io::TensorFile file = io::read_tensors(path);
  if (file.tensors.size() != 1) io::fail(path, "expected one tensor, found {}", file.tensors.size());
  return std::move(file.tensors.front());
}

}  // namespace

const char* layout_name(Layout layout) { return layout == Layout::kBshd ? "BSHD" : "BHSD"; }

std::string layout_metadata(Layout layout, size_t rank) {
  return fmt::format("[{}{}, head_dim]", rank == 4 ? "batch, " : "",
                     layout == Layout::kBshd ? "tokens, heads" : "heads, tokens");
}

void add_input_options(CLI::App& command, InputOptions& options) {
  command.add_option("FILE", options.file, ".safetensors file with q, k and v");
  command.add_option("--q", options.q_file, "q from a file of its own, .npy or .safetensors");
  command.add_option("--k", options.k_file, "k, likewise");
  command.add_option("--v", options.v_file, "v, likewise");
  command.add_option("--names", options.names, "names of the three tensors in FILE: Q,K,V")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->default_str("q,k,v");
  command.add_option("--layout", options.layout, "BSHD or BHSD; 3-D tensors leave out B [metadata layout, else BSHD]");
  command.add_option("--grid", options.grid, "video grid, frames x height x width: 32x16x32 [metadata video_grid]");
  command.add_option("--text-tokens", options.text_tokens,
                     "tokens before the video grid [metadata text_tokens, else 0]");
  command.add_option("--scale", options.scale, "softmax scale [metadata softmax_scale, else 1/sqrt(head_dim)]");
}

void check_outputs(const std::vector<std::string>& paths, const InputOptions& inputs) {
  namespace fs = std::filesystem;
  std::vector<std::string> taken;
  for (const std::string* input : {&inputs.file, &inputs.q_file, &inputs.k_file, &inputs.v_file}) {
    if (!input->empty()) taken.push_back(io::destination_of(*input));
  }
  for (const std::string& path : paths) {
    if (path.empty() || path == "-") continue;
    check_output_folder(path);
    const std::string destination = io::destination_of(path);
    std::error_code ignored;
    const bool is_stream = fs::is_other(destination, ignored);  // a pipe or a device takes any number of outputs
    for (const std::string& other : taken) {
      if (!is_stream && (destination == other || fs::equivalent(destination, other, ignored))) {
        io::fail(path, "expected a file of its own for each output, found one that is an input or another output");
      }
    }
    taken.push_back(destination);
  }
}

Inputs load_inputs(const InputOptions& options) {
  const int separate = !options.q_file.empty() + !options.k_file.empty() + !options.v_file.empty();
  if (options.file.empty() ? separate != 3 : separate != 0) {
    throw io::Error("expected either FILE or all of --q, --k and --v");
  }
  Inputs inputs;
  std::array<std::string, 3> files = {options.file, options.file, options.file};
  if (separate == 0) {
    read_one_file(options, inputs);
  } else {
    files = {options.q_file, options.k_file, options.v_file};
    inputs.q = read_single(options.q_file);
    inputs.k = read_single(options.k_file);
    inputs.v = read_single(options.v_file);
    inputs.source = fmt::format("{}", fmt::join(files, ", "));
  }
  inputs.layout = resolve_layout(options, inputs.metadata);
  check_shapes({&inputs.q, files[0]}, {&inputs.k, files[1]}, {&inputs.v, files[2]}, inputs.layout);
  inputs.grid = resolve_grid(options, inputs.metadata);
  inputs.softmax_scale = resolve_scale(options, inputs.metadata, extent(inputs.q, inputs.layout, kHeadDim));
  inputs.flags = options.allow_nonfinite ? VCATTN_ALLOW_NONFINITE : 0;
  return inputs;
}

vcattn_dtype parse_dtype(const std::string& text) {
  if (text == "bf16") return VCATTN_BF16;
  if (text == "fp16") return VCATTN_FP16;
  if (text == "fp32") return VCATTN_FP32;
  throw io::Error(fmt::format("--dtype: expected bf16, fp16 or fp32, found {}", io::shown(text)));
}

vcattn_video_grid parse_grid(const std::string& text, const std::string& origin) {
  const auto refuse = [&] {
    throw io::Error(
        fmt::format("{}: expected frames x height x width such as 32x16x32, found {}", origin, io::shown(text)));
  };
  int64_t extents[3] = {};
  size_t at = 0;
  for (int axis = 0; axis < 3; ++axis) {
    const size_t end = axis < 2 ? text.find_first_of("x,", at) : text.size();
    if (end == std::string::npos) refuse();
    if (!parse_number(std::string_view(text).substr(at, end - at), extents[axis]) || extents[axis] < 1) refuse();
    at = end + 1;
  }
  return {.first_token = 0, .frames = extents[0], .height = extents[1], .width = extents[2]};
}

vcattn_tensor tensor_view(io::Tensor& tensor, Layout layout) {
  vcattn_tensor view = {};
  view.data = tensor.data.data();
  view.dtype = tensor.dtype;
  int64_t file_strides[4] = {};  // of the file's axes, batch first
  int64_t step = 1;
  const AxisOrder order = axis_order(layout);
  for (int axis = 0; axis < 4; ++axis) view.shape[axis] = extent(tensor, layout, static_cast<Axis>(axis));
  for (int at = 3; at >= 0; --at) {
    file_strides[at] = step;
    step *= view.shape[std::find(order.begin(), order.end(), static_cast<size_t>(at)) - order.begin()];
  }
  for (int axis = 0; axis < 4; ++axis) view.stride[axis] = file_strides[order[axis]];
  return view;
}

vcattn_attention_params attention_params(Inputs& inputs) {
  vcattn_attention_params params;
  vcattn_attention_params_init(&params);
  params.q = tensor_view(inputs.q, inputs.layout);
  params.k = tensor_view(inputs.k, inputs.layout);
  params.v = tensor_view(inputs.v, inputs.layout);
  params.grid = inputs.grid;
  params.softmax_scale = inputs.softmax_scale;
  params.flags = inputs.flags;
  return params;
}

io::Tensor make_output(const Inputs& inputs, const std::string& name, vcattn_dtype dtype) {
  io::Tensor output{.name = name, .dtype = dtype, .shape = inputs.q.shape, .data = {}};
  output.data.resize(static_cast<size_t>(output.element_count()) * io::dtype_size(dtype));
  return output;
}

}  // namespace vcattn::cli
