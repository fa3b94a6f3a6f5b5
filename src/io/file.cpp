#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <new>
#include <optional>
#include <system_error>

#include "io/format.h"
#include "io/message.h"
#include "io/tensor_file.h"

namespace vcattn::io {
namespace {

static_assert(std::endian::native == std::endian::little, "Tensor data are copied from and to little-endian files");

namespace fs = std::filesystem;

constexpr int kMaxSymlinks = 40;       // Linux follows as many
constexpr int kTemporaryNames = 1000;  // tried before giving up
constexpr mode_t kNewFileMode = 0666;  // less the umask
constexpr mode_t kPermissionBits = 0777;

std::string system_text(int code) { return std::generic_category().message(code); }

struct Descriptor {
  int value = -1;

  explicit Descriptor(int descriptor = -1) : value(descriptor) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

struct TemporaryFile {
  fs::path path;  // empty: none

  TemporaryFile() = default;
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!path.empty()) ::unlink(path.c_str());
  }
};

enum class Format { kSafetensors, kNpy };

Format format_of(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  if (extension == ".safetensors") return Format::kSafetensors;
  if (extension == ".npy") return Format::kNpy;
  fail(path, "expected a name that ends in .safetensors or .npy, found {}",
       extension.empty() ? "no extension" : shown(extension));
}

// A file's bytes, mapped: what is not looked at is not read.
class MappedFile {
 public:
  MappedFile(void* data, size_t size) : data_(data), size_(size) {}
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (size_ > 0) ::munmap(data_, size_);
  }
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  void* data_;
  size_t size_;
};

MappedFile map_file(const std::string& path) {
  // O_NONBLOCK: a FIFO must not make the call wait before it is refused.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status = {};
  if (file.value < 0 || ::fstat(file.value, &status) != 0) fail(path, "cannot open: {}", system_text(errno));
  if (S_ISDIR(status.st_mode)) fail(path, "cannot read: {}", system_text(EISDIR));
  if (!S_ISREG(status.st_mode)) fail(path, "expected a regular file, found a device, pipe or socket");
  const auto size = static_cast<size_t>(status.st_size);
  if (size == 0) return MappedFile(nullptr, 0);  // which cannot be mapped
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (data == MAP_FAILED) fail(path, "cannot read: {}", system_text(errno));
  return MappedFile(data, size);
}

// The descriptor that a path such as /dev/stdout stands for. To open the path instead would start at offset 0 of a
// redirected file, over what the process and its siblings have written there.
std::optional<int> inherited_descriptor(const std::string& path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  constexpr std::string_view kFolder = "/dev/fd/";
  if (!path.starts_with(kFolder)) return std::nullopt;
  int descriptor = 0;
  const auto [end, error] = std::from_chars(path.data() + kFolder.size(), path.data() + path.size(), descriptor);
  if (error != std::errc() || end != path.data() + path.size()) return std::nullopt;
  return descriptor;
}

// Where writing to `path` ends up, so that a rename replaces the file and leaves the links to it.
fs::path follow_symlinks(fs::path path) {
  std::error_code error;
  for (int i = 0; i < kMaxSymlinks; ++i) {
    const fs::path target = fs::read_symlink(path, error);
    if (error) break;
    path = path.parent_path() / target;  // an absolute target replaces the folder
  }
  return path;
}

// One file being written: a temporary file next to `path` until commit() renames it, or, where `path` is no regular
// file (a pipe, a device), that itself. Where the file system can, the temporary file has no name until commit(), so
// that nothing is left of it even when the process is killed; else it is removed without commit().
class OutputFile {
 public:
  explicit OutputFile(const std::string& path) : path_(path) {
    if (const std::optional<int> inherited = inherited_descriptor(path)) {
      descriptor_.value = ::fcntl(*inherited, F_DUPFD_CLOEXEC, 0);
      if (descriptor_.value < 0) fail(path_, "cannot open: {}", system_text(errno));
      return;
    }
    struct stat status = {};
    const bool exists = ::stat(path.c_str(), &status) == 0;
    if (!exists && errno != ENOENT) fail(path_, "cannot open: {}", system_text(errno));
    if (exists && S_ISDIR(status.st_mode)) fail(path_, "cannot write: {}", system_text(EISDIR));
    if (exists && !S_ISREG(status.st_mode)) {
      descriptor_.value = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
      if (descriptor_.value < 0) fail(path_, "cannot open: {}", system_text(errno));
      return;
    }
    // A rename asks for no permission of the file that it replaces; overwriting should.
    if (exists && ::access(path.c_str(), W_OK) != 0) fail(path_, "cannot write: {}", system_text(errno));
    target_ = follow_symlinks(path);
    open_temporary();
    if (exists && ::fchmod(descriptor_.value, status.st_mode & kPermissionBits) != 0) {
      fail(path_, "cannot set permissions: {}", system_text(errno));
    }
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::write(descriptor_.value, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(path_, "cannot write: {}", system_text(errno));
      bytes = bytes.subspan(static_cast<size_t>(count));
    }
  }

