// The C ABI: validate, choose the back end, check the workspace, run. No exception leaves it.
#include "core/backend.h"
#include "core/message.h"
#include "core/validate.h"
#include "vcattn/vcattn.h"

namespace vcattn {
namespace {

struct Request {
  Problem problem;
  const Backend* backend;
  size_t bytes;  // of workspace
};

vcattn_code plan_attention(const vcattn_attention_params* params, Request& request, vcattn_message* message) {
  vcattn_code code = validate_attention(params, request.problem, message);
  if (code == VCATTN_OK) code = choose_backend(*params, request.backend, message);
  if (code == VCATTN_OK) code = request.backend->attention_bytes(request.problem, request.bytes, message);
  return code;
}

vcattn_code plan_grouping(const vcattn_attention_params* params, Request& request, vcattn_message* message) {
  vcattn_code code = validate_grouping(params, request.problem, message);
  if (code == VCATTN_OK) code = choose_backend(*params, request.backend, message);
  if (code == VCATTN_OK) code = request.backend->group_bytes(request.problem, request.bytes, message);
  return code;
}

vcattn_code tell_bytes(vcattn_code code, const Request& request, size_t* bytes, vcattn_message* message) {
  if (code != VCATTN_OK) return code;
  if (bytes == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "bytes is NULL");
  *bytes = request.bytes;
  return VCATTN_OK;
}

}  // namespace
}  // namespace vcattn

using namespace vcattn;

extern "C" {

void vcattn_attention_params_init(vcattn_attention_params* params) {
  *params = vcattn_attention_params{};
  params->struct_size = sizeof *params;
  vcattn_recipe_by_name("accurate", &params->recipe, nullptr);
}

vcattn_code vcattn_attention_workspace_size(const vcattn_attention_params* params, size_t* bytes,
                                            vcattn_message* message) {
  Request request = {};
  return tell_bytes(plan_attention(params, request, message), request, bytes, message);
}

vcattn_code vcattn_attention(const vcattn_attention_params* params, void* workspace, size_t workspace_bytes,
                             vcattn_message* message) {
  Request request = {};
  vcattn_code code = plan_attention(params, request, message);
  if (code == VCATTN_OK) code = validate_workspace(workspace, workspace_bytes, request.bytes, message);
  if (code != VCATTN_OK) return code;
  return request.backend->attend(request.problem, workspace, message);
}

vcattn_code vcattn_break_even_seqlen(const vcattn_attention_params* params, int64_t* seqlen, vcattn_message* message) {
  Request request = {};
  const vcattn_code code = plan_attention(params, request, message);
  if (code != VCATTN_OK) return code;
  if (seqlen == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "seqlen is NULL");
  *seqlen = request.backend->break_even_seqlen(request.problem);
  return VCATTN_OK;
}

vcattn_code vcattn_group_workspace_size(const vcattn_attention_params* params, size_t* bytes, vcattn_message* message) {
  Request request = {};
  return tell_bytes(plan_grouping(params, request, message), request, bytes, message);
}

vcattn_code vcattn_group(const vcattn_attention_params* params, int32_t warm, float* centroids, int32_t* permutation,
                         void* workspace, size_t workspace_bytes, vcattn_message* message) {
  Request request = {};
  vcattn_code code = plan_grouping(params, request, message);
  if (code != VCATTN_OK) return code;
  if (permutation == nullptr) return fail(message, VCATTN_INVALID_ARGUMENT, "permutation is NULL");
  if (warm != 0 && centroids == nullptr) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "a warm start needs centroids; found NULL");
  }
  code = validate_alignment(permutation, "permutation", message);
  if (code == VCATTN_OK) code = validate_alignment(centroids, "centroids", message);
  if (code == VCATTN_OK) code = validate_workspace(workspace, workspace_bytes, request.bytes, message);
  if (code != VCATTN_OK) return code;
  return request.backend->group(request.problem, warm != 0, centroids, permutation, workspace, message);
}

}  // extern "C"
