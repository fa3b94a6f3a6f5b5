// FP32 rows to codes in tile order.
#pragma once

#include <cstdint>

#include "cpu/quantized_qkv.h"
#include "numerics/attention_math.h"

namespace vcattn::cpu {

// The scale under which the largest magnitude takes the largest code; 1 for formats that store values as they are.
Scale format_scale(int32_t format, float abs_max);

// Stores `count` values: the code of values[i] * encode at codes[i * stride], and for NVFP4 the scale of its group at
// groups[i / 16 * group_stride]; other formats ignore `groups`. FP32 and BF16 are stored without `encode`.
void quantise_line(int32_t format, const float* values, int64_t count, float encode, void* codes, int64_t stride,
                   uint8_t* groups, int64_t group_stride);

// The value that the code of a V format at codes[index] stands for, before descale and group scale.
float stored_value(int32_t format, const void* codes, int64_t index);

float abs_max(const float* values, int64_t count);

// `mean` as vcattn_mean_format stores it.
float round_mean(int32_t mean_format, float mean);

}  // namespace vcattn::cpu
