#include "random_models.h"

#include <algorithm>

namespace ds4::gpu {
namespace {

class Builder {
 public:
  Builder(RandomModel& model, bool hollow) : model_(model), random_(model.seed), hollow_(hollow) {}

  void matrix(const std::string& name, DType type, int64_t rows, int64_t cols, float scale = 1.0f) {
    const float size = scale / std::sqrt(static_cast<float>(cols));
    const void* data = hollow_ && rows > 1 && cols > 1 ? nowhere() : keep(random_.matrix(type, rows, cols, size));
    model_.tensors[name] = {{data, rows, cols, type}, 2};
  }
  // `count` matrices of one shape as one tensor.
  void slabs(const std::string& name, DType type, int64_t count, int64_t rows, int64_t cols) {
    matrix(name, type, count * rows, cols);
    model_.tensors[name].axes = 3;
  }
  // around + uniform in [-spread, spread)
  void vector(const std::string& name, int64_t dim, float around, float spread) {
    std::vector<float> v = random_.floats(dim, spread);
    for (float& x : v) x += around;
    std::vector<std::byte> bytes(v.size() * 4);
    std::memcpy(bytes.data(), v.data(), bytes.size());
    model_.tensors[name] = {{keep(std::move(bytes)), 1, dim, DType::F32}, 1};
  }
  // Rows of `cols` different numbers below `most`.
  void table(const std::string& name, int64_t rows, int64_t cols, int64_t most) {
    std::vector<std::byte> bytes(static_cast<size_t>(rows * cols) * 4);
    auto* out = reinterpret_cast<int32_t*>(bytes.data());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        int32_t& e = out[r * cols + c];
        do {
          e = static_cast<int32_t>(random_.below(most));
        } while (std::find(out + r * cols, &e, e) != &e);
      }
    model_.tensors[name] = {{keep(std::move(bytes)), rows, cols, DType::I32}, 2};
  }

 private:
  const void* keep(std::vector<std::byte> bytes) {
    model_.memory.push_back(std::make_shared<std::vector<std::byte>>(std::move(bytes)));
    return model_.memory.back()->data();
  }
  const void* nowhere() {
    if (!nowhere_) nowhere_ = keep(std::vector<std::byte>(64));
    return nowhere_;
  }
  RandomModel& model_;
  Random random_;
  bool hollow_;
  const void* nowhere_ = nullptr;
};

}  // namespace

RandomModel random_llama(uint64_t seed, const LlamaTypes& types) {
  RandomModel m;
  m.seed = seed;
  m.family = "llama";
  const int64_t layers = 3, width = 256, heads = 6, kv = 2, dim = 64, ff = 512, vocab = 320;
  m.values = {{"block_count", layers},
              {"embedding_length", width},
              {"feed_forward_length", ff},
              {"attention.head_count", heads},
              {"attention.head_count_kv", kv},
              {"attention.key_length", dim},
              {"attention.layer_norm_rms_epsilon", 1e-5},
              {"vocab_size", vocab}};
  Builder b(m, false);
  b.matrix("token_embd.weight", types.attention, vocab, width, 16.0f);
  b.vector("output_norm.weight", width, 1.0f, 0.2f);
  for (int64_t l = 0; l < layers; ++l) {
    const std::string p = "blk." + std::to_string(l) + ".";
    b.vector(p + "attn_norm.weight", width, 1.0f, 0.2f);
    b.matrix(p + "attn_q.weight", types.attention, heads * dim, width);
    b.matrix(p + "attn_k.weight", types.attention, kv * dim, width);
    b.matrix(p + "attn_v.weight", types.feed_forward, kv * dim, width);
    b.matrix(p + "attn_output.weight", types.attention, width, heads * dim);
    b.vector(p + "ffn_norm.weight", width, 1.0f, 0.2f);
    b.matrix(p + "ffn_gate.weight", types.feed_forward, ff, width);
    b.matrix(p + "ffn_up.weight", types.feed_forward, ff, width);
    b.matrix(p + "ffn_down.weight", types.feed_forward, width, ff);
  }
  return m;
}

DeepSeekShape tiny_deepseek() {
  return {.layers = 5,
          .width = 256,
          .vocab = 320,
          .heads = 4,
          .head_dim = 128,
          .rotated = 64,
          .q_rank = 128,
          .groups = 2,
          .rank = 64,
          .window = 16,
          .index_heads = 32,
          .index_dim = 128,
          .top_k = 8,
          .experts = 8,
          .used = 3,
          .ff = 256,
          .hash_layers = 3,
          .ratios = {0, 0, 4, 128, 4}};
}

