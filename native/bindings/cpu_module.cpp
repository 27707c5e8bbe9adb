// ds4._cpu: the CPU backend as a Python extension module.
#include "bindings.h"
#include "cpu/cpu.h"
#include "reference/reference.h"

namespace ds4 {

std::unique_ptr<Ops> open_ops(const std::string& kind, int threads, const std::string& isa) {
  if (kind == "cpu") return make_cpu_ops(threads, isa);
  if (kind == "reference") return make_reference_ops();
  throw Unsupported("backend '" + kind + "' is not in ds4._cpu");
}

std::optional<size_t> free_device_memory(const std::string&) {
  return std::nullopt;
}

}  // namespace ds4

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU backend of ds4: kernels, model families, sessions, sampler.";
  ds4::bind_ops(m);
  ds4::bind_engine(m);
  ds4::bind_sampler(m);
}
