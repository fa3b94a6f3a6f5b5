#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>

#include "compare_output.h"
#include "svg.h"

namespace vcattn::cli {
namespace {

using svg::escape;

// Smaller errors are FP32's own rounding, as from inputs that BF16 holds exactly; they would stretch the axis.
constexpr double kSmallestPlotted = 1e-5;

constexpr const char* kStyle = R"(
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f5f6f8; --line: #dde1e6; --ink: #1b2026; --dim: #59636e; --best: #dff3e4;
  --s0: #39465a; --s1: #2f6fde; --s2: #d9780b; --s3: #0b9268;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --panel: #1c2127; --line: #343b44; --ink: #e4e8ed; --dim: #9aa5b1; --best: #1d3d2b;
    --s0: #c3cedb; --s1: #6ea4ff; --s2: #f2a93b; --s3: #3dcb9c;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .5rem 0; max-width: 46rem; }
.facts, .note, footer { color: var(--dim); font-size: .9rem; }
.panel { background: var(--panel); border-radius: 8px; padding: .75rem 1rem; margin: .75rem 0; }
.panel > :first-child { margin-top: 0; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; margin: .75rem 0; }
.pair .panel { margin: 0; min-width: 0; }
.legend { font-size: .85rem; color: var(--dim); }
.legend span { white-space: nowrap; margin-right: 1rem; }
.legend svg { vertical-align: -1px; }
.bars { display: grid; grid-template-columns: 9rem minmax(0, 1fr); align-items: center; }
.label { font-size: .85rem; padding-right: .5rem; overflow-wrap: anywhere; }
.plot { display: block; overflow: visible; font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.axis { stroke: var(--dim); }
.tick { fill: var(--dim); font-size: 11px; }
.value { fill: var(--ink); }
.plot .note { fill: var(--dim); }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; }
td.best { background: var(--best); font-weight: 600; }
details { margin: .25rem 0; }
summary { cursor: pointer; }
code { font: .85rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; color: var(--dim); }
@media (max-width: 50rem) { .pair { grid-template-columns: 1fr; } }
@media (max-width: 36rem) {
  .bars { grid-template-columns: minmax(0, 1fr); }
  .label { padding-top: .5rem; }
  .label:empty { display: none; }
  th, td { padding: .25rem .4rem; }
}
)";

std::string paragraph(std::string_view text, std::string_view css_class = "") {
  return css_class.empty() ? fmt::format("<p>{}</p>\n", escape(text))
                           : fmt::format("<p class=\"{}\">{}</p>\n", css_class, escape(text));
}

std::string panel(const std::string& content) { return "<div class=\"panel\">\n" + content + "</div>\n"; }

std::string table_html(const ResultTable& table) {
  std::string html = "<div class=\"scroll\"><table>\n<tr>";
  for (const std::string& title : table.titles) html += fmt::format("<th scope=\"col\">{}</th>", escape(title));
  html += "</tr>\n";
  for (const std::vector<Cell>& row : table.rows) {
    html += "<tr>";
    for (const Cell& cell : row) {
      html += fmt::format("<td{}>{}</td>", cell.is_best ? " class=\"best\"" : "", escape(cell.text));
    }
    html += "</tr>\n";
  }
  html += "</table></div>\n";
  for (const std::string& note : table.notes) html += paragraph(note, "note");
  return html;
}

// Short enough for a phone: "0.01", "2e-4".
std::string decade_text(double tick) {
  if (tick > 0.9e-3) return fmt::format("{:g}", tick);
  const int exponent = static_cast<int>(std::floor(std::log10(tick) + 1e-9));
  return fmt::format("{:.0f}e{}", tick / std::pow(10.0, exponent), exponent);
}

std::string error_plot(const CompareResult& result) {
  svg::BarPlot plot{.description = "Relative error of each recipe and of its parts; the table below has the numbers",
                    .series = {"whole recipe", "Q and K alone", "P alone", "V alone"},
                    .rows = {},
                    .axis = svg::Axis::kLog,
                    .value_text = error_text,
                    .tick_text = decade_text};
  for (const RecipeResult& recipe : result.recipes) {
    svg::Bars bars{.label = recipe.name, .values = {}, .note = recipe.skipped.empty() ? "" : "skipped"};
    for (const double error : recipe.rel_l2) {
      bars.values.push_back(error >= kSmallestPlotted ? error : std::numeric_limits<double>::quiet_NaN());
    }
    plot.rows.push_back(bars);
  }
  return svg::bar_plot(plot);
}

std::string error_section(const CompareResult& result) {
  std::string html = "<h2>Error of the output</h2>\n";
  html += paragraph(
      "A recipe says how Q, K, the softmax probabilities P and V are stored in few bits. Its error is the length of "
      "the difference between its output and exact attention, divided by the length of the exact output: 0.01 means "
      "that one part in a hundred is wrong. The thin bars show the same recipe with only one operand stored in few "
      "bits, so the longest thin bar is what to improve first. The axis is logarithmic.");
  html += panel(error_plot(result));
  html += table_html(recipe_table(result));
  return html + paragraph("Marked: the best of each column among recipes that store every operand in 8 bits or fewer.",
                          "note");
}

std::string order_plot(const CompareResult& result, const char* description, double OrderResult::*value,
                       double shown_per_unit, std::function<std::string(double)> value_text) {
  svg::BarPlot plot{.description = description,
                    .series = {description},
                    .rows = {},
                    .axis = svg::Axis::kLinear,
                    .value_text = std::move(value_text),
                    .tick_text = [](double tick) { return fmt::format("{:g}", tick); }};
  for (const OrderResult& order : result.orders) {
    plot.rows.push_back({.label = order.name,
                         .values = {order.*value * shown_per_unit},
                         .note = order.skipped.empty() ? "" : "skipped"});
  }
  return svg::bar_plot(plot);
}

std::string order_section(const CompareResult& result) {
  std::string html = "<h2>Order of the value tokens</h2>\n";
  html += paragraph(
      "Attention does not depend on the order of its keys and values, so similar value tokens may be placed side by "
      "side. Each block of them is then stored as its mean and small differences, and only the differences are "
      "rounded. The first plot has the share of the energy (sum of squares) of V that the means take away before "
      "rounding; "
      "more is better. The second has the error that remains in the output when V alone is stored in 8 bits; less is "
      "better.");
  html += "<div class=\"pair\">\n";
  html += panel("<h3>Energy removed, %</h3>\n" +
                order_plot(result, "Energy removed by each order", &OrderResult::energy_removed, 100.0,
                           [](double percent) { return fmt::format("{:.1f}", percent); }));
  html += panel("<h3>Error from V alone, 1/1000</h3>\n" +
                order_plot(result, "Error from V alone in each order", &OrderResult::v_rel_l2, 1000.0, error_text));
  html += "</div>\n";
  html += table_html(order_table(result));
  html += "<details><summary>What the orders are</summary>\n<dl>\n";
  for (const OrderResult& order : result.orders) {
    html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escape(order.name), escape(order.description));
  }
  return html + "</dl>\n</details>\n";
}

