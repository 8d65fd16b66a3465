#pragma once
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "liger/models/llama.h"
#include "liger/train/data.h"
#include "liger/train/graph.h"
#include "liger/train/optimizer.h"
#include "liger/train/ranks.h"

namespace liger::train {

/// One run: steps, evaluations, checkpoints and the log. The same options and data give the same bits, whether or not
/// the run was cut off on the way.
class Trainer {
 public:
  explicit Trainer(Options options);
  void run();

 private:
  void make_model(const std::string& newest);
  void make_reference();
  at::Tensor loss_of(const Batch& batch, double counted, const at::Tensor& divisor = {});
  at::Tensor pass(const Batch& batch, double counted);
  std::string reason_for_no_graphs() const;
  void check_options(int64_t step) const;
  void resume(int64_t step);
  void step(int64_t step);
  double evaluate();
  void save(int64_t step);
  void describe();
  void log(const nlohmann::json& line);
  std::string checkpoint(int64_t step) const;

  Options options_;
  Ranks ranks_;
  at::Device device_;  // this rank's
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
  std::FILE* log_ = nullptr;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace liger::train
