#include "bench_split.h"

#include <fmt/format.h>

#include <stdexcept>

#include "arch/sm90a/support.h"
#include "bench_random.h"
#include "library.h"

namespace vcattn::cli {
namespace {

constexpr size_t kBf16Bytes = 2, kPermutationBytes = 4;

int64_t query_elements(const BenchShape& s) { return s.batch * s.seqlen_q * s.num_heads * s.head_dim; }
int64_t key_elements(const BenchShape& s) { return s.batch * s.seqlen_kv * s.num_heads_kv * s.head_dim; }

double tensor_bytes(const vcattn_tensor& t) {
  return static_cast<double>(t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]) * kBf16Bytes;
}

}  // namespace

BenchTensors::BenchTensors(const BenchShape& shape, const Stream& stream)
    : shape_(shape),
      q_(static_cast<size_t>(query_elements(shape)) * kBf16Bytes),
      k_(static_cast<size_t>(key_elements(shape)) * kBf16Bytes),
      v_(k_.bytes()),
      out_(q_.bytes()),
      stream_(stream.get()) {
  check_cuda(fill_normal_bf16(q_.as(), query_elements(shape), 1, stream_), "random q");
  check_cuda(fill_normal_bf16(k_.as(), key_elements(shape), 2, stream_), "random k");
  check_cuda(fill_normal_bf16(v_.as(), key_elements(shape), 3, stream_), "random v");
}

vcattn_attention_params BenchTensors::params(const vcattn_recipe& recipe, const int32_t* permutation) const {
  const Shape queries = {shape_.batch, shape_.seqlen_q, shape_.num_heads, shape_.head_dim};
  const Shape keys = {shape_.batch, shape_.seqlen_kv, shape_.num_heads_kv, shape_.head_dim};
  vcattn_attention_params params = make_params();
  params.q = make_tensor(q_.as(), VCATTN_BF16, queries);
  params.k = make_tensor(k_.as(), VCATTN_BF16, keys);
  params.v = make_tensor(v_.as(), VCATTN_BF16, keys);
  params.out = make_tensor(out_.as(), VCATTN_BF16, queries);
  params.recipe = recipe;
  params.permutation = permutation;
  params.backend = VCATTN_BACKEND_SM90A;
  params.memory = VCATTN_MEMORY_CUDA;
  params.stream = stream_;
  return params;
}

SplitCall::SplitCall(const vcattn_attention_params& params) : params_(params) {
  vcattn_message message = {};
  sm90a::Config config = {};
  check(validate_attention(&params_, problem_, &message), message);
  check(sm90a::choose_config(problem_, config, &message), message);
  kernel_ = sm90a::find_kernel(config);
  if (kernel_ == nullptr) throw std::logic_error("backend sm90a has no kernel for the recipe");
  plan_ = sm90a::make_plan(problem_, kernel_->config, nullptr);
}

void SplitCall::use_workspace(const DeviceMemory& workspace) {
  plan_ = sm90a::make_plan(problem_, kernel_->config, workspace.as<std::byte>());
}

void SplitCall::run(Stage stage) const { check_cuda(stage(prepare_call()), "preprocessing"); }

void SplitCall::prepare() const {
  check_cuda(sm90a::prepare(problem_, plan_.qkv, plan_.prepare, stream()), "preprocessing");
}

void SplitCall::attention() const {
  check_cuda(sm90a::launch_attention(*kernel_, sm90a::attention_params(problem_, plan_.qkv), stream()), "attention");
}

size_t SplitCall::unfused_workspace_bytes() const {
  if (const char* reason = unfused_unsupported(problem_); reason != nullptr) {
    throw Refusal(fmt::format("bench: the unfused chain {}; recipe {}, head_dim {}", reason, params_.recipe.name,
                              problem_.head_dim));
  }
  Arena arena(nullptr);
  take_unfused_scratch(problem_, plan_.qkv, arena);
  return arena.used();
}

std::vector<UnfusedStep> SplitCall::unfused_steps(const DeviceMemory& memory) const {
  Arena arena(memory.as<std::byte>());
  return cli::unfused_steps(prepare_call(), take_unfused_scratch(problem_, plan_.qkv, arena));
}

double SplitCall::permutation_bytes() const {
  if (params_.permutation == nullptr) return 0;
  return static_cast<double>(problem_.batch * problem_.num_heads_kv * problem_.seqlen_kv) * kPermutationBytes;
}

double SplitCall::query_operand_bytes() const {
  const sm90a::QuantizedQkv& qkv = plan_.qkv;
  const double rows = static_cast<double>(qkv.num_heads) * qkv.blocks * qkv.block_rows;
  return rows * (qkv.dim + sizeof(float));  // codes and factor
}

double SplitCall::key_operand_bytes() const {
  const sm90a::QuantizedQkv& qkv = plan_.qkv;
  const double tiles = static_cast<double>(qkv.num_heads_kv) * qkv.tiles;
  return tiles * (sm90a::key_tile_bytes(qkv.dim) + static_cast<int>(sizeof(float)));
}

double SplitCall::value_operand_bytes() const {
  const sm90a::QuantizedQkv& qkv = plan_.qkv;
  const bool means = params_.recipe.mean_rows > 0;
  const double groups = means ? static_cast<double>(qkv.num_heads_kv) * qkv.mean_groups : 0;
  return static_cast<double>(qkv.num_heads_kv) * qkv.tiles * sm90a::value_tile_bytes(qkv.dim) +
         groups * sm90a::mean_group_bytes(qkv.dim);
}

double SplitCall::key_bytes() const { return tensor_bytes(params_.k) + permutation_bytes() + key_operand_bytes(); }
double SplitCall::value_bytes() const { return tensor_bytes(params_.v) + permutation_bytes() + value_operand_bytes(); }
double SplitCall::query_bytes() const { return tensor_bytes(params_.q) + query_operand_bytes(); }
double SplitCall::statistics_bytes() const { return tensor_bytes(params_.k) + tensor_bytes(params_.v); }
double SplitCall::attention_bytes() const {
  return query_operand_bytes() + key_operand_bytes() + value_operand_bytes() + tensor_bytes(params_.out);
}

double SplitCall::call_bytes() const { return key_bytes() + value_bytes() + query_bytes() + attention_bytes(); }

}  // namespace vcattn::cli
