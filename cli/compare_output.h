// The results of a comparison as tables, which the terminal and the report share, and as JSON.
#pragma once

#include <string>
#include <vector>

#include "compare.h"
#include "json_output.h"

namespace vcattn::cli {

// Three significant digits, without an exponent while that is short: "0.00332", "1.73", "2.10e-08".
std::string error_text(double value);

// "[1, 16448, 1, 128] BF16; 512 of 16448 query rows; softmax scale 0.0884"
std::string facts_text(const CompareResult& result);

struct Cell {
  std::string text;
  bool is_best = false;  // of its column
};

struct ResultTable {
  std::vector<std::string> titles;
  std::vector<std::vector<Cell>> rows;  // the first cell names the row
  std::vector<std::string> notes;       // what was skipped, and why
};

// Best is the smallest error among recipes with every operand in 8 bits or fewer: bf16 would win all of them.
ResultTable recipe_table(const CompareResult& result);
ResultTable order_table(const CompareResult& result);
// Distances of each way to write P.
ResultTable expcast_table(const ExpCastStats& stats);
// What the distances are to be seen against, one sentence a line.
std::vector<std::string> expcast_facts(const ExpCastStats& stats);

// All of it for a terminal or a pipe; the best of each column is starred, and green where `color`.
std::string compare_text(const CompareResult& result, bool color);

// {"version", "input", "recipes", "orders", "expcast"}; what was skipped has "skipped": reason instead of its numbers.
Json compare_json(const CompareResult& result);

}  // namespace vcattn::cli
