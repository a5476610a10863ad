#include "oe_runtime/core/data/text_rows.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace oe {
namespace {

constexpr size_t kChunk = 64;

// What 64 bytes have: a bit for each that ends a field, and whether a line needs a closer look.
struct ChunkMarks {
  uint64_t ends;
  bool special;
};

#ifdef __AVX2__
ChunkMarks Mark(const char* text, char delimiter, char quote) {
  ChunkMarks marks{0, false};
  __m256i special = _mm256_setzero_si256();
  for (size_t half = 0; half < 2; ++half) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(text + 32 * half));
    const __m256i found = _mm256_or_si256(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(delimiter)),
                                          _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8('\n')));
    special = _mm256_or_si256(special, _mm256_or_si256(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()),
                                                       _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(quote))));
    marks.ends |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(found))) << (32 * half);
  }
  marks.special = _mm256_movemask_epi8(special) != 0;
  return marks;
}
#else
ChunkMarks Mark(const char* text, char delimiter, char quote) {
  ChunkMarks marks{0, false};
  for (size_t i = 0; i < kChunk; ++i) {
    const char c = text[i];
    marks.ends |= static_cast<uint64_t>(c == delimiter || c == '\n') << i;
    marks.special |= c == '\0' || c == quote;
  }
  return marks;
}
#endif

std::string Shown(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, 20)) {
    if (c >= ' ' && c <= '~') {
      shown += c;
    } else {
      constexpr char kDigits[] = "0123456789abcdef";
      const auto byte = static_cast<uint8_t>(c);
      shown += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return shown + (text.size() > 20 ? "…" : "");
}

// In double precision, so that the result is rounded once: libraries differ in the last bit of log1pf.
float Log1p(uint64_t value) { return static_cast<float>(std::log1p(static_cast<double>(value))); }

// Of the first counts, which most values are.
const std::array<float, 4096>& SmallLogs() {
  static const auto kLogs = [] {
    std::array<float, 4096> logs{};
    for (size_t i = 0; i < logs.size(); ++i) logs[i] = Log1p(i);
    return logs;
  }();
  return kLogs;
}

float Log1p(uint64_t value, const std::array<float, 4096>& logs) {
  return value < logs.size() ? logs[value] : Log1p(value);
}

struct Integer {
  uint64_t size;  // up to 2^63 - 1, and 2^63 if negative
  bool negative;

  double value() const { return negative ? -static_cast<double>(size) : static_cast<double>(size); }
};

// False if the text is none. "7.0" is one: pandas writes integers so in columns that miss some.
bool ParseInteger(std::string_view text, Integer* out) {
  const bool negative = !text.empty() && text.front() == '-';
  size_t i = negative ? 1 : 0;
  const size_t first = i;
  uint64_t value = 0;
  for (; i < text.size(); ++i) {
    const auto digit = static_cast<uint8_t>(text[i] - '0');
    if (digit > 9) break;
    if (value > (~uint64_t{0} >> 1) / 10) return false;
    value = value * 10 + digit;
  }
  if (i == first || value > (~uint64_t{0} >> 1) + (negative ? 1 : 0)) return false;
  if (i < text.size()) {
    if (text[i] != '.' || text.find_first_not_of('0', i + 1) != std::string_view::npos) return false;
  }
  *out = {value, negative};
  return true;
}

// Digits with a point, at most 15 of them: as a quotient of two numbers that doubles have exactly, it is
// rounded once, as by from_chars, and three times as fast. False for others.
bool ParseDecimal(std::string_view text, double* out) {
  constexpr std::array<double, 16> kPowers = {1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                              1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
  const bool negative = !text.empty() && text.front() == '-';
  if (negative) text.remove_prefix(1);
  const size_t point = std::min(text.find('.'), text.size());
  const size_t digits = text.size() - (point < text.size() ? 1 : 0);
  if (digits == 0 || digits > 15) return false;
  uint64_t value = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == point) continue;
    const auto digit = static_cast<uint8_t>(text[i] - '0');
    if (digit > 9) return false;
    value = value * 10 + digit;
  }
  const double size = static_cast<double>(value) / kPowers[digits - point];
  *out = negative ? -size : size;
  return true;
}

