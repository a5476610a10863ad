#include "oe_runtime/core/policy/admission.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace oe::admission_test {
namespace {

constexpr uint32_t kParts = 16;

uint32_t PartOf(Key key) { return static_cast<uint32_t>(Mix64(key) >> 60); }

AdmissionSpec Cbf(double elements, double probability) {
  return Complete(
      {"cbf",
       {{"filter_freq", 3}, {"max_element_size", elements}, {"false_positive_probability", probability}}},
      true);
}

AdmissionSpec Counter() { return Complete({"counter", {{"filter_freq", 3}}}, true); }

uint64_t Bytes(const AdmissionFilter& filter) {
  uint64_t bytes = 0;
  for (uint32_t part = 0; part < kParts; ++part) bytes += filter.bytes(part);
  return bytes;
}

std::string Written(const AdmissionFilter& filter) {
  std::string bytes;
  filter.Write([&](const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); });
  EXPECT_EQ(bytes.size(), filter.WrittenBytes());
  return bytes;
}

bool Add(AdmissionFilter* filter, const std::string& bytes, uint32_t server, uint32_t servers) {
  size_t at = 0;
  return filter->Add(
      [&](void* data, size_t size) {
        ASSERT_LE(at + size, bytes.size());
        std::memcpy(data, bytes.data() + at, size);
        at += size;
      },
      bytes.size(), [=](Key key) { return server_of(key, servers, false) == server ? PartOf(key) : kParts; });
}

TEST(AdmissionTest, ACounterCountsAndForgets) {
  const auto filter = AdmissionFilter::Create(Counter(), kParts, {});
  EXPECT_EQ(filter->Count(2, 7, 1), 1U);
  EXPECT_EQ(filter->Count(2, 7, 4), 5U);
  EXPECT_EQ(filter->Count(3, 7, 1), 1U);          // parts are independent
  const uint32_t most = (uint32_t{1} << 31) - 2;  // above every filter_freq
  EXPECT_EQ(filter->Count(2, ~Key{0}, ~uint32_t{0}), most);
  EXPECT_EQ(filter->Count(2, ~Key{0}, ~uint32_t{0}), most);
  filter->Forget(2, 7);
  filter->Forget(2, 8);
  EXPECT_EQ(filter->Count(2, 7, 1), 1U);
}

TEST(AdmissionTest, ABloomFilterNeverCountsTooFewAndSeldomTooMany) {
  constexpr uint64_t kElements = 100000;
  for (const double probability : {0.1, 0.01, 0.001}) {
    const auto filter = AdmissionFilter::Create(Cbf(kElements, probability), kParts, {});
    uint64_t wrong = 0;
    for (Key key = 0; key < kElements; ++key) ASSERT_GE(filter->Count(PartOf(key), key * 977, 2), 2U);
    for (Key key = 0; key < kElements; ++key) {
      // Keys that never came would count 1 now; what others did shows.
      const Key other = (key + kElements) * 977;
      wrong += filter->Count(PartOf(key), other, 0) > 0 ? 1 : 0;
    }
    EXPECT_LT(static_cast<double>(wrong) / kElements, 1.3 * probability);
    for (Key key = 0; key < 300; ++key) ASSERT_GE(filter->Count(PartOf(key), key * 977, 1), 3U);
    EXPECT_EQ(filter->Count(0, 5, 1000), 255U) << "a cell ends at 255";
  }
}

// 1.44 · log2(1/p) bytes an element, whatever comes, and one server's share with several.
TEST(AdmissionTest, ABloomFiltersMemoryIsBounded) {
  constexpr uint64_t kElements = 1000000;
  const double cells = 1.4427 * 6.6439 * kElements;
  constexpr uint64_t kRounding = kParts * 4096;  // a block for each part
  const auto filter = AdmissionFilter::Create(Cbf(kElements, 0.01), kParts, {});
  const uint64_t bytes = Bytes(*filter);
  EXPECT_GT(static_cast<double>(bytes), cells * 0.999);
  EXPECT_LT(static_cast<double>(bytes), cells * 1.001 + kRounding);
  std::mt19937_64 random(1);
  for (uint64_t i = 0; i < 2 * kElements; ++i) {
    const Key key = random();
    (void)filter->Count(PartOf(key), key, 1);
  }
  EXPECT_EQ(Bytes(*filter), bytes);
  for (uint32_t server = 0; server < 5; ++server) {
    const auto share = AdmissionFilter::Create(Cbf(kElements, 0.01), kParts, {server, 5});
    EXPECT_LT(static_cast<double>(Bytes(*share)), cells / 5 * 1.001 + 2 * kRounding);
  }
}

