// NumPy's .npy, versions 1.0 to 3.0 (numpy.lib.format): the bytes "\x93NUMPY", major, minor, the header's length as
// little-endian uint16 (1.0) or uint32 (2.0, 3.0), the header, the data. The header is the text of a Python dict:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
// padded with spaces and ended by a newline so that the data start at a multiple of 64 bytes.
#include <array>
#include <charconv>
#include <filesystem>
#include <string_view>

#include "io/format.h"
#include "io/message.h"
#include "io/tensor_file.h"

namespace vcattn::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kDataAlignment = 64;

struct Header {
  std::string_view descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

// Reads that one dict and nothing else of Python: no escapes, prefixes, other literals, nesting or repeated keys.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  Header read() {
    enum Key : size_t { kDescr, kFortranOrder, kShape, kCount };
    static constexpr std::array<std::string_view, kCount> kNames = {"descr", "fortran_order", "shape"};
    std::array<bool, kCount> seen = {};
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string_view name = string("a key");
      const size_t key = std::find(kNames.begin(), kNames.end(), name) - kNames.begin();
      if (key == kCount) fail(path_, "header: expected descr, fortran_order and shape, found {}", shown(name));
      if (seen[key]) fail(path_, "header: expected each key once, found {} twice", shown(name));
      seen[key] = true;
      expect(':');
      if (key == kDescr) header.descr = string("a dtype such as '<f4'");
      if (key == kFortranOrder) header.fortran_order = boolean();
      if (key == kShape) header.shape = shape();
      if (accept('}')) break;
      expect(',');
    }
    skip_space();
    if (at_ != text_.size()) unexpected("spaces to the end");
    for (size_t key = 0; key < kCount; ++key) {
      if (!seen[key]) fail(path_, "header: expected the key {}, found none", shown(kNames[key]));
    }
    return header;
  }

 private:
  [[noreturn]] void unexpected(std::string_view expected) const {
    const std::string found = at_ == text_.size() ? "its end" : shown(text_.substr(at_), kShownNameBytes);
    fail(path_, "header byte {}: expected {}, found {}", at_, expected, found);
  }

  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  bool accept(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) unexpected(std::string{'\'', c, '\''});
  }

  std::string_view string(std::string_view expected) {
    skip_space();
    if (at_ == text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) unexpected(expected);
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) unexpected(expected);
    const std::string_view content = text_.substr(at_ + 1, end - at_ - 1);
    if (content.find_first_of("\\\n") != std::string_view::npos) unexpected("a string without escapes");
    at_ = end + 1;
    return content;
  }

  bool boolean() {
    skip_space();
    for (const auto& [word, value] : {std::pair{std::string_view("False"), false}, {"True", true}}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    unexpected("True or False");
  }

  // A Python tuple: (), (3,), (3, 4) or (3, 4,); but (3) is a number.
  std::vector<int64_t> shape() {
    std::vector<int64_t> extents;
    expect('(');
    while (!accept(')')) {
      if (extents.size() == kMaxRank) fail(path_, "header: expected at most {} extents, found more", kMaxRank);
      extents.push_back(extent());
      if (accept(',')) continue;
      if (extents.size() == 1) unexpected("',' as in a tuple");
      if (!accept(')')) unexpected("',' or ')'");
      break;
    }
    return extents;
  }

  int64_t extent() {
    skip_space();
    const std::string_view rest = text_.substr(at_);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    const size_t digits = end - rest.data();
    const bool leading_zero = rest.starts_with('0') && digits > 1;  // not a number in Python
    if (error != std::errc() || rest.starts_with('-') || leading_zero) {
      unexpected("a whole number from 0 to 2^63 - 1");
    }
    at_ += digits;
    return value;
  }

  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
};

