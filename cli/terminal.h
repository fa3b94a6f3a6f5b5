// What the tool shows: tables and colour on a terminal, progress on stderr, results where --json points.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vcattn::cli {

// True where `stream` is a terminal that may be coloured and redrawn: no NO_COLOR in the environment, TERM not "dumb".
bool is_interactive(std::FILE* stream);

enum class Color { kBold, kDim, kRed, kGreen, kYellow, kCyan };

// `text` in `color` where `enabled` (is_interactive of the stream it goes to), else as it is.
std::string painted(std::string_view text, Color color, bool enabled);

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kRight;
};

// Plain text with aligned columns; widths count code points, so cells hold no colour. Rows may be painted whole.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // As many cells as columns. `paint` is used where text() is asked for colour.
  void add_row(std::vector<std::string> cells);
  void add_row(std::vector<std::string> cells, Color paint);
  // One line per row, each ended by a newline and without trailing spaces; the titles first.
  std::string text(bool color) const;

 private:
  struct Row {
    std::vector<std::string> cells;
    bool is_painted;
    Color paint;
  };
  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

// A bar on stderr with the elapsed time, redrawn in place and erased at the end; nothing where stderr is no terminal.
// Not for use by several threads at once.
class Progress {
 public:
  Progress(std::string title, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `detail` says what is being done now.
  void show(std::string_view detail);
  void advance(int64_t steps = 1);

 private:
  void draw();

  std::string title_, detail_;
  int64_t total_, done_ = 0;
  bool visible_;
  std::chrono::steady_clock::time_point start_;
};

// A result to a path, or to standard output where the path is "-". Throws std::runtime_error (io::Error) on failure.
void write_output(const std::string& path, const std::string& text);

// Refuses a path in a folder that does not exist, before the work whose result would be lost. Throws io::Error.
void check_output_folder(const std::string& path);

// "1.5 GiB", "812 B": three significant digits.
std::string bytes_text(uint64_t bytes);

}  // namespace vcattn::cli
