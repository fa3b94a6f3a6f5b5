// One call of the sm90a back end taken apart: its stages launched one by one, as the C ABI launches them together.
#pragma once

#include <cuda_runtime_api.h>

#include "arch/sm90a/attention.h"
#include "arch/sm90a/plan.h"
#include "bench_device.h"
#include "bench_unfused.h"
#include "core/validate.h"
#include "preprocess/stages.h"

namespace vcattn::cli {

// Random q, k and v of a shape in BF16, and memory for out: [batch, seqlen, num_heads, head_dim], dense.
class BenchTensors {
 public:
  BenchTensors(const BenchShape& shape, const Stream& stream);
  // A call on them.
  vcattn_attention_params params(const vcattn_recipe& recipe, const int32_t* permutation = nullptr) const;
  size_t qkv_bytes() const { return q_.bytes() + k_.bytes() + v_.bytes(); }

 private:
  BenchShape shape_;
  DeviceMemory q_, k_, v_, out_;
  cudaStream_t stream_;
};

class SplitCall {
 public:
  // `params` needs no grouping: it gives a permutation, or asks for the order of the sequence. Throws Refusal where the
  // back end does not serve it.
  explicit SplitCall(const vcattn_attention_params& params);
  SplitCall(const SplitCall&) = delete;
  SplitCall& operator=(const SplitCall&) = delete;

  size_t workspace_bytes() const { return plan_.bytes; }
  void use_workspace(const DeviceMemory& workspace);

  // In this order; each only launches.
  using Stage = cudaError_t (*)(const sm90a::PrepareCall&);
  void run(Stage stage) const;
  void prepare() const;
  void attention() const;

  // The unfused chain behind prepare_sequences, with memory for its intermediates. Throws Refusal where it does not
  // serve the call.
  size_t unfused_workspace_bytes() const;
  std::vector<UnfusedStep> unfused_steps(const DeviceMemory& memory) const;

  // Bytes that each reads and writes at least: every operand once, however often a stage goes over it.
  double statistics_bytes() const;
  double key_bytes() const;
  double value_bytes() const;
  double query_bytes() const;
  double attention_bytes() const;
  double call_bytes() const;  // all of them together

 private:
  sm90a::PrepareCall prepare_call() const { return {problem_, params_.recipe, plan_.qkv, plan_.prepare, stream()}; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(params_.stream); }
  double query_operand_bytes() const;
  double key_operand_bytes() const;
  double value_operand_bytes() const;
  double permutation_bytes() const;

  vcattn_attention_params params_;
  Problem problem_ = {};
  const sm90a::Kernel* kernel_ = nullptr;
  sm90a::Plan plan_ = {};
};

}  // namespace vcattn::cli
