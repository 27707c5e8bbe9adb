// What attention kernels share: a row's visible positions are cut into chunks of 32 by their place in the list, each
// chunk gives a maximum, a sum of exponentials and a weighted sum, and the chunks are added up in order. The cut
// depends on the row's own position only.
#pragma once

#include "cuda/memory.h"
#include "cuda/state.h"

namespace ds4::cuda {

constexpr int kChunk = 32;  // a lane each

// Partial results of `lists` = rows * heads softmaxes: sums [lists][chunks][dim], stats [lists][chunks] of (max,
// total).
struct Partials {
  float* sums;
  float2* stats;
  int64_t chunks;  // capacity per list
};

// out[t][h * dim ...] = combination of the chunks of list t * heads + h. Row t has chunks_of(t) chunks: one for each 32
// of the `visible` entries. `sinks` [heads], or null: a logit without a value.
void combine(const Device& device, const Partials& p, const int32_t* visible, const float* sinks, int64_t T,
             int64_t heads, int64_t dim, Tensor out);

// Attention of ops.h.
void paged_attention(const Device& device, Tensor q, const DeviceRow* rows, int64_t longest, const BufferPlace& k,
                     const BufferPlace& v, int64_t q_heads, int64_t kv_heads, int64_t head_dim, float scale,
                     Workspace& workspace, Tensor out);

}  // namespace ds4::cuda
