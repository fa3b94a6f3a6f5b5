// Plots as HTML with inline SVG. Horizontal positions are percentages and everything else is in CSS pixels, so a plot
// fills its column at any width while its text keeps its size. Colours come from the page's style sheet, by class:
// s0, s1, ... for the series, grid and text; bars, label, plot and legend lay the parts out.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace vcattn::cli::svg {

// Text as element content or attribute value.
std::string escape(std::string_view text);

enum class Axis { kLinear, kLog };

struct Bars {
  std::string label;
  std::vector<double> values;  // one per series; NaN draws nothing
  std::string note;            // shown instead of bars where not empty
};

struct BarPlot {
  std::string description;          // for screen readers
  std::vector<std::string> series;  // the first is drawn thick and carries its value as text
  std::vector<Bars> rows;
  Axis axis = Axis::kLinear;  // kLog: values > 0
  std::function<std::string(double)> value_text;
  std::function<std::string(double)> tick_text;
};

// Horizontal bars, one row per label, with a common axis at the bottom.
std::string bar_plot(const BarPlot& plot);

struct Histogram {
  std::string description;
  std::span<const int64_t> counts;  // column i: share of counts[i] in the sum
  int series = 0;                   // colour
  double top = 1.0;                 // share at the upper edge; larger shares are cut off there and say so
  int tick_step = 20;               // columns between labels
};

// Columns over 0 .. counts.size() - 1, heights linear in the share.
std::string histogram(const Histogram& histogram);

// ---- axes, for the tests ------------------------------------------------------------------------------------------

// Ends and ticks of an axis that covers [smallest, largest] (positive). Ticks are 1, 2 or 5 times a power of ten, at
// most eight of them, ascending, the ends included.
std::vector<double> axis_ticks(double smallest, double largest, Axis axis);

}  // namespace vcattn::cli::svg