// False if the text is no finite number.
bool ParseDouble(std::string_view text, double* out) {
  if (ParseDecimal(text, out)) return true;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto [stop, error] = std::from_chars(begin, end, *out);
  return error == std::errc() && stop == end && std::isfinite(*out);
}

// true or false, as pandas, Spark, R and Excel write them.
std::optional<bool> BooleanOf(std::string_view text) {
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  return std::nullopt;
}

bool IsWhole(double value) { return value == std::trunc(value) && std::abs(value) < 0x1p63; }

bool ParseWeight(std::string_view text, float* out) {
  const std::optional<double> weight = NumberOf(text);
  if (!weight || *weight < 0) return false;
  *out = static_cast<float>(*weight);
  return std::isfinite(*out);
}

bool Contains(const std::vector<double>& numbers, double value) {
  return std::find(numbers.begin(), numbers.end(), value) != numbers.end();
}

inline int64_t Hashed(std::string_view value, uint64_t cardinality) {
  return 1 + static_cast<int64_t>(XXH3_64bits(value.data(), value.size()) % cardinality);
}

// kHasMissing: some words count as missing. Most layouts have none, and then no field is compared with any.
template <bool kHasMissing>
class Parser {
 public:
  Parser(const TextLayout& layout, const TextRows& rows, std::vector<BrokenLine>* broken)
      : layout_(layout),
        rows_(rows),
        broken_(broken),
        logs_(SmallLogs()),
        positive_(NumberOf(layout.positive)),
        whole_ids_(layout.missing),
        ends_(layout.columns) {
    for (const std::string& word : layout.missing) {
      missing_sizes_ |= uint64_t{1} << std::min<size_t>(word.size(), 63);
      if (const auto number = NumberOf(word)) missing_numbers_.push_back(*number);
    }
    int64_t* ids = rows.ids;
    for (const CategoryColumn& column : layout.categories) {
      if (column.separator == '\0' && !column.whole) {
        texts_.push_back({column.place, column.cardinality, ids});
      } else {
        others_.emplace_back(&column, ids);
      }
      ids += column.length * rows.capacity;
    }
  }

  size_t Parse(std::string_view text) {
    const char quote = layout_.quotes ? '"' : '\0';
    const char* base = text.data();
    size_t line_begin = 0;
    size_t count = 0;  // fields of the line so far
    bool special = false;
    for (size_t at = 0; at < text.size(); at += kChunk) {
      char padded[kChunk];
      const size_t left = text.size() - at;
      const char* chunk = base + at;
      if (left < kChunk) {
        std::memset(padded, ' ', kChunk);
        std::memcpy(padded, chunk, left);
        chunk = padded;
      }
      const ChunkMarks marks = Mark(chunk, layout_.delimiter, quote);
      special |= marks.special;
      for (uint64_t bits = marks.ends; bits != 0; bits &= bits - 1) {
        const auto bit = static_cast<size_t>(__builtin_ctzll(bits));
        const size_t end = at + bit;
        if (count < ends_.size()) ends_[count] = end;
        ++count;
        if (chunk[bit] != '\n') continue;
        Line(text.substr(line_begin, end - line_begin), line_begin, count, special);
        line_begin = end + 1;
        count = 0;
        special = marks.special;
      }
    }
    if (line_begin < text.size()) {
      if (count < ends_.size()) ends_[count] = text.size();
      Line(text.substr(line_begin), line_begin, count + 1, special);
    }
    return row_;
  }

