// Which kernel of linear.h a product of a block format takes; included by the files that instantiate them.
#pragma once

#include "cuda/dense_blocks.h"
#include "cuda/stream_blocks.h"
#include "cuda/tile_blocks.h"
#include "cuda/wide_blocks.h"

namespace ds4::cuda {

template <DType type>
void launch_blocks(const Device& device, const Planes& w, const Activations& x, const LinearArgs& p) {
  if (p.items)
    launch_item_tiles<type>(device, w, x, p);
  else if (dense_kernel_takes<type>(device, p))
    launch_dense<type>(device, w, x, p);
  else if (p.experts ? p.alone : p.T == 1)
    launch_stream<type, 1, true>(device, w, x, p);
  else if (p.experts || p.T <= 8)
    launch_stream<type, 1, false>(device, w, x, p);
  else if (p.T <= 16)
    launch_stream<type, 2, false>(device, w, x, p);
  else if (p.T <= 32)
    launch_stream<type, 4, false>(device, w, x, p);
  else if (wide_kernel_takes<type>(device, p))
    launch_wide<type>(device, w, x, p);
  else
    launch_tiles<type>(device, w, x, p);
}

}  // namespace ds4::cuda
