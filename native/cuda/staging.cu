#include "cuda/staging.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace ds4::cuda {
namespace {

constexpr size_t kPiece = size_t{4} << 20;
constexpr size_t kBehind = 64;
constexpr size_t kMostReaders = 12;

size_t threads_here() {
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kMostReaders);
}

}  // namespace

struct Staging::Cut {
  size_t part, first;
  std::span<const std::byte> bytes;
};

class Staging::Reader {
 public:
  explicit Reader(const Device& device) : device_(device) {
    DS4_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~Reader() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void make_lanes(size_t bytes) {
    if (lanes_[0].host.bytes() >= bytes + kBehind) return;
    DS4_CUDA(cudaStreamSynchronize(stream_));
    for (Lane& lane : lanes_) {
      lane.host = PinnedBuffer(bytes + kBehind);
      lane.device = DeviceBuffer(device_, bytes + kBehind, DeviceBuffer::Lasting);
    }
  }
  void begin(const Event& before) { before.hold(stream_); }
  void pass(const Cut& cut, const Use& use) {
    Lane& lane = lanes_[std::exchange(next_, 1 - next_)];
    lane.done.wait();
    std::memcpy(lane.host.data(), cut.bytes.data(), cut.bytes.size());
    DS4_CUDA(cudaMemcpyAsync(lane.device.as(), lane.host.data(), cut.bytes.size(), cudaMemcpyHostToDevice, stream_));
    use({cut.part, cut.first, cut.bytes.size(), lane.device.as<const uint8_t>(), stream_});
    lane.done.record(stream_);
  }
  void end(cudaStream_t after) {
    finished_.record(stream_);
    finished_.hold(after);
  }

 private:
  struct Lane {
    PinnedBuffer host;
    DeviceBuffer device;
    Event done;
  };
  const Device& device_;
  cudaStream_t stream_ = nullptr;
  Lane lanes_[2];
  size_t next_ = 0;
  Event finished_;
};

Staging::Staging(const Device& device) : device_(device) {}

Staging::~Staging() = default;

void Staging::stream(std::span<const Part> parts, const Use& use) {
  std::vector<Cut> cuts;
  size_t largest = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [bytes, unit] = parts[i];
    require(unit > 0 && bytes.size() % unit == 0, "a stream of broken units");
    const size_t most = std::max<size_t>(1, kPiece / unit) * unit;
    for (size_t first = 0; first < bytes.size(); first += most) {
      cuts.push_back({i, first, bytes.subspan(first, std::min(most, bytes.size() - first))});
      largest = std::max(largest, cuts.back().bytes.size());
    }
  }
  if (cuts.empty()) return;
  device_.enter();
  const size_t count = std::min(threads_here(), cuts.size());
  while (readers_.size() < count) readers_.push_back(std::make_unique<Reader>(device_));
  before_.record(device_.stream());
  for (size_t r = 0; r < count; ++r) {
    readers_[r]->make_lanes(largest);
    readers_[r]->begin(before_);
  }

  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto read = [&](Reader& reader) {
    try {
      device_.enter();
      for (size_t c = next++; c < cuts.size(); c = next++) reader.pass(cuts[c], use);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (!error) error = std::current_exception();
      next = cuts.size();
    }
  };
  {
    std::vector<std::jthread> others;
    for (size_t r = 1; r < count; ++r) others.emplace_back(read, std::ref(*readers_[r]));
    read(*readers_[0]);
  }
  if (error) std::rethrow_exception(error);
  for (size_t r = 0; r < count; ++r) readers_[r]->end(device_.stream());
}

}  // namespace ds4::cuda
