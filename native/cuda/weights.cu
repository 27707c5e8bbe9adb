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

// Where rows of a piece go. `half` < 0: row r becomes row first + r, counted through all slabs. Otherwise row first + r
// of the gates (0) or the ups (1) of one slab.
struct Target {
  int64_t first, slab, slab_rows, tiles_m, tiles_k;
  int half;
};

struct Place {
  int64_t tile_row;  // counted through all slabs
  int slot;
};

__host__ __device__ inline Place place_of(const Target& to, int64_t row) {
  const int64_t r = to.first + row;
  if (to.half >= 0) return {to.slab * to.tiles_m + r / 8, static_cast<int>(r % 8) + 8 * to.half};
  return {r / to.slab_rows * to.tiles_m + r % to.slab_rows / kTileRows, static_cast<int>(r % to.slab_rows % kTileRows)};
}

template <DType type>
constexpr int kFileBytes = type == DType::Q8_0     ? 34
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

// Code of column c of block g of a superblock `b` of the file (of a block, where there are none).
template <DType type>
__device__ uint32_t code_of(const uint8_t* b, int g, int c) {
  if constexpr (type == DType::Q8_0) {
    return b[2 + c];
  } else if constexpr (type == DType::Q4_0 || type == DType::IQ4_NL) {
    return b[2 + c % 16] >> (c / 16 * 4) & 15;
  } else if constexpr (type == DType::MXFP4) {
    return b[1 + c % 16] >> (c / 16 * 4) & 15;
  } else if constexpr (type == DType::Q4_1) {
    return b[4 + c % 16] >> (c / 16 * 4) & 15;
  } else if constexpr (type == DType::Q5_0 || type == DType::Q5_1) {
    constexpr int at = type == DType::Q5_0 ? 2 : 4;
    return (b[at + 4 + c % 16] >> (c / 16 * 4) & 15) | (b[at + c / 8] >> (c % 8) & 1) << 4;
  } else if constexpr (type == DType::Q4_K) {
    return b[16 + g / 2 * 32 + c] >> (g % 2 * 4) & 15;
  } else if constexpr (type == DType::Q5_K) {
    return (b[48 + g / 2 * 32 + c] >> (g % 2 * 4) & 15) | (b[16 + c] >> g & 1) << 4;
  } else if constexpr (type == DType::Q2_K) {
    return b[16 + g / 4 * 32 + c] >> (g % 4 * 2) & 3;
  } else if constexpr (type == DType::Q3_K) {
    return (b[32 + g / 4 * 32 + c] >> (g % 4 * 2) & 3) | (b[c] >> g & 1) << 2;
  } else if constexpr (type == DType::Q6_K) {
    const int e = g * 32 + c, half = e / 128, in = e % 128;
    return (b[half * 64 + in % 64] >> (in / 64 * 4) & 15) | (b[128 + half * 32 + in % 32] >> (in / 32 * 2) & 3) << 4;
  } else {
    return 0;  // IQ2_XXS has indices
  }
}

// The scales of block g, kS / 4 bytes at `to` (IQ2_XXS: a nibble, see repack).
template <DType type>
__device__ void scales_of(const uint8_t* b, int g, uint8_t* to) {
  using L = Layout<type>;
  if constexpr (type == DType::Q2_K) {
    to[0] = b[2 * g], to[1] = b[2 * g + 1];
  } else if constexpr (type == DType::Q3_K) {
    const uint8_t* sc = b + 96;
    for (int i = 0; i < 2; ++i) {
      const int group = 2 * g + i;
      const int low = group < 8 ? sc[group] & 15 : sc[group - 8] >> 4;
      const int high = sc[8 + group % 4] >> (group / 4 * 2) & 3;
      to[i] = static_cast<uint8_t>(static_cast<int8_t>((low | high << 4) - 32));
    }
  } else if constexpr (type == DType::Q6_K) {
    to[0] = b[192 + 2 * g], to[1] = b[193 + 2 * g];
  } else if constexpr (type == DType::Q4_K || type == DType::Q5_K) {
    const uint8_t* sc = b + 4;
    to[0] = static_cast<uint8_t>(g < 4 ? sc[g] & 63 : (sc[g + 4] & 15) | (sc[g - 4] >> 6) << 4);
    to[1] = static_cast<uint8_t>(g < 4 ? sc[g + 4] & 63 : (sc[g + 4] >> 4) | (sc[g] >> 6) << 4);
  } else if constexpr (type != DType::IQ2_XXS) {
    for (int i = 0; i < L::kS / kTileBlocks; ++i) to[i] = b[i];
  }
}

