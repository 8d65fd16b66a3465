#pragma once
#include <c10/core/Device.h>
#include <functional>
#include <memory>

namespace liger::train {

/// The kernels of some work as one CUDA graph, which the host launches at once.
class Graph {
 public:
  /// Whether there are graphs: on a GPU, where liger-train was built with CUDA's headers.
  static bool available(at::Device device);

  /// Makes a stream of the device current that can be captured, as its default one cannot. What is to be captured ran
  /// on it before.
  static void use_stream(at::Device device);

  /// Captures work without running it. Raises what work raises, and c10::Error where it cannot be captured.
  explicit Graph(const std::function<void()>& work);
  ~Graph();

  void replay();

 private:
  struct Held;
  std::unique_ptr<Held> held_;
};

}  // namespace liger::train
