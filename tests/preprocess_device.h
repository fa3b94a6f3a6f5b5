// A problem prepared by the CPU and on the device, and the two compared bit by bit after undoing the layouts. Device
// memory starts as 0xFF, so that what is not written shows.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "arch/sm90a/plan.h"
#include "core/tensor_access.h"
#include "core/validate.h"
#include "cpu/plan.h"
#include "cpu/preprocess.h"
#include "preprocess/prepare.h"
#include "vcattn/vcattn.h"

namespace vcattn::preprocess_test {

// ---- memory ---------------------------------------------------------------------------------------------------------

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)));
    check(cudaMemset(data_, 0xFF, std::max<size_t>(bytes, 1)));
  }
  DeviceBytes(const void* host, size_t bytes) : DeviceBytes(bytes) {
    check(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice));
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> host(bytes_);
    check(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// How [batch, seqlen, heads, dim] lies in memory.
enum class Layout { kBshd, kBhsd, kFusedQkv, kOddTokenStride, kChannelStride2, kUnaligned, kBroadcastBatch };

class HostTensor {
 public:
  HostTensor(int64_t b, int64_t s, int64_t h, int64_t d, vcattn_dtype dtype, Layout layout) {
    view_ = {nullptr, dtype, 0, {b, s, h, d}, {s * h * d, h * d, d, 1}};
    int64_t* stride = view_.stride;
    int64_t first = 0;
    switch (layout) {
      case Layout::kBshd:
        break;
      case Layout::kBhsd:
        stride[1] = d;
        stride[2] = s * d;
        break;
      case Layout::kFusedQkv:
        stride[0] = s * 3 * h * d;
        stride[1] = 3 * h * d;
        first = h * d;
        break;
      case Layout::kOddTokenStride:
        stride[1] = h * d + 1;
        stride[0] = s * stride[1];
        break;
      case Layout::kChannelStride2:
        for (int axis = 0; axis < 4; ++axis) stride[axis] *= 2;
        break;
      case Layout::kUnaligned:
        first = 1;
        break;
      case Layout::kBroadcastBatch:
        stride[0] = 0;
        break;
    }
    int64_t elements = first + 1;
    for (int axis = 0; axis < 4; ++axis) elements += (view_.shape[axis] - 1) * stride[axis];
    const int64_t size = dtype == VCATTN_FP32 ? 4 : 2;
    offset_ = first * size;
    bytes_.resize(static_cast<size_t>(elements * size));
    view_.data = bytes_.data() + offset_;
  }
  HostTensor(const HostTensor&) = delete;
  HostTensor& operator=(const HostTensor&) = delete;

  const vcattn_tensor& view() const { return view_; }
  void fill(const std::function<float(int64_t, int64_t, int64_t, int64_t)>& value) {
    std::vector<float> row(view_.shape[3]);
    for (int64_t b = 0; b < view_.shape[0]; ++b) {
      for (int64_t s = 0; s < view_.shape[1]; ++s) {
        for (int64_t h = 0; h < view_.shape[2]; ++h) {
          for (int64_t d = 0; d < view_.shape[3]; ++d) row[d] = value(b, s, h, d);
          store_row(view_, b, s, h, row.data());
        }
      }
    }
  }
  DeviceBytes to_device() const { return DeviceBytes(bytes_.data(), bytes_.size()); }
  vcattn_tensor on(const DeviceBytes& device) const {
    vcattn_tensor view = view_;
    view.data = device.data() + offset_;
    return view;
  }

 private:
  std::vector<std::byte> bytes_;
  int64_t offset_;
  vcattn_tensor view_;
};

// Tables of a vcattn_rope, of random numbers: nothing may take them for the cosine and sine of an angle.
struct RopeCase {
  vcattn_rope_pairing pairing = VCATTN_ROPE_NONE;
  vcattn_rope_tables tables = VCATTN_ROPE_PER_TOKEN;
  bool strided = false;  // per token: tables of each batch and head, their pairs two elements apart
};

class HostRope {
 public:
  HostRope(const RopeCase& c, const vcattn_tensor& x, const vcattn_video_grid& grid, uint32_t seed) {
    rope_.pairing = c.pairing;
    rope_.tables = c.tables;
    if (c.pairing == VCATTN_ROPE_NONE) return;
    const int64_t half = x.shape[3] / 2, step = c.strided ? 2 : 1, row = half * step;
    int64_t elements = x.shape[1] * row;
    rope_.stride[1] = row;
    rope_.stride[3] = step;
    if (c.strided) {
      rope_.stride[2] = elements;
      rope_.stride[0] = elements * x.shape[2];
      elements = rope_.stride[0] * x.shape[0];
    }
    int64_t sizes[3] = {elements, 0, 0};
    if (c.tables == VCATTN_ROPE_PER_AXIS) {
      const int64_t extents[3] = {grid.frames, grid.height, grid.width};
      const int64_t third = half / 3;
      for (int axis = 0; axis < 3; ++axis) {
        rope_.pairs[axis] = axis == 0 ? half - 2 * third : third;
        sizes[axis] = extents[axis] * rope_.pairs[axis];
      }
    }
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1.2f, 1.2f);
    values_.resize(static_cast<size_t>(2 * (sizes[0] + sizes[1] + sizes[2])));
    for (float& value : values_) value = uniform(random);
    float* table = values_.data();
    for (int axis = 0; axis < 3; ++axis) {
      if (sizes[axis] == 0) continue;
      rope_.cos[axis] = table;
      rope_.sin[axis] = table + sizes[axis];
      table += 2 * sizes[axis];
    }
  }

  const vcattn_rope& view() const { return rope_; }
  std::vector<float>& values() { return values_; }
  DeviceBytes to_device() const { return DeviceBytes(values_.data(), values_.size() * sizeof(float)); }
  vcattn_rope on(const DeviceBytes& device) const {
    vcattn_rope rope = rope_;
    const auto* base = reinterpret_cast<const float*>(device.data());
    for (int axis = 0; axis < 3; ++axis) {
      if (rope.cos[axis] == nullptr) continue;
      rope.cos[axis] = base + (rope.cos[axis] - values_.data());
      rope.sin[axis] = base + (rope.sin[axis] - values_.data());
    }
    return rope;
  }

 private:
  std::vector<float> values_;
  vcattn_rope rope_{};
};

