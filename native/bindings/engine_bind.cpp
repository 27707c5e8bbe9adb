// Binds the block formats, and the backend, model and session classes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "quant/quant.h"

namespace ds4 {
namespace py = pybind11;

namespace {

py::array_t<float> dequantize(int32_t type, const py::buffer& data) {
  const py::buffer_info info = data.request();
  if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1)
    throw Invalid("dequantize takes a contiguous row of bytes");
  const auto dtype = static_cast<DType>(type);
  const auto bytes = static_cast<int64_t>(info.size);
  const auto block = static_cast<int64_t>(block_bytes(dtype));
  if (bytes % block != 0)
    throw Invalid(std::to_string(bytes) + " bytes are not a whole number of " + dtype_name(dtype) + " blocks");
  py::array_t<float> out(bytes / block * block_elements(dtype));
  dequantize_row(dtype, info.ptr, out.mutable_data(), out.size());
  return out;
}

}  // namespace

void bind_engine(py::module_& m) {
  py::register_exception<Unsupported>(m, "Unsupported", PyExc_RuntimeError);
  m.def("dequantize", &dequantize, py::arg("type"), py::arg("data"));
  m.def(
      "row_bytes", [](int32_t type, int64_t cols) { return row_bytes(static_cast<DType>(type), cols); },
      py::arg("type"), py::arg("cols"));
  m.def("dtype_name", [](int32_t type) { return dtype_name(static_cast<DType>(type)); }, py::arg("type"));
  m.def("float_to_half", &float_to_half, py::arg("value"));
  m.def("half_to_float", &half_to_float, py::arg("half"));
  m.def("float_to_bf16", &float_to_bf16, py::arg("value"));
}

}  // namespace ds4
