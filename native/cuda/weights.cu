#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda/weights.h"
#include "quant/iq_tables.h"
#include "quant/quant.h"

namespace ds4::cuda {
namespace {

constexpr size_t kPiece = size_t{16} << 20;

// Where rows of a piece go: row r of the piece becomes row first + r * step.
struct Target {
  int64_t first, step, blocks;  // blocks of 32 in a row
};

__device__ uint32_t pack_two_bits(const uint8_t (&code)[32], int k) {
  uint32_t w = 0;
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) w |= static_cast<uint32_t>(code[16 * k + 4 * j + i] & 3) << (8 * i + 2 * j);
  return w;
}

__device__ uint32_t pack_bits(const uint8_t (&bit)[32]) {
  uint32_t w = 0;
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 4; ++i) w |= static_cast<uint32_t>(bit[4 * j + i] & 1) << (8 * i + j);
  return w;
}

// One thread per block of 32 columns: reads the file's block, writes its share of the planes.
template <DType type>
__global__ void repack(const uint8_t* file, int64_t rows, Target to, uint8_t* q, uint8_t* h, uint8_t* s, uint8_t* d) {
  using L = Layout<type>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * to.blocks) return;
  const int64_t row = index / to.blocks, block = index % to.blocks;
  const int64_t out = (to.first + row * to.step) * to.blocks + block;
  constexpr int super = L::kD > 0 ? 8 : 1;
  constexpr int bytes = type == DType::Q8_0     ? 34
                        : type == DType::Q4_0   ? 18
                        : type == DType::Q4_1   ? 20
                        : type == DType::Q5_0   ? 22
                        : type == DType::Q5_1   ? 24
                        : type == DType::IQ4_NL ? 18
                        : type == DType::MXFP4  ? 17
                        : type == DType::Q2_K   ? 84
                        : type == DType::Q3_K   ? 110
                        : type == DType::Q4_K   ? 144
                        : type == DType::Q5_K   ? 176
                        : type == DType::Q6_K   ? 210
                                                : 66;
  const uint8_t* b = file + index / super * bytes;
  const int g = static_cast<int>(index % super);
  uint8_t* qo = q + out * L::kQ;
  uint8_t code[32];
  if constexpr (type == DType::Q8_0) {
    for (int i = 0; i < 32; ++i) qo[i] = b[2 + i];
    s[2 * out] = b[0], s[2 * out + 1] = b[1];
  } else if constexpr (type == DType::Q4_0 || type == DType::Q4_1 || type == DType::Q5_0 || type == DType::Q5_1) {
    constexpr int at = L::kS + L::kH;
    for (int i = 0; i < 16; ++i) qo[i] = b[at + i];
    for (int i = 0; i < L::kS; ++i) s[L::kS * out + i] = b[i];
    if constexpr (L::kH == 4) {
      for (int i = 0; i < 32; ++i) code[i] = b[L::kS + i / 8] >> (i % 8) & 1;
      reinterpret_cast<uint32_t*>(h)[out] = pack_bits(code);
    }
  } else if constexpr (type == DType::IQ4_NL || type == DType::MXFP4) {
    const uint8_t* n = b + L::kS;
    for (int i = 0; i < 8; ++i) qo[i] = static_cast<uint8_t>((n[2 * i] & 15) | (n[2 * i + 1] & 15) << 4);
    for (int i = 0; i < 8; ++i) qo[8 + i] = static_cast<uint8_t>(n[2 * i] >> 4 | (n[2 * i + 1] >> 4) << 4);
    for (int i = 0; i < L::kS; ++i) s[L::kS * out + i] = b[i];
  } else if constexpr (type == DType::Q4_K || type == DType::Q5_K) {
    constexpr int at = type == DType::Q4_K ? 16 : 48;
    for (int i = 0; i < 32; ++i) code[i] = b[at + g / 2 * 32 + i] >> (g % 2 * 4) & 15;
    for (int i = 0; i < 16; ++i) qo[i] = static_cast<uint8_t>(code[i] | code[16 + i] << 4);
    if constexpr (type == DType::Q5_K) {
      for (int i = 0; i < 32; ++i) code[i] = b[16 + i] >> g & 1;
      reinterpret_cast<uint32_t*>(h)[out] = pack_bits(code);
    }
    for (int i = 0; i < 2; ++i) d[out / 8 * 16 + 2 * g + i] = b[2 * g + i];
  } else if constexpr (type == DType::Q2_K) {
    for (int i = 0; i < 32; ++i) code[i] = b[16 + g / 4 * 32 + i] >> (g % 4 * 2) & 3;
    for (int k = 0; k < 2; ++k) reinterpret_cast<uint32_t*>(qo)[k] = pack_two_bits(code, k);
    s[2 * out] = b[2 * g], s[2 * out + 1] = b[2 * g + 1];
    if (g < 4) d[out / 8 * 4 + g] = b[80 + g];
  } else if constexpr (type == DType::Q3_K) {
    for (int i = 0; i < 32; ++i) code[i] = b[32 + g / 4 * 32 + i] >> (g % 4 * 2) & 3;
    for (int k = 0; k < 2; ++k) reinterpret_cast<uint32_t*>(qo)[k] = pack_two_bits(code, k);
    for (int i = 0; i < 32; ++i) code[i] = b[i] >> g & 1;
    reinterpret_cast<uint32_t*>(h)[out] = pack_bits(code);
    for (int i = 0; i < 2; ++i) {
      const int group = 2 * g + i;
      const uint8_t* sc = b + 96;
      const int low = group < 8 ? sc[group] & 15 : sc[group - 8] >> 4;
      const int high = sc[8 + group % 4] >> (group / 4 * 2) & 3;
      s[2 * out + i] = static_cast<uint8_t>(static_cast<int8_t>((low | high << 4) - 32));
    }
    if (g < 2) d[out / 8 * 2 + g] = b[108 + g];
  } else if constexpr (type == DType::Q6_K) {
    uint8_t high[32];
    for (int i = 0; i < 32; ++i) {
      const int e = g * 32 + i, half = e / 128, in = e % 128;
      code[i] = b[half * 64 + in % 64] >> (in / 64 * 4) & 15;
      high[i] = b[128 + half * 32 + in % 32] >> (in / 32 * 2) & 3;
    }
    for (int i = 0; i < 16; ++i) qo[i] = static_cast<uint8_t>(code[i] | code[16 + i] << 4);
    for (int k = 0; k < 2; ++k) reinterpret_cast<uint32_t*>(h)[2 * out + k] = pack_two_bits(high, k);
    s[2 * out] = b[192 + 2 * g], s[2 * out + 1] = b[193 + 2 * g];
    if (g < 2) d[out / 8 * 2 + g] = b[208 + g];
  } else if constexpr (type == DType::IQ2_XXS) {
    for (int i = 0; i < 8; ++i) qo[i] = b[2 + g * 8 + i];
    if (g < 2) d[out / 8 * 2 + g] = b[g];
  }
}