// ---- one case -------------------------------------------------------------------------------------------------------

using Fill = std::function<float(int64_t b, int64_t s, int64_t h, int64_t d)>;

struct Case {
  int64_t batch = 1, seqlen_q = 200, seqlen_kv = 300, num_heads = 2, num_heads_kv = 2, head_dim = 128;
  vcattn_dtype dtype = VCATTN_BF16;
  std::optional<vcattn_dtype> k_dtype, v_dtype;  // where they differ
  Layout layout = Layout::kBshd;
  const char* recipe = "accurate";
  std::function<void(vcattn_recipe&)> change = [](vcattn_recipe&) {};
  bool lse = false;
  bool permuted = true;
  std::function<bool(int64_t b, int64_t token)> mask;  // admits
  int64_t mask_token_stride = 1;
  std::vector<int64_t> cu_q, cu_kv;
  double softmax_scale = 0.0;
  float scale = 1.0f;
  Fill q, k, v;  // instead of normal numbers
  RopeCase rope_q, rope_k;
  vcattn_video_grid grid{};
};

inline Fill normal(uint32_t seed, float scale, float mean) {
  return [random = std::mt19937(seed), normal = std::normal_distribution<float>(), scale, mean](
             int64_t, int64_t, int64_t, int64_t d) mutable {
    return scale * (normal(random) + mean * static_cast<float>(d % 7 - 3));
  };
}

