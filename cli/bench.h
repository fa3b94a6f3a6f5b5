// What `vcattn bench` measures and finds. The measuring itself needs a CUDA build (bench_attention.cpp,
// bench_call.cpp); bench_without_cuda.cpp stands in for it elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench_clocks.h"
#include "vcattn/vcattn.h"

namespace vcattn::cli {

struct BenchShape {
  std::string name;  // of the preset, or the extents as given
  int64_t batch, seqlen_q, seqlen_kv, num_heads, num_heads_kv, head_dim;
};

struct BenchOptions {
  std::vector<BenchShape> shapes;
  std::vector<vcattn_recipe> recipes;
  int rounds;
  bool unfused;  // bench_call: time preparation kernel by kernel through memory, too
};

// One timed piece of work.
struct BenchPart {
  std::string name;
  double flops;                      // 4 batch seqlen_q seqlen_kv num_heads head_dim where it holds attention, else 0
  double bytes;                      // that must move between the chip and its memory at least; 0: not counted
  std::vector<double> milliseconds;  // one a round, in the order taken
};

struct BenchRecipe {
  std::string name;
  std::string description;          // of all fields
  size_t workspace_bytes;           // of a call that is given the order of the keys
  size_t grouping_workspace_bytes;  // of vcattn_group; 0 where it was not called
  std::string not_grouped;          // why it was not called; empty where it was
  std::vector<BenchPart> parts;
  // Places of what is compared among the parts: preparation as calls run it, and every step of it through memory.
  struct Fusion {
    size_t fused, unfused;
  };
  std::optional<Fusion> fusion = std::nullopt;
};

struct BenchCase {
  BenchShape shape;
  std::vector<BenchRecipe> recipes;
  // The first before any work, the last right after it, the others while it ran. Empty without NVML.
  std::vector<ClockReading> clocks;
};

struct BenchMachine {
  std::string device;
  int multiprocessors = 0;
  size_t memory_bytes = 0, l2_bytes = 0;
  int cuda_driver = 0, cuda_runtime = 0;  // 1000 major + 10 minor; the runtime is that of this build
  ClockSource clocks;
};

struct BenchResult {
  BenchMachine machine;
  int rounds;
  std::vector<BenchCase> cases;
};

// That the sm90a back end cannot run here, and why; empty where it can.
std::string why_no_sm90a();

// The attention kernel of each recipe alone, on operands prepared before. Both throw where there is no card, where the
// back end does not serve a recipe or a shape, and where the card's memory is short.
BenchResult bench_attention(const BenchOptions& options);

// The parts of a whole call, and whole calls, of each recipe.
BenchResult bench_call(const BenchOptions& options);

}  // namespace vcattn::cli
