// The corpus and a fixed number of changes to it, through every target: what a machine without clang, and CI,
// does of fuzzing. OE_WRITE_CORPUS=1 writes the seeds into the folder of sources.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "oe_runtime/core/common/test_directory.h"
#include "tests/fuzz/targets.h"

namespace oe::fuzz_test {
namespace {

constexpr int kChanges = 400;  // to each file of the corpus

std::filesystem::path FolderOf(const FuzzTarget& target) {
  return std::filesystem::path(OE_FUZZ_CORPUS) / target.name;
}

// One of what libFuzzer does: flip a bit, set a byte, cut, repeat a part, put in a striking number.
void Change(std::string* text, std::mt19937_64* random) {
  const auto below = [random](size_t n) { return static_cast<size_t>((*random)() % n); };
  if (text->empty()) text->push_back('\0');
  const size_t at = below(text->size());
  switch (below(5)) {
    case 0:
      (*text)[at] = static_cast<char>((*text)[at] ^ (1 << below(8)));
      break;
    case 1:
      (*text)[at] = static_cast<char>(below(256));
      break;
    case 2:
      text->resize(at);
      break;
    case 3:
      text->insert(below(text->size()), text->substr(at, below(64)));
      break;
    default: {
      constexpr uint64_t kStriking[] = {0, 1, 0x7fffffff, 0xffffffff, ~uint64_t{0}, uint64_t{1} << 63, 4096};
      const uint64_t number = kStriking[below(std::size(kStriking))];
      const size_t size = std::min<size_t>(size_t{1} << below(4), text->size() - at);
      text->replace(at, size, reinterpret_cast<const char*>(&number), size);
    }
  }
}

TEST(FuzzTest, TheCorpusIsWhatOurEncodersWrite) {
  for (const FuzzTarget& target : FuzzTargets()) {
    for (const auto& [name, content] : target.seeds()) {
      const std::filesystem::path file = FolderOf(target) / name;
      if (std::getenv("OE_WRITE_CORPUS") != nullptr) {
        std::filesystem::create_directories(file.parent_path());
        WriteAll(file.string(), content);
      }
      EXPECT_EQ(ReadAll(file.string()), content)
          << file << " is of another format; if that is meant, run this test with OE_WRITE_CORPUS=1";
    }
  }
}

TEST(FuzzTest, NoInputBreaksAParser) {
  for (const FuzzTarget& target : FuzzTargets()) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(FolderOf(target)))
      files.push_back(entry.path());
    ASSERT_FALSE(files.empty()) << target.name;
    std::sort(files.begin(), files.end());
    std::mt19937_64 random(1);
    for (const std::filesystem::path& file : files) {
      const std::string content = ReadAll(file.string());
      SCOPED_TRACE(file);
      target.run(reinterpret_cast<const uint8_t*>(content.data()), content.size());
      for (int i = 0; i < kChanges; ++i) {
        std::string changed = content;
        for (uint64_t n = 1 + random() % 4; n > 0; --n) Change(&changed, &random);
        target.run(reinterpret_cast<const uint8_t*>(changed.data()), changed.size());
      }
    }
  }
}

}  // namespace
}  // namespace oe::fuzz_test
