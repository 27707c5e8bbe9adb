// Hyper-connections between two sub-layers in one kernel, for wide models.
#pragma once

#include "cuda/context.h"
#include "cuda/hyper_math.h"
#include "ops_latent.h"

namespace ds4::cuda {

// `out` given: hc_out with `mix` first, which adds what the context owes it. Then hc_in with its norm; y is also left
// rounded in the context. False: a shape that the kernel is not for, and nothing was done.
bool mix_and_norm(Context& context, const HyperConnection& hc, const Tensor* out, Tensor streams, const float* gain,
                  float eps, Tensor y, Tensor mix);

// The same for many rows, in two kernels; `more` is to be added to `out`. Called by mix_and_norm, whose bits it leaves.
bool mix_many_rows(Context& context, const Segment& fn, const HyperArgs& a, const float* gain, float eps,
                   const Tensor* out, const Addends& more, Tensor streams, Tensor y, Tensor mix,
                   const Activations& codes);

}  // namespace ds4::cuda