 private:
  // `begin` is where the line begins in the text, as `ends_` counts; `special`: it may have quotes or NULs.
  void Line(std::string_view line, size_t begin, size_t columns, bool special) {
    std::string problem;
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.size() > kMaxLineBytes) {
      problem = "the line has more than " + std::to_string(kMaxLineBytes) + " bytes";
    } else if (special && NeedsSplit(line)) {
      problem = Divided(line);
    } else if (columns != layout_.columns) {
      problem = ColumnsProblem(line, columns);
    } else {
      problem = Row([&](size_t column) {
        const size_t from = column == 0 ? 0 : ends_[column - 1] - begin + 1;
        const size_t to = std::min(ends_[column] - begin, line.size());  // without a carriage return
        return std::string_view(line.data() + from, to - from);
      });
    }
    if (problem.empty()) {
      ++row_;
    } else {
      broken_->push_back({line_, std::move(problem)});
    }
    ++line_;
  }

  bool NeedsSplit(std::string_view line) const {
    return line.find('\0') != std::string_view::npos ||
           (layout_.quotes && line.find('"') != std::string_view::npos);
  }

  // A line with quotes or NULs.
  std::string Divided(std::string_view line) {
    if (line.find('\0') != std::string_view::npos) return "the line has a NUL byte";
    if (!SplitLine(line, layout_, &fields_, &scratch_))
      return "a quoted field does not end where its quote does";
    if (fields_.size() != layout_.columns) return ColumnsProblem(line, fields_.size());
    return Row([&](size_t column) { return fields_[column]; });
  }

  std::string ColumnsProblem(std::string_view line, size_t columns) const {
    std::string problem = "found " + std::to_string(line.empty() ? 0 : columns) + " columns, expected " +
                          std::to_string(layout_.columns);
    if (columns == 1 && !line.empty()) {
      problem += layout_.delimiter == '\t' ? "; are the columns tab-separated?"
                                           : "; are the columns comma-separated?";
    }
    return problem;
  }

  // Writes the row; what is wrong with it, or nothing.
  template <typename Field>
  std::string Row(const Field& field) {
    const std::string_view label = field(layout_.label);
    if (!layout_.positive.empty()) {
      if (!ParsePositive(label, &rows_.labels[row_])) {
        return "the label is '" + Shown(label) + "', which is no value";
      }
    } else if (label.size() == 1 && (label[0] == '0' || label[0] == '1')) {
      rows_.labels[row_] = static_cast<float>(label[0] - '0');
    } else if (const auto number = NumberOf(label); number == 0 || number == 1) {
      rows_.labels[row_] = static_cast<float>(*number);
    } else {
      return "the label is '" + Shown(label) + "', expected 0 or 1";
    }
    float* dense = rows_.dense + row_ * layout_.numbers.size();
    for (const NumberColumn& column : layout_.numbers) {
      const std::string_view value = Present(field(column.place));
      if (value.empty()) {
        *dense = column.missing;
      } else if (!ParseNumber(value, column, dense)) {
        return NumberProblem(value, column);
      }
      ++dense;
    }
    if (layout_.weight && !ParseWeight(field(*layout_.weight), &rows_.weights[row_])) {
      return "the weight is '" + Shown(field(*layout_.weight)) + "', expected a number from 0";
    }
    for (const auto& [place, cardinality, ids] : texts_) {
      const std::string_view value = Present(field(place));
      ids[row_] = value.empty() ? 0 : Hashed(value, cardinality);
    }
    for (const auto& [column, ids] : others_) {
      const std::string_view value = Present(field(column->place));
      if (const auto odd = Values(value, *column, ids + row_)) return CategoryProblem(*odd, *column);
    }
    return {};
  }

  // The value of a field; empty where it counts as missing.
  std::string_view Present(std::string_view value) const {
    const bool may_be = kHasMissing && (missing_sizes_ >> std::min<size_t>(value.size(), 63) & 1) != 0;
    return may_be && IsMissing(value) ? std::string_view() : value;
  }

  [[gnu::noinline]] bool IsMissing(std::string_view value) const {
    return std::find(layout_.missing.begin(), layout_.missing.end(), value) != layout_.missing.end();
  }

  // The label where `positive` is set. False if it is missing.
  [[gnu::noinline]] bool ParsePositive(std::string_view label, float* out) const {
    if (Present(label).empty()) return false;
    const std::optional<double> number = NumberOf(label);
    if (number && IsMissingNumber(*number)) return false;
    *out = label == layout_.positive || (number && number == positive_) ? 1 : 0;
    return true;
  }

  bool IsMissingNumber(double value) const { return kHasMissing && Contains(missing_numbers_, value); }

  bool ParseNumber(std::string_view text, const NumberColumn& column, float* out) const {
    Integer integer;
    if (column.scale != Scale::kLog1p || !ParseInteger(text, &integer)) return ParseOther(text, column, out);
    if (IsMissingNumber(integer.value())) {
      *out = column.missing;
      return true;
    }
    const float size = Log1p(integer.size, logs_);
    *out = integer.negative ? -size : size;
    return true;
  }

  // Apart from the common case, integers of kLog1p. False also for what is infinite as float32.
  [[gnu::noinline]] bool ParseOther(std::string_view text, const NumberColumn& column, float* out) const {
    Integer integer;
    const bool is_integer = column.whole && ParseInteger(text, &integer);
    const std::optional<double> value = is_integer ? integer.value() : NumberOf(text);
    if (!value) return false;
    if (IsMissingNumber(*value)) {
      *out = column.missing;
      return true;
    }
    if (column.whole && !is_integer && !IsWhole(*value)) return false;
    *out = Scaled(*value, column);
    return std::isfinite(*out);
  }

  [[gnu::noinline]] static std::string CategoryProblem(std::string_view value, const CategoryColumn& column) {
    return column.name + " is '" + Shown(value) + "', expected an integer or nothing";
  }

  [[gnu::noinline]] static std::string NumberProblem(std::string_view value, const NumberColumn& column) {
    return column.name + " is '" + Shown(value) + "', expected " +
           (column.whole ? "an integer" : "a number") + " or nothing";
  }

  // Writes the ids of a field of integers or several values; returns a value that is no integer and must be.
  [[gnu::noinline]] std::optional<std::string_view> Values(std::string_view text,
                                                           const CategoryColumn& column, int64_t* id) {
    if (column.separator == '\0') {
      *id = whole_ids_.IdOf(text, column.cardinality);
      return *id < 0 ? std::optional(text) : std::nullopt;
    }
    values_.clear();
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find(column.separator, at), text.size());
      const std::string_view value = Present(text.substr(at, end - at));
      const int64_t found = value.empty()  ? 0
                            : column.whole ? whole_ids_.IdOf(value, column.cardinality)
                                           : Hashed(value, column.cardinality);
      if (found < 0) return value;
      if (found != 0) values_.push_back(found);
      at = end + 1;
      // Integers are read to the end, so that the row is broken here where it is in other formats.
      if (values_.size() == column.length && !column.keep_last && !column.whole) break;
    }
    const size_t count = std::min(values_.size(), column.length);
    const size_t dropped = column.keep_last ? values_.size() - count : 0;
    const size_t first = column.pad_before ? column.length - count : 0;
    for (size_t i = 0; i < column.length; ++i) {
      id[i * rows_.capacity] = i >= first && i < first + count ? values_[dropped + i - first] : 0;
    }
    return std::nullopt;
  }

  const TextLayout& layout_;
  const TextRows& rows_;
  std::vector<BrokenLine>* broken_;
  const std::array<float, 4096>& logs_;
  // Categories of one value that is hashed as it stands, and the others; ids are those of the first row.
  struct Text {
    size_t place;
    uint64_t cardinality;
    int64_t* ids;
  };
  std::vector<Text> texts_;
  std::vector<std::pair<const CategoryColumn*, int64_t*>> others_;
  uint64_t missing_sizes_ = 0;  // bit n: a word has n bytes; bit 63: 63 or more
  std::vector<double> missing_numbers_;
  const std::optional<double> positive_;
  WholeIds whole_ids_;
  std::vector<size_t> ends_;  // where the fields of the line end
  std::vector<std::string_view> fields_;
  std::vector<int64_t> values_;
  std::string scratch_;
  size_t row_ = 0;
  size_t line_ = 0;
};

}  // namespace

