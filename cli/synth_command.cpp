// vcattn synth: random q, k and v with stated structure, to a file.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <stdexcept>

#include "commands.h"
#include "inputs.h"
#include "io/message.h"
#include "json_output.h"
#include "synth.h"
#include "terminal.h"

namespace vcattn::cli {
namespace {

// The shares that the paper reports for Wan2.2 (arXiv 2609.15810).
constexpr const char* kWanEnergy = "8,12,36";
constexpr const char* kWanEnergyWithoutGrid = "8,36";

struct CommandOptions {
  SynthOptions synth;
  std::string output, json;
  std::string dtype = "bf16";
  std::string grid;
  int64_t text_tokens = 0;
  int64_t heads_kv = 0;  // 0: heads
  std::string energy, outliers;
};

std::vector<double> parse_numbers(const std::string& text, char separator, size_t count, const std::string& option,
                                  const char* expected) {
  std::vector<double> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (true) {
    double number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc()) break;
    numbers.push_back(number);
    at = next;
    if (at == end || *at != separator) break;
    ++at;
  }
  if (at != end || numbers.size() != count) {
    throw std::runtime_error(fmt::format("{}: expected {}, found {}", option, expected, io::shown(text)));
  }
  return numbers;
}

// Fractions, or percent where any number is above 1.
EnergyShares parse_energy(const std::string& text, bool has_grid) {
  std::vector<double> shares =
      parse_numbers(text, ',', has_grid ? 3 : 2, "--energy",
                    has_grid ? "three shares (sequence, cube, k-means) such as 8,12,36"
                             : "two shares (sequence, k-means) such as 8,36, as there is no --grid");
  if (*std::max_element(shares.begin(), shares.end()) > 1) {
    for (double& share : shares) share /= 100;
  }
  EnergyShares energy;
  energy.sequence = shares.front();
  if (has_grid) energy.cube = shares[1];
  energy.kmeans = shares.back();
  return energy;
}

SynthOptions resolve(const CommandOptions& options) {
  SynthOptions synth = options.synth;
  synth.dtype = parse_dtype(options.dtype);
  synth.heads_kv = options.heads_kv == 0 ? synth.heads : options.heads_kv;
  const bool has_grid = !options.grid.empty();
  if (has_grid) {
    synth.grid = parse_grid(options.grid, "--grid");
    synth.grid.first_token = options.text_tokens;
    int64_t cells = 0;
    if (options.text_tokens < 0 || __builtin_mul_overflow(synth.grid.frames, synth.grid.height, &cells) ||
        __builtin_mul_overflow(cells, synth.grid.width, &cells) ||
        __builtin_add_overflow(cells, options.text_tokens, &cells)) {
      throw std::runtime_error("--text-tokens and --grid: expected a number of tokens from 0 that fits 64 bits");
    }
    if (synth.tokens != 0 && synth.tokens != cells) {
      throw std::runtime_error(
          fmt::format("--tokens: expected {}, the text tokens and the grid, found {}", cells, synth.tokens));
    }
    synth.tokens = cells;
  } else if (options.text_tokens != 0) {
    throw std::runtime_error("--text-tokens: expected --grid with it");
  }
  if (!has_grid && synth.tokens == 0) throw std::runtime_error("expected --grid or --tokens");
  const char* default_energy = has_grid ? kWanEnergy : kWanEnergyWithoutGrid;
  synth.energy = parse_energy(options.energy.empty() ? default_energy : options.energy, has_grid);
  if (!options.outliers.empty()) {
    const std::vector<double> numbers =
        parse_numbers(options.outliers, '/', 2, "--v-outliers", "fraction/scale such as 0.001/8");
    synth.outlier_fraction = numbers[0];
    synth.outlier_scale = numbers[1];
  }
  return synth;
}

Json to_json(const EnergyShares& shares) {
  Json json = {{"sequence", shares.sequence}};
  if (shares.cube) json["cube"] = *shares.cube;
  json["kmeans"] = shares.kmeans;
  return json;
}

Json to_json(const std::string& output, const SynthOptions& options, const SynthResult& result) {
  Json json;
  json["command"] = "synth";
  json["version"] = vcattn_version();
  json["output"] = output;
  json["seed"] = options.seed;
  json["shape"] = {{"batch", options.batch},
                   {"num_heads", options.heads},
                   {"num_heads_kv", options.heads_kv},
                   {"tokens", options.tokens},
                   {"head_dim", options.head_dim}};
  json["energy_asked"] = to_json(options.energy);
  json["heads"] = Json::array();
  for (const SynthHead& head : result.heads) {
    json["heads"].push_back({{"batch", head.batch},
                             {"head_kv", head.head_kv},
                             {"energy_reached", to_json(head.reached)},
                             {"effective_keys", head.effective_keys}});
  }
  return json;
}

std::string to_text(const SynthOptions& options, const SynthResult& result, bool color) {
  const auto percent = [](double share) { return fmt::format("{:.2f} %", 100 * share); };
  Table table({{"batch"}, {"KV head"}, {"sequence"}, {"cube"}, {"k-means"}, {"effective keys"}});
  const auto cells = [&](std::string batch, std::string head, const EnergyShares& shares, std::string keys) {
    return std::vector<std::string>{std::move(batch),         std::move(head),
                                    percent(shares.sequence), shares.cube ? percent(*shares.cube) : "-",
                                    percent(shares.kmeans),   std::move(keys)};
  };
  table.add_row(cells("asked", "", options.energy, ""), Color::kDim);
  for (const SynthHead& head : result.heads) {
    table.add_row(cells(fmt::format("{}", head.batch), fmt::format("{}", head.head_kv), head.reached,
                        fmt::format("{:.1f}", head.effective_keys)));
  }
  return table.text(color);
}

void run(const CommandOptions& options) {
  const SynthOptions synth = resolve(options);
  if (!options.output.ends_with(".safetensors")) io::fail(options.output, "expected a name that ends in .safetensors");
  check_outputs({options.output, options.json}, {});
  SynthResult result;
  {
    Progress progress("synth", synth.batch * synth.heads_kv);
    result = synthesize(synth, [&] { progress.advance(); });
  }
  io::write_tensors(options.output, result.file);
  if (!options.json.empty()) write_json(options.json, to_json(options.output, synth, result));
  if (options.json != "-") write_output("-", to_text(synth, result, is_interactive(stdout)));
}

}  // namespace

