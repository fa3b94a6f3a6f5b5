#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "commands.h"
#include "vcattn/vcattn.h"

namespace {

int complain(std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::fprintf(stderr, "vcattn: %s\n", line.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond the size limit is a failed write, to be reported
  CLI::App app("Low-bit, non-causal attention for video diffusion transformers.", "vcattn");
  app.set_version_flag("--version", std::string("vcattn ") + vcattn_version());
  app.require_subcommand(1);
  try {
    vcattn::cli::add_info(app);
    vcattn::cli::add_attend(app);
    vcattn::cli::add_compare(app);
    vcattn::cli::add_synth(app);
    vcattn::cli::add_bench(app);
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    complain(std::string(error.what()) + " (--help lists the options)");
    return 2;
  } catch (const std::bad_alloc&) {
    return complain("out of memory");
  } catch (const std::length_error&) {  // a container that no memory could hold
    return complain("out of memory");
  } catch (const std::exception& error) {
    return complain(error.what());
  }
}