// Inputs of a case in host memory, and what describes them.
struct Inputs {
  explicit Inputs(const Case& c)
      : q(c.batch, c.seqlen_q, c.num_heads, c.head_dim, c.dtype, c.layout),
        k(c.batch, c.seqlen_kv, c.num_heads_kv, c.head_dim, c.k_dtype.value_or(c.dtype), c.layout),
        v(c.batch, c.seqlen_kv, c.num_heads_kv, c.head_dim, c.v_dtype.value_or(c.dtype), c.layout),
        out(c.batch, c.seqlen_q, c.num_heads, c.head_dim, VCATTN_BF16, Layout::kBshd),
        rope_q(c.rope_q, q.view(), c.grid, 4),
        rope_k(c.rope_k, k.view(), c.grid, 5),
        lse(static_cast<size_t>(c.batch * c.seqlen_q * c.num_heads)),
        cu_q(c.cu_q),
        cu_kv(c.cu_kv) {
    q.fill(c.q ? c.q : normal(1, c.scale, 0.1f));
    k.fill(c.k ? c.k : normal(2, c.scale, 1.0f));
    v.fill(c.v ? c.v : normal(3, c.scale, 0.5f));
    vcattn_attention_params_init(&params);
    params.q = q.view();
    params.k = k.view();
    params.v = v.view();
    params.out = out.view();
    params.rope_q = rope_q.view();
    params.rope_k = rope_k.view();
    params.grid = c.grid;
    params.softmax_scale = c.softmax_scale;
    params.flags = VCATTN_ALLOW_NONFINITE;
    EXPECT_EQ(vcattn_recipe_by_name(c.recipe, &params.recipe, nullptr), VCATTN_OK);
    params.recipe.v_order = VCATTN_ORDER_SEQUENCE;
    c.change(params.recipe);
    if (c.lse) {
      params.lse = lse.data();
      params.lse_stride[0] = c.seqlen_q * c.num_heads;
      params.lse_stride[1] = c.num_heads;
      params.lse_stride[2] = 1;
    }
    if (c.mask) {
      mask.resize(static_cast<size_t>(c.batch * c.seqlen_kv * std::max<int64_t>(1, c.mask_token_stride)));
      params.key_mask = mask.data();
      params.key_mask_stride[0] = c.seqlen_kv * c.mask_token_stride;
      params.key_mask_stride[1] = c.mask_token_stride;
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t s = 0; s < c.seqlen_kv; ++s) {
          mask[b * params.key_mask_stride[0] + s * c.mask_token_stride] = c.mask(b, s) ? 7 : 0;
        }
      }
    }
    if (!cu_q.empty()) {
      params.cu_seqlens_q = cu_q.data();
      params.cu_seqlens_kv = cu_kv.data();
      params.num_segments = static_cast<int64_t>(cu_q.size()) - 1;
    }
    if (c.permuted) permute(c);
  }

  void permute(const Case& c) {
    std::mt19937 random(4);
    permutation.assign(static_cast<size_t>(c.batch * c.num_heads_kv * c.seqlen_kv), -1);
    std::vector<int64_t> bounds = cu_kv.empty() ? std::vector<int64_t>{0, c.seqlen_kv} : cu_kv;
    for (int64_t row = 0; row < c.batch * c.num_heads_kv; ++row) {
      for (size_t segment = 0; segment + 1 < bounds.size(); ++segment) {
        std::vector<int32_t> order;
        for (int64_t token = 0; token < bounds[segment + 1] - bounds[segment]; ++token) {
          if (!c.mask || c.mask(row / c.num_heads_kv, token)) order.push_back(static_cast<int32_t>(token));
        }
        std::shuffle(order.begin(), order.end(), random);
        std::copy(order.begin(), order.end(), permutation.begin() + row * c.seqlen_kv + bounds[segment]);
      }
    }
    params.permutation = permutation.data();
  }

  HostTensor q, k, v, out;
  HostRope rope_q, rope_k;
  std::vector<float> lse;
  std::vector<uint8_t> mask;
  std::vector<int32_t> permutation;
  std::vector<int64_t> cu_q, cu_kv;
  vcattn_attention_params params;
};

// ---- both back ends -------------------------------------------------------------------------------------------------

