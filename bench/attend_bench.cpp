// CPU attention beside an FP32 GEMM of the same size through OpenBLAS, in one process, on the real tensors of data/.
// Both count 4 seqlen_q seqlen_kv head_dim operations; the GEMM does the two products and nothing between them.
// usage: attend_bench [Google Benchmark's options], from the repository's root; threads: VCATTN_BENCH_THREADS (default
// all).
#include <benchmark/benchmark.h>
#include <cblas.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "io/tensor_file.h"
#include "vcattn/vcattn.hpp"

namespace {

using namespace vcattn;

int threads() {
  const char* text = std::getenv("VCATTN_BENCH_THREADS");
  return text == nullptr ? 0 : std::atoi(text);
}

const io::TensorFile& sample() {
  static const io::TensorFile file = io::read_tensors("data/qkv_layer2_16448.safetensors", {"q", "k", "v"});
  return file;
}

int64_t tokens() { return sample().tensors[0].shape[2]; }

void report(benchmark::State& state) {
  const double n = static_cast<double>(tokens());
  state.counters["GFLOP/s"] = benchmark::Counter(4 * n * n * 128 / 1e9, benchmark::Counter::kIsIterationInvariantRate);
}

void attend(benchmark::State& state, const std::string& recipe) {
  const Shape shape = {1, tokens(), 1, 128};
  std::vector<float> out(static_cast<size_t>(tokens()) * 128);
  vcattn_attention_params params = make_params();
  params.num_threads = threads();
  params.q = make_tensor(sample().tensors[0].data.data(), VCATTN_BF16, shape);
  params.k = make_tensor(sample().tensors[1].data.data(), VCATTN_BF16, shape);
  params.v = make_tensor(sample().tensors[2].data.data(), VCATTN_BF16, shape);
  params.out = make_tensor(out.data(), VCATTN_FP32, shape);
  Workspace workspace;
  Status status = find_recipe(recipe, params.recipe);
  for (auto _ : state) {
    if (status.ok()) status = attention(params, workspace);
    benchmark::DoNotOptimize(out.data());
  }
  if (!status.ok()) state.SkipWithError(status.message.c_str());
  report(state);
}

void openblas(benchmark::State& state) {
  if (threads() > 0) openblas_set_num_threads(threads());
  const auto n = static_cast<blasint>(tokens());
  std::vector<float> q(static_cast<size_t>(n) * 128, 0.5f), out(q.size());
  // Scores of 1,024 queries at a time: a full matrix would measure memory.
  constexpr blasint kRows = 1024;
  std::vector<float> scores(static_cast<size_t>(kRows) * n);
  for (auto _ : state) {
    for (blasint row = 0; row < n; row += kRows) {
      const blasint rows = std::min(kRows, n - row);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, n, 128, 1.0f, &q[row * 128], 128, q.data(), 128, 0.0f,
                  scores.data(), n);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, 128, n, 1.0f, scores.data(), n, q.data(), 128, 0.0f,
                  &out[row * 128], 128);
    }
    benchmark::DoNotOptimize(out.data());
  }
  report(state);
}

BENCHMARK(openblas)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(attend, accurate, "accurate")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(attend, exact, "exact")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(attend, fast, "fast")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(attend, vsmooth8, "vsmooth8")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(attend, bf16, "bf16")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(attend, fp32, "fp32")->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
