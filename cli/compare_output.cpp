#include "compare_output.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "terminal.h"

namespace vcattn::cli {
namespace {

constexpr char kBestMark = '*';
constexpr const char* kNoNumber = "-";

// One column of numbers and which of them may be marked as its best.
template <typename Result>
struct NumberColumn {
  std::string title;
  std::function<double(const Result&)> value;
  std::function<std::string(double)> text;
  double sign = 1.0;  // -1: larger is better
};

template <typename Result>
ResultTable make_table(const std::string& first_title, const std::vector<Result>& results,
                       const std::vector<NumberColumn<Result>>& columns,
                       const std::function<bool(const Result&)>& may_win) {
  ResultTable table{.titles = {first_title}, .rows = {}, .notes = {}};
  for (const Result& result : results) {
    table.rows.push_back({{result.name}});
    if (!result.skipped.empty()) table.notes.push_back(fmt::format("{} skipped: {}", result.name, result.skipped));
  }
  for (const NumberColumn<Result>& column : columns) {
    table.titles.push_back(column.title);
    double best = std::numeric_limits<double>::infinity();
    for (const Result& result : results) {
      const bool competes = result.skipped.empty() && may_win(result);
      if (competes) best = std::min(best, column.sign * column.value(result));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const bool has_number = results[i].skipped.empty();
      const double value = has_number ? column.value(results[i]) : 0.0;
      table.rows[i].push_back({.text = has_number ? column.text(value) : kNoNumber,
                               .is_best = has_number && may_win(results[i]) && column.sign * value == best});
    }
  }
  return table;
}

std::string percent_text(double share) { return fmt::format("{:.1f} %", 100.0 * share); }

std::string table_text(const ResultTable& table, bool color) {
  std::vector<Column> columns;
  for (const std::string& title : table.titles) {
    columns.push_back({title, columns.empty() ? Align::kLeft : Align::kRight});
  }
  Table layout(columns);
  for (const std::vector<Cell>& row : table.rows) {
    std::vector<std::string> cells;
    // A space keeps the digits of the others in line with those that are marked.
    for (const Cell& cell : row) cells.push_back(cell.text + (cell.is_best ? kBestMark : ' '));
    layout.add_row(cells);
  }
  std::string text = layout.text(color);
  if (color) {
    for (size_t mark = text.find(kBestMark); mark != std::string::npos; mark = text.find(kBestMark, mark)) {
      const size_t begin = text.find_last_of(" \n", mark) + 1;
      const std::string best = painted(std::string_view(text).substr(begin, mark - begin), Color::kGreen, true) + ' ';
      text.replace(begin, mark + 1 - begin, best);
      mark = begin + best.size();
    }
  }
  for (const std::string& note : table.notes) text += note + "\n";
  return text;
}

Json recipe_json(const RecipeResult& recipe) {
  if (!recipe.skipped.empty()) return {{"name", recipe.name}, {"skipped", recipe.skipped}};
  const auto error = [&](Part part) { return recipe.rel_l2[static_cast<size_t>(part)]; };
  return {{"name", recipe.name},         {"rel_l2", error(Part::kWhole)}, {"qk_rel_l2", error(Part::kQk)},
          {"p_rel_l2", error(Part::kP)}, {"v_rel_l2", error(Part::kV)},   {"cosine", recipe.cosine},
          {"max_abs", recipe.max_abs}};
}

Json order_json(const OrderResult& order) {
  if (!order.skipped.empty()) return {{"name", order.name}, {"skipped", order.skipped}};
  return {{"name", order.name}, {"energy_removed", order.energy_removed}, {"v_rel_l2", order.v_rel_l2}};
}

Json distance_json(const Distance& distance) { return {{"mean", distance.mean}, {"max", distance.max}}; }

Json expcast_json(const ExpCastStats& stats) {
  return {{"rows", stats.rows},
          {"total_variation",
           {{"expcast", distance_json(stats.expcast)},
            {"exp2_e4m3", distance_json(stats.exp2_e4m3)},
            {"expcast_two_lines", distance_json(stats.two_lines)},
            {"expcast_per_tile", distance_json(stats.expcast_per_tile)}}},
          {"bound", kExpCastTvBound},
          {"rows_without_underflow", stats.rows_without_underflow},
          // JSON has no NaN: null where every row underflows.
          {"max_without_underflow",
           stats.rows_without_underflow > 0 ? Json(stats.max_tv_without_underflow) : Json(nullptr)},
          {"mean_underflow_mass", stats.mean_underflow_mass},
          {"bound_violations", stats.bound_violations},
          {"codes", {{"running", stats.running_codes}, {"per_tile", stats.per_tile_codes}}}};
}

Json shape_json(const CompareResult& result) {
  return {{"batch", result.q_shape[0]},     {"seqlen_q", result.q_shape[1]},      {"seqlen_kv", result.kv_shape[1]},
          {"num_heads", result.q_shape[2]}, {"num_heads_kv", result.kv_shape[2]}, {"head_dim", result.q_shape[3]}};
}

}  // namespace

std::string error_text(double value) {
  const double magnitude = std::abs(value);
  if (magnitude == 0.0) return "0";
  if (magnitude < 1e-6 || magnitude >= 1e6) return fmt::format("{:.2e}", value);
  const int decimals = std::max(0, 2 - static_cast<int>(std::floor(std::log10(magnitude))));
  return fmt::format("{:.{}f}", value, decimals);
}

std::string facts_text(const CompareResult& result) {
  const bool one_length = result.q_shape == result.kv_shape;
  return fmt::format("[{}]{} {}; {} of {} query rows; softmax scale {:.4g}", fmt::join(result.q_shape, ", "),
                     one_length ? "" : fmt::format(" to [{}]", fmt::join(result.kv_shape, ", ")), result.dtype,
                     result.rows, result.q_shape[1], result.softmax_scale);
}

ResultTable recipe_table(const CompareResult& result) {
  const auto error = [](Part part) {
    return [part](const RecipeResult& r) { return r.rel_l2[static_cast<size_t>(part)]; };
  };
  return make_table<RecipeResult>("recipe", result.recipes,
                                  {{"rel L2", error(Part::kWhole), error_text},
                                   {"QK alone", error(Part::kQk), error_text},
                                   {"P alone", error(Part::kP), error_text},
                                   {"V alone", error(Part::kV), error_text},
                                   {"1 - cosine", [](const RecipeResult& r) { return 1.0 - r.cosine; }, error_text},
                                   {"max abs", [](const RecipeResult& r) { return r.max_abs; }, error_text}},
                                  [](const RecipeResult& r) { return r.is_low_bit; });
}

ResultTable order_table(const CompareResult& result) {
  return make_table<OrderResult>(
      "order of V", result.orders,
      {{"energy removed", [](const OrderResult& r) { return r.energy_removed; }, percent_text, -1.0},
       {"V alone", [](const OrderResult& r) { return r.v_rel_l2; }, error_text}},
      [](const OrderResult&) { return true; });
}

ResultTable expcast_table(const ExpCastStats& stats) {
  struct Row {
    std::string name;
    Distance distance;
    std::string skipped;
  };
  const std::vector<Row> rows = {{"exp2, then E4M3", stats.exp2_e4m3, ""},
                                 {"ExpCast", stats.expcast, ""},
                                 {"ExpCast, two lines", stats.two_lines, ""},
                                 {"ExpCast per tile", stats.expcast_per_tile, ""}};
  return make_table<Row>("P by", rows,
                         {{"mean TV", [](const Row& r) { return r.distance.mean; }, error_text},
                          {"max TV", [](const Row& r) { return r.distance.max; }, error_text}},
                         [](const Row&) { return true; });
}

std::vector<std::string> expcast_facts(const ExpCastStats& stats) {
  std::vector<std::string> facts = {fmt::format("{} of {} rows have no probability under 2^{:g} of their largest.",
                                                stats.rows_without_underflow, stats.rows, kUnderflowLog2)};
  if (stats.rows_without_underflow > 0) {
    facts.back().pop_back();
    facts.back() += fmt::format("; their largest TV is {}, the bound {}.", error_text(stats.max_tv_without_underflow),
                                error_text(kExpCastTvBound));
  }
  facts.push_back(fmt::format("Mean probability tau under that limit: {}.", error_text(stats.mean_underflow_mass)));
  facts.push_back(
      stats.bound_violations == 0
          ? fmt::format("TV <= {} + tau holds for every row.", error_text(kExpCastTvBound))
          : fmt::format("TV <= {} + tau is violated by {} rows.", error_text(kExpCastTvBound), stats.bound_violations));
  return facts;
}

std::string compare_text(const CompareResult& result, bool color) {
  const auto heading = [&](const char* text) { return fmt::format("\n{}\n", painted(text, Color::kBold, color)); };
  std::string text = fmt::format("{}\n{}\n", painted(result.file, Color::kBold, color), facts_text(result));
  if (!result.recipes.empty()) {
    text += heading("Error of the output against FP64, ||out - exact|| / ||exact||") +
            table_text(recipe_table(result), color);
  }
  if (!result.orders.empty()) {
    text += heading("Order of the value tokens: energy in the block means, error from E4M3 V alone") +
            table_text(order_table(result), color);
  }
  text += heading("Total variation distance of the softmax rows") + table_text(expcast_table(result.expcast), color);
  for (const std::string& fact : expcast_facts(result.expcast)) text += fact + "\n";
  return text;
}

Json compare_json(const CompareResult& result) {
  Json recipes = Json::array(), orders = Json::array();
  for (const RecipeResult& recipe : result.recipes) recipes.push_back(recipe_json(recipe));
  for (const OrderResult& order : result.orders) orders.push_back(order_json(order));
  return {
      {"version", vcattn_version()},
      {"input", {{"file", result.file}, {"shape", shape_json(result)}, {"dtype", result.dtype}, {"rows", result.rows}}},
      {"recipes", recipes},
      {"orders", orders},
      {"expcast", expcast_json(result.expcast)}};
}

}  // namespace vcattn::cli
