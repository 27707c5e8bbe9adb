// CpuOps: the operations of ops.h on the kernels of one instruction set.
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <span>

#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "cpu/latent.h"
#include "cpu/memory.h"
#include "cpu/packed.h"
#include "cpu/paged_state.h"
#include "cpu/pool.h"

namespace ds4 {
namespace cpu {

namespace {

// Activations of one pass over the weights: what the second-level cache holds beside a weight tile.
constexpr int64_t kCachedActBytes = 384 << 10;
// How far ahead of a tile its thread prefetches, into the second-level cache: a memory latency at full bandwidth is
// about 5 KB, and closer or into the first level was measurably slower (rows of 1536 columns: 15 against 24 GB/s).
constexpr int64_t kPrefetchBytes = 16 << 10;
// From this many rows on, work between the matrix products is worth sharing among threads.
constexpr int64_t kParallelRows = 6;
// Rows of a core from which on going apart is tried, and rows in all up to which it is.
constexpr int64_t kLaneRows = 4;
constexpr int64_t kMostLaneRows = 1024;

void require(bool ok, const char* what) {
  if (!ok) throw Invalid(std::string("cpu: ") + what);
}

float* row_of(const Tensor& x, int64_t t) {
  return x.data + t * x.stride;
}

const float* gain_of(const Norm& norm, int64_t dim) {
  require(norm.gain, "norm without a gain");
  const PackedWeight& w = packed(*norm.gain);
  require(w.vector() && w.rows() * w.cols() == dim, "norm gain of another width");
  return w.vector();
}

// Scratch of one step: a bump allocator whose blocks become one block at the next reset.
class Arena {
 public:
  explicit Arena(size_t block = size_t{4} << 20) : block_(block) {}
  float* take(int64_t floats) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) & ~size_t{63};
    if (blocks_.empty() || used_ + bytes > blocks_.back().size()) {
      blocks_.emplace_back(std::max(bytes, block_));
      used_ = 0;
    }
    auto* at = reinterpret_cast<float*>(blocks_.back().data() + used_);
    used_ += bytes;
    return at;
  }
  void reset() {
    if (blocks_.size() > 1) {
      const size_t all = bytes();
      blocks_.clear();
      blocks_.emplace_back(all);
    }
    used_ = 0;
  }
  size_t bytes() const {
    size_t n = 0;
    for (const HugeBuffer& b : blocks_) n += b.size();
    return n;
  }

 private:
  size_t block_;
  std::vector<HugeBuffer> blocks_;
  size_t used_ = 0;
};

// Whether as many rows go through a model apart or together: the way that took less time, now and then the other.
class LaneChoice {
 public:
  bool apart() {
    const uint64_t step = steps_++;
    if (step < 2 * kFirst) return step % 2 == 0;
    const bool quicker = ways_[1].seconds <= ways_[0].seconds;
    return step % kRetry == 0 ? !quicker : quicker;
  }
  void took(bool apart, double seconds) {
    Way& way = ways_[apart];
    // The first steps of all touch memory that the later ones find there. One that was held up says little of the next.
    if (way.steps++ < kFirst)
      way.seconds = way.steps == 1 ? seconds : std::min(way.seconds, seconds);
    else
      way.seconds += kWeight * (std::min(seconds, 2 * way.seconds) - way.seconds);
  }

 private:
  static constexpr uint64_t kFirst = 4, kRetry = 32;
  static constexpr double kWeight = 0.25;
  struct Way {
    uint64_t steps = 0;
    double seconds = 0;
  };
  uint64_t steps_ = 0;
  Way ways_[2];  // together, apart
};

class CpuOps final : public Ops {
 public:
  CpuOps(int threads, const Kernels& kernels, const LatentKernels& latent)
      : kernels_(kernels), pool_(threads), attention_(kernels, pool_) {
    const auto swiglu = [this](const Weight& w, Tensor x, float limit, Tensor y) {
      this->swiglu(w, x, nullptr, limit, y);
    };
    latent_ = make_latent_ops(*this, swiglu, latent, pool_);
  }
  // The operations of one core, for rows that go apart. Few rows' scratch memory is less than a huge page.
  explicit CpuOps(const Kernels& kernels)
      : kernels_(kernels), pool_(1), attention_(kernels, pool_), arena_(size_t{256} << 10) {}
  LatentOps* latent() override { return latent_.get(); }