TEST(AdmissionTest, CountsMoveToOtherNumbersOfServers) {
  for (const AdmissionSpec& spec : {Counter(), Cbf(50000, 0.01)}) {
    const auto one = AdmissionFilter::Create(spec, kParts, {});
    std::vector<std::unique_ptr<AdmissionFilter>> three;
    std::vector<std::unique_ptr<AdmissionFilter>> two;
    for (uint32_t i = 0; i < 3; ++i) three.push_back(AdmissionFilter::Create(spec, kParts, {i, 3}));
    for (uint32_t i = 0; i < 2; ++i) two.push_back(AdmissionFilter::Create(spec, kParts, {i, 2}));
    for (Key key = 0; key < 50000; ++key) {
      const auto times = static_cast<uint32_t>(1 + key % 5);
      const uint32_t expected = one->Count(PartOf(key), key, times);
      ASSERT_LE(three[server_of(key, 3, false)]->Count(PartOf(key), key, times), expected) << spec.name;
    }
    for (const auto& from : three) {
      for (uint32_t i = 0; i < 2; ++i) ASSERT_TRUE(Add(two[i].get(), Written(*from), i, 2));
    }
    // Never too few, nor more than one server counts: a counter exactly, a Bloom filter no less exactly.
    for (Key key = 0; key < 50000; ++key) {
      const uint32_t count = two[server_of(key, 2, false)]->Count(PartOf(key), key, 0);
      ASSERT_GE(count, 1 + key % 5) << spec.name << " key " << key;
      ASSERT_LE(count, one->Count(PartOf(key), key, 0)) << spec.name << " key " << key;
    }
  }
}

// What lies in blocks of two servers was taken over by both of them: it must not count twice the next time.
TEST(AdmissionTest, CountsThatMoveAgainAndAgainDoNotGrow) {
  for (const AdmissionSpec& spec : {Counter(), Cbf(3000, 0.0001)}) {  // a block a part, on all servers
    std::vector<std::unique_ptr<AdmissionFilter>> filters;
    filters.push_back(AdmissionFilter::Create(spec, kParts, {}));
    for (Key key = 0; key < 300; ++key) (void)filters[0]->Count(PartOf(key), key, 1);
    for (const uint32_t servers : {3, 2, 5, 1}) {
      std::vector<std::unique_ptr<AdmissionFilter>> next;
      for (uint32_t i = 0; i < servers; ++i) {
        next.push_back(AdmissionFilter::Create(spec, kParts, {i, servers}));
        for (const auto& from : filters) ASSERT_TRUE(Add(next[i].get(), Written(*from), i, servers));
      }
      filters = std::move(next);
    }
    for (Key key = 0; key < 300; ++key) ASSERT_EQ(filters[0]->Count(PartOf(key), key, 0), 1U) << spec.name;
  }
}

TEST(AdmissionTest, BytesOfAnotherFilterAreRefused) {
  const auto small = AdmissionFilter::Create(Cbf(1000, 0.01), kParts, {});
  const auto large = AdmissionFilter::Create(Cbf(1000000, 0.01), kParts, {});
  EXPECT_FALSE(Add(small.get(), Written(*large), 0, 1));
  EXPECT_FALSE(Add(small.get(), "", 0, 1));
  EXPECT_FALSE(Add(AdmissionFilter::Create(Counter(), kParts, {}).get(), "seven b", 0, 1));
}

}  // namespace
}  // namespace oe::admission_test
