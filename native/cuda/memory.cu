#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "cuda/memory.h"

namespace ds4::cuda {

void fail(cudaError_t error, const char* what, const char* file, int line) {
  cudaGetLastError();  // the error is reported here, not once more by the next call
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + cudaGetErrorString(error) + " in " +
                           what);
}

void require(bool ok, const char* what) {
  if (!ok) throw Invalid(std::string("cuda backend: ") + what);
}

Device::Device(int index) : index_(index) {
  int count = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess) {
    cudaGetLastError();
    throw Unsupported(std::string("no CUDA device: ") + cudaGetErrorString(e));
  }
  if (index < 0 || index >= count)
    throw Unsupported("CUDA device " + std::to_string(index) + " of " + std::to_string(count));
  enter();
  cudaDeviceProp properties{};
  DS4_CUDA(cudaGetDeviceProperties(&properties, index));
  name_ = properties.name;
  multiprocessors_ = properties.multiProcessorCount;
  block_shared_ = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  DS4_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (auto& lane : lanes_) lane = std::make_unique<Lane>();
  DS4_CUDA(cudaDeviceGetDefaultMemPool(&pool_, index));
  uint64_t keep = size_t{1} << 30;
  DS4_CUDA(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep));
}

Device::Lane::Lane() {
  DS4_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
}

Device::Lane::~Lane() {
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
}

void Device::enter_lane(int lane) {
  require(lane_ < 0 && lane >= 0 && lane < kLanes, "a lane inside of a lane, or one that is not there");
  Lane& l = *lanes_[lane];
  l.forked.record(stream_);
  l.forked.hold(l.stream);
#if CUDART_VERSION >= 13000
  if (recording_ && early_lanes_ && !l.open) {
    // The stream comes after all that a joined lane has done. Were that a dependency of its own, the lane's next kernel
    // would start early behind it, and not behind the stream's.
    cudaStreamCaptureStatus status{};
    const cudaGraphNode_t* nodes = nullptr;
    size_t count = 0;
    DS4_CUDA(cudaStreamGetCaptureInfo(stream_, &status, nullptr, nullptr, &nodes, nullptr, &count));
    std::vector<cudaGraphNode_t> fork(nodes, nodes + count);
    DS4_CUDA(
        cudaStreamUpdateCaptureDependencies(l.stream, fork.data(), nullptr, count, cudaStreamSetCaptureDependencies));
  }
#endif
  l.open = true;
  lane_ = lane;
}

void Device::join_lanes() {
  for (const auto& lane : lanes_) {
    if (!lane->open) continue;
    lane->open = false;
    lane->joined.record(lane->stream);
    lane->joined.hold(stream_);
  }
}

Device::~Device() {
  cudaSetDevice(index_);
  for (auto& lane : lanes_) lane.reset();
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

DeviceBuffer::DeviceBuffer(const Device& device, size_t bytes, Kind kind)
    : bytes_(bytes), stream_(device.stream()), kind_(kind) {
  if (bytes == 0) return;
  if (device.recording()) throw std::runtime_error("memory was asked for while a step is recorded");
  device.enter();
  if (kind == Pooled)
    DS4_CUDA(cudaMallocAsync(&data_, bytes, device.pool(), stream_));
  else
    DS4_CUDA(cudaMalloc(&data_, bytes));
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this == &other) return *this;
  reset();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  stream_ = other.stream_;
  kind_ = other.kind_;
  return *this;
}

void DeviceBuffer::reset() noexcept {
  if (!data_) return;
  if (kind_ == Pooled)
    cudaFreeAsync(data_, stream_);
  else
    cudaFree(data_);
  data_ = nullptr;
  bytes_ = 0;
}

PinnedBuffer::PinnedBuffer(size_t bytes) : bytes_(bytes) {
  void* p = nullptr;
  DS4_CUDA(cudaMallocHost(&p, bytes));
  data_ = static_cast<std::byte*>(p);
}

