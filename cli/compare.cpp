#include "compare.h"

#include <fmt/format.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>

#include "core/tensor_access.h"
#include "cpu/oracle.h"
#include "library.h"
#include "vsmooth/grouping.h"

namespace vcattn::cli {
namespace {

constexpr int64_t kExpCastRowsPerHead = 64;
constexpr const char* kUnquantised = "fp32";
constexpr const char* kOrderBase = "accurate";

struct Errors {
  double rel_l2 = 0.0, cosine = 0.0, max_abs = 0.0;
};

// Either a value or the library's reason for refusing the recipe.
template <typename T>
struct Outcome {
  T value{};
  std::string refusal;
};

Errors errors_of(const std::vector<float>& found, const std::vector<double>& reference) {
  double difference = 0.0, found_norm = 0.0, reference_norm = 0.0, dot = 0.0, max_abs = 0.0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double f = found[i], r = reference[i];
    difference += (f - r) * (f - r);
    found_norm += f * f;
    reference_norm += r * r;
    dot += f * r;
    if (!(std::abs(f - r) <= max_abs)) max_abs = std::abs(f - r);  // NaN stays
  }
  return {std::sqrt(difference / reference_norm), dot / std::sqrt(found_norm * reference_norm), max_abs};
}

// True where the library turned this recipe down; every other failure ends the comparison.
bool is_refusal(vcattn_code code, const vcattn_message& message) {
  if (code == VCATTN_INVALID_ARGUMENT || code == VCATTN_UNSUPPORTED) return true;
  check(code, message);
  return false;
}

bool is_low_bit(const vcattn_recipe& recipe) {
  const auto wide = [](int32_t format) { return format == VCATTN_FORMAT_FP32 || format == VCATTN_FORMAT_BF16; };
  return !wide(recipe.qk_format) && !wide(recipe.v_format) && recipe.p_format != VCATTN_P_FP32 &&
         recipe.p_format != VCATTN_P_BF16;
}

// One head of a tensor in FP32: [seqlen, stride], rows padded with zeros to a multiple of 16 floats.
struct HeadRows {
  HeadRows(const vcattn_tensor& tensor, int64_t batch, int64_t head)
      : count(tensor.shape[1]), dim(tensor.shape[3]), stride((dim + 15) / 16 * 16) {
    data.resize(static_cast<size_t>(count * stride));
    for (int64_t token = 0; token < count; ++token) load_row(tensor, batch, token, head, row(token));
  }
  float* row(int64_t token) { return data.data() + token * stride; }
  const float* row(int64_t token) const { return data.data() + token * stride; }

  int64_t count, dim, stride;
  std::vector<float> data;
};

// FP64 dot product; four sums, so that the additions do not wait for one another.
double dot(const float* a, const float* b, int64_t stride) {
  double sums[4] = {};
  for (int64_t d = 0; d < stride; d += 4) {
    for (int64_t i = 0; i < 4; ++i) sums[i] += static_cast<double>(a[d + i]) * b[d + i];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

class Comparison {
 public:
  Comparison(const vcattn_attention_params& params, const CompareOptions& options);

  void run_oracle();
  RecipeResult measure(const vcattn_recipe& recipe, const std::function<void(Part)>& before);
  OrderResult measure(const Order& order, const vcattn_recipe& base);
  ExpCastStats expcast();

  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }

 private:
  using Permutation = std::vector<int32_t>;  // [batch, num_heads_kv, seqlen_kv]

  const Outcome<Errors>& errors(const vcattn_recipe& recipe);
  const Outcome<Permutation>& permutation(const vcattn_recipe& recipe, bool warm);
  Outcome<Permutation> group(const vcattn_recipe& recipe, bool warm) const;
  Outcome<Errors> attend(const vcattn_recipe& recipe, const Permutation& order);
  double energy_removed(const Permutation& order, int64_t mean_rows) const;

  std::vector<int64_t> rows_;
  std::vector<std::byte> q_;  // the sampled rows, [batch, rows, num_heads, head_dim] in q's dtype
  std::vector<float> out_;    // [batch, rows, num_heads, head_dim]; FP32, so that its rounding does not count
  vcattn_attention_params params_;
  oneapi::tbb::task_arena arena_;  // for what runs outside the library's calls
  cpu::OracleRows reference_;
  // Recipes share parts, and many share an order. Keys: vcattn_recipe_describe without the name.
  std::map<std::string, Outcome<Errors>> errors_;
  std::map<std::string, Outcome<Permutation>> permutations_;
};

// 0: all; never more than there are, or the scheduler would print a warning.
int usable_threads(int32_t asked) {
  const int all = oneapi::tbb::info::default_concurrency();
  return asked > 0 ? std::min(asked, all) : all;
}

Comparison::Comparison(const vcattn_attention_params& params, const CompareOptions& options)
    : params_(params), arena_(usable_threads(params.num_threads)) {
  rows_ = sample_rows(params.q.shape[1], options.rows);
  const Shape shape = {params.q.shape[0], rows(), params.q.shape[2], params.q.shape[3]};
  const auto elements = static_cast<size_t>(shape.batch * shape.seqlen * shape.num_heads * shape.head_dim);
  q_.resize(elements * (params.q.dtype == VCATTN_FP32 ? 4 : 2));
  out_.resize(elements);
  params_.q = make_tensor(q_.data(), static_cast<vcattn_dtype>(params.q.dtype), shape);
  params_.out = make_tensor(out_.data(), VCATTN_FP32, shape);
  params_.lse = nullptr;
  params_.permutation = nullptr;

  std::vector<float> row(static_cast<size_t>(shape.head_dim));
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t i = 0; i < shape.seqlen; ++i) {
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        load_row(params.q, b, rows_[static_cast<size_t>(i)], h, row.data());
        store_row(params_.q, b, i, h, row.data());  // exact: the same dtype
      }
    }
  }
}

