// The pieces of the extension modules, one module per kind of device; each file binds one room. `ds4._cpu` and
// `ds4._cuda` are linked from the same objects and from one file of their own (cpu_module.cpp, cuda_module.cpp), which
// says what can be opened.
//
// Types and exceptions are local to their module: two modules that bind the same classes live in one process.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>

#include "ops.h"

namespace ds4 {

void bind_ops(pybind11::module_& m);      // single operations on numpy arrays, host memory only: tests and benchmarks
void bind_engine(pybind11::module_& m);   // Backend, Model, Session, step
void bind_sampler(pybind11::module_& m);  // Sampler

// Defined once in each module. Throws Unsupported for a kind that the module does not hold.
std::unique_ptr<Ops> open_ops(const std::string& kind, int threads, const std::string& isa);
// Bytes that can still be allocated on the device of `open_ops(kind)`; none where it computes in host memory.
std::optional<size_t> free_device_memory(const std::string& kind);

}  // namespace ds4
