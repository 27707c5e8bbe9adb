// The CPU backend's operations of the DeepSeek V4 family, see latent.cpp.
#pragma once

#include <functional>
#include <memory>

#include "cpu/latent_kernels.h"
#include "cpu/pool.h"
#include "ops_latent.h"

namespace ds4::cpu {

// y = silu(min(G x, limit)) * clamp(U x, +-limit), on a weight loaded as SwiGLU.
using ClampedSwiglu = std::function<void(const Weight&, Tensor x, float limit, Tensor y)>;

// `ops` gives matrix products and scratch memory and outlives the result, as does `pool`.
std::unique_ptr<LatentOps> make_latent_ops(Ops& ops, ClampedSwiglu swiglu, const LatentKernels& kernels,
                                           ThreadPool& pool);

}  // namespace ds4::cpu