std::optional<double> NumberOf(std::string_view text) {
  double value;
  if (ParseDouble(text, &value)) return value;
  return BooleanOf(text);
}

std::string_view WholeText(std::string_view text, std::string* scratch) {
  if (const auto boolean = BooleanOf(text)) return *boolean ? "1" : "0";
  const size_t sign = !text.empty() && text.front() == '-' ? 1 : 0;
  const size_t end = std::min(text.find_first_not_of("0123456789", sign), text.size());
  const bool has_zeros =
      end < text.size() && text[end] == '.' && text.find_first_not_of('0', end + 1) == std::string_view::npos;
  if (end > sign && (end == text.size() || has_zeros)) {
    const size_t first = text.find_first_not_of('0', sign);
    if (first >= end) return "0";
    if (sign == 0 || first == 1) return text.substr(first - sign, end - first + sign);
    *scratch = '-';
    return scratch->append(text, first, end - first);
  }
  double value;
  if (!ParseDouble(text, &value) || !IsWhole(value)) return {};
  return *scratch = std::to_string(static_cast<int64_t>(value));
}

int64_t HashedId(std::string_view value, uint64_t cardinality) { return Hashed(value, cardinality); }

WholeIds::WholeIds(const std::vector<std::string>& missing) {
  for (const std::string& word : missing) {
    if (const std::string_view text = WholeText(word, &scratch_); !text.empty()) missing_.emplace_back(text);
  }
}

