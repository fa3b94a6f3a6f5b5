// The attention shapes of video and image diffusion transformers by name, and shapes as text.
#pragma once

#include <string>
#include <vector>

#include "bench.h"

namespace vcattn::cli {

// Self-attention of one layer, batch 1.
const std::vector<BenchShape>& bench_presets();
std::string preset_names();  // "flux, ..."

// Throws CLI::ValidationError, which names the presets.
BenchShape preset_by_name(const std::string& name);

// "BxSqxSkvxHxHkvxD". Throws CLI::ValidationError.
BenchShape parse_shape(const std::string& text);

}  // namespace vcattn::cli