  std::string name() const override {
    return std::string("cpu (") + kernels_.name + ", " + std::to_string(pool_.threads()) +
           (pool_.threads() == 1 ? " thread" : " threads") +
           (huge_pages_available() ? ", huge pages)" : ", no huge pages)");
  }

  std::unique_ptr<Weight> load(std::span<const MatrixView> parts, WeightUse use) override {
    return std::make_unique<PackedWeight>(parts, use, pool_, weights_);
  }
  Tensor scratch(int64_t n, int64_t dim) override {
    require(n >= 0 && dim > 0 && n <= (int64_t{1} << 40) / dim, "scratch of an impossible shape");
    return {arena_.take(n * dim), n, dim};
  }
  void reset_scratch() override {
    arena_.reset();
    pools_.touch_ahead();
  }
  size_t scratch_bytes() const override {
    size_t n = arena_.bytes() + act_.size();
    for (const auto& lane : lanes_) n += lane->scratch_bytes();
    return n;
  }
  std::unique_ptr<State> new_state(std::span<const StateSpec> specs, int64_t capacity) override {
    return std::make_unique<PagedState>(specs, capacity, pools_);
  }
  void to_host(const Tensor& from, float* out) override {
    for (int64_t t = 0; t < from.n; ++t) std::copy_n(row_of(from, t), from.dim, out + t * from.dim);
  }
  void to_device(const float* from, const Tensor& to) override {
    for (int64_t t = 0; t < to.n; ++t) std::copy_n(from + t * to.dim, to.dim, row_of(to, t));
  }

  // Apart there is no waiting for each other, nothing is packed twice, and no core reads what another has written; but
  // every core reads all weights, and one that is taken away holds all rows of its part up. So both ways are timed.
  bool in_parts(int64_t rows, const std::function<void(Ops&, int64_t, int64_t)>& part) override {
    const int64_t lanes = pool_.threads();
    if (lanes < 2 || rows < kLaneRows * lanes || rows > kMostLaneRows) return false;
    while (static_cast<int64_t>(lanes_.size()) < lanes) lanes_.push_back(std::make_unique<CpuOps>(kernels_));
    choices_.resize(kMostLaneRows + 1);
    LaneChoice& choice = choices_[static_cast<size_t>(rows)];
    const bool apart = choice.apart();
    const auto start = std::chrono::steady_clock::now();
    if (apart) {
      share(lanes, [&](int64_t i) {
        CpuOps& lane = *lanes_[static_cast<size_t>(i)];
        lane.reset_scratch();
        part(lane, rows * i / lanes, rows * (i + 1) / lanes - rows * i / lanes);
      });
    } else {
      part(*this, 0, rows);
    }
    choice.took(apart, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    return true;
  }

  void share(int64_t n, const std::function<void(int64_t)>& each) override {
    std::vector<std::exception_ptr> failed(static_cast<size_t>(n));
    pool_.run(n, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        try {
          each(i);
        } catch (...) {
          failed[static_cast<size_t>(i)] = std::current_exception();
        }
      }
    });
    for (const std::exception_ptr& e : failed)
      if (e) std::rethrow_exception(e);
  }

