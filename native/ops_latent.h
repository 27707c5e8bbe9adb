// Operations of the DeepSeek V4 family: hyper-connections, latent attention over a window and compressed rows,
// and the mixture of experts. A backend that has them returns them from Ops::latent().
//
// The contract of ops.h holds here too: output row t depends on input row t and on the state of its own session only.
// The rows of one session stand together in a step, at consecutive positions.
//
// T: token rows of the step, H: width, n: residual streams, D: head width, R: rotated columns (the last R of a head).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ops.h"

namespace ds4 {

// Manifold-constrained hyper-connections (arXiv:2512.24880): n residual streams, mixed before and after a sub-layer.
struct HyperConnection {
  const Weight* fn = nullptr;     // [2n + n*n, n*H], or [n, n*H] for the head
  const Weight* base = nullptr;   // [1, 2n + n*n] or [1, n]
  const Weight* scale = nullptr;  // [1, 3] or [1, 1]
  int64_t streams = 4;
  int64_t iterations = 20;  // of Sinkhorn's algorithm, the first column step included
  float norm_eps = 1e-6f;
  float eps = 1e-6f;
};

// Simulated storage precision of the key rows that a model was trained with.
enum class RowRounding {
  None,
  Fp8,          // all but the last R columns: e4m3 in groups of 64 with a power-of-two scale
  HadamardFp4,  // orthonormal Hadamard transform of the whole row, then e2m1 in groups of 32 with a power-of-two scale
};

// Where a compressor keeps its projections and its result.
struct Compressor {
  size_t ring = 0;               // Ring: [2 * lanes * dim] per token, keys then gates (position bias added)
  size_t rows = 0;               // Append, `ratio` tokens per row: [dim]
  const Weight* bias = nullptr;  // [ratio, lanes * dim], by position within the window
  const Weight* gain = nullptr;  // [1, dim]
  std::span<const float> freq;   // radians per position of the R/2 rotated pairs
  int64_t ratio = 4;             // 4: two lanes, windows overlap by one; any other: one lane
  int64_t dim = 0;
  float eps = 1e-6f;
  RowRounding rounding = RowRounding::None;
};

// Compressed rows that each token row attends to. counts[t] < 0: all that are visible. Otherwise the first counts[t] of
// ids[t * capacity ...], ascending. Lives in the backend's scratch memory.
struct Selection {
  int32_t* ids = nullptr;
  int32_t* counts = nullptr;
  int64_t n = 0;
  int64_t capacity = 0;
};

// The experts of each token row and their weights, [T, k]; an expert occurs once per row. Scratch memory.
struct Routing {
  int32_t* experts = nullptr;
  float* weights = nullptr;
  int64_t n = 0;
  int64_t k = 0;
};

struct LatentAttention {
  size_t window_ring = 0;  // Ring: [D] per token
  int64_t window = 128;    // tokens, the current one included
  bool compressed = false;
  size_t rows = 0;                // Append: [D] per `ratio` tokens
  int64_t ratio = 1;              // of `rows`
  const Weight* sinks = nullptr;  // [1, heads]: one logit per head without a value
  int64_t heads = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  int64_t short_columns = 0;  // at the start of every row, with at most eight significant bits, as after Fp8
};

class LatentOps {
 public:
  virtual ~LatentOps() = default;

  // z = streams / rms(streams); c = fn z; pre = sigmoid(c[0:n] s0 + b) + eps; post = 2 sigmoid(c[n:2n] s1 + b);
  // M = Sinkhorn(softmax_rows(c[2n:] s2 + b) + eps). y = sum_j pre[j] streams[j]; mix = (post | M), M[source][target].
  //   streams [T, n*H], y [T, H], mix [T, n + n*n]
  virtual void hc_in(const HyperConnection& hc, Tensor streams, Tensor y, Tensor mix) = 0;
  // hc_in, then y = rms_norm(y).
  virtual void hc_in_norm(Ops& ops, const HyperConnection& hc, Tensor streams, Norm norm, Tensor y, Tensor mix) {
    hc_in(hc, streams, y, mix);
    ops.rms_norm(y, norm, y);
  }
  // streams[k] = post[k] out + sum_j M[j][k] streams[j], in place.      out [T, H]
  virtual void hc_out(Tensor out, Tensor mix, int64_t n, Tensor streams) = 0;
  // hc_out with `mix`, then hc_in_norm, which writes it anew.
  virtual void hc_out_in_norm(Ops& ops, Tensor out, const HyperConnection& hc, Tensor streams, Norm norm, Tensor y,
                              Tensor mix) {
    hc_out(out, mix, hc.streams, streams);
    hc_in_norm(ops, hc, streams, norm, y, mix);
  }
  // y = sum_j (sigmoid(c[j] s0 + b[j]) + eps) streams[j].               y [T, H]
  virtual void hc_head(const HyperConnection& hc, Tensor streams, Tensor y) = 0;

  // x / rms(x) of each head, without gain, in place.                    x [T, heads * D]
  virtual void head_norm(Tensor x, int64_t heads, float eps) = 0;
  // (cos, sin) of the f32 product position * freq: the one rounding is part of what the model was trained with.
  virtual void rope_table_f32(std::span<const RowRef> rows, std::span<const float> freq, Tensor out) = 0;
  // Rotates the last R columns of each head, adjacent pairs, by the angle or its negative, in place.
  //   x [T, heads * D], table [T, R]: cos then sin
  virtual void rope_tail(Tensor x, Tensor table, int64_t heads, bool inverse) = 0;
  // In place, each head a row; `rotated` columns at the end are exempt from Fp8. x [T, heads * D]
  virtual void round_rows(Tensor x, int64_t heads, RowRounding rounding, int64_t rotated) = 0;