DeepSeekShape flash_deepseek(int64_t layers) {
  DeepSeekShape s{.layers = layers,
                  .width = 4096,
                  .vocab = 129280,
                  .heads = 64,
                  .head_dim = 512,
                  .rotated = 64,
                  .q_rank = 1024,
                  .groups = 8,
                  .rank = 1024,
                  .window = 128,
                  .index_heads = 64,
                  .index_dim = 128,
                  .top_k = 512,
                  .experts = 256,
                  .used = 6,
                  .ff = 2048,
                  .hash_layers = std::min<int64_t>(3, layers),
                  .ratios = {0, 0}};
  while (static_cast<int64_t>(s.ratios.size()) < layers) s.ratios.push_back(s.ratios.size() % 2 == 0 ? 4 : 128);
  return s;
}

RandomModel random_deepseek(const DeepSeekShape& s, uint64_t seed, const DeepSeekTypes& types, bool rounding,
                            bool hollow, Drafts drafts) {
  RandomModel m;
  m.seed = seed;
  m.family = "deepseek4";
  m.values = {{"block_count", s.layers},
              {"embedding_length", s.width},
              {"vocab_size", s.vocab},
              {"attention.head_count", s.heads},
              {"attention.key_length", s.head_dim},
              {"rope.dimension_count", s.rotated},
              {"attention.q_lora_rank", s.q_rank},
              {"attention.output_group_count", s.groups},
              {"attention.output_lora_rank", s.rank},
              {"attention.sliding_window", s.window},
              {"attention.indexer.head_count", s.index_heads},
              {"attention.indexer.key_length", s.index_dim},
              {"attention.indexer.top_k", s.top_k},
              {"hyper_connection.count", int64_t{4}},
              {"hyper_connection.sinkhorn_iterations", int64_t{20}},
              {"expert_count", s.experts},
              {"expert_used_count", s.used},
              {"expert_shared_count", int64_t{1}},
              {"expert_feed_forward_length", s.ff},
              {"hash_layer_count", s.hash_layers},
              {"expert_weights_scale", 1.5},
              {"swiglu_clamp_exp", 4.0},
              {"kv_qat", rounding},
              {"attention.compress_ratios", s.ratios}};
  Builder b(m, hollow);
  const int64_t n = 4, streams = n * s.width, q = s.heads * s.head_dim;
  b.matrix("token_embd.weight", types.small, s.vocab, s.width, std::sqrt(static_cast<float>(s.width)));
  b.matrix("output.weight", types.dense, s.vocab, s.width);
  b.vector("output_norm.weight", s.width, 1.0f, 0.2f);
  b.matrix("output_hc_fn.weight", types.small, n, streams);
  b.vector("output_hc_base.weight", n, 0.0f, 0.5f);
  b.vector("output_hc_scale.weight", 1, 1.0f, 0.2f);
  const auto layer = [&](const std::string& p, int64_t ratio, bool hashed) {
    for (const char* part : {"attn", "ffn"}) {
      const std::string hc = p + "hc_" + part + "_";
      b.matrix(hc + "fn.weight", types.small, 2 * n + n * n, streams);
      b.vector(hc + "base.weight", 2 * n + n * n, 0.0f, 1.0f);
      b.vector(hc + "scale.weight", 3, 1.0f, 0.3f);
      b.vector(p + part + "_norm.weight", s.width, 1.0f, 0.2f);
    }
    b.matrix(p + "attn_q_a.weight", types.dense, s.q_rank, s.width);
    b.vector(p + "attn_q_a_norm.weight", s.q_rank, 1.0f, 0.2f);
    b.matrix(p + "attn_q_b.weight", types.dense, q, s.q_rank);
    b.matrix(p + "attn_kv.weight", types.dense, s.head_dim, s.width);
    b.vector(p + "attn_kv_a_norm.weight", s.head_dim, 1.0f, 0.2f);
    b.vector(p + "attn_sinks.weight", s.heads, 0.0f, 1.0f);
    b.matrix(p + "attn_output_a.weight", types.dense, s.groups * s.rank, q / s.groups);
    b.matrix(p + "attn_output_b.weight", types.dense, s.width, s.groups * s.rank);
    if (ratio != 0) {
      const int64_t dim = (ratio == 4 ? 2 : 1) * s.head_dim;
      b.matrix(p + "attn_compressor_kv.weight", types.small, dim, s.width);
      b.matrix(p + "attn_compressor_gate.weight", types.small, dim, s.width);
      b.matrix(p + "attn_compressor_ape.weight", types.small, ratio, dim, std::sqrt(static_cast<float>(dim)));
      b.vector(p + "attn_compressor_norm.weight", s.head_dim, 1.0f, 0.2f);
    }
    if (ratio == 4) {
      b.matrix(p + "indexer.attn_q_b.weight", types.small, s.index_heads * s.index_dim, s.q_rank);
      b.matrix(p + "indexer.proj.weight", types.small, s.index_heads, s.width);
      b.matrix(p + "indexer_compressor_kv.weight", types.small, 2 * s.index_dim, s.width);
      b.matrix(p + "indexer_compressor_gate.weight", types.small, 2 * s.index_dim, s.width);
      b.matrix(p + "indexer_compressor_ape.weight", types.small, 4, 2 * s.index_dim, 16.0f);
      b.vector(p + "indexer_compressor_norm.weight", s.index_dim, 1.0f, 0.2f);
    }
    b.matrix(p + "ffn_gate_inp.weight", types.small, s.experts, s.width);
    if (hashed)
      b.table(p + "ffn_gate_tid2eid.weight", s.vocab, s.used, s.experts);
    else
      b.vector(p + "exp_probs_b.bias", s.experts, 0.0f, 0.2f);
    b.slabs(p + "ffn_gate_exps.weight", types.gate_up, s.experts, s.ff, s.width);
    b.slabs(p + "ffn_up_exps.weight", types.gate_up, s.experts, s.ff, s.width);
    b.slabs(p + "ffn_down_exps.weight", types.down, s.experts, s.width, s.ff);
    b.matrix(p + "ffn_gate_shexp.weight", types.dense, s.ff, s.width);
    b.matrix(p + "ffn_up_shexp.weight", types.dense, s.ff, s.width);
    b.matrix(p + "ffn_down_shexp.weight", types.dense, s.width, s.ff);
  };
  for (int64_t l = 0; l < s.layers; ++l)
    layer("blk." + std::to_string(l) + ".", s.ratios[static_cast<size_t>(l)], l < s.hash_layers);
  if (drafts == Drafts::None) return m;
  const int64_t stages = drafts == Drafts::Mtp ? 1 : 3, rank = 32;
  const std::string last = "mtp." + std::to_string(stages - 1) + ".";
  m.values["draft.ahead"] = int64_t{5};
  for (int64_t stage = 0; stage < stages; ++stage) layer("mtp." + std::to_string(stage) + ".", 0, false);
  b.vector(last + "norm.weight", s.width, 1.0f, 0.2f);
  b.matrix(last + "hc_head_fn.weight", types.small, n, streams);
  b.vector(last + "hc_head_base.weight", n, 0.0f, 0.5f);
  b.vector(last + "hc_head_scale.weight", 1, 1.0f, 0.2f);
  if (drafts == Drafts::Mtp) {
    b.matrix("mtp.0.e_proj.weight", types.dense, s.width, s.width);
    b.matrix("mtp.0.h_proj.weight", types.dense, s.width, s.width);
    b.vector("mtp.0.enorm.weight", s.width, 1.0f, 0.2f);
    b.vector("mtp.0.hnorm.weight", s.width, 1.0f, 0.2f);
    return m;
  }
  m.values.insert({{"dspark.block_size", int64_t{5}},
                   {"dspark.markov_rank", rank},
                   {"dspark.noise_token_id", s.vocab - 1},
                   {"dspark.stage_count", stages},
                   {"dspark.target_layer_ids", std::vector<int64_t>{2, 3, 4}},
                   {"draft.confidence", 0.01}});
  b.matrix("mtp.0.main_proj.weight", types.dense, s.width, 3 * s.width);
  b.vector("mtp.0.main_norm.weight", s.width, 1.0f, 0.2f);
  b.matrix(last + "markov_head.markov_w1.weight", types.small, s.vocab, rank);
  b.matrix(last + "markov_head.markov_w2.weight", types.small, s.vocab, rank);
  b.matrix(last + "confidence_head.proj.weight", types.small, 1, s.width + rank);
  return m;
}

}  // namespace ds4::gpu
