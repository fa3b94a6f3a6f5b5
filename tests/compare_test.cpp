// vcattn compare: the parts of recipes, the sampled rows, the statistics of ExpCast, the outputs, and the numbers on
// captured tensors against an independent FP64 model.
#include "compare.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <numbers>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "compare_output.h"
#include "inputs.h"
#include "library.h"
#include "report.h"
#include "svg.h"

namespace vcattn::cli {
namespace {

// ---- parts of recipes ----------------------------------------------------------------------------------------------

std::map<std::string, std::string> fields_of(const vcattn_recipe& recipe) {
  std::map<std::string, std::string> fields;
  std::istringstream words(describe(recipe));
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    fields[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return fields;
}

// Which part every field belongs to. A field that is new in the library fails the test until it is placed here.
const std::map<std::string, std::set<Part>> kFieldParts = {
    {"qk_format", {Part::kQk}},
    {"q_scale_span", {Part::kQk}},
    {"k_scale_span", {Part::kQk}},
    {"qk_scale_kind", {Part::kQk}},
    {"qk_hadamard", {Part::kQk}},
    {"k_centred", {Part::kQk}},
    {"q_centred", {Part::kQk}},
    {"qk_accumulate", {Part::kQk}},
    {"p_format", {Part::kP}},
    {"p_phases", {Part::kP}},
    {"row_max", {Part::kP}},
    {"tile_keys", {Part::kP}},
    {"row_sum", {Part::kP}},
    {"p_log2_peak", {Part::kP}},
    {"v_format", {Part::kV}},
    {"v_scale_span", {Part::kV}},
    {"v_hadamard", {Part::kV}},
    {"v_order", {Part::kV}},  // and kP where the order matters to it
    {"mean_rows", {Part::kV}},
    {"mean_centred", {Part::kV}},
    {"mean_format", {Part::kV}},
    {"pv_accumulate", {}},
    {"promote_keys", {}},
    {"name", {Part::kQk, Part::kP, Part::kV}},
    {"clusters", {Part::kQk, Part::kP, Part::kV}},
    {"iterations", {Part::kQk, Part::kP, Part::kV}},
    {"warm_iterations", {Part::kQk, Part::kP, Part::kV}},
    {"seeding", {Part::kQk, Part::kP, Part::kV}},
    {"seed", {Part::kQk, Part::kP, Part::kV}},
};

TEST(PartOf, TakesTheFieldsOfItsOperandAndNothingElse) {
  const auto plain = fields_of(make_recipe("fp32"));
  for (const std::string& name : comparable_recipes()) {
    const vcattn_recipe recipe = make_recipe(name, {"clusters=7", "seed=3", "pv_accumulate=fp64"});
    const auto whole = fields_of(recipe);
    const bool order_matters = recipe.row_max == VCATTN_MAX_TILE_OCTAVE || recipe.p_phases == 2;
    for (const Part part : {Part::kQk, Part::kP, Part::kV}) {
      for (const auto& [field, found] : fields_of(part_of(recipe, part))) {
        ASSERT_TRUE(kFieldParts.contains(field)) << "new field " << field;
        bool belongs = kFieldParts.at(field).contains(part);
        if (field == "v_order" && part == Part::kP) belongs = order_matters;
        EXPECT_EQ(found, belongs ? whole.at(field) : plain.at(field))
            << name << ", part " << static_cast<int>(part) << ", " << field;
      }
    }
  }
}

TEST(PartOf, WholeIsTheRecipe) {
  const vcattn_recipe recipe = make_recipe("accurate", {"promote_keys=64"});
  EXPECT_EQ(describe(part_of(recipe, Part::kWhole)), describe(recipe));
}

// ---- sampled rows --------------------------------------------------------------------------------------------------

TEST(SampleRows, WholeBlocksInTheMiddleOfEqualStretches) {
  const std::vector<int64_t> rows = sample_rows(16448, 512);  // 129 blocks
  ASSERT_EQ(rows.size(), 512u);
  const int64_t blocks[] = {16, 48, 80, 112};
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i], blocks[i / 128] * 128 + static_cast<int64_t>(i % 128)) << i;
  }
}

