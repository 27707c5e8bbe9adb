#pragma once

#include "common.h"

namespace ds4::gpu {

// Sessions that decode side by side against each alone, for a backend of this machine.
void check_lanes(Ops& ops, Results& results, uint64_t seed);

}  // namespace ds4::gpu
