#include "oe_runtime/core/data/text_rows.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>

namespace oe::text_rows_test {
namespace {

constexpr size_t kIntegers = 13, kCategories = 26, kColumns = 40;

// The columns of Criteo's data sets.
TextLayout Criteo() {
  TextLayout layout;
  layout.columns = kColumns;
  for (size_t i = 0; i < kIntegers; ++i) {
    layout.numbers.push_back({1 + i, "I" + std::to_string(1 + i), true, Scale::kLog1p, 0, 1, 0});
  }
  for (size_t i = 0; i < kCategories; ++i) layout.categories.push_back({1 + kIntegers + i});
  return layout;
}

struct Parsed {
  std::vector<float> labels, dense, weights;
  std::vector<int64_t> ids;
  size_t capacity = 0, rows = 0;
  std::vector<BrokenLine> broken;

  Parsed(std::string_view text, const TextLayout& layout)
      : labels(CountLines(text)),
        dense(labels.size() * layout.numbers.size()),
        weights(labels.size()),
        ids(labels.size() * layout.ids()),
        capacity(labels.size()) {
    rows =
        ParseRows(text, layout, {capacity, labels.data(), dense.data(), ids.data(), weights.data()}, &broken);
  }
  int64_t id(size_t row, size_t field) const { return ids[field * capacity + row]; }
};

float Log1p(size_t value) { return static_cast<float>(std::log1p(static_cast<double>(value))); }

// A line with these fields, and 0 for the label and nothing for others.
std::string Line(const std::vector<std::pair<size_t, std::string>>& fields, char delimiter = '\t') {
  std::vector<std::string> all(kColumns);
  all[0] = "0";
  for (const auto& [column, text] : fields) all[column] = text;
  std::string line;
  for (const std::string& text : all) line += text + delimiter;
  line.back() = '\n';
  return line;
}

TEST(TextRowsTest, ValuesOfALine) {
  const std::string text =
      Line({{0, "1"}, {1, "5"}, {2, "-2"}, {3, "100000"}, {4, "7.0"}, {14, "68fd1e64"}, {39, "x"}});
  TextLayout layout = Criteo();
  layout.categories[0].cardinality = 1000;
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
  EXPECT_EQ(parsed.id(0, 25),
            1 + static_cast<int64_t>(XXH3_64bits("x", 1) % layout.categories[25].cardinality));
}

TEST(TextRowsTest, NormalisedIntegers) {
  const std::vector<int64_t> values = {0, 1, -3, 5000, -123456789, std::numeric_limits<int64_t>::min()};
  std::vector<float> out(values.size());
  Normalise(values.data(), values.size(), out.data());
  EXPECT_EQ(out, (std::vector<float>{0, Log1p(1), -Log1p(3), Log1p(5000), -Log1p(123456789),
                                     -Log1p(size_t{1} << 63)}));
}

// Lines of every length, so that ends fall on every place of a chunk; the last has no line end.
TEST(TextRowsTest, LinesLieAnywhere) {
  std::string text;
  for (size_t i = 0; i < 300; ++i) {
    text += Line({{0, std::to_string(i % 2)}, {1, std::to_string(i)}, {20, std::string(i, 'a')}});
    if (i % 3 == 0) text.insert(text.size() - 1, "\r");
  }
  text.pop_back();
  const Parsed parsed(text, Criteo());
  ASSERT_EQ(parsed.rows, 300U);
  for (size_t i = 0; i < 300; ++i) {
    EXPECT_EQ(parsed.labels[i], static_cast<float>(i % 2));
    EXPECT_EQ(parsed.dense[i * kIntegers], Log1p(i));
    const std::string category(i, 'a');
    const auto hash = XXH3_64bits(category.data(), i) % kMostIds;
    EXPECT_EQ(parsed.id(i, 6), i == 0 ? 0 : 1 + static_cast<int64_t>(hash));
  }
}

TEST(TextRowsTest, BrokenLinesAreLeftOutAndNamed) {
  const std::string good = Line({{0, "1"}});
  const std::string text = good + "\n" + Line({{0, "2"}}) + Line({{3, "1.5e0"}}) + "1\t2\n" +
                           Line({{5, std::string(1, '\0')}}) + Line({{30, std::string(kMaxLineBytes, 'a')}}) +
                           Line({{1, "9223372036854775808"}}) + Line({{2, "-"}}) + Line({{13, "7.5"}}) +
                           Line({{13, "\xff 5678901234567890123"}}) + good;
  const Parsed parsed(text, Criteo());
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
                "I3 is '1.5e0', expected an integer or nothing", "found 2 columns, expected 40",
                "the line has a NUL byte", "the line has more than 1048576 bytes",
                "I1 is '9223372036854775808', expected an integer or nothing",
                "I2 is '-', expected an integer or nothing", "I13 is '7.5', expected an integer or nothing",
                "I13 is '\\xff 567890123456789012…', expected an integer or nothing"}));
}

