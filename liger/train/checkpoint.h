#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "liger/models/llama.h"
#include "liger/train/data.h"
#include "liger/train/optimizer.h"
#include "liger/train/ranks.h"

namespace liger::train {

/// The checkpoints of a run: folders OUT/checkpoint-<step>, which take this name when they are whole.
class Checkpoints {
 public:
  /// Makes the folder OUT. Raises c10::Error where nothing can be written there.
  Checkpoints(const Options& options, const Ranks& ranks);

  std::string path(int64_t step) const;

  /// The newest one's step; 0 where there is none.
  int64_t newest() const { return steps_.empty() ? 0 : steps_.back(); }

  /// Raises c10::Error, naming the options, where a run with these cannot go on from a checkpoint.
  void check_options(int64_t step, const Options& options) const;

  /// Raises c10::Error where the disk has less space than a checkpoint needs.
  void check_space(const nn::LlamaForCausalLM& model, const Optimizer& optimizer) const;

  void save(int64_t step, const nn::LlamaForCausalLM& model, const Optimizer& optimizer, const Data& data,
            const Options& options);

  /// Goes on from a checkpoint, whose model is loaded already.
  void resume(int64_t step, Optimizer& optimizer, const Data& data, const Options& options) const;

 private:
  void write(const std::string& folder, int64_t step, const nn::LlamaForCausalLM& model, const Optimizer& optimizer,
             const Data& data, const Options& options) const;

  std::string out_, model_;
  bool lora_, shards_;
  int64_t keep_;
  Ranks ranks_;
  std::vector<int64_t> steps_;
};

}  // namespace liger::train
