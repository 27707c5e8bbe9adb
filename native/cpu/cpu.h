// The CPU backend: every operation of ops.h on repacked weights, chosen for the instruction set at run time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops.h"

namespace ds4 {

// Instruction sets that this build holds and this machine runs, best first: "avx512", "avx2", "neon", "scalar".
std::vector<std::string> cpu_isas();

// `threads` 0: one per usable core; the calling thread is one of them. `isa` is "auto" or one of `cpu_isas()`.
// Throws Invalid for a negative or absurd thread count and for an unknown instruction set, Unsupported for one that
// this machine or build lacks. Calls to one object must not overlap.
std::unique_ptr<Ops> make_cpu_ops(int threads, const std::string& isa);

}  // namespace ds4