struct CpuResult {
  std::vector<std::byte> memory;
  cpu::Plan plan;
};

inline CpuResult prepare_on_cpu(const Problem& problem) {
  CpuResult result;
  result.memory.resize(cpu::make_plan(problem, nullptr).bytes + VCATTN_WORKSPACE_ALIGNMENT);
  void* base = result.memory.data();
  size_t room = result.memory.size();
  std::align(VCATTN_WORKSPACE_ALIGNMENT, 1, base, room);
  result.plan = cpu::make_plan(problem, static_cast<std::byte*>(base));
  cpu::preprocess(problem, result.plan);
  return result;
}

inline sm90a::QuantizedQkv take_operands(const Problem& problem, Arena& arena) {
  const int dim = problem.head_dim <= 64 ? 64 : 128;
  const int block_rows = dim == 64 ? 384 : 256;  // both that the kernels use
  return sm90a::take_operands(problem, dim, block_rows, problem.params->recipe.mean_rows > 0, arena);
}

// The device's result in host memory: pointers of `qkv` are moved to it.
struct DeviceResult {
  std::vector<std::byte> memory;
  sm90a::QuantizedQkv qkv;
};

using Prepare =
    std::function<cudaError_t(const Problem&, const sm90a::QuantizedQkv&, const sm90a::PrepareScratch&, cudaStream_t)>;

// Runs `prepare`; with `captured` through a CUDA graph.
inline DeviceResult prepare_on_device(const Inputs& inputs, const Problem& host_problem, bool captured = false,
                                      const Prepare& prepare = sm90a::prepare) {
  const auto q = inputs.q.to_device(), k = inputs.k.to_device(), v = inputs.v.to_device();
  const auto rope_q = inputs.rope_q.to_device(), rope_k = inputs.rope_k.to_device();
  const DeviceBytes mask(inputs.mask.data(), inputs.mask.size());
  const DeviceBytes permutation(inputs.permutation.data(), inputs.permutation.size() * sizeof(int32_t));
  vcattn_attention_params params = inputs.params;
  params.q = inputs.q.on(q);
  params.k = inputs.k.on(k);
  params.v = inputs.v.on(v);
  params.rope_q = inputs.rope_q.on(rope_q);
  params.rope_k = inputs.rope_k.on(rope_k);
  if (params.key_mask != nullptr) params.key_mask = reinterpret_cast<const uint8_t*>(mask.data());
  if (params.permutation != nullptr) params.permutation = reinterpret_cast<const int32_t*>(permutation.data());
  Problem problem = host_problem;
  problem.params = &params;

  const auto take = [&](std::byte* base, sm90a::QuantizedQkv& qkv, sm90a::PrepareScratch& scratch) {
    Arena arena(base);
    qkv = take_operands(problem, arena);
    const size_t operands = arena.used();
    scratch = sm90a::take_prepare_scratch(problem, qkv, arena);
    return std::pair{operands, arena.used()};
  };
  sm90a::QuantizedQkv qkv;
  sm90a::PrepareScratch scratch;
  const auto [operand_bytes, bytes] = take(nullptr, qkv, scratch);
  constexpr size_t kGuard = 4096;
  const DeviceBytes workspace(bytes + kGuard);
  take(workspace.data(), qkv, scratch);

  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (captured) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    check(prepare(problem, qkv, scratch, stream));
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    // A second launch must not depend on what the first one left.
    for (int i = 0; i < 2; ++i) check(cudaGraphLaunch(executable, stream));
    check(cudaStreamSynchronize(stream));
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
  } else {
    check(prepare(problem, qkv, scratch, stream));
    check(cudaStreamSynchronize(stream));
  }
  check(cudaStreamDestroy(stream));

  DeviceResult result = {workspace.read(), qkv};
  EXPECT_TRUE(std::all_of(result.memory.begin() + static_cast<int64_t>(bytes), result.memory.end(), [](std::byte b) {
    return b == std::byte{0xFF};
  })) << "wrote past the workspace";
  result.memory.resize(operand_bytes);
  Arena arena(result.memory.data());
  result.qkv = take_operands(problem, arena);
  return result;
}