double largest_share(const CodeCounts& counts) {
  const double total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  return static_cast<double>(*std::max_element(counts.begin() + 1, counts.end())) / std::max(total, 1.0);
}

std::string code_plot(const char* title, const CodeCounts& counts, int series, double top) {
  return panel(fmt::format("<h3>{}</h3>\n", title) +
               svg::histogram({.description = fmt::format("{}; the table below has the distances", title),
                               .counts = counts,
                               .series = series,
                               .top = top}));
}

std::string softmax_section(const ExpCastStats& stats) {
  std::string html = "<h2>Codes of the probabilities</h2>\n";
  html += paragraph(
      "ExpCast writes a probability as an 8-bit code straight from its score, without an exponential. The code grows "
      "by 8 each time the probability doubles, and code 0 means that the probability is lost. Against the maximum of "
      "the whole row (code 120), keys far below it end at the left edge; against the maximum of each tile of 128 keys "
      "the codes move to the right, where they are precise.");
  const double largest = std::max(largest_share(stats.running_codes), largest_share(stats.per_tile_codes));
  const double top = largest > 0.0 ? svg::axis_ticks(largest, largest, svg::Axis::kLinear).back() : 1.0;
  html += code_plot("Share of each code: maximum of the row", stats.running_codes, 2, top);
  html += code_plot("Share of each code: maximum of each tile", stats.per_tile_codes, 3, top);
  html += paragraph(
      "The total variation distance (TV) of a row is the probability that has moved to other keys: half the sum of "
      "the absolute differences to the exact softmax. It takes each key by itself: that the errors of neighbouring "
      "keys "
      "cancel in the output (p_phases=2) shows in the error of the output alone.");
  html += table_html(expcast_table(stats));
  for (const std::string& fact : expcast_facts(stats)) html += paragraph(fact, "note");
  return html;
}

std::string recipe_section(const CompareResult& result) {
  std::string html = "<h2>Recipes in full</h2>\n";
  for (const RecipeResult& recipe : result.recipes) {
    html += fmt::format("<details><summary>{}</summary><code>{}</code></details>\n", escape(recipe.name),
                        escape(recipe.description));
  }
  return html;
}

}  // namespace

std::string report_html(const CompareResult& result) {
  const std::string name = escape(std::filesystem::path(result.file).filename().string());
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>vcattn compare: {0}</title>\n<style>{1}</style>\n</head>\n<body>\n<main>\n<p class=\"facts\">vcattn "
      "compare</p>\n<h1>{0}</h1>\n",
      name, kStyle);
  html += paragraph("[batch, seqlen, num_heads, head_dim] = " + facts_text(result), "facts");
  if (!result.recipes.empty()) html += error_section(result);
  if (!result.orders.empty()) html += order_section(result);
  html += softmax_section(result.expcast);
  if (!result.recipes.empty()) html += recipe_section(result);
  return html + fmt::format("<footer><p>vcattn {}</p></footer>\n</main>\n</body>\n</html>\n", vcattn_version());
}

}  // namespace vcattn::cli