// Rows of 2- or 4-byte elements to rows of another stride.
template <class T>
__global__ void copy_rows(const T* file, int64_t rows, int64_t cols, int64_t first, int64_t step, int64_t stride,
                          T* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows * cols) out[(first + i / cols * step) * stride + i % cols] = file[i];
}

__device__ uint32_t random_word(uint64_t seed, uint64_t i) {
  uint64_t x = (seed << 40) + i + 0x9E3779B97F4A7C15ull * (seed + 1);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>(x ^ x >> 31);
}

__global__ void random_bytes(uint32_t* out, int64_t words, uint64_t seed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < words) out[i] = random_word(seed, static_cast<uint64_t>(i));
}

// Random blocks get scales of a size that keeps activations near one.
__global__ void set_scales(uint8_t* blocks, int64_t n, int bytes, int at, int count, uint16_t value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (int k = 0; k < count; ++k) {
    blocks[i * bytes + at + 2 * k] = static_cast<uint8_t>(value & 255);
    blocks[i * bytes + at + 2 * k + 1] = static_cast<uint8_t>(value >> 8);
  }
}
__global__ void set_exponents(uint8_t* blocks, int64_t n, uint8_t value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) blocks[i * 17] = value;
}
template <class T>
__global__ void random_floats(T* out, int64_t n, uint64_t seed, float scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n)
    out[i] =
        static_cast<T>((static_cast<float>(random_word(seed, static_cast<uint64_t>(i))) * 0x1p-31f - 1.0f) * scale);
}

