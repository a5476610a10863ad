#include "oe_runtime/core/common/registry.h"

#include <gtest/gtest.h>

namespace oe::registry_test {
namespace {

struct Entry {
  std::string name;
  int value;
};
using Values = Registry<Entry>;

const Values::Add kTwo({"two", 2});
const Values::Add kOne({"one", 1});
const Values::Add kThree({"three", 3});

TEST(RegistryTest, HasWhatWasRegistered) {
  ASSERT_NE(Values::Find("two"), nullptr);
  EXPECT_EQ(Values::Find("two")->value, 2);
  EXPECT_EQ(Values::Find("four"), nullptr);
  EXPECT_EQ(Values::All().size(), 3U);
  EXPECT_EQ(Values::Names(" or "), "one, three or two");
}

TEST(RegistryTest, RefusesANameTwice) { EXPECT_DEATH(Values::Add({"one", 4}), "'one' is registered twice"); }

}  // namespace
}  // namespace oe::registry_test
