#include "bench_output.h"

#include <fmt/format.h>

#include <algorithm>

#include "terminal.h"

namespace vcattn::cli {
namespace {

// What a copy within an H200's memory reaches, counting bytes read and written: below it no part that moves bytes gets.
constexpr double kFloorBytesPerSecond = 4.1e12;

double floor_milliseconds(const BenchPart& part) { return part.bytes / kFloorBytesPerSecond * 1e3; }

double teraflops(const BenchPart& part) { return part.flops / median(part.milliseconds) * 1e-9; }

double qkv_bytes(const BenchShape& s) {
  const auto bytes = [&](int64_t seqlen, int64_t heads) {
    return 2.0 * static_cast<double>(s.batch * seqlen * heads * s.head_dim);
  };
  return bytes(s.seqlen_q, s.num_heads) + 2 * bytes(s.seqlen_kv, s.num_heads_kv);
}

std::string shape_text(const BenchShape& s) {
  const std::string tokens =
      s.seqlen_q == s.seqlen_kv ? fmt::format("{}", s.seqlen_q) : fmt::format("{} (kv {})", s.seqlen_q, s.seqlen_kv);
  const std::string heads = s.num_heads == s.num_heads_kv ? fmt::format("{}", s.num_heads)
                                                          : fmt::format("{} (kv {})", s.num_heads, s.num_heads_kv);
  return fmt::format("batch {}, tokens {}, heads {}, head_dim {}", s.batch, tokens, heads, s.head_dim);
}

std::string cuda_version(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string machine_text(const BenchMachine& m) {
  const std::string driver = m.clocks.driver.empty() ? "" : fmt::format(" {}", m.clocks.driver);
  return fmt::format("{}, {} multiprocessors, {}; driver{} for CUDA {}, runtime {}\n", m.device, m.multiprocessors,
                     bytes_text(m.memory_bytes), driver, cuda_version(m.cuda_driver), cuda_version(m.cuda_runtime));
}

std::string clocks_text(const BenchMachine& machine, const std::vector<ClockReading>& readings) {
  if (readings.empty()) return fmt::format("clocks: not read: {}\n", machine.clocks.why_not);
  const ClockReading& before = readings.front();
  const ClockReading& after = readings.back();
  std::string running;
  uint64_t reasons = before.reasons | after.reasons;
  if (readings.size() > 2) {
    const auto begin = readings.begin() + 1, end = readings.end() - 1;
    const auto [low, high] =
        std::minmax_element(begin, end, [](const auto& a, const auto& b) { return a.sm_mhz < b.sm_mhz; });
    const auto [least, most] =
        std::minmax_element(begin, end, [](const auto& a, const auto& b) { return a.watts < b.watts; });
    running =
        fmt::format(", {}..{} MHz {:.0f}..{:.0f} W while it ran", low->sm_mhz, high->sm_mhz, least->watts, most->watts);
    reasons = 0;  // those of an idle card say nothing
    for (auto reading = begin; reading != end; ++reading) reasons |= reading->reasons;
  }
  const std::vector<std::string> names = clock_reason_names(reasons);
  return fmt::format(
      "SM clock and power: {} MHz {:.0f} W before{}, {} MHz {:.0f} W after (limits {} MHz, {:.0f} W); "
      "held down by: {}\n",
      before.sm_mhz, before.watts, running, after.sm_mhz, after.watts, machine.clocks.max_sm_mhz,
      machine.clocks.limit_watts, names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", ")));
}

std::vector<std::string> time_cells(const BenchPart& part) {
  const auto [least, most] = std::minmax_element(part.milliseconds.begin(), part.milliseconds.end());
  return {fmt::format("{:.3f}", median(part.milliseconds)), fmt::format("{:.3f}", *least),
          fmt::format("{:.3f}", *most)};
}

std::string flops_cell(const BenchPart& part) { return part.flops > 0 ? fmt::format("{:.0f}", teraflops(part)) : ""; }

// One line a recipe.
std::string recipes_table(const BenchCase& c, bool color) {
  Table table({{"recipe", Align::kLeft}, {"median ms"}, {"min ms"}, {"max ms"}, {"TFLOP/s"}, {"of first"}});
  const double first = median(c.recipes.front().parts.front().milliseconds);
  for (const BenchRecipe& recipe : c.recipes) {
    const BenchPart& part = recipe.parts.front();
    std::vector<std::string> cells = time_cells(part);
    cells.insert(cells.begin(), recipe.name);
    cells.push_back(flops_cell(part));
    cells.push_back(fmt::format("{:.3f}", median(part.milliseconds) / first));
    table.add_row(std::move(cells));
  }
  return table.text(color);
}

// One line a part.
std::string parts_table(const BenchRecipe& recipe, bool color) {
  Table table(
      {{"part", Align::kLeft}, {"median ms"}, {"min ms"}, {"max ms"}, {"MB"}, {"floor ms"}, {"x floor"}, {"TFLOP/s"}});
  for (const BenchPart& part : recipe.parts) {
    std::vector<std::string> cells = time_cells(part);
    cells.insert(cells.begin(), part.name);
    const double floor = floor_milliseconds(part);
    cells.push_back(floor > 0 ? fmt::format("{:.1f}", part.bytes * 1e-6) : "");
    cells.push_back(floor > 0 ? fmt::format("{:.3f}", floor) : "");
    cells.push_back(floor > 0 ? fmt::format("{:.2f}", median(part.milliseconds) / floor) : "");
    cells.push_back(flops_cell(part));
    table.add_row(std::move(cells));
  }
  return table.text(color);
}

std::string workspace_text(const BenchRecipe& recipe, const BenchShape& shape) {
  const double qkv = qkv_bytes(shape);
  std::string text = fmt::format("{}: workspace {} ({:.3f} of q, k and v in BF16)", recipe.name,
                                 bytes_text(recipe.workspace_bytes), static_cast<double>(recipe.workspace_bytes) / qkv);
  if (recipe.grouping_workspace_bytes > 0) {
    text += fmt::format(", of grouping {} ({:.3f})", bytes_text(recipe.grouping_workspace_bytes),
                        static_cast<double>(recipe.grouping_workspace_bytes) / qkv);
  }
  if (!recipe.not_grouped.empty()) text += fmt::format("; not grouped: {}", recipe.not_grouped);
  return text + "\n";
}

// How many times longer than `prepare` the unfused chain takes, and how many times more bytes it moves.
struct FusionRatios {
  double time, bytes;
};
FusionRatios fusion_ratios(const BenchRecipe& recipe) {
  const BenchPart& fused = recipe.parts[recipe.fusion->fused];
  const BenchPart& unfused = recipe.parts[recipe.fusion->unfused];
  return {median(unfused.milliseconds) / median(fused.milliseconds), unfused.bytes / fused.bytes};
}

std::string fusion_text(const BenchRecipe& recipe) {
  if (!recipe.fusion) return "";
  const FusionRatios ratios = fusion_ratios(recipe);
  return fmt::format(
      "{}: the unfused chain takes {:.2f} times as long as {}, and moves {:.2f} times the bytes that must move\n",
      recipe.name, ratios.time, recipe.parts[recipe.fusion->fused].name, ratios.bytes);
}

Json clocks_json(const std::vector<ClockReading>& readings) {
  Json json = Json::array();
  for (const ClockReading& r : readings) {
    json.push_back({{"sm_mhz", r.sm_mhz},
                    {"memory_mhz", r.memory_mhz},
                    {"watts", r.watts},
                    {"celsius", r.celsius},
                    {"held_down_by", clock_reason_names(r.reasons)}});
  }
  return json;
}

Json machine_json(const BenchMachine& m) {
  Json json = {{"device", m.device},
               {"multiprocessors", m.multiprocessors},
               {"memory_bytes", m.memory_bytes},
               {"l2_bytes", m.l2_bytes},
               {"cuda_driver", cuda_version(m.cuda_driver)},
               {"cuda_runtime", cuda_version(m.cuda_runtime)}};
  if (!m.clocks.why_not.empty()) {
    json["nvml"] = {{"found", false}, {"reason", m.clocks.why_not}};
  } else {
    json["nvml"] = {{"found", true},
                    {"driver", m.clocks.driver},
                    {"max_sm_mhz", m.clocks.max_sm_mhz},
                    {"limit_watts", m.clocks.limit_watts}};
  }
  return json;
}

Json part_json(const BenchPart& part) {
  const auto [least, most] = std::minmax_element(part.milliseconds.begin(), part.milliseconds.end());
  Json json = {{"name", part.name},   {"median_ms", median(part.milliseconds)}, {"min_ms", *least}, {"max_ms", *most},
               {"bytes", part.bytes}, {"floor_ms", floor_milliseconds(part)}};
  if (part.flops > 0) {
    json["flops"] = part.flops;
    json["tflops"] = teraflops(part);
  }
  json["samples_ms"] = part.milliseconds;
  return json;
}

Json recipe_json(const BenchRecipe& recipe, const BenchShape& shape) {
  Json json = {{"name", recipe.name},
               {"description", recipe.description},
               {"workspace_bytes", recipe.workspace_bytes},
               {"workspace_of_qkv", static_cast<double>(recipe.workspace_bytes) / qkv_bytes(shape)},
               {"grouping_workspace_bytes", recipe.grouping_workspace_bytes},
               {"not_grouped", recipe.not_grouped}};
  if (recipe.fusion) {
    const FusionRatios ratios = fusion_ratios(recipe);
    json["unfused_of_fused"] = {{"time", ratios.time}, {"bytes", ratios.bytes}};
  }
  json["parts"] = Json::array();
  for (const BenchPart& part : recipe.parts) json["parts"].push_back(part_json(part));
  return json;
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string bench_text(const BenchResult& result, bool shows_bytes, bool color) {
  std::string text = machine_text(result.machine);
  for (const BenchCase& c : result.cases) {
    text += fmt::format("\n{}: {}; {} rounds\n", painted(c.shape.name, Color::kBold, color), shape_text(c.shape),
                        result.rounds);
    if (!shows_bytes) text += recipes_table(c, color);
    for (const BenchRecipe& recipe : c.recipes) {
      if (shows_bytes) text += workspace_text(recipe, c.shape) + parts_table(recipe, color) + fusion_text(recipe);
    }
    text += clocks_text(result.machine, c.clocks);
  }
  return text;
}

Json bench_json(const BenchResult& result, const std::string& command) {
  Json json = {{"command", command},
               {"version", vcattn_version()},
               {"timing", "CUDA events on one stream, one warm round, then all parts in turn each round"},
               {"machine", machine_json(result.machine)},
               {"rounds", result.rounds},
               {"floor_bytes_per_second", kFloorBytesPerSecond}};
  json["cases"] = Json::array();
  for (const BenchCase& c : result.cases) {
    const BenchShape& s = c.shape;
    Json entry = {{"name", s.name},
                  {"shape",
                   {{"batch", s.batch},
                    {"seqlen_q", s.seqlen_q},
                    {"seqlen_kv", s.seqlen_kv},
                    {"num_heads", s.num_heads},
                    {"num_heads_kv", s.num_heads_kv},
                    {"head_dim", s.head_dim}}},
                  {"clocks", clocks_json(c.clocks)}};
    entry["recipes"] = Json::array();
    for (const BenchRecipe& recipe : c.recipes) entry["recipes"].push_back(recipe_json(recipe, s));
    json["cases"].push_back(std::move(entry));
  }
  return json;
}

}  // namespace vcattn::cli
