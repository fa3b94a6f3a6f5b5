// vcattn attend: one attention call from files to a file.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "commands.h"
#include "inputs.h"
#include "io/message.h"
#include "json_output.h"
#include "library.h"
#include "terminal.h"

namespace vcattn::cli {
namespace {

// Above this the heads go one by one, so that a progress bar moves: some seconds on a small machine.
constexpr double kProgressFlops = 1e12;

struct AttendOptions {
  InputOptions inputs;
  std::string output;
  std::string recipe = "accurate";
  std::vector<std::string> changes;
  std::string backend = "auto";
  std::string dtype;  // empty: that of q
  int32_t threads = 0;
  bool lse = false;
  std::string json;
};

// Refuses before the work what io::write_tensors would refuse after it, naming the option that cures it.
void check_output(const AttendOptions& options, vcattn_dtype dtype) {
  const std::filesystem::path path = options.output;
  const bool npy = path.extension() == ".npy";
  if (!npy && path.extension() != ".safetensors") {
    io::fail(options.output, "expected a name that ends in .safetensors or .npy");
  }
  if (npy && options.lse) io::fail(options.output, "expected .safetensors with --lse: .npy holds one tensor");
  if (npy && dtype == VCATTN_BF16) {
    io::fail(options.output, "NumPy has no BF16: expected --dtype fp16 or fp32, or a .safetensors file");
  }
  check_outputs({options.output, options.json}, options.inputs);
}

// FP32, in the order of the output's axes: [batch, seqlen, heads] or [batch, heads, seqlen].
io::Tensor make_lse(const io::Tensor& out) {
  io::Tensor lse{.name = "lse", .dtype = VCATTN_FP32, .shape = out.shape, .data = {}};
  lse.shape.pop_back();
  lse.data.resize(static_cast<size_t>(lse.element_count()) * sizeof(float));
  return lse;
}

// Points params at `lse`, whose strides are those of `out` less the head_dim.
void attach_lse(io::Tensor& lse, vcattn_attention_params& params) {
  params.lse = reinterpret_cast<float*>(lse.data.data());
  for (int axis = 0; axis < 3; ++axis) params.lse_stride[axis] = params.out.stride[axis] / params.out.shape[3];
}

Json to_json(const AttendOptions& options, const Inputs& inputs, const vcattn_attention_params& params,
             const std::string& backend, const AttentionRun& run) {
  Json json;
  json["command"] = "attend";
  json["version"] = vcattn_version();
  json["source"] = inputs.source;
  json["layout"] = layout_name(inputs.layout);
  json["shape"] = {{"batch", params.q.shape[0]},        {"seqlen_q", params.q.shape[1]},
                   {"seqlen_kv", params.k.shape[1]},    {"num_heads", params.q.shape[2]},
                   {"num_heads_kv", params.k.shape[2]}, {"head_dim", params.q.shape[3]}};
  json["recipe"] = describe(params.recipe);
  json["softmax_scale"] = params.softmax_scale;
  json["backend"] = backend;
  json["threads"] = params.num_threads;
  json["seconds"] = run.seconds;
  json["flops"] = attention_flops(params);
  json["workspace_bytes"] = run.workspace_bytes;
  json["output"] = options.output;
  return json;
}

std::string summary(const vcattn_attention_params& params, const std::string& backend, const AttentionRun& run) {
  const int64_t *q = params.q.shape, *k = params.k.shape;
  const std::string heads = q[2] == k[2] ? fmt::format("{}", q[2]) : fmt::format("{} (kv {})", q[2], k[2]);
  const std::string tokens = q[1] == k[1] ? fmt::format("{}", q[1]) : fmt::format("{} (kv {})", q[1], k[1]);
  return fmt::format("batch {}, tokens {}, heads {}, head_dim {}; recipe {}, back end {}: {:.3g} s, {:.3g} TFLOP/s\n",
                     q[0], tokens, heads, q[3], params.recipe.name, backend, run.seconds,
                     attention_flops(params) / run.seconds * 1e-12);
}

AttentionRun run_with_progress(const vcattn_attention_params& params) {
  std::optional<Progress> bar;
  int64_t shown = 0;
  return run_attention_by_head(params, kProgressFlops, [&](int64_t done, int64_t total) {
    if (!bar) bar.emplace("attend", total);
    bar->advance(done - std::exchange(shown, done));
    bar->show(fmt::format("head {} of {}", std::min(done + 1, total), total));
  });
}

void attend(const AttendOptions& options) {
  const vcattn_recipe recipe = make_recipe(options.recipe, options.changes);
  const vcattn_backend backend = backend_by_name(options.backend);
  Inputs inputs = load_inputs(options.inputs);
  const vcattn_dtype dtype = options.dtype.empty() ? inputs.q.dtype : parse_dtype(options.dtype);
  check_output(options, dtype);

  io::TensorFile file;
  file.tensors.push_back(make_output(inputs, "out", dtype));
  if (options.lse) file.tensors.push_back(make_lse(file.tensors.front()));
  vcattn_attention_params params = attention_params(inputs);
  params.out = tensor_view(file.tensors.front(), inputs.layout);
  if (options.lse) attach_lse(file.tensors.back(), params);
  params.recipe = recipe;
  params.backend = backend;
  params.num_threads = options.threads;
  const AttentionRun run = naming_source(inputs.source, [&] { return run_with_progress(params); });

  file.metadata = {{"layout", layout_metadata(inputs.layout, inputs.q.shape.size())},
                   {"recipe", describe(recipe)},
                   {"softmax_scale", fmt::format("{}", inputs.softmax_scale)},
                   {"vcattn_version", vcattn_version()}};
  io::write_tensors(options.output, file);
  const std::string served_by = backend_name(backend);
  if (!options.json.empty()) write_json(options.json, to_json(options, inputs, params, served_by, run));
  if (options.json != "-") write_output("-", summary(params, served_by, run));
}

}  // namespace

void add_attend(CLI::App& app) {
  const auto options = std::make_shared<AttendOptions>();
  CLI::App* command = app.add_subcommand("attend", "Run attention on q, k and v from files and write the output");
  add_input_options(*command, options->inputs);
  command->add_flag("--allow-nonfinite", options->inputs.allow_nonfinite, "let NaN and infinities through");
  command->add_option("-o,--output", options->output, "file for `out` (and `lse`): .safetensors or .npy")->required();
  command->add_option("--recipe", options->recipe, "recipe by name; vcattn info --recipes lists them")
      ->capture_default_str();
  command->add_option("--set", options->changes, "change a field of the recipe: field=value; repeatable")
      ->allow_extra_args(false);
  command->add_flag("--lse", options->lse, "write the log-sum-exp of each row too, FP32, natural logarithm");
  command->add_option("--dtype", options->dtype, "of `out`: bf16, fp16 or fp32 [that of q]");
  command->add_option("--backend", options->backend, "auto or cpu")->capture_default_str();
  command->add_option("--threads", options->threads, "0: as many as the process may use")->capture_default_str();
  command->add_option("--json", options->json, "write a report to a path, or to standard output with -");
  command->callback([options] { attend(*options); });
}

}  // namespace vcattn::cli
