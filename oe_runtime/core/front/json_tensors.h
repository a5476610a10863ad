// The requests and replies of a model of numbers as JSON, of TensorFlow Serving's form or the Open Inference
// Protocol's. It reads what is right and declines everything else, for which Python's parsers find the words
// (serving/requests.py, serving/open_inference.py).
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
  std::string id;                   // of an inference, for its reply
  std::vector<size_t> outputs;      // of an inference: those that it asks for; none: all
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

// The same of the Open Inference Protocol. It also declines tensors whose data comes before their name, shape
// and datatype, and values behind the JSON.
std::optional<JsonRequest> ReadInference(std::string_view body, const std::vector<JsonInput>& inputs,
                                         const std::vector<JsonOutput>& outputs);
std::optional<std::string> WriteInference(const std::string& model, int64_t version,
                                          const JsonRequest& request, const std::vector<JsonOutput>& outputs);

}  // namespace oe
