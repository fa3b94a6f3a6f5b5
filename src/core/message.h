// Failure as a value: a code, and one line for the caller's vcattn_message.
#pragma once

#include <fmt/format.h>

#include "vcattn/vcattn.h"

namespace vcattn {

// One line: control characters are replaced.
template <typename... Args>
void set_message(vcattn_message* message, fmt::format_string<Args...> format, Args&&... args) {
  if (message == nullptr) return;
  const auto end = fmt::format_to_n(message->text, sizeof message->text - 1, format, std::forward<Args>(args)...);
  *end.out = '\0';
  for (char* c = message->text; *c != '\0'; ++c) {
    if (static_cast<unsigned char>(*c) < ' ' || *c == '\x7f') *c = '?';  // callers' names may hold anything
  }
}

template <typename... Args>
vcattn_code fail(vcattn_message* message, vcattn_code code, fmt::format_string<Args...> format, Args&&... args) {
  set_message(message, format, std::forward<Args>(args)...);
  return code;
}

}  // namespace vcattn
