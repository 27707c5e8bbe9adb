#include "reference/faulty.h"

#include <new>
#include <stdexcept>

#include "ops_latent.h"

namespace ds4 {
namespace {

bool due(FaultPlan& plan) {
  int64_t left = plan.operations_left.load();
  if (left < 0) return false;
  plan.operations_left = left - 1;
  return left == 0;
}

class FaultyState final : public State {
 public:
  FaultyState(std::unique_ptr<State> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  State* inner() const { return inner_.get(); }
  int64_t capacity() const override { return inner_->capacity(); }
  void reserve(int64_t tokens) override {
    if (due(*plan_)) throw std::bad_alloc();
    inner_->reserve(tokens);
  }
  void truncate(int64_t tokens) override { inner_->truncate(tokens); }
  void fork_from(const State& other, int64_t tokens) override {
    inner_->fork_from(*dynamic_cast<const FaultyState&>(other).inner_, tokens);
  }
  void export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const override {
    inner_->export_rows(index, first, count, out);
  }
  void import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) override {
    inner_->import_rows(index, first, count, in);
  }
  size_t resident_bytes() const override { return inner_->resident_bytes(); }
  const float* readable_row(size_t index, int64_t row) const override { return inner_->readable_row(index, row); }
  float* writable_row(size_t index, int64_t row) override { return inner_->writable_row(index, row); }

 private:
  std::unique_ptr<State> inner_;
  std::shared_ptr<FaultPlan> plan_;
};

std::vector<RowRef> unwrap(std::span<const RowRef> rows) {
  std::vector<RowRef> out(rows.begin(), rows.end());
  for (RowRef& row : out) row.state = dynamic_cast<FaultyState&>(*row.state).inner();
  return out;
}

class FaultyLatentOps final : public LatentOps {
 public:
  FaultyLatentOps(LatentOps& inner, std::shared_ptr<FaultPlan> plan) : inner_(inner), plan_(std::move(plan)) {}

  void hc_in(const HyperConnection& hc, Tensor streams, Tensor y, Tensor mix) override {
    counted().hc_in(hc, streams, y, mix);
  }
  void hc_out(Tensor out, Tensor mix, int64_t n, Tensor streams) override { counted().hc_out(out, mix, n, streams); }
  void hc_head(const HyperConnection& hc, Tensor streams, Tensor y) override { counted().hc_head(hc, streams, y); }
  void head_norm(Tensor x, int64_t heads, float eps) override { counted().head_norm(x, heads, eps); }
  void rope_table_f32(std::span<const RowRef> rows, std::span<const float> freq, Tensor out) override {
    counted().rope_table_f32(unwrap(rows), freq, out);
  }
  void rope_tail(Tensor x, Tensor table, int64_t heads, bool inverse) override {
    counted().rope_tail(x, table, heads, inverse);
  }
  void round_rows(Tensor x, int64_t heads, RowRounding rounding, int64_t rotated) override {
    counted().round_rows(x, heads, rounding, rotated);
  }
  void ring_store(Tensor x, std::span<const RowRef> rows, size_t ring) override {
    counted().ring_store(x, unwrap(rows), ring);
  }
  void previous_rows(Tensor x, std::span<const RowRef> rows, size_t ring, Tensor y) override {
    counted().previous_rows(x, unwrap(rows), ring, y);
  }
  void compress(Tensor kg, std::span<const RowRef> rows, const Compressor& c) override {
    counted().compress(kg, unwrap(rows), c);
  }
  Selection select(Tensor q, Tensor weight, std::span<const RowRef> rows, size_t index_rows, int64_t ratio,
                   int64_t heads, int64_t k) override {
    return counted().select(q, weight, unwrap(rows), index_rows, ratio, heads, k);
  }
  void latent_attention(Tensor q, Tensor kv, std::span<const RowRef> rows, const LatentAttention& a,
                        const Selection* selection, Tensor out) override {
    counted().latent_attention(q, kv, unwrap(rows), a, selection, out);
  }
  std::unique_ptr<Weight> load_grouped(const MatrixView& view, int64_t groups) override {
    return inner_.load_grouped(view, groups);
  }
  void grouped_linear(const Weight& w, Tensor x, int64_t groups, Tensor y) override {
    counted().grouped_linear(w, x, groups, y);
  }
  void linear_swiglu_clamped(const Weight& w, Tensor x, float limit, Tensor y) override {
    counted().linear_swiglu_clamped(w, x, limit, y);
  }
  Routing route(Tensor logits, const Weight* bias, const Weight* table, std::span<const int32_t> ids, int64_t k,
                float scale) override {
    return counted().route(logits, bias, table, ids, k, scale);
  }
  std::unique_ptr<Weight> load_experts(std::span<const MatrixView> parts, int64_t experts, WeightUse use) override {
    return inner_.load_experts(parts, experts, use);
  }
  std::unique_ptr<Weight> load_table(const MatrixView& view) override { return inner_.load_table(view); }
  void moe(const Weight& gate_up, const Weight& down, Tensor x, const Routing& routing, float limit,
           Tensor y) override {
    counted().moe(gate_up, down, x, routing, limit, y);
  }

