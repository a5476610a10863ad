// The one hash of strings.
#include <pybind11/numpy.h>
#include <xxhash.h>

#include <string>
#include <utility>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/wire/errors.h"

namespace py = pybind11;

namespace oe {
namespace {

using Bytes8 = py::array_t<uint8_t, py::array::c_style>;

template <typename Offset>
void HashAll(const Offset* offsets, size_t strings, const uint8_t* data, size_t size, uint64_t seed,
             uint64_t* out) {
  for (size_t i = 0; i < strings; ++i) {
    const Offset begin = offsets[i];
    const Offset end = offsets[i + 1];
    if (begin < 0 || end < begin || static_cast<uint64_t>(end) > size) {
      throw SpecError("string " + std::to_string(i) + " lies from " + std::to_string(begin) + " to " +
                      std::to_string(end) + " in " + std::to_string(size) + " bytes of data");
    }
    out[i] = XXH3_64bits_withSeed(data + begin, static_cast<size_t>(end - begin), seed);
  }
}

template <typename Offset>
py::array HashStringsOf(const py::array_t<Offset, py::array::c_style>& offsets, const Bytes8& data,
                        uint64_t seed) {
  const auto count = static_cast<size_t>(offsets.size());
  const size_t strings = count == 0 ? 0 : count - 1;
  py::array_t<uint64_t> hashes(static_cast<py::ssize_t>(strings));
  const Offset* from = offsets.data();
  const uint8_t* bytes = data.data();
  const auto size = static_cast<size_t>(data.size());
  uint64_t* out = hashes.mutable_data();
  {
    const py::gil_scoped_release release;
    HashAll(from, strings, bytes, size, seed, out);
  }
  return hashes;
}

py::array HashStrings(const py::array& offsets, const Bytes8& data, uint64_t seed) {
  if (py::isinstance<py::array_t<int32_t>>(offsets)) {
    return HashStringsOf<int32_t>(py::array_t<int32_t, py::array::c_style>(offsets), data, seed);
  }
  if (py::isinstance<py::array_t<int64_t>>(offsets)) {
    return HashStringsOf<int64_t>(py::array_t<int64_t, py::array::c_style>(offsets), data, seed);
  }
  throw py::type_error("offsets must be int32 or int64");
}

}  // namespace

void BindStrings(py::module_& module) {
  module.def("hash_strings", &HashStrings, py::arg("offsets"), py::arg("data"), py::arg("seed") = 0,
             "XXH3-64 of the strings data[offsets[i]:offsets[i + 1]] as a uint64 array.");
}

}  // namespace oe
