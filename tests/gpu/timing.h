// Time of operations on the GPU. They are captured into a graph and replayed, so that launch gaps do not count.
#pragma once

#include <functional>

#include "ops.h"

namespace ds4::gpu {

// Median microseconds of one call of `once`; `calls` calls are one graph.
double time_op(Ops& ops, int calls, const std::function<void(int)>& once);

}  // namespace ds4::gpu