TEST(TextRowsTest, CommasQuotesAndOtherOrders) {
  TextLayout layout = Criteo();
  layout.delimiter = ',';
  layout.quotes = true;
  const Parsed parsed(Line({{1, "\"12\""}, {14, "\"a,\"\"b\"\"\""}, {15, "a\"b"}, {39, "\"\""}}, ',') +
                          Line({{14, "\"a"}}, ',') + Line({{14, "\"a\"b"}}, ','),
                      layout);
  ASSERT_EQ(parsed.rows, 1U);
  EXPECT_EQ(parsed.dense[0], Log1p(12));
  EXPECT_EQ(parsed.id(0, 0),
            1 + static_cast<int64_t>(XXH3_64bits("a,\"b\"", 5) % layout.categories[0].cardinality));
  EXPECT_EQ(parsed.id(0, 1),
            1 + static_cast<int64_t>(XXH3_64bits("a\"b", 3) % layout.categories[0].cardinality));
  EXPECT_EQ(parsed.id(0, 25), 0);
  ASSERT_EQ(parsed.broken.size(), 2U);
  EXPECT_EQ(parsed.broken[1].problem, "a quoted field does not end where its quote does");

  TextLayout reversed = Criteo();
  reversed.label = kColumns - 1;
  for (NumberColumn& column : reversed.numbers) column.place = kColumns - 1 - column.place;
  for (CategoryColumn& column : reversed.categories) column.place = kColumns - 1 - column.place;
  const Parsed turned(Line({{0, "z"}, {38, "3"}, {39, "1"}}), reversed);
  ASSERT_EQ(turned.rows, 1U);
  EXPECT_EQ(turned.labels[0], 1.0F);
  EXPECT_EQ(turned.dense[0], Log1p(3));
  EXPECT_EQ(turned.id(0, 25),
            1 + static_cast<int64_t>(XXH3_64bits("z", 1) % layout.categories[0].cardinality));
}

int64_t IdOf(std::string_view value, uint64_t cardinality) {
  return 1 + static_cast<int64_t>(XXH3_64bits(value.data(), value.size()) % cardinality);
}

// Scales, fractions, several values of a column, weights; in the order of any file.
TEST(TextRowsTest, AnyColumns) {
  TextLayout layout;
  layout.delimiter = ',';
  layout.columns = 7;
  layout.label = 2;
  layout.weight = 6;
  layout.numbers = {{0, "price", false, Scale::kLog1p, 0, 1, 0},
                    {1, "age", false, Scale::kLinear, 20, 40, -0.5F}};
  layout.categories = {{3, 100}, {4, 50, '|', 3, false, false}, {5, 50, ' ', 3, true, true}};
  const Parsed parsed(
      "2.5,30,1,a,x|y,p q r s,0.5\n"
      "-1e3,,0,,,,2\n"
      "7,20.5,0,b,|x||y|z|w,p,1\n",
      layout);
  EXPECT_TRUE(parsed.broken.empty());
  ASSERT_EQ(parsed.rows, 3U);
  EXPECT_EQ(parsed.labels, (std::vector<float>{1, 0, 0}));
  EXPECT_EQ(parsed.weights, (std::vector<float>{0.5F, 2, 1}));
  EXPECT_EQ(parsed.dense, (std::vector<float>{static_cast<float>(std::log1p(2.5)), 0.25F, -Log1p(1000), -0.5F,
                                              Log1p(7), static_cast<float>(0.5 / 40)}));
  std::vector<int64_t> rows;
  for (size_t row = 0; row < 3; ++row) {
    for (size_t field = 0; field < 7; ++field) rows.push_back(parsed.id(row, field));
  }
  const auto of = [](std::string_view value) { return IdOf(value, 50); };
  EXPECT_EQ(rows, (std::vector<int64_t>{IdOf("a", 100),
                                        of("x"),
                                        of("y"),
                                        0,
                                        of("q"),
                                        of("r"),
                                        of("s"),  //
                                        0,
                                        0,
                                        0,
                                        0,
                                        0,
                                        0,
                                        0,  //
                                        IdOf("b", 100),
                                        of("x"),
                                        of("y"),
                                        of("z"),
                                        0,
                                        0,
                                        of("p")}));
}

