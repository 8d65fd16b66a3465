#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "liger/models/llama.h"
#include "liger/train/checkpoint.h"
#include "liger/train/data.h"
#include "liger/train/graph.h"
#include "liger/train/log.h"
#include "liger/train/optimizer.h"
#include "liger/train/ranks.h"

namespace liger::train {

/// One run: steps, evaluations, checkpoints and the log. The same options and data give the same bits, whether or not
/// the run was cut off on the way.
class Trainer {
 public:
  explicit Trainer(Options options);

  /// Returns whether the run is finished: a signal ends it before, after a step and with a checkpoint.
  bool run();

 private:
  /// Of rows, sums of what is logged.
  struct Outcome {
    at::Tensor loss;
    double accuracy = 0, margin = 0;  // of pairs: those whose chosen answer has the larger reward; by how much
  };
  void make_model(const std::string& newest);
  void make_reference();
  Outcome outcome_of(const Batch& batch, double counted, const at::Tensor& divisor = {});
  Outcome pass(const Batch& batch, double counted);
  std::string reason_for_no_graphs() const;
  void step(int64_t step);
  void evaluate(int64_t step);
  void describe();
  void tell(int64_t step, const nlohmann::json& line);

  Options options_;
  Ranks ranks_;
  at::Device device_;  // this rank's
  Checkpoints checkpoints_;
  Log log_;
  nn::LlamaForCausalLM model_{nullptr}, reference_{nullptr};
  std::optional<Data> data_, eval_;
  std::optional<Optimizer> optimizer_;
  /// Passes of batches of one shape.
  struct Captured {
    Batch batch;  // on the device, what the graph reads
    at::Tensor divisor, loss;
    std::vector<at::Tensor> gradients;  // of all parameters, of which some may be undefined
    std::unique_ptr<Graph> graph;
    int64_t seen = 0;
  };
  std::string no_graphs_;  // why passes are not captured; empty where they are
  std::vector<std::pair<std::pair<std::vector<int64_t>, bool>, Captured>> captured_;  // by shape, and Batch::packed
  int64_t done_ = 0;
  bool stopping_ = false;                                // all ranks have been told that one was asked to stop
  std::chrono::steady_clock::time_point start_, begin_;  // of the process, and of its steps
};

}  // namespace liger::train
