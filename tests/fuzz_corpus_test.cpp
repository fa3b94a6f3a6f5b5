// Replays the fuzzers' corpus through the same checks, without libFuzzer.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "../fuzz/targets.h"

namespace vcattn::io {
namespace {

constexpr int kFewestFiles = 10;  // so that an empty or moved folder does not pass

void replay(const std::string& format, void (*check)(std::span<const std::byte>)) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(VCATTN_TEST_DATA) + "/../fuzz/corpus/" + format)) {
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(stream), {}};
    EXPECT_NO_THROW(check(std::as_bytes(std::span(content)))) << entry.path();
    ++files;
  }
  EXPECT_GE(files, kFewestFiles);
}

TEST(FuzzCorpus, Safetensors) { replay("safetensors", fuzz::check_safetensors); }
TEST(FuzzCorpus, Npy) { replay("npy", fuzz::check_npy); }

}  // namespace
}  // namespace vcattn::io