TEST(TextRowsTest, WrongNumbersAndWeightsAreNamed) {
  TextLayout layout;
  layout.columns = 3;
  layout.weight = 2;
  layout.numbers = {{1, "price", false, Scale::kLinear, 0, 1, 0}};
  const Parsed parsed("0\tinf\t1\n0\t1,5\t1\n0\t+1\t1\n0\t1e999\t1\n0\t1\t\n0\t1\t-1\n0\t1\tnan\n", layout);
  EXPECT_EQ(parsed.rows, 0U);
  std::vector<std::string> problems;
  for (const BrokenLine& one : parsed.broken) problems.push_back(one.problem);
  EXPECT_EQ(
      problems,
      (std::vector<std::string>{
          "price is 'inf', expected a number or nothing", "price is '1,5', expected a number or nothing",
          "price is '+1', expected a number or nothing", "price is '1e999', expected a number or nothing",
          "the weight is '', expected a number from 0", "the weight is '-1', expected a number from 0",
          "the weight is 'nan', expected a number from 0"}));
}

TEST(TextRowsTest, FractionsAreRoundedOnce) {
  TextLayout layout;
  layout.columns = 2;
  layout.numbers = {{1, "n", false, Scale::kLinear, 0, 1, 0}};
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string text = std::to_string(random() >> (random() % 64));
    if (random() % 4 != 0) text.insert(random() % (text.size() + 1), ".");
    if (random() % 2 != 0) text = "-" + text;
    const Parsed parsed("0\t" + text, layout);
    ASSERT_EQ(parsed.rows, 1) << text;
    ASSERT_EQ(parsed.dense[0], static_cast<float>(std::strtod(text.c_str(), nullptr))) << text;
  }
  for (const char* text : {".", "-", "-.", "1..2", "1.2.", "+1", "1,5", "--1", "0x1", "1e999", "nan"}) {
    EXPECT_EQ(Parsed(std::string("0\t") + text, layout).rows, 0) << text;
  }
}

TEST(TextRowsTest, OtherLabelsAndWordsForMissingValues) {
  TextLayout layout;
  layout.columns = 4;
  layout.positive = "yes";
  layout.missing = {"NA", "-1"};
  layout.numbers = {{1, "n", false, Scale::kLinear, 0, 1, 7}};
  layout.categories = {{2, 100}, {3, 100, '|', 2, false, false}};
  const Parsed parsed("yes\t-1\tNA\tNA|a|-1|b\nno\t1\tNAN\tNA\nNA\t1\tx\tx\n\t1\tx\tx\n", layout);
  EXPECT_EQ(parsed.rows, 2);
  EXPECT_EQ(parsed.labels[0], 1);
  EXPECT_EQ(parsed.labels[1], 0);
  EXPECT_EQ(parsed.dense[0], 7);
  EXPECT_EQ(parsed.dense[1], 1);
  EXPECT_EQ(parsed.id(0, 0), 0);
  EXPECT_NE(parsed.id(1, 0), 0);
  EXPECT_NE(parsed.id(0, 1), 0);
  EXPECT_NE(parsed.id(0, 2), 0);
  EXPECT_EQ(parsed.id(1, 1), 0);
  ASSERT_EQ(parsed.broken.size(), 2);
  EXPECT_EQ(parsed.broken[0].problem, "the label is 'NA', which is no value");
}

TEST(TextRowsTest, TheTextOfAnInteger) {
  std::string scratch;
  const std::vector<std::pair<std::string, std::string>> texts = {
      {"7", "7"},
      {"7.0", "7"},
      {"-7.000", "-7"},
      {"007", "7"},
      {"-007", "-7"},
      {"-0", "0"},
      {"0.0", "0"},
      {"1e3", "1000"},
      {"-1.5e1", "-15"},
      {"true", "1"},
      {"False", "0"},
      {"99999999999999999999", "99999999999999999999"},
      {"9223372036854775807.0", "9223372036854775807"}};
  for (const auto& [text, whole] : texts) EXPECT_EQ(WholeText(text, &scratch), whole) << text;
  for (const char* text : {"", "-", ".", "7.5", "1e19", "inf", "nan", "+7", " 7", "7 ", "truE", "0x7"}) {
    EXPECT_EQ(WholeText(text, &scratch), "") << text;
  }
}

