#include "arch/sm90a/backend.h"

#include <cuda_runtime_api.h>

#include "arch/sm90a/attention.h"
#include "arch/sm90a/break_even.h"
#include "arch/sm90a/plan.h"
#include "arch/sm90a/support.h"
#include "core/arena.h"
#include "core/message.h"
#include "numerics/rope.h"

namespace vcattn::sm90a {
namespace {

vcattn_code refuse_cuda(cudaError_t status, const char* what, vcattn_message* message) {
  cudaGetLastError();  // the next caller of CUDA must not find it
  return fail(message, VCATTN_INTERNAL, "{}: CUDA says {} ({})", what, cudaGetErrorString(status),
              cudaGetErrorName(status));
}

// The kernels follow pointers without looking: one from another device, or from the host, would end the process.
vcattn_code validate_memory(const char* name, const void* pointer, int device, vcattn_message* message) {
  if (pointer == nullptr) return VCATTN_OK;
  cudaPointerAttributes attributes = {};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, pointer);
  if (status != cudaSuccess) return refuse_cuda(status, name, message);
  const bool managed = attributes.type == cudaMemoryTypeManaged;
  if (managed || (attributes.type == cudaMemoryTypeDevice && attributes.device == device)) return VCATTN_OK;
  if (attributes.type == cudaMemoryTypeDevice) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "{} lies on CUDA device {}; the current device is {}", name,
                attributes.device, device);
  }
  return fail(message, VCATTN_INVALID_ARGUMENT, "{} lies in host memory; memory says CUDA", name);
}

struct Pointer {
  const char* name;
  const void* pointer;
};

template <size_t kCount>
vcattn_code validate_pointers(const Pointer (&pointers)[kCount], vcattn_message* message) {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) {
    return refuse_cuda(status, "current device", message);
  }
  for (const Pointer& p : pointers) {
    if (const vcattn_code code = validate_memory(p.name, p.pointer, device, message); code != VCATTN_OK) return code;
  }
  return VCATTN_OK;
}

// Those that the call reads: a table per token is the first alone, and an axis without pairs has none.
vcattn_code validate_tables(const vcattn_rope& rope, const char* name, vcattn_message* message) {
  if (rope.pairing == VCATTN_ROPE_NONE) return VCATTN_OK;
  for (int axis = 0; axis < kRopeAxes; ++axis) {
    const bool read = rope.tables == VCATTN_ROPE_PER_TOKEN ? axis == 0 : rope.pairs[axis] > 0;
    if (!read) continue;
    const Pointer tables[] = {{name, rope.cos[axis]}, {name, rope.sin[axis]}};
    if (const vcattn_code code = validate_pointers(tables, message); code != VCATTN_OK) return code;
  }
  return VCATTN_OK;
}

cudaStream_t stream_of(const Problem& problem) { return static_cast<cudaStream_t>(problem.params->stream); }

vcattn_code refuse_grouping(const Problem& problem, vcattn_message* message) {
  const char* reason = group_unsupported(problem);
  return reason == nullptr ? VCATTN_OK : fail(message, VCATTN_UNSUPPORTED, "the sm90a back end {}", reason);
}

bool available(vcattn_message* reason) {
  int devices = 0, device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDeviceCount(&devices);
  if (status == cudaSuccess) status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) {
    cudaGetLastError();  // the next caller of CUDA must not find it
    int driver = 0;
    if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
      set_message(reason, "no NVIDIA driver: libcuda.so.1 was not found");
    } else {
      set_message(reason, "no usable CUDA device: {}", cudaGetErrorString(status));
    }
    return false;
  }
  if (major != 9 || minor != 0) {
    set_message(reason, "CUDA device {} has compute capability {}.{}; the kernels are built for 9.0 (H100, H200)",
                device, major, minor);
    return false;
  }
  set_message(reason, "runs here on CUDA device {} (compute capability 9.0)", device);
  return true;
}

