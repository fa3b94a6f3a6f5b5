#include "bench_shapes.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>

namespace vcattn::cli {

const std::vector<BenchShape>& bench_presets() {
  const auto self = [](const char* name, int64_t tokens, int64_t heads, int64_t dim = 128) {
    return BenchShape{name, 1, tokens, tokens, heads, heads, dim};
  };
  static const std::vector<BenchShape> presets = {
      self("wan2.2-480p", 32760, 40),            // A14B, 81 frames
      self("wan2.2-720p", 75600, 40),            //
      self("wan2.2-5b", 27280, 24),              // 121 frames
      self("hunyuanvideo-720p", 119056, 24),     // 129 frames and 256 tokens of text
      self("hunyuanvideo1.5-480p", 49290, 16),   // 121 frames; without text
      self("hunyuanvideo1.5-720p", 111600, 16),  //
      self("longcat-480p", 37440, 32),           // 93 frames
      self("longcat-720p", 86400, 32),           //
      self("minimax-h3-37k", 37296, 56),         // packed sequences
      self("minimax-h3-73k", 72576, 56),         //
      self("minimax-h3-108k", 107856, 56),       //
      self("minimax-h3-1080p", 218280, 56),      //
      self("cogvideox-5b", 17776, 48, 64),       // 17,550 and 226 of text
      self("ltx2-6k", 6144, 32),                 // 121 frames
      self("ltx2-14k", 14080, 32),               //
      self("ltx2-33k", 32640, 32),               //
      self("flux", 4608, 24),                    // 4,096 and 512 of text
  };
  return presets;
}

std::string preset_names() {
  std::vector<std::string> names;
  for (const BenchShape& shape : bench_presets()) names.push_back(shape.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

BenchShape preset_by_name(const std::string& name) {
  for (const BenchShape& shape : bench_presets()) {
    if (shape.name == name) return shape;
  }
  throw CLI::ValidationError("--preset", fmt::format("{:?} is not known; the presets are {}", name, preset_names()));
}

BenchShape parse_shape(const std::string& text) {
  constexpr double kMaxElements = 0x1p40;  // of one tensor: more than a card holds, and products fit 64 bits
  BenchShape shape = {};
  shape.name = text;
  const char* at = text.data();
  const char* const end = at + text.size();
  int64_t* const extents[] = {&shape.batch,     &shape.seqlen_q,     &shape.seqlen_kv,
                              &shape.num_heads, &shape.num_heads_kv, &shape.head_dim};
  for (int64_t* extent : extents) {
    const auto [next, error] = std::from_chars(at, end, *extent);
    const bool last = extent == &shape.head_dim;
    if (error != std::errc() || *extent < 1 || (last ? next != end : next == end || *next != 'x')) {
      throw CLI::ValidationError(
          "--shape", fmt::format("expected batch x seqlen_q x seqlen_kv x num_heads x num_heads_kv x head_dim, each at "
                                 "least 1, as in 1x4608x4608x24x24x128; found {:?}",
                                 text));
    }
    at = next + 1;
  }
  const double rows = static_cast<double>(std::max(shape.seqlen_q, shape.seqlen_kv)) * static_cast<double>(shape.batch);
  const double width =
      static_cast<double>(std::max(shape.num_heads, shape.num_heads_kv)) * static_cast<double>(shape.head_dim);
  if (rows * width > kMaxElements) {
    throw CLI::ValidationError("--shape", fmt::format("expected tensors of at most 2^40 elements; found {:?}", text));
  }
  return shape;
}

}  // namespace vcattn::cli
