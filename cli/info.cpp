// vcattn info: what this build is, and what this machine lets it run.
#include <fmt/format.h>
#include <oneapi/tbb/info.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <thread>

#include "commands.h"
#include "gpus.h"
#include "json_output.h"
#include "library.h"
#include "terminal.h"

namespace vcattn::cli {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

struct Backend {
  std::string name;
  bool available;
  std::string reason;
};

std::vector<Backend> backends() {
  std::vector<Backend> found;
  int32_t available = 0;
  vcattn_message reason = {};
  while (const char* name = vcattn_backend_info(static_cast<int32_t>(found.size()), &available, &reason)) {
    found.push_back({name, available != 0, reason.text});
  }
  return found;
}

// Linux on x86 names the processor; elsewhere the field is missing.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "not named by the system";
}

// The back end that has kernels for the GPU.
const Backend* backend_of(const Gpu& gpu, const std::vector<Backend>& found) {
  const bool hopper = gpu.compute_major == 9 && gpu.compute_minor == 0;
  const auto sm90a = std::find_if(found.begin(), found.end(), [](const Backend& b) { return b.name == "sm90a"; });
  return hopper && sm90a != found.end() ? &*sm90a : nullptr;
}

std::string gpu_use(const Gpu& gpu, const std::vector<Backend>& found) {
  const Backend* backend = backend_of(gpu, found);
  if (backend == nullptr) return "this version has no kernels for it";
  return fmt::format("back end {}{}", backend->name, backend->available ? "" : ": " + backend->reason);
}

struct Machine {
  std::string cpu = cpu_name();
  int usable_cores = oneapi::tbb::info::default_concurrency();  // what num_threads = 0 means
  unsigned cores = std::thread::hardware_concurrency();
  GpuReport gpu_report = find_gpus();
};

Json recipes_json() {
  Json recipes = Json::array();
  for (const std::string& name : recipe_names()) {
    recipes.push_back({{"name", name}, {"description", describe(make_recipe(name))}});
  }
  return recipes;
}

Json to_json(const Machine& machine, bool recipes) {
  Json json;
  json["command"] = "info";
  json["version"] = vcattn_version();
  json["build"] = {{"compiler", kCompiler}, {"type", VCATTN_BUILD_TYPE}, {"flags", VCATTN_BUILD_FLAGS}};
  json["cpu"] = {{"name", machine.cpu}, {"usable_cores", machine.usable_cores}, {"cores", machine.cores}};
  json["backends"] = Json::array();
  const std::vector<Backend> found = backends();
  for (const Backend& b : found) {
    json["backends"].push_back({{"name", b.name}, {"available", b.available}, {"reason", b.reason}});
  }
  const GpuReport& report = machine.gpu_report;
  json["gpu_driver"] = {{"found", report.driver_found}, {"text", report.driver}};
  json["gpus"] = Json::array();
  for (const Gpu& gpu : report.gpus) {
    json["gpus"].push_back({{"name", gpu.name},
                            {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
                            {"multiprocessors", gpu.multiprocessors},
                            {"memory_bytes", gpu.memory_bytes},
                            {"backends", backend_of(gpu, found) != nullptr ? Json{"sm90a"} : Json::array()},
                            {"reason", gpu_use(gpu, found)}});
  }
  if (recipes) json["recipes"] = recipes_json();
  return json;
}

std::string to_text(const Machine& machine, bool recipes, bool color) {
  std::string text = fmt::format("vcattn {}\n", vcattn_version());
  const auto line = [&](const char* title, const std::string& content) {
    text += fmt::format("{}{}\n", painted(fmt::format("{:<12}", title), Color::kBold, color), content);
  };
  line("compiler", kCompiler);
  line("build", fmt::format("{}: {}", VCATTN_BUILD_TYPE, VCATTN_BUILD_FLAGS));
  line("cpu", fmt::format("{}; {} of {} cores usable", machine.cpu, machine.usable_cores, machine.cores));
  const std::vector<Backend> found = backends();
  for (const Backend& b : found) {
    line("back end", fmt::format("{}: {}: {}", b.name, b.available ? "available" : "not available", b.reason));
  }
  line("gpu driver", machine.gpu_report.driver);
  if (machine.gpu_report.driver_found && machine.gpu_report.gpus.empty()) line("gpu", "none");
  for (const Gpu& gpu : machine.gpu_report.gpus) {
    line("gpu", fmt::format("{}, compute capability {}.{}, {} multiprocessors, {}: {}", gpu.name, gpu.compute_major,
                            gpu.compute_minor, gpu.multiprocessors, bytes_text(gpu.memory_bytes), gpu_use(gpu, found)));
  }
  if (recipes) {
    for (const std::string& name : recipe_names()) line("recipe", describe(make_recipe(name)));
  }
  return text;
}

}  // namespace

void add_info(CLI::App& app) {
  struct Options {
    std::string json;
    bool recipes = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "Show this build, this machine and what runs on it");
  command->add_option("--json", options->json, "write a report to a path, or to standard output with -");
  command->add_flag("--recipes", options->recipes, "list the recipes with all their fields");
  command->callback([options] {
    const Machine machine;
    if (!options->json.empty()) write_json(options->json, to_json(machine, options->recipes));
    if (options->json != "-") write_output("-", to_text(machine, options->recipes, is_interactive(stdout)));
  });
}

}  // namespace vcattn::cli
