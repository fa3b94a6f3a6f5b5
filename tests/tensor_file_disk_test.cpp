// Tensor files on disk: exact bytes, round trips, and what a failure leaves behind.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "io/tensor_file.h"

namespace vcattn::io {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;

Tensor tensor(const std::string& name, vcattn_dtype dtype, const std::vector<int64_t>& shape, const std::string& data) {
  Tensor result{name, dtype, shape, {}};
  for (const char c : data) result.data.push_back(static_cast<std::byte>(c));
  return result;
}

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class DiskTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/vcattn_disk_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  static std::string content(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    EXPECT_TRUE(stream.is_open()) << file;
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  static void put(const std::string& file, const std::string& text) { std::ofstream(file, std::ios::binary) << text; }

  // The names in the folder, hidden ones too.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder_)) result.push_back(entry.path().filename().string());
    std::sort(result.begin(), result.end());
    return result;
  }

  static int mode(const std::string& file) {
    struct stat status = {};
    EXPECT_EQ(::stat(file.c_str(), &status), 0) << file;
    return status.st_mode & 0777;
  }

  fs::path folder_;
};

using Names = std::vector<std::string>;

// ---- what is written ----------------------------------------------------------------------------------------------

TEST_F(DiskTest, SafetensorsBytes) {
  TensorFile file;
  file.metadata = {{"grid", "1,2"}, {"\"", "\n"}};
  file.tensors = {tensor("é", VCATTN_BF16, {1}, "ab"), tensor("q", VCATTN_FP32, {}, "cdef"),
                  tensor("k", VCATTN_FP16, {2, 1}, "ghij")};
  write_tensors(path("a.safetensors"), file);
  // The FP32 data come first, where 4 divides their offset.
  const std::string header = R"({"__metadata__":{"\"":"\n","grid":"1,2"},)"
                             R"("é":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]},)"
                             R"("q":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                             R"("k":{"dtype":"F16","shape":[2,1],"data_offsets":[6,10]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  const std::string length = {static_cast<char>(padded.size()), 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(content(path("a.safetensors")), length + padded + "cdefabghij");
  EXPECT_EQ(names(), Names{"a.safetensors"});
}

TEST_F(DiskTest, SafetensorsRoundTrip) {
  TensorFile file;
  file.metadata = {{"", "empty key"}, {"языки", "日本語 \t\\"}};
  const std::string everything = [] {
    std::string bytes;
    for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
    return bytes;
  }();
  file.tensors = {tensor("", VCATTN_FP16, {2, 64}, everything),
                  tensor("名前\n\"", VCATTN_BF16, {1, 1, 128, 1}, everything),
                  tensor("layer.0/q", VCATTN_FP32, {64}, everything), tensor("none", VCATTN_FP32, {3, 0, 5}, "")};
  write_tensors(path("a.safetensors"), file);
  const TensorFile back = read_tensors(path("a.safetensors"));
  EXPECT_EQ(back.metadata, file.metadata);
  ASSERT_EQ(back.tensors.size(), file.tensors.size());
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    EXPECT_EQ(back.tensors[i].name, file.tensors[i].name) << "the order of the tensors is kept";
    EXPECT_EQ(back.tensors[i].dtype, file.tensors[i].dtype) << file.tensors[i].name;
    EXPECT_EQ(back.tensors[i].shape, file.tensors[i].shape) << file.tensors[i].name;
    EXPECT_EQ(back.tensors[i].data, file.tensors[i].data) << file.tensors[i].name;
  }
  write_tensors(path("empty.safetensors"), {});
  EXPECT_EQ(content(path("empty.safetensors")), "\x08\0\0\0\0\0\0\0{}      "s);
  EXPECT_TRUE(read_tensors(path("empty.safetensors")).tensors.empty());
}

// The same bytes as numpy.save of NumPy 2.4.6.
TEST_F(DiskTest, NpyBytes) {
  const auto written = [&](const Tensor& t) {
    write_tensors(path("a.npy"), {{}, {t}});
    const TensorFile back = read_tensors(path("a.npy"));
    EXPECT_EQ(back.tensors.at(0).shape, t.shape);
    EXPECT_EQ(back.tensors.at(0).dtype, t.dtype);
    EXPECT_EQ(back.tensors.at(0).data, t.data);
    EXPECT_EQ(back.tensors.at(0).name, "a");
    return content(path("a.npy"));
  };
  const auto expected = [](std::string dict) {
    dict.resize(117, ' ');
    return "\x93NUMPY\x01\0v\0"s + dict + "\n";
  };
  EXPECT_EQ(written(tensor("q", VCATTN_FP32, {2, 1}, "abcdefgh")),
            expected("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }") + "abcdefgh");
  EXPECT_EQ(written(tensor("q", VCATTN_FP16, {1}, "ab")),
            expected("{'descr': '<f2', 'fortran_order': False, 'shape': (1,), }") + "ab");
  EXPECT_EQ(written(tensor("q", VCATTN_FP32, {}, "abcd")),
            expected("{'descr': '<f4', 'fortran_order': False, 'shape': (), }") + "abcd");
  const std::string high_rank = written(tensor("q", VCATTN_FP32, std::vector<int64_t>(64, 1), "abcd"));
  EXPECT_EQ((high_rank.size() - 4) % 64, 0u);
}

TEST_F(DiskTest, RefusesToWriteWhatDoesNotHold) {
  const Tensor q = tensor("q", VCATTN_FP32, {1}, "abcd");
  struct Case {
    std::string name;
    std::vector<Tensor> tensors;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"a.txt", {q}, "expected a name that ends in .safetensors or .npy, found \".txt\""},
      {"a.npy", {}, "expected one tensor for .npy, found 0"},
      {"a.npy", {q, q}, "expected one tensor for .npy, found 2"},
      {"a.npy", {tensor("b", VCATTN_BF16, {1}, "ab")}, "tensor \"b\": expected FP16 or FP32 for .npy, found BF16"},
      {"a.npy", {tensor("q", VCATTN_FP32, {2}, "abcd")}, "tensor \"q\": expected 8 bytes for FP32 [2], found 4"},
      {"a.safetensors", {tensor("q", VCATTN_FP16, {3}, "abcd")}, "expected 6 bytes for FP16 [3], found 4"},
      {"a.safetensors", {tensor("q", VCATTN_FP16, {-1}, "")}, "found shape [-1]"},
      {"a.safetensors", {tensor("q", VCATTN_FP16, {1LL << 40, 1LL << 40}, "")}, "fewer than 2^63 bytes"},
      {"a.safetensors", {tensor("q", VCATTN_FP16, std::vector<int64_t>(65, 1), "ab")}, "at most 64 extents, found 65"},
      {"a.safetensors",
       {tensor("q", static_cast<vcattn_dtype>(0), {1}, "ab")},
       "expected dtype BF16, FP16 or FP32, found 0"},
      {"a.safetensors", {q, q}, "found \"q\" again"},
      {"a.safetensors", {tensor("__metadata__", VCATTN_FP16, {1}, "ab")}, "found \"__metadata__\" again"},
      {"a.safetensors",
       {tensor("\xFF", VCATTN_FP16, {1}, "ab")},
       "expected names and metadata in UTF-8, found \"\\xff\""},
  };
  for (const Case& c : cases) {
    const std::string message = error_of([&] { write_tensors(path(c.name), {{}, c.tensors}); });
    EXPECT_NE(message.find(c.message), std::string::npos) << "expected: " << c.message << "\nfound: " << message;
    EXPECT_TRUE(message.starts_with(path(c.name) + ": ")) << message;
    EXPECT_EQ(names(), Names{}) << c.message;
  }
  const TensorFile bad_metadata = {{{"k", "\xFF"}}, {q}};
  EXPECT_EQ(error_of([&] { write_tensors(path("a.safetensors"), bad_metadata); }),
            path("a.safetensors") + ": expected names and metadata in UTF-8, found \"\\xff\"");
  EXPECT_EQ(names(), Names{});
}

