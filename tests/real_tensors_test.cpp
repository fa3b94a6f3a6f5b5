// The errors of the recipes on tensors captured from a trained video transformer (data/README.md), beside figures that
// were measured independently in NumPy and PyTorch. docs/algorithm.md explains each difference.
#include <cstring>

#include "io/tensor_file.h"
#include "support.h"

namespace vcattn::test {
namespace {

struct Sample {
  io::TensorFile file;
  int64_t tokens = 0;
  std::vector<int64_t> rows;  // every n-th query, in blocks of 128: block scales of Q see a mixture of rows
  std::vector<float> q;
  cpu::OracleRows oracle;
  vcattn_attention_params p;

  const io::Tensor& tensor(const char* name) const {
    for (const io::Tensor& t : file.tensors) {
      if (t.name == name) return t;
    }
    throw std::runtime_error("no tensor in the sample");
  }
};

vcattn_tensor dense(const void* data, vcattn_dtype dtype, int64_t tokens) {
  return {const_cast<void*>(data), dtype, 0, {1, tokens, 1, 128}, {tokens * 128, 128, 128, 1}};
}

const Sample& sample(const std::string& name) {
  static std::map<std::string, std::unique_ptr<Sample>> cache;
  auto& entry = cache[name];
  if (entry != nullptr) return *entry;
  entry = std::make_unique<Sample>();
  Sample& s = *entry;
  s.file = io::read_tensors(std::string(VCATTN_TEST_DATA) + "/" + name);
  s.tokens = s.tensor("q").shape[2];
  constexpr int64_t kRows = 512;
  for (int64_t i = 0; i < kRows; ++i) s.rows.push_back(i * s.tokens / kRows);
  vcattn_attention_params_init(&s.p);
  std::vector<float> out(s.tokens * 128);
  s.p.q = dense(s.tensor("q").data.data(), VCATTN_BF16, s.tokens);
  s.p.k = dense(s.tensor("k").data.data(), VCATTN_BF16, s.tokens);
  s.p.v = dense(s.tensor("v").data.data(), VCATTN_BF16, s.tokens);
  s.p.out = dense(out.data(), VCATTN_FP32, s.tokens);
  vcattn_message message{};
  EXPECT_EQ(cpu::oracle_attention(s.p, s.rows, s.oracle, &message), VCATTN_OK) << message.text;
  s.q.resize(kRows * 128);
  for (int64_t i = 0; i < kRows; ++i) load_row(s.p.q, 0, s.rows[i], 0, &s.q[i * 128]);
  s.p.q = dense(s.q.data(), VCATTN_FP32, kRows);
  return s;
}

double error_of(const Sample& s, const vcattn_recipe& r) {
  vcattn_attention_params p = s.p;
  p.recipe = r;
  std::vector<float> out(s.q.size());
  p.out = dense(out.data(), VCATTN_FP32, p.q.shape[1]);
  const Outcome outcome = attend(p);
  EXPECT_EQ(outcome.code, VCATTN_OK) << outcome.message;
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += (out[i] - s.oracle.out[i]) * (out[i] - s.oracle.out[i]);
    norm += s.oracle.out[i] * s.oracle.out[i];
  }
  return std::sqrt(error / norm);
}

// Only P quantised. The order stays: a tile's maximum depends on it.
vcattn_recipe p_alone(vcattn_recipe r) {
  r.qk_format = r.v_format = VCATTN_FORMAT_FP32;
  r.qk_scale_kind = VCATTN_SCALE_ABSMAX;
  r.qk_accumulate = VCATTN_ACC_FP32;
  r.qk_hadamard = r.k_centred = r.q_centred = 0;
  r.mean_rows = 0;
  return r;
}

// Only V quantised.
vcattn_recipe v_alone(vcattn_recipe r) {
  r = p_alone(r);
  r.p_format = VCATTN_P_FP32;
  r.row_max = VCATTN_MAX_RUNNING;
  r.row_sum = VCATTN_SUM_UNROUNDED;
  r.v_format = VCATTN_FORMAT_E4M3;
  return r;
}

constexpr const char* kLayer2 = "qkv_layer2_16448.safetensors";
constexpr const char* kLayer6 = "qkv_layer6_4160.safetensors";

void expect_near(const char* what, double found, double expected) {
  EXPECT_NEAR(found, expected, 0.15 * expected) << what;
}

TEST(RealTensors, ErrorsOfLayer2AreThoseMeasuredIndependently) {
  const Sample& s = sample(kLayer2);
  expect_near("fp8_naive", error_of(s, recipe("fp8_naive")), .0111);
  expect_near("sage2", error_of(s, recipe("sage2")), .0042);
  expect_near("vsmooth8", error_of(s, recipe("vsmooth8")), .0034);
  expect_near("vsmooth8_expcast", error_of(s, recipe("vsmooth8_expcast")), .0035);
  expect_near("accurate", error_of(s, recipe("accurate")), .0033);
}

TEST(RealTensors, ValueErrorsFallWithEachStep) {
  const Sample& s = sample(kLayer2);
  vcattn_recipe none = v_alone(recipe("sage2"));
  expect_near("no smoothing", error_of(s, none), .0017);
  vcattn_recipe kmeans = v_alone(recipe("vsmooth8"));
  kmeans.mean_rows = 128;
  expect_near("k-means, 128 rows", error_of(s, kmeans), .0013);
  vcattn_recipe centred = kmeans;
  centred.mean_centred = 1;
  expect_near("centred", error_of(s, centred), .0010);
  vcattn_recipe ordered = centred;
  ordered.v_order = VCATTN_ORDER_CHAIN;
  EXPECT_LT(error_of(s, ordered), .0010);
  vcattn_recipe fine = ordered;
  fine.mean_rows = 32;
  EXPECT_LT(error_of(s, fine), .0008);
}

TEST(RealTensors, OneMaximumPerTileBeatsOnePerRow) {
  for (const char* file : {kLayer2, kLayer6}) {
    const Sample& s = sample(file);
    vcattn_recipe tile = p_alone(recipe("exact")), row = tile;
    row.row_max = VCATTN_MAX_RUNNING;
    row.row_sum = VCATTN_SUM_UNROUNDED;  // as the peers do it
    EXPECT_LT(error_of(s, tile), error_of(s, row)) << file;
  }
}

TEST(RealTensors, TwoPhasesTakeExpCastToExp2) {
  const Sample& s = sample(kLayer6);
  const vcattn_recipe two = recipe("accurate"), exact = recipe("exact");
  vcattn_recipe one = two;
  one.p_phases = 1;
  const double error = error_of(s, two);
  EXPECT_LT(error, 0.7 * error_of(s, one));
  EXPECT_LT(error, 1.15 * error_of(s, exact));
}

TEST(RealTensors, AccurateIsFarBelowSage2OnLayer6) {
  const Sample& s = sample(kLayer6);
  EXPECT_LT(error_of(s, recipe("accurate")), 0.59 * error_of(s, recipe("sage2")));  // .0010 / .0017
  EXPECT_LT(error_of(s, recipe("accurate")), .00125);
  EXPECT_LT(error_of(s, recipe("exact")), .00120);
}

}  // namespace
}  // namespace vcattn::test