// ---- comparison -----------------------------------------------------------------------------------------------------

// Counts differences of one array and reports the first few.
class Difference {
 public:
  explicit Difference(const char* name) : name_(name) {}
  ~Difference() {
    if (count_ > kReported) ADD_FAILURE() << name_ << ": " << count_ << " differences in all";
  }
  void bits(uint32_t expected, uint32_t found, int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) {
    if (expected == found || ++count_ > kReported) return;
    ADD_FAILURE() << name_ << "[" << a << ", " << b << ", " << c << ", " << d << "]: expected 0x" << std::hex
                  << expected << ", found 0x" << found;
  }
  void floats(float expected, float found, int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) {
    const auto want = std::bit_cast<uint32_t>(expected), have = std::bit_cast<uint32_t>(found);
    if (want == have || ++count_ > kReported) return;
    ADD_FAILURE() << name_ << "[" << a << ", " << b << ", " << c << ", " << d << "]: expected " << expected << " (0x"
                  << std::hex << want << "), found " << found << " (0x" << have << ")";
  }
  // Of bounds, which hardware may round otherwise.
  void bounds(float expected, float found, int64_t a, int64_t b, int64_t c = 0) {
    if (std::fabs(found - expected) <= 1e-6f * expected || ++count_ > kReported) return;
    ADD_FAILURE() << name_ << "[" << a << ", " << b << ", " << c << "]: expected " << expected << ", found " << found;
  }
  void nan(float found, int64_t a, int64_t b, int64_t c = 0) {
    if (std::isnan(found) || ++count_ > kReported) return;
    ADD_FAILURE() << name_ << "[" << a << ", " << b << ", " << c << "]: expected NaN, found " << found;
  }

 private:
  static constexpr int kReported = 3;
  const char* name_;
  int count_ = 0;
};

struct Comparison {
  const vcattn_attention_params& params;
  const cpu::Plan& plan;
  const sm90a::QuantizedQkv& found;
  const cpu::Sequence& expected;
  const sm90a::Sequence& s;
  int64_t index;  // of the sequence
  bool int8() const { return params.recipe.qk_format == VCATTN_FORMAT_INT8; }
};

inline uint8_t byte_at(const std::byte* codes, int64_t at) { return static_cast<uint8_t>(codes[at]); }

// Euclidean norm of `dim` INT8 codes, `stride` apart.
inline float norm(const std::byte* codes, int64_t dim, int64_t stride) {
  int squares = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const int code = static_cast<int8_t>(codes[d * stride]);
    squares += code * code;
  }
  return std::sqrt(static_cast<float>(squares));
}

inline void compare_sequence(const Comparison& c) {
  const cpu::Sequence& e = c.expected;
  EXPECT_EQ(c.s.batch, e.batch) << "sequence " << c.index;
  EXPECT_EQ(c.s.q_begin, e.q_begin) << "sequence " << c.index;
  EXPECT_EQ(c.s.q_count, e.q_count) << "sequence " << c.index;
  EXPECT_EQ(c.s.kv_begin, e.kv_begin) << "sequence " << c.index;
  EXPECT_EQ(c.s.kv_count, e.kv_count) << "sequence " << c.index;
  EXPECT_EQ(c.s.keys, e.keys) << "sequence " << c.index;
}