TEST(SampleRows, RoundsUpToBlocksAndStopsAtTheSequence) {
  EXPECT_EQ(sample_rows(1024, 1).size(), 128u);
  EXPECT_EQ(sample_rows(1024, 129).size(), 256u);
  for (const int64_t rows : {int64_t{300}, int64_t{512}, std::numeric_limits<int64_t>::max()}) {
    std::vector<int64_t> all(300);
    std::iota(all.begin(), all.end(), int64_t{0});
    EXPECT_EQ(sample_rows(300, rows), all) << rows;
  }
  EXPECT_EQ(sample_rows(5, 512), (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(SampleRows, LeavesOutTheShortLastBlock) {
  for (int64_t seqlen = 129; seqlen < 1300; seqlen += 37) {
    for (int64_t wanted = 1; wanted * 128 + 128 <= seqlen; ++wanted) {
      const std::vector<int64_t> rows = sample_rows(seqlen, wanted * 128);
      ASSERT_EQ(rows.size(), static_cast<size_t>(wanted * 128)) << seqlen;
      for (size_t i = 0; i < rows.size(); i += 128) EXPECT_EQ(rows[i] % 128, 0) << seqlen;
      EXPECT_LT(rows.back(), seqlen);
    }
  }
}

// ---- ExpCast -------------------------------------------------------------------------------------------------------

std::vector<double> scores_from_octaves(std::vector<double> octaves) {
  for (double& u : octaves) u *= std::numbers::ln2;
  return octaves;
}

TEST(ExpCastRow, PowersOfTwoAreExact) {
  const ExpCastRow row = expcast_row(scores_from_octaves({5, 4, 5, 2}));
  EXPECT_NEAR(row.expcast, 0.0, 1e-12);
  EXPECT_NEAR(row.exp2_e4m3, 0.0, 1e-12);
  EXPECT_NEAR(row.expcast_per_tile, 0.0, 1e-12);
  EXPECT_FALSE(row.underflows);
  EXPECT_EQ(row.underflow_mass, 0.0);
  EXPECT_EQ(row.running_codes[120], 2);  // 256
  EXPECT_EQ(row.running_codes[112], 1);  // 128
  EXPECT_EQ(row.running_codes[96], 1);   // 32
  EXPECT_EQ(row.per_tile_codes, row.running_codes);
}

// Two keys half an octave apart: p = 1 / (1 + 2^-1/2) and the rest.
TEST(ExpCastRow, HalfAnOctaveByHand) {
  const double exact = std::exp2(-0.5) / (1.0 + std::exp2(-0.5));
  const ExpCastRow row = expcast_row(scores_from_octaves({0.0, -0.5}));
  EXPECT_NEAR(row.expcast, std::abs(192.0 / (256 + 192) - exact), 1e-12);    // codes 120 and rne(115.65) = 116
  EXPECT_NEAR(row.exp2_e4m3, std::abs(176.0 / (256 + 176) - exact), 1e-12);  // 181.02 lies between 176 and 192
  EXPECT_NEAR(row.two_lines, std::abs(320.0 / (448 + 320) - exact), 1e-12);  // codes 126 and rne(121.65) = 122
  EXPECT_NEAR(row.expcast_per_tile, row.expcast, 1e-12);
  // A quarter octave higher the maximum falls inside its octave: codes 2 + 112 and -2 + 112, values 160 and 112.
  const ExpCastRow shifted = expcast_row(scores_from_octaves({0.25, -0.25}));
  EXPECT_NEAR(shifted.expcast, row.expcast, 1e-12);
  EXPECT_NEAR(shifted.expcast_per_tile, std::abs(112.0 / (160 + 112) - exact), 1e-12);
  EXPECT_EQ(shifted.per_tile_codes[114], 1);
  EXPECT_EQ(shifted.per_tile_codes[110], 1);
}

TEST(ExpCastRow, UnderflowIsLostUnlessTheTileHasItsOwnMaximum) {
  std::vector<double> octaves(129, -20.0);
  octaves[128] = 0.0;  // alone in the second tile
  const ExpCastRow row = expcast_row(scores_from_octaves(octaves));
  const double tau = 128 * 0x1p-20 / (1 + 128 * 0x1p-20);
  EXPECT_TRUE(row.underflows);
  EXPECT_NEAR(row.underflow_mass, tau, 1e-12);
  EXPECT_NEAR(row.expcast, tau, 1e-12);
  EXPECT_NEAR(row.expcast_per_tile, 0.0, 1e-12);
  EXPECT_EQ(row.running_codes[0], 128);
  EXPECT_EQ(row.per_tile_codes[120], 129);
}

TEST(ExpCastRow, ScoresMayBeHuge) {
  const ExpCastRow row = expcast_row(std::vector<double>{1e30, -1e30, 1e30});
  EXPECT_NEAR(row.expcast, 0.0, 1e-12);
  EXPECT_NEAR(row.expcast_per_tile, 0.0, 1e-12);
}

TEST(ExpCastStats, MeansMaximaAndTheBound) {
  ExpCastRow a, b, c;
  a.expcast = 0.01;
  a.two_lines = 0.04;
  a.running_codes[3] = 5;
  b.expcast = 0.038;  // over 0.0364, within 0.0364 + 0.002
  b.underflows = true;
  b.underflow_mass = 0.002;
  b.running_codes[3] = 2;
  c.expcast = 0.06;  // over 0.0364 + 0.001
  c.underflows = true;
  c.underflow_mass = 0.001;
  const ExpCastStats stats = summarise(std::vector<ExpCastRow>{a, b, c});
  EXPECT_EQ(stats.rows, 3);
  EXPECT_NEAR(stats.expcast.mean, 0.108 / 3, 1e-15);
  EXPECT_EQ(stats.expcast.max, 0.06);
  EXPECT_EQ(stats.two_lines.max, 0.04);
  EXPECT_EQ(stats.rows_without_underflow, 1);
  EXPECT_EQ(stats.max_tv_without_underflow, 0.01);
  EXPECT_NEAR(stats.mean_underflow_mass, 0.001, 1e-15);
  EXPECT_EQ(stats.bound_violations, 1);
  EXPECT_EQ(stats.running_codes[3], 7);
  EXPECT_TRUE(std::isnan(summarise(std::vector<ExpCastRow>{b, c}).max_tv_without_underflow));
}

TEST(ExpCastStats, TheBoundFollowsFromTheRatios) {
  const double low = std::sqrt(0.9290), high = std::sqrt(1.0746);
  EXPECT_NEAR(kExpCastTvBound, (high - low) / (high + low), 5e-5);
}

// ---- outputs -------------------------------------------------------------------------------------------------------

CompareResult made_up_result() {
  CompareResult result;
  result.file = "some/folder/<b>&\"q'.safetensors";
  result.q_shape = {1, 256, 2, 64};
  result.kv_shape = {1, 300, 1, 64};
  result.dtype = "BF16";
  result.softmax_scale = 0.125;
  result.rows = 256;
  result.recipes = {{.name = "good",
                     .description = "name=good",
                     .skipped = "",
                     .is_low_bit = true,
                     .rel_l2 = {0.00332, 0.002, 0.001, 0.0005},
                     .cosine = 0.99999,
                     .max_abs = 0.01},
                    {.name = "wide",
                     .description = "name=wide",
                     .skipped = "",
                     .is_low_bit = false,
                     .rel_l2 = {1e-5, 1e-7, 1e-5, 0},
                     .cosine = 1.0,
                     .max_abs = 1e-5},
                    {.name = "bad", .description = "name=bad", .skipped = "fields <a> & <b> disagree"}};
  result.orders = {
      {.name = "kmeans", .description = "sorted", .skipped = "", .energy_removed = 0.343, .v_rel_l2 = 0.00129},
      {.name = "cube", .description = "cubes", .skipped = "no grid is known"}};
  result.expcast.rows = 4;
  result.expcast.expcast = {0.0129, 0.0134};
  result.expcast.running_codes[0] = 30;
  result.expcast.running_codes[120] = 10;
  result.expcast.per_tile_codes[100] = 20;
  result.expcast.per_tile_codes[101] = 20;
  return result;
}

std::set<std::string> keys_of(const Json& json) {
  std::set<std::string> keys;
  for (const auto& item : json.items()) keys.insert(item.key());
  return keys;
}

using Keys = std::set<std::string>;

void expect_schema(const Json& json) {
  EXPECT_EQ(keys_of(json), (Keys{"version", "input", "recipes", "orders", "expcast"}));
  EXPECT_EQ(keys_of(json["input"]), (Keys{"file", "shape", "dtype", "rows"}));
  EXPECT_EQ(keys_of(json["input"]["shape"]),
            (Keys{"batch", "seqlen_q", "seqlen_kv", "num_heads", "num_heads_kv", "head_dim"}));
  for (const Json& recipe : json["recipes"]) {
    EXPECT_EQ(keys_of(recipe), recipe.contains("skipped") ? (Keys{"name", "skipped"})
                                                          : (Keys{"name", "rel_l2", "qk_rel_l2", "p_rel_l2", "v_rel_l2",
                                                                  "cosine", "max_abs"}));
  }
  for (const Json& order : json["orders"]) {
    EXPECT_EQ(keys_of(order),
              order.contains("skipped") ? (Keys{"name", "skipped"}) : (Keys{"name", "energy_removed", "v_rel_l2"}));
  }
  const Json& expcast = json["expcast"];
  EXPECT_EQ(keys_of(expcast), (Keys{"rows", "total_variation", "bound", "rows_without_underflow",
                                    "max_without_underflow", "mean_underflow_mass", "bound_violations", "codes"}));
  EXPECT_EQ(keys_of(expcast["total_variation"]),
            (Keys{"expcast", "exp2_e4m3", "expcast_two_lines", "expcast_per_tile"}));
  for (const Json& distance : expcast["total_variation"]) EXPECT_EQ(keys_of(distance), (Keys{"mean", "max"}));
  EXPECT_EQ(expcast["codes"]["running"].size(), 127u);
  EXPECT_EQ(expcast["codes"]["per_tile"].size(), 127u);
}

TEST(CompareOutput, Json) {
  const Json json = compare_json(made_up_result());
  expect_schema(json);
  EXPECT_EQ(json["input"]["shape"]["seqlen_kv"], 300);
  EXPECT_EQ(json["recipes"][0]["qk_rel_l2"], 0.002);
  EXPECT_EQ(json["recipes"][2]["skipped"], "fields <a> & <b> disagree");
  EXPECT_EQ(json["orders"][1]["skipped"], "no grid is known");
  EXPECT_TRUE(json["expcast"]["max_without_underflow"].is_null());
  EXPECT_EQ(Json::parse(json.dump()), json);
}

TEST(CompareOutput, ErrorsHaveThreeDigitsAndNoExponentWhileShort) {
  EXPECT_EQ(error_text(0.0033219), "0.00332");
  EXPECT_EQ(error_text(0.0120), "0.0120");
  EXPECT_EQ(error_text(1.7), "1.70");
  EXPECT_EQ(error_text(123.4), "123");
  EXPECT_EQ(error_text(0.0), "0");
  EXPECT_EQ(error_text(4.5e-9), "4.50e-09");
}

TEST(CompareOutput, TextMarksTheBestLowBitRecipeAndNamesWhatWasSkipped) {
  const std::string text = compare_text(made_up_result(), false);
  EXPECT_NE(text.find("0.00332*"), std::string::npos) << text;
  EXPECT_EQ(text.find("0.0000100*"), std::string::npos) << text;  // `wide` competes with no one
  EXPECT_NE(text.find("bad skipped: fields <a> & <b> disagree"), std::string::npos) << text;
  EXPECT_NE(text.find("cube skipped: no grid is known"), std::string::npos) << text;
  EXPECT_EQ(text.find('\x1b'), std::string::npos) << text;
  const std::string colored = compare_text(made_up_result(), true);
  EXPECT_EQ(colored.find('*'), std::string::npos) << colored;
  EXPECT_NE(colored.find('\x1b'), std::string::npos) << colored;
}

// The first tag that is not closed in order, or an empty string. The page has no comments and no ">" in attributes.
std::string unbalanced_tag(const std::string& html) {
  const std::set<std::string> kVoid = {"!doctype", "meta"};
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    if (end == std::string::npos) return html.substr(at, 40);
    const std::string tag = html.substr(at + 1, end - at - 1);
    const bool closes = tag[0] == '/';
    const std::string name = tag.substr(closes ? 1 : 0, tag.find_first_of(" /", 1) - (closes ? 1 : 0));
    if (closes) {
      if (open.empty() || open.back() != tag.substr(1)) return tag;
      open.pop_back();
    } else if (tag.back() != '/' && !kVoid.contains(name)) {
      open.push_back(name);
    }
  }
  return open.empty() ? "" : open.back();
}

TEST(Report, TheTagChecker) {
  EXPECT_EQ(unbalanced_tag("<!doctype html><p><b>x</b><rect x=\"1\"/></p>"), "");
  EXPECT_EQ(unbalanced_tag("<p><b>x</p></b>"), "/p");
  EXPECT_EQ(unbalanced_tag("<p>"), "p");
}

TEST(Report, IsOnePageThatFetchesNothing) {
  const std::string html = report_html(made_up_result());
  EXPECT_EQ(unbalanced_tag(html), "");
  for (const char* reference :
       {"http:", "https:", "//", "src=", "href", "url(", "@import", "<script", "<link", "<img"}) {
    EXPECT_EQ(html.find(reference), std::string::npos) << reference;
  }
  EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
  EXPECT_NE(html.find("width=device-width"), std::string::npos);
}

TEST(Report, EscapesAndReportsEverything) {
  const std::string html = report_html(made_up_result());
  EXPECT_EQ(html.find("<b>"), std::string::npos);
  EXPECT_NE(html.find("<h1>&lt;b&gt;&amp;&quot;q&#39;.safetensors</h1>"), std::string::npos);
  EXPECT_EQ(html.find("some/folder"), std::string::npos);
  for (const char* text :
       {"name=good", "name=wide", "name=bad", "bad skipped: fields &lt;a&gt; &amp; &lt;b&gt; disagree",
        "cube skipped: no grid is known", "0.00332", "0: 75 % (cut off)"}) {
    EXPECT_NE(html.find(text), std::string::npos) << text;
  }
  CompareResult nothing = made_up_result();
  nothing.recipes.clear();
  nothing.orders.clear();
  EXPECT_EQ(unbalanced_tag(report_html(nothing)), "");
}

TEST(Svg, TicksAreRoundAndCoverTheValues) {
  using svg::Axis;
  EXPECT_EQ(svg::axis_ticks(0.1, 49.3, Axis::kLinear), (std::vector<double>{0, 10, 20, 30, 40, 50}));
  for (const double smallest : {1e-5, 3.3e-4, 0.02, 1.0}) {
    for (const double span : {1.0, 1.5, 30.0, 1e4, 1e9, 1e15}) {
      const double largest = smallest * span;
      const std::vector<double> ticks = svg::axis_ticks(smallest, largest, Axis::kLog);
      ASSERT_GE(ticks.size(), 2u);
      EXPECT_LE(ticks.size(), 8u) << smallest << " to " << largest;
      EXPECT_LT(ticks.front(), smallest);
      EXPECT_GE(ticks.back(), largest * (1 - 1e-12));
      EXPECT_TRUE(std::is_sorted(ticks.begin(), ticks.end()));
      const std::vector<double> linear = svg::axis_ticks(smallest, largest, Axis::kLinear);
      EXPECT_LE(linear.size(), 8u);
      EXPECT_EQ(linear.front(), 0.0);
      EXPECT_GE(linear.back(), largest * (1 - 1e-12));
    }
  }
}

// ---- captured tensors ----------------------------------------------------------------------------------------------

constexpr const char* kCapture = VCATTN_TEST_DATA "/qkv_layer6_4160.safetensors";

struct Capture {
  Capture() {
    InputOptions options;
    options.file = kCapture;
    inputs = load_inputs(options);
    params = attention_params(inputs);
  }
  CompareResult run(const CompareOptions& options) {
    return compare(params, inputs.source, options, [](std::string_view, int64_t, int64_t) {});
  }
  Inputs inputs;
  vcattn_attention_params params;
};

const RecipeResult& recipe(const CompareResult& result, const std::string& name) {
  for (const RecipeResult& candidate : result.recipes) {
    if (candidate.name == name) return candidate;
  }
  throw std::runtime_error("no recipe " + name);
}

const OrderResult& order(const CompareResult& result, const std::string& name) {
  for (const OrderResult& candidate : result.orders) {
    if (candidate.name == name) return candidate;
  }
  throw std::runtime_error("no order " + name);
}

double error(const RecipeResult& result, Part part) { return result.rel_l2[static_cast<size_t>(part)]; }

class CompareCapture : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    CompareOptions options;
    options.rows = 256;
    result_ = Capture().run(options);
  }
  static CompareResult result_;
};
CompareResult CompareCapture::result_;

