#include "oe_runtime/core/data/text_rows.h"

#include <algorithm>

#include "oe_runtime/core/fuzz/targets.h"

namespace oe {
namespace {

struct Parsed {
  std::vector<float> labels, dense;
  std::vector<int64_t> ids;
  size_t capacity, rows;
  std::vector<BrokenLine> broken;
};

Parsed Parse(std::string_view text, const CriteoLayout& layout) {
  Parsed parsed;
  parsed.capacity = CountLines(text);
  parsed.labels.resize(parsed.capacity);
  parsed.dense.resize(parsed.capacity * kCriteoIntegers);
  parsed.ids.resize(parsed.capacity * kCriteoCategories);
  parsed.rows = ParseCriteo(text, layout,
                            {parsed.capacity, parsed.labels.data(), parsed.dense.data(), parsed.ids.data()},
                            &parsed.broken);
  Require(parsed.rows + parsed.broken.size() == parsed.capacity);
  return parsed;
}

CriteoLayout LayoutOf(uint8_t byte) {
  CriteoLayout layout;
  layout.cardinalities.fill(1 + (byte >> 4));
  if (byte & 1) {
    layout.delimiter = ',';
    layout.quotes = true;
  }
  if (byte & 2) {  // another order, and a column that is passed over
    layout.columns = kCriteoColumns + 1;
    for (size_t i = 0; i < kCriteoColumns; ++i) layout.places[i] = kCriteoColumns - i;
  }
  return layout;
}

}  // namespace

// Each line alone must give what it gives among the others, wherever it lies.
void FuzzCriteo(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const CriteoLayout layout = LayoutOf(data[0]);
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
      Require(std::equal(one.dense.begin(), one.dense.end(), &all.dense[row * kCriteoIntegers]));
      for (size_t i = 0; i < kCriteoCategories; ++i) {
        const int64_t id = all.ids[i * all.capacity + row];
        Require(id == one.ids[i] && id >= 0 && static_cast<uint64_t>(id) <= layout.cardinalities[i]);
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
      if (i % 5 != 0) text += i <= kCriteoIntegers ? std::to_string(i * i * i) : category;
    }
    return text;
  };
  return {
      {"tsv",
       '\x70' + line('\t', kCriteoColumns, "68fd1e64") + "\n" + line('\t', kCriteoColumns, "0b") + "\r\n"},
      {"csv", '\x01' + line(',', kCriteoColumns, "\"a,\"\"b\"") + "\n" + line(',', kCriteoColumns, "x")},
      {"reordered", '\x02' + line('\t', kCriteoColumns + 1, "1") + "\n\n"},
  };
}

}  // namespace oe
