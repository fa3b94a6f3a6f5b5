// The tool as its users meet it: run as a process, judged by its files, its two streams and its exit code.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "cli_fixture.h"
#include "core/tensor_access.h"
#include "cpu/oracle.h"
#include "io/tensor_file.h"
#include "library.h"
#include "random.h"
#include "terminal.h"
#include "vcattn/vcattn.h"
#include "vsmooth/grouping.h"

namespace vcattn {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::CliTest, test::contents, test::Result;

const std::string kQkv = std::string(VCATTN_TEST_DATA) + "/qkv_layer6_4160.safetensors";

io::Tensor tensor_of(const std::string& name, const std::vector<int64_t>& shape, const std::vector<float>& values) {
  io::Tensor tensor{.name = name, .dtype = VCATTN_FP32, .shape = shape, .data = {}};
  const auto bytes = std::as_bytes(std::span(values));
  tensor.data.assign(bytes.begin(), bytes.end());
  return tensor;
}

std::vector<float> floats_of(const io::Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.element_count()));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t code = 0;
    if (tensor.dtype == VCATTN_FP32) {
      std::memcpy(&values[i], tensor.data.data() + 4 * i, 4);
    } else {
      std::memcpy(&code, tensor.data.data() + 2 * i, 2);
      values[i] = tensor.dtype == VCATTN_BF16 ? decode_bf16(code) : decode_fp16(code);
    }
  }
  return values;
}

// Wave-like values without a symmetry that could hide swapped axes.
std::vector<float> waves(size_t count, double step) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(std::sin(step * static_cast<double>(i * i + 1)));
  return values;
}

// Contiguous [batch, seqlen, num_heads, head_dim], or [batch, num_heads, seqlen, head_dim] where `heads_first`.
vcattn_tensor view_of(io::Tensor& t, bool heads_first) {
  vcattn_tensor view = {};
  view.data = t.data.data();
  view.dtype = t.dtype;
  const int64_t b = t.shape[0], x = t.shape[1], y = t.shape[2], d = t.shape[3];
  const std::array<int64_t, 4> shape = {b, heads_first ? y : x, heads_first ? x : y, d};
  const std::array<int64_t, 4> stride = {x * y * d, heads_first ? d : y * d, heads_first ? y * d : d, 1};
  std::copy(shape.begin(), shape.end(), view.shape);
  std::copy(stride.begin(), stride.end(), view.stride);
  return view;
}