// Expected: a NumPy FP64 model written from the definitions, on the same 256 rows.
TEST_F(CompareCapture, AgreesWithAnIndependentModel) {
  struct Expected {
    const char* recipe;
    Part part;
    double error;
  };
  const Expected expected[] = {{"fp8_naive", Part::kQk, 0.003276},    {"sage2", Part::kQk, 0.000864},
                               {"vsmooth8", Part::kQk, 0.000694},     {"fp8_naive", Part::kP, 0.001420},
                               {"sage2", Part::kP, 0.001360},         {"vsmooth8_expcast", Part::kP, 0.001739},
                               {"fp8_naive", Part::kV, 0.001742},     {"sage2", Part::kV, 0.001645},
                               {"fp8_naive", Part::kWhole, 0.004281}, {"sage2", Part::kWhole, 0.002493}};
  for (const Expected& e : expected) {
    // P is rounded against the maximum so far, the model's against the final one: a few per cent.
    EXPECT_NEAR(error(recipe(result_, e.recipe), e.part), e.error, 0.05 * e.error)
        << e.recipe << ", part " << static_cast<int>(e.part);
  }
  EXPECT_NEAR(order(result_, "sequence").energy_removed, 0.16774, 1e-4);
  EXPECT_NEAR(result_.expcast.expcast.mean, 0.01287, 0.0002);
  EXPECT_NEAR(result_.expcast.exp2_e4m3.mean, 0.01119, 0.0002);
}

