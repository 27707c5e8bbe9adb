// The CUDA backend: all operations of ops.h and ops_latent.h on one GPU.
//
//   memory.h   device, stream, buffers, scratch, per-step inputs     state.h     sessions in pages
//   formats.h  layouts of block formats and how kernels read them    weights.h   upload and repacking
//   linear.h   products; of block formats by dense_blocks.h and stream_blocks.h (few rows) or wide_blocks.h and
//              tile_blocks.h (many)                                  ops.cu      ops.h
//   expert_kernels.h  experts of few rows: expert_blocks.h, of one row expert_row.h
//   attention.h  attention over paged keys and values                latent.cu   ops_latent.h
//   draw.h     draws from rows of logits
//
// Every output element is a fixed sequence of f32 operations that depends on the operation's shape and on absolute
// positions only, so that rows agree bit for bit however a prompt is cut and whatever else is in the step. The kernels
// are compiled without contraction of a * b + c; where a fused multiply-add is wanted they say so.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops.h"

namespace ds4 {

struct CudaOptions {
  int device = 0;
  // Matrices are filled with random blocks on the device instead of being read from the views' memory (vectors and
  // tables still are). For benchmarks of models that do not exist as a file here.
  bool synthetic_weights = false;
};

// Throws Unsupported when the device does not exist or no driver is there.
std::unique_ptr<Ops> make_cuda_ops(const CudaOptions& options);

// The backend's cudaStream_t, so that benchmarks can record events and capture graphs around operations. Null for
// another backend.
void* cuda_stream(Ops& ops);

struct CudaDevice {
  std::string name;
  size_t memory_bytes = 0;
};
// The devices that can be opened; empty, with the reason in `why`, when there are none. Throws nothing of CUDA's.
std::vector<CudaDevice> cuda_devices(std::string& why);

}  // namespace ds4