// One thread per strip: reads the columns of its lane from four of the file's blocks, writes its words of the planes;
// one in four writes the row's scales.
template <DType type>
__global__ void repack(const uint8_t* file, int64_t rows, int64_t blocks, Target to, uint8_t* q, uint8_t* h, uint8_t* s,
                       uint8_t* d) {
  using L = Layout<type>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * to.tiles_k * 4) return;
  const int t = static_cast<int>(index % 4);
  const int64_t column = index / 4 % to.tiles_k, row = index / 4 / to.tiles_k;
  const Place at = place_of(to, row);
  const int64_t tile = at.tile_row * to.tiles_k + column;
  constexpr int super = L::kD > 0 ? 8 : 1;
  constexpr bool table = type == DType::MXFP4 || type == DType::IQ4_NL;
  const uint8_t* from = file + row * (blocks / super) * kFileBytes<type>;
  uint32_t quants[L::kQ] = {}, high[L::kH ? L::kH : 1] = {};
  uint8_t scales[L::kS] = {};
  for (int block = 0; block < kTileBlocks; ++block) {
    const int64_t in_row = column * kTileBlocks + block;
    if (in_row >= blocks) break;
    const uint8_t* b = from + in_row / super * kFileBytes<type>;
    const int g = static_cast<int>(in_row % super);
    if constexpr (type == DType::IQ2_XXS) {
      const uint8_t* group = b + 2 + 8 * g;
      const uint32_t word =
          static_cast<uint32_t>(group[4]) | group[5] << 8 | group[6] << 16 | static_cast<uint32_t>(group[7]) << 24;
      const uint32_t seven = word >> (7 * t) & 127u;
      const uint32_t signs = seven | (static_cast<uint32_t>(__popc(seven)) & 1u) << 7;
      quants[0] |= static_cast<uint32_t>(group[t]) << (8 * block);
      for (int c = 0; c < 8; ++c) quants[1] |= (signs >> c & 1u) << (4 * c + sign_bit(block));
      scales[block / 2] |= static_cast<uint8_t>((word >> 28) << (4 * (block % 2)));
    } else {
      for (int c = 0; c < 8; ++c) {
        const uint32_t code = code_of<type>(b, g, 8 * t + c);
        const int byte = 8 * (c % 4), half = c / 4;
        if constexpr (L::kQ == 8)
          quants[2 * block + half] |= code << byte;
        else if constexpr (table)
          quants[block] |= code << (4 * c);
        else if constexpr (L::kQ == 4)
          quants[block] |= (code & 15u) << (byte + 4 * half);
        else
          quants[block / 2] |= (code & 3u) << (byte + 4 * (block % 2) + 2 * half);
        if constexpr (L::kH == 1) high[0] |= (code >> (L::kQ == 2 ? 2 : 4) & 1u) << (byte + 2 * block + half);
        if constexpr (L::kH == 2) high[block / 2] |= (code >> 4 & 3u) << (byte + 4 * (block % 2) + 2 * half);
      }
      if (t == 0) scales_of<type>(b, g, scales + block * (L::kS / kTileBlocks));
    }
  }
  auto* words = reinterpret_cast<uint32_t*>(q);
  for (int i = 0; i < L::kQ; ++i)
    words[quant_word<L::kQ>(tile, at.slot, t, L::kQ == 8 ? i / 2 : i, L::kQ == 8 ? i % 2 : i)] = quants[i];
  const int g = at.slot % 8, hi = at.slot / 8;
  for (int i = 0; i < L::kH; ++i)
    reinterpret_cast<uint32_t*>(h)[((tile * 32 + g * 4 + t) * 2 + hi) * L::kH + i] = high[i];
  if (t != 0) return;
  for (int i = 0; i < L::kS; ++i) s[((tile * 8 + g) * 2 + hi) * L::kS + i] = scales[i];
  if (L::kD == 0 || column % 2 != 0) return;
  constexpr int scale_at = type == DType::Q2_K ? 80 : type == DType::Q3_K ? 108 : type == DType::Q6_K ? 208 : 0;
  const uint8_t* b = from + column / 2 * kFileBytes<type>;
  const int64_t pair = at.tile_row * (to.tiles_k / 2) + column / 2;
  for (int i = 0; i < L::kD; ++i) d[((pair * 8 + g) * 2 + hi) * L::kD + i] = b[scale_at + i];
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