unsigned blocks_of(int64_t n, int threads = 256) {
  return static_cast<unsigned>((n + threads - 1) / threads);
}

// Typical size of a decoded value for a scale of one.
double magnitude(DType type) {
  switch (type) {
    case DType::Q8_0:
      return 74;
    case DType::MXFP4:
      return 5;
    case DType::IQ4_NL:
      return 64;
    case DType::Q2_K:
      return 12;
    case DType::Q3_K:
      return 37;
    case DType::Q4_K:
      return 280;
    case DType::Q5_K:
      return 560;
    case DType::Q6_K:
      return 1370;
    case DType::IQ2_XXS:
      return 50;
    case DType::Q5_0:
    case DType::Q5_1:
      return 10;
    default:
      return 5;
  }
}

void fill_random(DType type, uint8_t* out, int64_t rows, int64_t cols, uint64_t seed, cudaStream_t stream) {
  const double size = 1.0 / std::sqrt(static_cast<double>(cols));
  const int64_t n = rows * cols;
  if (type == DType::F32) {
    random_floats<<<blocks_of(n), 256, 0, stream>>>(reinterpret_cast<float*>(out), n, seed, 1.7f * float(size));
  } else if (type == DType::F16) {
    random_floats<<<blocks_of(n), 256, 0, stream>>>(reinterpret_cast<__half*>(out), n, seed, 1.7f * float(size));
  } else if (type == DType::BF16) {
    random_floats<<<blocks_of(n), 256, 0, stream>>>(reinterpret_cast<__nv_bfloat16*>(out), n, seed, 1.7f * float(size));
  } else {
    const int64_t bytes = rows * static_cast<int64_t>(row_bytes(type, cols)), blocks = n / block_elements(type);
    random_bytes<<<blocks_of((bytes + 3) / 4), 256, 0, stream>>>(reinterpret_cast<uint32_t*>(out), (bytes + 3) / 4,
                                                                 seed);
    const uint16_t scale = float_to_half(static_cast<float>(size / magnitude(type)));
    const int each = static_cast<int>(block_bytes(type));
    if (type == DType::MXFP4) {
      set_exponents<<<blocks_of(blocks), 256, 0, stream>>>(out, blocks, 127 - 8);
    } else {
      const bool min = type == DType::Q4_1 || type == DType::Q5_1 || type == DType::Q2_K || type == DType::Q4_K ||
                       type == DType::Q5_K;
      const int at = type == DType::Q2_K ? 80 : type == DType::Q3_K ? 108 : type == DType::Q6_K ? 208 : 0;
      set_scales<<<blocks_of(blocks), 256, 0, stream>>>(out, blocks, each, at, min ? 2 : 1, scale);
    }
  }
  DS4_CUDA(cudaGetLastError());
}

