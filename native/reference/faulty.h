// A backend that fails on demand: passes every operation on to another backend, and throws at the n-th one from now.
// Tests use it to walk every point at which a step can fail.
#pragma once

#include <atomic>
#include <memory>

#include "ops.h"

namespace ds4 {

struct FaultPlan {
  std::atomic<int64_t> operations_left{-1};  // throws when it counts down to 0; negative: never
};

// Throws std::runtime_error("injected failure") once per plan; also counts State::reserve, as std::bad_alloc.
std::unique_ptr<Ops> make_faulty_ops(std::unique_ptr<Ops> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace ds4