 private:
  LatentOps& counted() {
    if (due(*plan_)) throw std::runtime_error("injected failure");
    return inner_;
  }

  LatentOps& inner_;
  std::shared_ptr<FaultPlan> plan_;
};

class FaultyOps final : public Ops {
 public:
  FaultyOps(std::unique_ptr<Ops> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {
    if (LatentOps* latent = inner_->latent()) latent_ = std::make_unique<FaultyLatentOps>(*latent, plan_);
  }

  LatentOps* latent() override { return latent_.get(); }
  std::string name() const override { return inner_->name() + " with injected failures"; }
  std::unique_ptr<Weight> load(std::span<const MatrixView> parts, WeightUse use) override {
    return inner_->load(parts, use);
  }
  Tensor scratch(int64_t n, int64_t dim) override {
    if (due(*plan_)) throw std::bad_alloc();
    return inner_->scratch(n, dim);
  }
  void reset_scratch() override { inner_->reset_scratch(); }
  size_t scratch_bytes() const override { return inner_->scratch_bytes(); }
  std::unique_ptr<State> new_state(std::span<const StateSpec> specs, int64_t capacity) override {
    return std::make_unique<FaultyState>(inner_->new_state(specs, capacity), plan_);
  }
  bool host_memory() const override { return inner_->host_memory(); }
  void to_host(const Tensor& from, float* out) override {
    count();
    inner_->to_host(from, out);
  }
  void to_device(const float* from, const Tensor& to) override {
    count();
    inner_->to_device(from, to);
  }
  void embed(const Weight& table, std::span<const int32_t> ids, Tensor out) override {
    count();
    inner_->embed(table, ids, out);
  }
  void rms_norm(Tensor x, Norm norm, Tensor y) override {
    count();
    inner_->rms_norm(x, norm, y);
  }
  void linear(const Weight& w, Tensor x, const Norm* norm, const Weight* bias, Tensor y) override {
    count();
    inner_->linear(w, x, norm, bias, y);
  }
  void linear_add(const Weight& w, Tensor x, Tensor y) override {
    count();
    inner_->linear_add(w, x, y);
  }
  void linear_swiglu(const Weight& w, Tensor x, const Norm* norm, Tensor y) override {
    count();
    inner_->linear_swiglu(w, x, norm, y);
  }
  void rope_table(std::span<const RowRef> rows, std::span<const double> freq, Tensor out) override {
    count();
    inner_->rope_table(unwrap(rows), freq, out);
  }
  void rope_store(Tensor qkv, Tensor table, RopeKind kind, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads,
                  int64_t kv_heads, int64_t head_dim) override {
    count();
    inner_->rope_store(qkv, table, kind, unwrap(rows), kv, q_heads, kv_heads, head_dim);
  }
  void attention(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads,
                 int64_t head_dim, float scale, Tensor out) override {
    count();
    inner_->attention(q, unwrap(rows), kv, q_heads, kv_heads, head_dim, scale, out);
  }
  void gather(Tensor x, std::span<const int32_t> index, Tensor out) override {
    count();
    inner_->gather(x, index, out);
  }

 private:
  void count() {
    if (due(*plan_)) throw std::runtime_error("injected failure");
  }

  std::unique_ptr<Ops> inner_;
  std::unique_ptr<LatentOps> latent_;
  std::shared_ptr<FaultPlan> plan_;
};

}  // namespace

std::unique_ptr<Ops> make_faulty_ops(std::unique_ptr<Ops> inner, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyOps>(std::move(inner), std::move(plan));
}

}  // namespace ds4
