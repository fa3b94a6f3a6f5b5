#include "cpu/panel.h"

#include <array>
#include <cstring>

#include "numerics/attention_math.h"
#include "vcattn/vcattn.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/panel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace vcattn::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using I = hn::Rebind<int32_t, F>;
using U8 = hn::Rebind<uint8_t, F>;
using I8 = hn::Rebind<int8_t, F>;
using U16 = hn::Rebind<uint16_t, F>;
constexpr int64_t kLanes = hn::MaxLanes(F());

// Codes of E4M3 to FP32 without touching FP32 subnormals, which the caller may have switched off.
HWY_INLINE hn::Vec<F> decode_e4m3_lanes(const uint8_t* codes) {
  const I i;
  const F f;
  const auto code = hn::PromoteTo(i, hn::LoadU(U8(), codes));
  const auto magnitude = hn::And(code, hn::Set(i, 0x7F));
  // Exponent and mantissa moved in place; the bias grows from 7 to 127.
  const auto normal = hn::BitCast(f, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(i, (127 - 7) << 23)));
  const auto subnormal = hn::Mul(hn::ConvertTo(f, magnitude), hn::Set(f, 0x1p-9f));
  const auto value = hn::IfThenElse(hn::RebindMask(f, hn::Lt(magnitude, hn::Set(i, 8))), subnormal, normal);
  return hn::Or(value, hn::BitCast(f, hn::ShiftLeft<24>(hn::And(code, hn::Set(i, 0x80)))));
}

void decode_row(int32_t format, int64_t cols, const void* codes, float* out) {
  const F f;
  const auto* bytes = static_cast<const uint8_t*>(codes);
  switch (format) {
    case VCATTN_FORMAT_INT8:
      for (int64_t c = 0; c < cols; c += kLanes) {
        const auto code = hn::LoadU(I8(), reinterpret_cast<const int8_t*>(bytes) + c);
        hn::StoreU(hn::ConvertTo(f, hn::PromoteTo(I(), code)), f, out + c);
      }
      return;
    case VCATTN_FORMAT_E4M3:
      for (int64_t c = 0; c < cols; c += kLanes) hn::StoreU(decode_e4m3_lanes(bytes + c), f, out + c);
      return;
    case VCATTN_FORMAT_BF16:
      for (int64_t c = 0; c < cols; c += kLanes) {
        const auto code = hn::LoadU(U16(), static_cast<const uint16_t*>(codes) + c);
        hn::StoreU(hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(I(), code))), f, out + c);
      }
      return;
    default:
      std::memcpy(out, codes, static_cast<size_t>(cols) * sizeof(float));
  }
}

}  // namespace vcattn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vcattn::cpu {
namespace {

HWY_EXPORT(decode_row);

constexpr auto kE2m1Values = [] {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code) values[code] = decode_e2m1(static_cast<uint8_t>(code));
  return values;
}();
constexpr auto kUe4m3Values = [] {
  std::array<float, 128> values{};
  for (int code = 0; code < 127; ++code) values[code] = decode_ue4m3(static_cast<uint8_t>(code));
  return values;
}();

}  // namespace

int64_t stored_size(int32_t format) { return format == VCATTN_FORMAT_FP32 ? 4 : format == VCATTN_FORMAT_BF16 ? 2 : 1; }

void decode_panel(int32_t format, int64_t rows, int64_t cols, const void* codes, const uint8_t* group_scale,
                  float* out) {
  if (format != VCATTN_FORMAT_NVFP4) {
    HWY_DYNAMIC_DISPATCH(decode_row)(format, rows * cols, codes, out);
    return;
  }
  const auto* code = static_cast<const uint8_t*>(codes);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* scale = group_scale + r / kFp4Group * cols;
    for (int64_t c = 0; c < cols; ++c) out[r * cols + c] = kE2m1Values[code[r * cols + c]] * kUe4m3Values[scale[c]];
  }
}

void decode_rows(int32_t format, int64_t rows, int64_t cols, const void* codes, const uint8_t* group_scale,
                 float* out) {
  if (format != VCATTN_FORMAT_NVFP4) {
    HWY_DYNAMIC_DISPATCH(decode_row)(format, rows * cols, codes, out);
    return;
  }
  const auto* code = static_cast<const uint8_t*>(codes);
  for (int64_t i = 0; i < rows * cols; ++i) out[i] = kE2m1Values[code[i]] * kUe4m3Values[group_scale[i / kFp4Group]];
}

}  // namespace vcattn::cpu
#endif
