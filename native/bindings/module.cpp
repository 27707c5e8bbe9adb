// ds4._cpu: the CPU backend as a Python extension module.
#include "bindings.h"

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU backend of ds4: kernels, model families, sessions, sampler.";
  ds4::bind_ops(m);
  ds4::bind_engine(m);
  ds4::bind_sampler(m);
}