double relative_l2(const std::vector<double>& expected, const std::vector<double>& found) {
  EXPECT_EQ(expected.size(), found.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (expected[i] - found[i]) * (expected[i] - found[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// Relative L2 of `out` (and of `lse`, where given) in the rows `rows` to FP64 attention.
struct Errors {
  double out, lse;
};

Errors oracle_errors(io::Tensor& q, io::Tensor& k, io::Tensor& v, bool heads_first, io::Tensor& out,
                     const io::Tensor* lse, const std::vector<int64_t>& rows, double scale = 0) {
  vcattn_attention_params params;
  vcattn_attention_params_init(&params);
  params.q = view_of(q, heads_first);
  params.k = view_of(k, heads_first);
  params.v = view_of(v, heads_first);
  params.out = view_of(out, heads_first);
  params.softmax_scale = scale;
  cpu::OracleRows oracle;
  vcattn_message message = {};
  EXPECT_EQ(cpu::oracle_attention(params, rows, oracle, &message), VCATTN_OK) << message.text;
  const int64_t heads = params.q.shape[2], tokens = params.q.shape[1];
  std::vector<double> found_out, found_lse;
  std::vector<float> row(static_cast<size_t>(params.q.shape[3]));
  const std::vector<float> all_lse = lse != nullptr ? floats_of(*lse) : std::vector<float>{};
  for (int64_t b = 0; b < params.q.shape[0]; ++b) {
    for (const int64_t token : rows) {
      for (int64_t h = 0; h < heads; ++h) {
        load_row(params.out, b, token, h, row.data());
        found_out.insert(found_out.end(), row.begin(), row.end());
        const int64_t at = heads_first ? (b * heads + h) * tokens + token : (b * tokens + token) * heads + h;
        if (lse != nullptr) found_lse.push_back(static_cast<double>(all_lse[at]));
      }
    }
  }
  return {relative_l2(oracle.out, found_out), lse != nullptr ? relative_l2(oracle.lse, found_lse) : 0};
}

io::Tensor& named(io::TensorFile& file, const std::string& name) {
  for (io::Tensor& tensor : file.tensors) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return file.tensors.front();
}

const std::vector<int64_t> kRows = {0, 63, 64, 1000, 2048, 3333, 4159};

// ---- info ----------------------------------------------------------------------------------------------------------

TEST_F(CliTest, InfoReportsBuildMachineAndRecipes) {
  const json report = json::parse(run_well({"info", "--recipes", "--json", "-"}).out);
  EXPECT_EQ(report["version"], vcattn_version());
  EXPECT_NE(report["build"]["flags"].get<std::string>().find("-ffp-contract=off"), std::string::npos);
  EXPECT_GE(report["cpu"]["usable_cores"].get<int>(), 1);
  EXPECT_EQ(report["backends"][0]["name"], vcattn_backend_info(0, nullptr, nullptr));
  EXPECT_EQ(report["backends"][0]["available"], true);
  EXPECT_TRUE(report["gpu_driver"]["text"].is_string());
  for (const json& gpu : report["gpus"]) EXPECT_NE(gpu["reason"], "") << gpu;
  ASSERT_EQ(report["recipes"].size(), static_cast<size_t>(vcattn_recipe_count()));
  for (int32_t i = 0; i < vcattn_recipe_count(); ++i) {
    EXPECT_EQ(report["recipes"][i]["name"], vcattn_recipe_name(i));
    EXPECT_NE(report["recipes"][i]["description"].get<std::string>().find(" p_format="), std::string::npos);
  }
}

TEST_F(CliTest, TextForAPipeHasNoColour) {
  const std::string info = run_well({"info", "--recipes"}).out;
  EXPECT_NE(info.find(std::string("vcattn ") + vcattn_version()), std::string::npos);
  EXPECT_NE(info.find("name=accurate "), std::string::npos);
  const std::string synth = run_well({"synth", "-o", path("a.safetensors"), "--grid", "8x16x32"}).out;
  for (const std::string& text : {info, synth}) EXPECT_EQ(text.find('\033'), std::string::npos) << text;
}

// ---- attend --------------------------------------------------------------------------------------------------------

TEST_F(CliTest, AttendMatchesTheOracleOnRealTensors) {
  struct Case {
    const char *recipe, *dtype;
    double out, lse;  // largest relative L2
  };
  io::TensorFile inputs = io::read_tensors(kQkv);
  for (const Case& c : {Case{"fp32", "fp32", 1e-6, 1e-6}, {"accurate", "bf16", 4e-3, 1e-3}}) {
    SCOPED_TRACE(c.recipe);
    std::vector<std::string> arguments = {"attend", kQkv, "-o", path("o.safetensors"), "--recipe", c.recipe, "--lse"};
    if (c.dtype == std::string("fp32")) arguments.insert(arguments.end(), {"--dtype", "fp32"});
    const Result result = run_well(arguments);
    EXPECT_NE(result.out.find(std::string("recipe ") + c.recipe), std::string::npos) << result.out;
    EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1);
    io::TensorFile outputs = io::read_tensors(path("o.safetensors"));
    ASSERT_EQ(outputs.tensors.size(), 2u);
    io::Tensor& out = named(outputs, "out");
    const io::Tensor& lse = named(outputs, "lse");
    EXPECT_EQ(out.dtype, c.dtype == std::string("fp32") ? VCATTN_FP32 : VCATTN_BF16);
    EXPECT_EQ(out.shape, (std::vector<int64_t>{1, 1, 4160, 128}));
    EXPECT_EQ(lse.dtype, VCATTN_FP32);
    EXPECT_EQ(lse.shape, (std::vector<int64_t>{1, 1, 4160}));
    EXPECT_EQ(outputs.metadata["layout"], "[batch, heads, tokens, head_dim]");
    EXPECT_EQ(outputs.metadata["softmax_scale"], "0.08838834764831843");
    EXPECT_EQ(outputs.metadata["vcattn_version"], vcattn_version());
    EXPECT_TRUE(outputs.metadata["recipe"].starts_with(std::string("name=") + c.recipe + " "));
    const Errors errors =
        oracle_errors(named(inputs, "q"), named(inputs, "k"), named(inputs, "v"), true, out, &lse, kRows);
    EXPECT_LT(errors.out, c.out);
    EXPECT_LT(errors.lse, c.lse);
  }
}

TEST_F(CliTest, AttendReportsAsJson) {
  const Result result = run_well({"attend", kQkv, "-o", path("o.safetensors"), "--set", "mean_rows=32", "--set",
                                  "p_format=e4m3", "--threads", "1", "--backend", "cpu", "--json", "-"});
  const json report = json::parse(result.out);
  EXPECT_EQ(report["shape"], (json{{"batch", 1},
                                   {"seqlen_q", 4160},
                                   {"seqlen_kv", 4160},
                                   {"num_heads", 1},
                                   {"num_heads_kv", 1},
                                   {"head_dim", 128}}));
  const std::string recipe = report["recipe"];
  EXPECT_NE(recipe.find(" mean_rows=32 "), std::string::npos) << recipe;
  EXPECT_NE(recipe.find(" p_format=e4m3 "), std::string::npos) << recipe;
  EXPECT_EQ(report["backend"], "cpu");
  EXPECT_EQ(report["flops"], 4.0 * 4160 * 4160 * 128);
  EXPECT_GT(report["seconds"].get<double>(), 0.0);
  EXPECT_GT(report["workspace_bytes"].get<int64_t>(), 0);
}

// [seqlen, num_heads, head_dim] by --q, --k, --v; two query heads per KV head; the same data in both layouts.
TEST_F(CliTest, AttendTakesNpyInBothLayouts) {
  constexpr int64_t kQueries = 37, kKeys = 150, kHeads = 4, kHeadsKv = 2, kDim = 32;
  for (const bool heads_first : {false, true}) {
    SCOPED_TRACE(heads_first ? "BHSD" : "BSHD");
    const auto shape = [&](int64_t tokens, int64_t heads) {
      return heads_first ? std::vector<int64_t>{heads, tokens, kDim} : std::vector<int64_t>{tokens, heads, kDim};
    };
    io::Tensor q = tensor_of("q", shape(kQueries, kHeads), waves(kQueries * kHeads * kDim, 0.37));
    io::Tensor k = tensor_of("k", shape(kKeys, kHeadsKv), waves(kKeys * kHeadsKv * kDim, 0.11));
    io::Tensor v = tensor_of("v", shape(kKeys, kHeadsKv), waves(kKeys * kHeadsKv * kDim, 0.23));
    for (const io::Tensor* t : {&q, &k, &v}) io::write_tensors(path(t->name + ".npy"), {{}, {*t}});
    std::vector<std::string> arguments = {"attend",
                                          "--q",
                                          path("q.npy"),
                                          "--k",
                                          path("k.npy"),
                                          "--v",
                                          path("v.npy"),
                                          "--recipe",
                                          "fp32",
                                          "--layout",
                                          heads_first ? "BHSD" : "BSHD",
                                          "--scale",
                                          "0.5",
                                          "-o"};
    arguments.push_back(path("out.npy"));
    run_well(arguments);
    io::Tensor out = io::read_tensors(path("out.npy")).tensors.front();
    EXPECT_EQ(out.shape, q.shape);

    arguments.back() = path("out.safetensors");
    arguments.push_back("--lse");
    run_well(arguments);
    io::TensorFile both = io::read_tensors(path("out.safetensors"));
    EXPECT_EQ(both.metadata["layout"], heads_first ? "[heads, tokens, head_dim]" : "[tokens, heads, head_dim]");
    EXPECT_EQ(named(both, "out").data, out.data);
    const io::Tensor& lse = named(both, "lse");
    EXPECT_EQ(lse.shape, (std::vector<int64_t>{q.shape[0], q.shape[1]}));
    for (io::Tensor* t : {&q, &k, &v, &out}) t->shape.insert(t->shape.begin(), 1);
    const Errors errors = oracle_errors(q, k, v, heads_first, out, &lse, {0, 1, 17, 36}, 0.5);
    EXPECT_LT(errors.out, 1e-6);
    EXPECT_LT(errors.lse, 1e-6);
  }
}

class RefusalTest : public CliTest {
 protected:
  void write(const std::string& name, const std::vector<int64_t>& q, const std::vector<int64_t>& k,
             const std::vector<int64_t>& v, const std::map<std::string, std::string>& metadata = {}) {
    io::TensorFile file{metadata, {}};
    const std::array<std::pair<const char*, const std::vector<int64_t>*>, 3> tensors = {
        {{"q", &q}, {"k", &k}, {"v", &v}}};
    for (const auto& [tensor, shape] : tensors) {
      int64_t count = 1;
      for (const int64_t extent : *shape) count *= extent;
      file.tensors.push_back(tensor_of(tensor, *shape, std::vector<float>(count, 1.0f)));
    }
    io::write_tensors(path(name), file);
  }

  void expect_attend_refused(const std::vector<std::string>& arguments, const std::vector<std::string>& parts) {
    std::vector<std::string> all = {"attend", "-o", path("out.safetensors")};
    all.insert(all.end(), arguments.begin(), arguments.end());
    expect_refused(all, parts);
    EXPECT_FALSE(fs::exists(path("out.safetensors")));
  }
};

TEST_F(RefusalTest, InputsNameFileTensorExpectedAndFound) {
  const std::string file = path("a.safetensors");
  expect_attend_refused({path("none.safetensors")}, {"none.safetensors", "No such file"});
  expect_attend_refused({kQkv, "--names", "q,k,value"}, {kQkv, "\"value\"", "found \"q\", \"k\", \"v\""});
  expect_attend_refused({kQkv, "--names", "q,k"}, {"--names", "three", "2"});
  expect_attend_refused({}, {"FILE", "--q"});
  expect_attend_refused({"--q", file}, {"FILE", "--q"});
  expect_attend_refused({path("q.npy")}, {"q.npy", ".safetensors", "--q"});

  write("a.safetensors", {1, 8, 4, 16}, {1, 8, 2, 16}, {1, 9, 2, 16});
  expect_attend_refused({file}, {file, "\"k\"", "seqlen 9", "\"v\"", "found 8"});
  write("a.safetensors", {1, 8, 4, 32}, {1, 8, 2, 16}, {1, 8, 2, 16});
  expect_attend_refused({file}, {file, "\"q\"", "head_dim 16", "found 32"});
  write("a.safetensors", {1, 8, 3, 16}, {1, 8, 2, 16}, {1, 8, 2, 16});
  expect_attend_refused({file}, {file, "\"q\"", "multiple of the 2", "found 3"});
  write("a.safetensors", {8, 16}, {1, 8, 2, 16}, {1, 8, 2, 16});
  expect_attend_refused({file}, {file, "\"q\"", "3 or 4 axes", "[8, 16]"});
  write("a.safetensors", {1, 0, 2, 16}, {1, 8, 2, 16}, {1, 8, 2, 16});
  expect_attend_refused({file}, {file, "\"q\"", "empty", "[1, 0, 2, 16]"});
}

TEST_F(RefusalTest, MetadataAndOptionsNameWhatWasFound) {
  const std::vector<int64_t> shape = {1, 8, 2, 16};
  const std::string file = path("a.safetensors");
  const auto refused_metadata = [&](const std::string& key, const std::string& value) {
    std::map<std::string, std::string> metadata = {{"video_grid", "1,2,4"}};
    metadata[key] = value;
    write("a.safetensors", shape, shape, shape, metadata);
    expect_attend_refused({file}, {file, key, value});
  };
  refused_metadata("layout", "[tokens, batch]");
  refused_metadata("video_grid", "1,2");
  refused_metadata("text_tokens", "-3");
  refused_metadata("softmax_scale", "0.1x");
  write("a.safetensors", shape, shape, shape);
  expect_attend_refused({file, "--layout", "SBHD"}, {"--layout", "BSHD", "\"SBHD\""});
  expect_attend_refused({file, "--grid", "1x0x8"}, {"--grid", "\"1x0x8\""});
  expect_attend_refused({file, "--text-tokens", "2"}, {"--text-tokens", "--grid"});
  expect_attend_refused({file, "--scale", "nan"}, {"--scale", "nan"});
  expect_attend_refused({file, "--dtype", "int8"}, {"--dtype", "\"int8\""});
  expect_attend_refused({file, "--backend", "tpu"}, {"auto or cpu", "\"tpu\""});
  expect_attend_refused({file, "--recipe", "none"}, {"\"none\"", "accurate", "vsmooth8_expcast", "fp32"});
  expect_attend_refused({file, "--set", "no_field=1"}, {"\"no_field\""});
  expect_attend_refused({file, "--set", "mean_rows"}, {"field=value", "\"mean_rows\""});
  expect_attend_refused({file, "--set", "mean_rows=33"}, {"mean_rows is 0, 32, 64 or 128"});
  expect_attend_refused({file, "--recipe", "vsmooth8", "--set", "v_order=cube"}, {"v_order cube needs the video grid"});
}

TEST_F(RefusalTest, NonFiniteInputsAreLocatedAndLetThroughOnRequest) {
  write("a.safetensors", {1, 8, 2, 16}, {1, 8, 2, 16}, {1, 8, 2, 16});
  io::TensorFile file = io::read_tensors(path("a.safetensors"));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(named(file, "v").data.data() + 4 * ((5 * 2 + 1) * 16 + 3), &nan, 4);
  io::write_tensors(path("a.safetensors"), file);
  expect_attend_refused({path("a.safetensors")}, {"v: NaN at batch 0, token 5, head 1, channel 3"});
  run_well({"attend", path("a.safetensors"), "-o", path("o.safetensors"), "--allow-nonfinite"});
  const std::vector<float> out = floats_of(io::read_tensors(path("o.safetensors")).tensors.front());
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i % 32 == 16 + 3) << i << ": " << out[i];
}

TEST_F(RefusalTest, OutputsThatCannotBeWrittenLeaveNothing) {
  const std::vector<std::string> before = files();
  const auto refused = [&](const std::string& output, const std::vector<std::string>& more,
                           const std::vector<std::string>& parts) {
    std::vector<std::string> arguments = {"attend", kQkv, "--recipe", "bf16", "-o", output};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refused(arguments, parts);
    EXPECT_EQ(files(), before);
  };
  refused(path("no/out.safetensors"), {}, {"no/out.safetensors", "folder does not exist"});
  refused(path("out.bin"), {}, {"out.bin", ".safetensors or .npy"});
  refused(path("out.npy"), {}, {"out.npy", "BF16", "--dtype"});
  refused(path("out.npy"), {"--dtype", "fp32", "--lse"}, {"out.npy", "--lse"});
  // Outputs that would replace one another, or an input.
  const std::string twice = path("twice.safetensors");
  refused(twice, {"--json", twice}, {"twice.safetensors", "a file of its own"});
  refused(path("./twice.safetensors"), {"--json", path("././twice.safetensors")}, {"a file of its own"});
  fs::create_directory(path("d"));
  fs::create_directory_symlink("d", path("link"));
  fs::create_symlink("new.safetensors", path("dangling.safetensors"));
  expect_refused({"attend", kQkv, "-o", path("d/n.safetensors"), "--json", path("link/n.safetensors")},
                 {"a file of its own"});
  expect_refused({"attend", kQkv, "-o", path("dangling.safetensors"), "--json", path("new.safetensors")},
                 {"a file of its own"});
  for (const char* name : {"d", "link", "dangling.safetensors"}) fs::remove(path(name));
  expect_refused({"compare", kQkv, "--json", kQkv}, {"qkv", "a file of its own"});
  expect_refused({"compare", kQkv, "--report", path("r.html"), "--json", path("r.html")}, {"a file of its own"});
  expect_refused({"compare", kQkv, "--json", path("no/r.json")}, {"no/r.json", "folder does not exist"});
  expect_refused({"synth", "--tokens", "2048", "-o", twice, "--json", twice}, {"a file of its own"});
  expect_refused({"synth", "--tokens", "2048", "-o", path("no/s.safetensors")}, {"no/s.safetensors", "folder"});
  expect_refused({"synth", "--tokens", "2048", "-o", path("s.npy")}, {"s.npy", ".safetensors"});
  EXPECT_EQ(files(), before);
}

TEST_F(CliTest, UsageErrorsGoToStderr) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{}, {"attend", kQkv}, {"info", "--no-such-option"}, {"nonsense"}}) {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err.rfind("vcattn: ", 0), 0u) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