// One thread per strip.
template <DType type>
__global__ void decode_rows(Planes p, Target from, int64_t cols, const int32_t* ids, int64_t first_row, int64_t rows,
                            float* out, int64_t stride) {
  __shared__ Grid<1> grid;
  if constexpr (type == DType::IQ2_XXS) {
    grid.fill(p);
    __syncthreads();
  }
  const int64_t row = (ids ? ids[blockIdx.y] : blockIdx.y) - first_row;
  if (row < 0 || row >= rows) return;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, column = index / 4;
  if (column >= from.tiles_k) return;
  const Place at = place_of(from, row);
  const int t = static_cast<int>(index % 4), lane = at.slot % 8 * 4 + t, hi = at.slot / 8;
  RawTile<type> raw;
  TileReader<type>(p, lane).all(raw, static_cast<uint32_t>(at.tile_row * from.tiles_k + column),
                                static_cast<uint32_t>(at.tile_row * (from.tiles_k / 2) + column / 2));
#pragma unroll
  for (int block = 0; block < kTileBlocks; ++block) {
    const int64_t first = column * kTileCols + block * 32 + 8 * t;
    if (first >= cols) break;
    int code[4];
    decode_codes<type, 1>(raw, block, grid.address(0), lane, code);
    using L = Layout<type>;
    const int half = t / 2;
    float d = 0.0f, m = 0.0f;
    if constexpr (L::kInteger) {
      d = super_scale<type>(raw, hi);
      if constexpr (type != DType::Q2_K)
        d = d * static_cast<float>(integer_scale<type>(raw, hi, block, L::kHalves ? half : 0));
      if constexpr (L::kMin)
        m = -(super_minimum<type>(raw, hi) *
              static_cast<float>(integer_minimums<type>(raw, hi, block) >> (8 * half) & 255u));
    } else {
      d = float_scale<type>(raw, hi, block);
      if constexpr (L::kMin) m = float_minimum<type>(raw, hi, block);
    }
    for (int c = 0; c < 8; ++c) {
      const auto word = static_cast<uint32_t>(hi ? (c < 4 ? code[1] : code[3]) : (c < 4 ? code[0] : code[2]));
      float v = d * static_cast<float>(static_cast<int8_t>(word >> (8 * (c % 4)) & 255u));
      if (L::kMin) v = v + m;
      out[blockIdx.y * stride + first + c] = v;
    }
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

Uploader::Uploader(const Device& device, bool synthetic) : device_(device), synthetic_(synthetic), staging_(device) {
  std::vector<uint32_t> grid(256);
  for (size_t i = 0; i < 256; ++i)
    for (size_t k = 0; k < 8; ++k) grid[i] |= (uint32_t{kIq2Grid[i]} >> (2 * k) & 3u) << (4 * k);
  grid_ = DeviceBuffer(device, grid.size() * sizeof(uint32_t), DeviceBuffer::Lasting);
  DS4_CUDA(cudaMemcpyAsync(grid_.as(), grid.data(), grid_.bytes(), cudaMemcpyHostToDevice, device.stream()));
  device.synchronize();
}

std::unique_ptr<CudaWeight> Uploader::load(std::span<const MatrixView> parts, bool interleave, int64_t slabs) {
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
    // Pageable memory: the copy has read it when the call returns, and what is on its way is not waited for.
    w->vector_ = DeviceBuffer(device_, values.size() * sizeof(float), DeviceBuffer::Lasting);
    DS4_CUDA(cudaMemcpyAsync(w->vector_.as(), values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice,
                             device_.stream()));
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
  require(!interleave || (w->segments.size() == 1 && static_cast<int64_t>(parts.size()) == 2 * slabs),
          "interleaved parts of different types");
  require(slabs == 1 || (w->segments.size() == 1 && rows % slabs == 0), "slabs of different types or sizes");
  for (Segment& s : w->segments) {
    const bool blocks = with_block_format(s.type, [&](auto type) {
      using L = Layout<type.value>;
      s.paired = interleave;
      s.slabs = slabs;
      s.slab_rows = s.rows / slabs;
      s.tiles_m = interleave ? (s.slab_rows / 2 + 7) / 8 : (s.slab_rows + kTileRows - 1) / kTileRows;
      s.tiles_k = (cols + kTileCols - 1) / kTileCols;
      require(L::kD == 0 || s.tiles_k % 2 == 0, "superblocks that do not fill a row");
      require(s.slabs * s.tiles_m * s.tiles_k <= INT32_MAX, "a matrix of too many tiles");
      const int64_t tile_rows = s.slabs * s.tiles_m, tiles = tile_rows * s.tiles_k;
      const auto plane = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
      const int64_t q = plane(tiles * 256 * L::kQ), h = plane(tiles * 256 * L::kH), sc = plane(tiles * 16 * L::kS),
                    d = plane(tile_rows * (s.tiles_k / 2) * 16 * L::kD);
      s.memory = DeviceBuffer(device_, static_cast<size_t>(q + h + sc + d), DeviceBuffer::Lasting);
      if (tile_rows * kTileRows != s.rows || s.tiles_k * kTileCols != cols)
        DS4_CUDA(cudaMemsetAsync(s.memory.as(), 0, s.memory.bytes(), device_.stream()));
      const auto* base = s.memory.as<uint8_t>();
      s.planes = {base, base + q, base + q + h, base + q + h + sc, grid_.as<uint32_t>()};
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
  std::vector<Destination> to;
  for (size_t i = 0; i < parts.size(); ++i) {
    while (row >= w->segments[segment].first_row + w->segments[segment].rows) ++segment;
    const Segment& s = w->segments[segment];
    const int64_t in = row - s.first_row;
    if (!interleave)
      to.push_back({&s, in, 1, -1});
    else if (s.stride)
      to.push_back({&s, i % 2 == 0 ? in : in - parts[i].rows + 1, 2, -1});
    else
      to.push_back({&s, static_cast<int64_t>(i / 2), 1, static_cast<int>(i % 2)});
    row += parts[i].rows;
  }
  if (synthetic_)
    for (size_t i = 0; i < parts.size(); ++i) draw(parts[i], to[i]);
  else
    read(parts, to);
  return w;
}

void Uploader::read(std::span<const MatrixView> parts, std::span<const Destination> to) {
  std::vector<Staging::Part> files;
  for (const MatrixView& p : parts) {
    const size_t each = row_bytes(p.type, p.cols);
    files.push_back({{static_cast<const std::byte*>(p.data), static_cast<size_t>(p.rows) * each}, each});
  }
  staging_.stream(files, [&](const Staging::Piece& piece) {
    const auto each = static_cast<int64_t>(files[piece.part].unit);
    arrange(parts[piece.part], to[piece.part], piece.data, static_cast<int64_t>(piece.first) / each,
            static_cast<int64_t>(piece.bytes) / each, piece.stream);
  });
}

void Uploader::draw(const MatrixView& part, const Destination& to) {
  // Random rows come a piece at a time too: a whole matrix of experts would take twice its memory.
  const size_t each = row_bytes(part.type, part.cols);
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>((size_t{16} << 20) / each));
  const DeviceBuffer drawn(device_, static_cast<size_t>(std::min(most, part.rows)) * each + 64, DeviceBuffer::Pooled);
  for (int64_t r = 0; r < part.rows; r += most) {
    const int64_t n = std::min(most, part.rows - r);
    fill_random(part.type, drawn.as<uint8_t>(), n, part.cols, seed_++, device_.stream());
    arrange(part, to, drawn.as<const uint8_t>(), r, n, device_.stream());
  }
}

void Uploader::arrange(const MatrixView& part, const Destination& destination, const uint8_t* rows, int64_t r,
                       int64_t n, cudaStream_t stream) {
  const auto& [segment, first, step, half] = destination;
  const Segment& to = *segment;
  const bool blocks = with_block_format(part.type, [&](auto type) {
    const Target target{half < 0 ? first + r : r, half < 0 ? 0 : first, to.slab_rows, to.tiles_m, to.tiles_k, half};
    const auto plane = [](const uint8_t* p) { return const_cast<uint8_t*>(p); };
    repack<type.value><<<blocks_of(n * to.tiles_k * 4, 128), 128, 0, stream>>>(rows, n, part.cols / 32, target,
                                                                               plane(to.planes.q), plane(to.planes.h),
                                                                               plane(to.planes.s), plane(to.planes.d));
  });
  if (!blocks) {
    const int64_t total = n * part.cols;
    if (block_bytes(part.type) == 2)
      copy_rows<<<blocks_of(total), 256, 0, stream>>>(reinterpret_cast<const uint16_t*>(rows), n, part.cols,
                                                      first + r * step, step, to.stride, to.memory.as<uint16_t>());
    else
      copy_rows<<<blocks_of(total), 256, 0, stream>>>(reinterpret_cast<const float*>(rows), n, part.cols,
                                                      first + r * step, step, to.stride, to.memory.as<float>());
  }
  DS4_CUDA(cudaGetLastError());
}

std::unique_ptr<CudaWeight> Uploader::load_table(const MatrixView& view) {
  require(view.type == DType::I32, "a table of integers has type I32");
  device_.enter();
  auto w = std::make_unique<CudaWeight>(view.rows, view.cols);
  const size_t bytes = static_cast<size_t>(view.rows * view.cols) * sizeof(int32_t);
  w->table_ = DeviceBuffer(device_, bytes, DeviceBuffer::Lasting);
  DS4_CUDA(cudaMemcpyAsync(w->table_.as(), view.data, bytes, cudaMemcpyHostToDevice, device_.stream()));
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
        const Target target{0, 0, s.slab_rows, s.tiles_m, s.tiles_k, -1};
        decode_rows<type.value><<<dim3(blocks_of(s.tiles_k * 4, 128), count), 128, 0, device.stream()>>>(
            s.planes, target, w.cols(), from, s.first_row, s.rows, to, out_stride);
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
