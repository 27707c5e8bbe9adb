// The indexer, which chooses the compressed rows that a row attends to.
#pragma once

#include "cuda/context.h"
#include "ops_latent.h"

namespace ds4::cuda {

// See LatentOps::select and select_short (`short_values`).
Selection select_rows(Context& context, Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows,
                      int64_t ratio, int64_t heads, int64_t k, bool short_values);

}  // namespace ds4::cuda