void Comparison::run_oracle() {
  std::vector<int64_t> all(rows_.size());
  std::iota(all.begin(), all.end(), int64_t{0});
  params_.recipe = make_recipe(kUnquantised);
  vcattn_message message = {};
  arena_.execute([&] { check(cpu::oracle_attention(params_, all, reference_, &message), message); });
  const double energy = std::inner_product(reference_.out.begin(), reference_.out.end(), reference_.out.begin(), 0.0);
  if (!std::isfinite(energy)) {
    errors(params_.recipe);  // throws, saying where the first number that is not finite lies
    throw std::runtime_error("the exact output is not finite: there is nothing to compare with");
  }
  if (energy == 0.0) throw std::runtime_error("the exact output is zero everywhere: there is nothing to compare with");
}

RecipeResult Comparison::measure(const vcattn_recipe& recipe, const std::function<void(Part)>& before) {
  RecipeResult result;
  result.name = recipe.name;
  result.description = describe(recipe);
  result.is_low_bit = is_low_bit(recipe);
  for (const Part part : kParts) {
    before(part);
    const Outcome<Errors>& outcome = errors(part_of(recipe, part));
    if (!outcome.refusal.empty()) {
      result.skipped = outcome.refusal;
      return result;
    }
    result.rel_l2[static_cast<size_t>(part)] = outcome.value.rel_l2;
    if (part == Part::kWhole) {
      result.cosine = outcome.value.cosine;
      result.max_abs = outcome.value.max_abs;
    }
  }
  return result;
}

OrderResult Comparison::measure(const Order& order, const vcattn_recipe& base) {
  vcattn_recipe recipe = part_of(base, Part::kV);
  recipe.v_format = VCATTN_FORMAT_E4M3;
  recipe.v_scale_span = VCATTN_SPAN_CHANNEL;
  recipe.v_order = order.v_order;
  recipe.v_hadamard = order.v_hadamard;
  recipe.mean_rows = order.mean_rows;
  recipe.mean_centred = order.mean_centred;

  OrderResult result;
  result.name = order.name;
  result.description = order.description;
  const Outcome<Permutation>& grouped = permutation(recipe, order.warm);
  result.skipped = grouped.refusal;
  if (!result.skipped.empty()) return result;
  const Outcome<Errors> outcome = attend(recipe, grouped.value);
  result.skipped = outcome.refusal;
  result.v_rel_l2 = outcome.value.rel_l2;
  result.energy_removed = order.mean_rows == 0 ? 0.0 : energy_removed(grouped.value, order.mean_rows);
  return result;
}

const Outcome<Errors>& Comparison::errors(const vcattn_recipe& recipe) {
  vcattn_recipe unnamed = recipe;
  unnamed.name[0] = '\0';
  const auto [entry, is_new] = errors_.try_emplace(describe(unnamed));
  if (is_new) {
    const Outcome<Permutation>& order = permutation(recipe, false);
    entry->second = order.refusal.empty() ? attend(recipe, order.value) : Outcome<Errors>{{}, order.refusal};
  }
  return entry->second;
}

const Outcome<Comparison::Permutation>& Comparison::permutation(const vcattn_recipe& recipe, bool warm) {
  // All that an order depends on besides V.
  vcattn_recipe order = make_recipe(kUnquantised);
  order.v_order = recipe.v_order;
  order.grouping = recipe.grouping;
  const auto [entry, is_new] = permutations_.try_emplace(fmt::format("{} warm={}", describe(order), warm));
  if (is_new) entry->second = group(order, warm);
  return entry->second;
}

