// What the interfaces of ops.h and ops_latent.h do by themselves, beyond a line or two.
//
// Each class has one virtual function of its own here, so its table and the bodies that stand in the headers come from
// this object alone: never from one compiled for an instruction set that the machine may lack, nor from nvcc, whose
// closures have another layout than the host compiler's.
#include "ops.h"

#include <algorithm>
#include <vector>

#include "ops_latent.h"

namespace ds4 {

void Ops::draw(Tensor, std::span<const RowDraw>, std::span<int32_t>) {
  throw Unsupported("the backend draws no tokens");
}

void Ops::best(Tensor logits, std::span<Best> out) {
  std::vector<float> row(static_cast<size_t>(logits.dim));
  for (size_t i = 0; i < out.size(); ++i) {
    const Tensor one = logits.rows(static_cast<int64_t>(i), 1);
    if (!host_memory()) to_host(one, row.data());
    out[i] = best_of({host_memory() ? one.data : row.data(), row.size()});
  }
}

void LatentOps::previous_rows(Tensor x, std::span<const RowRef> rows, size_t ring, Tensor y) {
  for (size_t t = 0; t < rows.size(); ++t) {
    float* to = y.data + static_cast<int64_t>(t) * y.stride;
    if (rows[t].position == 0)
      std::fill_n(to, y.dim, 0.0f);
    else if (t > 0 && rows[t - 1].state == rows[t].state)
      std::copy_n(x.data + static_cast<int64_t>(t - 1) * x.stride, y.dim, to);
    else
      std::copy_n(rows[t].state->readable_row(ring, rows[t].position - 1), y.dim, to);
  }
}

}  // namespace ds4
