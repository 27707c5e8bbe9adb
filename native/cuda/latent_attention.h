// Attention of all heads over one list of latent rows.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// Whether attention with heads of `dim` columns takes Context::raw_heads as its queries.
bool attention_norms(int64_t dim);
// See LatentOps::latent_attention and latent_attention_rope (`table`, or null).
void latent_attention(Context& context, Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                      const Selection* selection, const Tensor* table, Tensor out);

}  // namespace ds4::cuda
