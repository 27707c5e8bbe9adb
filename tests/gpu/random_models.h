// Llama and DeepSeek V4 models of any size with random weights, built from tensor tables without a file.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common.h"
#include "model/model.h"

namespace ds4::gpu {

// Owns the tensors; `make` gives a model over them.
struct RandomModel {
  uint64_t seed = 0;
  std::string family;
  std::map<std::string, HyperValue> values;
  std::map<std::string, StoredTensor> tensors;
  std::vector<std::shared_ptr<std::vector<std::byte>>> memory;
  DType kv_type = DType::F16;

  std::unique_ptr<Model> make() const { return make_model(family, HyperParams(values), TensorTable(tensors), kv_type); }
};

struct LlamaTypes {
  DType attention, feed_forward;
};
RandomModel random_llama(uint64_t seed, const LlamaTypes& types);

struct DeepSeekShape {
  int64_t layers, width, vocab, heads, head_dim, rotated, q_rank, groups, rank, window, index_heads, index_dim, top_k;
  int64_t experts, used, ff, hash_layers;
  std::vector<int64_t> ratios;
};
DeepSeekShape tiny_deepseek();
// Flash with the first `layers` layers.
DeepSeekShape flash_deepseek(int64_t layers);

struct DeepSeekTypes {
  DType small, dense, gate_up, down;  // small: hyper-connections, compressors, indexer, router, embedding
};
enum class Drafts { None, Mtp, DSpark };

// `rounding`: simulate the storage precision of key rows. `hollow`: matrices point nowhere, for a backend that fills
// them itself. `drafts`: with layers that draft.
RandomModel random_deepseek(const DeepSeekShape& shape, uint64_t seed, const DeepSeekTypes& types, bool rounding,
                            bool hollow = false, Drafts drafts = Drafts::None);

}  // namespace ds4::gpu
