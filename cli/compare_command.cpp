// vcattn compare: how far each recipe is from exact attention on given tensors, as a table, JSON and a report.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "commands.h"
#include "compare.h"
#include "compare_output.h"
#include "inputs.h"
#include "io/tensor_file.h"
#include "json_output.h"
#include "library.h"
#include "report.h"
#include "terminal.h"

namespace vcattn::cli {
namespace {

struct CommandOptions {
  InputOptions inputs;
  CompareOptions compare;
  std::optional<uint64_t> seed;
  int32_t threads = 0;
  std::string json;
  std::string report;
};

// "none" leaves a list empty.
void clear_none(std::vector<std::string>& names) {
  if (names == std::vector<std::string>{"none"}) names.clear();
}

// Results that hold no number at all are a failure, which a script must be able to see.
void check_any_number(const CompareResult& result) {
  for (const RecipeResult& recipe : result.recipes) {
    if (recipe.skipped.empty()) return;
  }
  if (!result.recipes.empty()) {
    throw std::runtime_error(
        fmt::format("every recipe was skipped; {}: {}", result.recipes.front().name, result.recipes.front().skipped));
  }
}

void run_compare(CommandOptions& options) {
  if (options.report == "-") throw std::runtime_error("--report: expected a path, found -");
  check_outputs({options.json, options.report}, options.inputs);
  clear_none(options.compare.recipes);
  clear_none(options.compare.orders);
  if (options.seed) options.compare.changes.push_back(fmt::format("seed={}", *options.seed));

  const auto start = std::chrono::steady_clock::now();
  Inputs inputs = load_inputs(options.inputs);
  vcattn_attention_params params = attention_params(inputs);
  params.num_threads = options.threads;

  std::optional<Progress> progress;
  int64_t shown = 0;
  const auto show = [&](std::string_view step, int64_t done, int64_t total) {
    if (!progress) progress.emplace("compare", total);
    progress->advance(done - std::exchange(shown, done));
    progress->show(step);
  };
  const CompareResult result =
      naming_source(inputs.source, [&] { return compare(params, inputs.source, options.compare, show); });
  progress.reset();

  check_any_number(result);
  if (!options.json.empty()) write_json(options.json, compare_json(result));
  if (!options.report.empty()) io::write_text(options.report, report_html(result));
  if (options.json != "-") write_output("-", compare_text(result, is_interactive(stdout)));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  fmt::print(stderr, "compared in {:.1f} s\n", elapsed.count());
}

}  // namespace

void add_compare(CLI::App& app) {
  const auto options = std::make_shared<CommandOptions>();
  CLI::App* command = app.add_subcommand("compare", "Measure the error of recipes against exact attention");
  add_input_options(*command, options->inputs);
  command->add_option("--rows", options->compare.rows, "query rows per head, in whole blocks of 128")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  command->add_option("--recipes", options->compare.recipes, "names separated by commas, or none [all but fp32]")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--orders", options->compare.orders, "orders of V separated by commas, or none [all]")
      ->delimiter(',')
      ->allow_extra_args(false);
  command
      ->add_option("--set", options->compare.changes,
                   "change a field of every recipe: field=value; repeatable; grouping fields and mean_format also "
                   "for the orders")
      ->allow_extra_args(false);
  command->add_option("--seed", options->seed, "of the grouping, where seeding is random or plusplus [0]");
  command->add_option("--threads", options->threads, "0: as many as the process may use")->capture_default_str();
  command->add_option("--json", options->json, "write the numbers to a path, or to standard output with -");
  command->add_option("--report", options->report, "write a self-contained HTML page with plots to a path");
  command->callback([options] { run_compare(*options); });
}

}  // namespace vcattn::cli
