// Which experts each row of activations takes.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// See LatentOps::route.
Routing route(Context& context, Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids,
              int64_t k, float scale);

// LatentOps::router of few rows in one kernel, with the bits of the product and `route`; the logits are not kept.
// False: a shape that the kernel is not for, and nothing was done.
bool route_rows(Context& context, const CudaWeight& w, Tensor x, const Weight* bias, const Weight* table,
                std::span<const int32_t> ids, int64_t k, float scale, Routing& out);

}  // namespace ds4::cuda