Outcome<Comparison::Permutation> Comparison::group(const vcattn_recipe& recipe, bool warm) const {
  vcattn_attention_params params = params_;
  params.recipe = recipe;
  // Text and video are clustered together, as where others measure.
  if (recipe.v_order != VCATTN_ORDER_CUBE) params.grid = {};
  const int64_t* shape = params.v.shape;
  Outcome<Permutation> outcome;
  vcattn_message message = {};
  size_t bytes = 0;
  if (is_refusal(vcattn_group_workspace_size(&params, &bytes, &message), message)) {
    outcome.refusal = message.text;
    return outcome;
  }
  Workspace memory;
  const std::span<std::byte> workspace = memory.at_least(bytes);
  outcome.value.resize(static_cast<size_t>(shape[0] * shape[2] * shape[1]));
  std::vector<float> centroids(static_cast<size_t>(shape[0] * shape[2] * recipe.grouping.clusters * shape[3]));
  for (int pass = 0; pass <= (warm ? 1 : 0); ++pass) {
    check(vcattn_group(&params, pass, centroids.data(), outcome.value.data(), workspace.data(), bytes, &message),
          message);
  }
  return outcome;
}

Outcome<Errors> Comparison::attend(const vcattn_recipe& recipe, const Permutation& order) {
  params_.recipe = recipe;
  params_.permutation = order.data();
  Outcome<Errors> outcome;
  vcattn_message message = {};
  size_t bytes = 0;
  if (is_refusal(vcattn_attention_workspace_size(&params_, &bytes, &message), message)) {
    outcome.refusal = message.text;
  } else {
    Workspace memory;
    const std::span<std::byte> workspace = memory.at_least(bytes);
    check(vcattn_attention(&params_, workspace.data(), bytes, &message), message);
    outcome.value = errors_of(out_, reference_.out);
  }
  params_.permutation = nullptr;
  return outcome;
}

double Comparison::energy_removed(const Permutation& order, int64_t mean_rows) const {
  const int64_t* shape = params_.v.shape;
  double removed = 0.0, energy = 0.0;
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t g = 0; g < shape[2]; ++g) {
      const HeadRows v(params_.v, b, g);
      double head_energy = 0.0;
      for (const float x : v.data) head_energy += static_cast<double>(x) * x;
      const int32_t* head_order = order.data() + (b * shape[2] + g) * shape[1];
      removed +=
          head_energy * vsmooth::energy_removed({v.data.data(), v.count, v.dim, v.stride}, head_order, mean_rows);
      energy += head_energy;
    }
  }
  return energy > 0.0 ? removed / energy : 0.0;
}

ExpCastStats Comparison::expcast() {
  const int64_t batch = params_.q.shape[0], heads = params_.q.shape[2], heads_kv = params_.k.shape[2];
  const int64_t head_rows = std::min(rows(), kExpCastRowsPerHead);
  std::vector<ExpCastRow> results(static_cast<size_t>(batch * heads * head_rows));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const HeadRows q(params_.q, b, h), k(params_.k, b, h / (heads / heads_kv));
      const auto measure_row = [&](int64_t i) {
        const float* query = q.row(i * rows() / head_rows);
        std::vector<double> scores(static_cast<size_t>(k.count));
        for (int64_t j = 0; j < k.count; ++j) {
          scores[static_cast<size_t>(j)] = params_.softmax_scale * dot(query, k.row(j), k.stride);
        }
        results[static_cast<size_t>((b * heads + h) * head_rows + i)] = expcast_row(scores);
      };
      arena_.execute([&] { oneapi::tbb::parallel_for(int64_t{0}, head_rows, measure_row); });
    }
  }
  return summarise(results);
}

// The copies of one operand's fields.
void copy_qk(const vcattn_recipe& from, vcattn_recipe& to) {
  to.qk_format = from.qk_format;
  to.q_scale_span = from.q_scale_span;
  to.k_scale_span = from.k_scale_span;
  to.qk_scale_kind = from.qk_scale_kind;
  to.qk_hadamard = from.qk_hadamard;
  to.k_centred = from.k_centred;
  to.q_centred = from.q_centred;
  to.qk_accumulate = from.qk_accumulate;
}

void copy_p(const vcattn_recipe& from, vcattn_recipe& to) {
  to.p_format = from.p_format;
  to.p_phases = from.p_phases;
  to.row_max = from.row_max;
  to.tile_keys = from.tile_keys;
  to.row_sum = from.row_sum;
  to.p_log2_peak = from.p_log2_peak;
  if (from.row_max == VCATTN_MAX_TILE_OCTAVE || from.p_phases > 1) to.v_order = from.v_order;
}

