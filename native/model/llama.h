// Llama and its relatives of the same graph (SmolLM2): see llama.cpp.
#pragma once

#include "model/model.h"

namespace ds4 {

std::unique_ptr<Model> make_llama(HyperParams params, TensorTable tensors, DType kv_type);

}  // namespace ds4