TEST_F(CompareCapture, RecipesRankAsTheyShould) {
  ASSERT_EQ(result_.recipes.size(), comparable_recipes().size());
  for (const RecipeResult& r : result_.recipes) {
    EXPECT_EQ(r.skipped, "") << r.name;
    EXPECT_GT(r.cosine, 0.999) << r.name;
    EXPECT_LE(r.cosine, 1.0) << r.name;
    EXPECT_GT(r.max_abs, 0.0) << r.name;
  }
  const auto whole = [&](const char* name) { return error(recipe(result_, name), Part::kWhole); };
  EXPECT_LT(whole("bf16"), whole("accurate"));
  EXPECT_LT(whole("accurate"), whole("vsmooth8_expcast"));
  EXPECT_LT(whole("accurate"), whole("sage2"));
  EXPECT_LT(whole("sage2"), whole("fp8_naive"));
  EXPECT_LT(whole("fp8_naive"), whole("sage3"));
  const auto p = [&](const char* name) { return error(recipe(result_, name), Part::kP); };
  EXPECT_LT(p("accurate"), p("vsmooth8_expcast"));
  EXPECT_LT(p("exact"), p("vsmooth8"));
}

TEST_F(CompareCapture, OrdersRankAsTheyShould) {
  ASSERT_EQ(result_.orders.size(), order_names().size());
  for (const OrderResult& o : result_.orders) EXPECT_EQ(o.skipped, "") << o.name;
  const auto energy = [&](const char* name) { return order(result_, name).energy_removed; };
  EXPECT_EQ(energy("no_means"), 0.0);
  EXPECT_EQ(energy("hadamard"), 0.0);
  EXPECT_LT(energy("sequence"), energy("cube"));
  EXPECT_LT(energy("cube"), energy("kmeans"));
  EXPECT_LT(energy("kmeans"), energy("chain"));
  EXPECT_EQ(energy("chain"), energy("chain_centred"));
  EXPECT_LT(energy("chain_centred"), energy("chain_centred_64"));
  EXPECT_LT(energy("chain_centred_64"), energy("chain_centred_32"));
  const auto v = [&](const char* name) { return order(result_, name).v_rel_l2; };
  EXPECT_LT(v("hadamard"), v("no_means"));
  EXPECT_LT(v("kmeans"), v("sequence"));
  EXPECT_LT(v("chain"), v("kmeans"));
  EXPECT_LT(v("chain_centred"), v("chain"));
  // `accurate` stores V in this very way.
  EXPECT_EQ(v("chain_centred"), error(recipe(result_, "accurate"), Part::kV));
  EXPECT_NE(order(result_, "kmeans_warm").v_rel_l2, v("kmeans"));
}

