// The tool run as a process in a folder of its own.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace vcattn::test {

namespace fs = std::filesystem;

struct Result {
  int exit_code;
  std::string out, err;
};

inline std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A folder of the test's own, gone with it.
class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "vcattn-cli-test-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  // stdout is a pipe; stderr a file. A terminal that takes colour, to show that a pipe gets none.
  Result run(const std::vector<std::string>& arguments) const {
    const fs::path err = fs::temp_directory_path() / (folder_.filename().string() + ".stderr");
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    std::vector<std::string> words = {VCATTN_TOOL};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    std::array<char*, 2> environment = {const_cast<char*>("TERM=xterm-256color"), nullptr};
    pid_t pid = 0;
    EXPECT_EQ(::posix_spawn(&pid, VCATTN_TOOL, &actions, nullptr, argv.data(), environment.data()), 0) << VCATTN_TOOL;
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    Result result = {};
    std::array<char, 4096> buffer;
    for (ssize_t count; (count = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
      result.out.append(buffer.data(), static_cast<size_t>(count));
    }
    ::close(ends[0]);
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    result.exit_code = WEXITSTATUS(status);
    result.err = contents(err);
    fs::remove(err);
    return result;
  }

  Result run_well(const std::vector<std::string>& arguments) const {
    const Result result = run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    return result;
  }

  // Exit code 1, nothing on stdout, one line on stderr with each of `parts`.
  void expect_refused(const std::vector<std::string>& arguments, const std::vector<std::string>& parts) const {
    const Result result = run(arguments);
    SCOPED_TRACE(result.err);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(result.err.starts_with("vcattn: "));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1);
    EXPECT_TRUE(result.err.ends_with('\n'));
    for (const std::string& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part;
  }

 private:
  fs::path folder_;
};

}  // namespace vcattn::test
