// The mixture of experts: products grouped by expert.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// See LatentOps::moe. Of few rows the sum is left in `context.owed`.
void experts(Context& context, const CudaWeight& gate_up, const CudaWeight& down, Tensor x, const Routing& routing,
             float limit, Tensor y);
// Adds what the context owes to a tensor.
void settle(Context& context);

}  // namespace ds4::cuda
