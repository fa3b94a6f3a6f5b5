// How names from files appear in messages: on one line, whatever bytes they hold, and cut to a sane length.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "io/tensor_file.h"

namespace vcattn::io {

inline constexpr size_t kShownPathBytes = 256;
inline constexpr size_t kShownBytes = 100;     // of a tensor name or a token
inline constexpr size_t kShownNameBytes = 40;  // of each name in a list
inline constexpr size_t kShownNames = 8;       // of a list of names
inline constexpr size_t kShownExtents = 8;     // of a shape

// `text` in double quotes; what is not printable UTF-8 is escaped. At most 4 characters come of each byte.
inline std::string shown(std::string_view text, size_t limit = kShownBytes) {
  if (text.size() <= limit) return fmt::format("{:?}", text);
  size_t end = limit;
  const auto continues = [&](size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80; };
  while (end > limit - 3 && continues(end)) --end;  // whole code points, where there are any
  return fmt::format("{:?}...", text.substr(0, end));
}

// A path opens every message, so it goes without quotes; its end says more than its beginning.
inline std::string shown_path(std::string_view path) {
  const bool cut = path.size() > kShownPathBytes;
  if (cut) path.remove_prefix(path.size() - kShownPathBytes);
  const std::string text = fmt::format("{:?}", path);
  return (cut ? "..." : "") + text.substr(1, text.size() - 2);
}

inline std::string shown_shape(std::span<const int64_t> shape) {
  const auto head = shape.first(std::min(shape.size(), kShownExtents));
  return fmt::format("[{}{}]", fmt::join(head, ", "), head.size() < shape.size() ? ", ..." : "");
}

template <typename... Args>
[[noreturn]] void fail(const std::string& path, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(fmt::format("{}: {}", shown_path(path), fmt::format(text, std::forward<Args>(args)...)));
}

// `tensors` are those that the file does hold.
template <typename Tensors>
[[noreturn]] void fail_missing(const std::string& path, const std::string& wanted, const Tensors& tensors) {
  std::string names;
  size_t count = 0;
  for (const auto& tensor : tensors) {
    if (count == kShownNames) break;
    names += (count++ == 0 ? "" : ", ") + shown(tensor.name, kShownNameBytes);
  }
  if (tensors.empty()) names = "no tensors";
  if (count < tensors.size()) names += fmt::format(" and {} more", tensors.size() - count);
  fail(path, "expected a tensor {}, found {}", shown(wanted), names);
}

}  // namespace vcattn::io