// ---- where it is written ------------------------------------------------------------------------------------------

TEST_F(DiskTest, ReplacesAFileAndKeepsItsPermissions) {
  const mode_t umask = ::umask(027);
  write_text(path("new"), "text");
  ::umask(umask);
  EXPECT_EQ(mode(path("new")), 0640);
  put(path("old"), "something longer than the text");
  ASSERT_EQ(::chmod(path("old").c_str(), 0606), 0);
  write_text(path("old"), "text");
  EXPECT_EQ(mode(path("old")), 0606);
  EXPECT_EQ(content(path("old")), "text");
  EXPECT_EQ(names(), (Names{"new", "old"}));
}

TEST_F(DiskTest, ReplacesWhatALinkPointsTo) {
  fs::create_directory(folder_ / "sub");
  put(path("sub/file"), "old");
  fs::create_symlink("sub/file", path("link"));
  fs::create_symlink("link", path("link_to_link"));
  fs::create_symlink(path("absent"), path("dangling"));
  write_text(path("link_to_link"), "new");
  write_text(path("dangling"), "created");
  EXPECT_EQ(content(path("sub/file")), "new");
  EXPECT_EQ(content(path("absent")), "created");
  EXPECT_TRUE(fs::is_symlink(path("link")) && fs::is_symlink(path("link_to_link")) && fs::is_symlink(path("dangling")));
  EXPECT_EQ(names(), (Names{"absent", "dangling", "link", "link_to_link", "sub"}));
}

