// Products of the experts that a step of few rows meets (expert_blocks.h, expert_row.h).
#pragma once

#include "cuda/linear.h"

namespace ds4::cuda {

// What the experts multiply: rows rounded before, pair p reads row p / per_row; or `rows` [pairs][cols], which the
// kernel rounds itself.
struct ExpertInput {
  Activations rounded{};
  const float* rows = nullptr;
  // The kernel before is one of these, of the same pairs. They let the next kernel start behind their own wait, so the
  // list of experts is complete when this one starts, and it asks for weights before it waits for the rows.
  bool early = false;
};

// Whether the kernels take a product of the pairs `args.experts`: their formats, rows of 4096 or 2048 columns.
bool experts_take(const Device& device, const Segment& w, const LinearArgs& args);
void linear_experts(const Device& device, const Segment& w, const ExpertInput& x, LinearArgs args);

}  // namespace ds4::cuda
