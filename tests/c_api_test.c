/* The C ABI from C99: the contract as a C program sees it. Exit code 0 and a closing line when all holds. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vcattn/vcattn.h"

static int checks = 0, failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    ++checks;                                                        \
    if (!(condition)) {                                              \
      ++failures;                                                    \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                \
  } while (0)

enum { kQueries = 3, kKeys = 5, kHeads = 2, kDim = 8 };

static vcattn_tensor dense(float* data, int64_t tokens) {
  vcattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = VCATTN_FP32;
  t.shape[0] = 1;
  t.shape[1] = tokens;
  t.shape[2] = kHeads;
  t.shape[3] = kDim;
  t.stride[0] = tokens * kHeads * kDim;
  t.stride[1] = kHeads * kDim;
  t.stride[2] = kDim;
  t.stride[3] = 1;
  return t;
}

/* The definition, row by row. */
static double expected(const float* q, const float* k, const float* v, int query, int head, int channel) {
  double weights[kKeys], sum = 0.0, out = 0.0;
  int j, d;
  for (j = 0; j < kKeys; ++j) {
    double score = 0.0;
    for (d = 0; d < kDim; ++d)
      score += (double)q[(query * kHeads + head) * kDim + d] * k[(j * kHeads + head) * kDim + d];
    weights[j] = exp(score / sqrt((double)kDim));
    sum += weights[j];
  }
  for (j = 0; j < kKeys; ++j) out += weights[j] / sum * v[(j * kHeads + head) * kDim + channel];
  return out;
}

int main(void) {
  float q[kQueries * kHeads * kDim], k[kKeys * kHeads * kDim], v[kKeys * kHeads * kDim], out[kQueries * kHeads * kDim];
  vcattn_attention_params params;
  vcattn_message message;
  vcattn_schedule schedule = {VCATTN_SCHEDULE_FIRST_QUARTER, 40, 0};
  vcattn_schedule_step step;
  vcattn_recipe recipe;
  size_t bytes = 0;
  int64_t break_even = -1;
  void* workspace;
  int i, h, d;

  for (i = 0; i < kQueries * kHeads * kDim; ++i) q[i] = (float)sin(i);
  for (i = 0; i < kKeys * kHeads * kDim; ++i) k[i] = (float)cos(3 * i), v[i] = (float)sin(5 * i) + 1.0f;

  CHECK(strcmp(vcattn_version(), "0.1.0") == 0);
  vcattn_attention_params_init(&params);
  CHECK(strcmp(params.recipe.name, "accurate") == 0);
  params.q = dense(q, kQueries);
  params.k = dense(k, kKeys);
  params.v = dense(v, kKeys);
  params.out = dense(out, kQueries);
  CHECK(vcattn_recipe_by_name("fp32", &params.recipe, &message) == VCATTN_OK);
  CHECK(vcattn_attention_workspace_size(&params, &bytes, &message) == VCATTN_OK);
  workspace = aligned_alloc(VCATTN_WORKSPACE_ALIGNMENT, (bytes + VCATTN_WORKSPACE_ALIGNMENT - 1) /
                                                            VCATTN_WORKSPACE_ALIGNMENT * VCATTN_WORKSPACE_ALIGNMENT);
  CHECK(workspace != NULL);
  CHECK(vcattn_attention(&params, workspace, bytes, &message) == VCATTN_OK);
  for (i = 0; i < kQueries; ++i) {
    for (h = 0; h < kHeads; ++h) {
      for (d = 0; d < kDim; ++d) {
        CHECK(fabs(out[(i * kHeads + h) * kDim + d] - expected(q, k, v, i, h, d)) < 1e-5);
      }
    }
  }

  CHECK(vcattn_break_even_seqlen(&params, &break_even, &message) == VCATTN_OK && break_even == 0);
  CHECK(vcattn_break_even_seqlen(&params, NULL, &message) == VCATTN_INVALID_ARGUMENT);
  CHECK(strcmp(message.text, "seqlen is NULL") == 0);
  CHECK(vcattn_attention(&params, workspace, bytes - 1, &message) == VCATTN_WORKSPACE_TOO_SMALL);
  CHECK(strstr(message.text, "workspace holds") != NULL);
  CHECK(vcattn_attention(&params, workspace, bytes - 1, NULL) == VCATTN_WORKSPACE_TOO_SMALL);
  CHECK(vcattn_recipe_by_name("none", &recipe, &message) == VCATTN_INVALID_ARGUMENT);
  CHECK(vcattn_recipe_by_name("exact", &recipe, &message) == VCATTN_OK);
  CHECK(vcattn_recipe_set(&recipe, "mean_rows", "32", &message) == VCATTN_OK && recipe.mean_rows == 32);

  CHECK(vcattn_schedule_at(&schedule, 4, &step, &message) == VCATTN_OK);
  CHECK(step.smooth == 1 && step.regroup == 1 && step.warm == 1);
  CHECK(vcattn_schedule_at(&schedule, 10, &step, &message) == VCATTN_OK);
  CHECK(step.smooth == 0 && step.regroup == 0);
  CHECK(vcattn_schedule_at(&schedule, 40, &step, &message) == VCATTN_INVALID_ARGUMENT);

  free(workspace);
  printf("c_api_test: %d passed, %d failed\n", checks - failures, failures);
  return failures == 0 ? 0 : 1;
}
