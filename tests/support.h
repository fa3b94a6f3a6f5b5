// What the attention tests share: owned tensors, a call with its workspace between guard bytes, error measures.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/tensor_access.h"
#include "cpu/oracle.h"
#include "vcattn/vcattn.h"

namespace vcattn::test {

// Owns [batch, seqlen, heads, dim]; views describe it.
class Tensor {
 public:
  Tensor(int64_t batch, int64_t seqlen, int64_t heads, int64_t dim, vcattn_dtype dtype = VCATTN_FP32)
      : bytes_(static_cast<size_t>(batch * seqlen * heads * dim) * (dtype == VCATTN_FP32 ? 4 : 2), std::byte{0xFF}) {
    view_ = {bytes_.data(), dtype, 0, {batch, seqlen, heads, dim}, {seqlen * heads * dim, heads * dim, dim, 1}};
  }

  const vcattn_tensor& view() const { return view_; }
  std::vector<std::byte>& bytes() { return bytes_; }

  void set(int64_t b, int64_t s, int64_t h, const std::vector<float>& row) { store_row(view_, b, s, h, row.data()); }
  std::vector<float> row(int64_t b, int64_t s, int64_t h) const {
    std::vector<float> out(view_.shape[3]);
    load_row(view_, b, s, h, out.data());
    return out;
  }

  // fill(batch, token, head, channel)
  template <typename Fill>
  Tensor& fill(Fill fill) {
    std::vector<float> row(view_.shape[3]);
    for (int64_t b = 0; b < view_.shape[0]; ++b) {
      for (int64_t s = 0; s < view_.shape[1]; ++s) {
        for (int64_t h = 0; h < view_.shape[2]; ++h) {
          for (int64_t d = 0; d < view_.shape[3]; ++d) row[d] = fill(b, s, h, d);
          set(b, s, h, row);
        }
      }
    }
    return *this;
  }

  Tensor& fill_normal(uint32_t seed, float scale = 1.0f, float mean = 0.0f) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(mean, scale);
    return fill([&](int64_t, int64_t, int64_t, int64_t) { return normal(random); });
  }

 private:
  std::vector<std::byte> bytes_;
  vcattn_tensor view_;
};

inline vcattn_recipe recipe(const char* name) {
  vcattn_recipe r;
  EXPECT_EQ(vcattn_recipe_by_name(name, &r, nullptr), VCATTN_OK) << name;
  return r;
}

inline vcattn_attention_params params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                      const char* recipe_name = "accurate") {
  vcattn_attention_params p;
  vcattn_attention_params_init(&p);
  p.q = q.view();
  p.k = k.view();
  p.v = v.view();
  p.out = out.view();
  p.recipe = recipe(recipe_name);
  return p;
}

struct Outcome {
  vcattn_code code;
  std::string message;
};

// Runs with exactly the workspace asked for, filled with garbage, guard bytes behind it.
inline Outcome attend(const vcattn_attention_params& p) {
  vcattn_message message{};
  size_t bytes = 0;
  const vcattn_code asked = vcattn_attention_workspace_size(&p, &bytes, &message);
  if (asked != VCATTN_OK) return {asked, message.text};
  constexpr size_t kGuard = 4096;
  const size_t total = (bytes + kGuard + 255) / 256 * 256;
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(256, total), &std::free);
  std::memset(memory.get(), 0xA5, total);
  const vcattn_code code = vcattn_attention(&p, memory.get(), bytes, &message);
  const auto* end = static_cast<const unsigned char*>(memory.get()) + bytes;
  for (size_t i = 0; i < kGuard; ++i) {
    if (end[i] != 0xA5) {
      ADD_FAILURE() << "wrote past the workspace, byte " << i;
      break;
    }
  }
  return {code, message.text};
}

// ||out - oracle|| / ||oracle|| over all rows; a NaN anywhere gives NaN.
inline double relative_error(const vcattn_attention_params& p) {
  std::vector<int64_t> rows(p.q.shape[1]);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  cpu::OracleRows oracle;
  vcattn_message message{};
  EXPECT_EQ(cpu::oracle_attention(p, rows, oracle, &message), VCATTN_OK) << message.text;
  double error = 0.0, norm = 0.0;
  std::vector<float> row(p.out.shape[3]);
  size_t at = 0;
  for (int64_t b = 0; b < p.q.shape[0]; ++b) {
    for (int64_t s = 0; s < p.q.shape[1]; ++s) {
      for (int64_t h = 0; h < p.q.shape[2]; ++h) {
        load_row(p.out, b, s, h, row.data());
        for (const float x : row) {
          error += (x - oracle.out[at]) * (x - oracle.out[at]);
          norm += oracle.out[at] * oracle.out[at];
          ++at;
        }
      }
    }
  }
  return norm == 0.0 ? std::sqrt(error) : std::sqrt(error / norm);
}

inline double attend_error(const vcattn_attention_params& p) {
  const Outcome outcome = attend(p);
  EXPECT_EQ(outcome.code, VCATTN_OK) << outcome.message;
  return outcome.code == VCATTN_OK ? relative_error(p) : std::nan("");
}

}  // namespace vcattn::test
