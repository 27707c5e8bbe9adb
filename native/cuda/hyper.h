// Hyper-connections between two sub-layers in one kernel, for wide models.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// `out` given: hc_out with `mix` first, which adds what the context owes it. Then hc_in with its norm; y is also left
// rounded in the context. False: a shape that the kernel is not for, and nothing was done.
bool mix_and_norm(Context& context, const HyperConnection& hc, const Tensor* out, Tensor streams, const float* gain,
                  float eps, Tensor y, Tensor mix);

}  // namespace ds4::cuda
