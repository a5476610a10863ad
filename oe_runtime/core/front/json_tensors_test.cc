#include "oe_runtime/core/front/json_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "oe_runtime/core/front/http_head.h"

namespace oe {
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

TEST(JsonTensorsTest, ReadsZerosAsPythonDoes) {
  const auto request = ReadRequest(R"({"inputs": {"x": [[-0, -0.0], [0, -0e0]], "id": [-0, 0]}})", kInputs);
  ASSERT_TRUE(request);
  std::vector<bool> signs;
  for (const float value : ValuesOf<float>(request->inputs[0])) signs.push_back(std::signbit(value));
  EXPECT_EQ(signs, (std::vector<bool>{false, true, false, true}));
}

// Whatever is cut off, changed or put in: what is read is JSON, and has the same numbers as another parser's.
TEST(JsonTensorsTest, ReadsNothingThatIsNotJson) {
  const std::string good =
      R"({"instances": [{"x": [1, -0.5], "id": 7}, {"id": -8, "x": [2e0, 0.25]}], "signature_name": ""})";
  const std::string letters = "{}[]:,\"\\ \n\t0123456789.-+eExidnulNaI";
  std::mt19937 random(1);
  const auto pick = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  size_t read = 0;
  for (int i = 0; i < 200000; ++i) {
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
    const auto request = ReadRequest(body, kInputs);
    if (!request) continue;
    ++read;
    ASSERT_TRUE(nlohmann::json::accept(body)) << body;
    const auto json = nlohmann::json::parse(body);
    ASSERT_TRUE(json.contains("instances")) << body;
    std::vector<float> x;
    std::vector<int64_t> ids;
    for (const auto& row : json["instances"]) {
      for (const auto& value : row["x"]) x.push_back(static_cast<float>(value.get<double>()));
      ids.push_back(row["id"].get<int64_t>());
    }
    EXPECT_EQ(ValuesOf<float>(request->inputs[0]), x) << body;
    EXPECT_EQ(ValuesOf<int64_t>(request->inputs[1]), ids) << body;
  }
  EXPECT_GT(read, 1000U);
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
}  // namespace oe
