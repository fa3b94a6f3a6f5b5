// vcattn bench call: where the time of a whole call goes.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "bench_rounds.h"
#include "bench_split.h"
#include "library.h"

namespace vcattn::cli {
namespace {

// One recipe on one shape: its parts and whole calls, in the order in which each finds what it needs from those before,
// in memory of its own.
class RecipeBench {
 public:
  RecipeBench(const BenchTensors& tensors, const vcattn_recipe& recipe, bool unfused)
      : ordering_(tensors.params(recipe)), sequence_(ordering_) {
    sequence_.recipe.v_order = VCATTN_ORDER_SEQUENCE;
    result_ = {.name = recipe.name,
               .description = describe(recipe),
               .workspace_bytes = 0,
               .grouping_workspace_bytes = 0,
               .not_grouped = why_not_grouped(),
               .parts = {},
               .fusion = {}};
    const bool groups = result_.not_grouped.empty();
    ordered_ = groups ? ordering_ : sequence_;
    if (groups) make_room_for_groups();
    split_.emplace(ordered_);
    result_.workspace_bytes = split_->workspace_bytes();
    workspace_.emplace(std::max({split_->workspace_bytes(), grouping_bytes(), groups ? call_bytes(ordering_) : 0}));
    split_->use_workspace(*workspace_);
    if (groups) add_grouping();
    add_stages();
    if (unfused) add_unfused();
    add_calls(groups);
  }

  size_t num_steps() const { return launches_.size(); }
  BenchStep step(size_t i) { return {&result_.parts[i].milliseconds, launches_[i]}; }

  BenchRecipe result() { return std::move(result_); }

 private:
  std::string why_not_grouped() const {
    if (ordering_.recipe.v_order == VCATTN_ORDER_SEQUENCE) return "the recipe keeps the order of the sequence";
    size_t bytes = 0;
    vcattn_message message = {};
    return vcattn_group_workspace_size(&ordering_, &bytes, &message) == VCATTN_OK ? "" : message.text;
  }

  static size_t call_bytes(const vcattn_attention_params& params) {
    size_t bytes = 0;
    vcattn_message message = {};
    check(vcattn_attention_workspace_size(&params, &bytes, &message), message);
    return bytes;
  }

  size_t grouping_bytes() const { return result_.grouping_workspace_bytes; }

  void make_room_for_groups() {
    vcattn_message message = {};
    check(vcattn_group_workspace_size(&ordering_, &result_.grouping_workspace_bytes, &message), message);
    const int64_t* v = ordering_.v.shape;
    const int64_t clusters = ordering_.recipe.grouping.clusters;
    permutation_.emplace(static_cast<size_t>(v[0] * v[2] * v[1]) * sizeof(int32_t));
    centroids_.emplace(static_cast<size_t>(v[0] * v[2] * clusters * v[3]) * sizeof(float));
    ordered_.permutation = permutation_->as<const int32_t>();
  }

  void add(std::string name, double flops, double bytes, std::function<void()> launch) {
    result_.parts.push_back({std::move(name), flops, bytes, {}});
    launches_.push_back(std::move(launch));
  }

  void group(bool warm) const {
    vcattn_message message = {};
    check(vcattn_group(&ordering_, warm ? 1 : 0, centroids_->as<float>(), permutation_->as<int32_t>(), workspace_->as(),
                       workspace_->bytes(), &message),
          message);
  }

  void call(const vcattn_attention_params& params) const {
    vcattn_message message = {};
    check(vcattn_attention(&params, workspace_->as(), workspace_->bytes(), &message), message);
  }

  double grouping_traffic() const {
    return static_cast<double>(ordering_.v.shape[0] * ordering_.v.shape[1] * ordering_.v.shape[2]) *
           static_cast<double>(ordering_.v.shape[3] * 2 + 4);  // BF16 in, a position of 32 bits out
  }

  void add_grouping() {
    add("grouping, cold", 0, grouping_traffic(), [this] { group(false); });
    add("grouping, warm", 0, grouping_traffic(), [this] { group(true); });
  }

