// What `vcattn bench` prints and writes.
#pragma once

#include <string>

#include "bench.h"
#include "json_output.h"

namespace vcattn::cli {

// Tables of medians, for people. Bytes are shown beside the parts of a call, where memory bounds some of them.
std::string bench_text(const BenchResult& result, bool shows_bytes, bool color);

// Everything, with all samples. `command`: "bench attention", "bench call".
Json bench_json(const BenchResult& result, const std::string& command);

double median(std::vector<double> values);

}  // namespace vcattn::cli
