#include "oe_runtime/core/front/json_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "oe_runtime/core/front/http_head.h"

namespace oe::json_tensors_test {
namespace {

const std::vector<JsonInput> kInputs = {{"x", NumberType::kFloat32, {-1, 2}},
                                        {"id", NumberType::kInt64, {-1}}};

template <typename Number>
std::vector<Number> ValuesOf(const NumberArray& array) {
  std::vector<Number> values(array.bytes.size() / sizeof(Number));
  std::memcpy(values.data(), array.bytes.data(), array.bytes.size());
  return values;
}

TEST(JsonTensorsTest, ReadsRowsAndColumns) {
  for (const char* body : {R"({"instances": [{"x": [1, -0.5], "id": 7}, {"id": -8, "x": [2e0, 0.25]}]})",
                           R"({"inputs": {"id": [7, -8], "x": [[1.0, -5E-1], [2, 0.25]]}})"}) {
    const auto request = ReadRequest(body, kInputs);
    ASSERT_TRUE(request) << body;
    EXPECT_EQ(request->by_row, std::string(body).find("instances") != std::string::npos);
    EXPECT_EQ(request->inputs[0].shape, (std::vector<int64_t>{2, 2}));
    EXPECT_EQ(ValuesOf<float>(request->inputs[0]), (std::vector<float>{1, -0.5, 2, 0.25}));
    EXPECT_EQ(ValuesOf<int64_t>(request->inputs[1]), (std::vector<int64_t>{7, -8}));
  }
}

const std::vector<JsonOutput> kOutputs = {{"y", NumberType::kFloat32, {}, nullptr},
                                          {"z", NumberType::kInt64, {}, nullptr}};

TEST(JsonTensorsTest, ReadsInferences) {
  const std::string id = R"({"name": "id", "datatype": "INT64", "shape": [2], "data": [7, -8]})";
  for (const std::string x :
       {R"({"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, -0.5, 2e0, 0.25]})",
        R"({"shape": [2, 2], "name": "x", "datatype": "FP32", "data": [[1, -5E-1], [2, 0.25]]})"}) {
    const auto request = ReadInference(
        R"({"id": "4", "outputs": [{"name": "z", "parameters": {"binary_data": false}}], "inputs": [)" + id +
            ", " + x + "]}",
        kInputs, kOutputs);
    ASSERT_TRUE(request) << x;
    EXPECT_EQ(request->id, "4");
    EXPECT_EQ(request->outputs, (std::vector<size_t>{1}));
    EXPECT_EQ(request->inputs[0].shape, (std::vector<int64_t>{2, 2}));
    EXPECT_EQ(ValuesOf<float>(request->inputs[0]), (std::vector<float>{1, -0.5, 2, 0.25}));
    EXPECT_EQ(ValuesOf<int64_t>(request->inputs[1]), (std::vector<int64_t>{7, -8}));
    EXPECT_TRUE(ReadInference(R"({"inputs": [)" + x + ", " + id + "]}", kInputs, kOutputs));
    EXPECT_FALSE(ReadInference(R"({"inputs": [)" + x + "]}", kInputs, kOutputs));
    EXPECT_FALSE(ReadInference(R"({"inputs": [)" + x + ", " + x + "]}", kInputs, kOutputs));
    EXPECT_FALSE(ReadInference(R"({"inputs": [)" + x + ", " + id + ", " + id + "]}", kInputs, kOutputs));
  }
}

TEST(JsonTensorsTest, DeclinesInferencesThatPythonRefusesOrReadsItself) {
  const auto is_read = [](const std::string& x, const std::string& rest = "") {
    return ReadInference(
               R"({"inputs": [{"name": "id", "shape": [2], "datatype": "INT64", "data": [7, 8]}, {)" + x +
                   "}]" + rest + "}",
               kInputs, kOutputs)
        .has_value();
  };
  const std::string good = R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4])";
  EXPECT_TRUE(is_read(good));
  EXPECT_TRUE(is_read(good, R"(, "outputs": [{"name": "z"}, {"name": "y"}])"));
  for (const char* x : {
           R"("name": "x", "shape": [2, 2], "data": [1, 2, 3, 4], "datatype": "FP32")",
           R"("name": "x", "shape": [2, 2], "datatype": "FP64", "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4, 5])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2, 3, 4]])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3]])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], 3, 4])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32")",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [])",
           R"("name": "x", "shape": [], "datatype": "FP32", "data": [1])",
           R"("name": "x", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [0, 2], "datatype": "FP32", "data": [])",
           R"("name": "x", "shape": [-1, 2], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [2.0, 2], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [4294967296, 4294967296], "datatype": "FP32", "data": [1])",
           R"("name": "x", "shape": [9223372036854775807, 2], "datatype": "FP32", "data": [1])",
           R"("name": "x", "shape": [2, 2], "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "x", "name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "q", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "parameters": {}, "data": [1, 2, 3, 4])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 1e39])",
           R"("name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, "4"])",
       })
    EXPECT_FALSE(is_read(x)) << x;
  for (const char* rest :
       {R"(, "outputs": [{"name": "q"}])", R"(, "outputs": [{"name": "z"}, {"name": "z"}])",
        R"(, "outputs": [{"parameters": {"binary_data": false}}])",
        R"(, "outputs": [{"name": "y", "name": "z"}])", R"(, "outputs": [])",
        R"(, "outputs": [{"name": "z", "parameters": {"binary_data": true}}])",
        R"(, "parameters": {"sequence_id": 1})", R"(, "id": 5)", R"(, "id": "\u0031")", R"(, "inputs": [])",
        "}"})
    EXPECT_FALSE(is_read(good, rest)) << rest;
}

