#include "oe_runtime/core/data/text_rows.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cmath>
#include <limits>

namespace oe {
namespace {

struct Parsed {
  std::vector<float> labels, dense;
  std::vector<int64_t> ids;
  size_t capacity = 0, rows = 0;
  std::vector<BrokenLine> broken;

  Parsed(std::string_view text, const CriteoLayout& layout)
      : labels(CountLines(text)),
        dense(labels.size() * kCriteoIntegers),
        ids(labels.size() * kCriteoCategories),
        capacity(labels.size()) {
    rows = ParseCriteo(text, layout, {capacity, labels.data(), dense.data(), ids.data()}, &broken);
  }
  int64_t id(size_t row, size_t field) const { return ids[field * capacity + row]; }
};

float Log1p(size_t value) { return static_cast<float>(std::log1p(static_cast<double>(value))); }

// A line with these fields, and 0 for the label and nothing for others.
std::string Line(const std::vector<std::pair<size_t, std::string>>& fields, char delimiter = '\t') {
  std::vector<std::string> all(kCriteoColumns);
  all[0] = "0";
  for (const auto& [column, text] : fields) all[column] = text;
  std::string line;
  for (const std::string& text : all) line += text + delimiter;
  line.back() = '\n';
  return line;
}

TEST(CriteoTest, ValuesOfALine) {
  const std::string text =
      Line({{0, "1"}, {1, "5"}, {2, "-2"}, {3, "100000"}, {4, "7.0"}, {14, "68fd1e64"}, {39, "x"}});
  CriteoLayout layout;
  layout.cardinalities[0] = 1000;
  const Parsed parsed(text, layout);
  ASSERT_EQ(parsed.rows, 1U);
  EXPECT_EQ(parsed.labels[0], 1.0F);
  EXPECT_EQ(parsed.dense[0], Log1p(5));
  EXPECT_EQ(parsed.dense[1], -Log1p(2));
  EXPECT_EQ(parsed.dense[2], Log1p(100000));
  EXPECT_EQ(parsed.dense[3], Log1p(7));
  EXPECT_EQ(parsed.dense[4], 0.0F);
  EXPECT_EQ(parsed.id(0, 0), 1 + static_cast<int64_t>(XXH3_64bits("68fd1e64", 8) % 1000));
  EXPECT_EQ(parsed.id(0, 1), 0);
  EXPECT_EQ(parsed.id(0, 25), 1 + static_cast<int64_t>(XXH3_64bits("x", 1) % layout.cardinalities[25]));
}

TEST(CriteoTest, NormalisedIntegers) {
  const std::vector<int64_t> values = {0, 1, -3, 5000, -123456789, std::numeric_limits<int64_t>::min()};
  std::vector<float> out(values.size());
  Normalise(values.data(), values.size(), out.data());
  EXPECT_EQ(out, (std::vector<float>{0, Log1p(1), -Log1p(3), Log1p(5000), -Log1p(123456789),
                                     -Log1p(size_t{1} << 63)}));
}

// Lines of every length, so that ends fall on every place of a chunk; the last has no line end.
TEST(CriteoTest, LinesLieAnywhere) {
  std::string text;
  for (size_t i = 0; i < 300; ++i) {
    text += Line({{0, std::to_string(i % 2)}, {1, std::to_string(i)}, {20, std::string(i, 'a')}});
    if (i % 3 == 0) text.insert(text.size() - 1, "\r");
  }
  text.pop_back();
  const Parsed parsed(text, {});
  ASSERT_EQ(parsed.rows, 300U);
  for (size_t i = 0; i < 300; ++i) {
    EXPECT_EQ(parsed.labels[i], static_cast<float>(i % 2));
    EXPECT_EQ(parsed.dense[i * kCriteoIntegers], Log1p(i));
    const std::string category(i, 'a');
    const auto hash = XXH3_64bits(category.data(), i) % CriteoLayout().cardinalities[0];
    EXPECT_EQ(parsed.id(i, 6), i == 0 ? 0 : 1 + static_cast<int64_t>(hash));
  }
}

TEST(CriteoTest, BrokenLinesAreLeftOutAndNamed) {
  const std::string good = Line({{0, "1"}});
  const std::string text = good + "\n" + Line({{0, "2"}}) + Line({{3, "1e5"}}) + "1\t2\n" +
                           Line({{5, std::string(1, '\0')}}) + Line({{30, std::string(kMaxLineBytes, 'a')}}) +
                           Line({{1, "9223372036854775808"}}) + Line({{2, "-"}}) + Line({{13, "7.5"}}) +
                           Line({{13, "\xff 5678901234567890123"}}) + good;
  const Parsed parsed(text, {});
  EXPECT_EQ(parsed.rows, 2U);
  EXPECT_EQ(parsed.labels[1], 1.0F);
  std::vector<std::string> problems;
  for (const BrokenLine& one : parsed.broken) {
    EXPECT_EQ(one.line, problems.size() + 1);
    problems.push_back(one.problem);
  }
  EXPECT_EQ(problems,
            (std::vector<std::string>{
                "found 0 columns, expected 40", "the label is '2', expected 0 or 1",
                "I3 is '1e5', expected an integer or nothing", "found 2 columns, expected 40",
                "the line has a NUL byte", "the line has more than 1048576 bytes",
                "I1 is '9223372036854775808', expected an integer or nothing",
                "I2 is '-', expected an integer or nothing", "I13 is '7.5', expected an integer or nothing",
                "I13 is '\\xff 567890123456789012…', expected an integer or nothing"}));
}

TEST(CriteoTest, CommasQuotesAndOtherOrders) {
  CriteoLayout layout;
  layout.delimiter = ',';
  layout.quotes = true;
  const Parsed parsed(Line({{1, "\"12\""}, {14, "\"a,\"\"b\"\"\""}, {15, "a\"b"}, {39, "\"\""}}, ',') +
                          Line({{14, "\"a"}}, ',') + Line({{14, "\"a\"b"}}, ','),
                      layout);
  ASSERT_EQ(parsed.rows, 1U);
  EXPECT_EQ(parsed.dense[0], Log1p(12));
  EXPECT_EQ(parsed.id(0, 0), 1 + static_cast<int64_t>(XXH3_64bits("a,\"b\"", 5) % layout.cardinalities[0]));
  EXPECT_EQ(parsed.id(0, 1), 1 + static_cast<int64_t>(XXH3_64bits("a\"b", 3) % layout.cardinalities[0]));
  EXPECT_EQ(parsed.id(0, 25), 0);
  ASSERT_EQ(parsed.broken.size(), 2U);
  EXPECT_EQ(parsed.broken[1].problem, "a quoted field does not end where its quote does");

  CriteoLayout reversed;
  for (size_t i = 0; i < kCriteoColumns; ++i) reversed.places[i] = kCriteoColumns - 1 - i;
  const Parsed turned(Line({{0, "z"}, {38, "3"}, {39, "1"}}), reversed);
  ASSERT_EQ(turned.rows, 1U);
  EXPECT_EQ(turned.labels[0], 1.0F);
  EXPECT_EQ(turned.dense[0], Log1p(3));
  EXPECT_EQ(turned.id(0, 25), 1 + static_cast<int64_t>(XXH3_64bits("z", 1) % layout.cardinalities[0]));
}

}  // namespace
}  // namespace oe
