// DeepSeek V4 (Flash and PRO), see deepseek4.cpp.
#pragma once

#include <memory>

#include "model/model.h"

namespace ds4 {

std::unique_ptr<Model> make_deepseek4(HyperParams params, TensorTable tensors);

}  // namespace ds4
