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
  bool whole = false;       // values are integers, and their decimal text is hashed: 7.0 is 7, true is 1
  std::string name{};       // for messages
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
  // Fields that count as empty, besides empty ones. Among numbers, all that are equal: -1.0 is -1.
  std::vector<std::string> missing;

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

// The number of a text: a finite one, or true or false (1 or 0), in small letters, capitals or with one
// capital.
std::optional<double> NumberOf(std::string_view text);

// The decimal text of an integer up to 63 bits, or of more digits: that of "7.0", "007" and "7e0" is "7".
// Empty if the text is none. It may lie in `scratch`.
std::string_view WholeText(std::string_view text, std::string* scratch);

// 1 + XXH3-64(value) modulo the cardinality.
int64_t HashedId(std::string_view value, uint64_t cardinality);

// Ids of values that are integers, by their decimal text.
class WholeIds {
 public:
  explicit WholeIds(const std::vector<std::string>& missing);

  // 0 if the value is empty or its integer among `missing`; -1 if it is no integer.
  int64_t IdOf(std::string_view value, uint64_t cardinality);

 private:
  std::vector<std::string> missing_;
  std::string scratch_;
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
