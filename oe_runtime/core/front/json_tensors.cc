#include "oe_runtime/core/front/json_tensors.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

namespace oe {
namespace {

constexpr size_t kExactDigits = 15;  // of integers that every double has

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Reads a text from its beginning. Each function returns false where the text has something else.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  bool Take(char wanted) {
    Skip();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }

  bool IsAtEnd() {
    Skip();
    return at_ == end_;
  }

  // A text without escapes.
  bool Text(std::string_view* text) {
    if (!Take('"')) return false;
    const char* const begin = at_;
    for (; at_ != end_ && *at_ != '"'; ++at_)
      if (*at_ == '\\' || static_cast<unsigned char>(*at_) < ' ' || static_cast<unsigned char>(*at_) > '~')
        return false;
    if (at_ == end_) return false;
    *text = {begin, static_cast<size_t>(at_++ - begin)};
    return true;
  }

  template <typename Integer>
  bool Number(Integer* value) {
    const std::string_view token = Token();
    if (token.empty() || has_fraction_) return false;
    const auto [after, error] = std::from_chars(token.data(), token.data() + token.size(), *value);
    return error == std::errc() && after == token.data() + token.size();
  }

  bool Number(double* value) {
    const std::string_view token = Token();
    if (token.empty() || (!has_fraction_ && token.size() > kExactDigits)) return false;
#ifdef __cpp_lib_to_chars
    const auto [after, error] = std::from_chars(token.data(), token.data() + token.size(), *value);
    if (!has_fraction_ && *value == 0) *value = 0;  // -0 is an integer, unlike -0.0
    return error == std::errc() && after == token.data() + token.size();
#else
    return false;
#endif
  }

  bool Number(float* value) {
    double number = 0;
    if (!Number(&number)) return false;
    *value = static_cast<float>(number);
    return std::isfinite(*value);
  }

 private:
  void Skip() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
  }

  size_t Digits() {
    const char* const begin = at_;
    while (at_ != end_ && IsDigit(*at_)) ++at_;
    return static_cast<size_t>(at_ - begin);
  }

  // A number by JSON's grammar; empty if there is none.
  std::string_view Token() {
    Skip();
    const char* const begin = at_;
    has_fraction_ = false;
    if (at_ != end_ && *at_ == '-') ++at_;
    const char* const first = at_;
    const size_t digits = Digits();
    if (digits == 0 || (digits > 1 && *first == '0')) return {};
    if (at_ != end_ && *at_ == '.') {
      has_fraction_ = true;
      ++at_;
      if (Digits() == 0) return {};
    }
    if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
      has_fraction_ = true;
      ++at_;
      if (at_ != end_ && (*at_ == '-' || *at_ == '+')) ++at_;
      if (Digits() == 0) return {};
    }
    return {begin, static_cast<size_t>(at_ - begin)};
  }

  const char* at_;
  const char* end_;
  bool has_fraction_ = false;
};

template <typename Number>
bool ReadNumber(JsonReader* reader, NumberArray* array) {
  Number value{};
  if (!reader->Number(&value)) return false;
  const size_t size = array->bytes.size();
  array->bytes.resize(size + sizeof value);
  std::memcpy(array->bytes.data() + size, &value, sizeof value);
  return true;
}

bool ReadNumber(JsonReader* reader, NumberType type, NumberArray* array) {
  switch (type) {
    case NumberType::kFloat32:
      return ReadNumber<float>(reader, array);
    case NumberType::kFloat64:
      return ReadNumber<double>(reader, array);
    case NumberType::kInt32:
      return ReadNumber<int32_t>(reader, array);
    case NumberType::kInt64:
      return ReadNumber<int64_t>(reader, array);
  }
  return false;
}

// What lies at a depth of an input: numbers at that of its shape, lists of equal sizes above.
bool ReadLists(JsonReader* reader, const JsonInput& input, size_t depth, NumberArray* array) {
  if (depth == input.shape.size()) return ReadNumber(reader, input.type, array);
  if (!reader->Take('[')) return false;
  int64_t size = 0;
  do {
    if (!ReadLists(reader, input, depth + 1, array)) return false;
    ++size;
  } while (reader->Take(','));
  int64_t& wanted = array->shape[depth];
  if (!reader->Take(']') || (wanted != -1 && wanted != size)) return false;
  wanted = size;
  return true;
}

