// The safetensors format (huggingface.co/docs/safetensors): the header's length N as little-endian uint64, N bytes of
// JSON padded with spaces, then the data. The JSON is one object:
//   {"__metadata__": {"key": "text", ...},
//    "name": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [begin, end]}, ...}
// Offsets count bytes from the end of the header. The tensors tile the data: no holes, no overlaps.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string_view>

#include "io/format.h"
#include "io/message.h"
#include "io/tensor_file.h"

namespace vcattn::io {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr size_t kHeaderAlignment = 8;
constexpr std::string_view kMetadataKey = "__metadata__";

struct DtypeName {
  vcattn_dtype dtype;
  std::string_view name;
};
constexpr std::array<DtypeName, 3> kDtypes = {{{VCATTN_BF16, "BF16"}, {VCATTN_FP16, "F16"}, {VCATTN_FP32, "F32"}}};

struct Entry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<uint64_t> offsets;  // begin, end
};

// Follows the JSON event by event rather than as a tree: repeated keys are seen, nothing nests deeper than the format
// does, and the first value of a wrong kind ends the reading.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::map<std::string, std::string> metadata;
  std::vector<Entry> entries;  // in the order of the header

  bool start_object(size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kHeader;
    } else if (place_ == Place::kHeader) {
      place_ = key_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
      if (place_ == Place::kTensor) entries.push_back({key_, {}, {}, {}});
      fields_seen_ = {};
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& text) override {
    if (place_ == Place::kHeader) {
      if (!names_.insert(text).second) fail(path_, "expected each name once, found {} twice", shown(text));
      key_ = text;
    } else if (place_ == Place::kMetadata) {
      if (!metadata.try_emplace(text).second) {
        fail(path_, "__metadata__: expected each key once, found {} twice", shown(text));
      }
      field_ = text;
    } else {
      const size_t field = std::find(kFields.begin(), kFields.end(), text) - kFields.begin();
      if (field == kFields.size()) {
        fail(path_, "tensor {}: expected dtype, shape and data_offsets, found {}", shown(key_), shown(text));
      }
      if (fields_seen_[field]) fail(path_, "tensor {}: expected {} once, found it twice", shown(key_), text);
      fields_seen_[field] = true;
      field_ = text;
    }
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::kMetadata) {
      metadata[field_] = text;
    } else if (place_ == Place::kTensor && field_ == kFields[kDtype]) {
      entries.back().dtype = text;
    } else {
      unexpected(shown(text));
    }
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == kFields[kDtype]) unexpected("an array");
    place_ = field_ == kFields[kShape] ? Place::kShape : Place::kOffsets;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ == Place::kShape && value <= INT64_MAX) {
      if (entries.back().shape.size() == kMaxRank) {
        fail(path_, "tensor {}: expected at most {} extents, found more", shown(key_), kMaxRank);
      }
      entries.back().shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::kOffsets && entries.back().offsets.size() < 2) {
      entries.back().offsets.push_back(value);
    } else {
      unexpected(fmt::format("{}", value));
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && entries.back().offsets.size() != 2) unexpected("fewer");
    place_ = Place::kTensor;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (size_t field = 0; field < kFields.size(); ++field) {
        if (!fields_seen_[field]) fail(path_, "tensor {}: expected {}, found none", shown(key_), kFields[field]);
      }
    }
    place_ = Place::kHeader;  // after the last brace the parser admits nothing but space
    return true;
  }

  bool null() override { unexpected("null"); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { unexpected(fmt::format("{}", value)); }
  // Whole numbers past 64 bits come here too.
  bool number_float(double, const std::string& text) override { unexpected(shown(text)); }
  bool binary(json::binary_t&) override { unexpected("binary data"); }

  bool parse_error(size_t position, const std::string& token, const nlohmann::detail::exception&) override {
    // `position` is the number of bytes read.
    fail(path_, "header byte {}: expected JSON in UTF-8, found {}", position - 1, shown(token, kShownNameBytes));
  }

 private:
  enum class Place { kStart, kHeader, kMetadata, kTensor, kShape, kOffsets };
  enum Field : size_t { kDtype, kShape, kOffsets, kCount };
  static constexpr std::array<std::string_view, kCount> kFields = {"dtype", "shape", "data_offsets"};

  [[noreturn]] void unexpected(const std::string& found) const {
    const std::string field = shown(field_, kShownNameBytes);
    switch (place_) {
      case Place::kStart:
        break;
      case Place::kHeader:
        fail(path_, "{}: expected an object, found {}", shown(key_), found);
      case Place::kMetadata:
        fail(path_, "__metadata__ {}: expected a string, found {}", field, found);
      case Place::kTensor:
        fail(path_, "tensor {}: {}: expected {}, found {}", shown(key_), field_,
             field_ == kFields[kDtype] ? "a string" : "an array", found);
      case Place::kShape:
        fail(path_, "tensor {}: shape: expected whole numbers from 0 to 2^63 - 1, found {}", shown(key_), found);
      case Place::kOffsets:
        fail(path_, "tensor {}: data_offsets: expected two whole numbers, found {}", shown(key_), found);
    }
    fail(path_, "header: expected a JSON object, found {}", found);
  }

  const std::string& path_;
  Place place_ = Place::kStart;
  std::set<std::string> names_;
  std::string key_;    // of the header: a tensor's name or __metadata__
  std::string field_;  // of the object below it
  std::array<bool, kCount> fields_seen_ = {};
};