vcattn_dtype dtype_of(std::string_view descr, const std::string& path) {
  if (descr == "<f4") return VCATTN_FP32;
  if (descr == "<f2") return VCATTN_FP16;
  // NumPy has no bfloat16: it saves the one of ml_dtypes as two bytes of no type, spelled either way.
  if (descr == "<V2" || descr == "|V2") return VCATTN_BF16;
  if (descr.starts_with('>')) {
    fail(path, "expected little-endian data, found big-endian {}; save it as .astype('<f4')", shown(descr));
  }
  if (descr == "<f8") {
    fail(path, "expected dtype '<f4' or '<f2', found \"<f8\" (float64); save it as .astype(numpy.float32)");
  }
  fail(path, "expected dtype '<f4', '<f2' or '|V2' (bfloat16), found {}", shown(descr));
}

}  // namespace

TensorFile parse_npy(std::span<const std::byte> bytes, const std::string& path) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with(kMagic)) {
    fail(path, "expected a .npy file, found {}", text.empty() ? "no bytes" : shown(text.substr(0, kMagic.size())));
  }
  const auto byte_at = [&](size_t i) {
    if (i >= bytes.size()) fail(path, "expected a header, found the end of the file after {} bytes", bytes.size());
    return std::to_integer<size_t>(bytes[i]);
  };
  const size_t major = byte_at(kMagic.size());
  const size_t minor = byte_at(kMagic.size() + 1);
  if (major < 1 || major > 3 || minor != 0) {
    fail(path, "expected .npy version 1.0, 2.0 or 3.0, found {}.{}", major, minor);
  }
  const size_t length_at = kMagic.size() + 2;
  const size_t length_bytes = major == 1 ? 2 : 4;
  size_t length = 0;
  for (size_t i = 0; i < length_bytes; ++i) length |= byte_at(length_at + i) << (8 * i);
  const std::string_view rest = text.substr(length_at + length_bytes);
  if (length > rest.size()) fail(path, "expected a header of {} bytes, found {} in the file", length, rest.size());

  Header header = HeaderReader(rest.substr(0, length), path).read();
  Tensor tensor;
  tensor.name = std::filesystem::path(path).stem().string();
  tensor.dtype = dtype_of(header.descr, path);
  if (header.fortran_order) {
    fail(path, "expected C order, found fortran_order True; save numpy.ascontiguousarray(array)");
  }
  tensor.shape = std::move(header.shape);
  const std::optional<int64_t> size = byte_count(tensor.shape, tensor.dtype);
  if (!size) fail(path, "expected fewer than 2^63 bytes, found shape {}", shown_shape(tensor.shape));
  const std::span<const std::byte> data = bytes.subspan(bytes.size() - rest.size() + length);
  if (static_cast<uint64_t>(*size) != data.size()) {
    fail(path, "expected {} bytes of data for {} {}, found {}", *size, dtype_name(tensor.dtype),
         shown_shape(tensor.shape), data.size());
  }
  tensor.data.assign(data.begin(), data.end());
  TensorFile file;
  file.tensors.push_back(std::move(tensor));
  return file;
}

Encoding encode_npy(const TensorFile& file, const std::string& path) {
  if (file.tensors.size() != 1) fail(path, "expected one tensor for .npy, found {}", file.tensors.size());
  const Tensor& tensor = file.tensors.front();
  check_tensor(tensor, path);
  if (tensor.dtype == VCATTN_BF16) {
    fail(path, "tensor {}: expected FP16 or FP32 for .npy, found BF16; write .safetensors", shown(tensor.name));
  }
  const std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                         tensor.dtype == VCATTN_FP16 ? "<f2" : "<f4", fmt::join(tensor.shape, ", "),
                                         tensor.shape.size() == 1 ? "," : "");
  const size_t before = kMagic.size() + 4;
  const size_t unpadded = before + header.size() + 1;
  const size_t total = (unpadded + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  const size_t length = total - before;  // kMaxRank extents of 19 digits stay far below 2^16
  Encoding encoding;
  encoding.head = std::string(kMagic) +
                  std::string{'\1', '\0', static_cast<char>(length & 0xFF), static_cast<char>(length >> 8)} + header +
                  std::string(total - unpadded, ' ') + '\n';
  encoding.data = {&tensor};
  return encoding;
}

}  // namespace vcattn::io
