#include "terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "io/message.h"
#include "io/tensor_file.h"

namespace vcattn::cli {
namespace {

constexpr int kBarCells = 24;
constexpr std::string_view kColumnGap = "  ";
constexpr const char* kEraseLine = "\r\033[K";

const char* escape_of(Color color) {
  switch (color) {
    case Color::kBold:
      return "\033[1m";
    case Color::kDim:
      return "\033[2m";
    case Color::kRed:
      return "\033[31m";
    case Color::kGreen:
      return "\033[32m";
    case Color::kYellow:
      return "\033[33m";
    case Color::kCyan:
      return "\033[36m";
  }
  return "";
}

size_t code_points(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

bool is_interactive(std::FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");  // https://no-color.org: set and not empty
  if (no_color != nullptr && no_color[0] != '\0') return false;
  const char* terminal = std::getenv("TERM");
  if (terminal != nullptr && std::string_view(terminal) == "dumb") return false;
  return ::isatty(::fileno(stream)) == 1;
}

std::string painted(std::string_view text, Color color, bool enabled) {
  return enabled ? fmt::format("{}{}\033[0m", escape_of(color), text) : std::string(text);
}

void Table::add_row(std::vector<std::string> cells) { rows_.push_back({std::move(cells), false, Color::kBold}); }

void Table::add_row(std::vector<std::string> cells, Color paint) { rows_.push_back({std::move(cells), true, paint}); }

std::string Table::text(bool color) const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = code_points(columns_[c].title);
    for (const Row& row : rows_) width = std::max(width, code_points(row.cells.at(c)));
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string padding(widths[c] - code_points(cell), ' ');
      if (c > 0) text += kColumnGap;
      text += columns_[c].align == Align::kLeft ? cell + padding : padding + cell;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  const std::string titles = line([&](size_t c) -> const std::string& { return columns_[c].title; });
  std::string result = painted(titles, Color::kBold, color) + "\n";
  for (const Row& row : rows_) {
    const std::string text = line([&](size_t c) -> const std::string& { return row.cells[c]; });
    result += painted(text, row.paint, color && row.is_painted) + "\n";
  }
  return result;
}

Progress::Progress(std::string title, int64_t total)
    : title_(std::move(title)),
      total_(std::max<int64_t>(total, 1)),
      visible_(is_interactive(stderr)),
      start_(std::chrono::steady_clock::now()) {
  draw();
}

Progress::~Progress() {
  if (visible_) std::fputs(kEraseLine, stderr);
}

void Progress::show(std::string_view detail) {
  detail_ = detail;
  draw();
}

void Progress::advance(int64_t steps) {
  done_ = std::min(done_ + steps, total_);
  draw();
}

void Progress::draw() {
  if (!visible_) return;
  const int filled = static_cast<int>(done_ * kBarCells / total_);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  const std::string line = fmt::format("{}{} [{:#<{}}{:.<{}}] {}/{}  {:.0f} s  {}", kEraseLine, title_, "", filled, "",
                                       kBarCells - filled, done_, total_, elapsed.count(), detail_);
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

void write_output(const std::string& path, const std::string& text) {
  if (path != "-") return io::write_text(path, text);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw std::runtime_error(fmt::format("standard output: cannot write: {}", std::generic_category().message(errno)));
  }
}

void check_output_folder(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) io::fail(path, "its folder does not exist");
}

std::string bytes_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {  // 999.5 would print as 1e+03
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.3g} {}", value, kUnits[unit]);
}

}  // namespace vcattn::cli