// ---- parts ---------------------------------------------------------------------------------------------------------

TEST(AttentionByHead, EqualsOneCallToTheBitAndRefusesInItsCoordinates) {
  const Shape q_shape = {2, 70, 4, 32}, kv_shape = {2, 150, 2, 32};
  std::vector<float> q(2 * 70 * 4 * 32), k(2 * 150 * 2 * 32), v(k.size()), whole(q.size()), parts(q.size());
  std::vector<float> whole_lse(2 * 70 * 4), parts_lse(whole_lse.size());
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < k.size(); ++i)
    k[i] = std::cos(static_cast<float>(3 * i)), v[i] = std::sin(static_cast<float>(7 * i));
  vcattn_attention_params params = make_params();
  params.q = make_tensor(q.data(), VCATTN_FP32, q_shape);
  params.k = make_tensor(k.data(), VCATTN_FP32, kv_shape);
  params.v = make_tensor(v.data(), VCATTN_FP32, kv_shape);
  params.lse_stride[0] = 280;
  params.lse_stride[1] = 4;
  params.lse_stride[2] = 1;
  params.out = make_tensor(whole.data(), VCATTN_FP32, q_shape);
  params.lse = whole_lse.data();
  cli::run_attention(params);
  params.out = make_tensor(parts.data(), VCATTN_FP32, q_shape);
  params.lse = parts_lse.data();
  std::vector<int64_t> seen;
  cli::run_attention_by_head(params, 0.0, [&](int64_t done, int64_t) { seen.push_back(done); });
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(whole, parts);
  EXPECT_EQ(whole_lse, parts_lse);
  v[((150 + 9) * 2 + 1) * 32 + 5] = std::numeric_limits<float>::infinity();
  try {
    cli::run_attention_by_head(params, 0.0, [](int64_t, int64_t) {});
    ADD_FAILURE() << "an infinity was let through";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "v: infinity at batch 1, token 9, head 1, channel 5");
  }
}

