// Failure as a value: a code, and one line for the caller's vcattn_message.
#pragma once

#include <fmt/format.h>

#include "vcattn/vcattn.h"

namespace vcattn {

template <typename... Args>
void set_message(vcattn_message* message, fmt::format_string<Args...> format, Args&&... args) {
  if (message == nullptr) return;
  const auto end = fmt::format_to_n(message->text, sizeof message->text - 1, format, std::forward<Args>(args)...);
  *end.out = '\0';
}

template <typename... Args>
vcattn_code fail(vcattn_message* message, vcattn_code code, fmt::format_string<Args...> format, Args&&... args) {
  set_message(message, format, std::forward<Args>(args)...);
  return code;
}

}  // namespace vcattn
