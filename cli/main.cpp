#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "commands.h"
#include "vcattn/vcattn.h"

int main(int argc, char** argv) {
  CLI::App app("Low-bit, non-causal attention for video diffusion transformers.", "vcattn");
  app.set_version_flag("--version", std::string("vcattn ") + vcattn_version());
  app.require_subcommand(1);
  try {
    vcattn::cli::add_info(app);
    vcattn::cli::add_attend(app);
    vcattn::cli::add_compare(app);
    vcattn::cli::add_synth(app);
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::bad_alloc&) {
    std::fputs("vcattn: out of memory\n", stderr);
  } catch (const std::length_error&) {  // a container that no memory could hold
    std::fputs("vcattn: out of memory\n", stderr);
  } catch (const std::exception& error) {
    std::string line = error.what();
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::fprintf(stderr, "vcattn: %s\n", line.c_str());
  }
  return 1;
}
