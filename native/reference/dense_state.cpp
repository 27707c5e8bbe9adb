#include "reference/dense_state.h"

#include <algorithm>
#include <cstring>

#include "quant/quant.h"

namespace ds4 {

DenseState::DenseState(std::span<const StateSpec> specs, int64_t capacity) : capacity_(capacity) {
  if (capacity < 1) throw Invalid("state of " + std::to_string(capacity) + " tokens");
  for (const StateSpec& spec : specs) {
    if (spec.heads < 1 || spec.width < 1 || spec.ratio < 1 || (spec.kind != StateKind::Append && spec.capacity < 1))
      throw Invalid("state buffer " + spec.name + " has an impossible shape");
    const bool plain = spec.type == DType::F32 || spec.type == DType::F16 || spec.type == DType::BF16 ||
                       (spec.type == DType::I32 && spec.kind == StateKind::Counter);
    if (!plain) throw Unsupported("state buffer " + spec.name + " of type " + dtype_name(spec.type));
    Buffer b{spec, row_bytes(spec.type, spec.row_elements()), {}};
    if (!grows(spec)) b.bytes.resize(b.row_bytes * static_cast<size_t>(spec.capacity));
    buffers_.push_back(std::move(b));
  }
}

bool DenseState::grows(const StateSpec& spec) {
  return spec.kind == StateKind::Append || spec.kind == StateKind::Ring;
}

int64_t DenseState::rows_for(const StateSpec& spec, int64_t tokens) {
  if (spec.kind == StateKind::Append) return tokens / spec.ratio;
  return spec.kind == StateKind::Ring ? std::min(tokens, spec.capacity) : spec.capacity;
}

// Rows of a ring that nobody wrote are zeros.
void DenseState::grow(size_t index, int64_t rows) {
  if (index >= buffers_.size() || buffers_[index].spec.kind != StateKind::Ring) return;
  Buffer& b = buffers_[index];
  const size_t need = b.row_bytes * static_cast<size_t>(std::clamp<int64_t>(rows, 0, b.spec.capacity));
  if (need > b.bytes.size()) b.bytes.resize(need);
}

void DenseState::reserve(int64_t tokens) {
  if (tokens > capacity_)
    throw Invalid("reserve " + std::to_string(tokens) + " tokens in a state of " + std::to_string(capacity_));
  if (tokens <= reserved_) return;
  // Grow every buffer's allocation first: nothing has changed yet when one of them fails.
  for (Buffer& b : buffers_) {
    const size_t need = b.row_bytes * static_cast<size_t>(rows_for(b.spec, tokens));
    if (need > b.bytes.capacity()) b.bytes.reserve(need + need / 2);
  }
  for (Buffer& b : buffers_)
    b.bytes.resize(std::max(b.bytes.size(), b.row_bytes * static_cast<size_t>(rows_for(b.spec, tokens))));
  reserved_ = tokens;
}

void DenseState::truncate(int64_t tokens) {
  if (tokens < 0) throw Invalid("truncate a state to " + std::to_string(tokens) + " tokens");
  if (tokens >= reserved_ && tokens > 0) return;
  for (Buffer& b : buffers_) {
    if (!grows(b.spec)) {
      // Before the first token a recurrence starts from zero.
      if (tokens == 0) std::fill(b.bytes.begin(), b.bytes.end(), std::byte{});
      continue;
    }
    if (b.spec.kind == StateKind::Ring && tokens > 0) continue;  // its rows are the last ones, wherever they lie
    b.bytes.resize(b.row_bytes * static_cast<size_t>(rows_for(b.spec, tokens)));
    b.bytes.shrink_to_fit();
  }
  reserved_ = tokens;
}

void DenseState::fork_from(const State& other, int64_t tokens) {
  const auto* from = dynamic_cast<const DenseState*>(&other);
  if (!from || from->buffers_.size() != buffers_.size()) throw Invalid("fork from a state of another kind");
  if (tokens < 0 || tokens > from->reserved_ || tokens > capacity_)
    throw Invalid("fork " + std::to_string(tokens) + " tokens of a state of " + std::to_string(from->reserved_) +
                  " into one of capacity " + std::to_string(capacity_));
  if (from == this) return truncate(tokens);
  std::vector<Buffer> copy;
  copy.reserve(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& b = from->buffers_[i];
    if (b.row_bytes != buffers_[i].row_bytes) throw Invalid("fork from a state with another layout");
    const auto n = b.row_bytes * static_cast<size_t>(rows_for(b.spec, tokens));
    copy.push_back({b.spec, b.row_bytes, {b.bytes.begin(), b.bytes.begin() + static_cast<ptrdiff_t>(n)}});
  }
  buffers_ = std::move(copy);
  reserved_ = tokens;
}

const DenseState::Buffer& DenseState::at(size_t index, int64_t first, int64_t count) const {
  if (index >= buffers_.size()) throw Invalid("state buffer " + std::to_string(index) + " does not exist");
  const Buffer& b = buffers_[index];
  const auto rows = static_cast<int64_t>(b.bytes.size() / b.row_bytes);
  if (first < 0 || count < 0 || first > rows || count > rows - first)
    throw Invalid("rows " + std::to_string(first) + "+" + std::to_string(count) + " of state buffer " + b.spec.name +
                  ", which holds " + std::to_string(rows));
  return b;
}

void DenseState::export_rows(size_t index, int64_t first, int64_t count, std::span<std::byte> out) const {
  const Buffer& b = at(index, first, count);
  if (out.size() != b.row_bytes * static_cast<size_t>(count)) throw Invalid("export into a buffer of another size");
  if (!out.empty()) std::memcpy(out.data(), b.bytes.data() + static_cast<size_t>(first) * b.row_bytes, out.size());
}

void DenseState::import_rows(size_t index, int64_t first, int64_t count, std::span<const std::byte> in) {
  if (first >= 0 && count >= 0 && first <= INT64_MAX - count) grow(index, first + count);
  const Buffer& b = at(index, first, count);
  if (in.size() != b.row_bytes * static_cast<size_t>(count)) throw Invalid("import from a buffer of another size");
  std::byte* to = buffers_[index].bytes.data() + static_cast<size_t>(first) * b.row_bytes;
  if (!in.empty()) std::memcpy(to, in.data(), in.size());
}

size_t DenseState::resident_bytes() const {
  size_t n = 0;
  for (const Buffer& b : buffers_) n += b.bytes.capacity();
  return n;
}

const float* DenseState::readable_row(size_t index, int64_t row) const {
  if (index < buffers_.size() && buffers_[index].spec.kind == StateKind::Ring) row %= buffers_[index].spec.capacity;
  const Buffer& b = at(index, row, 1);
  if (b.spec.type != DType::F32) throw Invalid("state buffer " + b.spec.name + " does not hold f32 rows");
  return reinterpret_cast<const float*>(b.bytes.data() + static_cast<size_t>(row) * b.row_bytes);
}

float* DenseState::writable_row(size_t index, int64_t row) {
  if (index < buffers_.size() && buffers_[index].spec.kind == StateKind::Ring && row >= 0)
    grow(index, row % buffers_[index].spec.capacity + 1);
  return const_cast<float*>(readable_row(index, row));
}

void DenseState::read_row(size_t index, int64_t row, std::span<float> out) const {
  const Buffer& b = at(index, row, 1);
  dequantize_row(b.spec.type, b.bytes.data() + static_cast<size_t>(row) * b.row_bytes, out.data(),
                 b.spec.row_elements());
}

void DenseState::write_row(size_t index, int64_t row, std::span<const float> in) {
  const Buffer& b = at(index, row, 1);
  std::byte* to = buffers_[index].bytes.data() + static_cast<size_t>(row) * b.row_bytes;
  if (b.spec.type == DType::F32) {
    std::memcpy(to, in.data(), b.row_bytes);
    return;
  }
  for (int64_t i = 0; i < b.spec.row_elements(); ++i) {
    const float value = in[static_cast<size_t>(i)];
    const uint16_t code = b.spec.type == DType::F16 ? float_to_half(value) : float_to_bf16(value);
    std::memcpy(to + 2 * i, &code, 2);
  }
}

}  // namespace ds4