TEST(Random, IsSplitMix64) {
  cli::Random random(1234567);
  for (const uint64_t expected : {6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
                                  4593380528125082431u, 16408922859458223821u}) {
    EXPECT_EQ(random.bits(), expected);
  }
}

TEST(Random, NormalNumbersFollowThePolarMethodWithAnExactLogarithm) {
  cli::Random random(1234567), uniform(1234567);
  for (int i = 0; i < 10000; ++i) {
    double x, y, s;
    do {
      x = 2 * uniform.uniform() - 1;
      y = 2 * uniform.uniform() - 1;
      s = x * x + y * y;
    } while (s >= 1);
    const double factor = std::sqrt(-2 * std::log(s) / s);
    EXPECT_NEAR(random.normal(), x * factor, 1e-14 * std::abs(x * factor)) << i;
    EXPECT_NEAR(random.normal(), y * factor, 1e-14 * std::abs(y * factor)) << i;
  }
}

TEST(Random, StreamsDiffer) {
  std::set<uint64_t> first;
  for (const uint64_t seed : {0, 1}) {
    for (int64_t a = 0; a < 10; ++a) {
      first.insert(cli::Random(seed, {a}).bits());
      for (int64_t b = 0; b < 10; ++b) first.insert(cli::Random(seed, {a, b}).bits());
    }
  }
  EXPECT_EQ(first.size(), 220u);
}

