// Results for --json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "terminal.h"

namespace vcattn::cli {

using Json = nlohmann::ordered_json;  // keys in the order written

// "-" is standard output. Bytes of a path that are no UTF-8 become U+FFFD: JSON has no other place for them.
inline void write_json(const std::string& path, const Json& json) {
  write_output(path, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace vcattn::cli
