// Training data: lines of text to arrays.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/data/text_rows.h"
#include "oe_runtime/core/wire/errors.h"

namespace py = pybind11;

namespace oe {
namespace {

CriteoLayout NewLayout(char delimiter, bool quotes, size_t columns, const std::vector<size_t>& places,
                       const std::vector<uint64_t>& cardinalities) {
  CriteoLayout layout;
  if (places.size() != kCriteoColumns || cardinalities.size() != kCriteoCategories) {
    throw SpecError("found " + std::to_string(places.size()) + " places and " +
                    std::to_string(cardinalities.size()) + " cardinalities, expected 40 and 26");
  }
  if (*std::max_element(places.begin(), places.end()) >= columns) {
    throw SpecError("a place is not below the " + std::to_string(columns) + " columns of a line");
  }
  const auto [least, most] = std::minmax_element(cardinalities.begin(), cardinalities.end());
  if (*least == 0 || *most > ~uint64_t{0} >> 1) {
    throw SpecError("a cardinality is 0 or beyond 63 bits");
  }
  layout.delimiter = delimiter;
  layout.quotes = quotes;
  layout.columns = columns;
  std::copy(places.begin(), places.end(), layout.places.begin());
  std::copy(cardinalities.begin(), cardinalities.end(), layout.cardinalities.begin());
  return layout;
}

// (labels, dense, ids, broken); ids are column-major.
py::tuple Parse(const CriteoLayout& layout, const py::bytes& lines) {
  const std::string_view text = lines;
  const auto capacity = [&] {
    const py::gil_scoped_release release;
    return CountLines(text);
  }();
  py::array_t<float> labels(static_cast<py::ssize_t>(capacity));
  py::array_t<float> dense({capacity, kCriteoIntegers});
  py::array_t<int64_t, py::array::f_style> ids({capacity, kCriteoCategories});
  const CriteoRows rows = {capacity, labels.mutable_data(), dense.mutable_data(), ids.mutable_data()};
  std::vector<BrokenLine> broken;
  size_t count = 0;
  {
    const py::gil_scoped_release release;
    count = ParseCriteo(text, layout, rows, &broken);
  }
  py::list problems;
  for (const BrokenLine& one : broken) problems.append(py::make_tuple(one.line, one.problem));
  const py::slice first(0, static_cast<py::ssize_t>(count), 1);
  return py::make_tuple(labels[first], dense[first], ids[first], problems);
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

std::vector<py::bytes> Split(const CriteoLayout& layout, const py::bytes& line) {
  std::vector<std::string_view> fields;
  std::string scratch;
  if (!SplitLine(line, layout, &fields, &scratch)) return {};
  return {fields.begin(), fields.end()};
}

}  // namespace

void BindData(py::module_& module) {
  module.attr("MAX_LINE_BYTES") = kMaxLineBytes;
  module.def("normalise", &NormaliseAll, py::arg("values"), "sign(x) log1p(|x|) of each value as float32.");
  py::class_<CriteoLayout>(module, "CriteoLayout", "How lines are divided, and which columns are which.")
      .def(py::init(&NewLayout), py::arg("delimiter"), py::arg("quotes"), py::arg("columns"),
           py::arg("places"), py::arg("cardinalities"))
      .def("parse", &Parse, py::arg("lines"))
      .def("split", &Split, py::arg("line"));
}

}  // namespace oe
