// The CUDA implementation of ops_latent.h.
#pragma once

#include <memory>

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

std::unique_ptr<LatentOps> make_latent_ops(Context& context);
// Does what Context::raw_heads still lack.
void settle_heads(Context& context);

}  // namespace ds4::cuda
