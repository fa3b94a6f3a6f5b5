#include "synth.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "inputs.h"
#include "random.h"
#include "synth_scores.h"
#include "synth_structure.h"
#include "synth_values.h"

namespace vcattn::cli {
namespace {

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
  throw std::runtime_error(fmt::format(text, std::forward<Args>(args)...));
}

void check_at_least_one(const char* option, int64_t value) {
  if (value < 1) refuse("{}: expected 1 or more, found {}", option, value);
}

void check_not_negative(const char* option, double value) {
  if (!(value >= 0) || std::isinf(value)) refuse("{}: expected a finite number from 0, found {}", option, value);
}

void check_options(const SynthOptions& o) {
  check_at_least_one("--batch", o.batch);
  check_at_least_one("--heads", o.heads);
  check_at_least_one("--heads-kv", o.heads_kv);
  check_at_least_one("--tokens", o.tokens);
  check_at_least_one("--dim", o.head_dim);
  check_at_least_one("--clusters", o.clusters);
  if (o.head_dim > VCATTN_MAX_HEAD_DIM) refuse("--dim: expected at most {}, found {}", VCATTN_MAX_HEAD_DIM, o.head_dim);
  if (o.tokens > std::numeric_limits<int32_t>::max()) refuse("--tokens: expected fewer than 2^31, found {}", o.tokens);
  if (o.clusters > o.tokens) refuse("--clusters: expected at most the {} tokens, found {}", o.tokens, o.clusters);
  if (o.heads % o.heads_kv != 0) {
    refuse("--heads: expected a multiple of the {} KV heads, found {}", o.heads_kv, o.heads);
  }
  check_not_negative("--k-bias", o.k_bias);
  check_not_negative("--sharpness", o.sharpness);
  check_not_negative("--v-outliers", o.outlier_scale);
  if (!(o.outlier_fraction >= 0 && o.outlier_fraction <= 1)) {
    refuse("--v-outliers: expected a fraction from 0 to 1, found {}", o.outlier_fraction);
  }
  check_shares(o.energy);
}

io::Tensor make_tensor(const char* name, const SynthOptions& options, int64_t heads) {
  io::Tensor tensor{.name = name,
                    .dtype = options.dtype,
                    .shape = {options.batch, heads, options.tokens, options.head_dim},
                    .data = {}};
  int64_t bytes = static_cast<int64_t>(io::dtype_size(options.dtype));
  for (const int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) refuse("{}: its size overflows 64 bits", name);
  }
  tensor.data.resize(static_cast<size_t>(bytes));
  return tensor;
}

std::map<std::string, std::string> make_metadata(const SynthOptions& o, const std::vector<SynthHead>& heads) {
  std::map<std::string, std::string> metadata = {
      {"layout", layout_metadata(Layout::kBhsd, 4)},
      {"generator", fmt::format("vcattn {} synth", vcattn_version())},
      {"seed", fmt::format("{}", o.seed)},
      {"softmax_scale", fmt::format("{}", 1 / std::sqrt(static_cast<double>(o.head_dim)))},
      {"clusters", fmt::format("{}", o.clusters)},
      {"v_outliers", fmt::format("{}/{}", o.outlier_fraction, o.outlier_scale)},
      {"k_bias", fmt::format("{}", o.k_bias)},
      {"sharpness", fmt::format("{}", o.sharpness)},
      {"energy_asked", shares_text(o.energy)}};
  if (o.grid.frames > 0) {
    metadata["text_tokens"] = fmt::format("{}", o.grid.first_token);
    metadata["video_grid"] = fmt::format("{},{},{}", o.grid.frames, o.grid.height, o.grid.width);
  }
  std::string reached;
  for (const SynthHead& head : heads) reached += (reached.empty() ? "" : "; ") + shares_text(head.reached);
  metadata["energy_reached"] = reached;
  return metadata;
}

}  // namespace

SynthResult synthesize(const SynthOptions& options, const std::function<void()>& head_done) {
  check_options(options);
  SynthResult result;
  result.file.tensors.push_back(make_tensor("q", options, options.heads));
  result.file.tensors.push_back(make_tensor("k", options, options.heads_kv));
  result.file.tensors.push_back(make_tensor("v", options, options.heads_kv));
  const vcattn_tensor q = tensor_view(result.file.tensors[0], Layout::kBhsd);
  const vcattn_tensor k = tensor_view(result.file.tensors[1], Layout::kBhsd);
  const vcattn_tensor v = tensor_view(result.file.tensors[2], Layout::kBhsd);
  for (int64_t batch = 0; batch < options.batch; ++batch) {
    for (int64_t head = 0; head < options.heads_kv; ++head) {
      Random label_random(options.seed, {batch, head, static_cast<int64_t>(SynthStream::kLabels)});
      const std::vector<int32_t> labels = draw_labels(options.tokens, options.clusters, label_random);
      const EnergyShares reached = synthesize_values(options, labels, batch, head, v);
      result.heads.push_back({batch, head, reached, synthesize_scores(options, labels, batch, head, q, k)});
      head_done();
    }
  }
  result.file.metadata = make_metadata(options, result.heads);
  return result;
}

}  // namespace vcattn::cli