// {"name": value, …} with each input once, in any order; `depth` is that of the values.
bool ReadNamed(JsonReader* reader, const std::vector<JsonInput>& inputs, size_t depth,
               std::vector<size_t>* times, std::vector<NumberArray>* arrays) {
  size_t next = 0;
  for (size_t n = 0; n < inputs.size(); ++n, ++next) {
    std::string_view name;
    if (n > 0 && !reader->Take(',')) return false;
    if (!reader->Text(&name) || !reader->Take(':')) return false;
    if (next == inputs.size() || inputs[next].name != name) {
      for (next = 0; next < inputs.size() && inputs[next].name != name;) ++next;
      if (next == inputs.size()) return false;
    }
    (*times)[next] += 1;
    if (!ReadLists(reader, inputs[next], depth, &(*arrays)[next])) return false;
  }
  for (const size_t one : *times)
    if (one != times->front()) return false;
  return reader->Take('}');
}

bool ReadRows(JsonReader* reader, const std::vector<JsonInput>& inputs, std::vector<NumberArray>* arrays) {
  if (!reader->Take('[')) return false;
  int64_t rows = 0;
  std::vector<size_t> times(inputs.size(), 0);
  do {
    if (reader->Take('{')) {
      if (!ReadNamed(reader, inputs, 1, &times, arrays)) return false;
    } else if (inputs.size() != 1 || times[0] != 0 || !ReadLists(reader, inputs[0], 1, arrays->data())) {
      return false;
    }
    ++rows;
  } while (reader->Take(','));
  for (NumberArray& array : *arrays) array.shape[0] = rows;
  return (times[0] == 0 || times[0] == static_cast<size_t>(rows)) && reader->Take(']');
}

bool ReadColumns(JsonReader* reader, const std::vector<JsonInput>& inputs, std::vector<NumberArray>* arrays) {
  if (reader->Take('{')) {
    std::vector<size_t> times(inputs.size(), 0);
    if (!ReadNamed(reader, inputs, 0, &times, arrays)) return false;
  } else if (inputs.size() != 1 || !ReadLists(reader, inputs[0], 0, arrays->data())) {
    return false;
  }
  for (const NumberArray& array : *arrays)
    if (array.shape[0] != arrays->front().shape[0]) return false;
  return true;
}

template <typename Number>
bool Write(Number value, std::string* text) {
  std::array<char, 32> place{};
  if constexpr (std::is_floating_point_v<Number>) {
    if (!std::isfinite(value)) return false;
#ifdef __cpp_lib_to_chars
    const char* const end = std::to_chars(place.data(), place.data() + place.size(), value).ptr;
    const std::string_view number(place.data(), static_cast<size_t>(end - place.data()));
    text->append(number);
    if (number.find_first_of(".e") == std::string_view::npos) text->append(".0");
    return true;
#else
    return false;
#endif
  } else {
    text->append(place.data(), std::to_chars(place.data(), place.data() + place.size(), value).ptr);
    return true;
  }
}

// The values of an output from `depth` on, and moves on to those behind them.
bool WriteLists(const JsonOutput& output, size_t depth, const std::byte** data, std::string* text) {
  if (depth == output.shape.size()) {
    const std::byte* const from = *data;
    *data += BytesOf(output.type);
    const auto write = [&](auto value) {
      std::memcpy(&value, from, sizeof value);
      return Write(value, text);
    };
    switch (output.type) {
      case NumberType::kFloat32:
        return write(float{});
      case NumberType::kFloat64:
        return write(double{});
      case NumberType::kInt32:
        return write(int32_t{});
      case NumberType::kInt64:
        return write(int64_t{});
    }
    return false;
  }
  *text += '[';
  for (int64_t i = 0; i < output.shape[depth]; ++i) {
    if (i > 0) *text += ", ";
    if (!WriteLists(output, depth + 1, data, text)) return false;
  }
  *text += ']';
  return true;
}