  void embed(const Weight& table, std::span<const int32_t> ids, Tensor out) override {
    const PackedWeight& w = packed(table);
    require(static_cast<int64_t>(ids.size()) == out.n && w.cols() == out.dim, "embed shapes");
    for (const int32_t id : ids) require(id >= 0 && id < w.rows(), "token id outside the embedding table");
    over_rows(out.n, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) w.dequantize(ids[static_cast<size_t>(t)], row_of(out, t));
    });
  }

  void rms_norm(Tensor x, Norm norm, Tensor y) override {
    require(x.n == y.n && x.dim == y.dim, "rms_norm shapes");
    const float* gain = gain_of(norm, x.dim);
    over_rows(x.n, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) kernels_.rms_norm(row_of(x, t), gain, norm.eps, x.dim, row_of(y, t));
    });
  }

  void linear(const Weight& weight, Tensor x, const Norm* norm, const Weight* bias, Tensor y) override {
    const PackedWeight& w = packed(weight);
    require(x.n == y.n && x.dim == w.cols() && y.dim == w.rows(), "linear shapes");
    require(w.use() == WeightUse::Linear || w.use() == WeightUse::Precise || w.use() == WeightUse::TiedHead,
            "linear: a weight loaded for another use");
    const float* add = nullptr;
    if (bias) {
      const PackedWeight& b = packed(*bias);
      require(b.vector() && b.rows() * b.cols() == w.rows(), "linear bias shape");
      add = b.vector();
    }
    multiply(w, x, norm, y, add, false);
  }

  void linear_add(const Weight& weight, Tensor x, Tensor y) override {
    const PackedWeight& w = packed(weight);
    require(x.n == y.n && x.dim == w.cols() && y.dim == w.rows(), "linear_add shapes");
    require(w.use() == WeightUse::Linear || w.use() == WeightUse::TiedHead,
            "linear_add: a weight loaded for another use");
    multiply(w, x, nullptr, y, nullptr, true);
  }

  void linear_swiglu(const Weight& weight, Tensor x, const Norm* norm, Tensor y) override {
    swiglu(weight, x, norm, std::numeric_limits<float>::infinity(), y);
  }

  void swiglu(const Weight& weight, Tensor x, const Norm* norm, float limit, Tensor y) {
    const PackedWeight& w = packed(weight);
    require(x.n == y.n && x.dim == w.cols() && 2 * y.dim == w.rows(), "linear_swiglu shapes");
    require(w.use() == WeightUse::SwiGLU, "linear_swiglu: a weight loaded for another use");
    prepare(w, x, norm, y);
    const Segment &gate = w.segments()[0], &up = w.segments()[1];
    over_tiles(gate.tiles, w.cols(), [&](const uint8_t* act, int64_t tile, std::span<const Group> groups) {
      alignas(64) float g[16 * 16], u[16 * 16];
      const int64_t n = std::min(kTileRows, gate.rows - tile * kTileRows);
      for (const Group& group : groups) {
        fetch_rows(y, group, tile * kTileRows);
        run_tile(act, gate, tile, group, w.cols(), &group == groups.data(), {g});
        run_tile(act, up, tile, group, w.cols(), &group == groups.data(), {u});
        kernels_.swiglu(g, u, 16 * group.tokens, limit, g);
        for (int64_t t = 0; t < group.tokens; ++t)
          copy_lanes(g + 16 * t, n, row_of(y, group.first + t) + tile * kTileRows);
      }
    });
  }

  void rope_table(std::span<const RowRef> rows, std::span<const double> freq, Tensor out) override {
    const auto pairs = static_cast<int64_t>(freq.size());
    require(static_cast<int64_t>(rows.size()) == out.n && out.dim == 2 * pairs, "rope_table shapes");
    over_rows(out.n, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t)
        for (int64_t i = 0; i < pairs; ++i) {
          const double angle = rows[static_cast<size_t>(t)].position * freq[static_cast<size_t>(i)];
          row_of(out, t)[i] = static_cast<float>(std::cos(angle));
          row_of(out, t)[pairs + i] = static_cast<float>(std::sin(angle));
        }
    });
  }

  void rope_store(Tensor qkv, Tensor table, RopeKind kind, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads,
                  int64_t kv_heads, int64_t head_dim) override {
    const int64_t pairs = table.dim / 2;
    require(q_heads > 0 && kv_heads > 0 && head_dim > 0 && static_cast<int64_t>(rows.size()) == qkv.n &&
                table.n == qkv.n && 2 * pairs <= head_dim && qkv.dim == (q_heads + 2 * kv_heads) * head_dim,
            "rope_store shapes");
    own_pages(rows, kv, kv_heads, head_dim);
    const int64_t padded = (head_dim + 15) / 16 * 16;
    over_rows(qkv.n, [&](int64_t first, int64_t last) {
      uint16_t half[kMaxHeadDim];
      fetch_places(rows, first, kv, kv_heads, head_dim);
      for (int64_t t = first; t < last; ++t) {
        if (t + 1 < qkv.n) fetch_places(rows, t + 1, kv, kv_heads, head_dim);
        const RowRef& row = rows[static_cast<size_t>(t)];
        const auto& state = static_cast<const PagedState&>(*row.state);
        float* q = row_of(qkv, t);
        kernels_.rope(q, q_heads + kv_heads, head_dim, row_of(table, t), pairs, kind == RopeKind::Interleaved);
        const float *k = q + q_heads * head_dim, *v = k + kv_heads * head_dim;
        const int64_t page = row.position / kPageRows, in = row.position % kPageRows;
        for (int64_t h = 0; h < kv_heads; ++h, k += head_dim, v += head_dim) {
          kernels_.to_f16(k, head_dim, half);
          uint16_t* lane = state.head_page(kv.k, page, h) + in / 16 * head_dim * 16 + in % 16;
          for (int64_t d = 0; d < head_dim; ++d) lane[d * 16] = half[d];
          kernels_.to_f16(v, head_dim, state.head_page(kv.v, page, h) + in * padded);
        }
      }
    });
  }

  void attention(Tensor q, std::span<const RowRef> rows, KvSlots kv, int64_t q_heads, int64_t kv_heads,
                 int64_t head_dim, float scale, Tensor out) override {
    require(q_heads > 0 && kv_heads > 0 && head_dim > 0 && q_heads % kv_heads == 0 &&
                static_cast<int64_t>(rows.size()) == q.n && out.n == q.n && q.dim == q_heads * head_dim &&
                out.dim == q.dim,
            "attention shapes");
    attention_.run(q, rows, kv, q_heads, kv_heads, head_dim, scale, out);
  }

  void gather(Tensor x, std::span<const int32_t> index, Tensor out) override {
    require(static_cast<int64_t>(index.size()) == out.n && x.dim == out.dim, "gather shapes");
    for (int64_t i = 0; i < out.n; ++i) {
      const int32_t t = index[static_cast<size_t>(i)];
      require(t >= 0 && t < x.n, "gather index outside the rows");
      std::copy_n(row_of(x, t), x.dim, row_of(out, i));
    }
  }

 private:
  static constexpr int64_t kMaxHeadDim = 1024;

  struct Group {
    int64_t first = 0, tokens = 0;
    int size_index = 0;
  };

  // Cuts the rows into groups and lays out their activations in every kind that `w` wants. Those of many rows are
  // packed here, all threads sharing the work; few rows are packed by each thread for itself when it begins with the
  // product, which takes as long as packing on one thread and saves reading what another core has written.
  void prepare(const PackedWeight& w, Tensor x, const Norm* norm, Tensor y) {
    groups_.clear();
    for (int64_t t = 0; t < x.n;) {
      int i = kGroupCount - 1;
      while (kGroupSizes[i] > x.n - t || kGroupSizes[i] > kernels_.max_group) --i;
      groups_.push_back({t, kGroupSizes[i], i});
      t += kGroupSizes[i];
    }
    const auto& segments = w.segments();  // packs a vector at its first use as a matrix: before acts()
    (void)segments;
    rows_ = {x, w.acts(), norm ? gain_of(*norm, x.dim) : nullptr, norm ? norm->eps : 0.0f};
    act_at_.clear();
    act_per_token_.clear();
    int64_t bytes = 0;
    for (const ActKind& kind : w.acts()) {
      act_at_.push_back(bytes);
      act_per_token_.push_back(act_bytes(kind, x.dim));
      bytes += (act_per_token_.back() * x.n + 63) / 64 * 64;
    }
    // Broadcasts at the end of the last record may not read past the buffer; vector loads never touch it.
    act_size_ = static_cast<size_t>(bytes + 64);
    static std::atomic<uint64_t> products{0};
    product_ = x.n <= kGroupSizes[kGroupCount - 1] && !overlap(x, y) ? ++products : 0;
    if (product_) return;
    if (act_.size() < act_size_) act_ = HugeBuffer(act_size_);
    auto* act = reinterpret_cast<uint8_t*>(act_.data());
    pool_.run(static_cast<int64_t>(groups_.size()), 1,
              [&](int64_t first, int64_t last) { pack_groups(first, last, act); });
  }

  static bool overlap(const Tensor& x, const Tensor& y) {
    const auto end = [](const Tensor& t) { return t.data + (t.n - 1) * t.stride + t.dim; };
    return x.n && y.n && std::less<>()(x.data, end(y)) && std::less<>()(y.data, end(x));
  }

  void pack_groups(int64_t first, int64_t last, uint8_t* act) const {
    const int64_t padded = (rows_.x.dim + 31) / 32 * 32;
    thread_local std::vector<float> memory;
    const auto floats = static_cast<size_t>(padded + pack_floats(padded));
    if (memory.size() < floats) memory.resize(floats);
    for (int64_t i = first; i < last; ++i) {
      const Group& g = groups_[static_cast<size_t>(i)];
      for (int64_t t = 0; t < g.tokens; ++t) {
        const float* row = row_of(rows_.x, g.first + t);
        if (rows_.gain) {
          kernels_.rms_norm(row, rows_.gain, rows_.eps, rows_.x.dim, memory.data());
          row = memory.data();
        }
        for (size_t k = 0; k < act_at_.size(); ++k)
          kernels_.pack_act(rows_.kinds[k], row, rows_.x.dim, g.tokens, t,
                            act + act_at_[k] + g.first * act_per_token_[k], memory.data() + padded);
      }
    }
  }

  // The packed rows of the product in progress, as this thread reads them.
  const uint8_t* activations() const {
    if (!product_) return reinterpret_cast<const uint8_t*>(act_.data());
    thread_local HugeBuffer own;
    thread_local uint64_t packed = 0;
    if (packed != product_) {
      if (own.size() < act_size_) own = HugeBuffer(act_size_);
      pack_groups(0, static_cast<int64_t>(groups_.size()), reinterpret_cast<uint8_t*>(own.data()));
      packed = product_;
    }
    return reinterpret_cast<const uint8_t*>(own.data());
  }

  // Calls body(activations, tile, groups) for all tiles and all groups, the groups in runs whose activations stay
  // cached.
  template <class Body>
  void over_tiles(int64_t tiles, int64_t cols, Body&& body) {
    if (groups_.empty()) return;
    const int64_t per_token = *std::max_element(act_per_token_.begin(), act_per_token_.end());
    const int64_t per_run = std::max<int64_t>(1, kCachedActBytes / (per_token * kernels_.max_group));
    const auto groups = static_cast<int64_t>(groups_.size());
    const int64_t runs = (groups + per_run - 1) / per_run;
    // A tile of few columns is less than a microsecond of reading: hand out several.
    const int64_t least = std::max<int64_t>(1, 2048 / std::max<int64_t>(cols * std::min<int64_t>(groups, 4), 1));
    pool_.run(runs * tiles, least, [&](int64_t first, int64_t last) {
      const uint8_t* act = activations();
      for (int64_t i = first; i < last; ++i) {
        const int64_t run = i / tiles;
        body(act, i % tiles,
             std::span<const Group>(groups_).subspan(static_cast<size_t>(run * per_run),
                                                     static_cast<size_t>(std::min(per_run, groups - run * per_run))));
      }
    });
  }

  // Where the results of a tile go.
  struct Target {
    float* out = nullptr;
    int64_t stride = kTileRows;
    bool add = false;
  };

  void run_tile(const uint8_t* act, const Segment& s, int64_t tile, const Group& g, int64_t cols, bool ahead,
                Target to) const {
    TileArgs a;
    a.tile = s.data + tile * s.tile_stride;
    a.scales = a.tile + s.scales_at;
    a.table = s.format.table;
    a.act = act + act_at_[s.act_index] + g.first * act_per_token_[s.act_index];
    if (ahead) {
      const int64_t bytes = tile_bytes(s.format, cols);
      a.ahead = a.tile + kPrefetchBytes;
      a.ahead_step = s.format.bits == 0 ? 64 : bytes / ((cols + kBlock - 1) / kBlock);
    }
    a.cols = cols;
    a.out = to.out;
    a.out_stride = to.stride;
    a.add = to.add;
    kernels_.tile[static_cast<int>(s.format.kind)][g.size_index](a);
  }

  // A tile's results go to one cache line of each token's row, which is not in the nearest cache: asked for while the
  // tile is computed, it is there when they are stored.
  static void fetch_rows(const Tensor& y, const Group& g, int64_t column) {
    for (int64_t t = 0; t < g.tokens; ++t) __builtin_prefetch(row_of(y, g.first + t) + column, 1);
  }

  // Where the key and the value of row t go: a key is a column of its tile, that is, one element in each line. Asked
  // for a row ahead, unless the row before went to the same tile.
  static void fetch_places(std::span<const RowRef> rows, int64_t t, KvSlots kv, int64_t kv_heads, int64_t head_dim) {
    constexpr int64_t kLine = 32;  // elements
    const RowRef& row = rows[static_cast<size_t>(t)];
    const int64_t page = row.position / kPageRows, in = row.position % kPageRows;
    if (t > 0 && in % 16 && rows[static_cast<size_t>(t - 1)].state == row.state) return;
    const auto& state = static_cast<const PagedState&>(*row.state);
    for (int64_t h = 0; h < kv_heads; ++h) {
      const uint16_t* keys = state.head_page(kv.k, page, h) + in / 16 * head_dim * 16;
      for (int64_t i = 0; i < 16 * head_dim; i += kLine) __builtin_prefetch(keys + i, 1);
      const uint16_t* values = state.head_page(kv.v, page, h) + in * ((head_dim + 15) / 16 * 16);
      for (int64_t i = 0; i < head_dim; i += kLine) __builtin_prefetch(values + i, 1);
    }
  }

  // Calls body(first, last) for all of n rows, by threads where that pays.
  template <class Body>
  void over_rows(int64_t n, Body&& body) {
    if (n < kParallelRows)
      body(int64_t{0}, n);
    else
      pool_.run(n, 1, body);
  }

  static void copy_lanes(const float* from, int64_t n, float* to) {
    if (n == kTileRows)
      std::memcpy(to, from, kTileRows * sizeof(float));
    else
      std::copy_n(from, n, to);
  }

  // y = W x, plus `bias` or what is in y.
  void multiply(const PackedWeight& w, Tensor x, const Norm* norm, Tensor y, const float* bias, bool add) {
    prepare(w, x, norm, y);
    const std::vector<Segment>& segments = w.segments();
    int64_t tiles = 0;
    for (const Segment& s : segments) tiles += s.tiles;
    over_tiles(tiles, w.cols(), [&](const uint8_t* act, int64_t tile, std::span<const Group> groups) {
      const Segment* s = segments.data();
      while (tile >= s->tiles) tile -= (s++)->tiles;
      alignas(64) float sums[16 * 16];
      const int64_t row = s->first_row + tile * kTileRows, n = std::min(kTileRows, s->rows - tile * kTileRows);
      for (const Group& g : groups) {
        fetch_rows(y, g, row);
        float* to = row_of(y, g.first) + row;
        if (n == kTileRows && !bias) {
          run_tile(act, *s, tile, g, w.cols(), &g == groups.data(), {to, y.stride, add});
          continue;
        }
        run_tile(act, *s, tile, g, w.cols(), &g == groups.data(), {sums});
        for (int64_t t = 0; t < g.tokens; ++t)
          for (int64_t i = 0; i < n; ++i) {
            float& at = to[t * y.stride + i];
            at = add ? at + sums[16 * t + i] : bias ? sums[16 * t + i] + bias[row + i] : sums[16 * t + i];
          }
      }
    });
  }

  void own_pages(std::span<const RowRef> rows, KvSlots kv, int64_t kv_heads, int64_t head_dim) {
    require(head_dim <= kMaxHeadDim, "head dimension above 1024");
    const State* state = nullptr;
    int64_t page = -1;
    for (const RowRef& row : rows) {
      if (row.state != state) {
        const PagedState& p = paged(row.state);
        p.check_buffer(kv.k, true, kv_heads, head_dim);
        p.check_buffer(kv.v, false, kv_heads, head_dim);
        state = row.state;
        page = -1;
      } else if (row.position >= 0 && row.position / kPageRows == page) {
        continue;
      }
      auto& p = static_cast<PagedState&>(*row.state);
      p.prepare_write(kv.k, row.position);
      p.prepare_write(kv.v, row.position);
      page = row.position / kPageRows;
    }
  }

  const Kernels& kernels_;
  ThreadPool pool_;
  PagePools pools_;
  SlabArena weights_;
  Attention attention_;
  Arena arena_;
  std::unique_ptr<LatentOps> latent_;
  // Of the product in progress; members so that their memory is kept.
  struct Rows {
    Tensor x;
    std::span<const ActKind> kinds;
    const float* gain = nullptr;
    float eps = 0;
  };
  Rows rows_;
  std::vector<Group> groups_;
  std::vector<int64_t> act_at_, act_per_token_;
  size_t act_size_ = 0;
  uint64_t product_ = 0;  // its number where each thread packs its rows itself, unique in the process; else 0
  HugeBuffer act_;        // rows packed for all threads
  std::vector<std::unique_ptr<CpuOps>> lanes_;  // of in_parts
  std::vector<LaneChoice> choices_;             // by rows
};

bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

bool runs_avx512() {
#if defined(__x86_64__)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool runs_neon() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kNeeded = HWCAP_ASIMDDP | HWCAP_ASIMDHP;
  return (getauxval(AT_HWCAP) & kNeeded) == kNeeded;
#elif defined(__aarch64__)
  return true;  // every Apple silicon
#else
  return false;
#endif
}

}  // namespace

int64_t act_bytes(ActKind kind, int64_t cols) {
  if (kind.type == ActKind::Int8)
    return (cols + 31) / 32 * (32 + 4 * (kScalesPerBlock + (kind.zero ? kScalesPerBlock : 32 / kind.group))) + 4;
  return kind.type == ActKind::BFloat16 ? (cols + 1) / 2 * 4 : cols * 4;
}

}  // namespace cpu

std::vector<std::string> cpu_isas() {
  std::vector<std::string> found;
  if (cpu::runs_avx512()) found.emplace_back("avx512");
  if (cpu::runs_avx2()) found.emplace_back("avx2");
  if (cpu::runs_neon()) found.emplace_back("neon");
  found.emplace_back("scalar");
  return found;
}

std::unique_ptr<Ops> make_cpu_ops(int threads, const std::string& isa) {
  constexpr int kMostThreads = 1024;
  if (threads < 0 || threads > kMostThreads)
    throw Invalid("cpu: " + std::to_string(threads) + " threads; 0 (all cores) to " + std::to_string(kMostThreads));
  const std::vector<std::string> found = cpu_isas();
  const std::string& chosen = isa == "auto" ? found.front() : isa;
  if (std::find(found.begin(), found.end(), chosen) == found.end()) {
    if (chosen == "avx512" || chosen == "avx2" || chosen == "neon")
      throw Unsupported("cpu: this machine does not run " + chosen + "; it runs " + found.front());
    throw Invalid("cpu: instruction set \"" + isa + "\" is none of auto, avx512, avx2, neon, scalar");
  }
  const cpu::Kernels* kernels = &cpu::kernels_scalar();
  const cpu::LatentKernels* latent = &cpu::latent_kernels_scalar();
#if defined(__x86_64__)
  if (chosen == "avx512") kernels = &cpu::kernels_avx512(), latent = &cpu::latent_kernels_avx512();
  if (chosen == "avx2") kernels = &cpu::kernels_avx2(), latent = &cpu::latent_kernels_avx2();
#elif defined(__aarch64__)
  if (chosen == "neon") kernels = &cpu::kernels_neon(), latent = &cpu::latent_kernels_neon();
#endif
  return std::make_unique<cpu::CpuOps>(threads ? threads : cpu::usable_cores(), *kernels, *latent);
}

}  // namespace ds4
