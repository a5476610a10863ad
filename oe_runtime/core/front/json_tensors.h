// The requests and replies of a model of numbers as JSON, of TensorFlow Serving's form. It reads what is
// right and declines everything else, for which Python's parser finds the words (serving/requests.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace oe {

enum class NumberType : uint8_t { kFloat32, kFloat64, kInt32, kInt64 };
size_t BytesOf(NumberType type);
// In NumPy.
const char* NameOf(NumberType type);
std::optional<NumberType> NumberTypeOf(std::string_view name);

struct JsonInput {
  std::string name;
  NumberType type = NumberType::kFloat32;
  std::vector<int64_t> shape;  // from the batch on; -1 is any size
};

struct NumberArray {
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

struct JsonRequest {
  bool by_row = false;              // "instances"
  std::vector<NumberArray> inputs;  // in the order of the model's
};

// Declines where Python may refuse it, or read it in another way: also numbers beyond a type, several equal
// names, and names with escapes.
std::optional<JsonRequest> ReadRequest(std::string_view body, const std::vector<JsonInput>& inputs);

struct JsonOutput {
  std::string name;
  NumberType type = NumberType::kFloat32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
};

// Declines for values without a JSON number, and for outputs by row without a row for each example.
std::optional<std::string> WriteReply(const std::vector<JsonOutput>& outputs, bool by_row);

}  // namespace oe