// The outputs by name, those of one example if `depth` is 1.
bool WriteNamed(const std::vector<JsonOutput>& outputs, const std::vector<std::string>& names, size_t depth,
                std::vector<const std::byte*>* data, std::string* text) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    *text += i == 0 ? "{" : ", ";
    *text += names[i];
    if (!WriteLists(outputs[i], depth, &(*data)[i], text)) return false;
  }
  *text += '}';
  return true;
}

}  // namespace

size_t BytesOf(NumberType type) { return type == NumberType::kFloat32 || type == NumberType::kInt32 ? 4 : 8; }

const char* NameOf(NumberType type) {
  switch (type) {
    case NumberType::kFloat32:
      return "float32";
    case NumberType::kFloat64:
      return "float64";
    case NumberType::kInt32:
      return "int32";
    case NumberType::kInt64:
      return "int64";
  }
  return "";
}

std::optional<NumberType> NumberTypeOf(std::string_view name) {
  for (const NumberType type :
       {NumberType::kFloat32, NumberType::kFloat64, NumberType::kInt32, NumberType::kInt64})
    if (name == NameOf(type)) return type;
  return std::nullopt;
}

std::optional<JsonRequest> ReadRequest(std::string_view body, const std::vector<JsonInput>& inputs) {
  JsonRequest request;
  for (const JsonInput& input : inputs) {
    if (input.shape.empty()) return std::nullopt;
    request.inputs.push_back({std::vector<int64_t>(input.shape.size(), -1), {}});
    // Of a request whose numbers share it evenly, in few characters each.
    request.inputs.back().bytes.reserve(body.size() / inputs.size());
  }
  JsonReader reader(body);
  if (inputs.empty() || !reader.Take('{')) return std::nullopt;
  bool has_values = false;
  do {
    std::string_view key;
    if (!reader.Text(&key) || !reader.Take(':')) return std::nullopt;
    if (key == "signature_name") {
      std::string_view name;
      if (!reader.Text(&name) || (!name.empty() && name != "serving_default")) return std::nullopt;
      continue;
    }
    request.by_row = key == "instances";
    if (has_values || (!request.by_row && key != "inputs")) return std::nullopt;
    has_values = true;
    if (!(request.by_row ? ReadRows : ReadColumns)(&reader, inputs, &request.inputs)) return std::nullopt;
  } while (reader.Take(','));
  if (!has_values || !reader.Take('}') || !reader.IsAtEnd()) return std::nullopt;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (size_t d = 0; d < inputs[i].shape.size(); ++d)
      if (inputs[i].shape[d] != -1 && inputs[i].shape[d] != request.inputs[i].shape[d]) return std::nullopt;
  }
  return request;
}

std::optional<std::string> WriteReply(const std::vector<JsonOutput>& outputs, bool by_row) {
  std::vector<const std::byte*> data;
  std::vector<std::string> names;
  for (const JsonOutput& output : outputs) {
    data.push_back(static_cast<const std::byte*>(output.data));
    names.push_back(nlohmann::json(output.name).dump() + ": ");
  }
  std::string text = by_row ? "{\"predictions\": " : "{\"outputs\": ";
  if (outputs.size() == 1) {
    if (!WriteLists(outputs[0], 0, data.data(), &text)) return std::nullopt;
  } else if (!by_row) {
    if (!WriteNamed(outputs, names, 0, &data, &text)) return std::nullopt;
  } else {
    for (const JsonOutput& output : outputs)
      if (output.shape.empty() || output.shape[0] != outputs[0].shape[0]) return std::nullopt;
    text += '[';
    for (int64_t i = 0; i < outputs[0].shape[0]; ++i) {
      if (i > 0) text += ", ";
      if (!WriteNamed(outputs, names, 1, &data, &text)) return std::nullopt;
    }
    text += ']';
  }
  return text += '}';
}

}  // namespace oe