TEST_F(DiskTest, WritesARelativePath) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  write_text("report", "text");
  fs::current_path(before);
  EXPECT_EQ(content(path("report")), "text");
  EXPECT_EQ(names(), Names{"report"});
}

TEST_F(DiskTest, WritesStraightIntoAPipe) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const std::string text(200'000, 'x');  // more than a pipe holds
  std::string received;
  std::thread reader([&] { received = content(path("pipe")); });
  const std::string message = error_of([&] { write_text(path("pipe"), text); });
  reader.join();
  EXPECT_EQ(message, "no error");
  EXPECT_TRUE(received == text) << received.size() << " bytes";
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(names(), Names{"pipe"});
}

TEST_F(DiskTest, ContinuesAnInheritedDescriptor) {
  const int file = ::open(path("log").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  ASSERT_GE(file, 0);
  ASSERT_EQ(::write(file, "before,", 7), 7);
  write_text("/dev/fd/" + std::to_string(file), "text,");
  std::fflush(stdout);
  const int saved = ::dup(STDOUT_FILENO);
  ASSERT_EQ(::dup2(file, STDOUT_FILENO), STDOUT_FILENO);
  const std::string message = error_of([&] { write_text("/dev/stdout", "more,"); });
  ::dup2(saved, STDOUT_FILENO);
  ::close(saved);
  EXPECT_EQ(message, "no error");
  ASSERT_EQ(::write(file, "after", 5), 5);
  ::close(file);
  EXPECT_EQ(content(path("log")), "before,text,more,after");
  EXPECT_EQ(error_of([] { write_text("/dev/fd/987654", "text"); }), "/dev/fd/987654: cannot open: Bad file descriptor");
}

TEST_F(DiskTest, WritersOfOneFileDoNotMix) {
  const std::string a(50'000, 'a');
  const std::string b(50'000, 'b');
  const auto writing = [&](const std::string& text) {
    for (int i = 0; i < 50; ++i) write_text(path("file"), text);
  };
  std::thread other(writing, b);
  writing(a);
  other.join();
  const std::string last = content(path("file"));
  EXPECT_TRUE(last == a || last == b) << last.size() << " bytes";
  EXPECT_EQ(names(), Names{"file"});
}

// ---- failures (all of them also fail as root) ---------------------------------------------------------------------

// Past `bytes` a write fails with EFBIG, as one to a full disk does with ENOSPC.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_ = {};
  void (*handler_)(int);
};

TEST_F(DiskTest, AFailedWriteLeavesTheOldFileOrNone) {
  put(path("old.npy"), "old");
  const TensorFile file = {{}, {tensor("q", VCATTN_FP32, {250'000}, std::string(1'000'000, 'x'))}};
  std::string replacing, creating;
  {
    const FileSizeLimit limit(100'000);
    replacing = error_of([&] { write_tensors(path("old.npy"), file); });
    creating = error_of([&] { write_tensors(path("new.npy"), file); });
  }
  EXPECT_EQ(replacing, path("old.npy") + ": cannot write: File too large");
  EXPECT_EQ(creating, path("new.npy") + ": cannot write: File too large");
  EXPECT_EQ(content(path("old.npy")), "old");
  EXPECT_EQ(names(), Names{"old.npy"});
}

TEST_F(DiskTest, AFailedWriteIntoAPipeIsReported) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const auto handler = ::signal(SIGPIPE, SIG_IGN);
  std::thread reader([&] { ::close(::open(path("pipe").c_str(), O_RDONLY)); });
  const std::string message = error_of([&] { write_text(path("pipe"), std::string(200'000, 'x')); });
  reader.join();
  ::signal(SIGPIPE, handler);
  EXPECT_EQ(message, path("pipe") + ": cannot write: Broken pipe");
  EXPECT_EQ(names(), Names{"pipe"});
}

TEST_F(DiskTest, WritingNamesTheReasonOfTheSystem) {
  fs::create_directory(path("folder.npy"));
  put(path("file"), "old");
  fs::create_symlink("loop", path("loop"));
  const Names before = names();
  const auto writing = [](const std::string& file) { return error_of([&] { write_text(file, "text"); }); };
  EXPECT_EQ(writing(path("folder.npy")), path("folder.npy") + ": cannot write: Is a directory");
  EXPECT_EQ(writing(path("file/a")), path("file/a") + ": cannot open: Not a directory");
  EXPECT_EQ(writing(path("none/a")),
            path("none/a") + ": cannot create a file in its folder: No such file or directory");
  EXPECT_EQ(writing(path("loop")), path("loop") + ": cannot open: Too many levels of symbolic links");
  EXPECT_EQ(writing(path(std::string(300, 'n'))), "..." + std::string(256, 'n') + ": cannot open: File name too long");
  const fs::path elsewhere = fs::current_path();
  fs::current_path(folder_);
  EXPECT_EQ(writing(""), ": cannot replace: No such file or directory");
  fs::current_path(elsewhere);
  EXPECT_EQ(names(), before);
  EXPECT_EQ(content(path("file")), "old");
}

TEST_F(DiskTest, ReadingNamesTheReasonOfTheSystem) {
  const auto reading = [](const std::string& file, const Names& wanted = {}) {
    return error_of([&] { read_tensors(file, wanted); });
  };
  EXPECT_EQ(reading(path("a.npy")), path("a.npy") + ": cannot open: No such file or directory");
  fs::create_directory(path("folder.npy"));
  EXPECT_EQ(reading(path("folder.npy")), path("folder.npy") + ": cannot read: Is a directory");
  const std::string names_only = "expected a name that ends in .safetensors or .npy, found ";
  EXPECT_EQ(reading("a.txt"), "a.txt: " + names_only + "\".txt\"");
  EXPECT_EQ(reading("/dev/stdin"), "/dev/stdin: " + names_only + "no extension");
  write_tensors(path("q.npy"), {{}, {tensor("q", VCATTN_FP32, {1}, "abcd")}});
  EXPECT_EQ(reading(path("q.npy/a.npy")), path("q.npy/a.npy") + ": cannot open: Not a directory");
  EXPECT_EQ(reading(path("q.npy"), {"q"}), "no error");
  EXPECT_EQ(reading(path("q.npy"), {"k"}), path("q.npy") + ": expected a tensor \"k\", found \"q\"");
  const std::string special = ": expected a regular file, found a device, pipe or socket";
  ASSERT_EQ(::mkfifo(path("pipe.npy").c_str(), 0600), 0);
  EXPECT_EQ(reading(path("pipe.npy")), path("pipe.npy") + special);
  fs::create_symlink("/dev/zero", path("zero.npy"));
  EXPECT_EQ(reading(path("zero.npy")), path("zero.npy") + special);
}

#ifndef __SANITIZE_ADDRESS__  // which ends the program where operator new should throw
TEST(LargeFile, OfMoreThanMemoryIsRefused) {
  // A hole without data, of a size that no address space has room for. Of the usual file systems tmpfs alone has those.
  std::string path = "/dev/shm/vcattn_XXXXXX.npy";
  const int file = ::mkstemps(path.data(), 4);
  const bool resized = file >= 0 && ::ftruncate(file, off_t{1} << 62) == 0;
  if (file >= 0) ::close(file);
  const std::string message = error_of([&] { read_tensors(path); });
  ::unlink(path.c_str());
  if (!resized) GTEST_SKIP() << "no tmpfs at /dev/shm";
  EXPECT_EQ(message, path + ": cannot read: Cannot allocate memory");
}
#endif

}  // namespace
}  // namespace vcattn::io
