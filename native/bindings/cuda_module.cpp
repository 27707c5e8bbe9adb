// ds4._cuda: the CUDA backend as a Python extension module. The runtime is linked statically, so the module loads, and
// says that there is no device, also where no driver is installed.
#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/cuda.h"
#include "cuda/devices.h"
#include "reference/reference.h"

namespace ds4 {
namespace {

namespace py = pybind11;

// ([(name, bytes, why it cannot be used or "")], why there are none)
std::pair<py::list, std::string> devices() {
  std::string why;
  std::vector<CudaDevice> found;
  std::vector<std::string> problems;
  {
    const py::gil_scoped_release release;  // the first call opens the driver
    found = cuda_devices(why);
    for (size_t i = 0; i < found.size(); ++i) problems.push_back(cuda_device_problem(static_cast<int>(i)));
  }
  py::list out;
  for (size_t i = 0; i < found.size(); ++i)
    out.append(py::make_tuple(found[i].name, found[i].memory_bytes, problems[i]));
  return {std::move(out), std::move(why)};
}

}  // namespace

std::unique_ptr<Ops> open_ops(const std::string& kind, int, const std::string&) {
  if (kind == "cuda") return make_cuda_ops({});
  if (kind == "reference") return make_reference_ops();
  throw Unsupported("backend '" + kind + "' is not in ds4._cuda");
}

std::optional<size_t> free_device_memory(const std::string& kind) {
  if (kind != "cuda") return std::nullopt;
  return cuda_free_memory(0);
}

}  // namespace ds4

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA backend of ds4: kernels, model families, sessions, sampler.";
  ds4::bind_engine(m);
  ds4::bind_sampler(m);
  m.def("devices", &ds4::devices);
  m.def("runtime_versions", &ds4::cuda_runtime_versions);
}