TEST(Table, AlignsByCodePoints) {
  cli::Table table({{"name", cli::Align::kLeft}, {"v"}, {"note", cli::Align::kLeft}});
  table.add_row({"µ", "1.25", ""});
  table.add_row({"longer", "3", "x"}, cli::Color::kDim);
  EXPECT_EQ(table.text(false), "name       v  note\nµ       1.25\nlonger     3  x\n");
  EXPECT_NE(table.text(true).find("\033[2mlonger     3  x\033[0m\n"), std::string::npos) << table.text(true);
}

TEST(BytesText, HasThreeDigits) {
  EXPECT_EQ(cli::bytes_text(812), "812 B");
  EXPECT_EQ(cli::bytes_text(1023), "0.999 KiB");
  EXPECT_EQ(cli::bytes_text(1536), "1.5 KiB");
  EXPECT_EQ(cli::bytes_text(uint64_t{150} << 30), "150 GiB");
}

// ---- synth ---------------------------------------------------------------------------------------------------------

// Share of V's energy that 128-row means remove, from the file alone.
double measured_share(const io::Tensor& v, int32_t order, const vcattn_video_grid& grid) {
  const std::vector<float> values = floats_of(v);
  const vsmooth::Tokens tokens = {values.data(), v.shape[2], v.shape[3], v.shape[3]};
  vcattn_recipe recipe;
  EXPECT_EQ(vcattn_recipe_by_name("vsmooth8", &recipe, nullptr), VCATTN_OK);
  const size_t bytes = vsmooth::grouping_workspace_size(tokens.count, tokens.stride, recipe.grouping, order);
  std::vector<std::byte> memory(bytes + 64);
  void* aligned = memory.data();
  size_t space = memory.size();
  EXPECT_NE(std::align(64, bytes, aligned, space), nullptr);
  std::vector<int32_t> permutation(static_cast<size_t>(tokens.count));
  vsmooth::order_tokens(tokens, order, recipe.grouping, grid, false, nullptr, permutation.data(),
                        {static_cast<std::byte*>(aligned), bytes});
  return vsmooth::energy_removed(tokens, permutation.data(), 128);
}

