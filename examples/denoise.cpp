// A denoising loop as a host runs it: one attention call a step, values grouped as the schedule says, the permutation
// and centroids kept by the caller. Random tensors stand in for a model.
#include <cstdio>
#include <random>
#include <vector>

#include "vcattn/vcattn.hpp"

int main() {
  const vcattn::Shape shape = {.batch = 1, .seqlen = 1024, .num_heads = 2, .head_dim = 64};
  const size_t elements = static_cast<size_t>(shape.batch * shape.seqlen * shape.num_heads * shape.head_dim);
  std::vector<float> q(elements), k(elements), v(elements), out(elements);

  vcattn_attention_params params = vcattn::make_params();  // recipe "accurate"
  params.q = vcattn::make_tensor(q.data(), VCATTN_FP32, shape);
  params.k = vcattn::make_tensor(k.data(), VCATTN_FP32, shape);
  params.v = vcattn::make_tensor(v.data(), VCATTN_FP32, shape);
  params.out = vcattn::make_tensor(out.data(), VCATTN_FP32, shape);
  const vcattn_recipe smoothing = params.recipe;
  vcattn_recipe plain = smoothing;
  plain.mean_rows = 0;

  const vcattn_schedule schedule = {.kind = VCATTN_SCHEDULE_FIRST_QUARTER, .num_steps = 16, .reuse = 0};
  std::vector<int32_t> permutation(static_cast<size_t>(shape.batch * shape.num_heads * shape.seqlen));
  std::vector<float> centroids(
      static_cast<size_t>(shape.batch * shape.num_heads * smoothing.grouping.clusters * shape.head_dim));
  vcattn::Workspace workspace;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;

  for (int32_t step = 0; step < schedule.num_steps; ++step) {
    for (std::vector<float>* tensor : {&q, &k, &v}) {
      for (float& x : *tensor) x = normal(random);
    }
    vcattn_schedule_step todo;
    vcattn::Status status = vcattn::schedule_at(schedule, step, todo);
    if (status.ok() && todo.regroup != 0) {
      params.permutation = nullptr;
      status = vcattn::group(params, todo.warm != 0, centroids, permutation, workspace);
    }
    params.permutation = permutation.data();
    params.recipe = todo.smooth != 0 ? smoothing : plain;
    if (status.ok()) status = vcattn::attention(params, workspace);
    if (!status.ok()) {
      std::fprintf(stderr, "step %d: %s\n", step, status.message.c_str());
      return 1;
    }
    std::printf("step %2d: %s%s, out[0] = %+.4f\n", step, todo.smooth != 0 ? "smoothed" : "plain",
                todo.regroup != 0 ? (todo.warm != 0 ? ", regrouped warm" : ", regrouped") : "", out[0]);
  }
  return 0;
}
