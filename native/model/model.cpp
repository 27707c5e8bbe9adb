#include "model/model.h"

#include <algorithm>

#include "model/deepseek4.h"
#include "model/llama.h"
#include "quant/quant.h"

namespace ds4 {

bool can_truncate(std::span<const StateSpec> specs, int64_t longest, int64_t to) {
  return to == 0 || std::all_of(specs.begin(), specs.end(), [&](const StateSpec& s) {
           if (s.kind == StateKind::Append || s.draft) return true;
           return s.kind == StateKind::Ring && longest - s.kept() <= std::max<int64_t>(0, to - s.need);
         });
}

int64_t most_ahead(std::span<const StateSpec> specs) {
  int64_t most = kMostAhead;
  for (const StateSpec& s : specs)
    if (s.kind != StateKind::Append) most = std::min(most, s.kind == StateKind::Ring ? s.spare : 0);
  return most;
}

int64_t payload_rows(const StateSpec& spec, int64_t tokens) {
  switch (spec.kind) {
    case StateKind::Append:
      return tokens / spec.ratio;
    case StateKind::Ring:
      return std::min(tokens, spec.kept());
    case StateKind::Recurrent:
    case StateKind::Counter:
      break;
  }
  return spec.capacity;
}

size_t payload_bytes(std::span<const StateSpec> specs, int64_t tokens) {
  size_t bytes = 0;
  for (const StateSpec& spec : specs)
    bytes += static_cast<size_t>(payload_rows(spec, tokens)) * row_bytes(spec.type, spec.row_elements());
  return bytes;
}

std::unique_ptr<Model> make_model(const std::string& family, HyperParams params, TensorTable tensors, DType kv_type) {
  if (kv_type != DType::F16 && kv_type != DType::BF16 && kv_type != DType::F32)
    throw Unsupported(std::string("KV cache of type ") + dtype_name(kv_type));
  if (family == "llama") return make_llama(std::move(params), std::move(tensors), kv_type);
  if (family == "deepseek4") return make_deepseek4(std::move(params), std::move(tensors));
  throw Unsupported("general.architecture '" + family + "' is not implemented");
}

}  // namespace ds4