void copy_v(const vcattn_recipe& from, vcattn_recipe& to) {
  to.v_format = from.v_format;
  to.v_scale_span = from.v_scale_span;
  to.v_hadamard = from.v_hadamard;
  to.v_order = from.v_order;
  to.mean_rows = from.mean_rows;
  to.mean_centred = from.mean_centred;
  to.mean_format = from.mean_format;
}

const Order& order_by_name(const std::string& name) {
  for (const Order& order : kOrders) {
    if (name == order.name) return order;
  }
  throw std::runtime_error(fmt::format("no order \"{}\"; there are: {}", name, fmt::join(order_names(), ", ")));
}

}  // namespace

vcattn_recipe part_of(const vcattn_recipe& recipe, Part part) {
  if (part == Part::kWhole) return recipe;
  vcattn_recipe result = make_recipe(kUnquantised);
  std::copy(std::begin(recipe.name), std::end(recipe.name), result.name);
  result.grouping = recipe.grouping;
  if (part == Part::kQk) copy_qk(recipe, result);
  if (part == Part::kP) copy_p(recipe, result);
  if (part == Part::kV) copy_v(recipe, result);
  return result;
}

std::vector<int64_t> sample_rows(int64_t seqlen_q, int64_t rows) {
  const int64_t wanted = (std::min(rows, seqlen_q) + kScaleRows - 1) / kScaleRows;
  const int64_t full = seqlen_q / kScaleRows;
  const int64_t blocks = std::max(full, wanted);  // the short last one only where all are wanted
  std::vector<int64_t> sampled;
  for (int64_t i = 0; i < wanted; ++i) {
    const int64_t block = (2 * i + 1) * blocks / (2 * wanted);
    const int64_t end = std::min((block + 1) * kScaleRows, seqlen_q);
    for (int64_t row = block * kScaleRows; row < end; ++row) sampled.push_back(row);
  }
  return sampled;
}

std::vector<std::string> comparable_recipes() {
  std::vector<std::string> names = recipe_names();
  std::erase(names, kUnquantised);
  return names;
}

std::vector<std::string> order_names() {
  std::vector<std::string> names;
  for (const Order& order : kOrders) names.emplace_back(order.name);
  return names;
}

CompareResult compare(const vcattn_attention_params& params, const std::string& file, const CompareOptions& options,
                      const CompareProgress& progress) {
  // Everything that can be misspelt, before anything that takes time.
  std::vector<vcattn_recipe> recipes;
  for (const std::string& name : options.recipes) recipes.push_back(make_recipe(name, options.changes));
  std::vector<Order> orders;
  for (const std::string& name : options.orders) orders.push_back(order_by_name(name));
  const vcattn_recipe order_base = make_recipe(kOrderBase, options.changes);

  const auto total = static_cast<int64_t>(2 + recipes.size() * kParts.size() + orders.size());
  int64_t done = 0;
  const auto step = [&](std::string_view what) { progress(what, done++, total); };

  CompareResult result;
  result.file = file;
  std::copy(std::begin(params.q.shape), std::end(params.q.shape), result.q_shape.begin());
  std::copy(std::begin(params.v.shape), std::end(params.v.shape), result.kv_shape.begin());
  result.dtype = params.q.dtype == VCATTN_BF16 ? "BF16" : params.q.dtype == VCATTN_FP16 ? "FP16" : "FP32";
  result.softmax_scale =
      params.softmax_scale > 0.0 ? params.softmax_scale : 1.0 / std::sqrt(static_cast<double>(params.q.shape[3]));

  vcattn_attention_params scaled = params;
  scaled.softmax_scale = result.softmax_scale;
  Comparison comparison(scaled, options);
  result.rows = comparison.rows();
  step("FP64 reference");
  comparison.run_oracle();
  constexpr const char* kPartNames[] = {"whole", "QK", "P", "V"};
  for (const vcattn_recipe& recipe : recipes) {
    const int64_t first = done;
    result.recipes.push_back(comparison.measure(
        recipe, [&](Part part) { step(fmt::format("{}: {}", recipe.name, kPartNames[static_cast<size_t>(part)])); }));
    done = first + static_cast<int64_t>(kParts.size());
  }
  for (const Order& order : orders) {
    step(fmt::format("order {}", order.name));
    result.orders.push_back(comparison.measure(order, order_base));
  }
  step("ExpCast");
  result.expcast = comparison.expcast();
  return result;
}

}  // namespace vcattn::cli
