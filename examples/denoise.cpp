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
  const vcattn_schedule schedule = {.kind = VCATTN_SCHEDULE_EVERY_STEP, .num_steps = 16, .reuse = 0};
  std::vector<int32_t> permutation(vcattn::GroupingState::permutation_size(params));
  std::vector<float> centroids(vcattn::GroupingState::centroids_size(params));
  constexpr uint64_t kKey = 3;  // say, block 3 of the request's conditional branch
  vcattn::GroupingState state(kKey, schedule, permutation.data(), centroids.data());
  vcattn::Workspace workspace;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;

  for (int32_t step = 0; step < schedule.num_steps; ++step) {
    for (std::vector<float>* tensor : {&q, &k, &v}) {
      for (float& x : *tensor) x = normal(random);
    }
    vcattn_schedule_step done;
    vcattn_attention_params ready;
    vcattn::Status status = state.prepare(kKey, step, params, workspace, ready, done);
    if (status.ok()) status = vcattn::attention(ready, workspace);
    if (!status.ok()) {
      std::fprintf(stderr, "step %d: %s\n", step, status.message.c_str());
      return 1;
    }
    std::printf("step %2d: %s%s, out[0] = %+.4f\n", step, done.smooth != 0 ? "smoothed" : "plain",
                done.regroup != 0 ? (done.warm != 0 ? ", regrouped warm" : ", regrouped") : "", out[0]);
  }
  return 0;
}
