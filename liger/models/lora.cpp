#include "liger/models/lora.h"

#include <cmath>
#include <filesystem>
#include "liger/models/config_reader.h"

namespace liger {
namespace {

using nlohmann::json;

using enum FieldUse;
constexpr ConfigFields kAdapterFields[] = {
    {Read, "peft_type r lora_alpha use_rslora lora_dropout target_modules base_model_name_or_path"},
    {Refused, "task_type", R"(["CAUSAL_LM"])"},
    {Refused, "bias", R"(["none"])"},
    {Refused, "use_dora use_qalora lora_bias fan_in_fan_out ensure_weight_tying", "[false]"},
    {Refused, "rank_pattern alpha_pattern", "[{}]"},
    {Refused,
     "modules_to_save exclude_modules layers_to_transform layers_pattern layer_replication trainable_token_indices "
     "target_parameters alora_invocation_tokens",
     "[[], {}]"},
    {Refused, "velora_config monteclora_config use_bdlora arrow_config kasa_config megatron_config"},
    // Others change weights besides the adapter, when it begins and when PEFT loads it.
    {Refused, "init_lora_weights", R"([true, false, "gaussian", "orthogonal", "eva"])"},
    {Harmless,
     "auto_mapping peft_version revision inference_mode runtime_config megatron_core qalora_group_size loftq_config "
     "eva_config corda_config lora_ga_config"},
};

std::string path_in(const std::string& folder) {
  return (std::filesystem::path(folder) / "adapter_config.json").string();
}

}  // namespace

const std::map<std::string, ConfigField>& LoraConfig::fields() {
  static const auto all = by_name(kAdapterFields);
  return all;
}

LoraConfig LoraConfig::load(const std::string& folder) {
  const std::string path = path_in(folder);
  const json content = read_json(path);
  const ConfigReader in{content, path, fields()};
  std::string kind;
  in.need("peft_type", kind);
  in.check(kind == "LORA", "peft_type ", kind, " is not LORA");
  in.refuse_unknown();
  for (const auto& [name, value] : content.items())
    in.check(fields().contains(name) || value.is_null() || value == false || (value.is_structured() && value.empty()),
             name, " ", value.dump(), " is not known");
  LoraConfig c;
  in.need("r", c.rank), in.need("lora_alpha", c.alpha);
  in.read("use_rslora", c.rslora), in.read("lora_dropout", c.dropout);
  in.read("base_model_name_or_path", c.base_model);
  in.check(c.rank > 0, "r is ", c.rank);
  in.check(c.dropout >= 0 && c.dropout < 1, "lora_dropout is ", c.dropout);
  in.check(content.contains("target_modules") && content["target_modules"].is_array(), "target_modules ",
           content.value("target_modules", json()).dump(), " is no list of layers");
  in.read("target_modules", c.target_modules);
  return c;
}

void LoraConfig::save(const std::string& folder) const {
  json out = {{"peft_type", "LORA"},
              {"task_type", "CAUSAL_LM"},
              {"base_model_name_or_path", base_model},
              {"r", rank},
              {"use_rslora", rslora},
              {"lora_dropout", dropout},
              {"target_modules", target_modules},
              {"bias", "none"},
              {"fan_in_fan_out", false},
              {"inference_mode", true},
              {"init_lora_weights", true},
              {"modules_to_save", nullptr},
              {"use_dora", false}};
  out["lora_alpha"] = alpha == std::floor(alpha) ? json(int64_t(alpha)) : json(alpha);  // PEFT's is an int
  write_json(path_in(folder), out);
}

}  // namespace liger
