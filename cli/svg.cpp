#include "svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace vcattn::cli::svg {
namespace {

// The axis ends here, in percent of the width; the rest is room for the value beside the longest bar.
constexpr double kAxisWidth = 86.0;

// CSS pixels.
constexpr double kThickBar = 12, kThinBar = 6, kBarGap = 2, kRowPadding = 5;
constexpr double kAxisHeight = 22, kNoteHeight = 24;
constexpr double kColumnsHeight = 130, kColumnsTop = 16;
constexpr size_t kMostTicks = 8;

double position(double value, const std::vector<double>& ticks, Axis axis) {
  const double low = axis == Axis::kLog ? std::log(ticks.front()) : ticks.front();
  const double high = axis == Axis::kLog ? std::log(ticks.back()) : ticks.back();
  const double at = axis == Axis::kLog ? std::log(value) : value;
  return kAxisWidth * std::clamp((at - low) / (high - low), 0.0, 1.0);
}

std::string open_svg(double height, std::string_view extra) {
  return fmt::format("<svg class=\"plot\" width=\"100%\" height=\"{:g}\" {}>\n", height, extra);
}

std::string vertical_line(double percent, double height) {
  return fmt::format("<line class=\"grid\" x1=\"{0:.2f}%\" x2=\"{0:.2f}%\" y1=\"0\" y2=\"{1:g}\"/>\n", percent, height);
}

double bar_height(size_t series) { return series == 0 ? kThickBar : kThinBar; }

std::string bars_svg(const BarPlot& plot, const Bars& row, const std::vector<double>& ticks) {
  double height = kRowPadding;
  for (size_t s = 0; s < plot.series.size(); ++s) height += bar_height(s) + kBarGap;
  height = row.note.empty() ? height + kRowPadding : kNoteHeight;

  std::string text = open_svg(height, "aria-hidden=\"true\"");
  for (const double tick : ticks) text += vertical_line(position(tick, ticks, plot.axis), height);
  if (!row.note.empty()) {
    return text + fmt::format("<text class=\"note\" x=\"0\" y=\"16\">{}</text>\n</svg>\n", escape(row.note));
  }
  double y = kRowPadding;
  for (size_t s = 0; s < row.values.size(); ++s) {
    const double value = row.values[s];
    if (std::isnan(value)) {
      y += bar_height(s) + kBarGap;
      continue;
    }
    const double width = position(value, ticks, plot.axis);
    text += fmt::format(
        "<rect class=\"s{}\" x=\"0\" y=\"{:g}\" width=\"{:.2f}%\" height=\"{:g}\" rx=\"1\"><title>{}: "
        "{}</title></rect>\n",
        s, y, width, bar_height(s), escape(plot.series[s]), escape(plot.value_text(value)));
    if (s == 0) {
      text += fmt::format("<text class=\"value\" x=\"{:.2f}%\" y=\"{:g}\" dx=\"5\">{}</text>\n", width,
                          y + kThickBar - 1.5, escape(plot.value_text(value)));
    }
    y += bar_height(s) + kBarGap;
  }
  return text + "</svg>\n";
}

std::string axis_svg(const BarPlot& plot, const std::vector<double>& ticks) {
  std::string text = open_svg(kAxisHeight, "aria-hidden=\"true\"");
  for (const double tick : ticks) {
    const double at = position(tick, ticks, plot.axis);
    text += vertical_line(at, 5);
    text += fmt::format("<text class=\"tick\" x=\"{:.2f}%\" y=\"17\" text-anchor=\"{}\">{}</text>\n", at,
                        tick == ticks.front() ? "start" : "middle", escape(plot.tick_text(tick)));
  }
  return text + "</svg>\n";
}

// 1, 2 or 5 times a power of ten: the largest at most `value`, or the smallest at least `value`.
double round_down(double value) {
  const double decade = std::pow(10.0, std::floor(std::log10(value)));
  for (const double digit : {5.0, 2.0}) {
    if (digit * decade <= value) return digit * decade;
  }
  return decade;
}
double round_up(double value) {
  const double decade = std::pow(10.0, std::floor(std::log10(value)));
  for (const double digit : {1.0, 2.0, 5.0}) {
    if (digit * decade >= value) return digit * decade;
  }
  return 10.0 * decade;
}

std::vector<double> linear_ticks(double largest) {
  const double step = round_up(largest / (kMostTicks - 2));
  std::vector<double> ticks = {0.0};
  while (ticks.back() < largest) ticks.push_back(step * static_cast<double>(ticks.size()));
  return ticks;
}

std::vector<double> log_ticks(double smallest, double largest) {
  // Strictly under the smallest value, so that its bar can be seen.
  const double low = round_down(smallest / 1.2), high = round_up(largest);
  std::vector<double> ticks;
  for (double tick = low; tick <= high * 1.01; tick = round_up(tick * 1.01)) ticks.push_back(tick);
  if (ticks.size() <= kMostTicks) return ticks;
  const int first = static_cast<int>(std::floor(std::log10(low) + 1e-9));
  const int last = static_cast<int>(std::ceil(std::log10(high) - 1e-9));
  const int step = (last - first + static_cast<int>(kMostTicks) - 2) / (static_cast<int>(kMostTicks) - 1);
  ticks.clear();
  for (int exponent = first; ticks.empty() || ticks.back() < high; exponent += step) {
    ticks.push_back(std::pow(10.0, exponent));
  }
  return ticks;
}

}  // namespace