TEST_F(CompareCapture, ExpCastKeepsItsBound) {
  const ExpCastStats& stats = result_.expcast;
  EXPECT_EQ(stats.rows, 64);
  EXPECT_EQ(stats.bound_violations, 0);
  EXPECT_GT(stats.rows_without_underflow, 0);
  EXPECT_LE(stats.max_tv_without_underflow, kExpCastTvBound);
  for (const CodeCounts* counts : {&stats.running_codes, &stats.per_tile_codes}) {
    EXPECT_EQ(std::accumulate(counts->begin(), counts->end(), int64_t{0}), 64 * 4160);
  }
  EXPECT_GE(stats.running_codes[120], 64);  // each row's maximum
}

// ---- several heads -------------------------------------------------------------------------------------------------

// Two batch entries, four query heads, two heads of K and V. Q of head 1 and the second head of K, which heads 2 and 3
// see, are zero: three of four heads have uniform rows. V of the first head is 1, of the second +-3 by turns.
struct GroupedHeads {
  static constexpr int64_t kBatch = 2, kTokens = 384, kHeads = 4, kHeadsKv = 2, kDim = 16;

  GroupedHeads() {
    vcattn_attention_params_init(&params);
    params.q = tensor(q, kHeads);
    params.k = tensor(k, kHeadsKv);
    params.v = tensor(v, kHeadsKv);
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = i / kDim % kHeads == 1 ? 0.0f : std::sin(0.37f * static_cast<float>(i));
    }
    for (size_t i = 0; i < k.size(); ++i) {
      const bool second_head = i / kDim % kHeadsKv == 1;
      const bool odd_token = i / (kDim * kHeadsKv) % 2 == 1;
      k[i] = second_head ? 0.0f : 3.0f * std::cos(0.91f * static_cast<float>(i));
      v[i] = second_head ? (odd_token ? -3.0f : 3.0f) : 1.0f;
    }
  }
  vcattn_tensor tensor(std::vector<float>& data, int64_t heads) {
    data.resize(static_cast<size_t>(kBatch * kTokens * heads * kDim));
    return {
        data.data(), VCATTN_FP32, 0, {kBatch, kTokens, heads, kDim}, {kTokens * heads * kDim, heads * kDim, kDim, 1}};
  }

  std::vector<float> q, k, v;
  vcattn_attention_params params;
};

