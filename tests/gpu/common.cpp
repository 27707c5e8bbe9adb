#include "common.h"

namespace ds4::gpu {

std::vector<std::byte> Random::matrix(DType type, int64_t rows, int64_t cols, float size) {
  std::vector<std::byte> out(static_cast<size_t>(rows) * row_bytes(type, cols));
  const auto put = [&](size_t at, uint16_t half) { std::memcpy(out.data() + at, &half, 2); };
  if (type == DType::F32 || type == DType::F16 || type == DType::BF16) {
    for (size_t i = 0; i < static_cast<size_t>(rows * cols); ++i) {
      const float v = uniform() * 1.7f * size;
      if (type == DType::F32)
        std::memcpy(out.data() + 4 * i, &v, 4);
      else
        put(2 * i, type == DType::F16 ? float_to_half(v) : float_to_bf16(v));
    }
    return out;
  }
  for (std::byte& b : out) b = static_cast<std::byte>(next() >> 56);
  const size_t each = block_bytes(type);
  size_t at = 0;
  int fields = 1;
  float typical = 5;  // of a decoded value for a scale of one
  switch (type) {
    case DType::Q8_0:
      typical = 74;
      break;
    case DType::IQ4_NL:
      typical = 64;
      break;
    case DType::Q4_1:
      fields = 2;
      break;
    case DType::Q5_0:
      typical = 10;
      break;
    case DType::Q5_1:
      typical = 15, fields = 2;
      break;
    case DType::Q2_K:
      at = 80, typical = 12, fields = 2;
      break;
    case DType::Q3_K:
      at = 108, typical = 37;
      break;
    case DType::Q4_K:
      typical = 280, fields = 2;
      break;
    case DType::Q5_K:
      typical = 560, fields = 2;
      break;
    case DType::Q6_K:
      at = 208, typical = 1370;
      break;
    case DType::IQ2_XXS:
      typical = 50;
      break;
    default:
      break;
  }
  for (size_t block = 0; block < out.size(); block += each) {
    if (type == DType::MXFP4) {
      out[block] = static_cast<std::byte>(127 + std::ilogb(size / 5) - static_cast<int>(below(2)));
      continue;
    }
    for (int f = 0; f < fields; ++f)
      put(block + at + 2 * static_cast<size_t>(f), float_to_half(size / typical * (0.75f + 0.25f * uniform())));
  }
  return out;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - want[i];
    difference += d * d;
    norm += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-60));
}

void Results::close(const std::vector<float>& got, const std::vector<float>& want, double most,
                    const std::string& what) {
  const double e = got.size() == want.size() ? relative_error(got, want) : NAN;
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, ": error %.3g, at most %.3g", e, most);
  expect(e <= most, what + numbers);
}

void Results::equal(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  size_t at = 0;
  while (at < std::min(got.size(), want.size()) && std::memcmp(&got[at], &want[at], 4) == 0) ++at;
  const bool same = got.size() == want.size() && at == got.size();
  char numbers[96] = "";
  if (!same && at < std::min(got.size(), want.size()))
    std::snprintf(numbers, sizeof numbers, ": element %zu of %zu is %.9g, not %.9g", at, want.size(), got[at],
                  want[at]);
  expect(same, what + numbers);
}

Tensor upload(Ops& ops, const std::vector<float>& values, int64_t rows, int64_t cols) {
  const Tensor t = ops.scratch(rows, cols);
  ops.to_device(values.data(), t);
  return t;
}

std::vector<float> download(Ops& ops, const Tensor& t) {
  std::vector<float> out(static_cast<size_t>(t.n * t.dim));
  ops.to_host(t, out.data());
  return out;
}

Tensor poisoned(Ops& ops, int64_t rows, int64_t cols) {
  return upload(ops, std::vector<float>(static_cast<size_t>(rows * cols), std::numeric_limits<float>::quiet_NaN()),
                rows, cols);
}

}  // namespace ds4::gpu
