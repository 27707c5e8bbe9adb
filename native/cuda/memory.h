// Device memory and its lifetime: everything of one backend runs on one stream and on lanes that begin and end on it
// (Ops::beside), so memory is allocated and freed in stream order and reuse needs no synchronisation.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops.h"

namespace ds4::cuda {

// Throws std::bad_alloc for exhausted memory, std::runtime_error naming the call and its place for anything else.
[[noreturn]] void fail(cudaError_t error, const char* what, const char* file, int line);

#define DS4_CUDA(call)                                                  \
  do {                                                                  \
    if (const cudaError_t ds4_error = (call); ds4_error != cudaSuccess) \
      ::ds4::cuda::fail(ds4_error, #call, __FILE__, __LINE__);          \
  } while (0)

// Throws Invalid.
void require(bool ok, const char* what);

class Event {
 public:
  Event() { DS4_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { DS4_CUDA(cudaEventRecord(event_, stream)); }
  void wait() { DS4_CUDA(cudaEventSynchronize(event_)); }
  void hold(cudaStream_t stream) const { DS4_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

// One GPU, its stream and the lanes beside it. Entry points of the backend call `enter` first: CUDA's current device is
// per thread.
class Device {
 public:
  static constexpr int kLanes = Ops::kLanes;
  explicit Device(int index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void enter() const { DS4_CUDA(cudaSetDevice(index_)); }
  // Where operations go: the stream, inside of a lane the lane's.
  cudaStream_t stream() const { return lane_ < 0 ? stream_ : lanes_[lane_]->stream; }
  int lane() const { return lane_; }  // -1 outside of lanes
  // Work from here on goes to lane `lane`, after all that the stream has; `leave_lane` goes back.
  void enter_lane(int lane);
  void leave_lane() { lane_ = -1; }
  // The stream goes on after all work of the lanes.
  void join_lanes();
  // Inside of a lane: work goes to the stream, and the lane goes on after it. For what later work outside may use too.
  template <class F>
  void on_stream(F&& f) {
    const int lane = std::exchange(lane_, -1);
    f();
    if (lane >= 0) enter_lane(lane);
  }
  cudaMemPool_t pool() const { return pool_; }
  void synchronize() const { DS4_CUDA(cudaStreamSynchronize(stream())); }
  const std::string& name() const { return name_; }
  int multiprocessors() const { return multiprocessors_; }
  int64_t block_shared() const { return block_shared_; }  // most bytes of shared memory of a block of threads
  // While the stream's work is recorded, no memory may come or go and no host array may be uploaded.
  bool recording() const { return recording_; }
  // `early_lanes`: the first kernel of a lane may start before the one in front of the lane has ended, as kernels of
  // the stream do. It pays as long as it does not take the room of a larger one.
  void set_recording(bool on, bool early_lanes = false) {
    recording_ = on;
    early_lanes_ = early_lanes;
  }

 private:
  struct Lane {
    Lane();
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;
    cudaStream_t stream = nullptr;
    Event forked, joined;
    bool open = false;  // has work that the stream has not waited for
  };
  int index_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Lane> lanes_[kLanes];
  int lane_ = -1;
  cudaMemPool_t pool_ = nullptr;
  std::string name_;
  int multiprocessors_ = 0;
  int64_t block_shared_ = 0;
  bool recording_ = false, early_lanes_ = false;
};

// Owns device memory. `Pooled` buffers come and go in stream order; the others are for weights, which stay.
class DeviceBuffer {
 public:
  enum Kind { Lasting, Pooled };
  DeviceBuffer() = default;
  DeviceBuffer(const Device& device, size_t bytes, Kind kind);
  ~DeviceBuffer() { reset(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void reset() noexcept;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  Kind kind_ = Lasting;
};

// Page-locked host memory.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory of one step, handed out front to back and taken back at once. The same requests give the same addresses
// until `generation` changes.
class Arena {
 public:
  explicit Arena(Device& device) : device_(device) {}
  void* take(size_t bytes);
  void reset();
  size_t bytes() const;
  uint64_t generation() const { return generation_; }

 private:
  Device& device_;
  std::vector<DeviceBuffer> slabs_;
  size_t slab_ = 0, used_ = 0;
  uint64_t generation_ = 0;
};

// Named temporaries inside an operation, of each lane its own. Grow only.
class Workspace {
 public:
  enum Slot {
    Quants,
    Scales,
    Sums,
    Floats,
    Partials,
    Hidden,
    Products,
    Coefficients,
    Scores,
    Plan,
    Pooled,
    RowSums,
    HalfParts,
    HalfScales,
    Arrived,     // counters: zeros at first, and again after each kernel that counts
    KeptQuants,  // three of each, see Context::Kept
    KeptScales = KeptQuants + 3,
    KeptSums = KeptScales + 3,
    kSlots = KeptSums + 3
  };
  explicit Workspace(const Device& device) : device_(device) {}
  template <class T>
  T* get(Slot slot, int64_t count) {
    return static_cast<T*>(bytes(slot, static_cast<size_t>(count) * sizeof(T)));
  }
  size_t total() const;
  uint64_t generation() const { return generation_; }

 private:
  void* bytes(Slot slot, size_t n);
  const Device& device_;
  DeviceBuffer buffers_[1 + Device::kLanes][kSlots];
  uint64_t generation_ = 0;
};

// Small host arrays that the operations of a step read. Equal contents are uploaded once per step; `constant`, once.
// `stage` lays out what a step is known to need, before its operations: after `reset`, arrays of the same sizes get the
// same addresses until `generation` changes, whatever they hold.
class StepInputs {
 public:
  explicit StepInputs(Device& device);
  void reset();
  // `key`: what upload will be asked for; `values`: what it gets.
  template <class T>
  const T* stage(const void* key, std::span<const T> values) {
    return static_cast<const T*>(stage_bytes(key, values.data(), values.size_bytes()));
  }
  void send_staged();
  // The keys mean nothing from here on: their memory may hold something else.
  void end_staging() {
    for (Entry& e : entries_) e.key = nullptr;
  }
  uint64_t generation() const { return generation_; }
  template <class T>
  const T* upload(std::span<const T> values) {
    return static_cast<const T*>(upload_bytes(values.data(), values.size_bytes()));
  }
  template <class T>
  const T* constant(std::span<const T> values) {
    return static_cast<const T*>(constant_bytes(values.data(), values.size_bytes()));
  }

 private:
  struct Entry {
    size_t offset, bytes;
    const void* key;  // of a staged array
  };
  struct Constant {
    std::vector<std::byte> host;
    DeviceBuffer device;
  };
  const void* stage_bytes(const void* key, const void* data, size_t bytes);
  const void* upload_bytes(const void* data, size_t bytes);
  void grow(size_t bytes);
  const void* constant_bytes(const void* data, size_t bytes);

  Device& device_;
  PinnedBuffer host_;
  DeviceBuffer memory_;
  std::vector<DeviceBuffer> outgrown_;
  std::vector<PinnedBuffer> outgrown_host_;
  std::vector<Entry> entries_;
  std::vector<Constant> constants_;
  size_t used_ = 0;
  uint64_t generation_ = 0;
  Event copied_;
};

}  // namespace ds4::cuda