int64_t WholeIds::IdOf(std::string_view value, uint64_t cardinality) {
  if (value.empty()) return 0;
  const std::string_view text = WholeText(value, &scratch_);
  if (text.empty()) return -1;
  if (std::find(missing_.begin(), missing_.end(), text) != missing_.end()) return 0;
  return Hashed(text, cardinality);
}

void Normalise(const int64_t* values, size_t count, float* out) {
  const auto& logs = SmallLogs();
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<uint64_t>(values[i]);
    out[i] = values[i] < 0 ? -Log1p(~value + 1, logs) : Log1p(value, logs);
  }
}

float Scaled(double value, const NumberColumn& column) {
  if (column.scale == Scale::kLinear) return static_cast<float>((value - column.shift) / column.divisor);
  const auto size = static_cast<float>(std::log1p(std::abs(value)));
  return value < 0 ? -size : size;
}

size_t CountLines(std::string_view text) {
  const auto ends = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  return ends + (text.empty() || text.back() == '\n' ? 0 : 1);
}

size_t ParseRows(std::string_view text, const TextLayout& layout, const TextRows& rows,
                 std::vector<BrokenLine>* broken) {
  return layout.missing.empty() ? Parser<false>(layout, rows, broken).Parse(text)
                                : Parser<true>(layout, rows, broken).Parse(text);
}

bool SplitLine(std::string_view line, const TextLayout& layout, std::vector<std::string_view>* fields,
               std::string* scratch) {
  fields->clear();
  scratch->clear();
  scratch->reserve(line.size());  // views into it stay
  size_t at = 0;
  while (true) {
    if (layout.quotes && at < line.size() && line[at] == '"') {
      const size_t begin = scratch->size();
      while (true) {  // up to the next quote; two of them stand for one
        const size_t end = line.find('"', at + 1);
        if (end == std::string_view::npos) return false;
        scratch->append(line, at + 1, end - at - 1);
        at = end + 1;
        if (at == line.size() || line[at] != '"') break;
        *scratch += '"';
      }
      fields->emplace_back(scratch->data() + begin, scratch->size() - begin);
      if (at < line.size() && line[at] != layout.delimiter) return false;
    } else {
      const size_t end = std::min(line.find(layout.delimiter, at), line.size());
      fields->push_back(line.substr(at, end - at));
      at = end;
    }
    if (at == line.size()) return true;
    ++at;
  }
}

}  // namespace oe
