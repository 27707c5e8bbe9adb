// The reference implementation of ops_latent.h: scalar, sums in f64.
#pragma once

#include <memory>

#include "ops_latent.h"

namespace ds4 {

// `ops` gives the scratch memory and outlives the result.
std::unique_ptr<LatentOps> make_reference_latent_ops(Ops& ops);

}  // namespace ds4
