#pragma once
#include <torch/nn/module.h>
#include <string>
#include <vector>
#include "liger/models/safetensors.h"
#include "liger/train/options.h"
#include "liger/train/ranks.h"

namespace liger::train {

/// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) by liger::adamw_, with weight decay on matrices. With
/// options.master_weights it keeps float copies of weights that are not float, which it updates and rounds to them, and
/// adds up the gradients of several passes or ranks in float. Weights that need no gradient do not change.
class Optimizer {
 public:
  /// With options.shard_optimizer each rank keeps the copies and moments of a share of the weights.
  Optimizer(const torch::nn::Module& model, const Options& options, const Ranks& ranks);

  /// Takes what a backward pass has left in the parameters' gradients.
  void accumulate();

  /// Adds up all ranks' gradients, updates the weights as if these were scaled to a norm of at most clip, and forgets
  /// the gradients; returns the norm, in float.
  double step(double lr);

  /// The float copies, the moments and the number of steps, by name: those of this rank.
  NamedTensors state() const;

  /// Files which together hold the state of all ranks. Raises c10::Error for a state of another model.
  void load(const std::vector<SafetensorsFile>& files);

 private:
  struct Weight {
    std::string name;
    int64_t owner;                                         // the rank that updates it; -1: each does
    at::Tensor parameter, gradient, master, mean, square;  // the last three where mine(); master where has_copy()
  };

  bool mine(const Weight& weight) const { return weight.owner < 0 || weight.owner == ranks_.rank(); }
  bool has_copy(const Weight& weight) const {
    return options_.master_weights && weight.parameter.scalar_type() != at::kFloat;
  }

  Options options_;
  Ranks ranks_;
  std::vector<Weight> weights_;
  at::Tensor steps_;  // float, on the CPU
};

/// The learning rate of a step, the first of which is 0: as transformers' schedules have it.
double learning_rate(const Options& options, int64_t step);

}  // namespace liger::train