vcattn_code attention_bytes(const Problem& problem, size_t& bytes, vcattn_message* message) {
  Config config;
  if (const vcattn_code code = choose_config(problem, config, message); code != VCATTN_OK) return code;
  const Plan plan = make_plan(problem, config, nullptr);
  if (plan.groups) {
    if (const vcattn_code code = refuse_grouping(problem, message); code != VCATTN_OK) return code;
  }
  bytes = plan.bytes;
  return VCATTN_OK;
}

vcattn_code attend(const Problem& problem, void* workspace, vcattn_message* message) {
  Config config;
  vcattn_code code = choose_config(problem, config, message);
  if (code != VCATTN_OK) return code;
  const Kernel* kernel = find_kernel(config);
  if (kernel == nullptr) return fail(message, VCATTN_INTERNAL, "backend sm90a has no kernel for the recipe");
  const vcattn_attention_params& p = *problem.params;
  const Pointer pointers[] = {
      {"q", p.q.data}, {"k", p.k.data},          {"v", p.v.data},          {"out", p.out.data},
      {"lse", p.lse},  {"key_mask", p.key_mask}, {"workspace", workspace}, {"permutation", p.permutation}};
  code = validate_pointers(pointers, message);
  if (code == VCATTN_OK) code = validate_tables(p.rope_q, "rope_q", message);
  if (code == VCATTN_OK) code = validate_tables(p.rope_k, "rope_k", message);
  if (code != VCATTN_OK) return code;
  const Plan plan = make_plan(problem, config, static_cast<std::byte*>(workspace));
  const cudaStream_t stream = stream_of(problem);
  Problem ordered = problem;
  vcattn_attention_params with_permutation = p;
  if (plan.groups) {
    const cudaError_t status = group(problem, plan.group, false, nullptr, plan.permutation, stream);
    if (status != cudaSuccess) return refuse_cuda(status, "grouping", message);
    with_permutation.permutation = plan.permutation;
    ordered.params = &with_permutation;
  }
  cudaError_t status = prepare(ordered, plan.qkv, plan.prepare, stream);
  if (status != cudaSuccess) return refuse_cuda(status, "preprocessing", message);
  status = launch_attention(*kernel, attention_params(problem, plan.qkv), stream);
  if (status != cudaSuccess) return refuse_cuda(status, "attention", message);
  return VCATTN_OK;
}

int64_t break_even_seqlen(const Problem& problem) {
  Config config;
  if (choose_config(problem, config, nullptr) != VCATTN_OK) return 0;
  return break_even_seqlen(config, make_plan(problem, config, nullptr).groups);
}

vcattn_code group_bytes(const Problem& problem, size_t& bytes, vcattn_message* message) {
  if (const vcattn_code code = refuse_grouping(problem, message); code != VCATTN_OK) return code;
  Arena arena(nullptr);
  take_group_scratch(problem, arena);
  bytes = arena.used();
  return VCATTN_OK;
}

vcattn_code group(const Problem& problem, bool warm, float* centroids, int32_t* permutation, void* workspace,
                  vcattn_message* message) {
  const Pointer pointers[] = {{"v", problem.params->v.data},
                              {"key_mask", problem.params->key_mask},
                              {"centroids", centroids},
                              {"permutation", permutation},
                              {"workspace", workspace}};
  if (const vcattn_code code = validate_pointers(pointers, message); code != VCATTN_OK) return code;
  Arena arena(static_cast<std::byte*>(workspace));
  const GroupScratch scratch = take_group_scratch(problem, arena);
  const cudaError_t status = group(problem, scratch, warm, centroids, permutation, stream_of(problem));
  return status == cudaSuccess ? VCATTN_OK : refuse_cuda(status, "grouping", message);
}

}  // namespace

const Backend kBackend = {.name = "sm90a",
                          .id = VCATTN_BACKEND_SM90A,
                          .memory = VCATTN_MEMORY_CUDA,
                          .available = available,
                          .attention_bytes = attention_bytes,
                          .attend = attend,
                          .break_even_seqlen = break_even_seqlen,
                          .group_bytes = group_bytes,
                          .group = group};

}  // namespace vcattn::sm90a
