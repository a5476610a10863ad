// Text rows of training data: a label, numbers and categories, empty where a value is missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace oe {

// A longer line is broken: a file without line ends must not be taken into memory as a whole.
constexpr size_t kMaxLineBytes = size_t{1} << 20;
// Ids of a category are 1 to its cardinality, which is at most this.
constexpr uint64_t kMostIds = ~uint64_t{0} >> 1;

enum class Scale : uint8_t {
  kLog1p,   // sign(x) log1p(|x|), for heavy-tailed counts
  kLinear,  // (x - shift) / divisor
};

struct NumberColumn {
  size_t place = 0;    // the column of a line
  std::string name;    // for messages
  bool whole = false;  // whether a fraction is an error
  Scale scale = Scale::kLog1p;
  double shift = 0;
  double divisor = 1;
  float missing = 0;  // what an empty field becomes
};

struct CategoryColumn {
  size_t place = 0;
  uint64_t cardinality = kMostIds;  // at least 1
  // Between the values of a field; NUL: a field is one value. Empty values are left out.
  char separator = '\0';
  size_t length = 1;        // ids of a row; further values are dropped
  bool pad_before = false;  // where a row has fewer values: zeros before them, not after
  bool keep_last = false;   // where it has more: the last ones, not the first
};

// How lines are divided, and which of their columns are which.
struct TextLayout {
  char delimiter = '\t';
  // Whether a field may stand in double quotes, as RFC 4180 has them, but for line ends inside.
  bool quotes = false;
  size_t columns = 0;  // of a line; those that nothing below names are passed over
  size_t label = 0;
  std::vector<NumberColumn> numbers;
  std::vector<CategoryColumn> categories;
  std::optional<size_t> weight;
  // The label of a positive row; all others are 0. Empty: labels are 0 and 1.
  std::string positive;
  std::vector<std::string> missing;  // fields that count as empty, besides empty ones

  size_t ids() const {
    size_t all = 0;
    for (const CategoryColumn& column : categories) all += column.length;
    return all;
  }
};

// Where rows go; each array has room for `capacity` of them.
struct TextRows {
  size_t capacity;
  float* labels;   // (capacity)
  float* dense;    // (capacity, numbers)
  int64_t* ids;    // (layout.ids(), capacity): 1 + XXH3-64(text) modulo the cardinality, 0 where missing
  float* weights;  // (capacity); unused where the layout has none
};

struct BrokenLine {
  size_t line;  // from 0
  std::string problem;
};

// Integers as models take them: sign(x) log1p(|x|), the counts being heavy-tailed.
void Normalise(const int64_t* values, size_t count, float* out);

// A number as models take it, rounded once.
float Scaled(double value, const NumberColumn& column);

// Lines of a text: a last one needs no line end.
size_t CountLines(std::string_view text);

// Parses every line of `text` into the next row of `rows`, which has room for all; returns the number of
// rows. Lines that are no row are left out, appended to `broken` and pass for nothing else. A line ends in LF
// or CRLF.
size_t ParseRows(std::string_view text, const TextLayout& layout, const TextRows& rows,
                 std::vector<BrokenLine>* broken);

// The fields of one line without its end, as ParseRows divides it: for a header. False where a quote is not
// closed; `scratch` holds the text of fields that had quotes inside.
bool SplitLine(std::string_view line, const TextLayout& layout, std::vector<std::string_view>* fields,
               std::string* scratch);

}  // namespace oe