template <DType type>
__global__ void decode_rows(Planes p, int64_t blocks, const int32_t* ids, int64_t first_row, int64_t rows, float* out,
                            int64_t stride) {
  __shared__ uint2 grid[256];
  if constexpr (type == DType::IQ2_XXS) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) grid[i] = p.grid[i];
    __syncthreads();
  }
  const int64_t row = (ids ? ids[blockIdx.y] : blockIdx.y) - first_row;
  if (row < 0 || row >= rows) return;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (b >= blocks) return;
  const int64_t block = row * blocks + b;
  const Block w = decode_block<type>(load_block<type>(p, block), block, grid);
  float* to = out + blockIdx.y * stride + b * 32;
  for (int i = 0; i < 32; ++i) {
    const int code = static_cast<int8_t>(w.q[i / 4] >> (8 * (i % 4)) & 255) - Layout<type>::kZero;
    const bool second = Layout<type>::kHalves && i >= 16;
    float v = (second ? w.d1 : w.d0) * static_cast<float>(code);
    if (Layout<type>::kMin) v = v + (second ? w.m1 : w.m0);
    to[i] = v;
  }
}

template <class T>
__global__ void float_rows(const T* w, int64_t cols, int64_t w_stride, const int32_t* ids, int64_t first_row,
                           int64_t rows, float* out, int64_t stride) {
  const int64_t row = (ids ? ids[blockIdx.y] : blockIdx.y) - first_row;
  if (row < 0 || row >= rows) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < cols) out[blockIdx.y * stride + i] = static_cast<float>(w[row * w_stride + i]);
}

}  // namespace

size_t CudaWeight::resident_bytes() const {
  size_t n = vector_.bytes() + table_.bytes() + dense_.bytes();
  for (const Segment& s : segments) n += s.memory.bytes();
  return n;
}

const float* CudaWeight::dense(const Device& device) const {
  if (vector_.bytes() > 0) return vector();
  if (dense_.bytes() == 0) {
    dense_ = DeviceBuffer(device, static_cast<size_t>(rows_ * cols_) * sizeof(float), DeviceBuffer::Lasting);
    launch_rows(device, *this, nullptr, rows_, dense_.as<float>(), cols_);
  }
  return dense_.as<float>();
}

const CudaWeight& on_device(const Weight& w) {
  const auto* c = dynamic_cast<const CudaWeight*>(&w);
  if (!c) throw Invalid("a weight of another backend");
  return *c;
}

const float* vector_of(const Weight& w, int64_t n, const char* what) {
  const CudaWeight& c = on_device(w);
  require(c.vector() && c.rows() * c.cols() == n, what);
  return c.vector();
}

Uploader::Uploader(const Device& device, bool synthetic) : device_(device), synthetic_(synthetic) {
  std::vector<uint2> grid(256);
  for (size_t i = 0; i < 256; ++i) {
    uint32_t v[2] = {0, 0};
    for (size_t k = 0; k < 8; ++k) v[k / 4] |= uint32_t{kIq2Values[kIq2Grid[i] >> (2 * k) & 3]} << (8 * (k % 4));
    grid[i] = {v[0], v[1]};
  }
  grid_ = DeviceBuffer(device, grid.size() * sizeof(uint2), DeviceBuffer::Lasting);
  DS4_CUDA(cudaMemcpyAsync(grid_.as(), grid.data(), grid_.bytes(), cudaMemcpyHostToDevice, device.stream()));
  device.synchronize();
}

