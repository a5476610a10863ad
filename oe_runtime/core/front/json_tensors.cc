#include "oe_runtime/core/front/json_tensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

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

  bool False() {
    constexpr std::string_view kWord = "false";
    Skip();
    if (std::string_view(at_, static_cast<size_t>(end_ - at_)).substr(0, kWord.size()) != kWord) return false;
    at_ += kWord.size();
    return true;
  }

  // Whether a list of lists follows.
  bool IsNested() const {
    JsonReader ahead = *this;
    return ahead.Take('[') && ahead.Take('[');
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

// A list, of which `read` reads each element.
template <typename Read>
bool ReadList(JsonReader* reader, Read read) {
  if (!reader->Take('[')) return false;
  do {
    if (!read()) return false;
  } while (reader->Take(','));
  return reader->Take(']');
}

// An object, of which `read` reads the value of each key.
template <typename Read>
bool ReadObject(JsonReader* reader, Read read) {
  if (!reader->Take('{')) return false;
  do {
    std::string_view key;
    if (!reader->Text(&key) || !reader->Take(':') || !read(key)) return false;
  } while (reader->Take(','));
  return reader->Take('}');
}

template <typename Named>
size_t Find(const std::vector<Named>& all, std::string_view name) {
  return static_cast<size_t>(
      std::find_if(all.begin(), all.end(), [&](const Named& one) { return one.name == name; }) - all.begin());
}

const char* DatatypeOf(NumberType type) {
  switch (type) {
    case NumberType::kFloat32:
      return "FP32";
    case NumberType::kFloat64:
      return "FP64";
    case NumberType::kInt32:
      return "INT32";
    case NumberType::kInt64:
      return "INT64";
  }
  return "";
}

// The data of an input of this shape, one after the other or in lists; at most `most` numbers.
bool ReadData(JsonReader* reader, const JsonInput& input, size_t most, NumberArray* array) {
  if (array->shape.size() != input.shape.size()) return false;
  size_t count = 1;
  for (const int64_t size : array->shape) {
    if (size < 1 || static_cast<size_t>(size) > most / count) return false;
    count *= static_cast<size_t>(size);
  }
  if (reader->IsNested()) return ReadLists(reader, input, 0, array);
  array->bytes.reserve(count * BytesOf(input.type));
  return ReadList(reader, [&] { return count-- > 0 && ReadNumber(reader, input.type, array); }) && count == 0;
}

bool ReadTensor(JsonReader* reader, const std::vector<JsonInput>& inputs, size_t most,
                std::vector<NumberArray>* arrays) {
  size_t place = inputs.size();
  std::vector<int64_t> shape;
  bool has_type = false, has_data = false;
  const auto read = [&](std::string_view key) {
    std::string_view text;
    if (key == "shape")
      return shape.empty() && ReadList(reader, [&] { return reader->Number(&shape.emplace_back()); });
    if (key == "data") {
      if (has_data || !has_type || shape.empty()) return false;
      has_data = true;
      (*arrays)[place].shape = std::move(shape);
      shape = {0};
      return ReadData(reader, inputs[place], most, &(*arrays)[place]);
    }
    if (!reader->Text(&text)) return false;
    if (key == "name" && place == inputs.size()) {
      place = Find(inputs, text);
      return place < inputs.size() && (*arrays)[place].shape.empty();
    }
    if (key != "datatype" || has_type || place == inputs.size()) return false;
    has_type = text == DatatypeOf(inputs[place].type);
    return has_type;
  };
  return ReadObject(reader, read) && has_data;
}

// Of an output whose values are to be JSON.
bool ReadParameters(JsonReader* reader) {
  return ReadObject(reader, [&](std::string_view key) { return key == "binary_data" && reader->False(); });
}

bool ReadOutputs(JsonReader* reader, const std::vector<JsonOutput>& outputs, std::vector<size_t>* asked) {
  return ReadList(reader, [&] {
    const size_t before = asked->size();
    const bool is_read = ReadObject(reader, [&](std::string_view key) {
      std::string_view name;
      if (key == "parameters") return ReadParameters(reader);
      if (key != "name" || !reader->Text(&name)) return false;
      asked->push_back(Find(outputs, name));
      return asked->back() < outputs.size() &&
             std::find(asked->begin(), asked->end() - 1, asked->back()) == asked->end() - 1;
    });
    return is_read && asked->size() == before + 1;
  });
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

std::optional<JsonRequest> ReadInference(std::string_view body, const std::vector<JsonInput>& inputs,
                                         const std::vector<JsonOutput>& outputs) {
  JsonRequest request;
  request.inputs.resize(inputs.size());
  JsonReader reader(body);
  bool has_id = false, has_inputs = false;
  const auto read = [&](std::string_view key) {
    std::string_view text;
    if (key == "id") {
      if (std::exchange(has_id, true) || !reader.Text(&text)) return false;
      request.id = text;
      return true;
    }
    if (key == "outputs") return request.outputs.empty() && ReadOutputs(&reader, outputs, &request.outputs);
    if (key != "inputs" || std::exchange(has_inputs, true)) return false;
    return ReadList(&reader, [&] { return ReadTensor(&reader, inputs, body.size(), &request.inputs); });
  };
  if (!ReadObject(&reader, read) || !reader.IsAtEnd()) return std::nullopt;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::vector<int64_t>&shape = request.inputs[i].shape, &wanted = inputs[i].shape;
    if (shape.empty() || shape.front() != request.inputs.front().shape.front()) return std::nullopt;
    for (size_t d = 0; d < shape.size(); ++d)
      if (wanted[d] != -1 && wanted[d] != shape[d]) return std::nullopt;
  }
  if (inputs.empty()) return std::nullopt;
  return request;
}

std::optional<std::string> WriteInference(const std::string& model, int64_t version,
                                          const JsonRequest& request,
                                          const std::vector<JsonOutput>& outputs) {
  std::string text = "{\"model_name\": " + nlohmann::json(model).dump() + ", \"model_version\": \"" +
                     std::to_string(version) + '"';
  if (!request.id.empty()) text += ", \"id\": \"" + request.id + '"';  // it had no escapes
  text += ", \"outputs\": [";
  const size_t count = request.outputs.empty() ? outputs.size() : request.outputs.size();
  for (size_t i = 0; i < count; ++i) {
    JsonOutput output = outputs[request.outputs.empty() ? i : request.outputs[i]];
    text += (i > 0 ? ", {\"name\": " : "{\"name\": ") + nlohmann::json(output.name).dump() +
            ", \"datatype\": \"" + DatatypeOf(output.type) +
            "\", \"shape\": " + nlohmann::json(output.shape).dump() + ", \"data\": ";
    int64_t values = 1;
    for (const int64_t size : output.shape) values *= size;
    output.shape = {values};
    const auto* data = static_cast<const std::byte*>(output.data);
    if (!WriteLists(output, 0, &data, &text)) return std::nullopt;
    text += '}';
  }
  return text += "]}";
}

}  // namespace oe
