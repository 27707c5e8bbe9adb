// Attention over paged keys and values: cuts the rows of a step into work that threads share, in an order of f32
// operations that depends on absolute positions only.
//
// Each query row is computed by segments of kSegment keys (positions 0..255, 256..511, ...). A segment is one
// softmax; segments are merged online, in ascending order. Which thread computes a segment, with which other rows
// beside it, changes nothing in a row's arithmetic. Method: Dao et al., FlashAttention (arXiv 2205.14135).
#pragma once

#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/paged_state.h"
#include "cpu/pool.h"

namespace ds4::cpu {

class Attention {
 public:
  Attention(const Kernels& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}
  // See Ops::attention. Throws Invalid for a state without these buffers or positions.
  void run(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
           float scale, Tensor out);

 private:
  // Neighbouring rows of one session at consecutive positions.
  struct Block {
    const PagedState* state = nullptr;
    int64_t row = 0, rows = 0, position = 0, segments = 0;
    int64_t first_part = 0;  // of its partial results, in segments x KV heads
  };
  struct Shape {
    Tensor q, out;
    KvSlots kv;
    int64_t kv_heads, group, dim, padded;
    float scale;
  };
  // Per query vector: max [1], sum [16], acc [padded].
  struct Partial {
    float* max;
    float* sum;
    float* acc;
  };
  void cut(std::span<const RowRef> rows, const Shape& s);
  // Rounded up and ordered so that, from an aligned start, every accumulator is aligned.
  int64_t partial_floats(const Shape& s, int64_t vectors) const {
    return vectors * (16 + s.padded) + (vectors + 15) / 16 * 16;
  }
  Partial partial(const Shape& s, float* at, int64_t vectors) const {
    return {at + vectors * (16 + s.padded), at, at + vectors * 16};
  }
  const float* queries(const Shape& s, const Block& b, int64_t head) const;
  // `next`: whose keys of `next_head` are read after the block's last ones; null where nobody's are.
  void segment(const Shape& s, const Block& b, int64_t head, int64_t index, const float* q, Partial to,
               const Block* next = nullptr, int64_t next_head = 0) const;
  void fold(const Shape& s, const Block& b, int64_t index, Partial into, Partial from) const;
  void write(const Shape& s, const Block& b, int64_t head, Partial from) const;

  const Kernels& kernels_;
  ThreadPool& pool_;
  std::vector<Block> blocks_;
  std::vector<float> parts_;
};

const PagedState& paged(const State* state);  // throws Invalid for a state of another backend

}  // namespace ds4::cpu