TEST_F(CliTest, SynthReachesTheAskedShares) {
  const json report = json::parse(run_well({"synth", "-o", path("s.safetensors"), "--grid", "8x32x32", "--text-tokens",
                                            "64", "--energy", "8,12,36", "--seed", "5", "--json", "-"})
                                      .out);
  io::TensorFile file = io::read_tensors(path("s.safetensors"));
  const io::Tensor& v = named(file, "v");
  ASSERT_EQ(v.shape, (std::vector<int64_t>{1, 1, 64 + 8 * 32 * 32, 128}));
  EXPECT_EQ(file.metadata["layout"], "[batch, heads, tokens, head_dim]");
  EXPECT_EQ(file.metadata["video_grid"], "8,32,32");
  EXPECT_EQ(file.metadata["text_tokens"], "64");
  EXPECT_EQ(file.metadata["seed"], "5");
  const vcattn_video_grid grid = {64, 8, 32, 32};
  struct Case {
    const char* name;
    int32_t order;
    double asked;
  };
  for (const Case& c : {Case{"sequence", VCATTN_ORDER_SEQUENCE, 0.08},
                        {"cube", VCATTN_ORDER_CUBE, 0.12},
                        {"kmeans", VCATTN_ORDER_KMEANS, 0.36}}) {
    const double measured = measured_share(v, c.order, c.order == VCATTN_ORDER_CUBE ? grid : vcattn_video_grid{});
    EXPECT_NEAR(measured, c.asked, 0.005) << c.name;
    EXPECT_NEAR(report["heads"][0]["energy_reached"][c.name].get<double>(), measured, 1e-12) << c.name;
    EXPECT_NEAR(report["energy_asked"][c.name].get<double>(), c.asked, 1e-12) << c.name;
  }
}

