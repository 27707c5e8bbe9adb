// Attention of all heads over one list of latent rows, and the indexer that chooses them.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// Whether attention with heads of `dim` columns takes Context::raw_heads as its queries.
bool attention_norms(int64_t dim);
// See LatentOps::latent_attention, latent_attention_rope (`table`, or null), select and select_short (`short_values`).
void latent_attention(Context& context, Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                      const Selection* selection, const Tensor* table, Tensor out);
Selection select_rows(Context& context, Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows,
                      int64_t ratio, int64_t heads, int64_t k, bool short_values);

}  // namespace ds4::cuda
