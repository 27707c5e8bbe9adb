// The mixture of experts: routing, and the experts' products grouped by expert.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// See LatentOps::route and LatentOps::moe.
Routing route(Context& context, Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids,
              int64_t k, float scale);
// Of few rows the sum is left in `context.owed`.
void experts(Context& context, const CudaWeight& gate_up, const CudaWeight& down, Tensor x, const Routing& routing,
             float limit, Tensor y);
// Adds what the context owes to a tensor.
void settle(Context& context);

}  // namespace ds4::cuda
