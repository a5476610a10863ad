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
using Category = std::tuple<size_t, std::string, uint64_t, std::string, size_t, bool, bool, bool>;

NumberColumn NewNumber(const Number& given) {
  const auto& [place, name, whole, logarithm, shift, divisor, missing] = given;
  if (!std::isfinite(shift) || !std::isfinite(divisor) || divisor == 0) {
    throw SpecError("column " + name + " is scaled by no number");
  }
  return {place, name, whole, logarithm ? Scale::kLog1p : Scale::kLinear, shift, divisor, missing};
}

CategoryColumn NewCategory(const Category& given) {
  const auto& [place, name, cardinality, separator, length, pad_before, keep_last, whole] = given;
  if (cardinality == 0 || cardinality > kMostIds) throw SpecError("a cardinality is 0 or beyond 63 bits");
  if (length == 0 || separator.size() > 1 || (separator.empty() && length != 1)) {
    throw SpecError("a column of several values has no length or separator");
  }
  const char byte = separator.empty() ? '\0' : separator[0];
  return {place, cardinality, byte, length, pad_before, keep_last, whole, name};
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

// (ids, odd): of the texts data[offsets[i]:offsets[i + 1]].
template <typename Offset>
py::tuple IdsOf(const py::array_t<Offset, py::array::c_style>& offsets,
                const py::array_t<uint8_t, py::array::c_style>& data, uint64_t cardinality, bool whole,
                const std::vector<std::string>& missing) {
  NewCategory({0, "", cardinality, "", 1, false, false, whole});
  const auto count = static_cast<size_t>(std::max<py::ssize_t>(offsets.size(), 1) - 1);
  py::array_t<int64_t> ids(static_cast<py::ssize_t>(count));
  py::array_t<bool> odd(static_cast<py::ssize_t>(count));
  const Offset* from = offsets.data();
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), static_cast<size_t>(data.size()));
  int64_t* id = ids.mutable_data();
  bool* is_odd = odd.mutable_data();
  {
    const py::gil_scoped_release release;
    WholeIds whole_ids(missing);
    for (size_t i = 0; i < count; ++i) {
      const Offset begin = from[i];
      const Offset end = from[i + 1];
      if (begin < 0 || end < begin || static_cast<uint64_t>(end) > bytes.size()) {
        throw SpecError("text " + std::to_string(i) + " lies outside its data");
      }
      const std::string_view text =
          bytes.substr(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      if (whole) {
        id[i] = whole_ids.IdOf(text, cardinality);
      } else {
        id[i] = text.empty() ? 0 : HashedId(text, cardinality);
      }
      is_odd[i] = id[i] < 0;
    }
  }
  return py::make_tuple(ids, odd);
}

}  // namespace

void BindData(py::module_& module) {
  module.attr("MAX_LINE_BYTES") = kMaxLineBytes;
  module.def("normalise", &NormaliseAll, py::arg("values"), "sign(x) log1p(|x|) of each value as float32.");
  module.attr("MOST_IDS") = kMostIds;
  module.def("scale_numbers", &ScaleAll, py::arg("values"), py::arg("logarithm"), py::arg("shift"),
             py::arg("divisor"), "sign(x) log1p(|x|), or (x - shift) / divisor, of each value as float32.");
  module.def("parse_number", &NumberOf, py::arg("text"),
             "The number that a field of a text file is, 1 and 0 of true and false; None if it is none.");
  const auto def_ids = [&](auto ids_of) {
    module.def(
        "category_ids", ids_of, py::arg("offsets").noconvert(), py::arg("data"), py::arg("cardinality"),
        py::arg("whole"), py::arg("missing"),
        "Ids of the texts data[offsets[i]:offsets[i + 1]], 0 of empty ones; and which are no integers.");
  };
  def_ids(&IdsOf<int32_t>);
  def_ids(&IdsOf<int64_t>);
  py::class_<TextLayout>(module, "TextLayout", "How lines are divided, and which columns are which.")
      .def(py::init(&NewLayout), py::arg("delimiter"), py::arg("quotes"), py::arg("columns"),
           py::arg("label"), py::arg("numbers"), py::arg("categories"), py::arg("weight") = py::none(),
           py::arg("positive") = "", py::arg("missing") = std::vector<std::string>())
      .def("parse", &Parse, py::arg("lines"))
      .def("split", &Split, py::arg("line"));
}

}  // namespace oe
