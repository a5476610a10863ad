// Training data: lines of text to arrays.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/data/text_rows.h"
#include "oe_runtime/core/wire/errors.h"

namespace py = pybind11;

namespace oe {
namespace {

using Number = std::tuple<size_t, std::string, bool, bool, double, double, float>;
using Category = std::tuple<size_t, uint64_t, std::string, size_t, bool, bool>;

NumberColumn NewNumber(const Number& given) {
  const auto& [place, name, whole, logarithm, shift, divisor, missing] = given;
  if (!std::isfinite(shift) || !std::isfinite(divisor) || divisor == 0) {
    throw SpecError("column " + name + " is scaled by no number");
  }
  return {place, name, whole, logarithm ? Scale::kLog1p : Scale::kLinear, shift, divisor, missing};
}

CategoryColumn NewCategory(const Category& given) {
  const auto& [place, cardinality, separator, length, pad_before, keep_last] = given;
  if (cardinality == 0 || cardinality > kMostIds) throw SpecError("a cardinality is 0 or beyond 63 bits");
  if (length == 0 || separator.size() > 1 || (separator.empty() && length != 1)) {
    throw SpecError("a column of several values has no length or separator");
  }
  return {place, cardinality, separator.empty() ? '\0' : separator[0], length, pad_before, keep_last};
}

TextLayout NewLayout(char delimiter, bool quotes, size_t columns, size_t label,
                     const std::vector<Number>& numbers, const std::vector<Category>& categories,
                     std::optional<size_t> weight, const std::string& positive,
                     const std::vector<std::string>& missing) {
  TextLayout layout;
  layout.delimiter = delimiter;
  layout.quotes = quotes;
  layout.columns = columns;
  layout.label = label;
  layout.weight = weight;
  layout.positive = positive;
  layout.missing = missing;
  size_t last = std::max(label, weight.value_or(0));
  for (const Number& number : numbers)
    last = std::max(last, layout.numbers.emplace_back(NewNumber(number)).place);
  for (const Category& category : categories) {
    last = std::max(last, layout.categories.emplace_back(NewCategory(category)).place);
  }
  if (last >= columns) {
    throw SpecError("a place is not below the " + std::to_string(columns) + " columns of a line");
  }
  return layout;
}

// (labels, dense, ids, weights, broken); ids are column-major.
py::tuple Parse(const TextLayout& layout, const py::bytes& lines) {
  const std::string_view text = lines;
  const auto capacity = [&] {
    const py::gil_scoped_release release;
    return CountLines(text);
  }();
  py::array_t<float> labels(static_cast<py::ssize_t>(capacity));
  py::array_t<float> dense({capacity, layout.numbers.size()});
  py::array_t<int64_t, py::array::f_style> ids({capacity, layout.ids()});
  py::array_t<float> weights(static_cast<py::ssize_t>(layout.weight ? capacity : 0));
  const TextRows rows = {capacity, labels.mutable_data(), dense.mutable_data(), ids.mutable_data(),
                         weights.mutable_data()};
  std::vector<BrokenLine> broken;
  size_t count = 0;
  {
    const py::gil_scoped_release release;
    count = ParseRows(text, layout, rows, &broken);
  }
  py::list problems;
  for (const BrokenLine& one : broken) problems.append(py::make_tuple(one.line, one.problem));
  const py::slice first(0, static_cast<py::ssize_t>(count), 1);
  return py::make_tuple(labels[first], dense[first], ids[first],
                        layout.weight ? py::object(weights[first]) : py::none(), problems);
}

py::array ScaleAll(const py::array_t<double, py::array::c_style>& values, bool logarithm, double shift,
                   double divisor) {
  const NumberColumn column = NewNumber({0, "", false, logarithm, shift, divisor, 0.0F});
  py::array_t<float> out(std::vector<py::ssize_t>(values.shape(), values.shape() + values.ndim()));
  const double* from = values.data();
  float* to = out.mutable_data();
  const auto count = static_cast<size_t>(values.size());
  {
    const py::gil_scoped_release release;
    for (size_t i = 0; i < count; ++i) to[i] = Scaled(from[i], column);
  }
  return out;
}

py::array NormaliseAll(const py::array_t<int64_t, py::array::c_style>& values) {
  py::array_t<float> out(std::vector<py::ssize_t>(values.shape(), values.shape() + values.ndim()));
  const int64_t* from = values.data();
  float* to = out.mutable_data();
  const auto count = static_cast<size_t>(values.size());
  {
    const py::gil_scoped_release release;
    Normalise(from, count, to);
  }
  return out;
}

std::vector<py::bytes> Split(const TextLayout& layout, const py::bytes& line) {
  std::vector<std::string_view> fields;
  std::string scratch;
  if (!SplitLine(line, layout, &fields, &scratch)) return {};
  return {fields.begin(), fields.end()};
}

}  // namespace

void BindData(py::module_& module) {
  module.attr("MAX_LINE_BYTES") = kMaxLineBytes;
  module.def("normalise", &NormaliseAll, py::arg("values"), "sign(x) log1p(|x|) of each value as float32.");
  module.attr("MOST_IDS") = kMostIds;
  module.def("scale_numbers", &ScaleAll, py::arg("values"), py::arg("logarithm"), py::arg("shift"),
             py::arg("divisor"), "sign(x) log1p(|x|), or (x - shift) / divisor, of each value as float32.");
  py::class_<TextLayout>(module, "TextLayout", "How lines are divided, and which columns are which.")
      .def(py::init(&NewLayout), py::arg("delimiter"), py::arg("quotes"), py::arg("columns"),
           py::arg("label"), py::arg("numbers"), py::arg("categories"), py::arg("weight") = py::none(),
           py::arg("positive") = "", py::arg("missing") = std::vector<std::string>())
      .def("parse", &Parse, py::arg("lines"))
      .def("split", &Split, py::arg("line"));
}

}  // namespace oe
