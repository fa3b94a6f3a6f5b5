// Rows of a caller's tensor as FP32, whatever its dtype and strides.
#pragma once

#include <cstdint>

#include "numerics/formats.h"
#include "vcattn/vcattn.h"

namespace vcattn {

namespace detail {

template <typename Element, typename Decode>
void gather_row(const Element* source, int64_t stride, int64_t count, float* out, Decode decode) {
  if (stride == 1) {
    for (int64_t d = 0; d < count; ++d) out[d] = decode(source[d]);
  } else {
    for (int64_t d = 0; d < count; ++d) out[d] = decode(source[d * stride]);
  }
}

template <typename Element, typename Encode>
void scatter_row(const float* source, int64_t stride, int64_t count, Element* out, Encode encode) {
  for (int64_t d = 0; d < count; ++d) out[d * stride] = encode(source[d]);
}

inline int64_t row_offset(const vcattn_tensor& t, int64_t batch, int64_t token, int64_t head) {
  return batch * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}

}  // namespace detail

// out[head_dim] = tensor[batch, token, head, :]
inline void load_row(const vcattn_tensor& t, int64_t batch, int64_t token, int64_t head, float* out) {
  const int64_t offset = detail::row_offset(t, batch, token, head);
  const int64_t dim = t.shape[3], stride = t.stride[3];
  switch (t.dtype) {
    case VCATTN_BF16:
      return detail::gather_row(static_cast<const uint16_t*>(t.data) + offset, stride, dim, out, decode_bf16);
    case VCATTN_FP16:
      return detail::gather_row(static_cast<const uint16_t*>(t.data) + offset, stride, dim, out, decode_fp16);
    default:
      return detail::gather_row(static_cast<const float*>(t.data) + offset, stride, dim, out,
                                [](float x) { return x; });
  }
}

// tensor[batch, token, head, :] = row[head_dim], rounded to nearest even
inline void store_row(const vcattn_tensor& t, int64_t batch, int64_t token, int64_t head, const float* row) {
  const int64_t offset = detail::row_offset(t, batch, token, head);
  const int64_t dim = t.shape[3], stride = t.stride[3];
  switch (t.dtype) {
    case VCATTN_BF16:
      return detail::scatter_row(row, stride, dim, static_cast<uint16_t*>(t.data) + offset, encode_bf16);
    case VCATTN_FP16:
      return detail::scatter_row(row, stride, dim, static_cast<uint16_t*>(t.data) + offset, encode_fp16);
    default:
      return detail::scatter_row(row, stride, dim, static_cast<float*>(t.data) + offset, [](float x) { return x; });
  }
}

}  // namespace vcattn