TEST(TextRowsTest, BooleansAndWholeFloatsAreNumbersAndLabels) {
  TextLayout layout;
  layout.columns = 3;
  layout.missing = {"-1"};
  layout.numbers = {{1, "n", true, Scale::kLinear, 0, 1, 7}};
  layout.categories = {{2, 100}};
  layout.categories[0].whole = true;
  layout.categories[0].name = "c";
  const Parsed parsed("1.0\tTrue\t7.0\nFALSE\t-1.0\t7\ntrue\t2e3\t-1.0\n1\t1\tx\n0.5\t1\t1\n1\t0.5\t1\n",
                      layout);
  ASSERT_EQ(parsed.rows, 3);
  EXPECT_EQ(std::vector<float>(parsed.labels.begin(), parsed.labels.begin() + 3),
            (std::vector<float>{1, 0, 1}));
  EXPECT_EQ(std::vector<float>(parsed.dense.begin(), parsed.dense.begin() + 3),
            (std::vector<float>{1, 7, 2000}));
  EXPECT_EQ(parsed.id(0, 0), 1 + static_cast<int64_t>(XXH3_64bits("7", 1) % 100));
  EXPECT_EQ(parsed.id(1, 0), parsed.id(0, 0));
  EXPECT_EQ(parsed.id(2, 0), 0);
  ASSERT_EQ(parsed.broken.size(), 3);
  EXPECT_EQ(parsed.broken[0].problem, "c is 'x', expected an integer or nothing");
  EXPECT_EQ(parsed.broken[1].problem, "the label is '0.5', expected 0 or 1");
  EXPECT_EQ(parsed.broken[2].problem, "n is '0.5', expected an integer or nothing");
}

TEST(TextRowsTest, MissingNumbersOfEveryScale) {
  TextLayout layout;
  layout.columns = 4;
  layout.missing = {"NA", "-1", "0.5"};
  layout.positive = "2";
  layout.numbers = {{1, "log", false, Scale::kLog1p, 0, 1, 7},
                    {2, "whole", true, Scale::kLog1p, 0, 1, 8},
                    {3, "linear", false, Scale::kLinear, 1, 2, 9}};
  const Parsed parsed("2\t-1\t-1\t-1\n2.0\t-1.0\t-1.0\t-1.0\n1\tNA\t0.5\t0.50\n0\t1\t1\t1\n-1.0\t1\t1\t1\n",
                      layout);
  ASSERT_EQ(parsed.rows, 4);
  EXPECT_EQ(std::vector<float>(parsed.labels.begin(), parsed.labels.begin() + 4),
            (std::vector<float>{1, 1, 0, 0}));
  const auto log = static_cast<float>(std::log1p(1.0));
  EXPECT_EQ(std::vector<float>(parsed.dense.begin(), parsed.dense.begin() + 12),
            (std::vector<float>{7, 8, 9, 7, 8, 9, 7, 8, 9, log, log, 0}));
  ASSERT_EQ(parsed.broken.size(), 1);
  EXPECT_EQ(parsed.broken[0].problem, "the label is '-1.0', which is no value");
}

TEST(TextRowsTest, IntegersOfEverySize) {
  TextLayout layout;
  layout.columns = 3;
  layout.numbers = {{1, "log", true, Scale::kLog1p, 0, 1, 0}, {2, "linear", true, Scale::kLinear, 0, 1, 0}};
  const auto field = [](std::string_view text) { return "\t" + std::string(text); };
  std::string text;
  for (const char* value : {"9223372036854775807", "-9223372036854775808", "-9223372036854775808.0"}) {
    text += "0" + field(value) + field(value) + "\n";
  }
  const Parsed parsed(
      text + "0\t9223372036854775808\t0\n0\t0\t9223372036854775808\n0\t-9223372036854775809\t0\n", layout);
  ASSERT_EQ(parsed.rows, 3);
  const auto log = static_cast<float>(std::log1p(0x1p63));
  EXPECT_EQ(std::vector<float>(parsed.dense.begin(), parsed.dense.begin() + 6),
            (std::vector<float>{log, 0x1p63, -log, -0x1p63, -log, -0x1p63}));
  EXPECT_EQ(parsed.broken.size(), 3);
}

TEST(TextRowsTest, CategoriesOfEveryKindKeepTheirPlaces) {
  TextLayout layout;
  layout.columns = 5;
  layout.categories.resize(4);
  for (size_t i = 0; i < 4; ++i) layout.categories[i].place = i + 1;
  layout.categories[0].whole = true;
  layout.categories[1].separator = '|';
  layout.categories[1].length = 2;
  layout.categories[3].whole = true;
  layout.categories[3].separator = '|';
  const Parsed parsed("0\t7.0\ta|b\t7.0\t7.0|8\n", layout);
  const auto id = [](std::string_view text) {
    return 1 + static_cast<int64_t>(XXH3_64bits(text.data(), text.size()) % kMostIds);
  };
  ASSERT_EQ(parsed.rows, 1);
  EXPECT_EQ((std::vector<int64_t>{parsed.id(0, 0), parsed.id(0, 1), parsed.id(0, 2), parsed.id(0, 3),
                                  parsed.id(0, 4)}),
            (std::vector<int64_t>{id("7"), id("a"), id("b"), id("7.0"), id("7")}));
}

}  // namespace
}  // namespace oe::text_rows_test
