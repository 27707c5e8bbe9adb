#include "bindings.h"

namespace ds4 {

void bind_ops(pybind11::module_& m) {
  (void)m;
}

}  // namespace ds4