  // head_norm, then rope_tail.
  virtual void head_norm_rope(Tensor x, int64_t heads, float eps, Tensor table) {
    head_norm(x, heads, eps);
    rope_tail(x, table, heads, false);
  }
  // A key row: rms_norm, rope_tail and round_rows of one head, in place.       x [T, D], table [T, R]
  virtual void key_row(Ops& ops, Tensor x, Norm norm, Tensor table, RowRounding rounding) {
    ops.rms_norm(x, norm, x);
    rope_tail(x, table, 1, false);
    if (rounding != RowRounding::None) round_rows(x, 1, rounding, table.dim);
  }

  // The indexer's queries: rope_tail and round_rows, in place.               x [T, heads * D], table [T, R]
  virtual void index_query(Tensor x, Tensor table, int64_t heads, RowRounding rounding) {
    rope_tail(x, table, heads, false);
    if (rounding != RowRounding::None) round_rows(x, heads, rounding, table.dim);
  }

  // x[t] becomes row rows[t].position of the ring.
  virtual void ring_store(Tensor x, std::span<const RowRef> rows, size_t ring) = 0;
  // y[t] = the row of position rows[t].position - 1 of the same session: of x where this step has it, else of the ring;
  // zeros before position 0.    x, y [T, dim]
  virtual void previous_rows(Tensor x, std::span<const RowRef> rows, size_t ring, Tensor y);
  // Adds the position bias to the gates, stores both, and where a window closes appends the pooled row: per column a
  // softmax over the window's gates (ratio 4: lane 0 of the window before, lane 1 of this one), normed, rotated at the
  // window's first position, rounded.    kg [T, 2 * lanes * dim]
  virtual void compress(Tensor kg, std::span<const RowRef> rows, const Compressor& c) = 0;
  // The k best rows by sum_h weight[h] max(0, q_h . row): higher score first, then the lower id. All are visible where
  // there are at most k.  q [T, heads * dim], weight [T, heads]
  virtual Selection select(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows, int64_t ratio,
                           int64_t heads, int64_t k) = 0;
  // select where q and the rows have at most eight significant bits a value, as after HadamardFp4.
  virtual Selection select_short(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows,
                                 int64_t ratio, int64_t heads, int64_t k) {
    return select(q, weight, rows, index_rows, ratio, heads, k);
  }
  // Softmax attention of every head over the last `window` latent rows (those of this step in `kv`, older ones in the
  // ring) and the selected compressed rows; a row is key and value. `selection` null: all compressed rows.
  //   q [T, heads * D], kv [T, D], out [T, heads * D]
  virtual void latent_attention(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                                const Selection* selection, Tensor out) = 0;
  // latent_attention, then rope_tail by the negative angle.                    table [T, R]
  virtual void latent_attention_rope(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                                     const Selection* selection, Tensor table, Tensor out) {
    latent_attention(q, kv, rows, a, selection, out);
    rope_tail(out, table, a.heads, true);
  }
  // A matrix for grouped_linear.
  virtual std::unique_ptr<Weight> load_grouped(const MatrixView& view, int64_t groups) = 0;
  // Block-diagonal y = W x: group g of the rows of W reads columns of group g of x only.
  //   w [groups * rank, in], x [T, groups * in], y [T, groups * rank]
  virtual void grouped_linear(const Weight& w, Tensor x, int64_t groups, Tensor y) = 0;

  // y = silu(min(G x, limit)) * clamp(U x, +-limit); w loaded as SwiGLU.   x [T, H], y [T, F]
  virtual void linear_swiglu_clamped(const Weight& w, Tensor x, float limit, Tensor y) = 0;
  // Score sqrt(softplus(logit)). With a table, the experts of id i are table row i; else the k best of score + bias,
  // ties to the lower expert. Weights are the unbiased scores, normalised to sum `scale`.
  //   logits [T, E], bias [1, E] or null, table [vocab, k] as I32 or null
  virtual Routing route(Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids, int64_t k,
                        float scale) = 0;
  // The routes of logits = W x; `logits` is room for them and may be left as it is.
  //   W [E, H], x [T, H], logits [T, E]
  virtual Routing router(Ops& ops, const Weight& w, Tensor x, Tensor logits, const Weight* bias, const Weight* table,
                         std::span<const int32_t> ids, int64_t k, float scale) {
    ops.linear(w, x, nullptr, nullptr, logits);
    return route(logits, bias, table, ids, k, scale);
  }
  // The experts' matrices in order, of one shape and type: gate_0, up_0, gate_1, ... for SwiGLU, down_0, ... for
  // Linear.
  virtual std::unique_ptr<Weight> load_experts(std::span<const MatrixView> parts, int64_t experts, WeightUse use) = 0;
  // An I32 table, [rows, cols].
  virtual std::unique_ptr<Weight> load_table(const MatrixView& view) = 0;
  // y += sum_k weight_k down_k(silu(min(gate_k x, limit)) * clamp(up_k x, +-limit)), added in the order of k.
  //   x [T, H], y [T, H]
  virtual void moe(const Weight& gate_up, const Weight& down, Tensor x, const Routing& routing, float limit,
                   Tensor y) = 0;
};

}  // namespace ds4