inline void compare_queries(const Comparison& c) {
  using namespace sm90a;
  const cpu::QuantizedQkv& e = c.plan.qkv;
  const QuantizedQkv& f = c.found;
  Difference codes("q [sequence, head, row, channel]"), factors("q_factor [sequence, head, row]"),
      shifts("lse_shift [sequence, head, row]"), norms("q_norm [sequence, head, tile]");
  for (int64_t head = 0; head < f.num_heads; ++head) {
    float largest = 0.0f;
    for (int64_t i = 0; i < int64_t{blocks_of(c.s.q_count, f.block_rows)} * f.block_rows; ++i) {
      const int64_t at = (head * f.blocks + c.s.q_block) * f.block_rows + i;
      const int64_t from = (head * e.blocks + c.expected.q_block) * cpu::kBlockM + i;
      const bool inside = i < c.s.q_count;
      const uint8_t* tile = f.q + at / kTileRowsQ * query_tile_bytes(f.dim);
      for (int d = 0; d < f.dim; ++d) {
        codes.bits(inside && d < e.dim ? byte_at(e.q, from * e.dim + d) : 0,
                   tile[swizzled(static_cast<int>(at % kTileRowsQ), d, f.dim)], c.index, head, i, d);
      }
      const int64_t slot = head / (f.num_heads / f.num_heads_kv) * f.num_sequences + c.index;
      const float codes_norm = inside && c.int8() ? norm(e.q + from * e.dim, e.dim, 1) : 0.0f;
      const float limit = kCodeRange / codes_norm / f.k_norm[slot];  // of q_factor, where scores are integers
      const bool shortened = codes_norm > 0.0f && limit > 0.0f && e.q_factor[from] > limit;
      if (inside && e.q_poison[from] != 0) {
        factors.nan(f.q_factor[at], c.index, head, i);
      } else if (shortened) {
        factors.bounds(limit, f.q_factor[at], c.index, head, i);
      } else {
        factors.floats(inside ? e.q_factor[from] : 0.0f, f.q_factor[at], c.index, head, i);
      }
      if (inside && e.q_poison[from] == 0) largest = std::max(largest, codes_norm * e.q_factor[from]);
      if (c.int8() && i % kTileRowsQ == kTileRowsQ - 1) {
        norms.bounds(largest, f.q_norm[at / kTileRowsQ], c.index, head, i / kTileRowsQ);
        largest = 0.0f;
      }
      if (c.params.lse == nullptr || !inside) continue;
      if (shortened) {
        shifts.nan(f.lse_shift[at], c.index, head, i);
      } else {
        shifts.floats(e.lse_shift[from], f.lse_shift[at], c.index, head, i);
      }
    }
  }
}

inline void compare_keys(const Comparison& c) {
  using namespace sm90a;
  const cpu::QuantizedQkv& e = c.plan.qkv;
  const QuantizedQkv& f = c.found;
  Difference codes("k [sequence, head, key, channel]"), descales("k_descale [sequence, head, tile]"),
      norms("k_norm [sequence, head]");
  for (int64_t head = 0; head < f.num_heads_kv; ++head) {
    float largest = 0.0f;
    for (int64_t j = 0; j < int64_t{tiles_of(c.s.keys)} * kBlockN; ++j) {
      const int64_t key = std::min<int64_t>(j, c.s.keys - 1);  // behind the last, repeat it
      const int64_t at = head * f.tiles + c.s.tile + j / kBlockN;
      const int64_t from = head * e.tiles + c.expected.tile + key / kBlockN;
      const uint8_t* tile = f.k + at * key_tile_bytes(f.dim);
      for (int d = 0; d < f.dim; ++d) {
        codes.bits(d < e.dim ? byte_at(e.k, (from * e.dim + d) * kBlockN + key % kBlockN) : 0,
                   tile[swizzled(static_cast<int>(j % kBlockN), d, f.dim)], c.index, head, j, d);
      }
      largest =
          std::max(largest, norm(e.k + from * e.dim * kBlockN + key % kBlockN, e.dim, kBlockN) * e.k_descale[from]);
      if (j % kBlockN == 0) descales.floats(e.k_descale[from], f.k_descale[at], c.index, head, j / kBlockN);
    }
    const int64_t slot = head * f.num_sequences + c.index;
    if (c.int8()) norms.bounds(largest, f.k_norm[slot], c.index, head);
    EXPECT_EQ(f.k_poison[slot] != 0, e.k_poison[slot] != 0) << "k_poison [" << head << ", " << c.index << "]";
  }
}

