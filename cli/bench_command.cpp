// vcattn bench: how long the GPU back end takes, and for what.
#include <fmt/format.h>

#include <memory>
#include <string_view>

#include "bench.h"
#include "bench_output.h"
#include "bench_shapes.h"
#include "commands.h"
#include "json_output.h"
#include "library.h"
#include "terminal.h"

namespace vcattn::cli {

std::string why_no_sm90a() {
  for (int32_t i = 0;; ++i) {
    int32_t available = 0;
    vcattn_message reason = {};
    const char* name = vcattn_backend_info(i, &available, &reason);
    if (name == nullptr) return "bench: this build has no back end sm90a";
    if (std::string_view(name) != "sm90a") continue;
    return available != 0 ? "" : fmt::format("bench: back end sm90a cannot run here: {}", reason.text);
  }
}

namespace {

struct CommandOptions {
  std::vector<BenchShape> shapes;  // of --shape and --preset
  std::vector<std::string> recipes = {"accurate", "fast"};
  std::vector<std::string> changes;
  int rounds = 11;
  bool unfused = false;
  std::string json;
};

using Measure = BenchResult (*)(const BenchOptions&);

void run_bench(const CommandOptions& options, const char* command, Measure measure, bool shows_bytes) {
  BenchOptions bench = {.shapes = options.shapes, .recipes = {}, .rounds = options.rounds, .unfused = options.unfused};
  if (bench.shapes.empty()) bench.shapes.push_back(preset_by_name("wan2.2-720p"));
  for (const std::string& name : options.recipes) bench.recipes.push_back(make_recipe(name, options.changes));
  if (!options.json.empty() && options.json != "-") check_output_folder(options.json);
  const BenchResult result = measure(bench);
  if (!options.json.empty()) write_json(options.json, bench_json(result, command));
  if (options.json != "-") write_output("-", bench_text(result, shows_bytes, is_interactive(stdout)));
}

void add_one(CLI::App& bench, const char* name, const char* command_name, const char* description, Measure measure,
             bool is_call) {
  const auto options = std::make_shared<CommandOptions>();
  CLI::App* command = bench.add_subcommand(name, description);
  command
      ->add_option_function<std::vector<std::string>>(
          "--shape",
          [options](const std::vector<std::string>& texts) {
            for (const std::string& text : texts) options->shapes.push_back(parse_shape(text));
          },
          "batch x seqlen_q x seqlen_kv x num_heads x num_heads_kv x head_dim, as in 1x4608x4608x24x24x128; repeatable")
      ->allow_extra_args(false);
  command
      ->add_option_function<std::vector<std::string>>(
          "--preset",
          [options](const std::vector<std::string>& names) {
            for (const std::string& preset : names) options->shapes.push_back(preset_by_name(preset));
          },
          fmt::format("a shape by name; repeatable [wan2.2-720p]: {}", preset_names()))
      ->allow_extra_args(false);
  command->add_option("--recipe", options->recipes, "recipe by name; repeatable; vcattn info --recipes lists them")
      ->allow_extra_args(false)
      ->capture_default_str();
  command->add_option("--set", options->changes, "change a field of every recipe: field=value; repeatable")
      ->allow_extra_args(false);
  command
      ->add_option("--rounds", options->rounds, "samples of each part, taken in turns after a round that is not kept")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--json", options->json, "write all samples to a path, or to standard output with -");
  if (is_call) {
    command->add_flag("--unfused", options->unfused,
                      "also prepare with every step a kernel of its own through memory, and time its steps");
  }
  command->callback([=] { run_bench(*options, command_name, measure, is_call); });
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Time the GPU back end on random tensors");
  bench->require_subcommand(1);
  add_one(*bench, "attention", "bench attention",
          "Time the attention kernels alone, recipes in turns, operands prepared before", bench_attention, false);
  add_one(*bench, "call", "bench call",
          "Time the parts of a whole call, and whole calls, beside the bytes that they must move", bench_call, true);
}

}  // namespace vcattn::cli
