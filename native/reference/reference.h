// The reference backend: every operation of ops.h as its definition reads, one scalar loop each, sums in f64. It is
// the oracle that the fast backends are judged by, and runs on every machine.
//
// Weights are held as exact f32 copies. Scratch is filled with NaN, so that a model that reads what no operation
// wrote shows it.
#pragma once

#include <memory>

#include "ops.h"

namespace ds4 {

std::unique_ptr<Ops> make_reference_ops();

}  // namespace ds4
