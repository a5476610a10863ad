#include <algorithm>

#include "oe_runtime/core/data/text_rows.h"
#include "tests/fuzz/targets.h"

namespace oe {
namespace {

constexpr size_t kNumbers = 13, kCategories = 26, kColumns = 40;

struct Parsed {
  std::vector<float> labels, dense, weights;
  std::vector<int64_t> ids;
  size_t capacity, rows;
  std::vector<BrokenLine> broken;
};

Parsed Parse(std::string_view text, const TextLayout& layout) {
  Parsed parsed;
  parsed.capacity = CountLines(text);
  parsed.labels.resize(parsed.capacity);
  parsed.weights.resize(parsed.capacity);
  parsed.dense.resize(parsed.capacity * layout.numbers.size());
  parsed.ids.resize(parsed.capacity * layout.ids());
  parsed.rows = ParseRows(
      text, layout,
      {parsed.capacity, parsed.labels.data(), parsed.dense.data(), parsed.ids.data(), parsed.weights.data()},
      &parsed.broken);
  Require(parsed.rows + parsed.broken.size() == parsed.capacity);
  return parsed;
}

TextLayout LayoutOf(uint8_t byte) {
  TextLayout layout;
  const uint64_t cardinality = 1 + (byte >> 4);
  if (byte & 1) {
    layout.delimiter = ',';
    layout.quotes = true;
  }
  // Another order, and a column that is passed over.
  const bool turned = (byte & 2) != 0;
  const auto place = [&](size_t column) { return turned ? kColumns - column : column; };
  layout.columns = turned ? kColumns + 1 : kColumns;
  if (byte & 4) {  // few columns: fractions, a weight, several values
    layout.columns = turned ? kColumns + 1 : 6;
    layout.weight = place(1);
    layout.numbers = {{place(2), "n", false, Scale::kLog1p, 0, 1, 0},
                      {place(3), "m", false, Scale::kLinear, 1, 3, 0}};
    layout.categories = {{place(4), cardinality, '|', 3, false, true},
                         {place(5), cardinality, ' ', 2, true, false}};
    if (turned) layout.missing = {"NA", "-1"};
    if (turned && cardinality > 8) layout.positive = cardinality > 12 ? "1.0" : "yes";
    layout.categories[cardinality % 2].whole = cardinality > 4;
  } else {
    for (size_t i = 0; i < kNumbers; ++i) {
      layout.numbers.push_back({place(1 + i), "I", true, Scale::kLog1p, 0, 1, 0});
    }
    for (size_t i = 0; i < kCategories; ++i) {
      layout.categories.push_back({place(1 + kNumbers + i), cardinality});
    }
  }
  layout.label = place(0);
  return layout;
}

}  // namespace

// Each line alone must give what it gives among the others, wherever it lies.
void FuzzCriteo(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const TextLayout layout = LayoutOf(data[0]);
  const Buffer copy = CopyOf(data + 1, size - 1);
  const std::string_view text(reinterpret_cast<const char*>(copy.data()), copy.size());
  const Parsed all = Parse(text, layout);
  size_t row = 0;
  size_t line = 0;
  for (size_t at = 0; at < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const Parsed one = Parse(text.substr(at, end - at), layout);
    if (end > at && one.rows == 0) {
      const size_t number = line - row;
      Require(all.broken[number].line == line && all.broken[number].problem == one.broken[0].problem);
    } else if (end > at) {
      Require(one.rows == 1 && all.labels[row] == one.labels[0]);
      Require(std::equal(one.dense.begin(), one.dense.end(), all.dense.data() + row * layout.numbers.size()));
      Require(all.weights[row] == one.weights[0]);
      for (size_t i = 0; i < layout.ids(); ++i) {
        const int64_t id = all.ids[i * all.capacity + row];
        Require(id == one.ids[i] && id >= 0 && static_cast<uint64_t>(id) <= layout.categories[0].cardinality);
      }
      ++row;
    } else {
      Require(all.broken[line - row].line == line);  // an empty line
    }
    at = end + 1;
  }
  Require(row == all.rows && line == all.capacity);
}

std::vector<std::pair<std::string, std::string>> CriteoSeeds() {
  const auto line = [](char delimiter, size_t columns, const std::string& category) {
    std::string text = "1";
    for (size_t i = 1; i < columns; ++i) {
      text += delimiter;
      if (i % 5 != 0) text += i <= kNumbers ? std::to_string(i * i * i) : category;
    }
    return text;
  };
  return {
      {"tsv", '\x70' + line('\t', kColumns, "68fd1e64") + "\n" + line('\t', kColumns, "0b") + "\r\n"},
      {"csv", '\x01' + line(',', kColumns, "\"a,\"\"b\"") + "\n" + line(',', kColumns, "x")},
      {"few", std::string("\x74") + "1\t0.5\t-2.5e3\t7\ta|b||c|d\tx y z\n0\t1\t\t\t\t\n"},
      {"reordered", '\x02' + line('\t', kColumns + 1, "1") + "\n\n"},
  };
}

}  // namespace oe
