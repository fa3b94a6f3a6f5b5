// The subcommands. Each adds itself to the application; its callback throws on failure, and main prints one line.
#pragma once

#include <CLI/CLI.hpp>

namespace vcattn::cli {

void add_info(CLI::App& app);
void add_attend(CLI::App& app);
void add_compare(CLI::App& app);
void add_synth(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace vcattn::cli
