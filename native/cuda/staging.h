// The way of a mapped file's bytes to the device:
//
//   page cache ──▶ page-locked lanes, by several threads ──▶ copies of the lanes on the device, in order ──▶ kernels
//
// One thread reads a mapped file at a fraction of what the bus takes, so each lane is filled by a thread of its own
// while the pieces before it are on the bus.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cuda/memory.h"

namespace ds4::cuda {

class Staging {
 public:
  explicit Staging(const Device& device);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Called with (copy on the device, offset of the piece, bytes); 16 bytes behind the piece may be read. Its launches
  // on the device's stream are all that may use the copy.
  using Use = std::function<void(const uint8_t* piece, size_t first, size_t bytes)>;
  // Consecutive pieces of whole units, in order. `from` is not read after the call.
  void stream(std::span<const std::byte> from, size_t unit, const Use& use);

 private:
  struct Lane {
    PinnedBuffer host;
    DeviceBuffer device;
    Event arrived, done;
  };
  void make_lanes(size_t count, size_t bytes);

  const Device& device_;
  cudaStream_t bus_ = nullptr;  // copies go on while pieces before them are worked on
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace ds4::cuda
