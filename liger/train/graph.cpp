#include "liger/train/graph.h"

#include <c10/util/Exception.h>
#ifdef LIGER_CUDA_GRAPHS
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace liger::train {

#ifdef LIGER_CUDA_GRAPHS

struct Graph::Held {
  at::cuda::CUDAGraph graph;
};

bool Graph::available(at::Device device) { return device.is_cuda(); }

void Graph::use_stream(at::Device device) {
  c10::cuda::device_synchronize();
  c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()));
}

Graph::Graph(const std::function<void()>& work) : held_(std::make_unique<Held>()) {
  c10::cuda::device_synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  // Of this thread alone: NCCL's watches events meanwhile.
  held_->graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  try {
    work();
  } catch (...) {
    try {
      held_->graph.capture_end();
    } catch (const std::exception&) {}  // what work has raised says more
    throw;
  }
  held_->graph.capture_end();
}

void Graph::replay() { held_->graph.replay(); }

#else

struct Graph::Held {};

bool Graph::available(at::Device) { return false; }
void Graph::use_stream(at::Device) {}
Graph::Graph(const std::function<void()>&) { TORCH_CHECK(false, "liger-train was built without CUDA's headers"); }
void Graph::replay() {}

#endif

Graph::~Graph() = default;

}  // namespace liger::train