TEST(Compare, SeveralHeads) {
  GroupedHeads input;
  CompareOptions options;
  options.rows = 256;
  options.recipes = {"bf16"};
  options.orders = {"sequence", "kmeans"};
  options.changes = {"qk_format=fp32", "p_format=fp32", "v_format=fp32", "clusters=2"};
  const CompareResult result = compare(input.params, "made", options, [](std::string_view, int64_t, int64_t) {});
  EXPECT_EQ(result.rows, 256);
  EXPECT_DOUBLE_EQ(result.softmax_scale, 0.25);
  ASSERT_EQ(result.recipes[0].skipped, "");
  // Nothing is quantised: FP32's own rounding is left.
  for (const double e : result.recipes[0].rel_l2) EXPECT_LT(e, 1e-5);
  // Block means take all of the first head's energy, 1 a value, and none of the second's, 9 a value.
  EXPECT_NEAR(result.orders[0].energy_removed, 0.1, 1e-12);
  // Sorted by sign, the second head has a block of each sign and one of both, whose mean is 0.
  EXPECT_NEAR(result.orders[1].energy_removed, (1 + 9 * 2.0 / 3) / 10, 1e-12);
  const ExpCastStats& stats = result.expcast;
  EXPECT_EQ(stats.rows, GroupedHeads::kBatch * GroupedHeads::kHeads * 64);
  const int64_t uniform = stats.rows * 3 / 4 * GroupedHeads::kTokens;
  EXPECT_GE(stats.running_codes[120], uniform + stats.rows / 4);  // and each other row's maximum
  EXPECT_LT(stats.running_codes[120], uniform + stats.rows / 4 * 40);
}

