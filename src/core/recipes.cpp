#include "core/recipes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <span>
#include <string_view>

#include "core/message.h"
#include "numerics/attention_math.h"

namespace vcattn {
namespace {

// k, iterations and seeding are not published; these are within what public re-implementations use.
constexpr vcattn_grouping kGrouping = {
    .clusters = 64, .iterations = 4, .warm_iterations = 2, .seeding = VCATTN_SEED_SPACED, .seed = 0};

// Nothing quantised. The other recipes state what differs from it.
constexpr vcattn_recipe kFp32 = {.name = "fp32",
                                 .qk_format = VCATTN_FORMAT_FP32,
                                 .q_scale_span = VCATTN_SPAN_TOKEN,
                                 .k_scale_span = VCATTN_SPAN_BLOCK,
                                 .qk_scale_kind = VCATTN_SCALE_ABSMAX,
                                 .qk_hadamard = 0,
                                 .k_centred = 0,
                                 .q_centred = 0,
                                 .qk_accumulate = VCATTN_ACC_FP32,
                                 .p_format = VCATTN_P_FP32,
                                 .p_phases = 1,
                                 .row_max = VCATTN_MAX_RUNNING,
                                 .tile_keys = kBlockN,
                                 .row_sum = VCATTN_SUM_UNROUNDED,
                                 .p_log2_peak = 8.0f,
                                 .v_format = VCATTN_FORMAT_FP32,
                                 .v_scale_span = VCATTN_SPAN_CHANNEL,
                                 .v_hadamard = 0,
                                 .v_order = VCATTN_ORDER_SEQUENCE,
                                 .mean_rows = 0,
                                 .mean_centred = 0,
                                 .mean_format = VCATTN_MEAN_BF16,
                                 .pv_accumulate = VCATTN_ACC_FP32,
                                 .promote_keys = 0,
                                 .grouping = kGrouping};

constexpr vcattn_recipe named(const char* name, vcattn_recipe recipe) {
  for (char& c : recipe.name) c = '\0';
  for (size_t i = 0; name[i] != '\0'; ++i) recipe.name[i] = name[i];
  return recipe;
}

constexpr vcattn_recipe bf16() {
  vcattn_recipe r = named("bf16", kFp32);
  r.qk_format = r.v_format = VCATTN_FORMAT_BF16;
  r.p_format = VCATTN_P_BF16;
  return r;
}

// FlashAttention's 8 bits: one scale per 128 rows of Q and K, one per head of V.
constexpr vcattn_recipe fp8_naive() {
  vcattn_recipe r = named("fp8_naive", kFp32);
  r.qk_format = r.v_format = VCATTN_FORMAT_E4M3;
  r.q_scale_span = r.k_scale_span = VCATTN_SPAN_BLOCK;
  r.v_scale_span = VCATTN_SPAN_HEAD;
  r.p_format = VCATTN_P_E4M3;
  return r;
}

// FlashAttention-3's incoherent processing.
constexpr vcattn_recipe fp8_hadamard() {
  vcattn_recipe r = named("fp8_hadamard", fp8_naive());
  r.qk_hadamard = 1;
  return r;
}

// SageAttention2: P against 448 rather than 256.
constexpr vcattn_recipe sage2() {
  vcattn_recipe r = named("sage2", kFp32);
  r.qk_format = VCATTN_FORMAT_INT8;
  r.k_centred = 1;
  r.p_format = VCATTN_P_E4M3;
  r.p_log2_peak = 8.807355f;  // log2(448)
  r.v_format = VCATTN_FORMAT_E4M3;
  return r;
}

// SageAttention3: everything in NVFP4, Q and K smoothed, P in two levels.
constexpr vcattn_recipe sage3() {
  vcattn_recipe r = named("sage3", kFp32);
  r.qk_format = r.v_format = VCATTN_FORMAT_NVFP4;
  r.k_centred = r.q_centred = 1;
  r.p_format = VCATTN_P_NVFP4;
  return r;
}

// Attn-QAT's inference numerics without its training.
constexpr vcattn_recipe attn_qat() {
  vcattn_recipe r = named("attn_qat", kFp32);
  r.qk_format = VCATTN_FORMAT_NVFP4;
  r.p_format = VCATTN_P_E4M3;
  r.v_format = VCATTN_FORMAT_E4M3;
  return r;
}

// The paper's fidelity configuration at 8 bits.
constexpr vcattn_recipe vsmooth8() {
  vcattn_recipe r = named("vsmooth8", kFp32);
  r.qk_format = VCATTN_FORMAT_INT8;
  r.qk_hadamard = r.k_centred = 1;
  r.p_format = VCATTN_P_E4M3;
  r.v_format = VCATTN_FORMAT_E4M3;
  r.v_order = VCATTN_ORDER_KMEANS;
  r.mean_rows = 128;
  return r;
}

constexpr vcattn_recipe vsmooth8_expcast() {
  vcattn_recipe r = named("vsmooth8_expcast", vsmooth8());
  r.p_format = VCATTN_P_EXPCAST;
  r.row_sum = VCATTN_SUM_DECODED;
  return r;
}

constexpr vcattn_recipe vsmooth4() {
  vcattn_recipe r = named("vsmooth4", vsmooth8());
  r.qk_format = r.v_format = VCATTN_FORMAT_NVFP4;
  r.p_format = VCATTN_P_NVFP4;
  return r;
}

constexpr vcattn_recipe accurate() {
  vcattn_recipe r = named("accurate", vsmooth8());
  r.p_format = VCATTN_P_EXPCAST;
  r.p_phases = 2;
  r.row_max = VCATTN_MAX_TILE_OCTAVE;
  r.tile_keys = kMaxTileKeys;
  r.row_sum = VCATTN_SUM_DECODED;
  r.v_order = VCATTN_ORDER_CHAIN;
  r.mean_centred = 1;
  r.mean_format = VCATTN_MEAN_TF32;
  return r;
}

constexpr vcattn_recipe exact() {
  vcattn_recipe r = named("exact", accurate());
  r.p_format = VCATTN_P_E4M3;
  return r;
}

constexpr vcattn_recipe fast() {
  vcattn_recipe r = named("fast", accurate());
  r.qk_format = VCATTN_FORMAT_E4M3;
  r.k_scale_span = VCATTN_SPAN_HEAD;
  r.qk_scale_kind = VCATTN_SCALE_POW2_F16;
  r.qk_accumulate = VCATTN_ACC_HOPPER_F16;
  return r;
}

constexpr std::array kRecipes = {
    accurate(),         exact(), fast(),     bf16(),     fp8_naive(),         fp8_hadamard(), sage2(), vsmooth8(),
    vsmooth8_expcast(), sage3(), attn_qat(), vsmooth4(), named("fp32", kFp32)};

// ---- fields by name, for printing and setting -----------------------------------------------------------------------

constexpr const char* kFormats[] = {"fp32", "bf16", "int8", "e4m3", "nvfp4"};
constexpr const char* kSpans[] = {"token", "block", "head", "channel"};
constexpr const char* kScaleKinds[] = {"absmax", "pow2_f16"};
constexpr const char* kPFormats[] = {"fp32", "bf16", "e4m3", "expcast", "expcast_two_lines", "nvfp4"};
constexpr const char* kRowMaxima[] = {"running", "running_octave", "tile_octave"};
constexpr const char* kRowSums[] = {"decoded", "unrounded"};
constexpr const char* kOrders[] = {"sequence", "cube", "kmeans", "balanced", "chain"};
constexpr const char* kMeanFormats[] = {"bf16", "tf32", "fp32"};
constexpr const char* kAccumulators[] = {"fp32", "fp64", "hopper", "hopper_f16"};
constexpr const char* kSeedings[] = {"spaced", "random", "plusplus"};

struct Field {
  std::string_view name;
  int32_t& (*ref)(vcattn_recipe&);
  std::span<const char* const> values;  // empty: a plain number
  int32_t largest;                      // of a plain number; none is negative
};

#define VCATTN_FIELD(name, values, largest)                                      \
  Field {                                                                        \
#name, [](vcattn_recipe & r) -> int32_t& { return r.name; }, values, largest \
  }
#define VCATTN_GROUPING_FIELD(name, values, largest)                                      \
  Field {                                                                                 \
#name, [](vcattn_recipe & r) -> int32_t& { return r.grouping.name; }, values, largest \
  }

const Field kFields[] = {
    VCATTN_FIELD(qk_format, kFormats, 0),
    VCATTN_FIELD(q_scale_span, kSpans, 0),
    VCATTN_FIELD(k_scale_span, kSpans, 0),
    VCATTN_FIELD(qk_scale_kind, kScaleKinds, 0),
    VCATTN_FIELD(qk_hadamard, {}, 1),
    VCATTN_FIELD(k_centred, {}, 1),
    VCATTN_FIELD(q_centred, {}, 1),
    VCATTN_FIELD(qk_accumulate, kAccumulators, 0),
    VCATTN_FIELD(p_format, kPFormats, 0),
    VCATTN_FIELD(p_phases, {}, 2),
    VCATTN_FIELD(row_max, kRowMaxima, 0),
    VCATTN_FIELD(tile_keys, {}, kMaxTileKeys),
    VCATTN_FIELD(row_sum, kRowSums, 0),
    VCATTN_FIELD(v_format, kFormats, 0),
    VCATTN_FIELD(v_scale_span, kSpans, 0),
    VCATTN_FIELD(v_hadamard, {}, 1),
    VCATTN_FIELD(v_order, kOrders, 0),
    VCATTN_FIELD(mean_rows, {}, 128),
    VCATTN_FIELD(mean_centred, {}, 1),
    VCATTN_FIELD(mean_format, kMeanFormats, 0),
    VCATTN_FIELD(pv_accumulate, kAccumulators, 0),
    VCATTN_FIELD(promote_keys, {}, 1 << 30),
    VCATTN_GROUPING_FIELD(clusters, {}, 1 << 16),
    VCATTN_GROUPING_FIELD(iterations, {}, 1000),
    VCATTN_GROUPING_FIELD(warm_iterations, {}, 1000),
    VCATTN_GROUPING_FIELD(seeding, kSeedings, 0),
};
constexpr std::string_view kPeakField = "p_log2_peak";
constexpr std::string_view kSeedField = "seed";

#undef VCATTN_FIELD
#undef VCATTN_GROUPING_FIELD

bool in_range(const Field& field, int32_t value) {
  const int32_t largest = field.values.empty() ? field.largest : static_cast<int32_t>(field.values.size()) - 1;
  return value >= 0 && value <= largest;
}

// Text written into the caller's buffer as far as it goes, and its whole length.
class Line {
 public:
  Line(char* text, size_t size) : text_(text), size_(size) {
    if (size > 0) text[0] = '\0';
  }
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    const size_t room = length_ + 1 < size_ ? size_ - 1 - length_ : 0;
    const auto end = fmt::format_to_n(text_ + (room > 0 ? length_ : 0), room, format, std::forward<Args>(args)...);
    length_ += end.size;
    if (size_ > 0) text_[std::min(length_, size_ - 1)] = '\0';
  }
  size_t length() const { return length_; }