std::string escape(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::vector<double> axis_ticks(double smallest, double largest, Axis axis) {
  return axis == Axis::kLog ? log_ticks(smallest, largest) : linear_ticks(largest);
}

std::string bar_plot(const BarPlot& plot) {
  double smallest = std::numeric_limits<double>::infinity(), largest = 0.0;
  for (const Bars& row : plot.rows) {
    for (const double value : row.values) {
      if (!(value > 0.0) || !row.note.empty()) continue;
      smallest = std::min(smallest, value);
      largest = std::max(largest, value);
    }
  }
  const std::vector<double> ticks =
      largest > 0.0 ? axis_ticks(smallest, largest, plot.axis) : axis_ticks(0.1, 1.0, plot.axis);

  std::string text;
  if (plot.series.size() > 1) {
    text += "<p class=\"legend\">";
    for (size_t s = 0; s < plot.series.size(); ++s) {
      text += fmt::format(
          "<span><svg width=\"12\" height=\"12\" aria-hidden=\"true\"><rect class=\"s{}\" width=\"12\" "
          "height=\"12\" rx=\"2\"/></svg> {}</span> ",
          s, escape(plot.series[s]));
    }
    text += "</p>\n";
  }
  text += fmt::format("<div class=\"bars\" role=\"img\" aria-label=\"{}\">\n", escape(plot.description));
  for (const Bars& row : plot.rows) {
    text += fmt::format("<div class=\"label\">{}</div>\n{}", escape(row.label), bars_svg(plot, row, ticks));
  }
  return text + "<div class=\"label\"></div>\n" + axis_svg(plot, ticks) + "</div>\n";
}

std::string histogram(const Histogram& histogram) {
  const double bottom = kColumnsTop + kColumnsHeight;
  const double pitch = 100.0 / static_cast<double>(histogram.counts.size());
  const double total =
      static_cast<double>(std::accumulate(histogram.counts.begin(), histogram.counts.end(), int64_t{0}));
  std::string text =
      open_svg(bottom + kAxisHeight, fmt::format("role=\"img\" aria-label=\"{}\"", escape(histogram.description)));

  for (const double share : {0.25, 0.5, 0.75, 1.0}) {
    const double y = bottom - share * kColumnsHeight;
    text += fmt::format("<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{0:g}\" y2=\"{0:g}\"/>\n", y);
    text += fmt::format("<text class=\"tick\" x=\"100%\" y=\"{:g}\" text-anchor=\"end\">{:.3g} %</text>\n", y - 3,
                        100.0 * share * histogram.top);
  }
  for (size_t i = 0; i < histogram.counts.size(); ++i) {
    const double share = total > 0.0 ? static_cast<double>(histogram.counts[i]) / total : 0.0;
    if (share == 0.0) continue;
    const double height = kColumnsHeight * std::min(1.0, share / histogram.top);
    const double x = pitch * static_cast<double>(i);
    text += fmt::format(
        "<rect class=\"s{}\" x=\"{:.2f}%\" y=\"{:.1f}\" width=\"{:.2f}%\" height=\"{:.1f}\"><title>{}: {:.3g} %"
        "</title></rect>\n",
        histogram.series, x, bottom - height, 0.85 * pitch, height, i, 100.0 * share);
    if (share > histogram.top) {
      text += fmt::format("<text class=\"value\" x=\"{:.2f}%\" y=\"{:g}\">{}: {:.3g} % (cut off)</text>\n", x,
                          kColumnsTop - 4, i, 100.0 * share);
    }
  }
  text += fmt::format("<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"{0:g}\" y2=\"{0:g}\"/>\n", bottom);
  for (size_t i = 0; i < histogram.counts.size(); i += static_cast<size_t>(histogram.tick_step)) {
    text += fmt::format("<text class=\"tick\" x=\"{:.2f}%\" y=\"{:g}\" text-anchor=\"{}\">{}</text>\n",
                        pitch * (static_cast<double>(i) + (i == 0 ? 0.0 : 0.5)), bottom + 15,
                        i == 0 ? "start" : "middle", i);
  }
  return text + "</svg>\n";
}

}  // namespace vcattn::cli::svg