inline void compare_values(const Comparison& c) {
  using namespace sm90a;
  const cpu::QuantizedQkv& e = c.plan.qkv;
  const QuantizedQkv& f = c.found;
  Difference codes("v [sequence, head, key, channel]"), ones("ones [sequence, head, key, row]"),
      descales("v_descale [sequence, head, channel]"), means("means [sequence, head, tile, channel]");
  const int64_t filled = ceil_div(c.s.keys, kBlockN), tiles = tiles_of(c.s.keys);
  for (int64_t head = 0; head < f.num_heads_kv; ++head) {
    for (int64_t j = 0; j < tiles * kBlockN; ++j) {
      const int tile = static_cast<int>(j / kBlockN), key = static_cast<int>(j % kBlockN);
      const int64_t from = (head * e.tiles + c.expected.tile) * kBlockN + j;
      const uint8_t* bytes = f.v + (head * f.tiles + c.s.tile + tile) * value_tile_bytes(f.dim);
      for (int d = 0; d < f.dim; ++d) {
        codes.bits(j < c.s.keys && d < e.v_dim ? byte_at(e.v, from * e.v_dim + d) : 0,
                   bytes[swizzled(d, position_of(key), kBlockN)], c.index, head, j, d);
      }
      for (int row = 0; row < kOnesRows; ++row) {
        const bool counts = j < c.s.keys && row / 2 == tile % kSumTiles && row % 2 == key % 2;
        const uint8_t found = bytes[swizzled(f.dim + row, position_of(key), kBlockN)];
        ones.bits(counts ? kE4m3One : 0, found, c.index, head, j, row);
        if (counts) {
          EXPECT_EQ(ones_index(f.dim, tile, key), swizzled(f.dim + row, position_of(key), kBlockN));
        }
      }
    }
    const int64_t slot = head * f.num_sequences + c.index;
    for (int d = 0; d < e.v_dim; ++d) {
      const float found = f.v_descale[slot * f.dim + d];
      if (e.v_poison[slot * e.v_dim + d] != 0) {
        descales.nan(found, c.index, head, d);
      } else {
        descales.floats(e.v_descale[slot * e.v_dim + d], found, c.index, head, d);
      }
    }
    for (int64_t d = e.v_dim; d < f.dim; ++d) {
      EXPECT_TRUE(std::isfinite(f.v_descale[slot * f.dim + d])) << "v_descale of padding, channel " << d;
    }
    if (c.params.recipe.mean_rows == 0) continue;
    const int64_t groups = mean_groups_of(static_cast<int32_t>(tiles));
    for (int tile = 0; tile < groups * kMeanTiles; ++tile) {
      const float* group = f.means + (head * f.mean_groups + c.s.mean_group + tile / kMeanTiles) * kMeanTiles * f.dim;
      for (int d = 0; d < f.dim; ++d) {
        const bool inside = tile < filled && d < e.v_dim;
        const float expected = inside ? e.means[(head * e.tiles + c.expected.tile + tile) * e.v_dim + d] : 0.0f;
        means.floats(expected, group[mean_index(d, tile)], c.index, head, tile, d);
      }
    }
  }
}

inline void compare(const Case& c, bool captured = false, const Prepare& prepare = sm90a::prepare) {
  Inputs inputs(c);
  Problem problem;
  vcattn_message message{};
  ASSERT_EQ(validate_attention(&inputs.params, problem, &message), VCATTN_OK) << message.text;
  const CpuResult expected = prepare_on_cpu(problem);
  const DeviceResult found = prepare_on_device(inputs, problem, captured, prepare);
  if (::testing::Test::HasFatalFailure()) return;
  for (int64_t s = 0; s < problem.num_sequences; ++s) {
    const Comparison comparison = {
        inputs.params, expected.plan, found.qkv, expected.plan.sequences[s], found.qkv.sequences[s], s};
    compare_sequence(comparison);
    if (comparison.expected.keys == 0 || comparison.expected.q_count == 0) continue;
    compare_queries(comparison);
    compare_keys(comparison);
    compare_values(comparison);
  }
}

}  // namespace vcattn::preprocess_test
