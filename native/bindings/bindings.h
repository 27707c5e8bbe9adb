// The pieces of the extension module `ds4._cpu`; each file binds one room.
#pragma once

#include <pybind11/pybind11.h>

namespace ds4 {

void bind_ops(pybind11::module_& m);      // single operations on numpy arrays: tests and benchmarks
void bind_engine(pybind11::module_& m);   // Backend, Model, Session, step
void bind_sampler(pybind11::module_& m);  // Sampler

}  // namespace ds4