PinnedBuffer::~PinnedBuffer() {
  if (data_) cudaFreeHost(data_);
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  if (this == &other) return *this;
  if (data_) cudaFreeHost(data_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

// ---- arena

void* Arena::take(size_t bytes) {
  bytes = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  while (slab_ < slabs_.size() && used_ + bytes > slabs_[slab_].bytes()) {
    ++slab_;
    used_ = 0;
  }
  if (slab_ == slabs_.size()) {
    device_.on_stream(
        [&] { slabs_.emplace_back(device_, std::max<size_t>(bytes, size_t{32} << 20), DeviceBuffer::Pooled); });
    ++generation_;
  }
  void* p = slabs_[slab_].as() + used_;
  used_ += bytes;
  return p;
}

void Arena::reset() {
  if (slabs_.size() > 1) {
    // One slab for what took several.
    const size_t all = bytes();
    slabs_.clear();
    slabs_.emplace_back(device_, all, DeviceBuffer::Pooled);
    ++generation_;
  }
  slab_ = used_ = 0;
}

size_t Arena::bytes() const {
  size_t n = 0;
  for (const DeviceBuffer& b : slabs_) n += b.bytes();
  return n;
}

void* Workspace::bytes(Slot slot, size_t n) {
  DeviceBuffer& b = buffers_[1 + device_.lane()][slot];
  if (n > b.bytes()) {
    b = DeviceBuffer();
    b = DeviceBuffer(device_, (n + n / 4 + 255) / 256 * 256, DeviceBuffer::Pooled);
    if (slot == Arrived) DS4_CUDA(cudaMemsetAsync(b.as(), 0, b.bytes(), device_.stream()));
    ++generation_;
  }
  return b.as();
}

size_t Workspace::total() const {
  size_t n = 0;
  for (const auto& lane : buffers_)
    for (const DeviceBuffer& b : lane) n += b.bytes();
  return n;
}

// ---- step inputs

StepInputs::StepInputs(Device& device)
    : device_(device), host_(size_t{1} << 18), memory_(device, size_t{1} << 18, DeviceBuffer::Pooled) {}

void StepInputs::reset() {
  copied_.wait();  // the host memory is read by copies of the step before
  entries_.clear();
  outgrown_.clear();
  outgrown_host_.clear();
  used_ = 0;
}

void StepInputs::grow(size_t bytes) {
  if (used_ + bytes <= host_.bytes()) return;
  // What was handed out stays valid until the step's end; a larger area starts afresh.
  const size_t larger = 2 * (host_.bytes() + bytes);
  outgrown_host_.push_back(std::move(host_));
  outgrown_.push_back(std::move(memory_));
  host_ = PinnedBuffer(larger);
  memory_ = DeviceBuffer(device_, larger, DeviceBuffer::Pooled);
  entries_.clear();
  used_ = 0;
  ++generation_;
}

const void* StepInputs::stage_bytes(const void* key, const void* data, size_t bytes) {
  require(used_ + bytes <= host_.bytes(), "too many inputs to stage");
  if (bytes > 0) std::memcpy(host_.data() + used_, data, bytes);
  entries_.push_back({used_, bytes, key});
  const void* at = memory_.as() + used_;
  used_ += (bytes + 255) / 256 * 256;
  return at;
}

void StepInputs::send_staged() {
  if (used_ == 0) return;
  DS4_CUDA(cudaMemcpyAsync(memory_.as(), host_.data(), used_, cudaMemcpyHostToDevice, device_.stream()));
  copied_.record(device_.stream());
}

const void* StepInputs::upload_bytes(const void* data, size_t bytes) {
  for (const Entry& e : entries_)
    if (e.bytes == bytes && e.key == data && data) return memory_.as() + e.offset;
  if (device_.recording()) throw std::runtime_error("an input that was not staged while a step is recorded");
  for (const Entry& e : entries_)
    if (!e.key && e.bytes == bytes && std::memcmp(host_.data() + e.offset, data, bytes) == 0)
      return memory_.as() + e.offset;
  device_.on_stream([&] {
    grow(bytes);
    std::memcpy(host_.data() + used_, data, bytes);
    DS4_CUDA(
        cudaMemcpyAsync(memory_.as() + used_, host_.data() + used_, bytes, cudaMemcpyHostToDevice, device_.stream()));
    copied_.record(device_.stream());
  });
  entries_.push_back({used_, bytes, nullptr});
  const void* at = memory_.as() + used_;
  used_ += (bytes + 255) / 256 * 256;
  return at;
}

const void* StepInputs::constant_bytes(const void* data, size_t bytes) {
  for (const Constant& c : constants_)
    if (c.host.size() == bytes && std::memcmp(c.host.data(), data, bytes) == 0) return c.device.as();
  Constant c;
  const auto* p = static_cast<const std::byte*>(data);
  c.host.assign(p, p + bytes);
  c.device = DeviceBuffer(device_, bytes, DeviceBuffer::Lasting);
  DS4_CUDA(cudaMemcpyAsync(c.device.as(), c.host.data(), bytes, cudaMemcpyHostToDevice, device_.stream()));
  device_.synchronize();
  constants_.push_back(std::move(c));
  return constants_.back().device.as();
}

}  // namespace ds4::cuda
