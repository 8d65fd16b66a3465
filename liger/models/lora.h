#pragma once
#include <map>
#include <string>
#include <vector>
#include "liger/models/config.h"

namespace liger {

/// LoRA adapters (Hu et al. 2021, arXiv:2106.09685) of a model's linear layers, as the adapter_config.json of PEFT
/// describes them.
struct LoraConfig {
  int64_t rank = 8;                         // r
  double alpha = 8;                         // lora_alpha
  bool rslora = false;                      // the scale alpha / √rank instead of alpha / rank
  double dropout = 0;                       // of what the adapters see in training
  std::vector<std::string> target_modules;  // names of layers, or what they end with after a dot
  std::string base_model;                   // base_model_name_or_path

  /// Raises c10::Error, naming the file and the field, for what is of another type, or describes adapters that are
  /// computed otherwise.
  static LoraConfig load(const std::string& folder);

  /// Every field that PEFT 0.21 writes. What is none of them may be a later one: load refuses it unless it says
  /// nothing, as null, false, [] and {} do.
  static const std::map<std::string, ConfigField>& fields();

  /// Writes adapter_config.json as PEFT reads it.
  void save(const std::string& folder) const;
};

}  // namespace liger