// The tensors in the order of their data must follow one another from 0 to `size`.
void check_tiling(const std::vector<Entry>& entries, uint64_t size, const std::string& path) {
  std::vector<const Entry*> order;
  for (const Entry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) { return a->offsets < b->offsets; });
  uint64_t covered = 0;
  for (const Entry* entry : order) {
    const uint64_t begin = entry->offsets[0];
    const uint64_t end = entry->offsets[1];
    if (begin > end || end > size) {
      fail(path, "tensor {}: expected data_offsets within {} bytes of data, found [{}, {}]", shown(entry->name), size,
           begin, end);
    }
    if (begin != covered) {
      fail(path, "tensor {}: expected its data at byte {}, found them at {}, which leaves {}", shown(entry->name),
           covered, begin, begin < covered ? "an overlap" : "a hole");
    }
    covered = end;
  }
  if (covered != size) fail(path, "expected {} bytes of data, found {}", covered, size);
}

Tensor make_tensor(const Entry& entry, vcattn_dtype dtype, std::span<const std::byte> data, const std::string& path) {
  const std::optional<int64_t> bytes = byte_count(entry.shape, dtype);
  const std::string shape = shown_shape(entry.shape);
  if (!bytes) fail(path, "tensor {}: expected fewer than 2^63 bytes, found shape {}", shown(entry.name), shape);
  const std::span<const std::byte> own = data.subspan(entry.offsets[0], entry.offsets[1] - entry.offsets[0]);
  if (static_cast<uint64_t>(*bytes) != own.size()) {
    fail(path, "tensor {}: expected {} bytes for {} {}, found {}", shown(entry.name), *bytes, entry.dtype, shape,
         own.size());
  }
  return {entry.name, dtype, entry.shape, {own.begin(), own.end()}};
}

std::string json_string(const std::string& text, const std::string& path) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    fail(path, "expected names and metadata in UTF-8, found {}", shown(text));
  }
}

}  // namespace

TensorFile parse_safetensors(std::span<const std::byte> bytes, const std::string& path,
                             const std::vector<std::string>& wanted) {
  if (bytes.size() < kLengthBytes) fail(path, "expected 8 bytes of header length, found {} bytes", bytes.size());
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  const uint64_t available = bytes.size() - kLengthBytes;
  if (length > std::min(kMaxHeaderBytes, available)) {
    fail(path, "expected a header of at most {} bytes, found a length of {}", std::min(kMaxHeaderBytes, available),
         length);
  }
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  if (!header.starts_with('{')) {
    fail(path, "expected a header that starts with '{{', found {}", shown(header, kShownNameBytes));
  }
  // The parser would take a NUL for the end and never look at the rest.
  if (const size_t nul = header.find('\0'); nul != std::string_view::npos) {
    fail(path, "header byte {}: expected JSON in UTF-8, found a NUL byte", nul);
  }
  HeaderReader reader(path);
  json::sax_parse(header, &reader);  // throws from the reader

  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + length);
  check_tiling(reader.entries, data.size(), path);
  TensorFile file;
  file.metadata = std::move(reader.metadata);
  const auto dtype_of = [](const Entry& entry) {
    return std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& d) { return d.name == entry.dtype; });
  };
  for (const std::string& name : wanted) {
    const auto entry = std::find_if(reader.entries.begin(), reader.entries.end(),
                                    [&](const Entry& candidate) { return candidate.name == name; });
    if (entry == reader.entries.end()) fail_missing(path, name, reader.entries);
    const auto dtype = dtype_of(*entry);
    if (dtype == kDtypes.end()) {
      fail(path, "tensor {}: expected dtype BF16, F16 or F32, found {}", shown(name), shown(entry->dtype));
    }
    file.tensors.push_back(make_tensor(*entry, dtype->dtype, data, path));
  }
  if (wanted.empty()) {
    for (const Entry& entry : reader.entries) {
      const auto dtype = dtype_of(entry);
      if (dtype != kDtypes.end()) file.tensors.push_back(make_tensor(entry, dtype->dtype, data, path));
    }
  }
  return file;
}

Encoding encode_safetensors(const TensorFile& file, const std::string& path) {
  Encoding encoding;
  std::set<std::string_view> names = {kMetadataKey};
  for (const Tensor& tensor : file.tensors) {
    check_tensor(tensor, path);
    if (!names.insert(tensor.name).second) {
      fail(path, "expected tensor names that differ from each other and from {}, found {} again", kMetadataKey,
           shown(tensor.name));
    }
    encoding.data.push_back(&tensor);
  }
  // Wider elements first: then every tensor is aligned to its elements, as readers that map the file need.
  std::stable_sort(encoding.data.begin(), encoding.data.end(),
                   [](const Tensor* a, const Tensor* b) { return dtype_size(a->dtype) > dtype_size(b->dtype); });
  std::map<const Tensor*, size_t> begin;
  size_t covered = 0;
  for (const Tensor* tensor : encoding.data) {
    begin[tensor] = covered;
    covered += tensor->data.size();
  }

  std::vector<std::string> members;
  if (!file.metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, text] : file.metadata) {
      pairs.push_back(json_string(key, path) + ":" + json_string(text, path));
    }
    members.push_back(fmt::format("\"{}\":{{{}}}", kMetadataKey, fmt::join(pairs, ",")));
  }
  for (const Tensor& tensor : file.tensors) {
    const auto dtype =
        std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeName& d) { return d.dtype == tensor.dtype; });
    members.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                  json_string(tensor.name, path), dtype->name, fmt::join(tensor.shape, ","),
                                  begin[&tensor], begin[&tensor] + tensor.data.size()));
  }
  std::string header = fmt::format("{{{}}}", fmt::join(members, ","));
  header.resize((header.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  if (header.size() > kMaxHeaderBytes) {
    fail(path, "expected a header of at most {} bytes, found {}", kMaxHeaderBytes, header.size());
  }
  for (size_t i = 0; i < kLengthBytes; ++i) encoding.head += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  encoding.head += header;
  return encoding;
}

}  // namespace vcattn::io