TEST(JsonTensorsTest, WritesInferences) {
  const std::vector<float> values = {0.5, -2};
  const std::vector<int64_t> ids = {5, 6, 7, 8};
  const std::vector<JsonOutput> outputs = {{"y", NumberType::kFloat32, {2}, values.data()},
                                           {"z", NumberType::kInt64, {2, 2}, ids.data()}};
  JsonRequest request;
  EXPECT_EQ(nlohmann::json::parse(*WriteInference("m\"", 7, request, outputs)),
            nlohmann::json::parse(R"({"model_name": "m\"", "model_version": "7", "outputs": [
              {"name": "y", "datatype": "FP32", "shape": [2], "data": [0.5, -2.0]},
              {"name": "z", "datatype": "INT64", "shape": [2, 2], "data": [5, 6, 7, 8]}]})"));
  request.id = "4";
  request.outputs = {1};
  const auto found = nlohmann::json::parse(*WriteInference("m", 7, request, outputs));
  EXPECT_EQ(found["id"], "4");
  EXPECT_EQ(found["outputs"].size(), 1U);
  const float nan = std::nanf("");
  EXPECT_FALSE(WriteInference("m", 7, JsonRequest(), {{"y", NumberType::kFloat32, {1}, &nan}}));
}

TEST(JsonTensorsTest, ReadsZerosAsPythonDoes) {
  const auto request = ReadRequest(R"({"inputs": {"x": [[-0, -0.0], [0, -0e0]], "id": [-0, 0]}})", kInputs);
  ASSERT_TRUE(request);
  std::vector<bool> signs;
  for (const float value : ValuesOf<float>(request->inputs[0])) signs.push_back(std::signbit(value));
  EXPECT_EQ(signs, (std::vector<bool>{false, true, false, true}));
}

// Whatever is cut off, changed or put in: what is read is JSON, and has the same numbers as another parser's.
template <typename Read, typename Check>
void ReadChanged(const std::string& good, Read read_request, Check check) {
  const std::string letters = "{}[]:,\"\\ \n\t0123456789.-+eExidnulNaI";
  std::mt19937 random(1);
  const auto pick = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  size_t read = 0;
  for (int i = 0; i < 100000; ++i) {
    std::string body = good;
    for (size_t n = 1 + pick(3); n > 0 && !body.empty(); --n) {
      const size_t at = pick(body.size());
      switch (pick(4)) {
        case 0:
          body.erase(at, 1 + pick(4));
          break;
        case 1:
          body[at] = letters[pick(letters.size())];
          break;
        case 2:
          body.insert(at, 1, letters[pick(letters.size())]);
          break;
        default:
          body.resize(at);
      }
    }
    const auto request = read_request(body);
    if (!request) continue;
    ++read;
    ASSERT_TRUE(nlohmann::json::accept(body)) << body;
    check(nlohmann::json::parse(body), *request);
  }
  EXPECT_GT(read, 1000U);
}

TEST(JsonTensorsTest, ReadsNothingThatIsNotJson) {
  ReadChanged(
      R"({"instances": [{"x": [1, -0.5], "id": 7}, {"id": -8, "x": [2e0, 0.25]}], "signature_name": ""})",
      [](const std::string& body) { return ReadRequest(body, kInputs); },
      [](const nlohmann::json& json, const JsonRequest& request) {
        ASSERT_TRUE(json.contains("instances")) << json;
        std::vector<float> x;
        std::vector<int64_t> ids;
        for (const auto& row : json["instances"]) {
          for (const auto& value : row["x"]) x.push_back(static_cast<float>(value.get<double>()));
          ids.push_back(row["id"].get<int64_t>());
        }
        EXPECT_EQ(ValuesOf<float>(request.inputs[0]), x) << json;
        EXPECT_EQ(ValuesOf<int64_t>(request.inputs[1]), ids) << json;
      });
}

