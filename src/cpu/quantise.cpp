#include "cpu/quantise.h"

#include <algorithm>
#include <cmath>

#include "vcattn/vcattn.h"

namespace vcattn::cpu {
namespace {

void quantise_nvfp4(const float* values, int64_t count, float encode, uint8_t* codes, int64_t stride, uint8_t* groups,
                    int64_t group_stride) {
  for (int64_t begin = 0; begin < count; begin += kFp4Group) {
    const int64_t end = std::min<int64_t>(begin + kFp4Group, count);
    const float largest = abs_max(values + begin, end - begin) * encode;
    const uint8_t scale = encode_ue4m3(largest / kE2m1Max);
    const float value = decode_ue4m3(scale);
    const float inverse = value > 0.0f ? 1.0f / value : 0.0f;
    groups[begin / kFp4Group * group_stride] = scale;
    for (int64_t i = begin; i < end; ++i) codes[i * stride] = encode_e2m1(values[i] * encode * inverse);
  }
}

template <typename Code, typename Encode>
void quantise_each(const float* values, int64_t count, Code* codes, int64_t stride, Encode encode) {
  for (int64_t i = 0; i < count; ++i) codes[i * stride] = encode(values[i]);
}

}  // namespace

Scale format_scale(int32_t format, float abs_max) {
  switch (format) {
    case VCATTN_FORMAT_INT8:
      return absmax_scale(abs_max, kInt8Max);
    case VCATTN_FORMAT_E4M3:
      return absmax_scale(abs_max, kE4m3Max);
    case VCATTN_FORMAT_NVFP4:
      return nvfp4_tensor_scale(abs_max);
    default:
      return {1.0f, 1.0f};
  }
}

void quantise_line(int32_t format, const float* values, int64_t count, float encode, void* codes, int64_t stride,
                   uint8_t* groups, int64_t group_stride) {
  switch (format) {
    case VCATTN_FORMAT_BF16:
      return quantise_each(values, count, static_cast<uint16_t*>(codes), stride, encode_bf16);
    case VCATTN_FORMAT_INT8:
      return quantise_each(values, count, static_cast<int8_t*>(codes), stride,
                           [=](float x) { return encode_int8(x * encode); });
    case VCATTN_FORMAT_E4M3:
      return quantise_each(values, count, static_cast<uint8_t*>(codes), stride,
                           [=](float x) { return encode_e4m3(x * encode); });
    case VCATTN_FORMAT_NVFP4:
      return quantise_nvfp4(values, count, encode, static_cast<uint8_t*>(codes), stride, groups, group_stride);
    default:
      return quantise_each(values, count, static_cast<float*>(codes), stride, [](float x) { return x; });
  }
}

float stored_value(int32_t format, const void* codes, int64_t index) {
  switch (format) {
    case VCATTN_FORMAT_BF16:
      return decode_bf16(static_cast<const uint16_t*>(codes)[index]);
    case VCATTN_FORMAT_E4M3:
      return decode_e4m3(static_cast<const uint8_t*>(codes)[index]);
    case VCATTN_FORMAT_NVFP4:
      return decode_e2m1(static_cast<const uint8_t*>(codes)[index]);
    default:
      return static_cast<const float*>(codes)[index];
  }
}

float abs_max(const float* values, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

float round_mean(int32_t mean_format, float mean) {
  switch (mean_format) {
    case VCATTN_MEAN_BF16:
      return decode_bf16(encode_bf16(mean));
    case VCATTN_MEAN_TF32:
      return round_tf32(mean);
    default:
      return mean;
  }
}

}  // namespace vcattn::cpu