TEST_F(CliTest, SynthKeysAndQueriesHaveTheirStructure) {
  run_well({"synth", "-o", path("s.safetensors"), "--tokens", "2048", "--heads", "4", "--heads-kv", "2", "--dim", "64",
            "--dtype", "fp32", "--k-bias", "3", "--sharpness", "2.5"});
  io::TensorFile file = io::read_tensors(path("s.safetensors"));
  ASSERT_EQ(named(file, "q").shape, (std::vector<int64_t>{1, 4, 2048, 64}));
  ASSERT_EQ(named(file, "k").shape, (std::vector<int64_t>{1, 2, 2048, 64}));
  const std::vector<float> q = floats_of(named(file, "q")), k = floats_of(named(file, "k"));
  for (size_t head_kv = 0; head_kv < 2; ++head_kv) {
    const float* keys = k.data() + head_kv * 2048 * 64;
    std::array<double, 64> mean = {};
    double energy = 0, mean_energy = 0;
    for (size_t i = 0; i < 2048 * 64; ++i) {
      mean[i % 64] += static_cast<double>(keys[i]) / 2048;
      energy += static_cast<double>(keys[i]) * keys[i] / 2048;
    }
    for (const double m : mean) mean_energy += m * m;
    EXPECT_NEAR(std::sqrt(mean_energy / (energy - mean_energy)), 3.0, 1e-3) << "KV head " << head_kv;
    for (size_t h = 2 * head_kv; h < 2 * head_kv + 2; ++h) {
      double variance = 0;
      constexpr size_t kStep = 31;  // rows other than those that synth measures
      size_t rows = 0;
      for (size_t i = 0; i < 2048; i += kStep, ++rows) {
        double sum = 0, squares = 0;
        for (size_t j = 0; j < 2048; ++j) {
          double score = 0;
          for (size_t d = 0; d < 64; ++d) score += static_cast<double>(q[(h * 2048 + i) * 64 + d]) * keys[j * 64 + d];
          score /= 8;  // sqrt(64)
          sum += score / 2048;
          squares += score * score / 2048;
        }
        variance += squares - sum * sum;
      }
      EXPECT_NEAR(std::sqrt(variance / static_cast<double>(rows)), 2.5, 0.25) << "head " << h;
    }
  }
}