 private:
  char* text_;
  size_t size_, length_ = 0;
};

template <typename Number>
bool parse(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

vcattn_code set_field(vcattn_recipe& recipe, const Field& field, std::string_view value, vcattn_message* message) {
  for (size_t i = 0; i < field.values.size(); ++i) {
    if (value == field.values[i]) {
      field.ref(recipe) = static_cast<int32_t>(i);
      return VCATTN_OK;
    }
  }
  if (!field.values.empty()) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "recipe field {} is one of {}; found \"{:.40}\"", field.name,
                fmt::join(field.values, ", "), value);
  }
  int32_t number = 0;
  if (!parse(value, number) || !in_range(field, number)) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "recipe field {} is a whole number from 0 to {}; found \"{:.40}\"",
                field.name, field.largest, value);
  }
  field.ref(recipe) = number;
  return VCATTN_OK;
}

}  // namespace

vcattn_code validate_recipe(const vcattn_recipe& recipe, vcattn_message* message) {
  vcattn_recipe r = recipe;
  for (const Field& field : kFields) {
    if (!in_range(field, field.ref(r))) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "recipe field {} has the unknown value {}", field.name,
                  field.ref(r));
    }
  }
  const std::string_view name(r.name, strnlen(r.name, sizeof r.name));
  const auto refuse = [&](const char* why) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "recipe \"{}\": {}", name, why);
  };
  if (name.size() == sizeof r.name) return refuse("name is not NUL-terminated");
  if (r.q_scale_span != VCATTN_SPAN_TOKEN && r.q_scale_span != VCATTN_SPAN_BLOCK) {
    return refuse("q_scale_span is token or block");
  }
  if (r.k_scale_span == VCATTN_SPAN_CHANNEL || r.k_scale_span == VCATTN_SPAN_TOKEN) {
    return refuse("k_scale_span is block or head");
  }
  if (r.v_scale_span != VCATTN_SPAN_HEAD && r.v_scale_span != VCATTN_SPAN_CHANNEL) {
    return refuse("v_scale_span is head or channel");
  }
  if (r.v_format == VCATTN_FORMAT_INT8) return refuse("v_format int8 is not defined: P has no integer format");
  if (r.qk_scale_kind == VCATTN_SCALE_POW2_F16) {
    if (r.qk_format != VCATTN_FORMAT_E4M3) return refuse("qk_scale_kind pow2_f16 needs qk_format e4m3");
    if (r.k_scale_span != VCATTN_SPAN_HEAD) return refuse("qk_scale_kind pow2_f16 needs k_scale_span head");
  }
  if (r.qk_accumulate == VCATTN_ACC_HOPPER_F16 && r.qk_scale_kind != VCATTN_SCALE_POW2_F16) {
    return refuse("qk_accumulate hopper_f16 needs qk_scale_kind pow2_f16, which keeps the products inside FP16");
  }
  if (r.qk_accumulate == VCATTN_ACC_HOPPER && r.qk_format != VCATTN_FORMAT_E4M3) {
    return refuse("qk_accumulate hopper needs qk_format e4m3");
  }
  if (r.pv_accumulate == VCATTN_ACC_HOPPER_F16) return refuse("pv_accumulate hopper_f16 is not defined");
  if (r.pv_accumulate == VCATTN_ACC_HOPPER &&
      (r.v_format != VCATTN_FORMAT_E4M3 || !(r.p_format == VCATTN_P_E4M3 || is_expcast(r)))) {
    return refuse("pv_accumulate hopper needs E4M3 on both sides (p_format and v_format)");
  }
  if (r.promote_keys % 32 != 0) return refuse("promote_keys is a multiple of 32, the keys of one instruction");
  if (r.tile_keys != kBlockN && r.tile_keys != kMaxTileKeys) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "recipe \"{}\": tile_keys is {} or {}; found {}", name, kBlockN,
                kMaxTileKeys, r.tile_keys);
  }
  if (is_per_tile(r) && r.promote_keys != 0 && r.promote_keys != r.tile_keys) {
    return refuse("row_max tile_octave promotes what each maximum covers: promote_keys is 0 or tile_keys");
  }
  if (!std::isfinite(r.p_log2_peak) || r.p_log2_peak < 0.0f || r.p_log2_peak > 8.81f) {
    return refuse("p_log2_peak is from 0 to log2(448) = 8.807");
  }
  if (is_expcast(r) && r.row_sum != VCATTN_SUM_DECODED) {
    return refuse("row_sum unrounded needs an exponential; ExpCast has none, so its row sums are decoded");
  }
  if (r.p_phases < 1) return refuse("p_phases is 1 or 2");
  if (is_per_tile(r) && r.p_format == VCATTN_P_NVFP4) {
    return refuse("row_max tile_octave: p_format nvfp4 has its own scale per tile already");
  }
  if (r.p_format == VCATTN_P_NVFP4 && r.v_format != VCATTN_FORMAT_NVFP4 && r.v_format != VCATTN_FORMAT_FP32) {
    return refuse("p_format nvfp4 needs v_format nvfp4 (or fp32, to measure P alone)");
  }
  if (r.mean_rows != 0 && r.mean_rows != 32 && r.mean_rows != 64 && r.mean_rows != 128) {
    return refuse("mean_rows is 0, 32, 64 or 128");
  }
  if (r.grouping.clusters < 1) return refuse("clusters is at least 1");
  return VCATTN_OK;
}

}  // namespace vcattn

