#include "model/source.h"

#include "quant/quant.h"

namespace ds4 {

const HyperValue* HyperParams::take(const std::string& key) {
  const auto it = values_.find(key);
  if (it == values_.end()) return nullptr;
  read_.insert(key);
  return &it->second;
}

void HyperParams::wrong(const std::string& key, const char* expected) const {
  if (const auto it = values_.find(key);
      it != values_.end() && (std::holds_alternative<std::vector<int64_t>>(it->second) ||
                              std::holds_alternative<std::vector<double>>(it->second)))
    throw Unsupported(key + ": one value per layer is not implemented");
  throw Invalid(key + (values_.contains(key) ? " is not " : " is missing: expected ") + expected);
}

int64_t HyperParams::integer(const std::string& key) {
  const HyperValue* value = take(key);
  if (value && std::holds_alternative<int64_t>(*value)) return std::get<int64_t>(*value);
  wrong(key, "an integer");
}

int64_t HyperParams::integer_or(const std::string& key, int64_t otherwise) {
  return has(key) ? integer(key) : otherwise;
}

int64_t HyperParams::size(const std::string& key, int64_t low, int64_t high) {
  const int64_t value = integer(key);
  if (value < low || value > high)
    throw Invalid(key + " is " + std::to_string(value) + ", allowed are " + std::to_string(low) + " to " +
                  std::to_string(high));
  return value;
}

double HyperParams::real(const std::string& key) {
  const HyperValue* value = take(key);
  if (value && std::holds_alternative<double>(*value)) return std::get<double>(*value);
  if (value && std::holds_alternative<int64_t>(*value)) return static_cast<double>(std::get<int64_t>(*value));
  wrong(key, "a number");
}

double HyperParams::real_or(const std::string& key, double otherwise) {
  return has(key) ? real(key) : otherwise;
}

bool HyperParams::flag_or(const std::string& key, bool otherwise) {
  const HyperValue* value = take(key);
  if (!value) return otherwise;
  if (std::holds_alternative<bool>(*value)) return std::get<bool>(*value);
  wrong(key, "true or false");
}

std::vector<int64_t> HyperParams::integers(const std::string& key) {
  const HyperValue* value = take(key);
  if (value && std::holds_alternative<std::vector<int64_t>>(*value)) return std::get<std::vector<int64_t>>(*value);
  wrong(key, "a list of integers");
}

double HyperParams::uniform_or(const std::string& key, double otherwise) {
  const HyperValue* value = take(key);
  if (!value) return otherwise;
  std::vector<double> all;
  if (std::holds_alternative<std::vector<double>>(*value)) {
    all = std::get<std::vector<double>>(*value);
  } else if (std::holds_alternative<std::vector<int64_t>>(*value)) {
    const auto& list = std::get<std::vector<int64_t>>(*value);
    all.assign(list.begin(), list.end());
  } else {
    return real(key);
  }
  if (all.empty()) return otherwise;
  for (const double v : all)
    if (v != all.front()) throw Unsupported(key + ": different values per layer are not implemented");
  return all.front();
}

std::string HyperParams::text_or(const std::string& key, const std::string& otherwise) {
  const HyperValue* value = take(key);
  if (!value) return otherwise;
  if (std::holds_alternative<std::string>(*value)) return std::get<std::string>(*value);
  wrong(key, "a string");
}

void HyperParams::ignore(const std::string& prefix) {
  for (const auto& [key, value] : values_)
    if (key.starts_with(prefix)) read_.insert(key);
}

void HyperParams::refuse_unread() const {
  for (const auto& [key, value] : values_)
    if (!read_.contains(key)) throw Unsupported(key + " is not implemented");
}

namespace {

std::string shape(int64_t axes, int64_t rows, int64_t cols) {
  return axes == 1 ? "[" + std::to_string(cols) + "]" : "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

std::optional<MatrixView> take(const std::map<std::string, StoredTensor>& tensors, std::set<std::string>& taken,
                               const std::string& name, int64_t axes, int64_t rows, int64_t cols) {
  const auto it = tensors.find(name);
  if (it == tensors.end()) return std::nullopt;
  const StoredTensor& t = it->second;
  if (t.axes != axes || t.view.rows != rows || t.view.cols != cols)
    throw Invalid(name + ": shape " + shape(t.axes, t.view.rows, t.view.cols) + ", the hyper-parameters ask for " +
                  shape(axes, rows, cols));
  taken.insert(name);
  return t.view;
}

}  // namespace

std::optional<MatrixView> TensorTable::matrix_if_present(const std::string& name, int64_t rows, int64_t cols) {
  return take(tensors_, taken_, name, 2, rows, cols);
}

std::optional<MatrixView> TensorTable::vector_if_present(const std::string& name, int64_t dim) {
  return take(tensors_, taken_, name, 1, 1, dim);
}

MatrixView TensorTable::matrix(const std::string& name, int64_t rows, int64_t cols) {
  if (const auto view = matrix_if_present(name, rows, cols)) return *view;
  throw Invalid(name + ": tensor is missing");
}

std::vector<MatrixView> TensorTable::slabs(const std::string& name, int64_t count, int64_t rows, int64_t cols) {
  std::vector<MatrixView> out;
  if (const auto all = take(tensors_, taken_, name, 3, count * rows, cols)) {
    const size_t bytes = static_cast<size_t>(rows) * row_bytes(all->type, cols);
    for (int64_t i = 0; i < count; ++i)
      out.push_back({static_cast<const std::byte*>(all->data) + static_cast<size_t>(i) * bytes, rows, cols, all->type});
    return out;
  }
  const size_t dot = name.rfind('.');
  if (!has(name.substr(0, dot) + ".0" + name.substr(dot))) throw Invalid(name + ": tensor is missing");
  for (int64_t i = 0; i < count; ++i)
    out.push_back(matrix(name.substr(0, dot) + "." + std::to_string(i) + name.substr(dot), rows, cols));
  return out;
}

MatrixView TensorTable::vector(const std::string& name, int64_t dim) {
  if (const auto view = vector_if_present(name, dim)) return *view;
  throw Invalid(name + ": tensor is missing");
}

void TensorTable::refuse_untaken() const {
  for (const auto& [name, tensor] : tensors_)
    if (!taken_.contains(name)) throw Unsupported(name + ": this tensor is not implemented");
}

}  // namespace ds4
