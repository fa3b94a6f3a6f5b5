// What `vcattn compare` measures: the error of every recipe and of its three parts against the FP64 oracle, what each
// order of the value tokens is worth, and what ExpCast does to the softmax. Computes only; prints nothing.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "expcast_stats.h"
#include "vcattn/vcattn.h"

namespace vcattn::cli {

// ---- the parts of a recipe ----------------------------------------------------------------------------------------

enum class Part { kWhole, kQk, kP, kV };
inline constexpr std::array kParts = {Part::kWhole, Part::kQk, Part::kP, Part::kV};

// The same recipe with only that operand quantised, everything else as in the recipe `fp32`:
//  kQk  Q and K: format, scales, rotation, centring, accumulation.
//  kP   probabilities: format, phases, row maximum, row sum. V is exact and without means. The keys stay in the
//       recipe's order where it matters, that is where each tile has its own maximum or neighbours differ in phase;
//       else they are in sequence.
//  kV   V: format, scale, rotation, order, means.
// The accumulator of the second product multiplies quantised P by quantised V, so it stays with the whole alone.
vcattn_recipe part_of(const vcattn_recipe& recipe, Part part);

// ---- sampled queries ----------------------------------------------------------------------------------------------

// Ascending row indices of whole blocks of 128 rows, in the middle of equal stretches of the sequence: recipes may
// scale and centre Q by such blocks. `rows` is rounded up to whole blocks; all rows where the sequence has no more.
// Only where all are taken is a shorter last block among them.
std::vector<int64_t> sample_rows(int64_t seqlen_q, int64_t rows);

// ---- orders of V --------------------------------------------------------------------------------------------------

// V alone in E4M3 with one scale per channel. Grouping and mean_format are those of the recipe `accurate`, whose TF32
// means do not hide what the order gains behind their own rounding.
struct Order {
  const char* name;
  const char* description;
  int32_t v_order;    // vcattn_v_order
  int32_t mean_rows;  // 0: no means
  int32_t mean_centred;
  int32_t v_hadamard;
  bool warm;  // grouped a second time, from the centroids of the first
};

inline constexpr Order kOrders[] = {
    {"no_means", "sequence order, no means subtracted", VCATTN_ORDER_SEQUENCE, 0, 0, 0, false},
    {"hadamard", "V rotated by the Hadamard matrix, no means", VCATTN_ORDER_SEQUENCE, 0, 0, 1, false},
    {"sequence", "sequence order, 128-row means", VCATTN_ORDER_SEQUENCE, 128, 0, 0, false},
    {"cube", "2 x 8 x 8 cubes of the video grid, 128-row means", VCATTN_ORDER_CUBE, 128, 0, 0, false},
    {"kmeans", "sorted by k-means cluster, 128-row means", VCATTN_ORDER_KMEANS, 128, 0, 0, false},
    {"kmeans_warm", "k-means continued from its own centroids, 128-row means", VCATTN_ORDER_KMEANS, 128, 0, 0, true},
    {"balanced", "clusters of equal size, 128-row means", VCATTN_ORDER_BALANCED, 128, 0, 0, false},
    {"chain", "clusters in a chain, tokens along their principal direction, 128-row means", VCATTN_ORDER_CHAIN, 128, 0,
     0, false},
    {"chain_centred", "chain, 128-row means that absorb the rounding error", VCATTN_ORDER_CHAIN, 128, 1, 0, false},
    {"chain_centred_64", "chain, 64-row means that absorb the rounding error", VCATTN_ORDER_CHAIN, 64, 1, 0, false},
    {"chain_centred_32", "chain, 32-row means that absorb the rounding error", VCATTN_ORDER_CHAIN, 32, 1, 0, false},
};

// ---- options and results ------------------------------------------------------------------------------------------

std::vector<std::string> comparable_recipes();  // all named ones except fp32
std::vector<std::string> order_names();

struct CompareOptions {
  int64_t rows = 512;                                       // per (batch, head), >= 1
  std::vector<std::string> recipes = comparable_recipes();  // reported in this order
  std::vector<std::string> orders = order_names();
  std::vector<std::string> changes;  // "field=value" for every recipe; grouping and mean_format for the orders too
};

struct RecipeResult {
  std::string name;
  std::string description;  // vcattn_recipe_describe
  std::string skipped;      // why there are no numbers; empty: there are
  bool is_low_bit = false;  // each of QK, P and V in 8 bits or fewer
  // ||out - reference|| / ||reference|| over all sampled rows, by Part.
  std::array<double, kParts.size()> rel_l2{};
  double cosine = 0.0;   // of out and reference, as vectors of all sampled rows
  double max_abs = 0.0;  // largest |out - reference|
};

struct OrderResult {
  std::string name;
  std::string description;
  std::string skipped;
  double energy_removed = 0.0;  // share of the energy (sum of squares) of V that the block means take away
  double v_rel_l2 = 0.0;        // of the output with V alone in E4M3, one scale per channel
};

struct CompareResult {
  std::string file;
  std::array<int64_t, 4> q_shape{}, kv_shape{};  // batch, seqlen, num_heads, head_dim
  std::string dtype;                             // of q
  double softmax_scale = 0.0;
  int64_t rows = 0;  // sampled, per (batch, head)
  std::vector<RecipeResult> recipes;
  std::vector<OrderResult> orders;
  ExpCastStats expcast;
};

// Called before each step; `done` of `total` steps are behind it.
using CompareProgress = std::function<void(std::string_view step, int64_t done, int64_t total)>;

// `params` holds q, k, v, scale, grid and threads; its recipe, out and permutation are not used. A recipe or order that
// the library refuses is reported as skipped; unknown names and fields, and inputs that nothing can be computed from,
// throw std::runtime_error.
CompareResult compare(const vcattn_attention_params& params, const std::string& file, const CompareOptions& options,
                      const CompareProgress& progress);

}  // namespace vcattn::cli