extern "C" {

int32_t vcattn_recipe_count(void) { return static_cast<int32_t>(vcattn::kRecipes.size()); }

const char* vcattn_recipe_name(int32_t index) {
  return index < 0 || index >= vcattn_recipe_count() ? nullptr : vcattn::kRecipes[index].name;
}

vcattn_code vcattn_recipe_by_name(const char* name, vcattn_recipe* recipe, vcattn_message* message) {
  if (name == nullptr || recipe == nullptr) {
    return vcattn::fail(message, VCATTN_INVALID_ARGUMENT, "name and recipe must not be NULL");
  }
  for (const vcattn_recipe& candidate : vcattn::kRecipes) {
    if (std::string_view(name) == candidate.name) {
      *recipe = candidate;
      return VCATTN_OK;
    }
  }
  constexpr auto kNames = [] {
    std::array<const char*, vcattn::kRecipes.size()> names{};
    for (size_t i = 0; i < names.size(); ++i) names[i] = vcattn::kRecipes[i].name;
    return names;
  }();
  return vcattn::fail(message, VCATTN_INVALID_ARGUMENT, "no recipe \"{:.40}\"; there are: {}", name,
                      fmt::join(kNames, ", "));
}

vcattn_code vcattn_recipe_set(vcattn_recipe* recipe, const char* field, const char* value, vcattn_message* message) {
  using namespace vcattn;
  if (recipe == nullptr || field == nullptr || value == nullptr) {
    return fail(message, VCATTN_INVALID_ARGUMENT, "recipe, field and value must not be NULL");
  }
  const std::string_view name = field;
  for (const Field& candidate : kFields) {
    if (name == candidate.name) return set_field(*recipe, candidate, value, message);
  }
  const std::string_view text = value;
  if (name == kPeakField) {
    if (!parse(text, recipe->p_log2_peak)) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "recipe field {} is a number; found \"{:.40}\"", name, text);
    }
    return VCATTN_OK;
  }
  if (name == kSeedField) {
    if (!parse(text, recipe->grouping.seed)) {
      return fail(message, VCATTN_INVALID_ARGUMENT, "recipe field {} is a whole number; found \"{:.40}\"", name, text);
    }
    return VCATTN_OK;
  }
  return fail(message, VCATTN_INVALID_ARGUMENT,
              "a recipe has no field \"{:.40}\" (vcattn_recipe_describe names them all)", name);
}

size_t vcattn_recipe_describe(const vcattn_recipe* recipe, char* text, size_t size) {
  using namespace vcattn;
  vcattn_recipe r = *recipe;
  Line line(text, size);
  line.add("name={}", std::string_view(r.name, strnlen(r.name, sizeof r.name)));
  for (const Field& field : kFields) {
    const int32_t value = field.ref(r);
    if (!field.values.empty() && in_range(field, value)) {
      line.add(" {}={}", field.name, field.values[value]);
    } else {
      line.add(" {}={}", field.name, value);
    }
  }
  line.add(" {}={} {}={}", kPeakField, r.p_log2_peak, kSeedField, r.grouping.seed);
  return line.length();
}

}  // extern "C"
