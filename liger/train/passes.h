#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>
#include "liger/models/llama.h"
#include "liger/train/data.h"
#include "liger/train/graph.h"
#include "liger/train/log.h"
#include "liger/train/options.h"

namespace liger::train {

/// Of rows, sums of what is logged.
struct Outcome {
  at::Tensor loss;
  double accuracy = 0, margin = 0;  // of pairs: those whose chosen answer has the larger reward; by how much
};

/// The model of a run, what DPO compares it with, and their passes: CUDA graphs, where they can be captured.
class Passes {
 public:
  /// The model of a checkpoint, `newest`, or without one that which the options name.
  Passes(const Options& options, at::Device device, Log& log, const std::string& newest);

  const nn::LlamaForCausalLM& model() const { return model_; }
  Outcome forward(const Batch& batch, double counted, const at::Tensor& divisor = {});
  /// Returns the loss, and leaves gradients in the parameters. What a graph computes are the same kernels' results.
  Outcome forward_backward(const Batch& batch, double counted);

  /// Captures later passes, where nothing stands against it.
  void use_graphs();
  /// Why passes are not captured; empty where they are.
  const std::string& no_graphs() const { return no_graphs_; }

 private:
  void make_model(const std::string& newest);
  void make_reference();
  std::string reason_for_no_graphs() const;

  const Options& options_;
  at::Device device_;
  Log& log_;
  nn::LlamaForCausalLM model_{nullptr}, reference_{nullptr};
  /// Passes of batches of one shape.
  struct Captured {
    Batch batch;  // on the device, what the graph reads
    at::Tensor divisor, loss;
    std::vector<at::Tensor> gradients;  // of all parameters, of which some may be undefined
    std::unique_ptr<Graph> graph;
    int64_t seen = 0;
  };
  std::string no_graphs_;
  std::vector<std::pair<std::pair<std::vector<int64_t>, bool>, Captured>> captured_;  // by shape, and Batch::packed
};

}  // namespace liger::train