TEST(JsonTensorsTest, ReadsNoInferenceThatIsNotJson) {
  ReadChanged(
      R"({"id": "4", "inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, -0.5]},
          {"name": "id", "shape": [1], "datatype": "INT64", "data": [7]}], "outputs": [{"name": "z"}]})",
      [](const std::string& body) { return ReadInference(body, kInputs, kOutputs); },
      [](const nlohmann::json& json, const JsonRequest& request) {
        const auto& inputs = json.at("inputs");
        const auto& x = inputs[0]["name"] == "x" ? inputs[0] : inputs[1];
        const auto& ids = inputs[0]["name"] == "x" ? inputs[1] : inputs[0];
        EXPECT_EQ(ValuesOf<float>(request.inputs[0]), x.at("data").get<std::vector<float>>()) << json;
        EXPECT_EQ(ValuesOf<int64_t>(request.inputs[1]), ids.at("data").get<std::vector<int64_t>>()) << json;
        EXPECT_EQ(request.inputs[0].shape, x.at("shape").get<std::vector<int64_t>>()) << json;
        EXPECT_EQ(request.id, json.value("id", ""));
      });
}

TEST(JsonTensorsTest, WritesNumbersThatReadAsTheyAre) {
  const std::vector<float> values = {
      0, -0.0F, 1, 0.1F, 1e-7F, 3e38F, std::numeric_limits<float>::denorm_min(), 1e20F, 123.0F, -2.5F};
  const auto text = WriteReply({{"a\"b", NumberType::kFloat32, {5, 2}, values.data()}}, false);
  ASSERT_TRUE(text);
  std::vector<float> found;
  const auto parsed = nlohmann::json::parse(*text);
  for (const auto& row : parsed["outputs"])
    for (const auto& value : row) {
      EXPECT_TRUE(value.is_number_float()) << *text;
      found.push_back(static_cast<float>(value.get<double>()));
    }
  EXPECT_EQ(found, values);
  const std::vector<int64_t> ids = {std::numeric_limits<int64_t>::min(), 5};
  const auto named = WriteReply(
      {{"a\"b", NumberType::kFloat32, {2, 1}, values.data()}, {"i", NumberType::kInt64, {2}, ids.data()}},
      true);
  ASSERT_TRUE(named);
  const auto rows = nlohmann::json::parse(*named)["predictions"];
  EXPECT_EQ(rows[0]["i"], ids[0]);
  EXPECT_EQ(rows[1]["a\"b"][0], -0.0);
  const float nan = std::nanf("");
  EXPECT_FALSE(WriteReply({{"y", NumberType::kFloat32, {1}, &nan}}, false));
  EXPECT_FALSE(WriteReply(
      {{"y", NumberType::kFloat32, {2}, values.data()}, {"i", NumberType::kInt64, {1}, ids.data()}}, true));
}

// The server's own tests are Python's (tests/oe_runtime/serving/test_serving_http.py).
TEST(HttpHeadTest, TakesOrRefusesWhateverComes) {
  const std::string good =
      "POST /v1 HTTP/1.1\r\nContent-Length: 12\r\nConnection: keep-alive, Close\r\nX: y\r\n\r\n";
  const std::string letters = "\r\n :\t,aHTTP/1.0\x01\x7f\xff";
  std::mt19937 random(1);
  const auto pick = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  for (int i = 0; i < 100000; ++i) {
    std::string text = good;
    for (size_t n = pick(4); n > 0; --n) text.insert(pick(text.size() - 4), 1, letters[pick(letters.size())]);
    const size_t size = FindHttpHead(text);
    ASSERT_GT(size, 0U);
    HttpHead head;
    std::string problem;
    const unsigned refused = ParseHttpHead(std::string_view(text).substr(0, size), &head, &problem);
    EXPECT_EQ(refused == 0, problem.empty());
    if (text == good) {
      EXPECT_EQ(refused, 0U);
      EXPECT_EQ(head.method + head.target + head.length.value_or(""), "POST/v112");
      EXPECT_FALSE(head.keeps_alive);
    }
  }
}

}  // namespace
}  // namespace oe::json_tensors_test
