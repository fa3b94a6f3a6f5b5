// `vcattn bench`: its options and its output; on a card, that it measures.
#include <nlohmann/json.hpp>

#include "bench_output.h"
#include "bench_shapes.h"
#include "cli_fixture.h"

namespace vcattn {
namespace {

using nlohmann::json;
using test::CliTest, test::Result;

TEST_F(CliTest, BenchRefusesWithoutACard) {
  if (cli::why_no_sm90a().empty()) GTEST_SKIP() << "there is a card";
  for (const char* command : {"attention", "call"}) {
    expect_refused({"bench", command, "--preset", "flux", "--json", path("b.json")},
                   {"bench: back end sm90a cannot run here: "});
    EXPECT_EQ(files(), std::vector<std::string>{});
  }
}

TEST_F(CliTest, BenchNamesWhatIsWrongWithItsOptions) {
  const auto usage_error = [&](const std::vector<std::string>& more, const std::vector<std::string>& parts) {
    std::vector<std::string> arguments = {"bench", "attention"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Result result = run(arguments);
    SCOPED_TRACE(result.err);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
    for (const std::string& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part;
  };
  usage_error({"--preset", "wan"}, {"--preset", "\"wan\"", "wan2.2-720p", "flux"});
  for (const char* shape : {"1x2x3x4x4", "1x2x3x4x4x0", "1x2x3x4x4x128x1", "1x2x3x4x4x128 ", "-1x2x3x4x4x8", "", "axb",
                            "1x99999999999999999999x3x4x4x128"}) {
    usage_error({"--shape", shape}, {"--shape", "seqlen_kv"});
  }
  usage_error({"--shape", "1x2147483647x2147483647x40x40x128"}, {"--shape", "2^40 elements"});
  usage_error({"--rounds", "0"}, {"--rounds"});
  expect_refused({"bench", "attention", "--recipe", "no-such"}, {"\"no-such\"", "accurate"});
  expect_refused({"bench", "call", "--set", "no_field=5"}, {"no_field"});
  expect_refused({"bench", "call", "--json", path("none/b.json")}, {"none/b.json", "folder"});
}

TEST(Bench, ShapesComeInTheOrderTheyAreWritten) {
  const cli::BenchShape shape = cli::parse_shape("2x30x500x6x3x64");
  EXPECT_EQ(shape.batch, 2);
  EXPECT_EQ(shape.seqlen_q, 30);
  EXPECT_EQ(shape.seqlen_kv, 500);
  EXPECT_EQ(shape.num_heads, 6);
  EXPECT_EQ(shape.num_heads_kv, 3);
  EXPECT_EQ(shape.head_dim, 64);
  EXPECT_EQ(cli::preset_by_name("cogvideox-5b").head_dim, 64);
}

// A made-up result: medians, rates and ratios by hand.
cli::BenchResult bench_result() {
  cli::BenchResult result = {.machine = {}, .rounds = 4, .cases = {}};
  result.machine.device = "Card";
  result.machine.cuda_driver = result.machine.cuda_runtime = 13000;
  cli::BenchRecipe recipe = {"accurate", "all fields", 1 << 20, 2048, "", {}};
  recipe.parts.push_back({"attention", 8e9, 0, {5.0, 1.0, 4.0, 2.0}});              // 3 ms: 2.67 TFLOP/s
  recipe.parts.push_back({"prepare", 0, 8.2e9, {6.0, 4.0, 8.0, 2.0}});              // floor 2 ms
  result.cases.push_back({cli::parse_shape("1x1024x1024x1x1x512"), {recipe}, {}});  // q, k, v: 3 MiB
  return result;
}

TEST(Bench, TablesAndJsonHoldMediansAndSamples) {
  cli::BenchResult result = bench_result();
  result.machine.clocks.why_not = "no library";
  const std::string text = cli::bench_text(result, true, false);
  const auto holds = [&](const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << part << text; };
  holds("attention      3.000   1.000   5.000                                   3\n");
  holds("prepare        5.000   2.000   8.000  8200.0     2.000     2.50\n");
  holds("workspace 1 MiB (0.333 of q, k and v in BF16), of grouping 2 KiB (0.001)\n");
  holds("clocks: not read: no library\n");
  const json report = json::parse(cli::bench_json(result, "bench call").dump());
  const json& part = report["cases"][0]["recipes"][0]["parts"][0];
  EXPECT_EQ(part["samples_ms"], (std::vector<double>{5.0, 1.0, 4.0, 2.0}));
  EXPECT_EQ(part["median_ms"], 3.0);
  EXPECT_NEAR(part["tflops"].get<double>(), 8.0 / 3, 1e-9);
  EXPECT_EQ(report["machine"]["nvml"]["found"], false);
}

TEST(Bench, ComparesTheUnfusedChain) {
  cli::BenchResult result = bench_result();
  cli::BenchRecipe& recipe = result.cases[0].recipes[0];
  recipe.parts.push_back({"unfused chain", 0, 24.6e9, {26.0, 24.0, 30.0, 20.0}});  // 25 ms; prepare takes 5
  recipe.fusion = {.fused = 1, .unfused = 2};
  const std::string text = cli::bench_text(result, true, false);
  const char* line = "accurate: the unfused chain takes 5.00 times as long as prepare, and moves 3.00 times the bytes";
  EXPECT_NE(text.find(line), std::string::npos) << text;
  const json report = json::parse(cli::bench_json(result, "bench call").dump());
  EXPECT_EQ(report["cases"][0]["recipes"][0]["unfused_of_fused"]["time"], 5.0);
}

// The idle card's reasons before and after are not what held the clocks down.
TEST(Bench, ClocksAreThoseOfTheWork) {
  cli::BenchResult result = bench_result();
  result.cases[0].clocks = {{.sm_mhz = 345, .watts = 70, .reasons = 1},
                            {.sm_mhz = 1800, .watts = 690, .reasons = 4},
                            {.sm_mhz = 1500, .watts = 700, .reasons = 1 << 20},
                            {.sm_mhz = 1980, .watts = 300, .reasons = 1}};
  const std::string text = cli::bench_text(result, false, false);
  for (const char* part : {"345 MHz 70 W before", "1500..1800 MHz 690..700 W while it ran", "1980 MHz 300 W after",
                           "held down by: sw_power_cap, bit_20\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST_F(CliTest, BenchTimesEveryRoundOnACard) {
  if (const std::string reason = cli::why_no_sm90a(); !reason.empty()) GTEST_SKIP() << reason;
  for (const char* command : {"attention", "call"}) {
    const json report =
        json::parse(run_well({"bench", command, "--shape", "1x300x700x4x2x64", "--preset", "flux", "--recipe", "fast",
                              "--recipe", "accurate", "--rounds", "3", "--json", "-"})
                        .out);
    ASSERT_EQ(report["cases"].size(), 2u);
    for (const json& c : report["cases"]) {
      ASSERT_EQ(c["recipes"].size(), 2u);
      for (const json& recipe : c["recipes"]) {
        EXPECT_EQ(recipe["parts"].size(), std::string(command) == "call" ? 13u : 1u);
        for (const json& part : recipe["parts"]) {
          EXPECT_EQ(part["samples_ms"].size(), 3u);
          EXPECT_GT(part["min_ms"].get<double>(), 0.0);
        }
      }
    }
  }
}

TEST_F(CliTest, BenchTimesTheUnfusedChainOnACard) {
  if (const std::string reason = cli::why_no_sm90a(); !reason.empty()) GTEST_SKIP() << reason;
  const json report = json::parse(
      run_well({"bench", "call", "--unfused", "--shape", "1x300x700x4x2x64", "--rounds", "3", "--json", "-"}).out);
  for (const json& recipe : report["cases"][0]["recipes"]) {
    double bytes = 0.0;  // of the steps
    for (const json& part : recipe["parts"]) {
      const std::string name = part["name"];
      if (name == "unfused chain") {
        EXPECT_EQ(part["bytes"].get<double>(), bytes);
      }
      if (name.starts_with("unfused ")) bytes += part["bytes"].get<double>();
    }
    EXPECT_GT(bytes, 0.0);
    EXPECT_GT(recipe["unfused_of_fused"]["time"].get<double>(), 0.0);
  }
  expect_refused({"bench", "call", "--unfused", "--shape", "1x300x700x4x2x96"}, {"takes head_dim 64 or 128"});
}

}  // namespace
}  // namespace vcattn