// ---- what the library refuses --------------------------------------------------------------------------------------

TEST(Compare, SkipsWithTheReason) {
  Capture capture;
  capture.params.grid = {};
  CompareOptions options;
  options.rows = 128;
  options.recipes = {"sage2", "sage3"};
  options.orders = {"cube", "sequence"};
  options.changes = {"v_format=e4m3"};  // NVFP4 probabilities need NVFP4 values
  const CompareResult result = capture.run(options);
  EXPECT_EQ(result.recipes[0].skipped, "");
  EXPECT_NE(result.recipes[1].skipped.find("p_format nvfp4"), std::string::npos) << result.recipes[1].skipped;
  EXPECT_NE(result.orders[0].skipped.find("grid"), std::string::npos) << result.orders[0].skipped;
  EXPECT_EQ(result.orders[1].skipped, "");
}

TEST(Compare, ChangesReachRecipesAndOrders) {
  Capture capture;
  CompareOptions options;
  options.rows = 128;
  options.recipes = {"vsmooth8"};
  options.orders = {"kmeans"};
  const CompareResult before = capture.run(options);
  options.changes = {"clusters=4"};
  const CompareResult after = capture.run(options);
  EXPECT_NE(before.recipes[0].rel_l2, after.recipes[0].rel_l2);
  EXPECT_EQ(before.recipes[0].rel_l2[1], after.recipes[0].rel_l2[1]);  // QK has no part in it
  EXPECT_NE(before.orders[0].energy_removed, after.orders[0].energy_removed);
  EXPECT_NE(after.recipes[0].description.find("clusters=4"), std::string::npos);
}