std::unique_ptr<CudaWeight> Uploader::load(std::span<const MatrixView> parts, bool interleave) {
  require(!parts.empty(), "load of no parts");
  int64_t rows = 0;
  for (const MatrixView& p : parts) {
    require(p.data && p.rows > 0 && p.cols > 0 && p.cols == parts.front().cols, "parts do not stack");
    row_bytes(p.type, p.cols);
    if (p.type == DType::I32) throw Unsupported("a matrix of type I32 has no kernel");
    rows += p.rows;
  }
  const int64_t cols = parts.front().cols;
  auto w = std::make_unique<CudaWeight>(rows, cols);
  device_.enter();
  if (parts.size() == 1 && (rows == 1 || cols == 1)) {
    const MatrixView& p = parts.front();
    std::vector<float> values(static_cast<size_t>(rows * cols));
    for (int64_t r = 0; r < rows; ++r)
      dequantize_row(p.type, static_cast<const std::byte*>(p.data) + static_cast<size_t>(r) * row_bytes(p.type, cols),
                     values.data() + r * cols, cols);
    w->vector_ = DeviceBuffer(device_, values.size() * sizeof(float), DeviceBuffer::Lasting);
    DS4_CUDA(cudaMemcpyAsync(w->vector_.as(), values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice,
                             device_.stream()));
    device_.synchronize();
  }
  w->interleaved = interleave;

  // Segments of neighbouring parts of one type.
  int64_t row = 0;
  for (const MatrixView& p : parts) {
    if (w->segments.empty() || w->segments.back().type != p.type) {
      Segment s;
      s.type = p.type;
      s.first_row = row;
      w->segments.push_back(std::move(s));
    }
    w->segments.back().rows += p.rows;
    row += p.rows;
  }
  require(!interleave || (w->segments.size() == 1 && parts.size() % 2 == 0), "interleaved parts of different types");
  for (Segment& s : w->segments) {
    const bool blocks = with_block_format(s.type, [&](auto type) {
      using L = Layout<type.value>;
      const int64_t n = s.rows * cols / 32;
      const auto plane = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
      const int64_t q = plane(n * L::kQ), h = plane(n * L::kH), sc = plane(n * L::kS), d = plane(n / 8 * L::kD);
      s.memory = DeviceBuffer(device_, static_cast<size_t>(q + h + sc + d), DeviceBuffer::Lasting);
      const auto* base = s.memory.as<uint8_t>();
      s.planes = {base, base + q, base + q + h, base + q + h + sc, grid_.as<uint2>()};
    });
    if (!blocks) {
      s.stride = (cols + 7) / 8 * 8;
      const size_t bytes = static_cast<size_t>(s.rows * s.stride) * block_bytes(s.type);
      s.memory = DeviceBuffer(device_, bytes, DeviceBuffer::Lasting);
      if (s.stride != cols) DS4_CUDA(cudaMemsetAsync(s.memory.as(), 0, bytes, device_.stream()));
      s.planes.q = s.memory.as<uint8_t>();
    }
  }

  row = 0;
  size_t segment = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    while (row >= w->segments[segment].first_row + w->segments[segment].rows) ++segment;
    const Segment& s = w->segments[segment];
    const int64_t in = row - s.first_row;
    if (interleave)
      fill(parts[i], s, i % 2 == 0 ? in : in - parts[i].rows + 1, 2);
    else
      fill(parts[i], s, in, 1);
    row += parts[i].rows;
  }
  return w;
}

