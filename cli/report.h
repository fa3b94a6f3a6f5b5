// A comparison as one HTML page that needs nothing else: style and plots are inline, no script, nothing is fetched.
#pragma once

#include <string>

#include "compare.h"

namespace vcattn::cli {

std::string report_html(const CompareResult& result);

}  // namespace vcattn::cli