  void commit() {
    if (unnamed_) name_temporary();
    // Some file systems report a full disk or a lost server only here.
    if (::close(std::exchange(descriptor_.value, -1)) != 0) fail(path_, "cannot write: {}", system_text(errno));
    if (temporary_.path.empty()) return;
    if (::rename(temporary_.path.c_str(), target_.c_str()) != 0) fail(path_, "cannot replace: {}", system_text(errno));
    temporary_.path.clear();
  }

 private:
  fs::path folder() const { return target_.has_parent_path() ? target_.parent_path() : fs::path("."); }

  // Tries names beside the target until make(path) succeeds (returns true) or fails for another reason than EEXIST.
  template <typename Make>
  void take_name(Make make) {
    int code = 0;
    for (int i = 0; i < kTemporaryNames; ++i) {
      const fs::path path = folder() / fmt::format(".vcattn-{}-{}.tmp", ::getpid(), i);
      if (make(path)) {
        temporary_.path = path;
        return;
      }
      code = errno;
      if (code != EEXIST) break;
    }
    fail(path_, "cannot create a file in its folder: {}", system_text(code));
  }

  void open_temporary() {
    descriptor_.value = ::open(folder().c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, kNewFileMode);
    unnamed_ = descriptor_.value >= 0 && ::access(own_link().c_str(), F_OK) == 0;
    if (unnamed_) return;
    if (descriptor_.value >= 0) ::close(std::exchange(descriptor_.value, -1));
    take_name([&](const fs::path& path) {
      descriptor_.value = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kNewFileMode);
      return descriptor_.value >= 0;
    });
  }

  void name_temporary() {
    take_name([&](const fs::path& path) {
      return ::linkat(AT_FDCWD, own_link().c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0;
    });
  }

  std::string own_link() const { return fmt::format("/proc/self/fd/{}", descriptor_.value); }

  const std::string path_;  // as given, for messages
  fs::path target_;
  TemporaryFile temporary_;
  Descriptor descriptor_;
  bool unnamed_ = false;
};

}  // namespace

int64_t Tensor::element_count() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

size_t dtype_size(vcattn_dtype dtype) {
  switch (dtype) {
    case VCATTN_BF16:
    case VCATTN_FP16:
      return 2;
    case VCATTN_FP32:
      return 4;
  }
  return 0;
}

const char* dtype_name(vcattn_dtype dtype) {
  switch (dtype) {
    case VCATTN_BF16:
      return "BF16";
    case VCATTN_FP16:
      return "FP16";
    case VCATTN_FP32:
      return "FP32";
  }
  return "unknown";
}

std::optional<int64_t> byte_count(std::span<const int64_t> shape, vcattn_dtype dtype) {
  int64_t bytes = static_cast<int64_t>(dtype_size(dtype));
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

void check_tensor(const Tensor& tensor, const std::string& path) {
  const std::string name = shown(tensor.name);
  if (dtype_size(tensor.dtype) == 0) {
    fail(path, "tensor {}: expected dtype BF16, FP16 or FP32, found {}", name, static_cast<int>(tensor.dtype));
  }
  if (tensor.shape.size() > kMaxRank) {
    fail(path, "tensor {}: expected at most {} extents, found {}", name, kMaxRank, tensor.shape.size());
  }
  const std::optional<int64_t> bytes = byte_count(tensor.shape, tensor.dtype);
  const std::string shape = shown_shape(tensor.shape);
  if (!bytes) fail(path, "tensor {}: expected extents >= 0 and fewer than 2^63 bytes, found shape {}", name, shape);
  if (static_cast<uint64_t>(*bytes) != tensor.data.size()) {
    fail(path, "tensor {}: expected {} bytes for {} {}, found {}", name, *bytes, dtype_name(tensor.dtype), shape,
         tensor.data.size());
  }
}

std::string destination_of(const std::string& path) {
  std::error_code error;
  const fs::path target = follow_symlinks(fs::absolute(path, error));
  const fs::path canonical = fs::weakly_canonical(target, error);
  return (error ? target : canonical).string();
}

TensorFile read_tensors(const std::string& path, const std::vector<std::string>& wanted) {
  const Format format = format_of(path);
  try {
    const MappedFile mapped = map_file(path);
    if (format == Format::kSafetensors) return parse_safetensors(mapped.bytes(), path, wanted);
    TensorFile file = parse_npy(mapped.bytes(), path);
    for (const std::string& name : wanted) {
      if (name != file.tensors.front().name) fail_missing(path, name, file.tensors);
    }
    return file;
  } catch (const std::bad_alloc&) {
    fail(path, "cannot read: {}", system_text(ENOMEM));
  }
}

void write_tensors(const std::string& path, const TensorFile& file) {
  const Encoding encoding = format_of(path) == Format::kNpy ? encode_npy(file, path) : encode_safetensors(file, path);
  OutputFile output(path);
  output.write(std::as_bytes(std::span(encoding.head)));
  for (const Tensor* tensor : encoding.data) output.write(tensor->data);
  output.commit();
}

void write_text(const std::string& path, const std::string& text) {
  OutputFile output(path);
  output.write(std::as_bytes(std::span(text)));
  output.commit();
}

}  // namespace vcattn::io
