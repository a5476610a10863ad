// Text rows of Criteo's data sets: a label, 13 integers and 26 categories, empty where a value is missing.
// https://ailab.criteo.com/ressources/ describes the columns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oe {

constexpr size_t kCriteoIntegers = 13;
constexpr size_t kCriteoCategories = 26;
constexpr size_t kCriteoColumns = 1 + kCriteoIntegers + kCriteoCategories;
// A longer line is broken: a file without line ends must not be taken into memory as a whole.
constexpr size_t kMaxLineBytes = size_t{1} << 20;

// How lines are divided, and which of their columns are which.
struct CriteoLayout {
  char delimiter = '\t';
  // Whether a field may stand in double quotes, as RFC 4180 has them, but for line ends inside.
  bool quotes = false;
  size_t columns = kCriteoColumns;  // of a line; those that `places` does not name are passed over
  // The column of the label, of I1 … I13 and of C1 … C26.
  std::array<size_t, kCriteoColumns> places{};
  std::array<uint64_t, kCriteoCategories> cardinalities{};  // each at least 1

  CriteoLayout() {
    for (size_t i = 0; i < kCriteoColumns; ++i) places[i] = i;
    cardinalities.fill(~uint64_t{0} >> 1);
  }
};

// Where rows go; each array has room for `capacity` of them.
struct CriteoRows {
  size_t capacity;
  float* labels;  // (capacity)
  float* dense;   // (capacity, 13): sign(x) log1p(|x|), 0 where missing
  int64_t* ids;   // (26, capacity): 1 + XXH3-64(text) modulo the field's cardinality, 0 where missing
};

struct BrokenLine {
  size_t line;  // from 0
  std::string problem;
};

// Integers as models take them: sign(x) log1p(|x|), the counts being heavy-tailed.
void Normalise(const int64_t* values, size_t count, float* out);

// Lines of a text: a last one needs no line end.
size_t CountLines(std::string_view text);

// Parses every line of `text` into the next row of `rows`, which has room for all; returns the number of
// rows. Lines that are no row are left out, appended to `broken` and pass for nothing else. A line ends in LF
// or CRLF.
size_t ParseCriteo(std::string_view text, const CriteoLayout& layout, const CriteoRows& rows,
                   std::vector<BrokenLine>* broken);

// The fields of one line without its end, as ParseCriteo divides it: for a header. False where a quote is not
// closed; `scratch` holds the text of fields that had quotes inside.
bool SplitLine(std::string_view line, const CriteoLayout& layout, std::vector<std::string_view>* fields,
               std::string* scratch);

}  // namespace oe
