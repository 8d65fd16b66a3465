#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace liger::train {

/// What liger-train is told; `liger-train --help` says what each means.
struct Options {
  std::string model, out, loss = "causal", dpo_loss = "sigmoid", schedule = "cosine", dtype = "float32", device = "cpu";
  std::string cuda_graphs = "auto";
  std::string packing = "apart", adapter, lora_target = "all", base;
  std::vector<std::string> data, eval;
  int64_t length = 1024, batch = 4, accumulate = 1, steps = 0, warmup = 0, seed = 0;
  int64_t save_steps = 0, keep = 0, eval_steps = 0, log_steps = 1, threads = 0, lora_rank = 0;
  double epochs = 1, lr = 1e-5, weight_decay = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, clip = 1, dpo_beta = 0.1;
  double dpo_label_smoothing = 0, lora_alpha = 32, lora_dropout = 0;
  bool gradient_checkpointing = false, fresh = false, resume = false, shuffle = true;
  bool shard_optimizer = false, master_weights = true, deterministic = true, special_tokens = true;
  bool lora_rslora = false;

  std::string command;             // that goes on with this run, as a shell reads it
  std::vector<std::string> notes;  // what there is to say of the command line

  /// Whether adapters are trained, and the model's weights are frozen.
  bool lora() const { return lora_rank > 0 || !adapter.empty(); }

  /// Those that a run which goes on must share with the one before: all but those which the table of options excepts.
  nlohmann::json decisive() const;
};

/// Reads the command line. Where it asks for help or is wrong, prints what there is to say and ends the process.
Options parse(int argc, char** argv);

}  // namespace liger::train
