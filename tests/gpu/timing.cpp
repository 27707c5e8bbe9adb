#include "timing.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/cuda.h"

namespace ds4::gpu {
namespace {

void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

}  // namespace

double time_op(Ops& ops, int calls, const std::function<void(int)>& once) {
  auto* stream = static_cast<cudaStream_t>(cuda_stream(ops));
  for (int i = 0; i < std::min(calls, 3); ++i) once(i);  // workspaces get their size
  must(cudaStreamSynchronize(stream), "warm up");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "begin capture");
  for (int i = 0; i < calls; ++i) once(i);
  must(cudaStreamEndCapture(stream, &graph), "end capture");
  must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t a, b;
  must(cudaEventCreate(&a), "event");
  must(cudaEventCreate(&b), "event");
  std::vector<float> ms;
  for (int i = 0; i < 9; ++i) {
    must(cudaEventRecord(a, stream), "record");
    must(cudaGraphLaunch(exec, stream), "launch");
    must(cudaEventRecord(b, stream), "record");
    must(cudaEventSynchronize(b), "synchronize");
    float t = 0;
    must(cudaEventElapsedTime(&t, a, b), "elapsed");
    ms.push_back(t);
  }
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::nth_element(ms.begin(), ms.begin() + 4, ms.end());
  return 1000.0 * ms[4] / calls;
}

}  // namespace ds4::gpu
