// What a model file hands to a family: hyper-parameters and tensors by name. A family takes what it knows; whatever
// is left over changes the computation in a way it does not implement, and is refused by name.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "types.h"

namespace ds4 {

using HyperValue = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

// Keys are GGUF's without the architecture prefix: "attention.head_count". Getters throw Invalid, naming the key, when
// it is missing or of another type.
class HyperParams {
 public:
  explicit HyperParams(std::map<std::string, HyperValue> values) : values_(std::move(values)) {}

  bool has(const std::string& key) const { return values_.contains(key); }
  int64_t integer(const std::string& key);
  int64_t integer_or(const std::string& key, int64_t otherwise);
  // As `integer`; throws Invalid outside [low, high].
  int64_t size(const std::string& key, int64_t low, int64_t high);
  double real(const std::string& key);
  double real_or(const std::string& key, double otherwise);
  bool flag_or(const std::string& key, bool otherwise);
  std::vector<int64_t> integers(const std::string& key);
  // One number, or the same number for every layer.
  double uniform_or(const std::string& key, double otherwise);
  std::string text_or(const std::string& key, const std::string& otherwise);
  // Keys with this prefix change nothing in the computation.
  void ignore(const std::string& prefix);
  // Throws Unsupported, naming the key, when a value was given that nobody has read.
  void refuse_unread() const;

 private:
  const HyperValue* take(const std::string& key);
  [[noreturn]] void wrong(const std::string& key, const char* expected) const;

  std::map<std::string, HyperValue> values_;
  std::set<std::string> read_;
};

// A tensor as stored: row-major, the last axis contiguous. A vector has one axis.
struct StoredTensor {
  MatrixView view;
  int64_t axes = 2;
};

class TensorTable {
 public:
  explicit TensorTable(std::map<std::string, StoredTensor> tensors) : tensors_(std::move(tensors)) {}

  // Throw Invalid, naming the tensor, when it is missing or has another shape than asked for.
  MatrixView matrix(const std::string& name, int64_t rows, int64_t cols);
  MatrixView vector(const std::string& name, int64_t dim);
  // `count` matrices of one shape: one tensor of three axes, or one of two axes each, "base.0.weight" for number 0 of
  // "base.weight".
  std::vector<MatrixView> slabs(const std::string& name, int64_t count, int64_t rows, int64_t cols);
  bool has(const std::string& name) const { return tensors_.contains(name); }
  std::optional<MatrixView> matrix_if_present(const std::string& name, int64_t rows, int64_t cols);
  std::optional<MatrixView> vector_if_present(const std::string& name, int64_t dim);
  // Throws Unsupported, naming the tensor, when one is left that nobody has taken.
  void refuse_untaken() const;

 private:
  std::map<std::string, StoredTensor> tensors_;
  std::set<std::string> taken_;
};

}  // namespace ds4
