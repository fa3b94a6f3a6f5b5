// Codes to FP32 panels: what a K or V tile looks like to the inner loop.
#pragma once

#include <cstdint>

namespace vcattn::cpu {

// A tile whose rows run along the contraction axis: K^T as [head_dim, 128 keys], V as [128 keys, head_dim].
// out[rows, cols] = codes[rows, cols] decoded. NVFP4 codes lie one to a byte and are multiplied by
// group_scale[rows / 16, cols] (UE4M3); other formats ignore group_scale. cols is a multiple of 16.
void decode_panel(int32_t format, int64_t rows, int64_t cols, const void* codes, const uint8_t* group_scale,
                  float* out);

// The same for Q, contracted along its columns: group_scale[rows, cols / 16].
void decode_rows(int32_t format, int64_t rows, int64_t cols, const void* codes, const uint8_t* group_scale, float* out);

// Bytes of one element as stored on the CPU.
int64_t stored_size(int32_t format);

}  // namespace vcattn::cpu
