#pragma once
#include <chrono>
#include <optional>
#include <string>
#include "liger/train/checkpoint.h"
#include "liger/train/data.h"
#include "liger/train/log.h"
#include "liger/train/optimizer.h"
#include "liger/train/passes.h"
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
  void step(int64_t step);
  void evaluate(int64_t step);
  void describe();
  void tell(int64_t step, const nlohmann::json& line);

  Options options_;
  Ranks ranks_;
  at::Device device_;  // this rank's
  Checkpoints checkpoints_;
  Log log_;
  std::optional<Passes> passes_;
  nn::LlamaForCausalLM model_{nullptr};  // theirs
  std::optional<Data> data_, eval_;
  std::optional<Optimizer> optimizer_;
  int64_t done_ = 0;
  bool stopping_ = false;                                // all ranks have been told that one was asked to stop
  std::chrono::steady_clock::time_point start_, begin_;  // of the process, and of its steps
};

}  // namespace liger::train