void Uploader::fill(const MatrixView& part, const Segment& to, int64_t first, int64_t step) {
  const size_t each = row_bytes(part.type, part.cols);
  const int64_t per_piece = std::max<int64_t>(1, static_cast<int64_t>(kPiece / each));
  const auto* file = static_cast<const std::byte*>(part.data);
  for (int64_t r = 0; r < part.rows; r += per_piece) {
    const int64_t n = std::min(per_piece, part.rows - r);
    const size_t bytes = static_cast<size_t>(n) * each;
    Lane& lane = lanes_[next_];
    next_ ^= 1;
    if (lane.device.bytes() < bytes + 16) {
      device_.synchronize();
      const size_t size = std::max(kPiece, bytes) + 64;
      lane.device = DeviceBuffer(device_, size, DeviceBuffer::Lasting);
      if (!synthetic_) lane.host = PinnedBuffer(size);
      lane.done = std::make_unique<Event>();
    }
    auto* staged = lane.device.as<uint8_t>();
    if (synthetic_) {
      fill_random(part.type, staged, n, part.cols, seed_++, device_.stream());
    } else {
      lane.done->wait();
      std::memcpy(lane.host.data(), file + static_cast<size_t>(r) * each, bytes);
      DS4_CUDA(cudaMemcpyAsync(staged, lane.host.data(), bytes, cudaMemcpyHostToDevice, device_.stream()));
    }
    const bool blocks = with_block_format(part.type, [&](auto type) {
      const int64_t row_blocks = part.cols / 32;
      const Target target{first + r * step, step, row_blocks};
      const auto plane = [](const uint8_t* p) { return const_cast<uint8_t*>(p); };
      repack<type.value><<<blocks_of(n * row_blocks, 128), 128, 0, device_.stream()>>>(
          staged, n, target, plane(to.planes.q), plane(to.planes.h), plane(to.planes.s), plane(to.planes.d));
    });
    if (!blocks) {
      const int64_t total = n * part.cols;
      if (block_bytes(part.type) == 2)
        copy_rows<<<blocks_of(total), 256, 0, device_.stream()>>>(reinterpret_cast<const uint16_t*>(staged), n,
                                                                  part.cols, first + r * step, step, to.stride,
                                                                  to.memory.as<uint16_t>());
      else
        copy_rows<<<blocks_of(total), 256, 0, device_.stream()>>>(reinterpret_cast<const float*>(staged), n, part.cols,
                                                                  first + r * step, step, to.stride,
                                                                  to.memory.as<float>());
    }
    DS4_CUDA(cudaGetLastError());
    lane.done->record(device_.stream());
  }
}

std::unique_ptr<CudaWeight> Uploader::load_table(const MatrixView& view) {
  require(view.type == DType::I32, "a table of integers has type I32");
  device_.enter();
  auto w = std::make_unique<CudaWeight>(view.rows, view.cols);
  const size_t bytes = static_cast<size_t>(view.rows * view.cols) * sizeof(int32_t);
  w->table_ = DeviceBuffer(device_, bytes, DeviceBuffer::Lasting);
  DS4_CUDA(cudaMemcpyAsync(w->table_.as(), view.data, bytes, cudaMemcpyHostToDevice, device_.stream()));
  device_.synchronize();
  return w;
}

void launch_rows(const Device& device, const CudaWeight& w, const int32_t* ids, int64_t n, float* out,
                 int64_t out_stride) {
  // Grid rows beyond 65535 come in pieces.
  for (int64_t first = 0; first < n; first += 65535) {
    const auto count = static_cast<unsigned>(std::min<int64_t>(65535, n - first));
    require(ids || first == 0, "a dense copy of a large matrix");
    float* to = out + first * out_stride;
    const int32_t* from = ids ? ids + first : nullptr;
    for (const Segment& s : w.segments) {
      const bool blocks = with_block_format(s.type, [&](auto type) {
        const int64_t row_blocks = w.cols() / 32;
        decode_rows<type.value><<<dim3(blocks_of(row_blocks, 128), count), 128, 0, device.stream()>>>(
            s.planes, row_blocks, from, s.first_row, s.rows, to, out_stride);
      });
      if (blocks) continue;
      const dim3 grid(blocks_of(w.cols()), count);
      if (s.type == DType::F16)
        float_rows<<<grid, 256, 0, device.stream()>>>(s.memory.as<__half>(), w.cols(), s.stride, from, s.first_row,
                                                      s.rows, to, out_stride);
      else if (s.type == DType::BF16)
        float_rows<<<grid, 256, 0, device.stream()>>>(s.memory.as<__nv_bfloat16>(), w.cols(), s.stride, from,
                                                      s.first_row, s.rows, to, out_stride);
      else
        float_rows<<<grid, 256, 0, device.stream()>>>(s.memory.as<float>(), w.cols(), s.stride, from, s.first_row,
                                                      s.rows, to, out_stride);
    }
  }
  DS4_CUDA(cudaGetLastError());
}

}  // namespace ds4::cuda
