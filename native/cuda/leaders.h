// Which experts a step of few rows meets, found by every block of threads for itself.
#pragma once

#include "cuda/linear.h"

namespace ds4::cuda {

// The pairs of few rows grouped by expert, up to kEach of an expert together, in the order of their first pairs. Places
// behind a group's size hold its first pair again.
template <int kEach>
struct Leaders {
  int count;
  int votes[kMostPairs / 32];
  int expert[kMostPairs];
  int size[kMostPairs];
  int16_t members[kMostPairs][kEach];

  // By a block of at least kMostPairs threads; `scratch` holds 2 * kMostPairs words, aligned to four.
  __device__ __forceinline__ void find(const int32_t* experts, int pairs, int* scratch) {
    const int p = threadIdx.x;
    int* const place = scratch + kMostPairs;
    const int own = p < pairs ? __ldcg(experts + p) : -1;
    if (p < kMostPairs) scratch[p] = own;
    __syncthreads();
    int lead = p, rank = 0;
    bool leads = false;
    if (p < kMostPairs) {
      const int before = p < pairs ? p : 0;
      for (int i = 0; i < before; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(scratch + i);
        const int e[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (e[k] != own || i + k >= before) continue;
          if (rank == 0) lead = i + k;
          rank = rank + 1 == kEach ? 0 : rank + 1;
        }
      }
      leads = p < pairs && rank == 0;
      const unsigned vote = __ballot_sync(0xFFFFFFFFu, leads);
      if (p % 32 == 0) votes[p / 32] = __popc(vote);
      place[p] = __popc(vote & ((1u << (p % 32)) - 1u));
    }
    __syncthreads();
    if (leads) {
      int at = place[p];
      for (int i = 0; i < p / 32; ++i) at += votes[i];
      place[p] = at;
      expert[at] = own;
      size[at] = 1;
#pragma unroll
      for (int k = 0; k < kEach; ++k) members[at][k] = static_cast<int16_t>(p);
    }
    if (p == 0) {
      int all = 0;
      for (const int v : votes) all += v;
      count = all;
    }
    __syncthreads();
    if (p < pairs && rank > 0) {
      const int at = place[lead];
      members[at][rank] = static_cast<int16_t>(p);
      atomicMax(&size[at], rank + 1);
    }
    __syncthreads();
  }
};

}  // namespace ds4::cuda