TEST(Compare, RefusesUnknownNamesAndNonFiniteInputs) {
  Capture capture;
  CompareOptions options;
  options.rows = 128;
  options.recipes = {"no_such"};
  EXPECT_THROW(capture.run(options), std::runtime_error);
  options.recipes = {"sage2"};
  options.orders = {"no_such"};
  EXPECT_THROW(capture.run(options), std::runtime_error);
  options.orders = {"kmeans"};
  reinterpret_cast<uint16_t*>(capture.inputs.k.data.data())[77 * 128 + 5] = 0x7FC0;  // NaN
  try {
    capture.run(options);
    ADD_FAILURE() << "NaN in k was accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("77"), std::string::npos) << error.what();
  }
}

// ---- the command ---------------------------------------------------------------------------------------------------

class CompareCommand : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("vcattn_compare_test_{}", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  // Exit status; standard output and error lie in files.
  int run(const std::string& arguments) {
    const std::string command = fmt::format("'{}' compare '{}' {} > '{}' 2> '{}'", VCATTN_TOOL, kCapture, arguments,
                                            (folder_ / "stdout").string(), (folder_ / "stderr").string());
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::filesystem::path folder_;
};

TEST_F(CompareCommand, WritesJsonAndReport) {
  ASSERT_EQ(run(fmt::format("--rows 128 --recipes sage2,accurate --orders kmeans --seed 1 --json - --report '{}'",
                            (folder_ / "report.html").string())),
            0)
      << read("stderr");
  const Json json = Json::parse(read("stdout"));
  expect_schema(json);
  ASSERT_EQ(json["recipes"].size(), 2u);
  EXPECT_EQ(json["recipes"][0]["name"], "sage2");
  EXPECT_EQ(json["recipes"][1]["name"], "accurate");
  EXPECT_EQ(json["input"]["rows"], 128);
  EXPECT_EQ(json["orders"].size(), 1u);
  EXPECT_EQ(unbalanced_tag(read("report.html")), "");
}

TEST_F(CompareCommand, PrintsTables) {
  ASSERT_EQ(run("--rows 128 --recipes fp8_naive --orders none"), 0) << read("stderr");
  const std::string text = read("stdout");
  EXPECT_NE(text.find("fp8_naive"), std::string::npos) << text;
  EXPECT_EQ(text.find("order of V"), std::string::npos) << text;
}

TEST_F(CompareCommand, FailsInOneLine) {
  for (const char* arguments :
       {"--recipes no_such", "--set no_such=1", "--orders no_such", "--rows 128 --recipes sage2 --set v_format=int8"}) {
    EXPECT_EQ(run(arguments), 1) << arguments;
    const std::string text = read("stderr");
    EXPECT_NE(text.find("vcattn: "), std::string::npos) << arguments << ": " << text;
  }
  EXPECT_EQ(run("--rows 0"), 2);
  EXPECT_EQ(run("--allow-nonfinite"), 2);
}

}  // namespace
}  // namespace vcattn::cli
