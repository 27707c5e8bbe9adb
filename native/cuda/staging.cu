#include "cuda/staging.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace ds4::cuda {
namespace {

constexpr size_t kPiece = size_t{8} << 20;
constexpr size_t kBehind = 64;
constexpr size_t kMostThreads = 12;

// Pieces that were filled and pieces whose work was launched, and the first error on either side.
class Progress {
 public:
  explicit Progress(size_t pieces) : filled_(pieces) {}

  void fill(size_t piece) {
    filled_[piece] = 1;
    filled_[piece].notify_all();
  }
  void launch(size_t piece) {
    launched_ = piece + 1;
    launched_.notify_all();
  }
  // Whether it came to that, and not to an error.
  bool wait_filled(size_t piece) {
    filled_[piece].wait(0);
    return !failed_;
  }
  bool wait_launched(size_t piece) {
    for (size_t n = launched_; n <= piece; n = launched_) launched_.wait(n);
    return !failed_;
  }
  void fail(std::exception_ptr error) {
    {
      const std::scoped_lock lock(mutex_);
      if (!error_) error_ = std::move(error);
    }
    failed_ = true;
    for (size_t i = 0; i < filled_.size(); ++i) fill(i);
    launch(filled_.size());
  }
  void rethrow() {
    if (failed_) std::rethrow_exception(error_);
  }

 private:
  std::vector<std::atomic<int>> filled_;
  std::atomic<size_t> launched_ = 0;
  std::atomic<bool> failed_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;
};

size_t threads_here() {
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMostThreads);
}

}  // namespace

Staging::Staging(const Device& device) : device_(device) {
  device.enter();
  DS4_CUDA(cudaStreamCreateWithFlags(&bus_, cudaStreamNonBlocking));
}

Staging::~Staging() {
  cudaStreamSynchronize(bus_);
  cudaStreamDestroy(bus_);
}

void Staging::make_lanes(size_t count, size_t bytes) {
  if (lanes_.size() < count) lanes_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (!lanes_[i]) lanes_[i] = std::make_unique<Lane>();
    Lane& lane = *lanes_[i];
    if (lane.host.bytes() >= bytes + kBehind) continue;
    lane.done.wait();
    lane.host = PinnedBuffer(bytes + kBehind);
    lane.device = DeviceBuffer(device_, bytes + kBehind, DeviceBuffer::Lasting);
  }
}

void Staging::stream(std::span<const std::byte> from, size_t unit, const Use& use) {
  require(unit > 0 && from.size() % unit == 0, "a stream of broken units");
  if (from.empty()) return;
  device_.enter();
  const size_t piece = std::max<size_t>(1, kPiece / unit) * unit, pieces = (from.size() + piece - 1) / piece;
  const size_t threads = std::min(threads_here(), pieces), lanes = std::min(pieces, threads + 2);
  make_lanes(lanes, std::min(piece, from.size()));
  const auto part = [&](size_t p) { return from.subspan(p * piece, std::min(piece, from.size() - p * piece)); };
  Progress progress(pieces);

  const auto fill = [&](size_t p) {
    Lane& lane = *lanes_[p % lanes];
    if (p >= lanes && !progress.wait_launched(p - lanes)) return false;
    lane.done.wait();
    std::memcpy(lane.host.data(), part(p).data(), part(p).size());
    progress.fill(p);
    return true;
  };
  const auto reader = [&](size_t first) {
    try {
      device_.enter();
      for (size_t p = first; p < pieces; p += threads)
        if (!fill(p)) return;
    } catch (...) {
      progress.fail(std::current_exception());
    }
  };
  const auto launch = [&](size_t p) {
    Lane& lane = *lanes_[p % lanes];
    DS4_CUDA(cudaMemcpyAsync(lane.device.as(), lane.host.data(), part(p).size(), cudaMemcpyHostToDevice, bus_));
    lane.arrived.record(bus_);
    lane.arrived.hold(device_.stream());
    use(lane.device.as<const uint8_t>(), p * piece, part(p).size());
    lane.done.record(device_.stream());
    progress.launch(p);
  };

  if (pieces == 1) {
    fill(0);
    launch(0);
    return;
  }
  std::vector<std::jthread> pool;
  try {
    for (size_t t = 0; t < threads; ++t) pool.emplace_back(reader, t);
    for (size_t p = 0; p < pieces && progress.wait_filled(p); ++p) launch(p);
  } catch (...) {
    progress.fail(std::current_exception());
  }
  pool.clear();
  progress.rethrow();
}

}  // namespace ds4::cuda