void add_synth(CLI::App& app) {
  const auto options = std::make_shared<CommandOptions>();
  SynthOptions& synth = options->synth;
  CLI::App* command = app.add_subcommand("synth", "Write random q, k and v with the structure of a video model's");
  command->add_option("-o,--output", options->output, ".safetensors file")->required();
  command->add_option("--batch", synth.batch, "sequences")->capture_default_str();
  command->add_option("--heads", synth.heads, "heads of Q")->capture_default_str();
  command->add_option("--heads-kv", options->heads_kv, "heads of K and V [--heads]");
  command->add_option("--grid", options->grid, "video grid, frames x height x width: 8x16x32");
  command->add_option("--text-tokens", options->text_tokens, "tokens before the grid")->capture_default_str();
  command->add_option("--tokens", synth.tokens, "tokens of a sequence that is no video [those of --grid]");
  command->add_option("--dim", synth.head_dim, "head_dim")->capture_default_str();
  command->add_option("--dtype", options->dtype, "bf16, fp16 or fp32")->capture_default_str();
  command->add_option("--seed", synth.seed, "of the random numbers; the same seed gives the same file")
      ->capture_default_str();
  command->add_option("--clusters", synth.clusters, "kinds of tokens")->capture_default_str();
  command->add_option("--energy", options->energy,
                      "shares of V's energy that 128-row means remove in sequence order, in cube order and after "
                      "k-means, as percent or fractions; without --grid the first and last [8,12,36]");
  command->add_option("--v-outliers", options->outliers,
                      "fraction of V's tokens with larger noise, and how much larger [0.001/8]");
  command->add_option("--k-bias", synth.k_bias, "length of K's mean relative to the rest of a key")
      ->capture_default_str();
  command->add_option("--sharpness", synth.sharpness, "standard deviation of a softmax row's scores")
      ->capture_default_str();
  command->add_option("--json", options->json, "write a report to a path, or to standard output with -");
  command->callback([options] { run(*options); });
}

}  // namespace vcattn::cli
