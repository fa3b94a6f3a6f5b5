// vcattn bench attention: the kernels alone.
#include <memory>

#include "bench_rounds.h"
#include "bench_split.h"
#include "library.h"

namespace vcattn::cli {
namespace {

// A recipe with operands of its own, which no other's call writes over.
struct Prepared {
  SplitCall call;
  DeviceMemory workspace;

  explicit Prepared(const vcattn_attention_params& params) : call(params), workspace(call.workspace_bytes()) {
    call.use_workspace(workspace);
    call.prepare();
  }
};

BenchCase measure(const BenchShape& shape, const BenchOptions& options, const Card& card, const Stream& stream,
                  Progress& progress) {
  BenchCase result = {.shape = shape, .recipes = {}, .clocks = {}};
  const BenchTensors tensors(shape, stream);
  std::vector<std::unique_ptr<Prepared>> prepared;
  for (vcattn_recipe recipe : options.recipes) {
    recipe.v_order = VCATTN_ORDER_SEQUENCE;  // the kernel's time does not depend on the order of the keys
    const vcattn_attention_params params = tensors.params(recipe);
    prepared.push_back(std::make_unique<Prepared>(params));
    const SplitCall& call = prepared.back()->call;
    BenchPart part = {"attention", attention_flops(params), call.attention_bytes(), {}};
    result.recipes.push_back({recipe.name, describe(recipe), call.workspace_bytes(), 0, "", {std::move(part)}});
  }
  std::vector<BenchStep> steps;
  for (size_t i = 0; i < prepared.size(); ++i) {
    const SplitCall& call = prepared[i]->call;
    steps.push_back({&result.recipes[i].parts.front().milliseconds, [&call] { call.attention(); }});
  }
  run_rounds(steps, options.rounds, stream, card.clocks(), result.clocks, progress);
  return result;
}

}  // namespace

BenchResult bench_attention(const BenchOptions& options) {
  const Card card;
  const Stream stream;
  return measure_shapes(options, card, [&](const BenchShape& shape, Progress& progress) {
    return measure(shape, options, card, stream, progress);
  });
}

}  // namespace vcattn::cli
