// The way of a mapped file's bytes to the device:
//
//   page cache ──▶ page-locked lanes ──▶ copies of the lanes on the device ──▶ kernels
//
// One thread reads a mapped file at a fraction of what the bus takes, so several do, each with lanes and a stream of
// its own: while a lane is on the bus, its reader fills the next one.
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

  // Bytes of the file that are cut at multiples of `unit` only.
  struct Part {
    std::span<const std::byte> bytes;
    size_t unit = 1;
  };
  struct Piece {
    size_t part;   // index of the part that it belongs to
    size_t first;  // its offset there, in bytes
    size_t bytes;
    const uint8_t* data;  // the copy on the device; 16 bytes behind it may be read
    cudaStream_t stream;  // where all that uses the copy has to be launched
  };
  // Called once for every piece, in any order and by several threads at a time.
  using Use = std::function<void(const Piece& piece)>;
  // The pieces' work comes after what the device's stream has, and before what it gets after the call. The parts are
  // not read after the call. Throws the first error of any thread.
  void stream(std::span<const Part> parts, const Use& use);

 private:
  class Reader;
  struct Cut;

  const Device& device_;
  Event before_;
  std::vector<std::unique_ptr<Reader>> readers_;
};

}  // namespace ds4::cuda