TEST_F(CliTest, SynthDependsOnTheSeedAlone) {
  const auto make = [&](const char* name, const char* seed) {
    run_well({"synth", "-o", path(name), "--grid", "8x16x32", "--heads", "2", "--seed", seed});
    return contents(path(name));
  };
  const std::string first = make("a.safetensors", "7");
  EXPECT_EQ(first, make("b.safetensors", "7"));
  EXPECT_NE(first, make("c.safetensors", "8"));
}

TEST_F(CliTest, SynthRefusesWhatItCannotReach) {
  const auto refused = [&](const std::vector<std::string>& more, const std::vector<std::string>& parts) {
    std::vector<std::string> arguments = {"synth", "-o", path("s.safetensors")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refused(arguments, parts);
    EXPECT_FALSE(fs::exists(path("s.safetensors")));
  };
  const std::string grid = "4x16x16";
  refused({"--grid", grid, "--energy", "12,8,36"}, {"12.0, 8.0, 36.0 %", "sequence", "cube"});
  refused({"--grid", grid, "--energy", "0.08,0.4,0.36"}, {"8.0, 40.0, 36.0 %", "cube", "k-means"});
  refused({"--grid", grid, "--energy", "0.1,12,36"}, {"at least 0.78 %"});
  refused({"--grid", grid, "--energy", "8,12"}, {"--energy", "three shares", "\"8,12\""});
  refused({"--tokens", "1024", "--energy", "8,12,36"}, {"--energy", "two shares", "--grid"});
  refused({"--grid", grid, "--energy", "8,12,97"}, {"8.0, 12.0, 97.0 %", "even without noise", "at best"});
  refused({"--grid", grid, "--energy", "8,12,12"}, {"8.0, 12.0, 12.0 %", "k-means", "at best"});
  refused({"--grid", "1x1x2048"}, {"the orders group these 2048 tokens alike"});
  refused({"--grid", grid, "--tokens", "1000"}, {"--tokens", "1024", "1000"});
  refused({"--grid", grid, "--heads", "3", "--heads-kv", "2"}, {"--heads", "2", "3"});
  refused({"--grid", grid, "--v-outliers", "0.1"}, {"--v-outliers", "\"0.1\""});
  refused({}, {"--grid or --tokens"});
}

}  // namespace
}  // namespace vcattn