  void add_stages() {
    const SplitCall& split = *split_;
    const double prepared = split.key_bytes() + split.value_bytes() + split.query_bytes();
    add("prepare: start", 0, 0, [&split] { split.run(sm90a::prepare_sequences); });
    // Reads K and V in full; behind the start, which zeroes what it adds to.
    add("prepare: sums", 0, split.statistics_bytes(), [&split] { split.run(sm90a::prepare_statistics); });
    add("prepare: k", 0, split.key_bytes(), [&split] { split.run(sm90a::prepare_keys); });
    add("prepare: v", 0, split.value_bytes(), [&split] { split.run(sm90a::prepare_values); });
    add("prepare: q", 0, split.query_bytes(), [&split] { split.run(sm90a::prepare_queries); });
    prepare_ = launches_.size();
    add("prepare", 0, prepared, [&split] { split.prepare(); });
    add("attention", attention_flops(ordered_), split.attention_bytes(), [&split] { split.attention(); });
  }

  // Its steps one by one, then all of them. Operands are those of the fused stages bit for bit, so that whatever runs
  // behind finds the same.
  void add_unfused() {
    intermediates_.emplace(split_->unfused_workspace_bytes());
    double bytes = 0;
    const std::vector<UnfusedStep> steps = split_->unfused_steps(*intermediates_);
    for (const UnfusedStep& step : steps) {
      bytes += step.bytes;
      add(std::string("unfused ") + step.name, 0, step.bytes, [step] { check_cuda(step.launch(), step.name); });
    }
    result_.fusion = {prepare_, result_.parts.size()};
    add("unfused chain", 0, bytes, [this, steps] {
      split_->run(sm90a::prepare_sequences);
      for (const UnfusedStep& step : steps) check_cuda(step.launch(), step.name);
    });
  }

  void add_calls(bool groups) {
    const double flops = attention_flops(ordered_);
    add("call, order of the sequence", flops, SplitCall(sequence_).call_bytes(), [this] { call(sequence_); });
    if (!groups) return;
    const double traffic = split_->call_bytes();
    add("call, order given", flops, traffic, [this] { call(ordered_); });
    add("call, warm grouping", flops, grouping_traffic() + traffic, [this] {
      group(true);
      call(ordered_);
    });
    add("call, cold grouping", flops, grouping_traffic() + traffic, [this] { call(ordering_); });
  }

  vcattn_attention_params ordering_;  // the recipe as it is: the call groups
  vcattn_attention_params sequence_;  // the same in the order of the sequence
  vcattn_attention_params ordered_;   // the same with the permutation given, where it can be made
  BenchRecipe result_;
  std::optional<DeviceMemory> permutation_, centroids_, workspace_, intermediates_;
  std::optional<SplitCall> split_;
  std::vector<std::function<void()>> launches_;  // of result_.parts
  size_t prepare_ = 0;                           // among them
};

BenchCase measure(const BenchShape& shape, const BenchOptions& options, const Card& card, const Stream& stream,
                  Progress& progress) {
  const BenchTensors tensors(shape, stream);
  std::vector<std::unique_ptr<RecipeBench>> recipes;
  size_t num_steps = 0;
  for (const vcattn_recipe& recipe : options.recipes) {
    recipes.push_back(std::make_unique<RecipeBench>(tensors, recipe, options.unfused));
    num_steps = std::max(num_steps, recipes.back()->num_steps());
  }
  // Part by part rather than recipe by recipe: a card at its power limit takes tenths of a second to settle after the
  // load changes, which would fall on the first parts of each recipe.
  std::vector<BenchStep> steps;
  for (size_t i = 0; i < num_steps; ++i) {
    for (const auto& recipe : recipes) {
      if (i < recipe->num_steps()) steps.push_back(recipe->step(i));
    }
  }
  BenchCase result = {.shape = shape, .recipes = {}, .clocks = {}};
  run_rounds(steps, options.rounds, stream, card.clocks(), result.clocks, progress);
  for (const auto& recipe : recipes) result.recipes.push_back(recipe->result());
  return result;
}

}  // namespace

BenchResult bench_call(const BenchOptions& options) {
  const Card card;
  const Stream stream;
  return measure_shapes(options, card, [&](const BenchShape& shape, Progress& progress) {
    return measure(shape, options, card, stream, progress);
  });
}

}  // namespace vcattn::cli
