// A draw (draw.h) by one thread.
#pragma once

#include "draw.h"

namespace ds4 {

// `logits` [at least plan.settings.vocab] are changed by the plan's edits. `capacity`: candidates in the first of two
// lists; the result does not depend on it.
int32_t draw_row(const DrawPlan& plan, std::span<float> logits, int32_t capacity = 1024);

}  // namespace ds4
